"""Pictures of a training run and of a linearisation."""

from __future__ import annotations

from pathlib import Path

from ppattn.plots.figure import colour_of, picture
from ppattn.text import printable


def draw_curves(path: Path, history: list[dict]) -> None:
    """Losses, accuracy and learning rate over epochs."""
    panels = [
        ("loss", ("train_loss", "val_loss"), 1),
        ("accuracy (%)", ("top1", "top5"), 100),
        ("learning rate", ("lr",), 1),
    ]
    with picture(path, 12, 3.6, printable(str(path.parent))) as figure:
        for axes, (title, keys, scale) in zip(figure.subplots(1, 3), panels, strict=True):
            for key in keys:
                points = [(row["epoch"], scale * row[key]) for row in history if row.get(key) is not None]
                if points and (key != "top5" or min(value for _, value in points) < 100):  # of five classes: always 1
                    axes.plot(*zip(*points, strict=True), marker="." if len(points) < 40 else None, label=key)
            axes.set(title=title, xlabel="epoch")
            axes.grid(alpha=0.3)
            if axes.lines:
                axes.legend()


def draw_linearized(report: dict, path: Path) -> None:
    """Error and loss per block and new attention, and the front of loss against time."""
    measured, wanted, front = report["measured"], report["request"]["to"], report["front"]
    scale, unit = (1, "of the cosine") if report["metric"] == "features" else (100, "points of top-1")
    blocks = range(1, len(report["blocks"]) + 1)
    with picture(path, 12, 3.6, f"{report['request']['model']} to {', '.join(wanted)}") as figure:
        left, middle, right = figure.subplots(1, 3)
        for name in wanted:
            part, style = f" {name}" if len(wanted) > 1 else "", {"color": colour_of(name), "label": name}
            lost = [scale * (measured["teacher"] - measured[f"alone {i - 1}{part}"]) for i in blocks]
            left.plot(blocks, measured[f"errors{part}"], "o-", **style)
            middle.plot(blocks, lost, "o-", **style)
        left.set(title="error of the aligned attention", xlabel="block", ylabel="relative mean squared error")
        middle.set(title="this block alone replaced", xlabel="block", ylabel=f"loss, {unit}")
        times = [step["milliseconds"] for step in front]
        right.plot(times, [step["loss"] for step in front], "o-", color="grey", label="aligned only")
        for step in front:
            right.annotate(len(step["blocks"]), (step["milliseconds"], step["loss"]), fontsize=7)
        after = scale * (measured["teacher, every image"] - measured["final"])
        chosen = next(step["milliseconds"] for step in front if step["blocks"] == report["chosen"])
        right.plot(chosen, after, "*", markersize=14, color="black", label="after the training")
        right.set(title="loss against time, by replaced blocks", xlabel="ms per image", ylabel=f"loss, {unit}")
        for axes in (left, middle, right):
            axes.grid(alpha=0.3)
            axes.legend()
