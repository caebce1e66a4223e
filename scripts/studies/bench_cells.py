"""Speed and memory against the number of tokens: results/benchmark/cells.csv and its curves.

python scripts/studies/bench_cells.py              # about an hour on two cores; finished groups are kept
python scripts/studies/bench_cells.py deit_tiny*   # these groups, again

Batch 1, two threads. Tokens are those of the first stage: DeiT-T from 196 (224 pixels) to 12,544 (1,792 pixels), PVT-T
and Swin-T 3,136 and 12,544 (224 and 448 pixels). Every size of a group is one interleaved run of `tools/benchmark.py`.
All attentions together do not fit into 24 GB: DeiT-T takes them in groups that start with softmax, and at 1,792 pixels,
in groups without it. There softmax and the Gaussian kernel, a minute per training step, run in inference only.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from io import StringIO
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from matplotlib.ticker import LogLocator

from ppattn.files.atomic import write_rows
from ppattn.plots.figure import picture, styles
from ppattn.runtime.cpu import processor

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "results/benchmark"
ATTENTIONS = ["softmax", "inline", "linear", "polaformer", "soft", "soft_norm", "less"]
REST = ["focused", "agent", "performer", "linformer", "nystromformer", "gaussian"]
NEWEST = ["mala", "rala", "vittt", "mhla", "nalaformer", "mila"]
DRAWN = ["softmax", "inline", "linear", "polaformer", "soft", "agent", "mala", "vittt"]
SIZES = [224, 448, 896]
BOTH = ["infer", "train"]
# folder -> model, attentions, sizes, modes, options of the attentions
GROUPS = {
    "deit_tiny": ("deit_tiny", ATTENTIONS, SIZES, BOTH, []),
    "deit_tiny_rest": ("deit_tiny", ["softmax", *REST], SIZES, BOTH, []),
    "deit_tiny_newest": ("deit_tiny", ["softmax", *NEWEST], SIZES, BOTH, []),
    "deit_tiny_1792": ("deit_tiny", ATTENTIONS[1:4], [1792], BOTH, []),
    "deit_tiny_1792_soft": ("deit_tiny", ATTENTIONS[4:6], [1792], BOTH, []),
    "deit_tiny_1792_rest_1": ("deit_tiny", REST[:3], [1792], BOTH, []),
    "deit_tiny_1792_rest_2": ("deit_tiny", REST[3:5], [1792], BOTH, []),
    "deit_tiny_1792_newest_1": ("deit_tiny", NEWEST[:3], [1792], BOTH, []),
    "deit_tiny_1792_newest_2": ("deit_tiny", NEWEST[3:], [1792], BOTH, []),
    "deit_tiny_1792_softmax": ("deit_tiny", ["softmax", "gaussian"], [1792], ["infer"], []),
    "deit_tiny_less": ("deit_tiny", ["softmax", "less"], [224, 448], BOTH, ["max_tokens=1000"]),
    "deit_tiny_pool": ("deit_tiny", ["soft", "soft_norm"], [448, 896, 1792], BOTH, ["landmarks=pool"]),
    "pvt_tiny": ("pvt_tiny", ATTENTIONS, [224, 448], BOTH, []),
    "swin_tiny": ("swin_tiny", ATTENTIONS, [224, 448], BOTH, []),
}
COLUMNS = ["backbone", "attention", "mode", "img_size", "tokens", "ms_per_image", "against_softmax", "peak_mb"]
COLUMNS += ["step_mb", "macs", "share_of_peak"]


def measure(name: str, again: bool) -> list[dict]:
    """The rows of a group; `against_softmax`: times as fast as softmax, where it is the first of the group."""
    model, attentions, sizes, modes, options = GROUPS[name]
    kept, folder = OUT / f"{name}.json", f"runs/benchmark/{name}"
    if again or not kept.exists():
        command = [sys.executable, "tools/benchmark.py", "--models", model, "--attentions", *attentions]
        command += ["--attention-options", *options] if options else []
        command += ["--sizes", *map(str, sizes), "--modes", *modes, "--batch", "1", "--threads", "2"]
        command += ["--rounds", "3", "--seconds", "0.4", "--output", folder]
        subprocess.run(command, cwd=ROOT, check=True)
        shutil.copy(ROOT / folder / "benchmark.json", kept)
    rows = json.loads(kept.read_text())["rows"]
    for row in rows:
        row |= {"backbone": model, "attention": row["name"].partition(" ")[2]}
        row["against_softmax"] = row["against_first"] if attentions[0] == "softmax" else ""
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help="measured again, * stands for any letters")
    groups = parser.parse_args().groups
    rows = [row for name in GROUPS for row in measure(name, any(fnmatch(name, group) for group in groups))]
    values = [
        [f"{v:.4g}" if isinstance(v, float) else v for v in (row.get(key, "") for key in COLUMNS)] for row in rows
    ]
    write_rows(OUT / "cells.csv", [COLUMNS, *values], "\n")
    draw(rows)


def draw(rows: list[dict]) -> None:
    machine = json.loads((OUT / "deit_tiny.json").read_text())["environment"]
    title, out = f"DeiT-T, batch 1, {processor(machine, threads=2)}", StringIO()
    with picture(out, 11, 4.4, title) as figure:
        panels = figure.subplots(1, 2, sharey=True)
        for panel, mode, name in zip(panels, BOTH, ("inference", "training"), strict=True):
            style = styles({attention: attention for attention in DRAWN})
            for attention in DRAWN:
                own = [r for r in rows if (r["backbone"], r["attention"], r["mode"]) == ("deit_tiny", attention, mode)]
                points = sorted({row["tokens"]: row["ms_per_image"] for row in reversed(own)}.items())
                panel.loglog(*zip(*points, strict=True), marker="o", label=attention, **style[attention])
            panel.set(xlabel="tokens", ylabel="ms per image", title=name, xticks=[196, 784, 3136, 12544])
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.grid(alpha=0.3)
        panels[0].legend(fontsize=8)
    (OUT / "deit_tiny.svg").write_text(out.getvalue(), encoding="utf-8")


if __name__ == "__main__":
    main()
