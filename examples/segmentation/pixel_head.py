"""`type: PixelHead`: the smallest head for a plain transformer, a linear layer that predicts all pixels of a token."""

import paddle.nn.functional as F
from paddle import Tensor, nn
from paddleseg.cvlibs import manager


@manager.MODELS.add_component
class PixelHead(nn.Layer):
    """Images [B, 3, H, W] -> [logits [B, K, H, W]], from the last map of the backbone."""

    def __init__(self, num_classes: int, backbone: nn.Layer):
        super().__init__()
        self.backbone, self.stride = backbone, backbone.strides[-1]
        self.classify = nn.Conv2D(backbone.feat_channels[-1], num_classes * self.stride**2, 1)

    def forward(self, x: Tensor) -> list[Tensor]:
        pixels = F.pixel_shuffle(self.classify(self.backbone(x)[-1]), self.stride)
        return [pixels[:, :, : x.shape[2], : x.shape[3]]]
