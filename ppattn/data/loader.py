"""Batches of images. They are a pure function of the position in the run (the table in docs/training.md); the number of
workers changes nothing.

Worker processes are forked and write uint8 pixels into memory shared with their parent (anonymous, so the size of
/dev/shm does not matter); the parent normalises. A worker that dies ends the loop with `WorkerDied`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import mmap
import multiprocessing
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import cv2
import numpy as np
from threadpoolctl import threadpool_limits

from ppattn.data.images import ImageError, Preprocess
from ppattn.data.splits import Split
from ppattn.data.transforms import TrainTransform
from ppattn.errors import UserError
from ppattn.settings import Config
from ppattn.text import printable

logger = logging.getLogger("ppattn.data")


class WorkerDied(UserError):
    """A data loading process was killed from outside, in most cases for lack of memory."""


def sample_rng(seed: int, epoch: int, index: int, repeat: int) -> np.random.Generator:
    """The generator of everything that is random about one sample."""
    return np.random.default_rng([seed, epoch, index, repeat])


def batch_rng(seed: int, epoch: int, micro_batch: int, rank: int) -> np.random.Generator:
    """The generator of what is random about a batch as a whole: mixup and CutMix."""
    return np.random.default_rng([seed, epoch, micro_batch, rank, 1])


# A batch is made in two halves: `make(work, pixels)` fills uint8 [b, h, w, 3] and returns everything else, in a worker
# or here; `finish(pixels, made)` turns both into what the loop yields, always here.


def _in_process(make: Callable, finish: Callable, works: Iterator, shape: tuple) -> Generator:
    for work in works:
        pixels = np.empty(shape, np.uint8)
        yield finish(pixels, make(work, pixels))


_worker: tuple[Callable, list[np.ndarray]]


def _start_worker(make: Callable, slots: list[np.ndarray], parent: int) -> None:
    global _worker
    _worker = make, slots
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to every process; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "sigtimedwait"):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # before there are more threads: they inherit it
        threading.Thread(target=_serve_only, args=(parent,), daemon=True).start()
    cv2.setNumThreads(0)
    threadpool_limits(1)  # forked BLAS threads fight for the cores


def _serve_only(parent: int) -> None:
    """End this worker when its parent is gone or says so; not when a cluster sends SIGTERM to every process."""
    while os.getppid() == parent:
        received = signal.sigtimedwait([signal.SIGTERM], 1.0)
        if received is not None and received.si_pid == parent:
            break
    os._exit(1)


def _work(slot: int, work: Any) -> Any:
    make, slots = _worker
    return make(work, slots[slot])


def _in_workers(make: Callable, finish: Callable, works: Iterator, shape: tuple, workers: int) -> Generator:
    if "fork" not in multiprocessing.get_all_start_methods():
        raise UserError("Data workers need an operating system that can fork; set data.num_workers to 0.")
    size = int(np.prod(shape))
    slots = [np.frombuffer(mmap.mmap(-1, size), np.uint8).reshape(shape) for _ in range(workers + 2)]
    fork = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(workers, fork, _start_worker, (make, slots, os.getpid()))
    with warnings.catch_warnings():  # the workers use numpy and OpenCV only, both made for forking
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        pool.submit(int)  # the processes start here, in the caller's thread
    return _collect(pool, finish, works, slots, workers)


def _collect(pool: ProcessPoolExecutor, finish: Callable, works: Iterator, slots: list, workers: int) -> Generator:
    free = deque(range(len(slots)))
    running: deque[tuple[int, Future]] = deque()
    try:
        while True:
            while free and (work := next(works, None)) is not None:
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
            "Use fewer (data.num_workers) or smaller batches; training goes on with --resume auto."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _ahead(batches: Generator) -> Generator:
    """The same batches, the next one being finished in a thread while the caller uses this one."""
    with contextlib.closing(batches), ThreadPoolExecutor(1) as thread:
        future = thread.submit(next, batches, None)
        while (batch := future.result()) is not None:
            future = thread.submit(next, batches, None)
            yield batch


def _batches(make: Callable, finish: Callable, works: Iterator, shape: tuple, workers: int) -> Generator:
    if workers == 0:
        return _in_process(make, finish, works, shape)
    return _ahead(_in_workers(make, finish, works, shape, workers))


def _works(split: Split, order: np.ndarray, batch: int) -> Iterator:
    """The order cut into batches, each with the payloads of its images."""
    payloads = split.payloads(order[:, 0])
    for start in range(0, len(order), batch):
        work = order[start : start + batch]
        yield work, list(itertools.islice(payloads, len(work)))


def _check_memory(shape: tuple[int, ...], channels: int) -> None:
    """Refuse a batch that is larger than the memory of this machine, as bytes and as float32, before it is made."""
    needed = math.prod(shape) // 3 * (3 + 4 * channels)
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise UserError(
            f"A batch of {shape[0]:,} images of {shape[1]} x {shape[2]} pixels takes {needed / 2**30:,.0f} GiB, and "
            f"this machine has {there / 2**30:,.0f}; set data.batch_size or data.eval_batch_size lower."
        )


class TrainLoader:
    """The micro-batches of one epoch for process `rank` of `world`: `len()` pairs (float32 [b, c, h, w], int64 [b]).

    The order is a permutation of the split, dealt to the processes in turn and cut to full micro-batches; a process and
    its fellows together see the same global batches as one process with `world` times the batch size. With
    `augment.repeats` above 1 every image comes that many times in succession, its copies dealt to different processes,
    and the epoch keeps its length. Shards are dealt in equal stretches instead: batches are then other ones than those
    of one process, and all copies of an image go to the same process. Starting at micro-batch `start` gives exactly the
    batches that an undisturbed epoch gives from there on. An image that cannot be read is logged, noted in `skipped`
    and replaced by the next one of the split (of shards: by another one of the micro-batch).

    Attributes:
        skipped: names of the unreadable images in the batches given out so far, one entry per time.
        left_out: images that fill no micro-batch of all processes; which ones differs from epoch to epoch.

    Raises:
        UserError: for a split smaller than one micro-batch of all processes.
        WorkerDied: while iterating, when a worker process was killed.
    """

    def __init__(
        self,
        split: Split,
        transform: TrainTransform,
        config: Config,
        epoch: int,
        start: int = 0,
        rank: int = 0,
        world: int = 1,
    ):
        self.split, self.transform = split, transform
        self.seed, self.epoch, self.rank = config.train.seed, epoch, rank
        self.batch, self.workers = config.data.batch_size, config.data.num_workers
        self.start = start
        self.length, self.left_out = divmod(len(split), self.batch * world)
        if self.length == 0:
            raise UserError(
                f"{len(split)} training images do not fill one step of {world} x {self.batch}; "
                "set data.batch_size lower."
            )
        _check_memory((self.batch, *transform.img_size, 3), transform.normalise.in_chans)
        order = split.train_order(self.seed, epoch, rank, world, config.augment.repeats)
        self.order = order[: self.length * self.batch]
        self.flipped = None
        if config.augment.alternating_flip:  # airbench (Jordan, arXiv 2404.00498, section 3.6)
            self.flipped = (np.random.default_rng(self.seed).integers(0, 2, len(split)) + epoch) % 2 == 1
        self.skipped: list[str] = []

    def __len__(self) -> int:
        """Micro-batches in the whole epoch, wherever it starts."""
        return self.length

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        works = _works(self.split, self.order[self.start * self.batch :], self.batch)
        shape = (self.batch, *self.transform.img_size, 3)
        with contextlib.closing(_batches(self._make, self._finish, works, shape, self.workers)) as batches:
            for images, labels, failures in batches:
                for name, reason in failures:
                    if name not in self.skipped:
                        logger.warning("skipped in training: %s", printable(reason))
                    self.skipped.append(name)
                yield images, labels

    def _make(self, work: tuple[np.ndarray, list], pixels: np.ndarray) -> tuple:
        order, payloads = work
        indices, copies = order.T.tolist()
        labels = np.empty(len(indices), np.int64)
        erased, failures = [], []
        for k, (index, copy, payload) in enumerate(zip(indices, copies, payloads, strict=True)):
            rng = sample_rng(self.seed, self.epoch, index, copy)
            for _ in range(100):
                try:
                    image = self.split.load(index, payload)
                    break
                except ImageError as error:
                    failures.append((self.split.name(index), str(error)))
                    index, payload = self.split.instead(index, indices, payloads)
            else:
                raise UserError(f"100 images in succession cannot be read, the last one is {failures[-1][0]}.")
            labels[k] = self.split.label(index)
            flipped = self.flipped is not None and bool(self.flipped[index])
            pixels[k], box = self.transform.pixels(image, rng, flipped)
            erased.append(box)
        return labels, erased, failures

    def _finish(self, pixels: np.ndarray, made: tuple) -> tuple[np.ndarray, np.ndarray, list]:
        labels, erased, failures = made
        images = np.empty((len(pixels), self.transform.normalise.in_chans, *self.transform.img_size), np.float32)
        for image, box, out in zip(pixels, erased, images, strict=True):
            self.transform.finish(image, box, out)
        return images, labels, failures


class EvalLoader:
    """Every image once over all processes, none twice: (float32 [b, c, h, w], int64 labels [b], int64 indices [b]).

    The last batch may be smaller, and the shares of the processes differ by at most one image. An image that cannot
    be read raises `ImageError` (a `UserError`) with its name; with `tolerate` it is logged, left out of its batch and
    listed in `unreadable`, for the caller to count as wrong. A batch can then be smaller, even empty.
    """

    def __init__(
        self,
        split: Split,
        preprocess: Preprocess,
        batch_size: int,
        rank: int = 0,
        world: int = 1,
        num_workers: int = 0,
        tolerate: bool = False,
    ):
        self.split, self.preprocess = split, preprocess
        self.order = split.eval_order(rank, world)
        self.batch, self.workers, self.tolerate = min(batch_size, max(1, len(self.order))), num_workers, tolerate
        _check_memory((batch_size, *preprocess.img_size, 3), preprocess.in_chans)
        self.unreadable: list[str] = []

    def __len__(self) -> int:
        return -(-len(self.order) // self.batch)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        self.unreadable = []
        works = _works(self.split, self.order[:, None], self.batch)
        shape = (self.batch, *self.preprocess.img_size, 3)
        return _batches(self._make, self._finish, works, shape, self.workers)

    def _make(self, work: tuple[np.ndarray, list], pixels: np.ndarray) -> tuple:
        read: list[int] = []
        failures = []
        for index, payload in zip(work[0][:, 0].tolist(), work[1], strict=True):
            try:
                pixels[len(read)] = self.preprocess.pixels(self.split.load(index, payload))
                read.append(index)
            except ImageError as error:
                if not self.tolerate:
                    raise
                failures.append((self.split.name(index), str(error)))
        return np.array([self.split.label(i) for i in read], np.int64), np.array(read, np.int64), failures

    def _finish(self, pixels: np.ndarray, made: tuple) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        labels, indices, failures = made
        for name, reason in failures:
            logger.error("not evaluated: %s", printable(reason))
            self.unreadable.append(name)
        images = np.empty((len(indices), self.preprocess.in_chans, *self.preprocess.img_size), np.float32)
        for image, out in zip(pixels, images, strict=False):
            self.preprocess.normalise(image, out)
        return images, labels, indices
