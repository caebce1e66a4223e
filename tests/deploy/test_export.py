"""Exported folders: what is in them, that they answer as the model does, and that a changed one is refused."""

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, product
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import paddle
import pytest
from scipy.special import softmax

import ppattn
from ppattn.attention import ATTENTIONS
from ppattn.cli import main
from ppattn.data import Preprocess
from ppattn.deploy import checks, exporter
from ppattn.deploy.engines import open_engine
from ppattn.errors import UserError
from ppattn.files.atomic import checksum
from ppattn.runtime import cpu
from tests.helpers.runs import read_json, table

pytestmark = pytest.mark.slow

NAMES = ["ant", "bee", "cow", "dog", "elk", "fox", "gnu"]
X = np.random.default_rng(0).standard_normal((3, 3, 32, 32), dtype=np.float32)


@pytest.fixture(scope="module")
def model(_runtime):
    model = ppattn.create_model("deit_nano", attention="inline", depth=2, num_classes=7)
    model.eval()
    return model


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("export") / "inline"
    preprocess = Preprocess((32, 32), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), crop_ratio=0.875)
    report = ppattn.export(model, path, preprocess=preprocess, classes=NAMES, source={"from": "a test"})
    assert report["engine"] == "stock" and max(report["differences"].values()) < 1e-5
    return path


def pictures(count, height=41, width=53):
    rng = np.random.default_rng(3)
    return [rng.integers(0, 256, (height, width, 3)).astype(np.uint8) for _ in range(count)]


def probabilities(model, x):
    with paddle.no_grad():
        logits = model(paddle.to_tensor(x)).numpy().astype(np.float64)
    return softmax(logits, axis=1)


def test_a_folder_says_everything_about_itself(folder):
    program = {"inference.json", "inference.pdiparams"}
    assert {p.name for p in folder.iterdir()} == program | {"inference.yml", "ppattn.json", "golden.npz"}
    about = read_json(folder / "ppattn.json")
    assert about["classes"] == NAMES and about["output"] == "probabilities" and about["source"] == {"from": "a test"}
    assert Preprocess(**about["preprocess"]).crop_ratio == 0.875 and set(about["sha256"]) == program | {"golden.npz"}
    assert about["config_calls"] == []  # the default settings of Paddle's inference will do


def test_the_predictor_gives_the_models_probabilities(model, folder):
    predictor = ppattn.Predictor(folder)
    for batch in (1, 3, 8, 5):
        x = np.random.default_rng(batch).standard_normal((batch, 3, 32, 32), dtype=np.float32)
        assert np.abs(predictor.run(x) - probabilities(model, x)).max() < 1e-5
    shown = pictures(3)
    expected = probabilities(model, predictor.preprocess.batch(shown))
    for row, found in zip(expected, predictor.predict(shown, topk=3), strict=True):
        assert [name for name, _ in found] == [NAMES[i] for i in np.argsort(-row)[:3]]
        assert np.allclose([score for _, score in found], np.sort(row)[::-1][:3], atol=1e-5)
    assert [name for name, _ in predictor.predict(shown[0])[0]] == [name for name, _ in predictor.predict(shown)[0]]
    assert len(predictor.predict(pictures(35), topk=99)[34]) == 7 and predictor.predict([]) == []
    for wrong in (x[:, :1], x[:, :, :16], x[0]):
        with pytest.raises(UserError, match=r"\[B, 3, 32, 32\]"):
            predictor.run(wrong)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def other_weights_and_checksum(folder):
    """As a person would who mends the checksum too: the program fails, or the golden pair notices."""
    paddle.seed(99)
    other = ppattn.create_model("deit_nano", attention="inline", depth=2, num_classes=7)
    ppattn.export(other, folder.parent / "other", classes=NAMES)
    shutil.copy(folder.parent / "other" / "inference.pdiparams", folder)
    about = read_json(folder / "ppattn.json")
    about["sha256"]["inference.pdiparams"] = checksum(folder / "inference.pdiparams")
    (folder / "ppattn.json").write_text(json.dumps(about))


@pytest.mark.parametrize(
    ("damage", "words"),
    [(lambda folder: flip(folder / "inference.pdiparams"), "checksum"),
     (lambda folder: flip(folder / "inference.json"), "checksum"),
     (lambda folder: flip(folder / "golden.npz"), "checksum"),
     (lambda folder: (folder / "inference.json").unlink(), "inference.json is missing"),
     (lambda folder: (folder / "ppattn.json").unlink(), "not an exported model"),
     (other_weights_and_checksum, "golden")],
)  # fmt: skip
def test_a_changed_folder_is_refused(folder, tmp_path, damage, words, refused):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    damage(copy)
    with pytest.raises(UserError, match=words):
        ppattn.Predictor(copy)
    cv2.imwrite(str(tmp_path / "a.png"), pictures(1)[0])
    assert words in refused("predict", "--model", copy, tmp_path / "a.png")


def test_a_wrong_export_is_not_announced_and_leaves_nothing(model, tmp_path, monkeypatch):
    save, bias = exporter.save_program, model.head.bias.numpy()

    def wrong(*arguments):
        model.head.bias.set_value(bias + np.arange(7, dtype="float32"))
        save(*arguments)
        model.head.bias.set_value(bias)

    monkeypatch.setattr(exporter, "save_program", wrong)
    with pytest.raises(UserError, match="does not give the model's own answers"):
        ppattn.export(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_logits_where_they_are_asked_for_and_a_model_that_trains_on(model, tmp_path):
    model.train()
    model.patch_embed.eval()
    ppattn.export(model, tmp_path / "out", logits=True)
    assert model.blocks[0].mlp.training and not model.patch_embed.training
    model.forward_train(paddle.randn([2, 3, 32, 32]))[0].sum().backward()
    assert model.head.weight.grad.abs().sum().item() > 0
    model.clear_gradients()
    model.eval()
    program, x = paddle.jit.load(str(tmp_path / "out" / "inference")), paddle.to_tensor(X)
    assert np.abs(program(x).numpy() - model(x).numpy()).max() < 1e-5
    predictor = ppattn.Predictor(tmp_path / "out")
    assert predictor.output == "logits" and np.abs(predictor.run(X) - probabilities(model, X)).max() < 1e-6


def test_stock_settings_that_fail_are_told_with_the_call_that_mends_them(model, tmp_path, monkeypatch, capsys):
    def crash(*arguments, limit):
        python(*arguments[:-1], limit=limit)  # all engines but the last, which is the stock one
        return SimpleNamespace(returncode=-11, stderr="FatalError: `Segmentation fault` is detected", stdout="")

    python = checks.run_python
    monkeypatch.setattr(checks, "run_python", crash)
    report = ppattn.export(model, tmp_path / "out")
    assert report["engine"] == "plain" and "Segmentation" in report["differences"]["stock"]
    told = capsys.readouterr().err
    assert "default settings" in told and "Segmentation" in told and "config.disable_mkldnn()" in told
    assert read_json(tmp_path / "out" / "ppattn.json")["config_calls"] == [["disable_mkldnn"]]
    assert np.abs(ppattn.Predictor(tmp_path / "out").run(X) - probabilities(model, X)).max() < 1e-5


def test_threads_share_a_predictor(model, folder):
    rng = np.random.default_rng(7)
    batches = [rng.standard_normal((1 + i % 3, 3, 32, 32), dtype=np.float32) for i in range(8)]
    expected = [probabilities(model, batch) for batch in batches]
    predictor, start = ppattn.Predictor(folder, threads=1), threading.Barrier(8)

    def work(number: int) -> float:
        start.wait()
        order = np.random.default_rng(number).permutation(len(batches)).tolist() * 5
        return max(float(np.abs(predictor.run(batches[i]) - expected[i]).max()) for i in order)

    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(work, range(8))) < 1e-5


@pytest.mark.parametrize(
    "call",
    [lambda p: p.predict(pictures(1), topk=0), lambda p: p.predict(X[:1]), lambda p: p.embed(pictures(1)),
     *(lambda p, value=value: p.run(X.astype(float) + value) for value in (np.nan, np.inf, 1e300))],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_what_a_predictor_cannot_mean_is_a_sentence(folder, call):
    with pytest.raises(UserError):
        call(ppattn.Predictor(folder, threads=1))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"img_size": 64}, r"takes \[3, 64, 64\]"), ({"classes": [*"abcdef"]}, "6 class names"),
     ({"classes": [*"abcdef", "\x1b[31m"]}, "not printable text"), ({"format": "onxx"}, "Did you mean 'onnx'"),
     ({"precision": "int8"}, "--format onnx"), ({"precision": "bf16", "features": True}, "exported as fp32")],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_what_an_export_cannot_mean_is_a_sentence(model, tmp_path, arguments, words):
    with pytest.raises(UserError, match=words):
        ppattn.export(model, tmp_path / "out", preprocess=Preprocess((32, 32)), **arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("format", "classes"), [("paddle", 7), ("onnx", 7), ("paddle", 0)])
def test_features_instead_of_logits(format, classes, tmp_path, capsys):
    """A model without a head gives them without being asked."""
    if format == "onnx":
        pytest.importorskip("paddle2onnx")
    tokens = {"class_token": True, "mean_pool": True} if format == "paddle" else {}  # a head on two vectors
    model = ppattn.create_model("deit_nano", attention="inline", depth=1, num_classes=classes, **tokens)
    model.eval()
    ppattn.export(model, tmp_path / "out", format=format, features=classes > 0)
    (width,) = model.feat_channels
    assert not classes or model.head.weight.shape == [width * (1 + model.mean_pool), classes]  # it has it again
    predictor, x = ppattn.Predictor(tmp_path / "out"), paddle.randn([3, 3, 32, 32])
    pooled = model.tokens(x)[0][:, :width]
    assert predictor.output == "features" and predictor.classes == []
    assert np.abs(predictor.run(x.numpy()) - pooled.numpy()).max() < 1e-4
    shown = pictures(3)
    found = predictor.embed(shown)
    assert found.shape == (3, width) and np.allclose(found, predictor.run(predictor.preprocess.batch(shown)), atol=1e-6)
    assert predictor.embed([]).shape == (0, width)
    with pytest.raises(UserError, match="features instead of classes"):
        predictor.predict(shown)
    cv2.imwrite(str(tmp_path / "a.png"), shown[0][..., ::-1])
    written = tmp_path / "new/table.csv"
    assert main("predict", ["--model", str(tmp_path / "out"), str(tmp_path / "a.png"), "--csv", str(written)]) == 0
    assert np.allclose(json.loads(capsys.readouterr().out)["features"], found[0], atol=1e-5)
    (row,) = table(written)
    assert np.allclose([float(row[f"feature_{i}"]) for i in range(width)], found[0], rtol=1e-5, atol=1e-5)


def test_a_table_of_predictions_is_whole_when_the_reader_of_stdout_leaves(tmp_path):
    for i in range(40):
        cv2.imwrite(str(tmp_path / f"{i}.png"), pictures(1)[0])
    call = [sys.executable, "-u", "-m", "ppattn", "predict", "--model", "softmax_deit_nano_cifar10", str(tmp_path)]
    with subprocess.Popen([*call, "--csv", str(tmp_path / "all.csv")], stdout=subprocess.PIPE, text=True) as process:
        process.stdout.close()
    assert len({row["image"] for row in table(tmp_path / "all.csv")}) == 40


def test_export_replaces_an_export_and_nothing_else(model, tmp_path):
    for round in range(2):
        ppattn.export(model, tmp_path / "out", source={"round": round, "from": os.fsdecode(b"run\xff")})
    assert ppattn.Predictor(tmp_path / "out").source["round"] == 1
    (tmp_path / "mine").mkdir()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "out"]
    for name in ("mine", "out"):
        (tmp_path / name / "thesis.tex").write_text("years")
        with pytest.raises(UserError, match="no export"):
            ppattn.export(model, tmp_path / name)
        assert (tmp_path / name / "thesis.tex").exists()


def test_bfloat16_is_verified(model, tmp_path):
    try:
        report = ppattn.export(model, tmp_path / "half", precision="bf16")
    except UserError as error:
        assert "Export it as fp32" in str(error)
    else:
        # Paddle rounds to bfloat16 with AVX512, whether or not the processor has instructions for it.
        rounds = set(cpu.cpuinfo("flags").split()) >= cpu.AVX512
        assert report["engine"] == "bf16" and report["differences"]["bf16"] < 5e-2
        assert (report["differences"]["bf16"] > checks.TOLERANCE["fp32"]) == rounds
        assert report["note"] == (None if rounds else exporter.NOT_VERIFIED)
        assert np.abs(ppattn.Predictor(tmp_path / "half").run(X) - probabilities(model, X)).max() < 0.05


def test_a_bfloat16_program_that_was_computed_in_float32_is_not_called_verified(model, tmp_path, monkeypatch, capsys):
    def without_bfloat16(*arguments, limit):
        done = python(*(a if a != "bf16" else "stock" for a in arguments), limit=limit)
        answers = Path(arguments[4])
        shutil.copy(answers / "stock.npz", answers / "bf16.npz")
        return done

    python = checks.run_python
    monkeypatch.setattr(checks, "run_python", without_bfloat16)
    report = ppattn.export(model, tmp_path / "half", precision="bf16")
    assert report["engine"] == "bf16" and "in float32: not verified" in report["note"]
    assert read_json(tmp_path / "half" / "ppattn.json")["note"] == report["note"]


def test_any_size_where_the_model_allows_it(model, tmp_path):
    ppattn.export(model, tmp_path / "free", dynamic_size=True)
    predictor = ppattn.Predictor(tmp_path / "free")
    for height, width in ((32, 32), (48, 24)):
        x = np.random.default_rng(1).standard_normal((2, 3, height, width), dtype=np.float32)
        assert np.abs(predictor.run(x) - probabilities(model, x)).max() < 1e-5
    with pytest.raises(UserError, match="multiples of 4"):
        predictor.run(x[:, :, :31])
    with pytest.raises(UserError, match="multiples of 4"):
        ppattn.export(model, tmp_path / "no", img_size=(32, 30), dynamic_size=True)
    for name, attention in [*product(["deit_nano"], ONE_SIZE), ("swin_nano", "softmax")]:
        with pytest.raises(UserError, match="exported for one input size"):
            ppattn.export(ppattn.create_model(name, attention=attention), tmp_path / "no", dynamic_size=True)
    # A failed trace leaves nothing that a program at the same address would take for its own.
    for folder in ("dy2static", "pir_dy2static"):  # of Paddle 3.3 and 3.1
        with contextlib.suppress(ImportError):
            recorder = importlib.import_module(f"paddle.jit.{folder}.parameter_recorder")
            assert not recorder._global_parameter_recorder.tensor2value


ONE_SIZE = ["less", "linformer", "mhla", "window"]
ONE_LAYER = {
    "deit_nano": {"depth": 1},
    "pvt_nano": {"depths": [1], "embed_dims": [32], "num_heads": [2], "sr_ratios": [2], "mlp_ratios": [2]},
    "swin_nano": {"depths": [1], "num_heads": [2]},
}
FREE = [name for name in ATTENTIONS.list() if name not in ONE_SIZE]


@pytest.mark.parametrize(("attention", "backbone"), [*zip(FREE, cycle(ONE_LAYER), strict=False)])
def test_attentions_as_onnx_programs_of_any_size(attention, backbone, tmp_path):
    """Each on one backbone, in turn: all on all take minutes."""
    pytest.importorskip("paddle2onnx")
    model = ppattn.create_model(backbone, attention=attention, num_classes=7, **ONE_LAYER[backbone])
    model.eval()
    exporter.save_program(model, tmp_path, (3, None, None))
    exporter.to_onnx(tmp_path, keep=True)
    run = open_engine(tmp_path, "onnxruntime", threads=1)
    for size in ((32, 32), (48, 24)):
        x = np.random.default_rng(1).standard_normal((2, 3, *size), dtype=np.float32)
        assert np.abs(run(x) - model(paddle.to_tensor(x)).numpy()).max() < 2e-5


SHRUNKEN = {  # SOFT keeps 32 channels per head: with few, its iteration enlarges rounding
    "inline_deit_tiny": {"embed_dim": 48, "depth": 2, "num_heads": 3},
    "agent_pvt_tiny": {"embed_dims": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 2]},
    "pvt_v2_b0": {"embed_dims": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 2]},
    "pola_swin_tiny": {"embed_dim": 8, "depths": [1, 1, 2, 1], "num_heads": [1, 2, 4, 8]},
    "soft_tiny": {"embed_dims": [32, 32, 64, 64], "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2]},
    "lavit_tiny": {"embed_dims": [8, 16, 24, 32], "depths": [1, 2, 2, 2], "num_heads": [1, 2, 2, 2]},
}


@pytest.mark.parametrize("name", SHRUNKEN)
def test_zoo_entries_export_at_an_odd_shape(name, tmp_path):
    """One of each structure that the backbones of test_contract.py do not have."""
    model = ppattn.create_model(name, img_size=(96, 64), num_classes=7, **SHRUNKEN[name])
    report = ppattn.export(model, tmp_path / "out")
    assert report["engine"] == "stock" and max(report["differences"].values()) < 1e-5
    assert set(report["by_batch"]["stock"]) == {"random1", "random3", "random8"}


@pytest.mark.parametrize("attention", ["polaformer", "soft"])
def test_float16_programs_give_the_trained_models_answers(attention, tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("paddle2onnx")
    model = ppattn.create_model(f"{attention}_deit_nano_cifar10", pretrained=True)
    ppattn.export(model, tmp_path / "whole", format="onnx", logits=True)
    report = ppattn.export(model, tmp_path / "half", format="onnx", precision="fp16", logits=True)
    assert report["engine"] == "fp16" and report["same_top1"] >= 0.98 and 1e-5 < report["differences"]["fp16"] < 3e-3
    graph = onnx.load(tmp_path / "half" / "inference.onnx").graph
    assert sum(node.op_type == "Cast" for node in graph.node) > 42  # 30 of norms and ends, 12 of the attention
    weights = [array for array in graph.initializer if len(array.dims) == 2 and array.name.startswith("linear")]
    assert {array.data_type for array in weights} == {onnx.TensorProto.FLOAT16}
    kinds = {tuple(a.i for a in n.attribute) for n in graph.node if n.op_type == "Cast"}
    assert (onnx.TensorProto.DOUBLE,) not in kinds
    engines = ["onnxruntime"] + ["openvino"] * bool(importlib.util.find_spec("openvino"))
    for engine in engines:
        ppattn.Predictor(tmp_path / "half", engine=engine)  # which compares the golden answer


def test_int8_is_calibrated_judged_and_smaller(tmp_path):
    pytest.importorskip("paddle2onnx")
    onnx = pytest.importorskip("onnx")
    shape = {"stem": "patch", "embed_dim": 128, "num_heads": 4, "depth": 2, "mlp_ratio": 4}
    model = ppattn.create_model("deit_nano", attention="inline", num_classes=7, **shape)
    model.head.weight.set_value(20 * model.head.weight)  # clear winners, as after training
    images = np.random.default_rng(5).standard_normal((64, 3, 32, 32), dtype=np.float32)
    with pytest.raises(UserError, match="real images"):
        ppattn.export(model, tmp_path / "no", format="onnx", precision="int8")
    with pytest.raises(UserError, match="--format onnx"):
        ppattn.export(model, tmp_path / "no", precision="int8")
    report = ppattn.export(model, tmp_path / "whole", format="onnx")
    given = {"format": "onnx", "precision": "int8", "images": images}
    report = ppattn.export(model, tmp_path / "int8", calibration=images[:32], **given)
    assert report["engine"] == "int8" and 1e-4 < report["differences"]["int8"] < 0.3 and report["same_top1"] > 0.9
    sizes = [(tmp_path / name / "inference.onnx").stat().st_size for name in ("whole", "int8")]
    assert sizes[1] < 0.5 * sizes[0] and "7 bits" in report["note"]
    ppattn.Predictor(tmp_path / "int8")
    graph = onnx.load(tmp_path / "int8" / "inference.onnx").graph
    weights = [array for array in map(onnx.numpy_helper.to_array, graph.initializer) if array.dtype == np.int8]
    weights = [array.astype(int) for array in weights if array.ndim == 2]
    assert len(weights) == 10  # four in each block, those of the patches and of the head
    for array in weights:  # inputs times outputs; processors without VNNI add the products of two inputs in int16
        assert np.abs(array).max() > 48 and 255 * (np.abs(array[:-1]) + np.abs(array[1:])).max() < 2**15
    with pytest.raises(UserError, match="int8 does not give the model's own answers.*Export it as fp32"):
        ppattn.export(model, tmp_path / "dark", calibration=images[:32] / 1000, **given)


def test_onnx_or_a_sentence_how_to_get_it(model, tmp_path, monkeypatch, unabridged):
    if importlib.util.find_spec("paddle2onnx"):
        assert ppattn.export(model, tmp_path / "onnx", format="onnx")["differences"]["onnxruntime"] < 1e-4
        assert np.abs(ppattn.Predictor(tmp_path / "onnx").run(X) - probabilities(model, X)).max() < 1e-4
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'ppattn\[onnx\]'"):
        ppattn.export(model, tmp_path / "no", format="onnx")


class Own(ATTENTIONS.get("softmax")):
    """A user's attention with operators that none here uses."""

    def finish(self, y, parts):
        return paddle.asinh(paddle.cumsum(super().finish(y, parts), axis=1))


def test_an_attention_with_operators_of_its_own_exports(tmp_path, monkeypatch):
    monkeypatch.setitem(ATTENTIONS._entries, "own", Own)
    model = ppattn.create_model("deit_nano", attention="own", depth=2, num_classes=3)
    report = ppattn.export(model, tmp_path / "model")
    assert report["engine"] == "stock" and max(report["differences"].values()) < 1e-5
    program = (tmp_path / "model/inference.json").read_text()
    assert "asinh" in program and "cumsum" in program


def test_predict_writes_tables_lines_and_reports_what_it_cannot_read(folder, tmp_path, capsys, refused):
    images = tmp_path / "images" / "deep"
    images.mkdir(parents=True)
    for i, picture in enumerate(pictures(3)):
        cv2.imwrite(str(images / f"{i}.png"), picture)
    cv2.imwrite(str(images / "grey.png"), pictures(1)[0][..., 0])
    (images / "._grey.png").write_bytes(b"left by another system")
    assert main("predict", ["--model", str(folder), str(tmp_path / "images"), "--topk", "2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    (images / "broken.jpg").write_bytes(b"no picture")
    written = tmp_path / "out.csv"
    assert "is not a directory" in refused("predict", "--model", folder, images, "--csv", images / "0.png/table.csv")
    assert main("predict", ["--model", str(folder), f"{images}/*", "--json", "--csv", str(written)]) == 2
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert len(lines) == 4 and "1 of 5" in err and "broken.jpg" in err
    predictor = ppattn.Predictor(folder)
    for line in lines:
        ((best, _), *_) = predictor.predict([line["image"]])[0]
        assert line["predictions"][0]["name"] == best
    rows = table(written)
    assert len(rows) == 4 * 5 and rows[0]["rank"] == "1"


def test_export_in_python_is_quiet(tmp_path):
    """Paddle warns of ccache when it is imported, and of its own arguments when it traces."""
    code = "import ppattn; ppattn.export(ppattn.create_model('deit_nano', depth=1), 'exported')"
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
