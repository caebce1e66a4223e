"""Pictures of analyses: lines per run, maps over images, points of features."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from ppattn.errors import UserError, optional_package
from ppattn.plots.figure import legend_below, line_styles, open_figure, shorten_labels

with optional_package("train"):
    from matplotlib import colormaps
    from matplotlib.axes import Axes
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import MaxNLocator


@dataclass
class Panel:
    """Lines per run: {run: (xs, ys)}. `bottom`: lower end of the y axis."""

    title: str
    xlabel: str
    ylabel: str
    lines: Mapping[str, tuple[Sequence, Sequence]]
    xscale: str = "linear"
    yscale: str = "linear"
    bottom: float | None = None


def draw_lines(path: Path, title: str, panels: list[Panel], attentions: Mapping[str, str]) -> None:
    """Panels that have lines, up to three in a row; the `attentions` of runs give colours, layers go dark to bright."""
    panels = [panel for panel in panels if panel.lines]
    if not panels:
        raise UserError(f"{path.stem} needs layers whose keys are the queries' own tokens; no model here has them.")
    columns = 2 if len(panels) == 4 else min(len(panels), 3)
    rows = -(-len(panels) // columns)
    short, common = shorten_labels(list(attentions))
    labels, style = dict(zip(attentions, short, strict=True)), line_styles(attentions)
    first: dict[str, Axes] = {}
    with open_figure(path, 1.2 + 4.2 * columns, 0.4 + 3.6 * rows, f"{title}\n{common}".strip()) as figure:
        for place, panel in enumerate(panels, 1):
            axes = figure.add_subplot(rows, columns, place, sharey=first.get(panel.ylabel))
            first.setdefault(panel.ylabel, axes)
            layers = [name for name in panel.lines if name not in attentions]
            shades = colormaps["viridis"](np.linspace(0, 0.9, max(len(one.lines) for one in panels)))
            own = style | {name: {"color": shade} for name, shade in zip(layers, shades, strict=False)}
            for name, (xs, ys) in panel.lines.items():
                axes.plot(xs, ys, marker="o", markersize=4, label=labels.get(name, name), **own[name])
            if panel.yscale != "linear":
                axes.set_yscale(panel.yscale, **({"linthresh": 1} if panel.yscale == "symlog" else {}))
            if panel.xscale == "linear":
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            else:
                axes.set_xscale(panel.xscale)
            axes.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
            axes.grid(alpha=0.3)
            if panel.bottom is not None:
                axes.set_ylim(panel.bottom, 1.08 * axes.dataLim.y1 or None)
        legend_below(figure)


Column = tuple[str, list[np.ndarray], tuple[int, int] | None]
CELL, GAP, BETWEEN = 1.25, 0.06, 0.3  # inches: of a picture, around it, in front of a run


def draw_overlays(
    path: Path,
    title: str,
    pictures: list[np.ndarray],
    names: list[str],
    runs: Mapping[str, Sequence[Column]],
    label: str,
    marked: tuple[int, int] | None = None,
) -> None:
    """A row per image, uint8 RGB [H, W, 3]: it, then the maps of every run over it, with a colour scale per run.

    Args:
        runs: columns of each run: heading, one map [h, w] per image (1 is a uniform weight), grid of the queries.
        label: of the colour bars.
        marked: grid of the queries. Where there is one, a frame marks the query in the middle, on image or map.
    """
    count, step = len(pictures), CELL + GAP
    width = 0.5 + step + sum(BETWEEN + step * len(columns) for columns in runs.values())
    short, common = shorten_labels(list(runs))
    scales = ", ".join(filter(None, (common, "the colours of each run have a scale of their own" * (len(runs) > 1))))
    heading = f"{title}\n{fill(scales, int(11 * width))}".strip()
    bottom, height = 0.65, 0.65 + step * count + 0.75 + 0.2 * len(heading.splitlines())
    with open_figure(path, width, height, heading) as figure:
        figure.set_layout_engine("none")

        def axes_at(x: float, i: int) -> Axes:
            y = bottom + step * (count - 1 - i)
            return figure.add_axes((x / width, y / height, CELL / width, CELL / height), xticks=[], yticks=[])

        def mark(axes: Axes, image: np.ndarray, queries: tuple[int, int] | None) -> None:
            if queries is not None:
                (h, w), (rows, cols) = image.shape[:2], queries
                corner = cols // 2 * w / cols - 0.5, rows // 2 * h / rows - 0.5
                axes.add_patch(Rectangle(corner, w / cols, h / rows, fill=False, edgecolor="lime", linewidth=1.5))

        def text(x: float, y: float, words: str, size: int, **more: str) -> None:
            figure.text(x / width, y / height, words, ha="center", va="bottom", fontsize=size, **more)

        left, top = 0.4, bottom + step * count
        for i, (image, name) in enumerate(zip(pictures, names, strict=True)):
            axes = axes_at(left, i)
            axes.imshow(image, aspect="auto")
            axes.set_ylabel(name if len(name) < 17 else f"{name[:14]}...", fontsize=9)
            mark(axes, image, marked)
        left += step
        for run, columns in zip(short, runs.values(), strict=True):
            left += BETWEEN
            low, high = np.percentile(np.concatenate([m.ravel() for _, maps, _ in columns for m in maps]), [0.5, 99.5])
            norm = TwoSlopeNorm(1.0, min(low, 0.9), max(high, 1.1))
            across = step * len(columns) - GAP
            text(left + across / 2, top + 0.25, fill(run, int(9 * across)), 10, fontweight="bold")
            bar = figure.add_axes((left / width, 0.42 / height, across / width, 0.12 / height))
            for column, maps, queries in columns:
                text(left + CELL / 2, top + 0.03, column, 9)
                for i, image in enumerate(pictures):
                    axes, (h, w) = axes_at(left, i), image.shape[:2]
                    axes.imshow(image.mean(-1), cmap="gray", aspect="auto")
                    shown: Any = {"extent": (-0.5, w - 0.5, h - 0.5, -0.5), "interpolation": "nearest", "alpha": 0.7}
                    drawn = axes.imshow(maps[i], "RdBu_r", norm, aspect="auto", **shown)
                    mark(axes, image, queries)
                left += step
            figure.colorbar(drawn, cax=bar, orientation="horizontal", extend="both")
            ends = [float(norm.vmin), 1.0, float(norm.vmax)]  # type: ignore[arg-type]
            bar.set_xticks(ends, [f"{end:.2g}" if abs(end) >= 0.01 else "0" for end in ends])
            bar.tick_params(labelsize=8)
            bar.set_xlabel(label, fontsize=8)


def draw_points(
    path: Path, title: str, panels: list[tuple[str, np.ndarray]], labels: list[np.ndarray], classes: list[str]
) -> None:
    """Points [n, 2] of features: a panel per run, a colour per class."""
    shown = sorted({int(label) for own in labels for label in own})
    with open_figure(path, 1.5 + 4.5 * len(panels), 4.5, title) as figure:
        row = figure.subplots(1, len(panels), squeeze=False, sharex=True, sharey=True)[0]
        colors = colormaps["tab10" if len(shown) <= 10 else "tab20"]
        for axes, (name, points), own in zip(row, panels, labels, strict=True):
            for k, label in enumerate(shown):
                axes.scatter(*points[own == label].T, s=12, color=colors(k % colors.N), label=classes[label])
            axes.set(title=name, xticks=[], yticks=[])
        if len(shown) <= 20:
            figure.legend(*row[0].get_legend_handles_labels(), loc="outside right center", fontsize=8, markerscale=2)
