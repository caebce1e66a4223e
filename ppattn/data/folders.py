"""Images in class folders: `train/<class>/*.jpg` and `val/<class>/*.jpg`."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ppattn.data.images import SUFFIXES
from ppattn.data.layout import check_names, data_root, find_parts
from ppattn.data.splits import FileSplit, Splits
from ppattn.errors import UserError
from ppattn.settings import Config

logger = logging.getLogger("ppattn.data")


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
            broken = path.is_symlink() and not path.exists()  # told when it is read
            if path.suffix.lower() in SUFFIXES and (path.is_file() or broken):
                yield path


def _folder_split(folder: Path, classes: list[str]) -> FileSplit:
    unknown = sorted(set(class_folders(folder)) - set(classes))
    if unknown:
        raise UserError(f"{folder} has classes that the training split has not: {', '.join(map(repr, unknown[:5]))}.")
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
    train, val = find_parts(config, root, ("train", "training"), ("val", "valid", "validation", "test"))
    if name == "imagenet" and train is None:  # but train/ needs its val/, or `best` would be chosen on training images
        train = val = val or root
        logger.warning("%s has no train/: the images of %s serve as both, for trying out only", root, val)
    if train is None or val is None:
        raise UserError(
            f"{root} must hold train/<class>/*.jpg and val/<class>/*.jpg (or test/); "
            f"{'train' if train is None else 'val'}/ is not there. data.train and data.val name other folders."
        )
    for folder in (train, val):
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder of class folders.")
    classes = class_folders(train)
    if not classes:
        raise UserError(f"{train} has no class folders: one folder per class is expected, its name the class name.")
    check_names(classes, str(train))
    found = {part: _folder_split(part, classes) for part in dict.fromkeys((train, val))}  # listed once where they agree
    return Splits(found[train], found[val], classes)
