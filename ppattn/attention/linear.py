r"""Plain kernel attention: the linear baseline that the efficient mechanisms are compared with.

    y_i = phi(q_i) (sum_j phi(k_j)^T v_j) / (phi(q_i) . sum_j phi(k_j) + eps)  (Katharopoulos et al., ICML 2020, eq. 5)

Cost per layer: 2 N C d multiply-accumulates and h d (d + 1) state, besides the projections; linear in N.
phi: `elu` = elu(x) + 1 (default: that paper's choice, positive everywhere, so that the normaliser never vanishes and
every parameter gets a gradient), `relu` (the kernel of the injectivity argument of InLine: all positive multiples of a
query get the same weights), `exp`. Sums and normaliser run in float32; both are means over N, so that they do not grow
with it. eps = 1e-6.
"""

from __future__ import annotations

import paddle
import paddle.nn.functional as F

from ppattn.attention.base import (
    Attention,
    as_float32,
    check_choice,
    full_precision,
    merge_heads,
    register_attention,
    split_heads,
)
from ppattn.layers import Linear, dropout

KERNELS = {"elu": lambda x: F.elu(x) + 1.0, "relu": F.relu, "exp": paddle.exp}
EPS = 1e-6


@register_attention("linear")
class LinearAttention(Attention):
    eps = EPS

    def __init__(self, spec, *, kernel: str = "elu"):
        super().__init__(spec)
        check_choice("linear attention: kernel", kernel, KERNELS)
        self.phi = KERNELS[kernel]
        self.qkv = Linear(spec.dim, 3 * spec.dim, bias=spec.qkv_bias)
        self.proj = Linear(spec.dim, spec.dim)

    def features(self, x, hw):
        """phi(q), phi(k), v in float32 or better, [B, h, N, d] each."""
        q, k, v = (as_float32(t) for t in split_heads(self.qkv(x), self.num_heads, 3))
        return self.phi(q), self.phi(k), v

    def forward(self, x, hw, bias=None, mask=None, carry=None):
        y = self.global_term(x, hw).astype(x.dtype)
        return dropout(self.proj(y), self.spec.proj_drop, self.training), carry

    def global_term(self, x, hw):
        return merge_heads(self.mix(*self.features(x, hw)))

    @full_precision
    def mix(self, q, k, v):
        """The normalised sums [B, h, N, d]."""
        state = paddle.matmul(k, v, transpose_x=True) / k.shape[2]
        normaliser = paddle.matmul(q, k.mean(axis=2, keepdim=True), transpose_y=True) + self.eps
        return paddle.matmul(q, state) / normaliser

    def attention_map(self, x, hw, bias=None, mask=None, carry=None):
        q, k, _ = self.features(x, hw)
        weights = paddle.matmul(q, k, transpose_y=True) / k.shape[2]
        return weights / (weights.sum(axis=-1, keepdim=True) + self.eps)

    def values(self, x, hw):
        return self.features(x, hw)[2]
