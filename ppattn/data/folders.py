"""Images in files: class folders `train/<class>/*.jpg`, or list files with a path and a label per line."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ppattn.data.classes import check_names, numbered_classes, read_classes, read_lines
from ppattn.data.images import SUFFIXES
from ppattn.data.splits import FileSplit, Splits
from ppattn.errors import UserError
from ppattn.settings import Config

logger = logging.getLogger("ppattn.data")

TRAIN, VAL = ("train", "training"), ("val", "valid", "validation", "test")  # usual names of the parts of a folder
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def data_root(config: Config) -> Path:
    """The folder `data.root`; raises `UserError` if there is none."""
    root = config.data.location
    if not root.is_dir():
        raise UserError(f"data.root = {str(root)!r} is not a folder; put the data there or set data.root.")
    return root


def find_parts(
    config: Config, root: Path, train: tuple[str, ...], val: tuple[str, ...]
) -> tuple[Path | None, Path | None]:
    """Training and validation part within root: what the config names, or the first of the usual names that exists.

    With `data.holdout` the training part replaces a missing validation part.
    """
    found: list[Path | None] = []
    for what, given, usual in (("train", config.data.train, train), ("val", config.data.val, val)):
        if given is not None and not (root / given).exists():
            raise UserError(f"data.{what} = {given!r} is not in {root}.")
        names = usual if given is None else (given,)
        found.append(next((root / name for name in names if (root / name).exists()), None))
    return found[0], found[0] if config.data.holdout and found[1] is None else found[1]


def class_folders(folder: Path) -> list[str]:
    """Names of the folders in a folder, sorted; hidden ones are left out."""
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def image_files(folder: Path) -> Iterator[Path]:
    """Image files at any depth, behind links too; hidden files and folders are left out."""
    seen = set()
    for here, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if (real := os.path.realpath(here)) in seen:  # a link to a folder above it
            folders.clear()
            continue
        seen.add(real)
        for path in (Path(here, name) for name in names if not name.startswith(".")):
            if path.suffix.lower() in SUFFIXES:
                yield path


def _folder_split(folder: Path, classes: list[str]) -> FileSplit:
    unknown = sorted(set(class_folders(folder)) - set(classes))
    if unknown:
        raise UserError(f"{folder} has classes missing from the training split: {', '.join(map(repr, unknown[:5]))}.")
    paths, labels = [], []
    for label, name in enumerate(classes):
        files = sorted(image_files(folder / name))
        paths += [str(p.relative_to(folder)) for p in files]
        labels += [label] * len(files)
    if not paths:
        raise UserError(f"{folder} holds no images ({', '.join(SUFFIXES)}) in its class folders.")
    return FileSplit(folder, paths, np.asarray(labels))


def folders(config: Config, name: str) -> Splits:
    """The data set at `data.root`; `imagenet` with one split only serves as both, with a warning."""
    root = data_root(config)
    train, val = find_parts(config, root, TRAIN, VAL)
    if name == "imagenet" and train is None:  # but train/ needs its val/, or `best` would be chosen on training images
        train = val = val or root
        logger.warning("%s has no train/: the images of %s serve as both, for trying out only", root, val)
    if config.data.holdout and train is None and val is None:
        train = val = root
    if train is None or val is None:
        raise UserError(
            f"{root} must hold train/<class>/*.jpg and val/<class>/*.jpg (or test/); "
            f"{'train' if train is None else 'val'}/ is not there. data.train and data.val name other folders; "
            "data.holdout = N validates on N of the training images, which may then lie in <class>/*.jpg directly."
        )
    classes = class_folders(train)
    if not classes:
        raise UserError(f"{train} has no class folders: one folder per class is expected, its name the class name.")
    check_names(classes, str(train))
    found = {part: _folder_split(part, classes) for part in dict.fromkeys((train, val))}  # listed once where they agree
    return Splits(found[train], found[val], classes)


def _read_list(path: Path) -> tuple[list[str], list[str]]:
    """Paths and labels as written in the file."""
    rows = []
    for number, line in enumerate(read_lines(path), 1):
        row = line.rsplit(None, 1)
        if len(row) == 1 or "\0" in line:
            raise UserError(f"{path}:{number}: {line[:200]!r} is not of the form 'path label'.")
        rows += [row] if row else []
    if not rows:
        raise UserError(f"List file {path} is empty.")
    return [row[0] for row in rows], [row[1] for row in rows]


def _classes(root: Path, train: list[str], val: list[str]) -> tuple[list[str], dict[str, int]]:
    """Class names, and the number of every label, which is written as that number or as the name."""
    labels = {*train, *val}
    names = read_classes(root)
    if (names and labels <= set(names)) or not any(NUMBER.fullmatch(label) for label in labels):
        names = names or check_names(sorted(set(train)), str(root))
        if lost := sorted(labels - set(names)):
            raise UserError(f"The lists in {root} have labels that are not classes: {', '.join(map(repr, lost[:5]))}.")
        if len(set(names)) < len(names):
            raise UserError(f"{root}: two classes have the same name, so the lists must have numbers as labels.")
        return names, {name: i for i, name in enumerate(names)}
    for label in sorted(labels):
        if not re.fullmatch(r"[0-9]{1,18}", label):
            raise UserError(
                f"The lists in {root} have the label {label[:50]!r} among others that are numbers; "
                "labels are 0, 1, 2, ... or names."
            )
    return numbered_classes(root, max(map(int, labels))), {label: int(label) for label in labels}


def lists(config: Config, name: str) -> Splits:
    """The data set at `data.root`: train_list.txt, val_list.txt and, if present, classes.txt."""
    root = data_root(config)
    usual = ("train_list.txt", "train.txt"), ("val_list.txt", "val.txt", "test_list.txt", "test.txt")
    train, val = find_parts(config, root, *usual)
    if train is None or val is None:
        raise UserError(
            f"{root} has no train_list.txt and val_list.txt; data.train and data.val name other list files."
        )
    (train_paths, train_labels), (val_paths, val_labels) = _read_list(train), _read_list(val)
    classes, table = _classes(root, train_labels, val_labels)
    return Splits(
        FileSplit(root, train_paths, np.array([table[label] for label in train_labels])),
        FileSplit(root, val_paths, np.array([table[label] for label in val_labels])),
        classes,
    )
