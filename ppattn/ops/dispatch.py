"""Choice between the compiled and the plain form of an operator."""

from __future__ import annotations

import os

import paddle
from paddle import Tensor

from ppattn.ops import native

_on, _reason = False, "not enabled"  # and why they are off


def enable(compiled: bool = True) -> bool:
    """Switch the compiled kernels on (building them on first use) or off; true if they are on afterwards.

    The environment variable PPATTN_KERNELS=0 keeps them off.
    """
    global _on, _reason
    _on, _reason = False, "not enabled"
    if compiled and os.environ.get("PPATTN_KERNELS") == "0":
        _reason = "PPATTN_KERNELS=0"
    elif compiled:
        try:
            native.load()
            _on = True
        except native.Unavailable as error:
            _reason = str(error)
    return _on


def status() -> str:
    """One sentence: whether the compiled kernels are in use, and if not, why."""
    return f"The compiled CPU kernels are {'on' if _on else f'off: {_reason}'}."


def cpu_float32(*tensors: Tensor | None) -> bool:
    """Whether all tensors are non-empty float32 tensors on the CPU, in dynamic mode; None is ignored."""
    return paddle.in_dynamic_mode() and all(
        t is None or (t.dtype == paddle.float32 and t.place.is_cpu_place() and t.size > 0) for t in tensors
    )


def compiled(*tensors: Tensor | None) -> bool:
    """Whether an operator on these tensors runs in its compiled form."""
    return _on and cpu_float32(*tensors)


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
