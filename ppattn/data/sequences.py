"""Sequences of tokens: the tasks of Long Range Arena (Tay et al., ICLR 2021, arXiv 2011.04006), and their batches.

ListOps is generated here by the published rules. Image is CIFAR-10 in grey, row by row. Text (IMDb) and Retrieval (AAN)
are read as bytes from the published files. An item of a split is int16 [n], or [2, n] for two documents, the shorter
one filled up with -1; a batch is int64 with -1 behind the tokens. The validation split is what LRA calls the test
split.
"""

from __future__ import annotations

import random
import statistics
import tarfile
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from ppattn.data.cifar import cifar
from ppattn.data.splits import Split, Splits
from ppattn.data.transforms import Erased
from ppattn.errors import UserError, reading
from ppattn.settings import Augment, Config, ListOps

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
AAN = "new_aan_pairs.{}.tsv"


class SequenceSplit(Split):
    """Sequences in memory: anything that numpy makes an array of small integers."""

    takes = "sequences"

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
    """What happens to a sequence before the model sees it: all tokens after the first `max_len` are cut off."""

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

    def pixels(self, item: np.ndarray, rng: np.random.Generator, flipped: bool) -> tuple[np.ndarray, Erased | None]:
        return self.preprocess.pixels(item), None

    def assemble(self, slots: np.ndarray, erased: list) -> np.ndarray:
        return self.preprocess.assemble(slots)


class _TooLong(Exception):
    pass


def expression(rng: random.Random, settings: ListOps, tokens: bytearray, depth: int = 1) -> int:
    """Append the tokens of a random expression, and return its value."""
    if depth >= settings.max_depth or rng.random() > OPERATOR_SHARE:
        tokens.append(rng.randrange(10))
        return tokens[-1]
    operator = rng.randrange(len(FUNCTIONS))
    tokens.append(10 + operator)
    values = [expression(rng, settings, tokens, depth + 1) for _ in range(rng.randint(2, settings.max_args))]
    tokens.append(LISTOPS.index("]"))
    if len(tokens) >= settings.max_length:
        raise _TooLong
    return FUNCTIONS[operator](values)


def listops(config: Config, name: str) -> Splits:
    """Expressions with min_length < tokens < max_length, no two alike; the validation split comes after training."""
    settings = config.data.listops
    rng, found, wanted = random.Random(settings.seed), dict[bytes, int](), settings.train + settings.val
    for draw in count():
        if len(found) == wanted:
            break
        if draw > PATIENCE * (wanted + 1000):
            raise UserError(
                f"Of {draw:,} random expressions only {len(found):,} fit data.listops: allow more levels (max_depth), "
                "other lengths, or ask for fewer sequences."
            )
        tokens = bytearray()
        try:
            value = expression(rng, settings, tokens)
        except _TooLong:
            continue
        if settings.min_length < len(tokens) < settings.max_length:
            found.setdefault(bytes(tokens), value)
    rows = [np.frombuffer(tokens, np.uint8) for tokens in found]
    labels, cut = np.array(list(found.values())), settings.train
    train, val = (SequenceSplit(rows[part], labels[part], name) for part in (slice(cut), slice(cut, None)))
    return Splits(train, val, [str(digit) for digit in range(10)])


def lra_image(config: Config, name: str) -> Splits:
    """CIFAR-10 at `data.root`, every image as 1,024 grey values."""
    splits = cifar(config, "cifar10")

    def grey(split: Any) -> SequenceSplit:
        rows = (split.images.reshape([len(split), -1, 3]) / np.float32(255)) @ GREY
        return SequenceSplit((255.5 * rows).astype(np.uint8), split.labels, split.root)

    return Splits(grey(splits.train), grey(splits.val), splits.classes)


def lra_text(config: Config, name: str) -> Splits:
    """The bytes of IMDb's reviews, from the folder aclImdb or the archive aclImdb_v1.tar.gz at `data.root`."""
    root, labels = config.data.location, ["neg", "pos"]
    places = [root, root / IMDB, root / f"{IMDB}_v1.tar.gz"]
    found = next((path for path in places if path.is_file() or (path / "train" / "pos").is_dir()), None)
    if found is None:
        raise UserError(f"No IMDb reviews at {root}: put {IMDB}_v1.tar.gz (or its folder {IMDB}/) there.")
    texts: dict[str, bytes] = {}
    if found.is_dir():
        texts = {str(path.relative_to(found)): path.read_bytes() for path in found.glob("t*/*/*.txt")}
    else:
        with reading(found, f"a complete tar archive; expected is {IMDB}_v1.tar.gz"), tarfile.open(found) as archive:
            for member in archive:
                if member.name.endswith(".txt") and (file := archive.extractfile(member)):
                    texts[member.name.partition("/")[2]] = file.read()

    def split(part: str) -> SequenceSplit:
        names = sorted(key for key in texts if key.split("/")[:-1] in ([part, "neg"], [part, "pos"]))
        rows = [np.frombuffer(texts[key], np.uint8) for key in names]
        return SequenceSplit(rows, np.array([labels.index(key.split("/")[1]) for key in names]), found)

    return Splits(split("train"), split("test"), labels)


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
            if len(cells) != 5 or cells[0] not in (b"0", b"1", b"0.0", b"1.0"):
                raise UserError(
                    f"{path}:{number} is not `label, id, id, text, text` with tabs between and label 0 or 1."
                )
            rows.append((cells[3], cells[4]))
            labels.append(int(float(cells[0])))
        return SequenceSplit(rows, np.array(labels), path)

    return Splits(split(config.data.train, "train"), split(config.data.val, "test"), ["different", "related"])
