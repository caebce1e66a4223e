"""Accuracy of a classifier over a whole split, each image counted once, and the files that show it."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ppattn.engine.distributed import Processes
from ppattn.engine.log import write_json
from ppattn.errors import UserError


@dataclass
class Evaluation:
    """`metrics` are what eval/metrics.json holds; `predicted` [n] is -1 where an image was not evaluated."""

    metrics: dict
    predicted: np.ndarray


def evaluate(
    run: Callable[[np.ndarray], np.ndarray],
    loader: Iterable,
    size: int,
    processes: Processes | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Top-1, top-5 (top-K with fewer classes), plain cross-entropy and speed.

    Sums are exact: every image weighs the same whatever the batch it came in. With several processes each evaluates
    its part and the counts are added. An image that the loader left out as unreadable counts as wrong.

    Args:
        run: images [b, 3, H, W] float32 to logits or log-probabilities [b, K].
        loader: yields (images, labels, indices) of this process's part.
        size: images in the whole split.
        stopped: asked after every batch; true ends the evaluation.

    Returns:
        The result, or None where any process was stopped.
    """
    processes = processes or Processes()
    predicted = np.zeros(size)  # class + 1, so that parts of several processes add up
    loss = top1 = top5 = images_timed = seconds_timed = 0.0
    start = last = time.perf_counter()
    aborted = False
    for batch, (images, labels, indices) in enumerate(loader):
        if not len(labels):
            continue
        logits = np.asarray(run(images), "float64")
        order = np.argsort(-logits, axis=1, kind="stable")[:, :5]
        peak = logits.max(axis=1)
        normaliser = peak + np.log(np.exp(logits - peak[:, None]).sum(axis=1))
        loss += float((normaliser - logits[np.arange(len(labels)), labels]).sum())
        top1 += float((order[:, 0] == labels).sum())
        top5 += float((order == labels[:, None]).sum())
        predicted[indices] = order[:, 0] + 1
        now = time.perf_counter()
        if batch:  # the first batch warms up
            images_timed, seconds_timed = images_timed + len(labels), seconds_timed + now - last
        last = now
        if stopped():
            aborted = True
            break
    sums = processes.total([loss, top1, top5, float(aborted)])
    if sums[3]:
        return None
    predicted = processes.total(predicted).astype("int64") - 1
    count = int((predicted >= 0).sum())
    seconds = time.perf_counter() - start
    speed = images_timed / seconds_timed * processes.world if images_timed else count / seconds
    metrics = {
        "top1": float(sums[1]) / size,
        "top5": float(sums[2]) / size,
        "loss": float(sums[0]) / max(count, 1),
        "images": size,
        "images_per_second": round(speed, 2),
        "seconds": round(seconds, 3),
    }
    if count < size:
        metrics["unreadable"] = size - count
    return Evaluation(metrics, predicted)


def model_runner(model, autocast=nullcontext) -> Callable[[np.ndarray], np.ndarray]:
    """Forward pass of a Paddle model in eval mode as a function of numpy arrays."""
    import paddle

    def run(images: np.ndarray) -> np.ndarray:
        with paddle.no_grad(), autocast():
            return model(paddle.to_tensor(images)).astype("float32").numpy()

    return run


def evaluate_split(run: Callable[[np.ndarray], np.ndarray], config, classes: list[str], preprocess):
    """Evaluate on the validation split of the config's data set.

    Args:
        run: see `evaluate`.
        classes: the names that the model's outputs stand for.
        preprocess: the model's own.

    Returns:
        (Evaluation, Splits).

    Raises:
        UserError: where the data set has other classes than the model.
    """
    from ppattn.data import build_datasets, eval_loader

    splits = build_datasets(config)
    if list(splits.classes) != list(classes):
        raise UserError(
            f"The model knows {len(classes)} classes ({', '.join(classes[:3])}, ...), the data has "
            f"{len(splits.classes)} ({', '.join(splits.classes[:3])}, ...): evaluate it on the data it was made for."
        )
    size = config.data.eval_batch_size or config.data.batch_size
    loader = eval_loader(splits.val, preprocess, size, num_workers=config.data.num_workers, tolerate=True)
    return evaluate(run, loader, len(splits.val)), splits


def exported_runner(predictor) -> Callable[[np.ndarray], np.ndarray]:
    """A `ppattn.Predictor`, which gives probabilities, as a function to log-probabilities."""
    return lambda images: np.log(np.maximum(predictor.run(images), np.finfo("float32").tiny))


def labels_of(result: Evaluation, split) -> np.ndarray:
    """The true class of every image, [n]."""
    return np.array([split.label(i) for i in range(len(result.predicted))], "int64")


def write_evaluation(folder: Path, result: Evaluation, split, classes: list[str], preprocess) -> None:
    """metrics.json, per_class.csv, confusion_matrix.png and predictions.png in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    labels = labels_of(result, split)
    write_json(folder / "metrics.json", result.metrics)
    write_per_class(folder / "per_class.csv", labels, result.predicted, classes)
    draw_confusion(folder / "confusion_matrix.png", labels, result.predicted, classes)
    draw_predictions(folder / "predictions.png", result, split, classes, preprocess)


def write_per_class(path: Path, labels: np.ndarray, predicted: np.ndarray, classes: list[str]) -> None:
    """A row per class: images, recall (the accuracy within the class), precision, F1, and what it is taken for.

    Images that could not be read (-1) are wrong here as they are in top-1; where there are any, a column counts them.
    """
    from sklearn.metrics import precision_recall_fscore_support

    every = np.arange(len(classes))
    precision, recall, f1, count = precision_recall_fscore_support(labels, predicted, labels=every, zero_division=0.0)
    wrong, names = confusion(labels, predicted, classes)
    unreadable = wrong[:, len(classes) :]
    wrong = wrong[:, : len(classes)]
    np.fill_diagonal(wrong, 0)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        columns = ["class", "images", "accuracy", "precision", "f1", "mostly_taken_for", "times"]
        writer.writerow([*columns, *names[len(classes) :]])
        for k, name in enumerate(classes):
            other, times = int(wrong[k].argmax()), int(wrong[k].max())
            numbers = [round(float(v), 4) for v in (recall[k], precision[k], f1[k])]
            writer.writerow([name, int(count[k]), *numbers, classes[other] if times else "", times, *unreadable[k]])


def confusion(labels: np.ndarray, predicted: np.ndarray, classes: list[str]) -> tuple[np.ndarray, list[str]]:
    """Counts [true class, predicted class] and the names of the columns; a last one is `unreadable` if any image is."""
    failed = bool((predicted < 0).any())
    counts = np.zeros((len(classes), len(classes) + failed), "int64")
    np.add.at(counts, (labels, predicted), 1)  # -1, which is unreadable, is the last column
    return counts, [*classes, *["unreadable"] * failed]


def draw_confusion(path: Path, labels: np.ndarray, predicted: np.ndarray, classes: list[str]) -> None:
    """Rows are true classes, normalised to 1; names up to 50 classes, numbers up to 20."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    n = len(classes)
    counts, names = confusion(labels, predicted, classes)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = float(np.clip(0.55 * n + 1.5, 4.5, 12))
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0, interpolation="nearest")
    axes.set(xlabel="predicted", ylabel="true")
    if n <= 50:
        axes.set_xticks(range(len(names)), names, rotation=90)
        axes.set_yticks(range(n), classes)
    if n <= 20:
        for i, j in zip(*np.nonzero(counts), strict=True):
            colour = "white" if shares[i, j] > 0.5 else "black"
            axes.text(j, i, str(counts[i, j]), ha="center", va="center", color=colour, fontsize=8)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=100)


def draw_predictions(path, result: Evaluation, split, classes: list[str], preprocess, columns: int = 8, rows: int = 4):
    """A grid of what the model sees with the true name, and the predicted one where it differs; half of it errors."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    labels, predicted = labels_of(result, split), result.predicted
    wrong, right = np.flatnonzero((predicted != labels) & (predicted >= 0)), np.flatnonzero(predicted == labels)
    room = columns * rows
    few = min(len(wrong), max(room // 2, room - len(right)))
    chosen = np.concatenate([_spread(wrong, few), _spread(right, min(len(right), room - few))])
    height = 1.7 * rows
    figure = Figure(figsize=(1.4 * columns, height + 0.35))
    title = f"{few} of {len(wrong)} errors, {len(chosen) - few} of {len(right)} right answers"
    figure.text(0.5, 1 - 0.12 / (height + 0.35), title, ha="center", va="top")
    axes = figure.add_axes((0, 0, 1, height / (height + 0.35)))
    axes.axis("off")
    for place, i in enumerate(chosen):
        top, left = divmod(place, columns)
        true, guess = split.label(int(i)), int(predicted[i])
        box = (left + 0.06, left + 0.94, top + 0.94, top + 0.24)
        axes.imshow(preprocess.unnormalise(preprocess(split.image(int(i)))), extent=box, aspect="auto")
        text = classes[true] if true == guess else f"{classes[true]}\nnot {classes[guess]}"
        colour = "green" if true == guess else "crimson"
        axes.text(left + 0.5, top + 0.21, text, ha="center", va="bottom", fontsize=8, color=colour)
    axes.set(xlim=(0, columns), ylim=(rows, 0))
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=100)


def _spread(items: np.ndarray, count: int) -> np.ndarray:
    """`count` items at even distances."""
    return items[np.linspace(0, len(items) - 1, count).round().astype(int)] if count else items[:0]
