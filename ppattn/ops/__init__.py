"""Operators of the models, each in a plain Paddle form and in a compiled one for float32 on the CPU.

The plain form works everywhere: any device and type, static graphs, export. The compiled form (`native/`) takes over
for float32 tensors on the CPU in dynamic mode once `enable()` was called and the kernels could be built;
`ppattn.setup()` calls it. Both give the same values and gradients to float32 accuracy; `status()` says which one is in
use and why.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from ppattn.ops import native

__all__ = [
    "DynamicConv3x3",
    "constants",
    "depthwise_conv",
    "dynamic_conv3x3",
    "enable",
    "gelu",
    "inline_attention",
    "layer_norm",
    "linear",
    "linear_and_mean",
    "mlp",
    "residual_mlp",
    "softmax_attention",
    "status",
]

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


def _run_all(name: str, *arguments) -> list[Tensor]:
    return paddle._C_ops._run_custom_op("ppattn_" + name, *arguments)


def _run(name: str, *arguments) -> Tensor:
    """First output of a compiled operator; the others are for its gradient."""
    return _run_all(name, *arguments)[0]


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
    if weight.stop_gradient:  # Paddle's kernel on the CPU then leaves the weight out of the gradient of x
        return F.layer_norm(x, x.shape[-1:], epsilon=epsilon) * weight + bias
    return F.layer_norm(x, x.shape[-1:], weight, bias, epsilon)


def gelu(x: Tensor, approximate: bool = False) -> Tensor:
    """x times the normal distribution function of x, exact (erf) or in the tanh form."""
    return _run("gelu", x, approximate) if _compiled(x) else F.gelu(x, approximate)


class DynamicConv3x3(nn.Layer):
    """`dynamic_conv3x3` for grid tokens, as a layer: a program traced inside `with constants(model)` is fast, too."""

    def __init__(self, grid: tuple[int, int], num_prefix: int = 0):
        super().__init__()
        self.grid, self.num_prefix = tuple(grid), num_prefix

    def forward(self, v: Tensor, taps: Tensor, grid: tuple[int, int]) -> Tensor:
        """v [B, P + H*W, C] and taps [B, C, 9] -> [B, P + H*W, C], zero for the P tokens in front."""
        if paddle.in_dynamic_mode() or not self._buffers or tuple(grid) != self.grid:
            return dynamic_conv3x3(v, taps, grid)
        return _convolve_by_products(v, taps, *self._buffers.values())


@contextlib.contextmanager
def constants(model: nn.Layer):
    """Programs traced inside take constants from layers only: gives the model's predicted convolutions their matrices.

    Layers of the same grid share them, so that they are saved once; grids beyond `DENSE` tokens stay with patches.
    """
    layers = [layer for layer in model.sublayers() if isinstance(layer, DynamicConv3x3)]
    layers = [layer for layer in layers if layer.grid[0] * layer.grid[1] <= DENSE]
    made: dict[tuple, list[Tensor]] = {}
    for layer in layers:
        key = (*layer.grid, layer.num_prefix)
        if key not in made:
            made[key] = [paddle.to_tensor(matrix, dtype="float32") for matrix in _matrices(*key)]
        for name, value in zip(("analysis", "taps_analysis", "synthesis"), made[key], strict=True):
            layer.register_buffer(name, value, persistable=False)
    try:
        yield
    finally:
        for layer in layers:
            layer._buffers.clear()


def dynamic_conv3x3(v: Tensor, taps: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
    """Cross-correlates every channel of every image with its own 3x3 taps; zero padding 1.

    Args:
        v: [B, C, H, W], or with `grid` [B, P + H * W, C].
        taps: [B, C, 9] or [B, C, 3, 3], row by row.
        grid: (H, W) of a channels-last v, as Python integers.

    Returns:
        What v is, convolved; zeros for the P tokens in front of the grid.
    """
    if grid is None:
        return _convolve_by_patches(v, taps)
    channels, tokens = taps.shape[1], grid[0] * grid[1]
    prefix = v.shape[1] - tokens
    taps = taps.reshape([-1, channels, 9])
    if _compiled(v, taps) and v.shape[2] == channels and prefix >= 0:
        return _run("dynamic_conv", v, taps, *grid, _wanted(v, taps))
    if tokens <= DENSE and paddle.in_dynamic_mode():
        return _convolve_by_products(v, taps, *_basis(*grid, prefix, v.dtype, paddle.get_device()))
    v_BCHW = v[:, prefix:].transpose([0, 2, 1]).reshape([-1, channels, *grid])
    y = _convolve_by_patches(v_BCHW, taps).reshape([-1, channels, tokens]).transpose([0, 2, 1])
    return paddle.concat([0.0 * v[:, :prefix], y], axis=1) if prefix else y


def depthwise_conv(x: Tensor, weight: Tensor, bias: Tensor, grid: tuple[int, int]) -> Tensor:
    """Cross-correlates every channel of the grid tokens with its own 3x3 kernel; zero padding 1.

    Args:
        x: [B, P + H * W, C].
        weight: [C, 1, 3, 3].
        bias: [C].
        grid: (H, W).

    Returns:
        What x is, convolved; zeros for the P tokens in front of the grid.
    """
    channels = weight.shape[0]
    if _compiled(x, weight, bias):
        taps = weight.reshape([1, channels, 9]).expand([x.shape[0], -1, -1])
        y = _run("dynamic_conv", x, taps, *grid, _wanted(x, weight))
        prefix = x.shape[1] - grid[0] * grid[1]
        return paddle.concat([y[:, :prefix], y[:, prefix:] + bias], axis=1) if prefix else y + bias
    unknown = not all(isinstance(side, int) for side in grid)
    prefix = 0 if unknown else max(x.shape[1] - grid[0] * grid[1], 0)
    x_BCHW = x[:, prefix:].transpose([0, 2, 1]).reshape([-1, channels, *grid])
    y = F.conv2d(x_BCHW, weight, bias, padding=1, groups=channels)
    y = y.reshape([-1, channels, grid[0] * grid[1]]).transpose([0, 2, 1])
    return paddle.concat([0.0 * x[:, :prefix], y], axis=1) if prefix else y


def _convolve_by_patches(v: Tensor, taps: Tensor) -> Tensor:
    channels, height, width = v.shape[1:]
    patches = F.unfold(v, 3, paddings=1).reshape([-1, 9, height * width])
    return paddle.matmul(taps.reshape([-1, 1, 9]), patches).reshape([-1, channels, height, width])


def _convolve_by_products(
    v: Tensor, taps: Tensor, analysis: Tensor, taps_analysis: Tensor, synthesis: Tensor
) -> Tensor:
    spectrum, response = paddle.matmul(analysis, v), paddle.matmul(taps_analysis, taps, transpose_y=True)
    return paddle.matmul(synthesis, spectrum * response)


# Largest grid for the three products, whose cost grows with the square of the tokens; beyond it patches are cheaper.
DENSE = 400


@functools.lru_cache(maxsize=16)
def _basis(height: int, width: int, prefix: int, dtype, device: str) -> tuple[Tensor, ...]:
    return tuple(paddle.to_tensor(m, dtype=dtype, place=device) for m in _matrices(height, width, prefix))


def _matrices(height: int, width: int, prefix: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Constants A [R, P + N], T [R, 9], S [P + N, R] with  conv(v, taps) = S ((A v) (T taps)),  R about 1.7 N.

    This is the convolution theorem in real numbers. A period of one more than the grid is enough for taps that reach
    one token beyond it. With a + bi for v and c + di for the taps at a frequency, real part ac - bd = k1 - k3 and
    imaginary part ad + bc = k1 + k2 come from three products k1 = (a + b) c, k2 = a (d - c), k3 = b (c + d).
    """
    rows, columns = np.divmod(np.arange(height * width), width)
    tap_rows, tap_columns = np.divmod(np.arange(9), 3)
    periods, seen = (height + 1, width + 1), set()
    analysis, taps, synthesis = [], [], []
    for u, w in np.ndindex(periods):
        if (-u % periods[0], -w % periods[1]) in seen:
            continue  # the conjugate of one that was taken
        seen.add((u, w))
        angle = 2 * np.pi * (u * rows / periods[0] + w * columns / periods[1])
        tap_angle = 2 * np.pi * (u * (tap_rows - 1) / periods[0] + w * (tap_columns - 1) / periods[1])
        cos, sin, c, d = np.cos(angle), np.sin(angle), np.cos(tap_angle), np.sin(tap_angle)
        share = 1 / (periods[0] * periods[1])
        if (2 * u) % periods[0] == 0 and (2 * w) % periods[1] == 0:  # real
            analysis, taps, synthesis = [*analysis, cos], [*taps, c], [*synthesis, share * cos]
            continue
        analysis += [cos - sin, cos, -sin]
        taps += [c, d - c, c + d]
        synthesis += [2 * share * (cos - sin), -2 * share * sin, -2 * share * cos]
    empty = np.zeros([len(taps), prefix])
    return np.hstack([empty, analysis]), np.stack(taps), np.hstack([empty, synthesis]).T


def mlp(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, approximate: bool = False) -> Tensor:
    """`linear`, `gelu`, `linear`; compiled, the activations never leave the cache."""
    tensors = (x, weight1, bias1, weight2, bias2)
    if _compiled(*tensors) and x.shape[-1] == weight1.shape[0] and weight1.shape[1] == weight2.shape[0]:
        return _run("mlp", *tensors, approximate, _wanted(*tensors) if paddle.is_grad_enabled() else 0)
    return linear(gelu(linear(x, weight1, bias1), approximate), weight2, bias2)


def residual_mlp(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    epsilon: float,
    weight1: Tensor,
    bias1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    approximate: bool = False,
    keep: Tensor | None = None,
) -> Tensor:
    """The second half of a pre-norm transformer block: x + keep * mlp(layer_norm(x)).

    Args:
        x: [B, N, C].
        norm_weight, norm_bias, epsilon: of the layer norm.
        weight1, bias1, weight2, bias2, approximate: as for `mlp`.
        keep: factors of the images [B, 1, 1] (stochastic depth), without gradient; None: 1.
    """
    tensors = (x, norm_weight, norm_bias, weight1, bias1, weight2, bias2)
    if keep is None and _compiled(*tensors) and x.shape[-1] == weight1.shape[0] == weight2.shape[1]:
        return _run("mlp_block", *tensors, epsilon, approximate, _wanted(*tensors) if paddle.is_grad_enabled() else 0)
    y = mlp(layer_norm(x, norm_weight, norm_bias, epsilon), weight1, bias1, weight2, bias2, approximate)
    return x + (y if keep is None else y * keep)


def linear_and_mean(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`linear` of x [B, N, in], and the mean of x over the tokens [B, in]."""
    if _compiled(x, weight, bias) and x.ndim == 3 and x.shape[-1] == weight.shape[0]:
        return tuple(_run_all("linear_mean", x, weight, bias, _wanted(x, weight, bias)))
    return linear(x, weight, bias), _mean(x).reshape([-1, x.shape[2]])


def _mean(x: Tensor) -> Tensor:
    """Mean over the tokens, the last axis but one, which stays with length 1."""
    tokens = x.shape[-2]
    if paddle.in_dynamic_mode() or not isinstance(tokens, int) or tokens < 0:
        return x.mean(axis=-2, keepdim=True)
    # In an exported program a product runs on all cores and in bfloat16, a mean does not.
    return paddle.matmul(paddle.full([*[1] * (x.ndim - 1), tokens], 1 / tokens, x.dtype), x)


def softmax_attention(
    qkv: Tensor,
    num_heads: int,
    scale: float,
    kv: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """softmax(scale q k^T + bias + mask) v.

    Args:
        qkv: packed projections [B, N, 3 * C] (q, k, v, each by head); with `kv` only q [B, N, C].
        num_heads: h.
        scale: factor of the scores.
        kv: keys and values of other tokens [B, M, 2 * C].
        bias: logits of every image [h, N, M].
        mask: logits of the G windows of an image [G, N, M], without gradient; B counts windows.

    Returns:
        [B, N, C].
    """
    if _compiled(qkv, kv, bias, mask) and (mask is None or mask.stop_gradient):
        return _run("softmax_attention", qkv, kv, bias, mask, num_heads, scale, _wanted(qkv, kv, bias))
    if kv is None:
        q, k, v = _groups(_heads(qkv, 3 * num_heads), 3)
    else:
        q, (k, v) = _heads(qkv, num_heads), _groups(_heads(kv, 2 * num_heads), 2)
    if paddle.in_dynamic_mode():
        scores = paddle.matmul(q * scale, k, transpose_y=True)
    else:  # an exported program takes a factor behind the product into it
        scores = paddle.matmul(q, k, transpose_y=True) * scale
    if mask is not None:  # one sum: a constant of exported programs, and oneDNN is slow where two axes are broadcast
        added = mask.unsqueeze(1) if bias is None else mask.unsqueeze(1) + bias
        scores = (scores.reshape([-1, mask.shape[0], *scores.shape[1:]]) + added).flatten(0, 1)
    elif bias is not None:
        scores = scores + bias
    weights = F.softmax(_at_least_float32(scores)).astype(v.dtype)
    return _merge_heads(paddle.matmul(weights, v))


def inline_attention(
    qkv: Tensor,
    taps: Tensor | None,
    num_heads: int,
    grid: tuple[int, int],
    scale: float,
    conv: Callable[[Tensor, Tensor, tuple[int, int]], Tensor] | None = None,
) -> Tensor:
    """InLine attention and its local term: q (scale Cov(k, v)) + mean(v) + taps * v on the grid.

    Args:
        qkv: packed projections [B, P + H * W, 3 * C] (q, k, v, each by head).
        taps: [B, C, 9], or None for no local term; the P tokens in front get none.
        num_heads: h; a head has d = C / h channels.
        grid: (H, W) as Python integers.
        scale: factor of the scores, d^-1/2.
        conv: the `DynamicConv3x3` of the calling layer, for fast exported programs.

    Returns:
        [B, P + H * W, C].
    """
    if _compiled(qkv, taps) and grid[0] * grid[1] <= qkv.shape[1]:
        return _run("inline_attention", qkv, taps, num_heads, *grid, scale)
    q_BhNd, k_BhNd, v_BhNd = _groups(_heads(qkv, 3 * num_heads), 3)
    with paddle.amp.auto_cast(enable=False):
        k_BhNd, v_BhNd = _at_least_float32(k_BhNd), _at_least_float32(v_BhNd)
        k_mean, v_mean = _mean(k_BhNd), _mean(v_BhNd)
        covariance = paddle.matmul(k_BhNd, v_BhNd, transpose_x=True) / qkv.shape[1]
        covariance = scale * (covariance - paddle.matmul(k_mean, v_mean, transpose_x=True))
        # Subtracting the negative: Paddle Inference fuses a product and a broadcast sum into a kernel 200 times slower.
        y = paddle.matmul(q_BhNd, covariance.astype(qkv.dtype)) - (-v_mean).astype(qkv.dtype)
    y = _merge_heads(y)
    if taps is None:
        return y
    return y + (conv or dynamic_conv3x3)(qkv[:, :, 2 * y.shape[2] :], taps, grid)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.astype("float32") if x.dtype in (paddle.float16, paddle.bfloat16) else x


def _heads(x: Tensor, num_heads: int) -> Tensor:
    tokens, width = x.shape[1:]
    return x.reshape([-1, tokens, num_heads, width // num_heads]).transpose([0, 2, 1, 3])


def _groups(x: Tensor, count: int) -> list[Tensor]:
    """Equal parts of the heads; as slices, which oneDNN takes in bfloat16, where it takes no split."""
    heads = x.shape[1] // count
    return [x[:, i * heads : (i + 1) * heads] for i in range(count)]


def _merge_heads(x: Tensor) -> Tensor:
    return x.transpose([0, 2, 1, 3]).flatten(2)
