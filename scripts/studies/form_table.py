"""Which forms an operator has for a type, its reference for float64, and its inputs: the tables of gpu_forms.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch_forms as plain
import torch_local
from torch import Tensor
from torch_forms import AGENTS, HALF, Precision, Shape, Tensors


class Form(NamedTuple):
    call: Callable[[Tensors, Shape], Tensor]
    tf32: bool = False
    cudnn: bool = True


KERNELS: dict[str, Callable[[Tensors, Shape, Precision], Tensor]] = {
    "linear_elu": plain.linear_elu,
    "inline": plain.inline,
    "polaformer": plain.polaformer,
    "mala": plain.mala,
    "soft": plain.soft,
    "vittt": plain.vittt,
    "rala": plain.rala,
    "linear_relu": plain.linear_relu,
    "linear_map": plain.linear_map,
}
WITH_MAP = {"softmax": plain.softmax, "window": plain.softmax, "agent": plain.agent}
LOCAL = {
    "shifts": Form(torch_local.shifts),
    "grouped": Form(torch_local.grouped),
    "grouped_no_cudnn": Form(torch_local.grouped, cudnn=False),
}
LOCAL |= {"padded": Form(torch_local.padded), "unfold": Form(torch_local.unfold), "static": Form(torch_local.static)}
CENTRED = ("inline", "linear_elu", "linear_relu", "polaformer", "mala", "rala")
OPERATORS = (*WITH_MAP, "local", *KERNELS)


def forms(operator: str, dtype: torch.dtype) -> dict[str, Form]:
    """The forms of an operator for inputs of this type."""
    if operator == "local":
        return LOCAL
    if call := WITH_MAP.get(operator):
        fused = {"sdpa": Form(partial(call, attend=plain.fused_attention))}
        return {"plain": Form(call)} | fused | ({} if dtype in HALF else {"plain_tf32": Form(call, tf32=True)})
    call = KERNELS[operator]
    if dtype not in HALF:
        exact = partial(call, p=Precision())
        return {"plain": Form(exact), "plain_tf32": Form(exact, tf32=True)}
    kinds = ["naive", "lean", "mixed", "guarded"] + ["centred"] * (operator in CENTRED)
    kinds += ["balanced"] * (operator == "polaformer")
    kinds = [kind for kind in kinds if (operator, kind) != ("soft", "lean")]
    found = {kind: Form(partial(call, p=Precision(kind, dtype))) for kind in kinds}
    return found | {"guarded_tf32": found["guarded"]._replace(tf32=True)}


def reference(operator: str) -> Callable[[Tensors, Shape], Tensor]:
    """The form for float64."""
    if operator == "local":
        return torch_local.shifts
    return WITH_MAP.get(operator) or partial(KERNELS[operator], p=Precision())


@contextlib.contextmanager
def settings(form: Form) -> Iterator[None]:
    """TF32 and cuDNN as the form asks for them."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.enabled
    matmul.allow_tf32, cudnn.allow_tf32, cudnn.enabled = form.tf32, form.tf32, form.cudnn
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.enabled = before


def draw(operator: str, s: Shape, dtype: torch.dtype, size: float, device: str, seed: int = 0) -> Tensors:
    """Inputs of an operator, with gradient: activations of this type and of standard deviation `size`, parameters.

    Half of the variance of q, k and v is that of the channels' means, which the tokens of an image share.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=generator, device=device)

    names = {"local": "v", "soft": "qv"}.get(operator, "qkv")
    inputs = (s.batch, s.tokens, s.dim)
    t = {x: ((normal(*inputs) + normal(s.batch, 1, s.dim)) * (size * 0.5**0.5)).to(dtype) for x in names}
    if operator == "local":
        t["kernel"] = normal(s.batch, s.dim, 9, scale=0.3).to(dtype)
    elif operator == "window":
        t["bias"] = normal(s.heads, s.tokens, s.tokens)
    elif operator == "agent":
        t["on_keys"] = normal(s.heads, AGENTS**2, s.tokens, scale=0.5)
        t["on_agents"] = normal(s.heads, s.tokens, AGENTS**2, scale=0.5)
    elif operator == "polaformer":
        t["factor"] = normal(1, 1, s.dim, scale=0.2).exp() / 0.69
        t["power"] = 1.0 + 4.0 * torch.sigmoid(normal(1, s.heads, 1, s.head_dim))
        t["table"] = normal(1, s.tokens, s.dim, scale=0.02)
    elif operator == "vittt":
        t |= {x: normal(1, s.heads, s.head_dim, s.head_dim, scale=s.head_dim**-0.5) for x in ("w1", "w2")}
    elif operator == "soft":
        ratio = max(2, round(s.side / AGENTS))
        scale = (s.head_dim * ratio**2) ** -0.5
        t["landmark"] = normal(s.head_dim, s.head_dim, ratio, ratio, scale=scale)
        t["gain"], t["shift"] = 1.0 + normal(s.head_dim, scale=0.1), normal(s.head_dim, scale=0.1)
    return {x: value.detach().requires_grad_() for x, value in t.items()}
