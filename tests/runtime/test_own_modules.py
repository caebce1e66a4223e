"""Attentions, backbones and data sets in a file of the user, which `imports` and `--imports` load for every verb."""

import re
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest

import ppattn
from ppattn import zoo
from ppattn.attention import ATTENTIONS
from ppattn.backbones import BACKBONES
from ppattn.cli import main
from ppattn.config import load_config
from ppattn.data import build_datasets
from ppattn.data.sources import DATA_SETS
from ppattn.errors import UserError
from ppattn.runtime.plugins import IMPORTED

DOCS = Path(__file__).resolve().parents[2] / "docs/guide/extend.md"
OTHERS = """

from typing import Literal

import numpy as np
from ppattn.backbones import register_backbone
from ppattn.backbones.deit import DeiT
from ppattn.data.sources import register_data_set
from ppattn.data.splits import ArraySplit, Splits
from ppattn.validation import Positive
from ppattn.zoo import add_model


@register_backbone("own_backbone")
class OwnBackbone(DeiT):
    pass


add_model("own_tiny", "own_backbone", img_size=16, embed_dim=32, depth=2, num_heads=2, patch_size=4)


@register_data_set("stripes")
def stripes(config, name, *, count: Positive = 40, classes: Literal[2] = 2):
    images = np.random.default_rng(0).integers(0, 256, (count, 16, 16, 3)).astype(np.uint8)
    labels = np.arange(count) % classes
    return Splits(ArraySplit(images, labels, "a"), ArraySplit(images[:10], labels[:10], "b"), ["up", "down"])
"""
CONFIG = """
imports: [own_parts]
model: {name: own_tiny, attention: mean}
data: {name: stripes, batch_size: 8}
train: {epochs: 1, max_steps: 1}
output: run
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with own_parts.py, which holds the attention of the docs, and a config; nothing is imported yet."""
    attention = re.search(r"```python\n(\"\"\"Mean attention.*?)```", DOCS.read_text(), re.DOTALL)[1]
    (tmp_path / "own_parts.py").write_text(attention + OTHERS)
    (tmp_path / "own.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    tables = (ATTENTIONS._entries, BACKBONES._entries, DATA_SETS._entries, zoo.model_entries(), IMPORTED)
    before = [dict(table) for table in tables]

    def forget() -> None:
        for table, entries in zip(tables, before, strict=True):
            table.clear(), table.update(entries)
        sys.modules.pop("own_parts", None)

    yield forget
    forget()


@pytest.mark.slow
def test_every_verb(own, capsys):
    assert main(["train", "-c", "own.yaml"]) == 0
    own()
    assert main(["eval", "--run", "run"]) == 0, "the config.yaml of the run names the module"
    assert "on 10 images" in capsys.readouterr().out
    own()
    assert main(["check", "-c", "own.yaml"]) == 2  # ten images are in both splits
    assert "in both splits: 10" in capsys.readouterr().out
    own()
    best = ["--run", "run/checkpoints/best.safetensors"]
    assert main(["eval", *best]) == 2, "a file of weights imports nothing"
    assert "add --imports own_parts" in capsys.readouterr().err and "own_parts" not in sys.modules
    assert main(["eval", *best, "--imports", "own_parts"]) == 0
    assert main(["export", "--run", "run", "--output", "exported"]) == 0
    assert main(["analyze", "maps", "--run", "run", "--images", "2"]) == 0
    speed = ["--sizes", "16", "--batch", "2", "--rounds", "1", "--seconds", "0.01", "--output", "speed"]
    for model in (["--models", "own_tiny", "--attentions", "mean"], ["--folder", "exported"]):
        assert main(["benchmark", *model, *speed, "--imports", "own_parts"]) == 0
    image = np.random.default_rng(0).integers(0, 256, (20, 20, 3)).astype(np.uint8)
    answer = ppattn.Predictor("exported").predict(image, topk=1)
    own()
    assert ppattn.Predictor("exported").predict(image, topk=1) == answer, "an exported program needs no module"


def test_imports_where_there_is_no_config(own, capsys):
    assert main(["list", "attentions", "mean", "--imports", "own_parts"]) == 0
    assert "Mean attention" in capsys.readouterr().out
    config, _ = load_config("digits/inline_deit_nano", ["model.attention=mean"])
    assert config.imports == ["own_parts"], "a run says what it needs"


def test_options_of_a_data_set(own, tmp_path):
    config, origins = load_config("own.yaml", ["data.options.count=24"])
    assert len(build_datasets(config).train) == 24 and origins["data.options.count"] == "-o data.options.count=24"
    (tmp_path / "wrong.yaml").write_text(CONFIG.replace("batch_size: 8", "batch_size: 8, options: {cuont: 24}"))
    for source, items, words in (
        ("wrong.yaml", [], "wrong.yaml:4: Unknown stripes option 'cuont'. Did you mean 'count'? Allowed: classes"),
        ("own.yaml", ["data.options.count=0"], "stripes: count = 0: Input should be greater than or equal to 1."),
        ("own.yaml", ["data.options.name=x"], "Unknown stripes option 'name'."),
        ("digits/inline_deit_nano", ["data.options.count=24"], "digits option 'count'. Allowed: none."),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            load_config(source, items)


def test_the_example_of_sequences_is_named_where_it_is_missing():
    for call in (lambda: ppattn.create_model("sequence"), lambda: load_config({"model": {"name": "sequence"}})):
        with pytest.raises(UserError, match=re.escape("`imports: [examples.lra]`")):
            call()


def test_what_is_wrong_with_a_module(own, tmp_path):
    for name, text, words in (
        ("absent", None, "No module named 'absent'"),
        ("own_parts.py", None, "Write 'own_parts'"),
        ("broken", "import paddle\n1 / 0\n", "ZeroDivisionError"),
        ("yaml", "", "has the name of an installed module: rename it"),
    ):
        if text is not None:
            (tmp_path / f"{name}.py").write_text(text)
        with pytest.raises(UserError, match=words):
            load_config({"imports": [name]})
    with pytest.raises(UserError, match="imports = 'own_parts'"):
        load_config({"imports": "own_parts"})


NAMES = {
    "DeiT_tiny_patch16_224": "deit_tiny", "PVT_V2_B0": "pvt_v2_b0", "Zetatech/pvt-tiny-224": "pvt_tiny",
    "SwinTransformer_tiny_patch4_window7_224": "swin_tiny", "timm/swin_tiny_patch4_window7_224.ms_in1k": "swin_tiny",
    "microsoft/swin-tiny-patch4-window7-224": "swin_tiny", "vit_base_patch14_reg4_dinov2.lvd142m": "dinov2_base_reg",
    "facebook/dinov3-vits16plus-pretrain-lvd1689m": "dinov3_small_plus",
}  # fmt: skip


def test_names_of_other_libraries():
    assert all(zoo.model_entry(name) is zoo.model_entry(ours) for name, ours in NAMES.items())
    model = {"name": "DeiT_tiny_patch16_224", "embed_dim": 24, "depth": 1, "img_size": 32}
    assert load_config({"model": model})[0].model.name == "deit_tiny", "runs know one name"
    assert ppattn.create_model(**model).name == "deit_tiny"
    for name, words in (
        ("DeiT_tiny_patch16", "Did you mean 'deit_tiny'"),
        ("google/vit-base-patch16-224", r"architecture of deit_base \(img_size 224\)"),
        ("DeiT_base_patch16_384", r"deit_base \(img_size 384\)"),
        ("swin_tiny_patch4_window7_224.ms_in22k_ft_in1k", "of swin_tiny"),  # other weights
        ("runs/deit_tiny", "Unknown model"),
    ):
        with pytest.raises(UserError, match=words):
            zoo.model_entry(name)


@pytest.mark.parametrize("name, width", [("deit_nano", 96), ("dinov2_small", 384)])
def test_reset_classifier(name, width):
    model = ppattn.create_model(name, num_classes=10, img_size=32, depth=1)
    for classes, channels in ((7, 7), (0, width)):
        model.reset_classifier(classes)
        assert model(paddle.randn([2, 3, 32, 32])).shape == [2, channels] and model.num_classes == classes


def test_a_received_run_folder_brings_no_code(own, tmp_path, monkeypatch, capsys):
    """Whether it is named by --run or as a config, wherever one stands; named by the user, the module is imported."""
    (tmp_path / "run/bag").mkdir(parents=True)
    for module in ("inner", "bag/part"):
        (tmp_path / f"run/{module}.py").write_text("1 / 0")
    (tmp_path / "run/linked.py").symlink_to(tmp_path / "own_parts.py")
    ppattn.weights.save(tmp_path / "run/checkpoints/best.safetensors", {}, {})
    monkeypatch.chdir(tmp_path / "run")
    for name in ("inner", "bag.part", "linked"):
        Path("config.yaml").write_text(f"imports: [{name}]")
        for call in (["eval", "--run", "."], ["train", "-c", "config.yaml"], ["debug", "--run", "."]):
            assert main(call) == 2
            assert f"is in the run folder .: to trust it, add --imports {name}" in capsys.readouterr().err
    assert not {"inner", "bag", "linked"} & sys.modules.keys()
    assert main(["eval", "--run", ".", "--imports", "linked"]) == 2
    assert "does not say how its model is built" in capsys.readouterr().err and "linked" in sys.modules
    sys.modules.pop("linked")


def test_a_second_project_of_a_process_does_not_get_the_module_of_the_first(own, tmp_path, monkeypatch):
    load_config({"imports": ["own_parts"]})
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    load_config({"imports": ["own_parts"]})
    (tmp_path / "other/own_parts.py").write_text("")
    with pytest.raises(UserError, match="a module imported before: restart Python"):
        load_config({"imports": ["own_parts"]})
