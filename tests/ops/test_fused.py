"""Softmax attention by Paddle's fused function, plain mathematics on a CPU, and the switch of kernels."""

import subprocess
import sys
from unittest.mock import Mock

import numpy as np
import paddle
import pytest

import ppattn
from ppattn import ops
from ppattn.errors import UserError
from ppattn.files.cache import cache_folder, locked
from ppattn.ops import attention
from tests.helpers.half import logits_and_gradients

FUSED = ("softmax", "agent", "linformer", "nystromformer")  # less needs its score maps: it stays plain


@pytest.fixture
def calls(monkeypatch):
    """The calls of Paddle's function."""
    fused = Mock(wraps=attention.FUSED)
    monkeypatch.setattr(attention, "FUSED", fused)
    return fused.call_args_list


def gradients(kernels: str, backbone: str, name: str, size: int) -> dict[str, np.ndarray]:
    """Logits and all gradients of a model whose parameters are away from their special initial values."""
    ops.enable(kernels)
    paddle.seed(3)
    model = ppattn.create_model(backbone, attention=name, img_size=size, num_classes=5)
    for p in model.parameters():
        p.set_value(p if p.stop_gradient else p + 0.05 * paddle.randn(p.shape))
    model.eval()
    logits, found = logits_and_gradients(model, paddle.randn([2, 3, size, size]))
    return found | {"logits": logits}


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["deit_nano", "pvt_nano", "swin_nano"])
@pytest.mark.parametrize("name", FUSED)
def test_fused_equals_plain_with_all_gradients(name, backbone, calls):
    size = 40  # 25 tokens in swin's windows of 5, 100 on the maps of deit: no multiple of 8 keys
    plain = gradients("plain", backbone, name, size)
    assert not calls
    fused = gradients("fused", backbone, name, size)
    assert calls
    for parameter, wanted in plain.items():
        error = np.linalg.norm(fused[parameter] - wanted)
        assert error <= 1e-5 * np.linalg.norm(wanted) + 1e-7, f"{parameter} {error:.1e}"
    tables = [grad for parameter, grad in fused.items() if parameter.endswith("bias.table")]
    assert len(tables) == (5 if (backbone, name) == ("swin_nano", "softmax") else 0)
    assert all(np.abs(grad).max() > 0 for grad in tables)


def test_a_mask_never_goes_to_the_kernel_without_its_gradient(calls):
    """Flash takes no factor: Paddle gives it only calls whose `scale` is None."""
    gradients("fused", "swin_nano", "softmax", 40)
    masked = [call for call in calls if call.kwargs.get("attn_mask") is not None]
    assert len(masked) == len(calls) and all(call.kwargs["scale"] is not None for call in masked)
    assert all(call.kwargs["attn_mask"].shape[-1] % 8 == 0 for call in masked)
    assert all(call.kwargs["attn_mask"].shape[0] == len(call.args[0]) for call in masked)  # a GPU repeats no heads
    calls.clear()
    gradients("fused", "deit_nano", "softmax", 40)
    assert calls and all(call.kwargs.get("attn_mask") is None and call.kwargs.get("scale") is None for call in calls)


def test_dropout_of_weights_goes_along(calls):
    ops.enable("fused")
    model = ppattn.create_model("deit_nano", attn_drop_rate=0.25)
    model(paddle.randn([1, 3, 32, 32]))
    model.eval()
    model(paddle.randn([1, 3, 32, 32]))
    depth = len(calls) // 2
    assert [call.kwargs["dropout_p"] for call in calls] == [0.25] * depth + [0.0] * depth
    assert all(call.kwargs.get("training", True) for call in calls)  # else there is no gradient on a GPU


def test_a_factor_other_than_that_of_paddle_is_applied():
    qkv = paddle.to_tensor(np.random.default_rng(0).standard_normal((2, 7, 24)).astype("float32"))
    ops.enable("plain")
    wanted = ops.softmax_attention(qkv, 2, 0.7)
    ops.enable("fused")
    np.testing.assert_allclose(ops.softmax_attention(qkv, 2, 0.7).numpy(), wanted.numpy(), rtol=1e-5, atol=1e-6)


def test_programs_and_too_many_windows_have_the_plain_form(calls, tmp_path, monkeypatch):
    ops.enable("fused")
    layer = ppattn.attention_layer("softmax", dim=8, num_heads=2, grid=(3, 4))
    layer.eval()
    program = paddle.jit.to_static(layer, [paddle.static.InputSpec([None, 12, 8], "float32")], full_graph=True)
    paddle.jit.save(program, str(tmp_path / "layer"))
    monkeypatch.setattr(ops.dispatch, "CUDA_GRID", 2)
    ppattn.attention_layer("softmax", dim=8, num_heads=2, grid=(3, 4))(paddle.randn([2, 12, 8]))
    assert not calls and "flash" not in (tmp_path / "layer.json").read_text()


def test_where_this_paddle_has_no_fused_function_the_plain_form_runs(monkeypatch):
    monkeypatch.setattr(ops.dispatch, "FUSED", None)
    ops.enable("fused")
    assert ppattn.create_model("deit_nano")(paddle.randn([1, 3, 32, 32])).shape == [1, 1000]


@pytest.mark.parametrize(
    ("variable", "argument", "words"),
    [("plain", None, "on the CPU plain (PPATTN_KERNELS is 'plain'); on other devices plain"),
     ("0", None, "on the CPU plain (PPATTN_KERNELS is 'plain'); on other devices plain"),
     ("plain", "fused", "softmax attention by Paddle's fused function"), ("", "plain", "(kernels is 'plain')")],
)  # fmt: skip
def test_the_switch_and_its_line(monkeypatch, variable, argument, words):
    monkeypatch.setenv("PPATTN_KERNELS", variable)
    lines = ppattn.setup(device="cpu", kernels=argument)
    assert words in lines[-1] and lines[-1] == ops.status()


def test_a_misspelt_kernel_is_told(monkeypatch):
    with pytest.raises(UserError, match="kernels"):
        ppattn.setup(kernels="fussed")
    monkeypatch.setenv("PPATTN_KERNELS", "fussed")
    with pytest.raises(UserError, match="PPATTN_KERNELS 'fussed'. Did you mean 'fused'"):
        ppattn.setup()


@pytest.mark.slow
def test_compiled_kernels_load_while_a_download_holds_the_cache():
    ppattn.setup(device="cpu")  # they are compiled
    with locked(cache_folder()):
        call = [sys.executable, "-c", "import ppattn; ppattn.setup('cpu')"]
        assert "waiting" not in subprocess.run(call, capture_output=True, text=True, timeout=300, check=True).stderr
