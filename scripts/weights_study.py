"""Measure on CIFAR-10 what trained weights are good for; tables in results/weights, a run folder per row in runs/.

python scripts/weights_study.py finetune   # eight classes first, then cats and dogs with few images, or from scratch
python scripts/weights_study.py distill    # softmax attention replaced by a linear one, or trained from scratch
python scripts/weights_study.py distill --teacher runs/cifar10/softmax_deit_nano --data data/cifar10

Only `deit_nano`, one thread, and seconds of processor time. The test images are looked at once, after the last epoch;
no setting was chosen by them. SIGTERM: exit code 75, and the same command continues.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from ppattn import cli
from ppattn.config import make_config
from ppattn.data import build_datasets
from ppattn.files.atomic import write_rows

RESULTS = Path(__file__).resolve().parents[1] / "results/weights"
NEW = ("cat", "dog")  # the classes of the fine-tuning; the other eight are trained first
SEEDS = (42, 43, 44)
FEW = {50: 30, 500: 8}  # images per class: epochs
STUDENTS = 3_000  # training images of the students, an epoch below
SWAPS = {1: 3, 2: 4, 4: 7}  # epochs after one of alignment: epochs from scratch that take at least as long
COMMON = ["train.threads=1", "train.eval_every=1000", "train.save_every_minutes=1", "data.num_workers=0"]
COMMON += ["data.name=cifar10", "data.eval_batch_size=500"]


class Study:
    """Runs in one folder, each done once.

    Args:
        runs: the folder.
        data: where CIFAR-10 is.
    """

    def __init__(self, runs: Path, data: str):
        self.runs = runs
        self.whole = build_datasets(make_config({"data": {"name": "cifar10", "root": data}}))

    def subset(self, name: str, classes: list[str], per_class: int | None, seed: int, test_every: int = 1) -> str:
        """A data set of some classes in CIFAR's own files: `per_class` training images each, and the test images."""
        folder = self.runs / "data" / name
        folder.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(seed)
        wanted = [self.whole.classes.index(name) for name in classes]
        train, test = (np.flatnonzero(np.isin(split.labels, wanted)) for split in (self.whole.train, self.whole.val))
        if per_class is not None:
            labels = self.whole.train.labels
            drawn = [rng.choice(np.flatnonzero(labels == label), per_class, replace=False) for label in wanted]
            train = np.sort(np.concatenate(drawn))
        for part, split, indices in (
            *((f"data_batch_{i}", self.whole.train, share) for i, share in enumerate(np.array_split(train, 5), 1)),
            ("test_batch", self.whole.val, test[::test_every]),
        ):
            pixels = [split.image(int(i)).transpose(2, 0, 1).reshape(1, -1) for i in indices]
            labels = [wanted.index(split.label(int(i))) for i in indices]
            content = {b"data": np.concatenate(pixels), b"labels": labels}
            (folder / part).write_bytes(pickle.dumps(content, protocol=2))
        meta = {b"label_names": [name.encode() for name in classes]}
        (folder / "batches.meta").write_bytes(pickle.dumps(meta, protocol=2))
        return str(folder)

    def train(self, name: str, config: str, *overrides: str) -> dict:
        """summary.json of a run, with `cpu_seconds`; what is there is not trained again."""
        folder, spent = self.runs / name, self.runs / f"{name}.seconds"
        seconds = float(spent.read_text()) if spent.is_file() else 0.0
        if not (folder / "summary.json").is_file():
            print(f"{name}: training", flush=True)
            start = time.process_time()
            given = [*COMMON, *overrides, f"output={folder}"]
            code = cli.main(["train", "-c", config, "--resume", "auto", "-o", *given])
            seconds += time.process_time() - start
            spent.write_text(f"{seconds:.1f}")
            if code:
                sys.exit(code)
        summary = json.loads((folder / "summary.json").read_text()) | {"cpu_seconds": round(seconds)}
        print(f"{name}: {100 * summary['top1']:.2f} % after {summary['cpu_seconds']} s", flush=True)
        return summary


def finetune(study: Study, _: str | None) -> None:
    """Cats and dogs with few images, from weights of the other eight classes and from scratch."""
    others = [name for name in study.whole.classes if name not in NEW]
    root = study.subset("eight_classes", others, None, 0)
    first = ["model.attention=inline", "model.num_classes=null", "optimizer.lr=2.0e-3", "train.epochs=2"]
    study.train("eight_classes", "cifar10/inline_deit_nano", f"data.root={root}", *first)
    rows = []
    for count, epochs in FEW.items():
        for seed in SEEDS:
            root = study.subset(f"new_{count}_{seed}", list(NEW), count, seed)
            common = [f"data.root={root}", f"train.epochs={epochs}", f"train.seed={seed}"]
            common += ["data.crop_ratio=1.0", "optimizer.lr=1.0e-3"]
            starts = {
                "fine-tuned": [f"model.weights={study.runs / 'eight_classes'}"],
                "from scratch": ["model.weights=null", "model.reset_head=false", "optimizer.layer_decay=null"],
            }
            for start, overrides in starts.items():
                name = f"{start.replace(' ', '_').replace('-', '_')}_{count}_{seed}"
                summary = study.train(name, "finetune/from_run", *common, *overrides)
                rows.append([count, start, seed, epochs, summary["top1"], summary["cpu_seconds"]])
                write("finetune.csv", ["images_per_class", "start", "seed", "epochs", "top1", "cpu_seconds"], rows)


def distill(study: Study, teacher: str | None) -> None:
    """Softmax attention of a trained model replaced: aligned and distilled, copied only, and from scratch."""
    if teacher is None:
        everything = study.subset("everything", study.whole.classes, None, 0)
        study.train("teacher", "cifar10/softmax_deit_nano", f"data.root={everything}", "train.epochs=2")
        teacher = str(study.runs / "teacher")
    root = study.subset("students", study.whole.classes, STUDENTS // len(study.whole.classes), 0, test_every=4)
    data = [f"data.root={root}", "data.batch_size=64", "optimizer.lr=1.0e-3"]
    copied = [f"model.weights={teacher}", 'model.allow=["*.attn.*"]']
    rows = []

    def add(
        attention: str, start: str, epochs: int, config: str, *given: str, before: tuple[int, int] = (0, 0)
    ) -> None:
        name = f"{start.replace(' ', '_')}_{attention}_{epochs}"
        summary = study.train(name, config, *data, *given, f"train.epochs={epochs}")
        rows.append([attention, start, before[0] + epochs, summary["top1"], before[1] + summary["cpu_seconds"]])
        write("distill.csv", ["attention", "start", "epochs", "top1", "cpu_seconds"], sorted(rows))

    for attention in ("inline", "linear"):
        model = [f"model.attention={attention}", f"distill.teacher={teacher}"]
        aligned = study.train(f"aligned_{attention}", "finetune/swap_align", *data, *model, copied[0], "train.epochs=1")
        source = f"model.weights={study.runs / f'aligned_{attention}'}"
        for epochs in SWAPS:
            before = (1, aligned["cpu_seconds"])
            add(attention, "swapped", epochs, "finetune/swap_train", *model, source, before=before)
    for start, given in {"from scratch": [], "copied only": copied}.items():
        for epochs in sorted(SWAPS.values(), reverse=True):
            for attention in ("inline", "linear"):
                add(attention, start, epochs, f"cifar10/{attention}_deit_nano", *given)


def write(name: str, head: list[str], rows: list[list]) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    write_rows(RESULTS / name, [head, *rows], "\n")


def main() -> None:
    studies = {"finetune": finetune, "distill": distill}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=studies)
    parser.add_argument("--data", default="data/cifar10", metavar="DIR", help="CIFAR-10")
    parser.add_argument("--runs", type=Path, default=Path("runs/weights_study"), metavar="DIR")
    parser.add_argument("--teacher", metavar="RUN", help="for `distill`; default: softmax, trained here for two epochs")
    args = parser.parse_args()
    studies[args.study](Study(args.runs, args.data), args.teacher)


if __name__ == "__main__":
    main()
