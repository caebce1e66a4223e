"""Tar shards in the WebDataset layout: consecutive files `key.jpg`, `key.cls` are one sample, `.cls` holds its label.

An index beside the shards (`shards.json`) says where every image lies, so that reading one is a seek. The order of
training keeps the reads close together: shards in random order, dealt to the processes in equal stretches, samples
moved by up to `data.shuffle_buffer` places.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import tarfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from ppattn.data.classes import numbered_classes
from ppattn.data.folders import data_root
from ppattn.data.images import SUFFIXES, decode
from ppattn.data.splits import Split, Splits, with_copies
from ppattn.errors import UserError, reading
from ppattn.files.atomic import write_text
from ppattn.settings import Config

INDEX = "shards.json"


class ShardSplit(Split):
    """Samples in the shards `names` of a folder; `parts`: what `index_shard` found in each."""

    def __init__(self, root: Path, names: list[str], parts: list[dict], buffer: int):
        arrays = {key: np.concatenate([np.asarray(part[key], np.int64) for part in parts]) for key in parts[0]}
        super().__init__(arrays["labels"], root)
        self.names, self.offsets, self.sizes, self.buffer = names, arrays["offsets"], arrays["sizes"], buffer
        self.starts = np.concatenate([[0], np.cumsum([len(part["labels"]) for part in parts])])

    def shard(self, i: int) -> int:
        """The number of the shard that holds sample i."""
        return int(np.searchsorted(self.starts, i, side="right")) - 1

    def key(self, i: int) -> str:
        shard = self.shard(i)
        return f"{self.names[shard]}, sample {i - self.starts[shard]}"

    def image(self, i: int) -> np.ndarray:
        with (self.root / self.names[self.shard(i)]).open("rb") as file:
            file.seek(self.offsets[i])
            return decode(file.read(self.sizes[i]), self.name(i))

    def train_order(self, seed: int, epoch: int, rank: int, world: int, repeats: int) -> np.ndarray:
        rng = np.random.default_rng([seed, epoch])
        shards = rng.permutation(len(self.names))
        stream = np.concatenate([np.arange(self.starts[s], self.starts[s + 1]) for s in shards])
        share = len(stream) // world
        stream = stream[rank * share : (rank + 1) * share]
        moved = np.arange(share) + self.buffer * np.random.default_rng([seed, epoch, rank]).random(share)
        return with_copies(stream[np.argsort(moved)], repeats)


def index_shard(path: Path) -> dict[str, list[int]]:
    """Labels of a shard's samples, and where their images lie: `labels`, `offsets` and `sizes` in bytes."""
    found: dict[str, list[int]] = {"labels": [], "offsets": [], "sizes": []}
    with reading(path, "a tar file"), path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
        file.seek(-1024, os.SEEK_END)
        if any(file.read()):
            raise tarfile.ReadError("truncated: no end-of-archive mark")
        files = (member for member in tar if member.isfile())
        for key, members in itertools.groupby(files, lambda member: _key_and_suffix(member.name)[0]):
            parts = {_key_and_suffix(member.name)[1]: member for member in members}
            image = next((parts[suffix[1:]] for suffix in SUFFIXES if suffix[1:] in parts), None)
            label = tar.extractfile(parts["cls"]) if "cls" in parts else None
            text = label.read(20).strip() if label else b""
            if image is None or not re.fullmatch(rb"[0-9]{1,18}", text):
                raise UserError(f"{path}: sample {key!r} is not an image with a .cls file that holds its label.")
            found["labels"].append(int(text))
            found["offsets"].append(image.offset_data)
            found["sizes"].append(image.size)
        file.seek(tar.offset)
        if file.read(1 << 16).strip(b"\0"):
            raise tarfile.ReadError("a second archive follows the first, which `cat` does not join")
    return found


def _key_and_suffix(name: str) -> tuple[str, str]:
    """`folder/key.left.jpg` is the sample `folder/key` with the suffix `left.jpg`."""
    folder, slash, file = name.rpartition("/")
    key, _, suffix = file.partition(".")
    return f"{folder}{slash}{key}", suffix.lower()


def read_index(root: Path, names: list[str]) -> list[dict]:
    """What `index_shard` finds in every shard, out of `shards.json`; new or changed shards are read and added."""
    from tqdm import tqdm

    index: dict[str, dict] = {}
    if (root / INDEX).exists():
        with reading(root / INDEX, "an index of shards; delete it, it is made again"):
            index = json.loads((root / INDEX).read_text(encoding="utf-8"))
    states = {name: (root / name).stat() for name in names}
    stamps = {name: f"{state.st_size} bytes at {state.st_mtime_ns}" for name, state in states.items()}
    stale = [name for name in names if name not in index or index[name].get("stamp") != stamps[name]]

    def keep() -> float:
        """Write what is there so far, and say when to do it again: a twentieth of the time may go into it."""
        began = time.monotonic()
        with suppress(OSError):  # best effort: the index is optional
            write_text(root / INDEX, json.dumps(index))
        return time.monotonic() + max(1.0, 20 * (time.monotonic() - began))

    due = time.monotonic()
    try:
        for name in tqdm(stale, desc="indexing shards", unit="shard", disable=None):
            index[name] = {"stamp": stamps[name], "samples": index_shard(root / name)}
            due = keep() if time.monotonic() > due else due
    finally:  # the others are not read again if one is damaged
        if stale:
            keep()
    parts = [index[name]["samples"] for name in names]
    if not any(part["labels"] for part in parts):
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
        from braceexpand import braceexpand

        with reading(pattern, "a pattern of shards within data.root, with {000..123} or *"):
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
    classes = numbered_classes(root, max(int(split.labels.max()) for split in splits))
    return Splits(splits[0], splits[1], classes)
