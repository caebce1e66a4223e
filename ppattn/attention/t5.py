r"""T^5: test-time training of a SwiGLU on centred keys (Li et al., ICML 2026, arXiv 2605.02772).

    k^ = (k - mean_n k) / sqrt(var_n k + 1),   q <- q + DWC(q),   k <- k^ + DWC(k^)

with depth-wise 3 x 3 convolutions. Then every head takes one gradient step (rate 1) of f(x) = (silu(x W1) * (x W2)) W3
on -(s/N) sum_n <f(k_n), v_n>, s = d^-1/2, and applies it to the queries:

    z1 = k W1,  z2 = k W2,  g = sigmoid(z1),  a = z1 g z2,  e = -(s/N) v,  b = e W3^T
    G1 = k^T (b z2 g (1 + z1 (1 - g))),   G2 = k^T (b z1 g),   G3 = a^T e
    y = (silu(q (W1 - G1)) * (q (W2 - G2))) (W3 - G3)

Nothing is clipped, and outer gradients flow through the step. Cost per layer: 9 N C d + 18 N C multiply-accumulates
besides the projections (4 N C^2), state 3 h d^2; linear in N. Made to replace softmax attention in a trained model: all
its parameters are kept, and the new ones are small.

Option: `local_term` (True; False leaves out both convolutions). Everything between the projections runs in float32:
the steps are a few thousandths of the weights. Prefix tokens are queries, keys and values like the others and count in
N, without convolution. The layer is not linear in its values: it has no attention map. Rotary positions are ignored.

Written from the formulas. Difference from the authors' code, which takes square maps without prefix tokens: any grid.
"""

from paddle import Tensor
from paddle.nn.functional import sigmoid
from paddle.nn.initializer import TruncatedNormal

from ppattn import ops
from ppattn.attention.base import Attention, AttentionSpec, Context, Parts, register_attention
from ppattn.layers import Linear, conv2d
from ppattn.ops import as_float32, full_precision, head_product, merge_heads, split_heads, split_tensor, token_mean


@register_attention("t5")
class T5Attention(Attention):
    def __init__(self, spec: AttentionSpec, *, local_term: bool = True):
        super().__init__(spec)
        c, h, d = spec.dim, spec.num_heads, self.head_dim
        self.qkv, self.proj = Linear(c, 3 * c, bias=spec.qkv_bias), Linear(c, c)
        small = TruncatedNormal(0.0, 0.02)
        self.w1, self.w2, self.w3 = (self.create_parameter([1, h, d, d], default_initializer=small) for _ in range(3))
        self.q_conv2d, self.k_conv2d = (conv2d(c, c, 3, padding=1, groups=c) if local_term else None for _ in range(2))

    def project(self, x: Tensor, context: Context) -> Parts:
        """q, k and v [B, N, C] in float32 or better, with the convolutions of q and k."""
        return self.centred(as_float32(self.qkv(x)), context)

    @full_precision
    def centred(self, qkv: Tensor, context: Context) -> Parts:
        q, k, v = split_tensor(qkv, 3)
        k = k - token_mean(k)
        k = k / (token_mean(k * k) + 1.0).sqrt()
        if self.q_conv2d is not None and self.k_conv2d is not None:
            place = (context.hw, self.spec.num_prefix, False, True)
            q, k = (
                ops.depthwise_conv(t, as_float32(conv.weight), as_float32(conv.bias), *place)
                for t, conv in ((q, self.q_conv2d), (k, self.k_conv2d))
            )
        return Parts(q, k, v)

    @full_precision
    def attend(self, parts: Parts, context: Context) -> Tensor:
        w1, w2, w3 = (as_float32(w) for w in (self.w1, self.w2, self.w3))
        q, k, v = (split_heads(t, self.num_heads) for t in (parts.q, parts.k, parts.v))
        z1, z2 = head_product(k, w1), head_product(k, w2)
        gate = sigmoid(z1)
        inner = z1 * gate
        # The negative of e, so that the steps are added: the larger operand of a sum comes first.
        e = v * (self.head_dim**-0.5 / parts.k.shape[1])
        b = head_product(e, w3.transpose([0, 1, 3, 2]))
        step1 = (k.matmul(b * z2 * gate * (1.0 + z1 * (1.0 - gate)), transpose_x=True)) + w1
        step2 = k.matmul(b * inner, transpose_x=True) + w2
        step3 = (inner * z2).matmul(e, transpose_x=True) + w3
        return merge_heads((ops.silu(q.matmul(step1)) * q.matmul(step2)).matmul(step3))
