r"""NaLaFormer: norm-aware linear attention (Meng et al., ICML 2026, arXiv 2506.21137).

By head, with n_i = |q_i| and one exponent per token p_i = 3 (1/2 + tanh n_i) in [1.5, 4.5):

    q+ = (relu(q) / n)^p,   q- = (relu(-q) / n)^p,   k+ = relu(k)^3,   k- = relu(-k)^3
    r_i = (1/N) sum_j (q~+_i . k~+_j + q~-_i . k~-_j) v_j / (q+_i . mean_j k+_j + q-_i . mean_j k-_j + eps)
    y = LN(r + LePE(v)) * silu(g)

The rotary position encoding (the tilde; options and precision: rotary.py) is applied to the positive and the negative
part separately, after the power. LePE is a depth-wise 5 x 5 convolution of the values, LN a LayerNorm over all channels
(eps 1e-5), g a linear gate of x. Cost per layer: 4 N C d + 25 N C multiply-accumulates besides the
projections (5 N C^2), state 2 h d^2; linear in N.

Differences from the official code (ZacharyMeng/NaLaFormer): the weights of a query of zeros are 0 (0/0 there), and norm
and power have finite gradients everywhere; `qkv_bias` can be false, and there may be prefix tokens.
"""

from typing import ClassVar

import paddle
from paddle import Tensor

from ppattn import ops
from ppattn.attention.base import AttentionSpec, Context, Parts, register_attention
from ppattn.attention.polaformer import TINY
from ppattn.attention.rotary import RotaryAttention
from ppattn.layers import LayerNorm, Linear
from ppattn.ops import as_float32, split_tensor


@register_attention("nalaformer")
class NaLaFormerAttention(RotaryAttention):
    official: ClassVar = {"ln": "norm", "out_proj": "proj"}

    def __init__(self, spec: AttentionSpec, *, rope: bool = True, local_term: bool = True):
        super().__init__(spec)
        self.qkvg, self.proj = Linear(spec.dim, 4 * spec.dim, bias=spec.qkv_bias), Linear(spec.dim, spec.dim)
        self.norm = LayerNorm(spec.dim)
        self.build_positions(rope, kernel_size=5, local_term=local_term)

    def project(self, x: Tensor, context: Context) -> Parts:
        """[q+, q-] and [k+, k-] by head [B, N, 2C] in float32 or better, v and the gate [B, N, C]."""
        q, k, v, g = split_tensor(self.qkvg(x), 4)
        q, k = as_float32(q), as_float32(k)
        scale = paddle.ones([1, 1, k.shape[2]], k.dtype)
        cube = paddle.full([1, self.num_heads, 1, self.head_dim], 3.0, k.dtype)
        k = ops.signed_power(k, None, scale, cube, self.num_heads, TINY)
        return Parts(ops.direction_power(q, self.num_heads, TINY), k, v, ops.silu(g))

    def normalised(self, y: Tensor) -> Tensor:
        return self.norm(y)
