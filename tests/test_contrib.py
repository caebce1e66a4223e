"""Hosts as backbones of PaddleSeg and PaddleDetection; without those packages, small stand-ins of their registries."""

import importlib
import sys
import types
from collections import namedtuple
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from ppattn.contrib.feature_maps import FeatureMaps, SimpleFeaturePyramid
from ppattn.errors import UserError


def images(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((2, 3, height, width)).astype("float32")


@pytest.mark.parametrize(
    ("model", "arguments", "channels", "strides"),
    [("deit_nano", {}, [256] * 4, [1, 2, 4, 8]), ("pvt_nano", {}, [32, 64, 128, 160], [2, 4, 8, 16]),
     ("swin_nano", {}, [32, 64, 128], [2, 4, 8]), ("pvt_v2_b0", {"out_indices": [1, 2]}, [64, 160], [8, 16]),
     ("soft_tiny", {"embed_dims": [32, 32, 64, 64], "num_heads": [1, 1, 2, 2]}, [32, 32, 64, 64], [4, 8, 16, 32])],
)  # fmt: skip
def test_maps_of_an_odd_image_are_those_of_the_padded_one(model, arguments, channels, strides):
    backbone = FeatureMaps(model, img_size=32, **arguments)
    backbone.eval()
    assert (backbone.feat_channels, backbone.strides) == (channels, strides)
    x, last = images(41, 35), strides[-1]
    height, width = (int(np.ceil(side / last)) * last for side in x.shape[2:])
    padded = np.pad(x, [(0, 0), (0, 0), (0, height - 41), (0, width - 35)])
    maps, expected = backbone(paddle.to_tensor(x)), backbone(paddle.to_tensor(padded))
    assert [m.shape for m in maps] == [[2, c, height // s, width // s] for c, s in zip(channels, strides, strict=True)]
    for got, wanted in zip(maps, expected, strict=True):
        np.testing.assert_allclose(got.numpy(), wanted.numpy(), rtol=0, atol=1e-6)


def test_every_map_of_a_host_with_stages_is_normalised():
    backbone = FeatureMaps("pvt_nano")
    backbone.eval()
    for m in backbone(paddle.to_tensor(images(32, 32))):
        np.testing.assert_allclose(m.mean(1).numpy(), 0, atol=1e-5)
        np.testing.assert_allclose(m.var(1, unbiased=False).numpy(), 1, atol=1e-2)


def test_simple_feature_pyramid():
    """The level of half size: max pooling, 1 x 1 convolution, norm, 3 x 3 convolution, norm."""
    pyramid, x = SimpleFeaturePyramid(8, out=5), paddle.randn([1, 8, 6, 4])
    maps = pyramid(x)
    assert [m.shape for m in maps] == [[1, 5, 24, 16], [1, 5, 12, 8], [1, 5, 6, 4], [1, 5, 3, 2]]
    y = F.max_pool2d(x, 2)
    for weight in (p for p in pyramid.levels["3"].parameters() if p.ndim == 4):
        y = F.conv2d(y, weight, padding=weight.shape[2] // 2)
        y = (y - y.mean(1, keepdim=True)) / (y.var(1, unbiased=False, keepdim=True) + 1e-6).sqrt()
    np.testing.assert_allclose(maps[3].numpy(), y.numpy(), atol=1e-4)
    alone = SimpleFeaturePyramid(8, 5, levels=[3])
    alone.set_state_dict(pyramid.state_dict())
    (only,) = alone(x)
    np.testing.assert_array_equal(only.numpy(), maps[3].numpy())


@pytest.mark.parametrize(
    ("model", "freeze_at", "frozen"),
    [("deit_nano", 2, ["patch_embed.", "cls_token", "pos_embed", "blocks.0.", "blocks.1."]),
     ("swin_nano", 1, ["patch_embed.", "stages.0."]), ("pvt_nano", 2, ["stages.0.", "stages.1."]),
     ("soft_tiny", 1, ["stages.0."]), ("pvt_v2_b0", 1, ["stages.0."]), ("pvt_nano", 0, [])],
)  # fmt: skip
def test_frozen_stages_keep_weights_and_statistics(model, freeze_at, frozen):
    small = {"embed_dims": [32, 32, 64, 64], "num_heads": [1, 1, 2, 2]} if model == "soft_tiny" else {}
    backbone = FeatureMaps(model, img_size=32, freeze_at=freeze_at, drop_path_rate=0.2, **small)
    backbone.train()
    before = {name: value.numpy().copy() for name, value in backbone.host.state_dict().items()}
    step = paddle.optimizer.SGD(0.5, parameters=[p for p in backbone.parameters() if not p.stop_gradient])
    weights = iter(np.random.default_rng(2).standard_normal(8))
    sum((m * m * next(weights)).sum() + m.sum() for m in backbone(paddle.to_tensor(images(32, 32)))).backward()
    step.step()
    fixed = [n for n, p in backbone.host.named_parameters() if p.stop_gradient]
    fixed = [name for name in fixed if not name.endswith(("_mean", "_variance"))]
    assert bool(fixed) == bool(frozen) and all(n.startswith(tuple(frozen)) for n in fixed)
    for name, value in backbone.host.state_dict().items():
        if name.startswith(tuple(frozen)):
            assert (value.numpy() == before[name]).all(), name
    assert len([n for n, v in backbone.host.state_dict().items() if (v.numpy() != before[n]).any()]) > len(before) / 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"model": "swin_nano", "out_indices": [0, 3]}, "swin_nano has the maps 0 to 2"),
     ({"model": "swin_nano", "out_indices": []}, "swin_nano has the maps 0 to 2"),
     ({"model": "pvt_nano", "freeze_at": 5}, "freeze_at = 5"), ({"model": "pvt_nan"}, "Did you mean 'pvt_nano'"),
     ({"model": "pvt_nano", "patch": 2}, "patch_size"), ({"model": "pvt_nano", "num_classes": 5}, "need no head")],
)  # fmt: skip
def test_wrong_arguments_get_a_sentence(arguments, words):
    with pytest.raises(UserError, match=words):
        FeatureMaps(**arguments)


@pytest.fixture
def imported(monkeypatch):
    """A module by name, imported with the package that it extends or with stand-ins of that package's modules."""

    def load(name: str, modules: dict[str, dict]):
        package = next(iter(modules)).split(".")[0]
        for path, contents in {package: {}, **modules}.items() if not find_spec(package) else ():
            module = types.ModuleType(path)
            module.__dict__.update(contents)
            monkeypatch.setitem(sys.modules, path, module)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return load


def test_paddleseg_backbone(imported):
    found = {}
    manager = types.SimpleNamespace(
        BACKBONES=types.SimpleNamespace(add_component=lambda cls: found.setdefault(cls.__name__, cls))
    )
    backbone = imported("ppattn.contrib.paddleseg", {"paddleseg.cvlibs": {"manager": manager}}).PPAttn(
        model="pvt_nano", attention="inline", attention_options={"kernel": "exp"}, img_size=64, in_channels=4
    )
    assert not found or found["PPAttn"] is type(backbone)
    assert backbone.feat_channels == [32, 64, 128, 160]
    assert [m.shape[2:] for m in backbone(paddle.zeros([1, 4, 41, 35]))] == [[21, 18], [11, 9], [6, 5], [3, 3]]


def test_paddledet_backbone(imported):
    ShapeSpec = namedtuple("ShapeSpec", ["channels", "stride"])
    found = {}
    workspace = {"register": lambda cls: found.setdefault(cls.__name__, cls), "serializable": lambda cls: cls}
    modules = {"ppdet.core.workspace": workspace, "ppdet.modeling.shape_spec": {"ShapeSpec": ShapeSpec}}
    cls = imported("ppattn.contrib.paddledet", modules).PPAttn
    backbone = cls(model="swin_nano", out_indices=[1, 2])
    assert [(s.channels, s.stride) for s in backbone.out_shape] == [(64, 4), (128, 8)]
    assert [m.shape[2:] for m in backbone({"image": paddle.zeros([1, 3, 41, 35])})] == [[12, 10], [6, 5]]
    with pytest.raises(UserError, match="twice"):
        _ = cls(model="pvt_nano", out_indices=[0, 2]).out_shape


def test_areas_and_loss_leave_ignored_pixels_out(imported, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[1] / "examples/segmentation")
    keep = types.SimpleNamespace(add_component=lambda cls: cls)
    modules = {"paddleseg.cvlibs": {"manager": types.SimpleNamespace(LOSSES=keep)}}
    modules["paddleseg.utils"] = {"metrics": types.SimpleNamespace()}
    paddleseg_fixes, rng = imported("paddleseg_fixes", modules), np.random.default_rng(3)
    pred, label = rng.integers(0, 4, (2, 1, 7, 5)), rng.integers(0, 3, (2, 1, 7, 5))
    label[0, 0, :3] = 255
    kept = label != 255
    areas = paddleseg_fixes.calculate_area(paddle.to_tensor(pred.astype("int32")), paddle.to_tensor(label), 4)
    for k in range(4):
        expected = [((pred == k) & (label == k)).sum(), ((pred == k) & kept).sum(), (label == k).sum()]
        assert [int(area[k]) for area in areas] == expected
    assert [area.shape for area in areas] == [[4]] * 3
    logits = rng.standard_normal((2, 4, 7, 5)).astype("float32")
    loss = paddleseg_fixes.PixelCrossEntropy()(paddle.to_tensor(logits), paddle.to_tensor(label[:, 0]))
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    of_label = np.take_along_axis(log_p, np.where(kept, label, 0), axis=1)
    assert loss.shape == [1]
    np.testing.assert_allclose(loss.item(), -of_label[kept].mean(), rtol=1e-5)


def test_maps_of_a_selection_have_the_promised_size():
    (finest,) = FeatureMaps("deit_nano", img_size=48, out_indices=[0], pyramid_channels=7)(paddle.randn([1, 3, 41, 41]))
    assert finest.shape == [1, 7, 48, 48]
    with pytest.raises(UserError, match="pyramid_channels is for a backbone with one map; pvt_nano has 4"):
        FeatureMaps("pvt_nano", pyramid_channels=64)
    with pytest.raises(UserError, match="a multiple of 4"):
        FeatureMaps("deit_nano", img_size=28, patch_size=14, stem="patch")
    maps = FeatureMaps("deit_nano", img_size=28, patch_size=14, stem="patch", out_indices=[1, 3])
    assert [y.shape[2:] for y in maps(paddle.randn([1, 3, 29, 28]))] == [[8, 4], [2, 1]] and maps.strides == [7, 28]
