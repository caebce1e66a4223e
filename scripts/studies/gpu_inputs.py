"""What gpu_forms.py takes along to a machine without Paddle: ONNX programs, and answers of Paddle's plain operators.

`prepare(folder, data)` writes

    NAME.onnx.xz         a program of `ppattn.export`; unpacked, it is that file byte for byte
    NAME.golden.npz      `output`: the logits of the model itself, float32, on the CPU
    images_224.npz.xz    `input`: the images for all programs of that size; images_32.npz.xz also has `labels`
    operators.npz        inputs, outputs and gradients of plain operators, see `operator_references`

Parameters of two or more axes of the models at 224 pixels are +s or -s, so that the files are small: s is the root mean
square of the initial values with two digits, and the signs come from one random sequence, which every tensor reads from
a place of its own. Other parameters, and those that start with one sign, keep their initial values. The models at 32
pixels are trained ones of the package; their images are the first test images of CIFAR-10 if `data` is its folder, else
random.
"""

from __future__ import annotations

import io
import lzma
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import paddle
import paddle.nn.functional as F

import ppattn
from ppattn import ops
from ppattn.attention import AttentionSpec, Context, build_attention
from ppattn.attention.base import grid_means
from ppattn.attention.linear import EPS
from ppattn.attention.polaformer import TINY
from ppattn.attention.vittt import SCALE
from ppattn.config import make_config
from ppattn.data import Preprocess, build_datasets
from ppattn.data.cifar import CIFAR
from ppattn.errors import UserError

DEIT = ("softmax", "linear", "inline", "polaformer", "soft", "soft_norm", "agent", "mala", "rala", "mila")
DEIT += ("nalaformer", "vittt", "mhla", "focused")
RANDOM = {f"{name}_deit_tiny": ("deit_tiny", {"attention": name}) for name in DEIT}
RANDOM |= {name: (name, {}) for name in ("inline_pvt_tiny", "pola_swin_tiny", "swin_tiny", "soft_tiny")}
TRAINED = ("softmax", "linear", "inline", "polaformer", "soft", "soft_norm")
SIGNS = 1_000_003  # length of the sequence; a prime, so that rows of a matrix do not repeat
IMAGES = 256  # of CIFAR-10
XZ = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 27, "nice_len": 273, "lc": 0, "lp": 2}]
SPEC = AttentionSpec(32, 2, (10, 10))  # of the operators' references
Tensors = dict[str, paddle.Tensor]


def prepare(folder: Path, data: str | None) -> None:
    """Write what the module's docstring lists; programs that are there are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / "operators.npz", **operator_references())
    for name, (model, arguments) in RANDOM.items():
        if not (folder / f"{name}.golden.npz").exists():
            paddle.seed(0)
            layer = ppattn.create_model(model, **arguments)
            two_values(layer)
            program, golden = exported(layer)
            write(folder, name, program, golden["output"])
            pack(folder / "images_224.npz.xz", input=golden["input"])  # the same for every model
    arrays = cifar_images(data)
    pack(folder / "images_32.npz.xz", **arrays)
    for name in (f"{attention}_deit_nano_cifar10" for attention in TRAINED):
        if not (folder / f"{name}.golden.npz").exists():
            layer = ppattn.create_model(name, pretrained=True)
            program, _ = exported(layer)
            with paddle.no_grad():
                write(folder, name, program, layer(paddle.to_tensor(arrays["input"])).numpy())
    total = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{len(list(folder.glob('*.onnx.xz')))} programs, {total / 1e6:.1f} MB in all")


def two_values(layer: paddle.nn.Layer) -> None:
    """Two-valued parameters, see the docstring of the module."""
    rng = np.random.default_rng(0)
    signs = rng.choice(np.float32([-1.0, 1.0]), SIGNS)
    for parameter in layer.parameters():
        start = parameter.numpy()
        if start.ndim > 1 and start.min() < 0.0 < start.max():
            place = int(rng.integers(SIGNS)) + np.arange(start.size)
            size = np.float32(f"{np.sqrt(np.mean(np.square(start, dtype=np.float64))):.1e}")
            parameter.set_value((size * signs[place % SIGNS]).reshape(start.shape))


def exported(layer: paddle.nn.Layer) -> tuple[bytes, dict[str, np.ndarray]]:
    """The ONNX program that `ppattn.export` writes after its checks, and its golden.npz; the model is then in eval."""
    layer.eval()
    with tempfile.TemporaryDirectory() as place:
        ppattn.export(layer, Path(place) / "program", format="onnx", logits=True)
        with np.load(Path(place) / "program/golden.npz") as golden:
            return (Path(place) / "program/inference.onnx").read_bytes(), dict(golden)


def write(folder: Path, name: str, program: bytes, answer: np.ndarray) -> None:
    packed = lzma.compress(program, filters=XZ)
    if lzma.decompress(packed) != program:
        raise UserError(f"{name}: the packed program does not unpack to the same bytes.")
    (folder / f"{name}.onnx.xz").write_bytes(packed)
    np.savez(folder / f"{name}.golden.npz", output=answer)
    print(f"{name}: {len(program) / 1e6:.1f} MB, packed {len(packed) / 1e6:.2f} MB", flush=True)


def pack(path: Path, **arrays: np.ndarray) -> None:
    """An npz file under xz; one that is there must hold the same."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    if path.exists() and lzma.decompress(path.read_bytes()) != buffer.getvalue():
        raise UserError(f"{path} holds other images; take an empty folder.")
    path.write_bytes(lzma.compress(buffer.getvalue(), filters=XZ))


def cifar_images(data: str | None) -> dict[str, np.ndarray]:
    """`input` float32 [n, 3, 32, 32] and `labels` of test images; random input alone without `data`."""
    if data is None:
        return {"input": np.random.default_rng(0).standard_normal((IMAGES, 3, 32, 32), dtype=np.float32)}
    split = build_datasets(make_config({"data": {"name": "cifar10", "root": data}})).val
    prepared = Preprocess(32, mean=CIFAR["cifar10"].mean, std=CIFAR["cifar10"].std)
    return {
        "input": np.stack([prepared(split.image(i)) for i in range(IMAGES)]),
        "labels": np.array([split.label(i) for i in range(IMAGES)]),
    }


def operator_references() -> dict[str, np.ndarray]:
    """Arrays `OPERATOR/in/NAME`, `OPERATOR/out`, `OPERATOR/grad/NAME`, and `shared/in/NAME` for all operators.

    The gradient is that of the sum of the output times `shared/in/cotangent`; 2 images, 10 x 10 tokens, 2 heads of 16.
    """
    ops.enable(False)
    paddle.seed(1)
    rng = np.random.default_rng(1)
    shared = {name: rng.standard_normal((2, 100, 32), dtype=np.float32) for name in ("q", "k", "v", "cotangent")}
    found = {f"shared/in/{name}": array for name, array in shared.items()}
    for name, (operator, shapes) in OPERATORS.items():
        own = {key: rng.standard_normal(shape, dtype=np.float32) for key, shape in shapes.items()}
        own |= {key: np.exp(0.3 * own[key]) for key in ("factor", "power") if key in own}  # positive
        own |= {key: 0.1 * own[key] for key in ("w1", "w2") if key in own}
        leaves = {key: paddle.to_tensor(value, stop_gradient=False) for key, value in (shared | own).items()}
        cotangent = leaves.pop("cotangent").detach()
        y = operator(leaves)
        gradients = paddle.grad((y * cotangent).sum(), list(leaves.values()), allow_unused=True)
        found[f"{name}/out"] = y.numpy()
        found |= {f"{name}/in/{key}": leaf.numpy() for key, leaf in leaves.items() if key not in shared}
        pairs = zip(leaves, gradients, strict=True)
        found |= {f"{name}/grad/{key}": grad.numpy() for key, grad in pairs if grad is not None}
    return found


def packed(t: Tensors) -> paddle.Tensor:
    return paddle.concat([t["q"], t["k"], t["v"]], axis=-1)


def softmax(t: Tensors) -> paddle.Tensor:
    return ops.softmax_attention(packed(t), SPEC.num_heads, 0.25, bias=t.get("bias"))


def linear(kernel: str) -> Callable[[Tensors], paddle.Tensor]:
    layer = build_attention("linear", SPEC, {"kernel": kernel})
    return lambda t: layer.attend((*layer.features(t["q"], t["k"]), t["v"]), Context(SPEC.grid))


def inline(t: Tensors) -> paddle.Tensor:
    return ops.inline_attention(packed(t), None, SPEC.num_heads, SPEC.grid, 0.25)


def local(t: Tensors) -> paddle.Tensor:
    return ops.dynamic_conv3x3(t["v"], t["kernel"], SPEC.grid)


def polaformer(t: Tensors) -> paddle.Tensor:
    features = (ops.signed_power(t["q"], None, t["factor"], t["power"], SPEC.num_heads, TINY),)
    features += (ops.signed_power(t["k"], t["table"], t["factor"], t["power"], SPEC.num_heads, TINY),)
    return ops.linear_attention(*features, t["v"], SPEC.num_heads, EPS, polar=True)


def mala(t: Tensors) -> paddle.Tensor:
    layer = build_attention("mala", SPEC)
    return layer.attend((F.elu(t["q"]) + 1.0, F.elu(t["k"]) + 1.0, t["v"], None), Context(SPEC.grid))


def rala(t: Tensors) -> paddle.Tensor:
    layer, q, k = build_attention("rala", SPEC), F.elu(t["q"]) + 1.0, F.elu(t["k"]) + 1.0
    return layer.attend((q, layer.weighted(q, k), t["v"], None), Context(SPEC.grid))


def soft(t: Tensors) -> paddle.Tensor:
    """The parameters of the layer join the tensors."""
    layer = build_attention("soft", SPEC)
    t |= {"landmark": layer.landmark.weight, "gain": layer.landmark_norm.weight, "shift": layer.landmark_norm.bias}
    return layer.attend((t["q"] * 16**-0.25, t["v"]), Context(SPEC.grid))


def agent(t: Tensors) -> paddle.Tensor:
    agents = grid_means(t["q"], SPEC.grid, (7, 7), 0)
    keys = paddle.concat([t["k"], t["v"]], axis=-1)
    u = ops.softmax_attention(agents, SPEC.num_heads, 0.25, keys, t["on_keys"])
    return ops.softmax_attention(t["q"], SPEC.num_heads, 0.25, paddle.concat([agents, u], axis=-1), t["on_agents"])


def vittt(t: Tensors) -> paddle.Tensor:
    return ops.gated_unit(t["q"], t["k"], t["v"], t["w1"], t["w2"], SCALE / 100, TINY)


# the operator, and the shapes of the inputs it has besides q, k and v
OPERATORS: dict[str, tuple[Callable[[Tensors], paddle.Tensor], dict[str, tuple[int, ...]]]] = {
    "softmax": (softmax, {}),
    "window": (softmax, {"bias": (2, 100, 100)}),
    "linear_elu": (linear("elu"), {}),
    "linear_relu": (linear("relu"), {}),
    "inline": (inline, {}),
    "local": (local, {"kernel": (2, 32, 9)}),
    "polaformer": (polaformer, {"factor": (1, 1, 32), "power": (1, 2, 1, 16), "table": (1, 100, 32)}),
    "mala": (mala, {}),
    "rala": (rala, {}),
    "soft": (soft, {}),
    "agent": (agent, {"on_keys": (2, 49, 100), "on_agents": (2, 100, 49)}),
    "vittt": (vittt, {"w1": (1, 2, 16, 16), "w2": (1, 2, 16, 16)}),
}
