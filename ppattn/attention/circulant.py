r"""Circulant attention (Han et al., AAAI 2026, arXiv 2512.21542).

Every channel has one weight for each of the N shifts m of the H x W map, which wraps around at its borders:

    a[m] = N^-1/2 sum_p q[p] k[p + m],   A = softmax_m(a),   y[p] = sum_m A[m] v[p + m],   out = proj(y * silu(gate(x)))

By the real Fourier transform (F, orthonormal) a = F^-1(conj(F q) F k) and y = sqrt(N) F^-1(conj(F A) F v). The
transform is two products with constant matrices, one along each axis, which any engine runs. Cost per layer: at most
6 (W + 2 H) (1 + 2 / W) N C multiply-accumulates besides the projections (5 N C^2), so N^1.5 on square maps.

Weights are by channel, so `num_heads` has no effect, and the projection to q, k and v never has a bias. Prefix tokens
have no place on the torus (there are none in the official models): grid tokens do not see them; a prefix token takes
per channel softmax_n(q k_n) v_n over all tokens. Transforms and softmax run in float32.

Differences from the official code (LeapLabTHU/Circulant-Attention, models/ca_deit.py): any grid; q, k and v are
transformed instead of x; `proj_drop` is applied. Its convolution in front of the block belongs to the backbone (`cpe`).
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor

from ppattn import ops
from ppattn.attention.base import Attention, AttentionSpec, Context, Parts, register_attention
from ppattn.layers import Linear
from ppattn.ops import as_dtype, as_float32, exact_dtype, full_precision, is_dynamic, split_tensor


@register_attention("circulant")
class CirculantAttention(Attention):
    official: ClassVar = {"gate.0": "gate"}

    def __init__(self, spec: AttentionSpec):
        super().__init__(spec)
        c = self.num_maps = spec.dim  # every channel has a map of its own
        self.qkv, self.gate, self.proj = Linear(c, 3 * c, bias=False), Linear(c, c), Linear(c, c)

    def project(self, x: Tensor, context: Context) -> Parts:
        """q, k and v [B, N, C] in float32 or better, and the gate [B, N, C]."""
        q, k, v = split_tensor(as_float32(self.qkv(x)), 3)
        return Parts(q, k, v, ops.silu(self.gate(x)))

    @full_precision
    def attend(self, parts: Parts, context: Context) -> Tensor:
        prefix, fourier = self.spec.num_prefix, fourier_of(tuple(context.hw), parts.q.dtype)
        (height, width), v = context.hw, parts.v[:, prefix:]
        shifts = self.shifts(parts, fourier) * (1.0 * height * width) ** 0.5
        y = fourier.inverse(*product_with_conjugate(fourier(shifts), fourier(v)))
        if not prefix:
            return y
        return paddle.concat([(self.prefix_weights(parts) * parts.v.unsqueeze(1)).sum(axis=2), y], axis=1)

    def shifts(self, parts: Parts, fourier: Fourier) -> Tensor:
        """A [B, H*W, C]: the weights of the shifts."""
        q, k = (fourier(t[:, self.spec.num_prefix :]) for t in (parts.q, parts.k))
        return F.softmax(fourier.inverse(*product_with_conjugate(q, k)), axis=1)

    def prefix_weights(self, parts: Parts) -> Tensor:
        """[B, P, N, C]: of prefix tokens on all."""
        return F.softmax(parts.q[:, : self.spec.num_prefix].unsqueeze(2) * parts.k.unsqueeze(1), axis=2)

    @full_precision
    def weights(self, parts: Parts, context: Context) -> Tensor:
        prefix, (height, width) = self.spec.num_prefix, context.hw
        shifts = self.shifts(parts, fourier_of(tuple(context.hw), parts.q.dtype)).transpose([0, 2, 1])  # [B, C, N]
        row, column = np.divmod(np.arange(height * width), width)
        index = (row - row[:, None]) % height * width + (column - column[:, None]) % width
        grid = shifts.index_select(paddle.to_tensor(index.reshape(-1)), axis=2)
        grid = grid.reshape([*shifts.shape[:2], *index.shape])
        if not prefix:
            return grid
        grid = paddle.concat([paddle.zeros([*grid.shape[:3], prefix], grid.dtype), grid], axis=3)
        return paddle.concat([self.prefix_weights(parts).transpose([0, 3, 1, 2]), grid], axis=2)

    def values(self, parts: Parts, context: Context) -> Tensor:
        return parts.v.transpose([0, 2, 1]).unsqueeze(3)  # every channel is a head


class Fourier:
    """The orthonormal real Fourier transform of maps (H, W) as products with matrices; half of the columns is kept."""

    def __init__(self, hw: tuple[int, int], dtype: paddle.dtype):
        self.hw, (library, exact) = hw, (paddle, exact_dtype(dtype)) if is_dynamic(*hw) else (np, "float64")

        def waves(first: int, second: int) -> list[Tensor]:
            """cos and sin of 2 pi i j / second for i < first and j < second, divided by sqrt(second)."""
            products = library.arange(first).reshape([-1, 1]) * library.arange(second) % second
            angles = 2.0 * math.pi * products.astype(exact) / second
            return [wave(angles) / (1.0 * second) ** 0.5 for wave in (library.cos, library.sin)]

        (height, width), half = hw, hw[1] // 2 + 1
        column = library.arange(half)
        single = ((column == 0) | (2 * column == width)).astype(exact)  # the other columns stand for two
        rows, columns = waves(height, height), waves(half, width)
        back = [wave.T * (2.0 - single) for wave in columns]
        pairs = ([as_dtype(paddle.to_tensor(matrix), dtype) for matrix in pair] for pair in (rows, columns, back))
        self.rows, self.columns, self.back = pairs

    def along_rows(self, wave: Tensor, x: Tensor) -> Tensor:
        return paddle.matmul(wave, x.flatten(2)).reshape([-1, self.hw[0], self.hw[1] // 2 + 1, x.shape[3]])

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, H*W, C] -> real and imaginary part [B, H, W // 2 + 1, C]."""
        x, (cos, sin) = x.reshape([-1, *self.hw, x.shape[2]]), self.rows
        a, b = (paddle.matmul(wave, x) for wave in self.columns)
        return self.along_rows(cos, a) - self.along_rows(sin, b), -self.along_rows(sin, a) - self.along_rows(cos, b)

    def inverse(self, real: Tensor, imaginary: Tensor) -> Tensor:
        """The map [B, H*W, C] of a spectrum."""
        (height, width), (cos, sin) = self.hw, self.rows
        a = self.along_rows(cos, real) - self.along_rows(sin, imaginary)
        b = self.along_rows(cos, imaginary) + self.along_rows(sin, real)
        x = paddle.matmul(self.back[0], a) - paddle.matmul(self.back[1], b)
        return x.reshape([-1, height * width, real.shape[3]])


fourier_of = ops.constant(Fourier)


def product_with_conjugate(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """conj(a) b, by real and imaginary part."""
    return a[0] * b[0] + a[1] * b[1], a[0] * b[1] - a[1] * b[0]
