r"""Softmax attention, the baseline of every comparison (Vaswani et al., NeurIPS 2017, arXiv 1706.03762).

    Y = softmax(Q K^T / sqrt(d) + bias) V                      (eq. 1)

Cost per layer: 2 N M C multiply-accumulates and h N M stored weights (the compiled CPU form recomputes them in the
backward pass instead), besides the projections (4 N C^2); quadratic in N unless the keys are reduced. One class for all
backbones: relative position bias and shift mask come from Swin, and `sr_ratio` > 1 is PVT's spatial reduction (keys and
values from a strided convolution of the map, then LayerNorm; Wang et al., ICCV 2021, eq. 2-3).

Option: `residual` (False) adds InLine's local term for comparisons at equal locality: a 3x3 convolution of the values
with a dynamic kernel (see inline.py).

Differences from the official code: prefix tokens stay keys when the grid is reduced (the official models never combine
the two), and a grid smaller than the reduction is padded instead of failing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
from paddle import Tensor

from ppattn import ops
from ppattn.attention.base import Attention, AttentionSpec, Context, register_attention
from ppattn.attention.inline import DynamicKernel
from ppattn.errors import UserError
from ppattn.layers import LayerNorm, Linear, conv2d, is_dynamic, pad_end
from ppattn.ops import grid_map, grid_tokens, softmax, split, split_heads


@register_attention("softmax")
class SoftmaxAttention(Attention):
    drops_weights = True
    windowed = True

    def __init__(self, spec: AttentionSpec, *, residual: bool = False):
        super().__init__(spec)
        if residual and spec.sr_ratio > 1:
            raise UserError(
                "softmax attention: residual = true needs the values of all tokens, but sr_ratio reduces them."
            )
        self.residual = DynamicKernel(spec.num_heads, self.head_dim) if residual else None
        self.scale = self.head_dim**-0.5
        self.qkv = Linear(spec.dim, 3 * spec.dim, bias=spec.qkv_bias)
        self.proj = Linear(spec.dim, spec.dim)
        if spec.sr_ratio > 1:
            self.sr = conv2d(spec.dim, spec.dim, spec.sr_ratio, spec.sr_ratio)
            self.norm = LayerNorm(spec.dim)

    def keys(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """The tokens behind keys and values: all of them, or prefix and reduced grid [B, P + M', C]."""
        r, prefix = self.spec.sr_ratio, self.spec.num_prefix
        if r == 1:
            return x
        grid = grid_map(x, hw, prefix)
        if not is_dynamic(*hw):
            grid = pad_end(pad_end(grid, 2, max(r - hw[0], 0)), 3, max(r - hw[1], 0))
        reduced = self.norm(grid_tokens(self.sr(grid)))
        return paddle.concat([x[:, :prefix], reduced], axis=1) if prefix else reduced

    def project(self, x: Tensor, context: Context) -> tuple:
        """(q, k, v) [B, N, 3C] and None, or q [B, N, C] and reduced (k, v) [B, M, 2C]; then the dynamic kernel."""
        if self.spec.sr_ratio == 1:
            if self.residual is None:
                return self.qkv(x), None
            qkv, token = ops.linear_and_mean(x, self.qkv.weight, self.qkv.bias)
            return qkv, None, self.residual(token)
        c, weight, bias = self.spec.dim, self.qkv.weight, self.qkv.bias
        q = ops.linear(x, weight[:, :c], None if bias is None else bias[:c])
        return q, ops.linear(self.keys(x, context.hw), weight[:, c:], None if bias is None else bias[c:])

    def attend(self, parts: Any, context: Context) -> Tensor:
        drop = self.spec.attn_drop if self.training else 0.0
        q, kv = parts[:2]
        return ops.softmax_attention(q, self.num_heads, self.scale, kv, context.bias, context.mask, drop)

    def local(self, parts: Any, context: Context) -> Tensor | None:
        if self.residual is None:
            return None
        qkv, _, kernel = parts
        return ops.dynamic_conv3x3(split(qkv, 3)[2], kernel, context.hw, self.spec.num_prefix)

    def heads(self, parts: Any) -> Sequence[Tensor]:
        """q [B, h, N, d], k and v [B, h, M, d]."""
        q, kv = parts[:2]
        if kv is None:
            return split_heads(q, self.num_heads, 3)
        return split_heads(q, self.num_heads), *split_heads(kv, self.num_heads, 2)

    def weights(self, parts: Any, context: Context) -> Tensor:
        q, k, _ = self.heads(parts)
        return softmax(self.logits(q, k), context.bias, context.mask)

    def values(self, parts: Any, context: Context) -> Tensor:
        return self.heads(parts)[2]

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return paddle.matmul(q * self.scale, k, transpose_y=True)
