"""Choice between the forms of an operator: compiled on the CPU, fused on other devices, or plain."""

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Literal, cast, get_args

import paddle
import paddle.nn.functional as F
from paddle import Tensor
from paddle.jit.sot import psdb

from ppattn.errors import unknown_name
from ppattn.ops import native

Kernels = Literal["auto", "fused", "plain"]
FUSED: Any = getattr(F, "scaled_dot_product_attention", None)
if FUSED is not None and "scale" not in inspect.signature(FUSED).parameters:  # before Paddle 3.3
    FUSED = None

HALF = (paddle.float16, paddle.bfloat16)
CUDA_GRID = 65_536  # Paddle's kernels cannot be launched for as many groups of a convolution or windows of attention
_kernels: Kernels = "plain"
_compiled, _reason = False, "ppattn.setup() was not called"  # and why they are off
_traced = SimpleNamespace(marking=False)  # an object: Paddle's tracer copies the globals of a function once


def enable(kernels: Kernels | None = None, build: bool = True) -> bool:
    """Choose the forms of all operators; returns whether the compiled kernels are on afterwards.

    Args:
        kernels: "auto": compiled for float32 tensors on the CPU, built on first use; Paddle's fused softmax attention
            on other devices. "fused": Paddle's fused softmax attention on every device, everything else plain.
            "plain": Paddle's basic operators. None: what the variable PPATTN_KERNELS says ("0" means plain), or "auto".
        build: the CPU is the device, so that the compiled kernels are worth their building.
    """
    global _kernels, _compiled, _reason
    source = "kernels" if kernels else "PPATTN_KERNELS"
    name = kernels or os.environ.get("PPATTN_KERNELS") or "auto"
    name = "plain" if name == "0" else name
    if name not in get_args(Kernels):
        raise unknown_name(f"value of {source}", name, get_args(Kernels))
    _kernels, _compiled, _reason = cast(Kernels, name), False, f"{source} is {name!r}"
    if name == "auto" and not build:
        _reason = "the device is another"
    elif name == "auto":
        try:
            native.load()
            _compiled = True
        except native.Unavailable as error:
            _reason = str(error)
    return _compiled


def status() -> str:
    """Which form each operator takes, and why; for the log."""
    on_cpu = "compiled" if _compiled else f"plain ({_reason})"
    if _kernels == "fused":
        return "Kernels: softmax attention by Paddle's fused function, everything else plain (fused was asked for)."
    fused = "not in this Paddle" if FUSED is None else "softmax attention fused, everything else plain"
    return f"Kernels: on the CPU {on_cpu}; on other devices {'plain' if _kernels == 'plain' else fused}."


def eager() -> bool:
    """Whether operators compute at once; `paddle.jit.to_static` traces them instead, by either of its tracers."""
    return paddle.in_dynamic_mode() and not psdb.in_sot()


def constant(function: Callable) -> Callable:
    """Keep on the device what a function of sizes and types makes, so that a later step copies nothing to it."""
    kept = functools.lru_cache(maxsize=64)(lambda device, *arguments, **more: function(*arguments, **more))

    @functools.wraps(function)
    def call(*arguments, **more):
        if not eager():  # a constant of the program
            return function(*arguments, **more)
        return kept(paddle.get_device(), *arguments, **more)

    return call


def cpu_float32(*tensors: Tensor | None) -> bool:
    """Whether all tensors are non-empty float32 tensors on the CPU, in dynamic mode; None is ignored."""
    return eager() and all(
        t is None or (t.dtype == paddle.float32 and t.place.is_cpu_place() and t.size > 0) for t in tensors
    )


def compiled(*tensors: Tensor | None) -> bool:
    """Whether an operator on these tensors runs in its compiled form."""
    return _compiled and cpu_float32(*tensors)


def fused(x: Tensor) -> bool:
    """Whether softmax attention of x [B, ...] goes to Paddle's fused kernels; traced programs keep the plain form."""
    if FUSED is None or not eager() or len(x) >= CUDA_GRID:
        return False
    return _kernels == "fused" or (_kernels == "auto" and not x.place.is_cpu_place())


@contextlib.contextmanager
def marking_float32() -> Iterator[None]:
    """Mark in traced float32 programs what half precision would keep in float32, see `ppattn/deploy/half.py`.

    A CPU traces no float16 programs. Inside, float32 counts as half precision, a change to float32 is traced as a pair
    of casts to float64 and back, and the way back to half precision as three pairs.
    """
    _traced.marking = True
    try:
        yield
    finally:
        _traced.marking = False


def is_half(x: Tensor) -> bool:
    """Whether a tensor is in half precision, or stands for one."""
    return x.dtype in HALF or (_traced.marking and x.dtype == paddle.float32)


def as_float32(x: Tensor) -> Tensor:
    """Half precision as float32; float32 and float64 as they are."""
    if _traced.marking and x.dtype == paddle.float32:
        return x.astype("float64").astype("float32")
    return x.astype("float32") if x.dtype in HALF else x


def as_dtype_of(y: Tensor, x: Tensor) -> Tensor:
    """y in the type of x, after a computation that began with `as_float32(x)`."""
    return as_float32(as_float32(as_float32(y))) if _traced.marking and y.dtype == x.dtype else y.astype(x.dtype)


def run_all(name: str, *arguments) -> list[Tensor]:
    """All outputs of a compiled operator."""
    return paddle._C_ops._run_custom_op("ppattn_" + name, *arguments)


def run(name: str, *arguments) -> Tensor:
    """First output of a compiled operator; the others serve its backward pass."""
    return run_all(name, *arguments)[0]


def grad_mask(*tensors: Tensor | None) -> int:
    """Bit mask of the tensors that need a gradient; 0 if gradients are disabled."""
    if not paddle.is_grad_enabled():
        return 0
    return sum(1 << i for i, t in enumerate(tensors) if t is not None and not t.stop_gradient)
