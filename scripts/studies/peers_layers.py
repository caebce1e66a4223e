"""The attentions of peers_torch.py, with the operations and names of the official code."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.studies.torch_forms import NewtonInverse


def table(*shape: int) -> nn.Parameter:
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(shape), std=0.02))


class Attention(nn.Module):
    """Linear layers named by what they give, such as `qkv`, or `q` and `kv`, and `proj`."""

    def __init__(self, dim: int, heads: int, *names: str):
        super().__init__()
        self.heads, self.scale, self.names, self.proj = heads, (dim // heads) ** -0.5, names, nn.Linear(dim, dim)
        for name in names:
            setattr(self, name, nn.Linear(dim, len(name) * dim))

    def projected(self, x: Tensor) -> list[Tensor]:
        """[B, N, C] by letter of the names."""
        parts = [getattr(self, name)(x).reshape(*x.shape[:2], len(name), -1).unbind(2) for name in self.names]
        return [part for own in parts for part in own]

    def split(self, x: Tensor) -> Tensor:
        """[B, N, C] -> [B, heads, N, C / heads]"""
        return x.reshape(*x.shape[:2], self.heads, -1).permute(0, 2, 1, 3)


class Softmax(Attention):
    """softmax(q k^T / sqrt(d)) v, in three steps or as one operator."""

    def __init__(self, dim: int, heads: int, sdpa: bool, *names: str):
        super().__init__(dim, heads, *names)
        self.sdpa = sdpa

    def forward(self, x: Tensor, h: int, w: int) -> Tensor:
        q, k, v = map(self.split, self.projected(x))
        if self.sdpa:
            out = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        else:
            out = ((q @ k.transpose(-2, -1)) * self.scale).softmax(-1) @ v
        return self.proj(out.transpose(1, 2).flatten(2))


class SwinSoftmax(Softmax):
    """In windows: a bias looked up by the offset of the two positions, and the mask of shifted windows."""

    def __init__(self, dim: int, heads: int, window: int, sdpa: bool):
        super().__init__(dim, heads, sdpa, "qkv")
        self.relative_position_bias_table = table((2 * window - 1) ** 2, heads)
        offset = torch.arange(window)[:, None] - torch.arange(window) + window - 1
        index = offset[:, None, :, None] * (2 * window - 1) + offset[None, :, None, :]
        self.register_buffer("relative_position_index", index.reshape(window**2, window**2))

    def forward(self, x: Tensor, h: int, w: int, mask: Tensor | None) -> Tensor:
        b, n, c = x.shape
        q, k, v = map(self.split, self.projected(x))
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(n, n, -1)
        bias = bias.permute(2, 0, 1).contiguous()
        if self.sdpa:
            windows = bias.unsqueeze(0) if mask is None else (bias + mask.unsqueeze(1)).repeat(b // len(mask), 1, 1, 1)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=windows, scale=self.scale)
            return self.proj(out.transpose(1, 2).reshape(b, n, c))
        scores = (q * self.scale) @ k.transpose(-2, -1) + bias.unsqueeze(0)
        if mask is not None:
            scores = scores.view(b // len(mask), len(mask), self.heads, n, n) + mask.unsqueeze(1).unsqueeze(0)
            scores = scores.view(-1, self.heads, n, n)
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c))


class InLine(Attention):
    """q (K^T V) s / N + (1 - s q mean(k)) mean(v) with s = 1 / sqrt(d), plus a 3x3 depthwise convolution of v whose
    kernels are predicted per image and channel from the mean token; a class token takes no part in the convolution."""

    def __init__(self, dim: int, heads: int, *names: str):
        super().__init__(dim, heads, *names)
        self.residual = nn.Sequential(
            nn.Conv1d(dim, dim, 1, groups=heads), nn.GELU(), nn.Conv1d(dim, 9 * dim, 1, groups=heads)
        )

    def forward(self, x: Tensor, h: int, w: int, mask: Tensor | None = None) -> Tensor:
        b, n, c = x.shape
        q, k, v = map(self.split, self.projected(x))
        kernels = self.residual(x.mean(1).unsqueeze(-1)).reshape(b * c, 1, 3, 3)
        root = (self.scale / n) ** 0.5
        state = (k.transpose(-2, -1) * root) @ (v * root)
        out = q @ state + (1 - q @ k.mean(2, True).transpose(-2, -1) * self.scale) * v.mean(2, True)
        out = out.transpose(1, 2).reshape(b, n, c)
        prefix = n - h * w
        grid = v[:, :, prefix:].transpose(1, 2).reshape(b, h, w, c).permute(0, 3, 1, 2).reshape(1, b * c, h, w)
        local = F.conv2d(grid, kernels, padding=1, groups=b * c).reshape(b, c, h * w).permute(0, 2, 1)
        return self.proj(out + (F.pad(local, (0, 0, prefix, 0)) if prefix else local))


class PolaFormer(Attention):
    """With f(t) = relu(t)^p, p = 1 + alpha sigmoid(power): features [f(q), f(-q)] read the first half of v's channels,
    [f(-q), f(q)] the second, both through keys [f(k), f(-k)], each normalised by q mean(k) + 1e-6; plus a depthwise
    convolution of v; times a gate g."""

    def __init__(self, dim: int, heads: int, tokens: int, *names: str, alpha: int = 4, kernel: int = 5):
        super().__init__(dim, heads, *names)
        self.alpha = alpha
        self.power = nn.Parameter(torch.zeros(1, heads, 1, dim // heads))
        self.scale = nn.Parameter(torch.zeros(1, 1, dim))
        self.positional_encoding = nn.Parameter(torch.zeros(1, tokens, dim))
        self.dwc = nn.Conv2d(dim // heads, dim // heads, kernel, padding=kernel // 2, groups=dim // heads)

    def forward(self, x: Tensor, h: int, w: int, mask: Tensor | None = None) -> Tensor:
        b, n, c = x.shape
        named = dict(zip("".join(self.names), self.projected(x), strict=True))
        q, k, v, g = (named[letter] for letter in "qkvg")
        k = k + self.positional_encoding
        scale, power = F.softplus(self.scale), 1 + self.alpha * torch.sigmoid(self.power)
        q, k, v = (self.split(t).contiguous() for t in (q / scale, k / scale, v))
        q_pos, q_neg = F.relu(q) ** power, F.relu(-q) ** power
        k = torch.cat([F.relu(k) ** power, F.relu(-k) ** power], -1)
        halves, root = [], n**-0.5
        for query, value in zip(
            (torch.cat([q_pos, q_neg], -1), torch.cat([q_neg, q_pos], -1)), v.chunk(2, -1), strict=True
        ):
            z = 1 / (query @ k.mean(-2, True).transpose(-2, -1) + 1e-6)
            halves.append(query @ ((k.transpose(-2, -1) * root) @ (value * root)) * z)
        out = torch.cat(halves, -1).transpose(1, 2).reshape(b, n, c)
        grid = v.reshape(b * self.heads, h, w, -1).permute(0, 3, 1, 2)
        return self.proj((out + self.dwc(grid).reshape(b, c, n).permute(0, 2, 1)) * g)


def squared_distance(a: Tensor, b: Tensor) -> Tensor:
    """|a_i - b_j|^2 for the rows of a and the columns of b."""
    return a**2.0 @ a.new_ones(b.shape[-2:]) + a.new_ones(a.shape[-2:]) @ b**2.0 - 2.0 * (a @ b)


class SOFTAttention(nn.Module):
    """K1 K2^-1 K1^T v plus a depthwise convolution of v with one kernel per head; K1 = exp(-|q - landmark|^2 / 2) with
    q (= k) divided by d^(1/4), K2 the same among landmarks, which a strided convolution of q gives."""

    def __init__(self, dim: int, heads: int, ratio: int, size: int):
        super().__init__()
        d, self.heads = dim // heads, heads
        self.W_q, self.W_v, self.ff = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.attn = nn.ModuleDict(
            {
                "Qlandmark_op": nn.Conv2d(d, d, ratio, ratio, bias=False),
                "Qnorm_act": nn.Sequential(nn.LayerNorm(d), nn.GELU()),
                "conv": nn.Conv2d(heads, heads, size, padding=size // 2, bias=False, groups=heads),
            }
        )

    def forward(self, x: Tensor, h: int, w: int) -> Tensor:
        q, v = (y.reshape(*x.shape[:2], self.heads, -1).permute(0, 2, 1, 3) for y in (self.W_q(x), self.W_v(x)))
        b, heads, n, d = q.shape
        q = q / math.sqrt(math.sqrt(d))
        marks = self.attn["Qlandmark_op"](q.reshape(b * heads, h, w, d).permute(0, 3, 1, 2))
        marks = self.attn["Qnorm_act"](marks.flatten(2).transpose(1, 2).reshape(b, heads, -1, d))
        k1 = torch.exp(-squared_distance(q, marks.transpose(-1, -2).contiguous()) / 2)
        k2 = torch.exp(-squared_distance(marks, marks.transpose(-1, -2).contiguous()) / 2)
        out = (k1 @ NewtonInverse.apply(k2)) @ (k1.transpose(-2, -1) @ v)
        v = v.reshape(b, heads, h, w, d).permute(0, 4, 1, 2, 3).reshape(b * d, heads, h, w)
        out = out + self.attn["conv"](v).reshape(b, d, heads, h, w).flatten(3).permute(0, 2, 3, 1)
        return self.ff(out.transpose(1, 2).reshape(x.shape))
