"""Parity with the official implementations: the definition of 'implemented'.

Modules and shrunken models in float64 (outputs, input gradients, norm of every parameter's gradient), shrunken
models in float32 as they train, released sizes in float32. The tolerances come with the data.
"""

import math

import numpy as np
import paddle
import pytest
from paddle import nn

import ppattn
from ppattn.attention import AttentionSpec, Context, build_attention
from ppattn.backbones.swin import RelativePositionBias
from ppattn.weights import from_official, load_official
from tests.helpers import golden_data as golden

pytestmark = pytest.mark.slow

MODULES = [name for name in golden.CASES if name.startswith("mod_")]
SHRUNKEN = [name for name in golden.CASES if name.startswith("shrunk_") and "dinov3" not in name]


def test_generator_reproduces_its_own_figures():
    expected = golden.INDEX["fill_selftest"]
    for call, found in {
        "fill('head.weight', (4, 3))": golden.weight("head.weight", (4, 3)),
        "fill('head.weight', (4, 3), 7)": golden.weight("head.weight", (4, 3), 7),
        "image(1, (1, 1, 4, 4))": golden.image(1, (1, 1, 4, 4)),
    }.items():
        assert np.allclose(found.ravel(), expected[call], atol=1e-7)


class Module(nn.Layer):
    """An attention module where backbones keep it: `block.attn`, with a position bias beside it if it has one."""

    def __init__(self, case):
        super().__init__()
        self.hw = tuple(case["grid"])
        self.block, spec = nn.Layer(), AttentionSpec(grid=self.hw, **case["spec"])
        self.block.attn = build_attention(case["attention"], spec, case["options"])
        self.block.bias = RelativePositionBias(self.hw[0], spec.num_heads) if case["family"] == "swin_softmax" else None

    def forward(self, x):
        return self.block.attn(x, Context(self.hw, self.block.bias and self.block.bias()))[0]


def in_module(case, arrays):
    """Arrays of a module under the names that they have in `Module`."""
    return {f"block.attn.{name}": array for name, array in arrays.items()} if case["kind"] == "module" else arrays


def build(case):
    """The module or model with the weights of the case, in eval mode."""
    model = Module(case) if case["kind"] == "module" else ppattn.create_model(case["model"], **case["arguments"])
    load_official(model, in_module(case, golden.arrays(case)))
    model.eval()
    idle = case.get("params_without_gradient", [])  # the official model has them and never uses them
    idle = sum(math.prod(shape) for name, shape, _ in case["state_dict"] if name in idle)
    assert sum(p.size for p in model.parameters() if not p.stop_gradient) == case["trainable_params"] - idle
    return model


def run(case, model, dtype):
    """Output, input gradient and squared norms of the parameter gradients."""
    x = as_given(case, golden.image(case["input"]["seed"], case["input"]["shape"]))
    x = paddle.to_tensor(x.astype(dtype), stop_gradient=False)
    y = model(x)
    if case.get("layout") == "NCHW":
        probe = as_given(case, golden.image(case["grad_seed"], case["input"]["shape"]))
    else:
        probe = golden.image(case["grad_seed"], y.shape)
    (y * paddle.to_tensor(probe.astype(dtype))).sum().backward()
    sums = {n: float((p.grad.astype("float64") ** 2).sum()) for n, p in model.named_parameters() if p.grad is not None}
    return {"y": y.numpy(), "grad_x": x.grad.numpy()}, sums


def as_given(case, array):
    """A map [B, C, H, W] of a module as tokens; an image of the MHLA model with the empty ring that the authors add."""
    if case.get("layout") == "NCHW" and array.ndim == 4:
        return array.reshape(*array.shape[:2], -1).transpose(0, 2, 1)
    missing = case["kwargs"].get("img_size", 0) - array.shape[-1] if case["kwargs"].get("padding") else 0
    if array.ndim == 4 and missing > 0:
        return np.pad(array, ((0, 0), (0, 0), *2 * ((missing // 2, missing // 2),)))
    return array


def misses(case, model, dtype, tolerances) -> list[str]:
    """What lies outside the tolerances, in words; empty for parity."""
    found, sums = run(case, model, dtype)
    found["logits"] = found["y"]
    expected, out = {name: as_given(case, array) for name, array in golden.reference(case).items()}, []
    for name in tolerances:
        inside = expected[name] != 0 if case["kwargs"].get("padding") else ...
        error = np.abs(found[name] - expected[name])[inside].max()
        if not error <= tolerances[name]:
            out.append(f"{name}: {error:.2e} > {tolerances[name]:.2e}")
    norms = case["param_grad_l2"]
    # A constant array whose squares add up to the reference: it follows its parameter through fusing and transposing.
    shapes = [(name, shape) for name, shape, kind in case["state_dict"] if kind.startswith("param")]
    constant = {name: np.full(shape, (norms[name] or 0.0) / np.sqrt(np.prod(shape))) for name, shape in shapes}
    stored = {name[5:]: array for name, array in expected.items() if name.startswith("grad/")}
    own = {name: p.grad for name, p in model.named_parameters()}
    for name, array in (from_official(model, in_module(case, stored)) if stored else {}).items():
        if np.linalg.norm(own[name].numpy() - array) > 1e-5 * np.linalg.norm(array) + 1e-6:
            out.append(f"gradient of {name}")
    largest = max(norm for norm in norms.values() if norm is not None)
    for name, array in from_official(model, in_module(case, constant)).items():
        reference, norm = np.sqrt((array**2).sum()), np.sqrt(sums.get(name, 0.0))
        part = 1e-5 if dtype == "float64" else 1e-3
        if not abs(norm - reference) <= part * reference + 1e-5 * largest:
            out.append(f"gradient of {name}: {norm:.4e} instead of {reference:.4e}")
    return out


@pytest.mark.parametrize("name", MODULES + SHRUNKEN)
def test_modules_and_shrunken_models_equal_official_in_float64(name, float64):
    case = golden.CASES[name]
    assert misses(case, build(case), "float64", case["tolerance_float64"]) == []


@pytest.mark.parametrize("name", SHRUNKEN)
def test_shrunken_models_equal_official_in_float32(name):
    case = golden.CASES[name]
    assert misses(case, build(case), "float32", case["tolerance"]) == []


@pytest.mark.parametrize("name", [name for name in golden.CASES if name.startswith("full_")])
def test_released_models_equal_official(name):
    case = golden.CASES[name]
    with paddle.no_grad():
        y = build(case)(paddle.to_tensor(golden.image(case["input"]["seed"], case["input"]["shape"])))
    assert np.abs(y.numpy() - golden.reference(case)["logits"]).max() <= case["tolerance"]["logits"]
