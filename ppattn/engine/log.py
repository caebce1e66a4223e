"""log.txt, the terminal and the lock on a run folder."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from ppattn.errors import UserError
from ppattn.text import printable


class Log(logging.Handler):
    """log.txt in the run folder and the terminal; the package's loggers write there too while it is open.

    Processes of another `rank` than 0 write log.rank<N>.txt and nothing else. See `lock` for what it raises.
    """

    def __init__(self, folder: Path, rank: int):
        super().__init__()
        self.main = rank == 0
        self.file = lock(folder) if self.main else (folder / f"log.rank{rank}.txt").open("a", encoding="utf-8")
        self.notebook = type(sys.stdout).__module__.startswith("ipykernel")
        self.interactive = self.main and (sys.stderr.isatty() or self.notebook)
        self.attachment = ExitStack()
        self.attachment.enter_context(attached(self))

    def info(self, text: str, terminal: bool = True) -> None:
        """One line for log.txt, and for the terminal."""
        text = printable(text)
        self.file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        self.file.flush()
        if terminal and self.main:
            tqdm.write(text)
            sys.stdout.flush()

    def emit(self, record: logging.LogRecord) -> None:
        self.info(record.getMessage())

    def progress_bar(self, steps: int, done: int) -> tqdm:
        """Progress over the steps of the run; shown on a terminal and in Jupyter, where one stream keeps the order."""
        file = sys.stdout if self.notebook else sys.stderr
        return tqdm(total=steps, initial=done, unit="step", leave=False, disable=not self.interactive, file=file)

    def close(self) -> None:
        self.attachment.close()
        with suppress(OSError):  # every line was flushed; what a full disk did not take comes up again here
            self.file.close()
        super().close()


def lock(folder: Path) -> TextIO:
    """Open log.txt for appending, locked as long as it is open; raises `UserError` where another process has it."""
    import fcntl

    file = (folder / "log.txt").open("a", encoding="utf-8")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not flock: forked data workers would hold that as well
    except (BlockingIOError, PermissionError):
        file.close()
        raise UserError(
            f"Another training is writing to {folder}: wait for its end, or give this one its own folder with "
            "-o output=DIR."
        ) from None
    except OSError:
        pass  # a file system without locks
    return file


@contextmanager
def attached(handler: logging.Handler) -> Iterator[None]:
    """What the package logs inside this block goes to the handler, and not to that of Paddle's root logger."""
    logger = logging.getLogger("ppattn")
    propagate, level = logger.propagate, logger.level
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
        logger.setLevel(level)
