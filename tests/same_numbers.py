"""Record the losses of the first 60 steps and the final weights of small runs; compare them after a change.

python tests/same_numbers.py record before.json     # on the commit before
python tests/same_numbers.py compare before.json    # on the commit after

Compared bit for bit are the loss of each step, rows of metrics.csv, and all tensors of `latest` and `best`. A recording
holds for one processor and one set of libraries. The training data are made once, beside the recording.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

STEPS = 60
MODEL = {"name": "deit_nano", "img_size": 8, "patch_size": 2, "embed_dim": 12, "depth": 2, "num_heads": 3}
DROPPED = MODEL | {"drop_rate": 0.1, "drop_path_rate": 0.2}
MIXED = {
    "random_resized_crop": {}, "rand_augment": "rand-m9-mstd0.5-inc1", "random_erasing": 0.5, "mixup": 0.8,
    "cutmix": 1.0,
}  # fmt: skip
SHARDS = {"name": "shards", "root": "DATA/shards", "batch_size": 16, "shuffle_buffer": 50, "num_workers": 2}
RUNS: dict[str, dict] = {
    "plain": {},
    "accumulate": {"train": {"accumulate": 4}, "data": {"batch_size": 20}, "model": DROPPED},
    "moving average": {"train": {"ema": 0.9, "ema_warmup": True, "clip_grad": 1.0}},
    "mixing": {"augment": MIXED, "loss": {"label_smoothing": 0.1}, "data": {"num_workers": 2}},
    "muon": {"optimizer": {"name": "muon", "momentum": 0.95}, "schedule": {"warmup_epochs": 1}},
    "distillation": {"distill": {"teacher": "DATA/teacher", "blocks": 0.5}, "model": {"attention": "inline"}},
    "shards": {"data": SHARDS, "augment": {"horizontal_flip": 0.5, "mixup": 0.8}},
    "two processes": {"data": {"batch_size": 30}, "model": {"attention": "inline"}, "train": {"accumulate": 2}},
    "shards, two processes": {"data": SHARDS | {"batch_size": 8}},
    "holdout and early stop": {
        "data": {"holdout": 237, "batch_size": 100},
        "train": {"early_stop": {"patience": 2, "min_delta": 0.1}},
    },
    "recomputation": {"model": DROPPED | {"recompute": True}},
    "class folders": {
        "data": {"name": "folder", "root": "DATA/files", "batch_size": 16, "num_workers": 2},
        "augment": {"repeats": 2, "alternating_flip": True, "color_jitter": [0.2, 0.2, 0.2]},
    },
}


def config(name: str, data: Path, folder: Path):
    from ppattn.config import make_config

    own = json.loads(json.dumps(RUNS[name]).replace("DATA", str(data)))
    train = {"epochs": 6, "max_steps": STEPS, "seed": 7, "threads": 1, "log_every": 1}
    every = {"model": MODEL, "data": {"name": "digits", "batch_size": 60}, "train": train, "optimizer": {"lr": 0.01}}
    tree = {section: every.get(section, {}) | own.get(section, {}) for section in every | own}
    return make_config(tree | {"output": str(folder)})


def make_data(data: Path) -> None:
    """Made images in class folders, the same as shards, and a teacher trained on digits."""
    from ppattn.data import build_datasets
    from ppattn.engine.trainer import train
    from scripts.make_shards import write_shards
    from tests.helpers.data_sets import fill

    fill(data / "files", ["train"], "abc", 61)
    fill(data / "files", ["val"], "abc", 10)
    splits = build_datasets(config("class folders", data, data / "none"))
    for part in ("train", "val"):
        write_shards(getattr(splits, part), data / "shards", part, per_shard=25)
    (data / "shards" / "classes.txt").write_text("a\nb\nc\n")
    train(config("plain", data, data / "teacher"))


def one(name: str, data: Path, folder: Path) -> None:
    """Train; leave losses.json in the folder."""
    from ppattn.engine import outputs, trainer

    losses: list[str] = []
    honest = outputs.Outputs.scalars

    def scalars(self, step, values):
        if "train/loss" in values:
            losses.append(f"{step}: {float(values['train/loss']).hex()}")
        honest(self, step, values)

    outputs.Outputs.scalars = scalars  # type: ignore[method-assign]
    trainer.train(config(name, data, folder))
    if int(os.environ.get("PADDLE_TRAINER_ID", "0")) == 0:
        (folder / "losses.json").write_text(json.dumps(losses))


def result(name: str, data: Path) -> dict:
    """Train in processes of its own and say what came out."""
    from ppattn import weights

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        call = [__file__, "one", str(data), "--name", name, "--folder", str(folder)]
        if "two processes" in name:
            call = ["-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir", f"{scratch}/launch", *call]
        environ = os.environ | {"PADDLE_DISTRI_BACKEND": "gloo"}
        done = subprocess.run([sys.executable, "-W", "ignore", *call], capture_output=True, text=True, env=environ)
        if done.returncode:
            raise SystemExit(f"{name}: {(done.stdout + done.stderr)[-3000:]}")
        digest = hashlib.sha256()
        for which in ("latest", "best"):
            tensors, _ = weights.read(folder / "checkpoints" / which)
            for key in sorted(tensors):
                digest.update(key.encode() + tensors[key].tobytes())
        history = [line.split(",") for line in (folder / "metrics.csv").read_text().split()]
        columns = [history[0].index(key) for key in ("epoch", "step", "lr", "train_loss", "val_loss", "top1")]
        return {
            "losses": json.loads((folder / "losses.json").read_text()),
            "weights": digest.hexdigest(),
            "rows": [[row[k] for k in columns] for row in history],
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "compare", "one"])
    parser.add_argument("file", type=Path, help="the recording")
    parser.add_argument("--name", help="this run only")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.action == "one":
        one(args.name, args.file, args.folder)
        return 0
    data = args.file.with_suffix(".data").resolve()
    if args.action == "record" and not data.exists():
        make_data(data)
    before = json.loads(args.file.read_text()) if args.action == "compare" else {}
    found, failed = {}, 0
    for name in [args.name] if args.name else RUNS:
        found[name] = result(name, data)
        if args.action == "record":
            print(f"{name}: {len(found[name]['losses'])} steps, weights {found[name]['weights'][:12]}", flush=True)
            continue
        differing = [key for key in found[name] if found[name][key] != before[name][key]]
        failed += bool(differing)
        print(f"{name}: {'DIFFERS in ' + ', '.join(differing) if differing else 'identical'}", flush=True)
    if args.action == "record":
        args.file.write_text(json.dumps(found, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
