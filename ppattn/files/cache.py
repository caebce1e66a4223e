"""The cache directory of this user, and a lock on a directory."""

import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ppattn.errors import UserError


def cache_folder() -> Path:
    """The cache directory, `ppattn` in $XDG_CACHE_HOME or ~/.cache, private to this user and disposable."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = Path(base if os.path.isabs(base) else Path.home() / ".cache") / "ppattn"
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"There is no folder for the cache ({reason}): set XDG_CACHE_HOME to one.") from None
    return folder


def download_folder() -> Path:
    """Where downloads that serve every project are kept: PPATTN_CACHE, or the user's cache."""
    return Path(os.environ.get("PPATTN_CACHE") or cache_folder()).expanduser()


def private_folder() -> Path:
    """A private temporary folder for users without a home; raises `OSError` if another user owns it."""
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
    """Create a folder if needed and hold an exclusive lock on it; says so where it has to wait."""
    from fcntl import LOCK_EX, LOCK_NB, flock

    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            flock(handle, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that downloads or compiles into {folder}", file=sys.stderr, flush=True)
            flock(handle, LOCK_EX)
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)
