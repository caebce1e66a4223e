"""`import ppattn.contrib.paddleseg` registers the backbone type `PPAttn` in PaddleSeg (2.8.0).

model: {type: SegFormer, num_classes: 11, embedding_dim: 64,
        backbone: {type: PPAttn, model: pvt_nano, attention: inline, img_size: 64}}
"""

from __future__ import annotations

from paddle import Tensor
from paddleseg.cvlibs import manager

from ppattn.contrib.feature_maps import FeatureMaps
from ppattn.ops import is_dynamic


@manager.BACKBONES.add_component
class PPAttn(FeatureMaps):
    """See `FeatureMaps`; `in_channels` are those of the images. Maps are cut to ceil(H / stride) x ceil(W / stride),
    because PaddleSeg's heads stretch them over the whole image."""

    def __init__(self, model: str, in_channels: int = 3, **arguments):
        super().__init__(model, in_chans=in_channels, **arguments)

    def forward(self, x: Tensor) -> list[Tensor]:
        height, width = x.shape[2:]
        maps = self.maps(x)
        if is_dynamic(height, width):
            return maps
        return [m[:, :, : -(-height // self.strides[i]), : -(-width // self.strides[i])] for i, m in enumerate(maps)]
