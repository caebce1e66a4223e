"""One contract, every attention, every backbone: what `ppattn/attention/base.py` promises.

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

NAMES = ATTENTIONS.list()
QUICK = "class token on 5x7"
BACKBONES = {
    QUICK: AttentionSpec(dim=12, num_heads=3, grid=(5, 7), num_prefix=1),
    "reduction 2 on 8x6": AttentionSpec(dim=12, num_heads=3, grid=(8, 6), sr_ratio=2),
    "window 4, shifted, 7x9": AttentionSpec(dim=12, num_heads=3, grid=(4, 4), stage=1, links=StageLinks(shifted=True)),
    "last stage, class token on 3x5": AttentionSpec(dim=16, num_heads=2, grid=(3, 5), num_prefix=1, stage=3),
    "sequence of 11": AttentionSpec(dim=12, num_heads=3, grid=(1, 13), sequence=True),
}
MAP = (7, 9)  # of the window backbone
FIXED = ("less", "linformer")  # weights whose shape is the number of tokens


class OnBackbone(nn.Layer):
    """The attention where the backbone keeps it; a Less-Attention layer comes after the vanilla layer it reads from."""

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


@pytest.fixture(params=NAMES)
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


def heads_of(x, count):
    return x.reshape([*x.shape[:2], count, -1]).transpose([0, 2, 1, 3])


def merged(x):
    return x.transpose([0, 2, 1, 3]).flatten(2)


def trained_on_keys(attn, parts, hw):
    """ViT^3, whose layer is not linear in its values: the gradients of the inner loss by automatic differentiation."""
    (b, n, _), h, d = parts[0].q.shape, attn.num_heads, attn.head_dim
    q, k, v = (heads_of(t, h) for t in (parts[0].q, parts[0].k, parts[0].v))
    w1, w2, w3 = (w.expand([b, *w.shape[1:]]) for w in (attn.w1, attn.w2, attn.w3.reshape([1, d, 3, 3])))

    def unit(x, w1, w2):
        return (x @ w1) * F.silu(x @ w2)

    loss = -((unit(k, w1, w2) * v).sum() + (convolved(parts[1].k, w3, hw) * parts[1].v).sum()) / (3 * n)
    g1, g2, g3 = paddle.grad(loss, [w1, w2, w3], create_graph=True)
    first = unit(q, *(w - g / (1 + (g * g).sum(axis=2, keepdim=True).sqrt()) for w, g in ((w1, g1), (w2, g2))))
    second = parts[1].q if attn.local_term else paddle.zeros_like(parts[1].q)
    second = convolved(second, w3 - g3 / (1 + (g3 * g3).sum(axis=[2, 3], keepdim=True).sqrt()), hw)
    return paddle.concat([merged(first), second], axis=-1)


def trained_swiglu(attn, parts, hw):
    """T^5, which is not linear in its values either."""
    q, k, v = (heads_of(t, attn.num_heads) for t in (parts.q, parts.k, parts.v))
    weights = [w.expand([len(q), *w.shape[1:]]) for w in (attn.w1, attn.w2, attn.w3)]

    def unit(x, w1, w2, w3):
        return (F.silu(x @ w1) * (x @ w2)) @ w3

    loss = -(unit(k, *weights) * v).sum() / (k.shape[2] * attn.head_dim**0.5)
    steps = paddle.grad(loss, weights, create_graph=True)
    return merged(unit(q, *(w - g for w, g in zip(weights, steps, strict=True))))


TRAINED = {"vittt": trained_on_keys, "t5": trained_swiglu}


def mixed(attn, parts, context):
    """The map times the values, and these convolved: by a kernel per channel, head or image and channel, or by one."""
    weights, values, hw = attn.weights(parts, context), attn.values(parts, context), context.hw
    y, v = merged(paddle.matmul(weights, values)), merged(values)
    conv, kernel = getattr(attn, attn.convolution, None), getattr(parts, "kernel", None)
    if conv is not None:
        taps, bias = conv.weight[:, 0], conv.bias
        times = v.shape[2] // len(taps)
        taps = taps.repeat_interleave(times, axis=0) if attn.per_head else taps.tile([times, 1, 1])
        y = y + convolved(v, taps.unsqueeze(0), hw, None if bias is None else bias.tile([times]))
    if kernel is not None:
        y = y + convolved(v, kernel.reshape([*kernel.shape[:2], 3, 3]), hw)
    return y


def truth(name: str, attn, x, context):
    parts = attn.project(x, context)
    y = attn.normalised(TRAINED[name](attn, parts, context.hw) if name in TRAINED else mixed(attn, parts, context))
    gate = getattr(parts, "gate", None)
    return linear(attn.proj, y if gate is None else y * gate)


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
        return type(value)(**{name: cast(field, convert) for name, field in vars(value).items()})
    return convert(value) if isinstance(value, paddle.Tensor) else value


def value_and_gradient(function, x, context, dtype, move=lambda x: x):
    x = paddle.to_tensor(move(x.numpy()), dtype=dtype, stop_gradient=False)
    y = function(x, cast(context, lambda t: paddle.to_tensor(move(t.numpy()), dtype=dtype)))
    probe = np.random.default_rng(1).standard_normal(y.shape, "float32")
    (y * paddle.to_tensor(move(probe), dtype=dtype)).sum().backward()
    # not `paddle.grad` for x alone: Paddle's layer norm on the CPU is wrong there
    return y.numpy(), x.grad.numpy()


FORMS = {"float64": ("float64", "plain"), "compiled": ("float32", "auto")}  # test_ops.py has the plain one in float32


@pytest.mark.parametrize("form", FORMS)
def test_forward_is_the_explicit_map_the_local_term_and_the_projection(name, backbone, form):
    """In value and gradient of x."""
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
    attn, x = build_attention(name, AttentionSpec(24, 2, (5, 7), proj_drop=0.5)), paddle.randn([3, 35, 24])
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


@pytest.mark.parametrize("qkv_bias", [True, False])
def test_finite_with_values_rounded_to_bfloat16(name, qkv_bias):
    """Without bias the queries and keys of tokens that are zero are zero."""
    backbone = OnBackbone(name, replace(BACKBONES[QUICK], qkv_bias=qkv_bias))
    for p in backbone.parameters():
        p.set_value(p.astype("bfloat16").astype("float32"))
    x = tokens(backbone)
    for probe in (x, -x.abs(), paddle.zeros_like(x), 30.0 * x, 1000.0 * x):
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


# Every attention on one backbone (the others have the same operators); score maps, windows, stages of pyramids.
PROGRAMS = [
    *(("deit_nano", name) for name in NAMES),
    ("pvt_nano", "less"), ("pvt_nano", ["softmax", "soft", "inline", "focused"]),
    ("pvt_nano", ["soft_norm", "agent", "polaformer", "inline"]), ("swin_nano", "less"), ("swin_nano", "softmax"),
    ("swin_nano", ["agent", "soft", "inline"]), ("swin_nano", ["polaformer", "soft_norm", "focused"]),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("backbone", "name"), PROGRAMS, ids=lambda v: v if isinstance(v, str) else "+".join(v))
def test_programs_equal_the_model_at_any_batch(backbone, name, tmp_path):
    shapes = {"deit_nano": {"depth": 1 + (name == "less")}, "pvt_nano": {"depths": [1] * 4}}
    shape = shapes.get(backbone, {"depths": [1, 1, 2]})
    model = ppattn.create_model(backbone, attention=name, img_size=(32, 48), num_classes=7, **shape)
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


@pytest.mark.parametrize(
    "name", [name for name in NAMES if ATTENTIONS.get(name).options().get("local_term") or name == "inline"]
)
def test_without_its_local_term_an_attention_is_its_map(name):
    spec, hw, x = BACKBONES[QUICK], (5, 7), paddle.randn([2, 36, 12])
    attn = build_attention(name, spec, {"residual" if name == "inline" else "local_term": False})
    for parameter in attn.parameters():
        parameter.set_value(parameter + 0.1 * paddle.randn(parameter.shape))
    attn.eval()
    gone = build_attention(name, spec).state_dict().keys() - attn.state_dict().keys()
    assert bool(gone) == (name != "vittt")  # which keeps them without effect
    assert all(key.startswith(("residual.", "dwc.", "conv.", "lepe.", "q_conv2d.", "k_conv2d.")) for key in gone)
    found, expected = attn(x, hw)[0].numpy(), truth(name, attn, x, Context(hw)).numpy()
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
