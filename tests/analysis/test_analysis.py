"""Attention maps of whole models, and every analysis on maps or models whose answer is known."""

import json
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

import ppattn
from ppattn.analysis import interventions, measures, verbs
from ppattn.analysis.maps import LayerMap, attention_maps, spread
from ppattn.attention import Attention, LayerState
from ppattn.attention.less import key_grid
from ppattn.backbones.swin import roll_map, window_mask
from ppattn.cli import main
from ppattn.cli.analyze import ANALYSES
from ppattn.data import Preprocess
from ppattn.data.splits import ArraySplit, Splits
from ppattn.errors import UserError
from tests.helpers.data_sets import fill, write_image

SMALL = {"embed_dim": 16, "depth": 3, "num_heads": 2, "num_classes": 3, "patch_size": 4}


def layer_map(weights, hw, prefix=0, **more):
    layer = SimpleNamespace(spatial_keys=True)
    return LayerMap("blocks.0", layer, hw, prefix, None, np.asarray(weights, float), **more)


def subject(name="softmax", count=6, **arguments):
    """An untrained model on six random images of three classes."""
    paddle.seed(0)
    model = ppattn.create_model("deit_nano", attention=name, **SMALL, img_size=(20, 12), **arguments)
    images = np.random.default_rng(0).integers(0, 256, (9, 20, 12, 3)).astype(np.uint8)
    split = ArraySplit(images, np.array([0, 0, 0, 0, 1, 1, 2, 2, 2]), "made")
    return verbs.Subject(name, model, Preprocess((20, 12)), Splits(split, split, ["ant", "bee", "cat"]), count)


@pytest.mark.parametrize("backbone", ["deit_nano", "pvt_nano", "swin_nano"])
@pytest.mark.parametrize("attention", ["softmax", "inline", "linear", "less"])
def test_rows_of_every_map_sum_to_one(backbone, attention):
    model = ppattn.create_model(backbone, attention=attention, img_size=(44, 28))
    model.train()
    layers = attention_maps(model, paddle.randn([1, 3, 44, 28]))
    assert all(layer.training for layer in model.sublayers(include_self=True))
    assert [found.layer for found in layers] == [layer for layer in model.sublayers() if isinstance(layer, Attention)]
    for found in layers:
        whole = found.whole()
        assert whole.shape[1] == found.prefix + found.hw[0] * found.hw[1] and np.abs(whole.sum(-1) - 1).max() < 2e-5
        assert attention != "softmax" or backbone != "pvt_nano" or found.key_hw == key_grid(found.layer.spec)


def test_windows_are_assembled_where_the_backbone_cut_them():
    h, w, side, shift = 7, 10, 4, 2
    index = np.full((8, 12), -1.0, "float32")
    index[:h, :w] = np.arange(h * w).reshape(h, w)
    shifted = roll_map(paddle.to_tensor(index[None, ..., None]), -shift)
    cut = ppattn.ops.partition_windows(shifted, side, side).numpy()[..., 0].astype(int)
    weights = np.random.default_rng(0).random((len(cut), 2, 16, 16))
    found = layer_map(weights, (h, w), window=side, shift=shift)
    whole = found.whole()
    for y, x in ((0, 0), (3, 4), (6, 9)):
        assert np.array_equal(found.query(y, x), whole[:, y * w + x].mean(0).reshape(h, w))
    expected = np.zeros_like(whole)
    for group, own in zip(weights, cut, strict=True):
        real = own >= 0
        expected[:, own[real, None], own[real]] = group[:, real][:, :, real]
    assert np.array_equal(whole, expected)


@pytest.mark.parametrize("always_shift", [False, True])
def test_a_map_is_zero_exactly_where_the_output_does_not_depend_on_the_token(always_shift):
    """The gradient of the shipped block tells where; the second block of the last stage shifts only if told to."""
    shape = {"embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4}
    model = ppattn.create_model("swin_nano", img_size=(32, 24), always_shift=always_shift, patch_size=4, **shape)
    model.eval()
    for found in attention_maps(model, paddle.randn([1, 3, 32, 24])):
        block, tokens = dict(model.named_sublayers())[found.name], found.hw[0] * found.hw[1]
        x = paddle.randn([1, tokens, block.attn.spec.dim])
        x.stop_gradient = False
        out = block.attend(x, found.hw, LayerState())[0]
        for token in range(tokens):
            (slope,) = paddle.grad(out[0, token].sum(), [x], retain_graph=True)
            seen = (slope[0].abs().sum(-1) > 1e-9).numpy()
            assert np.array_equal(seen, found.whole()[:, token].max(0) > 1e-9), (found.name, token)


def test_classes_take_turns():
    assert spread(np.array([2, 2, 0, 2, 1, 0]), 5) == [2, 4, 0, 5, 1]


def test_local_share_by_hand():
    uniform = layer_map(np.full((1, 1, 12, 12), 1 / 12), (3, 4))
    neighbours = np.array([[4, 6, 6, 4], [6, 9, 9, 6], [4, 6, 6, 4]]).mean() / 12
    assert np.allclose(measures.local_share(uniform, 3), neighbours)
    assert np.allclose(measures.local_share(uniform, 5), np.mean([9, 12, 12, 9]) / 12)
    own = measures.local_share(layer_map(np.eye(13)[None, None], (3, 4), 1), 3)
    assert own[0] == 1 and own[1] == pytest.approx(neighbours * 12 / 13)
    assert measures.local_share(layer_map(np.zeros((1, 1, 12, 3)), (3, 4)), 3) is None
    assert np.allclose(measures.local_share(layer_map(np.full((4, 1, 4, 4), 0.25), (4, 4), window=2), 3), 1)


def test_confusions_count_equal_rows():
    rows = np.array([[0.5, 0.5], [0.5, 0.5], [0.9, 0.1], [0.5, 0.5001]])[None]
    assert [measures.confusions(rows, t) for t in (1e-5, 1e-3, 2.0)] == [1, 3, 6]
    assert measures.confusions(np.eye(4)[None], 1e-3) == 0


def test_measures_count_visible_keys_of_shifted_windows_only():
    """Uniform over what each query of an 8 x 8 map may see in windows of side 4, shifted by 2."""
    mask = window_mask((8, 8), (8, 8), 4, 2, paddle.float32).numpy()
    scores = np.where(mask[:, None] > -1, 0.0, -100.0)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)  # 4e-44 where nothing is to be seen
    found = layer_map(weights, (8, 8), window=4, shift=2, mask=mask)
    region = np.searchsorted([2, 6], np.arange(8), side="right")  # the shift cuts the map into 3 x 3 regions
    rows, columns = np.divmod(np.arange(64), 8)
    same = (region[rows][:, None] == region[rows]) & (region[columns][:, None] == region[columns])
    assert np.array_equal(found.visible(), same) and measures.entropy(found) == pytest.approx(1)
    for share in measures.local_share(found, 3):
        assert share == pytest.approx(((same & measures.near((8, 8), 3)).sum(-1) / same.sum(-1)).mean())
    pairs = sum(n * (n - 1) / 2 for n in (4, 8, 4, 8, 16, 8, 4, 8, 4))  # equal rows inside a region
    assert measures.confusions(found.whole(), 1e-6) == pairs


@pytest.mark.parametrize("backbone", ["swin_nano", "deit_nano"])
def test_masking_takes_visible_keys_of_windows_only(backbone):
    shape = {"embed_dim": 16, "depths": (2,), "num_heads": (2,), "window_size": 4, "patch_size": 4}
    plain = {"attention": "window", "attention_options": {"window_size": 3}, "class_token": True}
    model = ppattn.create_model(backbone, img_size=32, num_classes=3, **(shape if backbone == "swin_nano" else plain))
    model.eval()
    counts = {}
    for local in (True, False):
        with interventions.masked(model, 3, local) as counts[local]:
            model(paddle.randn([1, 3, 32, 32]))
    seen = attention_maps(model, paddle.randn([1, 3, 32, 32]))[1].visible()[-64:, -64:]
    expected = (seen & measures.near((8, 8), 3)).sum(-1).mean()
    assert seen.sum() < 2000 and counts[True] == counts[False] and counts[True][1] == pytest.approx(expected)
    model.set_input_size((36, 20))  # 9 x 5 tokens, padded to whole windows
    with interventions.masked(model, 1, True) as own:
        model(paddle.randn([1, 3, 36, 20]))
    assert own == [1.0] * len(own)


def test_projected_tokens_are_no_map():
    model = ppattn.create_model("pvt_nano", attention="linformer", img_size=56)
    layers = attention_maps(model, paddle.randn([1, 3, 56, 56]))
    assert not any(found.own_keys for found in layers)
    with pytest.raises(UserError, match="keys of linformer attention lie on no grid"):
        layers[-1].query(0, 0)
    assert measures.local_share(layers[-1], 3) is None


def test_entropy_and_rank_of_uniform_and_of_identity():
    uniform, eye = np.full((2, 5, 5), 0.2), np.stack([np.eye(5)] * 2)
    assert [measures.entropy(layer_map(m[None], (1, 5))) for m in (uniform, eye)] == pytest.approx([1, 0], abs=1e-9)
    assert measures.effective_rank(uniform) == pytest.approx(1, rel=1e-6)
    assert measures.effective_rank(eye) == pytest.approx(5)


def test_diagonality_symmetry_and_similarity_by_hand():
    a = np.array([[[0.6, 0.4], [0.9, 0.1]]])
    assert measures.diagonality(a) == 0.5 and measures.symmetry(a) == pytest.approx(1 - 1.0 / 4)
    assert measures.symmetry(a + a.swapaxes(1, 2)) == 1 and measures.similarity(a, 3 * a) == pytest.approx(1)
    assert measures.similarity(np.eye(2)[None], np.eye(2)[None, ::-1]) == 0


def test_rollout_of_uniform_maps():
    step = 0.5 * np.eye(4) + 0.125
    assert np.allclose(measures.rollout([np.full((2, 4, 4), 0.25)] * 3), np.linalg.matrix_power(step, 3))
    assert np.allclose(measures.rollout([np.array([[[-0.5, 1.5], [0.5, 0.5]]])]), [[0.5 + 0.125, 0.375], [0.25, 0.75]])


@pytest.mark.parametrize("name", ["softmax", "inline", "polaformer", "linear"])
def test_masking_takes_the_masked_tokens_out_of_the_sum(name):
    paddle.seed(1)
    model = ppattn.create_model("deit_nano", attention=name, **SMALL, img_size=(20, 12), class_token=True)
    layer, x, hw = model.blocks[0].attn, paddle.randn([2, 16, 16]), (5, 3)
    model.eval()
    before, _ = layer(x, hw)
    weights, seen = layer.attention_map(x, hw).numpy(), []
    with interventions.masked(model, 3, local=True) as counts:
        masked, _ = layer(x, hw)
    assert counts == [pytest.approx((4 * 4 + 8 * 6 + 3 * 9) / 15)]  # corners, edges, inside of 5 x 3
    with interventions.masked(model, 9, local=True):  # no grid token sees another, the class token sees them all
        everything, _ = layer(x, hw)
    with interventions.masked(model, 3, local=False):
        seen = [layer(x, hw)[0].numpy() for _ in range(2)]
    assert np.array_equal(layer(x, hw)[0].numpy(), before.numpy())
    assert np.allclose(before[:, 0].numpy(), everything[:, 0].numpy(), atol=1e-5)
    assert np.abs(seen[0] - before.numpy()).max() > 1e-3 and np.abs(seen[0] - seen[1]).max() > 1e-4
    if name == "softmax":
        v = layer.qkv(x)[..., 32:].numpy().reshape(2, 16, 2, 8).transpose(0, 2, 1, 3)
        rows, columns = np.divmod(np.arange(15), 3)
        local = (abs(rows[:, None] - rows) <= 1) & (abs(columns[:, None] - columns) <= 1)
        kept = weights.copy()
        kept[:, :, 1:, 1:] *= ~local
        y = (kept @ v).transpose(0, 2, 1, 3).reshape(2, 16, 16)
        assert np.abs(layer.proj(paddle.to_tensor(y)).numpy() - masked.numpy()).max() < 1e-5


@pytest.mark.parametrize("name", ["soft", "soft_norm"])
def test_rows_of_newton_name_their_layers_and_are_means_over_the_images(name, tmp_path):
    made = subject([["softmax", name, name]], attention_options={"newton_iters": 6, "num_landmarks": 4})
    made.name = "mixed"
    rows = verbs.newton([made], tmp_path / "newton.png")["mixed"]
    assert [row["layer"] for row in rows] == ["blocks.1", "blocks.2"]
    own = [interventions.newton(maps[1]) for maps in made.maps()]
    assert rows[0]["residuals"] == pytest.approx(np.mean([row["residuals"] for row in own], axis=0).tolist())
    assert len(rows[0]["residuals"]) == 7 and rows[0]["residuals"][-1] < rows[0]["residuals"][0]
    assert all(-1 <= row["cosine"] <= 1 and ("error" in row) == (name == "soft") for row in own)


def test_newton_residual_by_hand():
    """With one landmark, K = 1.01 and V = 1.8 K: the residual is 1 - 1.8 * 1.01^2, and then its square, ..."""
    made = subject("soft", attention_options={"newton_iters": 3, "num_landmarks": 1, "landmarks": "pool"})
    row, first = interventions.newton(next(made.maps())[0]), abs(1 - 1.8 * 1.01**2)
    assert row["residuals"] == pytest.approx([first, first**2, first**4, first**8], rel=1e-3)


@pytest.mark.parametrize("backbone", ["deit_nano", "pvt_nano", "swin_nano"])
def test_gradcam_by_finite_differences(backbone):
    """The mean derivative of a channel is that of the logit by a constant added to the channel, over the tokens."""
    more = {"depth": 2, "class_token": True} if backbone == "deit_nano" else {}
    model = ppattn.create_model(backbone, attention="linear", num_classes=3, img_size=(32, 48), **more)
    model.eval()
    image, prefix, width = paddle.randn([1, 3, 32, 48]), int("class_token" in more), model.feat_channels[-1]
    heat, logits = interventions.gradcam(model, image)
    steps, received = paddle.concat([0.02 * paddle.eye(width), -0.02 * paddle.eye(width)]).unsqueeze(1), []

    def add(_, inputs):
        x, hw, state = inputs
        received.extend([x[0, prefix:].numpy(), hw])
        return paddle.concat([x[:, :prefix], x[:, prefix:] + steps], axis=1), hw, state

    hook = model.blocks_flat()[-1].register_forward_pre_hook(add)
    with paddle.no_grad():
        above, below = model(image.tile([2 * width, 1, 1, 1]))[:, int(logits.argmax())].numpy().reshape(2, -1)
    hook.remove()
    tokens, hw = received
    expected = np.maximum(tokens @ (above - below) / 0.04 / len(tokens), 0).reshape(hw)
    assert heat.shape == tuple(hw) and np.abs(heat - expected).max() < 0.01 * expected.max()


def test_powers_and_gates_of_polaformer():
    made = subject("polaformer")
    layer = made.model.blocks[0].attn
    layer.power.set_value(paddle.full_like(layer.power, np.log(3)))  # sigmoid 0.75
    gate = layer.qkvg.weight.numpy()
    gate[:, 52:56] = -gate[:, 48:52]  # of the first head: same-sign half, opposite-sign half
    gate[:, 60:64] = -gate[:, 56:60]
    layer.qkvg.weight.set_value(gate)
    found = interventions.polarity(next(made.maps())[0])
    assert found["power"] == found["largest_power"] == pytest.approx(4, rel=1e-5)
    assert found["gate_correlation"] == pytest.approx(-1, abs=1e-4)
    assert interventions.polarity(next(subject("softmax").maps())[0]) is None


def test_less_attention_starts_saturated(tmp_path):
    report = verbs.saturation([subject("less"), subject("softmax")], tmp_path / "saturation.png")
    assert [row.get("similarity") for row in report["less"]] == [None, pytest.approx(1), pytest.approx(1)]
    assert report["softmax"][1]["similarity"] < 1


def test_nearest_mean_leaves_the_point_itself_out():
    points = np.array([[0.0], [1.0], [10.0], [11.0], [4.0]])
    assert verbs.nearest_mean(points, np.array([0, 0, 1, 1, 1])) == 4 / 5
    assert verbs.nearest_mean(points[:2], np.array([0, 1])) == 0


def test_embedding_of_features_on_a_line(tmp_path):
    made, line = subject(count=9), paddle.to_tensor([[1.0, 2.0, -1.0]])
    made.model.tokens = lambda images: (images.mean([1, 2, 3]).unsqueeze(1) * line, {}, [])
    for method in ("pca", "tsne"):
        report = verbs.embed([made], tmp_path / "embed.png", method)
        assert report["softmax"][0]["variance_in_two"] == pytest.approx(1, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("verb", [name for name in ANALYSES if name != "newton"])
def test_every_verb_takes_several_runs(verb, tmp_path):
    report = getattr(verbs, verb)([subject("softmax"), subject("polaformer"), subject("inline")], tmp_path / "x.png")
    assert list(report) == ["softmax", "polaformer", "inline"] and all(report.values())
    json.dumps(report)
    assert (tmp_path / "x.png").stat().st_size > 10_000


@pytest.mark.slow
def test_names_are_drawn_as_they_are(tmp_path, monkeypatch):
    """`$` begins a formula to matplotlib, an underscore hides a name, and no font has every sign."""
    (tmp_path / "run_$x^$").mkdir()
    names, model = ["$\\frac{", "_hidden", "\u732b"], ppattn.create_model("deit_nano", depth=1, num_classes=3)
    images = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3)).astype(np.uint8)
    split = ArraySplit(images, np.arange(6) % 3, "made")
    monkeypatch.setattr("ppattn.trained.load_run", lambda *_, **__: (None, model, names, Preprocess((32, 32))))
    monkeypatch.setattr("ppattn.data.build_datasets", lambda config: Splits(split, split, names, [0.5] * 3, [0.5] * 3))
    for verb in ("maps", "embed", "locality"):  # whose warnings are errors here
        call = [verb, "--run", str(tmp_path / "run_$x^$"), "--images", "6", "--output", str(tmp_path)]
        assert main("analyze", call) == 0


@pytest.mark.parametrize(
    ("backbone", "attention", "whole", "floats"),  # maps of 16 x 16 tokens, 8 x 8 and 4 x 4, by the heads of the layers
    [("swin_nano", "linear", True, 65536 + 4 * 4096 + 8 * 256), ("swin_nano", "softmax", False, 4096 + 4096 + 8 * 256)],
)
def test_maps_that_do_not_fit_into_memory_are_refused(backbone, attention, whole, floats, monkeypatch):
    model, needed = ppattn.create_model(backbone, attention=attention), 4 * (floats + 4 * (65536 if whole else 4096))
    images = paddle.randn([1, 3, 32, 32])
    monkeypatch.setattr("ppattn.runtime.memory.host", lambda: needed / 1e6)
    assert sum(found.weights.size for found in attention_maps(model, images, whole)) == floats
    monkeypatch.setattr("ppattn.runtime.memory.host", lambda: (needed - 1) / 1e6)
    with pytest.raises(UserError, match="about 31 pixels fit"):
        attention_maps(model, images, whole)


def test_what_a_verb_cannot_do_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match="has none"):
        verbs.newton([subject("softmax")], tmp_path / "x.png")
    with pytest.raises(UserError, match="1 to 9"):
        subject(count=10)
    with pytest.raises(UserError, match="two images or more"):
        verbs.embed([subject(count=1)], tmp_path / "x.png")
    others = subject(), subject()
    others[0].classes = ["cat", "dog"]
    others[1].pictures = [255 - picture for picture in others[1].pictures]
    for verb, other, words in (("embed", 0, "classes"), ("maps", 1, "images"), ("rollout", 1, "images")):
        with pytest.raises(UserError, match=f"different {words}"):
            getattr(verbs, verb)([subject(), others[other]], tmp_path / "x.png")
    model = ppattn.create_model("pvt_nano", sr_ratios=[4, 4, 2, 2], num_classes=3, img_size=64)
    split = ArraySplit(np.zeros((2, 64, 64, 3), np.uint8), np.array([0, 1]), "made")
    reduced = verbs.Subject("pvt", model, Preprocess((64, 64)), Splits(split, split, ["a", "b", "c"]), 2)
    for verb in ("locality", "rollout"):
        with pytest.raises(UserError, match="the queries' own tokens"):
            getattr(verbs, verb)([reduced], tmp_path / "x.png")


def test_pictures_of_ones_own_need_no_data_set(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("owl", "fox"):
        write_image(tmp_path / f"photos/{name}.png", len(name), (20, 30, 3))
    run = ["--run", "softmax_deit_nano_cifar10", "--output", "out"]
    assert main("analyze", ["rollout", *run, "--images", "photos", "photos/owl.png"]) == 0
    rows = json.loads((tmp_path / "out/rollout.json").read_text())["runs"]["softmax_deit_nano_cifar10"]
    assert [row["class"] for row in rows] == ["fox", "owl", "owl"]
    fill(tmp_path / "data", ["train", "val"], ("ship", "cat"), 2, (20, 30, 3))  # two of the model's classes
    assert main("analyze", ["maps", *run, "--images", "2", "-o", "data.name=folder", "data.root=data"]) == 0
    for call, words in (
        (["maps", *run, "-o", "data.download=false"], "--images PICTURE"),
        (["mask", *run, "--images", "photos"], "needs images with labels"),
        (["maps", *run, "--images", "photo"], "does not exist"),
    ):
        assert main("analyze", call) == 2 and words in capsys.readouterr().err
