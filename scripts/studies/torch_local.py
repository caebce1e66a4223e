"""The dynamic 3 x 3 convolution of InLine in PyTorch: v [B, N, C] with a kernel [B, C, 9] per image and channel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_forms import Shape, Tensors


def grouped(t: Tensors, s: Shape) -> Tensor:
    """One convolution with B C groups, the published form."""
    groups = s.batch * s.dim
    x = t["v"].mT.reshape(1, groups, s.side, s.side)
    y = F.conv2d(x, t["kernel"].reshape(-1, 1, 3, 3), padding=1, groups=groups)
    return y.reshape(s.batch, s.dim, -1).mT.contiguous()


def shifts(t: Tensors, s: Shape) -> Tensor:
    """Nine shifted products of tokens, as programs for any batch size have them."""
    x, kernel, width, n = t["v"], t["kernel"].mT, s.side, s.tokens
    column = torch.arange(-width, n + width, device=x.device).reshape(1, -1, 1) % width
    zeros, size = x.new_zeros(s.batch, width + 1, s.dim), n + 2 * width
    x = torch.cat([zeros, x, zeros], 1)
    right = x[:, 2 : size + 2] * (column < width - 1).to(x.dtype)
    triple = x[:, :size] * (column > 0).to(x.dtype), x[:, 1 : size + 1], right
    rows = []
    for row in range(3):
        a, b, c = (part * kernel[:, 3 * row + i : 3 * row + i + 1] for i, part in enumerate(triple))
        rows.append((a + b + c)[:, row * width : row * width + n])
    return rows[0] + rows[1] + rows[2]


def padded(t: Tensors, s: Shape) -> Tensor:
    """Nine products of views of the padded map [B, H + 2, W + 2, C]."""
    x = F.pad(t["v"].reshape(s.batch, s.side, s.side, s.dim), (0, 0, 1, 1, 1, 1))
    views = [x[:, i : i + s.side, j : j + s.side] for i in range(3) for j in range(3)]
    taps = t["kernel"].permute(2, 0, 1)[:, :, None, None]
    y = views[0] * taps[0]
    for view, tap in zip(views[1:], taps[1:], strict=True):
        y = y + view * tap
    return y.reshape(s.batch, s.tokens, s.dim)


def unfold(t: Tensors, s: Shape) -> Tensor:
    """All neighbourhoods as columns, and one batched product."""
    columns = F.unfold(t["v"].mT.reshape(s.batch, s.dim, s.side, s.side), 3, padding=1)
    columns = columns.reshape(s.batch * s.dim, 9, s.tokens)
    y = torch.bmm(t["kernel"].reshape(-1, 1, 9), columns)
    return y.reshape(s.batch, s.dim, s.tokens).mT.contiguous()


def static(t: Tensors, s: Shape) -> Tensor:
    """Not the same function: a depth-wise convolution with trained kernels, for comparison."""
    x = t["v"].mT.reshape(s.batch, s.dim, s.side, s.side)
    y = F.conv2d(x, t["kernel"][0].reshape(-1, 1, 3, 3), padding=1, groups=s.dim)
    return y.flatten(2).mT.contiguous()
