"""What PaddleSeg 2.8.0 (the last release on PyPI) needs on Paddle 3.3; importing this file applies it.

| breakage | way out |
|---|---|
| `CrossEntropyLoss`: Paddle 3.3 refuses the product of float32 and int64 | the loss `PixelCrossEntropy` |
| `train()`: takes `l[0]` of a loss, which has no dimensions since Paddle 2.5 (issue 3616) | that loss has one |
| `evaluate()`: `calculate_area` concatenates sums without dimensions (Paddle 2.5) | the function is replaced |
| `train()` calls `float` of that loss and `paddle.flops`, which fail with numpy 2.4 | numpy < 2.4 in requirements.txt |
| `paddle.inference`: oneDNN fails at the head's interpolation (Paddle 3.3.1) | segment.py calls `disable_mkldnn()` |
"""

from __future__ import annotations

import paddle
import paddle.nn.functional as F
from paddle import nn
from paddleseg.cvlibs import manager
from paddleseg.utils import metrics


@manager.LOSSES.add_component
class PixelCrossEntropy(nn.Layer):
    """Mean cross-entropy over the pixels of logits [B, K, H, W] whose label [B, H, W] is not `ignore_index`; [1]."""

    def __init__(self, ignore_index: int = 255):
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, logits, labels):
        return F.cross_entropy(logits, labels.unsqueeze(1), ignore_index=self.ignore_index, axis=1).reshape([1])


def calculate_area(pred, label, num_classes: int, ignore_index: int = 255):
    """Pixels per class of the intersection, of `pred` and of `label` [B, 1, H, W]; three int64 [num_classes].

    As in PaddleSeg, pixels of `ignore_index` count nowhere.
    """
    kept = label != ignore_index
    pred, label = pred[kept].astype("int64"), label[kept].astype("int64")
    counts = [paddle.bincount(values, minlength=num_classes) for values in (pred[pred == label], pred, label)]
    return tuple(count.astype("int64") for count in counts)


metrics.calculate_area = calculate_area
