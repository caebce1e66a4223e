"""Weights of other libraries: files that timm, transformers and PaddleClas wrote, with the logits these gave.

tests/foreign/make.py made them, of small random models. Then checkpoints of training scripts, and files beside them.
"""

import json
import pickle
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

import ppattn
from ppattn import weights
from ppattn.cli import main
from ppattn.config import make_config
from ppattn.errors import UserError
from ppattn.trained import open_weights
from ppattn.weights.beside import settings_beside_weights
from ppattn.weights.foreign import recognise
from tests.helpers import golden_data as golden
from tests.helpers.foreign import FOLDER, SHAPE, agree, changed, converted, facts, images_of, small_deit, source

CASES = sorted(path.stem for path in FOLDER.glob("*.json"))
LIBRARY = dict.fromkeys(("timm_deit", "timm_dinov2", "timm_dinov2_reg"), "the authors or timm") | {"timm": "timm"}
LIBRARY |= {"torchvision": "torchvision", "transformers": "transformers", "paddleclas": "PaddleClas"}


def test_weights_go_back_to_timm_as_they_were(tmp_path, capsys):
    """They are the arrays whose logits timm computed."""
    model, _, about = converted("timm_deit")
    section = {"name": about["model"], **about["arguments"]}
    weights.save(tmp_path / "ours.safetensors", model.state_dict(), {"config": {"model": section}})
    call = ["convert", "--to", "timm", "--from", str(tmp_path / "ours.safetensors"), "--output", str(tmp_path / "back")]
    assert main(call) == 0
    shape = "img_size=(32, 32), in_chans=3, num_classes=7, patch_size=8, embed_dim=24, depth=2, num_heads=3"
    norm = "norm_layer=functools.partial(torch.nn.LayerNorm, eps=1e-06)"
    assert f"VisionTransformer({shape}, mlp_ratio=4.0, {norm})" in capsys.readouterr().out
    theirs, (back, metadata) = weights.read(source("timm_deit"))[0], weights.read(tmp_path / "back.safetensors")
    assert not metadata and back.keys() == theirs.keys()
    assert all(np.array_equal(back[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [("deit_tiny", {"attention": "linear"}, "linear"), ("deit_nano", {}, "cpe"), ("pvt_tiny", {}, "no blocks")],
)
def test_other_models_do_not_go_to_timm(name, arguments, words):
    depth = {"depths": [1] * 4, "embed_dims": [8] * 4, "num_heads": [1] * 4} if name == "pvt_tiny" else {"depth": 1}
    with pytest.raises(UserError, match=f"no plain DeiT with softmax attention.*{words}"):
        weights.to_timm(ppattn.create_model(name, img_size=32, **depth, **arguments))


@pytest.mark.parametrize("name", CASES)
def test_converted_weights_give_the_logits_of_their_library(name, tmp_path):
    model, report, about = converted(name)
    library, family = name.split("_", 1)
    assert f"of {LIBRARY.get(name) or LIBRARY[library]} with" in report.source
    assert report.loaded == len(model.state_dict()) and not report.missing and not report.unused
    weights.save(tmp_path / "ours.safetensors", model.state_dict(), {"config": {"model": report.constants}})
    model = ppattn.create_model(about["model"], weights=tmp_path / "ours", **about["arguments"])
    model.eval()
    size = about["arguments"]["img_size"]
    assert agree(model(images_of(size, 2, 3, size, size)), about["logits"])


@pytest.mark.parametrize("name", [name for name in CASES if "dinov2" in name])
def test_patch_features_of_dinov2_are_those_of_its_library_at_every_size(name):
    """At other sizes the position table is resized as in the authors' code, which only timm's models can be given."""
    model, report, about = converted(name, num_classes=0)
    assert not report.missing and not report.unused
    model.eval()
    size = about["arguments"]["img_size"]
    cases = [(images_of(size, 2, 3, size, size), about["features"])]
    if "other_size" in about:
        cases.append((images_of(0, 1, 3, *about["other_size"]), about["other_features"]))
    for images, expected in cases:
        (features,) = model.forward_features(images)
        assert model(images).shape == [len(images), 24] and features.shape == [*np.shape(expected)]
        assert agree(features, expected)


def test_a_head_of_dinov2_on_the_class_token_alone_gives_the_same_logits():
    model, _, about = converted("timm_dinov2")
    assert model.head.weight.shape == [48, 7] and not model.head.weight[24:].numpy().any()
    encoder, *_ = converted("timm_dinov2", num_classes=0)
    encoder.eval()
    assert agree(encoder(images_of(32, 2, 3, 32, 32)) @ model.head.weight[:24] + model.head.bias, about["logits"])


@pytest.mark.parametrize(
    ("names", "words"),
    [({"rope_embed.periods": (16,), "blocks.0.norm1.weight": (8,)}, "a DINOv3 of the authors with 8 channels"),
     ({"blocks.0.mlp.w12.weight": (64, 8), "blocks.0.mlp.w3.weight": (8, 32)}, "both halves of a SwiGLU"),
     ({"encoder.layer.0.mlp.weights_in.weight": (64, 8)}, "both halves of a SwiGLU"),
     ({"blocks.0.mlp.fc1.bias": (64,), "blocks.0.mlp.fc2.weight": (8, 32)}, "both halves of a SwiGLU")],
)  # fmt: skip
def test_other_models_of_the_dino_family_are_refused_by_name(names, words, tmp_path):
    np.savez(tmp_path / "dino.npz", **{name: np.zeros(shape, "float32") for name, shape in names.items()})
    with pytest.raises(UserError, match=words):
        weights.convert(ppattn.create_model("deit_nano"), tmp_path / "dino.npz")
    for name in ("dinov2_giant", "dinov3_huge_plus"):
        with pytest.raises(UserError, match="Unknown model.*dinov2_base"):
            ppattn.create_model(name)


@pytest.mark.parametrize("name", [name for name in golden.CASES if name.startswith("shrunk_") and "dinov3" not in name])
def test_every_family_of_the_authors_is_recognised(name):
    arrays = golden.arrays(golden.CASES[name])
    source, renamed = recognise(arrays, "it")
    found = re.search("deit|pvt_v2|pvt|swin", name)
    backbone = found[0] if found else {"shrunk_soft": "pvt", "shrunk_soft_norm": "pvt"}.get(name, "deit")
    assert source.library.startswith("the authors") and (source.backbone, renamed.keys()) == (backbone, arrays.keys())


def test_the_fixtures_are_small_and_cover_what_is_promised():
    assert {"timm_deit", "timm_swin", "timm_pvt_v2", "paddleclas_deit", "paddleclas_swin"} <= set(CASES)
    assert {f"transformers_{family}" for family in ("deit", "swin", "pvt", "pvt_v2")} <= set(CASES)
    assert {f"{library}_dinov2{kind}" for library in ("timm", "transformers") for kind in ("", "_reg")} <= set(CASES)
    assert all(path.stat().st_size < 300_000 for path in FOLDER.iterdir())


def test_the_constants_of_a_library_matter_and_can_be_overruled(tmp_path):
    """A shift in the last map of PaddleClas's Swin, a smaller epsilon in transformers' ViT; eval knows them."""
    images = images_of(0, 1, 3, 64, 64)
    shape = {"img_size": 64, "embed_dim": 12, "depths": [1, 2, 2], "num_heads": [1, 2, 4], "window_size": 4}
    model = ppattn.create_model("swin_tiny", num_classes=10, **shape)
    known = {"name": "swin_tiny", "num_classes": 10, **shape, "always_shift": True, "norm_eps": 1e-3}
    weights.save(tmp_path / "w.safetensors", model.state_dict(), {"config": {"model": known}})
    logits = []
    for arguments in ({}, {"always_shift": False}, {"norm_eps": 1e-5}, {"always_shift": False, "norm_eps": 1e-5}):
        other = ppattn.create_model("swin_tiny", num_classes=10, weights=tmp_path / "w", **shape, **arguments)
        other.eval()
        logits.append(other(images).numpy())
    model.eval()
    assert np.array_equal(logits[3], model(images).numpy())
    assert all(np.abs(logits[i] - logits[j]).max() > 1e-6 for i in range(4) for j in range(i))
    given = make_config({"model": {"name": "swin_tiny", **shape}, "data": {"name": "digits"}})
    for other in (open_weights(given, tmp_path / "w")[0].model, ppattn.load_run(tmp_path / "w").model):
        assert np.array_equal(other(images).numpy(), logits[0])


FC1, TOKEN = "blocks.1.mlp.fc1.weight", np.zeros((1, 1, 24), "float32")
DISTILLED = {"deit.embeddings.distillation_token": TOKEN}
CHANGES = {
    "timm_deit, distilled": (lambda own: own | {"dist_token": TOKEN}, "distillation token, which no model here has"),
    "paddleclas_deit, distilled": (lambda own: own | {"dist_token": TOKEN}, "distillation token, which"),
    "transformers_deit, distilled": (
        lambda own: DISTILLED | {n.replace("vit.", "deit."): a for n, a in own.items()},
        "distillation token, which",
    ),
    "timm_swin, big": (lambda own: {n: a.repeat(9, 0) if "bias_t" in n else a for n, a in own.items()}, "another size"),
    "paddleclas_deit, transposed in part": (lambda own: own | {FC1: own[FC1].T}, "in both layouts"),
    "timm_deit, quantised": (
        lambda own: own | {FC1: (100 * own[FC1]).astype("int8")},
        f"int8 for {FC1}, not floats, as quantised models do",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_changed_weights_are_refused_with_a_reason(case, tmp_path):
    (name, _), (change, words) = case.split(", "), CHANGES[case]
    with pytest.raises(UserError, match=words):
        converted(name, changed(tmp_path, name, change))


def test_the_pooler_of_transformers_is_left_out_and_told(tmp_path):
    def base(arrays):  # as ViTModel saves itself
        arrays = {n.removeprefix("vit."): a for n, a in arrays.items() if not n.startswith("classifier")}
        return arrays | {"pooler.dense.weight": np.eye(24, dtype="float32"), "pooler.dense.bias": np.zeros(24)}

    path = changed(tmp_path, "transformers_deit", base)
    with pytest.raises(UserError, match=r"head.weight is missing.*the file has none.*--num-classes 0"):
        converted("transformers_deit", path)
    _, report, _ = converted("transformers_deit", path, num_classes=0)
    assert "left out: pooler.dense.bias, a head of the other library" in str(report)


@pytest.mark.parametrize(
    ("model", "file", "words"),
    [("swin_tiny", "timm_swin.pth",
      "looks like a Swin of timm with 8, 16, 32 channels and 1, 2, 2 blocks, but swin_tiny"),
     ("deit_tiny", "paddleclas_pvt_v2.pdparams", "looks like a PVTv2 of PaddleClas"),
     ("inline_deit_tiny", "timm_deit.pth", "but inline_deit_tiny is a DeiT with 192 channels and 12 blocks"),
     ("deit_tiny", "{here}/resnet.npz", "holds no DeiT, Swin, PVT or PVT v2"),
     ("deit_tiny", "{here}/page.pth", "damaged or not a complete weights file"),
     ("deit_tiny", "{here}/half.pth", "half.pth"),
     ("deit_nano", "{here}/own.safetensors", "already a ppattn weights file")],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_a_wrong_file_is_named_for_what_it_looks_like(model, file, words, tmp_path, capsys):
    np.savez(tmp_path / "resnet.npz", **{"layer1.0.conv1.weight": np.zeros((4, 4, 1, 1)), "fc.bias": np.zeros(3)})
    (tmp_path / "page.pth").write_text("<!DOCTYPE html><title>404</title>")
    data = source("timm_deit").read_bytes()
    (tmp_path / "half.pth").write_bytes(data[: len(data) // 2])
    weights.save(tmp_path / "own.safetensors", {"a": np.zeros(3)}, {"config": {}})
    path = file.format(here=tmp_path) if "{" in file else str(FOLDER / file)
    assert main("convert", ["--model", model, "--from", path, "--output", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert words in message and message.count("\n") == 1 and not (tmp_path / "out.safetensors").exists()


def test_convert_never_writes_onto_its_source_or_a_file_without_content(tmp_path, monkeypatch, capsys):
    file = tmp_path / "w.safetensors.pth"
    shutil.copy(source("timm_deit"), file)
    (tmp_path / "w.safetensors").symlink_to(file)
    command = ["--model", small_deit(monkeypatch), "--from", str(file)]
    assert main("convert", [*command, "--output", f"{tmp_path}/w"]) == 2
    assert "is what this call reads" in capsys.readouterr().err
    assert file.read_bytes() == source("timm_deit").read_bytes()
    hollow = changed(tmp_path, "timm_deit", lambda arrays: {n: a for n, a in arrays.items() if "norm1" not in n})
    command = ["--model", "small_deit", "--from", str(hollow), "--output", f"{tmp_path}/o", "--allow", "*"]
    assert main("convert", command) == 2 and not (tmp_path / "o.safetensors").exists()


def test_a_random_classifier_predicts_nothing(tmp_path, monkeypatch, capsys):
    path = changed(tmp_path, "timm_deit", lambda arrays: {n: a for n, a in arrays.items() if "head" not in n})
    model = small_deit(monkeypatch)
    assert main("convert", ["--model", model, "--from", str(path), "--output", f"{tmp_path}/w", "--allow", "head"]) == 0
    file = str(tmp_path / "w.safetensors")
    for verb, *rest in (["eval"], ["predict", file], ["export", "--output", f"{tmp_path}/e"]):
        assert main(verb, ["--run", file, *rest]) == 2
        assert "without head.weight, head.bias, which have random values" in capsys.readouterr().err
    ppattn.create_model(model, weights=file)


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
    **{prefix: ({"state_dict": prefixed(PLAIN, prefix) | {"criterion.weight": np.ones(7)}}, None, 1) for prefix in
       ("model.", "net.", "_orig_mod.", "module.", "module.module.", "backbone.", "model._orig_mod.vit_.")},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_usual_forms_of_checkpoints_are_read(form, tmp_path):
    tree, part, factor = FORMS[form]
    (tmp_path / "w.pth").write_bytes(pickle.dumps(tree))
    model = ppattn.create_model("deit_tiny", **SHAPE)
    weights.convert(model, tmp_path / "w.pth", part=part)
    assert np.array_equal(model.norm.bias.numpy(), factor * PLAIN["norm.bias"])
    assert np.array_equal(model.head.bias.numpy(), factor * PLAIN["head.bias"])


def test_what_is_read_of_several_is_told_and_an_unclear_choice_is_an_error(tmp_path, caplog):
    (tmp_path / "w.pth").write_bytes(pickle.dumps({"model": PLAIN, "model_ema": TWICE}))
    weights.read(tmp_path / "w.pth")
    assert "'model' is read; the file holds model_ema, too" in caplog.text
    itself = {"model": {}, "epoch": 1}
    itself["model"]["self"] = itself
    for tree, part, words in (
        (MOCO, None, "holds base_encoder, momentum_encoder: choose one with --part NAME"),
        ({"model": PLAIN}, "teacher", "holds one model: leave out --part"),
        (itself, None, "holds no arrays"),
    ):
        (tmp_path / "w.pth").write_bytes(pickle.dumps(tree))
        with pytest.raises(UserError, match=words):
            weights.read(tmp_path / "w.pth", part)


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


@pytest.mark.parametrize("size", [(64, 24), (40, 16)])
def test_a_table_for_an_oblong_grid_that_fits_is_kept(size, tmp_path):
    """8 x 3 patches and a class token are 25 positions, a square; 5 x 2 are 11."""
    table = np.random.default_rng(0).normal(size=(1, 1 + size[0] * size[1] // 64, 24)).astype("float32")
    for inside, name in ((table, "transformers_dinov2"), (table[:, 1:], "timm_dinov2_reg")):
        key = "pos_embed" if "timm" in name else "dinov2.embeddings.position_embeddings"
        path = changed(tmp_path, name, lambda arrays, key=key, inside=inside: arrays | {key: inside})
        model, report, _ = converted(name, path, img_size=list(size))
        assert not report.resized and np.array_equal(model.pos_embed.numpy()[:, 1:], table[:, 1:])


def test_weights_of_another_library_name_the_command_that_converts_them(tmp_path):
    file = source("transformers_deit")
    with pytest.raises(UserError, match=f"ppattn convert --model deit_tiny --from {file}"):
        ppattn.create_model("deit_tiny", weights=file, **SHAPE)
    config = {"model": {"name": "deit_nano", "img_size": 16, "weights": str(file)}, "output": str(tmp_path / "run")}
    with pytest.raises(UserError, match="ppattn convert --model deit_nano"):
        ppattn.train(config)


@pytest.mark.parametrize("name", ["timm_swin", "transformers_dinov2", "paddleclas_pvt_v2"])
@pytest.mark.parametrize("change", ["axes", "length", "empty", "missing"])
def test_odd_shapes_give_one_sentence(name, change, tmp_path):
    about = facts(name)
    model, arrays = ppattn.create_model(about["model"], **about["arguments"]), weights.read(source(name))[0]
    kinds = {array.ndim: key for key, array in arrays.items()} | {-1: next(iter(arrays)), -2: next(reversed(arrays))}
    for key in {*kinds.values(), *(key for key in arrays if "pos" in key or "bias_table" in key or "query" in key)}:
        if any(word in key for word in ("mask_token", "batches", "position_index")):
            continue
        odd = {"axes": arrays[key][None], "length": arrays[key][:-1], "empty": arrays[key][:0], "missing": None}[change]
        held = {k: a for k, a in (arrays | {key: odd}).items() if a is not None}
        (tmp_path / "w.pth").write_bytes(pickle.dumps(held))
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
def test_files_beside_the_weights_say_how_the_model_is_used(case, tmp_path, monkeypatch, capsys):
    files, expected = BESIDE[case]
    shutil.copy(source("transformers_deit"), tmp_path / "model.safetensors")
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    command = f"--model {small_deit(monkeypatch)} --allow * --from {tmp_path} --output {tmp_path}/ours"
    assert main("convert", command.split()) == 0
    said = capsys.readouterr().out
    _, _, classes, preprocess = ppattn.load_run(tmp_path / "ours.safetensors")
    found = (preprocess.mean[0], preprocess.std[0], preprocess.crop_ratio, preprocess.crop_keep_aspect)
    if expected:
        assert (*found, preprocess.interpolation) == expected and "names of 7 classes are not known: numbers" in said
    else:
        assert found[:2] == (0.485, 0.229) and "how images are prepared is not known" in said
        named = [*NAMES[:1], *"bcdefg"] if "timm" in case else NAMES
        assert classes == ([str(i) for i in range(7)] if case == "no names" else named)


def test_weights_converted_without_a_head_open_as_a_model_without_classes(tmp_path, monkeypatch):
    given = f"--model {small_deit(monkeypatch)} --num-classes 0 --from {source('transformers_deit')}"
    assert main("convert", [*given.split(), "--output", f"{tmp_path}/ours"]) == 0
    run = ppattn.load_run(tmp_path / "ours.safetensors")
    assert run.classes == [] and run.model.num_classes == 0


@pytest.mark.parametrize(
    ("name", "content"),
    [("preprocessor_config.json", '{"image_mean": "x"}'), ("preprocessor_config.json", "[" * 9999),
     ("preprocessor_config.json", '{"do_rescale": false}'), ("config.json", '{"mean": 5, "std": [1, 1, 1]}'),
     ("config.json", '{"id2label": {"x": "y"}}'), ("config.json", '{"label_names": [[1]]}'), ("config.json", "5"),
     ("config.json has 12 heads, the model 3", '{"num_attention_heads": 12}'),
     ("preprocessor_config.json", '{"size": 9, "do_center_crop": true, "crop_size": {"a": "b"}}')],
)  # fmt: skip
def test_odd_files_beside_the_weights_are_told(name, content, tmp_path):
    (tmp_path / name.split()[0]).write_text(content)
    with pytest.raises(UserError, match=name) as caught:
        settings_beside_weights(tmp_path, 7, heads=3)
    assert "\n" not in str(caught.value)


def test_a_filter_that_is_not_known_here_is_told(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(VIT | {"resample": 1}))
    pixels, _, said = settings_beside_weights(tmp_path, 7)
    assert pixels["interpolation"] == "bicubic" and "resample = 1 is not known here: bicubic is used" in said
