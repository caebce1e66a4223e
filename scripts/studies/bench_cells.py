"""Speed and memory against the number of tokens: results/benchmark/cells.csv.

python scripts/studies/bench_cells.py              # about an hour on two cores; finished groups are kept
python scripts/studies/bench_cells.py deit_tiny*   # these groups, again
python -m scripts.tables                           # afterwards: tables and picture

Batch 1, two threads; deit_nano also 32. Tokens are those of the first stage: DeiT-T from 196 (224 pixels) to 12,544
(1,792 pixels), PVT-T and Swin-T from 3,136 (224 pixels) to 65,536 (1,024 pixels), `deit_nano` from 64 (32 pixels) to
1,024 (128 pixels). Every size of a group is one interleaved run of `tools/benchmark.py`.
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ppattn.files.atomic import write_rows

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "results/benchmark"
ATTENTIONS = ["softmax", "inline", "linear", "polaformer", "soft", "soft_norm", "less"]
REST = ["focused", "agent", "performer", "linformer", "nystromformer", "gaussian"]
NEWEST = ["mala", "rala", "vittt", "mhla", "nalaformer", "mila"]
PYRAMIDS = [*ATTENTIONS[:4], "mala"]
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
    "deit_tiny_encoders": ("deit_tiny", ["softmax", "t5", "window", "circulant"], SIZES, BOTH, []),
    "pvt_tiny": ("pvt_tiny", PYRAMIDS, [224, 512, 1024], BOTH, []),
    "swin_tiny": ("swin_tiny", PYRAMIDS, [224, 512, 1024], BOTH, []),
    "deit_nano": ("deit_nano", ["softmax", "linear", "inline", "polaformer", "mila", "mhla"], [32, 64, 128], BOTH, []),
}
COLUMNS = ["backbone", "attention", "mode", "batch", "img_size", "tokens", "ms_per_image", "against_softmax"]
COLUMNS += ["peak_mb", "step_mb", "macs", "share_of_peak"]


def measure(name: str, again: bool) -> list[dict]:
    """The rows of a group; `against_softmax`: times as fast as softmax, where it is the first of the group."""
    model, attentions, sizes, modes, options = GROUPS[name]
    kept, folder = OUT / f"{name}.json", f"runs/benchmark/{name}"
    if again or not kept.exists():
        command = [sys.executable, "tools/benchmark.py", "--models", model, "--attentions", *attentions]
        command += ["--attention-options", *options] if options else []
        command += ["--sizes", *map(str, sizes), "--modes", *modes, "--batch", "1"]
        command += ["32"] if name == "deit_nano" else []
        command += ["--threads", "2", "--rounds", "3", "--seconds", "0.4", "--output", folder]
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


if __name__ == "__main__":
    main()
