"""Plain forms of ppattn's attentions in PyTorch, operator for operator, for gpu_forms.py.

Tokens are [B, N, C], channels by head. A form takes a dictionary of tensors and their `Shape`. Inputs of the layers (q,
k, v and the dynamic kernel) have the type under test, trained parameters are float32, as under mixed precision. Forms:

    naive          all in the half type: k^T v is rounded to it, then divided by N
    mixed          features, state, means and normaliser in float32; operands of the products over all tokens in the
                   half type, multiplied by N^-1/2 first, so that each sum is rounded to it once
    guarded        all in float32, as `ppattn.ops.full_precision` does; guarded_tf32: its products in TF32
    plain, sdpa    softmax with a stored map, which it computes in float32; the fused operator
"""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

EPS, TINY, NEWTON_STEPS, RATE = 1e-6, 1e-12, 20, 1.0 / 3.0
HALF = (torch.bfloat16, torch.float16)
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
    """See the docstring of the module; `half` is the type of the inputs."""

    kind: str
    half: torch.dtype

    def wide(self, x: Tensor) -> Tensor:
        """Inputs and parameters, as features are computed from them."""
        if self.kind == "naive":
            return x.to(self.half)
        return x.float() if x.dtype in HALF else x

    def value(self, v: Tensor) -> Tensor:
        """Inputs that are an operand of a product over all tokens and nothing else."""
        return v if self.kind == "mixed" else self.wide(v)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return (a.to(self.half) @ b.to(self.half)).float() if self.kind == "mixed" else a @ b

    def sums(self, k: Tensor, v: Tensor) -> Tensor:
        """k^T v / N."""
        n = k.shape[-2]
        return self.product((k * n**-0.5).mT, v * n**-0.5) if self.kind == "mixed" else k.mT @ v / n

    def mean(self, x: Tensor) -> Tensor:
        """Mean over the tokens, the second-last axis, which is kept."""
        return x.mean(-2, keepdim=True, dtype=torch.float32 if self.kind == "mixed" else None)


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
    return merge_heads((scores.float() if scores.dtype in HALF else scores).softmax(-1).to(v.dtype) @ v)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, s: Shape, bias: Tensor | None = None) -> Tensor:
    """The fused operator; with a bias [h, N, M] keys are filled up to a multiple of eight."""
    q, k, v = (split_heads(x, s) for x in (q, k, v))
    mask = None
    if bias is not None:
        fill = -k.shape[2] % 8
        k, v = F.pad(k, (0, 0, 0, fill)), F.pad(v, (0, 0, 0, fill))
        mask = F.pad(bias.to(q.dtype), (0, fill), value=-1e4).expand(q.shape[0], -1, -1, -1)
    flash = mask is None and q.dtype in HALF  # the kernels that Paddle takes
    kernel = SDPBackend.FLASH_ATTENTION if flash else SDPBackend.EFFICIENT_ATTENTION
    with sdpa_kernel(kernel) if q.is_cuda else contextlib.nullcontext():
        return merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def softmax(t: Tensors, s: Shape, attend: Callable = softmax_attention) -> Tensor:
    return attend(t["q"], t["k"], t["v"], s, t.get("bias"))


def agent(t: Tensors, s: Shape, attend: Callable = softmax_attention) -> Tensor:
    agents = cell_means(t["q"], s)
    return attend(t["q"], agents, attend(agents, t["k"], t["v"], s, t["on_keys"]), s, t["on_agents"])


def cell_means(x: Tensor, s: Shape) -> Tensor:
    """Means over 7 x 7 cells of the grid, by two products with constants."""
    cell, index = torch.arange(AGENTS, device=x.device)[:, None], torch.arange(s.side, device=x.device)
    first, end = cell * s.side // AGENTS, ((cell + 1) * s.side + AGENTS - 1) // AGENTS
    means = (((index >= first) & (index < end)) / (end - first)).to(x.dtype)
    x = means @ x.reshape(-1, s.side, s.side, s.dim)
    return (means @ x.reshape(-1, s.side, AGENTS * s.dim)).reshape(-1, AGENTS * AGENTS, s.dim)


def linear_attention(q, k, v, s: Shape, p: Precision, polar=False, table=None, magnitude=None) -> Tensor:
    """`ppattn.ops.linear_attention`; `table` is its rotation."""
    below, mean = split_heads(q, s), split_heads(p.mean(k), s).mT
    if table is not None:
        q, k = rotate(q, *table), rotate(k, *table)
    q, k, v = (split_heads(x, s) for x in (q, k, v))
    state = p.sums(k, v)
    if polar:
        return merge_heads(polar_streams(q, state, mean, p))
    y, z = p.product(q, state), below @ mean
    if magnitude is None:
        return merge_heads(y / (z + EPS))
    z = magnitude * z
    return merge_heads((magnitude + magnitude / (z + EPS)) * y - z @ p.mean(v))


def polar_streams(q: Tensor, state: Tensor, mean: Tensor, p: Precision) -> Tensor:
    """[q+, q-] with the first half of the values, [q-, q+] with the second one."""
    d, half = state.shape[3], state.shape[2] // 2
    columns, means = [state[..., : d // 2], state[..., d // 2 :].roll(half, 2)], [mean, mean.roll(half, 2)]
    if p.kind == "mixed":
        y, z = p.product(q, torch.cat(columns, -1)), q @ torch.cat(means, -1)
    else:
        y, z = (q @ torch.cat(columns + means, -1)).split([d, 2], -1)
    return torch.cat([a / (b + EPS) for a, b in zip(y.chunk(2, -1), z.chunk(2, -1), strict=True)], -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    b, n, c = x.shape
    cos, sin = (table.tile(1, c // table.shape[1]) for table in (cos, sin))
    pairs = x.reshape(b, n, c // 2, 2)
    return x * cos + torch.cat([pairs[..., 1:], pairs[..., :1]], -1).reshape(b, n, c) * sin


def rotary_table(like: Tensor, s: Shape) -> tuple[Tensor, Tensor]:
    """cos and sin [N, d] for `rotate`."""
    options, steps = {"dtype": torch.float64, "device": like.device}, s.head_dim // 4
    angle = torch.arange(s.side, **options)[:, None] * 10000.0 ** (-torch.arange(steps, **options) / max(steps - 1, 1))
    angles = torch.stack([angle[:, None].expand(-1, s.side, -1), angle[None].expand(s.side, -1, -1)], 2)
    tables = (torch.stack([angles.cos()] * 2, -1), torch.stack([-angles.sin(), angles.sin()], -1))
    return tuple(table.reshape(-1, s.head_dim).to(like.dtype) for table in tables)


def signed_power(x: Tensor, shift: Tensor | None, scale: Tensor, power: Tensor, s: Shape) -> Tensor:
    """`ppattn.ops.signed_power`."""
    z = (x if shift is None else x + shift) * scale
    value = torch.exp(power.reshape(1, 1, -1) * torch.log(z.abs().clamp(min=TINY)))
    positive = value * (z > 0).to(z.dtype)
    parts = [part.reshape(*x.shape[:2], s.heads, s.head_dim) for part in (positive, value - positive)]
    return torch.cat(parts, -1).reshape(*x.shape[:2], 2 * s.dim)


def features(t: Tensors, p: Precision) -> list[Tensor]:
    return [F.elu(p.wide(t[x])) + 1.0 for x in "qk"]


def linear_elu(t: Tensors, s: Shape, p: Precision) -> Tensor:
    return linear_attention(*features(t, p), p.value(t["v"]), s, p)


def inline(t: Tensors, s: Shape, p: Precision) -> Tensor:
    q, k, v = (split_heads(t[x], s) for x in "qkv")
    k, v = p.value(k), p.value(v)
    k_mean, v_mean = p.mean(k), p.mean(v)
    covariance = s.head_dim**-0.5 * (p.sums(k, v) - k_mean.mT @ v_mean)
    return merge_heads(q @ covariance.to(q.dtype) - (-v_mean).to(q.dtype))


def polaformer(t: Tensors, s: Shape, p: Precision) -> Tensor:
    factor, power = p.wide(t["factor"]), p.wide(t["power"])
    q = signed_power(p.wide(t["q"]), None, factor, power, s)
    k = signed_power(p.wide(t["k"]), p.wide(t["table"]), factor, power, s)
    return linear_attention(q, k, p.value(t["v"]), s, p, polar=True)


def mala(t: Tensors, s: Shape, p: Precision) -> Tensor:
    q, k = features(t, p)
    return linear_attention(q, k, p.value(t["v"]), s, p, table=rotary_table(q, s), magnitude=s.head_dim**-0.5)


def rala(t: Tensors, s: Shape, p: Precision) -> Tensor:
    q, k = features(t, p)
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
    if p.kind == "mixed":
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
    tokens = tokens.reshape(q.shape[0], -1, s.heads, d)
    tokens = F.gelu(F.layer_norm(tokens, (d,), p.wide(t["gain"]), p.wide(t["shift"])))
    q, landmarks = split_heads(q, s), tokens.transpose(1, 2)
    inverse, k1 = NewtonInverse.apply(gaussian(landmarks, landmarks)), gaussian(q, landmarks)
    if p.kind != "mixed":
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


def grouped(t: Tensors, s: Shape) -> Tensor:
    """InLine's dynamic 3 x 3 convolution with a kernel [B, C, 9], as one convolution with B C groups."""
    x = t["v"].mT.reshape(1, -1, s.side, s.side)
    y = F.conv2d(x, t["kernel"].reshape(-1, 1, 3, 3), padding=1, groups=x.shape[1])
    return y.reshape(s.batch, s.dim, -1).mT.contiguous()


class Form(NamedTuple):
    call: Callable[[Tensors, Shape], Tensor]
    tf32: bool = False


WITH_MAP = {"softmax": softmax, "window": softmax, "agent": agent}
KERNELS = {x.__name__: x for x in (linear_elu, inline, polaformer, mala, rala, soft, vittt)}
OPERATORS = (*WITH_MAP, "local", *KERNELS)


def forms(operator: str, dtype: torch.dtype) -> dict[str, Form]:
    """The forms of an operator for inputs of this type; the first is that for float64."""
    if operator == "local":
        return {"grouped": Form(grouped)}
    if call := WITH_MAP.get(operator):
        return {"plain": Form(call), "sdpa": Form(partial(call, attend=fused_attention))}
    call = KERNELS[operator]
    found = {kind: Form(partial(call, p=Precision(kind, dtype))) for kind in ("guarded", "naive", "mixed")}
    return found | {"guarded_tf32": found["guarded"]._replace(tf32=True)}
