r"""Focused linear attention (Han et al., FLatten Transformer, ICCV 2023, arXiv 2308.00442).

    f(x) = |x| / |x^p| x^p,   q' = f((relu(q) + eps) / t),   k' = f((relu(k) + eps) / t)              (eq. 5)
    y = q' (k'^T v) / (q' . sum k') + DWC(v)                                                        (eq. 8)

with t = softplus(scale) per channel, k after adding a learned position encoding, powers element by element, and norms
over all channels of a token, before the heads are split; DWC is a depth-wise convolution shared by the heads. Cost per
layer: 2 N C d + kernel_size^2 N C multiply-accumulates besides the projections (4 N C^2); linear in N.

Options: `focusing_factor` p (3), `kernel_size` (5, odd). eps = 1e-6, also in the normaliser, whose sums are means over
N. Powers, norms and sums run in float32. Prefix tokens have rows of their own in the position encoding and get no
convolution.

Where we differ from the official code: the position encoding is resized in two dimensions for another grid (there a
checkpoint has one size), and keys are never reduced. The final norm of its PVT, which is never applied, is kept for the
parameter count and the checkpoints.
"""

from __future__ import annotations

import paddle.nn.functional as F
from paddle.nn.initializer import Constant

from ppattn.attention.base import (
    add_to_grid,
    as_float32,
    check_odd,
    full_precision,
    grid_map,
    grid_tokens,
    merge_heads,
    register_attention,
    split_heads,
)
from ppattn.attention.linear import EPS, LinearAttention
from ppattn.errors import UserError
from ppattn.layers import conv2d, dropout, resize_grid, resized_table


@register_attention("focused")
class FocusedAttention(LinearAttention):
    def __init__(self, spec, *, focusing_factor: float = 3, kernel_size: int = 5):
        super().__init__(spec)
        if focusing_factor <= 0:
            raise UserError(f"focused attention: focusing_factor = {focusing_factor} is not allowed: above 0.")
        check_odd("focused attention: kernel_size", kernel_size)
        c, d = spec.dim, self.head_dim
        self.focusing_factor = focusing_factor
        self.dwc = conv2d(d, d, kernel_size, padding=kernel_size // 2, groups=d)
        self.scale = self.create_parameter([1, 1, c], default_initializer=Constant(0.0))
        self.positional_encoding = self.create_parameter([1, spec.tokens, c], default_initializer=Constant(0.0))

    def features(self, x, hw):
        """f(q), f(k), v in float32 or better, [B, h, N, d] each."""
        q, k, v = (as_float32(t) for t in self.qkv(x).split(3, axis=-1))
        k = k + resize_grid(self.positional_encoding, self.spec.grid, hw, self.spec.num_prefix)
        inverse = -1.0 / F.log_sigmoid(-self.scale)  # softplus(x) = -log sigmoid(-x), which paddle2onnx knows
        q, k = (self.focus((F.relu(t) + EPS) * inverse) for t in (q, k))
        return tuple(split_heads(t, self.num_heads) for t in (q, k, v))

    @full_precision
    def focus(self, x):
        """x^p with the norm of x, along the last axis; x is positive."""
        power = x**self.focusing_factor
        return power * (x.norm(axis=-1, keepdim=True) / power.norm(axis=-1, keepdim=True))

    def resized(self, name, array, img_size):
        if name != "positional_encoding":
            return None
        return resized_table(array, self.positional_encoding.shape, img_size, self.spec.grid, self.spec.num_prefix)

    def forward(self, x, hw, bias=None, mask=None, carry=None):
        q, k, v = self.features(x, hw)
        y, prefix = merge_heads(self.mix(q, k, v)).astype(x.dtype), self.spec.num_prefix
        grid = grid_map(merge_heads(v).astype(x.dtype), hw, prefix).reshape([-1, self.head_dim, *hw])
        y = add_to_grid(y, grid_tokens(self.dwc(grid).reshape([-1, self.spec.dim, *hw])), prefix)
        return dropout(self.proj(y), self.spec.proj_drop, self.training), carry
