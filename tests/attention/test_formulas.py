"""Formulas in numpy float64: attentions without official code; class tokens, odd grids and options of the others."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from scipy.special import erf, expit
from scipy.special import softmax as weights_of

import ppattn
from ppattn.attention import AttentionSpec, Context, LayerState, StageLinks, build_attention
from ppattn.attention.base import PackedParts
from ppattn.attention.less import key_tokens, own_key
from ppattn.attention.mhla import mixing_start, piece_side
from ppattn.errors import UserError


def heads(x, h):
    return x.reshape(*x.shape[:2], h, -1).transpose(0, 2, 1, 3)


def merge(x):
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def linear_layer(p, name, x):
    return x @ p[f"{name}.weight"] + p.get(f"{name}.bias", 0.0)


def elu1(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def gelu(x):
    return x * (1 + erf(x / math.sqrt(2))) / 2


def layer_norm(p, name, x):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]


def convolved(v, taps, spec, bias=0.0):
    """The grid tokens of v [B, N, C] under taps [B or 1, C, k, k]; zero for the prefix."""
    (height, width), prefix, k, y = spec.grid, spec.num_prefix, taps.shape[-1], 0.0
    grid = v[:, prefix:].reshape(len(v), height, width, -1)
    grid = np.pad(grid, ((0, 0), (k // 2, k // 2), (k // 2, k // 2), (0, 0)))
    for i, j in np.ndindex(k, k):
        y = y + taps[:, None, None, :, i, j] * grid[:, i : i + height, j : j + width]
    return np.concatenate([np.zeros_like(v[:, :prefix]), (y + bias).reshape(len(v), height * width, -1)], 1)


def depthwise(p, name, v, spec):
    """A kernel per channel, per head (`conv`) or for all heads (`dwc`); zero without the layer."""
    if f"{name}.weight" not in p:
        return np.zeros_like(v)
    taps, bias = p[f"{name}.weight"][:, 0], p.get(f"{name}.bias", np.zeros(len(p[f"{name}.weight"])))
    times = v.shape[2] // len(taps)
    taps = np.tile(taps, (times, 1, 1)) if name == "dwc" else np.repeat(taps, times, 0)
    return convolved(v, taps[None], spec, np.tile(bias, times))


def predicted(p, x, v, spec):
    """A 3 x 3 convolution of the values whose taps come from the mean token."""
    token = x.mean(1).reshape(len(x), spec.num_heads, -1)
    hidden = gelu(np.einsum("bhd,hde->bhe", token, p["residual.hidden_weight"]) + p["residual.hidden_bias"][:, 0])
    taps = np.einsum("bhd,hde->bhe", hidden, p["residual.taps_weight"]) + p["residual.taps_bias"][:, 0]
    return convolved(merge(v), taps.reshape(len(x), spec.dim, 3, 3), spec)


def pooled(t, spec, count=3):
    """Means of the grid tokens of t [B, h, N, d] over count x count cells."""
    grid = t[:, :, spec.num_prefix :].transpose(0, 1, 3, 2).reshape(len(t), -1, *spec.grid)
    means = F.adaptive_avg_pool2d(paddle.to_tensor(grid), count).numpy()
    return means.reshape(*t.shape[:2], t.shape[3], -1).transpose(0, 1, 3, 2)


def interpolation(size, count):
    place = np.clip((np.arange(count) + 0.5) * size / count - 0.5, 0, size - 1)
    return np.maximum(0, 1 - np.abs(place[:, None] - np.arange(size)))


def strided(p, name, t, spec, ratio):
    """Grid tokens of t [..., N, C] under a ratio x ratio convolution without overlap; what is left over is cut off."""
    (height, width), lead = (side // ratio for side in spec.grid), t.shape[:-2]
    grid = t[..., spec.num_prefix :, :].reshape(*lead, *spec.grid, -1)[..., : height * ratio, : width * ratio, :]
    grid = grid.reshape(*lead, height, ratio, width, ratio, -1)
    return np.einsum("...iajbc,ecab->...ije", grid, p[f"{name}.weight"]).reshape(*lead, height * width, -1)


def focused(p, x, spec, **_):
    q, k, v = np.split(linear_layer(p, "qkv", x), 3, -1)
    features = []
    for t in (q, k + p["positional_encoding"]):
        t = (np.maximum(t, 0) + 1e-6) / np.logaddexp(0, p["scale"])
        size, power = np.linalg.norm(t, 2, -1, True), t**3
        features.append(heads(power * size / np.linalg.norm(power, 2, -1, True), spec.num_heads))
    return normalised(*features, heads(v, spec.num_heads)) + depthwise(p, "dwc", v, spec)


def agent(p, x, spec, agent_num):
    """Biases [h, n, H, W] of the agents on the grid, and of the grid on the agents."""
    q, k, v = (heads(t, spec.num_heads) for t in np.split(linear_layer(p, "qkv", x), 3, -1))
    agents, (rows, columns) = pooled(q, spec, math.isqrt(agent_num)), (interpolation(7, side) for side in spec.grid)
    on_keys = rows @ p["an_bias"] @ columns.T + p["ah_bias"][0] + p["aw_bias"][0]
    on_agents = rows @ p["na_bias"] @ columns.T + (p["ha_bias"] + p["wa_bias"])[0].transpose(0, 3, 1, 2)
    on_keys, on_agents = (t.reshape(*t.shape[:2], -1) for t in (on_keys, on_agents))
    if spec.num_prefix:
        on_keys = np.concatenate([p["ac_bias"][0], on_keys], 2)
        on_agents = np.concatenate([p["ca_bias"][0].swapaxes(1, 2), on_agents], 2)
    scale = q.shape[-1] ** -0.5
    u = weights_of(scale * agents @ k.swapaxes(-1, -2) + on_keys, -1) @ v
    y = weights_of(scale * q @ agents.swapaxes(-1, -2) + on_agents.swapaxes(1, 2), -1) @ u
    return merge(y) + depthwise(p, "dwc", merge(v), spec)


def performer(p, x, spec, kept, num_features):
    """`kept` holds the largest exponents, which are constants to the gradient."""
    q, k, v = (heads(t, spec.num_heads) for t in np.split(linear_layer(p, "qkv", x), 3, -1))
    features = []
    for name, t, axes in (("q", q, -1), ("k", k, (-2, -1))):
        t = t / t.shape[-1] ** 0.25
        exponent = np.einsum("bhnd,rd->bhnr", t, p["projection"]) - (t**2).sum(-1, keepdims=True) / 2
        features.append(np.exp(exponent - kept.setdefault(name, exponent.max(axes, keepdims=True))) + 1e-6)
    weights = np.einsum("bhnr,bhmr->bhnm", *features)
    return merge(weights / weights.sum(-1, keepdims=True) @ v)


def linformer(p, x, spec, proj_tokens):
    q, k, v = (heads(t, spec.num_heads) for t in np.split(linear_layer(p, "qkv", x), 3, -1))
    k, v = np.einsum("jn,bhnd->bhjd", p["key_tokens"], k), np.einsum("jn,bhnd->bhjd", p["value_tokens"], v)
    return merge(weights_of(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]), -1) @ v)


def nystromformer(p, x, spec, num_landmarks):
    q, k, v = (heads(t, spec.num_heads) for t in np.split(linear_layer(p, "qkv", x), 3, -1))

    def landmarks(t):
        return np.concatenate([t[:, :, : spec.num_prefix], pooled(t, spec, math.isqrt(num_landmarks))], 2)

    def kernel(a, b):
        return weights_of(a @ b.swapaxes(-1, -2) / math.sqrt(a.shape[-1]), -1)

    a = kernel(landmarks(q), landmarks(k))
    z = a.swapaxes(-1, -2) / (np.linalg.norm(a, 1, (-2, -1), True) * np.linalg.norm(a, np.inf, (-2, -1), True))
    eye = np.eye(a.shape[-1])
    for _ in range(6):
        z = z @ (13 * eye - a @ z @ (15 * eye - a @ z @ (7 * eye - a @ z))) / 4
    return merge(kernel(q, landmarks(k)) @ z @ kernel(landmarks(q), k) @ v) + depthwise(p, "conv", merge(v), spec)


def gaussian(p, x, spec):
    q, v = (heads(t, spec.num_heads) for t in np.split(linear_layer(p, "qv", x), 2, -1))
    y = merge(np.exp(-((q[:, :, :, None] - q[:, :, None]) ** 2).sum(-1) / (2 * math.sqrt(q.shape[-1]))) @ v)
    return y + depthwise(p, "conv", merge(v), spec)


def soft(p, x, spec, num_landmarks, newton_iters, landmarks="conv"):
    q, v = (heads(t, spec.num_heads) for t in np.split(linear_layer(p, "qv", x), 2, -1))
    q = q / q.shape[-1] ** 0.25
    if landmarks == "pool":
        near = pooled(q, spec, math.isqrt(num_landmarks))
    else:
        ratio = spec.sr_ratio if spec.sr_ratio > 1 else math.ceil(math.sqrt(math.prod(spec.grid) / num_landmarks))
        near = strided(p, "landmark", q, spec, ratio)
    near = gelu(layer_norm(p, "landmark_norm", np.concatenate([q[:, :, : spec.num_prefix], near], 2)))

    def kernel(a, b):
        return np.exp(-((a[:, :, :, None] - b[:, :, None]) ** 2).sum(-1) / 2)

    k1, k2 = kernel(q, near), kernel(near, near)
    regular = k2 + 0.01 * np.eye(k2.shape[-1])
    inverse = 1.8 / k2.sum(-1).max(-1)[..., None, None] ** 2 * regular
    for _ in range(newton_iters):
        inverse = 2 * inverse - inverse @ regular @ inverse
    return merge(k1 @ inverse @ k1.swapaxes(-1, -2) @ v) + depthwise(p, "conv", merge(v), spec)


SLOPE = 0.01 if paddle.__version__ >= "3.2" else float(np.float32(0.01))  # Paddle 3.1 rounds it to float32
PHI = {
    "identity": lambda x: x, "relu": lambda x: np.maximum(x, 0), "leakyrelu": lambda x: np.where(x > 0, x, SLOPE * x),
    "exp": lambda x: np.exp(0.2 * x),
}  # fmt: skip


def linear(p, x, spec, kernel="elu"):
    phi = {"elu": elu1, "exp": np.exp}[kernel]
    q, k, v = (heads(t, spec.num_heads) for t in np.split(linear_layer(p, "qkv", x), 3, -1))
    return normalised(phi(q), phi(k), v)


def softmax(p, x, spec, residual=False):
    source = x
    if spec.sr_ratio > 1:
        grid = strided(p, "sr", x, spec, spec.sr_ratio) + p["sr.bias"]
        source = np.concatenate([x[:, : spec.num_prefix], layer_norm(p, "norm", grid)], 1)
    _, k, v = np.split(linear_layer(p, "qkv", source), 3, -1)
    q, k, v = (heads(t, spec.num_heads) for t in (linear_layer(p, "qkv", x)[..., : spec.dim], k, v))
    y = merge(weights_of(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]), -1) @ v)
    return y + predicted(p, x, v, spec) if residual else y


def inline(p, x, spec, kernel):
    """Weights by subtraction."""
    phi = PHI[kernel]
    q, k, v = (heads(t, spec.num_heads) for t in np.split(linear_layer(p, "qkv", x), 3, -1))
    scores = phi(q) @ phi(k).swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    return merge((scores - scores.mean(-1, keepdims=True) + 1) / q.shape[2] @ v) + predicted(p, x, v, spec)


def polaformer(p, x, spec, polarity=True, gates=True):
    """Half of the values by the products of equal signs, half by those of opposite ones."""
    q, k, v, *gate = np.split(linear_layer(p, "qkvg", x), 3 + gates, -1)
    factor, power = np.logaddexp(0, p["scale"]), 1 + 4 * expit(p["power"])
    q, k = (heads(t / factor, spec.num_heads) for t in (q, k + p["positional_encoding"]))
    q, k = ([np.maximum(sign * t, 0) ** power for sign in (1, -1)] for t in (q, k))
    streams = []
    for i, half in enumerate(np.split(heads(v, spec.num_heads), 2, -1)):
        weights = q[0] @ k[i * polarity].swapaxes(-1, -2) + polarity * q[1] @ k[1 - i].swapaxes(-1, -2)
        weights = weights / spec.tokens
        streams.append(weights / (weights.sum(-1, keepdims=True) + 1e-6) @ half)
    y = merge(np.concatenate(streams, -1)) + depthwise(p, "dwc", v, spec)
    return y * gate[0] if gates else y


def turned(x, spec, channels, steps):
    """x [B, h, N, C'] whose pairs, as complex numbers, are turned by row and column; a table has so many channels."""
    m, (height, width) = channels // 4, spec.grid
    frequency, angle = 10000.0 ** (-np.arange(m) / max(steps, 1)), np.zeros((spec.tokens, channels // 2))
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
    q, k, v, o = np.split(linear_layer(p, "qkvo", x), 4, -1)
    q, k, vh = (heads(t, spec.num_heads) for t in (elu1(q), elu1(k), v))
    s, n = q.shape[-1] ** -0.5, spec.tokens
    z = s * (q @ k.mean(2, keepdims=True).swapaxes(-1, -2))
    scores = per_head(q, spec, rope) @ per_head(k, spec, rope).swapaxes(-1, -2)
    weights = (1 + 1 / (z + 1e-6)) * s / n * scores - z / n
    return (merge(weights @ vh) + depthwise(p, "lepe", v, spec)) * o


def normalised(q, k, v, turn=lambda t: t):
    return merge(turn(q) @ turn(k).swapaxes(-1, -2) / k.shape[2] @ v / (q @ k.mean(2)[..., None] + 1e-6))


def rala(p, x, spec, rope=True):
    q, k, v, o = np.split(linear_layer(p, "qkvo", x), 4, -1)
    q, k, vh = (heads(t, spec.num_heads) for t in (elu1(q), elu1(k), v))
    scores = k @ q.mean(2)[..., None] * q.shape[-1] ** -0.5
    alpha = np.exp(scores - scores.max(2, keepdims=True))
    k = k * spec.tokens * alpha / alpha.sum(2, keepdims=True)
    return (normalised(q, k, vh, lambda t: per_head(t, spec, rope)) + depthwise(p, "lepe", v, spec)) * o


def nalaformer(p, x, spec, rope=True):
    q, k, v, g = np.split(linear_layer(p, "qkvg", x), 4, -1)
    q, k, vh = (heads(t, spec.num_heads) for t in (q, k, v))
    norm = np.sqrt((q**2).sum(-1, keepdims=True))
    qs = [(np.maximum(sign * q, 0) / norm) ** (3 * (0.5 + np.tanh(norm))) for sign in (1, -1)]
    ks = [np.maximum(sign * k, 0) ** 3 for sign in (1, -1)]

    def turn(t):
        return np.concatenate([per_head(half, spec, rope) for half in np.split(t, 2, -1)], -1)

    y = normalised(np.concatenate(qs, -1), np.concatenate(ks, -1), vh, turn)
    return layer_norm(p, "norm", y + depthwise(p, "lepe", v, spec)) * g * expit(g)


def mila(p, x, spec, rope=True):
    v, prefix = linear_layer(p, "in_proj", x), spec.num_prefix
    if "dwc.weight" in p:
        v = np.concatenate([v[:, :prefix], depthwise(p, "dwc", v, spec)[:, prefix:]], 1)
    v, gate = v * expit(v), linear_layer(p, "act_proj", x)
    q, k = (heads(elu1(t), spec.num_heads) for t in np.split(linear_layer(p, "qk", v), 2, -1))
    y = normalised(q, k, heads(v, spec.num_heads), lambda t: turned(t, spec, spec.dim, spec.dim // 4) if rope else t)
    return (y + depthwise(p, "lepe", v, spec)) * gate * expit(gate)


def mhla(p, x, spec, piece_size=None, eps=1e-6, mixing=None, **_):
    """Normalised by the keys of the query's place in every block; all see the prefix with 1 / M, and it all alike."""
    q, k, v = np.split(linear_layer(p, "qkv", layer_norm(p, "norm", x)), 3, -1)
    if "q_norm.weight" in p:
        q, k = (
            t / np.sqrt((t**2).mean(-1, keepdims=True) + 2.0**-23) * p[f"{name}.weight"]
            for name, t in (("q_norm", q), ("k_norm", k))
        )
    q, k, vh = (heads(t, spec.num_heads) for t in (np.maximum(q, 0) + eps, np.maximum(k, 0) + eps, v))
    m = p["mixing"] if mixing is None else mixing(p["mixing"])
    (height, width), prefix, count, side = spec.grid, spec.num_prefix, len(m), piece_side(spec.grid, piece_size)
    row, column = np.divmod(np.arange(height * width), width)
    block, place = row // side * (width // side) + column // side, row % side * side + column % side
    scores, blocks = q @ k.swapaxes(-1, -2), np.arange(count)
    own, seen = scores[:, :, :prefix], scores[:, :, prefix:]
    sums = seen[..., prefix:] @ (block[:, None] == blocks)
    same = np.lexsort((place, block)).reshape(count, -1)[:, place].T  # the token at the place of a query, in each block
    below = eps + seen[..., :prefix].sum(-1) / count + (m[block] * sums[:, :, same, blocks]).sum(-1)
    share = np.concatenate([np.full((height * width, prefix), 1 / count), m[block][:, block]], 1)
    weights = np.concatenate([own / (eps + own.sum(-1, keepdims=True)), seen * share / below[..., None]], 2)
    return merge(weights @ vh) + depthwise(p, "lepe", v, spec)


def circulant(p, x, spec):
    """The grid by shifts; a prefix token by channel over all tokens."""
    (q, k, v), gate, prefix = np.split(x @ p["qkv.weight"], 3, -1), linear_layer(p, "gate", x), spec.num_prefix
    shifts = [*np.ndindex(*spec.grid)]

    def shifted(t, m):
        grid = t[:, prefix:].reshape(len(x), *spec.grid, spec.dim)
        return np.roll(grid, (-m[0], -m[1]), (1, 2)).reshape(len(x), -1, spec.dim)

    weights = weights_of(np.stack([(q[:, prefix:] * shifted(k, m)).sum(1) for m in shifts]) / math.sqrt(len(shifts)), 0)
    grid = sum(a[:, None] * shifted(v, m) for a, m in zip(weights, shifts, strict=True))
    own = [(weights_of(q[:, n : n + 1] * k, 1) * v).sum(1, keepdims=True) for n in range(prefix)]
    return np.concatenate([*own, grid], 1) * gate * expit(gate)


def t5(p, x, spec):
    q, k, v = np.split(linear_layer(p, "qkv", x), 3, -1)
    k = (k - k.mean(1, keepdims=True)) / np.sqrt(k.var(1, keepdims=True) + 1)
    q, k = (t + depthwise(p, f"{name}_conv2d", t, spec) for name, t in (("q", q), ("k", k)))
    q, k, v = (heads(t, spec.num_heads) for t in (q, k, v))
    z1, z2, e = k @ p["w1"], k @ p["w2"], -v * q.shape[-1] ** -0.5 / spec.tokens
    gate, b, turned_k = expit(z1), e @ p["w3"].swapaxes(-1, -2), k.swapaxes(-1, -2)
    z = q @ (p["w1"] - turned_k @ (b * z2 * gate * (1 + z1 * (1 - gate))))
    w3 = p["w3"] - (z1 * gate * z2).swapaxes(-1, -2) @ e
    return merge(z * expit(z) * (q @ (p["w2"] - turned_k @ (b * z1 * gate))) @ w3)


CASES = [
    *((name, {"rope": rope}) for name in ("mala", "rala", "nalaformer", "mila") for rope in (True, False)),
    ("mhla", {}), ("mhla", {"qk_norm": True, "transform": "exp", "eps": 1e-3}),
    ("mhla", {"transform": "gaussian", "piece_size": 1}), ("performer", {"num_features": 7}),
    ("linformer", {"proj_tokens": 5}), ("nystromformer", {"num_landmarks": 9}), ("gaussian", {}), ("linear", {}),
    ("linear", {"kernel": "exp"}), *(("inline", {"kernel": kernel}) for kernel in PHI), ("softmax", {"residual": True}),
    ("softmax", {}), ("agent", {"agent_num": 4}), ("focused", {}), ("focused", {"kernel_size": 3}),
    ("soft", {"num_landmarks": 9, "newton_iters": 7}), ("circulant", {}), ("t5", {}),
    ("soft", {"landmarks": "pool", "num_landmarks": 9, "newton_iters": 7}),
    ("polaformer", {}), ("polaformer", {"polarity": False}), ("polaformer", {"gates": False}),
]  # fmt: skip
SPECS = {
    "class token on 5x7": AttentionSpec(dim=12, num_heads=3, grid=(5, 7), num_prefix=1),
    "two prefix tokens on 6x4": AttentionSpec(dim=8, num_heads=2, grid=(6, 4), num_prefix=2),
    "reduction 4 on 9x4": AttentionSpec(dim=16, num_heads=2, grid=(9, 4), sr_ratio=4, stage=1, block=2),
    "one head on 3x11": AttentionSpec(dim=8, num_heads=1, grid=(3, 11)),
}


@pytest.mark.parametrize(
    "spec", [pytest.param(s, id=key, marks=[pytest.mark.slow] * (s.num_prefix != 1)) for key, s in SPECS.items()]
)
@pytest.mark.parametrize(
    ("name", "options"), CASES, ids=lambda v: "-".join(map(str, v.items())) if isinstance(v, dict) else None
)
def test_value_and_gradients_are_the_formulas(name, options, spec, float64):
    if options.get("residual"):
        spec = replace(spec, sr_ratio=1)  # its local term needs the values of all tokens
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
    formula = partial(globals()[name], **options, **{"kept": {}} if name == "performer" else {})

    def reference(arrays):
        return linear_layer(arrays, "proj", formula(arrays, arrays["x"], spec))

    expected = reference(arrays)
    assert np.abs(y.numpy() - expected).max() < 1e-11 * max(1.0, np.abs(expected).max())
    if name == "soft":
        return  # its backward pass is the published rule, which the golden files have
    for key, tensor in [*attn.named_parameters(), ("x", x)]:
        step = rng.standard_normal(tensor.shape)
        ends = [(reference(arrays | {key: arrays[key] + h * step}) * probe).sum() for h in (1e-6, -1e-6)]
        slope = (ends[0] - ends[1]) / 2e-6
        found = 0.0 if tensor.grad is None else (tensor.grad.numpy() * step).sum()
        assert abs(found - slope) < 1e-6 * max(1.0, abs(slope)), key


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
        weights = weights_of(expected + each, -1)
        v = heads(linear_layer(p, "v", attn.keys(x, spec.grid).numpy()), spec.num_heads)
        assert np.abs(y.numpy() - linear_layer(p, "proj", merge(weights @ v))).max() < 1e-11
        own = np.take_along_axis(weights, own_key(spec).numpy()[None, None, :, None], -1)
        others = np.where(np.arange(m) == own_key(spec).numpy()[:, None], -np.inf, weights).max(-1, keepdims=True)
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
    old_maps = np.einsum("bhnm,gh->bgnm", small, p["inherit.heads.weight"][:, :, 0, 0])
    old_maps = p["inherit.layer_scale"] * (old_maps + p["inherit.heads.bias"][:, None, None])
    q, k, v = (heads(t, 3) for t in np.split(linear_layer(p, "qkv", x.numpy()), 3, -1))
    scores = q @ k.swapaxes(-1, -2) / 2 + old_maps
    assert np.abs(state.plain.numpy() - scores).max() < 1e-11
    assert np.abs(y.numpy() - linear_layer(p, "proj", merge(weights_of(scores, -1) @ v))).max() < 1e-11


def test_performers_projection_is_orthogonal_fixed_and_kept():
    spec = AttentionSpec(dim=32, num_heads=2, grid=(2, 2))
    paddle.seed(1)
    w = build_attention("performer", spec, {"num_features": 3000}).state_dict()["projection"].numpy()
    paddle.seed(2)
    assert np.array_equal(build_attention("performer", spec, {"num_features": 3000}).projection.numpy(), w)
    next_layer = AttentionSpec(dim=32, num_heads=2, grid=(2, 2), block=1)
    other = build_attention("performer", next_layer, {"num_features": 3000}).projection.numpy()
    assert np.abs(other - w).max(1).min() > 1e-3
    gram = w[32:48] @ w[32:48].T
    assert np.abs(gram - np.diag(np.diag(gram))).max() < 1e-4
    assert np.abs(w.mean(0)).max() < 0.1 and np.abs(w.T @ w / 3000 - np.eye(16)).max() < 0.15  # as of normal rows
    assert build_attention("performer", spec).projection.shape == [int(16 * math.log(16)), 16]


def test_nystromformer_has_the_same_landmarks_on_any_map():
    attn = build_attention("nystromformer", AttentionSpec(dim=8, num_heads=2, grid=(5, 9), num_prefix=1))
    for hw in ((5, 9), (14, 3), (1, 20)):
        constant = paddle.ones([3, 1 + hw[0] * hw[1], 24])
        for near in attn.landmarks(PackedParts(constant[:, :, :8], constant[:, :, 8:]), hw)[:2]:
            assert np.allclose(near.numpy(), np.ones((3, 1 + 5 * 7, 8)))


@pytest.mark.parametrize(
    ("grid", "piece_size", "side"),
    [((14, 14), None, 7), ((16, 16), None, 8), ((56, 56), None, 28), ((6, 9), None, 3), ((4, 4), None, 2),
     ((2, 2), None, 2), ((13, 13), None, 13), ((5, 7), None, 1), ((16, 16), 4, 4), ((6, 9), 3, 3),
     ((6, 4), None, 2)],  # six blocks, more than the rule allows: the fewest that there are
)  # fmt: skip
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
def test_the_first_matrix_of_a_transform(transform):
    """One block starts at one and is plain linear attention; the columns of more sum to one, but for the Gaussian."""
    start = mixing_start((3, 5), transform, 1.5, 3.0)
    assert (start >= 0).all() and (transform == "gaussian" or np.allclose(start.sum(0), 1.0, atol=1e-6))
    attn = build_attention("mhla", AttentionSpec(dim=8, num_heads=2, grid=(3, 3)), {"transform": transform})
    assert attn.mixing.numpy().tolist() == [[1.0]]
    attn.qkv.bias.set_value(paddle.ones_like(attn.qkv.bias))  # features far above eps
    x = paddle.randn([2, 9, 8])
    assert np.allclose(attn.attention_map(x, (3, 3)).sum(axis=-1).numpy(), 1.0, atol=1e-5)
    assert np.isfinite(attn(x, (3, 3))[0].numpy()).all()


def test_another_grid_resizes_the_matrix_along_rows_and_columns(float64):
    attn = build_attention("mhla", AttentionSpec(dim=8, num_heads=2, grid=(4, 6), num_prefix=1), {"piece_size": 2})
    attn.mixing.set_value(paddle.rand(attn.mixing.shape) + 0.5)
    seen = AttentionSpec(dim=8, num_heads=2, grid=(8, 6), num_prefix=1)
    x = paddle.randn([2, seen.tokens, 8])
    p = {key: t.numpy() for key, t in attn.state_dict().items()}

    def resized(m):
        resize = np.kron(interpolation(2, 4), interpolation(3, 3))
        return resize @ m @ resize.T

    expected = linear_layer(p, "proj", mhla(p, x.numpy(), seen, 2, mixing=resized))
    assert np.abs(attn(x, (8, 6))[0].numpy() - expected).max() < 1e-11
    assert attn.resized("mixing", np.random.default_rng(0).random((12, 12)), (64, 48)).shape == (6, 6)
    flat = build_attention("mhla", AttentionSpec(dim=8, num_heads=2, grid=(2, 8)), {"piece_size": 2})
    assert flat.resized("mixing", np.eye(4), None) is None


def test_what_cannot_be_built_or_drawn_is_one_sentence():
    with pytest.raises(UserError, match=r"needs a multiple of 4 channels per head, not 6"):
        build_attention("mala", AttentionSpec(dim=12, num_heads=2, grid=(3, 3)))
    attn = build_attention("vittt", AttentionSpec(dim=8, num_heads=2, grid=(3, 3)))
    with pytest.raises(UserError, match="not linear in its values"):
        attn.attention_map(paddle.randn([1, 9, 8]), (3, 3))


def test_soft_norm_with_one_landmark_does_not_vanish():
    layer = ppattn.attention_layer("soft_norm", 16, 2, (3, 3), num_landmarks=1, local_term=False)
    assert (layer(paddle.randn([2, 9, 16])).abs().max(-1) > 0).all()
