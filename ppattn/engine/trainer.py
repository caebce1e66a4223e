"""The training loop, to be read from top to bottom. A run is a function of its config and the step.

Every random number is a function of the position in the run (the table in docs/guide/train.md), so a run that is
stopped anywhere and resumed ends with the same weights, bit for bit, as one that was not.
"""

import math
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
import paddle
from paddle.distributed.fleet.utils.hybrid_parallel_util import fused_allreduce_gradients

from ppattn.config import load_config
from ppattn.data import EvalLoader
from ppattn.data.loader import Batch
from ppattn.engine import metrics
from ppattn.engine.build import Run, build_run
from ppattn.engine.evaluate import Evaluation, compare_features, evaluate, model_runner
from ppattn.engine.outputs import log_to, open_outputs
from ppattn.engine.state import checkpoint_worth
from ppattn.errors import FULL_DISK, Preempted, UserError, verb_command
from ppattn.settings import Config

CHECK_EVERY = {"cpu": 1, "gpu": 10}  # micro-batches between two checks of the loss, each of which waits for the device
WARMUP = 5  # first steps of a process, which no speed is measured on


def train(
    config: str | Path | dict | Config,
    resume: str | None = None,
    command: str = "",
    *,
    extend: str | None = None,
    override: Sequence[str] = (),
) -> dict:
    """Train as the config says and leave a run folder at its `output`; returns what summary.json holds.

    Args:
        config: a YAML file or the name of a config of the package, a mapping with what such a file holds (`base`
            included), or a configuration of `ppattn.config`.
        resume: None starts fresh, "auto" continues the run folder or starts fresh, a path names a checkpoint.
        command: what the user typed, for env.json.
        extend: a checkpoint or run folder whose weights, moving average and optimizer state a new run starts from, with
            a schedule, a number of processes and data of its own.
        override: `section.key=value` items, which go before the config.

    Raises `UserError` for wrong settings, data or checkpoint, a full disk, or a loss that is not finite; `Preempted`
    after SIGTERM, SIGINT or SIGHUP, with the state saved.
    """
    if resume and extend:
        raise UserError("resume and extend exclude each other: extend begins a run, resume = 'auto' continues it.")
    config, _ = load_config(config, override)
    with log_to(early := MemoryHandler(10**6)):  # log.txt is not open yet
        run = build_run(config, resume, extend)
    run.outputs = open_outputs(config, command, run.source, run.facts, early.buffer, run.processes)
    if not (run.outputs.checkpoints / "best.safetensors").exists():
        run.state.progress.best_epoch = 0  # the next evaluation makes it
    with run.signals, closing(run.outputs), log_to(run.outputs.log), closing(run.loader):
        try:
            if (run.source or extend) and not (run.outputs.checkpoints / "latest.safetensors").exists():
                run.outputs.save_state(run.state)  # it cannot be had again from this folder
            return train_steps(run)
        except (UserError, Preempted, OSError) as error:
            if isinstance(error, OSError) and error.errno in FULL_DISK:
                full = f"Could not write {error.filename or run.outputs.folder}: the disk is full"
                error = UserError(f"{full}; checkpoints are whole: make room and run again with --resume auto.")
            with suppress(OSError):
                run.outputs.log.info(str(error), terminal=False)
            raise error from None


def train_steps(run: Run) -> dict:
    """All steps that are left, with an evaluation after each epoch; returns what summary.json holds."""
    settings, state, progress, loader = run.config.train, run.state, run.state.progress, run.loader
    check_every = max(1, CHECK_EVERY["cpu" if paddle.get_device() == "cpu" else "gpu"] // settings.accumulate)
    stop, first, result = settings.early_stop, progress.step, None
    losses: list[paddle.Tensor] = []  # since the last check
    if len(progress.history) < progress.step // loader.steps_per_epoch:  # the last evaluation was interrupted
        result = finish_epoch(run)
    with run.outputs.log.progress_bar(run.last_step, progress.step) as bar:
        for step in range(progress.step, run.last_step):
            epoch_begins = step % loader.steps_per_epoch == 0
            if stop and epoch_begins and progress.waited(stop.min_delta, run.best) >= stop.patience:
                break
            began, done = time.perf_counter(), step + 1
            log_due = done % settings.log_every == 0
            save_due = settings.save_every_steps is not None and done % settings.save_every_steps == 0
            epoch_ends = done % loader.steps_per_epoch == 0

            state.optimizer.set_lr(run.learning_rate(step))
            loss = 0.0
            for batch in loader.micro_batches(step):
                loss = loss + backward(run, batch, len(loader.numbers(step)))
            losses.append(loss)
            checked = Checked()
            if log_due or save_due or epoch_ends or done % check_every == 0 or done == run.last_step:
                checked = synchronise(run, step, losses)
                losses = []
            update(run)
            progress.step = done
            seconds = time.perf_counter() - began
            progress.add(seconds=seconds)
            waited, loader.waited = loader.waited, 0.0
            if step >= first + WARMUP:  # on a GPU only sums that end with a check are exact
                progress.add(timed=1, timed_seconds=seconds, timed_images=run.images(step), waited=waited)

            bar.update()
            if log_due:
                metrics.log_step(run, step, checked.loss)
            if save_due or checked.overdue:
                save(run)
            if checked.stopped:
                preempt(run, f"after {run.position(step)}")
            if epoch_ends:
                result = finish_epoch(run)
    return finish(run, result)


def backward(run: Run, batch: Batch, parts: int) -> paddle.Tensor:
    """Add the gradients of a micro-batch, one of `parts` of a step; returns its part of the loss."""
    run.seed(batch.number)
    with run.autocast():
        loss = run.loss(paddle.to_tensor(batch.images), paddle.to_tensor(batch.targets)) / parts
    (run.state.scaler.scale(loss) if run.state.scaler else loss).backward()
    return loss.detach()


def update(run: Run) -> None:
    """Average the gradients over the processes, after the last backward pass (docs/lab/scale.md), and apply them."""
    if run.processes.world > 1:
        fused_allreduce_gradients([p for p in run.state.model.parameters() if not p.stop_gradient], None)
    run.state.update()


class Checked(NamedTuple):
    """The common view of all processes after a step."""

    loss: float = math.nan  # of the step, mean over the processes
    stopped: bool = False  # a signal came to one of them
    overdue: bool = False  # a save is due by the clock


def synchronise(run: Run, step: int, losses: list[paddle.Tensor]) -> Checked:
    """Synchronise device and ranks; share stop signals, save requests and losses; `UserError` for a loss that is not
    finite. On CPUs before every exchange of gradients, in which Gloo would give up on a process that is late."""
    minutes = (time.monotonic() - run.outputs.saved_at) / 60
    overdue = run.processes.main and minutes > (run.config.train.save_every_minutes or math.inf)
    sums = run.processes.sum([bool(run.signals.name), overdue, run.loader.unreadable, *paddle.stack(losses).numpy()])
    means = sums[3:] / run.processes.world
    if not np.isfinite(means).all():
        first = f"{run.position(step + 1 - len(losses))} to " if len(losses) > 1 else ""
        raise nonfinite(run, "The loss", f"at {first}{run.position(step)}")
    run.state.progress.add(loss=float(means.sum()), steps=len(losses), unreadable=int(sums[2]))
    run.loader.unreadable = 0
    return Checked(float(means[-1]), sums[0] > 0, sums[1] > 0)


def finish_epoch(run: Run) -> Evaluation | None:
    """Evaluate if that is due, add a row to metrics.csv and save; returns the evaluation."""
    progress, row, result = run.state.progress, metrics.epoch_row(run), None
    epoch = progress.step // run.loader.steps_per_epoch
    if epoch % run.config.train.eval_every == 0 or epoch == run.epochs:
        try:
            result = evaluate_model(run, epoch, candidate=True)
        except UserError:
            save(run)
            raise
        row |= result.columns()
    progress.history.append(row)
    progress.sums = {}
    save(run)
    metrics.log_row(run, progress.history)
    return result


def evaluate_model(run: Run, epoch: int, candidate: bool) -> Evaluation:
    """Evaluate the moving average, or the weights without one; a `candidate` that is the best so far is kept."""
    state, processes, data, progress = run.state, run.processes, run.config.data, run.state.progress
    check_finite(run)
    state.model.eval()
    with state.ema.applied() if state.ema else nullcontext():
        # running statistics are each process's own; to Paddle they are parameters without a gradient
        processes.broadcast([tensor for tensor in state.model.state_dict().values() if tensor.stop_gradient])
        size, val = data.eval_batch_size or data.batch_size, run.splits.val
        loader = EvalLoader(val, run.preprocess, size, processes.rank, processes.world, data.num_workers)
        asked = (processes, lambda: bool(run.signals.name))
        if run.splits.classes or run.loss.distill is None:
            result = evaluate(model_runner(state.model, run.autocast), loader, val, *asked)
        else:
            result = compare_features(run.loss.distill[0], state.model, loader, val, run.autocast, *asked)
        by, before = run.best, [(-math.inf, -math.inf)]
        before += progress.worths(by) if progress.best_epoch else []
        if result and candidate and checkpoint_worth(result.columns(), by) > max(before):
            progress.best_top1, progress.best_epoch = result.score, epoch
            run.outputs.save_best(state.model, result.metrics)
    state.model.train()
    if result is None:
        preempt(run, f"in the evaluation after epoch {epoch}")
    return result


def check_finite(run: Run) -> None:
    """Raise `UserError` if weights or running statistics are not finite; some operators hide that from the loss."""
    if name := run.state.nonfinite_weight():
        raise nonfinite(run, name, f"after {run.position(run.state.progress.step - 1)}")


def nonfinite(run: Run, name: str, where: str) -> UserError:
    finds = f"`{verb_command('debug')} --run {run.outputs.folder}` finds the step, the micro-batch and the layer"
    return UserError(f"{name} is not finite {where}. {finds}; a lower optimizer.lr or train.clip_grad may help.")


def save(run: Run) -> None:
    check_finite(run)
    run.state.progress.seconds = time.monotonic() - run.began
    run.outputs.save_state(run.state)


def preempt(run: Run, when: str) -> NoReturn:
    """Save, and end this process with the exit code after which a scheduler starts it again."""
    save(run)
    run.processes.barrier()
    stopped = f"stopped by {run.signals.name or 'a signal to another process'} {when}"
    place = " in place of --extend" if run.facts.extends else ""
    raise Preempted(f"{stopped}; the state is saved: run the same command again, `train` with --resume auto{place}")


def finish(run: Run, result: Evaluation | None) -> dict:
    """Write the summary, after an evaluation if none was due at the end; the state stays as it is, for a longer run."""
    progress, steps = run.state.progress, run.loader.steps_per_epoch
    history = progress.history
    if progress.step % steps:
        save(run)
        history = [*history, metrics.epoch_row(run)]
    if "val_loss" not in history[-1]:
        result = evaluate_model(run, -(-progress.step // steps), candidate=not progress.best_epoch)
        history = [*history[:-1], history[-1] | result.columns()]
        metrics.log_row(run, history)
    if not any(math.isfinite(row.get("val_loss", math.nan)) for row in history):
        raise nonfinite(run, "The validation loss", "after any epoch")
    return metrics.summarize(run, history, result)
