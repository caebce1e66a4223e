"""PVT v1: a pyramid of four stages with spatial reduction (Wang et al., ICCV 2021).

Stage: patch embedding (kernel = stride 4, 2, 2, 2, with LayerNorm), learned position table, pre-norm blocks; a class
token joins in the last stage; final norm, linear head on it. Block and final norms have eps 1e-6, the others 1e-5.
The published InLine and PolaFormer pyramids have neither class token nor final norm (`class_token=False`): mean over
tokens, then head. The official PolaFormer and FLatten pyramids create a final norm that they never apply. It does not
exist here and is skipped when their weights are loaded; their published parameter counts include it (2 x 512).

Not in PVT, for the nano variants: a convolutional stem (`stem="conv"`), a position convolution in every block (`cpe`).

Any input size: tables are resized bilinearly from their own grid (the official code compares every stage's size with
the first stage's, and fails or misplaces where they coincide); the patch embeddings cut what does not fill a patch.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from paddle import Tensor, nn

from ppattn.attention import LayerState
from ppattn.backbones.base import Block, Pyramid, Stage, StageBuilder, divided, numbered_stages, register_backbone
from ppattn.errors import UserError
from ppattn.layers import ConvEmbed, LayerNorm, patch_embedding, position_table, resize_grid
from ppattn.ops import dropout, grid_map
from ppattn.validation import AboveZero, BelowOne, Count, Fraction, Names, Positive, Size

EPS = 1e-6


@register_backbone("pvt")
class PVT(Pyramid):
    no_decay = ("cls_token",)
    tables_follow_img_size = True

    def __init__(
        self,
        attention: Names = "softmax",
        attention_options: dict | None = None,
        img_size: Size = 224,
        patch_size: Positive = 4,
        in_chans: Positive = 3,
        num_classes: Count = 1000,
        embed_dims: Sequence[Positive] = (64, 128, 320, 512),
        depths: Sequence[Positive] = (2, 2, 2, 2),
        num_heads: Sequence[Positive] = (1, 2, 5, 8),
        mlp_ratios: Sequence[AboveZero] = (8, 8, 4, 4),
        sr_ratios: Sequence[Positive] = (8, 4, 2, 1),
        qkv_bias: bool = True,
        drop_rate: Fraction = 0.0,
        attn_drop_rate: Fraction = 0.0,
        drop_path_rate: BelowOne = 0.0,
        class_token: bool = True,
        stem: Literal["patch", "conv", "pool"] = "patch",
        cpe: bool = False,
    ):
        per_stage = {"depths": depths, "num_heads": num_heads, "mlp_ratios": mlp_ratios, "sr_ratios": sr_ratios}
        super().__init__(img_size, in_chans, num_classes, patch_size, embed_dims, embed_dims=embed_dims, **per_stage)
        shared = {"qkv_bias": qkv_bias, "attn_drop": attn_drop_rate, "proj_drop": drop_rate}
        build = StageBuilder(attention, attention_options, depths, drop_path_rate, **shared)
        self.drop_rate = drop_rate
        stages, grid = [], self.img_size
        last = len(depths) - 1
        for i, dim in enumerate(embed_dims):
            prefix = int(class_token and i == last)
            before, patch = (embed_dims[i - 1], 2) if i else (in_chans, patch_size)
            embed = self.embedding(i, before, dim, patch, stem)
            grid = divided(grid, patch) if isinstance(embed, ConvEmbed) else (grid[0] // patch, grid[1] // patch)
            if min(grid) < 1:
                raise UserError(f"img_size {self.img_size} is too small: nothing is left of it in stage {i + 1}.")
            block = partial(Block, drop=drop_rate, cpe=cpe, **self.block_settings(i == last, mlp_ratios[i]))
            shape = {"dim": dim, "num_heads": num_heads[i], "num_prefix": prefix, "sr_ratio": sr_ratios[i]}
            stage = Stage(patch_embed=embed, blocks=build.blocks(block, grid, shape))
            stage.table, stage.prefix = self.table(i, grid), prefix
            stage.pos_embed = position_table(stage, prefix + stage.table[0] * stage.table[1], dim)
            if self.tables_follow_img_size:
                stage.grid_tables = {"pos_embed": (stage.table, prefix, "bilinear")}
            stages.append(stage)
        self.stages = nn.LayerList(stages)
        self.cls_token = position_table(self, 1, embed_dims[-1]) if class_token else None
        self.norm: Any = LayerNorm(embed_dims[-1], EPS) if class_token else None
        self.build_head()

    def embedding(self, stage: int, before: int, dim: int, patch: int, stem: str) -> nn.Layer:
        """Map [B, before, H, W] -> tokens of width `dim`, `patch` pixels apart."""
        return patch_embedding("patch" if stage else stem, before, dim, patch, norm=True, pad=False)

    def block_settings(self, last: bool, mlp_ratio: float) -> dict[str, Any]:
        """Arguments of `Block` in a stage, which is the last one or not."""
        return {"mlp_ratio": mlp_ratio, "epsilon": EPS}

    def table(self, stage: int, grid: tuple[int, int]) -> tuple[int, int]:
        """The grid of the position table of a stage whose tokens lie on `grid`."""
        return grid

    def tokens(self, x: Tensor) -> tuple[Tensor, list[Tensor], LayerState]:
        maps, state = [x], LayerState()
        for stage in self.stages:
            x, hw = stage.patch_embed(maps[-1])
            if stage.prefix:
                x = self.with_class_token(x)
            x = x + resize_grid(stage.pos_embed, stage.table, hw, stage.prefix)
            x = dropout(x, self.drop_rate, self.training)
            x, state = self.run(stage.blocks, x, hw, state)
            if stage is self.stages[-1] and self.norm is not None:
                x = self.norm(x)
            maps.append(grid_map(x, hw, stage.prefix))
        return (x.mean(axis=1) if self.cls_token is None else x[:, 0]), maps[1:], state

    def official_name(self, name: str) -> str | None:
        return None if self.norm is None and name.startswith("norm.") else numbered_stages(name)  # never applied
