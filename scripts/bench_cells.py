"""Speed and memory of 21 models against the number of tokens: table, curves, exponents, crossovers with softmax.

python scripts/bench_cells.py            # about half an hour on two cores; finished groups are kept
python scripts/bench_cells.py --again    # all of them again

Batch 1, two threads. Tokens are those of the first stage: DeiT-T from 196 (224 pixels) to 12,544 (1,792 pixels), PVT-T
and Swin-T 3,136 and 12,544 (224 and 448 pixels). Every size is one interleaved run of `tools/benchmark.py`; the largest
one takes the attentions in parts, since all of them together do not fit into 24 GB, and is in no comparison.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from statistics import linear_regression

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from matplotlib.ticker import LogLocator

from ppattn.drawing import picture, styles
from ppattn.files import write_rows
from ppattn.text import processor

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "results/benchmark"
ATTENTIONS = ["softmax", "inline", "linear", "polaformer", "soft", "soft_norm", "less"]
LINEAR = ["inline", "linear", "polaformer"]
BOTH = ["infer", "train"]
# folder -> model, attentions, sizes, modes, options of the attentions
GROUPS = {
    "deit_tiny": ("deit_tiny", ATTENTIONS, [224, 448, 896], BOTH, []),
    "deit_tiny_1792_softmax": ("deit_tiny", ["softmax", "inline"], [1792], ["infer"], []),
    "deit_tiny_1792": ("deit_tiny", ["inline", "linear", "polaformer"], [1792], BOTH, []),
    "deit_tiny_less": ("deit_tiny", ["softmax", "less"], [224, 448], BOTH, ["max_tokens=1000"]),
    "deit_tiny_pool": ("deit_tiny", ["soft", "soft_norm"], [448, 896, 1792], BOTH, ["landmarks=pool"]),
    "pvt_tiny": ("pvt_tiny", ATTENTIONS, [224, 448], BOTH, []),
    "swin_tiny": ("swin_tiny", ATTENTIONS, [224, 448], BOTH, []),
}


def measure(name: str, again: bool) -> list[dict]:
    model, attentions, sizes, modes, options = GROUPS[name]
    folder = OUT / name
    if again or not (folder / "benchmark.json").exists():
        command = [sys.executable, "tools/benchmark.py", "--models", model, "--attentions", *attentions]
        command += ["--attention-options", *options] if options else []
        command += ["--sizes", *map(str, sizes), "--modes", *modes, "--batch", "1", "--threads", "2"]
        subprocess.run(
            [*command, "--rounds", "3", "--seconds", "0.4", "--output", str(folder.relative_to(ROOT))],
            cwd=ROOT,
            check=True,
        )
    rows = json.loads((folder / "benchmark.json").read_text())["rows"]
    return [{"backbone": model, "attention": row["name"].partition(" ")[2], "part": name, **row} for row in rows]


def exponent(points: list[tuple[float, float]]) -> float:
    """Slope of the least-squares line through the logarithms."""
    return linear_regression([math.log(x) for x, _ in points], [math.log(y) for _, y in points]).slope


def crossover(mine: dict[int, float], softmax: dict[int, float]) -> str:
    """Where the line of an attention passes below softmax's, by interpolation between logarithms."""
    sizes = sorted(mine.keys() & softmax.keys())
    gaps = [math.log(mine[n] / softmax[n]) for n in sizes]
    if gaps[0] <= 0:
        return f"faster from {sizes[0]:,} on" if max(gaps) <= 0 else "varies"
    for (n, a), (m, b) in pairwise(zip(sizes, gaps, strict=True)):
        if a > 0 >= b:
            return f"{round(n * (m / n) ** (a / (a - b)), -1):,.0f}"
    return f"not up to {sizes[-1]:,}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="measure finished groups, too")
    again = parser.parse_args().again
    rows = [row for name in GROUPS for row in measure(name, again)]
    columns = [
        "backbone",
        "attention",
        "mode",
        "img_size",
        "tokens",
        "ms_per_image",
        "peak_mb",
        "macs",
        "share_of_peak",
    ]
    cells = [[f"{v:.4g}" if isinstance(v, float) else v for v in map(row.get, columns)] for row in rows]
    write_rows(OUT / "cells.csv", [columns, *cells], "\n")

    def line(attention: str, mode: str, value: str = "ms_per_image", part: str = "deit_tiny*") -> dict[int, float]:
        found = [r for r in rows if (r["attention"], r["mode"]) == (attention, mode) and fnmatch(r["part"], part)]
        first = {row["tokens"]: row[value] for row in reversed(found)}  # of the groups that measured this size
        return dict(sorted(first.items()))

    # Above 256 tokens layers of Less-Attention are vanilla: its row comes from the run with a higher limit.
    curves = {name: "deit_tiny*" for name in ATTENTIONS[:-1]}
    curves |= {f"{name} landmarks=pool": "deit_tiny_pool" for name in ("soft", "soft_norm")}
    curves["less max_tokens=1000"] = "deit_tiny_less"
    print("| DeiT-T with | exponent, infer | exponent, train | faster than softmax from (tokens), infer | train |")
    print("|---|---|---|---|---|")
    for attention, part in curves.items():
        cells = []
        for mode in BOTH:
            points = [(n, ms) for n, ms in line(attention, mode, part=part).items() if n >= 784]
            cells.append(f"{exponent(points):.2f}" if len(points) > 1 else "")
        for mode in BOTH:
            mine, softmax = (line(name, mode, part=part.removesuffix("*")) for name in (attention, "softmax"))
            cells.append(crossover(mine, softmax) if softmax and attention != "softmax" else "")
        print(f"| {attention} | {' | '.join(cells)} |")
    print("\n| training memory, MB | " + " | ".join(f"{n:,}" for n in line("inline", "train")) + " |")
    print("|---" * (1 + len(line("inline", "train"))) + "|")
    for attention in ["softmax", *LINEAR]:
        print(
            f"| {attention} | " + " | ".join(f"{mb:,.0f}" for mb in line(attention, "train", "peak_mb").values()) + " |"
        )
    print("\n| times as fast as softmax | 3,136 tokens, infer | train | 12,544 tokens, infer | train |")
    print("|---|---|---|---|---|")
    for part in ("pvt_tiny", "swin_tiny"):
        for attention in ATTENTIONS[1:]:
            ratios = [
                line("softmax", mode, part=part)[n] / line(attention, mode, part=part)[n]
                for n in (3136, 12544)
                for mode in BOTH
            ]
            print(f"| {part}, {attention} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |")
    draw(rows)


def draw(rows: list[dict]) -> None:
    machine = json.loads((OUT / "deit_tiny/benchmark.json").read_text())["environment"]
    title = f"DeiT-T, batch 1, {processor(machine, threads=2)}"
    with picture(OUT / "deit_tiny.png", 11, 4.4, title) as figure:
        panels = figure.subplots(1, 2, sharey=True)
        for panel, mode, name in zip(panels, BOTH, ("inference", "training"), strict=True):
            drawn = [*ATTENTIONS[:-1], "less max_tokens=1000", "soft landmarks=pool"]
            style = styles({label: label.partition(" ")[0] for label in drawn})
            for attention in drawn:
                own = [r for r in rows if (r["backbone"], r["attention"], r["mode"]) == ("deit_tiny", attention, mode)]
                points = sorted({row["tokens"]: row["ms_per_image"] for row in reversed(own)}.items())
                panel.loglog(*zip(*points, strict=True), marker="o", label=attention, **style[attention])
            panel.set(xlabel="tokens", ylabel="ms per image", title=name, xticks=[196, 784, 3136, 12544])
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.grid(alpha=0.3)
        panels[0].legend(fontsize=8)


if __name__ == "__main__":
    main()
