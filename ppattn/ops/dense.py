"""Linear layers, normalisation, activations and the MLP, each in a plain and in a compiled form."""

import paddle
import paddle.nn.functional as F
from paddle import Tensor

from ppattn.ops.dispatch import as_dtype_of, as_float32, compiled, cpu_float32, eager, grad_mask, is_half, run


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] times weight [in, out] plus bias [out]."""
    if compiled(x, weight, bias) and x.shape[-1] == weight.shape[0]:
        return run("linear", x, weight, bias, grad_mask(x, weight, bias))
    if not cpu_float32(x, weight, bias) or bias is None or bias.stop_gradient or not paddle.is_grad_enabled():
        return F.linear(x, weight, bias)
    # The bias is one more row of the matrix: Paddle's sum for its gradient takes longer than everything else together.
    one = paddle.ones([*x.shape[:-1], 1], x.dtype)
    one.stop_gradient = False  # otherwise second derivatives of the concatenation fail
    return paddle.matmul(paddle.concat([x, one], -1), paddle.concat([weight, bias.unsqueeze(0)]))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float = 1e-5) -> Tensor:
    """Normalises the last axis of x [..., C]; weight and bias [C]."""
    if compiled(x, weight, bias) and x.shape[-1:] == weight.shape == bias.shape:
        return run("layer_norm", x, weight, bias, epsilon, grad_mask(x, weight, bias))
    if is_half(x) and not eager():  # the kernels of half precision have float32 statistics inside
        return as_dtype_of(F.layer_norm(as_float32(x), x.shape[-1:], as_float32(weight), as_float32(bias), epsilon), x)
    weight, bias = (t if is_half(x) else as_float32(t) for t in (weight, bias))
    if weight.stop_gradient:  # Paddle's CPU kernel then ignores the weight in the gradient of x
        return F.layer_norm(x, x.shape[-1:], epsilon=epsilon) * weight + bias
    return F.layer_norm(x, x.shape[-1:], weight, bias, epsilon)


def gelu(x: Tensor, approximate: bool = False) -> Tensor:
    """x times the normal distribution function of x, exact (erf) or in the tanh form."""
    return run("gelu", x, approximate) if compiled(x) else F.gelu(x, approximate)


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x), whose gradient is finite everywhere; that of Paddle's own on a CPU is NaN below -88."""
    return x * F.sigmoid(x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), by an operator that paddle2onnx supports."""
    return -F.log_sigmoid(-x)


def mlp(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, approximate: bool = False) -> Tensor:
    """`linear`, `gelu`, `linear`; the compiled form keeps the activations in the cache."""
    tensors = (x, weight1, bias1, weight2, bias2)
    if compiled(*tensors) and x.shape[-1] == weight1.shape[0] and weight1.shape[1] == weight2.shape[0]:
        inputs = (x, None, None, *tensors[1:], None)
        return run("mlp", *inputs, 0.0, approximate, grad_mask(*inputs))
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
    """x + keep * mlp(layer_norm(x)) for x [B, N, C]; keep [B, 1, 1] (stochastic depth), without gradient, None: 1."""
    tensors = (x, norm_weight, norm_bias, weight1, bias1, weight2, bias2)
    if compiled(*tensors, keep) and x.shape[-1] == weight1.shape[0] == weight2.shape[1]:
        return run("mlp", *tensors, keep, epsilon, approximate, grad_mask(*tensors))
    y = mlp(layer_norm(x, norm_weight, norm_bias, epsilon), weight1, bias1, weight2, bias2, approximate)
    return x + (y if keep is None else y * keep)


def token_mean(x: Tensor) -> Tensor:
    """Mean over the tokens, the second-last axis, which is kept with length 1."""
    tokens = x.shape[-2]
    if eager() or not isinstance(tokens, int) or tokens < 0:
        return x.mean(axis=-2, keepdim=True)
    # In exported programs a product runs on all cores and in bfloat16; a mean does neither.
    return paddle.matmul(paddle.full([*[1] * (x.ndim - 1), tokens], 1 / tokens, x.dtype), x)
