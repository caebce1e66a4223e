"""scripts/studies/gpu_forms.py, as far as it runs without PyTorch: its inputs and its summary."""

from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from scripts.studies import gpu_inputs, gpu_summary


def test_two_values_keep_the_size_of_weights_and_leave_the_rest():
    paddle.seed(1)
    weight, bias = paddle.normal(0.0, 0.03, [300, 40]), paddle.normal(shape=[7])
    positive, constant = paddle.rand([4, 4]) + 0.1, paddle.zeros([3, 3])
    tensors = (weight, bias, positive, constant)
    before = [tensor.numpy().copy() for tensor in tensors]
    gpu_inputs.two_values(SimpleNamespace(parameters=lambda: tensors))
    (small, large), counts = np.unique(weight.numpy(), return_counts=True)
    assert small == -large == pytest.approx(-0.03, rel=0.02) and counts.min() > 0.45 * weight.size
    for tensor, values in zip(tensors[1:], before[1:], strict=True):
        assert np.array_equal(tensor.numpy(), values)


def test_references_are_the_plain_operators():
    found = gpu_inputs.operator_references()
    for name in gpu_inputs.OPERATORS:
        assert found[f"{name}/out"].shape == (2, 100, 32) and np.isfinite(found[f"{name}/out"]).all()
    q, k, v = (found[f"shared/in/{name}"].reshape(2, 100, 2, 16).transpose(0, 2, 1, 3).astype(float) for name in "qkv")
    weights = np.exp(0.25 * q @ k.swapaxes(2, 3))
    expected = weights @ v / weights.sum(axis=-1, keepdims=True)
    assert np.abs(found["softmax/out"] - expected.transpose(0, 2, 1, 3).reshape(2, 100, 32)).max() < 1e-5
    assert {key for key in found if key.startswith("window/grad")} == {
        f"window/grad/{x}" for x in ("q", "k", "v", "bias")
    }


def row(form, tokens, time, operator="linear_elu", error=1e-3):
    distances = dict.fromkeys(("out_fro", "grad_fro", "large_out_fro"), error)
    facts = {"operator": operator, "form": form, "dtype": "bfloat16", "tokens": tokens, "batch": 6400 // tokens}
    return facts | distances | {"finite": True, "large_finite": True, "forward_ms": time, "both_ms": 3 * time}


def test_summary_finds_where_lines_cross_and_the_fastest_form_that_is_right():
    rows = [row("sdpa", n, n / 100, "softmax") for n in (100, 400, 1600)]
    rows += [row("mixed", n, 8.0) for n in (100, 400, 1600)] + [
        row("naive", n, 1.0, error=0.5) for n in (100, 400, 1600)
    ]
    summary = gpu_summary.summarise(rows)
    crossing = {found["form"]: found["both_ms"] for found in summary["crossing"]}
    assert crossing == {"mixed": "800", "naive": "< 100"}
    best = {(found["operator"], found["tokens"]): found["both_form"] for found in summary["best"]}
    assert best["linear_elu", 400] == "mixed" and best["softmax", 400] == "sdpa"
    slow = gpu_summary.summarise([*rows[:3], row("mixed", 100, 99.0), row("mixed", 1600, 99.0)])
    assert slow["crossing"][0]["forward_ms"] == "> 1600"
