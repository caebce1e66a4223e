"""The code in the docs runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_dense_prediction_example_trains_one_step():
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "dense_prediction.md").read_text(), re.S)
    scope: dict = {}
    exec(code, scope)
    assert scope["model"](scope["images"]).shape == [2, 19, 96, 128]
    grads = {name: p.grad for name, p in scope["model"].named_parameters()}
    reached = [name for name, grad in grads.items() if grad is not None and float(grad.abs().max()) > 0]
    assert any(name.startswith("backbone.stages.0.") for name in reached)
    assert any(name.startswith("backbone.stages.3.") for name in reached)
