"""Attention maps of whole models, and the two properties measured on maps whose answer is known."""

from __future__ import annotations

import csv
import json

import numpy as np
import paddle
import pytest

import ppattn
from ppattn.analysis.maps import attention_maps, confusions, key_grid, local_share
from ppattn.attention import Attention
from ppattn.benchmark import Spec, Worker
from ppattn.cli.analyze import _draw_maps
from ppattn.errors import UserError


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


@pytest.mark.parametrize("size", [(48, 32), (36, 60)])
def test_reduced_keys_are_drawn_on_their_own_grid(size, tmp_path):
    model = ppattn.create_model("pvt_nano", img_size=size)
    layers = attention_maps(model, paddle.randn([1, 3, *size]))
    truth = [layer.spec.key_grid for layer in model.sublayers() if isinstance(layer, Attention)]
    assert [key_grid(hw, weights.shape[-1] - prefix) for _, hw, prefix, weights in layers] == truth
    _draw_maps(tmp_path / "maps.png", layers, [np.zeros((*size, 3), np.uint8)])
    assert (tmp_path / "maps.png").exists()


def test_keys_that_are_no_reduced_map_are_a_row():
    assert key_grid((14, 14), 43) == (1, 43)


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


def test_ratios_are_taken_round_by_round():
    """A machine that slows down by the same factor for all leaves the ratio alone."""
    from ppattn.benchmark import ratio

    drift = np.array([1.0, 3.0, 1.5])
    fast, slow = {"rounds": list(0.1 * drift), "batch": 8}, {"rounds": list(0.4 * drift), "batch": 16}
    assert ratio(fast, slow) == pytest.approx(0.4 / 16 / (0.1 / 8))


def test_benchmark_of_a_model_and_its_export(tmp_path):
    from ppattn.cli import main

    arguments = ["--models", "deit_nano", "--attentions", "inline", "--sizes", "32", "--engines", "dygraph", "paddle"]
    arguments += ["--modes", "infer", "--batch", "2", "--rounds", "2", "--seconds", "0.02", "--threads", "1"]
    assert main("benchmark", [*arguments, "--output", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "benchmark.json").read_text())
    dygraph, exported = written["rows"]
    assert (dygraph["engine"], exported["engine"]) == ("dygraph", "paddle") and dygraph["tokens"] == 64
    assert dygraph["images_per_second"] == pytest.approx(2 / np.median(dygraph["rounds"]))
    flops = 2 * dygraph["macs"] * dygraph["images_per_second"]
    assert dygraph["share_of_peak"] == pytest.approx(1e-9 * flops / dygraph["gemm_gflops"])
    faster = np.median(np.array(dygraph["rounds"]) / exported["rounds"])
    assert exported["against_first"] == pytest.approx(faster)
    rows = list(csv.DictReader((tmp_path / "benchmark.csv").read_text().splitlines()))
    assert len(rows) == 2
    for key, slowest in (("slowest_round", max), ("fastest_round", min)):
        assert float(rows[0][key]) == pytest.approx(2 / slowest(dygraph["rounds"]), rel=1e-4)


def test_a_worker_that_dies_is_a_sentence(tmp_path):
    (tmp_path / "dies.py").write_text("print('{}', flush=True)")
    with pytest.raises(UserError, match="the process ended with 0"):
        Worker(Spec("it"), module=[str(tmp_path / "dies.py")])
