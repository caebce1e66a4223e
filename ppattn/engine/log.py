"""What a run leaves behind for people: log.txt, a progress bar, metrics.csv, curves.png, VisualDL, env.json."""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, suppress
from importlib import metadata
from pathlib import Path

from tqdm import tqdm

from ppattn import __version__, cpu
from ppattn.errors import UserError
from ppattn.text import printable

ROUNDED = {"lr": 10, "top1": 6, "top5": 6, "train_loss": 8, "val_loss": 8}


class Log:
    """log.txt and the terminal; VisualDL and the bar on the main process only.

    Args:
        folder: the run folder.
        rank: process number; others than 0 write log.rank<N>.txt and nothing else.

    Raises:
        UserError: another training writes to this folder.
    """

    def __init__(self, folder: Path, rank: int = 0):
        self.folder, self.main = folder, rank == 0
        self.file = claim(folder) if self.main else (folder / f"log.rank{rank}.txt").open("a", encoding="utf-8")
        self.hearing = ExitStack()
        self.hearing.enter_context(heard(self.say))
        self.writer = None
        self.terminal = self.main and sys.stderr.isatty()
        if self.main:
            from visualdl import LogWriter

            self.writer = LogWriter(logdir=str(folder / "vdl"))

    def say(self, text: str, terminal: bool = True) -> None:
        """One line for log.txt, and for the terminal."""
        self.file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        self.file.flush()
        if terminal and self.main:
            tqdm.write(text)
            sys.stdout.flush()

    def bar(self, title: str, images: int, done: int) -> tqdm:
        """Progress over the images of an epoch; shown on a terminal only."""
        return tqdm(
            total=images, initial=done, desc=title, unit="img", unit_scale=True, leave=False, disable=not self.terminal
        )

    def scalars(self, step: int, values: dict[str, float]) -> None:
        if self.writer is not None:
            for tag, value in values.items():
                self.writer.add_scalar(tag, value, step)

    def picture(self, tag: str, step: int, draw: Callable) -> None:
        """Show in VisualDL what `draw(file)` writes as PNG."""
        if self.writer is not None:
            import cv2
            import numpy as np

            buffer = io.BytesIO()
            draw(buffer)
            pixels = cv2.imdecode(np.frombuffer(buffer.getvalue(), np.uint8), cv2.IMREAD_COLOR)
            self.writer.add_image(tag, pixels[..., ::-1], step)

    def close(self) -> None:
        self.hearing.close()
        if self.writer is not None:
            with suppress(OSError):
                self.writer.close()
        with suppress(OSError):  # every line was flushed; what a full disk did not take comes up again here
            self.file.close()


def claim(folder: Path):
    """Open log.txt for appending, and hold its lock as long as it is open; a process that dies gives it up.

    Raises:
        UserError: another process holds it.
    """
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
def heard(say: Callable):
    """What the package logs inside this block goes to `say(text)`, and not to Paddle's handler of the root logger."""
    logger, handler = logging.getLogger("ppattn"), _Handler(say)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = not any(isinstance(left, _Handler) for left in logger.handlers)


class _Handler(logging.Handler):
    """Hands records of the package's loggers to `say`."""

    def __init__(self, say: Callable):
        super().__init__()
        self.say = say

    def emit(self, record):
        self.say(record.getMessage())


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step: readers see the old or the new text, never half of it."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: Path, tree: dict) -> None:
    write_text(path, json.dumps(tree, indent=2) + "\n")


def write_metrics(folder: Path, history: list[dict]) -> None:
    """metrics.csv, a row per epoch."""
    if not history:
        return
    columns = list(dict.fromkeys(key for row in history for key in row))
    temporary = folder / f"metrics.csv.{os.getpid()}.tmp"
    with open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows({k: _short(k, v) for k, v in row.items()} for row in history)
    os.replace(temporary, folder / "metrics.csv")


def _short(key: str, value):
    return round(value, ROUNDED.get(key, 3)) if isinstance(value, float) else value


def draw_curves(path: Path, history: list[dict]) -> None:
    """Losses, accuracy and learning rate over epochs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    panels = [("loss", ("train_loss", "val_loss")), ("accuracy", ("top1", "top5")), ("learning rate", ("lr",))]
    for axes, (title, keys) in zip(figure.subplots(1, 3), panels, strict=True):
        for key in keys:
            points = [(row["epoch"], row[key]) for row in history if row.get(key) is not None]
            if points and (key != "top5" or min(value for _, value in points) < 1):  # of five classes it is always 1
                axes.plot(*zip(*points, strict=True), marker="." if len(points) < 40 else None, label=key)
        axes.set(title=title, xlabel="epoch")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    figure.suptitle(printable(str(path.parent)), parse_math=False)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=100)


def environment(command: str) -> dict:
    """Versions, device, git commit and command of this process."""
    import paddle

    packages = {}
    for name in ("numpy", "opencv-python", "opencv-python-headless", "visualdl", "safetensors", "webdataset"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    device = paddle.get_device()
    return {
        "ppattn": __version__,
        "paddle": paddle.__version__,
        "python": platform.python_version(),
        "packages": packages,
        "platform": platform.platform(),
        "device": device,
        "device_name": _device_name(device),
        "cores": os.cpu_count(),
        "processes": int(os.environ.get("PADDLE_TRAINERS_NUM", 1)),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_changed": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "command": command,
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _device_name(device: str) -> str:
    if device == "cpu":
        return cpu.processor_name() or platform.machine()
    import paddle

    return paddle.device.cuda.get_device_name()


def _git(*arguments: str) -> str | None:
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
