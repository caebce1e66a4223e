"""`import ppattn.contrib.paddledet` registers the backbone type `PPAttn` in PaddleDetection (2.6.0).

RetinaNet: {backbone: PPAttn, neck: FPN, head: RetinaHead}
PPAttn: {model: pvt_nano, attention: inline, img_size: 128, out_indices: [1, 2, 3]}
"""

from __future__ import annotations

from paddle import Tensor
from ppdet.core.workspace import register, serializable
from ppdet.modeling.shape_spec import ShapeSpec

from ppattn.contrib.feature_maps import FeatureMaps
from ppattn.errors import UserError


@register
@serializable
class PPAttn(FeatureMaps):
    """See `FeatureMaps`; takes PaddleDetection's batch with its images under `image`."""

    def forward(self, inputs: dict[str, Tensor]) -> list[Tensor]:
        return self.maps(inputs["image"])

    @property
    def out_shape(self) -> list[ShapeSpec]:
        if any(2 * fine != coarse for fine, coarse in zip(self.strides, self.strides[1:], strict=False)):
            strides = f"strides {self.strides}; PaddleDetection's necks need each to be twice the one before"
            raise UserError(f"out_indices = {self.out_indices} gives maps of {strides}.")
        return [ShapeSpec(channels=c, stride=s) for c, s in zip(self.feat_channels, self.strides, strict=True)]
