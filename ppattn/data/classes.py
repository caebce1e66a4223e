"""Names of classes: from files beside the data, of ImageNet, and whether two lists mean the same classes."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from ppattn.errors import UserError, reading
from ppattn.text import is_text

MOST_CLASSES = 1_000_000


def composed(name: str) -> str:
    """A name with accents as parts of their letters; macOS lists files with the accents behind the letters."""
    return unicodedata.normalize("NFC", name)


def read_lines(path: Path) -> list[str]:
    """The lines of a text file in UTF-8, with or without a byte order mark."""
    with reading(path, "a text file in UTF-8"):
        return path.read_text(encoding="utf-8-sig").split("\n")


def read_classes(root: Path) -> list[str] | None:
    """Class names from `classes.txt` or `labels.txt`: one in a line, or 'number name' as PaddleClas has it."""
    path = next((root / name for name in ("classes.txt", "labels.txt") if (root / name).is_file()), None)
    if path is None:
        return None
    lines = [composed(line.strip()) for line in read_lines(path) if line.strip()]
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


@cache
def _imagenet() -> list[tuple[str, str]]:
    """(synset, name) of the 1,000 classes of ImageNet-1K in the order of the labels.

    The first words of PaddleClas's imagenet1k_label_list.txt (Apache-2.0), made unique for two cranes and two maillots.
    """
    lines = (Path(__file__).parent / "imagenet_classes.txt").read_text(encoding="utf-8").splitlines()
    return [(line[:9], line[10:]) for line in lines]


def imagenet_names() -> list[str]:
    """Names of the classes of ImageNet-1K in the order of the labels."""
    return [name for _, name in _imagenet()]


def is_imagenet(names: list[str]) -> bool:
    """Whether these are the classes of ImageNet-1K in their order, as synsets, numbers or words."""

    def first(name: str) -> str:
        return re.split(r"[,(]", name)[0].strip().lower()

    table = enumerate(zip(names, _imagenet(), strict=False))
    return len(names) == 1000 and all(
        given in (synset, str(i)) or first(given) == first(name) for i, (given, (synset, name)) in table
    )


def same_classes(names: Iterable[str], others: Iterable[str]) -> bool:
    """Whether two models, or model and data, have the same classes; numbers stand for classes without names.

    ImageNet's may be named by synsets, numbers or words.
    """
    names, others = [*map(composed, names)], [*map(composed, others)]
    numbered = names == [*map(str, range(len(names)))] and sorted(others) != sorted(names)
    same = numbered or names == others or (is_imagenet(names) and is_imagenet(others))
    return len(names) == len(others) and same
