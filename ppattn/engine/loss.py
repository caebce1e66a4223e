"""The loss that training minimises."""

from __future__ import annotations

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from ppattn.backbones.base import recorded_blocks
from ppattn.settings import Distill

TINY = 1e-6  # below any mean square of a block's output


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """mean over the batch of sum_k -t_k log softmax(logits)_k, in float32.

    Label smoothing and mixing are in the targets: 1 - eps + eps/K on the true class and eps/K elsewhere is the same as
    (1 - eps) * (-log p_y) + eps * mean_k(-log p_k).

    Args:
        logits: [B, K].
        targets: [B, K], rows sum to 1.
    """
    return -(targets * F.log_softmax(logits.astype("float32"), axis=-1)).sum(axis=-1).mean(axis=0)


def logits_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 KL(softmax(teacher / T) || softmax(student / T)), mean over the batch (Hinton et al., 2015, section 2).

    Args:
        student, teacher: logits [B, K]; computed in float32.
    """
    logits = (student, teacher.detach())
    ours, theirs = (F.log_softmax(x.astype("float32") / temperature, axis=-1) for x in logits)
    return temperature**2 * (theirs.exp() * (theirs - ours)).sum(axis=-1).mean()


def blocks_loss(student: list[Tensor], teacher: list[Tensor]) -> Tensor:
    """Mean over blocks and images of |s - t|^2 / |t|^2, in float32.

    Args:
        student, teacher: outputs [B, N, C] of block after block, of equal shapes.
    """
    losses = []
    for ours, theirs in zip(student, teacher, strict=True):
        # without detach, Paddle wants gradients of what its custom operators computed under no_grad, and crashes
        ours, theirs = (x.astype("float32").flatten(1) for x in (ours, theirs.detach()))
        losses.append(((ours - theirs).square().mean(axis=1) / (theirs.square().mean(axis=1) + TINY)).mean())
    return paddle.stack(losses).mean()


class ModelWithLoss(nn.Layer):
    """Model and loss in one layer.

    Args:
        model: what is trained.
        teacher: a model in eval mode, or None. It is kept in a tuple: no sublayer, hence neither trained nor saved.
        weights: of the losses, for a run with a teacher.
    """

    def __init__(self, model: nn.Layer, teacher: nn.Layer | None = None, weights: Distill | None = None):
        super().__init__()
        self.model = model
        self.distill = None if teacher is None else (teacher, weights or Distill())

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        """Images [B, C, H, W] and targets [B, K] to the total loss, including the model's auxiliary loss."""
        with recorded_blocks(self.model) as blocks:
            logits, auxiliary = self.model.forward_train(images)
        loss = soft_cross_entropy(logits, targets)
        if self.distill:
            teacher, weights = self.distill
            with paddle.no_grad(), recorded_blocks(teacher) as wanted_blocks:
                wanted = teacher(images)
            loss = weights.labels * loss
            if weights.logits:
                loss = loss + weights.logits * logits_loss(logits, wanted, weights.temperature)
            if weights.blocks:
                loss = loss + weights.blocks * blocks_loss(blocks, wanted_blocks)
        return loss if auxiliary is None else loss + auxiliary.astype("float32")
