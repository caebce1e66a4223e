r"""MALA: magnitude-aware linear attention (Fan et al., ICCV 2025, arXiv 2507.00698).

    q, k <- elu(.) + 1,   z_i = s q_i . mean_j k_j,   beta_i = 1 + 1 / (z_i + eps),   s = d^-1/2
    r_i = beta_i (s/N) sum_j (q~_i . k~_j) v_j - z_i mean_j v_j,   y = (r + LePE(v)) * o

The tilde is the rotary position encoding (options and precision: rotary.py); z is computed without it. LePE is a
depth-wise 5 x 5 convolution of the values, o a linear gate of x without activation. The weights are normalised by
subtraction instead of division, so that they still depend on the norm of the query: without rotation they sum to
z / (z + eps); they may be negative. Cost per layer: 2 N C d + 25 N C multiply-accumulates besides the projections
(5 N C^2), state h d^2; linear in N.

Written from the formulas of the paper and the names of the official state dict (qhfan/MALA, classfication_release/
model.py, class AddLinearAttention). Differences from the official code: s/N multiplies the state, not its square root k
and v; `qkv_bias` can be false, and there may be prefix tokens.
"""

import paddle.nn.functional as F
from paddle import Tensor

from ppattn import ops
from ppattn.attention.base import AttentionSpec, Context, Parts, register_attention
from ppattn.attention.linear import EPS
from ppattn.attention.rotary import RotaryAttention
from ppattn.layers import Linear
from ppattn.ops import as_float32, split_tensor


class GatedRotaryAttention(RotaryAttention):
    """Shared by `mala` and `rala`: one projection to q, k, v and the gate o, and features elu + 1."""

    def __init__(self, spec: AttentionSpec, *, rope: bool = True, local_term: bool = True):
        super().__init__(spec)
        self.scale = self.head_dim**-0.5
        self.qkvo, self.proj = Linear(spec.dim, 4 * spec.dim, bias=spec.qkv_bias), Linear(spec.dim, spec.dim)
        self.build_positions(rope, kernel_size=5, local_term=local_term)

    def project(self, x: Tensor, context: Context) -> Parts:
        """q and k [B, N, C], positive, in float32 or better; v and the gate o [B, N, C]."""
        q, k, v, o = split_tensor(self.qkvo(x), 4)
        return Parts(F.elu(as_float32(q)) + 1.0, F.elu(as_float32(k)) + 1.0, v, o)


@register_attention("mala")
class MALAttention(GatedRotaryAttention):
    def attend(self, parts: Parts, context: Context) -> Tensor:
        q, k, v = parts.q, parts.k, as_float32(parts.v)
        rotation = self.rotation(q, context)
        return ops.linear_attention(q, k, v, self.num_heads, EPS, rotation=rotation, magnitude=self.scale)

    def weights(self, parts: Parts, context: Context) -> Tensor:
        scores, z = self.scores(parts, context)
        z = self.scale * z
        return (1.0 + 1.0 / (z + EPS)) * self.scale * scores - z / scores.shape[3]
