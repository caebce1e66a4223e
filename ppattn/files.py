"""Write files completely or not at all; a full disk is a user error."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Sequence
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
