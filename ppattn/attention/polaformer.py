r"""PolaFormer: polarity-aware linear attention (Meng et al., ICLR 2025, arXiv 2501.15061).

With q+ = relu(q / t)^p, q- = relu(-q / t)^p and the same for k (k after adding a learned position encoding),
t = softplus(scale) per channel, p = 1 + alpha sigmoid(power) per head and channel, and v cut into halves v1, v2:

    same-sign stream      y1 = [q+, q-] ([k+, k-]^T v1) / ([q+, q-] . sum [k+, k-])
    opposite-sign stream  y2 = [q-, q+] ([k+, k-]^T v2) / ([q-, q+] . sum [k+, k-])
    y = ([y1, y2] + DWC(v)) * g        g a linear gate of x; DWC a depth-wise convolution shared by the heads

Swapping the halves of q equals swapping the rows of the state, so the two streams take one product with the keys and
one with the queries. Cost per layer: 4 N C d + kernel_size^2 N C multiply-accumulates besides the projections (5 N
C^2); linear in N. Parameters that grow with the grid: the position encoding, N C.

Options: `alpha` (4), `kernel_size` (5, odd); for ablations `polarity` (False: q- and k- are zero, and both halves of
the values take the same-sign stream), `gates` (False: g = 1) and `local_term` (False: no DWC).

Powers, sums and normaliser (eps = 1e-6) run in float32. The power is exp(p log |x|) with |x| at least 1e-12, so that
gradients are finite if q or k is zero. Prefix tokens have own rows in the position encoding and get no convolution.

Differences from the official code: the position encoding is resized for another grid, and keys are never reduced.
"""

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor
from paddle.nn.initializer import Constant

from ppattn import ops
from ppattn.attention.base import AttentionSpec, Context, Parts, merge_rows, register_attention
from ppattn.attention.focused import PositionedFeatures
from ppattn.attention.linear import EPS
from ppattn.errors import UserError
from ppattn.layers import Linear
from ppattn.ops import as_float32, split_heads, split_tensor
from ppattn.validation import NotNegative, Odd

TINY = 1e-12


@register_attention("polaformer")
class PolaFormerAttention(PositionedFeatures):
    def __init__(
        self,
        spec: AttentionSpec,
        *,
        alpha: NotNegative = 4,
        kernel_size: Odd = 5,
        polarity: bool = True,
        gates: bool = True,
        local_term: bool = True,
    ):
        super().__init__(spec)
        if self.head_dim % 2:
            raise UserError(f"polaformer needs an even number of channels per head, not {spec.dim} / {spec.num_heads}.")
        c, shape = spec.dim, [1, spec.num_heads, 1, self.head_dim]
        self.alpha, self.polarity, self.gates = alpha, polarity, gates
        self.qkvg, self.proj = Linear(c, (4 if gates else 3) * c, bias=spec.qkv_bias), Linear(c, c)
        self.power = self.create_parameter(shape, default_initializer=Constant(0.0))
        self.build_features(kernel_size, local_term)

    def project(self, x: Tensor, context: Context) -> Parts:
        """[q+, q-] and [k+, k-] by head [B, N, 2C] in float32 or better, v and g [B, N, C]."""
        q, k, v, *g = split_tensor(self.qkvg(x), 4 if self.gates else 3)
        table, factor = self.position_and_factor(context.hw)
        return Parts(self.features(q, None, factor), self.features(k, table, factor), v, *g)

    def features(self, x: Tensor, shift: Tensor | None, factor: Tensor) -> Tensor:
        """[x+, x-] by head; without polarity x+ [B, N, C]."""
        (n, c), h, power = x.shape[1:], self.num_heads, 1.0 + self.alpha * F.sigmoid(self.power)
        x = ops.signed_power(as_float32(x), shift, factor, power, h, TINY)
        return x if self.polarity else x.reshape([-1, n, h, 2, c // h])[:, :, :, 0].reshape([-1, n, c])

    def attend(self, parts: Parts, context: Context) -> Tensor:
        return ops.linear_attention(parts.q, parts.k, as_float32(parts.v), self.num_heads, EPS, polar=self.polarity)

    def weights(self, parts: Parts, context: Context) -> Tensor:
        """[B, 2h, N, N]: for every head the same-sign and the opposite-sign stream."""
        q, k = split_heads(parts.q, self.num_heads), split_heads(parts.k, self.num_heads)
        swapped = paddle.concat([q[..., self.head_dim :], q[..., : self.head_dim]], axis=-1) if self.polarity else q
        maps = [paddle.matmul(query, k, transpose_y=True) / k.shape[2] for query in (q, swapped)]
        return paddle.stack([a / (a.sum(axis=-1, keepdim=True) + EPS) for a in maps], axis=2).flatten(1, 2)

    def values(self, parts: Parts, context: Context) -> Tensor:
        """[B, 2h, N, d/2]: the halves of every head's values."""
        return split_heads(parts.v, 2 * self.num_heads)

    @classmethod
    def from_official(cls, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return merge_rows(arrays, {"qkvg": [("qg", 2, 0), ("kv", 2, 0), ("kv", 2, 1), ("qg", 2, 1)]})
