"""Exported folders: what is in them, that they answer as the model does, and that a changed one is refused."""

from __future__ import annotations

import csv
import importlib.util
import json
import shutil

import cv2
import numpy as np
import paddle
import pytest

import ppattn
from ppattn.cli import main
from ppattn.data import Preprocess
from ppattn.errors import UserError

NAMES = ["ant", "bee", "cow", "dog", "elk", "fox", "gnu"]


@pytest.fixture(scope="module")
def model(_runtime):
    return ppattn.create_model("deit_nano", attention="inline", depth=2, num_classes=7)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("export") / "inline"
    preprocess = Preprocess((32, 32), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), crop_ratio=0.875)
    report = ppattn.export(model, path, preprocess=preprocess, classes=NAMES, source={"from": "a test"})
    assert report["engine"] == "onednn" and max(report["differences"].values()) < 1e-5
    return path


def pictures(count, height=41, width=53):
    rng = np.random.default_rng(3)
    return [rng.integers(0, 256, (height, width, 3)).astype(np.uint8) for _ in range(count)]


def probabilities(model, x):
    with paddle.no_grad():
        logits = model(paddle.to_tensor(x)).numpy().astype(np.float64)
    e = np.exp(logits - logits.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def test_a_folder_says_everything_about_itself(folder):
    assert {p.name for p in folder.iterdir()} == {"model.json", "model.pdiparams", "inference.json", "golden.npz"}
    about = json.loads((folder / "inference.json").read_text())
    assert about["classes"] == NAMES and about["output"] == "logits" and about["source"] == {"from": "a test"}
    assert Preprocess.from_dict(about["preprocess"]).crop_ratio == 0.875
    assert set(about["sha256"]) == {"model.json", "model.pdiparams", "golden.npz"}


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
    with pytest.raises(UserError, match=r"\[B, 3, 32, 32\]"):
        predictor.run(x[:, :1])


def flip(name):
    def damage(folder):
        data = bytearray((folder / name).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / name).write_bytes(data)

    return damage


def another_mean(folder):
    text = (folder / "inference.json").read_text()
    assert "0.4," in text
    (folder / "inference.json").write_text(text.replace("0.4,", "0.5,"))


def remove(folder):
    (folder / "model.json").unlink()


def other_weights(folder):
    paddle.seed(99)
    other = ppattn.create_model("deit_nano", attention="inline", depth=2, num_classes=7)
    ppattn.export(other, folder.parent / "other", classes=NAMES)
    shutil.copy(folder.parent / "other" / "model.pdiparams", folder)


def other_weights_and_checksum(folder):
    """As a person would who mends the checksum too: the golden pair notices."""
    from ppattn.deploy.exporter import seal, sha256, unseal

    other_weights(folder)
    about = unseal(folder / "inference.json")
    about["sha256"]["model.pdiparams"] = sha256(folder / "model.pdiparams")
    seal(folder / "inference.json", about)


def no_description(folder):
    (folder / "inference.json").unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        *((flip(name), "checksum") for name in ("model.pdiparams", "model.json", "golden.npz")),
        (another_mean, "checksum"),
        (remove, "model.json is missing"),
        (other_weights, "checksum"),
        (other_weights_and_checksum, "golden"),
        (no_description, "not an exported model"),
    ],
)
def test_a_changed_folder_is_refused(folder, tmp_path, damage, words, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    damage(copy)
    with pytest.raises(UserError, match=words):
        ppattn.Predictor(copy)
    cv2.imwrite(str(tmp_path / "a.png"), pictures(1)[0])
    assert main("predict", ["--model", str(copy), str(tmp_path / "a.png")]) == 2
    assert words in capsys.readouterr().err


def test_a_wrong_export_is_not_announced_and_leaves_nothing(model, tmp_path, monkeypatch):
    from ppattn.deploy import exporter

    def wrong(model, batches):
        return {name: np.ones((len(batch), 7), np.float32) for name, batch in batches.items()}

    monkeypatch.setattr(exporter, "answers", wrong)
    with pytest.raises(UserError, match="does not give the model's own answers"):
        ppattn.export(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_export_replaces_an_export_and_nothing_else(model, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years")
    with pytest.raises(UserError, match="no export"):
        ppattn.export(model, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").exists()


def test_bfloat16_is_verified(model, tmp_path):
    try:
        report = ppattn.export(model, tmp_path / "half", precision="bf16")
    except UserError as error:
        assert "Export it as fp32" in str(error)
    else:
        assert report["engine"] == "bf16" and 1e-6 < report["differences"]["bf16"] < 5e-2
        x = np.random.default_rng(0).standard_normal((4, 3, 32, 32), dtype=np.float32)
        assert np.abs(ppattn.Predictor(tmp_path / "half").run(x) - probabilities(model, x)).max() < 0.05


def test_any_size_where_the_model_allows_it(model, tmp_path):
    ppattn.export(model, tmp_path / "free", dynamic_size=True)
    predictor = ppattn.Predictor(tmp_path / "free")
    for height, width in ((32, 32), (48, 24)):
        x = np.random.default_rng(1).standard_normal((2, 3, height, width), dtype=np.float32)
        assert np.abs(predictor.run(x) - probabilities(model, x)).max() < 1e-5
    for name, attention in (("deit_nano", "less"), ("swin_nano", "softmax")):
        with pytest.raises(UserError, match="exported for one input size"):
            ppattn.export(ppattn.create_model(name, attention=attention), tmp_path / "no", dynamic_size=True)


@pytest.mark.parametrize(
    ("backbone", "attention"), [("deit_nano", "inline"), ("pvt_nano", "soft"), ("swin_nano", "softmax")]
)
def test_onnx_or_a_sentence_how_to_get_it(backbone, attention, tmp_path):
    model = ppattn.create_model(backbone, attention=attention, num_classes=7)
    if importlib.util.find_spec("paddle2onnx") is None:
        with pytest.raises(UserError, match="pip install"):
            ppattn.export(model, tmp_path / "onnx", format="onnx")
        return
    report = ppattn.export(model, tmp_path / "onnx", format="onnx")
    assert report["differences"]["onnx"] < 1e-4
    x = np.random.default_rng(0).standard_normal((2, 3, 32, 32), dtype=np.float32)
    assert np.abs(ppattn.Predictor(tmp_path / "onnx").run(x) - probabilities(model, x)).max() < 1e-4


def test_predict_writes_tables_lines_and_reports_what_it_cannot_read(folder, tmp_path, capsys):
    images = tmp_path / "images" / "deep"
    images.mkdir(parents=True)
    for i, picture in enumerate(pictures(3)):
        cv2.imwrite(str(images / f"{i}.png"), picture)
    cv2.imwrite(str(images / "grey.png"), pictures(1)[0][..., 0])
    assert main("predict", ["--model", str(folder), str(tmp_path / "images"), "--topk", "2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    (images / "broken.jpg").write_bytes(b"no picture")
    table = str(tmp_path / "out.csv")
    assert main("predict", ["--model", str(folder), f"{images}/*", "--json", "--csv", table]) == 2
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert len(lines) == 4 and "1 of 5" in err and "broken.jpg" in err
    predictor = ppattn.Predictor(folder)
    for line in lines:
        ((best, _), *_) = predictor.predict([line["image"]])[0]
        assert line["predictions"][0]["name"] == best
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * 5 and rows[0]["rank"] == "1"
