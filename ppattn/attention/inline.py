r"""InLine attention: injective linear attention with local modelling (Han et al., NeurIPS 2024, arXiv 2412.06590).

Weights by subtraction instead of division (eq. 5), with s = d^-1/2 on the scores as in the official code:

    a_ij = (s phi(q_i).phi(k_j) - mean_l s phi(q_i).phi(k_l)) / N + 1/N,            sum_j a_ij = 1, a_ij may be negative

and a dynamic 3x3 convolution of the values, its kernel predicted from the mean token (eq. 6):

    y_i = sum_j a_ij v_j + sum_{t in 3x3} r_t v_{i+t},        r = MLP(mean_n x_n), one kernel per image and channel

The first sum equals q (s Cov(k, v)) + mean(v) per head: one d x d matrix and one product, without a subtraction per
token. Cost per layer: 2 N C d + 9 N C multiply-accumulates besides the projections; state h d^2; linear in N.

Options: `kernel` phi in identity (every released model), relu, leakyrelu (slope 0.01), exp (exp(0.2 x)); `residual`
(its name in the official code) switches the local term on or off. Prefix tokens (class token) take part in the global
term and in the mean token, but get no local term. `sr_ratio` is ignored: keys are never reduced. Differences from the
official code: any grid (there H = W = sqrt(N)), no unused softmax and dropout.
"""

from typing import ClassVar, Literal

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn
from paddle.nn.initializer import Uniform

from ppattn import ops
from ppattn.attention.base import Attention, AttentionSpec, Context, PackedParts, register_attention
from ppattn.layers import Linear
from ppattn.ops import split_heads, split_tensor

Kernel = Literal["identity", "relu", "leakyrelu", "exp"]
KERNELS = {"relu": F.relu, "leakyrelu": F.leaky_relu, "exp": lambda x: paddle.exp(0.2 * x)}


@register_attention("inline")
class InLineAttention(Attention):
    rotates = True

    def __init__(self, spec: AttentionSpec, *, kernel: Kernel = "identity", residual: bool = True):
        super().__init__(spec)
        self.kernel, self.scale = kernel, self.head_dim**-0.5
        self.qkv, self.proj = Linear(spec.dim, 3 * spec.dim, bias=spec.qkv_bias), Linear(spec.dim, spec.dim)
        self.residual = DynamicKernel(spec.num_heads, self.head_dim) if residual else None

    def project(self, x: Tensor, context: Context) -> PackedParts:
        """phi(q), phi(k) and v, packed, and the kernel."""
        qkv = self.placed(self.qkv(x), context)
        if self.kernel != "identity":
            q, k, v = split_tensor(qkv, 3)
            phi = KERNELS[self.kernel]
            qkv = paddle.concat([phi(q), phi(k), v], axis=-1)
        return PackedParts(qkv, kernel=None if self.residual is None else self.residual(x))

    def attend(self, parts: PackedParts, context: Context) -> Tensor:
        """The global and the local term in one operator."""
        return ops.inline_attention(parts.q, parts.kernel, self.num_heads, context.hw, self.scale, self.spec.num_prefix)

    def weights(self, parts: PackedParts, context: Context) -> Tensor:
        q, k, _ = split_heads(parts.q, self.num_heads, 3)
        scores = paddle.matmul(q, k, transpose_y=True) * self.scale
        return (scores - scores.mean(axis=-1, keepdim=True) + 1.0) / k.shape[2]

    def values(self, parts: PackedParts, context: Context) -> Tensor:
        return split_heads(parts.q, self.num_heads, 3)[2]

    @classmethod
    def from_official(cls, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        arrays = super().from_official(arrays)
        if "residual.0.weight" in arrays:
            dim, head_dim, _ = arrays["residual.0.weight"].shape
            for ours, theirs in (("hidden", "residual.0"), ("taps", "residual.2")):
                weight = arrays.pop(f"{theirs}.weight").reshape(dim // head_dim, -1, head_dim)
                arrays[f"residual.{ours}_weight"] = np.ascontiguousarray(weight.transpose(0, 2, 1))
                arrays[f"residual.{ours}_bias"] = arrays.pop(f"{theirs}.bias").reshape(dim // head_dim, 1, -1)
        return arrays


class DynamicKernel(nn.Layer):
    """Mean of the tokens -> 3 x 3 kernel of every channel: two linear maps per head with GELU in between."""

    no_decay: ClassVar = ("hidden_bias", "taps_bias")

    def __init__(self, num_heads: int, head_dim: int):
        super().__init__()
        h, d, bound = num_heads, head_dim, Uniform(-(head_dim**-0.5), head_dim**-0.5)
        self.hidden_weight = self.create_parameter([h, d, d], default_initializer=bound)
        self.hidden_bias = self.create_parameter([h, 1, d], default_initializer=bound)
        self.taps_weight = self.create_parameter([h, d, 9 * d], default_initializer=bound)
        self.taps_bias = self.create_parameter([h, 1, 9 * d], default_initializer=bound)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, N, C] -> kernel [B, C, 9], row by row."""
        h, d, _ = self.hidden_weight.shape
        token = ops.token_mean(x).reshape([-1, h, d]).transpose([1, 0, 2])
        token = F.gelu(paddle.bmm(token, self.hidden_weight) + self.hidden_bias)
        return (paddle.bmm(token, self.taps_weight) + self.taps_bias).transpose([1, 0, 2]).reshape([-1, h * d, 9])
