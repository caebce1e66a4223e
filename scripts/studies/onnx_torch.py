"""Run exported ONNX programs node by node in PyTorch, and compare with the answers of the models themselves.

python scripts/studies/onnx_torch.py exported_onnx                       # a folder of `ppattn export --format onnx`
python scripts/studies/onnx_torch.py gpu_inputs --names soft_deit_tiny   # of gpu_forms.py --prepare
python scripts/studies/onnx_torch.py gpu_inputs --naive-half fp16 --device cuda

Modes: fp32, every node in the type that the graph says; tf32, the same with TF32 products; bf16 and fp16
(`--naive-half`), all real tensors in that type whatever the graph says, as an engine without strong types may do;
autocast_bf16 and autocast_fp16, operands and results of products and convolutions rounded to that type, the rest in
float32. Printed: the largest difference from the golden output as a part of the largest (ppattn allows 1e-4 in float32)
and the share of the images with the same first class. Only operators that ppattn's programs have are known. Nodes that
depend on no input are computed once, when a program is read; integers stay on the CPU.
"""

from __future__ import annotations

import argparse
import io
import lzma
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from torch import Tensor

ALLOWED = 1e-4


class Mode(NamedTuple):
    """Type of all real tensors, None: as the graph says; TF32 products."""

    real: torch.dtype | None = None
    tf32: bool = False


MODES = {"graph": Mode(), "tf32": Mode(tf32=True), "bf16": Mode(torch.bfloat16), "fp16": Mode(torch.float16)}
Attributes = dict[str, Any]


def convolution(inputs: list[Tensor], a: Attributes, mode: Mode) -> Tensor:
    pads = a.get("pads", [0, 0, 0, 0])
    if pads[:2] != pads[2:]:
        raise ValueError(f"pads = {pads}: only equal ones on both sides are known.")
    options = {"stride": a.get("strides", 1), "padding": pads[:2], "dilation": a.get("dilations", 1)}
    return F.conv2d(*inputs, **options, groups=a.get("group", 1))


def reshape(inputs: list[Tensor], a: Attributes, mode: Mode) -> Tensor:
    x, shape = inputs[0], inputs[1].tolist()
    return x.reshape([x.shape[i] if size == 0 else size for i, size in enumerate(shape)])


def part(inputs: list[Tensor], a: Attributes, mode: Mode) -> Tensor:
    x, starts, ends = inputs[0], inputs[1].tolist(), inputs[2].tolist()
    axes = inputs[3].tolist() if len(inputs) > 3 else list(range(len(starts)))
    steps = inputs[4].tolist() if len(inputs) > 4 else [1] * len(starts)
    index = [slice(None)] * x.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        index[axis] = slice(start, end, step)
    return x[tuple(index)]


def unsqueeze(inputs: list[Tensor], a: Attributes, mode: Mode) -> Tensor:
    x, axes = inputs[0], inputs[1].tolist()
    for axis in sorted(axis % (x.ndim + len(axes)) for axis in axes):
        x = x.unsqueeze(axis)
    return x


def squeeze(inputs: list[Tensor], a: Attributes, mode: Mode) -> Tensor:
    return inputs[0].squeeze(tuple(inputs[1].tolist())) if len(inputs) > 1 else inputs[0].squeeze()


def expand(inputs: list[Tensor], a: Attributes, mode: Mode) -> Tensor:
    return inputs[0].expand(torch.broadcast_shapes(inputs[0].shape, inputs[1].tolist()))


def divide(inputs: list[Tensor], a: Attributes, mode: Mode) -> Tensor:
    return inputs[0] / inputs[1] if inputs[0].is_floating_point() else inputs[0] // inputs[1]


def cast(inputs: list[Tensor], a: Attributes, mode: Mode) -> Tensor:
    kind = onnx.helper.tensor_dtype_to_np_dtype(a["to"])
    if kind.kind == "b":
        return inputs[0].bool()
    real = mode.real or (torch.float16 if kind == np.float16 else torch.float32)
    return inputs[0].to(real if kind.kind == "f" else torch.int64)


def layer_norm(inputs: list[Tensor], a: Attributes, mode: Mode) -> Tensor:
    x = inputs[0]
    return F.layer_norm(x, x.shape[a.get("axis", -1) :], *inputs[1:], eps=a.get("epsilon", 1e-5))


def batch_norm(inputs: list[Tensor], a: Attributes, mode: Mode) -> Tensor:
    x, gain, shift, mean, variance = inputs
    return F.batch_norm(x, mean, variance, gain, shift, eps=a.get("epsilon", 1e-5))


def split(inputs: list[Tensor], a: Attributes, mode: Mode) -> tuple[Tensor, ...]:
    return inputs[0].split(inputs[1].tolist(), a.get("axis", 0))


def reduction(call: Callable[..., Tensor]) -> Callable[[list[Tensor], Attributes, Mode], Tensor]:
    def reduced(inputs: list[Tensor], a: Attributes, mode: Mode) -> Tensor:
        axes = inputs[1].tolist() if len(inputs) > 1 else a.get("axes", list(range(inputs[0].ndim)))
        return call(inputs[0], axes, keepdim=bool(a.get("keepdims", 1)))

    return reduced


def plain(call: Callable[..., Tensor]) -> Callable[[list[Tensor], Attributes, Mode], Tensor]:
    """An operator without attributes."""
    return lambda inputs, a, mode: call(*inputs)


OPERATORS: dict[str, Callable[[list[Tensor], Attributes, Mode], Any]] = {
    **{name: plain(getattr(torch, name.lower())) for name in ("Abs", "Erf", "Exp", "Log", "Sigmoid", "Sqrt", "Tanh")},
    **{name: plain(getattr(torch, name.lower())) for name in ("Add", "Sub", "Mul", "Pow", "Where", "Greater", "Clip")},
    "BatchNormalization": batch_norm,
    "Cast": cast,
    "Concat": lambda x, a, mode: torch.cat(x, a["axis"]),
    "Conv": convolution,
    "Div": divide,
    "Elu": lambda x, a, mode: F.elu(x[0], a.get("alpha", 1.0)),
    "Expand": expand,
    "LayerNormalization": layer_norm,
    "MatMul": plain(torch.matmul),
    "Max": plain(torch.maximum),
    "ReduceMax": reduction(torch.amax),
    "ReduceMean": reduction(torch.mean),
    "ReduceSum": reduction(torch.sum),
    "Relu": plain(torch.relu),
    "Reshape": reshape,
    "Shape": lambda x, a, mode: torch.tensor(x[0].shape),
    "Slice": part,
    "Softmax": lambda x, a, mode: torch.softmax(x[0], a.get("axis", -1)),
    "Split": split,
    "Squeeze": squeeze,
    "Transpose": lambda x, a, mode: x[0].permute(a["perm"]),
    "Unsqueeze": unsqueeze,
}


class Step(NamedTuple):
    call: Callable[[list[Tensor], Attributes, Mode], Any]
    attributes: Attributes
    inputs: list[str]
    outputs: list[str]
    last: list[str]  # values that no later step needs


class Program:
    """An ONNX graph of one input and one output."""

    def __init__(self, model: onnx.ModelProto, mode: Mode, device: str):
        graph, self.mode, self.device = model.graph, mode, device
        self.input, self.output = graph.input[0].name, graph.output[0].name
        self.constants = {array.name: self.tensor(onnx.numpy_helper.to_array(array)) for array in graph.initializer}
        same: dict[str, str] = {}
        steps = []
        for node in graph.node:
            inputs = [same.get(name, name) for name in node.input if name]
            if node.op_type == "Identity":
                same[node.output[0]] = inputs[0]
                continue
            attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
            if node.op_type == "Constant":
                self.constants[node.output[0]] = self.tensor(onnx.numpy_helper.to_array(attributes["value"]))
                continue
            step = Step(OPERATORS[node.op_type], attributes, inputs, list(node.output), [])
            if all(name in self.constants for name in inputs):
                self.constants |= self.outputs(step, self.constants)
            else:
                steps.append(step)
        self.output = same.get(self.output, self.output)
        self.steps = marked(steps, {*self.constants, self.output})

    def tensor(self, array: np.ndarray) -> Tensor:
        """On the device in the type of the mode; integers on the CPU."""
        found = torch.from_numpy(np.array(array))
        return found.to(self.device, self.mode.real or found.dtype) if found.is_floating_point() else found

    def outputs(self, step: Step, values: dict[str, Tensor]) -> dict[str, Tensor]:
        found = step.call([values[name] for name in step.inputs], step.attributes, self.mode)
        return dict(zip(step.outputs, found if isinstance(found, tuple) else (found,), strict=True))

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        matmul.allow_tf32 = cudnn.allow_tf32 = self.mode.tf32
        values = self.constants | {self.input: images.to(self.device, self.mode.real or images.dtype)}
        for step in self.steps:
            values |= self.outputs(step, values)
            for name in step.last:
                del values[name]
        matmul.allow_tf32 = cudnn.allow_tf32 = False
        return values[self.output]


def marked(steps: list[Step], kept: set[str]) -> list[Step]:
    """The steps with the values that each is the last to need."""
    found, seen = [], set(kept)
    for step in reversed(steps):
        last = [name for name in dict.fromkeys([*step.inputs, *step.outputs]) if name not in seen]
        seen.update(last)
        found.append(step._replace(last=last))
    return found[::-1]


class Exported(NamedTuple):
    """A program on disk: the graph, images [n, C, H, W], the model's own outputs, and labels or None."""

    name: str
    model: onnx.ModelProto
    images: np.ndarray
    golden: np.ndarray
    labels: np.ndarray | None


def names_in(folder: Path) -> list[str]:
    """The programs that gpu_inputs.py wrote; one without a name for an export of ppattn."""
    found = sorted(path.name.removesuffix(".onnx.xz") for path in folder.glob("*.onnx.xz"))
    return found or [""]


def read(folder: Path, name: str) -> Exported:
    if not name:
        with np.load(folder / "golden.npz") as golden:
            return Exported(folder.name, onnx.load(folder / "inference.onnx"), golden["input"], golden["output"], None)
    model = onnx.load_from_string(lzma.decompress((folder / f"{name}.onnx.xz").read_bytes()))
    size = model.graph.input[0].type.tensor_type.shape.dim[3].dim_value
    with (
        np.load(folder / f"{name}.golden.npz") as golden,
        np.load(io.BytesIO(lzma.decompress((folder / f"images_{size}.npz.xz").read_bytes()))) as images,
    ):
        return Exported(name, model, images["input"], golden["output"], images.get("labels"))


def judged(exported: Exported, mode: str, device: str) -> dict[str, Any]:
    """Difference from the golden output, share of the images with the same class, accuracy where there are labels."""
    found = Program(exported.model, MODES[mode], device)(torch.from_numpy(exported.images)).float().cpu().numpy()
    finite, golden = bool(np.isfinite(found).all()), exported.golden
    classes = np.where(np.isfinite(found).all(1), found.argmax(1), -1)
    facts: dict[str, Any] = {"program": exported.name, "mode": mode, "finite": finite}
    facts["difference"] = float(f"{np.abs(found - golden).max() / np.abs(golden).max():.3g}") if finite else None
    facts["same_class"] = round(float((classes == golden.argmax(1)).mean()), 4)
    if exported.labels is not None:
        facts["accuracy"] = round(float((classes == exported.labels).mean()), 4)
    return facts


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--names", nargs="+", help="programs; default: all")
    parser.add_argument("--naive-half", choices=["bf16", "fp16"])
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=["fp32"])
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args(arguments)
    wrong = 0
    for name in given.names or names_in(given.folder):
        exported = read(given.folder, name)
        for mode in [given.naive_half] if given.naive_half else given.modes:
            facts = judged(exported, mode, given.device)
            print(" ".join(f"{key}={value}" for key, value in facts.items()), flush=True)
            wrong += mode == "fp32" and not (facts["finite"] and facts["difference"] <= ALLOWED)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
