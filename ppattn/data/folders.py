"""Images in class folders, `train/<class>/*.jpg` and `val/<class>/*.jpg`, under the usual names of such folders."""

import io
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ppattn.data.classes import check_names, composed_name
from ppattn.data.images import SIGNATURE, SUFFIXES
from ppattn.data.splits import FileSplit, Splits
from ppattn.errors import UserError
from ppattn.settings import Config

logger = logging.getLogger("ppattn.data")

# Usual names of the parts of a data set; of several that are there, the first kind counts.
TRAIN, VAL = ("train(ing)?",), ("val(id(ation)?)?|dev", "test(ing)?")
WORDS = "([-_ ]?(set|data|images?|imgs?|split|list|labels?))?([-_ ]?20[0-9][0-9])?"  # what may follow
WRAPPER = re.compile(r".*(image|img|photo|picture|data|jpe?g|png|raw|class|categor).*", re.IGNORECASE)
Parts = tuple[Path | None, Path | None]


def data_root(config: Config) -> Path:
    """The folder `data.root`; raises `UserError` if there is none."""
    root = Path(os.path.expanduser(config.data.location))
    if not root.is_dir():
        raise UserError(f"data.root = {str(root)!r} is not a folder; put the data there or set data.root.")
    return root


def named_parts(places: list[Path], ending: str = "") -> Parts:
    """Training and validation part among files or folders, by name; one like `seg_train` counts beside `seg_val`."""

    def first(kinds: tuple[str, ...], front: str) -> Path | None:
        for kind in kinds:
            pattern = re.compile(f"{front}({kind}){WORDS}{ending}", re.IGNORECASE)
            same = sorted((path for path in places if pattern.fullmatch(path.name)), key=lambda path: path.name)
            plain = [path for path in same if re.fullmatch(f"({kind})(_list)?{ending}", path.name)]
            if len(same) > 1 and not plain:
                raise UserError(f"{same[0]} and {same[1].name} may both be meant; choose with data.train and data.val.")
            if same:
                return (plain or same)[0]
        return None

    if any(found := (first(TRAIN, ""), first(VAL, ""))):
        return found
    found = first(TRAIN, ".+[-_ ]"), first(VAL, ".+[-_ ]")
    return found if all(found) else (None, None)


def given_parts(config: Config, root: Path, find: Callable[[Path], tuple[Path, Parts]]) -> tuple[Path, Parts]:
    """What `data.train` and `data.val` name within root, or what `find` does; `data.holdout` needs no second part."""
    given = {"train": config.data.train, "val": config.data.val}
    if missing := [what for what, name in given.items() if name is not None and not (root / name).exists()]:
        raise UserError(f"data.{missing[0]} = {given[missing[0]]!r} is not in {root}.")
    place, found = (root, (None, None)) if config.data.train and (config.data.val or config.data.held) else find(root)
    train, val = (part if name is None else root / name for name, part in zip(given.values(), found, strict=True))
    return place, (train, train if config.data.held and val is None else val)


def class_folders(folder: Path) -> dict[str, Path]:
    """The folders in a folder by their `composed_name`, sorted; hidden ones are left out."""
    found: dict[str, Path] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith(".") and entry.is_dir():
                if (name := composed_name(entry.name)) in found:
                    raise UserError(f"{folder} has two folders {name!r}, accents encoded in two ways; rename one.")
                found[name] = folder / entry.name
    return dict(sorted(found.items()))


def find_folders(root: Path, depth: int = 2) -> tuple[Path, Parts]:
    """The folder in `root`, or at most `depth` levels below, with parts; and these. Without: that of the classes."""
    below = [*class_folders(root).values()]
    if any(parts := named_parts([path for path in below if class_folders(path)])):
        return root, (parts[0] and _unwrapped(parts[0]), parts[1] and _unwrapped(parts[1]))
    deeper = {path: find_folders(path, depth - 1) for path in below} if depth else {}
    inner = [found for found in deeper.values() if any(found[1])]
    if len(inner) > 1:
        several = f"several folders of {root} ({inner[0][0]}, {inner[1][0]})"
        raise UserError(f"Parts are in {several}: set data.root to one, or data.train and data.val.")
    if inner and (all(inner[0][1]) or sum(any(image_files(path)) for path in below) == 1):
        return inner[0]
    return _unwrapped(root), (None, None)


def _unwrapped(folder: Path) -> Path:
    """The class folders' own folder, where nothing but an `images/` or the like is around them."""
    holding = [path for path in class_folders(folder).values() if any(image_files(path))]
    if len(holding) == 1 and class_folders(holding[0]) and not any(map(is_image, holding[0].iterdir())):
        inner = _unwrapped(holding[0])
        if inner != holding[0] or WRAPPER.fullmatch(holding[0].name) or holding[0].name == folder.name:
            return inner
    return folder


def image_files(folder: Path) -> Iterator[Path]:
    """Image files at any depth, behind links too; hidden files and folders are left out."""
    return filter(is_image, files_in(folder))


def is_image(path: Path) -> bool:
    """Whether a file has a suffix of images, or has another one or none and begins as images do."""
    if path.suffix.lower() in SUFFIXES:
        return True
    try:
        with path.open("rb") if path.is_file() else io.BytesIO() as file:
            return SIGNATURE.match(file.read(16)) is not None
    except OSError:
        return False


def files_in(folder: Path) -> Iterator[Path]:
    """Files at any depth, each under one name: its own, rather than that of a link; the order of the disk is none."""
    root, seen = os.path.realpath(folder), set()
    for here, folders, names in os.walk(folder, onerror=lambda e: logger.warning("left out: %s", e), followlinks=True):
        real, own = os.path.realpath(here), os.path.normpath(os.path.join(root, os.path.relpath(here, folder)))
        if real in seen or (real != own and os.path.commonpath([root, real]) == root):
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(here, name) for name in names if not name.startswith("."))


def _folder_split(folder: Path, classes: list[str]) -> FileSplit:
    own = class_folders(folder)
    if unknown := sorted(own.keys() - set(classes)):
        raise UserError(f"{folder} has classes missing from the training split: {', '.join(map(repr, unknown[:5]))}.")
    paths, labels = list[str](), list[int]()
    left_out = sum(path.is_file() and not path.name.startswith(".") for path in folder.iterdir())
    for label, name in enumerate(classes):
        everything = [*files_in(own[name])] if name in own else []
        files = sorted(filter(is_image, everything), key=lambda path: composed_name(str(path)).split(os.sep))
        paths += [str(path.relative_to(folder)) for path in files]
        labels += [label] * len(files)
        left_out += len(everything) - len(files)
    if not paths:
        raise UserError(f"{folder} holds no images ({', '.join(SUFFIXES)}) in its class folders.")
    if left_out:
        logger.warning("%s: %d files are left out, in no class folder or no images", folder, left_out)
    split = FileSplit(folder, paths, np.asarray(labels))
    split.left_out = left_out
    return split


def unlabelled(train: Path, val: Path) -> Splits:
    """All images of two folders, which may be the same. Labels are their folders, if each has two or more."""
    paths: dict[Path, list[str]] = {}
    for folder in dict.fromkeys((train, val)):
        files = sorted(filter(is_image, files_in(folder)), key=lambda path: composed_name(str(path)).split(os.sep))
        paths[folder] = [str(path.relative_to(folder)) for path in files]
        if len(files) < 2:
            raise UserError(f"{folder} holds {len(files)} images ({', '.join(SUFFIXES)}); two or more are needed.")
    names = [Path(path).parent.name for part in paths.values() for path in part]
    _, labels, counts = np.unique(names, return_inverse=True, return_counts=True)
    cut = np.split(labels if counts.min() > 1 else 0 * labels, [len(paths[train])])
    splits = {folder: FileSplit(folder, paths[folder], own) for folder, own in zip(paths, cut, strict=False)}
    return Splits(splits[train], splits[val], [])


def folders(config: Config, name: str) -> Splits:
    """The data set at `data.root`: class folders. A single part of `imagenet` serves as both, with a warning."""
    root, lacks = data_root(config), ""
    place, (train, val) = given_parts(config, root, find_folders)
    if not config.data.labels:
        return unlabelled(train or root, val if train and val else train or root)
    if name == "imagenet" and train is None:  # but train/ needs its val/, or `best` would be chosen on training images
        train = val = val or place
        logger.warning("%s has no train/: the images of %s serve as both, for trying out only", root, val)
    if config.data.held and train is None and val is None:
        train = val = place
    if train is None or val is None:
        has = ", ".join([*class_folders(root)][:8])
        missing = f"{'train' if train is None else 'val'}/ is not there, {f'but {has}' if has else 'nor any folder'}"
        others = "data.train and data.val name other folders; data.holdout = N needs no more than <class>/*.jpg"
        lacks = f"{root} must hold train/<class>/*.jpg and val/<class>/*.jpg (or test/); {missing}. {others}."
        val = val or (None if train else place)
        if val is None or not class_folders(val):
            raise UserError(lacks)
    classes = [*class_folders(train or val)]
    if not classes:
        raise UserError(f"{train or val} has no class folders: one per class is expected, its name the class name.")
    check_names(classes, str(train or val))
    if len(classes) > 1 and all(any(named_parts([Path(one)])) for one in classes):
        message = f"The class folders of {train or val} would be {', '.join(classes)}"
        raise UserError(f"{message}, which are names of parts: train/<class>/*.jpg is expected.")
    splits = {part: _folder_split(part, classes) for part in dict.fromkeys((train or val, val))}  # listed once if same
    return Splits(splits[train or val], splits[val], classes, lacks=lacks)
