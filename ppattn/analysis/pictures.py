"""Pictures of analyses: lines per run, maps over images, points of features. Runs share their scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap

import numpy as np

from ppattn.errors import optional
from ppattn.text import picture

with optional("train"):
    from matplotlib import colormaps
    from matplotlib.axes import Axes
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import MaxNLocator


@dataclass
class Panel:
    """Lines over x: {run: (xs, ys)}; `dashed` are references in the colour of the run; y starts at `bottom`."""

    title: str
    xlabel: str
    ylabel: str
    lines: Mapping[str, tuple[Sequence, Sequence]]
    dashed: Sequence[tuple[str, Sequence, Sequence]] = field(default_factory=list)
    xscale: str = "linear"
    yscale: str = "linear"
    bottom: float | None = None


def draw_lines(path: Path, title: str, panels: list[Panel]) -> None:
    """Up to three panels in a row; those with the same ylabel share their y axis, a run has the same colour in all."""
    columns = 2 if len(panels) == 4 else min(len(panels), 3)
    rows = -(-len(panels) // columns)
    with picture(path, 1.2 + 4.2 * columns, 0.4 + 3.6 * rows, title) as figure:
        cells = figure.subplots(rows, columns, squeeze=False).ravel()
        row, spare = cells[: len(panels)], cells[len(panels) :]
        for axes in spare:
            axes.remove()
        first: dict[str, Axes] = {}
        names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
        for axes, panel in zip(row, panels, strict=True):
            if panel.ylabel in first:
                axes.sharey(first[panel.ylabel])
            first.setdefault(panel.ylabel, axes)
            for name, (xs, ys) in panel.lines.items():
                axes.plot(xs, ys, "o-", markersize=4, label=name, color=f"C{names.index(name)}")
            for name, xs, ys in panel.dashed:
                axes.plot(xs, ys, "--", color=f"C{names.index(name)}")
            if panel.yscale == "symlog":
                axes.set_yscale("symlog", linthresh=1)
                axes.set_ylim(bottom=0)
            elif panel.yscale != "linear":
                axes.set_yscale(panel.yscale)
            if panel.xscale == "linear":
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            else:
                axes.set_xscale(panel.xscale)
            axes.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
            axes.grid(alpha=0.3)
            if panel.bottom is not None:
                axes.set_ylim(panel.bottom, 1.08 * axes.dataLim.y1)
            if not set(panel.lines) <= set(panels[0].lines):
                axes.legend(fontsize=8)
        figure.legend(
            *row[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(4, len(panels[0].lines))
        )


def draw_overlays(
    path: Path,
    title: str,
    pictures: list[np.ndarray],
    names: list[str],
    columns: Sequence[tuple[str, list[np.ndarray], tuple[int, int] | None]],
    label: str,
    marked: tuple[int, int] | None = None,
) -> None:
    """A row per image: the image, then maps over it.

    A frame marks the central query: row h // 2, column w // 2 of its grid (h, w).

    Args:
        pictures: uint8 RGB [H, W, 3].
        names: of the images.
        columns: heading, a map [h, w] per image in units of uniform weights (1 is what uniform weights would give), and
            the grid of the queries, if they are marked on the map.
        label: of the colour bar that all maps share.
        marked: grid of the queries, if they are marked on the image.
    """
    values = np.concatenate([m.ravel() for _, maps, _ in columns for m in maps])
    low, high = np.percentile(values, [0.5, 99.5])
    norm = TwoSlopeNorm(1.0, min(low, 0.5), max(high, 1.5))
    shape = (len(pictures), 1 + len(columns))
    with picture(path, 1.0 + 1.45 * shape[1], 0.9 + 1.45 * shape[0], title) as figure:
        grid, drawn = figure.subplots(*shape, squeeze=False), None
        for i, (image, name) in enumerate(zip(pictures, names, strict=True)):
            height, width = image.shape[:2]
            grid[i, 0].imshow(image)
            grid[i, 0].set_ylabel(name, fontsize=9)
            extent = (-0.5, width - 0.5, height - 0.5, -0.5)
            for axes, (heading, maps, _) in zip(grid[i, 1:], columns, strict=True):
                axes.imshow(image.mean(-1), cmap="gray")
                drawn = axes.imshow(
                    maps[i], cmap="RdBu_r", norm=norm, alpha=0.7, extent=extent, interpolation="nearest"
                )
                if i == 0:
                    axes.set_title(narrow(heading), fontsize=8)
            for axes, cells in zip(grid[i], [marked, *(queries for _, _, queries in columns)], strict=True):
                if cells is not None:
                    rows, cols = cells
                    wide, high = width / cols, height / rows
                    corner = cols // 2 * wide - 0.5, rows // 2 * high - 0.5
                    axes.add_patch(Rectangle(corner, wide, high, fill=False, edgecolor="lime", linewidth=1.5))
        for axes in grid.ravel():
            axes.set(xticks=[], yticks=[])
        ticks = [norm.vmin, 1.0, *np.linspace(1.0, float(norm.vmax or 1.0), 5)[1:]]
        clipped = (values.min() < norm.vmin, values.max() > norm.vmax)
        extend = {(True, True): "both", (True, False): "min", (False, True): "max"}.get(clipped, "neither")
        figure.colorbar(drawn, ax=grid, label=label, shrink=0.8, ticks=ticks, format="%.2g", extend=extend)


def narrow(heading: str) -> str:
    """The heading in lines of at most 18 characters, broken after underscores."""
    lines = [wrap(line.replace("_", "_ "), 18) or [""] for line in heading.split("\n")]
    return "\n".join(line.replace("_ ", "_") for part in lines for line in part)


def draw_toys(path: Path, title: str, toys: dict[str, dict[str, np.ndarray]], scales: Sequence[float]) -> None:
    """A row per kernel, a panel per attention: bars of the weights over the keys, a colour per query."""
    with picture(path, 9, 5, title) as figure:
        grid = figure.subplots(len(toys), len(next(iter(toys.values()))), sharey=True, sharex=True)
        for row, (kernel, maps) in zip(grid, toys.items(), strict=True):
            for axes, (mechanism, weights) in zip(row, maps.items(), strict=True):
                for i, (scale, values) in enumerate(zip(scales, weights, strict=True)):
                    place = np.arange(1, len(values) + 1) + 0.2 * (i - 1.5)
                    axes.bar(place, values, 0.2, color=colormaps["viridis"](i / len(scales)), label=f"{scale:g} q")
                axes.set_title(f"{mechanism}, {kernel}", fontsize=9)
                axes.axhline(0, color="black", linewidth=0.5)
        for axes in grid[-1]:
            axes.set(xlabel="key", xticks=range(1, 5))
        for axes in grid[:, 0]:
            axes.set_ylabel("weight")
        figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside right center", title="query", fontsize=8)


def draw_points(
    path: Path, title: str, panels: list[tuple[str, np.ndarray]], labels: list[np.ndarray], classes: list[str]
) -> None:
    """Points [n, 2] of features, a panel per run with the same scale, a colour per class."""
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
