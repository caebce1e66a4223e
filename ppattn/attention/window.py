r"""Window attention: softmax in windows of a plain map (ViTDet; Li et al., ECCV 2022, arXiv 2203.16527).

    out_n = proj( sum over m in K(n) of softmax_m(s q_n . k_m) v_m ),   s = d^-1/2

Windows of w x w tokens tile the H x W map from its top left corner; those at the other two edges may be smaller. A grid
token sees its window and all P prefix tokens, a prefix token sees everything. Names and shapes of the parameters are
those of softmax attention, and none depends on w, so that any trained block becomes one; with w >= max(H, W) it is
softmax attention. Cost per layer: 2 N w^2 C + 4 P N C multiply-accumulates (projections: 4 N C^2); linear in N.

Option: `window_size` w (7), side in tokens; of a sequence, tokens in a row.

Windows are not shifted and have no position bias. ViTDet drops the class token, and padded places of edge windows are
keys; here prefix tokens carry what is global into every window, and nothing is padded. In Swin it tiles the whole map.
"""

from dataclasses import replace

import numpy as np
import paddle
from paddle import Tensor

from ppattn.attention.base import AttentionSpec, Context, PackedParts, register_attention
from ppattn.attention.softmax import SoftmaxAttention
from ppattn.errors import UserError
from ppattn.ops import is_dynamic, merge_windows, partition_windows, softmax
from ppattn.ops.attention import EXCLUDED
from ppattn.validation import Positive


@register_attention("window")
class WindowAttention(SoftmaxAttention):
    windowed = False

    def __init__(self, spec: AttentionSpec, *, window_size: Positive = 7):
        super().__init__(replace(spec, sr_ratio=1))
        self.window_size = window_size

    def attend(self, parts: PackedParts, context: Context) -> Tensor:
        if is_dynamic(*context.hw):
            raise UserError("window attention is exported for one input size: its windows are cut at build time.")
        qkv, prefix, c = parts.q, self.spec.num_prefix, self.spec.dim
        (height, width), shared = context.hw, qkv[:, :prefix, c:]
        grid = qkv[:, prefix:].reshape([-1, height, width, 3 * c])
        strips = [
            paddle.concat([self.tiles(grid, rows, columns, shared) for columns in self.spans(width)], axis=2)
            for rows in self.spans(height)
        ]
        y = paddle.concat(strips, axis=1).reshape([-1, height * width, c])
        return y if not prefix else paddle.concat([self.weighted(qkv[:, :prefix, :c], qkv[:, :, c:]), y], axis=1)

    def spans(self, side: int) -> list[tuple[int, int, int]]:
        """(begin, end, window side) along one side: the whole windows, and the rest as one smaller window."""
        whole = side // self.window_size * self.window_size
        return [span for span in [(0, whole, self.window_size), (whole, side, side - whole)] if span[0] < span[1]]

    def tiles(self, grid: Tensor, rows: tuple[int, int, int], columns: tuple[int, int, int], shared: Tensor) -> Tensor:
        """Attention in the equal windows of a rectangle, the spans `rows` and `columns`, of the map grid [B, H, W, 3C]
        of q, k, v; shared k, v [B, P, 2C] of the prefix."""
        (top, bottom, a), (left, right, b), c = rows, columns, self.spec.dim
        x = partition_windows(grid[:, top:bottom, left:right], a, b)
        if self.spec.num_prefix:
            shared = shared.unsqueeze(1).tile([1, (bottom - top) // a * ((right - left) // b), 1, 1]).flatten(0, 1)
            y = self.weighted(x[:, :, :c], paddle.concat([shared, x[:, :, c:]], axis=1))
        else:
            y = self.weighted(x)
        return merge_windows(y, (bottom - top, right - left), a, b)

    def key_mask(self, context: Context) -> Tensor:
        prefix, (height, width) = self.spec.num_prefix, context.hw
        row, column = (np.arange(side) // self.window_size for side in (height, width))
        window = (row[:, None] * width + column).reshape(-1)
        seen = np.ones([prefix + height * width] * 2, bool)
        seen[prefix:, prefix:] = window[:, None] == window
        return paddle.to_tensor(np.where(seen, 0.0, EXCLUDED)[None])

    def weights(self, parts: PackedParts, context: Context) -> Tensor:
        q, k, _ = self.heads(parts)
        return softmax(self.logits(q, k), mask=self.key_mask(context).astype(q.dtype))
