"""Read the pickles of PyTorch, Paddle and CIFAR without importing any of them and without running code of the file.

Only containers, numbers, text and numeric arrays are built. What a file can ask for is bounded by its size.
"""

import functools
import io
import math
import pickle
import pickletools
import re
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from ppattn.errors import UserError

TORCH_MAGIC = 0x1950A86A20F9469CFC6C  # begins the format of before PyTorch 1.6
# Classes of storages, of which only the type of the numbers matters; `flat_arrays` makes float32 of bfloat16.
NUMBERS = dict(Float="<f4", Double="<f8", Half="<f2", BFloat16="<u2", Bool="|b1")
NUMBERS |= dict(Long="<i8", Int="<i4", Short="<i2", Char="|i1", Byte="|u1")
TORCH_TYPES = {f"{name}Storage": numbers for name, numbers in NUMBERS.items()}
MOST_PACKED = 20  # numbers hardly compress


def check_unpacked_size(archive: zipfile.ZipFile, path: Path) -> None:
    """Raise `UserError` for an archive that unpacks to much more than its own size."""
    if sum(member.file_size for member in archive.infolist()) > MOST_PACKED * path.stat().st_size:
        raise UserError(f"{path} would unpack to more than {MOST_PACKED} times its size: it does not hold numbers.")


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


def _rebuild_tensor(storage, offset, size, stride, *_):
    if not isinstance(storage, np.ndarray) or math.prod(size) > storage.size:
        raise ValueError("a tensor is larger than its storage, or has none")
    item = storage.dtype.itemsize
    return np.ndarray(size, storage.dtype, storage, offset * item, [s * item for s in stride])  # which compares bounds


KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): _reconstruct,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("_codecs", "encode"): _encode,  # how newer Pythons write bytes for older ones
    ("__builtin__", "bytes"): lambda: b"",  # how older protocols write them; called with a number it would allocate
    **{(module, kind.__name__): kind for module in ("__builtin__", "builtins") for kind in (set, tuple)},
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
    ("argparse", "Namespace"): _Settings,
    ("yacs.config", "CfgNode"): _Settings,
    **{(module, name): kind for name, kind in TORCH_TYPES.items() for module in ("torch", "torch.storage")},
}


class ArrayUnpickler(pickle.Unpickler):
    """Builds dictionaries, lists, sets, numbers, text and numeric arrays.

    `storages` gives the flat array of a tensor's storage by type, name and size; None: there are none. `load` raises
    `Refused` for a pickle that names anything else, and errors of many kinds for one that is damaged.
    """

    def __init__(self, file: BinaryIO, encoding: str = "latin1", storages: Callable | None = None):
        super().__init__(file, encoding=encoding)
        self.file, self.storages = file, storages

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy._core.", "numpy.core.")  # as numpy 2 calls it
        if (module, name) not in KNOWN:
            raise Refused(f"{module}.{name}")
        return KNOWN[module, name]

    def persistent_load(self, key: tuple) -> np.ndarray:
        kind, dtype, number, _, count, *_ = key
        if kind != "storage" or dtype not in TORCH_TYPES.values() or self.storages is None:
            raise Refused(f"an object kept outside ({kind})")
        return self.storages(dtype, str(number), count)

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


def from_bfloat16(data: bytes) -> np.ndarray:
    """The numbers of a bfloat16 array, flat, as float32."""
    return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")


def read_torch_zip(archive: zipfile.ZipFile) -> Any:
    """What `torch.save` of PyTorch 1.6 or later pickled."""
    names = {name.split("/", 1)[-1]: name for name in archive.namelist()}

    @functools.cache  # tensors may share one
    def storages(dtype, number, count):
        return np.frombuffer(archive.read(names[f"data/{number}"]), dtype)

    return ArrayUnpickler(io.BytesIO(archive.read(names["data.pkl"])), storages=storages).load()


def read_pickle(path: Path) -> Any:
    """What `paddle.save` pickled, or `torch.save` of before PyTorch 1.6."""
    with path.open("rb") as file:
        first = ArrayUnpickler(file).load()
        if first != TORCH_MAGIC:
            return first
        for _ in range(2):  # protocol, system information
            ArrayUnpickler(file).load()
        largest, storages = path.stat().st_size, dict[str, np.ndarray]()

        def blank(dtype, number, count):
            if count * np.dtype(dtype).itemsize > largest:
                raise ValueError("a storage is larger than the file")
            return storages.setdefault(number, np.zeros(count, dtype))

        tree = ArrayUnpickler(file, storages=blank).load()
        for key in ArrayUnpickler(file).load():  # the numbers come after the pickle that refers to them
            storage, (count,) = storages[str(key)], struct.unpack("<q", file.read(8))
            storage[:] = np.frombuffer(file.read(count * storage.itemsize), storage.dtype).reshape(storage.shape)
        return tree
