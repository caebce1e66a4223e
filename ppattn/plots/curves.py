"""Pictures of a training run, a linearisation and a benchmark."""

from pathlib import Path
from typing import Any

from ppattn.plots.figure import colour_of, legend_below, line_styles, open_figure
from ppattn.text import printable


def plot_column(axes: Any, history: list[dict], key: str, scale: float, **style: Any) -> None:
    """A column of metrics.csv over the epochs; nothing where no row has it."""
    points = [(int(row["epoch"]), scale * float(row[key])) for row in history if row.get(key) not in (None, "")]
    if points:
        axes.plot(*zip(*points, strict=True), marker="." if len(points) < 40 else None, **style)
        axes.xaxis.get_major_locator().set_params(integer=True)


def draw_curves(path: Path, history: list[dict]) -> None:
    """Losses, accuracy and learning rate over epochs."""
    panels = [("loss", ("train_loss", "val_loss")), ("accuracy (%)", ("top1", "top5")), ("learning rate", ("lr",))]
    with open_figure(path, 12, 3.6, printable(str(path.parent))) as figure:
        for axes, (title, keys) in zip(figure.subplots(1, 3), panels, strict=True):
            for key in keys:
                if key != "top5" or any(row.get(key, 1) < 1 for row in history):  # of five classes: always 1
                    plot_column(axes, history, key, 100 if "%" in title else 1, label=key)
            axes.set(title=title, xlabel="epoch")
            axes.grid(alpha=0.3)
            if axes.lines:
                axes.legend()


def draw_linearized(report: dict, path: Path) -> None:
    """Error and loss per block and new attention, and the front of loss against time."""
    measured, wanted, front = report["measured"], report["request"]["to"], report["front"]
    scale, unit = (1, "of the cosine") if report["metric"] == "features" else (100, "points of top-1")
    blocks = range(1, len(report["blocks"]) + 1)
    with open_figure(path, 12, 3.6, f"{report['request']['model']} to {', '.join(wanted)}") as figure:
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


def draw_speeds(folder: Path, rows: list[dict], machine: str) -> None:
    """Milliseconds per image against tokens, a line per candidate with several sizes, a picture per mode and batch."""
    from matplotlib.ticker import LogLocator

    for mode, batch in dict.fromkeys((row["mode"], row["batch"]) for row in rows):
        lines: dict[str, dict[int, float]] = {}
        for row in rows:
            if (row["mode"], row["batch"]) == (mode, batch) and row["tokens"]:
                lines.setdefault(row["name"], {})[row["tokens"]] = row["ms_per_image"]
        lines = {name: points for name, points in lines.items() if len(points) > 1}
        if not lines:
            continue
        title = f"{'Training' if mode == 'train' else 'Inference'}, batch {batch}, {machine}"
        file = f"{mode}.png" if batch == rows[0]["batch"] else f"{mode}_batch_{batch}.png"
        style = line_styles({row["name"]: row["attention"] for row in rows if row["name"] in lines})
        with open_figure(folder / file, 7, 5, title) as figure:
            axes = figure.subplots()
            for name, points in lines.items():
                axes.loglog(*zip(*sorted(points.items()), strict=True), marker="o", label=name, **style[name])
            tokens = sorted(set().union(*lines.values()))
            axes.set(xlabel="tokens of the first stage", ylabel="ms per image", xticks=tokens)
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.grid(alpha=0.3)
            legend_below(figure)
