"""What a checkpoint holds: model, optimizer, moving average, loss scale and progress."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import paddle
from pydantic import AfterValidator, Field

from ppattn import weights
from ppattn.engine.ema import Ema
from ppattn.engine.optim import load_optimizer, optimizer_tensors
from ppattn.errors import UserError


def _row(row: dict) -> dict:
    if not {"epoch", "step", "images_per_second"} <= row.keys():
        raise ValueError("a row without its epoch")
    return row


Count = Annotated[int, Field(strict=True, ge=0, lt=2**53)]
Amount = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Part = Annotated[float, Field(strict=True, ge=-1, le=1)]
Row = Annotated[dict[str, Annotated[float, Field(strict=True)] | None], AfterValidator(_row)]


@dataclass
class Progress:
    """How far a run is, and what it has measured on the way; pydantic checks one from a file."""

    epoch: Count = 0  # finished epochs
    step: Count = 0  # optimizer steps done in the present epoch
    best_top1: Part = -1.0
    best_epoch: Count = 0
    skipped: Count = 0  # steps left out because of a non-finite loss
    seconds: Amount = 0.0
    loss_sum: Finite = 0.0  # over the steps of the present epoch
    loss_count: Count = 0
    unreadable: Count = 0  # training images of the present epoch that could not be read, by all processes
    times: dict[str, Amount] = field(default_factory=dict)  # of the present epoch, see clock.Clock
    history: list[Row] = field(default_factory=list)  # rows of metrics.csv

    def mean_loss(self) -> float:
        return self.loss_sum / self.loss_count if self.loss_count else float("nan")

    def waited(self, min_delta: float) -> int:
        """Evaluations since the last new best top-1: one better than the best before it by more than `min_delta`."""
        best, count = -1.0 - min_delta, 0
        for row in self.history:
            if (top1 := row.get("top1")) is not None:
                best, count = (top1, 0) if top1 > best + min_delta else (best, count + 1)
        return count

    def add_losses(self, losses: np.ndarray) -> None:
        self.loss_sum, self.loss_count = self.loss_sum + float(losses.sum()), self.loss_count + len(losses)

    def finish_epoch(self) -> None:
        self.epoch, self.step, self.times = self.epoch + 1, 0, {}
        self.loss_sum, self.loss_count, self.unreadable = 0.0, 0, 0


@dataclass
class State:
    """Everything that a step of training changes."""

    model: Any
    optimizer: Any
    ema: Ema | None
    scaler: Any  # paddle.amp.GradScaler, or None
    progress: Progress
    copy: tuple[dict, dict] | None = None  # of tensors and counts

    def update(self) -> None:
        """Apply the gradients to weights and moving average."""
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        if self.ema:
            self.ema.update()

    def tensors(self) -> dict[str, paddle.Tensor]:
        """The tensors themselves: weights, `optimizer/<parameter>/<accumulator>` and `ema/<name>`."""
        found = dict(self.model.state_dict())
        found |= {f"optimizer/{n}": t for n, t in optimizer_tensors(self.optimizer, self.model).items()}
        return found | {f"ema/{n}": t for n, t in (self.ema.average.items() if self.ema else ())}

    def counts(self) -> dict:
        """The numbers of moving average and loss scale, for JSON."""
        scaler = {k: np.asarray(v).tolist() for k, v in self.scaler.state_dict().items()} if self.scaler else {}
        return {"ema_updates": self.ema.updates if self.ema else 0, "scaler": scaler}

    def load(self, tensors: dict[str, np.ndarray], metadata: dict) -> None:
        """Put a checkpoint into freshly built objects; raises `UserError` where it is of another model."""
        weights.assign(self.model, _under("", tensors), "the checkpoint")
        load_optimizer(self.optimizer, self.model, _under("optimizer/", tensors))
        average = _under("ema/", tensors)
        if self.ema:
            own = self.ema.average
            if average.keys() != own.keys() or any(list(average[name].shape) != own[name].shape for name in own):
                raise UserError("The moving average in the checkpoint is not that of this model.")
            for name, value in average.items():
                own[name].set_value(value)
        self._set_counts(metadata)
        self.progress = Progress(**metadata["progress"])

    @paddle.no_grad()
    def keep_copy(self) -> None:
        """Copy everything but the progress on the device, for `go_back`."""
        self.copy = None  # its memory is free first
        self.copy = {name: tensor.clone() for name, tensor in self.tensors().items()}, self.counts()

    @paddle.no_grad()
    def go_back(self) -> None:
        """Undo all updates since `keep_copy`; the optimizer had stepped before it or has not stepped since."""
        assert self.copy is not None
        tensors, counts = self.copy
        live = self.tensors()
        for name, tensor in tensors.items():
            paddle.assign(tensor, live[name])
        self._set_counts(counts)

    def _set_counts(self, counts: dict) -> None:
        if self.ema:
            self.ema.updates = counts["ema_updates"]
        if self.scaler:
            self.scaler.load_state_dict(counts["scaler"])


def _under(prefix: str, tensors: dict) -> dict:
    """The tensors of one prefix without it; those without any for an empty one."""
    names = {name: name.removeprefix(prefix) for name in tensors if name.startswith(prefix)}
    return {short: tensors[name] for name, short in names.items() if prefix or "/" not in short}
