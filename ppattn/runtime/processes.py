"""Collective operations of the processes of one launch, besides exchanging gradients.

Gloo gives up on a partner that is 30 s late, and Paddle's key-value store takes 50 ms per call. Small sums therefore
go over plain connections to the main process, which may wait for long. They are exchanged before each call of Gloo.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import numpy as np
import paddle

from ppattn.errors import UserError

TIMEOUT = 3600.0  # seconds


class Processes:
    """The processes of this launch, `rank` 0 the main one, with `links` to all others, in their order, or to it."""

    def __init__(self, rank: int = 0, world: int = 1, links: Sequence[Connection] = ()):
        self.rank, self.world, self.links = rank, world, links
        self.main = rank == 0

    def sum(self, values: Any) -> np.ndarray:
        """Element-wise sum over all processes of an array of the same shape on each, in float64; waits for all."""
        values = np.asarray(values, "float64")
        if self.world == 1:
            return values
        with connection_errors(self.rank):
            if not self.main:
                self.links[0].send_bytes(values.tobytes())
            received = []
            for link in self.links:
                if not link.poll(TIMEOUT):
                    raise UserError(f"Process {self.rank} ends: it waited {TIMEOUT:.0f} s for another of this launch.")
                received.append(np.frombuffer(link.recv_bytes()).reshape(values.shape))
            if not self.main:
                return received[0]
            values = sum(received, values)
            for link in self.links:
                link.send_bytes(values.tobytes())
        return values

    def barrier(self) -> None:
        """Block until every process arrives."""
        self.sum(0.0)

    def broadcast(self, tensors: list) -> None:
        """Overwrite the tensors with those of the main process."""
        if self.world == 1:
            return
        self.barrier()
        with paddle.no_grad():
            for tensor in tensors:
                paddle.distributed.broadcast(tensor, src=0)

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Run the block first in the main process, then in one of every other machine, then in the rest (downloads)."""
        turn = 0 if self.main else 2 if int(os.environ.get("PADDLE_LOCAL_RANK", 1)) else 1
        for _ in range(turn):
            self.barrier()
        yield
        for _ in range(3 - turn):
            self.barrier()


@contextmanager
def connection_errors(rank: int) -> Iterator[None]:
    """Report a broken connection as a lost process; otherwise its `OSError` would be reported as a full disk."""
    try:
        yield
    except (EOFError, OSError):
        raise UserError(f"Process {rank} ends: another process of this launch is gone, and its log says why.") from None


def join() -> Processes:
    """Join the group that `python -m paddle.distributed.launch` started, if it did."""
    world = int(os.environ.get("PADDLE_TRAINERS_NUM", 1))
    if world == 1:
        return Processes()
    if sys.platform == "linux":  # otherwise workers outlive a killed launcher: let the kernel send SIGTERM
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    paddle.distributed.init_parallel_env()
    rank = paddle.distributed.get_rank()
    if rank:
        address: list[Any] = [None]
        paddle.distributed.broadcast_object_list(address, src=0)
        host, port, key = address[0]
        with connection_errors(rank):
            link = Client((host, port), authkey=key)
            link.send_bytes(str(rank).encode())
        return Processes(rank, world, [link])
    host, key = os.environ["PADDLE_CURRENT_ENDPOINT"].rsplit(":", 1)[0], os.urandom(32)
    with Listener((host, 0), backlog=world, authkey=key) as listener:
        paddle.distributed.broadcast_object_list([(host, listener.address[1], key)], src=0)
        with connection_errors(rank):
            links = [listener.accept() for _ in range(world - 1)]
            ranks = [int(link.recv_bytes()) for link in links]
    return Processes(rank, world, [link for _, link in sorted(zip(ranks, links, strict=True))])
