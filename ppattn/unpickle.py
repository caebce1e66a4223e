"""Reading pickles without running anything from them: containers, numbers, text and numeric arrays.

This is the unpickler of Python's standard library written in Python, since the one in C lets a file of ten bytes ask
for gigabytes (its memo is a list as long as the largest index).
"""

from __future__ import annotations

import pickle
import re
from collections import OrderedDict
from typing import Any, ClassVar

import numpy as np


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


class ArrayUnpickler(pickle._Unpickler):
    """Builds dictionaries, lists, sets, numbers, text and numeric arrays; rejects everything else by name.

    Attributes set on objects (other than arrays) are read and dropped.

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

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy._core.", "numpy.core.")  # as numpy 2 calls it
        if (module, name) not in self.known:
            raise Refused(f"{module}.{name}")
        return self.known[module, name]

    stack: list[Any]

    def load_build(self) -> None:
        state, built = self.stack.pop(), self.stack[-1]
        if isinstance(built, (_Array, _Dtype)):
            built.__setstate__(state)

    dispatch = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}  # type: ignore[dict-item]
