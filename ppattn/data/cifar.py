"""CIFAR-10 and CIFAR-100 from their official archives (Krizhevsky, 2009), extracted or not."""

import io
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from ppattn.data.classes import check_names
from ppattn.data.images import SUFFIXES
from ppattn.data.splits import ArraySplit, Splits
from ppattn.errors import UserError, reading_untrusted
from ppattn.files.cache import locked
from ppattn.files.download import fetch
from ppattn.files.pickles import ArrayUnpickler
from ppattn.files.tables import read_table
from ppattn.settings import Config

TABLE = Path(__file__).with_name("cifar.yaml")  # explains the fields
CIFAR = {name: SimpleNamespace(**kind) for name, kind in read_table(TABLE).items()}
LARGEST_FILE = 1 << 29  # bytes; the largest of CIFAR has 155 MB
HOSTS = ("https://www.cs.toronto.edu/~kriz/", "https://dataset.bj.bcebos.com/cifar/")


def _read(path: Path, kind: SimpleNamespace) -> dict[str, dict]:
    """The contents of the files of the data set, read in one pass over the folder or archive."""
    wanted = {*kind.train, kind.test, kind.meta}
    if path.is_dir():
        return {name: _unpickle(path / name, (path / name).read_bytes()) for name in wanted if (path / name).is_file()}
    found = {}
    with reading_untrusted(path, f"a complete tar archive; expected is {kind.archive}"), tarfile.open(path) as archive:
        for member in archive:
            name, file = member.name.rpartition("/")[2], archive.extractfile(member)
            if name in wanted and file:
                if member.size > LARGEST_FILE:
                    raise UserError(f"{path}: {name} is too large for a file of {kind.title}.")
                found[name] = _unpickle(f"{path}: {name}", file.read())
    return found


def _unpickle(name: str | Path, data: bytes) -> dict:
    with reading_untrusted(name, "a CIFAR file"):
        content = ArrayUnpickler(io.BytesIO(data), encoding="bytes").load()
        if not isinstance(content, dict):
            raise TypeError(f"it holds a {type(content).__name__}")
    return content


def _split(batches: list[dict], kind: SimpleNamespace, classes: int, prefix: str, path: Path) -> ArraySplit:
    with reading_untrusted(f"{path}: {prefix}", f"from {kind.title}"):
        label = kind.label.encode()
        if any(len(batch[b"data"]) != len(batch[label]) for batch in batches):
            raise ValueError("rows without labels")
        rows, labels = (np.concatenate([batch[key] for batch in batches]) for key in (b"data", label))
        known = labels.dtype.kind == "i" and set(labels.tolist()) <= set(range(classes))
        if rows.dtype != np.uint8 or not known or (*labels.shape, 3072) != rows.shape:
            raise ValueError(f"no rows of 3,072 bytes with {kind.label} 0 to {classes - 1}")
    return ArraySplit(np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), labels, prefix)


def find_cifar(root: Path, kind: SimpleNamespace) -> Path | None:
    """The archive or the extracted folder: `root` itself, or what it contains."""
    for candidate in (root, root / kind.folder, root / kind.archive, root / kind.archive.removesuffix(".gz")):
        if candidate.is_file() or (candidate / kind.meta).is_file():
            return candidate
    return None


def cifar(config: Config, name: str) -> Splits:
    """The data set at `data.root`, downloaded to there where it is not and `data.download` allows it."""
    kind, root = CIFAR[name], config.data.location
    found = find_cifar(root, kind)
    if found is None and config.data.download and not any(p.suffix.lower() in SUFFIXES for p in root.rglob("*")):
        target = root if root.name.endswith((".gz", ".tar")) else root / kind.archive
        advice = f"Put {target.name} there yourself, or set data.root to where it is."
        urls = [host + kind.archive for host in HOSTS]
        with locked(target.parent):
            found = fetch(urls, target, f"{kind.title} at {target}", ("md5", kind.md5), advice)
    if found is None:
        raise UserError(f"No {kind.title} at {root}: put {kind.archive} there, or set data.root, or data.name=folder.")
    batches = _read(found, kind)
    if missing := sorted({*kind.train, kind.test, kind.meta} - set(batches)):
        raise UserError(f"{found} is not a complete {kind.title}: {', '.join(missing)} not found in it.")
    with reading_untrusted(f"{found}: {kind.meta}", f"from {kind.title}, with {kind.names}"):
        names = [name.decode(errors="surrogateescape") for name in batches[kind.meta][kind.names.encode()]]
    classes = check_names(names, f"{found}: {kind.meta}")
    train = _split([batches[member] for member in kind.train], kind, len(classes), f"{name}/train", found)
    test = _split([batches[kind.test]], kind, len(classes), f"{name}/test", found)
    return Splits(train, test, classes, kind.mean, kind.std)
