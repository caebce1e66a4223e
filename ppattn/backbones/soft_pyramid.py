"""The pyramid of SOFT (Lu et al., NeurIPS 2021, arXiv 2110.11945): PVT v1 with other embeddings and blocks.

3 x 3 convolutions of stride 2 with BatchNorm and ReLU embed, three of them at the input. The blocks of the first three
stages are post-norm (eps 1e-5, MLP ratio 4, tanh GELU, element-wise dropout where others have stochastic depth). The
position tables are those of a 224-pixel image whatever `img_size` is.
"""

from typing import Any

from paddle import nn

from ppattn.backbones.base import register_backbone
from ppattn.backbones.pvt import PVT
from ppattn.errors import UserError
from ppattn.layers import ConvEmbed


@register_backbone("soft_pyramid")
class SoftPyramid(PVT):
    tables_follow_img_size = False

    def embedding(self, stage: int, before: int, dim: int, patch: int, stem: str) -> nn.Layer:
        if stem != "patch":
            raise UserError(f"stem = {stem!r} is not allowed: the SOFT pyramid has convolutions of its own.")
        if stage:
            return ConvEmbed([(before, dim, 2)])
        if patch != 4:
            raise UserError(f"patch_size = {patch} is not allowed: the SOFT pyramid's convolutions make it 4.")
        return ConvEmbed([(before, 32, 2), (32, 32, 1), (32, dim, 2)])

    def block_settings(self, last: bool, mlp_ratio: float) -> dict[str, Any]:
        return super().block_settings(last, mlp_ratio) if last else {"mlp_ratio": 4, "epsilon": 1e-5, "post": True}

    def table(self, stage: int, grid: tuple[int, int]) -> tuple[int, int]:
        side = max(1, 56 >> stage)
        return side, side

    def official_name(self, name: str) -> str | None:
        if (found := super().official_name(name)) is None:
            return None
        return found.replace(".att.mha.", ".attn.").replace(".att.ff", ".mlp.fc").replace(".att.norm", ".norm")
