"""The data set that a config names, whatever its kind."""

import logging
import os
from contextlib import suppress
from functools import cache

import numpy as np

from ppattn.data.cifar import CIFAR, cifar
from ppattn.data.folders import folders
from ppattn.data.images import ImageError, is_one_colour
from ppattn.data.lists import lists
from ppattn.data.shards import ShardSplit, shards
from ppattn.data.splits import ArraySplit, FileSplit, Split, Splits, Subset
from ppattn.errors import UserError, optional_package
from ppattn.registry import Registry
from ppattn.settings import Config, Data

logger = logging.getLogger("ppattn.data")


def digits() -> Splits:
    """scikit-learn's 1,797 handwritten digits (8 x 8 pixels, grey): 360 to test on, by a fixed stratified split."""
    with optional_package("train"):
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

    data = load_digits()
    images = np.repeat(np.rint(data.images * (255 / 16)).astype(np.uint8)[..., None], 3, axis=3)
    parts = train_test_split(np.arange(len(images)), test_size=360, random_state=0, stratify=data.target)
    named = zip(("train", "test"), parts, strict=True)
    train, test = (ArraySplit(images[part], data.target[part], f"digits/{name}") for name, part in named)
    return Splits(train, test, [*map(str, data.target_names)], [0.3053] * 3, [0.3760] * 3)


DATA_SETS = Registry("data set")  # data.name: a function of the config, the name and its own options
register_data_set = DATA_SETS.register
register_data_set("digits")(lambda config, name: digits())
FIXED = ("digits", *CIFAR)  # data sets of their own, not kinds of folders
OTHERS = {"cifar10": cifar, "cifar100": cifar, "folder": folders, "imagenet": folders, "list": lists, "shards": shards}
for _name, _build in OTHERS.items():
    register_data_set(_name)(_build)


def fixed_parts(data: Data) -> None:
    """`UserError` where the config names parts of a data set that has its own; a warning for a root of the digits."""
    for key, given in (("train", data.train), ("val", data.val)):
        if given is not None:
            raise UserError(f"data.{key} = {given!r}: {data.name} has fixed images; data.name=folder is for your own.")
    if data.name == "digits" and data.root:
        logger.warning("data.root = %r has no effect: digits has fixed images; set data.name=folder, too", data.root)


def own_splits(config: Config) -> Splits:
    """What the function of the data set returns."""
    return DATA_SETS.get(config.data.name)(config, config.data.name, **config.data.options)


def build_datasets(config: Config, training: bool = True) -> Splits:
    """The data set that `config.data` names, with `data.mean` and `data.std` instead of its own if given.

    With `data.holdout` that many training images become the validation split, and the data set's own is unused. Raises
    `UserError` for data that is missing, damaged or laid out differently; the message names the expected layout.
    """
    data = config.data
    if data.name in FIXED:
        fixed_parts(data)
    splits = own_splits(config)
    if splits.lacks and (training or data.held):
        raise UserError(splits.lacks)
    if len(splits.classes) == 1:
        text = "%s has a single class, %r: every model is right about it; are the classes one folder deeper?"
        logger.warning(text, data.location, splits.classes[0])
    channels = getattr(config.model, "in_chans", None) or 3
    if channels > 3 and data.name in FIXED:
        raise UserError(f"model.in_chans = {channels} is not allowed: the images of {data.name} allow 1 or 3.")
    for split in (splits.train, splits.val):
        while isinstance(split, Subset):  # whose images the whole split reads
            split = split.split
        split.reading = {"max_value": data.max_value, "channels": max(3, channels)}
    warn_flat(splits.train)
    if data.held:
        if data.name == "shards":
            raise UserError("data.holdout and data.fold need images to be read in any order: give shards a val split.")
        parts = hold_out(splits.train, data.held, config.holdout_seed)
        splits.train, splits.val = (Subset(splits.train, indices) for indices in parts)
    for part in ("train", "val"):
        if not len(getattr(splits, part)):
            raise UserError(f"The {part} split of {data.location} holds no {splits.train.input_kind}.")
    if not data.labels:
        splits.classes, splits.train.table, splits.val.table = [], None, None
    splits.mean, splits.std = data.mean or splits.mean, data.std or splits.std
    return splits


def warn_flat(split: Split) -> None:
    """Warn where most of some images in files are nearly of one colour."""
    flat: list[str] = []
    some = {i * (len(split) - 1) // 4 for i in range(5)} if isinstance(split, FileSplit | ShardSplit) else {}
    for i in sorted(some):
        with suppress(ImageError):
            flat += [split.name(i)] * is_one_colour(split.image(i))
    if 2 * len(flat) > len(some):
        text = "%s and others are nearly of one colour; where 16 bits are not all in use, set data.max_value"
        logger.warning(text, flat[0])


def hold_out(split: Split, held_out: int | float | str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices to train on and to hold out (a number, a part, or fold "k/n"), by class; copies are in neither."""
    with optional_package("train"):
        from sklearn.model_selection import KFold, StratifiedKFold, train_test_split

    if not held_out:
        return np.arange(len(split)), np.arange(0)
    seen: dict[str, int] = {}
    first = np.array([seen.setdefault(split.key(i), i) for i in range(len(split))])  # of the copies of an image
    labels = split.labels[unique := np.unique(first)]
    several = split.table is not None  # many sets of labels are there once
    try:
        if isinstance(held_out, str):
            fold, folds = map(int, held_out.split("/"))
            parts = (KFold if several else StratifiedKFold)(folds, shuffle=True, random_state=seed % 2**32)
            if not several and np.bincount(labels)[labels].min() < folds:
                raise ValueError("a class is smaller than the number of folds")
            held = unique[[*parts.split(unique, labels)][fold - 1][1]]
        else:
            images = round(held_out * len(unique)) if isinstance(held_out, float) else held_out
            stratify = None if several else labels
            _, held = train_test_split(unique, test_size=images, random_state=seed % 2**32, stratify=stratify)
    except ValueError:
        there = f"{len(labels)} training images of {len(set(labels))} classes"
        advice = "must leave one of each class on both sides and in every fold"
        key = "fold" if isinstance(held_out, str) else "holdout"
        raise UserError(f"data.{key} = {held_out} is not allowed: {there} {advice}.") from None
    return np.flatnonzero(~np.isin(first, held)), np.sort(held)


def leaked_images(splits: Splits, digests: dict[str, str], holdout: int | float | str, seed: int) -> int:
    """How many validation images a training with these digests, holdout and seed saw; warns where that is not known."""
    val = splits.val
    whole, own = (val.split, val.indices) if isinstance(val, Subset) else (val, np.arange(len(val)))
    with suppress(UserError):  # too few images for that holdout: others than those of the training
        rest, _ = hold_out(whole, holdout, seed)
        if digests.get("val") != digests["train"] == Subset(whole, rest).digest():  # equal names do not tell
            return len(np.intersect1d(rest, own))
    if holdout and isinstance(val, Subset) and val.digest() != digests.get("val"):
        text = "trained on other images than these: if some were added or removed, accuracy on the %d held-out ones"
        logger.warning(f"{text} is too high; data.holdout=0 data.fold=null evaluates on all of a new folder", len(val))
    return 0


def shared_images(splits: Splits) -> int:
    """How many of the validation images are training images as well, by their names; links are followed."""
    train, val = splits.train, splits.val
    if not all(isinstance(part, FileSplit | ShardSplit) for part in (train, val)):
        return 0
    real_folder = cache(os.path.realpath)

    def real(path: str) -> str:
        folder, name = os.path.split(os.path.realpath(path) if os.path.islink(path) else path)
        return f"{real_folder(folder)}/{name}"

    seen = {real(f"{train.root}/{train.key(i)}") for i in range(len(train))}
    return sum(real(f"{val.root}/{val.key(i)}") in seen for i in range(len(val)))
