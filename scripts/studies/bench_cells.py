"""Speed and memory against the number of tokens: results/benchmark/cells.csv.

python -m scripts.studies.bench_cells              # about an hour on two cores; finished groups are kept
python -m scripts.studies.bench_cells deit_tiny*   # these groups, again
python -m scripts.tables                           # afterwards: tables and picture

Batch 1, two threads; deit_nano also 32. Tokens are those of the first stage: DeiT-T from 196 (224 pixels) to 12,544
(1,792 pixels), PVT-T and Swin-T from 3,136 (224 pixels) to 65,536 (1,024 pixels), `deit_nano` from 64 (32 pixels) to
1,024 (128 pixels). Every size of a group is one interleaved run of `tools/benchmark.py`.
All attentions together do not fit into 24 GB: DeiT-T takes them in groups that start with softmax, and at 1,792 pixels,
in groups without it. There softmax and the Gaussian kernel, a minute per training step, run in inference only.
"""

import argparse
import json
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

from ppattn.files.tables import read_table
from scripts.run_grid import ROOT
from scripts.tables.runs import write_csv

OUT = ROOT / "results/benchmark"
GROUPS = read_table(Path(__file__).with_name("cells.yaml"))  # by the names of their files in `OUT`
COLUMNS = ["backbone", "attention", "mode", "batch", "img_size", "tokens", "ms_per_image", "against_softmax"]
COLUMNS += ["peak_mb", "step_mb", "macs", "share_of_peak"]


def measure(name: str, again: bool) -> list[dict]:
    """The rows of a group; `against_softmax`: times as fast as softmax, where it is the first of the group."""
    group = {"modes": ["infer", "train"], "options": []} | GROUPS[name]
    kept, folder = OUT / f"{name}.json", f"runs/benchmark/{name}"
    if again or not kept.exists():
        command = [sys.executable, "tools/benchmark.py", "--models", group["model"]]
        command += ["--attentions", *group["attentions"], "--sizes", *map(str, group["sizes"])]
        command += ["--attention-options", *group["options"]] if group["options"] else []
        command += ["--modes", *group["modes"], "--batch", *(["1", "32"] if name == "deit_nano" else ["1"])]
        command += ["--threads", "2", "--rounds", "3", "--seconds", "0.4", "--output", folder]
        subprocess.run(command, cwd=ROOT, check=True)
        shutil.copy(ROOT / folder / "benchmark.json", kept)
    rows = json.loads(kept.read_text())["rows"]
    for row in rows:
        row |= {"backbone": group["model"], "attention": row["name"].partition(" ")[2]}
        row["against_softmax"] = row["against_first"] if group["attentions"][0] == "softmax" else ""
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help="measured again, * stands for any letters")
    groups = parser.parse_args().groups
    rows = [row for name in GROUPS for row in measure(name, any(fnmatch(name, group) for group in groups))]
    for row in rows:
        row |= {key: f"{value:.4g}" for key, value in row.items() if isinstance(value, float)}
    write_csv(OUT / "cells.csv", [{key: row.get(key, "") for key in COLUMNS} for row in rows])


if __name__ == "__main__":
    main()
