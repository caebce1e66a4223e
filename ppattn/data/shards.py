"""Tar shards in the WebDataset layout: consecutive files `key.jpg`, `key.cls` are one sample, `.cls` holds its label.

Shards are read from start to end through the webdataset library, by one reader per process that hands the encoded
bytes to the data workers. What order the samples come in is worked out beforehand from their number alone: shards in
random order, dealt to the processes in equal stretches, samples moved by up to `data.shuffle_buffer` places. Going on
in the middle of an epoch skips the shards that are done with and reads on from there.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from ppattn.data.images import SUFFIXES, decode
from ppattn.data.layout import MOST_CLASSES, data_root, numbered_classes
from ppattn.data.splits import FileSplit, Split, Splits, with_copies
from ppattn.errors import UserError, reading
from ppattn.settings import Config

MOST_SHARDS = 100_000
NUMBERS = re.compile(r"(-?\d+)\.\.(-?\d+)")  # of a range {first..last}
INDEX = "shards.json"  # beside the shards: for every shard its size, time and labels


def samples(path: Path) -> Iterator[tuple[str, bytes, int]]:
    """(key, encoded image, label) of every sample of a shard, in order; raises `UserError` for one that is damaged."""
    from webdataset.tariterators import group_by_keys, tar_file_expander

    with reading(path, "a tar file"), path.open("rb") as stream:
        stream.seek(-1024, os.SEEK_END)
        if any(stream.read()):
            raise tarfile.ReadError("truncated: no end-of-archive mark")
        stream.seek(0)
        for sample in group_by_keys(tar_file_expander([{"url": str(path), "stream": stream}])):
            image = next((sample[s[1:]] for s in SUFFIXES if s[1:] in sample), None)
            label = sample.get("cls", b"").strip()
            if image is None or not re.fullmatch(rb"[0-9]{1,18}", label) or int(label) >= MOST_CLASSES:
                raise UserError(
                    f"{path}: sample {sample['__key__']!r} is not an image with a .cls file that holds its label, "
                    f"a whole number below {MOST_CLASSES:,}."
                )
            yield sample["__key__"], image, int(label)


class ShardSplit(Split):
    """Samples in tar shards; `image(i)` reads its shard up to there, so it is for a few pictures only."""

    def __init__(self, paths: list[Path], labels: list[list[int]], buffer: int):
        super().__init__(np.concatenate([np.asarray(part, np.int64) for part in labels]))
        self.paths, self.buffer = paths, buffer
        self.starts = np.concatenate([[0], np.cumsum([len(part) for part in labels])])

    def _place(self, i: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self.starts, i, side="right")) - 1
        return shard, i - int(self.starts[shard])

    def name(self, i: int) -> str:
        shard, position = self._place(i)
        return f"{self.paths[shard]}, sample {position}"

    def key(self, i: int) -> str:
        shard, position = self._place(i)
        return f"{self.paths[shard].name}, sample {position}"

    def image(self, i: int) -> np.ndarray:
        return self.load(i, next(self.payloads(np.array([i]))))

    def load(self, i: int, payload: bytes) -> np.ndarray:
        return decode(payload, self.name(i))

    def instead(self, i: int, batch: list[int], payloads: list) -> tuple[int, bytes]:
        k = batch.index(i)
        other = next((j for j in [*range(k + 1, len(batch)), *range(k)] if batch[j] != i), None)
        if other is None:
            raise UserError(f"{self.name(i)} cannot be read, and its batch has no other image to take its place.")
        return batch[other], payloads[other]

    def train_order(self, seed: int, epoch: int, rank: int, world: int, repeats: int) -> np.ndarray:
        rng = np.random.default_rng([seed, epoch])
        shards = rng.permutation(len(self.paths))
        stream = np.concatenate([np.arange(self.starts[s], self.starts[s + 1]) for s in shards])
        share = len(stream) // world
        stream = stream[rank * share : (rank + 1) * share]
        moved = np.arange(share) + self.buffer * np.random.default_rng([seed, epoch, rank]).random(share)
        return with_copies(stream[np.argsort(moved)], repeats)

    def eval_order(self, rank: int, world: int) -> np.ndarray:
        return np.arange(len(self) * rank // world, len(self) * (rank + 1) // world)

    def payloads(self, order: np.ndarray) -> Iterator[bytes]:
        """Encoded images in the given order, from one pass over each shard they lie in."""
        shards = np.searchsorted(self.starts, order, side="right") - 1
        found, held = self._scan(list(dict.fromkeys(shards.tolist())), set(order.tolist())), dict[int, bytes]()
        last = -1
        for index in order.tolist():
            if index != last:
                held.pop(last, None)
                while index not in held:
                    i, data = next(found)
                    held[i] = data
            last = index
            yield held[index]

    def _scan(self, shards: list[int], wanted: set[int]) -> Iterator[tuple[int, bytes]]:
        for shard in shards:
            first, stop = self.starts[shard : shard + 2].tolist()
            remaining = len(wanted.intersection(range(first, stop)))
            found = samples(self.paths[shard])
            for i in range(first, stop):
                sample = next(found, None)
                if sample is None:
                    raise UserError(f"{self.paths[shard]} ends {stop - i} samples before its index; delete {INDEX}.")
                if i + 1 == stop and next(found, None) is not None:
                    raise UserError(f"{self.paths[shard]} holds more samples than its index; delete {INDEX}.")
                _, data, label = sample
                if i in wanted:
                    if label != self.labels[i]:
                        raise UserError(f"{self.paths[shard]} is not the file that was indexed; delete {INDEX}.")
                    yield i, data
                    remaining -= 1
                if remaining == 0:
                    break


def named_shards(root: Path, name: str) -> list[Path]:
    """`root`/NAME/*.tar, or else the tar files of `root` that have the split's name as a word of theirs."""
    files = sorted(path for path in root.glob("*.tar") if name in re.split("[^a-z]+", path.stem.lower()))
    return sorted((root / name).glob("*.tar")) or files


def _expanded(pattern: str) -> list[str]:
    from braceexpand import braceexpand

    try:
        # braceexpand keeps every number of a range in memory before it gives the first name
        if any(abs(int(last) - int(first)) >= MOST_SHARDS for first, last in NUMBERS.findall(pattern)):
            raise ValueError
        parts = list(itertools.islice(braceexpand(pattern), MOST_SHARDS + 1))
        if not parts or len(parts) > MOST_SHARDS or any(not part or part.startswith("/") for part in parts):
            raise ValueError
    except (ValueError, RecursionError):
        raise _no_pattern(pattern) from None
    return parts


def _no_pattern(pattern: str) -> UserError:
    return UserError(
        f"{pattern[:200]!r} is not a pattern of shards: names within data.root with {{000..123}} or *, "
        f"{MOST_SHARDS:,} at most."
    )


def find_shards(root: Path, pattern: str | None, names: tuple[str, ...]) -> list[Path]:
    """Tar files of a split: those a pattern with {000..123} or * stands for, or else those named after it."""
    if pattern is None:
        paths = next(filter(None, (named_shards(root, name) for name in names)), [])
        expanded = [f"{names[0]}/*.tar"]
    else:
        expanded = _expanded(f"{pattern}/*.tar" if (root / pattern).is_dir() else pattern)
        try:
            paths = [path for part in expanded for path in sorted(root.glob(part))]
        except (ValueError, IndexError, NotImplementedError):  # "**.tar", ".", "/x"
            raise _no_pattern(pattern) from None
        lost = [part for part in expanded if "*" not in part and not (root / part).is_file()]
        if paths and lost:
            raise UserError(f"Shard {root / lost[0]} is missing ({len(lost)} of the {len(expanded)} that data names).")
    if not paths:
        wanted = pattern or expanded[0]
        raise UserError(f"No shards in {root} for {wanted!r}: tar files are expected, or set data.train and data.val.")
    return paths


def read_index(root: Path, paths: list[Path]) -> list[list[int]]:
    """Labels of every shard, from the index beside them; shards that it does not know are read once and added."""
    from tqdm import tqdm

    index = _known(root)
    stale = [p for p in paths if index.get(_key(root, p), {}).get("stamp") != _stamp(p)]
    try:
        for path in tqdm(stale, desc="indexing shards", unit="shard", disable=None):
            index[_key(root, path)] = {"stamp": _stamp(path), "labels": [label for _, _, label in samples(path)]}
    finally:  # the others are not read again where one is damaged
        if stale:
            save_index(root, index)
    labels = [index[_key(root, p)]["labels"] for p in paths]
    if not sum(map(len, labels)):
        raise UserError(f"The shards in {root} hold no samples.")
    return labels


def _known(root: Path) -> dict[str, dict]:
    """The index as it lies there; one that is not of its shape is refused."""
    path = root / INDEX
    if not path.exists():
        return {}
    with reading(path, "an index of shards; delete it, it is made again"):
        index = json.loads(path.read_text(encoding="utf-8"))
        for entry in index.values():
            size, time = entry["stamp"]
            labels = entry["labels"]
            if not all(type(number) is int for number in (size, time, *labels)):
                raise ValueError("something else than whole numbers")
            if labels and not 0 <= min(labels) <= max(labels) < MOST_CLASSES:
                raise ValueError("labels out of range")
    return index


def save_index(root: Path, index: dict) -> None:
    """Write the index whole or not at all; a folder that cannot be written to goes without one."""
    temporary = root / f".{INDEX}.{os.getpid()}"
    try:
        temporary.write_text(json.dumps(index), encoding="utf-8")
        temporary.replace(root / INDEX)
    except OSError:  # no right to write, a read-only mount, a full disk
        with suppress(OSError):
            temporary.unlink()


def _key(root: Path, path: Path) -> str:
    return str(path.relative_to(root))


def _stamp(path: Path) -> list[int]:
    state = path.stat()
    return [state.st_size, state.st_mtime_ns]


def write_shards(split: FileSplit, folder: Path, prefix: str, per_shard: int = 1000, seed: int = 0) -> list[Path]:
    """Write a `FileSplit` as shards `prefix-000000.tar`, ..., its images in random order and byte for byte.

    Args:
        split: class folders or a list file, see `build_datasets`.
        folder: where the shards, and their index, go.
        per_shard: samples in a shard.
        seed: of the order; shuffling is local when shards are read, so classes must be spread here.

    Returns:
        The shards, in order.

    Raises:
        UserError: where shards of this name exist already, or an image's file cannot be read.
    """
    from tqdm import tqdm
    from webdataset import ShardWriter

    folder.mkdir(parents=True, exist_ok=True)
    if list(folder.glob(f"{prefix}-*.tar")):
        raise UserError(f"{folder} already has shards {prefix}-*.tar; remove them or choose another folder.")
    order = np.random.default_rng(seed).permutation(len(split))
    pattern = f"{str(folder).replace('%', '%%')}/{prefix}-%06d.tar"
    with ShardWriter(pattern, per_shard, maxsize=math.inf, verbose=0, encoder=False) as writer:
        for number, i in enumerate(tqdm(order.tolist(), desc=prefix, unit="image", disable=None)):
            path = split.root / split.paths[i]
            key = f"{number:08d}-{re.sub(r'[^0-9A-Za-z_-]', '_', path.stem)[:60]}"
            try:
                data = path.read_bytes()
            except OSError as error:
                raise UserError(f"Cannot read image {path}: {error.strerror}.") from None
            writer.write({"__key__": key, path.suffix[1:].lower(): data, "cls": str(split.label(i)).encode()})
    paths = sorted(folder.glob(f"{prefix}-*.tar"))
    labels = split.labels[order]
    index = _known(folder)
    for k, path in enumerate(paths):
        index[path.name] = {"stamp": _stamp(path), "labels": labels[k * per_shard : (k + 1) * per_shard].tolist()}
    save_index(folder, index)
    return paths


def shards(config: Config, name: str) -> Splits:
    """The data set at `data.root`: shards in train/ and val/, or with these words in their names, or given patterns."""
    root = data_root(config)
    splits = []
    for given, names in ((config.data.train, ("train",)), (config.data.val, ("val", "test"))):
        paths = find_shards(root, given, names)
        splits.append(ShardSplit(paths, read_index(root, paths), config.data.shuffle_buffer))
    classes = numbered_classes(root, max(int(split.labels.max()) for split in splits))
    return Splits(splits[0], splits[1], classes)
