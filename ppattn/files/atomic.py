"""Files and folders that are written completely or not at all."""

import csv
import ctypes
import errno
import hashlib
import io
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ppattn.errors import FULL_DISK, UserError

ALMOST_FULL = 1 << 20  # bytes left on a disk on which writing failed


@contextmanager
def replacing(path: str | Path, sync: bool = False) -> Iterator[Path]:
    """A temporary file that replaces `path` in one step at the end of the block: readers see the old or the new one.

    Links are followed. The block gets a device or a pipe itself. `sync` waits until the disk has the file.
    """
    path = Path(path)
    open_elsewhere = os.path.abspath(path).startswith(("/dev/std", "/dev/fd/", "/proc/"))
    if path.exists() and (open_elsewhere or not path.is_file()):
        yield path
        return
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name[:50]}.{secrets.token_hex(4)}.tmp")
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))  # never through a link of another user
    mode = (target if target.exists() else temporary).stat().st_mode
    try:
        yield temporary
        temporary.chmod(stat.S_IMODE(mode))  # safetensors makes a file of its own, for its owner alone
        if sync:
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        error.filename = error.filename or str(target)  # that of a flush has none
        raise
    finally:
        temporary.unlink(missing_ok=True)


def check_links(folder: Path, paths: Iterable[Path]) -> None:
    """Raise `UserError` if one of the paths in a folder leads out of it, since the folder may come from anybody."""
    for path in paths:
        if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
            raise UserError(f"{path} is a link that leads out of {folder}: it is not followed.")


def write_text(path: Path, text: str, encoding: str = "utf-8") -> None:
    with replacing(path) as file:
        file.write_text(text, encoding=encoding)


def write_rows(path: Path, rows: Iterable[Sequence], lineterminator: str = "\r\n") -> None:
    """Replace a CSV file, heading included in `rows`, as `write_text` does; if not ASCII, with the mark for Excel."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator=lineterminator).writerows(rows)
    write_text(path, text.getvalue(), "utf-8" if text.getvalue().isascii() else "utf-8-sig")


def write_json(path: Path, tree: dict) -> None:
    write_text(path, json.dumps(tree, indent=2) + "\n")


@contextmanager
def atomic_folder(folder: Path, replaceable: set[str], what: str) -> Iterator[Path]:
    """A folder that becomes `folder` at the end of the block; an old `what` contains `replaceable` files only."""
    if not str(folder).isprintable():
        raise UserError(f"Paddle cannot write to {folder}, whose name is not printable UTF-8; name another folder.")
    if folder.exists() and not (folder.is_dir() and {path.name for path in folder.iterdir()} <= replaceable):
        raise UserError(f"{folder} holds something that is no {what}; give an empty or new folder.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as place:
            work = Path(place) / "new"
            work.mkdir()
            try:
                yield work
            except Exception as error:  # Paddle and paddle2onnx have words of their own for a full disk, or none
                if shutil.disk_usage(work).free > ALMOST_FULL:
                    raise
                raise OSError(errno.ENOSPC, str(error)) from None
            if folder.exists():
                exchange(work, folder)
            else:
                work.rename(folder)
    except OSError as error:
        reason = "the disk is full" if error.errno in FULL_DISK else error.strerror or error
        raise UserError(f"Cannot write {folder}: {reason}.") from None


def exchange(new: Path, old: Path) -> None:
    """Swap two folders in one step, or in two where the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if renameat2 is None or renameat2(here, os.fsencode(new), here, os.fsencode(old), swap):
        old.rename(new.with_name("old"))
        new.rename(old)


def checksum(path: Path, algorithm: str = "sha256") -> str:
    """Checksum of a file, hexadecimal."""
    found = hashlib.new(algorithm)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()
