"""Trains digit scenes with one head on several attentions, and writes tables and pictures to results/dense.

    bash scripts/setup.sh seg
    bash scripts/setup.sh det
    python examples/compare.py             # everything that is missing
    python examples/compare.py --list      # what is done and what is missing
    python examples/compare.py seg_inline_0 det_softmax_0

Needs digit scenes in data/digit_scenes (examples/digit_scenes.py). A run takes at most ten minutes on two cores that do
nothing else, all of them two hours. A finished run is not repeated unless its yaml file changed. SIGTERM or SIGINT:
exit code 75, and the run that was going on starts anew next time.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results/dense"
STOPPED = 75
SCRIPTS = {"seg": "segmentation/segment.py", "det": "detection/detect.py"}
KEYS = {"seg": "model.backbone.attention", "det": "PPAttn.attention"}
FIGURES = {"seg": ["miou", "accuracy"], "det": ["ap", "ap50", "ap75"]}
ATTENTIONS = {"seg": ["inline", "softmax", "polaformer"], "det": ["inline", "softmax"]}
RUNS = [
    *(("seg", name, 0) for name in ATTENTIONS["seg"]),
    *(("det", name, 0) for name in ATTENTIONS["det"]),
    *(("seg", name, seed) for seed in (1, 2) for name in ATTENTIONS["seg"]),
]
INTRODUCTION = """# Segmentation and detection on digit scenes

`pvt_nano` from scratch with each attention under the same head: SegFormer's (1,500 steps), RetinaNet's (8 epochs).
Percent on 200 validation scenes; `_2x`: at twice the training resolution; brackets: range over the seeds. `python
examples/compare.py` trains all runs ([data](../../docs/guide/dense_prediction.md#digit-scenes)). Rows of the pictures:
scene, ground truth, prediction.
"""
CREDIT = """The photographs behind the digits are china.jpg by danielbuechele (flickr.com/photos/danielbuechele) and
flower.jpg by vultilion (flickr.com/photos/vultilion), both CC BY 2.0, cropped, from scikit-learn."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="default: all")
    parser.add_argument("--list", action="store_true", help="what is done and what is missing")
    args = parser.parse_args(argv)
    names = {f"{task}_{attention}_{seed}": (task, attention, seed) for task, attention, seed in RUNS}
    for name in args.runs:
        if name not in names:
            parser.error(f"unknown run {name}; choose from {', '.join(names)}")
    if args.list:
        for name, run in names.items():
            print(f"{name:20} {'done' if done(name, run[0]) else 'missing'}")
        return 0
    if not (ROOT / "data/digit_scenes/val_2x.txt").exists():
        parser.error("there are no digit scenes: python examples/digit_scenes.py --output data/digit_scenes")
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, stop)
    for name in args.runs or names:
        task, attention, seed = names[name]
        if not done(name, task):
            print(f"{name} ...", flush=True)
            train(name, task, attention, seed)
            tables()
    tables()
    return 0


child: subprocess.Popen | None = None


def stop(*_) -> None:
    if child is not None:
        child.kill()
    print("Stopped; the finished runs are kept.", file=sys.stderr)
    sys.exit(STOPPED)


def call(task: str, *arguments) -> None:
    """A verb of the task's script in the task's environment; exits if it fails."""
    global child
    python = ROOT / f".venv-{task}/bin/python"
    if not python.exists():
        sys.exit(f"error: bash scripts/setup.sh {task} makes the environment that this run needs")
    child = subprocess.Popen([python, ROOT / "examples" / SCRIPTS[task], *map(str, arguments)], cwd=ROOT)
    if child.wait():
        sys.exit(f"error: {SCRIPTS[task]} failed, see above")


def config(task: str) -> Path:
    return ROOT / "examples" / Path(SCRIPTS[task]).parent / "digit_scenes.yaml"


def done(name: str, task: str) -> bool:
    """Whether the run's figures are there and were made with the yaml file as it is."""
    path = RESULTS / f"{name}.json"
    return path.exists() and json.loads(path.read_text())["config"] == config(task).read_text()


def train(name: str, task: str, attention: str, seed: int) -> None:
    run = ROOT / "runs/dense" / name
    shutil.rmtree(run, ignore_errors=True)
    recipe, started = config(task).read_text(), time.monotonic()
    call(task, "train", "-c", config(task), "--output", run, "--seed", seed, "-o", f"{KEYS[task]}={attention}")
    print(f"{name} trained in {time.monotonic() - started:.0f} seconds.", flush=True)
    twice = ("--list", "data/digit_scenes/val_2x.txt")
    if task == "det":
        twice = ("--annotations", "data/digit_scenes/annotations/val_2x.json")
    call(task, "evaluate", "--run", run, *twice)
    RESULTS.mkdir(parents=True, exist_ok=True)
    if seed == 0:
        call(task, "export", "--run", run)
        pictures = [f"data/digit_scenes/images/val_{i:05}.png" for i in range(6)]
        picture = RESULTS / f"{task}_{attention}.png"
        call(task, "predict", "--model", run / "export", *pictures, "--output", picture)
        picture.with_suffix(".svg").unlink(missing_ok=True)  # the page shows the PNG
    metrics = json.loads((run / "metrics.json").read_text())
    figures = {"metrics": metrics, "seed": seed, "config": recipe}
    partial = RESULTS / f".{name}.part"
    partial.write_text(json.dumps(figures, indent=2) + "\n")
    partial.rename(RESULTS / f"{name}.json")


def tables() -> None:
    """Writes segmentation.csv, detection.csv and README.md: means and ranges over the seeds of finished runs."""
    text = [INTRODUCTION]
    for task, title in (("seg", "segmentation"), ("det", "detection")):
        header = ["attention", "seeds", *(f"{f}{at}" for at in ("", "_2x") for f in FIGURES[task])]
        rows = []
        for attention in ATTENTIONS[task]:
            names = [f"{t}_{m}_{s}" for t, m, s in RUNS if (t, m) == (task, attention)]
            runs = [json.loads((RESULTS / f"{n}.json").read_text()) for n in names if done(n, task)]
            if not runs:
                continue
            cells = []
            for part in ("val", "val_2x"):
                for figure in FIGURES[task]:
                    values = [100 * run["metrics"][part][figure] for run in runs]
                    spread = f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else ""
                    cells.append(f"{statistics.mean(values):.1f}{spread}")
            rows.append([attention, len(runs), *cells])
        if not rows:
            continue
        with (RESULTS / f"{title}.csv").open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([header, *rows])
        text += [f"## {title.capitalize()}\n", "| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
        text += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
        text += ["", *(f"![{title} with {row[0]}]({task}_{row[0]}.png)" for row in rows), ""]
    text.append(CREDIT)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "README.md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    sys.exit(main())
