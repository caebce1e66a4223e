"""The loss that training minimises."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from ppattn.attention import LayerState
from ppattn.backbones.base import AttentionCall, Backbone, recording_blocks
from ppattn.errors import UserError
from ppattn.settings import Distill, Loss

TINY = 1e-6  # below any mean square of a block's output


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """mean over the batch of sum_k -t_k log softmax(logits)_k, in float32; logits and targets t are [B, K]. Label
    smoothing and mixing are in the targets: 1 - eps + eps/K on the true class and eps/K elsewhere."""
    return -(targets * F.log_softmax(logits.astype("float32"), axis=-1)).sum(axis=-1).mean(axis=0)


def criterion(settings: Loss, counts: np.ndarray) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of logits and targets [B, K] that `settings` name, mean over the batch; in float32.

    With class weights w and probabilities p: ce: -(sum_k w_k t_k) sum_k t_k log p_k; focal (Lin et al., 2017) with the
    factor (1 - p_k)^gamma in each term; bce: the mean over k of w_k times the binary cross-entropy of sigmoid and t_k.
    "balanced" weights are n / (K n_k) for `counts` n_k with sum n; their mean over the labels is 1.
    """
    chosen = settings.class_weights
    if settings.name == "ce" and chosen is None:
        return soft_cross_entropy
    if chosen == "balanced":
        chosen = (np.sign(counts) * counts.sum() / (len(counts) * np.maximum(counts, 1))).tolist()
    if chosen is not None and len(chosen) != len(counts):
        raise UserError(f"loss.class_weights has {len(chosen)} numbers, the data {len(counts)} classes.")
    weights = paddle.to_tensor([1.0] * len(counts) if chosen is None else chosen, "float32")

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        logits = logits.astype("float32")
        if settings.name == "bce":
            each = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
            return (weights * each).mean(axis=-1).mean(axis=0)
        logs = F.log_softmax(logits, axis=-1)
        factor = (1.0 - logs.exp()).clip(min=1e-6) ** settings.gamma if settings.name == "focal" else 1.0
        return -((weights * targets).sum(axis=-1) * (targets * factor * logs).sum(axis=-1)).mean(axis=0)

    return loss


def logits_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 KL(softmax(teacher / T) || softmax(student / T)) of logits [B, K], float32 (Hinton et al., 2015)."""
    student, teacher = (F.log_softmax(x.astype("float32") / temperature, axis=-1) for x in (student, teacher.detach()))
    return temperature**2 * (teacher.exp() * (teacher - student)).sum(axis=-1).mean()


def blocks_loss(student: list[Tensor], teacher: list[Tensor]) -> Tensor:
    """Mean over blocks and images of |s - t|^2 / |t|^2, in float32; s and t are outputs [B, N, C] of equal shapes."""
    losses = []
    for s, t in zip(student, teacher, strict=True):
        # without detach, Paddle wants gradients of what its custom operators computed under no_grad, and crashes
        s, t = (x.astype("float32").flatten(1) for x in (s, t.detach()))
        losses.append(((s - t).square().mean(axis=1) / (t.square().mean(axis=1) + TINY)).mean())
    return paddle.stack(losses).mean()


@contextmanager
def recording_both(model: Backbone, weights: Distill) -> Iterator[tuple[list[Tensor], list[AttentionCall]]]:
    """Block outputs and attention calls, filled while the model runs; a list whose loss has weight 0 stays empty."""
    attentions = model.blocks_flat() if weights.attention else []
    with recording_blocks([model] if weights.blocks else []) as outputs, recording_blocks(attentions) as calls:
        yield outputs, calls


class ModelWithLoss(nn.Layer):
    """Model and loss in one layer; with a teacher in eval mode the losses are weighted as `Distill` says."""

    def __init__(
        self,
        model: nn.Layer,
        teacher: nn.Layer | None = None,
        weights: Distill | None = None,
        criterion: Callable[[Tensor, Tensor], Tensor] = soft_cross_entropy,
    ):
        super().__init__()
        self.model, self.criterion = model, criterion
        # a tuple is no sublayer: the teacher is neither trained nor saved
        self.distill = (teacher, weights or Distill()) if teacher else None

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        """Images [B, C, H, W] and targets [B, K] to the total loss, with the model's auxiliary losses in it."""
        if self.distill is None:
            logits, auxiliary = self.model.forward_train(images)
            loss = self.criterion(logits, targets)
        else:
            loss, auxiliary = self.distilled(images, targets, *self.distill)
        return loss if auxiliary is None else loss + auxiliary.astype("float32")

    def distilled(
        self, images: Tensor, targets: Tensor, teacher: Backbone, weights: Distill
    ) -> tuple[Tensor, Tensor | None]:
        """The weighted sum of the losses, and the model's auxiliary losses where it ran as a whole."""
        with paddle.no_grad(), recording_both(teacher, weights) as (wanted_blocks, wanted_calls):
            if weights.features:
                *wanted_features, _ = teacher.final_features(images)
                wanted = teacher.head(wanted_features[0])
            else:
                wanted_features, wanted = [], teacher(images)
        terms, auxiliary, calls = [], None, list[AttentionCall]()
        if weights.labels or weights.logits or weights.blocks or weights.features or weights.inputs == "student":
            with recording_both(self.model, weights) as (blocks, calls):
                *features, auxiliary = self.model.final_features(images)
                logits = self.model.head(features[0])
            if weights.features:
                c = min(features[0].shape[1], wanted_features[0].shape[1])  # DINO's classifiers append a mean
                both = [[x[:, :c] for x in some] for some in (features, wanted_features)]
                terms.append(weights.features * blocks_loss(*both))
            if targets.shape[1]:
                terms.append(weights.labels * self.criterion(logits, targets))
            if weights.logits:
                terms.append(weights.logits * logits_loss(logits, wanted, weights.temperature))
            if weights.blocks:
                terms.append(weights.blocks * blocks_loss(blocks, wanted_blocks))
        if weights.attention:
            outputs = [call.y for call in calls]
            if weights.inputs == "teacher":  # the student's attentions run again, each on the teacher's input
                outputs, state = [], LayerState()
                for block, call in zip(self.model.blocks_flat(), wanted_calls, strict=True):
                    y, state = block.attend(call.x.detach(), call.hw, state)
                    outputs.append(y)
            terms.append(weights.attention * blocks_loss(outputs, [call.y for call in wanted_calls]))
        return sum(terms[1:], terms[0]), auxiliary
