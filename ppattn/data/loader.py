"""Batches: what comes when is a pure function of (seed, epoch, step, rank), whatever the number of workers.

Worker processes are forked and write uint8 pixels into memory shared with their parent (anonymous, so the size of
/dev/shm does not matter); the parent normalises. A worker that dies ends the loop with `WorkerDied`.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import cv2
import numpy as np
from threadpoolctl import threadpool_limits

from ppattn.config import Config
from ppattn.data.images import ImageError, Preprocess
from ppattn.data.transforms import TrainTransform
from ppattn.errors import UserError

logger = logging.getLogger("ppattn.data")


class WorkerDied(RuntimeError):
    """A data loading process was killed from outside, in most cases for lack of memory."""


def epoch_order(length: int, seed: int, epoch: int) -> np.ndarray:
    """The order of an epoch's samples: a permutation that depends on the seed and the epoch only."""
    return np.random.default_rng([seed, epoch]).permutation(length)


def sample_rng(seed: int, epoch: int, index: int, repeat: int) -> np.random.Generator:
    """The generator of everything that is random about one sample."""
    return np.random.default_rng([seed, epoch, index, repeat])


def batch_rng(seed: int, epoch: int, step: int, rank: int) -> np.random.Generator:
    """The generator of what is random about a batch as a whole: mixup and CutMix."""
    return np.random.default_rng([seed, epoch, step, rank, 1])


# A batch is made in two halves: `make(work, pixels)` fills uint8 [b, h, w, 3] and returns everything else, in a worker
# or here; `finish(pixels, made)` turns both into what the loop yields, always here.


def _in_process(make: Callable, finish: Callable, works: list, shape: tuple) -> Iterator:
    for work in works:
        pixels = np.empty(shape, np.uint8)
        yield finish(pixels, make(work, pixels))


_worker: tuple[Callable, list[np.ndarray]]


def _start_worker(make: Callable, slots: list[np.ndarray]) -> None:
    global _worker
    _worker = make, slots
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to every process; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    cv2.setNumThreads(0)
    threadpool_limits(1)  # forked BLAS threads fight for the cores
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()  # do not outlive it


def _work(slot: int, work):
    make, slots = _worker
    return make(work, slots[slot])


def _in_workers(make: Callable, finish: Callable, works: list, shape: tuple, workers: int) -> Iterator:
    if "fork" not in multiprocessing.get_all_start_methods():
        raise UserError("Data workers need an operating system that can fork; set data.num_workers to 0.")
    size = int(np.prod(shape))
    slots = [np.frombuffer(mmap.mmap(-1, size), np.uint8).reshape(shape) for _ in range(workers + 2)]
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _start_worker, (make, slots))
    free, running, todo = deque(range(len(slots))), deque(), iter(works)
    try:
        while True:
            while free and (work := next(todo, None)) is not None:
                running.append((free[0], pool.submit(_work, free.popleft(), work)))
            if not running:
                return
            slot, future = running.popleft()
            batch = finish(slots[slot], future.result())
            free.append(slot)
            yield batch
    except BrokenProcessPool:
        raise WorkerDied(
            f"One of the {workers} data workers was killed from outside, in most cases for lack of memory. "
            "Use fewer (data.num_workers) or smaller batches, and go on with --resume auto."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _ahead(batches: Iterator) -> Iterator:
    """The same batches, the next one being finished in a thread while the caller uses this one."""
    with contextlib.closing(batches), ThreadPoolExecutor(1) as thread:
        future = thread.submit(next, batches, None)
        while (batch := future.result()) is not None:
            future = thread.submit(next, batches, None)
            yield batch


def _batches(make: Callable, finish: Callable, works: list, shape: tuple, workers: int) -> Iterator:
    if workers == 0 or not works:
        return _in_process(make, finish, works, shape)
    return _ahead(_in_workers(make, finish, works, shape, min(workers, len(works))))


class TrainLoader:
    """One epoch of training batches for one process; see `train_loader`.

    Attributes:
        skipped: names of the unreadable images met so far, one entry per time.
    """

    def __init__(
        self, split, transform: TrainTransform, config: Config, epoch: int, start_step: int, rank: int, world: int
    ):
        self.split, self.transform = split, transform
        self.seed, self.epoch, self.rank = config.train.seed, epoch, rank
        self.batch, self.workers = config.data.batch_size, config.data.num_workers
        self.start_step = start_step
        self.steps = len(split) // (self.batch * world)
        if self.steps == 0:
            raise UserError(
                f"{len(split)} training images do not fill one step of {world} x {self.batch}; "
                "set data.batch_size lower."
            )
        repeats = config.augment.repeats
        order = epoch_order(len(split), self.seed, epoch)
        order = np.stack([np.repeat(order, repeats), np.tile(np.arange(repeats), len(order))], axis=1)
        self.order = order[rank::world][: self.steps * self.batch]
        self.skipped: list[str] = []

    def __len__(self) -> int:
        """Steps in the whole epoch, whatever the step it starts at."""
        return self.steps

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        works = [self.order[s * self.batch : (s + 1) * self.batch] for s in range(self.start_step, self.steps)]
        shape = (self.batch, *self.transform.img_size, 3)
        return _batches(self._make, self._finish, works, shape, self.workers)

    def _make(self, work: np.ndarray, pixels: np.ndarray):
        labels = np.empty(len(work), np.int64)
        erased, failures = [], []
        for k, (index, repeat) in enumerate(work.tolist()):
            rng = sample_rng(self.seed, self.epoch, index, repeat)
            image, index = self._read(index, failures)
            labels[k] = self.split.label(index)
            pixels[k], box = self.transform.pixels(image, rng)
            erased.append(box)
        return labels, erased, failures

    def _read(self, index: int, failures: list[tuple[str, str]]) -> tuple[np.ndarray, int]:
        """The image, or the next one in the split's own order that can be read."""
        for _ in range(min(len(self.split), 100)):
            try:
                return self.split.image(index), index
            except ImageError as error:
                failures.append((self.split.name(index), str(error)))
                index = (index + 1) % len(self.split)
        raise UserError(f"100 images one after the other cannot be read, the last one is {failures[-1][0]}.")

    def _finish(self, pixels: np.ndarray, made) -> tuple[np.ndarray, np.ndarray]:
        labels, erased, failures = made
        for name, reason in failures:
            if name not in self.skipped:
                logger.warning("skipped in training: %s", reason)
            self.skipped.append(name)
        images = np.empty((len(pixels), self.transform.normalise.in_chans, *self.transform.img_size), np.float32)
        for image, box, out in zip(pixels, erased, images, strict=True):
            self.transform.finish(image, box, out)
        return images, labels


class EvalLoader:
    """Every image of this process's share once, in order; see `eval_loader`.

    Attributes:
        unreadable: names of the images that were left out because they cannot be read.
    """

    def __init__(
        self, split, preprocess: Preprocess, batch_size: int, rank: int, world: int, workers: int, tolerate: bool
    ):
        self.split, self.preprocess = split, preprocess
        self.batch, self.workers, self.tolerate = batch_size, workers, tolerate
        self.indices = np.arange(rank, len(split), world)
        self.unreadable: list[str] = []

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        self.unreadable = []
        works = [self.indices[s : s + self.batch] for s in range(0, len(self.indices), self.batch)]
        shape = (self.batch, *self.preprocess.img_size, 3)
        return _batches(self._make, self._finish, works, shape, self.workers)

    def _make(self, work: np.ndarray, pixels: np.ndarray):
        read, failures = [], []
        for index in work.tolist():
            try:
                pixels[len(read)] = self.preprocess.pixels(self.split.image(index))
                read.append(index)
            except ImageError as error:
                if not self.tolerate:
                    raise
                failures.append((self.split.name(index), str(error)))
        return np.array([self.split.label(i) for i in read], np.int64), np.array(read, np.int64), failures

    def _finish(self, pixels: np.ndarray, made) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        labels, indices, failures = made
        for name, reason in failures:
            logger.error("not evaluated: %s", reason)
            self.unreadable.append(name)
        images = np.empty((len(indices), self.preprocess.in_chans, *self.preprocess.img_size), np.float32)
        for image, out in zip(pixels, images, strict=False):
            self.preprocess.normalise(image, out)
        return images, labels, indices


def train_loader(
    split, transform: TrainTransform, config: Config, epoch: int, start_step: int = 0, rank: int = 0, world: int = 1
) -> TrainLoader:
    """The batches of one epoch for process `rank` of `world`: (float32 [b, c, h, w], int64 [b]), `len()` steps.

    The order is a permutation of the split, dealt to the processes in turn and cut to full steps; a process and its
    fellows together see the same global batches as one process with `world` times the batch size. Starting at
    `start_step` gives exactly the batches that an undisturbed epoch gives from there on. With `augment.repeats`
    above 1 every image comes that many times in succession, dealt to different processes, and the epoch keeps its
    length. An image that cannot be read is logged, counted in `.skipped` and replaced by the next one of the split.

    Raises:
        UserError: for a split smaller than one step.
        WorkerDied: while iterating, when a worker process was killed.
    """
    return TrainLoader(split, transform, config, epoch, start_step, rank, world)


def eval_loader(
    split,
    preprocess: Preprocess,
    batch_size: int,
    rank: int = 0,
    world: int = 1,
    num_workers: int = 0,
    tolerate: bool = False,
) -> EvalLoader:
    """Every image once over all processes, none twice: (float32 [b, c, h, w], int64 labels [b], int64 indices [b]).

    The last batch may be smaller, and the shares of the processes differ by at most one image. An image that cannot
    be read raises `ImageError` (a `UserError`) with its name; with `tolerate` it is logged, left out of its batch and
    listed in `.unreadable`, for the caller to count as wrong. A batch can then be smaller, even empty.
    """
    return EvalLoader(split, preprocess, batch_size, rank, world, num_workers, tolerate)
