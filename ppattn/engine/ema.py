"""Exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import paddle


class Ema:
    """average = d * average + (1 - d) * weight after every optimizer step, in float32.

    Covers everything in the model's state dict: running statistics are averaged like weights, integers copied.

    Args:
        model: the model whose weights are followed; the average starts at its present weights.
        decay: d, per optimizer step.
        warmup: d = min(decay, (1 + t) / (10 + t)) at update t, counted from 0.
    """

    def __init__(self, model: paddle.nn.Layer, decay: float, warmup: bool = False):
        self.model, self.decay, self.warmup = model, decay, warmup
        self.updates = 0
        self.average = {
            name: t.astype("float32").clone() if t.is_floating_point() else t.clone()
            for name, t in model.state_dict().items()
        }

    @paddle.no_grad()
    def update(self) -> None:
        t = self.updates
        decay = min(self.decay, (1 + t) / (10 + t)) if self.warmup else self.decay
        for name, weight in self.model.state_dict().items():
            average = self.average[name]
            if weight.is_floating_point():
                average.scale_(decay)
                average.add_(weight.astype("float32") * (1.0 - decay))
            else:
                average.set_value(weight)
        self.updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the averaged weights inside this block and its own after it."""
        state = self.model.state_dict()
        own = {name: t.clone() for name, t in state.items()}
        for name, t in state.items():
            t.set_value(self.average[name].astype(t.dtype))
        try:
            yield
        finally:
            for name, t in state.items():
                t.set_value(own[name])
