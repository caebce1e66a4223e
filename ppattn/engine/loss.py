"""The loss that training minimises."""

from __future__ import annotations

import paddle.nn.functional as F
from paddle import Tensor, nn


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """mean over the batch of sum_k -t_k log softmax(logits)_k, in float32.

    Label smoothing and mixing are in the targets: 1 - eps + eps/K on the true class and eps/K elsewhere is the same as
    (1 - eps) * (-log p_y) + eps * mean_k(-log p_k).

    Args:
        logits: [B, K].
        targets: [B, K], rows sum to 1.
    """
    return -(targets * F.log_softmax(logits.astype("float32"), axis=-1)).sum(axis=-1).mean(axis=0)


class ModelWithLoss(nn.Layer):
    """Model and loss in one layer, so that `paddle.DataParallel` wraps both."""

    def __init__(self, model: nn.Layer):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        """Images [B, 3, H, W] and targets [B, K] to the total loss, with the model's auxiliary losses in it."""
        logits, auxiliary = self.model.forward_train(images)
        loss = soft_cross_entropy(logits, targets)
        for value in auxiliary.values():
            loss = loss + value.astype("float32")
        return loss
