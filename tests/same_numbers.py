"""Train small runs; train them again after a change and compare.

python tests/same_numbers.py record FOLDER      # on the commit before
python tests/same_numbers.py compare FOLDER     # on the commit after

Compared bit for bit are rows of metrics.csv and all tensors of `latest` and `best` after 60 steps. A recording holds
for one processor and one set of libraries. The training data are made once, beside the runs.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppattn.config import make_config
from ppattn.data import build_datasets
from scripts.make_shards import write_shards
from tests.helpers.data_sets import fill
from tests.kill import finish, result_of

STEPS = 60
MODEL = {"name": "deit_nano", "img_size": 8, "patch_size": 2, "embed_dim": 12, "depth": 2, "num_heads": 3}
DROPPED = MODEL | {"drop_rate": 0.1, "drop_path_rate": 0.2}
MIXED = {"random_resized_crop": {}, "rand_augment": "rand-m9-mstd0.5-inc1", "random_erasing": 0.5}
MIXED |= {"mixup": 0.8, "cutmix": 1.0}
SHARDS = {"name": "shards", "root": "DATA/shards", "batch_size": 16, "shuffle_buffer": 50, "num_workers": 2}
RUNS: dict[str, dict] = {
    "plain": {},
    "accumulate": {"train": {"accumulate": 4}, "data": {"batch_size": 20}, "model": DROPPED},
    "moving average": {"train": {"ema": 0.9, "ema_warmup": True, "clip_grad": 1.0}},
    "mixing": {"augment": MIXED, "loss": {"label_smoothing": 0.1}, "data": {"num_workers": 2}},
    "muon": {"optimizer": {"name": "muon", "momentum": 0.95}, "schedule": {"warmup_epochs": 1}},
    "distillation": {"distill": {"teacher": "DATA/teacher/run", "blocks": 0.5}, "model": {"attention": "inline"}},
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
    own = json.loads(json.dumps(RUNS[name]).replace("DATA", str(data)))
    train = {"epochs": 6, "max_steps": STEPS, "seed": 7, "threads": 1, "log_every": 1}
    every = {"model": MODEL, "data": {"name": "digits", "batch_size": 60}, "train": train, "optimizer": {"lr": 0.01}}
    tree = {section: every.get(section, {}) | own.get(section, {}) for section in every | own}
    return make_config(tree | {"output": str(folder / "run")})


def train(name: str, data: Path, folder: Path) -> None:
    finish(folder, config(name, data, folder), 2 if "two processes" in name else 1)


def make_data(data: Path) -> None:
    """Made images in class folders, the same as shards, and a teacher trained on digits."""
    fill(data / "files", ["train"], "abc", 61)
    fill(data / "files", ["val"], "abc", 10)
    splits = build_datasets(config("class folders", data, data / "none"))
    for part in ("train", "val"):
        write_shards(getattr(splits, part), data / "shards", part, per_shard=25)
    (data / "shards" / "classes.txt").write_text("a\nb\nc\n")
    train("plain", data, data / "teacher")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("folder", type=Path, help="the recording")
    parser.add_argument("--name", help="this run only")
    args = parser.parse_args()
    recording, failed = args.folder.resolve(), 0
    data = recording / "data"
    if not data.exists():
        make_data(data)
    for name in [args.name] if args.name else RUNS:
        if args.action == "record":
            train(name, data, recording / name)
            continue
        with tempfile.TemporaryDirectory() as scratch:
            train(name, data, Path(scratch) / name)
            result = result_of(recording / name / "run", Path(scratch) / name / "run")
        failed += result == "DIFFERS"
        print(f"{name}: {result}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
