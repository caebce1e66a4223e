"""What test_distributed.py launches on two processes: `distributed_job.py JOB FOLDER`."""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ppattn.config import load_config
from ppattn.data import loader
from ppattn.engine import debug, trainer


def one_is_late(folder: Path) -> None:
    """Train; process 1 gets its third batch later than Gloo waits."""
    honest = trainer.backward

    def late(run, batch, parts):
        if run.processes.rank == 1 and batch.number == 2:
            time.sleep(35)
        return honest(run, batch, parts)

    trainer.backward = late
    trainer.train(load_config(folder / "config.yaml")[0])


def poison() -> None:
    """The second micro-batch of process 1's fourth step holds a NaN."""
    honest = loader.TrainLoader._finish

    def finish(self, number, pixels, made):
        batch = honest(self, number, pixels, made)
        if self.rank == 1 and number == 7:
            batch.images[0, 0, 0, 0] = float("nan")
        return batch

    loader.TrainLoader._finish = finish


def one_is_poisoned(folder: Path) -> None:
    poison()
    trainer.train(load_config(folder / "config.yaml")[0])


def poisoned_again(folder: Path) -> None:
    poison()
    told = debug.debug(folder / "run")
    (folder / f"rank{os.environ['PADDLE_TRAINER_ID']}.txt").write_text(told)


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
