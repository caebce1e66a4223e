"""Weights inside the package: logits of the runs that they are from, cards, size, and how a newcomer uses them."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import paddle
import pytest

import ppattn
from ppattn import weights, zoo
from ppattn.cli import main
from ppattn.config import load_config
from ppattn.data.cifar import CIFAR
from ppattn.engine import trainer
from ppattn.zoo import table
from tests.helpers.foreign import images_of
from tests.helpers.runs import tiny

ROOT = Path(__file__).resolve().parents[2]
FOLDER = table.RELEASED.parent
LOGITS = json.loads((ROOT / "tests/zoo/released.json").read_text())
NAMES = zoo.table.released()


def seeded_logits(model) -> np.ndarray:
    model.eval()
    return model(images_of(0, 2, model.in_chans, *model.img_size)).numpy()


def test_every_released_model_has_its_files_and_they_are_small():
    assert set(NAMES) == set(LOGITS) and set(NAMES) <= set(ppattn.list_models(pretrained=True))
    files = {f"{name}{suffix}" for name in NAMES for suffix in (".safetensors", ".md")}
    assert {path.name for path in FOLDER.iterdir()} == {"models.yaml", *files}
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 25e6


CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
PIXELS = ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616])


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_run(name, monkeypatch):
    """Its float32 weights gave the stored ones; a half float keeps 11 bits."""
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("the network was asked"))
    found, expected = seeded_logits(ppattn.create_model(name, pretrained=True)), np.array(LOGITS[name])
    assert np.abs(found - expected).max() < 5e-3 * np.abs(expected).max()
    tensors, metadata = weights.read(zoo.weights_file(name))
    assert all(array.dtype == ("float16" if array.ndim > 1 else "float32") for array in tensors.values())
    assert metadata["config"]["model"]["name"] == name and metadata["classes"] == CLASSES and len(metadata["data"]) == 2
    kind = CIFAR["cifar10"]
    assert (metadata["preprocess"]["mean"], metadata["preprocess"]["std"]) == PIXELS == (kind.mean, kind.std)


@pytest.mark.parametrize("name", NAMES)
def test_the_card_has_the_accuracy_and_the_command_of_the_run(name):
    """Its settings are those that the weights file holds; what had no meaning then has its default."""
    card = (FOLDER / f"{name}.md").read_text()
    accuracy = re.search(r"Test accuracy: \*\*(\d+\.\d\d) %\*\*", card)[1]
    assert zoo.model_entry(name).note.endswith(f"{accuracy} %") and re.search(r"\| commit \| [0-9a-f]{40}", card)
    command = re.search(r"\| command \| `python tools/train.py -c (\S+) --resume auto -o (.*)` \|", card)
    config, _ = load_config(ROOT / command[1], shlex.split(command[2]))
    stored, now = weights.read(zoo.weights_file(name))[1]["config"], config.model_dump()
    for section in ("augment", "optimizer", "schedule", "loss"):
        assert {key: now[section].get(key) for key in stored[section]} == stored[section], section
    assert all(now["train"][key] == stored["train"][key] for key in ("epochs", "seed"))
    arguments = zoo.model_entry(config.model.name).arguments | config.model.arguments() | {"num_classes": 10}
    assert zoo.model_entry(name).arguments.items() <= arguments.items()


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--model", "--run"])
def test_a_name_is_enough_to_predict(option, tmp_path, capsys):
    picture = np.random.default_rng(0).integers(0, 256, (45, 50, 3), np.uint8)
    cv2.imwrite(str(tmp_path / "picture.png"), picture)
    assert main(["predict", option, NAMES[0], str(tmp_path / "picture.png"), "--topk", "10", "--json"]) == 0
    shown = {row["name"]: row["score"] for row in json.loads(capsys.readouterr().out)["predictions"]}
    _, model, classes, preprocess = ppattn.load_run(NAMES[0])
    with paddle.no_grad():
        logits = model(paddle.to_tensor(preprocess(picture[..., ::-1])[None])).numpy()[0].astype("float64")
    assert shown == pytest.approx(dict(zip(classes, np.exp(logits) / np.exp(logits).sum(), strict=True)), abs=2e-6)
    assert preprocess.img_size == model.img_size and preprocess.std != (1.0, 1.0, 1.0)


@pytest.mark.slow
def test_the_script_releases_a_run(tmp_path):
    """In a copy of what it writes: the last epoch, its accuracy, its logits, and a second model beside the first."""
    from scripts import release_weights

    run, name = tmp_path / "inline_deit_nano", "inline_deit_nano_digits"
    model = {"name": "deit_nano", "attention": "inline", "embed_dim": 12, "depth": 1, "img_size": 8, "patch_size": 2}
    summary = trainer.train(tiny(run, model=model, train={"epochs": 2}), command="tools/train.py -c x.yaml")
    (tmp_path / "released").mkdir()
    (tmp_path / "released/models.yaml").write_text("{}")
    shutil.copy(table.COSTS, tmp_path)
    program = f"""
import sys
from pathlib import Path
from ppattn.cli import main
from ppattn.zoo import table
from scripts import release_weights
here = Path({str(tmp_path)!r})
table.RELEASED, table.COSTS, table.PACKAGE = here / "released/models.yaml", here / "costs.csv", here
release_weights.LOGITS = here / "logits.json"
sys.argv[1:] = [{str(run)!r}, "--about-data", "eight by eight"]
release_weights.main()
sys.exit(main(["eval", "--model", {name!r}, "--output", str(here / "eval")]))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "eval" / "metrics.json").read_text())
    assert metrics["images"] == 360 and abs(metrics["top1"] - summary["top1"]) <= 2 / 360
    assert f"released as {name}" in done.stdout and release_weights.LIMIT == 25e6
    last = weights.read(run / "checkpoints" / "latest")[0]
    tensors, metadata = weights.read(tmp_path / "released" / name)
    assert tensors.keys() == {key for key in last if "/" not in key}
    assert all(np.array_equal(array, last[key].astype(array.dtype)) for key, array in tensors.items())
    assert str(tmp_path) not in json.dumps(metadata)
    card = (tmp_path / "released" / f"{name}.md").read_text()
    assert "eight by eight" in card and f"run's float32 weights: {100 * summary['top1']:.2f} %" in card
    logits = json.loads((tmp_path / "logits.json").read_text())[name]
    trained = ppattn.create_model(**model, num_classes=10)
    for key, tensor in trained.state_dict().items():
        tensor.set_value(last[key])
    assert np.abs(seeded_logits(trained) - np.array(logits)).max() < 1e-5
    assert name in (tmp_path / "costs.csv").read_text()
