"""Half precision, emulated: logits near those of float32, gradients finite."""

import pytest

import ppattn
from tests.helpers.half import compare

LIMIT = {"bfloat16": 0.02, "float16": 0.003}


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("name", ppattn.list_attentions())
def test_trained_models_are_right_in_half_precision(name, dtype):
    found = compare(name, "deit_nano", 8, dtype, guarded=True)
    assert found["gradients_finite"] and found["logits"] <= LIMIT[dtype], found


@pytest.mark.parametrize(("name", "dtype"), [("polaformer", "float16"), ("soft", "bfloat16")])
def test_without_the_guard_they_are_not(name, dtype):
    assert not compare(name, "deit_nano", 8, dtype, guarded=False)["logits"] <= LIMIT[dtype]
