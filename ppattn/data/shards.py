"""Tar shards in the WebDataset layout: consecutive files `key.jpg`, `key.cls` are one sample, `.cls` holds its label.

An index beside the shards (`shards.json`) says where every image lies, so that reading one is a seek. Training reads
shards in random order, in equal stretches for the processes, samples moved by up to `data.shuffle_buffer` places.
"""

import itertools
import os
import re
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, Field, TypeAdapter
from tqdm import tqdm

from ppattn.data.classes import numbered_classes
from ppattn.data.folders import data_root
from ppattn.data.images import SIGNATURE, SUFFIXES, ImageError, decode
from ppattn.data.splits import Split, Splits, with_copies
from ppattn.errors import UserError, optional_package, reading_untrusted
from ppattn.files.atomic import write_text
from ppattn.settings import Config

INDEX = "shards.json"
Whole = Annotated[int, Field(ge=0, lt=2**63)]


class Samples(BaseModel):
    """Labels of a shard's samples, and where their images lie, in bytes."""

    labels: list[Whole] = []
    offsets: list[Whole] = []
    sizes: list[Whole] = []


class Indexed(BaseModel):
    stamp: str  # size and time, which change with the shard
    samples: Samples


INDEXED = TypeAdapter(dict[str, Indexed])  # by the name of the shard


class ShardSplit(Split):
    """Samples in the shards `names` of a folder; `parts`: what `index_shard` found in each."""

    def __init__(self, root: Path, names: list[str], parts: list[Samples], buffer: int):
        labels, self.offsets, self.sizes = (
            np.concatenate([np.asarray(getattr(part, key), np.int64) for part in parts]) for key in Samples.model_fields
        )
        super().__init__(labels, root)
        self.names, self.buffer = names, buffer
        self.starts = np.concatenate([[0], np.cumsum([len(part.labels) for part in parts])])

    def shard(self, i: int) -> int:
        """The number of the shard that contains sample i."""
        return int(np.searchsorted(self.starts, i, side="right")) - 1

    def key(self, i: int) -> str:
        shard = self.shard(i)
        return f"{self.names[shard]}, sample {i - self.starts[shard]}"

    def image(self, i: int) -> np.ndarray:
        try:
            with (self.root / self.names[self.shard(i)]).open("rb") as file:
                file.seek(self.offsets[i])
                data = file.read(self.sizes[i])
        except OSError as error:
            raise ImageError(f"Cannot read image {self.name(i)}: {error.strerror}.") from None
        return decode(data, self.name(i), **self.reading)

    def train_order(self, seed: int, epoch: int, rank: int, world: int, repeats: int) -> np.ndarray:
        shards = np.random.default_rng([seed, epoch]).permutation(len(self.names))
        stream = np.concatenate([np.arange(self.starts[s], self.starts[s + 1]) for s in shards])
        share = len(stream) // world
        stream = stream[rank * share : (rank + 1) * share]
        moved = np.arange(share) + self.buffer * np.random.default_rng([seed, epoch, rank]).random(share)
        return with_copies(stream[np.argsort(moved)], repeats)


def index_shard(path: Path) -> Samples:
    """The samples of a shard. Their images have a suffix of images, or another one and begin as images do."""
    found = Samples()
    with reading_untrusted(path, "a tar file"), path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
        file.seek(-1024, os.SEEK_END)
        if any(file.read()):
            raise tarfile.ReadError("truncated: no end-of-archive mark")

        def head(member: tarfile.TarInfo) -> bytes:
            content = tar.extractfile(member)
            return content.read(20) if content else b""

        files = (member for member in tar if member.isfile())
        for key, members in itertools.groupby(files, lambda member: _key_and_suffix(member.name)[0]):
            parts = {_key_and_suffix(member.name)[1]: member for member in members}
            label = head(parts.pop("cls")).strip() if "cls" in parts else b""
            named = [parts[suffix[1:]] for suffix in SUFFIXES if suffix[1:] in parts]
            image = next(iter(named or [part for part in parts.values() if SIGNATURE.match(head(part))]), None)
            if image is None or image.issparse() or not re.fullmatch(rb"[0-9]{1,18}", label):
                raise UserError(f"{path}: sample {key!r} is not an image with a .cls file that holds its label.")
            found.labels.append(int(label))
            found.offsets.append(image.offset_data)
            found.sizes.append(image.size)
        file.seek(tar.offset)
        if file.read(1 << 16).strip(b"\0"):
            raise tarfile.ReadError("a second archive follows the first, which `cat` does not join")
    return found


def _key_and_suffix(name: str) -> tuple[str, str]:
    """`folder/key.left.jpg` is the sample `folder/key` with the suffix `left.jpg`."""
    folder, slash, file = name.rpartition("/")
    key, _, suffix = file.partition(".")
    return f"{folder}{slash}{key}", suffix.lower()


def read_index(root: Path, names: list[str]) -> list[Samples]:
    """What `index_shard` finds in every shard, out of `shards.json`; new or changed shards are read and added."""
    index: dict[str, Indexed] = {}
    if (root / INDEX).exists():
        with reading_untrusted(root / INDEX, "an index of shards; delete it, it is made again"):
            index = INDEXED.validate_json((root / INDEX).read_bytes())
    states = {name: (root / name).stat() for name in names}
    stamps = {name: f"{state.st_size} bytes at {state.st_mtime_ns}" for name, state in states.items()}
    stale = [name for name in names if name not in index or index[name].stamp != stamps[name]]
    try:
        for name in tqdm(stale, desc="indexing shards", unit="shard", disable=None):
            index[name] = Indexed(stamp=stamps[name], samples=index_shard(root / name))
    finally:  # the others are not read again if one is damaged
        if stale:
            with suppress(OSError):  # best effort: the index is optional
                write_text(root / INDEX, INDEXED.dump_json(index).decode())
    parts = [index[name].samples for name in names]
    if not any(part.labels for part in parts):
        raise UserError(f"The shards in {root} hold no samples.")
    return parts


def named_shards(root: Path, name: str) -> list[Path]:
    """`root`/NAME/*.tar, or else the tar files of `root` that have the split's name as a word of theirs."""
    files = sorted(path for path in root.glob("*.tar") if name in re.split("[^a-z]+", path.stem.lower()))
    return sorted((root / name).glob("*.tar")) or files


def find_shards(root: Path, pattern: str | None, names: tuple[str, ...]) -> list[Path]:
    """Tar files of a split: those that a pattern with {000..123} or * stands for, or else those named after it."""
    if pattern is None:
        paths = next(filter(None, (named_shards(root, name) for name in names)), [])
    else:
        with reading_untrusted(pattern, "a pattern of shards within data.root, with {000..123} or *"):
            with optional_package("shards"):
                from braceexpand import braceexpand
            parts = list(braceexpand(f"{pattern}/*.tar" if (root / pattern).is_dir() else pattern))
            paths = [path for part in parts for path in sorted(root.glob(part))]
        lost = [part for part in parts if "*" not in part and not (root / part).is_file()]
        if paths and lost:
            raise UserError(f"Shard {root / lost[0]} is missing ({len(lost)} of the {len(parts)} that data names).")
    if not paths:
        wanted = pattern or f"{names[0]}/*.tar"
        raise UserError(f"No shards in {root} for {wanted!r}: tar files are expected, or set data.train and data.val.")
    return paths


def shards(config: Config, name: str) -> Splits:
    """The data set at `data.root`: shards in train/ and val/, or with these words in their names, or given patterns."""
    root = data_root(config)
    splits = []
    for given, names in ((config.data.train, ("train",)), (config.data.val, ("val", "test"))):
        found = [str(path.relative_to(root)) for path in find_shards(root, given, names)]
        splits.append(ShardSplit(root, found, read_index(root, found), config.data.shuffle_buffer))
    classes, table = numbered_classes(root, {*np.concatenate([split.labels for split in splits]).tolist()})
    for split in splits:
        split.labels = np.array([table[label] for label in split.labels.tolist()], np.int64)
    return Splits(splits[0], splits[1], classes)
