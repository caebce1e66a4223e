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

from paddle.nn.initializer import Constant

from ppattn import ops
from ppattn.attention.base import check_odd, register_attention
from ppattn.attention.linear import EPS, LinearAttention
from ppattn.errors import UserError
from ppattn.layers import conv2d, resize_grid, resized_table
from ppattn.ops import as_float32, split


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

    def project(self, x, context):
        """f(q) and f(k) [B, N, C] in float32 or better, v [B, N, C]."""
        q, k, v = split(self.qkv(x), 3)
        shift = resize_grid(self.positional_encoding, self.spec.grid, context.hw, self.spec.num_prefix)
        inverse = 1.0 / ops.softplus(self.scale)
        q = ops.focused_power(as_float32(q), None, inverse, self.focusing_factor, EPS)
        return q, ops.focused_power(as_float32(k), shift, inverse, self.focusing_factor, EPS), v

    def local(self, parts, context):
        return ops.depthwise_conv(parts[2], self.dwc.weight, self.dwc.bias, context.hw, self.spec.num_prefix)

    def resized(self, name, array, img_size):
        if name != "positional_encoding":
            return None
        return resized_table(array, self.positional_encoding.shape, img_size, self.spec.grid, self.spec.num_prefix)
