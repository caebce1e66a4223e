"""DeiT, PVT, Swin and SOFT in PyTorch, the other side of bench_peers.py; the attentions are in peers_layers.py.

The computation is that of the official code, operation by operation, also where it could be done with less work:
softmax attention in three steps, SOFT's squared norms as products with ones, its GELU in single steps. Parameters have
the official names. With `sdpa=True`, softmax attention is one call of `scaled_dot_product_attention` instead.
"""

import itertools
import math
from collections import OrderedDict
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.studies.peers_layers import InLine, PolaFormer, SOFTAttention, Softmax, SwinSoftmax, table


def build(name: str, img_size: int = 224, num_classes: int = 1000, sdpa: bool = False) -> nn.Module:
    """One of `MODELS` with random weights; img_size is the side of a square input in pixels."""
    return MODELS[name](img_size=img_size, num_classes=num_classes, sdpa=sdpa).apply(init)


def init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def mlp(dim: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(OrderedDict(fc1=nn.Linear(dim, hidden), act=nn.GELU(), fc2=nn.Linear(hidden, dim)))


class Block(nn.Module):
    """x + attn(norm1(x)), then x + mlp(norm2(x))."""

    def __init__(self, dim: int, attn: nn.Module, mlp_ratio: int):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(dim, 1e-6), attn, nn.LayerNorm(dim, 1e-6)
        self.mlp = mlp(dim, dim * mlp_ratio)

    def forward(self, x: Tensor, h: int, w: int) -> Tensor:
        x = x + self.attn(self.norm1(x), h, w)
        return x + self.mlp(self.norm2(x))


class DeiT(nn.Module):
    def __init__(self, attention, heads: int, img_size: int, num_classes: int, sdpa: bool, dim: int = 192):
        super().__init__()
        self.side = img_size // 16
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, dim, 16, 16)})
        self.cls_token, self.pos_embed = table(1, 1, dim), table(1, self.side**2 + 1, dim)
        layer = partial(Softmax, dim, heads, sdpa) if attention == "softmax" else partial(InLine, dim, heads)
        self.blocks = nn.ModuleList(Block(dim, layer("qkv"), 4) for _ in range(12))
        self.norm, self.head = nn.LayerNorm(dim, 1e-6), nn.Linear(dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed["proj"](x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x, self.side, self.side)
        return self.head(self.norm(x)[:, 0])


class Embed(nn.Module):
    """Image or map -> (tokens, height, width)."""

    def __init__(self, proj: nn.Module, norm: nn.Module | None = None):
        super().__init__()
        self.proj, self.norm = proj, norm

    def forward(self, x: Tensor) -> tuple[Tensor, int, int]:
        x = self.proj(x)
        tokens = x.flatten(2).transpose(1, 2)
        return tokens if self.norm is None else self.norm(tokens), x.shape[2], x.shape[3]


def patches(channels: int, dim: int, size: int) -> Embed:
    return Embed(nn.Conv2d(channels, dim, size, size), nn.LayerNorm(dim))


def conv_stem(channels: int, dim: int) -> Embed:
    """SOFT's 3x3 convolutions with BatchNorm and ReLU: strides 2, 1, 2 for the image, one of stride 2 later."""
    widths = [(3, 32, 2), (32, 32, 1), (32, dim, 2)] if channels == 3 else [(channels, dim, 2)]
    layers = [(nn.Conv2d(a, b, 3, stride, 1), nn.BatchNorm2d(b), nn.ReLU()) for a, b, stride in widths]
    return Embed(nn.Sequential(*itertools.chain(*layers)))


class Pyramid(nn.Module):
    """Four stages of embedding, added positions and blocks; see `pvt` and `soft`.

    Args:
        sides: of the position tables [1, side^2, C], which are resized bilinearly unless the map has `native` tokens.
        class_token: joins in the last stage and is classified; without one, the mean token is.
    """

    def __init__(self, embeds, sides, stages, num_classes: int, class_token: bool, norm: bool, native: int | None):
        super().__init__()
        self.sides, self.native = sides, native
        for i, (embed, side, blocks, dim) in enumerate(zip(embeds, sides, stages, DIMS, strict=True), 1):
            setattr(self, f"patch_embed{i}", embed)
            setattr(self, f"pos_embed{i}", table(1, side**2 + (class_token and i == 4), dim))
            setattr(self, f"block{i}", nn.ModuleList(blocks))
        self.cls_token = table(1, 1, DIMS[3]) if class_token else None
        self.norm = nn.LayerNorm(DIMS[3], 1e-6) if norm else None
        self.head = nn.Linear(DIMS[3], num_classes)

    def resized(self, positions: Tensor, side: int, h: int, w: int) -> Tensor:
        if h * w == self.native:
            return positions
        positions = positions.reshape(1, side, side, -1).permute(0, 3, 1, 2)
        return F.interpolate(positions, size=(h, w), mode="bilinear").reshape(1, -1, h * w).permute(0, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        for i, side in enumerate(self.sides, 1):
            x, h, w = getattr(self, f"patch_embed{i}")(x)
            positions = getattr(self, f"pos_embed{i}")
            if self.cls_token is not None and i == 4:
                x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), 1)
                x = x + torch.cat((positions[:, :1], self.resized(positions[:, 1:], side, h, w)), 1)
            else:
                x = x + self.resized(positions, side, h, w)
            for block in getattr(self, f"block{i}"):
                x = block(x, h, w)
            if i < 4:
                x = x.reshape(len(x), h, w, -1).permute(0, 3, 1, 2).contiguous()
        return self.head(x.mean(1) if self.cls_token is None else self.norm(x)[:, 0])


DIMS = (64, 128, 320, 512)


def pvt(attention: str, heads: tuple[int, ...], img_size: int, num_classes: int, sdpa: bool) -> Pyramid:
    """PVT v1. InLine has no final norm; PolaFormer has one that it never uses."""
    sides = [img_size // stride for stride in (4, 8, 16, 32)]

    def layer(i: int) -> nn.Module:
        if attention == "inline":
            return InLine(DIMS[i], heads[i], "q", "kv")
        return PolaFormer(DIMS[i], heads[i], sides[i] ** 2, "qg", "kv")

    embeds = [patches(channels, dim, 4 if channels == 3 else 2) for channels, dim in itertools.pairwise((3, *DIMS))]
    stages = [[Block(DIMS[i], layer(i), (8, 8, 4, 4)[i]) for _ in range(2)] for i in range(4)]
    return Pyramid(embeds, sides, stages, num_classes, False, attention == "polaformer", sides[0] ** 2)


class SOFTBlock(nn.Module):
    """y = norm1(x + attention(x)); norm2(y + ff2(gelu(ff1(y)))) with the tanh form of GELU."""

    def __init__(self, dim: int, heads: int, ratio: int, size: int):
        super().__init__()
        layers = {"mha": SOFTAttention(dim, heads, ratio, size), "norm1": nn.LayerNorm(dim), "norm2": nn.LayerNorm(dim)}
        self.att = nn.ModuleDict(layers | {"ff1": nn.Linear(dim, 4 * dim), "ff2": nn.Linear(4 * dim, dim)})

    def forward(self, x: Tensor, h: int, w: int) -> Tensor:
        y = self.att["norm1"](x + self.att["mha"](x, h, w))
        z = self.att["ff1"](y)
        z = 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * torch.pow(z, 3))))
        return self.att["norm2"](y + self.att["ff2"](z))


def soft(img_size: int, num_classes: int, sdpa: bool) -> Pyramid:
    """SOFT: softmax-free stages 1 to 3, PVT's blocks in stage 4; position tables for 224 pixels, always resized."""
    shapes = ((64, 2, 8, 9), (128, 4, 4, 5), (320, 10, 2, 3))  # width, heads, ratio, size of the convolution
    stages: list = [[SOFTBlock(*shape) for _ in range(depth)] for shape, depth in zip(shapes, (1, 2, 3), strict=True)]
    stages.append([Block(DIMS[3], Softmax(DIMS[3], 16, sdpa, "q", "kv"), 4) for _ in range(2)])
    embeds = [conv_stem(channels, dim) for channels, dim in itertools.pairwise((3, *DIMS))]
    return Pyramid(embeds, (56, 28, 14, 7), stages, num_classes, True, True, None)


def to_windows(x: Tensor, size: int) -> Tensor:
    """[B, H, W, C] -> [B * windows, size * size, C]"""
    b, h, w, c = x.shape
    x = x.view(b, h // size, size, w // size, size, c).permute(0, 1, 3, 2, 4, 5).contiguous()
    return x.view(-1, size * size, c)


def from_windows(x: Tensor, size: int, side: int) -> Tensor:
    """The inverse of `to_windows` for square maps."""
    x = x.view(-1, side // size, side // size, size, size, x.shape[-1]).permute(0, 1, 3, 2, 4, 5).contiguous()
    return x.view(-1, side, side, x.shape[-1])


class SwinBlock(nn.Module):
    """Softmax in windows of 7, every second block shifted by 3; linear attention over the entire map."""

    def __init__(self, attention: str, dim: int, heads: int, side: int, odd: bool, sdpa: bool):
        super().__init__()
        self.side, self.window = side, min(side, 7) if attention == "softmax" else side
        self.shift = self.window // 2 if odd and side > self.window else 0
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        if attention == "softmax":
            self.attn: nn.Module = SwinSoftmax(dim, heads, self.window, sdpa)
        else:
            self.attn = InLine(dim, heads, "qkv") if attention == "inline" else PolaFormer(dim, heads, side**2, "qkvg")
        self.mlp, mask = mlp(dim, 4 * dim), None
        if self.shift:  # -100 between tokens of different parts of the image
            at = torch.arange(side)
            part = (at >= side - self.window).long() + (at >= side - self.shift).long()
            part = to_windows((3 * part[:, None] + part)[None, :, :, None], self.window).squeeze(-1)
            mask = torch.where(part[:, None, :] == part[:, :, None], 0.0, -100.0)
        self.register_buffer("attn_mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        b, _, c = x.shape
        y = self.norm1(x).view(b, self.side, self.side, c)
        if self.shift:
            y = torch.roll(y, (-self.shift, -self.shift), (1, 2))
        y = self.attn(to_windows(y, self.window), self.window, self.window, self.attn_mask)
        y = from_windows(y, self.window, self.side)
        if self.shift:
            y = torch.roll(y, (self.shift, self.shift), (1, 2))
        x = x + y.view(b, -1, c)
        return x + self.mlp(self.norm2(x))


class Merge(nn.Module):
    """A linear layer on the normalised tokens of each 2 x 2 cell."""

    def __init__(self, dim: int, side: int):
        super().__init__()
        self.side, self.norm, self.reduction = side, nn.LayerNorm(4 * dim), nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        x = x.view(b, self.side, self.side, c)
        x = torch.cat([x[:, i::2, j::2, :] for j in (0, 1) for i in (0, 1)], -1)
        return self.reduction(self.norm(x.view(b, n // 4, 4 * c)))


class Swin(nn.Module):
    """Args: attentions: one per stage."""

    def __init__(self, attentions: tuple[str, ...], img_size: int, num_classes: int, sdpa: bool):
        super().__init__()
        self.patch_embed, self.layers = patches(3, 96, 4), nn.ModuleList()
        for i, (attention, depth, heads) in enumerate(zip(attentions, (2, 2, 6, 2), (3, 6, 12, 24), strict=True)):
            dim, side = 96 * 2**i, img_size // 4 // 2**i
            blocks = [SwinBlock(attention, dim, heads, side, bool(j % 2), sdpa) for j in range(depth)]
            layer = OrderedDict(blocks=nn.Sequential(*blocks))
            if i < 3:
                layer["downsample"] = Merge(dim, side)
            self.layers.append(nn.Sequential(layer))
        self.norm, self.avgpool, self.head = nn.LayerNorm(dim), nn.AdaptiveAvgPool1d(1), nn.Linear(dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x, _, _ = self.patch_embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.avgpool(self.norm(x).transpose(1, 2)).flatten(1))


MODELS = {
    "deit_tiny": partial(DeiT, "softmax", 3),
    "inline_deit_tiny": partial(DeiT, "inline", 6),
    "inline_pvt_tiny": partial(pvt, "inline", (2, 4, 10, 16)),
    "pola_pvt_tiny": partial(pvt, "polaformer", (1, 2, 5, 8)),
    "swin_tiny": partial(Swin, ("softmax",) * 4),
    "inline_swin_tiny": partial(Swin, ("inline", "inline", "inline", "softmax")),
    "pola_swin_tiny": partial(Swin, ("polaformer", "polaformer", "softmax", "softmax")),
    "soft_tiny": soft,
}
