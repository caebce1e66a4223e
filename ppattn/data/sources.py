"""The data set that a config names, whatever its kind."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from ppattn.data.cifar import CIFAR, cifar
from ppattn.data.folders import folders, lists
from ppattn.data.shards import ShardSplit, shards
from ppattn.data.splits import ArraySplit, FileSplit, Splits, Subset
from ppattn.errors import UserError, optional
from ppattn.registry import Registry
from ppattn.settings import Config, Data


def digits() -> Splits:
    """scikit-learn's 1,797 handwritten digits (8 x 8 pixels, grey): 360 to test on, by a fixed stratified split."""
    with optional("train"):
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

    data = load_digits()
    grey = np.rint(data.images * (255 / 16)).astype(np.uint8)
    images = np.repeat(grey[..., None], 3, axis=3)
    train, test = train_test_split(np.arange(len(images)), test_size=360, random_state=0, stratify=data.target)
    return Splits(
        ArraySplit(images[train], data.target[train], "digits/train"),
        ArraySplit(images[test], data.target[test], "digits/test"),
        [str(name) for name in data.target_names],
        [0.3053] * 3,
        [0.3760] * 3,
    )


DATA_SETS = Registry("data set")  # data.name: a function of the config, the name and its own options
register_data_set = DATA_SETS.register
for _name, _build in {
    "digits": lambda config, name: digits(),
    "cifar10": cifar,
    "cifar100": cifar,
    "folder": folders,
    "imagenet": folders,
    "list": lists,
    "shards": shards,
}.items():
    register_data_set(_name)(_build)


def fixed_parts(data: Data) -> None:
    """Raise `UserError` where the config names the parts of a data set that has two of its own."""
    for key in ("train", "val"):
        if getattr(data, key) is not None:
            raise UserError(f"data.{key} = {getattr(data, key)!r}: {data.name} has two fixed splits; leave it at null.")


def own_splits(config: Config) -> Splits:
    """What the function of the data set returns."""
    return DATA_SETS.get(config.data.name)(config, config.data.name, **config.data.options)


def build_datasets(config: Config) -> Splits:
    """The data set that `config.data` names, with `data.mean` and `data.std` instead of its own if given.

    With `data.holdout` that many training images become the validation split, and the data set's own is unused.

    Raises:
        UserError: the data is missing, damaged or laid out differently; the message names the expected layout.
    """
    data = config.data
    if data.name in ("digits", *CIFAR):
        fixed_parts(data)
    splits = own_splits(config)
    if data.holdout:
        if data.name == "shards":
            raise UserError(
                "data.holdout needs images that can be read in any order, not shards: give them a val split."
            )
        train = splits.train
        rest, held = drawn(train.labels, data.holdout, config.holdout_seed)
        splits.train, splits.val = Subset(train, rest), Subset(train, held)
    for part in ("train", "val"):
        if not len(getattr(splits, part)):
            raise UserError(f"The {part} split of {data.location} holds no {splits.train.input_kind}.")
    splits.mean, splits.std = data.mean or splits.mean, data.std or splits.std
    return splits


def drawn(labels: np.ndarray, images: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices to train on and of the images held out, of every class its share."""
    with optional("train"):
        from sklearn.model_selection import train_test_split

    everything = np.arange(len(labels))
    if not images:
        return everything, everything[:0]
    try:
        rest, held = train_test_split(everything, test_size=images, random_state=seed % 2**32, stratify=labels)
    except ValueError:
        raise UserError(
            f"data.holdout = {images} is not allowed: {len(labels)} training images of {len(set(labels))} classes must "
            "leave at least one of each class on both sides."
        ) from None
    return np.sort(rest), np.sort(held)


def leaked_images(splits: Splits, digest: str, holdout: int, seed: int) -> int:
    """How many of the validation images are among the training images of this digest, drawn by `holdout` and `seed`."""
    val = splits.val
    whole, own = (val.split, val.indices) if isinstance(val, Subset) else (val, np.arange(len(val)))
    with suppress(UserError):  # too few images for that holdout: others than those of the training
        rest, _ = drawn(whole.labels, holdout, seed)
        if Subset(whole, rest).digest() == digest:
            return len(np.intersect1d(rest, own))
    return 0


def shared(splits: Splits) -> int:
    """How many of the validation images are training images as well, by their names."""
    train, val = splits.train, splits.val
    if not all(isinstance(part, FileSplit | ShardSplit) for part in (train, val)) or train.root != val.root:
        return 0
    return len({train.key(i) for i in range(len(train))} & {val.key(i) for i in range(len(val))})
