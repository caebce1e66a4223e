r"""Focused linear attention (Han et al., FLatten Transformer, ICCV 2023, arXiv 2308.00442).

    f(x) = |x| / |x^p| x^p,   q' = f((relu(q) + eps) / t),   k' = f((relu(k) + eps) / t)              (eq. 5)
    y = q' (k'^T v) / (q' . sum k') + DWC(v)                                                        (eq. 8)

with t = softplus(scale) per channel, k after adding a learned position encoding, powers element by element, and norms
over all channels of a token, before the heads are split; DWC is a depth-wise convolution shared by the heads. Cost per
layer: 2 N C d + kernel_size^2 N C multiply-accumulates besides the projections (4 N C^2); linear in N. Parameters that
grow with the grid: the position encoding, N C.

Options: `focusing_factor` p (3), `kernel_size` (5, odd), `local_term` (False: no DWC). eps = 1e-6, also in the
normaliser, whose sums are means over N. Powers, norms and sums run in float32. Prefix tokens have rows of their own in
the position encoding and get no convolution.

Differences from the official code: the position encoding is resized for another grid, and keys are never reduced.
"""

from paddle import Tensor
from paddle.nn.initializer import Constant

from ppattn import ops
from ppattn.attention.base import Attention, AttentionSpec, Context, Parts, register_attention
from ppattn.attention.linear import EPS, LinearAttention
from ppattn.layers import conv2d, resize_grid
from ppattn.ops import as_float32, split_tensor
from ppattn.validation import AboveZero, Odd


class PositionedFeatures(Attention):
    """Shared by `focused` and `polaformer`: the factor 1 / t, the position encoding of the keys, and the local term."""

    convolution = "dwc"

    def build_features(self, kernel_size: int, local_term: bool) -> None:
        d, zero = self.head_dim, Constant(0.0)
        self.dwc = conv2d(d, d, kernel_size, padding=kernel_size // 2, groups=d) if local_term else None
        self.scale = self.create_parameter([1, 1, self.spec.dim], default_initializer=zero)
        self.positional_encoding = self.create_parameter([1, self.spec.tokens, self.spec.dim], default_initializer=zero)
        self.grid_tables = {"positional_encoding": (self.spec.grid, self.spec.num_prefix, "bilinear")}

    def position_and_factor(self, hw: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """The position encoding [1, N, C] on the grid hw, and 1 / t [1, 1, C]."""
        if self.spec.sequence:
            table = self.positional_encoding[:, : hw[1]]
        else:
            table = resize_grid(self.positional_encoding, self.spec.grid, hw, self.spec.num_prefix)
        return table, 1.0 / ops.softplus(self.scale)


@register_attention("focused")
class FocusedAttention(PositionedFeatures, LinearAttention):
    def __init__(
        self, spec: AttentionSpec, *, focusing_factor: AboveZero = 3, kernel_size: Odd = 5, local_term: bool = True
    ):
        super().__init__(spec)
        self.focusing_factor = focusing_factor
        self.build_features(kernel_size, local_term)

    def project(self, x: Tensor, context: Context) -> Parts:
        """f(q) and f(k) [B, N, C] in float32 or better, v [B, N, C]."""
        q, k, v = split_tensor(self.qkv(x), 3)
        table, factor = self.position_and_factor(context.hw)
        q = ops.focused_power(as_float32(q), None, factor, self.focusing_factor, EPS)
        return Parts(q, ops.focused_power(as_float32(k), table, factor, self.focusing_factor, EPS), v)
