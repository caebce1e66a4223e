"""Names of classes: from files beside the data, of ImageNet, and whether two lists mean the same classes."""

import logging
import re
import unicodedata
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ppattn.errors import UserError, reading_untrusted
from ppattn.text import is_text

logger = logging.getLogger("ppattn.data")

MOST_CLASSES = 1_000_000


def composed_name(name: str) -> str:
    """A name with accents as parts of their letters; macOS lists files with the accents behind the letters."""
    return unicodedata.normalize("NFC", name)


def read_lines(path: Path) -> list[str]:
    """The lines of a text file in UTF-8, with or without a byte order mark."""
    with reading_untrusted(path, "a text file in UTF-8"):
        return path.read_text(encoding="utf-8-sig").split("\n")


class ClassFile(NamedTuple):
    names: list[str]  # in the order of their numbers
    numbers: list[int]  # in the labels
    lines: list[str]  # as they are


def read_classes(root: Path) -> ClassFile | None:
    """Class names from `classes.txt`, `labels.txt`, PaddleX's `label.txt` or PaddleClas's `label_list.txt`."""
    names = ("classes.txt", "labels.txt", "label.txt", "label_list.txt")
    path = next((root / name for name in names if (root / name).is_file()), None)
    return None if path is None else class_file(path)


def class_file(path: Path) -> ClassFile:
    """Class names, one in a line or with its number; numbers may stand in any order and begin anywhere."""
    lines = [composed_name(line.strip()) for line in read_lines(path) if line.strip()]
    for pattern in (
        r"(?P<number>\d{1,9})(\s*[,:;=]\s*|\s+)(?P<name>.+)",
        r"(?P<name>.+?)\s*[\t,:;=]\s*(?P<number>\d{1,9})",
    ):
        found = [match for line in lines if (match := re.fullmatch(pattern, line))]
        table = {int(match["number"]): match["name"] for match in found}
        if not found or len(found) < len(lines):
            continue
        if len(table) < len(lines):
            raise UserError(f"{path} gives two classes the same number.")
        if len({*table.values()}) == len(table) or sorted(table) == [*range(len(table))]:
            numbers = sorted(table)
            return ClassFile(check_names([table[number] for number in numbers], str(path)), numbers, lines)
    return ClassFile(check_names(lines, str(path)), [*range(len(lines))], lines)


def check_names(names: list[str], where: str) -> list[str]:
    """The class names; raises `UserError` for none, or one that is not printable text."""
    if not names:
        raise UserError(f"{where} has no class names.")
    for name in names:
        if not isinstance(name, str) or not is_text(name):
            raise UserError(f"{where}: class name {name!r} is not printable text in UTF-8; rename it.")
    return names


def numbered_classes(root: Path, labels: Iterable[int]) -> tuple[list[str], dict[int, int]]:
    """Class names and the index of every label: those of classes.txt, or else the numbers themselves."""
    known, highest = read_classes(root), max(labels)
    if known is None:
        if highest >= MOST_CLASSES:
            raise UserError(f"{root} has label {highest}, but labels are below {MOST_CLASSES:,}.")
        return [str(i) for i in range(highest + 1)], {i: i for i in range(highest + 1)}
    table = {number: i for i, number in enumerate(known.numbers)}
    if lost := {*labels} - table.keys():
        span = "" if known.numbers[0] == 0 else f", numbered from {known.numbers[0]} to {known.numbers[-1]}"
        raise UserError(f"{root} has label {max(lost)}, but there are {len(table)} class names{span}.")
    return known.names, table


@cache
def _imagenet() -> list[tuple[str, str]]:
    """(synset, name) of ImageNet-1K's classes by label; from PaddleClas's imagenet1k_label_list.txt (Apache-2.0)."""
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


def class_numbers(names: list[str], others: list[str]) -> list[int | None]:
    """The index among a model's classes of each class of some data; None for those that it does not have."""
    numbers = others == [*map(str, range(len(others)))] and len(others) <= len(names) and not {*others} & {*names}
    if numbers or same_classes(names, others):
        warn_of_order(names, others)
        return [*range(len(others))]
    table = {composed_name(name): i for i, name in enumerate(names)}
    if is_imagenet(names):
        table |= {known: i for i, row in enumerate(_imagenet()) for known in row}
    return [table.get(composed_name(name)) for name in others]


def same_classes(names: Iterable[str], others: Iterable[str], numbers: bool = True) -> bool:
    """Whether the classes are the same; ImageNet's may be synsets or words; with `numbers`, 0, 1, ... are any names."""
    names, others = [*map(composed_name, names)], [*map(composed_name, others)]
    numbered = numbers and names == [*map(str, range(len(names)))] and sorted(others) != sorted(names)
    return len(names) == len(others) and (numbered or names == others or (is_imagenet(names) and is_imagenet(others)))


def warn_of_order(names: list[str], others: list[str]) -> None:
    """Warn where nothing but the order says which classes of a model are which of the data."""
    if names and not ({*names} & {*others} or (is_imagenet(names) and len(others) == len(names))):
        logger.warning("classes are matched by their order: %s as %s, ...", names[0], others[0])
