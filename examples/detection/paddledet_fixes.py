"""What PaddleDetection 2.6.0 (the last release on PyPI) needs on Paddle 3.3; importing this file applies it.

| breakage | way out |
|---|---|
| export: `multiclass_nms` builds a program in the form that Paddle had before 3.0 | the function is replaced |
| export: `Trainer.export` needs `to_static(full_graph=True)` since Paddle 3.0 | detect.py calls `paddle.jit.save` |
| export: `Trainer.export` keeps the unused input `im_shape`, which Paddle 3.3 refuses | detect.py leaves it out |
| `paddle.inference`: oneDNN fails at the neck's interpolation (Paddle 3.3.1) | detect.py calls `disable_mkldnn()` |
| FasterRCNN: `range()` of a Tensor fails with numpy 2.4 (Paddle 3.3.1) | numpy < 2.4 in requirements.txt |
"""

from __future__ import annotations

import paddle
from ppdet.modeling import ops


@paddle.jit.not_to_static
def multiclass_nms(
    bboxes,
    scores,
    score_threshold: float,
    nms_top_k: int,
    keep_top_k: int,
    nms_threshold: float = 0.3,
    normalized: bool = True,
    nms_eta: float = 1.0,
    background_label: int = -1,
    return_index: bool = False,
    return_rois_num: bool = True,
    rois_num=None,
    name=None,
):
    """Boxes [N, 6] (class, score, corners), their number per image and their indices; arguments as in `ppdet`."""
    boxes, index, count = paddle._C_ops.multiclass_nms3(
        bboxes,
        scores,
        rois_num,
        score_threshold,
        nms_top_k,
        keep_top_k,
        nms_threshold,
        normalized,
        nms_eta,
        background_label,
    )
    return boxes, count if return_rois_num else None, index if return_index else None


ops.multiclass_nms = multiclass_nms
