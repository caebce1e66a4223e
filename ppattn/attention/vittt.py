r"""ViT^3: test-time training as attention (Han et al., CVPR 2026, arXiv 2512.01643).

Keys and values train a small network by one gradient step (rate 1) on the loss -(s/N) sum_n <f(k_n), v_n>, s = 1/3,
before it is applied to the queries. Each head has a gated linear unit f(x) = (x W1) * silu(x W2):

    a = k W1,  z = k W2,  e = -(s/N) v,    G1 = k^T (e * silu(z)),   G2 = k^T (e * a * silu'(z))
    y = (q (W1 - clip G1)) * silu(q (W2 - clip G2)),               clip divides every column by its norm + 1

A second branch, as wide as one head (d channels), is a depth-wise 3 x 3 convolution W3, trained per image and channel:

    G[t] = -(s/N) sum_n k[n + t] v[n] for the nine shifts t,       y = q convolved with W3 - clip G

where the clip takes the norm of the nine weights of a channel. The output projection takes both branches. Outer
gradients flow through the inner step. Cost per layer: 6 N C d + 18 N d multiply-accumulates besides the projections
(4 N C^2 + 4 N C d), state 2 h d^2; linear in N.

Options: `rope` (False; True: rotary position encoding over all channels of q and k of the first branch, as in H-ViT^3),
`local_term` (True; False: the second branch gives zero; all parameters stay, W3 without effect). Both branches run in
float32. Prefix tokens take part in the first branch and count in N; the second gives them zero.

The layer is not linear in its values, so it has no attention map. Difference from the official code (LeapLabTHU/ViTTT):
the norms of the clip are at least 1e-12, so that gradients stay finite.
"""

import paddle
from paddle import Tensor
from paddle.nn.initializer import Normal

from ppattn import ops
from ppattn.attention.base import Attention, AttentionSpec, Context, Parts, register_attention
from ppattn.attention.polaformer import TINY
from ppattn.attention.rotary import check_pairs, rotary_table
from ppattn.layers import Linear
from ppattn.ops import as_float32, full_precision, split_tensor

SCALE = 1.0 / 3.0


@register_attention("vittt")
class ViTTTAttention(Attention):
    def __init__(self, spec: AttentionSpec, *, rope: bool = False, local_term: bool = True):
        super().__init__(spec)
        c, h, d = spec.dim, spec.num_heads, self.head_dim
        if rope:
            check_pairs(self, full=True)
        self.rope, self.local_term = rope, local_term
        self.qkv, self.proj = Linear(c, 3 * (c + d), bias=spec.qkv_bias), Linear(c + d, c)
        normal = Normal(0.0, 0.02)
        self.w1, self.w2 = (self.create_parameter([1, h, d, d], default_initializer=normal) for _ in range(2))
        self.w3 = self.create_parameter([d, 1, 3, 3], default_initializer=normal)

    def project(self, x: Tensor, context: Context) -> tuple[Parts, Parts]:
        """For the first branch [B, N, C], and for the second, a convolution [B, N, d]; in float32 or better."""
        c, qkv = self.spec.dim, as_float32(self.qkv(x))
        q, k, v = split_tensor(qkv[:, :, : 3 * c], 3)
        second = Parts(*split_tensor(qkv[:, :, 3 * c :], 3))
        if self.rope:
            table = rotary_table(self, context.hw, q.dtype, full=True)
            q, k = ops.rotate(q, *table), ops.rotate(k, *table)
        return Parts(q, k, v), second

    def mix(self, parts: tuple[Parts, Parts], context: Context) -> Tensor:
        """Both branches [B, N, C + d]."""
        return paddle.concat([self.attend(parts, context), self.local(parts, context)], axis=-1)

    def attend(self, parts: tuple[Parts, Parts], context: Context) -> Tensor:
        """The first branch [B, N, C]."""
        q, k, v = parts[0].q, parts[0].k, parts[0].v
        return ops.gated_unit(q, k, v, as_float32(self.w1), as_float32(self.w2), SCALE / k.shape[1], TINY)

    @full_precision
    def local(self, parts: tuple[Parts, Parts], context: Context) -> Tensor:
        """The second branch [B, N, d]; zero for prefix tokens."""
        q, k, v = parts[1].q, parts[1].k, parts[1].v
        if not self.local_term:
            return paddle.zeros_like(q)
        hw, prefix = context.hw, self.spec.num_prefix
        step = SCALE / k.shape[1] * ops.correlation3x3(k, v, hw, prefix)
        taps = ops.clipped(step, 2, TINY) + as_float32(self.w3).reshape([1, self.head_dim, 9])
        return ops.dynamic_conv3x3(q, taps, hw, prefix)
