"""Small runs that several test files train, and how they look into what is left behind."""

import csv
import json
import resource
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ppattn import weights
from ppattn.config import make_config, to_yaml
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


def written(config: Config) -> str:
    """The path of a configuration as a file, beside its run folder."""
    path = Path(config.output).with_suffix(".yaml")
    path.write_text(to_yaml(config))
    return str(path)


def state(folder) -> dict[str, np.ndarray]:
    return weights.read(folder / "checkpoints" / "latest")[0]


def table(path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text("utf-8-sig").splitlines()))


def read_json(path):
    return json.loads(path.read_text())


@contextmanager
def full_disk(size: int):
    """Files cannot grow above `size` bytes, which stands in for a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
