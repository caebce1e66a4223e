"""Evaluation against numpy and sklearn, its files, and the eval verb."""

import json
import shutil
import unicodedata
from itertools import product
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from PIL import Image
from scipy.special import softmax
from sklearn import metrics as sk

import ppattn
from ppattn.cli import main
from ppattn.config import make_config
from ppattn.data import Preprocess, build_datasets
from ppattn.data.classes import _imagenet, class_numbers, imagenet_names, same_classes
from ppattn.data.splits import Split, Splits
from ppattn.engine import trainer
from ppattn.engine.evaluate import Evaluation, evaluate, match_classes, model_runner, write_evaluation
from ppattn.engine.teacher import compare_data
from ppattn.errors import UserError
from ppattn.plots.evaluation import confusion
from ppattn.trained import load_run
from tests.helpers.abridged import whole
from tests.helpers.data_sets import fill, write_image
from tests.helpers.runs import read_json, state, table, tiny

pytestmark = pytest.mark.slow

KEYS = ["top1", "top5", "balanced", "f1", "majority", "loss", "images", "images_per_second", "seconds"]


def metrics(folder) -> dict:
    return read_json(folder / "metrics.json")


def parts(logits, labels, sizes, leave_out=()):
    """What `EvalLoader` yields; the images are the logits themselves."""
    start = 0
    for size in sizes:
        indices = np.array([i for i in range(start, start + size) if i not in leave_out], "int64")
        yield logits[indices], labels[indices], indices
        start += size


def test_evaluation_weighs_every_image_the_same():
    rng = np.random.default_rng(4)
    logits, labels = rng.normal(size=(43, 7)), rng.integers(0, 7, 43)
    result = evaluate(lambda x: x, parts(logits, labels, [20, 20, 3]), Split(labels, "."))
    predicted = logits.argmax(1)
    truth = {
        "top1": (predicted == labels).mean(),
        "top5": sk.top_k_accuracy_score(labels, logits, k=5),
        "balanced": sk.balanced_accuracy_score(labels, predicted),
        "f1": sk.f1_score(labels, predicted, average="macro"),
        "majority": np.bincount(labels).max() / 43,
        "loss": sk.log_loss(labels, softmax(logits, axis=1)),
    }
    for key, value in truth.items():
        assert result.metrics[key] == pytest.approx(value, rel=1e-12)
    assert list(result.metrics) == KEYS and result.metrics["images"] == 43
    assert np.array_equal(result.predicted, predicted)


def test_equal_logits_are_no_success():
    result = evaluate(lambda x: x, parts(np.zeros((9, 3)), np.arange(9) % 3, [9]), Split(np.arange(9) % 3, "."))
    assert result.metrics["top1"] == pytest.approx(1 / 3)
    assert "top5" not in result.metrics  # three classes


def test_unreadable_images_count_as_wrong():
    logits, labels = np.eye(4)[np.arange(10) % 4], np.arange(10) % 4
    result = evaluate(lambda x: x, parts(logits, labels, [5, 5], leave_out=(2, 7)), Split(labels, "."))
    assert result.metrics["top1"] == 0.8 and (result.metrics["images"], result.metrics["unreadable"]) == (10, 2)
    with pytest.raises(UserError, match="None of the 10 images"):
        evaluate(lambda x: x, parts(logits, labels, [5, 5], leave_out=range(10)), Split(labels, "."))


def test_confusion_is_sklearns_also_with_one_class():
    labels, predicted = np.random.default_rng(0).integers(0, 4, (2, 50))
    counts, names = confusion(labels, predicted, list("abcd"))
    assert np.array_equal(counts, sk.confusion_matrix(labels, predicted)) and names == list("abcd")
    predicted[7:9] = -1
    counts, names = confusion(labels, predicted, list("abcd"))
    truth = sk.confusion_matrix(labels, predicted, labels=[0, 1, 2, 3, -1])[:4]
    assert np.array_equal(counts, truth) and names == [*"abcd", "unreadable"]
    assert confusion(np.zeros(3, int), np.zeros(3, int), ["a"])[0].tolist() == [[3]]  # of which sklearn warns


def test_files_of_an_evaluation(tmp_path, unabridged):
    labels = np.array([0, 0, 1, 1, 1, 2])
    predicted = np.array([0, 1, 1, 1, 2, -1])  # the last one could not be read
    image = np.full((6, 5, 3), 128, np.uint8)
    split = SimpleNamespace(input_kind="images", labels=labels, image=lambda i: image, table=None)
    write_evaluation(tmp_path, Evaluation({"top1": 0.5}, predicted), split, ["cat", "dog", "emu"], Preprocess((8, 8)))
    assert metrics(tmp_path) == {"top1": 0.5}
    rows = table(tmp_path / "per_class.csv")
    assert [row["class"] for row in rows] == ["cat", "dog", "emu"]
    dog = [rows[1][key] for key in ("images", "mostly_taken_for", "times", "accuracy", "precision")]
    assert dog == ["3", "emu", "1", "0.6667", "0.6667"]
    assert [(row["images"], row["unreadable"]) for row in rows] == [("2", "0"), ("3", "0"), ("1", "1")]
    assert sum(int(row["images"]) * float(row["accuracy"]) for row in rows) == pytest.approx(3, abs=1e-3)
    split.labels = labels[:-1]
    write_evaluation(tmp_path, Evaluation({}, predicted[:-1]), split, ["cat", "dog", "emu"], Preprocess((8, 8)))
    assert "unreadable" not in table(tmp_path / "per_class.csv")[0]
    for name in ("confusion_matrix.png", "predictions.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    trainer.train(tiny(folder, train={"max_steps": 12}, model={"name": "deit_tiny", "attention": "inline"}))
    return folder


def test_eval_of_a_run_and_of_its_weights(trained, tmp_path, capsys, refused):
    with whole():
        assert main("eval", ["--run", str(trained)]) == 0
    written = metrics(trained / "eval")
    assert list(written) == KEYS
    last = table(trained / "metrics.csv")[-1]
    assert written["top1"] == pytest.approx(float(last["top1"]), abs=1e-6)
    assert written["loss"] == pytest.approx(float(last["val_loss"]), rel=1e-6)
    names = {path.name for path in (trained / "eval").iterdir()}
    pictures = {f"{name}.{suffix}" for name in ("confusion_matrix", "predictions") for suffix in ("png", "svg")}
    assert names == {"metrics.json", "per_class.csv", "confusion_matrix.csv", "errors.csv", "errors.html", *pictures}
    assert "top-1" in capsys.readouterr().out
    best = trained / "checkpoints/best.safetensors"
    given = ["-c", trained / "config.yaml", "--output", tmp_path / "out"]
    for call, folder in (
        ([*given, "--weights", trained / "checkpoints/best"], tmp_path / "out"),
        ([*given, "--weights", trained / "checkpoints/latest.safetensors"], tmp_path / "out"),
        (["--run", trained / "checkpoints"], trained / "eval"),
        (["--run", best], trained / "eval"),
        (["--run", shutil.copy(best, tmp_path / "alone.safetensors")], tmp_path / "eval"),
    ):
        shutil.rmtree(folder, ignore_errors=True)
        assert main("eval", [*map(str, call)]) == 0 and metrics(folder)["top1"] == written["top1"]
    assert "is not a directory" in refused("eval", "--run", trained, "--output", best / "eval", "-o", "data.root=no")


def test_eval_with_mirror_images_averages_logits(trained, tmp_path, capsys):
    config, model, _, preprocess = load_run(trained)
    rng = np.random.default_rng(5)  # after 12 steps the answers hardly depend on the image
    for tensor in model.parameters():
        if tensor.ndim > 1:
            tensor.set_value(0.5 * rng.normal(size=tensor.shape).astype("float32"))
    paddle.save(model.state_dict(), str(tmp_path / "random.pdparams"))
    random = ["-c", str(trained / "config.yaml"), "--weights", str(tmp_path / "random.pdparams")]
    split, run = build_datasets(config).val, model_runner(model)
    images = np.stack([preprocess(split.image(i)) for i in range(len(split))])
    plain, mirrored = run(images).astype("float64"), run(images[:, :, :, ::-1].copy())
    one, truth = (sk.log_loss(split.labels, softmax(x, axis=1)) for x in (plain, (plain + mirrored) / 2))
    assert abs(one / truth - 1) > 0.01 and main("eval", [*random, "--mirror", "--output", str(tmp_path / "own")]) == 0
    assert "and their mirror images" in capsys.readouterr().out
    assert main("export", [*random, "--output", str(tmp_path / "out")]) == 0
    assert main("eval", ["--model", str(tmp_path / "out"), "--mirror"]) == 0
    for folder in (tmp_path / "own", tmp_path / "out/eval_mirror"):
        written = metrics(folder)
        assert written["mirror"] is True and written["loss"] == pytest.approx(truth, rel=1e-4)
    assert main("export", [*random, "--output", str(tmp_path / "out")]) == 0


def test_eval_of_an_exported_model(trained, tmp_path, capsys):
    """The predictor answers probabilities; the cross-entropy comes out the same."""
    out = str(tmp_path / "out")
    assert main("export", ["--run", str(trained), "--output", out]) == 0
    assert main("eval", ["--run", str(trained)]) == main("eval", ["--model", out]) == 0
    exported, own = metrics(tmp_path / "out/eval"), metrics(trained / "eval")
    assert exported["top1"] == own["top1"] and exported["loss"] == pytest.approx(own["loss"], rel=1e-4)
    assert "no effect" not in capsys.readouterr().err
    changes = ["data.crop_ratio=0.5", "data.mean=[0.1, 0.2, 0.3]", "model.img_size=16"]
    assert main("eval", ["--model", out, "-o", *changes]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "has no effect" in line]
    assert {line.split(" = ")[0] for line in said} == {change.split("=")[0] for change in changes}
    assert f"data.crop_ratio = 0.5 has no effect: {out} has {load_run(trained)[3].crop_ratio}" in said


@pytest.fixture(scope="module")
def animals(tmp_path_factory):
    """A run on class folders; it is trained for two steps."""
    root = tmp_path_factory.mktemp("animals")
    fill(root / "data", ["train", "val"], ("ant", "bee", "café", "dog"), 3, (9, 8, 3))
    data = {"name": "folder", "root": str(root / "data"), "batch_size": 4}
    trainer.train(tiny(root / "run", train={"max_steps": 2}, data=data))
    return root


@pytest.mark.parametrize("layout", ["val", "test", "."])
def test_eval_goes_by_class_names(animals, tmp_path, layout, caplog):
    """On a set without training images, without one of the classes, and with accents from a Mac."""
    for name in ("ant", "café", "dog"):
        shutil.copytree(animals / "data/val" / name, tmp_path / layout / unicodedata.normalize("NFD", name))
    call = ["--run", str(animals / "run"), "--output", str(tmp_path / "out"), "-o"]
    assert main("eval", [*call, f"data.root={tmp_path}"]) == 0
    found = table(tmp_path / "out/per_class.csv")
    assert "no images of 1 of the 4 classes to evaluate on: bee" in caplog.text
    assert [row["images"] for row in found] == ["3", "0", "3", "3"] and found[1]["accuracy"] == ""
    assert main("eval", [*call, f"data.root={animals / 'data'}"]) == 0
    whole = table(tmp_path / "out/per_class.csv")
    assert [row["accuracy"] for row in whole][::2] == [row["accuracy"] for row in found][::2]


def test_predict_tells_every_repeated_file(animals, capsys):
    image = str(animals / "data/val/ant/0.png")
    assert main("predict", ["--run", str(animals / "run"), image, image]) == 0
    assert capsys.readouterr().out.count("ant/0.png") == 2
    for threshold, unknown in ((0.99, 1), (0.01, 0)):
        assert main("predict", ["--run", str(animals / "run"), image, "--threshold", str(threshold)]) == 0
        assert capsys.readouterr().out.count("  unknown ") == unknown


def test_imagenet_has_names_in_the_order_of_its_labels(caplog):
    """Anchors from the published list: first and last, the two cranes, a dog and a fruit."""
    names = imagenet_names()
    known = {0: "tench", 134: "crane (bird)", 207: "golden retriever", 517: "crane (machine)", 954: "banana"}
    assert {i: names[i] for i in known} == known and names[999] == "toilet tissue" and len(set(names)) == 1000
    synsets = [synset for synset, _ in _imagenet()]
    assert synsets == sorted(synsets) and synsets[207] == "n02099601"
    words = [f"{name}, and more" if i == 3 else name for i, name in enumerate(names)]
    numbers = [str(i) for i in range(1000)]
    assert all(same_classes(names, others) for others in (synsets, words, numbers))
    for one, other in ((names, synsets[::-1]), (names, sorted(names)), (numbers, sorted(numbers)), ("ab", "ba")):
        assert not same_classes([*one], [*other])
    assert class_numbers(names, ["n02099601", "n07753592"]) == [207, 954]
    assert class_numbers(names, ["banana", "unicorn"]) == [954, None] and class_numbers([*"ba"], [*"01"]) == [0, 1]
    assert class_numbers(["0", "1", "10", "2"], ["0", "1", "2"]) == [0, 1, 3]  # folders are in this order
    split = Split(np.arange(2), ".")
    for classes, told in ((["ant", "bee", "cow"], True), (["0", "1", "2"], False), (names, True)):
        match_classes(Splits(split, split, ["0", "1"]), classes)
        assert (f"matched by their order: {classes[0]} as 0" in caplog.text) == told
        caplog.clear()
    distilling = make_config({"distill": {"teacher": "teacher", "logits": 1.0}})
    compare_data("teacher", distilling, Splits(split, split, ["ant", "bee"]), ["0", "1"], Preprocess(32))
    assert "matched by their order: 0 as ant" in caplog.text
    split.table = np.eye(2)  # several labels per image
    with pytest.raises(UserError, match=r"set distill.logits to 0"):
        compare_data("teacher", distilling, Splits(split, split, ["ant", "bee"]), ["ant", "bee"], Preprocess(32))
    assert class_numbers(["b", "a"], ["a", "b"]) == [1, 0] and class_numbers(["b", "a", "c"], ["0", "1"]) == [0, 1]


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    """A run with 300 images held out."""
    folder = tmp_path_factory.mktemp("held_out")
    trainer.train(tiny(folder, train={"max_steps": 2, "seed": 5}, data={"holdout": 300}))
    return folder


def overlap(seed: int, images: int) -> int:
    """Images held out by this seed that seed 5 trains on when 300 are held out."""
    trained = build_datasets(tiny("x", train={"seed": 5}, data={"holdout": 300})).train
    other = build_datasets(tiny("x", train={"seed": seed}, data={"holdout": images})).val
    return len({trained.name(i) for i in range(len(trained))} & {other.name(i) for i in range(len(other))})


def test_eval_tells_of_images_that_were_trained_on(held_out, tmp_path, capsys):
    def told(*overrides: str) -> str:
        assert main("eval", ["--run", str(held_out), "--output", str(tmp_path), "-o", *overrides]) == 0
        return capsys.readouterr().err

    for honest in (["data.holdout=300"], ["data.holdout=0"], ["data.holdout=0", "train.seed=7"]):
        assert told(*honest) == "" and "trained_on" not in metrics(tmp_path)
    for seed, images in ((6, 300), (5, 200), (5, 400)):
        count, said = overlap(seed, images), told(f"data.holdout={images}", f"train.seed={seed}")
        assert (f"trained on {count:,} of these {images} images" in said) == (count > 0)
        assert metrics(tmp_path).get("trained_on", 0) == count
    assert overlap(6, 300) > 150
    whole = ["-c", str(held_out / "config.yaml"), "--output", str(tmp_path)]
    assert main("eval", [*whole, "--weights", str(held_out), "-o", "train.seed=6"]) == 0
    assert metrics(tmp_path)["trained_on"] == overlap(6, 300)
    assert main("export", ["--run", str(held_out), "--output", str(tmp_path / "it")]) == 0
    assert main("eval", ["--model", str(tmp_path / "it"), "-o", "train.seed=6"]) == 0
    assert metrics(tmp_path / "it/eval")["trained_on"] == overlap(6, 300)


@pytest.mark.parametrize("start,exported", [("model.weights", 0), ("distill.teacher", 0), ("distill.teacher", 1)])
def test_training_tells_of_images_that_its_start_or_teacher_was_trained_on(held_out, tmp_path, start, exported):
    section, _, key = start.partition(".")
    if exported:
        assert main("export", ["--run", str(held_out), "--output", str(tmp_path / "it")]) == 0
    source = str(tmp_path / "it" if exported else held_out)
    for seed, expected in ((5, 0), (6, overlap(6, 300))):
        more = {"train": {"max_steps": 1, "seed": seed}, "data": {"holdout": 300}}
        trainer.train(tiny(tmp_path / f"{seed}", **more | {section: {key: source} | more.get(section, {})}))
        log = (tmp_path / f"{seed}/log.txt").read_text()
        said = f"warning: {start} was trained on {expected:,} of the 300 validation images"
        assert (said in log and "data.holdout=300 and data.holdout_seed=5" in log) if expected else "warning" not in log


def test_training_tells_of_validation_on_training_images(folder, tmp_path):
    for given, said in ((None, False), ("train", True)):
        data = {"name": "folder", "root": str(folder), "batch_size": 5, "val": given}
        trainer.train(tiny(tmp_path / str(given), data=data, train={"max_steps": 1}))
        log = (tmp_path / str(given) / "log.txt").read_text()
        assert ("15 of the validation images are training images" in log) == said


def uneven(root, images=40):
    for part, i in product(("train", "val"), range(images)):
        write_image(root / part / ("usual" if i % 20 else "rare") / f"{i}.png", [len(part), i], (8, 8, 3))
    return {"name": "folder", "root": str(root), "batch_size": 8}


def test_a_balanced_run_resumes_bit_for_bit(tmp_path):
    data = uneven(tmp_path / "data") | {"sampler": "balanced"}
    loss, augment = {"name": "focal", "class_weights": "balanced"}, {"pad_crop": 1, "repeats": 2}
    changes = {"data": data, "loss": loss, "augment": augment}
    for folder, stop in (("whole", 9), ("parts", 7), ("parts", 9)):
        run = tiny(tmp_path / folder, **changes, train={"epochs": 2, "max_steps": stop, "best": "balanced"})
        summary = trainer.train(run, resume="auto")
    assert summary["majority"] == 0.95
    np.testing.assert_equal(state(tmp_path / "whole"), state(tmp_path / "parts"))


def several(root, form):
    """24 images in colours whose red, green and blue are on or off, three labels."""
    rng = np.random.default_rng(0)
    for part in ("train", "val"):
        lines = []
        (root / part).mkdir(parents=True)
        for i in range(24):
            sets = rng.integers(0, 2, 3)
            sets[rng.integers(3)] = 1
            Image.new("RGB", (8, 8), tuple((sets * rng.integers(128, 256, 3)).tolist())).save(root / part / f"{i}.png")
            labels = sets.astype(str) if form == "0,1" else np.array(["red", "4 green", "blue"])[sets > 0]
            lines.append(f"{part}/{i}.png\t{','.join(labels)}\n")
        (root / f"{part}_list.txt").write_text("".join(lines))
    if form == "0,1":
        (root / "classes.txt").write_text("red\ngreen\nblue\n")
    return {"name": "list", "root": str(root), "batch_size": 8}


@pytest.mark.parametrize("form", ["0,1", "names"])
def test_several_labels_are_trained_evaluated_exported_and_predicted(tmp_path, form, capsys, refused):
    data = several(tmp_path / "data", form=form)
    with pytest.raises(UserError, match="loss.name to bce"):
        build_datasets(tiny(tmp_path, data=data))
    changes = {"loss": {"name": "bce"}, "train": {"epochs": 12}, "optimizer": {"name": "adam", "lr": 0.02}}
    config, run, exported = tiny(tmp_path / "run", data=data, **changes), str(tmp_path / "run"), str(tmp_path / "out")
    assert trainer.train(config)["map"] > 0.85
    assert main("eval", ["--run", run]) == main("export", ["--run", run, "--output", exported]) == 0
    assert main("eval", ["--model", exported]) == 0
    metrics, again = (read_json(tmp_path / name / "eval/metrics.json") for name in ("run", "out"))
    assert [again[key] for key in ("map", "loss")] == pytest.approx([metrics["map"], metrics["loss"]], abs=1e-3)
    rows = {row["class"]: row for row in table(tmp_path / "run/eval/per_class.csv")}
    splits = build_datasets(config)
    truth = splits.val.table[splits.val.labels]
    shown = [splits.val.image(i) for i in range(len(truth))]
    found = [dict(row) for row in ppattn.Predictor(exported).predict(shown, topk=3)]
    scores = np.array([[row[name] for name in splits.classes] for row in found])
    assert metrics["map"] == pytest.approx(sk.average_precision_score(truth, scores), abs=1e-3)
    assert metrics["f1"] == pytest.approx(sk.f1_score(truth, scores >= 0.5, average="macro"), abs=1e-3)
    assert [int(float(rows[name]["images"])) for name in splits.classes] == truth.sum(0).astype(int).tolist()
    assert scores.sum(1).max() > 1.5  # sigmoid, not softmax
    capsys.readouterr()
    assert main("predict", ["--run", run, "--json", f"{tmp_path}/data/val/0.png"]) == 0
    said = json.loads(capsys.readouterr().out)["predictions"]
    assert {row["name"]: row["score"] for row in said} == pytest.approx(found[0], abs=1e-4)
    assert main("check", ["-c", f"{run}/config.yaml"]) in (0, 2) and main("analyze", ["gradcam", "--run", run]) == 0
    drawn = read_json(tmp_path / "run/analysis/gradcam.json")["runs"]["run"]
    sets = {", ".join(name for name, on in zip(splits.classes, row, strict=True) if on) for row in truth}
    assert {row["class"] for row in drawn} <= sets and any(", " in row["class"] for row in drawn)
    assert all("one label each" in refused("analyze", verb, "--run", run) for verb in ("mask", "embed"))
    said = refused("linearize", "--model", run, "--to", "linear", "--output", tmp_path / "x")
    assert "set distill.logits to 0" in said and not (tmp_path / "x").exists()  # nothing was trained before


def test_four_channels_of_twelve_bits_are_evaluated_exported_and_analysed(tmp_path, capsys):
    rng, (run, exported, file) = np.random.default_rng(0), (str(tmp_path / n) for n in ("run", "out", "val/a/0.npy"))
    for part, name, i in product(("train", "val"), "ab", range(4)):
        (tmp_path / part / name).mkdir(parents=True, exist_ok=True)
        np.save(tmp_path / part / name / f"{i}.npy", rng.integers(0, 4096, (8, 8, 4)).astype("uint16"))
    data = {"name": "folder", "root": str(tmp_path), "max_value": 4095, "batch_size": 4}
    trainer.train(tiny(run, data=data, model={"in_chans": 4}))
    assert main("eval", ["--run", run]) == main("export", ["--run", run, "--output", exported]) == 0
    assert main("eval", ["--model", exported]) == main("analyze", ["gradcam", "--run", run, "--images", file]) == 0
    assert "was trained on" not in capsys.readouterr().err  # val/a/0.npy is not train/a/0.npy
    metrics, again = (read_json(tmp_path / name / "eval/metrics.json") for name in ("run", "out"))
    assert again["loss"] == pytest.approx(metrics["loss"], abs=1e-4)
    (row,) = read_json(tmp_path / "run/analysis/gradcam.json")["runs"]["run"]
    _, model, _, preprocess = load_run(run)
    image = (np.rint(np.load(file) / 4095 * 255) / 255 - np.resize(preprocess.mean, 4)) / np.resize(preprocess.std, 4)
    logits = model(paddle.to_tensor(image.transpose(2, 0, 1)[None].astype("float32")))
    assert row["logit"] == pytest.approx(float(logits.max()), abs=1e-4)


def test_an_evaluation_lists_the_wrong_images_the_surest_first(tmp_path):
    trainer.train(tiny(tmp_path / "run", data=uneven(tmp_path / "data")))
    assert main("eval", ["--run", str(tmp_path / "run")]) == 0
    folder = tmp_path / "run/eval"
    rows = table(folder / "errors.csv")
    assert len(rows) == round((1 - read_json(folder / "metrics.json")["top1"]) * 40)
    scores = [float(row["score"]) for row in rows]
    assert scores == sorted(scores, reverse=True) and scores[0] > 0.5
    assert all(row["label"] != row["predicted"] and float(row["score_of_label"]) <= float(row["score"]) for row in rows)
    assert (tmp_path / "data/val" / rows[0]["image"]).is_file()
    page = (folder / "errors.html").read_text()
    assert page.count("<img") == len(rows) and rows[0]["image"] in page
    counts = table(folder / "confusion_matrix.csv")
    assert [row["true class"] for row in counts] == ["rare", "usual"]
    assert sum(int(row[name]) for row in counts for name in ("rare", "usual")) == 40
