"""Pictures of results/cifar10, benchmark and linearize, as SVG; each holds the digest of the data it was drawn from."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

from ppattn.plots.figure import RUNS, colour_of, legend_below, picture
from ppattn.runtime.cpu import processor
from scripts.tables.cifar10 import LOCAL_KEYS, front, fronts
from scripts.tables.compare import mean_and_error, pooled_deviation
from scripts.tables.linearize import read
from scripts.tables.runs import (
    BACKBONES,
    Row,
    adamw,
    by_tokens,
    local_terms,
    muon,
    nano_times,
    read_json,
    speed_machine,
    unchanged,
)
from scripts.tables.sequences import Lengths, read_lengths
from scripts.tables.speed import SIDES, TOKENS, read_tokens

VERSION = "10"  # counted up when a drawing changes: the pictures are then drawn again
MARKERS = {"deit_nano": "o", "pvt_nano": "s", "swin_nano": "^"}
ACCURACY = "CIFAR-10 test top-1 (%)"
COLOURED = ("inline", "linear", "linformer", "focused", "polaformer", "vittt")  # beside softmax; the others are grey
# small models of others on CIFAR-10 from scratch: 10^15 operations of training, top-1 %
PUBLISHED = {
    "airbench94 (CNN)": (0.29, 94.01),
    "airbench96 (CNN)": (3.1, 96.00),
    "CCT-2/3x2": (2.0, 89.17),
    "CCT-4/3x2": (2.8, 91.45),
}


@contextmanager
def drawn(path: Path, digest: str, width: float, title: str) -> Iterator[Any]:
    """A figure that becomes an SVG file with the digest at its end."""
    out = StringIO()
    with picture(out, width, 4.5, title) as figure:
        yield figure
    path.write_text(f"{out.getvalue()}<!-- {digest} -->\n", encoding="utf-8")


def style(row: Row) -> dict[str, Any]:
    return {"marker": MARKERS[row.backbone], "color": colour_of(row.attention), "markersize": 8}


def draw_cost(path: Path, rows: list[Row], digest: str, label: str, cost: Callable[[Row], float]) -> None:
    """Accuracy against a cost: a colour per attention, a marker per backbone."""
    from matplotlib.lines import Line2D

    with drawn(path, digest, 8, f"The same recipe, {rows[0].epochs} epochs") as figure:
        axes = figure.subplots()
        for row in rows:
            spread = statistics.stdev([100 * top1 for top1 in row.top1]) if len(row.top1) > 1 else None
            axes.errorbar(cost(row), row.mean, spread, capsize=3, alpha=0.85, **style(row))
        marks = [("grey", MARKERS[backbone], title) for backbone, title in BACKBONES.items()]
        marks += [(colour_of(name), "o", name) for name in dict.fromkeys(row.attention for row in rows)]
        marks += [("grey", "|", "standard deviation\nover seeds")]
        handles = [Line2D([], [], marker=marker, color=color, ls="", label=label) for color, marker, label in marks]
        figure.legend(handles=handles, loc="outside right center")
        axes.set(xlabel=label, ylabel=ACCURACY)
        axes.grid(alpha=0.3)


def draw_pflop(path: Path, rows: list[Row], digest: str) -> None:
    """Accuracy against the arithmetic of training: one mark for the attentions with one recipe, one per other run."""
    together = muon(rows)
    others = [row for row in rows if row not in together]
    title = "Grey crosses: published results, not run here; those of airbench average six views of an image"
    with drawn(path, digest, 8, title) as figure:
        axes = figure.subplots()
        if together:
            pairs = [[row.pflop for row in together], [row.mean for row in together]]
            x, y = map(statistics.median, pairs)
            ends = [[[middle - min(own)], [max(own) - middle]] for middle, own in zip((x, y), pairs, strict=True)]
            label = f"{len(together)} attentions, 15 epochs: median, range"
            axes.errorbar(x, y, ends[1], ends[0], fmt="", color="black", capsize=3, label=label)
        for row, color in zip(others, RUNS, strict=False):
            axes.plot(row.pflop, row.mean, "o", color=color, label=row.name)
        for name, (pflop, top1) in PUBLISHED.items():
            axes.plot(pflop, top1, "x", color="grey")
            place = {"xytext": (6, 4)} if pflop < 2.5 else {"xytext": (-6, -3), "ha": "right"}
            axes.annotate(name, (pflop, top1), textcoords="offset points", color="grey", **place)
        axes.set(xscale="log", xlabel="operations of training (10^15)", ylabel=ACCURACY, ylim=(79, 97))
        axes.set_xticks((0.1, 0.2, 0.5, 1, 2, 5))
        axes.grid(alpha=0.3, which="both")
        legend_below(figure)


def draw_lengths(path: Path, times: dict[str, Lengths], digest: str, machine: str) -> None:
    """Milliseconds per sequence against tokens, a line per attention."""
    with drawn(path, digest, 9, f"The sequence backbone on {machine}, batch 1, fastest of three rounds") as figure:
        for axes, (mode, found) in zip(figure.subplots(1, 2), times.items(), strict=True):
            for name, points in found.items():
                axes.loglog(*zip(*sorted(points.items()), strict=True), "o-", color=colour_of(name), label=name)
            tokens = sorted(set().union(*found.values()))
            axes.set(title=mode, xlabel="tokens", ylabel="milliseconds per sequence")
            axes.set_xticks(tokens)
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        legend_below(figure)


def draw_linearized(path: Path, runs: dict[str, dict], digest: str) -> None:
    """Error and change of accuracy per block, and the change with more and more blocks, a line per attention."""
    with drawn(path, digest, 12, "Held-out images, change of top-1 against the teacher on the same images") as figure:
        left, middle, right = figure.subplots(1, 3)
        for name, run in runs.items():
            blocks, look = range(1, len(run["errors"]) + 1), {"color": colour_of(name), "label": name}
            left.plot(blocks, run["errors"], "o-", **look)
            middle.plot(blocks, [100 * (top1 - run["teacher_top1"]) for top1 in run["alone"]], "o-", **look)
            changes = [100 * (step["top1"] - run["teacher_top1"]) for step in run["path"]]
            right.plot(blocks, changes, "o-", **look)
            trained = 100 * (run["held_out_top1"] - run["teacher_held_out_top1"])
            right.plot(blocks[-1], trained, "*", markersize=13, markeredgecolor="black", color=colour_of(name))
        right.plot([], [], "*", markersize=13, color="grey", label="all blocks, trained (5,000 images)")
        left.set(title="relative error of the aligned attention", xlabel="block")
        middle.set(title="this block alone replaced", xlabel="block", ylabel="points (1,000 images)")
        right.set(title="aligned only", xlabel="replaced blocks", ylabel="points (1,000 images)")
        for axes in (left, middle, right):
            axes.grid(alpha=0.3)
        legend_below(figure)


def draw_local_terms(path: Path, rows: list[Row], digest: str) -> None:
    """Accuracy with its 95 % error: a place per attention, a marker per combination."""
    with drawn(path, digest, 8, "15 epochs with Muon, DeiT") as figure:
        axes, found, bars = figure.subplots(), local_terms(rows), error_bars(rows)
        for (label, key), marker, shift in zip(LOCAL_KEYS.items(), "sD^o", (-0.18, -0.06, 0.06, 0.18), strict=True):
            points = [(x + shift, cells[key]) for x, cells in enumerate(found.values()) if key in cells]
            values, errors = [row.mean for _, row in points], [bars(row) for _, row in points]
            axes.errorbar([x for x, _ in points], values, errors, fmt=marker, elinewidth=0.7, label=label)
        axes.set_xticks(range(len(found)), list(found))
        axes.set(xlim=(-0.5, len(found) - 0.5), ylabel=ACCURACY)
        axes.grid(alpha=0.3, axis="y")
        legend_below(figure)


def draw_fronts(path: Path, rows: list[Row], digest: str) -> None:
    """Accuracy, with its 95 % error, against inference; a line joins what none beats in both."""
    from matplotlib.ticker import MaxNLocator

    with drawn(path, digest, 9, "15 epochs with Muon, DeiT") as figure:
        bars = error_bars(rows)
        errors = {row.attention: bars(row) for row in rows}
        for axes, (cost, points) in zip(figure.subplots(1, 2, sharey=True), fronts(rows).items(), strict=True):
            best = front(points)
            axes.step(*zip(*(points[name] for name in best), strict=True), where="post", color="grey", zorder=0)
            for name, point in points.items():
                axes.errorbar(*point, yerr=errors[name], fmt="o", color=colour_of(name), elinewidth=0.7, label=name)
            axes.set(xlabel=f"inference: {cost}", xscale="log")
            axes.xaxis.set_major_locator(MaxNLocator(6))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        figure.axes[0].set(ylabel=ACCURACY)
        legend_below(figure)


def draw_tokens(path: Path, times: dict[str, dict[str, dict[int, float]]], digest: str, machine: str) -> None:
    """Milliseconds per image against tokens: softmax as a thick line, the other attentions beside it."""
    import numpy as np

    def scale(axis: Any, ticks: dict[int, str]) -> None:
        """A logarithmic axis with these ticks and no others."""
        log = lambda values: np.log(np.maximum(values, 1))  # noqa: E731
        getattr(axis.axes, f"set_{axis.axis_name}scale")("function", functions=(log, np.exp))
        axis.set_ticks(list(ticks), list(ticks.values()))

    with drawn(path, digest, 9, f"DeiT-T on {machine}, batch 1") as figure:
        panels = figure.subplots(1, 2, sharey=True)
        for axes, (mode, found) in zip(panels, times.items(), strict=True):
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
            axes.grid(alpha=0.3)
        panels[0].set(ylabel="milliseconds per image")
        legend_below(figure)


def draw_accuracy_tokens(path: Path, rows: list[Row], digest: str, times: dict) -> None:
    """Accuracy against milliseconds per image: a line per attention through its numbers of tokens."""
    with drawn(path, digest, 8, "deit_nano by number of tokens, batch 32") as figure:
        axes, error = figure.subplots(), error_bars(rows)
        for name, own in by_tokens(rows).items():
            ends = [
                (float(times[name, 32, n]["ms_per_image"]), own[n], n) for n in sorted(own) if (name, 32, n) in times
            ]
            if ends:
                x, y = [x for x, _, _ in ends], [row.mean for _, row, _ in ends]
                axes.errorbar(
                    x, y, [error(row) for _, row, _ in ends], capsize=3, marker="o", color=colour_of(name), label=name
                )
            for x_end, row, tokens in ends:
                axes.annotate(f"{tokens:,}", (x_end, row.mean), (5, -11), textcoords="offset points", fontsize=7)
        axes.set(xlabel="milliseconds per image", ylabel=ACCURACY, xscale="log")
        axes.set_xticks([0.5, 1, 2, 5, 10, 20], ["0.5", "1", "2", "5", "10", "20"])
        axes.grid(alpha=0.3)
        axes.legend()


def tokens_times(root: Path, mode: str) -> dict[str, dict[int, float]]:
    """Milliseconds per image of the attentions with their default options, by tokens."""
    return {
        name: {tokens: float(own[tokens]["ms_per_image"]) for tokens in sorted(own)}
        for name, own in read_tokens(root, mode).items()
        if " " not in name
    }


def machine_of(root: Path) -> str:
    """The processor of `tokens_times`."""
    return processor(read_json(root / "results/benchmark/deit_tiny.json")["environment"], threads=2)


def error_bars(rows: list[Row]) -> Callable[[Row], float]:
    """The 95 % error of a row's accuracy in percent, from the test images and the deviation over seeds of all rows."""
    deviation = pooled_deviation([row.top1 for row in rows])
    return lambda row: 196 * mean_and_error(row.top1, deviation)[1]


def outdated(root: Path, rows: list[Row], write: bool) -> list[Path]:
    """The pictures that are not those of the runs; `write` draws them, or removes those without runs."""
    machine, wrong = speed_machine(root), []
    macs, seconds = "multiply-accumulates per image (millions)", f"estimated training seconds, {machine}"
    pictures: dict[str, tuple[list[Row], Callable[[Path, list[Row], str], None]]] = {
        "accuracy_macs": (adamw(rows), lambda *given: draw_cost(*given, macs, lambda row: row.macs / 1e6)),
        "accuracy_seconds": (
            [row for row in adamw(rows) if row.seconds],
            lambda *given: draw_cost(*given, seconds, lambda row: row.seconds or 0.0),
        ),
        "accuracy_pflop": (
            [row for row in rows if row.epochs >= 12 and unchanged(row, "train.epochs=", "augment.")],
            draw_pflop,
        ),
        "local_terms": ([row for cells in local_terms(rows).values() for row in cells.values()], draw_local_terms),
        "accuracy_inference": ([row for row in muon(rows) if row.inference], draw_fronts),
    }
    longer, speeds = [row for own in by_tokens(rows).values() for row in own.values()], nano_times(root, "infer")
    draws: list[tuple[str, list | dict, Callable[[Path, str], None]]] = []
    for name, (chosen, draw) in pictures.items():
        values = [[r.backbone, r.attention, r.top1, r.macs, r.seconds, r.epochs, *r.inference] for r in chosen]
        draws.append((f"cifar10/{name}", values, lambda path, digest, draw=draw, rows=chosen: draw(path, rows, digest)))
    values = [[row.attention, row.epochs, row.overrides, row.top1] for row in longer] if speeds else []
    values += [[list(key), speed["ms_per_image"]] for key, speed in speeds.items()] if longer else []
    draws.append(
        ("cifar10/accuracy_tokens", values, lambda path, digest: draw_accuracy_tokens(path, longer, digest, speeds))
    )
    times = {title: tokens_times(root, mode) for title, mode in (("training", "train"), ("inference", "infer"))}
    tokens = times if any(times.values()) else {}
    draws.append(("benchmark/tokens", tokens, lambda path, digest: draw_tokens(path, times, digest, machine_of(root))))
    lengths = {title: read_lengths(root, mode)[0] for title, mode in (("training", "train"), ("inference", "infer"))}
    sizes = read_json(root / "results/benchmark/sequence_train/benchmark.json")
    draws.append(
        (
            "benchmark/sequences",
            lengths if sizes else {},
            lambda path, digest: draw_lengths(path, lengths, digest, processor(sizes["environment"])),
        )
    )
    linearized = {to: runs[0] for (kind, to), runs in read(root).items() if kind == "" and "path" in runs[0]}
    draws.append(
        ("linearize/blocks", linearized, lambda path, digest: draw_linearized(path, linearized, digest)),
    )
    for name, values, drawing in draws:
        path = root / f"results/{name}.svg"
        digest = hashlib.sha256(json.dumps([VERSION, machine, values]).encode()).hexdigest()
        if path.is_file() == bool(values) and (not values or digest in path.read_text(encoding="utf-8")):
            continue
        wrong.append(path)
        if write and values:
            drawing(path, digest)
        elif write:
            path.unlink()
    return wrong
