"""Operators of the models, each in a plain Paddle form and in a compiled one for float32 on the CPU.

The plain form works everywhere: any device and type, static graphs, export. The compiled form (`native.cc`) takes over
for float32 tensors on the CPU in dynamic mode once `enable()` was called and the kernels could be built;
`ppattn.setup()` calls it. Both give the same values and gradients to float32 accuracy; `status()` says which one is in
use and why.
"""

from __future__ import annotations

import paddle
import paddle.nn.functional as F
from paddle import Tensor

from ppattn.ops import native

__all__ = ["dynamic_conv3x3", "enable", "gelu", "layer_norm", "linear", "status"]

_native = False
_status = "The compiled CPU kernels are off: they were not asked for."


def enable(compiled: bool = True) -> bool:
    """Switch the compiled kernels on (building them at the first time) or off; true if they are on afterwards."""
    global _native, _status
    _native, _status = False, "The compiled CPU kernels are off: they were not asked for."
    if compiled:
        try:
            native.load()
            _native, _status = True, "The compiled CPU kernels are on."
        except native.Unavailable as error:
            _status = f"The compiled CPU kernels are off: {error}."
    return _native


def status() -> str:
    """One sentence: whether the compiled kernels are in use, and why not."""
    return _status


def _cpu_float32(*tensors: Tensor | None) -> bool:
    return paddle.in_dynamic_mode() and all(
        t is None or (t.dtype == paddle.float32 and t.place.is_cpu_place() and t.size > 0) for t in tensors
    )


def _compiled(*tensors: Tensor | None) -> bool:
    return _native and _cpu_float32(*tensors)


def _run(name: str, *arguments) -> Tensor:
    """First output of a compiled operator."""
    return paddle._C_ops._run_custom_op("ppattn_" + name, *arguments)[0]


def _wanted(*tensors: Tensor | None) -> int:
    """Bit mask of the tensors that want a gradient."""
    return sum(1 << i for i, t in enumerate(tensors) if t is not None and not t.stop_gradient)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] times weight [in, out] plus bias [out]."""
    if _compiled(x, weight, bias) and x.shape[-1] == weight.shape[0]:
        return _run("linear", x, weight, bias, _wanted(x, weight, bias))
    if bias is None or bias.stop_gradient or not paddle.is_grad_enabled() or not _cpu_float32(x, weight, bias):
        return F.linear(x, weight, bias)
    # The bias as one more row of the matrix: its gradient comes out of the product of the weights, where Paddle's own
    # reduction takes longer than everything else together.
    one = paddle.ones([*x.shape[:-1], 1], x.dtype)
    one.stop_gradient = False  # or second derivatives of the concatenation fail
    return paddle.matmul(paddle.concat([x, one], -1), paddle.concat([weight, bias.unsqueeze(0)]))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float = 1e-5) -> Tensor:
    """Normalises the last axis of x [..., C]; weight and bias [C]."""
    if _compiled(x, weight, bias) and x.shape[-1:] == weight.shape == bias.shape:
        return _run("layer_norm", x, weight, bias, epsilon, _wanted(x, weight, bias))
    return F.layer_norm(x, x.shape[-1:], weight, bias, epsilon)


def gelu(x: Tensor, approximate: bool = False) -> Tensor:
    """x times the normal distribution function of x, exact (erf) or in the tanh form."""
    return _run("gelu", x, approximate) if _compiled(x) else F.gelu(x, approximate)


def dynamic_conv3x3(v: Tensor, taps: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
    """Cross-correlates every channel of every sample with its own 3x3 taps; zero padding 1.

    Args:
        v: [B, C, H, W], or with `grid` [B, H * W, C].
        taps: [B, C, 9] or [B, C, 3, 3], row by row.
        grid: (H, W) of a channels-last v, as Python integers.

    Returns:
        What v is, convolved.
    """
    channels = taps.shape[1]
    if grid is None:
        return _correlate(v, taps)
    if _compiled(v, taps) and v.shape[1:] == [grid[0] * grid[1], channels]:
        return _run("dynamic_conv", v, taps.reshape([-1, channels, 9]), *grid, _wanted(v, taps))
    v_BCHW = v.transpose([0, 2, 1]).reshape([-1, channels, *grid])
    return _correlate(v_BCHW, taps).reshape([-1, channels, grid[0] * grid[1]]).transpose([0, 2, 1])


def _correlate(v: Tensor, taps: Tensor) -> Tensor:
    channels, height, width = v.shape[1:]
    patches = F.unfold(v, 3, paddings=1).reshape([-1, 9, height * width])
    return paddle.matmul(taps.reshape([-1, 1, 9]), patches).reshape([-1, channels, height, width])


def mlp(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, approximate: bool = False) -> Tensor:
    """`linear`, `gelu`, `linear`; compiled, the activations never leave the cache."""
    tensors = (x, weight1, bias1, weight2, bias2)
    if _compiled(*tensors) and x.shape[-1] == weight1.shape[0] and weight1.shape[1] == weight2.shape[0]:
        return _run("mlp", *tensors, approximate, _wanted(*tensors) if paddle.is_grad_enabled() else 0)
    return linear(gelu(linear(x, weight1, bias1), approximate), weight2, bias2)


def softmax_attention(qkv: Tensor, num_heads: int, scale: float) -> Tensor:
    """softmax(scale q k^T) v for packed projections [B, N, 3 * C] (q, k, v, each by head); returns [B, N, C]."""
    if _compiled(qkv):
        return _run("softmax_attention", qkv, num_heads, scale)
    q, k, v = _split_heads(qkv, num_heads)
    weights = F.softmax(paddle.matmul(q * scale, k, transpose_y=True))
    return _merge_heads(paddle.matmul(weights, v))


def inline_attention(qkv: Tensor, taps: Tensor | None, num_heads: int, grid: tuple[int, int], scale: float) -> Tensor:
    """InLine attention and its local term: q (scale Cov(k, v)) + mean(v) + taps * v on the grid.

    Args:
        qkv: packed projections [B, P + H * W, 3 * C] (q, k, v, each by head).
        taps: [B, C, 9], or None for no local term; the P tokens in front get none.
        num_heads: h; a head has d = C / h channels.
        grid: (H, W) as Python integers.
        scale: factor of the scores, d^-1/2.

    Returns:
        [B, P + H * W, C].
    """
    if _compiled(qkv, taps):
        return _run("inline_attention", qkv, taps, num_heads, *grid, scale)
    q, k, v = _split_heads(qkv, num_heads)
    n, prefix = k.shape[2], k.shape[2] - grid[0] * grid[1]
    k_mean, v_mean = k.mean(axis=2, keepdim=True), v.mean(axis=2, keepdim=True)
    covariance = paddle.matmul(k, v, transpose_x=True) / n - paddle.matmul(k_mean, v_mean, transpose_x=True)
    y = _merge_heads(paddle.matmul(q, scale * covariance) + v_mean)
    if taps is None:
        return y
    local = dynamic_conv3x3(_merge_heads(v)[:, prefix:], taps, grid)
    return paddle.concat([y[:, :prefix], y[:, prefix:] + local], axis=1) if prefix else y + local


def _split_heads(qkv: Tensor, num_heads: int) -> list[Tensor]:
    tokens, width = qkv.shape[1:]
    return qkv.reshape([-1, tokens, 3, num_heads, width // (3 * num_heads)]).transpose([2, 0, 3, 1, 4]).unbind(0)


def _merge_heads(x: Tensor) -> Tensor:
    heads, tokens, channels = x.shape[1:]
    return x.transpose([0, 2, 1, 3]).reshape([-1, tokens, heads * channels])
