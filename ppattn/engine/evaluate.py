"""Accuracy of a classifier over a whole split, each image counted once, and the files that show it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ppattn.data import EvalLoader, Preprocess, Splits, build_datasets
from ppattn.data.classes import same_classes
from ppattn.data.splits import Split
from ppattn.errors import UserError, optional
from ppattn.files.atomic import write_json, write_rows
from ppattn.plots.evaluation import confusion, draw_confusion, draw_predictions
from ppattn.runtime.processes import Processes
from ppattn.settings import Config
from ppattn.text import cell
from ppattn.trained import Provenance

if TYPE_CHECKING:
    from paddle import nn


@dataclass
class Evaluation:
    """`metrics` are what eval/metrics.json holds; `predicted` [n] is -1 where an image was not evaluated."""

    metrics: dict
    predicted: np.ndarray

    def columns(self) -> dict:
        """For a row of metrics.csv."""
        row = {"val_loss": self.metrics["loss"], "top1": self.metrics["top1"], "top5": self.metrics["top5"]}
        if "majority" in self.metrics:
            row["majority"] = self.metrics["majority"]
        return row | {"unreadable_val": self.metrics.get("unreadable", 0)}


def evaluate(
    run: Callable[[np.ndarray], np.ndarray],
    loader: Iterable,
    split: Split,
    processes: Processes | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Top-1, top-5 (top-K with fewer classes), plain cross-entropy and speed; of uneven splits the majority class, too.

    Sums are exact: every image weighs the same whatever the batch it came in. With several processes each evaluates
    its part and the counts are added. An image that the loader left out as unreadable counts as wrong.

    Args:
        run: images [b, C, H, W] float32 to logits or log-probabilities [b, K].
        loader: yields (images, labels, indices) of this process's part.
        split: all of them.
        processes: those that evaluate together; default: this one alone.
        stopped: asked after every batch; true ends the evaluation.

    Returns:
        The result, or None where any process was stopped.

    Raises:
        UserError: where no image can be read.
    """
    processes = processes or Processes()
    predicted = np.zeros(len(split))  # class + 1, so that parts of several processes add up
    sums = np.zeros(3)
    start = warm = last = time.perf_counter()
    timed = 0  # images after the first batch, which warms up
    aborted = False
    for number, (images, labels, indices) in enumerate(loader):
        if not len(labels):
            continue
        classes, batch_sums = score(np.asarray(run(images), "float64"), labels)
        predicted[indices] = classes + 1
        sums += batch_sums
        last = time.perf_counter()
        if number:
            timed += len(labels)
        else:
            warm = last
        if stopped():
            aborted = True
            break
    top1, top5, loss, aborted = processes.sum([*sums, aborted]).tolist()
    if aborted:
        return None
    predicted = processes.sum(predicted).astype("int64") - 1
    seconds = time.perf_counter() - start
    speed = timed / (last - warm) * processes.world if timed else None
    return Evaluation(summary(split, predicted, top1, top5, loss, seconds, speed), predicted)


def score(logits: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Predicted classes [b] of logits [b, K], and the sums of top-1 hits, top-5 hits and cross-entropies."""
    order = np.argsort(-logits, axis=1, kind="stable")[:, :5]
    hits = order == labels[:, None]
    peak = logits.max(axis=1)
    with np.errstate(invalid="ignore"):  # logits that are not finite make the loss so
        normaliser = peak + np.log(np.exp(logits - peak[:, None]).sum(axis=1))
    losses = normaliser - logits[np.arange(len(labels)), labels]
    return order[:, 0], np.array([hits[:, 0].sum(), hits.sum(), losses.sum()])


def summary(
    split: Split, predicted: np.ndarray, top1: float, top5: float, loss: float, seconds: float, speed: float | None
) -> dict:
    """What eval/metrics.json holds, from sums over all images; `speed` in images/s, None where one batch was all."""
    readable = int((predicted >= 0).sum())
    if not readable:
        raise UserError(f"None of the {len(split)} images to evaluate on can be read.")
    metrics = {
        "top1": top1 / len(split),
        "top5": top5 / len(split),
        "loss": loss / readable,
        "images": len(split),
        "images_per_second": round(speed or readable / seconds, 2),
        "seconds": round(seconds, 3),
    }
    if readable < len(split):
        metrics["unreadable"] = len(split) - readable
    if split.uneven:
        metrics["majority"] = split.majority()
    return metrics


def accuracies(metrics: dict, classes: int) -> str:
    """Top-1 and top-5 for people, without the top-5 of five classes or fewer, which is always 100 %."""
    majority = f" (majority class {100 * metrics['majority']:.2f} %)" if "majority" in metrics else ""
    top5 = f", top-5 {100 * metrics['top5']:.2f} %" if classes > 5 else ""
    return f"top-1 {100 * metrics['top1']:.2f} %{majority}{top5}"


def model_runner(model: nn.Layer, autocast: Callable = nullcontext) -> Callable[[np.ndarray], np.ndarray]:
    """Forward pass of a Paddle model in eval mode as a function of numpy arrays."""
    import paddle

    def run(images: np.ndarray) -> np.ndarray:
        with paddle.no_grad(), autocast():
            return model(paddle.to_tensor(images)).astype("float32").numpy()

    return run


def mirrored(run: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """The mean of `run`'s logits for an image and for its mirror image, images [b, C, H, W] as in `evaluate`."""
    return lambda images: (run(images) + run(np.ascontiguousarray(images[..., ::-1]))) / 2


def evaluate_split(
    run: Callable[[np.ndarray], np.ndarray],
    config: Config,
    classes: list[str],
    preprocess: Preprocess,
    provenance: Provenance | None = None,
) -> tuple[Evaluation, Splits]:
    """Evaluate on the validation split of the config's data set.

    Args:
        run: see `evaluate`. classes, preprocess: the model's own.
        provenance: where the model was trained; its training images are then counted in the metrics as `trained_on`.

    Raises:
        UserError: where the data set has other classes than the model, or the model's answers are not finite.
    """
    splits = build_datasets(config)
    if not same_classes(classes, splits.classes):
        raise UserError(
            f"The model knows {len(classes)} classes ({', '.join(classes[:3])}, ...), the data has "
            f"{len(splits.classes)} ({', '.join(splits.classes[:3])}, ...): evaluate it on the data it was made for."
        )
    size = config.data.eval_batch_size or config.data.batch_size
    loader = EvalLoader(splits.val, preprocess, size, num_workers=config.data.num_workers)
    result = evaluate(run, loader, splits.val)
    assert result is not None  # nothing stops it
    if not np.isfinite(result.metrics["loss"]):
        raise UserError("The model's answers to the validation images are not finite numbers: its weights are damaged.")
    if provenance and (seen := provenance.leaked_images(splits)):
        result.metrics["trained_on"] = seen
    return result, splits


def write_evaluation(
    folder: Path, result: Evaluation, split: Split, classes: list[str], preprocess: Any, title: str = ""
) -> None:
    """metrics.json, per_class.csv, confusion_matrix.png and, of images, predictions.png in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "metrics.json", result.metrics)
    write_per_class(folder / "per_class.csv", split.labels, result.predicted, classes)
    draw_confusion(folder / "confusion_matrix.png", split.labels, result.predicted, classes, title)
    if split.input_kind == "images":
        draw_predictions(folder / "predictions.png", result.predicted, split, classes, preprocess, title)


def write_per_class(path: Path, labels: np.ndarray, predicted: np.ndarray, classes: list[str]) -> None:
    """A row per class: images, recall (the accuracy within the class), precision, F1, and what it is taken for.

    Images that could not be read (-1) are wrong here as they are in top-1; where there are any, a column counts them.
    """
    with optional("train"):
        from sklearn.metrics import precision_recall_fscore_support

    every = np.arange(len(classes))
    precision, recall, f1, count = precision_recall_fscore_support(labels, predicted, labels=every, zero_division=0.0)
    wrong, names = confusion(labels, predicted, classes)
    unreadable = wrong[:, len(classes) :]
    wrong = wrong[:, : len(classes)]
    np.fill_diagonal(wrong, 0)
    columns = ["class", "images", "accuracy", "precision", "f1", "mostly_taken_for", "times"]
    rows: list[list] = [[*columns, *names[len(classes) :]]]
    for k, name in enumerate(classes):
        other, times = int(wrong[k].argmax()), int(wrong[k].max())
        numbers = [round(float(v), 4) for v in (recall[k], precision[k], f1[k])]
        taken_for = cell(classes[other]) if times else ""
        rows.append([cell(name), int(count[k]), *numbers, taken_for, times, *unreadable[k]])
    write_rows(path, rows)
