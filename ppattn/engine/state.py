"""The state of a training, which checkpoints hold: model, optimizer, moving average, loss scale and progress."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle
from pydantic.dataclasses import dataclass as checked

from ppattn import weights
from ppattn.engine.optim import load_optimizer, optimizer_tensors
from ppattn.errors import UserError
from ppattn.validation import Count


class Ema:
    """average = d * average + (1 - d) * weight after every optimizer step, in float32; d is `decay`, or with `warmup`
    at update t min(decay, (1 + t) / (10 + t)). Covers the model's state dict; integers are copied."""

    def __init__(self, model: paddle.nn.Layer, decay: float, warmup: bool = False):
        self.model, self.decay, self.warmup = model, decay, warmup
        self.updates = 0
        state = model.state_dict()
        self.average = {n: (t.astype("float32") if t.is_floating_point() else t).clone() for n, t in state.items()}

    @paddle.no_grad()
    def update(self) -> None:
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay
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


@checked
class Progress:
    """Progress of a run: position, best score, history."""

    step: Count = 0  # updates of the weights
    steps_per_epoch: Count = 0
    best_top1: float = -1.0  # of the best checkpoint; without labels its cosine
    best_epoch: int = 0  # 0: there is none yet
    seconds: float = 0.0  # of the run, without the time between stop and resume
    sums: dict[str, int | float] = field(default_factory=dict)  # over the steps of the present epoch, see `add`
    history: list[dict] = field(default_factory=list)  # rows of metrics.csv, one for each finished epoch

    def add(self, **values: float) -> None:
        for key, value in values.items():
            self.sums[key] = self.sums.get(key, 0) + value

    def mean_loss(self) -> float:
        """Over the steps of the present epoch."""
        return self.sums["loss"] / self.sums["steps"]

    def worths(self, by: str) -> list[tuple[float, float]]:
        """Of the evaluations so far, see `checkpoint_worth`."""
        return [checkpoint_worth(row, by) for row in self.history if row.get("top1", row.get("cosine")) is not None]

    def waited(self, min_delta: float, by: str = "top1") -> int:
        """Evaluations since the last that was better by more than `min_delta`, or equal with a lower loss."""
        (best, lowest), count = (-math.inf, -math.inf), 0
        for score, loss in self.worths(by):
            better = score > best + min_delta or (score == best and loss > lowest)
            (best, lowest), count = ((score, loss), 0) if better else ((best, lowest), count + 1)
        return count


def checkpoint_worth(row: dict, by: str) -> tuple[float, float]:
    """What a row of metrics.csv is worth by `train.best`, and minus its loss, which decides between equals."""
    loss = row.get("val_loss", 0.0)
    if not math.isfinite(loss):
        return -math.inf, -math.inf
    return (-loss if by == "loss" else row.get(by, -math.inf)), -loss


@dataclass
class State:
    """Everything that a step of training changes."""

    model: Any
    optimizer: Any
    ema: Ema | None
    scaler: Any  # paddle.amp.GradScaler, or None
    progress: Progress

    def update(self) -> None:
        """Apply the gradients to weights and moving average."""
        try:
            if self.scaler:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()
        except AssertionError as error:
            raise UserError(f"The checkpoint does not hold the optimizer's state of this run ({error}).") from None
        self.optimizer.clear_grad()
        if self.ema:
            self.ema.update()

    def nonfinite_weight(self) -> str | None:
        """The name of the first weight or running statistic that is not finite, with one wait for the device."""
        floats = {name: tensor for name, tensor in self.model.state_dict().items() if tensor.is_floating_point()}
        bad = paddle.stack([~paddle.isfinite(tensor).all() for tensor in floats.values()]).numpy()
        return list(floats)[bad.argmax()] if bad.any() else None

    def tensors(self) -> dict[str, paddle.Tensor]:
        """The tensors themselves: weights, `optimizer/<parameter>/<accumulator>` and `ema/<name>`."""
        found = self.model.state_dict() | optimizer_tensors(self.optimizer, self.model)
        return found | {f"ema/{n}": t for n, t in (self.ema.average.items() if self.ema else ())}

    def counts(self) -> dict:
        """The numbers of moving average and loss scale, for JSON."""
        scaler = {k: np.asarray(v).tolist() for k, v in self.scaler.state_dict().items()} if self.scaler else {}
        return {"ema_updates": self.ema.updates if self.ema else 0, "scaler": scaler}

    def load(self, tensors: dict[str, np.ndarray], metadata: dict) -> None:
        """Put a checkpoint into freshly built objects; raises an error if it is of another model."""
        own = {name: array for name, array in tensors.items() if "/" not in name}
        weights.assign(self.model, own, "the checkpoint")
        load_optimizer(self.optimizer, self.model, tensors)
        if self.ema:
            for name, average in self.ema.average.items():
                average.set_value(tensors[f"ema/{name}"])
            self.ema.updates = metadata["ema_updates"]
        if self.scaler:
            self.scaler.load_state_dict(metadata["scaler"])
        self.progress = Progress(**metadata["progress"])
