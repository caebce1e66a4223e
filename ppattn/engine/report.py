"""What a run tells while it trains: times, lines of the log, rows of metrics.csv, and summary.json."""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

from ppattn import cost
from ppattn.engine import metrics
from ppattn.engine.build import Run
from ppattn.evaluation import Evaluation
from ppattn.pictures import draw_confusion, draw_predictions


def add_time(run: Run, step: int, seconds: float, warm: bool) -> None:
    """Add up the time of a step; on a GPU only sums that end with a check are exact."""
    waited, run.loader.waited = run.loader.waited, 0.0
    run.state.progress.add(seconds=seconds)
    if warm:
        run.state.progress.add(timed=1, timed_seconds=seconds, timed_images=run.images(step), waited=waited)


def epoch_row(run: Run) -> dict:
    """The row of metrics.csv for the steps since the last one, without evaluation."""
    progress, sums = run.state.progress, run.state.progress.sums
    row = {
        "epoch": -(-progress.step // run.loader.steps_per_epoch),
        "step": progress.step,
        "lr": run.learning_rate(progress.step - 1),
        "train_loss": progress.mean_loss(),
        "unreadable_train": sums["unreadable"],
        "seconds": sums["seconds"],
        "images_per_second": None,
    }
    if "timed" in sums:
        row["images_per_second"] = sums["timed_images"] / sums["timed_seconds"]
        row["step_ms"] = 1000 * sums["timed_seconds"] / sums["timed"]
        row["data_ms"] = 1000 * sums["waited"] / sums["timed"]
    return row


def log_step(run: Run, step: int, loss: float) -> None:
    lr, steps, log = run.learning_rate(step), run.loader.steps_per_epoch, run.outputs.log
    run.outputs.scalars(step + 1, {"train/loss": loss, "train/lr": lr})
    place = f"epoch {step // steps + 1} step {step % steps + 1}/{steps}"
    log.info(f"{place} loss {run.state.progress.mean_loss():.4f} lr {lr:.3g}", terminal=not log.interactive)


def show(run: Run, history: list[dict]) -> None:
    """Tell of the last row."""
    row = history[-1]
    run.outputs.log.info(metrics.sentence(row, run.epochs, len(run.splits.classes)))
    run.outputs.scalars(row["step"], {f"epoch/{key}": value for key, value in row.items() if isinstance(value, float)})
    run.outputs.write_metrics(history)


def summarize(run: Run, history: list[dict], result: Evaluation | None) -> dict:
    """Write summary.json, the last curves and pictures; returns the summary."""
    progress, outputs = run.state.progress, run.outputs
    speeds = [row["images_per_second"] for row in history if row["images_per_second"]]
    summary = {
        "top1": history[-1]["top1"],
        "best_top1": progress.best_top1 if progress.best_top1 >= 0 else None,
        "best_epoch": progress.best_epoch,
        "epochs": progress.step // run.loader.steps_per_epoch,
        "steps": progress.step,
        "seconds": round(time.monotonic() - run.began, 1),
        "images_per_second": round(statistics.median(speeds), 2) if speeds else None,
        "params": cost.params(run.state.model),
        "macs": cost.macs(run.state.model) if outputs.main else None,
    }
    outputs.write_summary(summary)
    outputs.write_metrics(history, last=True)
    if result and outputs.main:
        add_pictures(run, result)
    if progress.best_epoch:
        outputs.log.info(f"best top-1 {100 * progress.best_top1:.2f} % in epoch {progress.best_epoch}")
    outputs.log.info(f"everything is in {outputs.folder}")
    return summary


def add_pictures(run: Run, result: Evaluation) -> None:
    """The confusion matrix and a grid of predictions of the last evaluation, in VisualDL."""
    val, step = run.splits.val, run.state.progress.step
    common: dict[str, Any] = {
        "predicted": result.predicted,
        "classes": run.splits.classes,
        "title": str(run.outputs.folder),
    }
    run.outputs.picture("confusion", step, partial(draw_confusion, labels=val.labels, **common))
    run.outputs.picture("predictions", step, partial(draw_predictions, split=val, preprocess=run.preprocess, **common))
