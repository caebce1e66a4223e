"""A data set in memory or on disk: two splits with the same few methods, class names and pixel statistics.

A split has `len()`, `image(i)` (uint8 RGB), `label(i)`, `name(i)` for reports and `labels`, all of them at once. The
other methods are the loader's: which indices come when, and what to do about an image that cannot be read.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ppattn.data.images import IMAGENET_MEAN, IMAGENET_STD, read_image


class Split:
    """One part of a data set. The defaults are those of images that can be read in any order."""

    def __init__(self, labels: np.ndarray):
        self.labels = np.asarray(labels, np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def label(self, i: int) -> int:
        return int(self.labels[i])

    def image(self, i: int) -> np.ndarray:
        """uint8 RGB [h, w, 3]; raises `ImageError` where it cannot be read."""
        raise NotImplementedError

    def name(self, i: int) -> str:
        """What to call the image in a message."""
        raise NotImplementedError

    def key(self, i: int) -> str:
        """A name that stays where the data set moves."""
        return self.name(i)

    def digest(self) -> str:
        """SHA-256 of the keys and labels of all images, in their order."""
        found = hashlib.sha256(self.labels.tobytes())
        for i in range(len(self)):
            found.update(self.key(i).encode("utf-8", "surrogateescape") + b"\0")
        return found.hexdigest()

    def train_order(self, seed: int, epoch: int, rank: int, world: int, repeats: int) -> np.ndarray:
        """[n, 2]: index and copy (0..repeats - 1) of what process `rank` of `world` sees in an epoch, in order."""
        order = np.random.default_rng([seed, epoch]).permutation(len(self))
        return with_copies(order, repeats)[rank::world]

    def eval_order(self, rank: int, world: int) -> np.ndarray:
        """Indices of the share of process `rank` of `world`; all shares together hold each image once."""
        return np.arange(rank, len(self), world)

    def payloads(self, order: np.ndarray) -> Iterator:
        """What the loader's process has to read and hand to the worker that makes the image; here nothing."""
        return itertools.repeat(None, len(order))

    def load(self, i: int, payload: Any) -> np.ndarray:
        """The image, from its payload."""
        return self.image(i)

    def instead(self, i: int, batch: list[int], payloads: list) -> tuple[int, Any]:
        """Index and payload that stand in for image i of a batch when it cannot be read."""
        return (i + 1) % len(self), None


def with_copies(order: np.ndarray, repeats: int) -> np.ndarray:
    """[n] to [n * repeats, 2]: every index that many times in succession, beside the number of the copy."""
    return np.stack([np.repeat(order, repeats), np.tile(np.arange(repeats), len(order))], axis=1)


class ArraySplit(Split):
    """Images that lie in memory, uint8 [n, h, w, 3]."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, prefix: str):
        super().__init__(labels)
        self.images, self.prefix = images, prefix

    def image(self, i: int) -> np.ndarray:
        return self.images[i]

    def name(self, i: int) -> str:
        return f"{self.prefix}/{i}"

    def key(self, i: int) -> str:
        return str(i)


class FileSplit(Split):
    """Images in files, paths relative to `root`."""

    def __init__(self, root: Path, paths: list[str], labels: np.ndarray):
        super().__init__(labels)
        self.root, self.paths = root, paths

    def image(self, i: int) -> np.ndarray:
        return read_image(self.root / self.paths[i])

    def name(self, i: int) -> str:
        return str(self.root / self.paths[i])

    def key(self, i: int) -> str:
        return self.paths[i]


class Subset(Split):
    """Some images of a split that can be read in any order."""

    def __init__(self, split: Split, indices: np.ndarray):
        super().__init__(split.labels[indices])
        self.split, self.indices = split, indices

    def image(self, i: int) -> np.ndarray:
        return self.split.image(int(self.indices[i]))

    def name(self, i: int) -> str:
        return self.split.name(int(self.indices[i]))

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
