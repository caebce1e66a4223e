"""`disturbed.py HOW VALUE VERB ...`: a verb in which something goes wrong on purpose, for tests in other processes."""

import itertools
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ppattn.cli import main
from ppattn.data.loader import TrainLoader
from ppattn.engine import trainer
from ppattn.weights import files
from tests.helpers.abridged import abridged

SECOND = os.environ.get("PADDLE_TRAINER_ID") == "1"


def slow(step: str) -> None:
    """Steps from this one on take long, so that a signal finds the training at work."""
    after_update(lambda done: time.sleep(0.3 * (done >= int(step))))


def late(step: str) -> None:
    """The second process takes longer for this step than Gloo waits."""
    after_update(lambda done: time.sleep(35 * (SECOND and done == int(step))))


def after_update(act) -> None:
    honest = trainer.update

    def update(run):
        honest(run)
        act(run.state.progress.step)

    trainer.update = update


def poisoned(batch: str) -> None:
    """This micro-batch of the second process holds a NaN."""
    honest = TrainLoader._finish

    def finish(self, number, pixels, made):
        made = honest(self, number, pixels, made)
        if SECOND and number == int(batch):
            made.images[0, 0, 0, 0] = float("nan")
        return made

    TrainLoader._finish = finish


def dying(place: str) -> None:
    """SIGKILL in a write of a state: "half a file 7", "before the first rename 7" or "between the renames 7"."""
    where, _, count = place.rpartition(" ")
    write, rename, calls = files.save_file, os.replace, itertools.count(1)

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def save_file(arrays, path, header):
        write(arrays, path, header)
        if where == "half a file" and "next" in Path(path).name and next(calls) == int(count):
            os.truncate(path, os.path.getsize(path) // 2)
            die()

    def replace(source, target):
        last = where != "half a file" and Path(target).name == "previous.safetensors" and next(calls) == int(count)
        if last and where == "before the first rename":
            die()
        rename(source, target)
        if last:
            die()

    files.save_file, os.replace = save_file, replace


if __name__ == "__main__":
    how, value, *command = sys.argv[1:]
    globals()[how](value)
    with abridged():
        sys.exit(main(command))
