r"""Softmax attention: the baseline of every comparison.

    Y = softmax(Q K^T / sqrt(d) + bias) V                      (Vaswani et al., 2017, eq. 1)

Cost per layer: 2 N M C multiply-accumulates and h N M stored weights (the compiled CPU form stores none: its backward
pass computes them again), besides the projections (4 N C^2); quadratic in N unless the keys are reduced. One class for
all hosts: relative position bias and shift mask come from Swin, and `sr_ratio` > 1 is PVT's spatial reduction (keys
and values from a strided convolution of the map, then LayerNorm; Wang et al., ICCV 2021, eq. 2-3).

Where we differ from the official code: prefix tokens stay keys when the grid is reduced (there they never meet), and a
grid smaller than the reduction is padded to it instead of failing.
"""

from __future__ import annotations

import paddle
import paddle.nn.functional as F

from ppattn import ops
from ppattn.attention.base import Attention, grid_map, grid_tokens, merge_heads, register_attention, split_heads
from ppattn.layers import LayerNorm, Linear, conv2d, dropout, pad_end, unknown_size


@register_attention("softmax")
class SoftmaxAttention(Attention):
    windowed = True

    def __init__(self, spec):
        super().__init__(spec)
        self.scale = self.head_dim**-0.5
        self.qkv = Linear(spec.dim, 3 * spec.dim, bias=spec.qkv_bias)
        self.proj = Linear(spec.dim, spec.dim)
        self.build_reduction()

    def build_reduction(self):
        spec = self.spec
        if spec.sr_ratio > 1:
            self.sr = conv2d(spec.dim, spec.dim, spec.sr_ratio, spec.sr_ratio)
            self.norm = LayerNorm(spec.dim)

    def keys(self, x, hw):
        """Tokens that keys and values are made of: all of them, or prefix and reduced grid [B, P + M', C]."""
        r, prefix = self.spec.sr_ratio, self.spec.num_prefix
        if r == 1:
            return x
        grid = grid_map(x, hw, prefix)
        if not unknown_size(*hw):
            grid = pad_end(pad_end(grid, 2, max(r - hw[0], 0)), 3, max(r - hw[1], 0))
        reduced = self.norm(grid_tokens(self.sr(grid)))
        return paddle.concat([x[:, :prefix], reduced], axis=1) if prefix else reduced

    def packed(self, x, hw):
        """(q, k, v) [B, N, 3C] and None, or with reduced keys q [B, N, C] and (k, v) [B, M, 2C]."""
        if self.spec.sr_ratio == 1:
            return self.qkv(x), None
        c, weight, bias = self.spec.dim, self.qkv.weight, self.qkv.bias
        q = ops.linear(x, weight[:, :c], None if bias is None else bias[:c])
        return q, ops.linear(self.keys(x, hw), weight[:, c:], None if bias is None else bias[c:])

    def heads(self, x, hw):
        """q [B, h, N, d], k and v [B, h, M, d]."""
        q, kv = self.packed(x, hw)
        if kv is None:
            return split_heads(q, self.num_heads, 3)
        return split_heads(q, self.num_heads), *split_heads(kv, self.num_heads, 2)

    def forward(self, x, hw, bias=None, mask=None, carry=None):
        if self.training and self.spec.attn_drop:
            y = self.global_term(x, hw, bias, mask)
        else:
            q, kv = self.packed(x, hw)
            y = ops.softmax_attention(q, self.num_heads, self.scale, kv, bias, mask)
        return dropout(self.proj(y), self.spec.proj_drop, self.training), carry

    def logits(self, q, k, bias):
        scores = paddle.matmul(q * self.scale, k, transpose_y=True)
        return scores if bias is None else scores + bias

    def drop_weights(self, weights):
        return dropout(weights, self.spec.attn_drop, self.training)

    def attention_map(self, x, hw, bias=None, mask=None, carry=None):
        q, k, _ = self.heads(x, hw)
        return normalise(self.logits(q, k, bias), mask)

    def values(self, x, hw):
        return self.heads(x, hw)[2]

    def global_term(self, x, hw, bias=None, mask=None, carry=None):
        q, k, v = self.heads(x, hw)
        weights = self.drop_weights(normalise(self.logits(q, k, bias), mask))
        return merge_heads(paddle.matmul(weights, v))


def add_mask(scores, mask):
    """Scores [B*G, h, N, N] plus the mask [G, N, N] of the G windows of each image."""
    if mask is None:
        return scores
    g, n = mask.shape[0], mask.shape[1]
    return (scores.reshape([-1, g, scores.shape[1], n, n]) + mask.unsqueeze([0, 2])).reshape(
        [-1, scores.shape[1], n, n]
    )


def normalise(scores, mask=None):
    """Row softmax, in float32 where the scores are half precision."""
    scores = add_mask(scores, mask)
    if scores.dtype in (paddle.float16, paddle.bfloat16):
        return F.softmax(scores.astype("float32")).astype(scores.dtype)
    return F.softmax(scores)
