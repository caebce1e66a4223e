"""A model as the backbone of segmentation or detection: feature maps whose sizes a head can rely on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paddle import Tensor, nn

from ppattn.backbones import Backbone
from ppattn.errors import UserError
from ppattn.layers import LayerNorm, conv2d
from ppattn.ops import pad_to_multiple
from ppattn.zoo import create_model

EPS = 1e-6


class FeatureMaps(nn.Layer):
    """Images [B, C, H, W] -> a list of maps [B, feat_channels[i], H' / strides[i], W' / strides[i]].

    H' and W' are H and W rounded up, by zeros at the bottom and right, to a multiple of the largest stride, so map
    sizes have exactly the ratio of their strides. Every map of a backbone with stages passes a LayerNorm over its
    channels, as in the dense models of Swin. The single map of DeiT becomes four in a `SimpleFeaturePyramid`.

    Args:
        model: name for `ppattn.create_model`, which gets `arguments`, too. The head in `weights` is not used.
        out_indices: which maps, the finest is 0; default: all.
        freeze_at: number of stages (DeiT: blocks) that, with everything before them, are not trained and stay in
            evaluation mode (but for `drop_rate` behind a position table); 0: none.
        pyramid_channels: channels of the maps of DeiT; default 256.
    """

    def __init__(
        self,
        model: str,
        out_indices: list[int] | None = None,
        freeze_at: int = 0,
        pyramid_channels: int | None = None,
        **arguments: Any,
    ):
        super().__init__()
        if "num_classes" in arguments:
            raise UserError("num_classes is not an argument here: feature maps need no head.")
        self.host = create_model(model, num_classes=0, **arguments)
        channels, strides = self.host.feat_channels, self.host.strides
        width = channels[0] if len(strides) == 1 else None
        if width:
            if strides[0] % (4 if out_indices is None or 0 in out_indices else 2 if 1 in out_indices else 1):
                raise UserError(f"patch_size = {strides[0]} is not a multiple of 4: leave map 0, or 0 and 1, out.")
            strides = [strides[0] // 4, strides[0] // 2, strides[0], strides[0] * 2]
            channels = [pyramid_channels or 256] * 4
        elif pyramid_channels:
            raise UserError(f"pyramid_channels is for a backbone with one map; {model} has {len(strides)}.")
        self.out_indices = list(range(len(strides)) if out_indices is None else out_indices)
        if not self.out_indices or not set(self.out_indices) <= set(range(len(strides))):
            raise UserError(f"out_indices = {out_indices}: {model} has the maps 0 to {len(strides) - 1}.")
        self.feat_channels = [channels[i] for i in self.out_indices]
        self.strides = [strides[i] for i in self.out_indices]
        self.multiple = max(strides if width else self.strides)
        self.pyramid = SimpleFeaturePyramid(width, channels[0], self.out_indices) if width else None
        self.norms = nn.LayerList([] if width else [ChannelNorm(c) for c in self.feat_channels])
        self.frozen = freeze(self.host, freeze_at)

    def forward(self, x: Tensor) -> list[Tensor]:
        return self.maps(x)

    def maps(self, x: Tensor) -> list[Tensor]:
        """The same as `forward`; a method of its own, because Paddle 3.3.1 cannot trace `super().forward`."""
        for layer in self.frozen:  # `train()` of a surrounding model sets their mode without calling ours
            layer.eval()
        maps = self.host.forward_features(pad_to_multiple(x, self.multiple, self.multiple))
        if self.pyramid is not None:
            return self.pyramid(maps[0])
        return [self.norms[k](maps[i]) for k, i in enumerate(self.out_indices)]


def freeze(backbone: Backbone, count: int) -> list[nn.Layer]:
    """Exclude the first `count` stages (or blocks) from training; returns the layers that stay in evaluation mode."""
    units = list(getattr(backbone, "stages", None) or backbone.blocks)
    if not isinstance(count, int) or not 0 <= count <= len(units):
        raise UserError(f"freeze_at = {count!r} is not allowed: {backbone.name} has {len(units)} stages or blocks.")
    if not count:
        return []
    blocks = sum(len(unit.blocks) if hasattr(unit, "blocks") else 1 for unit in units[:count])
    names = {name for group in backbone.layer_groups()[: blocks + 1] for name in group}
    frozen = tuple(f"stages.{i}." for i in range(count))
    for name, parameter in backbone.named_parameters():
        if name in names or name.startswith(frozen):
            parameter.stop_gradient = True
    return ([backbone.patch_embed] if hasattr(backbone, "patch_embed") else []) + units[:count]


class ChannelNorm(nn.Layer):
    """LayerNorm over the channels of [B, C, H, W]."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = LayerNorm(channels, EPS)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose([0, 2, 3, 1])).transpose([0, 3, 1, 2])


class SimpleFeaturePyramid(nn.Layer):
    """Maps of `out` channels from one [B, C, H, W] of even sides; `levels` selects from 4, 2, 1, 1/2 times its sides.

    ViTDet (Li et al., ECCV 2022, section 3; detectron2's modeling/backbone/vit.py): transposed convolutions or a max
    pooling, then a 1 x 1 and a 3 x 3 convolution, each with LayerNorm.
    """

    def __init__(self, channels: int, out: int = 256, levels: Sequence[int] = (0, 1, 2, 3)):
        super().__init__()
        half, quarter, up = channels // 2, channels // 4, nn.Conv2DTranspose
        scales = [
            ([up(channels, half, 2, 2), ChannelNorm(half), nn.GELU(), up(half, quarter, 2, 2)], quarter),
            ([up(channels, half, 2, 2)], half),
            ([], channels),
            ([nn.MaxPool2D(2, 2)], channels),
        ]
        self.order, self.levels = [str(i) for i in levels], nn.LayerDict()
        for i in levels:
            layers, width = scales[i]
            project = [conv2d(width, out, 1, bias=False), ChannelNorm(out)]
            smooth = [conv2d(out, out, 3, padding=1, bias=False), ChannelNorm(out)]
            self.levels[str(i)] = nn.Sequential(*layers, *project, *smooth)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.levels[level](x) for level in self.order]
