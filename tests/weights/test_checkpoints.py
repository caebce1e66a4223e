"""Checkpoints as training scripts leave them, and the files beside them that say how their model is used."""

import json
import pickle
import shutil
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

import ppattn
from ppattn import weights
from ppattn.cli import main
from ppattn.errors import UserError
from ppattn.weights.beside import beside
from tests.weights.test_convert import FOLDER, changed, converted, source

PLAIN = weights.read(source("timm_deit"))[0]
TWICE = {name: 2 * array for name, array in PLAIN.items()}
ADAM = {"state": {0: {"exp_avg": np.ones(3)}}, "param_groups": []}


def prefixed(arrays: dict, prefix: str) -> dict:
    return {f"{prefix}{name}": array for name, array in arrays.items()}


DINO = {
    "student": prefixed(prefixed(TWICE, "backbone."), "module.") | {"module.dino_head.mlp.0.weight": np.ones((2, 2))},
    "teacher": prefixed(PLAIN, "backbone.") | {"dino_head.mlp.0.weight": np.ones((2, 2))},
    "optimizer": ADAM,
}
MOCO = {"state_dict": prefixed(PLAIN, "module.base_encoder.") | prefixed(TWICE, "module.momentum_encoder.")}
BODY = {name: array for name, array in PLAIN.items() if not name.startswith("head.")}
HEAD = {name: array for name, array in PLAIN.items() if name.startswith("head.")}
CHUNKS = {name.replace("blocks.", "blocks.0."): array for name, array in PLAIN.items()}
FORMS = {
    "average alone": ({"model_ema": PLAIN, "epoch": 3}, None, 1),
    "weights and average": ({"state_dict": PLAIN, "state_dict_ema": TWICE, "optimizer": ADAM}, None, 1),
    "the average is wanted": ({"state_dict": TWICE, "state_dict_ema": PLAIN}, "state_dict_ema", 1),
    "teacher and student": (DINO, None, 1),
    "the student is wanted": (DINO, "student", 2),
    "base encoder": (MOCO, "base_encoder", 1),
    "distilled in PaddleClas": (prefixed(PLAIN, "Teacher.") | prefixed(TWICE, "Student."), None, 1),
    "an average inside": ({"model": PLAIN | prefixed(TWICE, "ema_model.")}, None, 1),
    "in chunks": ({"teacher": prefixed(CHUNKS, "backbone.")}, None, 1),
    "own head": ({"state_dict": prefixed(BODY, "model.backbone.") | HEAD}, None, 1),
    "decoder of MAE": ({"model": PLAIN | {"decoder_embed.weight": np.ones((4, 24))}}, None, 1),
    **{
        prefix: ({"state_dict": prefixed(PLAIN, prefix) | {"criterion.weight": np.ones(7)}}, None, 1)
        for prefix in (
            "model.", "net.", "_orig_mod.", "module.", "module.module.", "backbone.", "model._orig_mod.vit_.",
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_usual_forms_of_checkpoints_are_read(form, tmp_path):
    tree, part, factor = FORMS[form]
    (tmp_path / "w.pth").write_bytes(pickle.dumps(tree))
    model = ppattn.create_model("deit_tiny", **json.loads((FOLDER / "timm_deit.json").read_text())["arguments"])
    weights.convert(model, tmp_path / "w.pth", part=part)
    assert np.array_equal(model.norm.bias.numpy(), factor * PLAIN["norm.bias"])
    assert np.array_equal(model.head.bias.numpy(), factor * PLAIN["head.bias"])


def test_what_is_read_of_several_is_told_and_an_unclear_choice_is_an_error(tmp_path, caplog):
    (tmp_path / "w.pth").write_bytes(pickle.dumps({"model": PLAIN, "model_ema": TWICE}))
    weights.read(tmp_path / "w.pth")
    assert "'model' is read; the file holds model_ema, too" in caplog.text
    (tmp_path / "w.pth").write_bytes(pickle.dumps(MOCO))
    with pytest.raises(UserError, match="holds base_encoder, momentum_encoder: choose one with --part NAME"):
        weights.read(tmp_path / "w.pth")
    (tmp_path / "w.pth").write_bytes(pickle.dumps({"model": PLAIN}))
    with pytest.raises(UserError, match="holds one model: leave out --part"):
        weights.read(tmp_path / "w.pth", "teacher")
    again = {"model": {}, "epoch": 1}
    again["model"]["self"] = again
    (tmp_path / "w.pth").write_bytes(pickle.dumps(again))
    with pytest.raises(UserError, match="holds no arrays"):
        weights.read(tmp_path / "w.pth")


def test_checkpoints_in_several_files(tmp_path, capsys):
    names = sorted(arrays := weights.read(source("transformers_deit"))[0])
    parts = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, own in parts.items():
        save_file({name: arrays[name] for name in own}, tmp_path / file)
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for path in (tmp_path, tmp_path / "model.safetensors.index.json", tmp_path / next(iter(parts))):
        _, report, _ = converted("transformers_deit", path)
        assert not report.missing
    (tmp_path / next(iter(parts))).unlink()
    for path in (tmp_path, tmp_path / "model-00002-of-00002.safetensors"):
        with pytest.raises(UserError, match="2 files, and model-00001-of-00002.safetensors is not beside it"):
            converted("transformers_deit", path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": [1]}')
    with pytest.raises(UserError, match="damaged or not the index of a checkpoint"):
        weights.read(tmp_path)


@pytest.mark.parametrize("convert", [True, False])
def test_quantised_weights_are_refused(tmp_path, convert):
    def quantised(arrays):
        return arrays | {"blocks.1.mlp.fc1.weight": (100 * arrays["blocks.1.mlp.fc1.weight"]).astype("int8")}

    path = changed(tmp_path, "timm_deit", quantised)
    with pytest.raises(UserError, match=r"int8 for blocks.1.mlp.fc1.weight, not floats, as quantised models do"):
        if convert:
            converted("timm_deit", path)
        else:
            shape = json.loads((FOLDER / "timm_deit.json").read_text())["arguments"]
            weights.load(ppattn.create_model("deit_tiny", **shape), path)
    header = json.dumps({"norm.weight": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "w.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(UserError, match=r"holds quantised weights \(F8_E4M3\)"):
        weights.read(tmp_path / "w.safetensors")


@pytest.mark.parametrize("size", [(64, 24), (40, 16)])
def test_a_table_for_an_oblong_grid_that_fits_is_kept(size, tmp_path):
    """8 x 3 patches and a class token are 25 positions, a square; 5 x 2 are 11."""
    tokens = size[0] * size[1] // 64
    table = np.random.default_rng(0).normal(size=(1, 1 + tokens, 24)).astype("float32")
    for inside, name in ((table, "transformers_dinov2"), (table[:, 1:], "timm_dinov2_reg")):
        key = "pos_embed" if "timm" in name else "dinov2.embeddings.position_embeddings"
        path = changed(tmp_path, name, lambda arrays, key=key, inside=inside: arrays | {key: inside})
        model, report, _ = converted(name, path, img_size=list(size))
        assert not report.resized and np.array_equal(model.pos_embed.numpy()[:, 1:], table[:, 1:])


def test_weights_of_another_library_name_the_command_that_converts_them(tmp_path):
    file = source("transformers_deit")
    shape = json.loads((FOLDER / "transformers_deit.json").read_text())["arguments"]
    with pytest.raises(UserError, match=f"ppattn convert --model deit_tiny --from {file}"):
        ppattn.create_model("deit_tiny", weights=file, **shape)
    config = {"model": {"name": "deit_nano", "img_size": 16, "weights": str(file)}, "output": str(tmp_path / "run")}
    with pytest.raises(UserError, match="ppattn convert --model deit_nano"):
        ppattn.train(config)


@pytest.mark.parametrize("name", ["timm_swin", "transformers_dinov2", "paddleclas_pvt_v2"])
@pytest.mark.parametrize("change", ["axes", "length", "empty", "missing"])
def test_odd_shapes_give_one_sentence(name, change, tmp_path):
    about = json.loads((FOLDER / f"{name}.json").read_text())
    model = ppattn.create_model(about["model"], **about["arguments"])
    arrays = weights.read(source(name))[0]
    kinds = {array.ndim: key for key, array in arrays.items()} | {-1: next(iter(arrays)), -2: next(reversed(arrays))}
    for key in {*kinds.values(), *(key for key in arrays if "pos" in key or "bias_table" in key or "query" in key)}:
        odd = {"axes": arrays[key][None], "length": arrays[key][:-1], "empty": arrays[key][:0], "missing": None}[change]
        held = {k: a for k, a in (arrays | {key: odd}).items() if a is not None}
        (tmp_path / "w.pth").write_bytes(pickle.dumps(held))
        if any(word in key for word in ("mask_token", "batches", "position_index")):
            continue
        try:
            report = weights.convert(model, tmp_path / "w.pth")
        except UserError as error:
            assert "\n" not in str(error)
        else:
            assert report.resized, key


HUGGING_FACE = {"do_resize": True, "do_rescale": True, "rescale_factor": 0.00392156862745098, "do_normalize": True}
VIT = HUGGING_FACE | {"image_mean": [0.5] * 3, "image_std": [0.25] * 3, "resample": 2}
VIT |= {"size": {"height": 32, "width": 32}}
BIT = HUGGING_FACE | {"do_center_crop": True, "crop_size": {"height": 24, "width": 24}, "size": {"shortest_edge": 32}}
TIMM = {"mean": [0.1] * 3, "std": [0.2] * 3, "crop_pct": 0.875, "crop_mode": "squash", "interpolation": "bilinear"}
NAMES = [f"class {i}" for i in range(7)]
BESIDE = {
    "transformers": ({"preprocessor_config.json": VIT}, (0.5, 0.25, 1.0, False, "bilinear")),
    "crop": ({"preprocessor_config.json": BIT | {"resample": 3}}, (0.5, 0.5, 0.75, True, "bicubic")),
    "timm": ({"config.json": {"pretrained_cfg": TIMM}}, (0.1, 0.2, 0.875, False, "bilinear")),
    "older timm": ({"config.json": TIMM}, (0.1, 0.2, 0.875, False, "bilinear")),
    "names": ({"config.json": {"id2label": {str(i): n for i, n in enumerate(NAMES)}}}, None),
    "names of timm": ({"config.json": {"label_names": [*"abcdefg"], "label_descriptions": {"a": "class 0"}}}, None),
    "PaddleClas": ({"label_list.txt": "\n".join(f"{i} {name}" for i, name in enumerate(NAMES))}, None),
    "no names": ({"config.json": {"id2label": {str(i): f"LABEL_{i}" for i in range(7)}}}, None),
}


@pytest.mark.parametrize("case", BESIDE)
def test_files_beside_the_weights_say_how_the_model_is_used(case, tmp_path, capsys):
    files, expected = BESIDE[case]
    shutil.copy(source("transformers_deit"), tmp_path / "model.safetensors")
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    given = json.loads((FOLDER / "transformers_deit.json").read_text())["arguments"]
    deit = f"--model deit_tiny --num-classes 7 --img-size 32 --allow * --from {tmp_path} --output {tmp_path}/ours"
    ppattn.zoo.add_model("small_deit", "deit", **given)
    try:
        assert main("convert", deit.replace("deit_tiny", "small_deit").split()) == 0
        said = capsys.readouterr().out
        _, _, classes, preprocess = ppattn.load_run(tmp_path / "ours.safetensors")
    finally:
        ppattn.zoo.entries().pop("small_deit")
    found = (preprocess.mean[0], preprocess.std[0], preprocess.crop_ratio, preprocess.crop_keep_aspect)
    if expected:
        assert (*found, preprocess.interpolation) == expected and "names of 7 classes are not known: numbers" in said
    else:
        assert found[:2] == (0.485, 0.229) and "how images are prepared is not known" in said
        named = [*NAMES[:1], *"bcdefg"] if "timm" in case else NAMES
        assert classes == ([str(i) for i in range(7)] if case == "no names" else named)


def test_weights_converted_without_a_head_open_as_a_model_without_classes(tmp_path):
    given = json.loads((FOLDER / "transformers_deit.json").read_text())["arguments"]
    command = f"--model small_deit --num-classes 0 --from {source('transformers_deit')} --output {tmp_path}/ours"
    ppattn.zoo.add_model("small_deit", "deit", **given)
    try:
        assert main("convert", command.split()) == 0
        run = ppattn.load_run(tmp_path / "ours.safetensors")
    finally:
        ppattn.zoo.entries().pop("small_deit")
    assert run.classes == [] and run.model.num_classes == 0


@pytest.mark.parametrize(
    ("name", "content"),
    [("preprocessor_config.json", '{"image_mean": "x"}'), ("preprocessor_config.json", "[" * 9999),
     ("preprocessor_config.json", '{"do_rescale": false}'), ("config.json", '{"mean": 5, "std": [1, 1, 1]}'),
     ("config.json", '{"id2label": {"x": "y"}}'), ("config.json", '{"label_names": [[1]]}'), ("config.json", "5"),
     ("preprocessor_config.json", '{"size": 9, "do_center_crop": true, "crop_size": {"a": "b"}}')],
)  # fmt: skip
def test_odd_files_beside_the_weights_are_told(name, content, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=name) as caught:
        beside(tmp_path, 7)
    assert "\n" not in str(caught.value)


def test_a_filter_that_is_not_known_here_is_told(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(VIT | {"resample": 1}))
    pixels, _, said = beside(tmp_path, 7)
    assert pixels["interpolation"] == "bicubic" and "resample = 1 is not known here: bicubic is used" in said
