"""Configs: what is merged, where each value came from, and files that are not configs at all."""

import inspect
import os
import re
import threading

import pytest
import yaml

from ppattn.backbones import BACKBONES
from ppattn.cli import main
from ppattn.config import load_config, make_config, override_config, parse_yaml, to_yaml
from ppattn.errors import UserError
from ppattn.zoo import create_model

BASE = "model: {name: deit_tiny, depth: 3}\naugment:\n  random_resized_crop: {scale: [0.6, 1.0]}\n"
TOP = "base: base.yaml\nmodel: {depth: &five 5, patch_size: *five}\noptimizer:\n  lr: 3e-4\n"


@pytest.fixture
def files(tmp_path):
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "top.yaml").write_text(TOP)
    return tmp_path


def test_base_file_and_overrides_are_merged_in_this_order(files):
    given = ["model.attention=[inline]", "optimizer.lr=1E-5", "augment.random_resized_crop={ratio: [1, 1]}"]
    config, _ = load_config(files / "top.yaml", given)
    assert (config.model.name, config.model.depth, config.model.attention) == ("deit_tiny", 5, ["inline"])
    assert config.model.patch_size == 5
    assert load_config(files / "top.yaml", ["augment={}"])[0].augment.random_resized_crop is None
    assert [override_config({}, [f"output={o}"]).output for o in ("a #2", "'b' # c")] == ["a #2", "b"]
    assert config.optimizer.lr == 1e-5 and config.augment.random_resized_crop.scale == [0.6, 1.0]
    assert config.augment.random_resized_crop.ratio == [1, 1]
    for text, scale in (("{scale: [0.5, 0.5], ratio: [1, 1]}", [0.5, 0.5]), ("null", None)):  # a fixed shape, none
        crop = load_config(files / "top.yaml", [f"augment.random_resized_crop={text}"])[0].augment.random_resized_crop
        assert (crop and crop.scale) == scale


def test_every_value_says_where_it_comes_from(files):
    said = to_yaml(*load_config(files / "top.yaml", ["train={epochs: 7}", "model.attention_options.kernel=exp"]))
    found = dict(re.findall(r"(\w+):.*# (.*)", said))
    defaults = dict.fromkeys(("ratio", "num_classes", "seed", "embed_dim"), "default")
    expected = {"lr": f"{files}/top.yaml:4", "depth": f"{files}/top.yaml:2", "scale": f"{files}/base.yaml:3"}
    expected |= {"epochs": "-o train={epochs: 7}", "kernel": "-o model.attention_options.kernel=exp"}
    assert found | expected | defaults == found


def test_resolved_config_reads_back_as_itself(tmp_path):
    """Names with dots and stars stay whole."""
    scale = {"*.mixing": 0.1, "*": 2.0, "blocks.0.attn.dwc.weight": 3.0, "blocks.1.attn.dwc.weight": 4.0}
    given = ["model.attention_options.kernel=exp", "output='on: off'", "data.root=wait..."]
    config, _ = load_config({"optimizer": {"lr_scale": scale}}, given)
    for origins in (None, {}):
        (tmp_path / "it.yaml").write_text(to_yaml(config, origins))
        assert load_config(tmp_path / "it.yaml")[0] == config
    assert make_config(yaml.safe_load(to_yaml(config))) == config  # other readers of YAML take it as we do


def test_shipped_config_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ("configs/digits/inline_deit_nano.yaml", "digits/inline_deit_nano.yaml", "digits/inline_deit_nano")
    assert len({to_yaml(load_config(name)[0]) for name in names}) == 1


TOO_MUCH = "a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))


@pytest.mark.parametrize(
    "text",
    [TOO_MUCH, "[" * 9999, "a: &a [*a]", "a: &a {b: *a}", "1: x", "{{ epochs }}: 3", "? [a]\n: b", "\0", ":", "'", "-",
     "train: !!python/object/apply:os.getcwd []", "train: {epochs: 1e3}", "train: {null: 3}", "model: {2: 3}",
     "base: 3", "model: null", "data: []", "augment: {color_jitter: {a: 1}}", "model: {attention: [[[inline]]]}",
     "\xff: \x85", "train: {epochs: 1:30}", "optimizer: {lr: .nan}", "optimizer: {lr: 1e400}", "data: {download: yes}",
     "model: {name: 3}"],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_text_that_is_no_config_is_refused_with_a_sentence(text, tmp_path):
    (tmp_path / "wrong.yaml").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=r"^[^\n]{9,}\.$") as error:
        load_config(tmp_path / "wrong.yaml")
    assert "http" not in str(error.value)


def test_every_wrong_key_has_its_line(tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text("train:\n  epochs: many\n  sed: 3\ndata:\n  num_workers: -1\n  root: x\n")
    with pytest.raises(UserError) as error:
        load_config(path, ["model.attention=5"])
    lines = str(error.value).split("\n")
    assert lines[0].startswith("-o model.attention=5: model.attention = 5: Input should be a valid string; or: Input")
    assert lines[1] == f"{path}:5: data.num_workers = -1: Input should be greater than or equal to 0."
    assert lines[2].startswith(f"{path}:2: train.epochs = 'many': Input should be a valid integer")
    assert lines[3].startswith(f"{path}:3: Unknown setting 'train.sed'. Did you mean 'train.seed'? Allowed: ")
    assert len(lines) == 4


@pytest.mark.parametrize(
    ("text", "value"),
    [("3e-4", 3e-4), ("1E5", 1e5), (".5", 0.5), ("010", 10), ("-7", -7), ("on", "on"), ("1:30", "1:30"), ("1_0", "1_0")]
    + [("2024-01-31", "2024-01-31"), ("~", None), ("", None), ("True", True), ("no", "no"), ("'3e-4'", "3e-4")],
)
def test_scalars_are_those_of_yaml_1_2(text, value):
    found, _ = parse_yaml(text, "it")
    assert found == value and type(found) is type(value)
    written, _ = parse_yaml(to_yaml(override_config({}, [f"model.attention_options.x={text}"])), "it")
    assert written["model"]["attention_options"] == {"x": value}


@pytest.mark.parametrize("item", ["", "=", "=3", "a", "a.=3", ".a=3", "a..b=3", "train.epochs", "train.seed=[", "3=4"])
def test_override_that_is_none_is_refused_with_a_sentence(item):
    with pytest.raises(UserError, match=r"^[^\n]{9,}\.$"):
        override_config({}, [item])


def test_the_model_section_takes_every_argument_of_its_backbone():
    config = override_config({}, ["model.name=pvt_tiny", "model.class_token=false", "model.num_heads=[2, 4, 10, 16]"])
    assert config.model_dump()["model"].keys() >= set(inspect.signature(BACKBONES.get("pvt")).parameters)
    model = create_model(config.model.name, **config.model.arguments())
    assert model.cls_token is None and [b.attn.num_heads for s in model.stages for b in s.blocks[:1]] == [2, 4, 10, 16]


PATHS = ("output", "data.root", "data.train", "data.val", "model.weights", "distill.teacher")


@pytest.mark.parametrize("key", PATHS)
def test_a_path_may_begin_with_the_home_folder(key, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    section, _, name = key.rpartition(".")
    tree = {section: {name: "~/it"}} if section else {name: "~/it"}
    for config in (override_config({}, [f"{key}=~/it"]), make_config(tree)):
        found = config.model_dump()
        assert (found[section] if section else found)[name] == f"{tmp_path}/it"
    (tmp_path / "base.yaml").write_text("train: {epochs: 3}")
    (tmp_path / "top.yaml").write_text("base: ~/base.yaml")
    assert load_config("~/top.yaml")[0].train.epochs == 3
    assert load_config("~/top.yaml", ["model.norm_eps=~"])[0].model.norm_eps is None


def test_the_command_line_knows_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("data: {name: digits}")
    for call in (["-c~/c.yaml", "--json=~/new/it.json"], ["-c", "~/c.yaml", "--json", "~/other/it.json"]):
        assert main("check", call) == 0
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir() and path.name[0] != ".") == ["new", "other"]


def test_a_config_may_come_out_of_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=["train: {epochs: 3}"])
    writer.start()
    assert load_config(tmp_path / "pipe")[0].train.epochs == 3
    writer.join()
