"""Convolutions of maps, and depth-wise convolutions of grid tokens with trained or dynamic kernels.

Tokens are [B, P + H*W, C]: P prefix tokens (class token), then the H x W grid row by row.
"""

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor

from ppattn.ops.dispatch import CUDA_GRID, HALF, compiled, constant, eager, grad_mask, run
from ppattn.ops.tensors import as_dtype

COMPILED = (3, 5, 7, 9)  # sizes of the kernels


def grid_map(x: Tensor, grid: tuple[int, int], num_prefix: int = 0) -> Tensor:
    """Grid tokens of [B, P + H*W, C] as a map [B, C, H, W]."""
    if num_prefix:
        x = x[:, num_prefix:]
    return x.transpose([0, 2, 1]).reshape([-1, x.shape[2], *grid])


def grid_tokens(x: Tensor) -> Tensor:
    """[B, C, H, W] -> [B, H*W, C]."""
    channels, height, width = x.shape[1:]
    return x.reshape([-1, channels, height * width]).transpose([0, 2, 1])


def behind_prefix(y: Tensor, x: Tensor, num_prefix: int) -> Tensor:
    """Grid tokens y [B, H*W, C] with zeros in front for the P prefix tokens of x [B, P + H*W, C]."""
    return paddle.concat([0.0 * x[:, :num_prefix], y], axis=1) if num_prefix else y


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int = 1, padding: int = 0) -> Tensor:
    """Convolution of x [B, C, H, W] with weight [F, C, k, k] and bias [F] or None -> [B, F, H', W']."""
    plain = not compiled(x, weight, bias) or x.shape[1] != weight.shape[1]
    if not plain and min(x.shape[2:]) + 2 * padding >= weight.shape[2]:
        return run("conv2d", x, weight, bias, stride, padding, grad_mask(x, weight, bias))
    return F.conv2d(x, as_dtype(weight, x.dtype), bias, stride, padding)


def depthwise_conv(
    v: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    grid: tuple[int, int],
    num_prefix: int = 0,
    per_head: bool = False,
    skip: bool = False,
) -> Tensor:
    """Convolves every channel of the grid of v [B, P + H*W, C]; k x k kernels, stride 1, zero padding k // 2, k odd.

    weight is [C, 1, k, k], or [d, 1, k, k] for d channels per head, shared by the heads, or with `per_head` [h, 1, k,
    k], one for a head; bias has a number per kernel. `skip` adds v; without, the result is zero for the P tokens.
    """
    (kernels, _, k, _), channels = weight.shape, v.shape[2]
    if k in COMPILED and compiled(v, weight, bias) and v.shape[1] == num_prefix + grid[0] * grid[1]:
        weight, repeat = weight.reshape([1, kernels, k, k]), channels // kernels if per_head else 1
        inside = skip and not num_prefix
        y = run("depthwise_conv", v, weight, bias, *grid, repeat, inside, grad_mask(v, weight, bias))
        return v + y if skip and not inside else y
    x, tokens, share = v[:, num_prefix:] if num_prefix else v, grid[0] * grid[1], channels // kernels
    if eager() and len(v) > 1 and len(v) * share >= CUDA_GRID:  # images of the convolution below
        (first, second), rest = v.tensor_split(2), (weight, bias, grid, num_prefix, per_head, skip)
        return paddle.concat([depthwise_conv(first, *rest), depthwise_conv(second, *rest)])
    # One transpose: between two of them, oneDNN's passes lose the shape of a reshape.
    x = x.reshape([-1, tokens, kernels, share]).transpose([0, 3, 2, 1]) if per_head else x.transpose([0, 2, 1])
    weight = as_dtype(weight, x.dtype) if weight.dtype in HALF else weight  # autocast convolves half x in float32
    y = F.conv2d(x.reshape([-1, kernels, *grid]), weight, bias, padding=k // 2, groups=kernels)
    if per_head:
        y = y.reshape([-1, share, kernels, tokens]).transpose([0, 3, 2, 1]).flatten(2)
    else:
        y = y.reshape([-1, channels, tokens]).transpose([0, 2, 1])
    y = behind_prefix(y, v, num_prefix)
    return v + y if skip else y


def dynamic_conv3x3(v: Tensor, kernel: Tensor, grid: tuple[int, int], num_prefix: int = 0) -> Tensor:
    """Cross-correlates every channel of v [B, P + H*W, C] with its own 3 x 3 kernel [B, C, 9], row by row; zero padding
    1, zero for the P tokens in front."""
    if compiled(v, kernel) and v.shape[1:] == [num_prefix + grid[0] * grid[1], kernel.shape[1]]:
        square = kernel.reshape([*kernel.shape[:2], 3, 3])
        return run("depthwise_conv", v, square, None, *grid, 1, False, grad_mask(v, kernel))
    batch, _, channels = v.shape
    known = isinstance(batch, int) and batch > 0  # else the program is traced for any batch size
    if known and batch > 1 and batch * channels >= CUDA_GRID and eager():  # groups of the convolution below
        (v1, v2), (k1, k2) = v.tensor_split(2), kernel.tensor_split(2)
        return paddle.concat([dynamic_conv3x3(v1, k1, grid, num_prefix), dynamic_conv3x3(v2, k2, grid, num_prefix)])
    x = v[:, num_prefix:] if num_prefix else v
    if not known or batch * channels >= CUDA_GRID or (v.dtype in HALF and eager() and v.place.is_cpu_place()):
        y = _sum_of_shifts(x, kernel, grid)
    else:
        groups = batch * channels
        x = grid_map(x, grid).reshape([1, groups, *grid])
        y = F.conv2d(x, kernel.reshape([-1, 1, 3, 3]), padding=1, groups=groups)
        y = grid_tokens(y.reshape([batch, channels, *grid]))
    return behind_prefix(y, v, num_prefix)


def correlation3x3(k: Tensor, v: Tensor, grid: tuple[int, int], num_prefix: int = 0) -> Tensor:
    """sum_n k[n + t] v[n] over the grid for the nine shifts t: k and v [B, P + H*W, C] -> [B, C, 9], row by row."""
    if compiled(k, v) and k.shape[1] == num_prefix + grid[0] * grid[1]:
        return run("correlation", k, v, *grid).flatten(2)
    k, v = (t[:, num_prefix:] if num_prefix else t for t in (k, v))
    columns, (height, width) = column_shifts(k, grid), grid
    shifts = [column[:, row * width : (row + height) * width] for row in range(3) for column in columns]
    return paddle.stack([(shift * v).sum(axis=1) for shift in shifts], axis=-1)


def _sum_of_shifts(x: Tensor, kernel: Tensor, grid: tuple[int, int]) -> Tensor:
    """`dynamic_conv3x3` of x [B, H*W, C] as a sum of nine shifted copies: a grouped convolution needs a fixed batch
    size, and half precision is slow on CPUs."""
    width, tokens = grid[1], grid[0] * grid[1]
    triple, kernel = column_shifts(x, grid), kernel.transpose([0, 2, 1])
    rows = []
    for row in range(3):
        a, b, c = (part * kernel[:, 3 * row + i : 3 * row + i + 1] for i, part in enumerate(triple))
        rows.append((a + b + c)[:, row * width : row * width + tokens])
    return rows[0] + rows[1] + rows[2]


def column_shifts(x: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """For every token of x [B, H*W, C] its left neighbour, itself and its right neighbour, zero outside the grid: each
    [B, (H + 2) * W, C], with a row of zeros above and one below."""
    (height, width), (batch, _, channels) = grid, x.shape
    tokens = height * width
    has_left, has_right = inner_columns(height, width, x.dtype)
    zeros = paddle.zeros([batch, width + 1, channels], x.dtype)
    x, size = paddle.concat([zeros, x, zeros], axis=1), tokens + 2 * width
    return x[:, :size] * has_left, x[:, 1 : size + 1], x[:, 2 : size + 2] * has_right


@constant
def inner_columns(height: int, width: int, dtype: paddle.dtype) -> tuple[Tensor, Tensor]:
    """[1, (H + 2) * W, 1]: 1 for tokens with a left, and with a right neighbour, else 0."""
    library = np if isinstance(width, int) and isinstance(height, int) else paddle  # a constant if the size is known
    column = library.arange(-width, height * width + width).reshape([1, -1, 1]) % width
    left, right = (paddle.to_tensor(mask.astype("float32")).astype(dtype) for mask in (column > 0, column < width - 1))
    return left, right
