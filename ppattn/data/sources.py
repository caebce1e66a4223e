"""Where images come from: every data set becomes two splits with the same few methods.

A split has `len()`, `image(i)` (uint8 RGB), `label(i)`, `name(i)` for reports and `labels`, all of them at once. The
other methods are the loader's: which indices come when, and what to do about an image that cannot be read.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import logging
import pickle
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ppattn.config import Config
from ppattn.data.images import IMAGENET_MEAN, IMAGENET_STD, SUFFIXES, read_image
from ppattn.errors import UserError

logger = logging.getLogger("ppattn.data")


class Split:
    """One part of a data set. The defaults are those of images that can be read in any order."""

    def __init__(self, labels: np.ndarray):
        self.labels = np.asarray(labels, np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def label(self, i: int) -> int:
        return int(self.labels[i])

    def image(self, i: int) -> np.ndarray:
        """uint8 RGB [h, w, 3]; raises `ImageError` where it cannot be read."""
        raise NotImplementedError

    def name(self, i: int) -> str:
        """What to call the image in a message."""
        raise NotImplementedError

    def train_order(self, seed: int, epoch: int, rank: int, world: int, repeats: int) -> np.ndarray:
        """[n, 2]: index and copy (0..repeats - 1) of what process `rank` of `world` sees in an epoch, in order."""
        order = np.random.default_rng([seed, epoch]).permutation(len(self))
        return with_copies(order, repeats)[rank::world]

    def eval_order(self, rank: int, world: int) -> np.ndarray:
        """Indices of the share of process `rank` of `world`; all shares together hold each image once."""
        return np.arange(rank, len(self), world)

    def payloads(self, order: np.ndarray) -> Iterator:
        """What the loader's process has to read and hand to the worker that makes the image; here nothing."""
        return itertools.repeat(None, len(order))

    def load(self, i: int, payload: None) -> np.ndarray:
        """The image, from its payload."""
        return self.image(i)

    def instead(self, i: int, batch: list[int], payloads: list) -> tuple[int, None]:
        """Index and payload that stand in for image i of a batch when it cannot be read."""
        return (i + 1) % len(self), None


def with_copies(order: np.ndarray, repeats: int) -> np.ndarray:
    """[n] to [n * repeats, 2]: every index that many times in succession, beside the number of the copy."""
    return np.stack([np.repeat(order, repeats), np.tile(np.arange(repeats), len(order))], axis=1)


class ArraySplit(Split):
    """Images that lie in memory, uint8 [n, h, w, 3]."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, prefix: str):
        super().__init__(labels)
        self.images, self.prefix = images, prefix

    def image(self, i: int) -> np.ndarray:
        return self.images[i]

    def name(self, i: int) -> str:
        return f"{self.prefix}/{i}"


class FileSplit(Split):
    """Images in files, paths relative to `root`."""

    def __init__(self, root: Path, paths: list[str], labels: np.ndarray):
        super().__init__(labels)
        self.root, self.paths = root, paths

    def image(self, i: int) -> np.ndarray:
        return read_image(self.root / self.paths[i])

    def name(self, i: int) -> str:
        return str(self.root / self.paths[i])


@dataclass
class Splits:
    """A data set: two splits, class names in the order of the labels, and its pixel statistics in 0..1."""

    train: Split
    val: Split
    classes: list[str]
    mean: list[float]
    std: list[float]


# digits


def _digits() -> Splits:
    """scikit-learn's 1,797 handwritten digits (8 x 8 grey), 360 of them for testing, by a fixed stratified split."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    grey = np.rint(data.images * (255 / 16)).astype(np.uint8)
    images = np.repeat(grey[..., None], 3, axis=3)
    train, test = train_test_split(np.arange(len(images)), test_size=360, random_state=0, stratify=data.target)
    return Splits(
        ArraySplit(images[train], data.target[train], "digits/train"),
        ArraySplit(images[test], data.target[test], "digits/test"),
        [str(name) for name in data.target_names],
        [0.3053] * 3,
        [0.3760] * 3,
    )


# CIFAR


@dataclass(frozen=True)
class _Cifar:
    title: str
    archive: str
    md5: str
    folder: str
    train: tuple[str, ...]
    test: str
    meta: str
    label: bytes
    names: bytes
    mean: list[float]
    std: list[float]


_CIFAR = {
    "cifar10": _Cifar(
        "CIFAR-10",
        "cifar-10-python.tar.gz",
        "c58f30108f718f92721af3b95e74349a",
        "cifar-10-batches-py",
        tuple(f"data_batch_{i}" for i in range(1, 6)),
        "test_batch",
        "batches.meta",
        b"labels",
        b"label_names",
        [0.4914, 0.4822, 0.4465],
        [0.2470, 0.2435, 0.2616],
    ),
    "cifar100": _Cifar(
        "CIFAR-100",
        "cifar-100-python.tar.gz",
        "eb9058c3a382ffc7106e4002c42a8d85",
        "cifar-100-python",
        ("train",),
        "test",
        "meta",
        b"fine_labels",
        b"fine_label_names",
        [0.5071, 0.4865, 0.4409],
        [0.2673, 0.2564, 0.2762],
    ),
}
_CIFAR_HOSTS = ("https://www.cs.toronto.edu/~kriz/", "https://dataset.bj.bcebos.com/cifar/")


def _encode(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"encoding {encoding}")
    return text.encode("latin1")


class _CifarUnpickler(pickle.Unpickler):
    """Knows the few names that arrays, strings and lists need; everything else is refused and never imported."""

    def find_class(self, module: str, name: str):
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):  # how newer Pythons write bytes
            return _encode
        raise pickle.UnpicklingError(f"{module}.{name}")


def _cifar_batches(path: Path, kind: _Cifar) -> dict[str, dict]:
    """The contents of the files that make up the data set, read in one pass over the folder or archive."""
    wanted = {*kind.train, kind.test, kind.meta}
    if path.is_dir():
        return {name: _cifar_load(path / name, open(path / name, "rb")) for name in wanted if (path / name).is_file()}
    try:
        with tarfile.open(path) as archive:
            members = (m for m in archive if m.isfile() and m.name.rpartition("/")[2] in wanted)
            return {
                m.name.rpartition("/")[2]: _cifar_load(f"{path}: {m.name}", archive.extractfile(m)) for m in members
            }
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        reason = str(error).partition("\n")[0].rstrip(":")  # the first of a line per compression that was tried
        raise UserError(f"{path} is not a complete tar archive ({reason}); expected {kind.archive}.") from None


def _cifar_load(name: str | Path, file: BinaryIO) -> dict:
    try:
        with file:
            content = _CifarUnpickler(io.BytesIO(file.read()), encoding="bytes").load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
        raise UserError(f"{name} is damaged or not a CIFAR file ({error}).") from None
    if not isinstance(content, dict):
        raise UserError(f"{name} is not a CIFAR file: it holds a {type(content).__name__}.")
    return content


def _cifar_split(batches: list[dict], kind: _Cifar, prefix: str) -> ArraySplit:
    rows, labels = [], []
    for batch in batches:
        data, targets = np.asarray(batch.get(b"data")), batch.get(kind.label)
        if data.dtype != np.uint8 or data.shape[1:] != (3072,) or len(data) != len(targets or ()):
            raise UserError(f"{prefix} is not from {kind.title}: no rows of 3,072 bytes with {kind.label.decode()}.")
        rows.append(data)
        labels += targets
    images = np.concatenate(rows).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return ArraySplit(np.ascontiguousarray(images), np.asarray(labels), prefix)


def _find_cifar(root: Path, kind: _Cifar) -> Path | None:
    """The archive or the extracted folder: `root` itself, or what it contains."""
    for candidate in (root, root / kind.folder, root / kind.archive, root / kind.archive.removesuffix(".gz")):
        if candidate.is_file() or (candidate / kind.meta).is_file():
            return candidate
    return None


def _cifar(config: Config, name: str) -> Splits:
    kind = _CIFAR[name]
    root = Path(config.data.root or f"data/{name}")
    found = _find_cifar(root, kind)
    if found is None and config.data.download:
        target = root if root.name.endswith((".gz", ".tar")) else root / kind.archive
        found = download([host + kind.archive for host in _CIFAR_HOSTS], target, kind.md5, kind.title)
    if found is None:
        raise UserError(
            f"No {kind.title} at {root}: put {kind.archive} (or its folder {kind.folder}/) there, or set data.root."
        )
    batches = _cifar_batches(found, kind)
    missing = sorted({*kind.train, kind.test, kind.meta} - set(batches))
    if missing:
        raise UserError(f"{found} is not a complete {kind.title}: {', '.join(missing)} not found in it.")
    names = batches[kind.meta].get(kind.names)
    if not names:
        raise UserError(f"{found}: {kind.meta} is not from {kind.title}, it has no {kind.names.decode()}.")
    train = _cifar_split([batches[member] for member in kind.train], kind, f"{name}/train")
    test = _cifar_split([batches[kind.test]], kind, f"{name}/test")
    return Splits(train, test, [n.decode() for n in names], kind.mean, kind.std)


def download(urls: list[str], target: Path, md5: str, title: str) -> Path:
    """Fetch a file with a progress bar from the first address that answers, check it, and move it to `target`.

    Processes that ask for the same file at the same time wait for the first one.

    Raises:
        UserError: where no address answers, or what came is not the file with this md5.
    """
    from fcntl import LOCK_EX, flock

    from tqdm import tqdm

    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".part")
    reasons = []
    with partial.open("ab") as lock:
        flock(lock, LOCK_EX)
        if target.is_file():
            return target
        for url in urls:
            digest = hashlib.md5()
            try:
                with urllib.request.urlopen(url, timeout=20) as answer, partial.open("wb") as file:
                    size = int(answer.headers.get("Content-Length") or 0) or None
                    with tqdm(total=size, unit="B", unit_scale=True, desc=title) as bar:
                        while block := answer.read(1 << 20):
                            file.write(block)
                            digest.update(block)
                            bar.update(len(block))
            except (OSError, urllib.error.URLError) as error:
                reasons.append(f"{url}: {getattr(error, 'reason', error)}")
                continue
            if digest.hexdigest() == md5:
                return partial.replace(target)
            reasons.append(f"{url}: wrong checksum")
        partial.unlink()
    raise UserError(
        f"{title} is not at {target} and cannot be downloaded ({'; '.join(reasons)}). "
        f"Put {target.name} there yourself, or set data.root to where it is."
    )


# class folders


def _class_folders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _folder_split(folder: Path, classes: list[str]) -> FileSplit:
    unknown = sorted(set(_class_folders(folder)) - set(classes))
    if unknown:
        raise UserError(f"{folder} has classes that the training split has not: {', '.join(unknown[:5])}.")
    paths, labels = [], []
    for label, name in enumerate(classes):
        files = sorted(p for p in (folder / name).rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
        paths += [str(p.relative_to(folder)) for p in files]
        labels += [label] * len(files)
    if not paths:
        raise UserError(f"{folder} holds no images ({', '.join(SUFFIXES)}) in its class folders.")
    return FileSplit(folder, paths, np.asarray(labels))


def _find(root: Path, given: str | None, names: tuple[str, ...], what: str) -> Path | None:
    """`given` within root, or the first of the usual names that exists; an absent `given` is an error."""
    if given is not None:
        if not (root / given).exists():
            raise UserError(f"data.{what} = {given!r} is not in {root}.")
        return root / given
    return next((root / name for name in names if (root / name).exists()), None)


def _folder(config: Config, name: str) -> Splits:
    root = _root(config, name)
    train = _find(root, config.data.train, ("train", "training"), "train")
    val = _find(root, config.data.val, ("val", "valid", "validation", "test"), "val")
    if name == "imagenet" and train is None:  # but train/ needs its val/, or `best` would be chosen on training images
        train = val = val or root
        logger.warning("%s has no train/: the images of %s serve as both, for trying out only", root, val)
    if train is None or val is None:
        raise UserError(
            f"{root} must hold train/<class>/*.jpg and val/<class>/*.jpg (or test/); "
            f"{'train' if train is None else 'val'}/ is not there. data.train and data.val name other folders."
        )
    for folder in (train, val):
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder of class folders.")
    classes = _class_folders(train)
    if not classes:
        raise UserError(f"{train} has no class folders: one folder per class is expected, its name the class name.")
    return Splits(
        _folder_split(train, classes), _folder_split(val, classes), classes, list(IMAGENET_MEAN), list(IMAGENET_STD)
    )


# list files


def _list_split(path: Path) -> tuple[list[str], list[str]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"Cannot read list file {path} ({error}).") from None
    rows = [(number, line.rsplit(None, 1)) for number, line in enumerate(lines, 1) if line.strip()]
    for number, row in rows:
        if len(row) != 2:
            raise UserError(f"{path}:{number}: {lines[number - 1]!r} is not of the form 'path label'.")
    if not rows:
        raise UserError(f"List file {path} is empty.")
    return [row[0] for _, row in rows], [row[1] for _, row in rows]


def read_classes(root: Path) -> list[str] | None:
    """Class names from `classes.txt` or `labels.txt`: one in a line, or 'number name' as PaddleClas has it."""
    path = next((root / name for name in ("classes.txt", "labels.txt") if (root / name).is_file()), None)
    if path is None:
        return None
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    parts = [line.split(None, 1) for line in lines]
    if all(len(part) == 2 and part[0] == str(i) for i, part in enumerate(parts)):
        return [part[1] for part in parts]
    return lines


def _list(config: Config, name: str) -> Splits:
    root = _root(config, name)
    train = _find(root, config.data.train, ("train_list.txt", "train.txt"), "train")
    val = _find(root, config.data.val, ("val_list.txt", "val.txt", "test_list.txt", "test.txt"), "val")
    if train is None or val is None:
        raise UserError(
            f"{root} has no train_list.txt and val_list.txt; data.train and data.val name other list files."
        )
    (train_paths, train_labels), (val_paths, val_labels) = _list_split(train), _list_split(val)
    classes = read_classes(root)
    labels = {*train_labels, *val_labels}
    if all(label.isdecimal() for label in labels):
        highest = max(map(int, labels))
        classes = classes or [str(i) for i in range(highest + 1)]
        if highest >= len(classes):
            raise UserError(f"The lists in {root} have label {highest}, but there are {len(classes)} class names.")
        table = {label: int(label) for label in labels}
    else:
        classes = classes or sorted({*train_labels})
        table = {name: i for i, name in enumerate(classes)}
        if lost := sorted(labels - set(classes)):
            raise UserError(f"The lists in {root} have labels that are not classes: {', '.join(lost[:5])}.")
    return Splits(
        FileSplit(root, train_paths, np.array([table[label] for label in train_labels])),
        FileSplit(root, val_paths, np.array([table[label] for label in val_labels])),
        classes,
        list(IMAGENET_MEAN),
        list(IMAGENET_STD),
    )


def _shards(config: Config, name: str) -> Splits:
    from ppattn.data.shards import ShardSplit, find_shards, read_index

    root = _root(config, name)
    splits = []
    for given, names in ((config.data.train, ("train",)), (config.data.val, ("val", "test"))):
        paths = find_shards(root, given, names)
        splits.append(ShardSplit(paths, read_index(root, paths), config.data.shuffle_buffer))
    highest = max(int(split.labels.max()) for split in splits)
    classes = read_classes(root) or [str(i) for i in range(highest + 1)]
    if highest >= len(classes):
        raise UserError(f"The shards in {root} have label {highest}, but there are {len(classes)} class names.")
    return Splits(*splits, classes, list(IMAGENET_MEAN), list(IMAGENET_STD))


def _root(config: Config, name: str) -> Path:
    root = Path(config.data.root or f"data/{name}")
    if not root.is_dir():
        raise UserError(f"data.root = {str(root)!r} is not a folder; put the data there or set data.root.")
    return root


_BUILDERS = {
    "digits": lambda config, name: _digits(),
    "cifar10": _cifar,
    "cifar100": _cifar,
    "folder": _folder,
    "imagenet": _folder,
    "list": _list,
    "shards": _shards,
}


def build_datasets(config: Config) -> Splits:
    """The data set that `config.data` names, with `data.mean` and `data.std` in place of its own where given.

    Raises:
        UserError: where it is not there, damaged, or not laid out as its kind is; the message says what to put where.
    """
    data = config.data
    if data.name in ("digits", *_CIFAR):
        for key in ("train", "val"):
            if getattr(data, key) is not None:
                raise UserError(
                    f"data.{key} = {getattr(data, key)!r}: {data.name} has two fixed splits; leave it at null."
                )
    splits = _BUILDERS[data.name](config, data.name)
    for key in ("mean", "std"):
        given = getattr(data, key)
        if given is not None and (len(given) != 3 or (key == "std" and min(given) <= 0)):
            raise UserError(f"data.{key} = {given} is not allowed: three numbers (red, green, blue; pixels in 0..1).")
        setattr(splits, key, given or getattr(splits, key))
    return splits
