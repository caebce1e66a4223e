"""Read the pickles of PyTorch, Paddle and CIFAR without importing any of them and without running code of the file.

Only containers, numbers, text and numeric arrays are built. What a file can ask for is bounded by its size.
"""

from __future__ import annotations

import functools
import io
import logging
import math
import pickle
import pickletools
import re
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, cast

import numpy as np

logger = logging.getLogger("ppattn.weights")

TORCH_MAGIC = 0x1950A86A20F9469CFC6C  # begins the format of before PyTorch 1.6
TORCH_TYPES = {  # classes of storages, of which only the type of the numbers matters
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
    "HalfStorage": "<f2",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "|i1",
    "ByteStorage": "|u1",
    "BoolStorage": "|b1",
    "BFloat16Storage": "<u2",  # of which `state_dict` makes float32
}


class Refused(Exception):
    """A pickle names a class or function that is not needed to hold arrays."""


class _Dtype:
    """A numeric type of numpy; objects, text, times and records are rejected."""

    def __init__(self, code: str | bytes, *_: object):
        code = code.decode("latin1") if isinstance(code, bytes) else code
        if not isinstance(code, str) or not re.fullmatch("[<>|=]?[biuf][1248]", code):
            raise ValueError(f"an array of type {code!r} does not hold numbers")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: tuple) -> None:
        if state[1] in (">", b">"):
            self.dtype = self.dtype.newbyteorder(">")


class _Array(np.ndarray):
    """An array whose shape, type and bytes fit together; as `_reconstruct` leaves it, it is empty."""

    def __setstate__(self, state: tuple) -> None:
        shape, kind, fortran, data = state[-4:]
        data = data.encode("latin1") if isinstance(data, str) else data
        array = np.frombuffer(data, kind.dtype).reshape(shape, order="F" if fortran else "C")
        if min(array.shape, default=0) < 0 or array.size * array.itemsize != len(data):
            raise ValueError("the shape of an array does not fit its bytes")
        np.ndarray.__setstate__(self, (1, array.shape, array.dtype, fortran, data))


def _reconstruct(*_: object) -> _Array:
    return np.ndarray.__new__(_Array, (0,), "u1")


def _scalar(kind: _Dtype, data: str | bytes) -> Any:
    return np.frombuffer(data.encode("latin1") if isinstance(data, str) else data, kind.dtype)[0].item()


def _encode(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"encoding {encoding!r}")
    return text.encode("latin1")


class _Settings(dict):
    """Stands for the settings objects that training scripts save; what is set on it is kept out of the dictionary."""


class ArrayUnpickler(pickle.Unpickler):
    """Builds dictionaries, lists, sets, numbers, text and numeric arrays; rejects everything else by name.

    Raises (from `load`):
        Refused: the pickle names anything else.
        Exception: of many kinds, for a pickle that is damaged.
    """

    known: ClassVar[dict[tuple[str, str], Any]] = {
        ("collections", "OrderedDict"): OrderedDict,
        ("numpy", "dtype"): _Dtype,
        ("numpy", "ndarray"): _reconstruct,
        ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy.core.multiarray", "scalar"): _scalar,
        ("_codecs", "encode"): _encode,  # how newer Pythons write bytes for older ones
        ("__builtin__", "bytes"): lambda: b"",  # how older protocols write them; called with a number it would allocate
        ("__builtin__", "set"): set,
        ("builtins", "set"): set,
    }

    def __init__(self, file: BinaryIO, encoding: str = "latin1"):
        super().__init__(file, encoding=encoding)
        self.file = file

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy._core.", "numpy.core.")  # as numpy 2 calls it
        if (module, name) not in self.known:
            raise Refused(f"{module}.{name}")
        return self.known[module, name]

    def load(self) -> Any:
        """The next object of the file, after a look at the lengths and memo indices that it asks for."""
        start, size = self.file.tell(), self.file.seek(0, 2)
        self.file.seek(start)
        for code, argument, place in pickletools.genops(cast(Any, _Bounded(self.file, size))):
            if code.name.endswith("PUT") and int(argument or 0) > (place or 0):
                raise ValueError(f"memo index {argument} at byte {place}")
        self.file.seek(start)
        return super().load()


class _Bounded:
    """A file whose `read` never allocates more than the file has."""

    def __init__(self, file: BinaryIO, size: int):
        self.readline, self.tell, self.file, self.size = file.readline, file.tell, file, size

    def read(self, count: int) -> bytes:
        return self.file.read(min(count, self.size))


def _rebuild_tensor(storage, offset, size, stride, *_):
    if not isinstance(storage, np.ndarray) or math.prod(size) > storage.size:
        raise ValueError("a tensor is larger than its storage, or has none")
    item = storage.dtype.itemsize
    return np.ndarray(size, storage.dtype, storage, offset * item, [s * item for s in stride])  # which compares bounds


class _Unpickler(ArrayUnpickler):
    """Also knows how PyTorch keeps tensors, and the settings that training scripts save with them."""

    known = ArrayUnpickler.known | {
        ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
        ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
        ("argparse", "Namespace"): _Settings,
        ("yacs.config", "CfgNode"): _Settings,
        **{(module, name): kind for name, kind in TORCH_TYPES.items() for module in ("torch", "torch.storage")},
    }

    def __init__(self, file: BinaryIO, storages: Callable[[Any, str, int], np.ndarray] | None = None):
        super().__init__(file)
        self.storages = storages

    def persistent_load(self, key: tuple) -> np.ndarray:
        kind, dtype, number, _, count, *_ = key
        if kind != "storage" or dtype not in TORCH_TYPES.values() or self.storages is None:
            raise Refused(f"an object kept outside ({kind})")
        return self.storages(dtype, str(number), count)


def from_bfloat16(data: bytes) -> np.ndarray:
    """The numbers of a bfloat16 array, flat, as float32."""
    return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")


def read_torch_zip(archive: zipfile.ZipFile) -> Any:
    """What `torch.save` of PyTorch 1.6 or later pickled."""
    names = {name.split("/", 1)[-1]: name for name in archive.namelist()}

    @functools.cache  # tensors may share one
    def storages(dtype, number, count):
        return np.frombuffer(archive.read(names[f"data/{number}"]), dtype)

    return _Unpickler(io.BytesIO(archive.read(names["data.pkl"])), storages).load()


def read_pickle(path: Path) -> Any:
    """What `paddle.save` pickled, or `torch.save` of before PyTorch 1.6."""
    with path.open("rb") as file:
        first = _Unpickler(file).load()
        if first != TORCH_MAGIC:
            return first
        for _ in range(2):  # protocol, system information
            _Unpickler(file).load()
        largest, storages = path.stat().st_size, dict[str, np.ndarray]()

        def blank(dtype, number, count):
            if count * np.dtype(dtype).itemsize > largest:
                raise ValueError("a storage is larger than the file")
            return storages.setdefault(number, np.zeros(count, dtype))

        tree = _Unpickler(file, blank).load()
        for key in _Unpickler(file).load():  # the numbers come after the pickle that refers to them
            storage, (count,) = storages[str(key)], struct.unpack("<q", file.read(8))
            storage[:] = np.frombuffer(file.read(count * storage.itemsize), storage.dtype).reshape(storage.shape)
        return tree


def state_dict(tree: object) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint: its own, or those under one of the usual keys."""
    if not isinstance(tree, dict):
        raise ValueError(f"it holds a {type(tree).__name__}, not a state dict")
    for key in ("model", "state_dict", "model_state", "module"):
        if isinstance(tree.get(key), dict):
            averages = [name for name in tree if "ema" in str(name).lower() and isinstance(tree[name], dict)]
            if averages:
                logger.warning("the file holds a moving average (%s), too; %r is read", ", ".join(averages), key)
            return state_dict(tree[key])
    arrays = {}
    for name, value in tree.items():
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], np.ndarray):
            value = value[1]  # paddle.save keeps (name, array)
        if isinstance(value, np.ndarray) and value.dtype == np.uint16:
            value = from_bfloat16(value.tobytes()).reshape(value.shape)  # bfloat16, from Paddle too
        if isinstance(value, np.ndarray):
            arrays[name.removeprefix("module.")] = value
    if not arrays:
        raise ValueError("it holds no arrays")
    return arrays
