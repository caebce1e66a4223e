"""Answers of Paddle's plain operators for gpu_forms.py: python -m scripts.studies.gpu_inputs FOLDER.

FOLDER/operators.npz has the arrays `OPERATOR/in/NAME`, `OPERATOR/out`, `OPERATOR/grad/NAME`, and `shared/in/NAME` for
all operators. The gradient is that of the sum of the output times `shared/in/cotangent`; 2 images, 10 x 10 tokens, 2
heads of 16.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import paddle
import paddle.nn.functional as F

from ppattn import ops
from ppattn.attention import AttentionSpec, Context, build_attention
from ppattn.attention.base import Parts, grid_means
from ppattn.attention.linear import EPS
from ppattn.attention.polaformer import TINY
from ppattn.attention.vittt import SCALE

HEADS, GRID = 2, (10, 10)
Tensors = dict[str, paddle.Tensor]


def layer(name: str):
    return build_attention(name, AttentionSpec(32, HEADS, GRID))


def packed(*x: paddle.Tensor) -> paddle.Tensor:
    return paddle.concat([*x], axis=-1)


def softmax(t: Tensors) -> paddle.Tensor:
    return ops.softmax_attention(packed(t["q"], t["k"], t["v"]), HEADS, 0.25, bias=t.get("bias"))


def polaformer(t: Tensors) -> paddle.Tensor:
    q = ops.signed_power(t["q"], None, t["factor"], t["power"], HEADS, TINY)
    k = ops.signed_power(t["k"], t["table"], t["factor"], t["power"], HEADS, TINY)
    return ops.linear_attention(q, k, t["v"], HEADS, EPS, polar=True)


def features(t: Tensors) -> list[paddle.Tensor]:
    return [F.elu(t[x]) + 1.0 for x in "qk"]


def rala(t: Tensors) -> paddle.Tensor:
    own, (q, k) = layer("rala"), features(t)
    return own.attend(Parts(q, own.weighted(q, k), t["v"]), Context(GRID))


def soft(t: Tensors) -> paddle.Tensor:
    """The parameters of the layer join the tensors."""
    own = layer("soft")
    t |= {"landmark": own.landmark.weight, "gain": own.landmark_norm.weight, "shift": own.landmark_norm.bias}
    q = t["q"] * 16**-0.25
    return own.attend(Parts(q, q, t["v"]), Context(GRID))


def agent(t: Tensors) -> paddle.Tensor:
    agents = grid_means(t["q"], GRID, (7, 7), 0)
    u = ops.softmax_attention(agents, HEADS, 0.25, packed(t["k"], t["v"]), t["on_keys"])
    return ops.softmax_attention(t["q"], HEADS, 0.25, packed(agents, u), t["on_agents"])


# the operator, and the shapes of the inputs it has besides q, k and v
OPERATORS: dict[str, tuple[Callable[[Tensors], paddle.Tensor], dict[str, tuple[int, ...]]]] = {
    "softmax": (softmax, {}),
    "window": (softmax, {"bias": (2, 100, 100)}),
    "linear_elu": (lambda t: ops.linear_attention(*features(t), t["v"], HEADS, EPS), {}),
    "inline": (lambda t: ops.inline_attention(packed(t["q"], t["k"], t["v"]), None, HEADS, GRID, 0.25), {}),
    "local": (lambda t: ops.dynamic_conv3x3(t["v"], t["kernel"], GRID), {"kernel": (2, 32, 9)}),
    "polaformer": (polaformer, {"factor": (1, 1, 32), "power": (1, 2, 1, 16), "table": (1, 100, 32)}),
    "mala": (lambda t: layer("mala").attend(Parts(*features(t), t["v"]), Context(GRID)), {}),
    "rala": (rala, {}),
    "soft": (soft, {}),
    "agent": (agent, {"on_keys": (2, 49, 100), "on_agents": (2, 100, 49)}),
    "vittt": (lambda t: ops.gated_unit(*t.values(), SCALE / 100, TINY), {"w1": (1, 2, 16, 16), "w2": (1, 2, 16, 16)}),
}


def operator_references() -> dict[str, np.ndarray]:
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
        gradients = paddle.grad((y * cotangent).sum(), [*leaves.values()], allow_unused=True)
        found[f"{name}/out"] = y.numpy()
        for (key, leaf), gradient in zip(leaves.items(), gradients, strict=True):
            found |= {f"{name}/in/{key}": leaf.numpy()} if key not in shared else {}
            found |= {f"{name}/grad/{key}": gradient.numpy()} if gradient is not None else {}
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    np.savez_compressed(Path(sys.argv[1], "operators.npz"), **operator_references())
