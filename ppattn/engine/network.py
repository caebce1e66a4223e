"""Forward and backward passes of training: mixed precision, and gradients of several processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import paddle
from paddle.distributed.fleet.utils.hybrid_parallel_util import fused_allreduce_gradients

from ppattn.engine.loss import ModelWithLoss
from ppattn.errors import UserError
from ppattn.settings import Distill, Train

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}  # of train.amp


class Network:
    """Model and loss as training runs them.

    Args:
        model: the model; every process has its own, with the same weights.
        world: processes, which average their gradients.
        autocast, scaler: see `mixed_precision`.
        teacher, distill: see `ModelWithLoss`.
    """

    def __init__(
        self,
        model: paddle.nn.Layer,
        world: int,
        autocast: Callable,
        scaler: paddle.amp.GradScaler | None,
        teacher: paddle.nn.Layer | None,
        distill: Distill,
    ):
        self.model, self.world, self.autocast, self.scaler = model, world, autocast, scaler
        self.layer = ModelWithLoss(model, teacher, distill)
        self.parallel = paddle.DataParallel(self.layer) if world > 1 else self.layer
        self.exchanges_itself = not model.recompute  # DataParallel cannot while it recomputes

    def loss(self, images: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        """Images [B, C, H, W] and targets [B, K] to the loss."""
        with self.autocast():
            return self.parallel(images, targets)

    def gradients_of(self, last: bool) -> AbstractContextManager:
        """Around forward and backward pass of a micro-batch; those of the `last` one of a step are exchanged."""
        local = self.world > 1 and not (last and self.exchanges_itself)
        return self.parallel.no_sync() if local else nullcontext()

    def backward(self, loss: paddle.Tensor) -> None:
        (self.scaler.scale(loss) if self.scaler else loss).backward()

    def exchange_gradients(self) -> None:
        """After the last backward pass of a step: average the gradients where that has not happened in it."""
        if self.world > 1 and not self.exchanges_itself:
            fused_allreduce_gradients([p for p in self.model.parameters() if not p.stop_gradient], None)


def mixed_precision(settings: Train) -> tuple[Callable, paddle.amp.GradScaler | None]:
    """A factory of autocast contexts, and the loss scaler that fp16 needs, as the settings ask for."""
    if settings.amp is None:
        return nullcontext, None
    if paddle.get_device() == "cpu":
        raise UserError(
            f"train.amp = {settings.amp} needs a GPU: on a CPU Paddle computes in float32 whatever is asked for. "
            "Leave train.amp at null."
        )
    scaler = paddle.amp.GradScaler(init_loss_scaling=2.0**16) if settings.amp == "fp16" else None
    return partial(paddle.amp.auto_cast, level=settings.amp_level, dtype=DTYPES[settings.amp]), scaler
