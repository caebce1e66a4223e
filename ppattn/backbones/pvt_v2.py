"""PVT v2: overlapping patches and a convolution in every MLP (Wang et al., CVMJ 2022, arXiv 2106.13797).

Stage of stride S (4, 2, 2, 2), from a map [B, C', H, W] to a map [B, C, ceil(H / S), ceil(W / S)]:

    x = LN(conv(map))                 kernel 2 S - 1, padding S - 1: neighbouring patches share pixels
    x = x + attention(LN(x));         x = x + W2 GELU(conv3x3(W1 LN(x)))  for every block
    map = LN(x)

The 3 x 3 convolution is depthwise, and its zero padding is all that tells tokens where they are: there is no position
table, and no class token. Keys and values are reduced as in the first version; mean over the last map, linear head.
LayerNorm eps 1e-6 in blocks and at the end of a stage, 1e-5 behind convolutions. Convolutions start from a normal
distribution of variance 2 / fan-out with zero bias, those of an attention too (except InLine's dynamic kernel).

Any input size: maps are rounded up, and only the attention may depend on the grid.

Differences from the official code: a map smaller than its spatial reduction is padded to it instead of failing. Its
"linear" form of the reduction (average pooling to 7 x 7) is not here.
"""

from collections.abc import Sequence
from functools import partial

from paddle import Tensor, nn

from ppattn import ops
from ppattn.attention import LayerState
from ppattn.backbones.base import Block, Pyramid, Stage, StageBuilder, divided, numbered_stages, register_backbone
from ppattn.layers import LayerNorm, Linear, conv2d, kaiming
from ppattn.ops import drop_path, dropout, grid_map, grid_tokens
from ppattn.validation import AboveZero, BelowOne, Count, Fraction, Names, Positive, Size

EPS = 1e-6


@register_backbone("pvt_v2")
class PVTv2(Pyramid):
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
    ):
        per_stage = {"depths": depths, "num_heads": num_heads, "mlp_ratios": mlp_ratios, "sr_ratios": sr_ratios}
        super().__init__(img_size, in_chans, num_classes, patch_size, embed_dims, embed_dims=embed_dims, **per_stage)
        shared = {"qkv_bias": qkv_bias, "attn_drop": attn_drop_rate, "proj_drop": drop_rate}
        build = StageBuilder(attention, attention_options, depths, drop_path_rate, **shared)
        stages, grid = [], self.img_size
        for i, dim in enumerate(embed_dims):
            stride = 2 if i else patch_size
            grid = divided(grid, stride)
            embed = OverlappingPatchEmbed(embed_dims[i - 1] if i else in_chans, dim, stride)
            block = partial(ConvBlock, mlp_ratio=mlp_ratios[i], drop=drop_rate, epsilon=EPS, mlp_type=ConvMlp)
            shape = {"dim": dim, "num_heads": num_heads[i], "sr_ratio": sr_ratios[i]}
            stages.append(Stage(patch_embed=embed, blocks=build.blocks(block, grid, shape), norm=LayerNorm(dim, EPS)))
        self.stages = nn.LayerList(stages)
        self.build_head()
        kaiming(self)

    def tokens(self, x: Tensor) -> tuple[Tensor, list[Tensor], LayerState]:
        maps, state = [x], LayerState()
        for stage in self.stages:
            x, hw = stage.patch_embed(maps[-1])
            x, state = self.run(stage.blocks, x, hw, state)
            x = stage.norm(x)
            maps.append(grid_map(x, hw))
        return x.mean(axis=1), maps[1:], state

    def official_name(self, name: str) -> str | None:
        return numbered_stages(name).replace(".dwconv.dwconv.", ".dwconv.")

    def stem_group(self, name: str) -> int:
        """The norm that ends a stage belongs to what comes after it: the first block of the next stage, or the head."""
        _, stage, part, *_ = name.split(".")
        return super().stem_group(f"stages.{int(stage) + (part == 'norm')}.")


class OverlappingPatchEmbed(nn.Layer):
    """[B, in, H, W] -> tokens [B, H'*W', dim] and (H', W'), each side divided by `stride` and rounded up."""

    def __init__(self, in_chans: int, dim: int, stride: int):
        super().__init__()
        self.proj = conv2d(in_chans, dim, 2 * stride - 1, stride, stride - 1)
        self.norm = LayerNorm(dim)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        x = self.proj(x)
        return self.norm(grid_tokens(x)), (x.shape[2], x.shape[3])


class ConvMlp(nn.Layer):
    """Linear, depthwise 3 x 3 convolution on the grid, GELU, Linear."""

    def __init__(self, dim: int, hidden: int, drop: float = 0.0, approximate: bool = False):
        super().__init__()
        self.fc1, self.fc2 = Linear(dim, hidden), Linear(hidden, dim)
        self.drop, self.approximate = drop, approximate
        self.dwconv = conv2d(hidden, hidden, 3, padding=1, groups=hidden)

    def forward(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        x = ops.depthwise_conv(self.fc1(x), self.dwconv.weight, self.dwconv.bias, hw)
        x = dropout(ops.gelu(x, self.approximate), self.drop, self.training)
        return dropout(self.fc2(x), self.drop, self.training)


class ConvBlock(Block):
    """A pre-norm block whose MLP, a `ConvMlp`, takes the grid."""

    def forward(self, x: Tensor, hw: tuple[int, int], state: LayerState) -> tuple[Tensor, LayerState]:
        y, state = self.attend(self.norm1(x), hw, state)
        x = x + drop_path(y, self.drop_path, self.training)
        return x + drop_path(self.mlp(self.norm2(x), hw), self.drop_path, self.training), state
