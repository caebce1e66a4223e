"""The fine-tuning recipes, for a few steps on a folder of images: what is loaded, new, frozen and resized."""

import numpy as np
import pytest

import ppattn
from ppattn import weights
from ppattn.cli import main
from ppattn.config import make_config
from ppattn.data.cifar import CIFAR
from ppattn.data.splits import Splits
from ppattn.engine.build import build_model
from ppattn.errors import UserError
from tests.helpers.data_sets import fill, numbered

pytestmark = pytest.mark.slow

RUNNING = ("._mean", "._variance")  # of BatchNorm
SMALL = ["train.epochs=1", "train.max_steps=2", "data.batch_size=4", "data.num_workers=0", "train.log_every=1"]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Two classes of noise, 41 x 37 pixels."""
    root = tmp_path_factory.mktemp("mine")
    fill(root, ["train"], ("bee", "wasp"), 6, (41, 37, 3))
    fill(root, ["val"], ("bee", "wasp"), 2, (41, 37, 3))
    return root


def train(recipe: str, images, output, *overrides: str) -> tuple[dict, str]:
    """Weights and log of a short run."""
    given = [*SMALL, f"data.root={images}", f"output={output}", *overrides]
    assert main("train", ["-c", f"finetune/{recipe}", "-o", *given]) == 0
    return weights.read(output / "checkpoints" / "latest")[0], (output / "log.txt").read_text()


def test_a_run_folder_is_fine_tuned_with_a_new_head_at_another_size(images, tmp_path):
    source = ppattn.create_model("deit_nano", attention="inline", num_classes=10)
    tensors = {name: tensor.numpy() for name, tensor in source.state_dict().items()}
    weights.save(tmp_path / "run/checkpoints/best.safetensors", tensors, {"preprocess": {"img_size": [32, 32]}})
    given = ("model.img_size=40", "optimizer.lr=1.0e-12", "optimizer.weight_decay=0")
    given = (f"model.weights={tmp_path / 'run'}", *given)
    after, log = train("from_run", images, tmp_path / "out", *given)
    (width,) = source.feat_channels
    assert after["head.weight"].shape == (width, 2) and "left at initial values: head.weight" in log
    assert f"resized: pos_embed [1, 64, {width}] -> [1, 100, {width}]" in log
    body = [name for name in tensors if not name.startswith(("head.", "pos_embed")) and not name.endswith(RUNNING)]
    assert all(np.abs(after[name] - tensors[name]).max() < 1e-9 for name in body), "the weights it starts from"


def test_frozen_parameters_stay_and_lower_layers_learn_more_slowly(images, tmp_path, monkeypatch):
    monkeypatch.setenv("PPATTN_CACHE", str(tmp_path / "cache"))
    source = ppattn.create_model("deit_tiny", img_size=64)
    tensors = {name: tensor.numpy() for name, tensor in source.state_dict().items()}
    weights.save(tmp_path / "cache/deit_tiny.safetensors", tensors, {})  # stands for the published file
    given = ("model.img_size=64", "schedule.warmup_epochs=0", "data.batch_size=2")
    after, log = train("frozen_stem", images, tmp_path / "out", *given)
    moved = {name: np.abs(after[name] - tensors[name]).max() for name in tensors if not name.startswith("head.")}
    prefixes = ("patch_embed.", "cls_token", "pos_embed", *(f"blocks.{i}." for i in range(6)))
    frozen = [name for name in moved if name.startswith(prefixes)]
    assert f"{len(frozen)} parameters are frozen" in log
    assert all(moved[name] == 0 for name in frozen)
    low, high = moved["blocks.6.mlp.fc1.weight"], moved["blocks.11.mlp.fc1.weight"]
    assert 0 < low < high and abs(low / high - 0.75**5) < 0.05  # Adam's first steps are as long as the rate


def test_own_images_take_the_published_weights(images, tmp_path, monkeypatch):
    monkeypatch.setenv("PPATTN_CACHE", str(tmp_path / "cache"))
    model = ppattn.create_model("deit_tiny", img_size=224)
    weights.save(tmp_path / "cache/deit_tiny.safetensors", model.state_dict(), {})
    after, log = train("own_images", images, tmp_path / "out", "model.img_size=64", "data.batch_size=2")
    assert after["head.weight"].shape == (192, 2) and "deit_tiny.safetensors" in log and "resized: pos_embed" in log


def test_weights_of_another_mechanism_are_refused_or_told(caplog):
    """Linear attention has the parameters of softmax; the file says what it was trained with."""

    def lines(model: dict, **pixels) -> list[str]:
        config = make_config({"model": {"name": "deit_nano", "weights": "linear_deit_nano_cifar10"} | model})
        classes = ppattn.load_run("linear_deit_nano_cifar10")[2]
        caplog.clear()
        caplog.set_level("INFO", "ppattn")
        build_model(config, Splits(numbered(1), numbered(1), classes, **pixels), fresh=True)
        return caplog.messages

    with pytest.raises(
        UserError, match="was trained with attention linear, and deit_nano is built with attention softmax;"
    ):
        lines({})
    cifar = {"mean": CIFAR["cifar10"].mean, "std": CIFAR["cifar10"].std}
    assert not [line for line in lines({"attention": "linear"}, **cifar) if "trained" in line]
    (line,) = (line for line in lines({"attention": "softmax"}, **cifar) if "trained" in line)
    assert line == "model.weights was trained with attention linear, and deit_nano is built with attention softmax"
    options = {"attention": "linear", "attention_options": {"kernel": "exp"}}
    assert any("built with attention_options {'kernel': 'exp'}" in line for line in lines(options, **cifar))
    assert any("trained on pixels of mean [0.4914" in line for line in lines({"attention": "linear"}))


def test_the_classifier_of_other_classes_is_not_kept(caplog):
    """As many classes, by chance."""
    config = {"name": "linear_deit_nano_cifar10", "weights": "pretrained"}
    splits = Splits(numbered(1), numbered(1), [*"0123456789"])
    with pytest.raises(UserError, match=r"'airplane' where the data has '0'.*model.reset_head=true"):
        build_model(make_config({"model": config}), splits, fresh=True)
    caplog.set_level("INFO", "ppattn")
    model = build_model(make_config({"model": config | {"reset_head": True}}), splits, fresh=True)
    assert "left at initial values: head.weight; head.bias" in caplog.messages and model.num_classes == 10
