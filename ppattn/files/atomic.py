"""Write files completely or not at all, and where files are kept from call to call."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ppattn.errors import FULL_DISK, UserError


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step: readers see the old or the new text, never half of it."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_rows(path: Path, rows: Iterable[Sequence], lineterminator: str = "\r\n") -> None:
    """Replace a CSV file, heading included in `rows`, as `write_text` does."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator=lineterminator).writerows(rows)
    write_text(path, text.getvalue())


def write_json(path: Path, tree: dict) -> None:
    write_text(path, json.dumps(tree, indent=2) + "\n")


def full_disk(error: Exception, folder: Path) -> UserError | None:
    """The error to raise if a write failed because the disk is full; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in FULL_DISK:
        return None
    return UserError(
        f"Could not write {error.filename or folder}: the disk is full. The last good checkpoint is untouched; "
        "make room and run again with --resume auto."
    )


@contextmanager
def atomic_folder(folder: Path, replaceable: set[str], what: str) -> Iterator[Path]:
    """A folder to write to, renamed to `folder` at the end of the block; what was there goes only then.

    Args:
        replaceable: names of files that may be there before. what: they are of.
    """
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
            except Exception:
                # Paddle and paddle2onnx have words of their own for a full disk, or none; this says it.
                largest = max((path.stat().st_size for path in work.iterdir()), default=0)
                (work / "room").write_bytes(bytes(largest + (64 << 10)))
                raise
            if folder.exists():
                folder.rename(Path(place) / "old")
            work.rename(folder)
    except OSError as error:
        reason = "the disk is full" if error.errno in FULL_DISK else error.strerror or error
        raise UserError(f"Cannot write {folder}: {reason}.") from None


def checksum(path: Path, algorithm: str = "sha256") -> str:
    """Checksum of a file, hexadecimal."""
    found = hashlib.new(algorithm)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()
