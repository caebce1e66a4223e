r"""Softmax attention, the baseline of every comparison (Vaswani et al., NeurIPS 2017, arXiv 1706.03762).

    Y = softmax(Q K^T / sqrt(d) + bias) V                      (eq. 1)

Cost per layer: 2 N M C multiply-accumulates and h N M stored weights (none in the compiled CPU form), besides the
projections (4 N C^2); quadratic in N unless the keys are reduced. Position bias and shift mask are Swin's; `sr_ratio` >
1 is PVT's spatial reduction (keys and values of a strided convolution and LayerNorm; Wang et al., ICCV 2021, eq. 2-3).

Option: `residual` (False) adds InLine's local term (see inline.py), for comparisons at equal locality.

Differences from the official code: prefix tokens stay keys when the grid is reduced (the official models never combine
the two), and a grid smaller than the reduction is padded instead of failing.
"""

from collections.abc import Sequence

import paddle
from paddle import Tensor

from ppattn import ops
from ppattn.attention.base import Attention, AttentionSpec, Context, PackedParts, register_attention
from ppattn.attention.inline import DynamicKernel
from ppattn.errors import UserError
from ppattn.layers import LayerNorm, Linear, conv2d, replaceable
from ppattn.ops import grid_map, grid_tokens, is_dynamic, pad_end, softmax, split_heads, split_tensor


@register_attention("softmax")
class SoftmaxAttention(Attention):
    windowed = drops_weights = rotates = True

    def __init__(self, spec: AttentionSpec, *, residual: bool = False):
        super().__init__(spec)
        if residual and spec.sr_ratio > 1:
            raise UserError("softmax attention: residual = true needs all values, but sr_ratio reduces them.")
        self.residual = DynamicKernel(spec.num_heads, self.head_dim) if residual else None
        self.scale = self.head_dim**-0.5
        self.qkv, self.proj = Linear(spec.dim, 3 * spec.dim, bias=spec.qkv_bias), Linear(spec.dim, spec.dim)
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

    def project(self, x: Tensor, context: Context) -> PackedParts:
        c, called = self.spec.dim, not replaceable(self.qkv)  # with hooks, or another layer, such as LoRA's
        bias = own = getattr(self.qkv, "bias", None)
        if bias is not None and not self.spec.key_bias:
            bias = paddle.concat([bias[:c], paddle.zeros([c], bias.dtype), bias[2 * c :]])
        if self.spec.sr_ratio == 1:
            kernel = None if self.residual is None else self.residual(x)
            qkv = self.qkv(x) if called or bias is own else ops.linear(x, self.qkv.weight, bias)
            qkv = qkv + paddle.subtract(bias, own) if called and bias is not own else qkv
            return PackedParts(self.placed(qkv, context), kernel=kernel)
        if called:
            return PackedParts(self.qkv(x)[:, :, :c], self.qkv(self.keys(x, context.hw))[:, :, c:])
        weight = self.qkv.weight
        q = ops.linear(x, weight[:, :c], None if bias is None else bias[:c])
        return PackedParts(q, ops.linear(self.keys(x, context.hw), weight[:, c:], None if bias is None else bias[c:]))

    def attend(self, parts: PackedParts, context: Context) -> Tensor:
        return self.weighted(parts.q, parts.kv, bias=context.bias, mask=context.mask)

    def weighted(self, q: Tensor, kv: Tensor | None = None, **logits: Tensor | None) -> Tensor:
        """`ops.softmax_attention` with the factor and the dropout of this layer; `logits`: its bias and mask."""
        drop = self.spec.attn_drop if self.training else 0.0
        return ops.softmax_attention(q, self.num_heads, self.scale, kv, drop=drop, **logits)

    def local(self, parts: PackedParts, context: Context) -> Tensor | None:
        if self.residual is None or parts.kernel is None:
            return None
        return ops.dynamic_conv3x3(split_tensor(parts.q, 3)[2], parts.kernel, context.hw, self.spec.num_prefix)

    def heads(self, parts: PackedParts) -> Sequence[Tensor]:
        """q [B, h, N, d], k and v [B, h, M, d]."""
        if parts.kv is None:
            return split_heads(parts.q, self.num_heads, 3)
        return split_heads(parts.q, self.num_heads), *split_heads(parts.kv, self.num_heads, 2)

    def weights(self, parts: PackedParts, context: Context) -> Tensor:
        q, k, _ = self.heads(parts)
        return softmax(self.logits(q, k), context.bias, context.mask)

    def values(self, parts: PackedParts, context: Context) -> Tensor:
        return self.heads(parts)[2]

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return paddle.matmul(q * self.scale, k, transpose_y=True)
