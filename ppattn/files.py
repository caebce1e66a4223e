"""Write files completely or not at all, and where files are kept from call to call."""

from __future__ import annotations

import csv
import io
import json
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ppattn.errors import FULL_DISK, UserError


def cache_folder() -> Path:
    """The folder of what can be made again, `ppattn` in $XDG_CACHE_HOME or ~/.cache, made for this user alone."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = Path(base if os.path.isabs(base) else Path.home() / ".cache") / "ppattn"
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"There is no folder for the cache ({reason}): set XDG_CACHE_HOME to one.") from None
    return folder


def private_folder() -> Path:
    """A folder for this user alone where there is no home; raises `OSError` where another user has made it."""
    folder = Path(tempfile.gettempdir(), f"ppattn-{os.geteuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if not only_ours(folder):
        raise PermissionError(f"{folder} was made by another user")
    return folder


def only_ours(path: Path) -> bool:
    """Whether nobody but this user and root may write to a file or folder."""
    state = path.lstat()
    return state.st_uid in (os.geteuid(), 0) and not state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder, and keep other processes out of this block as long as one is in it."""
    from fcntl import LOCK_EX, flock

    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        flock(handle, LOCK_EX)
        yield
    finally:
        os.close(handle)


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
