"""Attention maps of whole models, and the two properties measured on maps whose answer is known."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

import ppattn
from ppattn.analysis.maps import attention_maps, confusions, local_share


@pytest.mark.parametrize("backbone", ["deit_nano", "pvt_nano", "swin_nano"])
@pytest.mark.parametrize("attention", ["softmax", "inline", "linear", "less"])
def test_rows_of_every_map_sum_to_one(backbone, attention):
    model = ppattn.create_model(backbone, attention=attention)
    layers = attention_maps(model, paddle.randn([2, 3, 32, 32]))
    assert len(layers) == sum(
        len(group) for group in ([model.blocks] if "deit" in backbone else [s.blocks for s in model.stages])
    )
    for _, hw, prefix, weights in layers:
        assert weights.shape[2] == prefix + hw[0] * hw[1]
        assert np.abs(weights.sum(-1) - 1).max() < 2e-5


def test_local_share_by_hand():
    h, w = 3, 4
    uniform = np.full((1, 1, 12, 12), 1 / 12)
    neighbours = np.array([[4, 6, 6, 4], [6, 9, 9, 6], [4, 6, 6, 4]]).mean()
    assert np.allclose(local_share(uniform, (h, w), 0), neighbours / 12)
    assert local_share(np.eye(13)[None, None], (h, w), 1)[0] == 1.0
    assert local_share(np.zeros((1, 1, 12, 3)), (h, w), 0) is None


def test_confusions_counts_equal_rows():
    rows = np.array([[0.5, 0.5], [0.5, 0.5], [0.9, 0.1], [0.5, 0.5001]])
    assert confusions(rows[None, None]) == 3
    assert confusions(np.eye(4)[None, None]) == 0
