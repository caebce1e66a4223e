"""Pictures of results/cifar10, benchmark and linearize, as SVG; each holds the digest of the data it was drawn from."""

import hashlib
import json
import statistics
from collections.abc import Callable, Iterator
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from ppattn.plots.figure import RUNS, colour_of, legend_below, open_figure
from scripts.tables.cifar10 import LOCAL_KEYS, front, fronts
from scripts.tables.compare import mean_and_error, pooled_deviation
from scripts.tables.runs import BACKBONES, Results, Row, by_tokens, local_terms, muon, unchanged
from scripts.tables.speed import SIDES, TOKENS, Lengths, nano_times, read_lengths, read_tokens
from scripts.tables.weights import read_linearized

VERSION = "11"  # counted up when a drawing changes: the pictures are then drawn again
ACCURACY = "CIFAR-10 test top-1 (%)"
COLOURED = ("inline", "linear", "linformer", "focused", "polaformer", "vittt")  # beside softmax; the others are grey
# small models of others on CIFAR-10 from scratch: 10^15 operations of training, top-1 %
PUBLISHED = {
    "airbench94 (CNN)": (0.29, 94.01),
    "airbench96 (CNN)": (3.1, 96.00),
    "CCT-2/3x2": (2.0, 89.17),
    "CCT-4/3x2": (2.8, 91.45),
    "ConvMixer-256/8": (1.11, 92.60),
}


def draw_pflop(figure: Any, rows: list[Row]) -> None:
    """Accuracy against the arithmetic of training: one mark for the attentions with one recipe, one per other run."""
    together, axes = muon(rows), figure.subplots()
    if together:
        pairs = [[row.pflop for row in together], [row.mean for row in together]]
        x, y = map(statistics.median, pairs)
        ends = [[[middle - min(own)], [max(own) - middle]] for middle, own in zip((x, y), pairs, strict=True)]
        label = f"{len(together)} attentions, 15 epochs: median, range"
        axes.errorbar(x, y, ends[1], ends[0], fmt="", color="black", capsize=3, label=label)
    for row, (mark, color) in zip((row for row in rows if row not in together), product("os", RUNS), strict=False):
        axes.plot(row.pflop, row.mean, mark, color=color, label=row.name)
    for name, (pflop, top1) in PUBLISHED.items():
        axes.plot(pflop, top1, "x", color="grey")
        place = {"xytext": (6, 4)} if pflop < 2.5 else {"xytext": (-6, -3), "ha": "right"}
        axes.annotate(name, (pflop, top1), textcoords="offset points", color="grey", **place)
    axes.set(xscale="log", xlabel="operations of training (10^15)", ylabel=ACCURACY, ylim=(79, 97))
    axes.set_xticks((0.1, 0.2, 0.5, 1, 2, 5))
    axes.grid(visible=True, which="both")
    legend_below(figure)


def draw_lengths(figure: Any, times: dict[str, Lengths]) -> None:
    """Milliseconds per sequence against tokens, a line per attention."""
    for axes, (mode, found) in zip(figure.subplots(1, 2), times.items(), strict=True):
        for name, points in found.items():
            axes.loglog(*zip(*sorted(points.items()), strict=True), "o-", color=colour_of(name), label=name)
        axes.set(title=mode, xlabel="tokens", ylabel="milliseconds per sequence")
        axes.set_xticks(sorted(set().union(*found.values())))
        axes.minorticks_off()
    legend_below(figure)


def draw_linearized(figure: Any, runs: dict[str, dict]) -> None:
    """Error and change of accuracy per block, and the change with more and more blocks, a line per attention."""
    left, middle, right = figure.subplots(1, 3)
    for name, run in runs.items():
        measured, look = run["measured"], {"color": colour_of(name), "label": name}
        blocks = range(1, len(measured["errors"]) + 1)
        left.plot(blocks, measured["errors"], "o-", **look)
        middle.plot(blocks, [100 * (measured[f"alone {i - 1}"] - measured["teacher"]) for i in blocks], "o-", **look)
        right.plot(blocks, [-step["loss"] for step in run["front"][1:]], "o-", **look)
        trained = 100 * (run["held_out_top1"] - measured["teacher, every image"])
        right.plot(blocks[-1], trained, "*", markersize=13, markeredgecolor="black", color=colour_of(name))
    right.plot([], [], "*", markersize=13, color="grey", label="all blocks, trained (5,000 images)")
    left.set(title="relative error of the aligned attention", xlabel="block")
    middle.set(title="this block alone replaced", xlabel="block", ylabel="points (1,000 images)")
    right.set(title="aligned only", xlabel="replaced blocks", ylabel="points (1,000 images)")
    legend_below(figure)


def draw_local_terms(figure: Any, rows: list[Row]) -> None:
    """Accuracy with its 95 % error: a place per attention, a marker per combination."""
    axes, found, bars = figure.subplots(), local_terms(rows), error_bars(rows)
    for (label, key), marker, shift in zip(LOCAL_KEYS.items(), "sD^o", (-0.18, -0.06, 0.06, 0.18), strict=True):
        points = [(x + shift, cells[key]) for x, cells in enumerate(found.values()) if key in cells]
        values, errors = [row.mean for _, row in points], [bars(row) for _, row in points]
        axes.errorbar([x for x, _ in points], values, errors, fmt=marker, elinewidth=0.7, label=label)
    axes.set_xticks(range(len(found)), list(found), rotation=30)
    axes.set(xlim=(-0.5, len(found) - 0.5), ylabel=ACCURACY)
    axes.grid(visible=False, axis="x")
    legend_below(figure)


def draw_fronts(figure: Any, rows: list[Row]) -> None:
    """Accuracy, with its 95 % error, against inference; a line joins what none beats in both."""
    from matplotlib.ticker import MaxNLocator

    bars = error_bars(rows)
    errors = {row.attention: bars(row) for row in rows}
    for axes, (cost, points) in zip(figure.subplots(1, 2, sharey=True), fronts(rows).items(), strict=True):
        axes.step(*zip(*(points[name] for name in front(points)), strict=True), where="post", color="grey", zorder=0)
        for name, point in points.items():
            axes.errorbar(*point, yerr=errors[name], fmt="o", color=colour_of(name), elinewidth=0.7, label=name)
        axes.set(xlabel=f"inference: {cost}", xscale="log")
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    figure.axes[0].set(ylabel=ACCURACY)
    legend_below(figure)


def draw_tokens(figure: Any, times: dict[str, dict[str, dict[int, float]]]) -> None:
    """Milliseconds per image against tokens: softmax as a thick line, the other attentions beside it."""
    import numpy as np

    def scale(axis: Any, ticks: dict[int, str]) -> None:
        """A logarithmic axis with these ticks and no others."""
        log = lambda values: np.log(np.maximum(values, 1))  # noqa: E731
        getattr(axis.axes, f"set_{axis.axis_name}scale")("function", functions=(log, np.exp))
        axis.set_ticks(list(ticks), list(ticks.values()))

    for axes, (mode, found) in zip(figure.subplots(1, 2, sharey=True), times.items(), strict=True):
        others = [name for name in found if name not in ("softmax", *COLOURED)]
        for name in ("softmax", *COLOURED, *others):
            if name in others:
                look = {"color": "0.8", "lw": 1, "zorder": 1, "label": f"the other {len(others)} attentions"}
            else:
                look = {"color": colour_of(name), "lw": 1.5, "marker": "o", "markersize": 4, "label": name}
                look |= {"lw": 4, "markersize": 9, "zorder": 4} if name == "softmax" else {"zorder": 3}
            axes.plot(found[name].keys(), found[name].values(), **look)
        scale(axes.xaxis, {tokens: f"{tokens:,}\n{SIDES[tokens]:,} px" for tokens in TOKENS})
        scale(axes.yaxis, {tick: f"{tick:,}" for tick in (20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)})
        axes.set(title=mode, xlabel="tokens (side of the image)")
    figure.axes[0].set(ylabel="milliseconds per image")
    legend_below(figure)


def draw_accuracy_tokens(figure: Any, rows: list[Row], times: dict) -> None:
    """Accuracy against milliseconds per image: a line per attention through its numbers of tokens."""
    axes, error = figure.subplots(), error_bars(rows)
    for name, own in by_tokens(rows).items():
        measured = {n: float(times[name, 32, n]["ms_per_image"]) for n in sorted(own) if (name, 32, n) in times}
        y, bars = [own[n].mean for n in measured], [error(own[n]) for n in measured]
        axes.errorbar([*measured.values()], y, bars, capsize=3, color=colour_of(name), label=name)
        for n, x in measured.items():
            axes.plot(x, own[n].mean, {64: "o", 256: "s", 1024: "^"}[n], color=colour_of(name))
    axes.set(xlabel="milliseconds per image", ylabel=ACCURACY, xscale="log")
    axes.set_xticks([0.5, 1, 2, 5, 10, 20], ["0.5", "1", "2", "5", "10", "20"])
    axes.legend()


def error_bars(rows: list[Row]) -> Callable[[Row], float]:
    """The 95 % error of a row's accuracy in percent, from the test images and the deviation over seeds of all rows."""
    deviation = pooled_deviation([row.top1 for row in rows])
    return lambda row: 196 * mean_and_error(row.top1, deviation)[1]


class Picture(NamedTuple):
    """results/NAME.svg, which is drawn again when `values` change, and removed when they are empty."""

    name: str
    values: list | dict
    width: float  # inches
    title: str
    draw: Callable[..., None]  # with a figure and `data`
    data: tuple


def pictures(results: Results) -> Iterator[Picture]:
    rows = results.rows
    longer = [row for row in rows if row.epochs >= 12 or row.config not in BACKBONES]
    runs = [row for row in longer if unchanged(row, "train.epochs=", "augment.")]
    title = "Grey crosses: published results, not run here; those of airbench average six views of an image"
    yield Picture("cifar10/accuracy_pflop", values_of(runs), 8, title, draw_pflop, (runs,))
    terms = [row for cells in local_terms(rows).values() for row in cells.values()]
    title = "15 epochs with Muon, DeiT"
    yield Picture("cifar10/local_terms", values_of(terms), 8, title, draw_local_terms, (terms,))
    inferred = [row for row in muon(rows) if row.inference]
    yield Picture("cifar10/accuracy_inference", values_of(inferred), 9, title, draw_fronts, (inferred,))
    longer, speeds = [row for own in by_tokens(rows).values() for row in own.values()], nano_times(results, "infer")
    values: list = [[row.attention, row.epochs, row.overrides, row.top1] for row in longer]
    values = values + [[list(key), speed["ms_per_image"]] for key, speed in speeds.items()] if longer and speeds else []
    title = "deit_nano with 64 (circles), 256 (squares) and 1,024 tokens (triangles), batch 32"
    yield Picture("cifar10/accuracy_tokens", values, 8, title, draw_accuracy_tokens, (longer, speeds))
    modes = {"training": "train", "inference": "infer"}
    times = {title: default_times(results, mode) for title, mode in modes.items()}
    title = f"DeiT-T on {results.machine('deit_tiny', 2)}, batch 1"
    yield Picture("benchmark/tokens", times if any(times.values()) else {}, 9, title, draw_tokens, (times,))
    lengths = {title: read_lengths(results, mode)[0] for title, mode in modes.items()}
    title = f"The sequence backbone on {results.machine('sequence_train/benchmark')}, batch 1, fastest of three rounds"
    yield Picture("benchmark/sequences", lengths if all(lengths.values()) else {}, 9, title, draw_lengths, (lengths,))
    first = {to: own[0] for (kind, to), own in read_linearized(results).items() if kind == ""}
    replaced = {to: run for to, run in first.items() if "measured" in run}
    title = "Held-out images, change of top-1 against the teacher on the same images"
    yield Picture("linearize/blocks", replaced, 12, title, draw_linearized, (replaced,))


def values_of(rows: list[Row]) -> list[list]:
    return [[r.backbone, r.attention, r.top1, r.macs, r.seconds, r.epochs, *r.inference] for r in rows]


def default_times(results: Results, mode: str) -> dict[str, dict[int, float]]:
    """Milliseconds per image of the attentions with their default options, by tokens."""
    found = {name: own for name, own in read_tokens(results, mode).items() if " " not in name}
    return {name: {n: float(own[n]["ms_per_image"]) for n in sorted(own)} for name, own in found.items()}


def outdated(results: Results, write: bool) -> list[Path]:
    """The pictures that are not those of the runs; `write` draws them, or removes those without runs."""
    from matplotlib import rc_context

    wrong = []
    for one in pictures(results):
        path = results.root / f"results/{one.name}.svg"
        digest = hashlib.sha256(json.dumps([VERSION, results.machine(), one.values]).encode()).hexdigest()
        if path.is_file() == bool(one.values) and (not one.values or digest in path.read_text(encoding="utf-8")):
            continue
        wrong.append(path)
        if write and one.values:
            out, grid = StringIO(), {"axes.grid": True, "grid.alpha": 0.3}
            with rc_context(grid), open_figure(out, one.width, 4.5, one.title) as figure:
                one.draw(figure, *one.data)
            path.write_text(f"{out.getvalue()}<!-- {digest} -->\n", encoding="utf-8")
        elif write:
            path.unlink()
    return wrong
