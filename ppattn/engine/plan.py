"""The numbers of a run that never change, and what is due after which step."""

from __future__ import annotations

from dataclasses import dataclass

from ppattn.engine.optim import lr_at
from ppattn.settings import Config


@dataclass(frozen=True)
class Due:
    """What is due after a step; whatever is due needs its loss, so `read` is true with each of them."""

    log: bool
    save: bool
    read: bool


@dataclass(frozen=True)
class Plan:
    """Counts of a run. A step is one update of the weights, with the gradients of `accumulate` micro-batches.

    Args:
        config: the checked configuration.
        micro_batches: micro-batches per epoch and process; they fill `steps_per_epoch` steps, the last one perhaps not
            wholly.
        world: processes.
        read_every: steps between two readings of the loss, each of which waits for the device and for all processes.
    """

    config: Config
    micro_batches: int
    world: int
    read_every: int

    @property
    def epochs(self) -> int:
        return self.config.train.epochs + self.config.schedule.cooldown_epochs

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.micro_batches // self.config.train.accumulate)

    @property
    def last_step(self) -> int:
        """Steps of the whole run."""
        steps = self.epochs * self.steps_per_epoch
        return min(steps, self.config.train.max_steps or steps)

    @property
    def micro_batch(self) -> int:
        """Images of one micro-batch of all processes."""
        return self.config.data.batch_size * self.world

    @property
    def total_batch(self) -> int:
        """Images of one step of all processes."""
        return self.micro_batch * self.config.train.accumulate

    def micro_batches_of(self, step: int) -> range:
        """Numbers in the epoch of the micro-batches that make step `step` of an epoch."""
        first = step * self.config.train.accumulate
        return range(first, min(first + self.config.train.accumulate, self.micro_batches))

    def steps_in(self, epoch: int) -> int:
        """Steps of an epoch: all of them, or as many as are left to the last step of the run."""
        return min(self.steps_per_epoch, self.last_step - epoch * self.steps_per_epoch)

    def learning_rate(self, done: int) -> float:
        """The rate of the step before which `done` steps of the run are done."""
        return lr_at(done, self.config, self.steps_per_epoch, self.total_batch)

    def due(self, done: int) -> Due:
        """What is due once `done` steps of the run are done."""
        settings = self.config.train
        log = done % settings.log_every == 0
        save = settings.save_every_steps is not None and done % settings.save_every_steps == 0
        last = done % self.steps_per_epoch == 0 or done == self.last_step
        return Due(log, save, read=log or save or last or done % self.read_every == 0)
