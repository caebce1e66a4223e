"""Rows of metrics.csv: as a file, as curves and as a line of the log."""

from __future__ import annotations

from pathlib import Path

from ppattn.files import write_rows
from ppattn.text import picture, printable

ROUNDED = {"lr": 10, "top1": 6, "top5": 6, "train_loss": 8, "val_loss": 8}  # digits after the point; others: 3


def write_csv(path: Path, history: list[dict]) -> None:
    """A row per epoch."""
    columns = list(dict.fromkeys(key for row in history for key in row))
    rows = [
        [round(row[k], ROUNDED.get(k, 3)) if isinstance(row.get(k), float) else row.get(k) for k in columns]
        for row in history
    ]
    write_rows(path, [columns, *rows])


def draw_curves(path: Path, history: list[dict]) -> None:
    """Losses, accuracy and learning rate over epochs."""
    panels = [("loss", ("train_loss", "val_loss")), ("accuracy", ("top1", "top5")), ("learning rate", ("lr",))]
    with picture(path, 12, 3.6, printable(str(path.parent))) as figure:
        for axes, (title, keys) in zip(figure.subplots(1, 3), panels, strict=True):
            for key in keys:
                points = [(row["epoch"], row[key]) for row in history if row.get(key) is not None]
                if points and (key != "top5" or min(value for _, value in points) < 1):  # of five classes: always 1
                    axes.plot(*zip(*points, strict=True), marker="." if len(points) < 40 else None, label=key)
            axes.set(title=title, xlabel="epoch")
            axes.grid(alpha=0.3)
            if axes.lines:
                axes.legend()


def sentence(row: dict, epochs: int, classes: int) -> str:
    """A row as a line of the log, without the top-5 of five classes or fewer, which is always 100 %."""
    text = f"epoch {row['epoch']}/{epochs}: train loss {row['train_loss']:.4f}"
    if "top1" in row:
        text += f", val loss {row['val_loss']:.4f}, top-1 {100 * row['top1']:.2f} %"
        text += f", top-5 {100 * row['top5']:.2f} %" if classes > 5 else ""
    unreadable = row["unreadable_train"] + row.get("unreadable_val", 0)
    text += f", {unreadable} images could not be read" if unreadable else ""
    return text + (f", {row['images_per_second']:.0f} img/s" if row["images_per_second"] else "")
