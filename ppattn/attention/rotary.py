r"""Rotary position encoding (RoPE) on the grid, and linear attention with it: shared by four attentions, and `vittt`.

The channel pairs (2j, 2j + 1) of a token rotate by angles that grow with its row (first half of the pairs) or its
column (second half): (u, v) -> (u cos t - v sin t, v cos t + u sin t). Rows and columns count from 0.

    per head        t_j = 10000^(-j / (m - 1)) * position,  m = d / 4      (RALA, MALA, NaLaFormer)
    all channels    t_j = 10000^(-j / m) * position,        m = C / 4      (MILA, H-ViT^3)

With the second, the first half of the heads encodes the row only, the second half the column.

Options of the four: `rope` (True), `local_term` (True: LePE). Features, sums and normaliser run in float32, eps = 1e-6.
The normaliser is computed without rotation. Prefix tokens are queries and keys, without rotation and LePE.

DINOv3 (Simeoni et al., 2025, arXiv 2508.10104) rotates the channel pairs (j, j + d / 2) of every head by the place in
the image, so that the same weights serve any size (`image_rotary_table`):

    t_j = 2 pi 100^(-j / m) (2 (position + 1/2) / side - 1),  m = d / 4
"""

import numpy as np
import paddle
from paddle import Tensor

from ppattn import ops
from ppattn.attention.base import Attention, Context, Parts
from ppattn.attention.linear import EPS
from ppattn.errors import UserError
from ppattn.layers import conv2d
from ppattn.ops import as_dtype, as_float32, exact_dtype, is_dynamic, split_heads

BASE = 10000.0


def check_pairs(attn: Attention, full: bool) -> None:
    """Half of the channel pairs belong to the row, half to the column."""
    channels, of = (attn.spec.dim, "token") if full else (attn.head_dim, "head")
    if channels % 4:
        raise UserError(f"Rotary position encoding needs a multiple of 4 channels per {of}, not {channels}.")


def rotary_table(attn: Attention, hw: tuple[int, int], dtype: paddle.dtype, full: bool) -> tuple[Tensor, Tensor]:
    """(cos, sin) for `ops.rotate`: [N, d], the same for all heads, or `full` [N, C]; the sine has the pairs' signs."""
    channels = attn.spec.dim if full else attn.head_dim
    steps = channels // 4 if full else max(channels // 4 - 1, 1)
    return _table(tuple(BASE ** -(np.arange(channels // 4) / steps)), attn.spec.num_prefix, *hw, dtype)


def image_rotary_table(attn: Attention, hw: tuple[int, int], x: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin) [N, d] of DINOv3 for `Attention.placed` and tokens x, in float32 or better."""
    check_pairs(attn, full=False)
    frequencies = tuple(2.0 * np.pi * 100.0 ** (-np.arange(attn.head_dim // 4) / (attn.head_dim // 4)))
    dtype = paddle.float32 if x.dtype in ops.HALF else x.dtype
    return _table(frequencies, attn.spec.num_prefix, *hw, dtype, image=True)


@ops.constant
def _table(
    frequencies: tuple[float, ...], num_prefix: int, h: int, w: int, dtype: paddle.dtype, image: bool = False
) -> tuple[Tensor, Tensor]:
    """cos and sin [N, 4 m] for m frequencies; `image`: of DINOv3's places and pairs."""
    frequency, channels, library = np.array(frequencies), 4 * len(frequencies), np
    if is_dynamic(h, w):
        library, frequency = paddle, paddle.to_tensor(frequency.astype("float32"))
    rows, columns = (library.arange(side).astype(frequency.dtype) for side in (h, w))
    if image:
        rows, columns = 2.0 * (rows + 0.5) / h - 1.0, 2.0 * (columns + 0.5) / w - 1.0
    rows, columns = rows.reshape([-1, 1, 1]) * frequency, columns.reshape([1, -1, 1]) * frequency
    angles = library.stack([rows + 0.0 * columns, columns + 0.0 * rows], 2)  # [H, W, 2, channels / 4]
    if image:
        angles = angles.reshape([-1, channels // 2])
    cos, sin = library.cos(angles), library.sin(angles)
    tables = []
    for pair, still in (([cos, cos], 1.0), ([-sin, sin], 0.0)):
        table = library.hstack(pair) if image else library.stack(pair, -1).reshape([-1, channels])
        table = as_dtype(table if is_dynamic(h, w) else paddle.to_tensor(table.astype(exact_dtype(dtype))), dtype)
        prefix = paddle.full([num_prefix, channels], still, dtype)
        tables.append(paddle.concat([prefix, table]) if num_prefix else table)
    return tables[0], tables[1]


class RotaryAttention(Attention):
    """r_i = (1/N) sum_j (q~_i . k~_j) v_j / (q_i . mean_j k_j + eps),   y = (r + LePE(v)) * o

    Subclasses return q, k, v and the gate o from `project`.
    """

    full_table = False  # the rotary table is that of all channels
    convolution = "lepe"

    def build_positions(self, rope: bool, kernel_size: int, local_term: bool) -> None:
        if rope:
            check_pairs(self, self.full_table)
        self.rope = rope
        c = self.spec.dim
        self.lepe = conv2d(c, c, kernel_size, padding=kernel_size // 2, groups=c) if local_term else None

    def rotation(self, q: Tensor, context: Context) -> tuple[Tensor, Tensor] | None:
        """cos and sin for `ops.rotate`; None without rotary tables."""
        return rotary_table(self, context.hw, q.dtype, self.full_table) if self.rope else None

    def attend(self, parts: Parts, context: Context) -> Tensor:
        q, k, v = parts.q, parts.k, as_float32(parts.v)
        return ops.linear_attention(q, k, v, self.num_heads, EPS, rotation=self.rotation(q, context))

    def weights(self, parts: Parts, context: Context) -> Tensor:
        scores, below = self.scores(parts, context)
        return scores / (below + EPS)

    def scores(self, parts: Parts, context: Context) -> tuple[Tensor, Tensor]:
        """q~_i . k~_j / N [B, h, N, N] and q_i . mean_j k_j [B, h, N, 1]."""
        q, k, h = parts.q, parts.k, self.num_heads
        below = paddle.matmul(split_heads(q, h), split_heads(k.mean(axis=1, keepdim=True), h), transpose_y=True)
        rotation = self.rotation(q, context)
        if rotation is not None:
            q, k = ops.rotate(q, *rotation), ops.rotate(k, *rotation)
        q, k = split_heads(q, h), split_heads(k, h)
        return paddle.matmul(q, k, transpose_y=True) / k.shape[2], below
