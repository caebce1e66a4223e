"""Training, top to bottom: the epochs, one epoch, and what a run leaves behind.

Every random number is a function of (seed, epoch, step, process), so a run that is stopped anywhere and resumed ends
with the same weights, bit for bit, as one that was not.
"""

from __future__ import annotations

import math
import statistics
import time
from contextlib import closing, nullcontext, suppress
from functools import partial

import numpy as np
import paddle
from paddle.distributed.fleet.utils.hybrid_parallel_util import fused_allreduce_gradients

from ppattn import cost
from ppattn.config import Config
from ppattn.data import batch_rng, eval_loader, mix, train_loader
from ppattn.engine import checkpoint, log
from ppattn.engine.evaluate import Evaluation, evaluate, model_runner
from ppattn.engine.optim import lr_at
from ppattn.engine.pictures import draw_confusion, draw_predictions
from ppattn.engine.session import Session, prepare
from ppattn.engine.step import first_nonfinite, seed_step
from ppattn.engine.watch import Signals
from ppattn.errors import Preempted, UserError

AGAIN = "the state is saved: run the same command again with --resume auto"


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
        Preempted: SIGTERM or SIGINT came; the state is saved.
    """
    s = prepare(config, resume, command)
    with Signals(s.processes.world > 1) as signals, closing(s.book):
        try:
            return finish(s, train_epochs(s, signals))
        except OSError as error:
            raise checkpoint.cannot_write(error.filename or s.run, error) from None
        except (UserError, Preempted) as reason:
            with suppress(OSError):  # the disk may be full
                s.book.say(str(reason), terminal=False)
            raise


def train_epochs(s: Session, signals: Signals) -> Evaluation | None:
    """All epochs that are left, each with its evaluation, its row and its checkpoint; the last evaluation."""
    progress, result, drawn = s.progress, None, time.monotonic()
    early = s.config.train.early_stop
    for epoch in range(progress.epoch, s.epochs):
        enough = early is not None and progress.waited >= early.patience
        if progress.step == 0 and (enough or epoch * s.steps_per_epoch >= s.last_step):
            break
        train_epoch(s, epoch, signals)
        whole, at = progress.step == s.steps_per_epoch, epoch * s.steps_per_epoch + progress.step
        row = {"epoch": epoch + 1, "step": at, "lr": rate(s, at - 1), "train_loss": progress.mean_loss()}
        due = whole and ((epoch + 1) % s.config.train.eval_every == 0 or epoch + 1 == s.epochs)
        extra = at >= s.last_step and not due
        if extra:
            keep(s)  # max_steps: a longer run goes on from here as if this one had not stopped
        if due or extra:
            first = progress.best_top1 < 0
            result = judge(s, signals, keeping=due or first)
            if result is None:
                leave(s, f"{signals.reason} in the evaluation after epoch {epoch + 1}", saved=extra)
            row |= {"val_loss": result.metrics["loss"], "top1": result.metrics["top1"], "top5": result.metrics["top5"]}
            row["unreadable_val"] = result.metrics.get("unreadable", 0)
            better = row["top1"] > progress.best_top1 + (early.min_delta if early else 0.0)
            progress.waited = 0 if better else progress.waited + 1
            if row["top1"] > progress.best_top1 and (due or first):
                progress.best_top1, progress.best_epoch = row["top1"], epoch + 1
        row["unreadable_train"] = progress.unreadable
        row |= s.clock.row(progress.times) | {"skipped_steps": progress.skipped}
        progress.history.append(row)
        if whole:
            progress.finish_epoch()
            if not extra:
                keep(s)
        s.book.say(in_words(row, s.epochs, len(s.splits.classes)))
        s.book.scalars(at, {f"epoch/{key}": value for key, value in row.items() if isinstance(value, float)})
        if s.processes.main:
            log.write_metrics(s.run, progress.history)
            if time.monotonic() - drawn > 60:
                log.draw_curves(s.run / "curves.png", progress.history)
                drawn = time.monotonic()
        if s.processes.total(bool(signals.name)) and at < s.last_step:
            leave(s, f"{signals.reason} after epoch {epoch + 1}", saved=True)
        if extra:
            break
    return result


def batches(s: Session, epoch: int, start: int):
    """(number in the epoch, images, soft targets, unreadable images so far) of the micro-batches from `start` on."""
    loader = train_loader(s.splits.train, s.transform, s.config, epoch, start, s.processes.rank, s.processes.world)
    smoothing = s.config.loss.label_smoothing
    for micro, (images, labels) in enumerate(loader, start):
        rng = batch_rng(s.config.train.seed, epoch, micro, s.processes.rank)
        images, targets = mix(images, labels, len(s.splits.classes), s.config.augment, smoothing, rng)
        yield micro, paddle.to_tensor(images), paddle.to_tensor(targets), len(loader.skipped)


def forward(s: Session, layer, epoch: int, micro: int, images, targets):
    """The loss of a micro-batch, under random numbers that depend on nothing but its place."""
    seed_step(s.config.train.seed, epoch * s.micro_per_epoch + micro, s.processes.rank)
    with s.autocast():
        return layer(images, targets)


def rate(s: Session, at: int) -> float:
    return lr_at(at, s.config, s.steps_per_epoch, s.total_batch)


def train_epoch(s: Session, epoch: int, signals: Signals) -> None:
    """Train from where the progress stands to the end of the epoch, or to the last step of the run."""
    settings, progress, clock, world = s.config.train, s.progress, s.clock, s.processes.world
    at = epoch * s.steps_per_epoch + progress.step
    images_per_micro = s.config.data.batch_size * world
    bar = s.book.bar(
        f"epoch {epoch + 1}/{s.epochs}", s.micro_per_epoch * images_per_micro, progress.step * s.total_batch
    )
    feed = batches(s, epoch, progress.step * settings.accumulate)
    unread: list = []  # losses of steps since the last reading
    skipped = told = 0  # unreadable images of this process: so far, and up to the last reading
    s.model.train()
    while progress.step < s.steps_per_epoch and at < s.last_step:
        step, at = progress.step, at + 1
        saving = settings.save_every_steps and at % settings.save_every_steps == 0
        logging = at % settings.log_every == 0
        ending = step + 1 == s.steps_per_epoch or at == s.last_step
        reading = saving or logging or ending or at % s.read_every == 0
        micros = min(settings.accumulate, s.micro_per_epoch - step * settings.accumulate)
        clock.start(progress.times, reading)
        s.optimizer.set_lr(rate(s, at - 1))
        stop = bad = False
        losses: list = []
        before = [t.clone() for t in statistics_of(s.model)] if settings.nonfinite == "skip" else []
        for part in range(micros):
            micro, images, targets, skipped = next(feed)
            clock.lap("data")
            last = part + 1 == micros
            with nullcontext() if world == 1 or (last and not s.model.recompute) else s.parallel.no_sync():
                loss = forward(s, s.parallel, epoch, micro, images, targets) / micros
                losses.append(loss.detach())
                clock.lap("forward")
                if last:
                    unread.append(sum(losses))
                    if reading:
                        stop, late, failed, values = exchange(s, signals, skipped - told, unread)
                        saving, told, progress.unreadable = saving or late, skipped, progress.unreadable + failed
                        bad = not np.isfinite(values).all()
                        clock.lap("wait")
                        if bad:
                            break
                (s.scaler.scale(loss) if s.scaler else loss).backward()
            clock.lap("backward")
        if world > 1 and s.model.recompute and not bad:  # DataParallel cannot exchange gradients while it recomputes
            fused_allreduce_gradients([p for p in s.model.parameters() if not p.stop_gradient], None)
            clock.lap("backward")
        if bad:
            skip_or_stop(s, epoch, step + 1 - len(values) + int(np.isfinite(values).argmin()))
            for tensor, value in zip(statistics_of(s.model), before, strict=True):
                tensor.set_value(value)
        else:
            if s.scaler:
                s.scaler.step(s.optimizer)
                s.scaler.update()
            else:
                s.optimizer.step()
            if s.ema:
                s.ema.update()
        s.optimizer.clear_grad()
        clock.lap("optimizer")
        clock.stop(micros * images_per_micro)
        progress.step = step + 1
        bar.update(micros * images_per_micro)
        if not reading:
            continue
        unread = []
        if not bad:
            progress.loss_sum, progress.loss_count = (
                progress.loss_sum + float(values.sum()),
                progress.loss_count + len(values),
            )
        bar.set_postfix(loss=f"{progress.mean_loss():.4f}", refresh=False)
        if logging:
            tell_step(s, epoch, at, values[-1])
        if saving or stop:
            keep(s)
        if stop:
            leave(s, f"{signals.reason} in epoch {epoch + 1} after step {progress.step}", saved=True)
    feed.close()
    bar.close()


def exchange(s: Session, signals: Signals, skipped: int, unread: list) -> tuple[bool, bool, int, np.ndarray]:
    """Wait for all processes and agree.

    Returns:
        Whether one was told to stop, whether it is time to save, the unreadable images of all since the last time, and
        the mean losses of the steps.
    """
    late = (time.monotonic() - s.saved_at) / 60 > (s.config.train.save_every_minutes or math.inf)
    losses = paddle.stack(unread).numpy()
    sums = s.processes.total([bool(signals.name), late and s.processes.main, skipped, *losses])
    return sums[0] > 0, sums[1] > 0, int(sums[2]), sums[3:] / s.processes.world


def statistics_of(model) -> list:
    """What a forward pass may change, the running statistics of batch norms; what never changes is among it."""
    return [t for t in model.state_dict().values() if t.stop_gradient]  # to Paddle, running statistics are parameters


def skip_or_stop(s: Session, epoch: int, step: int) -> None:
    """Find the micro-batch that made the loss of a step non-finite, keep it as a file, say where it went wrong."""
    first = step * s.config.train.accumulate
    last = min(first + s.config.train.accumulate, s.micro_per_epoch) - 1
    for micro, images, targets, _ in batches(s, epoch, first):  # noqa: B007
        bad = not np.isfinite(forward(s, s.step_layer, epoch, micro, images, targets).item())
        if bad or micro == last:
            break
    path = s.run / f"nonfinite_epoch{epoch + 1}_step{step + 1}_rank{s.processes.rank}.npz"
    np.savez(path, images=images.numpy(), targets=targets.numpy())
    seed_step(s.config.train.seed, epoch * s.micro_per_epoch + micro, s.processes.rank)
    where = first_nonfinite(s.model, images) if bad else "computed again, it is finite on this process"
    sentence = f"the loss of epoch {epoch + 1}, step {step + 1} is not finite: {where}; the batch is in {path}"
    s.processes.meet()
    if s.config.train.nonfinite == "stop":
        raise UserError(f"{sentence}. Lower optimizer.lr, or leave such steps out with train.nonfinite=skip.")
    s.book.say(f"step skipped, {sentence}")
    s.progress.skipped += 1


def judge(s: Session, signals: Signals, keeping: bool) -> Evaluation | None:
    """Evaluate the moving average, or the weights where there is none, and if `keeping`, keep the best.

    Returns:
        The result, or None if a signal came.
    """
    s.model.eval()
    with s.ema.applied() if s.ema else nullcontext():
        s.processes.share(statistics_of(s.model))
        size = s.config.data.eval_batch_size or s.config.data.batch_size
        workers = s.config.data.num_workers
        loader = eval_loader(
            s.splits.val, s.preprocess, size, s.processes.rank, s.processes.world, workers, tolerate=True
        )
        runner = model_runner(s.model, s.autocast)
        result = evaluate(runner, loader, len(s.splits.val), s.processes, lambda: bool(signals.name))
        if keeping and result and s.processes.main and result.metrics["top1"] > s.progress.best_top1:
            checkpoint.save_best(s.run / "checkpoints", s.model, result.metrics, s.facts)
    return result


def keep(s: Session) -> None:
    """Write `latest`."""
    s.progress.seconds = s.seconds_before + time.monotonic() - s.began
    if s.processes.main:
        checkpoint.save_state(s.run / "checkpoints", s.model, s.optimizer, s.ema, s.scaler, s.progress, s.facts)
    s.saved_at = time.monotonic()


def leave(s: Session, why: str, saved: bool = False) -> None:
    """Save, and end this process so that a scheduler starts it again."""
    if not saved:
        keep(s)
    s.processes.meet()
    raise Preempted(f"{why}; {AGAIN}")


def tell_step(s: Session, epoch: int, at: int, loss: float) -> None:
    s.book.scalars(at, {"train/loss": float(loss), "train/lr": rate(s, at - 1)})
    s.book.say(
        f"epoch {epoch + 1} step {s.progress.step}/{s.steps_per_epoch} loss {s.progress.mean_loss():.4f} "
        f"lr {rate(s, at - 1):.3g}",
        terminal=not s.book.terminal,
    )


def in_words(row: dict, epochs: int, classes: int) -> str:
    """A row of metrics.csv as a line for people, without the top-5 of five classes or fewer, which is always 100 %."""
    text = f"epoch {row['epoch']}/{epochs}: train loss {row['train_loss']:.4f}"
    if "top1" in row:
        text += f", val loss {row['val_loss']:.4f}, top-1 {100 * row['top1']:.2f} %"
        text += f", top-5 {100 * row['top5']:.2f} %" if classes > 5 else ""
    unreadable = row["unreadable_train"] + row.get("unreadable_val", 0)
    text += f", {unreadable} images could not be read" if unreadable else ""
    return text + (f", {row['images_per_second']:.0f} img/s" if row["images_per_second"] else "")


def finish(s: Session, result: Evaluation | None) -> dict:
    """Write summary.json and the last pictures."""
    history, best = s.progress.history, s.progress.best_top1
    speeds = [row["images_per_second"] for row in history if row["images_per_second"]]
    summary = {
        "top1": next((row["top1"] for row in reversed(history) if "top1" in row), None),
        "best_top1": best if best >= 0 else None,
        "best_epoch": s.progress.best_epoch,
        "epochs": s.progress.epoch,
        "steps": s.progress.epoch * s.steps_per_epoch + s.progress.step,
        "seconds": round(s.seconds_before + time.monotonic() - s.began, 1),
        "images_per_second": round(statistics.median(speeds), 2) if speeds else None,
        "params": sum(math.prod(p.shape) for p in s.model.parameters()),
        "macs": None,
    }
    if s.processes.main:
        summary["macs"] = cost.macs(s.model)
        log.write_json(s.run / "summary.json", summary)
        log.write_metrics(s.run, history)
        log.draw_curves(s.run / "curves.png", history)
        if result:
            show(s, result)
    s.book.say(f"best top-1 {100 * best:.2f} % in epoch {s.progress.best_epoch}; everything is in {s.run}")
    return summary


def show(s: Session, result: Evaluation) -> None:
    """The confusion matrix and a grid of predictions of the last evaluation, in VisualDL."""
    at, title = s.progress.history[-1]["step"], str(s.run)
    labels, predicted, classes = s.splits.val.labels, result.predicted, s.splits.classes
    s.book.picture(
        "confusion",
        at,
        partial(draw_confusion, labels=labels, predicted=predicted, classes=classes, title=title),
    )
    grid = partial(
        draw_predictions,
        predicted=predicted,
        split=s.splits.val,
        classes=classes,
        preprocess=s.preprocess,
        title=title,
    )
    s.book.picture("predictions", at, grid)
