"""Formulas of mala, rala, nalaformer, mila, vittt and mhla in numpy float64: class tokens, odd grids, options."""

from functools import partial

import numpy as np
import paddle
import pytest

import ppattn
from ppattn.attention import AttentionSpec, build_attention
from ppattn.attention.mhla import mixing_start, piece_side
from ppattn.errors import UserError

pytestmark = pytest.mark.slow

SPECS = {
    "class token on 5x7": AttentionSpec(dim=12, num_heads=3, grid=(5, 7), num_prefix=1),
    "two prefix tokens on 6x4": AttentionSpec(dim=8, num_heads=2, grid=(6, 4), num_prefix=2),
    "reduction 4 on 9x6": AttentionSpec(dim=16, num_heads=2, grid=(9, 6), sr_ratio=4, stage=1),
    "one head on 1x11": AttentionSpec(dim=8, num_heads=1, grid=(1, 11)),
}


def heads(x, h):
    return x.reshape(*x.shape[:2], h, -1).transpose(0, 2, 1, 3)


def merge(x):
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def linear(p, name, x):
    return x @ p[f"{name}.weight"] + p.get(f"{name}.bias", 0.0)


def elu1(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def silu(x):
    return x / (1 + np.exp(-x))


def layer_norm(p, name, x):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]


def depthwise(p, name, v, spec):
    """A convolution of the grid tokens of v [B, N, C]; zero for the prefix, and everywhere without the layer."""
    out = np.zeros_like(v)
    if f"{name}.weight" in p:
        weight, (height, width), prefix = p[f"{name}.weight"], spec.grid, spec.num_prefix
        r = weight.shape[-1] // 2
        for n in range(height * width):
            for m in range(height * width):
                i, j = m // width - n // width + r, m % width - n % width + r
                if 0 <= i <= 2 * r and 0 <= j <= 2 * r:
                    out[:, prefix + n] += weight[:, 0, i, j] * v[:, prefix + m]
        out[:, prefix:] += p[f"{name}.bias"]
    return out


def turned(x, spec, channels, steps):
    """x [B, h, N, C'] whose pairs, as complex numbers, are turned by row and column; a table has so many channels."""
    m, (height, width) = channels // 4, spec.grid
    frequency = 10000.0 ** (-np.arange(m) / max(steps, 1))
    angle = np.zeros((spec.tokens, channels // 2))
    for n in range(height * width):
        angle[spec.num_prefix + n] = np.concatenate([n // width * frequency, n % width * frequency])
    shape = x.shape
    if x.shape[-1] != channels:  # one table over all heads
        angle = angle.reshape(spec.tokens, shape[1], -1).transpose(1, 0, 2)
    z = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
    return np.stack([z.real, z.imag], -1).reshape(shape)


def per_head(x, spec, rope):
    d = spec.dim // spec.num_heads
    return turned(x, spec, d, d // 4 - 1) if rope else x


def mala(p, x, spec, rope=True):
    q, k, v, o = np.split(linear(p, "qkvo", x), 4, -1)
    q, k, vh = (heads(t, spec.num_heads) for t in (elu1(q), elu1(k), v))
    s, n = q.shape[-1] ** -0.5, spec.tokens
    z = s * (q @ k.mean(2, keepdims=True).swapaxes(-1, -2))
    scores = per_head(q, spec, rope) @ per_head(k, spec, rope).swapaxes(-1, -2)
    weights = (1 + 1 / (z + 1e-6)) * s / n * scores - z / n
    return (merge(weights @ vh) + depthwise(p, "lepe", v, spec)) * o


def normalised(q, k, v, turn):
    weights = turn(q) @ turn(k).swapaxes(-1, -2) / k.shape[2]
    return merge(weights @ v / (q @ k.mean(2)[..., None] + 1e-6))


def rala(p, x, spec, rope=True):
    q, k, v, o = np.split(linear(p, "qkvo", x), 4, -1)
    q, k, vh = (heads(t, spec.num_heads) for t in (elu1(q), elu1(k), v))
    scores = k @ q.mean(2)[..., None] * q.shape[-1] ** -0.5
    alpha = np.exp(scores - scores.max(2, keepdims=True))
    k = k * spec.tokens * alpha / alpha.sum(2, keepdims=True)
    return (normalised(q, k, vh, lambda t: per_head(t, spec, rope)) + depthwise(p, "lepe", v, spec)) * o


def nalaformer(p, x, spec, rope=True):
    q, k, v, g = np.split(linear(p, "qkvg", x), 4, -1)
    q, k, vh = (heads(t, spec.num_heads) for t in (q, k, v))
    norm = np.sqrt((q**2).sum(-1, keepdims=True))
    power = 3 * (0.5 + np.tanh(norm))
    qs = [(np.maximum(sign * q, 0) / norm) ** power for sign in (1, -1)]
    ks = [np.maximum(sign * k, 0) ** 3 for sign in (1, -1)]

    def turn(t):
        return np.concatenate([per_head(half, spec, rope) for half in np.split(t, 2, -1)], -1)

    y = normalised(np.concatenate(qs, -1), np.concatenate(ks, -1), vh, turn)
    return layer_norm(p, "norm", y + depthwise(p, "lepe", v, spec)) * silu(g)


def mila(p, x, spec, rope=True):
    v, prefix = linear(p, "in_proj", x), spec.num_prefix
    if "dwc.weight" in p:
        v = np.concatenate([v[:, :prefix], depthwise(p, "dwc", v, spec)[:, prefix:]], 1)
    v = silu(v)
    q, k = (heads(elu1(t), spec.num_heads) for t in np.split(linear(p, "qk", v), 2, -1))
    y = normalised(q, k, heads(v, spec.num_heads), lambda t: turned(t, spec, spec.dim, spec.dim // 4) if rope else t)
    return (y + depthwise(p, "lepe", v, spec)) * silu(linear(p, "act_proj", x))


def vittt(p, x, spec, rope=False, local_term=True):
    c, h, d = spec.dim, spec.num_heads, spec.dim // spec.num_heads
    q, k, v, *second = np.split(linear(p, "qkv", x), np.cumsum([c, c, c, d, d]), -1)
    q, k, v = (heads(t, h) for t in (q, k, v))
    if rope:
        q, k = (turned(t, spec, c, c // 4) for t in (q, k))
    a, z, e = k @ p["w1"], k @ p["w2"], -v / 3 / spec.tokens
    sigmoid = 1 / (1 + np.exp(-z))
    steps = [e * silu(z), e * a * sigmoid * (1 + z * (1 - sigmoid))]
    steps = [k.swapaxes(-1, -2) @ step for step in steps]
    w1, w2 = (
        p[name] - g / (np.sqrt((g**2).sum(2, keepdims=True)) + 1) for name, g in zip(("w1", "w2"), steps, strict=True)
    )
    first, y2 = merge((q @ w1) * silu(q @ w2)), np.zeros_like(second[0])
    prefix, (height, width) = spec.num_prefix, spec.grid
    if local_term:
        grids = [np.pad(t[:, prefix:].reshape(-1, height, width, d), ((0, 0), (1, 1), (1, 1), (0, 0))) for t in second]
        places = [(slice(i, i + height), slice(j, j + width)) for i, j in np.ndindex(3, 3)]
        own = np.s_[:, 1:-1, 1:-1]
        g = np.stack([(grids[1][:, i, j] * grids[2][own]).sum((1, 2)) for i, j in places], -1) / (-3 * spec.tokens)
        taps = p["w3"].reshape(1, d, 9) - g / (np.sqrt((g**2).sum(-1, keepdims=True)) + 1)
        y = sum(taps[:, None, None, :, t] * grids[0][:, i, j] for t, (i, j) in enumerate(places))
        y2[:, prefix:] = y.reshape(-1, height * width, d)
    return np.concatenate([first, y2], -1)


def mhla(p, x, spec, side=1, mixing=None, eps=1e-6):
    """Token by token; all tokens see the prefix with 1 / M, and it sees them alike."""
    q, k, v = np.split(linear(p, "qkv", layer_norm(p, "norm", x)), 3, -1)
    if "q_norm.weight" in p:
        q, k = (
            t / np.sqrt((t**2).mean(-1, keepdims=True) + 2.0**-23) * p[f"{name}.weight"]
            for name, t in (("q_norm", q), ("k_norm", k))
        )
    q, k, vh = (heads(t, spec.num_heads) for t in (np.maximum(q, 0) + eps, np.maximum(k, 0) + eps, v))
    m = p["mixing"] if mixing is None else mixing(p["mixing"])
    (height, width), prefix, count = spec.grid, spec.num_prefix, len(m)
    row, column = np.divmod(np.arange(height * width), width)
    block = row // side * (width // side) + column // side
    place = row % side * side + column % side
    scores = q @ k.swapaxes(-1, -2)
    weights = np.zeros_like(scores)
    for n in range(prefix):
        weights[:, :, n] = scores[:, :, n] / (eps + scores[:, :, n].sum(-1, keepdims=True))
    for n in range(height * width):
        share = np.concatenate([np.full(prefix, 1 / count), m[block[n], block]])
        below = eps + scores[:, :, prefix + n, :prefix].sum(-1) / count
        for c in range(count):
            same = prefix + np.flatnonzero((block == c) & (place == place[n]))[0]
            below = below + m[block[n], c] * scores[:, :, same, prefix:][..., block == c].sum(-1)
        weights[:, :, prefix + n] = scores[:, :, prefix + n] * share / below[..., None]
    return merge(weights @ vh) + depthwise(p, "lepe", v, spec)


CASES = [
    *((name, formula, {}) for name, formula in (("mala", mala), ("rala", rala), ("nalaformer", nalaformer))),
    *((name, globals()[name], {"rope": False}) for name in ("mala", "rala", "nalaformer", "mila")),
    *(
        (name, globals()[name], {"local_term": False})
        for name in ("mala", "rala", "nalaformer", "mila", "vittt", "mhla")
    ),
    ("mila", mila, {}),
    ("vittt", vittt, {}),
    ("vittt", vittt, {"rope": True}),
    ("mhla", mhla, {}),
    ("mhla", mhla, {"qk_norm": True, "transform": "exp", "eps": 1e-3}),
    ("mhla", mhla, {"transform": "gaussian", "piece_size": 1}),
]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize(
    ("name", "formula", "options"), CASES, ids=lambda v: "-".join(map(str, v.items())) if isinstance(v, dict) else None
)
def test_value_and_gradients_are_the_formulas(name, formula, options, spec, float64):
    attn = build_attention(name, spec, options)
    for key, p in attn.named_parameters():
        noise = 0.3 * paddle.randn(p.shape)
        p.set_value(p * (1 + noise) if key == "mixing" else p + noise)
    x = paddle.randn([2, spec.tokens, spec.dim])
    x.stop_gradient = False
    y, _ = attn(x, spec.grid)
    rng = np.random.default_rng(0)
    probe = rng.standard_normal(y.shape)
    (y * paddle.to_tensor(probe)).sum().backward()
    arrays = {key: t.numpy() for key, t in attn.state_dict().items()} | {"x": x.numpy()}
    if name == "mhla":
        formula = partial(mhla, side=piece_side(spec.grid, options.get("piece_size")), eps=options.get("eps", 1e-6))
    elif name == "vittt" or "local_term" not in options:  # the others have no layer then
        formula = partial(formula, **options)

    def reference(arrays):
        return linear(arrays, "proj", formula(arrays, arrays["x"], spec))

    expected = reference(arrays)
    assert np.abs(y.numpy() - expected).max() < 1e-11 * max(1.0, np.abs(expected).max())
    for key, tensor in [*attn.named_parameters(), ("x", x)]:
        step = rng.standard_normal(tensor.shape)
        ends = [(reference(arrays | {key: arrays[key] + h * step}) * probe).sum() for h in (1e-6, -1e-6)]
        slope = (ends[0] - ends[1]) / 2e-6
        found = 0.0 if tensor.grad is None else (tensor.grad.numpy() * step).sum()
        assert abs(found - slope) < 1e-5 * max(1.0, abs(slope)), key


@pytest.mark.parametrize(
    ("grid", "piece_size", "side"),
    [
        ((14, 14), None, 7),
        ((16, 16), None, 8),
        ((56, 56), None, 28),
        ((6, 9), None, 3),
        ((6, 4), None, 2),  # six blocks, more than the rule allows: the fewest that there are
        ((4, 4), None, 2),
        ((2, 2), None, 2),
        ((13, 13), None, 13),
        ((5, 7), None, 1),
        ((16, 16), 4, 4),
        ((6, 9), 3, 3),
    ],
)
def test_the_side_of_a_block(grid, piece_size, side):
    assert piece_side(grid, piece_size) == side


def test_a_block_that_does_not_divide_the_grid_is_an_error():
    spec = AttentionSpec(dim=8, num_heads=2, grid=(6, 4))
    with pytest.raises(UserError, match=r"piece_size = 4 does not divide the grid of 6 x 4 tokens; 1, 2 or null fit"):
        build_attention("mhla", spec, {"piece_size": 4})
    attn = build_attention("mhla", spec, {"piece_size": 2})
    with pytest.raises(UserError, match="grid of 5 x 4 tokens; 1 or null fit"):
        attn(paddle.zeros([1, 20, 8]), (5, 4))
    with pytest.raises(UserError, match="piece_size = 4 does not divide the grid of 6 x 4"):
        ppattn.create_model("mhla_deit_tiny", img_size=(96, 64))


@pytest.mark.parametrize("transform", ["linear", "cos", "exp", "gaussian", "local"])
def test_one_block_starts_at_one_and_is_plain_linear_attention(transform):
    attn = build_attention("mhla", AttentionSpec(dim=8, num_heads=2, grid=(3, 3)), {"transform": transform})
    assert attn.mixing.numpy().tolist() == [[1.0]]
    attn.qkv.bias.set_value(paddle.ones_like(attn.qkv.bias))  # features far above eps
    x = paddle.randn([2, 9, 8])
    assert np.allclose(attn.attention_map(x, (3, 3)).sum(axis=-1).numpy(), 1.0, atol=1e-5)
    assert np.isfinite(attn(x, (3, 3))[0].numpy()).all()


@pytest.mark.parametrize("transform", ["linear", "cos", "exp", "local"])
def test_columns_of_the_first_matrix_sum_to_one(transform):
    start = mixing_start((3, 5), transform, 1.5, 3.0)
    assert np.allclose(start.sum(0), 1.0, atol=1e-6) and (start >= 0).all()


def interpolation(size, count):
    place = np.clip((np.arange(count) + 0.5) * size / count - 0.5, 0, size - 1)
    return np.maximum(0, 1 - np.abs(place[:, None] - np.arange(size)))


def test_another_grid_resizes_the_matrix_along_rows_and_columns(float64):
    built = AttentionSpec(dim=8, num_heads=2, grid=(4, 6), num_prefix=1)
    attn = build_attention("mhla", built, {"piece_size": 2})
    attn.mixing.set_value(paddle.rand(attn.mixing.shape) + 0.5)
    seen = AttentionSpec(dim=8, num_heads=2, grid=(8, 6), num_prefix=1)
    x = paddle.randn([2, seen.tokens, 8])
    p = {key: t.numpy() for key, t in attn.state_dict().items()}

    def resized(m):
        resize = np.kron(interpolation(2, 4), interpolation(3, 3))
        return resize @ m @ resize.T

    expected = linear(p, "proj", mhla(p, x.numpy(), seen, 2, resized))
    assert np.abs(attn(x, (8, 6))[0].numpy() - expected).max() < 1e-11
    file = attn.resized("mixing", np.random.default_rng(0).random((12, 12)), (64, 48))
    assert file.shape == (6, 6)


@pytest.mark.parametrize("size", [64, (96, 64)])
@pytest.mark.parametrize("name", ["deit_nano", "pvt_nano", "swin_nano", "deit_tiny", "pvt_tiny", "swin_tiny"])
def test_mhla_runs_at_small_and_oblong_images(name, size):
    model = ppattn.create_model(name, attention="mhla", img_size=size, num_classes=3)
    model.eval()
    with paddle.no_grad():
        assert np.isfinite(model(paddle.randn([1, 3, *model.img_size])).numpy()).all()


@pytest.mark.parametrize(
    ("name", "size"),
    [("vittt_tiny", 64), ("vittt_tiny", (96, 64)), ("mhla_deit_tiny", 64), ("mhla_deit_tiny", (128, 64))],
)
def test_zoo_entries_run_at_small_and_oblong_images(name, size):
    model = ppattn.create_model(name, img_size=size, num_classes=3)
    model.eval()
    with paddle.no_grad():
        assert np.isfinite(model(paddle.randn([1, 3, *model.img_size])).numpy()).all()


def test_what_cannot_be_built_or_drawn_is_one_sentence():
    with pytest.raises(UserError, match=r"needs a multiple of 4 channels per head, not 6"):
        build_attention("mala", AttentionSpec(dim=12, num_heads=2, grid=(3, 3)))
    attn = build_attention("vittt", AttentionSpec(dim=8, num_heads=2, grid=(3, 3)))
    with pytest.raises(UserError, match="not linear in its values"):
        attn.attention_map(paddle.randn([1, 9, 8]), (3, 3))


@pytest.mark.parametrize("form", ["compiled", "plain"])
def test_nalaformer_is_finite_where_queries_and_keys_are_zero(form):
    from ppattn import ops

    ops.enable("auto" if form == "compiled" else "plain")
    attn = build_attention("nalaformer", AttentionSpec(dim=8, num_heads=2, grid=(3, 3), qkv_bias=False))
    x = paddle.zeros([1, 9, 8])
    x.stop_gradient = False
    y, _ = attn(x, (3, 3))
    y.sum().backward()
    ops.enable("auto")
    assert np.isfinite(y.numpy()).all() and np.isfinite(x.grad.numpy()).all()
    assert all(np.isfinite(p.grad.numpy()).all() for p in attn.parameters())
