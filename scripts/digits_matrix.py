"""Train every attention on every nano backbone for 200 steps on digits and write results/digits_matrix.csv.

python scripts/digits_matrix.py            # about ten minutes on two cores; finished runs are kept
python scripts/digits_matrix.py --again    # all of them anew
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppattn import zoo
from ppattn.files.atomic import write_rows

ROOT = Path(__file__).resolve().parents[1]
STEPS = 200
SETTINGS = {
    "data.name": "digits",
    "data.root": "null",
    "data.batch_size": 64,
    "model.num_classes": 10,
    "model.img_size": 16,
    "augment.pad_crop": 1,
    "augment.horizontal_flip": 0.0,
    "train.epochs": 10,
    "train.max_steps": STEPS,
    "train.threads": 1,
    "schedule.warmup_epochs": 1,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="repeat finished runs, too")
    again, rows = parser.parse_args().again, []
    for backbone in ("deit", "pvt", "swin"):
        for attention in zoo.list_attentions():
            run = ROOT / f"runs/digits_matrix/{attention}_{backbone}_nano"
            if again:
                shutil.rmtree(run, ignore_errors=True)
            if not (run / "summary.json").exists():
                overrides = {**SETTINGS, "model.attention": attention, "output": run}
                command = [sys.executable, "tools/train.py", "-c", f"configs/cifar10/softmax_{backbone}_nano.yaml"]
                command += [word for key, value in overrides.items() for word in ("-o", f"{key}={value}")]
                subprocess.run([*command, "--resume", "auto"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            summary = json.loads((run / "summary.json").read_text())
            environment = json.loads((run / "env.json").read_text())
            rows.append(
                {
                    "backbone": f"{backbone}_nano",
                    "attention": attention,
                    "top1": round(summary["top1"], 4),
                    "steps": summary["steps"],
                    "params": summary["params"],
                    "seconds": summary["seconds"],
                    "commit": environment["git_commit"][:7],
                }
            )
            print(rows[-1], flush=True)
    out = ROOT / "results/digits_matrix.csv"
    out.parent.mkdir(exist_ok=True)
    write_rows(out, [[*rows[0]], *(row.values() for row in rows)], "\n")
    worst = min(rows, key=lambda row: row["top1"])
    print(f"results/digits_matrix.csv: lowest top-1 {worst['top1']:.3f} ({worst['attention']}, {worst['backbone']})")


if __name__ == "__main__":
    main()
