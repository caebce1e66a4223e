"""Keep a verb running where a standard stream is closed, its reader ends, or the terminal takes ASCII only."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from ppattn.text import printable


class Shown:
    """A stream that shows control characters as escapes: names of files must not steer a terminal."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write("\n".join(map(printable, text.split("\n"))))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Lasting:
    """A stream that drops what is written to it once its reader is gone or the disk behind it is full."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        self._until_gone(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._until_gone(self._stream.flush)

    def _until_gone(self, call: Any, *arguments: str) -> None:
        try:
            call(*arguments)
        except OSError:
            discard(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def discard(stream: TextIO) -> None:
    """Send what the stream still holds, and what is written to it from now on, nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@contextmanager
def standard_streams(lasting: bool) -> Iterator[None]:
    """Standard streams that are open and take every character; with `lasting` stdout's reader may leave.

    A stream that the caller closed (`>&-`) is opened on nothing: otherwise the next file would get its number, and what
    libraries print would go into that file.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115 (open as long as the process)
    before = sys.stdout, sys.stderr
    for stream in before:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = Shown(before[0]), Lasting(before[1])
    if lasting:
        sys.stdout = Lasting(sys.stdout)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
