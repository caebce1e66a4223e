"""Tensors: types, padding, interpolation, random dropping; tracing of programs."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor

from ppattn.ops.dispatch import constant


def is_dynamic(*sizes) -> bool:
    """Whether a program is being traced for any input size: heights and widths are then tensors, not integers."""
    return not all(isinstance(size, (int, np.integer)) for size in sizes)


def pad_to_multiple(x: Tensor, height: int, width: int) -> Tensor:
    """Zero-pad [B, C, H, W] at the bottom and right to multiples; a dynamic size must be a multiple already."""
    if is_dynamic(x.shape[2], x.shape[3]):
        return x
    return pad_end(pad_end(x, 2, -x.shape[2] % height), 3, -x.shape[3] % width)


def pad_end(x: Tensor, axis: int, count: int) -> Tensor:
    """`count` zeros appended along an axis; not by `pad`, which writes out of bounds with oneDNN (Paddle 3.3.1)."""
    if not count:
        return x
    shape = list(x.shape)
    shape[axis] = count
    return paddle.concat([x, paddle.zeros(shape, x.dtype)], axis)


def as_dtype(x: Tensor, dtype: paddle.dtype) -> Tensor:
    """x as `dtype`; no operator if it is already."""
    return x if x.dtype == dtype else x.astype(dtype)


def exact_dtype(dtype: paddle.dtype) -> str:
    """The type in which constants for tensors of `dtype` are computed: float64 for float64, else float32."""
    return "float64" if dtype == paddle.float64 else "float32"


@constant
def interpolation_matrix(size: int, count: int, dtype: paddle.dtype, mode: str = "bilinear", add: Any = 0.1) -> Tensor:
    """[count, size]: row i contains the weights of `size` numbers in number i of an interpolation to `count`.

    Corners are not aligned, and the numbers at the ends repeat. "bicubic" has a = -0.75, and so has "offset", whose
    steps are size / (count + add), as in DINOv2. For "antialias", as in DINOv2 with registers, a is -0.5, and the
    kernel is stretched where the table shrinks and cut at the ends.
    """
    library = np if not is_dynamic(count) and isinstance(add, float) else paddle  # a constant where the number is known
    ranges = (0, count), (0, size), (-2, size + 2)
    new, old, taps = (library.arange(*limits).astype(exact_dtype(dtype)) for limits in ranges)
    total = new[-1:] + (1.0 + add if mode == "offset" else 1.0)
    place = ((new + 0.5) * size / total - 0.5).reshape([-1, 1])

    def kernel(t: Any, a: float) -> Any:
        outer = library.where(t < 2, a * (((t - 5) * t + 8) * t - 4), 0 * t)
        return library.where(t <= 1, ((a + 2) * t - (a + 3)) * t * t + 1, outer)

    if mode == "antialias":
        weights = kernel(library.abs(place - old) / library.clip(size / total, 1, size), -0.5)
        weights = weights / weights.sum(1).reshape([-1, 1])
    else:
        distance = library.abs(place - taps)
        weights = library.clip(1 - distance, 0, 1) if mode == "bilinear" else kernel(distance, -0.75)
        ends = (library.clip(taps, 0, size - 1).reshape([-1, 1]) == old).astype(exact_dtype(dtype))
        weights = library.matmul(weights, ends)
    return as_dtype(paddle.to_tensor(weights), dtype)


def partition_windows(x: Tensor, height: int, width: int) -> Tensor:
    """[B, H, W, C] -> [B * G, height * width, C], the window index running fastest after the image."""
    w, c = x.shape[2:]
    return x.reshape([-1, height, w // width, width, c]).transpose([0, 2, 1, 3, 4]).flatten(0, 1).flatten(1, 2)


def merge_windows(x: Tensor, hw: tuple[int, int], height: int, width: int) -> Tensor:
    """The inverse of `partition_windows`."""
    x = x.reshape([-1, hw[1] // width, height, width, x.shape[2]]).transpose([0, 2, 1, 3, 4])
    return x.flatten(2, 3).reshape([-1, *hw, x.shape[4]])


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    return F.dropout(x, p, training=True) if training and p > 0.0 else x


def drop_path(x: Tensor, p: float, training: bool) -> Tensor:
    """Stochastic depth: drop whole images [B, ...] of a residual branch with probability p, rescale the rest."""
    return x * keep_factors(x, p) if training and p else x


def keep_factors(x: Tensor, p: float) -> Tensor:
    """A factor per image of x [B, ...]: 0 with probability p, else 1 / (1 - p); [B, 1, ...]."""
    return (paddle.rand([x.shape[0]] + [1] * (x.ndim - 1)) >= p).astype(x.dtype) / (1.0 - p)


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Programs are traced inside, so that one that fails cannot crash the process later.

    Paddle 3.3 keeps the values of a trace under the address of its program, and drops them only where the trace
    succeeds. A later program at that address takes them for its own, and reads memory that is gone.
    """

    def forget() -> None:
        for folder in ("dy2static", "pir_dy2static"):  # of Paddle 3.3 and 3.1; a later one may have no such record
            with contextlib.suppress(ImportError, AttributeError):
                recorder = importlib.import_module(f"paddle.jit.{folder}.parameter_recorder")
                recorder._global_parameter_recorder.__init__()
                recorder._global_inplace_map.__init__()

    forget()
    try:
        yield
    finally:
        forget()
