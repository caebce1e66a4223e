"""Pictures of an evaluation, the confusion matrix and a grid of predictions."""

import base64
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import BinaryIO

import cv2
import numpy as np

from ppattn.data import ImageError, Preprocess
from ppattn.data.splits import Split
from ppattn.plots.figure import open_figure
from ppattn.text import printable

Target = Path | BinaryIO


def confusion(labels: np.ndarray, predicted: np.ndarray, classes: list[str]) -> tuple[np.ndarray, list[str]]:
    """Counts [true class, predicted class] and the names of the columns; a last one is `unreadable` if any image is."""
    failed = bool((predicted < 0).any())
    counts = np.zeros((len(classes), len(classes) + failed), "int64")
    np.add.at(counts, (labels, predicted), 1)  # -1, which is unreadable, is the last column
    return counts, [*classes, *["unreadable"] * failed]


def draw_confusion(
    path: Target, labels: np.ndarray, predicted: np.ndarray, classes: list[str], title: str = ""
) -> None:
    """Rows are true classes, in percent of their images; names up to 50 classes, numbers up to 20."""
    n = len(classes)
    counts, names = confusion(labels, predicted, list(map(_short, classes)))
    shares = 100 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = float(np.clip(0.55 * n + 1.5, 4.5, 12))
    with open_figure(path, side, side) as figure:
        axes = figure.subplots()
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=100, interpolation="nearest")
        axes.set(xlabel="predicted class", ylabel="true class")
        axes.set_title(f"{_short(title, 60)}\nconfusion matrix, % of each true class".strip())
        if n <= 50:
            room = 0.9 * axes.get_window_extent().width / len(names)
            if max(x.label1.get_window_extent().width for x in axes.set_xticks(range(len(names)), names)) > room:
                axes.tick_params("x", rotation=90)
            axes.set_yticks(range(n), names[:n])
        if n <= 20:
            for i, j in zip(*np.nonzero(counts), strict=True):
                colour = "white" if shares[i, j] > 50 else "black"
                axes.text(j, i, f"{shares[i, j]:.1f}", ha="center", va="center", color=colour, fontsize=8)


def draw_predictions(
    path: Target, predicted: np.ndarray, split: Split, classes: list[str], preprocess: Preprocess, title: str = ""
) -> None:
    """A grid of preprocessed images, half errors, with the `predicted` [n] class (-1: none), if wrong the true one."""
    labels = split.labels
    wrong, right = np.flatnonzero((predicted != labels) & (predicted >= 0)), np.flatnonzero(predicted == labels)
    columns, rows = 6, 3
    room = columns * rows
    few = min(len(wrong), max(room // 2, room - len(right)))
    chosen = np.concatenate([_spread(wrong, few), _spread(right, min(len(right), room - few))])
    shown = f"{few} of {len(wrong)} errors (red), {len(chosen) - few} of {len(right)} correct (green)"
    with open_figure(path, 1.8 * columns, 2.1 * rows + 0.5, f"{_short(title, 90)}\n{shown}".strip()) as figure:
        panels = figure.subplots(rows, columns).ravel()
        for panel in panels:
            panel.axis("off")
        for panel, i in zip(panels, chosen.tolist(), strict=False):
            with suppress(ImageError):  # it could be read before
                panel.imshow(preprocess.unnormalise(preprocess(split.image(i))))
            text, colour = f"model: {_short(classes[predicted[i]])}", "green"
            if predicted[i] != labels[i]:
                text, colour = f"{text}\ntrue: {_short(classes[labels[i]])}", "crimson"
            panel.set_title(text, fontsize=8, color=colour)


def errors_page(rows: list[list], indices: np.ndarray, split: Split, preprocess: Preprocess) -> str:
    """An HTML page of its own with thumbnails of wrong images; `rows` are those of errors.csv, `indices` theirs."""
    figures = []
    for (name, label, guess, sure, _), i in zip(rows, indices.tolist(), strict=False):
        with suppress(ImageError):
            pixels = preprocess.unnormalise(preprocess(split.image(i)))
            data = base64.b64encode(cv2.imencode(".png", pixels[..., ::-1])[1].tobytes()).decode()
            text = f"{escape(guess)} ({100 * sure:.1f} %), not {escape(label)}<br>{escape(printable(name))}"
            figures.append(f'<figure><img src="data:image/png;base64,{data}"><figcaption>{text}</figcaption></figure>')
    style = "figure {display: inline-block; width: 12em; margin: .5em; font: .8em sans-serif; word-wrap: break-word}"
    head = f'<!doctype html><meta charset="utf-8"><title>errors</title><style>{style} img {{width: 100%}}</style>'
    return "\n".join([f"{head}<h1>{len(figures)} of {len(indices)} wrong images, the surest first</h1>", *figures, ""])


def _short(name: str, longest: int = 16) -> str:
    """A name that fits under a picture."""
    name = printable(name)
    return name if len(name) <= longest else f"{name[: longest - 3]}..."


def _spread(items: np.ndarray, count: int) -> np.ndarray:
    """`count` items at even distances."""
    return items[np.linspace(0, len(items) - 1, count).round().astype(int)] if count else items[:0]
