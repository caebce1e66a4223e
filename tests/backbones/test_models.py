"""Backbones and zoo: mixed stages, sizes, windows, features, less-attention's maps, and costs in closed form."""

import math
import re

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

import ppattn
from ppattn import cost, ops, weights, zoo
from ppattn.attention import AttentionSpec, Context, LayerState, soft_norm
from ppattn.attention.base import cell_means
from ppattn.attention.less import ScoreDownsample, own_key
from ppattn.backbones.base import Block
from ppattn.backbones.swin import window_mask
from ppattn.errors import UserError
from ppattn.layers import PositionConv, patch_embedding
from ppattn.ops import interpolation_matrix, keep_factors

pytestmark = pytest.mark.slow


PROMISED = """
deit_{tiny,small,base} inline_deit_{tiny,small,base} swin_{tiny,small,base} inline_swin_{tiny,small,base}
pola_swin_{tiny,small,base} lavit_{tiny,small,base} pvt_{tiny,small,medium,large} inline_pvt_{tiny,small,medium,large}
pola_pvt_{tiny,small,medium,large} pvt_v2_{b0,b1,b2,b3,b4,b5} soft_{tiny,small,medium,large,huge}
soft_norm_{tiny,small,medium,large,huge}
"""


def test_lists_hold_the_promised_names():
    for family, sizes in re.findall(r"(\w+_){(.*?)}", PROMISED):
        assert {f"{family}{size}" for size in sizes.split(",")} <= set(ppattn.list_models())
    assert ppattn.list_models("inline_s*") == ["inline_swin_tiny", "inline_swin_small", "inline_swin_base"]
    assert {"deit_tiny", "deit_small", "deit_base", "pvt_tiny", "swin_base"} <= set(ppattn.list_backbones())
    assert set(ppattn.list_attentions()) >= {"softmax", "linear", "inline", "polaformer", "soft", "soft_norm", "less"}


def kinds(model):
    return [[type(b.attn).__name__.removesuffix("Attention") for b in stage.blocks] for stage in model.stages]


def test_attention_per_stage_and_per_block():
    small = {"img_size": 64, "embed_dim": 16, "num_heads": [1, 2, 2, 4]}
    model = ppattn.create_model("inline_swin_base", depths=[2, 2, 18, 2], **small)
    assert kinds(model)[2] == ["InLine"] * 2 + ["Softmax"] * 16
    model = ppattn.create_model("swin_tiny", attention=["inline"] * 3 + ["softmax"], **small)
    assert [stage[0] for stage in kinds(model)] == ["InLine"] * 3 + ["Softmax"]
    plain = ppattn.create_model("deit_nano", attention=["inline", "softmax"] * 3)
    assert [type(b.attn).__name__[:3] for b in plain.blocks] == ["InL", "Sof"] * 3


def test_weights_of_another_attention_are_refused_unless_they_are_asked_for(tmp_path):
    """linear and softmax have the same parameters, and so have the kernels of linear."""
    small, file = {"num_classes": 2, "depth": 1}, tmp_path / "linear.safetensors"
    linear = {"attention": "linear", "attention_options": {"kernel": "relu"}}
    model = ppattn.create_model("deit_nano", **linear, **small, fc_norm=True)
    weights.save(file, model.state_dict(), {"config": {"model": {"name": "deit_nano", **linear, "fc_norm": True}}})
    with pytest.raises(UserError, match=r"trained with .*linear.*'kernel': 'relu'.* built with .*softmax"):
        ppattn.create_model("deit_nano", weights=file, **small)
    with pytest.raises(UserError, match=r"trained with attention_options .*'relu'.* built with attention_options {}"):
        ppattn.create_model("deit_nano", weights=file, attention="linear", **small)
    ppattn.create_model("deit_nano", weights=file, attention="softmax", **small)
    again, images = ppattn.create_model("deit_nano", weights=file, **linear, **small), paddle.randn([2, 3, 32, 32])
    assert np.array_equal(again(images).numpy(), model(images).numpy())  # fc_norm, too
    last, (only,) = model.forward_intermediates(images, norm=True)
    assert np.array_equal(last.numpy(), only.numpy())  # its norm is that of the pooled features
    saved = {"config": {"model": {"name": "pvt_nano", "num_heads": [1, 2, 4, 1]}}}
    assert not zoo.other_attention(weights.Metadata(**saved), {"name": "pvt_nano", "num_heads": (1, 2, 4, 1)})


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 4, 32, 32), (1, 3, 0, 32)])
def test_what_is_no_batch_of_images_is_refused(shape):
    with pytest.raises(UserError, match="takes images"):
        ppattn.create_model("deit_nano", num_classes=2)(paddle.zeros(shape))


def test_the_full_kernel_has_no_landmark_ratio():
    model = ppattn.create_model("deit_nano", attention="gaussian", img_size=(4, 1024), num_classes=2)
    assert model(paddle.ones([1, 3, 4, 1024])).shape == [1, 2]


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [("deit_tny", {}, "'deit_tiny'"), (["deit_nano"], {}, "Unknown model"),
     ("deit_nano", {"embed_dims": [1]}, "'embed_dim'"), ("deit_nano", {"num_heads": 7}, "does not divide"),
     ("deit_nano", {"attention": "inlin"}, "'inline'"), ("deit_nano", {"attention": 5}, "attention = 5"),
     ("swin_nano", {"attention": ["inline"] * 2}, "lists 2 stages, but the model has 3"),
     ("swin_nano", {"attention": ["inline", ["softmax"] * 3, "inline"]}, "3 blocks for stage 2, which has 2"),
     ("pvt_nano", {"depths": [1, 1]}, "differ in length"), ("pvt_nano", {"depths": [0] * 4}, "depths = 0"),
     ("pvt_nano", {"num_heads": 4}, "num_heads = 4: Input should be an instance of Sequence"),
     ("pvt_nano", {"img_size": 8}, "too small"), ("deit_nano", {"img_size": (3, 32, 32)}, "at most 2 items"),
     ("deit_nano", {"img_size": "224"}, "valid integer; or: Input should be a valid list"),
     ("deit_nano", {"patch_size": 0}, "patch_size = 0"), ("deit_nano", {"patch_size": 6}, "a power of two"),
     ("deit_nano", {"stem": "cnn"}, "'patch', 'conv' or 'pool'"), ("deit_nano", {"init": "kaiming"}, "xavier"),
     ("pvt_tiny", {"attention": ["less"] * 4}, "max_tokens"),
     ("pvt_tiny", {"attention": "less", "img_size": 64, "sr_ratios": [8, 8, 1, 1]}, "more keys than the stage before"),
     ("deit_nano", {"drop_path_rate": 1.0}, "less than 1"), ("deit_nano", {"qkv_bias": 1}, "qkv_bias = 1"),
     ("deit_nano", {"mlp_ratio": float("nan")}, "mlp_ratio = nan"), ("deit_nano", {"mlp_ratio": 0.005}, "no channel"),
     ("deit_nano", {"in_chans": "3"}, "in_chans = '3'"), ("deit_nano", {"num_classes": -1}, "num_classes = -1"),
     ("swin_nano", {"window_size": 0}, "window_size = 0"), ("soft_tiny", {"patch_size": 8}, "make it 4"),
     ("soft_tiny", {"stem": "conv"}, "convolutions of its own"),
     ("pvt_nano", {"attention": "softmax", "attention_options": {"residual": True}}, "sr_ratio"),
     ("pvt_tiny", {"attention": "soft", "img_size": 16}, "smaller than its landmark ratio 8")],
)  # fmt: skip
def test_what_cannot_be_built_is_refused_in_one_sentence(name, arguments, words):
    with pytest.raises(UserError, match=words):
        ppattn.create_model(name, **arguments)


@pytest.mark.parametrize(
    ("attention", "options", "words"),
    [("inline", 5, "attention_options = 5"), ("inline", {"alpha": 2}, "kernel"), ("inline", {"kernel": "tanh"}, "relu"),
     ("inline", {"residual": "maybe"}, "valid boolean"), ("polaformer", {"kernel_size": 4}, "odd"),
     ("polaformer", {"alpha": "abc"}, "valid number"), ("focused", {"focusing_factor": -3}, "greater than 0"),
     ("agent", {"agent_num": "many"}, "valid integer; or: Input should be a valid l"),
     ("less", {"num_va": 0}, "greater than or equal to 1"), ("soft", {"newton_iters": -1}, "than or equal to 0"),
     ("performer", {"num_features": 0}, "greater than or equal to 1"), ("linformer", {"proj_tokens": 1.5}, "integer"),
     ("nystromformer", {"num_landmarks": 50}, "square number"), ("nystromformer", {"kernel_size": 2}, "odd, or 0"),
     ("gaussian", {"newton_iters": 3}, "Allowed: none")],
)  # fmt: skip
def test_options_that_an_attention_does_not_take(attention, options, words):
    with pytest.raises(UserError, match=words):
        ppattn.create_model("deit_nano", attention=attention, attention_options=options)


def test_an_option_goes_to_every_attention_that_knows_it():
    names, options = ["linear", "inline", "polaformer"], {"kernel": "relu", "alpha": 2}
    model = ppattn.create_model("swin_nano", attention=names, attention_options=options)
    linear, inline, pola = (stage.blocks[0].attn for stage in model.stages)
    x = paddle.to_tensor([-1.0, 2.0])
    assert linear.features(x, x)[0].tolist() == linear.features(x, x)[1].tolist() == [0.0, 2.0]
    qkv = inline.project(paddle.randn([1, 4, inline.spec.dim]), Context((2, 2))).q[:, :, : 2 * inline.spec.dim]
    assert linear.kernel == inline.kernel == "relu" and qkv.min().item() == 0.0 and pola.alpha == 2


@pytest.mark.parametrize("name", ["deit_nano", "pvt_nano", "swin_nano", "pvt_v2_b0", "soft_tiny"])
def test_a_backbone_says_the_channels_and_strides_of_its_feature_maps(name):
    for arguments in ({}, {"patch_size": 4, "img_size": 64}):
        model = ppattn.create_model(name, **arguments)
        model.eval()
        maps = model.forward_features(paddle.randn([2, 3, 96, 64]))
        assert isinstance(maps, list)
        steps = zip(model.feat_channels, model.strides, strict=True)
        assert [m.shape for m in maps] == [[2, c, 96 // s, 64 // s] for c, s in steps]


@pytest.mark.parametrize("name", ["deit_nano", "pvt_nano", "swin_nano"])
def test_a_model_without_head_gives_what_the_head_would_get(name, tmp_path):
    model = ppattn.create_model(name, num_classes=7)
    weights.save(tmp_path / "w.safetensors", model.state_dict(), {})
    bare = ppattn.create_model(name, num_classes=0, weights=tmp_path / "w")
    model.eval(), bare.eval()
    x = paddle.randn([2, 3, 37, 45])
    features = bare(x)
    assert features.shape == [2, bare.feat_channels[-1]] and not [n for n in bare.state_dict() if "head" in n]
    assert np.abs((features @ model.head.weight + model.head.bias - model(x)).numpy()).max() < 1e-6


PVT_V2 = {"embed_dims": [16, 24, 32, 48], "depths": [1, 2, 1, 2], "num_heads": [1, 2, 2, 3], "num_classes": 7}


@pytest.mark.parametrize("attention", ["softmax", "linear", "inline", "polaformer", "soft"])
def test_pvt_v2_takes_any_attention_and_any_size(attention):
    """Sides are rounded up at every stage: 70 x 54 pixels are 18 x 14, 9 x 7, 5 x 4 and 3 x 2 tokens."""
    model = ppattn.create_model("pvt_v2_b0", attention=attention, img_size=64, **PVT_V2)
    x = paddle.randn([2, 3, 70, 54])
    maps = model.forward_features(x)
    assert [m.shape for m in maps] == [[2, 16, 18, 14], [2, 24, 9, 7], [2, 32, 5, 4], [2, 48, 3, 2]]
    logits = model(x)
    assert logits.shape == [2, 7]
    (logits * paddle.randn([2, 7])).sum().backward()
    assert all(np.isfinite(p.grad.numpy()).all() and p.grad.abs().max() > 0 for p in model.parameters())
    if attention == "softmax":  # smaller than its reductions
        assert np.isfinite(model(paddle.randn([1, 3, 9, 13])).numpy()).all()


def test_pvt_v2_mixes_attentions_and_hands_score_maps_on():
    mixed = ["inline", ["linear", "softmax"], "polaformer", "less"]
    model = ppattn.create_model("pvt_v2_b0", attention=mixed, img_size=(70, 54), **PVT_V2)
    assert kinds(model)[:3] == [["InLine"], ["Linear", "Softmax"], ["PolaFormer"]]
    assert [b.attn.vanilla for b in model.stages[3].blocks] == [True, False]
    model = ppattn.create_model("pvt_v2_b0", attention="less", img_size=(96, 64), **PVT_V2)
    logits, loss = model.forward_train(paddle.randn([2, 3, 96, 64]))
    assert logits.shape == [2, 7] and loss.item() > 0


def test_models_start_from_their_own_distribution():
    """PVT v2: variance 2 groups / (kernel x outputs), 0.02 for matrices, no bias (golden QUIRKS); nano: Glorot's."""
    model, nano, plain = (ppattn.create_model(name) for name in ("pvt_v2_b1", "deit_nano", "deit_tiny"))
    first, second = model.stages[:2]
    for layer, fan_out in (
        (first.patch_embed.proj, 7 * 7 * 64),
        (second.patch_embed.proj, 3 * 3 * 128),
        (first.blocks[0].attn.sr, 8 * 8 * 64),
        (second.blocks[1].mlp.dwconv, 3 * 3),
    ):
        assert layer.weight.numpy().std() == pytest.approx((2 / fan_out) ** 0.5, rel=0.05) and not layer.bias.any()
    matrices = {second.blocks[0]: 0.02, plain.blocks[0]: 0.02, nano.blocks[0]: (2 / (96 + 192)) ** 0.5}
    for block, deviation in matrices.items():
        assert block.mlp.fc1.weight.numpy().std() == pytest.approx(deviation, rel=0.03)
    assert model.no_weight_decay() == set()


@pytest.mark.parametrize(
    ("name", "arguments", "places", "no_decay"),
    [
        ("deit_tiny", {"depth": 2},
         {"patch_embed.proj.weight": 0, "cls_token": 0, "pos_embed": 0, "blocks.1.norm1.weight": 2, "norm.bias": 3},
         {"cls_token", "pos_embed", "register_tokens"}),
        ("pvt_tiny", {"depths": [1, 2, 1, 1]},
         {"stages.0.pos_embed": 0, "stages.0.patch_embed.proj.weight": 0, "stages.1.pos_embed": 2, "cls_token": 5,
          "stages.2.patch_embed.norm.bias": 4, "stages.3.pos_embed": 5, "norm.weight": 6}, {"cls_token"}),
        ("pvt_v2_b0", {"depths": [1, 2, 1, 2]},
         {"stages.0.patch_embed.norm.weight": 0, "stages.0.norm.weight": 2, "stages.2.norm.weight": 5,
          "stages.3.patch_embed.norm.weight": 5, "stages.3.norm.weight": 7, "head.weight": 7}, set()),
        ("swin_tiny", {"depths": [1, 2, 1, 1], "ape": True},
         {"absolute_pos_embed": 0, "patch_embed.norm.weight": 0, "stages.0.downsample.reduction.weight": 1,
          "stages.1.downsample.norm.weight": 3, "stages.2.blocks.0.bias.table": 4, "head.weight": 6},
         {"absolute_pos_embed", "stages.1.blocks.1.bias.table",
          *(f"stages.{i}.blocks.0.bias.table" for i in range(4))}),
    ],
)  # fmt: skip
def test_groups_of_layers_and_what_is_not_decayed(name, arguments, places, no_decay):
    """The groups of BEiT's layer-wise decay; `no_weight_decay` of the official code."""
    model = ppattn.create_model(name, img_size=64, num_classes=3, **arguments)
    found = {name: i for i, group in enumerate(model.layer_groups()) for name in group}
    assert {key: found[key] for key in places} == places and len(found) == len(list(model.named_parameters()))
    assert model.no_weight_decay() == no_decay


def test_stochastic_depth_drops_whole_images_and_scales_the_others():
    blocks = ppattn.create_model("deit_nano", depth=4, drop_path_rate=0.3).blocks
    assert np.allclose([block.drop_path for block in blocks], [0.0, 0.1, 0.2, 0.3])
    factors = keep_factors(paddle.zeros([5000, 2, 3]), 0.3).numpy()
    assert factors.shape == (5000, 1, 1) and factors.mean() == pytest.approx(1, abs=0.04)
    assert np.allclose(np.unique(factors), [0, 1 / 0.7])
    shape = {"img_size": 32, "embed_dim": 24, "num_heads": 3, "depth": 2}
    block = ppattn.create_model("deit_tiny", drop_path_rate=0.5, **shape).blocks[1]
    x = paddle.randn([64, 5, 24])
    block.eval()
    attended = block.attn(block.norm1(x), (2, 2))[0]
    kept = [x, x + 2 * attended]  # of the first branch; the second one goes on from either
    kept += [y + 2 * block.mlp(block.norm2(y)) for y in kept]
    block.train()
    found = block(x, (2, 2), LayerState())[0].numpy()
    near = np.stack([np.abs(found - y.numpy()).max((1, 2)) < 1e-4 for y in kept])
    assert near.sum(0).tolist() == [1] * 64 and near.any(1).all()
    block.eval()
    y = x + attended
    assert np.allclose(block(x, (2, 2), LayerState())[0].numpy(), (y + block.mlp(block.norm2(y))).numpy(), atol=1e-5)


def test_window_mask_is_a_statement_about_distances():
    """In the shifted frame two tokens of a window are neighbours in the image, or across its seam, or padding."""
    hw, padded, window, shift = (7, 9), (8, 12), 4, 2
    position = np.stack(np.meshgrid(np.arange(8), np.arange(12), indexing="ij"), -1)
    position = np.roll(position, (-shift, -shift), (0, 1)).reshape(2, 4, 3, 4, 2).transpose(0, 2, 1, 3, 4)
    position = position.reshape(6, 16, 2)
    near = (np.abs(position[:, :, None] - position[:, None]) < window).all(-1)
    real = (position < np.array(hw)).all(-1)
    mask = window_mask(hw, padded, window, shift, paddle.float32).numpy()
    assert mask.shape == (6, 16, 16) and np.array_equal(mask == 0, near & real[:, None, :])
    assert set(np.unique(mask)) == {0.0, -100.0}


def test_padding_does_not_leak_into_the_image():
    """The last window of 4 x 4 tokens on a map of 7 x 9 has three tokens, below one another, and padding."""
    block = ppattn.create_model("swin_nano", num_classes=5).stages[0].blocks[0]
    attn, x = block.attn, paddle.randn([2, 7, 9, 32])
    q, k, v = attn.qkv(x[:, 4:, 8]).reshape([2, 3, 3, attn.num_heads, -1]).transpose([2, 0, 3, 1, 4])
    offsets = paddle.to_tensor([7 * (i - j + 3) + 3 for i in range(3) for j in range(3)])
    bias = block.bias.table[offsets].reshape([3, 3, -1]).transpose([2, 0, 1])
    seen = F.softmax(attn.scale * q.matmul(k, transpose_y=True) + bias, -1).matmul(v).transpose([0, 2, 1, 3])
    y = block.attend(x.flatten(1, 2), (7, 9), LayerState())[0].reshape([2, 7, 9, 32])[:, 4:, 8]
    assert np.abs(y.numpy() - attn.proj(seen.flatten(2)).numpy()).max() < 1e-6


@pytest.mark.parametrize(
    ("old", "sr_ratio", "keys", "new"), [((6, 4), 2, (3, 2), (3, 2)), ((7, 5), 1, (7, 5), (4, 3))], ids=["even", "odd"]
)
def test_score_downsampling_follows_the_grids(old, sr_ratio, keys, new):
    """With the initial weights: means over 2 x 2 queries and keys, unless there are as many, with zeros beyond the map;
    heads by a 1 x 1 map; rows and columns of the class token are zero."""
    before = AttentionSpec(dim=8, num_heads=2, grid=old, sr_ratio=sr_ratio)
    layer = ScoreDownsample(before, AttentionSpec(dim=9, num_heads=3, grid=new, num_prefix=1))
    scores = np.random.default_rng(0).standard_normal((5, 2, math.prod(old), math.prod(keys))).astype("float32")
    maps = scores.reshape(5, 2, *old, *keys)
    for axis, count in enumerate((*new, *new), 2):
        if maps.shape[axis] != count:
            maps = np.add.reduceat(maps, np.arange(0, maps.shape[axis], 2), axis) / 2
    heads = np.einsum("gh,bhijxy->bgijxy", layer.heads.weight.numpy()[:, :, 0, 0], maps)
    expected = 0.1 * (heads + layer.heads.bias.numpy()[:, None, None, None, None])
    y = layer(paddle.to_tensor(scores)).numpy()
    assert not y[:, :, 0].any() and not y[:, :, :, 0].any()
    assert np.abs(y[:, :, 1:, 1:] - expected.reshape(5, 3, math.prod(new), -1)).max() < 1e-6


def test_small_backbones_take_other_stems_pooling_and_position_convolutions():
    paddle.seed(0)
    x = paddle.randn([2, 3, 37, 22])
    for name, grid in (("deit_nano", (10, 6)), ("pvt_nano", (19, 11)), ("swin_nano", (19, 11))):
        model = ppattn.create_model(name, img_size=(37, 22), num_classes=5)
        model.eval()
        tokens, hw = model.patch_embed(x) if name != "pvt_nano" else model.stages[0].patch_embed(x)
        assert hw == grid and tokens.shape[1] == grid[0] * grid[1]
        blocks = [layer for layer in model.sublayers() if isinstance(layer, Block)]
        assert all(block.cpe is not None for block in blocks)
        plain = ppattn.create_model(name, img_size=(37, 22), num_classes=5, cpe=False, stem="patch")
        assert not any("cpe" in key for key in plain.state_dict()) and plain(x).shape == [2, 5]
    assert (model(x) - model.head(model.forward_features(x)[-1].mean(axis=[2, 3]))).abs().max().item() < 1e-5
    mean, token = (ppattn.create_model("deit_nano", class_token=choice, num_classes=5) for choice in (False, True))
    assert "cls_token" not in mean.state_dict() and token.pos_embed.shape[1] == mean.pos_embed.shape[1] + 1 == 65


def test_pool_stem_is_two_convolutions_per_halving_with_max_pooling_after_the_first():
    stem, y = patch_embedding("pool", 3, 12, 4), paddle.randn([2, 3, 9, 14])
    stem.eval()
    (tokens, hw), state = stem(y), stem.state_dict()
    for i, kernel in ((0, 1), (3, 2), (7, 1), (10, 2), (14, 1)):
        y = F.conv2d(y, state[f"proj.{i}.weight"], state[f"proj.{i}.bias"], padding=1)
        y = F.max_pool2d(y, kernel, ceil_mode=True)  # an odd side ends with a window of one
        y = F.gelu(y / math.sqrt(1 + 1e-5))  # BatchNorm in its initial state
    assert hw == (3, 4) and (tokens - y.flatten(2).transpose([0, 2, 1])).abs().max().item() < 1e-5


def test_position_conv_adds_a_depthwise_convolution_to_the_grid_only():
    layer = PositionConv(3, num_prefix=2)
    x = np.random.default_rng(2).standard_normal((1, 2 + 5 * 4, 3)).astype("float32")
    got = layer(paddle.to_tensor(x), (5, 4)).numpy()
    maps = paddle.to_tensor(x[:, 2:].transpose(0, 2, 1).reshape(1, 3, 5, 4))
    local = F.conv2d(maps, layer.proj.weight, layer.proj.bias, padding=1, groups=3).flatten(2).transpose([0, 2, 1])
    assert np.array_equal(got[:, :2], x[:, :2]) and np.abs(got[:, 2:] - x[:, 2:] - local.numpy()).max() < 1e-5


@pytest.mark.parametrize(
    ("name", "attention"), [("swin_nano", "softmax"), ("deit_nano", "less"), ("swin_nano", "less")]
)
def test_a_model_keeps_its_answers_in_another_type(name, attention):
    """`Layer.to` changes all buffers, those of integers too."""
    model, x = ppattn.create_model(name, attention=attention, num_classes=5), paddle.randn([2, 3, 32, 32])
    before, loss = model.forward_train(x)
    model.to(dtype="float64")
    after, other = model.forward_train(x.astype("float64"))
    assert after.dtype == paddle.float64 and np.abs((after - before).numpy()).max() < 1e-4
    assert attention != "less" or other.item() == pytest.approx(loss.item(), rel=1e-4)


def test_the_own_key_of_a_token():
    spec = AttentionSpec(dim=4, num_heads=1, grid=(3, 4), sr_ratio=2, num_prefix=1)
    assert own_key(spec).tolist() == [0, 1, 1, 2, 2, 1, 1, 2, 2, 1, 1, 2, 2]


def test_less_attention_starts_from_the_map_it_gets_and_trains_with_its_loss():
    model = ppattn.create_model("deit_nano", attention="less", depth=3, num_classes=5)
    x = paddle.randn([2, 3, 32, 32])
    logits, loss = model.forward_train(x)
    assert 0 < loss.item() < 0.1
    tokens = paddle.randn([2, 64, 96])
    first, second = model.blocks[0].attn, model.blocks[1].attn
    _, state = first(tokens, (8, 8))
    inherited = second.attention_map(tokens, Context((8, 8), state=state))
    assert np.abs((inherited - first.attention_map(tokens, (8, 8))).numpy()).max() < 1e-6
    model.eval()
    assert model.forward_train(x)[1] is None


@pytest.mark.parametrize("frozen", [(), ("patch_embed", "cls_token", "pos_embed")])
def test_recomputation_gives_the_same_gradients(frozen):
    for backbone, attention in (("pvt_nano", "inline"), ("pvt_nano", "less"), ("deit_nano", "inline")):
        model = ppattn.create_model(backbone, attention=attention, num_classes=5)
        for name, parameter in model.named_parameters():
            parameter.stop_gradient = name.startswith(frozen) if frozen else False
        x, grads = paddle.randn([2, 3, 32, 32]), []
        for recompute in (False, True):
            model.recompute = recompute
            logits, loss = model.forward_train(x)
            (logits.sum() + (0.0 if loss is None else loss)).backward()
            grads.append({n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None})
            model.clear_gradients()
        assert grads[0].keys() == grads[1].keys()
        largest = max(np.abs(grad).max() for grad in grads[0].values())  # the rounding of sums is a part of it: 4e-7
        assert all(np.abs(grads[0][n] - grads[1][n]).max() <= 2e-6 * largest for n in grads[0])


def layer_macs(name, n, m, c, h):
    """Closed forms of the attention's files, per layer and image: projections and other products."""
    d = c // h
    features = int(d * np.log(d))
    soft = 3 * n * m * c + 2 * m * m * c + h * 2 * 20 * m**3 + n * c * d + 9 * n * c
    projections, products = {
        "softmax": (4, 2 * n * m * c),
        "linear": (4, 2 * n * c * d + n * c),
        "inline": (4, 2 * n * c * d + c * d + c * d + 9 * c * d + 9 * n * c),
        "polaformer": (5, 2 * n * c * d + 2 * n * c * d + 4 * n * c + 25 * n * c),
        "soft": (3, soft),
        "soft_norm": (3, soft + h * m**3),  # the start value squares the kernel
        "less": (2, h * n * m * (n + m) + n * m * c),
        "focused": (4, 2 * n * c * d + n * c + 25 * n * c),
        "agent": (4, 4 * m * n * c + 9 * n * c + 3 * n * c + 9 * round(n**0.5) * c),
        "performer": (4, 4 * n * c * features + n * h * features),
        "linformer": (4, 4 * n * m * c),
        "nystromformer": (4, 4 * n * m * c + 2 * m * m * c + h * 4 * 6 * m**3 + 2 * 3 * (n + 3 * 6) * c + 9 * n * c),
        "gaussian": (3, 2 * n * n * c + 9 * n * c),
    }[name]
    return projections * n * c * c + products


TIMED = "softmax linear inline polaformer soft soft_norm less focused agent performer linformer nystromformer gaussian"


@pytest.mark.parametrize("name", TIMED.split())
def test_traced_macs_equal_the_closed_form(name):
    side, c, h, depth = 6, 24, 3, 2
    n = side * side
    arguments = {"img_size": 4 * side, "embed_dims": [c], "depths": [depth], "num_heads": [h], "mlp_ratios": [2]}
    options = {"linformer": {"proj_tokens": 9}, "nystromformer": {"num_landmarks": 9}, "agent": {"agent_num": 9}}
    shape = {"sr_ratios": [2 if name in ("soft", "soft_norm") else 1], "patch_size": 4, "class_token": False}
    more = {"stem": "patch", "cpe": False, "attention_options": options.get(name)}
    model = ppattn.create_model("pvt_nano", attention=name, **shape, **more, **arguments)
    layers = depth * layer_macs(name, n, 9 if name in ("soft", "soft_norm", *options) else n, c, h)
    if name == "less":  # the first layer is vanilla
        layers += layer_macs("softmax", n, n, c, h) - layer_macs("less", n, n, c, h)
    expected = 48 * n * c + layers + depth * 4 * n * c * c + c * model.num_classes
    assert cost.macs(model) == pytest.approx(expected, rel=1e-9)


def test_macs_of_a_transposed_convolution():
    layer = paddle.nn.Conv2DTranspose(2, 4, 3, stride=2)
    layer.example = lambda size: paddle.zeros([1, 2, 5, 3])
    assert cost.macs(layer) == 2 * 5 * 3 * 4 * 9


def test_traced_macs_of_pvt_v2_are_the_official_modules_and_the_products_between_tokens():
    """527,956,992 in Linear and Conv modules of the official B0 (fixture full_pvt_v2_b0); 49 keys in every stage."""
    products = sum(2 * 2 * (56 // 2**i) ** 2 * 49 * c for i, c in enumerate([32, 64, 160, 256]))
    assert cost.macs(ppattn.create_model("pvt_v2_b0")) == zoo.costs()["pvt_v2_b0"]["macs"] == 527_956_992 + products


def test_the_table_of_costs_is_what_the_models_have():
    assert list(zoo.costs()) == list(zoo.model_entries())
    for name, row in zoo.costs().items():
        with paddle.LazyGuard():  # shapes without values
            assert row["params"] == cost.params(ppattn.create_model(name)), name
    for name in ("deit_nano", "swin_nano", "pvt_nano"):
        assert zoo.costs()[name]["macs"] == cost.macs(ppattn.create_model(name))


def test_a_published_accuracy_names_its_source():
    for name, row in zoo.model_entries().items():
        assert bool(row.top1) == bool(row.source), name
        assert row.published or "nano" in name or row.weights


@pytest.mark.parametrize(
    ("name", "params", "giga"), [("lavit_tiny", 10.9, 1.6), ("lavit_small", 22.4, 3.3), ("lavit_base", 39.6, 6.1)]
)
def test_lavit_is_near_the_published_size(name, params, giga):
    row = zoo.costs()[name]
    assert abs(row["params"] / 1e6 / params - 1) < 0.05 and abs(row["macs"] / 1e9 / giga - 1) < 0.10


@pytest.mark.parametrize("attention", ["softmax", "inline", "mhla"])
def test_a_model_traces_after_paddle_counted_its_operations(attention):
    """paddle.flops leaves buffers of these names in every layer."""
    model = ppattn.create_model("deit_nano", attention=attention, img_size=(28, 24), num_classes=3, depth=1)
    model.eval()
    for layer in model.sublayers():
        for name in ("total_ops", "total_params"):
            layer.register_buffer(name, paddle.zeros([1], "int64"))
    images, spec = paddle.randn([2, 3, 28, 20]), [paddle.static.InputSpec([None, 3, 28, 20])]
    traced = paddle.jit.to_static(model.forward, input_spec=spec, full_graph=True)
    assert np.allclose(traced(images).numpy(), model(images).numpy(), atol=1e-5)


@pytest.mark.filterwarnings("ignore:Tensor do not have 'place'")  # in Paddle's backward pass
@pytest.mark.parametrize(("name", "attention"), [("deit_nano", "inline"), ("swin_nano", "rala"), ("pvt_nano", "less")])
def test_the_default_tracer_of_paddle_trains_a_model(name, attention):
    model = ppattn.create_model(name, attention=attention, img_size=28, num_classes=3)
    images, found = paddle.randn([2, 3, 28, 28]), []
    for trace in (lambda model: model, paddle.jit.to_static):
        (trace(model)(images) ** 2).sum().backward()
        found.append([p.grad.numpy() for p in model.parameters() if not p.stop_gradient])
        model.clear_gradients()
    assert all(np.allclose(a, b, rtol=1e-4, atol=5e-5) for a, b in zip(*found, strict=True))  # up to 1.4e-5 measured


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_constants_of_half_precision_are_those_of_float32_rounded(dtype):
    for found, exact in (
        (interpolation_matrix(256, 320, getattr(paddle, dtype)), interpolation_matrix(256, 320, paddle.float64)),
        (cell_means(9, 4, getattr(paddle, dtype)), cell_means(9, 4, paddle.float64)),
    ):
        assert found.dtype == getattr(paddle, dtype)
        assert np.abs(found.astype("float64").numpy() - exact.numpy()).max() < {"bfloat16": 4e-3}.get(dtype, 6e-4)


@pytest.mark.parametrize("size", [32, 56])
def test_less_attention_inherits_nothing_from_windows(size):
    """Two stages whose windows are their maps at the size of the build, and not at another."""
    model = ppattn.create_model("swin_nano", attention="less", img_size=28, window_size=7, num_classes=5)
    model.eval()
    assert model(paddle.randn([2, 3, size, size])).shape == [2, 5]


def test_a_model_says_which_settings_have_no_effect():
    assert ppattn.create_model("deit_nano", attention="linear").remarks() == []
    for name in ("softmax", "less", "linear"):
        told = ppattn.create_model("deit_nano", attention=name, attn_drop_rate=0.1).remarks()
        assert told == (["attn_drop_rate has no effect in LinearAttention"] if name == "linear" else [])
    (line,) = ppattn.create_model("pvt_nano", attention="less", img_size=64).remarks()
    assert "in 1 of 5 layers: those with 1024 tokens stay vanilla (max_tokens is 256)" in line


@pytest.mark.parametrize("attention", ppattn.list_attentions())
@pytest.mark.parametrize("backbone", ["deit_nano", "pvt_nano", "swin_nano"])
def test_a_later_step_copies_nothing_between_host_and_device(backbone, attention, monkeypatch):
    ops.enable("plain")  # as on a GPU
    model = ppattn.create_model(backbone, attention=attention, num_classes=5)
    images = paddle.randn([2, 3, 32, 32])
    model(images).sum().backward()

    def copied(*_, **__):
        raise AssertionError("a copy between host and device")

    monkeypatch.setattr(paddle, "to_tensor", copied)
    monkeypatch.setattr(soft_norm, "HALVINGS", 0)  # after each it looks whether they are enough, on the CPU only
    for name in ("numpy", "item", "tolist", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(paddle.Tensor, name, copied)
    model(images).sum().backward()


@pytest.mark.parametrize("attention", ["inline", "softmax"])
@pytest.mark.parametrize("backbone", ["deit_nano", "pvt_nano", "swin_nano"])
def test_intermediates_are_the_outputs_of_blocks_or_stages(backbone, attention):
    (model := ppattn.create_model(backbone, attention=attention, num_classes=5, img_size=(32, 48))).eval()
    parts, seen, inner = getattr(model, "stages", None) or model.blocks, [], []
    for part in parts:
        last = part.blocks[-1] if hasattr(part, "blocks") else part
        last.register_forward_post_hook(lambda _, __, output: seen.append(output[0]))
        for layer in (last.norm2, last.mlp.fc2, last.attn.qkv):  # whose weights an operator takes where nobody looks
            layer.register_forward_post_hook(lambda layer, *_: inner.append(layer))
    last, maps = model.forward_intermediates(images := paddle.randn([2, 3, 32, 48]))
    twice = [p for p in parts if backbone + attention == "pvt_nanosoftmax" and p.blocks[-1].attn.spec.sr_ratio > 1]
    assert len(maps) == len(parts) and len(inner) == 3 * len(maps) + len(twice)  # of PVT's fewer keys
    if backbone == "swin_nano":
        seen[-1] = model.norm(seen[-1])
    for tokens, found in zip(seen, maps, strict=True):
        (h, w), found = found.shape[2:], found.flatten(2).transpose([0, 2, 1])
        assert h * 3 == w * 2 and np.array_equal(tokens.numpy(), found.numpy())
    assert np.allclose(model.head(last.mean([2, 3])).numpy(), model(images).numpy(), atol=1e-5)
    for indices, wanted in ((2, [-2, -1]), ([-1, 0], [0, len(maps) - 1])):
        chosen = model.forward_intermediates(images, indices)[1]
        assert all(np.array_equal(one.numpy(), maps[i].numpy()) for one, i in zip(chosen, wanted, strict=True))
    with pytest.raises(UserError, match=f"there are {len(maps)} maps"):
        model.forward_intermediates(images, [len(maps)])


@pytest.mark.parametrize("backbone", ["deit_nano", "pvt_nano", "swin_nano"])
def test_a_model_takes_another_size_as_weights_that_are_loaded_at_it(backbone, tmp_path):
    paddle.seed(3)
    shape, called = {"attention": "polaformer", "num_classes": 5}, []
    model = ppattn.create_model(backbone, **shape)
    weights.save(tmp_path / "w.safetensors", model.state_dict(), {})
    model.blocks_flat()[1].register_forward_post_hook(lambda *_: called.append(1))
    model.set_input_size((40, 56))
    other = ppattn.create_model(backbone, img_size=(40, 56), weights=tmp_path / "w.safetensors", **shape)
    model.eval(), other.eval()
    images = paddle.randn([2, 3, 40, 56])
    assert model.img_size == (40, 56) and np.array_equal(model(images).numpy(), other(images).numpy()) and called
    for dtype in ("bfloat16", "float64"):
        same = ppattn.create_model(backbone, weights=tmp_path / "w.safetensors", **shape).to(dtype=dtype)
        same.set_input_size((40, 56))
        assert {str(p.dtype) for p in same.parameters()} == {f"paddle.{dtype}"}
        pairs = zip(same.parameters(), other.parameters(), strict=True)
        assert max(np.abs(a.astype("float32").numpy() - b.numpy()).max() for a, b in pairs) < 1e-2
    model(images).sum().backward()
    trained = [name for name, p in model.named_parameters() if p.grad is not None]
    other(images).sum().backward()
    assert trained == [name for name, p in other.named_parameters() if p.grad is not None]
    model.set_input_size((24, 48))
    assert not model.training and model(paddle.randn([2, 3, 24, 48])).shape == [2, 5]
    assert model.arguments["img_size"] == (24, 48)
    fixed = ppattn.create_model("deit_nano", attention="linformer")
    with pytest.raises(UserError, match="depends on the image size"):
        fixed.set_input_size((40, 56))
    with pytest.raises(UserError, match="landmark.weight depends on the image size"):  # which 7 x 7 tokens do not have
        ppattn.create_model("deit_nano", attention="soft", img_size=64).set_input_size(28)
    with pytest.raises(UserError, match="arguments are known"):
        type(fixed)(num_heads=6).set_input_size(64)
