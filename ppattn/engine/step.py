"""One forward pass with its loss, the seeds of a step, and the search for what made a loss non-finite."""

from __future__ import annotations

import random

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn


def soft_cross_entropy(logits, targets):
    """mean over the batch of sum_k -t_k log softmax(logits)_k, in float32.

    Label smoothing and mixing are in the targets: 1 - eps + eps/K on the true class and eps/K elsewhere is the same as
    (1 - eps) * (-log p_y) + eps * mean_k(-log p_k).

    Args:
        logits: [B, K].
        targets: [B, K], rows sum to 1.
    """
    return -(targets * F.log_softmax(logits.astype("float32"), axis=-1)).sum(axis=-1).mean(axis=0)


class TrainStep(nn.Layer):
    """Model and loss in one layer, so that `DataParallel` wraps both."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images, targets):
        """Images [B, 3, H, W] and targets [B, K] to the total loss, with the model's auxiliary losses in it."""
        logits, auxiliary = self.model.forward_train(images)
        loss = soft_cross_entropy(logits, targets)
        for value in auxiliary.values():
            loss = loss + value.astype("float32")
        return loss


def seed_step(seed: int, step: int, rank: int) -> None:
    """Make dropout and stochastic depth a function of (seed, micro-batch, process): there is no state to keep."""
    number = int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])
    random.seed(number)
    np.random.seed(number)
    paddle.seed(number)


@paddle.no_grad()
def first_nonfinite(model, images) -> str:
    """Run the model again and say where the first value that is not finite comes up."""
    if not np.isfinite(images.numpy()).all():
        return "the images themselves are not finite"
    for name, parameter in model.named_parameters():
        if not np.isfinite(parameter.astype("float32").numpy()).all():
            return f"parameter {name} was no longer finite before this step"
    found: list[str] = []

    def watch(name):
        def look(layer, inputs, outputs):
            tensors = outputs if isinstance(outputs, (tuple, list)) else [outputs]
            floats = [t for t in tensors if isinstance(t, paddle.Tensor) and t.is_floating_point()]
            if not found and not all(np.isfinite(t.astype("float32").numpy()).all() for t in floats):
                found.append(name)

        return look

    handles = [layer.register_forward_post_hook(watch(name)) for name, layer in model.named_sublayers()]
    try:
        model.forward_train(images)
    finally:
        for handle in handles:
            handle.remove()
    return f"the first layer whose output is not finite is {found[0]}" if found else "every layer's output is finite"
