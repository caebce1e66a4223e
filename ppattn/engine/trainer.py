"""The training loop, to be read from top to bottom: epochs, the steps of an epoch, and the summary at the end.

Every random number is a function of the position in the run (the table in docs/training.md), so a run that is stopped
anywhere and resumed ends with the same weights, bit for bit, as one that was not.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Generator, Iterator
from contextlib import closing, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np
import paddle

from ppattn import cost
from ppattn.data import EvalLoader, TrainLoader, batch_rng, mix
from ppattn.engine import metrics, nonfinite
from ppattn.engine.build import Run, build_run
from ppattn.engine.evaluate import Evaluation, evaluate, model_runner
from ppattn.engine.files import full_disk
from ppattn.engine.pictures import draw_confusion, draw_predictions
from ppattn.engine.plan import Due
from ppattn.engine.state import Row
from ppattn.errors import Preempted, UserError
from ppattn.runtime import seed_all
from ppattn.settings import Config

MAX_KEPT = 3  # batches with a loss that is not finite, per process


def train(config: Config, resume: str | None = None, command: str = "") -> dict:
    """Train as the config says and leave a run folder at `config.output`.

    Args:
        config: the checked configuration.
        resume: None starts fresh, "auto" goes on where the run folder was left (or starts fresh), a folder or a file
            names the checkpoint.
        command: what the user typed, for env.json.

    Returns:
        What summary.json holds.

    Raises:
        UserError: wrong settings, data or checkpoint, a full disk, or a loss that is not finite.
        Preempted: SIGTERM, SIGINT or SIGHUP came; the state is saved.
    """
    run = build_run(config, resume, command)
    with run.signals, closing(run.outputs):
        try:
            return finish(run, train_epochs(run))
        except (UserError, Preempted, OSError) as error:
            reason = full_disk(error, run.outputs.folder) or error
            with suppress(OSError):  # the disk may be full
                run.outputs.log.info(str(reason), terminal=False)
            raise reason from None


def train_epochs(run: Run) -> Evaluation | None:
    """All epochs that are left, each with its evaluation, its row and its checkpoint; returns the last evaluation."""
    plan, progress, outputs, result = run.plan, run.state.progress, run.outputs, None
    early_stop = run.config.train.early_stop
    for epoch in range(progress.epoch, plan.epochs):
        enough = early_stop is not None and progress.waited(early_stop.min_delta) >= early_stop.patience
        if progress.step == 0 and (enough or plan.steps_in(epoch) <= 0):
            break
        train_epoch(run, epoch)
        done, whole = epoch * plan.steps_per_epoch + progress.step, progress.step == plan.steps_per_epoch
        row: Row = {"epoch": epoch + 1, "step": done, "lr": plan.learning_rate(done - 1)}
        row["train_loss"] = progress.mean_loss()
        due = whole and ((epoch + 1) % run.config.train.eval_every == 0 or epoch + 1 == plan.epochs)
        extra = done >= plan.last_step and not due  # max_steps: a longer run must go on as if this one had not stopped
        if extra:
            save_state(run)
        if due or extra:
            result = evaluate_epoch(run, epoch, candidate=due or progress.best_top1 < 0)
            if result is None:
                preempt(run, f"in the evaluation after epoch {epoch + 1}", saved=extra)
            row |= {"val_loss": result.metrics["loss"], "top1": result.metrics["top1"], "top5": result.metrics["top5"]}
            row["unreadable_val"] = result.metrics.get("unreadable", 0)
        row["unreadable_train"] = progress.unreadable
        row |= run.clock.row(progress.times) | {"skipped_steps": progress.skipped}
        progress.history.append(row)
        if whole:
            progress.finish_epoch()
            if not extra:
                save_state(run)
        outputs.log.info(metrics.sentence(row, plan.epochs, len(run.splits.classes)))
        outputs.scalars(done, {f"epoch/{key}": value for key, value in row.items() if isinstance(value, float)})
        outputs.write_metrics(progress.history)
        if run.processes.sum(bool(run.signals.name)) and done < plan.last_step:
            preempt(run, f"after epoch {epoch + 1}", saved=True)
        if extra:
            break
    return result


class Reading(NamedTuple):
    """What the processes know together after a reading."""

    losses: np.ndarray  # of the steps since the last reading, mean over the processes
    unreadable: int  # images, of all processes
    stop: bool  # a signal came to one of them
    save: bool  # by the clock

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.losses).all())


def train_epoch(run: Run, epoch: int) -> None:
    """Train from where the progress stands to the end of the epoch, or to the last step of the run.

    Losses are read every `plan.read_every` steps only. Where one is not finite, the state goes back to the last
    reading, and the steps since are done again, each of them read: the bad step is then met before its update.
    """
    plan, state, progress, clock = run.plan, run.state, run.state.progress, run.clock
    title = f"epoch {epoch + 1}/{plan.epochs}"
    bar = run.outputs.log.progress_bar(title, plan.micro_batches * plan.micro_batch, progress.step * plan.total_batch)
    feed = batches(run, epoch, plan.micro_batches_of(progress.step).start)
    unread: list[tuple[paddle.Tensor, int]] = []  # losses and unreadable images since the last reading
    read_each_to = progress.step  # read every step up to this index: `go_back` needs an optimizer that has stepped once
    can_go_back = plan.read_every > 1 or run.config.train.nonfinite == "skip"
    if can_go_back:
        state.keep_copy()
    while progress.step < plan.steps_in(epoch):
        step, done = progress.step, epoch * plan.steps_per_epoch + progress.step + 1
        due, images = plan.due(done), len(plan.micro_batches_of(step)) * plan.micro_batch
        read = due.read or step <= read_each_to

        clock.start(progress.times, read)
        state.optimizer.set_lr(plan.learning_rate(done - 1))
        reading = compute_gradients(run, feed, epoch, step, unread, read)
        if reading is None or reading.finite:
            state.update()
        state.optimizer.clear_grad()
        clock.lap("optimizer")
        clock.stop(images)

        if reading is not None and not reading.finite:
            if len(reading.losses) > 1:  # it may be any of these steps
                progress.step, read_each_to = step + 1 - len(reading.losses), step
                again = f"steps {progress.step + 1} to {step + 1} of epoch {epoch + 1} are done again"
                run.outputs.log.info(f"a loss is not finite: {again}, each loss read up to the bad step")
                state.go_back()
                feed.close()
                feed, unread = batches(run, epoch, plan.micro_batches_of(progress.step).start), []
                continue
            explain_or_stop(run, epoch, step)
            state.go_back()
            progress.skipped, read_each_to = progress.skipped + 1, step + 1

        progress.step = step + 1
        bar.update(images)
        if reading is not None:
            unread = []
            if can_go_back:
                state.keep_copy()
            report_and_save(run, epoch, reading, due)
            bar.set_postfix(loss=f"{progress.mean_loss():.4f}", refresh=False)
    feed.close()
    bar.close()
    if progress.loss_count == 0:
        raise UserError(f"No step of epoch {epoch + 1} had a finite loss; see the log, and data.mean and data.std.")


def report_and_save(run: Run, epoch: int, reading: Reading, due: Due) -> None:
    """After a step that was read: count, log, save and stop as is due."""
    progress, when = run.state.progress, f"after step {run.state.progress.step} of epoch {epoch + 1}"
    progress.unreadable += reading.unreadable
    if reading.finite:
        progress.add_losses(reading.losses)
    if due.log:
        log_step(run, epoch, float(reading.losses[-1]))
    save = due.save or reading.save or reading.stop
    if save or progress.step == run.plan.steps_in(epoch):
        check_finite(run.state.model.state_dict(), when)
    if save:
        save_state(run)
    if reading.stop:
        preempt(run, when, saved=True)


def batches(run: Run, epoch: int, start: int) -> Generator[tuple[paddle.Tensor, paddle.Tensor, int]]:
    """Images, soft targets and the number of unreadable images of this process's micro-batches from `start` on."""
    seed, rank = run.config.train.seed, run.processes.rank
    loader = TrainLoader(run.splits.train, run.transform, run.config, epoch, start, rank, run.processes.world)
    smoothing, unreadable = run.config.loss.label_smoothing, 0
    for number, (images, labels) in enumerate(loader, start):
        rng = batch_rng(seed, epoch, number, rank)
        images, targets = mix(images, labels, len(run.splits.classes), run.config.augment, smoothing, rng)
        yield paddle.to_tensor(images), paddle.to_tensor(targets), len(loader.skipped) - unreadable
        unreadable = len(loader.skipped)


def compute_gradients(
    run: Run, feed: Iterator[tuple[paddle.Tensor, paddle.Tensor, int]], epoch: int, step: int, unread: list, read: bool
) -> Reading | None:
    """Forward and backward passes of a step; what all processes agreed on if `read`.

    They wait for each other ahead of the last backward pass, where Gloo would give up on a late one. There is no last
    backward pass where a loss is not finite.
    """
    network, numbers, reading = run.network, run.plan.micro_batches_of(step), None
    loss_of_step, unreadable_of_step = 0.0, 0
    for number in numbers:
        last = number == numbers[-1]
        images, targets, unreadable = next(feed)
        unreadable_of_step += unreadable
        run.clock.lap("data")
        with network.gradients_of(last):
            seed_micro_batch(run, epoch, number)
            loss = network.loss(images, targets) / len(numbers)
            loss_of_step = loss_of_step + loss.detach()
            run.clock.lap("forward")
            if last:
                unread.append((loss_of_step, unreadable_of_step))
                if read:
                    reading = agree(run, unread)
                    run.clock.lap("wait")
                    if not reading.finite:
                        return reading
            network.backward(loss)
        run.clock.lap("backward")
    network.exchange_gradients()
    run.clock.lap("backward")
    return reading


def seed_micro_batch(run: Run, epoch: int, number: int) -> None:
    """Make dropout and stochastic depth a function of (seed, micro-batch, process): there is no state to keep."""
    place = [run.config.train.seed, epoch * run.plan.micro_batches + number, run.processes.rank]
    seed_all(int(np.random.SeedSequence(place).generate_state(1)[0]))


def agree(run: Run, unread: list[tuple[paddle.Tensor, int]]) -> Reading:
    """Wait for the device and for all processes, and tell each other what only one of them knows."""
    minutes = (time.monotonic() - run.outputs.saved_at) / 60
    overdue = run.processes.main and minutes > (run.config.train.save_every_minutes or math.inf)
    losses = paddle.stack([loss for loss, _ in unread]).numpy()
    unreadable = sum(count for _, count in unread)
    sums = run.processes.sum([bool(run.signals.name), overdue, unreadable, *losses])
    return Reading(sums[3:] / run.processes.world, int(sums[2]), stop=sums[0] > 0, save=sums[1] > 0)


def explain_or_stop(run: Run, epoch: int, step: int) -> None:
    """Find the micro-batch that made the loss of a step non-finite, keep it as a file, say where it went wrong.

    Raises:
        UserError: `train.nonfinite` is `stop`, or weights are not finite, so that no later loss would be.
    """
    trained = {name: weight for name, weight in run.state.model.named_parameters() if not weight.stop_gradient}
    check_finite(trained, f"before step {step + 1} of epoch {epoch + 1}")
    numbers = run.plan.micro_batches_of(step)
    with closing(batches(run, epoch, numbers.start)) as feed:
        for number in numbers:
            images, targets, _ = next(feed)
            seed_micro_batch(run, epoch, number)
            with run.network.autocast():
                bad = not np.isfinite(run.network.layer(images, targets).item())
            if bad:
                break
    seed_micro_batch(run, epoch, number)
    where = "computed again, it is finite on this process"
    if bad:
        with run.network.autocast():
            where = nonfinite.first_layer(run.state.model, images)
    sentence = f"the loss of epoch {epoch + 1}, step {step + 1} is not finite: {where}"
    if len(list(run.outputs.folder.glob(f"nonfinite_*_rank{run.processes.rank}.npz"))) < MAX_KEPT:
        path = run.outputs.folder / f"nonfinite_epoch{epoch + 1}_step{step + 1}_rank{run.processes.rank}.npz"
        np.savez(path, images=images.numpy(), targets=targets.numpy())
        sentence += f"; the batch is in {path}"
    run.processes.barrier()
    if run.config.train.nonfinite == "stop":
        raise UserError(f"{sentence}. Lower optimizer.lr, or leave such steps out with train.nonfinite=skip.")
    run.outputs.log.info(f"step skipped, {sentence}")


def check_finite(weights: dict[str, paddle.Tensor], when: str) -> None:
    """Raise `UserError` where weights are not finite: the last checkpoints are good, and no step can mend them."""
    name = nonfinite.first_of(weights)
    if name:
        raise UserError(
            f"{name} is not finite {when}. The checkpoints are from before that; lower optimizer.lr or set "
            "train.clip_grad, and start a new run from one of them with model.weights."
        )


def evaluate_epoch(run: Run, epoch: int, candidate: bool) -> Evaluation | None:
    """Evaluate the moving average, or the weights where there is none.

    Args:
        run: the training.
        epoch: the one that was trained last.
        candidate: keep the weights as `checkpoints/best` where they are the best so far.

    Returns:
        The result, or None if a signal came.
    """
    state, processes, data, progress = run.state, run.processes, run.config.data, run.state.progress
    state.model.eval()
    with state.ema.applied() if state.ema else nullcontext():
        # running statistics are each process's own; to Paddle they are parameters without a gradient
        processes.broadcast([tensor for tensor in state.model.state_dict().values() if tensor.stop_gradient])
        size, rank, world = data.eval_batch_size or data.batch_size, processes.rank, processes.world
        loader = EvalLoader(run.splits.val, run.preprocess, size, rank, world, data.num_workers, tolerate=True)
        runner = model_runner(state.model, run.network.autocast)
        result = evaluate(runner, loader, len(run.splits.val), processes, lambda: bool(run.signals.name))
        top1 = result.metrics["top1"] if result and math.isfinite(result.metrics["loss"]) else -1.0
        if result and candidate and top1 > progress.best_top1:
            progress.best_top1, progress.best_epoch = top1, epoch + 1
            run.outputs.save_best(state.model, result.metrics)
    state.model.train()
    return result


def save_state(run: Run) -> None:
    run.state.progress.seconds = run.seconds()
    run.outputs.save_state(run.state)


def preempt(run: Run, when: str, saved: bool = False) -> NoReturn:
    """Save, and end this process with the exit code after which a scheduler starts it again."""
    if not saved:
        save_state(run)
    run.processes.barrier()
    again = "the state is saved: run the same command again with --resume auto"
    raise Preempted(f"{run.signals.reason} {when}; {again}")


def log_step(run: Run, epoch: int, loss: float) -> None:
    progress, plan, log = run.state.progress, run.plan, run.outputs.log
    done = epoch * plan.steps_per_epoch + progress.step
    lr = plan.learning_rate(done - 1)
    run.outputs.scalars(done, {"train/loss": loss, "train/lr": lr})
    step = f"epoch {epoch + 1} step {progress.step}/{plan.steps_per_epoch}"
    log.info(f"{step} loss {progress.mean_loss():.4f} lr {lr:.3g}", terminal=not log.interactive)


def finish(run: Run, result: Evaluation | None) -> dict:
    """Write summary.json and the last pictures."""
    progress, outputs, model = run.state.progress, run.outputs, run.state.model
    speeds = [row["images_per_second"] for row in progress.history if row["images_per_second"]]
    summary = {
        "top1": next((row["top1"] for row in reversed(progress.history) if "top1" in row), None),
        "best_top1": progress.best_top1 if progress.best_top1 >= 0 else None,
        "best_epoch": progress.best_epoch,
        "epochs": progress.epoch,
        "steps": progress.epoch * run.plan.steps_per_epoch + progress.step,
        "seconds": round(run.seconds(), 1),
        "images_per_second": round(statistics.median(speeds), 2) if speeds else None,
        "params": cost.params(model),
        "macs": cost.macs(model) if outputs.main else None,
    }
    outputs.write_summary(summary)
    outputs.write_metrics(progress.history, last=True)
    if result and outputs.main:
        add_pictures(run, result)
    if progress.best_epoch:
        outputs.log.info(f"best top-1 {100 * progress.best_top1:.2f} % in epoch {progress.best_epoch}")
    outputs.log.info(f"everything is in {outputs.folder}")
    return summary


def add_pictures(run: Run, result: Evaluation) -> None:
    """The confusion matrix and a grid of predictions of the last evaluation, in VisualDL."""
    val, step = run.splits.val, int(run.state.progress.history[-1]["step"] or 0)
    common: dict[str, Any] = {
        "predicted": result.predicted,
        "classes": run.splits.classes,
        "title": str(run.outputs.folder),
    }
    run.outputs.picture("confusion", step, partial(draw_confusion, labels=val.labels, **common))
    run.outputs.picture("predictions", step, partial(draw_predictions, split=val, preprocess=run.preprocess, **common))
