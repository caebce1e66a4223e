"""`dying_writes.py WHERE COUNT -c ...`: training that is killed inside the COUNT-th write of a training state."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppattn import weights
from ppattn.cli import main
from ppattn.engine import checkpoint


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def install(where: str, count: int) -> None:
    honest, writes = weights.save, []

    def save(path, tensors, metadata):
        if "next" in Path(path).name:
            writes.append(path)
        if len(writes) < count:
            return honest(path, tensors, metadata)
        if where == "half a file":
            honest(path, tensors, metadata)
            data = Path(path).read_bytes()
            Path(path).write_bytes(data[: len(data) // 2])
            die()
        honest(path, tensors, metadata)
        if where == "before the first rename":
            die()
        replace = os.replace

        def once(source, target):
            replace(source, target)
            die()

        checkpoint.os.replace = once

    checkpoint.weights.save = save


if __name__ == "__main__":
    install(sys.argv[1], int(sys.argv[2]))
    sys.exit(main("train", sys.argv[3:]))
