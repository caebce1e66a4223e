"""Small runs that several test files train, and how they look into what is left behind."""

import csv

import numpy as np

from ppattn import weights
from ppattn.config import make_config
from ppattn.settings import Config


def tiny(folder, **changes) -> Config:
    """Digits with a model of a few thousand parameters; sections are merged."""
    tree = {
        "model": {"name": "deit_tiny", "img_size": 8, "patch_size": 2, "embed_dim": 12, "depth": 2, "num_heads": 3},
        "data": {"name": "digits", "batch_size": 100},
        "train": {"epochs": 1, "threads": 1, "seed": 5},
        "optimizer": {"lr": 0.01, "name": "sgd", "weight_decay": 0.0},
    }
    for section, values in changes.items():
        tree[section] = tree.get(section, {}) | values
    return make_config(tree | {"output": str(folder)})


def state(folder) -> dict[str, np.ndarray]:
    return weights.read(folder / "checkpoints" / "latest")[0]


def table(path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text("utf-8-sig").splitlines()))
