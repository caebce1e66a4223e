"""`ppattn.attention_layer`: an attention without a backbone."""

import importlib
from pathlib import Path

import numpy as np
import paddle
import pytest

import ppattn
from ppattn.attention import ATTENTIONS, AttentionSpec
from ppattn.errors import UserError


@pytest.mark.parametrize("name", ATTENTIONS.list())
def test_layer_is_the_registered_attention(name):
    layer = ppattn.attention_layer(name, dim=12, num_heads=3, grid=(5, 7), num_prefix=1)
    attn = layer.block.attn
    assert type(attn) is ATTENTIONS.get(name) and attn.spec == AttentionSpec(12, 3, (5, 7), num_prefix=1)
    layer.eval()
    x = paddle.randn([2, 36, 12])
    y = layer(x)
    assert y.shape == x.shape and np.array_equal(y.numpy(), attn(x, (5, 7))[0].numpy())
    x = paddle.randn([2, 1 + 4 * 9, 12])
    try:
        y = layer(x, (4, 9))
    except UserError as error:
        assert name in ("less", "linformer") and "built for a grid of 5 x 7" in str(error)
    else:
        assert np.array_equal(y.numpy(), attn(x, (4, 9))[0].numpy())


@pytest.mark.parametrize("name", [name for name in ATTENTIONS.list() if name != "less"])
def test_parameters_that_grow_with_the_grid_are_named(name):
    layers = [ppattn.attention_layer(name, dim=12, num_heads=3, grid=side) for side in (8, 32)]
    small, large = (sum(p.size for p in layer.parameters()) for layer in layers)
    named = "grow with the grid" in importlib.import_module(type(layers[0].block.attn).__module__).__doc__
    assert named == (large > small)


def test_less_alone_is_softmax_attention():
    less, softmax = (ppattn.attention_layer(name, dim=12, num_heads=3, grid=(5, 7)) for name in ("less", "softmax"))
    softmax.set_state_dict(less.state_dict())
    x = paddle.randn([2, 35, 12])
    assert np.abs(less(x).numpy() - softmax(x).numpy()).max() < 1e-6
    assert np.abs(less(x[:, :12], (3, 4)).numpy() - softmax(x[:, :12], (3, 4)).numpy()).max() < 1e-6


def test_layer_takes_official_weights_and_options():
    layer = ppattn.attention_layer("inline", dim=8, num_heads=2, grid=(3, 5), qkv_bias=False, kernel="relu")
    rng, shapes = np.random.default_rng(0), {"qkv.weight": (24, 8), "proj.weight": (8, 8), "proj.bias": (8,)}
    shapes |= {"residual.0.weight": (8, 4, 1), "residual.0.bias": (8,)}
    shapes |= {"residual.2.weight": (72, 4, 1), "residual.2.bias": (72,)}
    arrays = {f"block.attn.{name}": rng.standard_normal(shape).astype("float32") for name, shape in shapes.items()}
    assert ppattn.load_official(layer, arrays).loaded == 7
    assert np.array_equal(layer.block.attn.qkv.weight.numpy(), arrays["block.attn.qkv.weight"].T)
    assert layer.block.attn.kernel == "relu"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"name": "inlin"}, "'inline'"), ({"kernell": "relu"}, "'kernel'"), ({"kernel": "tanh"}, "leakyrelu"),
     ({"num_heads": 5}, "does not divide"), ({"grid": (0, 3)}, "grid"), ({"num_prefix": -1}, "num_prefix = -1")],
)  # fmt: skip
def test_wrong_arguments_get_one_sentence(arguments, words):
    with pytest.raises(UserError, match=words):
        ppattn.attention_layer(**{"name": "inline", "dim": 12, "num_heads": 3} | arguments)


@pytest.mark.parametrize(
    ("shape", "hw"), [((2, 34, 12), None), ((2, 35, 12), (4, 9)), ((2, 35, 11), None), ((35, 12), None)]
)
def test_tokens_that_do_not_fit_the_grid_are_rejected(shape, hw):
    layer = ppattn.attention_layer("linear", dim=12, num_heads=3, grid=(5, 7))
    with pytest.raises(UserError, match=r"takes \[B, 3[56], 12\]"):
        layer(paddle.zeros(shape), hw)


@pytest.mark.slow
def test_plain_vit_learns(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "examples")
    assert importlib.import_module("plain_vit").train("inline", epochs=3, lr=6e-3) > 0.5
