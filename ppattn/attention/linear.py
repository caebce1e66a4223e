r"""Plain kernel attention, the linear baseline of all comparisons (Katharopoulos et al., ICML 2020, arXiv 2006.16236).

    y_i = phi(q_i) (sum_j phi(k_j)^T v_j) / (phi(q_i) . sum_j phi(k_j) + eps)      (eq. 5)

Cost per layer: 2 N C d multiply-accumulates and h d (d + 1) state, besides the projections; linear in N.
Option: `kernel` phi: elu(x) + 1 (default: that paper's choice, positive, in float32 above -17: the normaliser does not
vanish and every parameter gets a gradient), relu (the kernel of the injectivity argument of InLine: all positive
multiples of a query get the same weights), exp (which float32 holds up to 88). Sums and normaliser run in float32; both
are means over N, so that they do not grow with it. eps = 1e-6.
"""

from typing import Literal

import paddle
import paddle.nn.functional as F
from paddle import Tensor

from ppattn import ops
from ppattn.attention.base import Attention, AttentionSpec, Context, Parts, register_attention
from ppattn.layers import Linear
from ppattn.ops import as_float32, split_heads, split_tensor

KERNELS = {"elu": lambda x: F.elu(x) + 1.0, "relu": F.relu, "exp": paddle.exp}
EPS = 1e-6


@register_attention("linear")
class LinearAttention(Attention):
    eps = EPS

    def __init__(self, spec: AttentionSpec, *, kernel: Literal["elu", "relu", "exp"] = "elu"):
        super().__init__(spec)
        self.kernel = kernel
        self.qkv, self.proj = Linear(spec.dim, 3 * spec.dim, bias=spec.qkv_bias), Linear(spec.dim, spec.dim)

    def project(self, x: Tensor, context: Context) -> Parts:
        """phi(q) and phi(k) [B, N, h * r] in float32 or better, v [B, N, C]."""
        q, k, v = split_tensor(self.qkv(x), 3)
        return Parts(*self.features(as_float32(q), as_float32(k)), v)

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """phi(q) and phi(k) [B, N, h * r] for q and k [B, N, C]."""
        phi = KERNELS[self.kernel]
        return phi(q), phi(k)

    def attend(self, parts: Parts, context: Context) -> Tensor:
        return ops.linear_attention(parts.q, parts.k, as_float32(parts.v), self.num_heads, self.eps)

    def weights(self, parts: Parts, context: Context) -> Tensor:
        q, k = split_heads(parts.q, self.num_heads), split_heads(parts.k, self.num_heads)
        weights = paddle.matmul(q, k, transpose_y=True) / k.shape[2]
        return weights / (weights.sum(axis=-1, keepdim=True) + self.eps)
