"""DeiT: a plain vision transformer (Touvron et al., ICML 2021), for any attention.

Patches of 16 pixels, a class token in front, learned position table added after it, pre-norm blocks, final norm, linear
head on the class token; LayerNorm eps 1e-6. Any input size: the table is resized bicubically, and an image that is no
multiple of the patch is zero-padded at the bottom and right.

Not in DeiT: the mean over tokens instead of the class token (`class_token=False`; ViT^3, MHLA, nano variants), a
position convolution in every block (`cpe=True`; ViT^3, nano variants), no learned table (`pos_embed=False`; ViT^3), the
final norm after the mean instead of before (`fc_norm=True`; MHLA), and stems of convolutions (`stem`; nano: "conv").

DINOv2 (Oquab et al., arXiv 2304.07193) scales both branches of a block (`layer_scale`), has `registers` behind the
class token, without positions of their own (Darcet et al., ICLR 2024, arXiv 2309.16588), a head on the class token and
the mean over the patch tokens (`mean_pool=True`), and tables resized in another way (`resize`, see
`ppattn.ops.interpolation_matrix`). DINOv3 is a subclass (dinov3.py).
"""

from functools import partial
from typing import Any, Literal

import paddle
from paddle import Tensor, nn

from ppattn.attention import LayerState
from ppattn.backbones.base import Backbone, Block, StageBuilder, divided, recording_blocks, register_backbone
from ppattn.errors import UserError
from ppattn.layers import LayerNorm, Mlp, SwiGLU, patch_embedding, position_table, resize_grid
from ppattn.ops import dropout, grid_map
from ppattn.validation import AboveZero, BelowOne, Count, Fraction, Names, Positive, Size


@register_backbone("deit")
class DeiT(Backbone):
    no_decay = ("pos_embed", "cls_token", "register_tokens")
    rotary, epsilon = False, 1e-6  # those of DINOv3 differ

    def __init__(
        self,
        attention: Names = "softmax",
        attention_options: dict | None = None,
        img_size: Size = 224,
        patch_size: Positive = 16,
        in_chans: Positive = 3,
        num_classes: Count = 1000,
        embed_dim: Positive = 192,
        depth: Positive = 12,
        num_heads: Positive = 3,
        mlp_ratio: AboveZero = 4.0,
        qkv_bias: bool = True,
        drop_rate: Fraction = 0.0,
        attn_drop_rate: Fraction = 0.0,
        drop_path_rate: BelowOne = 0.0,
        stem: Literal["patch", "conv", "pool"] = "patch",
        class_token: bool = True,
        cpe: bool = False,
        pos_embed: bool = True,
        fc_norm: bool = False,
        layer_scale: AboveZero | None = None,
        registers: Count = 0,
        mean_pool: bool = False,
        resize: Literal["bicubic", "offset", "antialias"] = "bicubic",
        swiglu: bool = False,
    ):
        if (registers or mean_pool) and (fc_norm or not class_token):
            raise UserError("registers and mean_pool need class_token = true and fc_norm = false.")
        if swiglu and layer_scale is None:
            raise UserError("swiglu needs layer_scale.")
        super().__init__(img_size, in_chans, num_classes, feat_channels=[embed_dim], strides=[patch_size])
        cut = (patch_size - 1) * (self.rotary and stem == "patch")
        self.grid = divided((self.img_size[0] - cut, self.img_size[1] - cut), patch_size)
        self.drop_rate = drop_rate
        self.patch_embed = patch_embedding(stem, in_chans, embed_dim, patch_size, pad=not self.rotary)
        self.prefix = int(class_token) + registers
        self.cls_token = position_table(self, 1, embed_dim) if class_token else None
        self.register_tokens = position_table(self, registers, embed_dim) if registers else None
        count = int(class_token) + self.grid[0] * self.grid[1]
        self.pos_embed = position_table(self, count, embed_dim) if pos_embed else None
        self.grid_tables = {"pos_embed": (self.grid, int(class_token), resize)}
        shared = {"qkv_bias": qkv_bias, "attn_drop": attn_drop_rate, "proj_drop": drop_rate}
        shared["key_bias"] = not self.rotary
        build = StageBuilder(attention, attention_options, [depth], drop_path_rate, **shared)
        own: dict[str, Any] = {"mlp_ratio": mlp_ratio, "drop": drop_rate, "epsilon": self.epsilon}
        own |= {"cpe": cpe, "layer_scale": layer_scale, "rotary": self.rotary}
        block = partial(Block, **own, mlp_type=SwiGLU if swiglu else Mlp)
        shape = {"dim": embed_dim, "num_heads": num_heads, "num_prefix": self.prefix}
        self.blocks = nn.LayerList(build.blocks(block, self.grid, shape))
        self.norm, self.fc_norm = LayerNorm(embed_dim, self.epsilon), fc_norm
        self.mean_pool = mean_pool
        self.build_head()

    def intermediates(self, x: Tensor, norm: bool) -> tuple[Tensor, list[Tensor]]:
        with recording_blocks([self]) as blocks:
            last = self.tokens(x)[1][0]
        hw = tuple(last.shape[2:])
        return last, [grid_map(self.norm(b) if norm and not self.fc_norm else b, hw, self.prefix) for b in blocks]

    def tokens(self, x: Tensor) -> tuple[Tensor, list[Tensor], LayerState]:
        x, hw = self.patch_embed(x)
        if self.cls_token is not None:
            x = self.with_class_token(x)
        if self.pos_embed is not None:
            grid, prefix, mode = self.grid_tables["pos_embed"]
            x = x + resize_grid(self.pos_embed, grid, hw, prefix, mode)
        if self.register_tokens is not None:
            x = paddle.concat([x[:, :1], self.register_tokens.expand([x.shape[0], -1, -1]), x[:, 1:]], axis=1)
        x = dropout(x, self.drop_rate, self.training)
        x, state = self.run(self.blocks, x, hw, LayerState())
        if not self.fc_norm:
            x = self.norm(x)
        pooled = x[:, 0] if self.prefix else x.mean(axis=1)
        if self.mean_pool and self.num_classes:
            pooled = paddle.concat([pooled, x[:, self.prefix :].mean(axis=1)], axis=1)
        return self.norm(pooled) if self.fc_norm else pooled, [grid_map(x, hw, self.prefix)], state

    def remarks(self) -> list[str]:
        kinds = {type(block.attn) for block in self.blocks}
        without = sorted(kind.__name__ for kind in kinds if self.rotary and not kind.rotates)
        return super().remarks() + ([f"the rotary positions have no effect in {', '.join(without)}"] if without else [])

    def official_name(self, name: str) -> str | None:
        name = name.replace("fc_norm.", "norm.") if self.fc_norm else name
        return None if name == "mask_token" else name  # DINOv2 trains with masks
