"""Sequences of tokens: the tasks of Long Range Arena (Tay et al., ICLR 2021, arXiv 2011.04006), and their batches.

ListOps is generated here by the published rules. Image is CIFAR-10 in grey, row by row. Text (IMDb) and Retrieval (AAN)
are read as bytes from the published files. An item of a split is int16 [n], or [2, n] for two documents, the shorter
one filled up with -1; a batch is int64 with -1 behind the tokens. The validation split is what LRA calls the test
split.
"""

from __future__ import annotations

import random
import re
import statistics
import tarfile
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field

from ppattn.data.sources import DATA_SETS, fixed_parts, register_data_set
from ppattn.data.splits import Split, Splits
from ppattn.errors import UserError, reading_untrusted
from ppattn.settings import Augment, Config
from ppattn.validation import Count, Positive, Seed

OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}
LISTOPS = [*"0123456789", *OPERATORS, "]"]  # the tokens, by id
FUNCTIONS = list(OPERATORS.values())
PATIENCE = 1000  # random expressions per sequence that is wanted
OPERATOR_SHARE = 0.25  # probability that a node above the largest depth is an operator
GREY = np.array([0.2989, 0.587, 0.114], np.float32)  # of red, green and blue, as in TensorFlow
IMDB = "aclImdb"
LARGEST_REVIEW = 1 << 20  # bytes; the largest of IMDb has 14 KB
AAN = "new_aan_pairs.{}.tsv"


class SequenceSplit(Split):
    """Sequences in memory: anything that numpy makes an array of small integers."""

    input_kind = "sequences"

    def __init__(self, sequences: Sequence, labels: np.ndarray, root: Path | str):
        super().__init__(labels, root)
        self.sequences = sequences
        self.lengths = np.array([len(item[0]) if isinstance(item, tuple) else len(item) for item in sequences])

    def image(self, i: int) -> np.ndarray:
        item = self.sequences[i]
        if not isinstance(item, tuple):
            return np.asarray(item, np.int16)
        pair = np.full([2, max(map(len, item))], -1, np.int16)
        for row, part in zip(pair, item, strict=True):
            row[: len(part)] = np.frombuffer(part, np.uint8)
        return pair


class Tokens:
    """`Preprocess` for sequences: all tokens after the first `max_len` are cut off."""

    def __init__(self, max_len: int, pairs: bool = False):
        self.max_len, self.pairs = max_len, pairs
        self.slot = (2, max_len, 2) if pairs else (max_len, 2)  # bytes: ids + 1 in 16 bits, 0 where there is no token

    def to_dict(self) -> dict:
        return {"max_len": self.max_len, "pairs": self.pairs}

    def pixels(self, item: np.ndarray) -> np.ndarray:
        if item.ndim != 1 + self.pairs:
            raise UserError("model.pairs is for Retrieval, whose examples are two documents, and for nothing else.")
        ids = np.zeros(self.slot[:-1], np.uint16)
        ids[..., : item.shape[-1]] = item[..., : self.max_len] + 1
        return ids[..., None].view(np.uint8)

    def assemble(self, slots: np.ndarray) -> np.ndarray:
        """int64 [b, longest] or [b, 2, longest] of uint8 [b, *slot]; -1 is padding."""
        ids = slots.view(np.uint16)[..., 0].astype(np.int64) - 1
        return ids[..., : max(1, (ids >= 0).sum(axis=-1).max(initial=0))]


class TrainTokens:
    """`TrainTransform` for sequences: there is nothing to augment."""

    img_size = None  # MACs are those of the longest sequence

    def __init__(self, augment: Augment, preprocess: Tokens):
        if augment != Augment():
            raise UserError("The settings of `augment` are for images; leave them out for sequences.")
        self.preprocess, self.slot = preprocess, preprocess.slot

    def pixels(self, item: np.ndarray, rng: np.random.Generator, flipped: bool) -> tuple[np.ndarray, None]:
        return self.preprocess.pixels(item), None

    def assemble(self, slots: np.ndarray, erased: list) -> np.ndarray:
        return self.preprocess.assemble(slots)


class Limits(NamedTuple):
    """Of a random expression; `listops` explains them."""

    max_length: int
    max_depth: int
    max_args: int


class _TooLong(Exception):
    pass


def expression(rng: random.Random, limits: Limits, tokens: bytearray, depth: int = 1) -> int:
    """Append the tokens of a random expression, and return its value."""
    if depth >= limits.max_depth or rng.random() > OPERATOR_SHARE:
        tokens.append(rng.randrange(10))
        return tokens[-1]
    operator = rng.randrange(len(FUNCTIONS))
    tokens.append(10 + operator)
    values = [expression(rng, limits, tokens, depth + 1) for _ in range(rng.randint(2, limits.max_args))]
    tokens.append(LISTOPS.index("]"))
    if len(tokens) >= limits.max_length:
        raise _TooLong
    return FUNCTIONS[operator](values)


@register_data_set("listops")
def listops(
    config: Config,
    name: str,
    *,
    train: Positive = 96_000,
    val: Positive = 2_000,
    min_length: Count = 500,
    max_length: Positive = 2_000,
    max_depth: Positive = 10,
    max_args: Annotated[int, Field(ge=2)] = 10,
    seed: Seed = 0,
) -> Splits:
    """Random expressions, no two alike; the validation split comes after training. The defaults are the published ones.

    Args:
        train, val: sequences to train and to validate on.
        min_length, max_length: sequences have more and fewer tokens than these, brackets included.
        max_depth: levels; the deepest holds digits only.
        max_args: of an operator, which has at least 2.
        seed: of the generator; `train.seed` is that of the training.
    """
    fixed_parts(config.data)
    if min_length + 1 >= max_length:
        raise UserError(f"max_length = {max_length} leaves no length above min_length = {min_length}.")
    limits, rng, found = Limits(max_length, max_depth, max_args), random.Random(seed), dict[bytes, int]()
    for draw in count():
        if len(found) == train + val:
            break
        if draw > PATIENCE * (train + val + 1000):
            raise UserError(
                f"Of {draw:,} random expressions only {len(found):,} fit data.options: allow more levels (max_depth), "
                "other lengths, or ask for fewer sequences."
            )
        tokens = bytearray()
        try:
            value = expression(rng, limits, tokens)
        except _TooLong:
            continue
        if min_length < len(tokens) < max_length:
            found.setdefault(bytes(tokens), value)
    rows = [np.frombuffer(tokens, np.uint8) for tokens in found]
    labels = np.array(list(found.values()))
    parts = (SequenceSplit(rows[part], labels[part], name) for part in (slice(train), slice(train, None)))
    return Splits(*parts, [str(digit) for digit in range(10)])


@register_data_set("lra_image")
def lra_image(config: Config, name: str) -> Splits:
    """CIFAR-10 at `data.root`, every image as 1,024 grey values."""
    fixed_parts(config.data)
    splits = DATA_SETS.get("cifar10")(config, "cifar10")

    def grey(split: Any) -> SequenceSplit:
        rows = (split.images.reshape([len(split), -1, 3]) / np.float32(255)) @ GREY
        return SequenceSplit((255.5 * rows).astype(np.uint8), split.labels, split.root)

    return Splits(grey(splits.train), grey(splits.val), splits.classes)


def reviews(found: Path) -> dict[str, bytes]:
    """The reviews with a label in a folder or archive, by their names there: train/pos/0_9.txt."""
    texts: dict[str, bytes] = {}

    def add(name: str, size: int, read: Callable[[], bytes]) -> None:
        if re.fullmatch(r"(train|test)/(neg|pos)/[^/]*\.txt", name):
            if not 0 < size <= LARGEST_REVIEW:
                raise UserError(f"{found}: {name} has {size:,} bytes; a review has 1 to {LARGEST_REVIEW:,}.")
            texts[name] = read()

    if found.is_dir():
        for path in sorted(found.glob("*/*/*.txt")):
            add(path.relative_to(found).as_posix(), path.stat().st_size, path.read_bytes)
        return texts
    with (
        reading_untrusted(found, f"a complete tar archive; expected is {IMDB}_v1.tar.gz"),
        tarfile.open(found) as archive,
    ):
        for member in archive:
            if member.isfile() and (file := archive.extractfile(member)):
                add(member.name.partition("/")[2], member.size, file.read)
    return texts


@register_data_set("lra_text")
def lra_text(config: Config, name: str) -> Splits:
    """The bytes of IMDb's reviews, from the folder aclImdb or the archive aclImdb_v1.tar.gz at `data.root`."""
    fixed_parts(config.data)
    root, labels = config.data.location, ["neg", "pos"]
    places = [root, root / IMDB, root / f"{IMDB}_v1.tar.gz"]
    found = next((path for path in places if path.is_file() or (path / "train" / "pos").is_dir()), None)
    if found is None:
        raise UserError(f"No IMDb reviews at {root}: put {IMDB}_v1.tar.gz (or its folder {IMDB}/) there.")
    texts = reviews(found)

    def split(part: str) -> SequenceSplit:
        names = sorted(key for key in texts if key.startswith(part))
        rows = [np.frombuffer(texts[key], np.uint8) for key in names]
        return SequenceSplit(rows, np.array([labels.index(key.split("/")[1]) for key in names]), found)

    return Splits(split("train"), split("test"), labels)


@register_data_set("lra_retrieval")
def lra_retrieval(config: Config, name: str) -> Splits:
    """Pairs of papers as bytes from LRA's files new_aan_pairs.*.tsv in `data.root`: label, two ids, two texts."""
    root = config.data.location

    def split(given: str | None, part: str) -> SequenceSplit:
        path = root / (given or AAN.format(part))
        if not path.is_file():
            raise UserError(f"No pairs of papers at {path}: put {AAN.format('*')} of lra_release.gz into {root}.")
        rows, labels = [], []
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            cells = line.split(b"\t")
            if len(cells) != 5 or cells[0] not in (b"0", b"1", b"0.0", b"1.0") or not (cells[3] and cells[4]):
                raise UserError(
                    f"{path}:{number} is not `label, id, id, text, text` with tabs between, label 0 or 1 and no text "
                    "empty."
                )
            rows.append((cells[3], cells[4]))
            labels.append(int(float(cells[0])))
        return SequenceSplit(rows, np.array(labels), path)

    return Splits(split(config.data.train, "train"), split(config.data.val, "test"), ["different", "related"])
