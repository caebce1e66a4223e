"""One contract, every mechanism, every host: what `ppattn/attention/base.py` promises.

Hosts: a class token on a 5 x 7 grid; reduction 2 on 8 x 6; shifted windows of 4 on a padded 7 x 9 map; a pyramid whose
last stage has a class token. Sizes are odd on purpose: a swapped axis cannot pass.
"""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from paddle import nn

import ppattn
from ppattn.attention import ATTENTIONS, AttentionSpec
from ppattn.attention.base import merge_heads
from ppattn.attention.less import LessAttention
from ppattn.attention.soft import SoftAttention
from ppattn.backbones.base import build_attention
from ppattn.backbones.swin import SwinBlock
from ppattn.deploy.engines import open_engine
from ppattn.deploy.exporter import answers, check_batches, save_program
from ppattn.errors import UserError

MECHANISMS = ATTENTIONS.list()
HOSTS = {
    "class token on 5x7": AttentionSpec(dim=12, num_heads=3, grid=(5, 7), num_prefix=1),
    "reduction 2 on 8x6": AttentionSpec(dim=12, num_heads=3, grid=(8, 6), sr_ratio=2),
    "window 4, shifted, on 7x9": AttentionSpec(dim=12, num_heads=3, grid=(4, 4), shifted=True, stage=1),
    "last stage, class token on 3x5": AttentionSpec(dim=16, num_heads=2, grid=(3, 5), num_prefix=1, stage=3),
}
MAP = (7, 9)  # of the window host
FIXED = ("less", "linformer")  # weights whose shape is the number of tokens


class Host(nn.Layer):
    """The mechanism where the host keeps it; a Less-Attention layer comes after the vanilla layer it reads from."""

    def __init__(self, name: str, spec: AttentionSpec):
        super().__init__()
        windowed = spec.grid == (4, 4)
        if windowed and not ATTENTIONS.get(name).windowed:
            spec = AttentionSpec(dim=spec.dim, num_heads=spec.num_heads, grid=MAP)
        specs = [spec]
        if name == "less":
            specs.append(AttentionSpec(**{**vars(spec), "index": 1}))
        self.layers = nn.LayerList([build_attention(name, s) for s in specs])
        self.spec, self.attn = spec, self.layers[-1]
        self.windows = [SwinBlock(layer, 1.0, 0.0, 0.0, 1e-5) for layer in self.layers] if windowed else None
        self.hw = MAP if windowed else spec.grid
        self.tokens = spec.num_prefix + self.hw[0] * self.hw[1]
        for p in self.parameters():  # away from the special initial values (zeros, identities)
            p.set_value(p + 0.1 * paddle.randn(p.shape))

    def forward(self, x):
        carry, total = {}, 0.0
        for i, layer in enumerate(self.layers):
            if self.windows:
                y, carry = self.windows[i].attend(x, self.hw, carry)
            else:
                y, carry = layer(x, self.hw, carry=carry)
            total = total + y
        return total


@pytest.fixture(params=MECHANISMS)
def name(request):
    return request.param


@pytest.fixture(params=HOSTS, ids=lambda h: h.replace(" ", "-"))
def host(request, name):
    return Host(name, HOSTS[request.param])


def tokens(host, batch=2):
    return paddle.randn([batch, host.tokens, host.spec.dim])


def test_shape_is_kept(host):
    x = tokens(host, 3)
    assert host(x).shape == x.shape


def test_every_parameter_gets_a_finite_gradient_that_is_not_zero(name, host):
    x = tokens(host)
    y = host(x)
    (y * paddle.randn(y.shape)).sum().backward()
    for parameter_name, p in host.named_parameters():
        grad = p.grad.numpy()
        assert np.isfinite(grad).all(), parameter_name
        if name in ("softmax", "inline", "agent", "nystromformer") and parameter_name.endswith("qkv.bias"):
            c = host.spec.dim
            assert np.abs(grad[:c]).max() > 0 and np.abs(grad[2 * c :]).max() > 0
            assert np.abs(grad[c : 2 * c]).max() < 1e-4 * np.abs(grad).max()  # a key bias cancels
        else:
            assert np.abs(grad).max() > 0, parameter_name


def test_global_term_is_the_explicit_map_times_the_values(name, host, float64):
    host.to(dtype="float64")
    x = paddle.randn([2, host.attn.spec.tokens, host.spec.dim], dtype="float64")
    hw, results = host.attn.spec.grid, []
    for explicit in (False, True):
        x.stop_gradient = False
        carry = {}
        for layer in host.layers[:-1]:
            _, carry = layer(x, hw, carry=carry)
        extra = {"carry": carry} if isinstance(host.attn, LessAttention) else {}
        if explicit:
            weights = host.attn.attention_map(x, hw, **extra)
            assert weights.shape[:2] == [2, weights.shape[1]] and weights.shape[2] == x.shape[1]
            y = merge_heads(paddle.matmul(weights, host.attn.values(x, hw)))
        else:
            y = host.attn.global_term(x, hw, **extra)
        probe = paddle.to_tensor(np.random.default_rng(1).standard_normal(y.shape))
        (grad,) = paddle.grad((y * probe).sum(), x)
        results.append((y.numpy(), grad.numpy()))
    for fast, slow in zip(*results, strict=True):
        assert np.abs(fast - slow).max() <= 1e-8 * max(1.0, np.abs(slow).max())


def test_an_image_does_not_depend_on_its_batch_mates(host):
    host.eval()
    x = tokens(host, 5)
    with paddle.no_grad():
        together, alone = host(x)[2:3].numpy(), host(x[2:3]).numpy()
    allowed = 1e-5 * max(1.0, np.abs(alone).max())
    if isinstance(host.attn, SoftAttention) and host.attn.uses_landmarks:  # its inverse amplifies rounding
        host.to(dtype="float64")
        with paddle.no_grad():
            exact = host(x[2:3].astype("float64")).numpy()
        allowed = max(allowed, 10 * np.abs(alone - exact).max())
    assert np.abs(together - alone).max() <= allowed


def test_evaluation_is_deterministic(host):
    host.eval()
    x = tokens(host)
    with paddle.no_grad():
        assert np.array_equal(host(x).numpy(), host(x).numpy())


def test_finite_with_values_rounded_to_bfloat16(host):
    for p in host.parameters():
        p.set_value(p.astype("bfloat16").astype("float32"))
    x = tokens(host)
    for probe in (x, -x.abs(), paddle.zeros_like(x), 30.0 * x):
        probe = probe.astype("bfloat16").astype("float32")
        probe.stop_gradient = False
        y = host(probe)
        y.sum().backward()
        assert np.isfinite(y.numpy()).all() and np.isfinite(probe.grad.numpy()).all()


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


@pytest.mark.parametrize("backbone", ["deit_nano", "pvt_nano", "swin_nano"])
def test_saved_program_equals_the_model_at_any_batch(name, backbone, tmp_path):
    model = ppattn.create_model(backbone, attention=name, num_classes=7)
    batches = check_batches(3, (32, 32), None)
    expected = answers(model, batches)
    save_program(model, tmp_path, (32, 32), dynamic_size=False)
    loaded = paddle.jit.load(str(tmp_path / "model"))
    loaded.eval()
    runtimes = [lambda images: loaded(paddle.to_tensor(images)).numpy()]
    runtimes += [open_engine(tmp_path, engine, threads=1) for engine in ("plain", "onednn")]
    for runtime in runtimes:
        for batch, images in batches.items():
            assert np.abs(runtime(images) - expected[batch]).max() <= 2e-5


def weights_of_multiples(name: str, **options) -> np.ndarray:
    """Attention rows of four queries on one ray, as in figure 1 of the InLine paper."""
    spec = AttentionSpec(dim=6, num_heads=1, grid=(2, 2), qkv_bias=False)
    attn = build_attention(name, spec, options)
    keys = np.array([[0.9, 0.1, 0, 0, 0, 0], [0.2, 1.1, 0, 0, 0, 0], [0.6, 0.7, 0, 0, 0, 0], [0.1, 0.3, 0, 0, 0, 0]])
    ray = np.outer([1, 2, 3, 4], [0.5, 0.8, 0, 0, 0, 0])
    q, k = paddle.to_tensor(ray[None, None], "float32"), paddle.to_tensor(keys[None, None], "float32")
    if name == "softmax":
        attn.heads = lambda x, hw: (q, k, k)
    else:
        phi = attn.phi
        attn.features = lambda *_: (phi(q), phi(k), k)
    return attn.attention_map(paddle.zeros([1, 4, 6]), (2, 2)).numpy()[0, 0]


@pytest.mark.parametrize(("name", "options"), [("softmax", {}), ("inline", {}), ("inline", {"kernel": "relu"})])
def test_injective_mechanisms_tell_multiples_of_a_query_apart(name, options):
    rows = weights_of_multiples(name, **options)
    assert np.allclose(rows.sum(-1), 1, atol=1e-6)
    assert all(np.abs(a - b).max() > 1e-2 for i, a in enumerate(rows) for b in rows[:i])


def test_plain_linear_attention_with_relu_confuses_multiples_of_a_query():
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
