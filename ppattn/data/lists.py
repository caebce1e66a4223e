"""Images named by list files with a path and a label in each line, as PaddleClas writes them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from ppattn.data.layout import check_names, data_root, find_parts, numbered_classes, read_classes, read_lines
from ppattn.data.splits import FileSplit, Splits
from ppattn.errors import UserError
from ppattn.settings import Config

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


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
