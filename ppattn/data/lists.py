"""Images in list files, a path and a label per line, as PaddleClas has them."""

import logging
import os
import re
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np

from ppattn.data.classes import ClassFile, check_names, composed_name, numbered_classes, read_classes, read_lines
from ppattn.data.folders import Parts, data_root, given_parts, named_parts
from ppattn.data.images import SUFFIXES
from ppattn.data.splits import FileSplit, Splits
from ppattn.errors import UserError
from ppattn.settings import Config

logger = logging.getLogger("ppattn.data")

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
IMAGE_NAME = re.compile(rf".*?({'|'.join(map(re.escape, SUFFIXES))})(?=\s)", re.IGNORECASE)
Rows = tuple[list[str], list[str]]  # paths and labels as written
Known = ClassFile | None  # class names beside the lists


def find_lists(root: Path) -> tuple[Path, Parts]:
    """The folder `root` and the list files of both parts in it, by their usual names."""
    return root, named_parts([path for path in root.iterdir() if path.is_file()], r"\.(txt|lst|tsv)")


def _read_list(path: Path, root: Path) -> Rows:
    """Without tabs, the path of a line with several spaces is what is there, or ends with a suffix of images."""
    paths, labels = [], []
    for number, line in enumerate(map(str.strip, read_lines(path)), 1):
        if not line:
            continue
        image, _, label = line.partition("\t") if "\t" in line else ("", "", "")
        if not label:
            pairs = [(line[: space.start()], line[space.end() :]) for space in re.finditer(r"\s+", line)][::-1]
            known = [pair for pair in pairs if _on_disk(root, pair[0])] if len(pairs) > 1 else pairs
            if not known and (named := IMAGE_NAME.match(line)):
                known = [(named[0], line[named.end() :].strip())]
            image, label = (known or pairs or [("", "")])[0]
        image, label = image.strip(), label.strip().rstrip(",;|").rstrip()  # a sign at the end names no further class
        if not label or "\0" in line:
            raise UserError(f"{path}:{number}: {line[:200]!r} is not of the form 'path label'.")
        if number == 1 and Path(image).suffix.lower() not in SUFFIXES and not _on_disk(root, image):
            logger.warning("%s: the first line, %r, is left out: it names no image", path, line[:200])
            continue
        paths.append(_on_disk(root, image) or image if not image.isascii() or "\\" in image else image)
        labels.append(composed_name(label))
    if not paths:
        raise UserError(f"List file {path} is empty.")
    return paths, labels


def _on_disk(root: Path, image: str) -> str | None:
    """The path of a file as the disk has it: accents in another form, or written on Windows."""
    forms = [image, *(unicodedata.normalize(form, image) for form in ("NFC", "NFD")), image.replace("\\", "/")]
    return next((form for form in forms if "\0" not in form and os.path.isfile(root / form)), None)


def several_labels(labels: set[str]) -> str | None:
    """One of the labels that names several classes: `0,1,0`, `3 7`, or `cat,dog` of names that others have too."""
    numbers = [label for label in labels if re.fullmatch(r"\d+([\s,;|]+\d+)+", label)]
    parts = {label: [part.strip() for part in re.split("[,;|]", label)] for label in labels}
    seen = Counter(part for names in parts.values() for part in {*names})
    named = [label for label, names in parts.items() if len(names) > 1 and all(seen[name] > 1 for name in names)]
    return min(numbers + named, default=None)


def _sets_of_classes(root: Path, known: Known, labels: set[str]) -> tuple[list[str], dict[str, int], np.ndarray]:
    """Class names, the number of every label, and the classes it stands for, [labels, K] of 0 and 1."""
    order = sorted(labels)
    signs = {label: r"[\s,;|]+" if re.fullmatch(r"[\d\s,;|]+", label) else "[,;|]" for label in order}
    rows = [[part.strip() for part in re.split(signs[label], label)] for label in order]
    parts = {part for row in rows for part in row}
    if parts <= {"0", "1"} and len({*map(len, rows)}) == 1:
        classes = known.names if known else [*map(str, range(len(rows[0])))]
        if len(classes) != len(rows[0]):
            raise UserError(f"The lists in {root} have {len(rows[0])} labels per image, and {len(classes)} names.")
        sets = np.array(rows, np.float32)
    else:
        classes, table = _classes(root, known, [*parts], parts)
        sets = np.zeros((len(rows), len(classes)), np.float32)
        for row, given in zip(sets, rows, strict=True):
            row[[table[part] for part in given]] = 1
    return classes, {label: i for i, label in enumerate(order)}, sets


def _classes(root: Path, known: Known, train: list[str], labels: set[str]) -> tuple[list[str], dict[str, int]]:
    """Class names, and the number of every label, which is written as that number or as the name."""
    names = known and known.names
    if known and labels <= set(known.lines) and not labels <= set(known.names):
        names = known.lines
    if (names and labels <= set(names)) or not any(NUMBER.fullmatch(label) for label in labels):
        names = names or check_names(sorted({*train}), str(root))
        if lost := sorted(labels - set(names)):
            raise UserError(f"The lists in {root} have labels that are not classes: {', '.join(map(repr, lost[:5]))}.")
        if len(set(names)) < len(names):
            raise UserError(f"{root}: two classes have the same name, so the lists must have numbers as labels.")
        return names, {name: i for i, name in enumerate(names)}
    if odd := sorted(label for label in labels if not re.fullmatch(r"[0-9]{1,18}", label)):
        raise UserError(f"The lists in {root} have the label {odd[0][:50]!r}: labels are 0, 1, 2, ... or names.")
    names, table = numbered_classes(root, {int(label) for label in labels})
    return names, {label: table[int(label)] for label in labels}


def lists(config: Config, name: str) -> Splits:
    """The data set at `data.root`: train_list.txt, val_list.txt and, if present, classes.txt."""
    root, lacks = data_root(config), ""
    _, (train, val) = given_parts(config, root, find_lists)
    if train is None or val is None:
        lacks = f"{root} has no train_list.txt and val_list.txt; data.train and data.val name other list files."
        if val is None:
            raise UserError(lacks)
    rows = {path: _read_list(path, root) for path in dict.fromkeys((train or val, val))}
    (train_paths, train_labels), (val_paths, val_labels) = (rows[path] for path in (train or val, val))
    labels, sets, known = {*train_labels, *val_labels}, None, read_classes(root)
    if (several := None if known and labels <= {*known.names} else several_labels(labels)) is None:
        classes, table = _classes(root, known, train_labels, labels)
    elif config.loss.name == "bce" or not config.data.labels:
        classes, table, sets = _sets_of_classes(root, known, labels)
    else:
        advice = "set loss.name to bce to train them, or write such names into classes.txt"
        raise UserError(f"The lists in {root} name several classes for an image ({several[:50]!r}): {advice}.")
    if not any(os.path.exists(root / path) for path in val_paths):
        raise UserError(f"None of the images in {val} is there, the first is {root / val_paths[0]}.")
    if twice := len({*zip(train_paths, train_labels, strict=True)}) - len({*train_paths}):
        logger.warning("%s lists %d images under several labels", train, twice)
    train_split = FileSplit(root, train_paths, np.array([table[label] for label in train_labels]))
    val_split = FileSplit(root, val_paths, np.array([table[label] for label in val_labels]))
    train_split.table = val_split.table = sets
    return Splits(train_split, val_split, classes, lacks=lacks)
