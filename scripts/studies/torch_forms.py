"""Plain forms of ppattn's attentions in PyTorch, operator for operator; form_table.py lists them for gpu_forms.py.

Tokens are [B, N, C], channels by head. A form takes a dictionary of tensors and their `Shape`. Inputs of the layers (q,
k, v and the dynamic kernel) have the type under test, trained parameters are float32, as under automatic mixed
precision.

Names of the treatments of half precision, here for k^T v / N of a linear attention:

    naive          all in the half type: k^T v is rounded to it, then divided by N
    lean           as naive, but k and v are multiplied by N^-1/2 first
    mixed          features, state, means and normaliser in float32; operands of the products over all tokens in the
                   half type, multiplied by N^-1/2 first, so that each sum is rounded to it once
    centred        as mixed, with v - mean(v) as the operand: what the mean adds does not pass through a rounded state
    balanced       PolaFormer: as centred, with every query and the keys of every head divided by their mean feature
    guarded        all in float32 (`full_precision`); guarded_tf32: its products in TF32
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

EPS, TINY, NEWTON_STEPS, RATE, ROTARY_BASE = 1e-6, 1e-12, 20, 1.0 / 3.0, 10000.0
HALF = (torch.bfloat16, torch.float16)
EXCLUDED = -1e4  # logit of keys that only fill up
AGENTS = 7  # per side


class Shape(NamedTuple):
    batch: int
    side: int  # of the grid
    heads: int
    dim: int

    @property
    def tokens(self) -> int:
        return self.side * self.side

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


Tensors = dict[str, Tensor]


class Precision(NamedTuple):
    """See the docstring of the module; `half` is the type of the inputs, None for float32 and float64."""

    kind: str = "guarded"
    half: torch.dtype | None = None

    @property
    def mixed(self) -> bool:
        return self.kind == "mixed" or self.centred

    @property
    def centred(self) -> bool:
        return self.kind in ("centred", "balanced")

    @property
    def scaled(self) -> bool:
        """Whether factors of N^-1/2 go in front of a sum over all tokens."""
        return self.mixed or self.kind == "lean"

    def wide(self, x: Tensor) -> Tensor:
        """Inputs and parameters, as features are computed from them."""
        if self.kind in ("naive", "lean"):
            return x.to(self.half)
        return x.float() if x.dtype in HALF else x

    def value(self, v: Tensor) -> Tensor:
        """Inputs that are an operand of a product over all tokens and nothing else."""
        return v if self.mixed else self.wide(v)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return (a.to(self.half) @ b.to(self.half)).float() if self.mixed else a @ b

    def sums(self, k: Tensor, v: Tensor) -> Tensor:
        """k^T v / N."""
        n = k.shape[-2]
        return self.product((k * n**-0.5).mT, v * n**-0.5) if self.scaled else k.mT @ v / n

    def mean(self, x: Tensor) -> Tensor:
        """Mean over the tokens, the second-last axis, which is kept."""
        return x.mean(-2, keepdim=True, dtype=torch.float32 if self.mixed else None)


def split_heads(x: Tensor, s: Shape) -> Tensor:
    """[B, N, C] -> [B, h, N, d]."""
    return x.reshape(x.shape[0], x.shape[1], s.heads, -1).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, s: Shape, bias: Tensor | None = None) -> Tensor:
    """The plain form: the map is stored, and its softmax runs in float32."""
    q, k, v = (split_heads(x, s) for x in (q, k, v))
    scores = (q * s.head_dim**-0.5) @ k.mT
    scores = scores if bias is None else scores + bias
    weights = (scores.float() if scores.dtype in HALF else scores).softmax(-1)
    return merge_heads(weights.to(v.dtype) @ v)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, s: Shape, bias: Tensor | None = None) -> Tensor:
    """The fused operator; with a bias [h, N, M] keys are filled up to a multiple of eight."""
    q, k, v = (split_heads(x, s) for x in (q, k, v))
    mask = None
    if bias is not None:
        fill = -k.shape[2] % 8
        k, v = F.pad(k, (0, 0, 0, fill)), F.pad(v, (0, 0, 0, fill))
        mask = F.pad(bias.to(q.dtype), (0, fill), value=EXCLUDED).expand(q.shape[0], -1, -1, -1)
    with backend(q, mask):
        return merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def backend(q: Tensor, mask: Tensor | None) -> contextlib.AbstractContextManager:
    """The kernel that Paddle takes: flash for half precision without mask, else the memory-efficient one."""
    if not q.is_cuda:
        return contextlib.nullcontext()
    flash = mask is None and q.dtype in HALF
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION if flash else SDPBackend.EFFICIENT_ATTENTION)


def softmax(t: Tensors, s: Shape, attend: Callable = softmax_attention) -> Tensor:
    return attend(t["q"], t["k"], t["v"], s, t.get("bias"))


def agent(t: Tensors, s: Shape, attend: Callable = softmax_attention) -> Tensor:
    agents = cell_means(t["q"], s)
    u = attend(agents, t["k"], t["v"], s, t["on_keys"])
    return attend(t["q"], agents, u, s, t["on_agents"])


def cell_means(x: Tensor, s: Shape) -> Tensor:
    """Means over 7 x 7 cells of the grid, by two products with constants."""
    cell, index = torch.arange(AGENTS, device=x.device)[:, None], torch.arange(s.side, device=x.device)
    first, end = cell * s.side // AGENTS, ((cell + 1) * s.side + AGENTS - 1) // AGENTS
    means = (((index >= first) & (index < end)) / (end - first)).to(x.dtype)
    x = means @ x.reshape(-1, s.side, s.side, s.dim)
    return (means @ x.reshape(-1, s.side, AGENTS * s.dim)).reshape(-1, AGENTS * AGENTS, s.dim)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Shape,
    p: Precision,
    polar: bool = False,
    table: tuple[Tensor, Tensor] | None = None,
    magnitude: float | None = None,
    epsilon: float | Tensor = EPS,
) -> Tensor:
    """`ppattn.ops.linear_attention`; epsilon may be [B, h, N, 1]."""
    below, mean = split_heads(q, s), split_heads(p.mean(k), s).mT
    if table is not None:
        q, k = rotate(q, *table), rotate(k, *table)
    q, k, v = (split_heads(x, s) for x in (q, k, v))
    centre = p.mean(v) if p.centred else None
    state = p.sums(k, v if centre is None else v - centre)
    if polar:
        return merge_heads(polar_streams(q, state, mean, p, centre, epsilon))
    y, z = p.product(q, state), below @ mean
    if centre is not None:
        y = y + (z if table is None else q @ p.mean(k).mT) * centre
    if magnitude is None:
        return merge_heads(y / (z + epsilon))
    z = magnitude * z
    return merge_heads((magnitude + magnitude / (z + epsilon)) * y - z @ p.mean(v))


def polar_streams(
    q: Tensor, state: Tensor, mean: Tensor, p: Precision, centre: Tensor | None, epsilon: float | Tensor
) -> Tensor:
    """[q+, q-] with the first half of the values, [q-, q+] with the second one."""
    d = state.shape[3]
    columns = [state[..., : d // 2], swap_halves(state[..., d // 2 :])]
    means = [mean, swap_halves(mean)]
    if p.mixed:
        y, z = p.product(q, torch.cat(columns, -1)), q @ torch.cat(means, -1)
    else:
        y, z = (q @ torch.cat(columns + means, -1)).split([d, 2], -1)
    streams = list(zip(y.chunk(2, -1), z.chunk(2, -1), strict=True))
    if centre is not None:
        streams = [(y + z * c, z) for (y, z), c in zip(streams, centre.chunk(2, -1), strict=True)]
    return torch.cat([y / (z + epsilon) for y, z in streams], -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    b, n, c = x.shape
    repeat = c // cos.shape[1]
    cos, sin = cos.tile(1, repeat), sin.tile(1, repeat)
    pairs = x.reshape(b, n, c // 2, 2)
    return x * cos + torch.cat([pairs[..., 1:], pairs[..., :1]], -1).reshape(b, n, c) * sin


def rotary_table(like: Tensor, s: Shape) -> tuple[Tensor, Tensor]:
    """cos and sin [N, d] for `rotate`."""
    options = {"dtype": torch.float64, "device": like.device}
    steps = s.head_dim // 4
    frequency = ROTARY_BASE ** -(torch.arange(steps, **options) / max(steps - 1, 1))
    angle = torch.arange(s.side, **options)[:, None] * frequency
    rows, columns = angle[:, None].expand(-1, s.side, -1), angle[None].expand(s.side, -1, -1)
    angles = torch.stack([rows, columns], 2)
    cos, sin = angles.cos(), angles.sin()
    tables = (torch.stack([cos, cos], -1), torch.stack([-sin, sin], -1))
    return tuple(table.reshape(-1, s.head_dim).to(like.dtype) for table in tables)


def swap_halves(state: Tensor) -> Tensor:
    half = state.shape[2] // 2
    return torch.cat([state[:, :, half:], state[:, :, :half]], 2)


def signed_power(x: Tensor, shift: Tensor | None, scale: Tensor, power: Tensor, s: Shape) -> Tensor:
    """`ppattn.ops.signed_power`."""
    z = (x if shift is None else x + shift) * scale
    value = torch.exp(power.reshape(1, 1, -1) * torch.log(z.abs().clamp(min=TINY)))
    positive = value * (z > 0).to(z.dtype)
    parts = [part.reshape(*x.shape[:2], s.heads, s.head_dim) for part in (positive, value - positive)]
    return torch.cat(parts, -1).reshape(*x.shape[:2], 2 * s.dim)


def linear_elu(t: Tensors, s: Shape, p: Precision) -> Tensor:
    q, k = (F.elu(p.wide(t[x])) + 1.0 for x in "qk")
    return linear_attention(q, k, p.value(t["v"]), s, p)


def linear_relu(t: Tensors, s: Shape, p: Precision) -> Tensor:
    return linear_attention(F.relu(p.wide(t["q"])), F.relu(p.wide(t["k"])), p.value(t["v"]), s, p)


def linear_map(t: Tensors, s: Shape, p: Precision) -> Tensor:
    """`linear_elu` in the other order, (q k^T) v."""
    q, k = (split_heads(F.elu(p.wide(t[x])) + 1.0, s) for x in "qk")
    weights = p.product(q, k.mT) / s.tokens
    return merge_heads(p.product(weights, split_heads(p.value(t["v"]), s)) / (q @ p.mean(k).mT + EPS))


def inline(t: Tensors, s: Shape, p: Precision) -> Tensor:
    q, k, v = (split_heads(t[x], s) for x in "qkv")
    scale = s.head_dim**-0.5
    k, v = p.value(k), p.value(v)
    k_mean, v_mean = p.mean(k), p.mean(v)
    covariance = scale * p.sums(k, v - v_mean) if p.centred else scale * (p.sums(k, v) - k_mean.mT @ v_mean)
    return merge_heads(q @ covariance.to(q.dtype) - (-v_mean).to(q.dtype))


def polaformer(t: Tensors, s: Shape, p: Precision) -> Tensor:
    factor, power = p.wide(t["factor"]), p.wide(t["power"])
    q = signed_power(p.wide(t["q"]), None, factor, power, s)
    k = signed_power(p.wide(t["k"]), p.wide(t["table"]), factor, power, s)
    epsilon: float | Tensor = EPS
    if p.kind == "balanced":
        (q, q_size), (k, k_size) = divided(q, s, (3,)), divided(k, s, (1, 3))
        epsilon = (EPS / (q_size * k_size)).transpose(1, 2)
    return linear_attention(q, k, p.value(t["v"]), s, p, polar=True, epsilon=epsilon)


def divided(x: Tensor, s: Shape, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Features [B, N, 2 C] divided by their mean over these axes of [B, N, h, 2 d], and that mean."""
    heads = x.reshape(*x.shape[:2], s.heads, -1)
    size = heads.detach().mean(axes, keepdim=True).clamp(min=TINY)
    return (heads / size).reshape(x.shape), size


def mala(t: Tensors, s: Shape, p: Precision) -> Tensor:
    q, k = (F.elu(p.wide(t[x])) + 1.0 for x in "qk")
    return linear_attention(q, k, p.value(t["v"]), s, p, table=rotary_table(q, s), magnitude=s.head_dim**-0.5)


def rala(t: Tensors, s: Shape, p: Precision) -> Tensor:
    q, k = (F.elu(p.wide(t[x])) + 1.0 for x in "qk")
    heads = torch.eye(s.heads, device=q.device, dtype=q.dtype).repeat_interleave(s.head_dim, 0)
    mean = s.head_dim**-0.5 * q.mean(1).unsqueeze(-1)
    alpha = torch.softmax(k @ (mean * heads), 1)
    k = (k.reshape(*k.shape[:2], s.heads, -1) * (s.tokens * alpha).unsqueeze(-1)).reshape(k.shape)
    return linear_attention(q, k, p.value(t["v"]), s, p, table=rotary_table(q, s))


def vittt(t: Tensors, s: Shape, p: Precision) -> Tensor:
    """`ppattn.ops.gated_unit`."""
    weights = torch.cat([p.wide(t["w1"]), p.wide(t["w2"])], -1)
    q, k, v = (split_heads(p.wide(t[x]), s) for x in "qkv")
    az = p.product(k.transpose(0, 1).reshape(s.heads, -1, s.head_dim), weights[0])
    a, z = az.reshape(s.heads, -1, s.tokens, 2 * s.head_dim).transpose(0, 1).chunk(2, -1)
    gate = torch.sigmoid(z)
    slope = gate * (1.0 + z * (1.0 - gate))
    if p.scaled:
        step = RATE * p.sums(k, torch.cat([v * z * gate, v * a * slope], -1))
    else:
        e = RATE / s.tokens * v
        step = k.mT @ torch.cat([e * z * gate, e * a * slope], -1)
    step = step / (1.0 + torch.sqrt((step * step).sum(2, keepdim=True) + TINY**2))
    a, z = p.product(q, step + weights).chunk(2, -1)
    return merge_heads(a * z * torch.sigmoid(z))


def soft(t: Tensors, s: Shape, p: Precision) -> Tensor:
    q, v = p.wide(t["q"]) * s.head_dim**-0.25, split_heads(p.value(t["v"]), s)
    ratio, d = t["landmark"].shape[-1], s.head_dim
    grid = q.mT.reshape(-1, d, s.side, s.side)
    tokens = F.conv2d(grid, p.wide(t["landmark"]), stride=ratio).reshape(q.shape[0], s.dim, -1).mT
    gain, shift = p.wide(t["gain"]), p.wide(t["shift"])
    tokens = F.gelu(F.layer_norm(tokens.reshape(q.shape[0], -1, s.heads, d), (d,), gain, shift))
    q, landmarks = split_heads(q, s), tokens.transpose(1, 2)
    inverse, k1 = NewtonInverse.apply(gaussian(landmarks, landmarks)), gaussian(q, landmarks)
    if not p.mixed:
        return merge_heads(k1 @ (inverse @ (k1.mT @ v)))
    root = s.tokens**0.5
    return root * merge_heads(p.product(k1, inverse @ p.product(k1.mT, v / root)))


def gaussian(a: Tensor, b: Tensor) -> Tensor:
    exponent = a @ b.mT - 0.5 * (a * a).sum(-1, keepdim=True) - 0.5 * (b * b).sum(-1).unsqueeze(2)
    return torch.exp(exponent.clamp(max=0.0))


class NewtonInverse(torch.autograd.Function):
    """SOFT's inverse with the published gradient."""

    @staticmethod
    def forward(ctx, kernel: Tensor) -> Tensor:
        row_sum = kernel.sum(-1).amax(-1)[..., None, None]
        regular = kernel + 0.01 * torch.eye(kernel.shape[-1], dtype=kernel.dtype, device=kernel.device)
        v = 1.8 * row_sum**-2.0 * regular
        for _ in range(NEWTON_STEPS):
            v = 2.0 * v - v @ regular @ v
        ctx.save_for_backward(v)
        return v

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (v,) = ctx.saved_tensors
        return -(v.mT @ grad @ v.mT)
