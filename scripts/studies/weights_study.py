"""Measure on CIFAR-10 what fine-tuning gains: results/weights/finetune.csv, a run folder per row in runs/weights_study.

python scripts/studies/weights_study.py --data data/cifar10

`deit_nano` is trained on eight classes, then on cats and dogs with few images, from these weights and from scratch; one
thread, seconds of processor time. The test images are looked at once, after the last epoch; no setting was chosen by
them. SIGTERM: exit code 75, and the same command continues.
"""

import argparse
import json
import pickle
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from ppattn import cli
from ppattn.config import make_config
from ppattn.data import build_datasets
from ppattn.data.splits import Splits
from scripts.tables.runs import write_csv

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results/weights/finetune.csv"
NEW = ["cat", "dog"]  # the classes of the fine-tuning; the other eight are trained first
SEEDS = (42, 43, 44)
FEW = {50: 30, 500: 8}  # images per class: epochs
COMMON = ["train.threads=1", "train.eval_every=1000", "train.save_every_minutes=1", "data.num_workers=0"]
COMMON += ["data.name=cifar10", "data.eval_batch_size=500"]


def subset(whole: Splits, folder: Path, classes: list[str], per_class: int | None = None, seed: int = 0) -> str:
    """A data set of some classes in CIFAR's own files: `per_class` training images each, and the test images."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    wanted = [whole.classes.index(name) for name in classes]
    train, test = (np.flatnonzero(np.isin(split.labels, wanted)) for split in (whole.train, whole.val))
    if per_class is not None:
        labels = whole.train.labels
        drawn = [rng.choice(np.flatnonzero(labels == label), per_class, replace=False) for label in wanted]
        train = np.sort(np.concatenate(drawn))
    parts = [(f"data_batch_{i}", whole.train, share) for i, share in enumerate(np.array_split(train, 5), 1)]
    for part, split, indices in (*parts, ("test_batch", whole.val, test)):
        pixels = [split.image(int(i)).transpose(2, 0, 1).reshape(1, -1) for i in indices]
        labels = [wanted.index(split.label(int(i))) for i in indices]
        content = {b"data": np.concatenate(pixels), b"labels": labels}
        (folder / part).write_bytes(pickle.dumps(content, protocol=2))
    meta = {b"label_names": [name.encode() for name in classes]}
    (folder / "batches.meta").write_bytes(pickle.dumps(meta, protocol=2))
    return str(folder)


def train(folder: Path, config: str, *overrides: str) -> dict:
    """summary.json of a run, with `cpu_seconds`; what is there is not trained again."""
    spent = folder.with_name(f"{folder.name}.seconds")
    seconds = float(spent.read_text()) if spent.is_file() else 0.0
    if not (folder / "summary.json").is_file():
        print(f"{folder.name}: training", flush=True)
        start = time.process_time()
        given = [*COMMON, *overrides, f"output={folder}"]
        code = cli.main(["train", "-c", config, "--resume", "auto", "-o", *given])
        seconds += time.process_time() - start
        spent.write_text(f"{seconds:.1f}")
        if code:
            sys.exit(code)
    summary = json.loads((folder / "summary.json").read_text()) | {"cpu_seconds": round(seconds)}
    print(f"{folder.name}: {100 * summary['top1']:.2f} % after {summary['cpu_seconds']} s", flush=True)
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data/cifar10", metavar="DIR", help="CIFAR-10")
    parser.add_argument("--runs", type=Path, default=Path("runs/weights_study"), metavar="DIR")
    args = parser.parse_args()
    whole = build_datasets(make_config({"data": {"name": "cifar10", "root": args.data}}))
    root = subset(whole, args.runs / "data/eight_classes", [name for name in whole.classes if name not in NEW])
    first = ["model.attention=inline", "model.num_classes=null", "optimizer.lr=2.0e-3", "train.epochs=2"]
    train(args.runs / "eight_classes", "cifar10/deit_nano", f"data.root={root}", *first)
    rows = []
    for count, epochs in FEW.items():
        for seed in SEEDS:
            root = subset(whole, args.runs / f"data/new_{count}_{seed}", NEW, count, seed)
            common = [f"data.root={root}", f"train.epochs={epochs}", f"train.seed={seed}"]
            common += ["data.crop_ratio=1.0", "optimizer.lr=1.0e-3"]
            tuned = [f"model.weights={args.runs / 'eight_classes'}"]
            scratch = ["model.weights=null", "model.reset_head=false", "optimizer.layer_decay=null"]
            for start, overrides in (("fine-tuned", tuned), ("from scratch", scratch)):
                folder = args.runs / f"{start.replace(' ', '_').replace('-', '_')}_{count}_{seed}"
                summary = train(folder, "finetune/from_run", *common, *overrides)
                row = {"images_per_class": count, "start": start, "seed": seed, "epochs": epochs}
                rows.append(row | {key: summary[key] for key in ("top1", "cpu_seconds")})
                write_csv(RESULTS, rows)


if __name__ == "__main__":
    main()
