"""`dying_writes.py WHERE COUNT -c ...`: training that is killed inside the COUNT-th write of a training state."""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import safetensors.numpy

from ppattn import weights
from ppattn.cli import main
from ppattn.engine import outputs


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def install(where: str, count: int) -> None:
    """`where`: "half a file" (of the temporary one), "before the first rename" or "between the renames"."""
    honest, writes = weights.save, []

    def half(arrays, path, header):
        data = safetensors.numpy.save(arrays, header)
        Path(path).write_bytes(data[: len(data) // 2])
        die()

    def rename_and_die(source, target):
        rename(source, target)
        die()

    def save(path, tensors, metadata):
        if "next" in Path(path).name:
            writes.append(path)
        if len(writes) == count and where == "half a file":
            safetensors.numpy.save_file = half
        honest(path, tensors, metadata)
        if len(writes) == count and where == "before the first rename":
            die()
        if len(writes) == count:
            outputs.os.replace = rename_and_die

    rename = os.replace
    outputs.weights.save = save


if __name__ == "__main__":
    install(sys.argv[1], int(sys.argv[2]))
    sys.exit(main("train", sys.argv[3:]))
