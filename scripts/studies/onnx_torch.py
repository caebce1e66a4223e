"""Runs ONNX programs node by node in PyTorch, for gpu_forms.py.

Modes: `graph`, every node in the type that the graph says; `tf32`, the same with TF32 products; `bf16` and `fp16`, all
real tensors in that type whatever the graph says, as an engine without strong types may do. Only operators that
ppattn's programs have are known. Nodes that depend on no input are computed once; integers stay on the CPU.
"""

from __future__ import annotations

import contextlib
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from torch import Tensor


class Mode(NamedTuple):
    """Type of all real tensors, None: as the graph says; TF32 products."""

    real: torch.dtype | None = None
    tf32: bool = False


MODES = {"graph": Mode(), "tf32": Mode(tf32=True), "bf16": Mode(torch.bfloat16), "fp16": Mode(torch.float16)}
Attributes = dict[str, Any]


Kernel = Callable[[list[Any], Attributes, Mode], Any]


@contextlib.contextmanager
def products_in(tf32: bool) -> Iterator[None]:
    """Products and convolutions of float32 in TF32, or not."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def convolution(x: list[Any], a: Attributes, mode: Mode) -> Tensor:
    top, left, bottom, right = a.get("pads", [0, 0, 0, 0])
    padded, options = F.pad(x[0], (left, right, top, bottom)), {"dilation": a.get("dilations", 1)}
    return F.conv2d(padded, *x[1:], **options, stride=a.get("strides", 1), groups=a.get("group", 1))


def part(x: list[Any], a: Attributes, mode: Mode) -> Tensor:
    starts, ends, *more = (one.tolist() for one in x[1:])
    axes = more[0] if more else range(len(starts))
    steps = more[1] if len(more) > 1 else [1] * len(starts)
    index = [slice(None)] * x[0].ndim
    for axis, *ends_and_step in zip(axes, starts, ends, steps, strict=True):
        index[axis] = slice(*ends_and_step)
    return x[0][tuple(index)]


def unsqueeze(x: list[Any], a: Attributes, mode: Mode) -> Tensor:
    found, axes = x[0], x[1].tolist()
    for axis in sorted(axis % (found.ndim + len(axes)) for axis in axes):
        found = found.unsqueeze(axis)
    return found


def cast(x: list[Any], a: Attributes, mode: Mode) -> Tensor:
    kind = onnx.helper.tensor_dtype_to_np_dtype(a["to"])
    if kind.kind == "b":
        return x[0].bool()
    real = mode.real or (torch.float16 if kind == np.float16 else torch.float32)
    return x[0].to(real if kind.kind == "f" else torch.int64)


def reduction(call: Callable[..., Tensor]) -> Kernel:
    def reduced(x: list[Any], a: Attributes, mode: Mode) -> Tensor:
        axes = x[1].tolist() if len(x) > 1 else a.get("axes", list(range(x[0].ndim)))
        return call(x[0], axes, keepdim=bool(a.get("keepdims", 1)))

    return reduced


def plain(call: Callable[..., Tensor]) -> Kernel:
    return lambda x, a, mode: call(*x)


OPERATORS: dict[str, Kernel] = {
    **{name: plain(getattr(torch, name.lower())) for name in ("Abs", "Erf", "Exp", "Log", "Sigmoid", "Sqrt", "Tanh")},
    **{name: plain(getattr(torch, name.lower())) for name in ("Add", "Sub", "Mul", "Pow", "Where", "Greater", "Clip")},
    **{"MatMul": plain(torch.matmul), "Max": plain(torch.maximum), "Relu": plain(torch.relu)},
    **{f"Reduce{name}": reduction(getattr(torch, name.lower())) for name in ("Mean", "Sum")},
    "BatchNormalization": lambda x, a, mode: F.batch_norm(x[0], x[3], x[4], x[1], x[2], eps=a.get("epsilon", 1e-5)),
    "Cast": cast,
    "Concat": lambda x, a, mode: torch.cat(x, a["axis"]),
    "Conv": convolution,
    "Div": lambda x, a, mode: x[0] / x[1] if x[0].is_floating_point() else x[0] // x[1],
    "Elu": lambda x, a, mode: F.elu(x[0], a.get("alpha", 1.0)),
    "Expand": lambda x, a, mode: x[0].expand(torch.broadcast_shapes(x[0].shape, x[1].tolist())),
    "Identity": lambda x, a, mode: x[0],
    "LayerNormalization": lambda x, a, mode: F.layer_norm(x[0], x[1].shape, *x[1:], eps=a.get("epsilon", 1e-5)),
    "ReduceMax": reduction(torch.amax),
    "Reshape": lambda x, a, mode: x[0].reshape([x[0].shape[i] if n == 0 else n for i, n in enumerate(x[1].tolist())]),
    "Shape": lambda x, a, mode: torch.tensor(x[0].shape),
    "Slice": part,
    "Softmax": lambda x, a, mode: torch.softmax(x[0], a.get("axis", -1)),
    "Split": lambda x, a, mode: x[0].split(x[1].tolist(), a.get("axis", 0)),
    "Squeeze": lambda x, a, mode: x[0].squeeze(tuple(x[1].tolist())) if len(x) > 1 else x[0].squeeze(),
    "Transpose": lambda x, a, mode: x[0].permute(a["perm"]),
    "Unsqueeze": unsqueeze,
}


class Step(NamedTuple):
    call: Kernel
    attributes: Attributes
    inputs: list[str]
    outputs: list[str]


class Program:
    """An ONNX graph of one input and one output."""

    def __init__(self, model: onnx.ModelProto, mode: Mode, device: str):
        graph, self.mode, self.device = model.graph, mode, device
        self.input, self.output = graph.input[0].name, graph.output[0].name
        self.constants = {array.name: self.tensor(onnx.numpy_helper.to_array(array)) for array in graph.initializer}
        self.steps = []
        for node in graph.node:
            attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
            if node.op_type == "Constant":
                self.constants[node.output[0]] = self.tensor(onnx.numpy_helper.to_array(attributes["value"]))
                continue
            step = Step(OPERATORS[node.op_type], attributes, [x for x in node.input if x], list(node.output))
            if all(name in self.constants for name in step.inputs):
                self.constants |= self.outputs(step, self.constants)
            else:
                self.steps.append(step)

    def tensor(self, array: np.ndarray) -> Tensor:
        """On the device in the type of the mode; integers on the CPU."""
        found = torch.from_numpy(np.array(array))
        return found.to(self.device, self.mode.real or found.dtype) if found.is_floating_point() else found

    def outputs(self, step: Step, values: dict[str, Tensor]) -> dict[str, Tensor]:
        found = step.call([values[name] for name in step.inputs], step.attributes, self.mode)
        return dict(zip(step.outputs, found if isinstance(found, tuple) else (found,), strict=True))

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        values = self.constants | {self.input: images.to(self.device, self.mode.real or images.dtype)}
        with products_in(self.mode.tf32):
            for step in self.steps:
                values |= self.outputs(step, values)
        return values[self.output]


def read(folder: Path, name: str) -> tuple[onnx.ModelProto, Tensor, Tensor]:
    """The graph, images [n, C, H, W] and the answers [n, K] of the model."""
    model = onnx.load_from_string(lzma.decompress((folder / f"{name}.onnx.xz").read_bytes()))
    with np.load(folder / f"{name}.golden.npz") as golden, np.load(folder / "images_32.npz") as images:
        return model, torch.from_numpy(images["input"]), torch.from_numpy(golden["output"])


def judged(found: Tensor, answers: Tensor) -> dict[str, Any]:
    """Difference from the answers, and the share of the images with the same class."""
    found, finite = found.float().cpu(), bool(found.isfinite().all())
    same = (found.argmax(1) == answers.argmax(1)) & found.isfinite().all(1)
    worst = f"{float((found - answers).abs().max() / answers.abs().max()):.3g}" if finite else ""
    return {"finite": finite, "difference": worst, "same_class": round(float(same.float().mean()), 4)}
