"""DINOv3: random weights under the names of Meta, transformers and timm give their outputs and gradients."""

import numpy as np
import paddle
import pytest

import ppattn
from ppattn import weights
from ppattn.engine.loss import soft_cross_entropy
from ppattn.errors import UserError
from tests.helpers import golden_data as golden

pytestmark = pytest.mark.slow

CASES = [name for name in golden.CASES if "dinov3" in name]
SMALL = {"img_size": (20, 36), "patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 3, "layer_scale": 1.0}


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_the_library(name, tmp_path):
    case = golden.CASES[name]
    model = ppattn.create_model(case["model"], **case["arguments"])
    np.savez(tmp_path / "file.npz", **golden.arrays(case))
    report, expected = weights.convert(model, tmp_path / "file.npz"), golden.reference(case)
    library = {"meta": "the authors"}.get(case["names"], case["names"])
    assert f"a DINOv3 of {library} with" in report.source and not report.missing and not report.unused
    model.eval()
    x = paddle.to_tensor(golden.image(case["input"]["seed"], case["input"]["shape"]), stop_gradient=False)
    if isinstance(case["grad_seed"], int):
        found = {"logits": model(x)}
    else:
        found = {"cls": model(x), "patches": model.forward_features(x)[-1].flatten(2).transpose([0, 2, 1])}
    seeds = {next(iter(found)): case["grad_seed"]} if len(found) == 1 else case["grad_seed"]
    sum((y * paddle.to_tensor(golden.image(seeds[key], y.shape))).sum() for key, y in found.items()).backward()
    for key, y in (found | {"grad_x": x.grad}).items():
        assert np.abs(y.numpy() - expected[key]).max() <= case["tolerance"][key], key
    if not case.get("biases_without_counterpart"):
        ours = sum(float((p.grad.astype("float64") ** 2).sum()) for p in model.parameters() if p.grad is not None)
        theirs = sum(norm**2 for norm in case["param_grad_l2"].values() if norm is not None)
        assert ours == pytest.approx(theirs, rel=4e-4)


@pytest.mark.parametrize("attention", ["softmax", "window", "inline"])
def test_the_positions_serve_any_size(attention):
    """A model built for one size sees another as one that was built for it."""
    shape = SMALL | {"attention": attention}
    built, other = (ppattn.create_model("dinov3_small", **shape | more) for more in ({}, {"img_size": 24}))
    other.set_state_dict(built.state_dict())
    images = paddle.randn([2, 3, 24, 24])
    for model in (built, other):
        model.eval()
    assert np.array_equal(built(images).numpy(), other(images).numpy())
    assert built.blocks[0].attn.rotates and built.remarks() == []
    assert np.abs(built(images.flip(3)).numpy() - built(images).numpy()).max() > 1e-4  # other places, other features


def test_the_key_bias_stays_zero_and_other_attentions_say_what_they_ignore():
    model = ppattn.create_model("dinov3_small_plus", attention=["softmax", "polaformer"], **SMALL, num_classes=5)
    assert model.remarks() == ["the rotary positions have no effect in PolaFormerAttention"]
    assert ppattn.create_model("dinov3_small", attention="linformer", **SMALL).remarks()
    soft_cross_entropy(model(paddle.randn([2, 3, 20, 36])), paddle.eye(5)[:2]).backward()
    keys = model.blocks[0].attn.qkv.bias.grad[48:96]
    assert not keys.numpy().any() and model.blocks[0].mlp.w2.weight.grad.abs().max() > 0
    model.blocks[0].attn.qkv.register_forward_post_hook(lambda *_: None)  # so that the layer itself is called
    soft_cross_entropy(model(paddle.randn([2, 3, 20, 36])), paddle.eye(5)[:2]).backward()
    gradient = model.blocks[0].attn.qkv.bias.grad.abs().numpy()
    assert gradient[48:96].max() < 1e-6 * gradient.max()
    with pytest.raises(UserError, match="swiglu needs layer_scale"):
        ppattn.create_model("deit_tiny", swiglu=True)
    with pytest.raises(UserError, match="multiple of 4 channels per head, not 6"):
        ppattn.create_model("dinov3_small", **SMALL | {"num_heads": 8})(paddle.zeros([1, 3, 8, 8]))


@pytest.mark.parametrize("dynamic", [False, True])
def test_exports(dynamic, tmp_path):
    model = ppattn.create_model("dinov3_small", **SMALL)
    ppattn.export(model, tmp_path, format="both", features=True, dynamic_size=dynamic)
    images = np.random.default_rng(0).standard_normal((2, 3, *((28, 20) if dynamic else (20, 36)))).astype("float32")
    model.eval()
    expected = model(paddle.to_tensor(images)).numpy()
    for engine in ("paddle", "onnxruntime", "openvino"):
        assert np.abs(ppattn.Predictor(tmp_path, engine=engine).run(images) - expected).max() < 1e-5, engine
