"""Accuracy of a classifier over a whole split, each image counted once, and the files that show it."""

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn

from ppattn.backbones.base import Backbone
from ppattn.data import EvalLoader, Preprocess, Splits, build_datasets
from ppattn.data.classes import class_numbers
from ppattn.data.splits import Split
from ppattn.errors import UserError, optional_package
from ppattn.files.atomic import write_json, write_rows, write_text
from ppattn.plots.evaluation import confusion, draw_confusion, draw_predictions, errors_page
from ppattn.runtime.processes import Processes
from ppattn.settings import Config
from ppattn.text import csv_cell
from ppattn.trained import Provenance

logger = logging.getLogger("ppattn.engine")

Runner = Callable[[np.ndarray], np.ndarray]
Stopped = Callable[[], bool]
SCORES = ("top1", "top5", "map", "balanced", "f1", "majority", "cosine")


@dataclass
class Evaluation:
    """`metrics` as in eval/metrics.json; `predicted` [n], -1 where an image was not evaluated; `scores`: probabilities
    of the predicted class and of the label [n, 2], or of all labels [n, K] of such a split."""

    metrics: dict
    predicted: np.ndarray
    scores: np.ndarray | None = None

    @property
    def score(self) -> float:
        """What the best checkpoint is chosen by: top-1, or without labels the cosine."""
        return self.metrics["cosine" if "cosine" in self.metrics else "top1"]

    def columns(self) -> dict:
        """For a row of metrics.csv."""
        row = {key: self.metrics[key] for key in SCORES if key in self.metrics}
        return {"val_loss": self.metrics["loss"]} | row | {"unreadable_val": self.metrics.get("unreadable", 0)}


def evaluate(
    run: Runner, loader: Iterable, split: Split, processes: Processes | None = None, stopped: Stopped = lambda: False
) -> Evaluation | None:
    """Top-1, top-5 of more than five classes, balanced accuracy, macro F1, plain cross-entropy and speed.

    `majority` is the share of the largest class, the balanced accuracy the mean recall of the classes with images,
    macro F1 the mean over the classes with images or predictions. Every image weighs the same whatever the batch it
    came in; an unreadable one counts as wrong. `UserError` where none can be read.

    Args:
        run: images [b, C, H, W] float32 to logits or log-probabilities [b, K].
        loader: yields (images, labels, indices) of this process's part of the split.
        processes: those that evaluate together and add their counts; default: this one alone.
        stopped: asked after every batch; where it is true in any process, the result is None.
    """
    processes, table = processes or Processes(), split.table
    predicted = np.zeros(len(split))  # class + 1, so that parts of several processes add up
    scores = np.zeros((len(split), 2 if table is None else table.shape[1]), np.float32)
    sums, count, aborted = np.zeros(3), 0, False
    start, ticks = time.perf_counter(), list[tuple[float, int]]()  # end of each batch, and its images
    for images, labels, indices in loader:
        if not len(labels):
            continue
        logits = np.asarray(run(images), "float64")
        found = score(logits, labels) if table is None else score_several(logits, table[labels])
        classes, batch_sums, scores[indices] = found
        predicted[indices], count = classes + 1, logits.shape[1]
        sums += batch_sums
        ticks.append((time.perf_counter(), len(labels)))
        if aborted := stopped():
            break
    top1, top5, loss, more, aborted = processes.sum([*sums, count > 5 and table is None, aborted]).tolist()
    if aborted:
        return None
    predicted, scores = processes.sum(predicted).astype("int64") - 1, processes.sum(scores).astype(np.float32)
    readable, seconds = int((predicted >= 0).sum()), time.perf_counter() - start
    counted = readable_images(split, readable)
    speed = readable / seconds
    if len(ticks) > 1:  # the first batch warms up
        speed = sum(images for _, images in ticks[1:]) / (ticks[-1][0] - ticks[0][0]) * processes.world
    metrics = {"top1": top1 / len(split), **({"top5": top5 / len(split)} if more else {})}
    if table is None:
        _, recall, _, f1 = by_class(split.labels, predicted)
        metrics |= {"balanced": float(np.nanmean(recall)), "f1": float(np.nanmean(f1))}
    else:
        _, precision, *_, half = by_label(table[split.labels], scores)
        metrics |= {"map": float(np.nanmean(precision)), "f1": float(np.nanmean(half))}
    metrics |= {"majority": split.majority(), "loss": loss / readable, **counted}
    metrics |= {"images_per_second": round(speed, 2), "seconds": round(seconds, 3)}
    return Evaluation(metrics, predicted, scores)


def readable_images(split: Split, readable: int) -> dict[str, int]:
    """The metrics `images` and, if there are any, `unreadable`; raises `UserError` where none can be read."""
    if not readable:
        raise UserError(f"None of the {len(split)} images to evaluate on can be read.")
    return {"images": len(split)} | ({"unreadable": len(split) - readable} if readable < len(split) else {})


def compare_features(
    teacher: Backbone,
    model: Backbone,
    loader: Iterable,
    split: Split,
    autocast: Callable = nullcontext,
    processes: Processes | None = None,
    stopped: Stopped = lambda: False,
) -> Evaluation | None:
    """`evaluate` where there are no labels: `cosine` of the final features to the teacher's, and `loss`,
    |student - teacher|^2 / |teacher|^2; of every image the mean for pooled features and for tokens of the last map."""
    processes, sums, aborted = processes or Processes(), np.zeros(3), False
    for images, labels, _ in loader:
        if not len(labels):
            continue
        with paddle.no_grad(), autocast():
            found = [one.final_features(paddle.to_tensor(images))[:2] for one in (model, teacher)]
        for ours, theirs in zip(*found, strict=True):
            both = ours[:, : theirs.shape[1]], theirs[:, : ours.shape[1]]  # without what DINO's classifiers append
            s, t = (x.astype("float32").numpy().astype("float64").reshape(*x.shape[:2], -1) for x in both)
            cosine = (s * t).sum(1) / np.maximum(np.sqrt((s * s).sum(1) * (t * t).sum(1)), 1e-30)
            error = ((s - t) ** 2).sum((1, 2)) / np.maximum((t * t).sum((1, 2)), 1e-30)
            sums += cosine.mean(1).sum() / 2, error.sum() / 2, len(labels) / 2
        if aborted := stopped():
            break
    cosine, loss, count, aborted = processes.sum([*sums, aborted]).tolist()
    if aborted:
        return None
    counted = readable_images(split, round(count))
    return Evaluation({"cosine": cosine / count, "loss": loss / count} | counted, np.full(len(split), -1))


def score_several(logits: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`score` for several labels of an image, targets [b, K] of 0 and 1: hits are images whose most probable label is
    right; the loss is the mean binary cross-entropy over the labels."""
    chosen = logits.argmax(axis=1)
    losses = np.logaddexp(0, logits) - targets * logits
    hits = targets[np.arange(len(logits)), chosen]
    return chosen, np.array([hits.sum(), 0, losses.mean(axis=1).sum()]), 1 / (1 + np.exp(-logits.clip(-80, 80)))


def by_label(targets: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, ...]:
    """Images, average precision, threshold of the best F1, that F1 and F1 at 0.5 of every label; nan without images."""
    with optional_package("train"):
        from sklearn.metrics import average_precision_score, precision_recall_curve

    rows = []
    for truth, given in zip(targets.T, scores.T, strict=True):
        row = [truth.sum(), *[np.nan] * 4]
        if truth.any():
            precision, recall, thresholds = precision_recall_curve(truth, given)
            f1 = (2 * precision * recall / np.maximum(precision + recall, 1e-12))[:-1]
            half = 2 * truth[given >= 0.5].sum() / (truth.sum() + (given >= 0.5).sum())
            row[1:] = average_precision_score(truth, given), thresholds[f1.argmax()], f1.max(), half
        rows.append(row)
    return tuple(np.array(rows).T)


def score(logits: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Predicted classes [b] of logits [b, K], the sums of top-1 hits, top-5 hits and cross-entropies, and the
    probabilities [b, 2] of the predicted classes and of the labels."""
    order = np.argsort(-logits, axis=1, kind="stable")[:, :5]
    hits = order == labels[:, None]
    peak = logits.max(axis=1)
    with np.errstate(invalid="ignore"):  # logits that are not finite make the loss so
        normaliser = peak + np.log(np.exp(logits - peak[:, None]).sum(axis=1))
        both = np.take_along_axis(logits, np.stack([order[:, 0], labels], axis=1), axis=1) - normaliser[:, None]
    return order[:, 0], np.array([hits[:, 0].sum(), hits.sum(), -both[:, 1].sum()]), np.exp(both)


def by_class(labels: np.ndarray, predicted: np.ndarray, classes: int = 0) -> tuple[np.ndarray, ...]:
    """Images, recall, precision and F1 of every class; nan where there is nothing to divide by. -1 is a wrong class."""
    count, parts = max(classes, labels.max() + 1, predicted.max() + 1), (labels, predicted[predicted >= 0])
    images, guessed, right = (np.bincount(some, minlength=count) for some in (*parts, labels[labels == predicted]))
    with np.errstate(invalid="ignore"):
        return images, right / images, right / guessed, 2 * right / (images + guessed)


def describe_accuracies(metrics: dict, classes: int) -> str:
    """The scores for people; those of an even split without the share of the largest class and what follows from it."""
    if "cosine" in metrics:
        return f"cosine of the features {metrics['cosine']:.4f}"
    top5 = f", top-5 {100 * metrics['top5']:.2f} %" if classes > 5 and "top5" in metrics else ""
    text = f"top-1 {100 * metrics['top1']:.2f} %"
    if classes > 2 and metrics.get("majority", 0) < 1.2 / classes and "map" not in metrics:
        return f"{text}{top5}"
    if "map" in metrics:
        return f"mAP {100 * metrics['map']:.2f} %, F1 {100 * metrics['f1']:.2f} %, {text} (the first label is right)"
    others = f", balanced {100 * metrics['balanced']:.2f} %, F1 {100 * metrics['f1']:.2f} %" if "f1" in metrics else ""
    return f"{text} (majority class {100 * metrics.get('majority', 0):.2f} %){others}{top5}"


def model_runner(model: nn.Layer, autocast: Callable = nullcontext) -> Runner:
    """Forward pass of a Paddle model in eval mode as a function of numpy arrays."""

    def run(images: np.ndarray) -> np.ndarray:
        with paddle.no_grad(), autocast():
            return model(paddle.to_tensor(images)).astype("float32").numpy()

    return run


def mirrored_runner(run: Runner) -> Runner:
    """The mean of `run`'s logits for an image and for its mirror image, images [b, C, H, W] as in `evaluate`."""
    return lambda images: (run(images) + run(np.ascontiguousarray(images[..., ::-1]))) / 2


def evaluate_split(
    run: Runner, config: Config, classes: list[str], preprocess: Preprocess, provenance: Provenance | None = None
) -> tuple[Evaluation, Splits]:
    """Evaluate on the validation split of the config's data set; `classes` and `preprocess` are the model's own.

    Counts its training images, by `provenance`, as `trained_on`. `UserError` for unknown classes and damaged weights.
    """
    splits = build_datasets(config, training=False)
    if not splits.classes:
        raise UserError("A model without classifier has no accuracy to evaluate.")
    seen = provenance.leaked_images(splits) if provenance else 0
    match_classes(splits, classes)
    size = config.data.eval_batch_size or config.data.batch_size
    result = evaluate(run, EvalLoader(splits.val, preprocess, size, num_workers=config.data.num_workers), splits.val)
    assert result is not None  # nothing stops it
    if not np.isfinite(result.metrics["loss"]):
        raise UserError("The model's answers to the validation images are not finite numbers: its weights are damaged.")
    if seen:
        result.metrics["trained_on"] = seen
    return result, splits


def match_classes(splits: Splits, classes: list[str]) -> None:
    """Number the validation images by the model's classes; warn of classes without images, refuse unknown ones."""
    val, numbers = splits.val, class_numbers(classes, splits.classes)
    if val.table is not None:
        if numbers != [*range(len(classes))]:
            raise UserError(f"The lists have other labels than the model: {', '.join(splits.classes[:5])}.")
        return
    if unknown := [splits.classes[label] for label in np.unique(val.labels) if numbers[label] is None]:
        model, data = (f"{len(some)} ({', '.join(some[:3])}, ...)" for some in (classes, splits.classes))
        lost = ", ".join(map(repr, unknown[:5]))
        raise UserError(f"The model's classes are {model}, the data has {data}: no class for images of {lost}.")
    if numbers != [*range(len(classes))]:
        val.labels = np.array([numbers[label] for label in val.labels.tolist()], np.int64)
        splits.classes = classes
    if absent := sorted({*range(len(classes))} - {*val.labels.tolist()}):
        names = ", ".join(classes[label] for label in absent[:5]) + (", ..." if len(absent) > 5 else "")
        logger.warning(f"no images of {len(absent)} of the {len(classes)} classes to evaluate on: {names}")


def write_evaluation(
    folder: Path, result: Evaluation, split: Split, classes: list[str], preprocess: Any, title: str = ""
) -> None:
    """metrics.json, per_class.csv and, of images with one label, errors.csv, the confusion matrix and pictures."""
    write_json(folder / "metrics.json", result.metrics)
    if split.table is not None and result.scores is not None:
        heads = ["class", "images", "average_precision", "threshold", "f1", "f1_at_half"]
        found = zip(*by_label(split.table[split.labels], result.scores), strict=True)
        rows = [["" if np.isnan(v) else f"{v:.4g}" for v in row] for row in found]
        write_rows(folder / "per_class.csv", [heads, *([csv_cell(n), *r] for n, r in zip(classes, rows, strict=True))])
        return
    counts, names = confusion(split.labels, result.predicted, classes)
    named = [[csv_cell(name), *row] for name, row in zip(classes, counts.tolist(), strict=True)]
    write_rows(folder / "confusion_matrix.csv", [["true class", *map(csv_cell, names)], *named])
    if result.scores is not None:
        write_errors(folder, result, split, classes, preprocess)
    write_per_class(folder / "per_class.csv", split.labels, result.predicted, classes)
    draw_confusion(folder / "confusion_matrix.png", split.labels, result.predicted, classes, title)
    if split.input_kind == "images":
        draw_predictions(folder / "predictions.png", result.predicted, split, classes, preprocess, title)


def write_errors(folder: Path, result: Evaluation, split: Split, classes: list[str], preprocess: Any) -> None:
    """errors.csv, a row per wrong image, the surest first, and of images errors.html with the first hundred."""
    assert result.scores is not None
    wrong = np.flatnonzero(result.predicted != split.labels)
    wrong = wrong[np.argsort(-result.scores[wrong, 0], kind="stable")]
    rows: list[list] = [["image", "label", "predicted", "score", "score_of_label"]]
    for i in wrong.tolist():
        guess = csv_cell(classes[result.predicted[i]]) if result.predicted[i] >= 0 else "unreadable"
        scores = [round(float(v), 6) for v in result.scores[i]]
        rows.append([csv_cell(split.key(i)), csv_cell(classes[split.label(i)]), guess, *scores])
    write_rows(folder / "errors.csv", rows)
    if split.input_kind == "images":
        write_text(folder / "errors.html", errors_page(rows[1:101], wrong, split, preprocess))


def write_per_class(path: Path, labels: np.ndarray, predicted: np.ndarray, classes: list[str]) -> None:
    """A row per class: images, recall (the accuracy within the class), precision, F1, and what it is taken for; empty
    cells where there are no images, a column for unreadable ones."""
    count, recall, precision, f1 = by_class(labels, predicted, len(classes))
    counts, names = confusion(labels, predicted, classes)
    wrong, unreadable = counts[:, : len(classes)], counts[:, len(classes) :]
    np.fill_diagonal(wrong, 0)
    columns = ["class", "images", "accuracy", "precision", "f1", "mostly_taken_for", "times", *names[len(classes) :]]
    rows: list[list] = [columns]
    for k, name in enumerate(classes):
        other, times = int(wrong[k].argmax()), int(wrong[k].max())
        numbers = [round(float(v), 4) if count[k] else "" for v in np.nan_to_num([recall[k], precision[k], f1[k]])]
        taken_for = csv_cell(classes[other]) if times else ""
        rows.append([csv_cell(name), int(count[k]), *numbers, taken_for, times, *unreadable[k]])
    write_rows(path, rows)
