"""On a CPU the compiled kernels are what runs, and stay so."""

import paddle
import pytest

import ppattn
from ppattn.ops import status


@pytest.mark.parametrize(
    ("attention", "used"),
    [("softmax", {"softmax_attention"}), ("inline", {"inline_attention"}), ("linear", {"linear_attention"}),
     ("polaformer", {"linear_attention", "signed_power"}), ("focused", {"linear_attention", "focused_power"}),
     ("soft", {"softmax_attention", "newton"})],  # the Gaussian kernel is one of its modes
)  # fmt: skip
def test_a_training_step_runs_the_compiled_kernels(attention, used, monkeypatch):
    names, run = set(), paddle._C_ops._run_custom_op
    monkeypatch.setattr(paddle._C_ops, "_run_custom_op", lambda name, *more: names.add(name) or run(name, *more))
    assert "on the CPU compiled" in status()
    ppattn.create_model("deit_nano", attention=attention, depth=1)(paddle.randn([1, 3, 32, 32])).sum().backward()
    assert used | {"linear", "layer_norm"} <= {name.removeprefix("ppattn_") for name in names}
