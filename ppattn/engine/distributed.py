"""What the processes of one launch do together. Gloo gives up on a slow partner after 30 s; a meeting waits."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager

import numpy as np

PATIENCE = 3600.0  # seconds


class Processes:
    """The processes of this launch; alone, every call returns at once."""

    def __init__(self, rank: int = 0, world: int = 1, store=None):
        self.rank, self.world, self.store = rank, world, store
        self.main = rank == 0
        self.meetings = 0

    def meet(self) -> None:
        """Return when all processes are here; for up to an hour, whatever the collective library allows."""
        if self.world == 1:
            return
        self.meetings += 1
        self.store.add("ppattn/met", 1)
        self._until("ppattn/met", self.meetings * self.world)

    def leave(self) -> None:
        """The last call of a process: the main one, which hosts the store, waits for the others to be done with it."""
        if self.world == 1:
            return
        self.store.add("ppattn/left", 1)
        if self.main:
            self._until("ppattn/left", self.world)

    def total(self, values) -> np.ndarray:
        """Element-wise sum over all processes of an array of the same shape on each; as float64."""
        values = np.asarray(values, "float64")
        if self.world == 1:
            return values
        import paddle

        self.meet()
        tensor = paddle.to_tensor(values)
        paddle.distributed.all_reduce(tensor)
        return tensor.numpy()

    def share(self, tensors) -> None:
        """Overwrite the tensors with those of the main process."""
        if self.world == 1:
            return
        import paddle

        self.meet()
        for tensor in tensors:
            paddle.distributed.broadcast(tensor, src=0)

    @contextmanager
    def main_first(self):
        """The main process runs the block while the others wait, then they run it (downloads, caches)."""
        if not self.main:
            self.meet()
        yield
        if self.main:
            self.meet()
        self.meet()

    def _until(self, key: str, count: int) -> None:
        start, pause = time.monotonic(), 0.0002
        while self.store.add(key, 0) < count:
            if time.monotonic() - start > PATIENCE:
                raise TimeoutError(f"Process {self.rank} waited {PATIENCE:.0f} s for the others.")
            time.sleep(pause)
            pause = min(2 * pause, 0.02)


def join() -> Processes:
    """Join the group that `python -m paddle.distributed.launch` started, if it did."""
    world = int(os.environ.get("PADDLE_TRAINERS_NUM", 1))
    if world == 1:
        return Processes()
    import paddle

    paddle.distributed.init_parallel_env()
    rank = paddle.distributed.get_rank()
    return Processes(rank, world, paddle.base.core.create_or_get_global_tcp_store())
