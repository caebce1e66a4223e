"""Weights of other libraries: files that timm, transformers and PaddleClas wrote, with the logits these gave.

tests/foreign/make.py made the files; the models are small, and every parameter is drawn at random.
"""

import json
import re
from pathlib import Path

import numpy as np
import paddle
import pytest

import ppattn
from ppattn import weights
from ppattn.cli import main
from ppattn.errors import UserError
from ppattn.weights.foreign import recognise
from tests.helpers import golden_data as golden

FOLDER = Path(__file__).resolve().parents[1] / "foreign"
CASES = sorted(path.stem for path in FOLDER.glob("*.json"))
LIBRARY = {
    "timm_deit": "the authors or timm", "timm_dinov2": "the authors or timm", "timm_dinov2_reg": "the authors or timm",
    "timm": "timm", "torchvision": "torchvision", "transformers": "transformers", "paddleclas": "PaddleClas",
}  # fmt: skip


def source(name: str) -> Path:
    return next(path for path in FOLDER.glob(f"{name}.*") if path.suffix != ".json")


def converted(name: str, path=None, **arguments):
    about = json.loads((FOLDER / f"{name}.json").read_text())
    model = ppattn.create_model(about["model"], **about["arguments"] | arguments)
    return model, weights.convert(model, path or source(name)), about


def test_weights_go_back_to_timm_as_they_were(tmp_path, capsys):
    """They are the arrays whose logits timm computed."""
    model, _, about = converted("timm_deit")
    section = {"name": about["model"], **about["arguments"]}
    weights.save(tmp_path / "ours.safetensors", model.state_dict(), {"config": {"model": section}})
    call = ["convert", "--to", "timm", "--from", str(tmp_path / "ours.safetensors"), "--output", str(tmp_path / "back")]
    assert main(call) == 0
    printed = capsys.readouterr().out
    shape = (
        "img_size=(32, 32), in_chans=3, num_classes=7, patch_size=8, embed_dim=24, depth=2, num_heads=3, mlp_ratio=4.0"
    )
    assert f"VisionTransformer({shape}, norm_layer=functools.partial(torch.nn.LayerNorm, eps=1e-06))" in printed
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


def changed(tmp_path, name: str, change) -> Path:
    """A fixture with other arrays, as .npz."""
    arrays, _ = weights.read(source(name))
    np.savez(tmp_path / "changed.npz", **change(dict(arrays)))
    return tmp_path / "changed.npz"


@pytest.mark.parametrize("name", CASES)
def test_converted_weights_give_the_logits_of_their_library(name, tmp_path):
    model, report, about = converted(name)
    library, family = name.split("_", 1)
    assert f"of {LIBRARY.get(name) or LIBRARY[library]} with" in report.source
    assert report.loaded == len(model.state_dict()) and not report.missing and not report.unused
    metadata = {"config": {"model": report.constants}}
    weights.save(tmp_path / "ours.safetensors", model.state_dict(), metadata)
    model = ppattn.create_model(about["model"], weights=tmp_path / "ours", **about["arguments"])
    model.eval()
    size = about["arguments"]["img_size"]
    images = np.random.RandomState(size).standard_normal((2, 3, size, size)).astype("float32")
    with paddle.no_grad():
        logits = model(paddle.to_tensor(images)).numpy()
    expected = np.array(about["logits"])
    assert np.abs(logits - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("name", [name for name in CASES if "dinov2" in name])
def test_patch_features_of_dinov2_are_those_of_its_library_at_every_size(name):
    """At other sizes the position table is resized as in the authors' code, which only timm's models can be given."""
    model, report, about = converted(name, num_classes=0)
    assert not report.missing and not report.unused
    model.eval()
    size = about["arguments"]["img_size"]
    cases = [(np.random.RandomState(size).standard_normal((2, 3, size, size)), about["features"])]
    if "other_size" in about:
        cases.append((np.random.RandomState(0).standard_normal((1, 3, *about["other_size"])), about["other_features"]))
    for images, expected in cases:
        images, expected = paddle.to_tensor(images.astype("float32")), np.array(expected)
        with paddle.no_grad():
            (features,) = model.forward_features(images)
            pooled = model(images)
        assert list(pooled.shape) == [len(expected), 24] and features.shape == list(expected.shape)
        assert np.abs(features.numpy() - expected).max() <= 1e-5 * np.abs(expected).max()


def test_a_head_of_dinov2_on_the_class_token_alone_gives_the_same_logits():
    model, _, about = converted("timm_dinov2")
    assert model.head.weight.shape == [48, 7] and not model.head.weight[24:].numpy().any()
    encoder, *_ = converted("timm_dinov2", num_classes=0)
    encoder.eval()
    images = paddle.to_tensor(np.random.RandomState(32).standard_normal((2, 3, 32, 32)).astype("float32"))
    logits = encoder(images) @ model.head.weight[:24] + model.head.bias
    assert np.allclose(logits.numpy(), about["logits"], atol=1e-4)


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
    family = name.removeprefix("shrunk_")
    backbone = found[0] if found else {"soft": "pvt", "soft_norm": "pvt"}.get(family, "deit")
    assert source.library.startswith("the authors") and (source.backbone, renamed.keys()) == (backbone, arrays.keys())


def test_the_fixtures_are_small_and_cover_what_is_promised():
    assert {"timm_deit", "timm_swin", "timm_pvt_v2", "paddleclas_deit", "paddleclas_swin"} <= set(CASES)
    assert {f"transformers_{family}" for family in ("deit", "swin", "pvt", "pvt_v2")} <= set(CASES)
    assert {f"{library}_dinov2{kind}" for library in ("timm", "transformers") for kind in ("", "_reg")} <= set(CASES)
    assert all(path.stat().st_size < 300_000 for path in FOLDER.iterdir())


def test_the_constants_of_a_library_matter_and_can_be_overruled(tmp_path):
    """A shift in the last map of PaddleClas's Swin, a smaller epsilon in transformers' ViT."""
    images = paddle.to_tensor(np.random.RandomState(0).standard_normal((1, 3, 64, 64)).astype("float32"))
    shape = {"img_size": 64, "embed_dim": 12, "depths": [1, 2, 2], "num_heads": [1, 2, 4], "window_size": 4}
    model = ppattn.create_model("swin_tiny", num_classes=4, **shape)
    metadata = {"config": {"model": {"always_shift": True, "norm_eps": 1e-3}}}
    weights.save(tmp_path / "w.safetensors", model.state_dict(), metadata)
    logits = []
    for arguments in ({}, {"always_shift": False}, {"norm_eps": 1e-5}, {"always_shift": False, "norm_eps": 1e-5}):
        other = ppattn.create_model("swin_tiny", num_classes=4, weights=tmp_path / "w", **shape, **arguments)
        other.eval()
        logits.append(other(images).numpy())
    model.eval()
    assert np.array_equal(logits[3], model(images).numpy())
    assert all(np.abs(logits[i] - logits[j]).max() > 1e-6 for i in range(4) for j in range(i))


@pytest.mark.parametrize("name", ["timm_deit", "transformers_deit", "paddleclas_deit"])
def test_a_distilled_model_is_refused_with_a_reason(name, tmp_path):
    token = "deit.embeddings.distillation_token" if "transformers" in name else "dist_token"

    def distilled(arrays):
        return {n.replace("vit.", "deit."): a for n, a in arrays.items()} | {token: np.zeros((1, 1, 24), "float32")}

    with pytest.raises(UserError, match="distillation token, which no model here has"):
        converted(name, changed(tmp_path, name, distilled))


def test_the_pooler_of_transformers_is_left_out_and_told(tmp_path):
    def base(arrays):  # as ViTModel saves itself
        arrays = {n.removeprefix("vit."): a for n, a in arrays.items() if not n.startswith("classifier")}
        return arrays | {"pooler.dense.weight": np.eye(24, dtype="float32"), "pooler.dense.bias": np.zeros(24)}

    path = changed(tmp_path, "transformers_deit", base)
    with pytest.raises(UserError, match=r"head.weight is missing.*the file has none.*--num-classes 0"):
        converted("transformers_deit", path)
    _, report, _ = converted("transformers_deit", path, num_classes=0)
    assert "left out: pooler.dense.bias, a head of the other library" in str(report)


def test_both_layouts_in_one_file_are_refused(tmp_path):
    def mixed(arrays):
        return arrays | {"blocks.1.mlp.fc1.weight": arrays["blocks.1.mlp.fc1.weight"].T}

    with pytest.raises(UserError, match="in both layouts"):
        converted("paddleclas_deit", changed(tmp_path, "paddleclas_deit", mixed))


REFUSED = [
    (
        "swin_tiny",
        "timm_swin.pth",
        "looks like a Swin of timm with 8, 16, 32 channels and 1, 2, 2 blocks, but swin_tiny",
    ),
    ("deit_tiny", "paddleclas_pvt_v2.pdparams", "looks like a PVTv2 of PaddleClas"),
    ("inline_deit_tiny", "timm_deit.pth", "but inline_deit_tiny is a DeiT with 192 channels and 12 blocks"),
    ("deit_tiny", "{here}/resnet.npz", "holds no DeiT, Swin, PVT or PVT v2"),
    ("deit_tiny", "{here}/page.pth", "damaged or not a complete weights file"),
    ("deit_tiny", "{here}/half.pth", "half.pth"),
    ("deit_nano", "{here}/own.safetensors", "already a ppattn weights file"),
]


@pytest.mark.parametrize(("model", "file", "words"), REFUSED, ids=lambda value: str(value)[:30])
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


def test_convert_never_writes_onto_its_source_or_a_file_without_content(tmp_path, capsys):
    state = ppattn.create_model("deit_tiny").state_dict()
    arrays = {n: t.numpy().T if t.ndim == 2 else t.numpy() for n, t in state.items()}
    np.savez(tmp_path / "w.npz", **arrays)
    (tmp_path / "w.npz").rename(tmp_path / "w.safetensors.npz")
    (tmp_path / "w.safetensors").symlink_to(tmp_path / "w.safetensors.npz")
    before = (tmp_path / "w.safetensors.npz").read_bytes()
    command = ["--model", "deit_tiny", "--from", f"{tmp_path}/w.safetensors.npz"]
    assert main("convert", [*command, "--output", f"{tmp_path}/w"]) == 2
    assert "is what this call reads" in capsys.readouterr().err
    assert (tmp_path / "w.safetensors.npz").read_bytes() == before
    hollow = {name: array for name, array in arrays.items() if "norm1" not in name}
    np.savez(tmp_path / "hollow.npz", **hollow)
    command = ["--model", "deit_tiny", "--from", f"{tmp_path}/hollow.npz", "--output", f"{tmp_path}/o", "--allow", "*"]
    assert main("convert", command) == 2 and not (tmp_path / "o.safetensors").exists()


def test_a_random_classifier_predicts_nothing(tmp_path, capsys):
    state = ppattn.create_model("deit_tiny").state_dict()
    arrays = {name: t.numpy().T if t.ndim == 2 else t.numpy() for name, t in state.items() if "head" not in name}
    np.savez(tmp_path / "w.npz", **arrays)
    command = ["--model", "deit_tiny", "--from", f"{tmp_path}/w.npz", "--output", f"{tmp_path}/w", "--allow", "head"]
    assert main("convert", command) == 0
    file = str(tmp_path / "w.safetensors")
    for verb, *rest in (["eval"], ["predict", file], ["export", "--output", f"{tmp_path}/e"]):
        assert main(verb, ["--run", file, *rest]) == 2
        assert "without head.weight, head.bias, which have random values" in capsys.readouterr().err
    ppattn.create_model("deit_tiny", weights=file)
