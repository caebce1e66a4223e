"""A data set: two splits that are read by index, class names and pixel statistics."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from ppattn.data.classes import composed_name
from ppattn.data.images import IMAGENET_MEAN, IMAGENET_STD, read_image


class Split:
    """One part of a data set: `len(split)`, and `split[i]` is an image (uint8 RGB [h, w, 3]) and its label."""

    input_kind = "images"  # what it contains, in the plural; a model takes splits of its own kind
    left_out = 0  # files in its folders that are no images
    lengths: np.ndarray | None = None  # int64 [n] where they differ; batches then contain items of similar length
    table: np.ndarray | None = None  # [labels, K] of 0 and 1, where a label stands for a set of the K classes
    reading: Mapping[str, Any] = MappingProxyType({})  # how files are decoded, see `ppattn.data.decode`

    def __init__(self, labels: np.ndarray, root: Path | str):
        self.labels, self.root = np.asarray(labels, np.int64), Path(root)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        return self.image(i), self.label(i)

    def label(self, i: int) -> int:
        return int(self.labels[i])

    def image(self, i: int) -> np.ndarray:
        """uint8 RGB [h, w, 3], or what models of this `input_kind` take; raises `ImageError` if it cannot be read."""
        raise NotImplementedError

    def key(self, i: int) -> str:
        """The name of the image within `root`."""
        return str(i)

    def counts(self, classes: int = 0) -> np.ndarray:
        """Images of every class."""
        if self.table is not None:
            return self.table[self.labels].sum(axis=0)
        return np.bincount(self.labels, minlength=classes)

    def majority(self) -> float:
        """The share of the most frequent class."""
        return float(self.counts().max() / len(self))

    def name(self, i: int) -> str:
        """What messages call the image."""
        return str(self.root / self.key(i))

    def digest(self) -> str:
        """SHA-256 of the keys and labels of all images, in order."""
        found = hashlib.sha256((self.labels if self.table is None else self.table[self.labels]).tobytes())
        for i in range(len(self)):
            found.update(composed_name(self.key(i)).encode("utf-8", "surrogateescape") + b"\0")
        return found.hexdigest()

    def train_order(self, seed: int, epoch: int, rank: int, world: int, repeats: int) -> np.ndarray:
        """[n, 2]: index and copy (0..repeats - 1) of what process `rank` of `world` sees in an epoch, in order."""
        return with_copies(np.random.default_rng([seed, epoch]).permutation(len(self)), repeats)[rank::world]


def with_copies(order: np.ndarray, repeats: int) -> np.ndarray:
    """[n] to [n * repeats, 2]: every index that many times in succession, beside the number of the copy."""
    return np.stack([np.repeat(order, repeats), np.tile(np.arange(repeats), len(order))], axis=1)


class ArraySplit(Split):
    """Images in memory, uint8 [n, h, w, 3]."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, root: str):
        super().__init__(labels, root)
        self.images = images

    def image(self, i: int) -> np.ndarray:
        return self.images[i]


class FileSplit(Split):
    """Images in files, paths relative to `root`."""

    def __init__(self, root: Path, paths: list[str], labels: np.ndarray):
        super().__init__(labels, root)
        self.paths = paths

    def image(self, i: int) -> np.ndarray:
        return read_image(self.root / self.paths[i], **self.reading)

    def key(self, i: int) -> str:
        return self.paths[i]


class Subset(Split):
    """Some images of a split."""

    def __init__(self, split: Split, indices: np.ndarray):
        super().__init__(split.labels[indices], split.root)
        self.split, self.indices = split, indices
        self.input_kind, self.left_out, self.table = split.input_kind, split.left_out, split.table
        self.lengths = None if split.lengths is None else split.lengths[indices]

    def image(self, i: int) -> np.ndarray:
        return self.split.image(int(self.indices[i]))

    def key(self, i: int) -> str:
        return self.split.key(int(self.indices[i]))


@dataclass
class Splits:
    """A data set: two splits, class names in the order of the labels, and its pixel statistics in 0..1."""

    train: Split
    val: Split
    classes: list[str]
    mean: list[float] = field(default_factory=lambda: list(IMAGENET_MEAN))
    std: list[float] = field(default_factory=lambda: list(IMAGENET_STD))
    lacks: str = ""  # why there is nothing to train on, where that is so; `train` is then the validation split

    def named(self, split: Split, i: int) -> str:
        """The class, or the classes, of an image."""
        label = split.label(i)
        labels = [label] if split.table is None else np.flatnonzero(split.table[label])
        return ", ".join(self.classes[k] for k in labels if self.classes)
