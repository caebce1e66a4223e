"""Log lines, metrics.csv and summary.json of a run."""

import io
import statistics
import time
from contextlib import suppress
from functools import partial
from typing import Any

from ppattn import cost
from ppattn.data.images import decode
from ppattn.engine.build import Run
from ppattn.engine.evaluate import SCORES, Evaluation, describe_accuracies
from ppattn.files.atomic import write_json, write_rows
from ppattn.plots.curves import draw_curves
from ppattn.plots.evaluation import draw_confusion, draw_predictions

CURVES_EVERY = 60.0  # seconds
ROUNDED = {"lr": 10, "train_loss": 8, "val_loss": 8} | dict.fromkeys(SCORES, 6)  # digits after the point; others: 3


def epoch_row(run: Run) -> dict:
    """The row of metrics.csv for the steps since the last one, without evaluation."""
    progress, sums = run.state.progress, run.state.progress.sums
    epoch, lr = -(-progress.step // run.loader.steps_per_epoch), run.learning_rate(progress.step - 1)
    row: dict[str, Any] = {"epoch": epoch, "step": progress.step, "lr": lr, "train_loss": progress.mean_loss()}
    row |= {"unreadable_train": sums["unreadable"], "seconds": sums["seconds"], "images_per_second": None}
    if "timed" in sums:
        row["images_per_second"] = sums["timed_images"] / sums["timed_seconds"]
        row["step_ms"] = 1000 * sums["timed_seconds"] / sums["timed"]
        row["data_ms"] = 1000 * sums["waited"] / sums["timed"]
    return row


def log_step(run: Run, step: int, loss: float) -> None:
    lr, log = run.learning_rate(step), run.outputs.log
    run.outputs.scalars(step + 1, {"train/loss": loss, "train/lr": lr})
    epoch, number = divmod(step, run.loader.steps_per_epoch)
    position = f"epoch {epoch + 1} step {number + 1}/{run.loader.steps_per_epoch}"
    log.info(f"{position} loss {run.state.progress.mean_loss():.4f} lr {lr:.3g}", terminal=not log.interactive)


def log_row(run: Run, history: list[dict]) -> None:
    """Log the last row."""
    row = history[-1]
    run.outputs.log.info(epoch_sentence(row, run.epochs, len(run.splits.classes)))
    run.outputs.scalars(row["step"], {f"epoch/{key}": value for key, value in row.items() if isinstance(value, float)})
    write_metrics(run, history)


def write_metrics(run: Run, rows: list[dict], last: bool = False) -> None:
    """metrics.csv, a row per epoch, and once a minute or as the `last` time curves.png."""
    outputs, columns = run.outputs, list(dict.fromkeys(key for row in rows for key in row))
    if outputs.main:
        rounded = [{k: round(v, ROUNDED.get(k, 3)) if isinstance(v, float) else v for k, v in r.items()} for r in rows]
        write_rows(outputs.folder / "metrics.csv", [columns, *([row.get(k) for k in columns] for row in rounded)])
        if last or time.monotonic() - outputs.drawn_at > CURVES_EVERY:
            draw_curves(outputs.folder / "curves.png", rows)
            outputs.drawn_at = time.monotonic()


def summarize(run: Run, history: list[dict], result: Evaluation | None) -> dict:
    """Write summary.json, the last curves and pictures; returns the summary."""
    progress, outputs = run.state.progress, run.outputs
    speeds = [row["images_per_second"] for row in history if row["images_per_second"]]
    macs = None
    with suppress(Exception):  # a layer of one's own need not be traceable
        macs = cost.macs(run.state.model) if outputs.main else None
    best = progress.best_top1 if progress.best_epoch and run.splits.classes else None
    summary = {"top1": history[-1].get("top1"), "best_top1": best, "best_epoch": progress.best_epoch}
    summary |= {"epochs": progress.step // run.loader.steps_per_epoch, "steps": progress.step}
    summary |= {"seconds": round(time.monotonic() - run.began, 1)}
    summary |= {"images_per_second": round(statistics.median(speeds), 2) if speeds else None}
    summary |= {"params": cost.params(run.state.model), "macs": macs, "train_pflop": macs and train_pflop(run, macs)}
    summary |= {key: history[-1][key] for key in SCORES[2:] if key in history[-1]}
    write_metrics(run, history, last=True)
    if outputs.main:
        write_json(outputs.folder / "summary.json", summary)
        if result and outputs.visualdl and run.splits.classes:
            add_pictures(run, result, outputs.visualdl)
    if progress.best_epoch and run.splits.classes:
        outputs.log.info(f"best checkpoint: epoch {progress.best_epoch}, top-1 {100 * progress.best_top1:.2f} %")
    outputs.log.info(f"everything is in {outputs.folder}")
    return summary


def train_pflop(run: Run, macs: int) -> float:
    """10^15 operations of the run so far: 6 per image and MAC of the model, without teacher and optimizer."""
    loader = run.loader
    done = run.state.progress.step / loader.steps_per_epoch
    resized = min(done, loader.resized_until / loader.per_epoch)
    total = (done - resized) * macs
    if resized:
        total += resized * cost.macs(run.state.model, loader.resized.img_size)
    return 6e-15 * loader.per_epoch * loader.size * loader.world * total


def add_pictures(run: Run, result: Evaluation, writer: Any) -> None:
    """The confusion matrix and a grid of predictions of the last evaluation, in VisualDL."""
    val, classes, title = run.splits.val, run.splits.classes, str(run.outputs.folder)
    if val.table is not None:
        return
    pictures = {"confusion": partial(draw_confusion, labels=val.labels)}
    if val.input_kind == "images":
        pictures["predictions"] = partial(draw_predictions, split=val, preprocess=run.preprocess)
    for tag, draw in pictures.items():
        draw(buffer := io.BytesIO(), predicted=result.predicted, classes=classes, title=title)
        writer.add_image(tag, decode(buffer.getvalue(), tag), run.state.progress.step)


def epoch_sentence(row: dict, epochs: int, classes: int) -> str:
    """A row as a line of the log."""
    text = f"epoch {row['epoch']}/{epochs}: train loss {row['train_loss']:.4f}"
    if "val_loss" in row:
        text += f", val loss {row['val_loss']:.4f}, {describe_accuracies(row, classes)}"
    unreadable = row["unreadable_train"] + row.get("unreadable_val", 0)
    text += f", {unreadable} images could not be read" if unreadable else ""
    return text + (f", {row['images_per_second']:.0f} img/s" if row["images_per_second"] else "")
