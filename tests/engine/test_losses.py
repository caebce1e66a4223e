"""Losses, samplers and scores for uneven classes and for several labels, against numpy and sklearn."""

import json

import numpy as np
import paddle
import pytest
from PIL import Image
from sklearn.metrics import average_precision_score, f1_score

import ppattn
from ppattn.cli import main
from ppattn.config import make_config
from ppattn.data import build_datasets
from ppattn.data.loader import balanced_order
from ppattn.engine import trainer
from ppattn.engine.loss import criterion
from ppattn.errors import UserError
from tests.helpers.data_sets import write_image
from tests.helpers.runs import table, tiny


def value(logits, targets, counts=(3, 1, 2), **settings):
    settings = make_config({"loss": settings}).loss
    return float(criterion(settings, np.array(counts))(paddle.to_tensor(logits), paddle.to_tensor(targets)))


@pytest.mark.parametrize("weights", [None, [0.5, 2.0, 1.0], "balanced"])
@pytest.mark.parametrize("name", ["ce", "focal", "bce"])
def test_losses_are_their_formulas(name, weights):
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(5, 3)).astype("f4"), rng.dirichlet(np.ones(3), 5).astype("f4")
    w = np.array([6 / 9, 2, 1] if weights == "balanced" else weights or [1, 1, 1])
    p, sigmoid = np.exp(logits) / np.exp(logits).sum(1, keepdims=True), 1 / (1 + np.exp(-logits.astype("f8")))
    expected = {
        "ce": -(w * targets * np.log(p)).sum(1).mean(),
        "focal": -(w * targets * (1 - p) ** 1.5 * np.log(p)).sum(1).mean(),
        "bce": -(w * (targets * np.log(sigmoid) + (1 - targets) * np.log(1 - sigmoid))).mean(),
    }
    found = value(logits, targets, name=name, gamma=1.5, class_weights=weights)
    assert found == pytest.approx(expected[name], rel=1e-5)


def test_class_weights_are_one_per_class():
    with pytest.raises(UserError, match="has 2 numbers, the data 3 classes"):
        value(np.zeros((1, 3), "f4"), np.zeros((1, 3), "f4"), class_weights=[1.0, 2.0])


def test_a_balanced_epoch_has_every_class_equally_often():
    labels = np.repeat([0, 1, 3], [90, 7, 3])
    order = balanced_order(labels, np.random.default_rng(1))
    assert order.shape == (100, 2) and sorted(np.bincount(labels[order[:, 0]])) == [0, 33, 33, 34]
    assert len(np.unique(order, axis=0)) == 100  # a copy has its own number, hence its own augmentation
    assert len(set(order[labels[order[:, 0]] == 0, 0].tolist())) >= 33


def uneven(root, images=40):
    for part in ("train", "val"):
        for i in range(images):
            name = "rare" if i % 20 == 0 else "usual"
            write_image(root / part / name / f"{i}.png", [len(part), i], (8, 8, 3))
    return {"name": "folder", "root": str(root), "batch_size": 8}


@pytest.mark.slow
def test_a_balanced_run_resumes_bit_for_bit(tmp_path):
    data = uneven(tmp_path / "data") | {"sampler": "balanced"}
    loss, augment = {"name": "focal", "class_weights": "balanced"}, {"pad_crop": 1, "repeats": 2}
    changes = {"data": data, "loss": loss, "augment": augment}
    for folder, steps in (("whole", [9]), ("parts", [7, 9])):
        for stop in steps:
            run = tiny(tmp_path / folder, **changes, train={"epochs": 2, "max_steps": stop, "best": "balanced"})
            summary = trainer.train(run, resume="auto")
    assert summary["majority"] == 0.95
    one, other = (ppattn.weights.read(tmp_path / folder / "checkpoints/latest")[0] for folder in ("whole", "parts"))
    assert all(one[name].tobytes() == other[name].tobytes() for name in one)


def several(root, images=24, form="0,1"):
    """Images whose red, green and blue halves are on or off, three labels."""
    rng = np.random.default_rng(0)
    for part in ("train", "val"):
        lines = []
        for i in range(images):
            sets = rng.integers(0, 2, 3)
            sets[rng.integers(3)] = 1
            image = np.broadcast_to(255 * sets, (8, 8, 3)).astype(np.uint8)
            (root / part).mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(root / part / f"{i}.png")
            names = [name for name, on in zip(("red", "green", "blue"), sets, strict=True) if on]
            lines.append(f"{part}/{i}.png\t{','.join(map(str, sets)) if form == '0,1' else ','.join(names)}\n")
        (root / f"{part}_list.txt").write_text("".join(lines))
    if form == "0,1":
        (root / "classes.txt").write_text("red\ngreen\nblue\n")
    return {"name": "list", "root": str(root), "batch_size": 8}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["0,1", "names"])
def test_several_labels_are_trained_evaluated_exported_and_predicted(tmp_path, form, capsys):
    data = several(tmp_path / "data", form=form)
    with pytest.raises(UserError, match="loss.name to bce"):
        build_datasets(tiny(tmp_path, data=data))
    optimizer = {"name": "adam", "lr": 0.02}
    run = tiny(tmp_path / "run", data=data, loss={"name": "bce"}, train={"epochs": 12}, optimizer=optimizer)
    summary = trainer.train(run)
    assert summary["map"] > 0.85
    assert main("eval", ["--run", str(tmp_path / "run")]) == 0
    metrics = json.loads((tmp_path / "run/eval/metrics.json").read_text())
    rows = {row["class"]: row for row in table(tmp_path / "run/eval/per_class.csv")}
    assert main("export", ["--run", str(tmp_path / "run"), "--output", str(tmp_path / "exported")]) == 0
    assert main("eval", ["--model", str(tmp_path / "exported")]) == 0
    again = json.loads((tmp_path / "exported/eval/metrics.json").read_text())
    for key in ("map", "loss"):
        assert again[key] == pytest.approx(metrics[key], abs=1e-3)
    predictor = ppattn.Predictor(tmp_path / "exported")
    splits = build_datasets(run)
    truth = splits.val.table[splits.val.labels]
    found = [dict(row) for row in predictor.predict([splits.val.image(i) for i in range(len(truth))], topk=3)]
    scores = np.array([[row[name] for name in splits.classes] for row in found])
    assert metrics["map"] == pytest.approx(average_precision_score(truth, scores), abs=1e-3)
    assert metrics["f1"] == pytest.approx(f1_score(truth, scores >= 0.5, average="macro"), abs=1e-3)
    assert [int(float(rows[name]["images"])) for name in splits.classes] == truth.sum(0).astype(int).tolist()
    assert scores.sum(1).max() > 1.5  # sigmoid, not softmax
    capsys.readouterr()
    assert main("predict", ["--run", str(tmp_path / "run"), "--json", f"{tmp_path}/data/val/0.png"]) == 0
    said = json.loads(capsys.readouterr().out)["predictions"]
    assert {row["name"]: row["score"] for row in said} == pytest.approx(found[0], abs=1e-4)
    assert main("check", ["-c", str(tmp_path / "run/config.yaml")]) in (0, 2)


@pytest.mark.slow
def test_an_evaluation_lists_the_wrong_images_the_surest_first(tmp_path):
    data = uneven(tmp_path / "data")
    trainer.train(tiny(tmp_path / "run", data=data))
    assert main("eval", ["--run", str(tmp_path / "run")]) == 0
    folder = tmp_path / "run/eval"
    rows, metrics = table(folder / "errors.csv"), json.loads((folder / "metrics.json").read_text())
    assert len(rows) == round((1 - metrics["top1"]) * 40)
    scores = [float(row["score"]) for row in rows]
    assert scores == sorted(scores, reverse=True) and scores[0] > 0.5
    assert all(row["label"] != row["predicted"] and float(row["score_of_label"]) <= float(row["score"]) for row in rows)
    assert (tmp_path / "data/val" / rows[0]["image"]).is_file()
    page = (folder / "errors.html").read_text()
    assert page.count("<img") == len(rows) and rows[0]["image"] in page
    counts = table(folder / "confusion_matrix.csv")
    assert [row["true class"] for row in counts] == ["rare", "usual"]
    assert sum(int(row[name]) for row in counts for name in ("rare", "usual")) == 40
