"""The benchmark harness: interleaved rounds, exported models beside their originals, workers that die."""

import csv
import json
from contextlib import closing
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from ppattn import benchmark, create_model, export
from ppattn.benchmark import Spec, Worker, ratio, speed_summary, speed_table
from ppattn.cli import main
from ppattn.errors import UserError

pytestmark = pytest.mark.slow


def test_ratios_are_taken_round_by_round():
    """A machine that slows down by the same factor for all leaves the ratio alone."""
    drift = np.array([1.0, 3.0, 1.5])
    fast, slow = {"rounds": list(0.1 * drift), "batch": 8}, {"rounds": list(0.4 * drift), "batch": 16}
    assert ratio(fast, slow) == pytest.approx(0.4 / 16 / (0.1 / 8))


def test_the_share_of_the_peak_is_taken_round_by_round(monkeypatch):
    def start(spec):
        seconds = iter([(0.1 if spec.model else 1.0) * drift for drift in (1.0, 3.0, 1.5, 7.0, 2.0)])
        facts = {"step_seconds": 1.0, "last": {"p50": 1, "p95": 1, "peak_mb": 2}, "ready": {"start_mb": 1}}
        return SimpleNamespace(spec=spec, run=lambda steps: next(seconds), close=lambda: None, **facts)

    monkeypatch.setattr(benchmark, "Worker", start)
    (row,) = benchmark.measure_speeds("", [Spec("it", model="deit_nano", batch=3, img_size=(32, 32))], 5, 1.0, None)
    assert row["share_of_peak"] == pytest.approx(3 * 2 * row["macs"] / 0.1 / (2 * 2048**3))


def test_benchmark_of_a_model_and_its_export(tmp_path):
    arguments = ["--models", "deit_nano", "--attentions", "inline", "--sizes", "32", "--engines", "dygraph", "paddle"]
    arguments += ["--modes", "infer", "--batch", "2", "--rounds", "2", "--seconds", "0.02", "--threads", "1"]
    assert main("benchmark", [*arguments, "--output", str(tmp_path)]) == 0
    dygraph, exported = json.loads((tmp_path / "benchmark.json").read_text())["rows"]
    assert (dygraph["engine"], exported["engine"]) == ("dygraph", "paddle") and dygraph["tokens"] == 64
    assert dygraph["images_per_second"] == pytest.approx(2 / np.median(dygraph["rounds"]))
    assert exported["against_first"] == pytest.approx(np.median(np.array(dygraph["rounds"]) / exported["rounds"]))
    assert exported["macs"] == dygraph["macs"] and exported["tokens"] == 64
    rows = list(csv.DictReader((tmp_path / "benchmark.csv").read_text().splitlines()))
    assert len(rows) == 2
    for key, slowest in (("slowest_round", max), ("fastest_round", min)):
        assert float(rows[0][key]) == pytest.approx(2 / slowest(dygraph["rounds"]), rel=1e-4)


def test_memory_of_a_worker_is_its_own():
    parent = np.ones(1 << 28)  # 2 GB
    with closing(Worker(Spec("it", "numpy_product", batch=1, threads=1))) as worker:
        assert 100 < worker.last["peak_mb"] < 1500 < parent.nbytes / 2**20


def test_a_worker_that_dies_is_a_sentence(tmp_path):
    (tmp_path / "dies.py").write_text("print('{}', flush=True)")
    with pytest.raises(UserError, match="the process ended with 0"):
        Worker(Spec("it"), module=[str(tmp_path / "dies.py")])


def test_a_candidate_that_cannot_start_is_left_out_and_all_processes_end(tmp_path, monkeypatch, capsys):
    closed = []

    def start(spec):
        if spec.engine in failing:
            raise UserError(f"{spec.engine}: no memory")
        return SimpleNamespace(spec=spec, close=lambda: closed.append(spec.engine))

    monkeypatch.setattr(benchmark, "Worker", start)
    command = ["benchmark", "--models", "deit_nano", "--sizes", "32", "--output", str(tmp_path)]
    failing = {"copy"}
    assert main(command) == 2 and closed == ["gemm"] and "copy: no memory" in capsys.readouterr().err
    failing = {"dygraph"}
    assert main(command) == 2 and closed == ["gemm", "copy", "gemm"]
    printed = capsys.readouterr()
    assert "left out: dygraph: no memory" in printed.out and "none of the candidates" in printed.err


def test_engines_of_an_exported_folder_and_their_model(tmp_path):
    export(create_model("deit_nano"), tmp_path / "e", source={"config": {"model": {"name": "deit_nano"}}})
    arguments = ["--folder", str(tmp_path / "e"), "--engine", "paddle", "onnxruntime", "--batch", "1", "2"]
    arguments += ["--rounds", "1", "--seconds", "0.02", "--threads", "1", "--output", str(tmp_path / "b")]
    assert main(["benchmark", *arguments]) == 0
    rows = json.loads((tmp_path / "b/benchmark.json").read_text())["rows"]
    assert [(row["engine"], row["precision"], row["batch"]) for row in rows] == [("paddle", "fp32", n) for n in (1, 2)]
    assert all(0 < row["step_ms_p50"] <= row["step_ms_p95"] and row["macs"] for row in rows)


def test_the_fastest_engine_is_named():
    def row(name, engine, seconds):
        speed = {"batch": 8, "images_per_second": 8 / seconds, "rounds": [seconds] * 3}
        return {"name": f"{name} {engine} fp32", "engine": engine, "precision": "fp32", "group": "batch 8", **speed}

    rows = [row("nano", "paddle", 0.4), row("nano", "onnxruntime", 0.1), row("tiny", "paddle", 0.3)]
    assert speed_summary(rows) == ["nano, batch 8: onnxruntime is the fastest, 4.00 times as fast as paddle"]
    assert "--engines paddle onnxruntime openvino" in speed_summary(rows[2:])[0]
    assert speed_summary([row("nano", "dygraph", 0.4)]) == []


ROWS = [("softmax", 64, 1.0, 1.0), ("linear", 64, 2.0, 0.5), ("less", 64, 4.0, 0.25), ("softmax", 256, 8.0, 1.0)]
ROWS += [("linear", 256, 9.0, 2.1)]  # the machine was busy: only ratios within a round count


def test_ranking_says_where_softmax_stops_being_the_fastest():
    keys = ("attention", "tokens", "seconds", "against_softmax")
    rows = [dict(zip(keys, row, strict=True), ms_per_image=row[2], memory_mb=3.2, params=1234) for row in ROWS]
    _, head, first, second, best, left = speed_table(rows)
    assert head.split()[:3] == ["tokens:", "64", "256"]
    assert first.split() == ["linear", "0.50", "2.10", "9.00", "3", "1,234"]
    assert second.split()[:3] == ["softmax", "1.00", "1.00"]
    assert best == "The fastest at 64: softmax (1.00), 256: linear (2.10)."
    assert left == "Too slow or too large here at 256 tokens: less."


def test_rank_of_attention_layers(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("ppattn.runtime.memory.free", lambda: 4.0)  # MB, fewer than 16 maps of 2 x 196 x 196 floats
    command = "benchmark --tokens 28x28 --attentions less linear --dim 6 --heads 1 --batch 2 --rounds 1 --seconds 0.01"
    assert main([*command.split(), "--threads", "1", "--output", str(tmp_path)]) == 0
    assert "Too slow or too large here at 784 tokens: less." in capsys.readouterr().out
    rows = json.loads((tmp_path / "ranking.json").read_text())["rows"]
    pairs = [(row["attention"], row["grid"]) for row in rows]
    assert pairs == [*product(["softmax", "less", "linear"], ["14x14"]), ("softmax", "28x28"), ("linear", "28x28")]
    assert all(row["against_softmax"] == 1 for row in rows if row["attention"] == "softmax")
    assert main([*command.replace("28x28", "1x256").split(), "--threads", "1"]) == 0
    less = next(row for row in rows if row["attention"] == "less")
    assert less["memory_mb"] > 2 * 196**2 * 4 / 1e6 and less["params"] == 6 * 18 + 18 + 6 * 6 + 6
