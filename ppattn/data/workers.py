"""Work for forked processes: batches made ahead, in their order, in memory shared with this process.

A batch is made in two halves: `make(number, pixels)` fills uint8 [b, h, w, 3] and returns everything else, in a worker
or here; `finish(number, pixels, made)` turns both into the batch, always here. Workers get nothing but numbers.
`paddle.io.DataLoader` would import Paddle in every worker and pass its batches through /dev/shm.
"""

import mmap
import multiprocessing
import multiprocessing.util
import signal
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import cv2
import numpy as np
from threadpoolctl import threadpool_limits

from ppattn.errors import UserError


class Workers:
    """Forked processes that make batches in turn, each two ahead, in memory shared with this one; see the module."""

    def __init__(self, count: int, make: Callable, shape: tuple[int, ...]):
        if "fork" not in multiprocessing.get_all_start_methods():
            raise UserError("Data workers need an operating system that can fork; set data.num_workers to 0.")
        fork, size = multiprocessing.get_context("fork"), int(np.prod(shape))
        self.slots = [np.frombuffer(mmap.mmap(-1, size), np.uint8).reshape(shape) for _ in range(2 * count)]
        self.pipes: list = []
        self.processes: list = []
        self.close = multiprocessing.util.Finalize(self, _kill, [self.processes], exitpriority=1)
        for _ in range(count):
            ours, theirs = fork.Pipe()
            self.pipes.append(ours)
            self.processes.append(fork.Process(target=_work, args=(theirs, self.pipes, make, self.slots), daemon=True))
            with warnings.catch_warnings():  # the workers use numpy and OpenCV only, both made for forking
                warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
                self.processes[-1].start()
            theirs.close()

    def batches(self, finish: Callable, numbers: Iterable[int]) -> Generator:
        """The batches of these numbers, in their order; each is made in the slot of its job's number."""
        running: deque[tuple[int, int]] = deque()
        try:
            for job, number in enumerate(numbers):
                if len(running) == len(self.slots):
                    yield self._collect(finish, *running.popleft())
                self.pipes[job % len(self.pipes)].send((number, job % len(self.slots)))
                running.append((job, number))
            while running:
                yield self._collect(finish, *running.popleft())
        except (EOFError, ConnectionError):
            killed = f"One of the {len(self.pipes)} data workers was killed, in most cases for lack of memory"
            raise UserError(f"{killed}: lower data.num_workers or data.batch_size, and --resume auto.") from None

    def _collect(self, finish: Callable, job: int, number: int):
        made = self.pipes[job % len(self.pipes)].recv()
        if isinstance(made, Exception):
            raise made
        return finish(number, self.slots[job % len(self.slots)], made)


def _kill(processes: list) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def _work(pipe, parents: list, make: Callable, slots: list[np.ndarray]) -> None:
    """What a worker does until the other end of its pipe is closed, which happens when its parent dies."""
    for end in parents:
        end.close()
    for number in (signal.SIGINT, signal.SIGTERM):  # clusters send them to every process; the parent decides
        signal.signal(number, signal.SIG_IGN)
    cv2.setNumThreads(0)
    threadpool_limits(1)  # forked BLAS threads fight for the cores
    with suppress(EOFError, ConnectionError):
        while True:
            number, slot = pipe.recv()
            try:
                made = make(number, slots[slot])
            except Exception as error:
                made = error if isinstance(error, UserError) else RuntimeError(traceback.format_exc())
            pipe.send(made)


def stream(make: Callable, finish: Callable, numbers: Iterable[int], shape: tuple, workers: int) -> Generator:
    """The batches of these numbers; with workers the next one is finished in a thread while the caller uses this."""
    if workers == 0:
        for number in numbers:
            pixels = np.empty(shape, np.uint8)
            yield finish(number, pixels, make(number, pixels))
        return
    with closing(Workers(workers, make, shape)) as pool, ThreadPoolExecutor(1) as thread:
        batches = pool.batches(finish, numbers)
        future = thread.submit(next, batches, None)
        while (batch := future.result()) is not None:
            future = thread.submit(next, batches, None)
            yield batch
