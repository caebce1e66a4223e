"""Formulas in numpy float64 of what no official code covers: the baselines, options of others, Less-Attention."""

import math
from functools import partial

import numpy as np
import paddle
import pytest

from ppattn.attention import AttentionSpec, Context, LayerState, StageLinks, build_attention
from ppattn.attention.less import key_tokens
from ppattn.attention.nystromformer import NystromParts

SPECS = {
    "class token on 5x7": AttentionSpec(dim=12, num_heads=3, grid=(5, 7), num_prefix=1),
    "reduction 4 on 9x4": AttentionSpec(dim=10, num_heads=2, grid=(9, 4), sr_ratio=4, stage=1, block=2),
}


def split(x, h):
    return x.reshape(*x.shape[:2], h, -1).transpose(0, 2, 1, 3)


def merge(x):
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def linear(p, name, x):
    return x @ p[f"{name}.weight"] + p[f"{name}.bias"]


def softmax(scores):
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def convolution(weight, v, spec):
    """One kernel per head [h, 1, k, k] over the grid tokens of v [B, h, N, d]; zeros for the prefix."""
    (height, width), prefix, k = spec.grid, spec.num_prefix, weight.shape[-1]
    grid = v[:, :, prefix:].reshape(*v.shape[:2], height, width, -1)
    padded = np.pad(grid, ((0, 0), (0, 0), (k // 2, k // 2), (k // 2, k // 2), (0, 0)))
    out = np.zeros_like(grid)
    for i in range(k):
        for j in range(k):
            out += weight[None, :, :1, i, j, None, None] * padded[:, :, i : i + height, j : j + width]
    return np.concatenate([np.zeros_like(v[:, :, :prefix]), out.reshape(v[:, :, prefix:].shape)], axis=2)


def performer(p, x, spec, kept):
    """`kept` holds the largest exponents, which are constants to the gradient."""
    q, k, v = (split(t, spec.num_heads) for t in np.split(linear(p, "qkv", x), 3, -1))
    features = []
    for name, t, axes in (("q", q, -1), ("k", k, (-2, -1))):
        t = t / t.shape[-1] ** 0.25
        exponent = np.einsum("bhnd,rd->bhnr", t, p["projection"]) - (t**2).sum(-1, keepdims=True) / 2
        features.append(np.exp(exponent - kept.setdefault(name, exponent.max(axes, keepdims=True))) + 1e-6)
    weights = np.einsum("bhnr,bhmr->bhnm", *features)
    return merge(weights / weights.sum(-1, keepdims=True) @ v)


def linformer(p, x, spec, kept):
    q, k, v = (split(t, spec.num_heads) for t in np.split(linear(p, "qkv", x), 3, -1))
    k = np.einsum("jn,bhnd->bhjd", p["key_tokens"], k)
    v = np.einsum("jn,bhnd->bhjd", p["value_tokens"], v)
    return merge(softmax(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])) @ v)


def nystromformer(p, x, spec, kept):
    """Nine landmarks on the grid."""
    q, k, v = (split(t, spec.num_heads) for t in np.split(linear(p, "qkv", x), 3, -1))

    def landmarks(t):
        grid = t[:, :, spec.num_prefix :].reshape(*t.shape[:2], *spec.grid, -1)
        (rows, columns) = (
            [slice(math.floor(i * side / 3), math.ceil((i + 1) * side / 3)) for i in range(3)] for side in spec.grid
        )
        means = [grid[:, :, row, column].mean((2, 3)) for row in rows for column in columns]
        return np.concatenate([t[:, :, : spec.num_prefix], np.stack(means, 2)], 2)

    def kernel(a, b):
        return softmax(a @ b.swapaxes(-1, -2) / math.sqrt(a.shape[-1]))

    a = kernel(landmarks(q), landmarks(k))
    inverse = np.empty_like(a)
    for place in np.ndindex(a.shape[:2]):
        one, eye = a[place], np.eye(a.shape[-1])
        z = one.T / (np.linalg.norm(one, 1) * np.linalg.norm(one, np.inf))
        for _ in range(6):
            z = z @ (13 * eye - one @ z @ (15 * eye - one @ z @ (7 * eye - one @ z))) / 4
        inverse[place] = z
    y = kernel(q, landmarks(k)) @ inverse @ kernel(landmarks(q), k) @ v
    return merge(y + convolution(p["conv.weight"], v, spec))


def gaussian(p, x, spec, kept):
    q, v = (split(t, spec.num_heads) for t in np.split(linear(p, "qv", x), 2, -1))
    distance = ((q[:, :, :, None] - q[:, :, None]) ** 2).sum(-1)
    y = np.exp(-distance / (2 * math.sqrt(q.shape[-1]))) @ v
    return merge(y + convolution(p["conv.weight"], v, spec))


SLOPE = 0.01 if paddle.__version__ >= "3.2" else float(np.float32(0.01))  # Paddle 3.1 rounds it to float32
PHI = {
    "identity": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "leakyrelu": lambda x: np.where(x > 0, x, SLOPE * x),
    "exp": lambda x: np.exp(0.2 * x),
}


def kernel_attention(phi, p, x, spec, kept):
    q, k, v = (split(t, spec.num_heads) for t in np.split(linear(p, "qkv", x), 3, -1))
    weights = phi(q) @ phi(k).swapaxes(-1, -2) / q.shape[2]
    return merge(weights @ v / (weights.sum(-1, keepdims=True) + 1e-6))


def gelu(x):
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def inline(phi, p, x, spec, kept):
    """Weights by subtraction, and a 3 x 3 convolution of the values whose taps come from the mean token."""
    heads, prefix, (height, width) = spec.num_heads, spec.num_prefix, spec.grid
    q, k, v = (split(t, heads) for t in np.split(linear(p, "qkv", x), 3, -1))
    scores = phi(q) @ phi(k).swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    y = (scores - scores.mean(-1, keepdims=True) + 1) / q.shape[2] @ v
    token = x.mean(1).reshape(len(x), heads, -1)
    hidden = gelu(np.einsum("bhd,hde->bhe", token, p["residual.hidden_weight"]) + p["residual.hidden_bias"][:, 0])
    taps = np.einsum("bhd,hde->bhe", hidden, p["residual.taps_weight"]) + p["residual.taps_bias"][:, 0]
    taps = taps.reshape(*token.shape, 3, 3)
    grid = v[:, :, prefix:].reshape(*v.shape[:2], height, width, -1)
    padded, local = np.pad(grid, ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0))), np.zeros_like(grid)
    for i, j in np.ndindex(3, 3):
        local += taps[:, :, None, None, :, i, j] * padded[:, :, i : i + height, j : j + width]
    y[:, :, prefix:] += local.reshape(v[:, :, prefix:].shape)
    return merge(y)


@pytest.mark.parametrize("spec", SPECS.values(), ids=lambda s: f"{s.grid[0]}x{s.grid[1]}")
@pytest.mark.parametrize(
    ("name", "formula", "options"),
    [
        ("performer", performer, {"num_features": 7}),
        ("linformer", linformer, {"proj_tokens": 5}),
        ("nystromformer", nystromformer, {"num_landmarks": 9}),
        ("gaussian", gaussian, {}),
        ("linear", partial(kernel_attention, lambda x: np.where(x > 0, x + 1, np.exp(x))), {}),
        ("linear", partial(kernel_attention, np.exp), {"kernel": "exp"}),
        *(("inline", partial(inline, phi), {"kernel": kernel}) for kernel, phi in PHI.items()),
    ],
    ids=lambda value: (
        "".join(map(str, value.values())) if isinstance(value, dict) else getattr(value, "__name__", value)
    ),
)
def test_value_and_gradients_are_the_formulas(name, formula, options, spec, float64):
    attn = build_attention(name, spec, options)
    for p in attn.parameters():
        p.set_value(p + 0.3 * paddle.randn(p.shape))
    x = paddle.randn([2, spec.tokens, spec.dim])
    x.stop_gradient = False
    y, _ = attn(x, spec.grid)
    rng = np.random.default_rng(0)
    probe = rng.standard_normal(y.shape)
    (y * paddle.to_tensor(probe)).sum().backward()
    arrays, kept = {name: t.numpy() for name, t in attn.state_dict().items()} | {"x": x.numpy()}, {}

    def reference(arrays):
        return linear(arrays, "proj", formula(arrays, arrays["x"], spec, kept))

    assert np.abs(y.numpy() - reference(arrays)).max() < 1e-11
    for key, tensor in [*attn.named_parameters(), ("x", x)]:
        step = rng.standard_normal(tensor.shape)
        ends = [(reference(arrays | {key: arrays[key] + h * step}) * probe).sum() for h in (1e-5, -1e-5)]
        expected = (ends[0] - ends[1]) / 2e-5
        assert abs((tensor.grad.numpy() * step).sum() - expected) < 1e-6 * max(1.0, abs(expected)), key


@pytest.mark.parametrize("spec", SPECS.values(), ids=lambda s: f"{s.grid[0]}x{s.grid[1]}")
def test_soft_with_pooled_landmarks_is_its_formula(spec, float64):
    attn = build_attention("soft", spec, {"landmarks": "pool", "num_landmarks": 9, "newton_iters": 7})
    for parameter in attn.parameters():
        parameter.set_value(parameter + 0.3 * paddle.randn(parameter.shape))
    x = paddle.randn([2, spec.tokens, spec.dim])
    p = {name: t.numpy() for name, t in attn.state_dict().items()}
    q, v = (split(t, spec.num_heads) for t in np.split(linear(p, "qv", x.numpy()), 2, -1))
    q = q / q.shape[-1] ** 0.25
    grid = q[:, :, spec.num_prefix :].reshape(*q.shape[:2], *spec.grid, -1)
    rows, columns = (
        [slice(math.floor(i * side / 3), math.ceil((i + 1) * side / 3)) for i in range(3)] for side in spec.grid
    )
    pooled = np.stack([grid[:, :, row, column].mean((2, 3)) for row in rows for column in columns], 2)
    near = np.concatenate([q[:, :, : spec.num_prefix], pooled], 2)
    near = (near - near.mean(-1, keepdims=True)) / np.sqrt(near.var(-1, keepdims=True) + 1e-5)
    near = gelu(near * p["landmark_norm.weight"] + p["landmark_norm.bias"])

    def kernel(a, b):
        return np.exp(-((a[:, :, :, None] - b[:, :, None]) ** 2).sum(-1) / 2)

    k1, k2 = kernel(q, near), kernel(near, near)
    regular = k2 + 0.01 * np.eye(k2.shape[-1])
    inverse = 1.8 / k2.sum(-1).max(-1)[..., None, None] ** 2 * regular
    for _ in range(7):
        inverse = 2 * inverse - inverse @ regular @ inverse
    y = k1 @ inverse @ k1.swapaxes(-1, -2) @ v + convolution(p["conv.weight"], v, spec)
    error = np.abs(attn(x, spec.grid)[0].numpy() - linear(p, "proj", merge(y))).max()
    assert error < 1e-9  # rounding, times the condition of the kernel


LESS = {
    "class token": AttentionSpec(dim=12, num_heads=3, grid=(5, 7), num_prefix=1, links=StageLinks(1)),
    "reduced keys": AttentionSpec(dim=10, num_heads=2, grid=(9, 4), sr_ratio=4, stage=1, links=StageLinks(2)),
    "shifted windows": AttentionSpec(dim=12, num_heads=3, grid=(3, 3), links=StageLinks(1, shifted=True)),
}


@pytest.mark.parametrize("spec", LESS.values(), ids=LESS)
def test_two_layers_of_less_attention_and_their_loss_are_the_formulas(spec, float64):
    """A_l = Psi(Theta(A_{l-1})^T)^T, Z = softmax(A_l) V, and eq. 8-9 as the docstring bounds them."""
    layers = [build_attention("less", spec, {"dp_weight": 0.3}) for _ in range(2)]
    n, m, windows = spec.tokens, key_tokens(spec), 2
    mask = np.where(np.random.default_rng(3).random((windows, n, n)) < 0.3, -100.0, 0.0) * (1 - np.eye(n))
    mask = mask if spec.links.shifted else None
    scores = paddle.randn([4, spec.num_heads, n, m])
    state = LayerState(shifted=scores) if spec.links.shifted else LayerState(scores)
    expected, loss = scores.numpy(), 0.0
    for attn in layers:
        attn.train()
        for parameter in attn.parameters():
            parameter.set_value(parameter + 0.2 * paddle.randn(parameter.shape))
        p = {name: t.numpy() for name, t in attn.state_dict().items()}
        x = paddle.randn([4, n, spec.dim])
        y, state = attn(x, Context(spec.grid, mask=None if mask is None else paddle.to_tensor(mask), state=state))
        each = np.zeros((4, 1, n, m)) if mask is None else np.tile(mask, (2, 1, 1))[:, None]  # of windows 0, 1, 0, 1
        mixed = np.where(each == 0, expected, 0) @ p["theta_weight"] + p["theta_bias"]
        expected = (mixed.swapaxes(-1, -2) @ p["psi_weight"] + p["psi_bias"]).swapaxes(-1, -2)
        weights = softmax(expected + each)
        v = split(linear(p, "v", attn.keys(x, spec.grid).numpy()), spec.num_heads)
        assert np.abs(y.numpy() - linear(p, "proj", merge(weights @ v))).max() < 1e-11
        own = np.take_along_axis(weights, attn.own.numpy()[None, None, :, None], -1)
        others = np.where(np.arange(m) == attn.own.numpy()[:, None], -np.inf, weights).max(-1, keepdims=True)
        loss += 0.3 * np.maximum(others - own, 0).mean()
        loss += 0.3 * np.abs(weights - weights.swapaxes(-1, -2)).mean() if n == m else 0.0
    assert state.loss.item() == pytest.approx(loss, rel=1e-9)


def test_less_attention_takes_over_the_last_map_of_the_stage_before(float64):
    """A = Q K^T / sqrt(d) + LayerScale(Conv1x1(DWConv(A_before))), every 2 x 2 queries and keys to one."""
    before = AttentionSpec(dim=6, num_heads=2, grid=(4, 6))
    spec = AttentionSpec(dim=12, num_heads=3, grid=(2, 3), stage=1, links=StageLinks(previous=before))
    attn = build_attention("less", spec, {})
    for parameter in attn.parameters():
        parameter.set_value(parameter + 0.3 * paddle.randn(parameter.shape))
    p = {name: t.numpy() for name, t in attn.state_dict().items()}
    x, old = paddle.randn([2, 6, 12]), paddle.randn([2, 2, 24, 24])
    y, state = attn(x, Context((2, 3), state=LayerState(old)))
    parts = old.numpy().reshape(2, 2, 2, 2, 3, 2, 2, 2, 3, 2)  # of the queries: row, its half, column, its half
    filters = p["inherit.query_weight"], p["inherit.key_weight"]
    small = np.einsum("bhiajcxyzw,hac,hyw->bhijxz", parts, *filters).reshape(2, 2, 6, 6)
    heads = np.einsum("bhnm,gh->bgnm", small, p["inherit.heads.weight"][:, :, 0, 0])
    heads = p["inherit.layer_scale"] * (heads + p["inherit.heads.bias"][:, None, None])
    q, k, v = (split(t, 3) for t in np.split(linear(p, "qkv", x.numpy()), 3, -1))
    scores = q @ k.swapaxes(-1, -2) / 2 + heads
    assert np.abs(state.plain.numpy() - scores).max() < 1e-11
    assert np.abs(y.numpy() - linear(p, "proj", merge(softmax(scores) @ v))).max() < 1e-11


def with_softmax(name: str, spec, options: dict):
    """A mechanism, and softmax attention with the same projections."""
    attn, softmax = build_attention(name, spec, options), build_attention("softmax", spec)
    rng = np.random.default_rng(0)
    for layer in ("qkv", "proj"):
        weight = paddle.to_tensor(0.25 * rng.standard_normal(getattr(attn, layer).weight.shape))
        for one in (attn, softmax):
            getattr(one, layer).weight.set_value(weight)
    return attn, softmax


def test_performer_converges_to_softmax_attention(float64):
    """Sixteen times the features leave less than a third of the error of the weights (in theory a quarter)."""
    spec, x, errors = AttentionSpec(dim=16, num_heads=2, grid=(4, 6)), 0.35 * paddle.randn([2, 24, 16]), []
    for count in (16, 256, 4096):
        attn, softmax = with_softmax("performer", spec, {"num_features": count})
        difference = attn.attention_map(x, (4, 6)) - softmax.attention_map(x, (4, 6))
        errors.append(24 * difference.abs().mean().item())  # as a part of the mean weight
    assert errors[2] < errors[1] / 3 < errors[0] / 9 and errors[2] < 0.015


def test_performers_projection_is_orthogonal_fixed_and_kept():
    spec = AttentionSpec(dim=32, num_heads=2, grid=(2, 2))
    paddle.seed(1)
    w = build_attention("performer", spec, {"num_features": 3000}).state_dict()["projection"].numpy()
    paddle.seed(2)
    assert np.array_equal(build_attention("performer", spec, {"num_features": 3000}).projection.numpy(), w)
    next_layer = AttentionSpec(dim=32, num_heads=2, grid=(2, 2), block=1)
    assert (
        np.abs(build_attention("performer", next_layer, {"num_features": 3000}).projection.numpy() - w).max(1).min()
        > 1e-3
    )
    gram = w[32:48] @ w[32:48].T
    assert np.abs(gram - np.diag(np.diag(gram))).max() < 1e-4
    assert np.abs(w.mean(0)).max() < 0.1 and np.abs(w.T @ w / 3000 - np.eye(16)).max() < 0.15  # as of normal rows
    assert build_attention("performer", spec).projection.shape == [int(16 * math.log(16)), 16]


def test_linformer_with_identity_projections_is_softmax_attention(float64):
    spec = AttentionSpec(dim=12, num_heads=3, grid=(5, 7), num_prefix=1)
    attn, softmax = with_softmax("linformer", spec, {"proj_tokens": 100})
    attn.key_tokens.set_value(paddle.eye(36))
    attn.value_tokens.set_value(paddle.eye(36))
    x = paddle.randn([2, 36, 12])
    assert np.abs((attn(x, (5, 7))[0] - softmax(x, (5, 7))[0]).numpy()).max() < 1e-12


def test_nystromformer_with_every_token_a_landmark_is_softmax_attention(float64):
    spec = AttentionSpec(dim=12, num_heads=3, grid=(5, 7), num_prefix=1)
    attn, softmax = with_softmax("nystromformer", spec, {"pinv_iters": 40, "kernel_size": 0})
    x = paddle.randn([2, 36, 12])
    assert np.abs((attn(x, (5, 7))[0] - softmax(x, (5, 7))[0]).numpy()).max() < 1e-8  # rounding, times the condition


def test_nystromformer_has_the_same_landmarks_on_any_map():
    attn = build_attention("nystromformer", AttentionSpec(dim=8, num_heads=2, grid=(5, 9), num_prefix=1))
    for hw in ((5, 9), (14, 3), (1, 20)):
        constant = paddle.ones([3, 1 + hw[0] * hw[1], 24])
        for near in attn.landmarks(NystromParts(constant[:, :, :8], constant[:, :, 8:]), hw)[:2]:
            assert np.allclose(near.numpy(), np.ones((3, 1 + 5 * 7, 8)))
