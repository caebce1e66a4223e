"""Convolutions of maps, and depth-wise ones of grid tokens with trained or predicted taps: each plain and compiled.

Tokens are [B, P + H*W, C]: P prefix tokens (class token), then the H x W grid row by row.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from ppattn.ops.dispatch import compiled, run, wanted

HALF = (paddle.float16, paddle.bfloat16)
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
    """Grid tokens y [B, H*W, C] behind zeros for the P tokens in front of x [B, P + H*W, C]."""
    return paddle.concat([0.0 * x[:, :num_prefix], y], axis=1) if num_prefix else y


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int = 1, padding: int = 0) -> Tensor:
    """Convolution of x [B, C, H, W] with weight [F, C, k, k] and bias [F] or None -> [B, F, H', W']."""
    if compiled(x, weight, bias):
        return run("conv2d", x, weight, bias, stride, padding, wanted(x, weight, bias))
    return F.conv2d(x, weight, bias, stride, padding)


def depthwise_conv(
    v: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    grid: tuple[int, int],
    num_prefix: int = 0,
    per_head: bool = False,
    skip: bool = False,
) -> Tensor:
    """Convolves every channel of the grid with a k x k kernel of its own; stride 1, zero padding k // 2, k odd.

    Args:
        v: [B, P + H*W, C].
        weight: [C, 1, k, k]; or [d, 1, k, k] for d channels per head, shared by the heads; or with `per_head`
            [h, 1, k, k], one kernel for all channels of a head.
        bias: one number per kernel, or None.
        grid: (H, W).
        num_prefix: P.
        skip: add v to the result.

    Returns:
        [B, P + H*W, C], zero (with `skip`: v) for the P tokens in front.
    """
    (kernels, _, k, _), channels = weight.shape, v.shape[2]
    if k in COMPILED and compiled(v, weight, bias):
        taps, repeat = weight.reshape([1, kernels, k, k]), channels // kernels if per_head else 1
        inside = skip and not num_prefix
        y = run("depthwise_conv", v, taps, bias, *grid, repeat, inside, wanted(v, weight, bias))
        return v + y if skip and not inside else y
    x, tokens, share = v[:, num_prefix:] if num_prefix else v, grid[0] * grid[1], channels // kernels
    # one transpose, because oneDNN's passes lose the shape of a reshape between two
    x = x.reshape([-1, tokens, kernels, share]).transpose([0, 3, 2, 1]) if per_head else x.transpose([0, 2, 1])
    y = F.conv2d(x.reshape([-1, kernels, *grid]), weight, bias, padding=k // 2, groups=kernels)
    if per_head:
        y = y.reshape([-1, share, kernels, tokens]).transpose([0, 3, 2, 1]).flatten(2)
    else:
        y = y.reshape([-1, channels, tokens]).transpose([0, 2, 1])
    y = behind_prefix(y, v, num_prefix)
    return v + y if skip else y


class DynamicConv3x3(nn.Layer):
    """`dynamic_conv3x3` as a layer: a program traced inside `with constants(model)` is fast, too."""

    CONSTANTS = ("analysis", "taps_analysis", "synthesis")

    def __init__(self, grid: tuple[int, int], num_prefix: int = 0):
        super().__init__()
        self.grid, self.num_prefix = tuple(grid), num_prefix

    def forward(self, v: Tensor, taps: Tensor, grid: tuple[int, int]) -> Tensor:
        """v [B, P + H*W, C] and taps [B, C, 9] -> [B, P + H*W, C], zero for the P tokens in front."""
        known = isinstance(grid[0], int) and isinstance(grid[1], int)  # else the program is traced for any size
        if not paddle.in_dynamic_mode() and "analysis" in self._buffers and known and tuple(grid) == self.grid:
            return _convolve_by_products(v, taps, self.analysis, self.taps_analysis, self.synthesis)
        return dynamic_conv3x3(v, taps, grid, self.num_prefix)


@contextlib.contextmanager
def constants(model: nn.Layer) -> Iterator[None]:
    """Programs traced inside take constants from layers only: gives the model's predicted convolutions their matrices.

    Layers of the same grid share them, so that they are saved once; grids beyond `DENSE` tokens stay with patches.
    """
    layers = [layer for layer in model.sublayers() if isinstance(layer, DynamicConv3x3)]
    layers = [layer for layer in layers if layer.grid[0] * layer.grid[1] <= DENSE]
    made: dict[tuple, list[Tensor]] = {}
    for layer in layers:
        key = (*layer.grid, layer.num_prefix)
        if key not in made:
            made[key] = [paddle.to_tensor(matrix, dtype="float32") for matrix in dft_matrices(*key)]
        for name, value in zip(layer.CONSTANTS, made[key], strict=True):
            layer.register_buffer(name, value, persistable=False)
    try:
        yield
    finally:
        for layer in layers:
            for name in layer.CONSTANTS:
                delattr(layer, name)


def dynamic_conv3x3(v: Tensor, taps: Tensor, grid: tuple[int, int], num_prefix: int = 0) -> Tensor:
    """Cross-correlates every channel of every image with its own 3x3 taps; zero padding 1.

    Args:
        v: [B, P + H*W, C].
        taps: [B, C, 9], row by row.
        grid: (H, W).
        num_prefix: P.

    Returns:
        [B, P + H*W, C], zero for the P tokens in front.
    """
    if compiled(v, taps):
        return run("depthwise_conv", v, taps.reshape([*taps.shape[:2], 3, 3]), None, *grid, 1, False, wanted(v, taps))
    if paddle.in_dynamic_mode() and v.dtype not in HALF and grid[0] * grid[1] <= DENSE:
        return _convolve_by_products(v, taps, *_basis(*grid, num_prefix, v.dtype, paddle.get_device()))
    channels, tokens = v.shape[2], grid[0] * grid[1]
    patches = F.unfold(grid_map(v, grid, num_prefix), 3, paddings=1).reshape([-1, 9, tokens])
    y = paddle.matmul(taps.reshape([-1, 1, 9]), patches).reshape([-1, channels, tokens])
    return behind_prefix(y.transpose([0, 2, 1]), v, num_prefix)


def _convolve_by_products(
    v: Tensor, taps: Tensor, analysis: Tensor, taps_analysis: Tensor, synthesis: Tensor
) -> Tensor:
    spectrum, response = paddle.matmul(analysis, v), paddle.matmul(taps_analysis, taps, transpose_y=True)
    return paddle.matmul(synthesis, spectrum * response)


# Largest grid for the three products, whose cost grows with the square of the tokens; beyond it patches are cheaper.
DENSE = 400


@functools.lru_cache(maxsize=16)
def _basis(height: int, width: int, prefix: int, dtype, device: str) -> tuple[Tensor, ...]:
    return tuple(paddle.to_tensor(m, dtype=dtype, place=device) for m in dft_matrices(height, width, prefix))


def dft_matrices(height: int, width: int, prefix: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Constants A [R, P + N], T [R, 9], S [P + N, R] with  conv(v, taps) = S ((A v) (T taps)),  R about 1.7 N.

    This is the convolution theorem in real numbers. A period of one more than the grid is enough for taps that reach
    one token beyond it. With a + bi for v and c + di for the taps at a frequency, real part ac - bd = k1 - k3 and
    imaginary part ad + bc = k1 + k2 come from three products k1 = (a + b) c, k2 = a (d - c), k3 = b (c + d).
    """
    rows, columns = np.divmod(np.arange(height * width), width)
    tap_rows, tap_columns = np.divmod(np.arange(9), 3)
    periods, seen = (height + 1, width + 1), set()
    analysis: list[np.ndarray] = []
    taps: list[np.ndarray] = []
    synthesis: list[np.ndarray] = []
    for u, w in np.ndindex(periods):
        if (-u % periods[0], -w % periods[1]) in seen:
            continue  # the conjugate of one that was taken
        seen.add((u, w))
        angle = 2 * np.pi * (u * rows / periods[0] + w * columns / periods[1])
        tap_angle = 2 * np.pi * (u * (tap_rows - 1) / periods[0] + w * (tap_columns - 1) / periods[1])
        cos, sin, c, d = np.cos(angle), np.sin(angle), np.cos(tap_angle), np.sin(tap_angle)
        share = 1 / (periods[0] * periods[1])
        if (2 * u) % periods[0] == 0 and (2 * w) % periods[1] == 0:  # real
            analysis, taps, synthesis = [*analysis, cos], [*taps, c], [*synthesis, share * cos]
            continue
        analysis += [cos - sin, cos, -sin]
        taps += [c, d - c, c + d]
        synthesis += [2 * share * (cos - sin), -2 * share * sin, -2 * share * cos]
    empty = np.zeros([len(taps), prefix])
    return np.hstack([empty, analysis]), np.stack(taps), np.hstack([empty, synthesis]).T
