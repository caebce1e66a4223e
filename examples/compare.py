"""Trains digit scenes with one head on several attentions, and writes tables and pictures to results/dense.

    bash scripts/setup.sh seg
    bash scripts/setup.sh det
    python examples/compare.py             # everything that is missing
    python examples/compare.py --list      # what is done and what is missing
    python examples/compare.py seg_inline_0 det_softmax_0 deit_linear_0

Needs digit scenes in data/digit_scenes, and of 128 pixels in data/digit_scenes_128 (examples/digit_scenes.py). A run
takes about ten minutes on two idle cores. A finished run is not repeated unless its yaml file changed. SIGTERM or
SIGINT: exit code 75, and the interrupted run starts over next time.
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
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results/dense"
STOPPED = 75


class Task(NamedTuple):
    environment: str  # .venv-ENVIRONMENT runs the script
    script: str  # in examples/
    config: str  # in examples/
    data: str
    choice: str  # of an attention, as an override of the config
    figures: list[str]
    attentions: list[str]
    seeds: int
    size: int  # pixels
    table: str

    @property
    def path(self) -> Path:
        return ROOT / "examples" / self.config


SEGMENT, MIOU = "segmentation/segment.py", ["miou", "accuracy"]
TASKS = {
    "seg": Task(
        "seg", SEGMENT, "segmentation/digit_scenes.yaml", "data/digit_scenes",
        "model.backbone.attention={}", MIOU,
        ["inline", "softmax", "polaformer"], 3, 64, "segmentation",
    ),
    "det": Task(
        "det", "detection/detect.py", "detection/digit_scenes.yaml", "data/digit_scenes", "PPAttn.attention={}",
        ["ap", "ap50", "ap75"], ["inline", "softmax"], 1, 64, "detection",
    ),
    "deit": Task(
        "seg", SEGMENT, "segmentation/digit_scenes_128.yaml", "data/digit_scenes_128",
        "model.backbone.model={}_deit_nano_cifar10", MIOU,
        ["softmax", "inline", "linear", "polaformer"], 3, 128, "segmentation_1024",
    ),
}  # fmt: skip
RUNS = [(task, name, seed) for seed in range(3) for task, t in TASKS.items() if seed < t.seeds for name in t.attentions]
INTRODUCTION = """# Segmentation and detection on digit scenes

Percent on 200 validation scenes; `_2x`: at twice the training resolution; brackets: range over the seeds. `python
examples/compare.py` trains all runs ([data](../../docs/guide/dense_prediction.md#digit-scenes)). Rows of the pictures:
scene, ground truth, prediction.
"""
SECTIONS = {
    "seg": "## Segmentation\n\n`pvt_nano` from scratch under SegFormer's head, 1,500 steps; scenes of 64 pixels.\n",
    "det": "## Detection\n\n`pvt_nano` from scratch under RetinaNet's head, 8 epochs; scenes of 64 pixels.\n",
    "deit": """## Segmentation with 1,024 and 4,096 tokens

`deit_nano`, a plain transformer with patches of 4 pixels, initialised with its CIFAR-10 weights, under a linear layer
that predicts all pixels of a token; 1,500 steps of 8 scenes of 128 pixels; `_2x`: 256 pixels. Milliseconds per image
and megabytes of a batch of 8 of `deit_nano` alone, two threads of an Intel Xeon (`ppattn benchmark`, speed.csv; ratios
on other pages are medians over its rounds).
""",
}
SPEEDS = {
    "training, ms": "train 128x128 ms",
    "training, ms_2x": "train 256x256 ms",
    "training, MB": "train 128x128 MB",
    "training, MB_2x": "train 256x256 MB",
    "inference, ms": "infer 128x128 ms",
    "inference, ms_2x": "infer 256x256 ms",
}
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
    chosen = args.runs or list(names)
    for task in (TASKS[kind] for kind in dict.fromkeys(names[name][0] for name in chosen)):
        if not (ROOT / task.data / "val_2x.txt").exists():
            making = f"python examples/digit_scenes.py --size {task.size} --output {task.data}"
            parser.error(f"there are no digit scenes: {making}")
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, stop)
    for name in chosen:
        if not done(name, names[name][0]):
            print(f"{name} ...", flush=True)
            train(name, *names[name])
            tables()
    tables()
    return 0


child: subprocess.Popen | None = None


def stop(*_) -> None:
    if child is not None:
        child.kill()
    print("Stopped; the finished runs are kept.", file=sys.stderr)
    sys.exit(STOPPED)


def call(task: Task, *arguments) -> None:
    """A verb of the task's script in the task's environment; exits if it fails."""
    global child
    python = ROOT / f".venv-{task.environment}/bin/python"
    if not python.exists():
        sys.exit(f"error: bash scripts/setup.sh {task.environment} makes the environment that this run needs")
    child = subprocess.Popen([python, ROOT / "examples" / task.script, *map(str, arguments)], cwd=ROOT)
    if child.wait():
        sys.exit(f"error: {task.script} failed, see above")


def done(name: str, task: str) -> bool:
    """Whether the run's figures are there and were made with the yaml file as it is."""
    path = RESULTS / f"{name}.json"
    return path.exists() and json.loads(path.read_text())["config"] == TASKS[task].path.read_text()


def train(name: str, kind: str, attention: str, seed: int) -> None:
    task, run = TASKS[kind], ROOT / "runs/dense" / name
    shutil.rmtree(run, ignore_errors=True)
    recipe, started = task.path.read_text(), time.monotonic()
    call(task, "train", "-c", task.path, "--output", run, "--seed", seed, "-o", task.choice.format(attention))
    print(f"{name} trained in {time.monotonic() - started:.0f} seconds.", flush=True)
    twice = ("--list", f"{task.data}/val_2x.txt")
    if kind == "det":
        twice = ("--annotations", f"{task.data}/annotations/val_2x.json")
    call(task, "evaluate", "--run", run, *twice)
    RESULTS.mkdir(parents=True, exist_ok=True)
    if seed == 0:
        call(task, "export", "--run", run, *(["--size", task.size, task.size] if task.script == SEGMENT else []))
        pictures = [f"{task.data}/images/val_{i:05}.png" for i in range(6 * 64 // task.size)]
        picture = RESULTS / f"{kind}_{attention}.png"
        call(task, "predict", "--model", run / "export", *pictures, "--output", picture)
        picture.with_suffix(".svg").unlink(missing_ok=True)  # the page shows the PNG
    metrics = json.loads((run / "metrics.json").read_text())
    figures = {"metrics": metrics, "seed": seed, "config": recipe}
    partial = RESULTS / f".{name}.part"
    partial.write_text(json.dumps(figures, indent=2) + "\n")
    partial.rename(RESULTS / f"{name}.json")


def tables() -> None:
    """Writes a CSV file per task, and README.md: means and ranges over the seeds of finished runs."""
    text = [INTRODUCTION]
    for kind, task in TASKS.items():
        times = speeds() if kind == "deit" else {}
        header = ["attention", "seeds", *(f"{f}{at}" for at in ("", "_2x") for f in task.figures)]
        header += [*SPEEDS] if times else []
        rows = []
        for attention in task.attentions:
            names = [f"{t}_{m}_{s}" for t, m, s in RUNS if (t, m) == (kind, attention)]
            runs = [json.loads((RESULTS / f"{n}.json").read_text()) for n in names if done(n, kind)]
            if not runs:
                continue
            cells = []
            for part in ("val", "val_2x"):
                for figure in task.figures:
                    values = [100 * run["metrics"][part][figure] for run in runs]
                    spread = f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else ""
                    cells.append(f"{statistics.mean(values):.1f}{spread}")
            rows.append([attention, len(runs), *cells, *times.get(attention, [])])
        if not rows:
            continue
        with (RESULTS / f"{task.table}.csv").open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([header, *rows])
        text += [SECTIONS[kind], "| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
        text += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
        text += ["", *(f"![{task.table.partition('_')[0]} with {row[0]}]({kind}_{row[0]}.png)" for row in rows), ""]
    text.append(CREDIT)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "README.md").write_text("\n".join(text) + "\n")


def speeds() -> dict[str, list[str]]:
    """`SPEEDS` by attention, from speed.csv, the benchmark.csv of `ppattn benchmark --models deit_nano --attentions
    softmax inline linear polaformer --sizes 128 256 --modes train infer --batch 8 --output DIR`."""
    path = RESULTS / "speed.csv"
    found: dict[str, dict[str, str]] = {}
    for row in csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines()) if path.exists() else []:
        own, key = found.setdefault(row["attention"], {}), f"{row['mode']} {row['img_size']}"
        own[f"{key} ms"], own[f"{key} MB"] = (f"{float(row[name]):,.1f}" for name in ("ms_per_image", "step_mb"))
    return {name: [own.get(key, "") for key in SPEEDS.values()] for name, own in found.items()}


if __name__ == "__main__":
    sys.exit(main())
