"""The engines of an export agree, `auto` takes the fastest, and programs of strangers stay closed."""

import json
import os

import numpy as np
import pytest

import ppattn
from ppattn.deploy import engines
from ppattn.deploy.folder import check_operators
from ppattn.errors import UserError

pytestmark = pytest.mark.slow
X = np.random.default_rng(0).standard_normal((3, 3, 32, 32), dtype=np.float32)


@pytest.fixture(scope="module")
def folder(_runtime, tmp_path_factory):
    pytest.importorskip("paddle2onnx", reason="paddle2onnx has no wheel for this Python")
    model = ppattn.create_model("deit_nano", attention="inline", depth=2, num_classes=7)
    model.head.weight.set_value(20 * model.head.weight)
    path = tmp_path_factory.mktemp("export") / "both"
    report = ppattn.export(model, path, format="both")
    assert report["engine"] == "stock" and report["differences"]["onnxruntime"] < 1e-5
    return path


def test_engines_agree_and_bfloat16_is_coarser(folder):
    paddle = ppattn.Predictor(folder)
    assert (paddle.engine, paddle.format) == ("paddle", "both")
    for engine in ("onnxruntime", "openvino"):
        pytest.importorskip(engine)
        assert np.abs(ppattn.Predictor(folder, engine=engine).run(X) - paddle.run(X)).max() < 1e-5
    if "ONEDNN_MAX_CPU_ISA" in os.environ:
        return  # OpenVINO chooses bfloat16 by the processor, and fails where oneDNN may not use it
    coarse = np.abs(ppattn.Predictor(folder, "bf16", engine="openvino").run(X) - paddle.run(X)).max()
    assert coarse < 0.05


def test_auto_takes_the_fastest_that_gives_the_golden_answer_and_remembers_it(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = ppattn.Predictor(folder, engine="auto")
    told = capsys.readouterr().err
    assert f"engine of {folder}: {found.engine} (paddle " in told and "onnxruntime " in told
    assert np.abs(found.run(X) - ppattn.Predictor(folder).run(X)).max() < 1e-5
    assert ppattn.Predictor(folder, engine="auto").engine == found.engine and capsys.readouterr().err == ""

    def wrong(*arguments):
        run = original(*arguments)
        return lambda images: 0.5 * run(images)

    (tmp_path / "ppattn/engines.json").unlink()
    original = engines._paddle
    monkeypatch.setattr(engines, "_paddle", wrong)
    found = ppattn.Predictor(folder, engine="auto")
    assert found.engine != "paddle" and "paddle" not in capsys.readouterr().err.partition("(")[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"engine": "tensorrt"}, "Unknown engine"), ({"precision": "bf16"}, "cannot run bf16 with paddle"),
     ({"precision": "int8", "engine": "onnxruntime"}, "cannot run int8 with onnxruntime")],
)  # fmt: skip
def test_what_was_not_exported_does_not_run(folder, arguments, words):
    with pytest.raises(UserError, match=words):
        ppattn.Predictor(folder, **arguments)


def test_a_program_that_writes_files_stays_closed(folder, tmp_path):
    check_operators(folder / "inference.json")
    program = json.loads((folder / "inference.json").read_text())
    operators = program["program"]["regions"][0]["blocks"][0]["ops"]
    inner = {"regions": [{"blocks": [{"ops": [{"#": "1.save_combine"}]}]}]}
    for harmful in ({"#": "1.save_"}, {"#": "1.py_func"}, {"#": "1.while"} | inner, {"#": "1.add"} | inner):
        changed = program | {"program": {"regions": [{"blocks": [{"ops": [*operators, harmful]}]}]}}
        (tmp_path / "inference.json").write_text(json.dumps(changed))
        with pytest.raises(UserError, match="runs code .*(save|py_func)"):
            engines.open_engine(tmp_path, "plain")
    own = program | {"program": {"regions": [{"blocks": [{"ops": [*operators, {"#": "9.an_operator_of_the_user"}]}]}]}}
    (tmp_path / "inference.json").write_text(json.dumps(own))
    check_operators(tmp_path / "inference.json")
    (tmp_path / "inference.json").write_bytes(b"\x0a\x08program of Paddle 2")
    with pytest.raises(UserError, match="not a program of Paddle 3"):
        engines.open_engine(tmp_path, "plain")
