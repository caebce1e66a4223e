"""Pictures of analyses: lines per run, maps over images, points of features. All runs share their scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

import numpy as np

from ppattn.errors import UserError, optional
from ppattn.text import picture

with optional("train"):
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


def draw_lines(path: Path, title: str, panels: list[Panel]) -> None:
    """Panels that have lines, up to three in a row; those with the same ylabel share their y axis."""
    panels = [panel for panel in panels if panel.lines]
    if not panels:
        raise UserError(f"{path.stem} needs layers whose keys are the queries' own tokens; no model here has them.")
    columns = 2 if len(panels) == 4 else min(len(panels), 3)
    rows = -(-len(panels) // columns)
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    colors = {name: f"C{i}" for i, name in enumerate(names)}
    first: dict[str, Axes] = {}
    with picture(path, 1.2 + 4.2 * columns, 0.4 + 3.6 * rows, title) as figure:
        for place, panel in enumerate(panels, 1):
            axes = figure.add_subplot(rows, columns, place, sharey=first.get(panel.ylabel))
            first.setdefault(panel.ylabel, axes)
            for name, (xs, ys) in panel.lines.items():
                axes.plot(xs, ys, "o-", markersize=4, label=name, color=colors[name])
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
            if not panel.lines.keys() <= panels[0].lines.keys():
                axes.legend(fontsize=8)
        handles = figure.axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=min(4, len(panels[0].lines)))


def draw_overlays(
    path: Path,
    title: str,
    pictures: list[np.ndarray],
    names: list[str],
    columns: Sequence[tuple[str, list[np.ndarray], tuple[int, int] | None]],
    label: str,
    marked: tuple[int, int] | None = None,
) -> None:
    """A row per image: the image, then maps over it. A frame marks the query in the middle, row h // 2, column w // 2.

    Args:
        pictures: the images, uint8 RGB [H, W, 3], with their `names`.
        columns: heading, one map [h, w] per image as a multiple of uniform weights, and the grid of the queries, to
            mark the query on the map, or None.
        label: of the colour bar, which all maps share.
        marked: grid of the queries, to mark the query on the image.
    """
    values = np.concatenate([m.ravel() for _, maps, _ in columns for m in maps])
    low, high = np.percentile(values, [0.5, 99.5])
    norm = TwoSlopeNorm(1.0, min(low, 0.5), max(high, 1.5))
    shape = (len(pictures), 1 + len(columns))
    with picture(path, 1.0 + 1.45 * shape[1], 0.9 + 1.45 * shape[0], title) as figure:
        grid = figure.subplots(*shape, squeeze=False, subplot_kw={"xticks": [], "yticks": []})
        for i, (row, image, name) in enumerate(zip(grid, pictures, names, strict=True)):
            height, width = image.shape[:2]
            row[0].imshow(image)
            row[0].set_ylabel(name, fontsize=9)
            for axes, (heading, maps, _) in zip(row[1:], columns, strict=True):
                axes.imshow(image.mean(-1), cmap="gray")
                extent = (-0.5, width - 0.5, height - 0.5, -0.5)
                drawn = axes.imshow(maps[i], "RdBu_r", norm, alpha=0.7, extent=extent, interpolation="nearest")
                if i == 0:
                    axes.set_title(narrow(heading), fontsize=8)
            for axes, queries in zip(row, [marked, *(queries for _, _, queries in columns)], strict=True):
                if queries is not None:
                    rows, cols = queries
                    corner = cols // 2 * width / cols - 0.5, rows // 2 * height / rows - 0.5
                    frame = Rectangle(corner, width / cols, height / rows, fill=False, edgecolor="lime", linewidth=1.5)
                    axes.add_patch(frame)
        ticks = [norm.vmin, *np.linspace(1.0, float(norm.vmax or 1.0), 5)]
        figure.colorbar(drawn, ax=grid, label=label, shrink=0.8, ticks=ticks, format="%.2g", extend="both")


def narrow(heading: str) -> str:
    """The heading in lines of at most 18 characters, broken after underscores."""
    lines = [wrap(line.replace("_", "_ "), 18) or [""] for line in heading.split("\n")]
    return "\n".join(line.replace("_ ", "_") for part in lines for line in part)


def draw_points(
    path: Path, title: str, panels: list[tuple[str, np.ndarray]], labels: list[np.ndarray], classes: list[str]
) -> None:
    """Points [n, 2] of features: a panel per run, a colour per class."""
    shown = sorted({int(label) for own in labels for label in own})
    with picture(path, 1.5 + 4.5 * len(panels), 4.5, title) as figure:
        row = figure.subplots(1, len(panels), squeeze=False, sharex=True, sharey=True)[0]
        colors = colormaps["tab10" if len(shown) <= 10 else "tab20"]
        for axes, (name, points), own in zip(row, panels, labels, strict=True):
            for k, label in enumerate(shown):
                axes.scatter(*points[own == label].T, s=12, color=colors(k % colors.N), label=classes[label])
            axes.set(title=name, xticks=[], yticks=[])
        if len(shown) <= 20:
            figure.legend(*row[0].get_legend_handles_labels(), loc="outside right center", fontsize=8, markerscale=2)
