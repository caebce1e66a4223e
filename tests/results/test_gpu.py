"""The GPU study, as far as it runs without PyTorch: its references, and where lines of times cross."""

import numpy as np

from scripts.studies import gpu_inputs
from scripts.tables.gpu import crossing


def test_references_are_the_plain_operators():
    found = gpu_inputs.operator_references()
    for name in gpu_inputs.OPERATORS:
        assert found[f"{name}/out"].shape == (2, 100, 32) and np.isfinite(found[f"{name}/out"]).all()
    q, k, v = (found[f"shared/in/{name}"].reshape(2, 100, 2, 16).transpose(0, 2, 1, 3).astype(float) for name in "qkv")
    weights = np.exp(0.25 * q @ k.swapaxes(2, 3))
    expected = weights @ v / weights.sum(axis=-1, keepdims=True)
    assert np.abs(found["softmax/out"] - expected.transpose(0, 2, 1, 3).reshape(2, 100, 32)).max() < 1e-5
    gradients = {key for key in found if key.startswith("window/grad")}
    assert gradients == {f"window/grad/{x}" for x in ("q", "k", "v", "bias")}


def test_where_a_form_becomes_faster():
    def rows(*times):
        return {n: {"both_ms": f"{time}"} for n, time in zip((100, 400, 1600), times, strict=True)}

    fused = rows(1, 4, 16)
    assert crossing(rows(8, 8, 8), fused, "both_ms") == "800"
    assert crossing(rows(0.5, 0.5, 0.5), fused, "both_ms") == "< 100"
    assert crossing(rows(99, 99, 99), fused, "both_ms") == "> 1,600"
