"""Swin: a pyramid whose windowed attention shifts every second block (Liu et al., ICCV 2021).

Patches of 4 pixels with LayerNorm, no class token; blocks with odd index inside a stage are the shifted ones; patch
merging between stages; final norm, mean over tokens, linear head; LayerNorm eps 1e-5. A window that is not smaller than
the shorter side of the map takes that side and is not shifted, as in the official code. `ape` adds a learned position
table. Attentions that are not windowed see the complete map, without shift, mask or relative position bias.

PaddleClas 2.6 shifts in that map, too; with `always_shift` its weights give its logits.

Any input size: maps are padded at the bottom and right to full windows; padded tokens and pairs across the seam of the
shift get -100 on their logits. Odd maps are padded before merging.

Not in Swin, for the nano variants: a convolutional stem (`stem="conv"`), position convolutions on the map (`cpe=True`).
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import paddle
from paddle import Tensor, nn
from paddle.nn.initializer import Normal

from ppattn import ops
from ppattn.attention import Attention, Context, LayerState
from ppattn.backbones.base import Block, Pyramid, Stage, StageBuilder, divided, register_backbone
from ppattn.errors import UserError
from ppattn.layers import LayerNorm, Linear, patch_embedding, position_table, resize_grid
from ppattn.ops import dropout, grid_map, is_dynamic, pad_end
from ppattn.validation import AboveZero, BelowOne, Count, Fraction, Names, Positive, Size

EPS = 1e-5
MASKED = -100.0


@register_backbone("swin")
class Swin(Pyramid):
    no_decay = ("absolute_pos_embed",)

    def __init__(
        self,
        attention: Names = "softmax",
        attention_options: dict | None = None,
        img_size: Size = 224,
        patch_size: Positive = 4,
        in_chans: Positive = 3,
        num_classes: Count = 1000,
        embed_dim: Positive = 96,
        depths: Sequence[Positive] = (2, 2, 6, 2),
        num_heads: Sequence[Positive] = (3, 6, 12, 24),
        window_size: Positive = 7,
        mlp_ratio: AboveZero = 4.0,
        qkv_bias: bool = True,
        ape: bool = False,
        drop_rate: Fraction = 0.0,
        attn_drop_rate: Fraction = 0.0,
        drop_path_rate: BelowOne = 0.0,
        stem: Literal["patch", "conv", "pool"] = "patch",
        cpe: bool = False,
        always_shift: bool = False,
    ):
        dims = [embed_dim * 2**i for i in range(len(depths))]
        super().__init__(img_size, in_chans, num_classes, patch_size, dims, depths=depths, num_heads=num_heads)
        grid = divided(self.img_size, patch_size)
        self.grid, self.drop_rate = grid, drop_rate
        self.patch_embed = patch_embedding(stem, in_chans, embed_dim, patch_size, norm=True)
        self.absolute_pos_embed: Any = position_table(self, grid[0] * grid[1], embed_dim) if ape else None
        self.grid_tables = {"absolute_pos_embed": (grid, 0, "bicubic")}
        shared = {"qkv_bias": qkv_bias, "attn_drop": attn_drop_rate, "proj_drop": drop_rate}
        build = StageBuilder(attention, attention_options, depths, drop_path_rate, **shared)
        block = partial(SwinBlock, mlp_ratio=mlp_ratio, drop=drop_rate, epsilon=EPS, cpe=cpe, always_shift=always_shift)
        stages = []
        for i, dim in enumerate(dims):
            shape, shift = {"dim": dim, "num_heads": num_heads[i]}, always_shift or min(grid) > window_size
            blocks = build.blocks(block, grid, shape, min(window_size, *grid), shift)
            stages.append(Stage(blocks=blocks, downsample=PatchMerging(dim) if i < len(depths) - 1 else None))
            grid = divided(grid, 2)
        self.stages = nn.LayerList(stages)
        self.norm = LayerNorm(dim, EPS)
        self.build_head()

    def tokens(self, x: Tensor) -> tuple[Tensor, list[Tensor], LayerState]:
        x, hw = self.patch_embed(x)
        if self.absolute_pos_embed is not None:
            x = x + resize_grid(self.absolute_pos_embed, self.grid, hw, mode="bicubic")
        x = dropout(x, self.drop_rate, self.training)
        maps, state = [], LayerState()
        for stage in self.stages:
            x, state = self.run(stage.blocks, x, hw, state)
            if stage.downsample is None:
                x = self.norm(x)
            maps.append(grid_map(x, hw))
            if stage.downsample is not None:
                x, hw = stage.downsample(x, hw)
        return x.mean(axis=1), maps, state

    def official_name(self, name: str) -> str | None:
        if name.endswith(("relative_position_index", "attn_mask")):  # constants
            return None
        return name.replace("layers.", "stages.", 1) if name.startswith("layers.") else name

    def stem_group(self, name: str) -> int:
        """A merging layer belongs to the last block before it."""
        if not name.startswith("stages."):
            return 0
        return sum(len(stage.blocks) for stage in list(self.stages)[: int(name.split(".")[1]) + 1])


class SwinBlock(Block):
    """A block that gives a windowed attention its windows, bias and mask, and any other the whole map."""

    def __init__(self, attn: Attention, drop_path: float, always_shift: bool = False, **arguments: Any):
        super().__init__(attn, drop_path, **arguments)
        spec, self.always_shift = attn.spec, always_shift
        self.shifted = spec.links.shifted
        self.window = spec.grid[0] if attn.windowed else None
        self.bias = RelativePositionBias(spec.grid[0], spec.num_heads) if attn.windowed and attn.uses_bias else None

    def shift(self, hw: tuple[int, int]) -> int:
        """Tokens by which the windows of a map of this size are shifted; 0 for unshifted or no windows."""
        window = self.window or 0
        return window // 2 if self.shifted and (self.always_shift or min(hw) > window) else 0

    def apply_attention(self, x: Tensor, hw: tuple[int, int], state: LayerState) -> tuple[Tensor, LayerState]:
        if self.window is None:
            return super().apply_attention(x, hw, state)
        if is_dynamic(*hw):
            raise UserError("Windowed attention is exported for one input size: its masks depend on the size.")
        window, shift, (h, w), c = self.window, self.shift(hw), hw, x.shape[2]
        bias = self.bias() if self.bias is not None else None
        padded = h + -h % window, w + -w % window
        x = pad_end(pad_end(x.reshape([-1, h, w, c]), 1, padded[0] - h), 2, padded[1] - w)
        mask = None
        if shift or padded != (h, w):
            mask = window_mask(hw, padded, window, shift, x.dtype)
        context = Context((window, window), bias, mask, state)
        y, state = self.attn(ops.partition_windows(roll_map(x, -shift), window, window), context)
        y = roll_map(ops.merge_windows(y, padded, window, window), shift)
        if padded != (h, w):
            y = y[:, :h, :w]
        return y.reshape([-1, h * w, c]), state


class RelativePositionBias(nn.Layer):
    """Learned logits per head and offset inside a window: a table [(2w-1)^2, h], looked up to [h, w^2, w^2]."""

    no_decay: ClassVar = ("table",)
    official_names: ClassVar = {"attn.relative_position_bias_table": "table", "attn.relative_position_index": None}

    def __init__(self, window: int, num_heads: int):
        super().__init__()
        self.table = self.create_parameter([(2 * window - 1) ** 2, num_heads], default_initializer=Normal(0.0, 0.02))
        self.window = window

    def forward(self) -> Tensor:
        bias, tokens = paddle.gather(self.table, relative_positions(self.window)), self.window**2
        return bias.transpose([1, 0]).reshape([-1, tokens, tokens])

    def resized(self, name: str, array: np.ndarray, img_size: tuple[int, int] | None) -> np.ndarray | None:
        side, wanted = (math.isqrt(rows) for rows in (array.shape[0], self.table.shape[0]))
        if side == wanted or (side**2, self.table.shape[1]) != array.shape:
            return None
        table = paddle.to_tensor(array[None].astype("float32"))
        return resize_grid(table, (side, side), (wanted, wanted), mode="bicubic")[0].numpy()


class PatchMerging(nn.Layer):
    """2 x 2 neighbours concatenated, LayerNorm, linear to twice the width: [B, H*W, C] -> [B, H/2 * W/2, 2C]."""

    def __init__(self, dim: int):
        super().__init__()
        self.norm = LayerNorm(4 * dim, EPS)
        self.reduction = Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor, hw: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
        c = x.shape[2]
        x = x.reshape([-1, *hw, c])
        if not is_dynamic(*hw):
            x = pad_end(pad_end(x, 1, hw[0] % 2), 2, hw[1] % 2)
        h, w = x.shape[1] // 2, x.shape[2] // 2
        x = x.reshape([-1, h, 2, w, 2, c]).transpose([0, 1, 3, 4, 2, 5]).reshape([-1, h * w, 4 * c])
        return self.reduction(self.norm(x)), (h, w)


@ops.constant
def relative_positions(window: int) -> Tensor:
    """The row of the table for each query and key of a window, [w^4]; no buffer, which `Layer.to` would make floats."""
    rows, columns = np.divmod(np.arange(window * window), window)
    index = (rows[:, None] - rows + window - 1) * (2 * window - 1) + columns[:, None] - columns + window - 1
    return paddle.to_tensor(index.reshape(-1))


def roll_map(x: Tensor, shift: int) -> Tensor:
    """Cyclic shift of both sides of [B, H, W, C], as slices (exports everywhere)."""
    if not shift:
        return x
    x = paddle.concat([x[:, -shift:], x[:, :-shift]], axis=1)
    return paddle.concat([x[:, :, -shift:], x[:, :, :-shift]], axis=2)


@ops.constant
def window_mask(hw: tuple[int, int], padded: tuple[int, int], window: int, shift: int, dtype: paddle.dtype) -> Tensor:
    """0 / -100 [G, window^2, window^2]: a token sees the tokens of its own region that are no padding."""
    region = np.zeros(padded, np.int64)
    if shift:
        cuts = [np.searchsorted([side - window, side - shift], np.arange(side), side="right") for side in padded]
        region = cuts[0][:, None] * 3 + cuts[1]
    real = np.zeros(padded, bool)
    real[: hw[0], : hw[1]] = True
    real = np.roll(real, (-shift, -shift), (0, 1))
    split = (padded[0] // window, window, padded[1] // window, window)
    region, real = (a.reshape(split).transpose(0, 2, 1, 3).reshape(-1, window * window) for a in (region, real))
    visible = (region[:, :, None] == region[:, None, :]) & real[:, None, :]
    return paddle.to_tensor(np.where(visible, 0.0, MASKED).astype("float32")).astype(dtype)
