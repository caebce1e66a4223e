"""The files of a run: log, metrics, checkpoints, pictures and VisualDL, all in its folder.

`checkpoints/latest.safetensors` holds the tensors of `state.State` under its names; everything else (config, progress,
scaler) is JSON in its metadata. Random numbers are functions of the position in the run, so the progress is all there
is to keep of them. Before a new `latest` takes its place the old one becomes `previous`; `best` holds weights only.
"""

import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from paddle import nn
from tqdm import tqdm

from ppattn import __version__, weights
from ppattn.config import to_yaml
from ppattn.engine.resume import RunFacts
from ppattn.engine.state import State
from ppattn.errors import UserError
from ppattn.files.atomic import replacing, write_json, write_text
from ppattn.runtime.environment import environment
from ppattn.runtime.processes import Processes
from ppattn.settings import Config
from ppattn.text import printable


class Log(logging.Handler):
    """log.txt in the run folder and the terminal; processes of another `rank` than 0 write log.rank<N>.txt alone."""

    def __init__(self, folder: Path, rank: int):
        super().__init__()
        self.main = rank == 0
        self.file = lock(folder) if self.main else (folder / f"log.rank{rank}.txt").open("a", encoding="utf-8")
        self.notebook = type(sys.stdout).__module__.startswith("ipykernel")
        self.interactive = self.main and (sys.stderr.isatty() or self.notebook)

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
        with suppress(OSError):  # every line was flushed; the error of a full disk comes up again here
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
        raise UserError(f"Another training is writing to {folder}: wait, or set -o output=DIR.") from None
    except OSError:
        pass  # a file system without locks
    return file


@contextmanager
def log_to(handler: logging.Handler) -> Iterator[None]:
    """Route the package's log records to `handler` only."""
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


class Outputs:
    """The files of a run; only the main process writes, except that every process has a log."""

    def __init__(self, folder: Path, log: Log, facts: RunFacts):
        self.folder, self.log, self.facts, self.main = folder, log, facts, log.main
        self.checkpoints = folder / "checkpoints"
        self.saved_at = self.drawn_at = time.monotonic()
        self.visualdl: Any = None
        if self.main:
            try:
                from visualdl import LogWriter

                self.visualdl = LogWriter(logdir=str(folder / "vdl"))
            except ModuleNotFoundError:
                log.info("VisualDL is not installed (pip install visualdl): vdl/ is not written")

    def save_state(self, state: State) -> None:
        """Write `checkpoints/latest`, after which the one before it is `previous`."""
        if self.main:
            tensors = state.tensors()
            for name in [name for name in tensors if name.endswith("/master")]:  # the float32 weights of half precision
                tensors[name.removeprefix("optimizer/").removesuffix("/master")] = tensors[name]
            metadata = self.facts.model_dump() | {"kind": "state", "progress": asdict(state.progress)} | state.counts()
            latest, previous, fresh = (self.checkpoints / f"{n}.safetensors" for n in ("latest", "previous", "next"))
            weights.save(fresh, tensors, metadata)
            if latest.exists():
                os.replace(latest, previous)
            os.replace(fresh, latest)
        self.saved_at = time.monotonic()

    def save_best(self, model: nn.Layer, values: dict) -> None:
        if self.main:
            metadata = self.facts.model_dump() | {"kind": "weights", "metrics": values}
            weights.save(self.checkpoints / "best.safetensors", model.state_dict(), metadata)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Points of curves in VisualDL."""
        if self.visualdl:
            for tag, value in values.items():
                self.visualdl.add_scalar(tag, value, step)

    def close(self) -> None:
        self.log.close()
        if self.visualdl:
            with suppress(OSError):
                self.visualdl.close()


def open_outputs(
    config: Config, command: str, source: Path | None, facts: RunFacts, early: list, processes: Processes
) -> Outputs:
    """Make the run folder with config.yaml, env.json and the best checkpoint so far, and open its log, which begins
    with `early`. Another run than that of the checkpoint `source` is renamed, not overwritten."""
    folder = Path(config.output)
    if folder.is_symlink():  # an existing run is renamed on its own disk, and the link stays
        folder = Path(os.path.realpath(folder))
    with ExitStack() as undo:
        if processes.main:
            moved = move_aside(folder, source, config.data.root)
            folder.mkdir(parents=True, exist_ok=True)
        processes.barrier()
        outputs = undo.enter_context(closing(Outputs(folder, Log(folder, processes.rank), facts)))
        if processes.main:
            for pattern in (".*.safetensors.*", "next.safetensors"):
                for left in outputs.checkpoints.glob(pattern):  # of a process that was killed while it wrote
                    left.unlink()
            write_text(folder / "config.yaml", to_yaml(config))
            write_json(folder / "env.json", {"ppattn": __version__} | environment(command) | {"extends": facts.extends})
            best = source and source.with_name("best.safetensors")
            if best and best.exists() and best.parent.resolve() != outputs.checkpoints.resolve():  # in another folder
                with replacing(outputs.checkpoints / best.name) as file:
                    shutil.copyfile(best, file)
            if moved:
                outputs.log.info(f"the earlier run in {folder} was renamed to {moved}")
        for record in early:
            outputs.log.emit(record)
        processes.barrier()
        undo.pop_all()
        return outputs


def move_aside(folder: Path, source: Path | None, root: str | None = None) -> Path | None:
    """Rename a folder that holds a run other than that of the checkpoint `source`; returns its new name. `UserError`
    for files that a run would overwrite and that no training wrote, and for a folder with the data at `root` in it."""
    for name in ("config.yaml", "env.json", "metrics.csv", "summary.json"):
        if (folder / name).exists() and not (folder / "log.txt").exists():
            raise UserError(f"{folder / name} exists and was not written by a training; choose another output.")
    states = (f"checkpoints/{name}.safetensors" for name in ("latest", "previous", "best"))
    written = any((folder / name).exists() for name in (*states, "metrics.csv", "summary.json"))
    homes = (folder.resolve(), (folder / "checkpoints").resolve())  # the checkpoints may be a link to another disk
    if not written or (source and any(map(source.resolve().is_relative_to, homes))):
        return None
    if root and Path(os.path.realpath(root)).is_relative_to(os.path.realpath(folder)):
        raise UserError(f"{folder} holds an earlier run, and data.root: choose another output.")
    target = next(path for n in range(1, 10**6) if not (path := Path(f"{folder}.{n}")).exists())
    with lock(folder):
        os.rename(folder, target)
    return target
