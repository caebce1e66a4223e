"""The compiled and the plain form of every operator against Paddle's own layers in float64 (values and gradients)."""

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from ppattn import ops
from ppattn.runtime import cpu
from tests.helpers.rounding import STEPS, check_rounding


@pytest.fixture
def native():
    """The compiled operators; skipped where they cannot be built."""
    if not ops.enable("auto"):
        pytest.skip(ops.status())


@pytest.fixture(params=["plain", "native"])
def form(request):
    """Both forms of the operators."""
    if request.param == "native":
        request.getfixturevalue("native")
    else:
        ops.enable("plain")
    return request.param


def random(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


def run(function, arrays, dtype, trained=None, move=lambda x: x):
    """Value of `function` and gradients of sum(value * (0.3 + cos(index))) for the arrays that are in `trained`."""
    tensors = [paddle.to_tensor(move(a), dtype=dtype) for a in arrays]
    for i, tensor in enumerate(tensors):
        tensor.stop_gradient = trained is not None and i not in trained
    y = function(*tensors)
    weight = paddle.to_tensor(move(in_float32(0.3 + np.cos(np.arange(y.size))).reshape(y.shape)), dtype=dtype)
    (y * weight).sum().backward()
    return [y.numpy()] + [None if t.grad is None else t.grad.numpy() for t in tensors]


def in_float32(x):
    """The nearest numbers that float32 has, so that both sides of a comparison start from the same."""
    return np.asarray(x, "float32").astype("float64")


def check(function, reference, arrays, trained=None, terms=None, steps=STEPS):
    """Value and every gradient, computed in float32, against those of a reference in float64.

    For `terms` and `steps` see rounding.py; by default a sum has as many terms as an array has rows or columns."""
    arrays = [in_float32(a) for a in arrays]
    got = run(function, arrays, "float32", trained)
    assert all(a is None or a.dtype == np.float32 for a in got)
    terms = terms or max(max(a.shape[-1], a.size // a.shape[-1]) for a in arrays)
    check_rounding(got, lambda move: run(reference, arrays, "float64", trained, move), terms, steps=steps)


@pytest.mark.parametrize("trained", [(0, 1, 2), (1, 2), (0,), (2,)])
@pytest.mark.parametrize(("shape", "bias"), [((1, 1, 5, 7), True), ((3, 67, 13, 29), False), ((2, 700, 33, 17), True)])
def test_linear(form, shape, bias, trained):
    b, n, k, out = shape
    arrays = random(0, (b, n, k), (k, out), (out,))[: 2 + bias]
    check(ops.linear, F.linear, arrays, trained if bias or trained != (2,) else (0, 1))


def test_wrong_shapes_are_errors_in_both_forms(form):
    calls = [
        lambda: ops.linear(paddle.ones([2, 5]), paddle.ones([7, 3])),
        lambda: ops.conv2d(paddle.ones([1, 4, 5, 5]), paddle.ones([2, 3, 3, 3]), None),
        lambda: ops.depthwise_conv(paddle.ones([1, 4, 3]), paddle.ones([3, 1, 3, 3]), None, (3, 3)),
        lambda: ops.dynamic_conv3x3(paddle.ones([1, 4, 3]), paddle.ones([1, 3, 9]), (3, 3)),
        lambda: ops.inline_attention(paddle.ones([1, 4, 9]), paddle.ones([1, 3, 9]), 1, (3, 3), 1.0),
    ]
    for call in calls:
        with pytest.raises(ValueError):
            call()


@pytest.mark.parametrize(
    ("shape", "trained"), [((1, 3), (0, 1, 2)), ((5, 67, 13), (0,)), ((5, 67, 13), (0, 2)), ((3, 130, 160), (1, 2))]
)
def test_layer_norm(form, shape, trained):
    x, w, b = random(1, shape, shape[-1:], shape[-1:])
    check(
        lambda x, w, b: ops.layer_norm(x, w, b, 1e-6),
        lambda x, w, b: F.layer_norm(x, shape[-1:], epsilon=1e-6) * w + b,
        [3 * x + 1, w, b],
        trained,
    )


@pytest.mark.parametrize("approximate", [False, True])
@pytest.mark.parametrize("reach", [3, 12, 100])
def test_gelu(form, approximate, reach):
    x = np.concatenate([np.linspace(-reach, reach, 4999), random(2, (9001,))[0], [0.0, -0.0, 1e-30]])
    # Paddle multiplies 1 - tanh(u)^2, where it vanishes but for rounding, by u' x / 2, which is up to 31 there.
    steps = 64 if form == "plain" and approximate else 4
    check(lambda x: ops.gelu(x, approximate), lambda x: F.gelu(x, approximate), [x], terms=1, steps=steps)


@pytest.mark.parametrize(("n", "parts"), [(1, 3), (13, 2), (13, 4), (13, 5)])
@pytest.mark.parametrize("used", [slice(None, None, -1), slice(0, 1), slice(-1, None)], ids=["all", "first", "last"])
def test_split(form, n, parts, used):
    """The parts in another order, or one of them, where the others have a gradient of zero."""
    check(
        lambda x: paddle.concat(ops.split_tensor(x, parts)[used]),
        lambda x: paddle.concat([x[..., i * n : (i + 1) * n] for i in range(parts)][used]),
        random(21, (3, 67, parts * n)),
        terms=1,
        steps=0,
    )


def test_nan_and_infinity_pass_through(form):
    x = paddle.to_tensor(np.array([[1.0, np.nan, 2.0], [np.inf, 0.0, 1.0]], "float32"))
    assert np.isnan(ops.gelu(x).numpy()[0, 1]) and np.isposinf(ops.gelu(x).numpy()[1, 0])
    assert np.isnan(ops.layer_norm(x, paddle.ones([3]), paddle.zeros([3])).numpy()).all()
    one, power = paddle.ones([1, 1, 3]), paddle.full([1, 1, 1, 3], 3.0)
    found = ops.signed_power(paddle.to_tensor([[[1.0, np.nan, -2.0]]]), None, one, power, 1, 1e-12).numpy()[0, 0]
    assert np.isnan(found[[1, 4]]).any() and np.allclose(found[[0, 2, 3, 5]], [1, 0, 0, 8], rtol=1e-5)


@pytest.mark.parametrize("power", [3, 4, 20])
def test_focused_power_is_finite_for_tokens_without_positive_channels_and_for_large_ones(form, power):
    x = paddle.to_tensor([[[-1.0, -2.0, -0.5], [-1.0, 30.0, 10.0]]], stop_gradient=False)
    scale = paddle.to_tensor([[[1.4, 1.2, 0.7]]], stop_gradient=False)
    y = ops.focused_power(x, None, scale, power, 1e-6)
    y.sum().backward()
    z = (np.maximum(x.numpy().astype("float64"), 0) + 1e-6) * scale.numpy()
    high = z**power
    expected = high * np.sqrt((z * z).sum(-1, keepdims=True) / (high * high).sum(-1, keepdims=True))
    assert np.allclose(y.numpy(), expected, rtol=1e-4, atol=1e-12)
    assert np.isfinite(x.grad.numpy()).all() and np.isfinite(scale.grad.numpy()).all()


def correlation(v, taps):
    """v [B, C, H, W], every channel of every image with its own of taps [B, C, 9]."""
    b, c, h, w = v.shape
    y = F.conv2d(v.reshape([1, b * c, h, w]), taps.reshape([b * c, 1, 3, 3]), padding=1, groups=b * c)
    return y.reshape([b, c, h, w])


def on_grid(function, grid, prefix=0):
    """A function of maps [B, C, H, W] as one of tokens [B, P + H*W, C]: prefix tokens get zero."""

    def of_tokens(v, *more):
        b, _, c = v.shape
        y = function(v[:, prefix:].transpose([0, 2, 1]).reshape([b, c, *grid]), *more)
        y = y.reshape([b, c, grid[0] * grid[1]]).transpose([0, 2, 1])
        return paddle.concat([paddle.zeros_like(v[:, :prefix]), y], axis=1) if prefix else y

    return of_tokens


@pytest.mark.parametrize(
    "shape", [(1, 5, 1, 1), (1, 3, 2, 5), (3, 21, 7, 4), (2, 32, 8, 8), (2, 67, 5, 6), (1, 2, 21, 20)]
)
def test_dynamic_conv3x3(form, shape, monkeypatch):
    (b, c, h, w), prefix = shape, 2 * (shape[1] % 2)
    monkeypatch.setattr(ops.convolution, "CUDA_GRID", 63)  # three of the shapes come in halves
    arrays = random(3, (b, prefix + h * w, c), (b, c, 9))
    check(lambda v, taps: ops.dynamic_conv3x3(v, taps, (h, w), prefix), on_grid(correlation, (h, w), prefix), arrays)


@pytest.mark.parametrize(
    ("k", "biased", "skip"), [(1, True, False), (3, True, False), (3, False, True), (5, False, True), (9, True, True)]
)
@pytest.mark.parametrize(
    ("kernels", "grid", "prefix"),
    [("one per channel", (5, 7), 1), ("shared by the heads", (2, 3), 0), ("one per head", (1, 11), 2)],
)
def test_depthwise_conv(form, k, kernels, grid, prefix, biased, skip, monkeypatch):
    b, heads, d = 2, 3, 4
    monkeypatch.setattr(ops.convolution, "CUDA_GRID", 7)  # "one per head" comes in halves
    count = {"one per channel": heads * d, "shared by the heads": d, "one per head": heads}[kernels]
    arrays = random(16, (b, prefix + grid[0] * grid[1], heads * d), (count, 1, k, k), (count,))[: 2 + biased]
    channels = np.arange(heads * d)
    index = paddle.to_tensor(channels // d if kernels == "one per head" else channels % count)

    def reference(v, weight, bias=None):
        bias = None if bias is None else paddle.gather(bias, index)
        return F.conv2d(v, paddle.gather(weight, index), bias, padding=k // 2, groups=heads * d)

    def conv(v, weight, bias=None):
        return ops.depthwise_conv(v, weight, bias, grid, prefix, kernels == "one per head", skip)

    def expected(v, *rest):
        y = on_grid(reference, grid, prefix)(v, *rest)
        return v + y if skip else y

    check(conv, expected, arrays)


@pytest.mark.parametrize(
    ("shape", "filters", "k", "stride", "padding"),
    [((2, 3, 9, 7), 5, 3, 2, 1), ((1, 4, 5, 8), 3, 3, 1, 1), ((3, 2, 11, 6), 4, 7, 4, 3), ((2, 5, 8, 6), 1, 2, 2, 0),
     ((2, 1, 2, 1), 2, 5, 3, 2), ((1, 16, 90, 61), 7, 3, 1, 1),  # more rows than one strip
     ((2, 3, 7, 5), 4, 3, 4, 0)],  # rows and columns that no patch touches
)  # fmt: skip
def test_conv2d(form, shape, filters, k, stride, padding):
    arrays = random(18, shape, (filters, shape[1], k, k), (filters,))[: 2 + (filters != 4)]

    def form_of(function):
        return lambda x, weight, bias=None: function(x, weight, bias, stride, padding)

    check(form_of(ops.conv2d), form_of(F.conv2d), arrays)


@pytest.mark.parametrize(
    ("shape", "approximate"),
    [((1, 1, 3, 5, 4), False), ((3, 67, 13, 29, 7), True), ((2, 350, 16, 64, 33), False), ((2, 350, 16, 64, 33), True)],
)
def test_mlp(form, shape, approximate):
    b, n, k, hidden, out = shape
    arrays = random(9, (b, n, k), (k, hidden), (hidden,), (hidden, out), (out,))

    def reference(x, w1, b1, w2, b2):
        return F.linear(F.gelu(F.linear(x, w1, b1), approximate), w2, b2)

    check(lambda *t: ops.mlp(*t, approximate), reference, arrays)
    check(lambda *t: ops.mlp(*t, approximate), reference, arrays, trained=(0, 2, 3))


@pytest.mark.parametrize(
    ("shape", "dropped"), [((1, 1, 3, 5), False), ((3, 67, 13, 29), True), ((2, 350, 16, 64), False)]
)
def test_residual_mlp(form, shape, dropped):
    """`dropped`: with a factor per image, as stochastic depth draws them."""
    b, n, k, hidden = shape
    arrays = random(12, (b, n, k), (k,), (k,), (k, hidden), (hidden,), (hidden, k), (k,))
    factors = np.array([1.25, 0.0, 1.25])[:b, None, None]

    def keep(x):
        return paddle.to_tensor(factors, dtype=x.dtype) if dropped else None

    def reference(x, norm_w, norm_b, w1, b1, w2, b2):
        y = F.linear(F.gelu(F.linear(F.layer_norm(x, [k], epsilon=1e-6) * norm_w + norm_b, w1, b1)), w2, b2)
        return x + (y * keep(x) if dropped else y)

    def block(x, norm_w, norm_b, *mlp):
        return ops.residual_mlp(x, norm_w, norm_b, 1e-6, *mlp, keep=keep(x))

    check(block, reference, arrays)
    check(block, reference, arrays, trained=(1, 2, 5))


# B, prefix tokens, grid, heads, channels per head; the last is larger than one block of score rows
ATTENTIONS = [
    (1, 0, (1, 1), 1, 3), (3, 1, (5, 7), 2, 13), (2, 2, (3, 4), 3, 32), (1, 1, (2, 8), 4, 16), (1, 0, (20, 19), 1, 8),
]  # fmt: skip


def heads_first(x, heads):
    """[B, N, h * r] -> [B, h, N, r]."""
    return x.reshape([*x.shape[:2], heads, x.shape[2] // heads]).transpose([0, 2, 1, 3])


def merged(x):
    return x.transpose([0, 2, 1, 3]).flatten(2)


@pytest.mark.parametrize("b, prefix, grid, heads, d", ATTENTIONS)
def test_softmax_attention(form, b, prefix, grid, heads, d):
    (qkv,) = random(10, (b, prefix + grid[0] * grid[1], 3 * heads * d))

    def reference(qkv):
        q, k, v = (heads_first(t, heads) for t in qkv.chunk(3, axis=-1))
        return merged(F.softmax(q.matmul(k, transpose_y=True) * 0.3).matmul(v))

    check(lambda qkv: ops.softmax_attention(qkv, heads, 0.3), reference, [3 * qkv + 1])


@pytest.mark.parametrize("trained", [(0, 1, 2), (0,), (2,)])
def test_softmax_attention_with_other_keys_bias_and_mask(form, trained):
    b, g, n, m, heads, d = 6, 3, 35, 11, 2, 5
    arrays = random(15, (b, n, heads * d), (b, m, 2 * heads * d), (heads, n, m), (g, n, m))
    arrays[3][:, :, :4] = -100.0

    def reference(q, kv, bias, mask):
        q, k, v = (heads_first(t, heads) for t in (q, *kv.chunk(2, axis=-1)))
        logits = q.matmul(k, transpose_y=True) * 0.3 + bias + mask.tile([b // g, 1, 1]).unsqueeze(1)
        return merged(F.softmax(logits).matmul(v))

    def attend(q, kv, bias, mask):
        return ops.softmax_attention(q, heads, 0.3, kv, bias, mask)

    check(attend, reference, arrays, trained)


@pytest.mark.parametrize("b, prefix, grid, heads, d", ATTENTIONS)
@pytest.mark.parametrize("local", [True, False])
def test_inline_attention(form, b, prefix, grid, heads, d, local):
    n, c = prefix + grid[0] * grid[1], heads * d
    qkv, taps = random(11, (b, n, 3 * c), (b, c, 9))

    def reference(qkv, taps=None):
        q, k, v = (heads_first(t, heads) for t in qkv.chunk(3, axis=-1))
        scores = q.matmul(k, transpose_y=True) * 0.3
        y = merged(((scores - scores.mean(-1, keepdim=True) + 1) / n).matmul(v))
        return y if taps is None else y + on_grid(correlation, grid, prefix)(qkv[:, :, 2 * c :], taps)

    arrays = [qkv + 1, taps] if local else [qkv + 1]
    check(lambda q, t=None: ops.inline_attention(q, t, heads, grid, 0.3, prefix), reference, arrays)


@pytest.mark.parametrize(
    "b, n, m, heads, d",
    [(1, 1, 1, 1, 3), (3, 35, 11, 2, 13), (2, 67, 49, 3, 32), (1, 380, 380, 1, 8), (1, 700, 300, 2, 5)],
)
def test_gaussian_attention(form, b, n, m, heads, d):
    arrays = [0.4 * a for a in random(30, (b, n, heads * d), (b, m, heads * d), (b, m, heads * d))]

    def reference(q, k, v):
        q, k, v = (heads_first(t, heads) for t in (q, k, v))
        return merged(paddle.exp(-((q.unsqueeze(3) - k.unsqueeze(2)) ** 2).sum(-1) / 2).matmul(v))

    check(lambda q, k, v: ops.gaussian_attention(q, k, v, heads), reference, arrays)
    if m > 1:  # the same tokens as queries and keys, as in the full kernel

        def full(attention):
            return lambda q, v: attention(q, q, v)

        check(full(lambda q, k, v: ops.gaussian_attention(q, k, v, heads)), full(reference), arrays[1:])


@pytest.mark.parametrize("b,n,heads,r,d", [(1, 2, 1, 2, 4), (3, 35, 2, 10, 6), (2, 67, 3, 64, 32), (2, 65, 4, 110, 32)])
@pytest.mark.parametrize("polar", [False, True])
def test_linear_attention(form, b, n, heads, r, d, polar):
    q, k, v = random(31, (b, n, heads * r), (b, n, heads * r), (b, n, heads * d))

    def stream(q, k, v):
        weights = q.matmul(k, transpose_y=True) / n
        return weights.matmul(v) / (weights.sum(-1, keepdim=True) + 0.01)

    def reference(q, k, v):
        q, k, v = (heads_first(t, heads) for t in (q, k, v))
        if not polar:
            return merged(stream(q, k, v))
        swapped = paddle.concat([q[..., r // 2 :], q[..., : r // 2]], -1)
        return merged(paddle.concat([stream(q, k, v[..., : d // 2]), stream(swapped, k, v[..., d // 2 :])], -1))

    check(lambda q, k, v: ops.linear_attention(q, k, v, heads, 0.01, polar), reference, [np.abs(q), np.abs(k), v])


def test_pairs_of_channels_that_lie_in_two_heads_are_turned(form):
    arrays = [np.abs(a) for a in random(32, *[(2, 9, 12)] * 3, *[(9, 6)] * 2)]  # in float64 the form is plain
    check(*[lambda q, k, v, *turn: ops.linear_attention(q, k, v, 4, 0.01, rotation=turn)] * 2, arrays, (0, 1, 2))


FEATURES = [(1, 1, 1, 4), (3, 35, 2, 6), (2, 67, 3, 32), (2, 300, 1, 5)]  # B, N, heads, channels per head


@pytest.mark.parametrize("b, n, heads, d", FEATURES)
@pytest.mark.parametrize(("shifted", "trained"), [(False, (0,)), (True, None)])
def test_signed_power(form, b, n, heads, d, shifted, trained):
    c = heads * d
    x, scale, power, shift = random(32, (b, n, c), (1, 1, c), (1, heads, 1, d), (1, n, c))
    x = np.sign(x) * (np.abs(x) + 0.02)
    x[0, 0, 0] = shift[0, 0, 0] = 0.0  # where the logarithm needs its bound

    def reference(x, scale, power, shift=None):
        z = heads_first((x if shift is None else x + shift) * scale, heads)
        size, none = paddle.clip(z.abs(), min=1e-12) ** power, paddle.zeros_like(z)
        return merged(paddle.concat([paddle.where(z > 0, size, none), paddle.where(z > 0, none, size)], -1))

    def feature(x, scale, power, shift=None):
        return ops.signed_power(x, shift, scale, power, heads, 1e-12)

    check(feature, reference, [x, 0.3 + np.abs(scale), 1 + 4 / (1 + np.exp(-power)), shift][: 3 + shifted], trained)


@pytest.mark.parametrize("b, n, heads, d", FEATURES)
@pytest.mark.parametrize(("shifted", "power", "trained"), [(False, 3, (1,)), (True, 2.5, None), (True, 3, None)])
def test_focused_power(form, b, n, heads, d, shifted, power, trained):
    c = heads * d
    x, scale, shift = random(33, (b, n, c), (1, 1, c), (1, n, c))

    def reference(x, scale, shift=None):
        z = (F.relu(x if shift is None else x + shift) + 0.01) * scale
        high = z**power
        return high * z.norm(axis=-1, keepdim=True) / high.norm(axis=-1, keepdim=True)

    def feature(x, scale, shift=None):
        return ops.focused_power(x, shift, scale, power, 0.01)

    check(feature, reference, [x, 0.3 + np.abs(scale), shift][: 2 + shifted], trained)


@pytest.mark.parametrize("b, n, m, heads, d", [(2, 35, 11, 2, 13), (1, 67, 49, 3, 16)])
def test_gaussian_nystrom(form, b, n, m, heads, d):
    arrays = [0.4 * a for a in random(35, (b, n, heads * d), (b, m, heads * d), (b, heads, m, m), (b, n, heads * d))]

    def reference(q, landmarks, inverse, v):
        q, landmarks, v = (heads_first(t, heads) for t in (q, landmarks, v))
        k1 = paddle.exp(-((q.unsqueeze(3) - landmarks.unsqueeze(2)) ** 2).sum(-1) / 2)
        return merged(k1.matmul(inverse).matmul(k1.matmul(v, transpose_x=True)))

    check(lambda q, a, i, v: ops.gaussian_nystrom(q, a, i, v, heads), reference, arrays)


@pytest.mark.parametrize(("shape", "steps"), [((1, 1, 5), 0), ((7, 2, 17), 1), ((3, 5, 49), 4), ((1, 1, 5), 7)])
def test_newton_inverse(form, shape, steps):
    *count, m = shape
    (a,) = random(34, (*count, m, m))
    a = a @ np.swapaxes(a, -1, -2) / m + 0.5 * np.eye(m)
    start = 0.3 * a / np.abs(a).sum(-1).max(-1)[..., None, None]

    def reference(a, v):
        for _ in range(steps):
            v = 2 * v - v.matmul(a).matmul(v)
        return v + a

    check(lambda a, v: ops.newton_inverse(a, v, steps) + a, reference, [a, start])


def test_gradient_of_some_inputs_only(form):
    """`paddle.grad` for one input while others are trained, too."""
    arrays = [in_float32(a) for a in random(4, (5, 7), (7, 3), (3,))]

    def slope(chosen, layer, dtype, move=lambda x: x):
        x, w, b = (paddle.to_tensor(move(a), dtype=dtype, stop_gradient=False) for a in arrays)
        return [paddle.grad((layer(x.tanh(), w, b) ** 2).sum(), (x, w, b)[chosen])[0].numpy()]

    for chosen in range(3):
        check_rounding(slope(chosen, ops.linear, "float32"), partial(slope, chosen, F.linear, "float64"), terms=7)


def test_second_derivatives_are_right_or_refused(form):
    arrays = [in_float32(a) for a in random(4, (5, 7), (7, 3), (3,))]

    def double(layer, dtype, move=lambda x: x):
        x, w, b = (paddle.to_tensor(move(a), dtype=dtype, stop_gradient=False) for a in arrays)
        (slope,) = paddle.grad(layer(x.tanh(), w, b).tanh().sum(), x, create_graph=True)
        return [g.numpy() for g in paddle.grad((slope**2).sum(), [x, w, b])]

    if form == "native":
        with pytest.raises(OSError, match="second derivatives"):
            double(ops.linear, "float32")
    else:
        check_rounding(double(ops.linear, "float32"), partial(double, F.linear, "float64"), terms=7)


def test_views(form):
    """Transposed views, which Paddle makes without copying by default."""
    arrays = [in_float32(a) for a in random(8, (5, 7, 3), (4, 5), (4,))]
    x, w, b = (paddle.to_tensor(a, dtype="float32") for a in arrays)
    y = ops.linear(x.transpose([2, 1, 0]), w.t(), b)
    check_rounding([y.numpy()], lambda move: [move(arrays[0]).T @ move(arrays[1]).T + move(arrays[2])], terms=5)
    value = ops.gelu(x.transpose([2, 1, 0])).numpy()
    check_rounding([value], lambda move: [F.gelu(paddle.to_tensor(move(arrays[0]))).numpy().T], terms=1, steps=4)


def test_other_types_take_the_plain_form(form):
    x, w, b = (paddle.to_tensor(a, dtype="float64") for a in random(5, (4, 6), (6, 5), (5,)))
    np.testing.assert_array_equal(ops.linear(x, w, b).numpy(), F.linear(x, w, b).numpy())


WITHOUT_AVX512 = {"CXXFLAGS": "-march=haswell", "MKL_DEBUG_CPU_TYPE": "5", "ONEDNN_MAX_CPU_ISA": "AVX2"}


@pytest.mark.slow
@pytest.mark.skipif(not set(cpu.cpuinfo("flags").split()) >= cpu.AVX2, reason="this processor has no AVX2")
def test_the_kernels_as_a_processor_without_avx512_has_them(native):
    chosen = "native and (mlp or softmax or conv or linear_attention or power or newton)"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", chosen]
    done = subprocess.run(command, env=os.environ | WITHOUT_AVX512, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    told = done.stdout.splitlines()[-1]
    assert int(told.split(" passed")[0]) > 50 and "skipped" not in told, told


TRAIN = """
import hashlib
import ppattn
ppattn.setup("cpu", threads=2, seed=0)
import paddle
model = ppattn.create_model("deit_nano", attention="inline", depth=1, num_classes=5)
opt = paddle.optimizer.SGD(0.1, model.parameters())
for _ in range(5):
    (model(paddle.randn([7, 3, 32, 32])) ** 2).mean().backward()
    opt.step()
    opt.clear_grad()
print(hashlib.md5(b"".join(p.numpy().tobytes() for p in model.parameters())).hexdigest(), ppattn.ops.status())
"""


def program(folder, script: str) -> Path:
    """A shell script in the place of a compiler."""
    path = folder / "c++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.mark.slow
def test_first_builds_at_the_same_time_and_bits_repeat(native, tmp_path):
    """Two processes with an empty cache: one compiles, without a warning, and both train to the same bits."""
    counting = program(tmp_path, 'case "$*" in *" -c "*) echo once >>"$COUNT" ;; esac\nexec c++ "$@"')
    flags = f"{os.environ.get('CXXFLAGS', '')} -Werror"
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "CXXFLAGS": flags, "CXX": str(counting)}
    env["COUNT"] = str(tmp_path / "compilations")
    command = [sys.executable, "-c", TRAIN]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) for _ in range(2)]
    (out1, err1), (out2, err2) = (process.communicate() for process in runs)
    assert b"compiled" in out1 and out1 == out2, (out1, err1, err2)
    assert len(list((tmp_path / "ppattn").glob("*.so"))) == 1
    assert (err1 + err2).count(b"Compiling the CPU kernels, once: up to two minutes.") == 1
    assert (tmp_path / "compilations").read_text() == "once\n"


NO_MEMORY = """
import resource
import ppattn
ppattn.setup("cpu", threads=2)
import paddle
from ppattn import ops
assert ops.enable(), ops.status()
x, w = paddle.ones([4, 6000]), paddle.ones([6000, 6000])
w.stop_gradient = False
loss = ops.linear(x, w).sum()
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), used + (200 << 20)))
try:
    loss.backward()  # needs 144 MB for the gradient and as much for its partial sums
except MemoryError:
    print("told")
"""


@pytest.mark.slow
def test_a_failed_allocation_is_an_error(native):
    done = subprocess.run([sys.executable, "-c", NO_MEMORY], capture_output=True, text=True)
    assert done.stdout.split() == ["told"], done.stderr


@pytest.mark.parametrize(
    ("script", "words"), [(None, "compiler"), ("echo 'error: no such luck' >&2\nexit 1", "no such luck")]
)
def test_without_a_compiler_that_works_the_plain_form_is_used(script, words, monkeypatch, tmp_path):
    monkeypatch.setattr(ops.native, "_loaded", False)
    monkeypatch.delenv("PPATTN_KERNELS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if script is None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
    else:
        monkeypatch.setenv("CXX", str(program(tmp_path, script)))
    assert not ops.enable("auto") and words in ops.status()
    assert ops.linear(paddle.ones([2, 3]), paddle.ones([3, 4])).shape == [2, 4]


@pytest.fixture
def library(monkeypatch, tmp_path):
    """Builds the library with a compiler that takes no time; returns its path and its text."""
    compiler = program(tmp_path, 'while [ $# -gt 1 ]; do [ "$1" = -o ] && echo "$CONTENT" >"$2"; shift; done')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))

    def build(content: str) -> tuple[Path, str]:
        monkeypatch.setenv("CONTENT", content)
        folder = ops.native._folder() or tmp_path / "alone"
        with tempfile.TemporaryDirectory() as scratch:
            path = ops.native._build(folder, scratch, str(compiler), tmp_path, [tmp_path / "libpaddle.so"])
        return path, path.read_text().strip()

    return build


def test_a_library_is_kept(library, tmp_path):
    path, text = library("first")
    assert text == "first" and path.parent == tmp_path / "cache/ppattn" and path.parent.stat().st_mode & 0o777 == 0o700
    assert library("second")[1] == "first"


def test_a_library_that_others_may_have_placed_is_not_loaded(library, tmp_path):
    path, _ = library("planted")
    path.parent.chmod(0o777)
    found, text = library("own")
    assert text == "own" and found.parent == tmp_path / f"tmp/ppattn-{os.geteuid()}"
    found.parent.chmod(0o777)
    found, text = library("alone")
    assert text == "alone" and found.parent == tmp_path / "alone"
    path.parent.chmod(0o700)
    assert library("own")[1] == "planted"
    if os.geteuid() == 0:
        os.chown(path.parent, 12345, 12345)
        assert library("other")[0].parent != path.parent


@pytest.mark.parametrize("home", [{"XDG_CACHE_HOME": "/proc/nowhere"}, {"HOME": "/proc/nowhere", "XDG_CACHE_HOME": ""}])
def test_kernels_without_a_folder_for_the_cache(library, monkeypatch, home):
    for name, value in home.items():
        monkeypatch.setenv(name, value)
    assert library("own")[1] == "own"
