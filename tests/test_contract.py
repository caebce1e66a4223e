"""One contract, every mechanism, every backbone: what `ppattn/attention/base.py` promises.

Backbones: a class token on a 5 x 7 grid; reduction 2 on 8 x 6; shifted windows of 4 on a padded 7 x 9 map; a pyramid
whose last stage has a class token; sequences of 11 tokens where 13 are possible. Sizes are odd on purpose: a swapped
axis cannot pass. The quick tests have the first of them.
"""

import importlib.util
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn

import ppattn
from ppattn import ops
from ppattn.attention import ATTENTIONS, AttentionSpec, Context, LayerState, StageLinks, build_attention
from ppattn.backbones.swin import SwinBlock
from ppattn.deploy.engines import open_engine
from ppattn.deploy.exporter import save_program, to_onnx
from ppattn.errors import UserError
from tests.helpers.rounding import check_rounding, check_within, exact_and_allowed, exact_answers, in_float64

MECHANISMS = ATTENTIONS.list()
QUICK = "class token on 5x7"
BACKBONES = {
    QUICK: AttentionSpec(dim=12, num_heads=3, grid=(5, 7), num_prefix=1),
    "reduction 2 on 8x6": AttentionSpec(dim=12, num_heads=3, grid=(8, 6), sr_ratio=2),
    "window 4, shifted, on 7x9": AttentionSpec(
        dim=12, num_heads=3, grid=(4, 4), stage=1, links=StageLinks(shifted=True)
    ),
    "last stage, class token on 3x5": AttentionSpec(dim=16, num_heads=2, grid=(3, 5), num_prefix=1, stage=3),
    "sequence of 11": AttentionSpec(dim=12, num_heads=3, grid=(1, 13), sequence=True),
}
MAP = (7, 9)  # of the window backbone
FIXED = ("less", "linformer")  # weights whose shape is the number of tokens


class OnBackbone(nn.Layer):
    """The mechanism where the backbone keeps it; a Less-Attention layer comes after the vanilla layer it reads from."""

    def __init__(self, name: str, spec: AttentionSpec):
        super().__init__()
        windowed = spec.grid == (4, 4)
        if windowed and not ATTENTIONS.get(name).windowed:
            spec = AttentionSpec(dim=spec.dim, num_heads=spec.num_heads, grid=MAP)
        specs = [spec]
        if name == "less":
            specs.append(replace(spec, links=StageLinks(1, windowed)))
        self.layers = nn.LayerList([build_attention(name, s) for s in specs])
        self.spec, self.attn = spec, self.layers[-1]
        plain = {"drop_path": 0.0, "mlp_ratio": 1.0, "drop": 0.0, "epsilon": 1e-5}
        self.windows = [SwinBlock(layer, **plain) for layer in self.layers] if windowed else None
        self.hw = MAP if windowed else (1, 11) if spec.sequence else spec.grid
        self.tokens = spec.num_prefix + self.hw[0] * self.hw[1]
        for parameter, p in self.named_parameters():  # away from the special initial values (zeros, identities)
            noise = 0.1 * paddle.randn(p.shape)
            # Entries of MHLA's matrix with both signs would bring its normaliser near zero.
            p.set_value(p * (1.0 + noise) if parameter.endswith("mixing") else p + noise)

    def forward(self, x):
        state, total = LayerState(), 0.0
        for i, layer in enumerate(self.layers):
            if self.windows:
                y, state = self.windows[i].attend(x, self.hw, state)
            else:
                y, state = layer(x, Context(self.hw, state=state))
            total = total + y
        return total


@pytest.fixture(params=MECHANISMS)
def name(request):
    return request.param


@pytest.fixture(
    params=[pytest.param(key, marks=[pytest.mark.slow] * (key != QUICK)) for key in BACKBONES],
    ids=lambda key: key.replace(" ", "-"),
)
def backbone(request, name):
    if name == "less" and BACKBONES[request.param].sequence:
        pytest.skip("less attention takes no sequences")
    return OnBackbone(name, BACKBONES[request.param])


def tokens(backbone, batch=2):
    return paddle.randn([batch, backbone.tokens, backbone.spec.dim])


def test_every_parameter_gets_a_finite_gradient_that_is_not_zero(name, backbone):
    x = tokens(backbone)
    y = backbone(x)
    assert y.shape == x.shape
    (y * paddle.randn(y.shape)).sum().backward()
    for parameter_name, p in backbone.named_parameters():
        grad = p.grad.numpy()
        assert np.isfinite(grad).all(), parameter_name
        if name in ("softmax", "window", "inline", "agent", "nystromformer") and parameter_name.endswith("qkv.bias"):
            c = backbone.spec.dim
            assert np.abs(grad[:c]).max() > 0 and np.abs(grad[2 * c :]).max() > 0
            assert np.abs(grad[c : 2 * c]).max() < 1e-4 * np.abs(grad).max()  # a key bias cancels
        else:
            assert np.abs(grad).max() > 0, parameter_name


# ---- one truth: forward is the explicit map times the values, the local term and the projection, written out here ----


def linear(layer, x):
    y = paddle.matmul(x, layer.weight)
    return y if layer.bias is None else y + layer.bias


def convolved(v, kernels, hw, bias=None):
    """Tokens v [B, P + H*W, C] under one k x k kernel per image and channel [B or 1, C, k, k]; zero for the prefix."""
    (height, width), k, c = hw, kernels.shape[-1], v.shape[2]
    prefix = v.shape[1] - height * width
    grid = v[:, prefix:].reshape([-1, height, width, c])
    grid = F.pad(grid.transpose([0, 3, 1, 2]), [k // 2] * 4)
    y = 0.0 if bias is None else bias.reshape([1, -1, 1, 1])
    for i, j in np.ndindex(k, k):
        y = y + grid[:, :, i : i + height, j : j + width] * kernels[:, :, i : i + 1, j : j + 1]
    y = y.transpose([0, 2, 3, 1]).reshape([-1, height * width, c])
    return paddle.concat([paddle.zeros_like(v[:, :prefix]), y], axis=1) if prefix else y


def predicted_taps(attn, x, hw):
    net, (h, d) = attn.residual, (attn.num_heads, attn.head_dim)
    token = x.mean(axis=1).reshape([-1, h, 1, d])
    hidden = F.gelu((token.unsqueeze(-1) * net.hidden_weight.unsqueeze([0, 2])).sum(axis=3) + net.hidden_bias)
    taps = (hidden.unsqueeze(-1) * net.taps_weight.unsqueeze([0, 2])).sum(axis=3) + net.taps_bias
    return convolved(linear(attn.qkv, x).chunk(3, axis=-1)[2], taps.reshape([-1, h * d, 3, 3]), hw)


def one_kernel_per_head(attn, v, hw):
    return convolved(v, attn.conv.weight[:, 0].repeat_interleave(attn.head_dim, axis=0).unsqueeze(0), hw)


def one_kernel_for_all_heads(attn, v, hw):
    h = attn.num_heads
    return convolved(v, attn.dwc.weight[:, 0].tile([h, 1, 1]).unsqueeze(0), hw, attn.dwc.bias.tile([h]))


def one_kernel_per_channel(attn, v, hw):
    return convolved(v, attn.dwc.weight[:, 0].unsqueeze(0), hw, attn.dwc.bias)


def position_encoding(v):
    """LePE of the values `v(attn, x, hw)`: one kernel per channel."""
    return lambda attn, x, hw: convolved(v(attn, x, hw), attn.lepe.weight[:, 0].unsqueeze(0), hw, attn.lepe.bias)


def part(layer, parts, index):
    """One part of a projection that gives several."""
    return lambda attn, x, hw=None: linear(getattr(attn, layer), x).chunk(parts, axis=-1)[index]


def mila_values(attn, x, hw):
    v, prefix = linear(attn.in_proj, x), x.shape[1] - hw[0] * hw[1]
    y = convolved(v, attn.dwc.weight[:, 0].unsqueeze(0), hw, attn.dwc.bias)
    return F.silu(paddle.concat([v[:, :prefix], y[:, prefix:]], axis=1))


def normed(layer, x):
    x = x - x.mean(axis=-1, keepdim=True)
    return x / paddle.sqrt((x * x).mean(axis=-1, keepdim=True) + 1e-5) * layer.weight + layer.bias


# The local term of the mechanisms that have one, from (layer, x, hw).
LOCAL = {
    "inline": predicted_taps,
    "agent": lambda attn, x, hw: one_kernel_per_channel(attn, linear(attn.qkv, x).chunk(3, axis=-1)[2], hw),
    "focused": lambda attn, x, hw: one_kernel_for_all_heads(attn, linear(attn.qkv, x).chunk(3, axis=-1)[2], hw),
    "polaformer": lambda attn, x, hw: one_kernel_for_all_heads(attn, linear(attn.qkvg, x).chunk(4, axis=-1)[2], hw),
    "nystromformer": lambda attn, x, hw: one_kernel_per_head(attn, linear(attn.qkv, x).chunk(3, axis=-1)[2], hw),
    "soft": lambda attn, x, hw: one_kernel_per_head(attn, linear(attn.qv, x).chunk(2, axis=-1)[1], hw),
    "mala": position_encoding(part("qkvo", 4, 2)),
    "rala": position_encoding(part("qkvo", 4, 2)),
    "nalaformer": position_encoding(part("qkvg", 4, 2)),
    "mhla": position_encoding(lambda attn, x, hw: linear(attn.qkv, normed(attn.norm, x)).chunk(3, axis=-1)[2]),
    "mila": position_encoding(mila_values),
}
LOCAL |= {"soft_norm": LOCAL["soft"], "gaussian": LOCAL["soft"]}
# What comes between the sum and the output projection.
GATE = {
    "polaformer": lambda attn, x, y: y * part("qkvg", 4, 3)(attn, x),
    "mala": lambda attn, x, y: y * part("qkvo", 4, 3)(attn, x),
    "rala": lambda attn, x, y: y * part("qkvo", 4, 3)(attn, x),
    "nalaformer": lambda attn, x, y: normed(attn.norm, y) * F.silu(part("qkvg", 4, 3)(attn, x)),
    "mila": lambda attn, x, y: y * F.silu(linear(attn.act_proj, x)),
    "circulant": lambda attn, x, y: y * F.silu(linear(attn.gate, x)),
}


def trained_on_keys(attn, x, hw):
    """ViT^3, whose layer is not linear in its values: the gradients of the inner loss by automatic differentiation."""
    (b, n, c), h, d = x.shape, attn.num_heads, attn.head_dim
    parts = linear(attn.qkv, x).split([c, c, c, d, d, d], axis=-1)
    q, k, v = (t.reshape([b, n, h, d]).transpose([0, 2, 1, 3]) for t in parts[:3])
    w1, w2, w3 = (w.expand([b, *w.shape[1:]]) for w in (attn.w1, attn.w2, attn.w3.reshape([1, d, 3, 3])))

    def unit(x, w1, w2):
        return (x @ w1) * F.silu(x @ w2)

    loss = -((unit(k, w1, w2) * v).sum() + (convolved(parts[4], w3, hw) * parts[5]).sum()) / (3 * n)
    g1, g2, g3 = paddle.grad(loss, [w1, w2, w3], create_graph=True)
    first = unit(q, *(w - g / (1 + (g * g).sum(axis=2, keepdim=True).sqrt()) for w, g in ((w1, g1), (w2, g2))))
    if not attn.local_term:
        parts[3] = paddle.zeros_like(parts[3])
    second = convolved(parts[3], w3 - g3 / (1 + (g3 * g3).sum(axis=[2, 3], keepdim=True).sqrt()), hw)
    return paddle.concat([first.transpose([0, 2, 1, 3]).reshape([b, n, c]), second], axis=-1)


def trained_swiglu(attn, x, hw):
    """T^5, which is not linear in its values either."""
    (b, n, c), h, d = x.shape, attn.num_heads, attn.head_dim
    q, k, v = linear(attn.qkv, x).chunk(3, axis=-1)
    k = (k - k.mean(axis=1, keepdim=True)) / (k.var(axis=1, keepdim=True, unbiased=False) + 1).sqrt()
    q, k = (
        t + convolved(t, conv.weight[:, 0].unsqueeze(0), hw, conv.bias)
        for t, conv in ((q, attn.q_conv2d), (k, attn.k_conv2d))
    )
    q, k, v = (t.reshape([b, n, h, d]).transpose([0, 2, 1, 3]) for t in (q, k, v))
    weights = [w.expand([b, *w.shape[1:]]) for w in (attn.w1, attn.w2, attn.w3)]

    def unit(x, w1, w2, w3):
        return (F.silu(x @ w1) * (x @ w2)) @ w3

    steps = paddle.grad(-(unit(k, *weights) * v).sum() / (n * d**0.5), weights, create_graph=True)
    return unit(q, *(w - g for w, g in zip(weights, steps, strict=True))).transpose([0, 2, 1, 3]).reshape([b, n, c])


def truth(name: str, attn, x, context, local_term=True):
    if name == "vittt":
        return linear(attn.proj, trained_on_keys(attn, x, context.hw))
    if name == "t5":
        return linear(attn.proj, trained_swiglu(attn, x, context.hw))
    parts = attn.project(x, context)
    weights, values = attn.weights(parts, context), attn.values(parts, context)
    b, h, n, m = weights.shape
    assert (b, n) == tuple(x.shape[:2]) and values.shape == [b, h, m, x.shape[2] // h]
    y = paddle.matmul(weights, values).transpose([0, 2, 1, 3]).reshape(x.shape)
    if name in LOCAL and local_term:
        y = y + LOCAL[name](attn, x, context.hw)
    return linear(attn.proj, GATE[name](attn, x, y) if name in GATE else y)


def recorded_call(backbone, x):
    """Tokens and context that the backbone gives its last attention."""
    calls = []
    hook = backbone.attn.register_forward_pre_hook(lambda _, inputs: calls.append(inputs))
    with paddle.no_grad():
        backbone(x)
    hook.remove()
    return calls[-1]


def cast(value, convert):
    """A tensor, or every tensor of a context, through `convert`."""
    if isinstance(value, (Context, LayerState)):
        return type(value)(*(cast(field, convert) for field in value))
    return convert(value) if isinstance(value, paddle.Tensor) else value


def value_and_gradient(function, x, context, dtype, move=lambda x: x):
    x = paddle.to_tensor(move(x.numpy()), dtype=dtype, stop_gradient=False)
    y = function(x, cast(context, lambda t: paddle.to_tensor(move(t.numpy()), dtype=dtype)))
    probe = np.random.default_rng(1).standard_normal(y.shape, "float32")
    (y * paddle.to_tensor(move(probe), dtype=dtype)).sum().backward()
    # not `paddle.grad` for x alone: Paddle's layer norm on the CPU is wrong there
    return y.numpy(), x.grad.numpy()


FORMS = {"float64": ("float64", "plain"), "compiled": ("float32", "auto")}  # test_ops.py has the plain one in float32


def check_forward(name: str, backbone, form: str):
    """`forward` of the backbone's mechanism equals the truth, in value and gradient of x."""
    backbone.eval()
    dtype, kernels = FORMS[form]
    if ops.enable(kernels) != (kernels == "auto"):
        pytest.skip(ops.status())
    x, context = recorded_call(backbone, tokens(backbone))
    backbone.to(dtype=dtype)
    got = value_and_gradient(lambda *call: backbone.attn(*call)[0], x, context, dtype)
    paddle.set_default_dtype("float64")

    def exact(move=lambda x: x):
        attn = in_float64(backbone.attn, move)
        with patch.object(ops, "newton_inverse", partial(newton, move)):
            return value_and_gradient(lambda *call: truth(name, attn, *call), x, context, "float64", move)

    if form == "float64":
        for a, b in zip(got, exact(), strict=True):  # some operators take a constant such as 1e-6 as float32
            assert np.abs(a - b).max() <= 1e-11 * np.abs(b).max()
    else:
        check_rounding(got, exact, terms=x.shape[1], noticed=5e-3)


def newton(move, matrix, start, steps):
    """`ops.newton_inverse`, whose steps enlarge their own rounding."""

    def rounded(v):
        return v * paddle.to_tensor(move(np.ones(v.shape)))

    for _ in range(steps):
        start = 2.0 * start - rounded(start).matmul(matrix).matmul(rounded(start))
    return start


@pytest.fixture
def restore():
    """Compiled operators and number type as the other tests have them."""
    yield
    paddle.set_default_dtype("float32")
    ops.enable("auto")


@pytest.mark.parametrize("form", FORMS)
def test_forward_is_the_explicit_map_the_local_term_and_the_projection(name, backbone, form, restore):
    check_forward(name, backbone, form)


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["forward", "attend", "local", "finish"])
def test_one_percent_is_noticed(name, hook, restore, monkeypatch):
    backbone = OnBackbone(name, BACKBONES[QUICK])
    right, changed = getattr(type(backbone.attn), hook), []

    def wrong(self, *args, **kwargs):
        y = right(self, *args, **kwargs)
        changed.append(y is not None)
        return (1.01 * y[0], y[1]) if hook == "forward" else y if y is None else 1.01 * y

    monkeypatch.setattr(type(backbone.attn), hook, wrong)
    try:
        check_forward(name, backbone, "compiled")  # the form with the larger tolerance
    except AssertionError:
        return
    assert hook == "local" and not any(changed), "1 % off, and nothing noticed"


def test_bias_of_the_projections_only_where_it_is_asked_for(name):
    names = {
        bias: {n for n, _ in build_attention(name, AttentionSpec(8, 2, (3, 4), qkv_bias=bias)).named_parameters()}
        for bias in (True, False)
    }
    if name == "circulant":  # whose transform allows no bias
        assert names[False] == names[True]
        return
    assert names[False] < names[True] and all(n.endswith("bias") for n in names[True] - names[False])


def test_dropout_of_the_result_acts_in_training_only(name):
    attn = build_attention(name, AttentionSpec(24, 2, (5, 7), proj_drop=0.5))
    x = paddle.randn([3, 35, 24])
    dropped = attn(x, (5, 7))[0].numpy()
    attn.eval()
    whole = attn(x, (5, 7))[0].numpy()
    assert 0.4 < (dropped == 0).mean() < 0.6
    assert np.allclose(dropped[dropped != 0], 2 * whole[dropped != 0], rtol=1e-3, atol=1e-5 * np.abs(whole).max())


def test_evaluation_is_deterministic_and_an_image_does_not_depend_on_its_batch_mates(name):
    backbone = OnBackbone(name, BACKBONES[QUICK])
    backbone.eval()
    x = tokens(backbone, 5)
    with paddle.no_grad():
        together, alone = backbone(x)[2:3].numpy(), backbone(x[2:3]).numpy()
        assert np.array_equal(backbone(x[2:3]).numpy(), alone)

    def exact(move):
        with patch.object(ops, "newton_inverse", partial(newton, move)):
            return exact_answers(backbone, x[2:3].numpy())(move)

    ((_, allowed),) = exact_and_allowed(exact, terms=x.shape[1], noticed=1e-3)
    assert np.abs(together - alone).max() <= allowed


def test_finite_with_values_rounded_to_bfloat16(name):
    backbone = OnBackbone(name, BACKBONES[QUICK])
    for p in backbone.parameters():
        p.set_value(p.astype("bfloat16").astype("float32"))
    x = tokens(backbone)
    for probe in (x, -x.abs(), paddle.zeros_like(x), 30.0 * x):
        probe = probe.astype("bfloat16").astype("float32")
        probe.stop_gradient = False
        y = backbone(probe)
        y.sum().backward()
        assert np.isfinite(y.numpy()).all() and np.isfinite(probe.grad.numpy()).all()


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["deit_nano", "pvt_nano", "swin_nano"])
def test_another_size_works_or_is_refused_in_one_sentence(name, backbone):
    model = ppattn.create_model(backbone, attention=name, num_classes=7)
    model.eval()
    x = paddle.randn([2, 3, 44, 26])
    try:
        with paddle.no_grad():
            y = model(x)
    except UserError as error:
        assert name in FIXED and "built for a grid" in str(error) and "img_size" in str(error)
    else:
        assert y.shape == [2, 7] and np.isfinite(y.numpy()).all()
        assert name not in FIXED or (name, backbone) == ("less", "swin_nano")  # whose windows stay as they are


SHAPES = {"deit_nano": {"depth": 2}, "pvt_nano": {"depths": [1, 1, 1, 1]}, "swin_nano": {"depths": [1, 1, 2]}}
PYRAMIDS = ("agent", "focused", "inline", "less", "polaformer", "soft", "soft_norm", "softmax")  # published on these


@pytest.mark.slow
@pytest.mark.parametrize("backbone", SHAPES)
def test_programs_equal_the_model_at_any_batch(name, backbone, tmp_path):
    if backbone != "deit_nano" and name not in PYRAMIDS:
        pytest.skip("exported on deit_nano, whose programs have the same operators")
    model = ppattn.create_model(backbone, attention=name, img_size=(32, 48), num_classes=7, **SHAPES[backbone])
    model.eval()
    images = np.random.default_rng(0).standard_normal((3, 3, 32, 48), dtype="float32")
    ((exact, allowed),) = exact_and_allowed(exact_answers(model, images), terms=64, noticed=1e-3)
    with paddle.no_grad():
        check_within([model(paddle.to_tensor(images)).numpy()], [(exact, allowed)])
    save_program(model, tmp_path, (3, 32, 48))
    engines = ["jit", "plain", "stock"] if backbone == "deit_nano" else ["stock"]
    if importlib.util.find_spec("paddle2onnx"):
        to_onnx(tmp_path, keep=True)
        engines.append("onnxruntime")
    for engine in engines:
        runtime = open_engine(tmp_path, engine, threads=1)
        for batch in (1, 3):
            check_within([runtime(images[:batch])], [(exact[:batch], allowed)])


def weights_of_multiples(name: str, **options) -> np.ndarray:
    """Attention rows of four queries on one ray, as in figure 1 of the InLine paper."""
    attn = build_attention(name, AttentionSpec(dim=4, num_heads=1, grid=(2, 2), qkv_bias=False), options)
    keys = np.array([[0.9, 0.1], [0.2, 1.1], [0.6, 0.7], [0.1, 0.3]])
    tokens = np.hstack([np.outer([1, 2, 3, 4], [0.5, 0.8]), keys])
    weight = np.zeros([4, 12])
    weight[:2, :2] = weight[2:, 4:6] = np.eye(2)  # q is the first half of a token, k the second
    attn.qkv.weight.set_value(weight.astype("float32"))
    return attn.attention_map(paddle.to_tensor(tokens[None], "float32"), (2, 2)).numpy()[0, 0]


def test_injective_attentions_distinguish_multiples_of_a_query():
    """Linear attention with ReLU does not."""
    for name, options in (("softmax", {}), ("inline", {}), ("inline", {"kernel": "relu"})):
        rows = weights_of_multiples(name, **options)
        assert np.allclose(rows.sum(-1), 1, atol=1e-6)
        assert all(np.abs(a - b).max() > 1e-2 for i, a in enumerate(rows) for b in rows[:i])
    rows = weights_of_multiples("linear", kernel="relu")
    assert np.abs(rows - rows[0]).max() < 1e-5


def test_newton_start_per_batch_depends_on_batch_mates_and_per_matrix_does_not():
    spec = AttentionSpec(dim=8, num_heads=2, grid=(6, 4), sr_ratio=2)
    spread = {}
    for start in ("matrix", "batch"):
        attn = build_attention("soft_norm", spec, {"newton_start": start, "newton_iters": 3})
        attn.eval()
        attn.qv.weight.set_value(paddle.randn(attn.qv.weight.shape))
        x = paddle.concat([paddle.randn([1, 24, 8]), 0.01 * paddle.randn([1, 24, 8])])
        with paddle.no_grad():
            spread[start] = np.abs(attn(x, (6, 4))[0][:1].numpy() - attn(x[:1], (6, 4))[0].numpy()).max()
    assert spread["matrix"] < 1e-6 < 1e-5 < spread["batch"]


@pytest.mark.parametrize(
    ("name", "options"),
    [("softmax", {"residual": True}), ("polaformer", {"polarity": False}), ("polaformer", {"gates": False})],
)
def test_ablations_change_what_they_name_and_nothing_else(name, options):
    paddle.seed(0)
    hw, x = (5, 3), 30 * paddle.randn([2, 16, 12])
    attn = build_attention(name, AttentionSpec(dim=12, num_heads=2, grid=hw, num_prefix=1), options)
    attn.eval()
    chunks = 3 if name == "softmax" or "gates" in options else 4
    projected = linear(attn.qkv if name == "softmax" else attn.qkvg, x).chunk(chunks, axis=-1)
    q, k, v = (t.reshape([2, 16, 2, 6]).transpose([0, 2, 1, 3]) for t in projected[:3])
    if name == "softmax":
        y = paddle.matmul(F.softmax(paddle.matmul(q, k, transpose_y=True) / 6**0.5), v)
        local = predicted_taps(attn, x, hw)
    else:  # p = 3 and t = log 2 at the start
        qp, qn, kp, kn = (F.relu(sign * t / np.log(2)) ** 3 for t in (q, k) for sign in (1, -1))
        kp, kn = kp.transpose([0, 1, 3, 2]), kn.transpose([0, 1, 3, 2])
        if options.get("polarity", True):
            same, opposite = qp @ kp + qn @ kn, qp @ kn + qn @ kp
        else:
            same = opposite = qp @ kp
        halves = zip((same, opposite), v.chunk(2, axis=-1), strict=True)
        y = paddle.concat([paddle.matmul(w / (w.sum(-1, keepdim=True) + 16e-6), half) for w, half in halves], axis=-1)
        local = one_kernel_for_all_heads(attn, projected[2], hw)
    y = y.transpose([0, 2, 1, 3]).reshape([2, 16, 12]) + local
    expected = linear(attn.proj, y * projected[3] if chunks == 4 else y)
    assert np.abs(attn(x, hw)[0].numpy() - expected.numpy()).max() < 1e-4 * np.abs(expected.numpy()).max()


def test_a_local_term_needs_the_values_of_all_tokens():
    with pytest.raises(UserError, match="sr_ratio"):
        build_attention("softmax", AttentionSpec(dim=4, num_heads=1, grid=(4, 4), sr_ratio=2), {"residual": True})


@pytest.mark.parametrize("name", sorted({*LOCAL, "vittt"} - {"gaussian", "nystromformer"}))
def test_without_its_local_term_an_attention_is_its_map(name):
    hw, x = (5, 7), paddle.randn([2, 36, 12])
    option = "residual" if name == "inline" else "local_term"
    spec = AttentionSpec(dim=12, num_heads=3, grid=hw, num_prefix=1)
    attn, both = build_attention(name, spec, {option: False}), build_attention(name, spec)
    for parameter in attn.parameters():
        parameter.set_value(parameter + 0.1 * paddle.randn(parameter.shape))
    attn.eval()
    gone = {key for key, _ in both.named_parameters()} - {key for key, _ in attn.named_parameters()}
    assert bool(gone) == (name != "vittt")  # which keeps them without effect
    assert all(key.startswith(("residual.", "dwc.", "conv.", "lepe.")) for key in gone)
    found, expected = attn(x, hw)[0].numpy(), truth(name, attn, x, Context(hw), local_term=False).numpy()
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
