"""What test_distributed.py launches on two processes: `distributed_job.py JOB FOLDER`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from ppattn.config import load_config
from ppattn.data import EvalLoader, Preprocess
from ppattn.data.splits import ArraySplit
from ppattn.engine import distributed, trainer
from ppattn.engine.evaluate import evaluate


def count_1003(folder: Path) -> None:
    """Evaluate 1,003 images whose label is in their first pixel; three of ten are labelled wrongly."""
    processes = distributed.join()
    labels = np.arange(1003) % 10
    shown = np.where(np.arange(1003) % 10 < 3, (labels + 1) % 10, labels)
    images = np.tile(shown.astype(np.uint8)[:, None, None, None], (1, 4, 5, 3))
    split = ArraySplit(images, labels, "numbers")
    preprocess = Preprocess((4, 5), mean=[0.0] * 3, std=[1 / 255] * 3)
    loader = EvalLoader(split, preprocess, 64, processes.rank, processes.world)

    mine = []

    def run(images):
        mine.append(len(images))
        return np.eye(10)[images[:, 0, 0, 0].round().astype(int)]

    result = evaluate(run, loader, 1003, processes)
    report = {"metrics": result.metrics, "predicted": result.predicted.tolist(), "mine": sum(mine)}
    (folder / f"rank{processes.rank}.json").write_text(json.dumps(report))


def one_is_late(folder: Path) -> None:
    """Train; process 1 gets its third batch later than Gloo waits."""
    honest = trainer.TrainLoader

    def late(split, transform, config, epoch, start, rank, world):
        loader = honest(split, transform, config, epoch, start, rank, world)

        class Late:
            skipped = loader.skipped

            def __len__(self):
                return len(loader)

            def __iter__(self):
                for number, batch in enumerate(loader):
                    if rank == 1 and number == 2 and epoch == 0:
                        time.sleep(35)
                    yield batch

        return Late()

    trainer.TrainLoader = late
    trainer.train(load_config(folder / "config.yaml")[0])


def one_is_poisoned(folder: Path) -> None:
    """Train; the second micro-batch of process 1's fourth step holds a NaN."""
    honest = trainer.batches

    def batches(run, epoch, start):
        for micro, (images, *rest) in enumerate(honest(run, epoch, start), start):
            if run.processes.rank == 1 and epoch == 0 and micro == 7:
                images[0, 0, 0, 0] = float("nan")
            yield images, *rest

    trainer.batches = batches
    trainer.train(load_config(folder / "config.yaml")[0])


if __name__ == "__main__":
    {"count_1003": count_1003, "one_is_late": one_is_late, "one_is_poisoned": one_is_poisoned}[sys.argv[1]](
        Path(sys.argv[2])
    )
