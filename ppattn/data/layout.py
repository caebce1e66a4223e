"""Splits and class names of a data set that is a folder."""

from __future__ import annotations

from pathlib import Path

from ppattn.errors import UserError, reading
from ppattn.settings import Config
from ppattn.text import is_text

MOST_CLASSES = 1_000_000


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


def read_lines(path: Path) -> list[str]:
    """The lines of a text file in UTF-8, with or without a byte order mark."""
    with reading(path, "a text file in UTF-8"):
        return path.read_text(encoding="utf-8-sig").split("\n")


def read_classes(root: Path) -> list[str] | None:
    """Class names from `classes.txt` or `labels.txt`: one in a line, or 'number name' as PaddleClas has it."""
    path = next((root / name for name in ("classes.txt", "labels.txt") if (root / name).is_file()), None)
    if path is None:
        return None
    lines = [line.strip() for line in read_lines(path) if line.strip()]
    parts = [line.split(None, 1) for line in lines]
    if all(len(part) == 2 and part[0] == str(i) for i, part in enumerate(parts)):
        lines = [part[1] for part in parts]
    return check_names(lines, str(path))


def check_names(names: list[str], where: str) -> list[str]:
    """The class names; raises `UserError` for none, or one that is not printable text."""
    if not names:
        raise UserError(f"{where} has no class names.")
    for name in names:
        if not isinstance(name, str) or not is_text(name):
            raise UserError(f"{where}: class name {name!r} is not printable text in UTF-8; rename it.")
    return names


def numbered_classes(root: Path, highest: int) -> list[str]:
    """Class names of labels up to `highest`: those of classes.txt, or else the numbers themselves."""
    names = read_classes(root)
    if highest >= (len(names) if names else MOST_CLASSES):
        known = f"there are {len(names)} class names" if names else f"labels are below {MOST_CLASSES:,}"
        raise UserError(f"{root} has label {highest}, but {known}.")
    return names or [str(i) for i in range(highest + 1)]
