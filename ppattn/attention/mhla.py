r"""MHLA: multi-head linear attention over blocks of tokens (Zhang et al., ICLR 2026, arXiv 2601.07832).

The H x W grid is cut into M blocks of w x w tokens. A learned matrix m [M, M], shared by the heads, mixes the states of
the blocks: m[i, c] is the weight of the keys of block c for the queries of block i. With b(n) the block of token n, and
n(c) the token at the same place in block c:

    u = LN(x);   q, k = relu(RMSNorm(.)) + eps of the projections of u,   v the third one
    S_c = sum_{j in c} k_j v_j^T,   z_c = sum_{j in c} k_j,   den_n = eps + sum_c m[b(n), c] q_{n(c)} . z_c
    y_n = q_n^T (sum_c m[b(n), c] S_c) / den_n + LePE(v)_n                                     LePE: depth-wise 5 x 5

The normaliser is that of the official code: it takes the queries at the same place in the other blocks, where equation
4 of the paper takes q_n itself, so the weights of a query sum to about 1. Cost per layer: 2 N C d + M^2 C d + M N h +
26 N C multiply-accumulates besides the projections (4 N C^2), state M h d^2; linear in N for a fixed number of blocks.

Options:
    piece_size: the side w of a block, which must divide both sides of the grid. None takes the largest common divisor
        of H and W with M >= 4 and M^2 <= H W, or else the largest one, that is, the fewest blocks. Sides without a
        common divisor make every token a block, which costs N^2 C d. Blocks of a sequence are w tokens in a row, by
        default about the square root of its largest length. The last one is filled up with keys and queries of zero,
        and a shorter sequence has the first blocks of the matrix.
    transform: the initial matrix, from the Euclidean distances D between blocks: `linear` 1 - D / max D, `cos`
        cos(pi/4 D / max D), `exp` exp(-D / `exp_sigma`), `local` [D <= `local_thres`], each divided by its column sums;
        `gaussian` exp(-9 D^2 / (2 max D^2)), not normalised. A single block starts at 1.
    qk_norm: RMSNorm (eps 2^-23) of q and k over all channels; off by default.
    eps: see the formulas; 1e-6.
    local_term: LePE.

The defaults are those of the official class; its training script sets `qk_norm: true, transform: linear`. Features,
sums and normaliser are computed in float32.

The paper clips m to (0, 1) after every step; the official code and this one do not. At high learning rates entries may
become negative and den_n come near 0: the configs here give m a tenth of the rate (`optimizer.lr_scale`).

Differences from the official code (DAGroup-PKU/MHLA, class MHLA_Normed_Torch), which takes square grids of one size,
without prefix tokens, sorted by block: tokens come in raster order, grids may be rectangular, and another grid than
that of the build resizes the matrix along the rows and columns of its blocks. Every grid query gives prefix tokens the
weight of an average block, 1/M; prefix queries give all tokens the same weight.
"""

import math
from typing import ClassVar, Literal

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn
from paddle.nn.initializer import Assign, Constant

from ppattn import ops
from ppattn.attention.base import Attention, AttentionSpec, Context, Parts, register_attention
from ppattn.errors import UserError
from ppattn.layers import LayerNorm, Linear, conv2d, grid_of
from ppattn.validation import AboveZero, Positive

RMS_EPS = 2.0**-23


@register_attention("mhla")
class MHLAttention(Attention):
    convolution = "lepe"
    official: ClassVar = {"to_qkv": "qkv", "to_out.0": "proj"}

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        piece_size: Positive | None = None,
        qk_norm: bool = False,
        transform: Literal["linear", "cos", "exp", "gaussian", "local"] = "cos",
        local_thres: AboveZero = 1.5,
        exp_sigma: AboveZero = 3.0,
        eps: AboveZero = 1e-6,
        local_term: bool = True,
    ):
        super().__init__(spec)
        c = spec.dim
        self.piece_size, self.eps = piece_size, eps
        self.segment = piece_size or math.ceil(spec.grid[1] / math.isqrt(spec.grid[1]))  # of a sequence
        self.blocks = self.layout(spec.grid)[:2]
        start = mixing_start(self.blocks, transform, local_thres, exp_sigma)
        self.norm = LayerNorm(c)
        self.qkv = Linear(c, 3 * c, bias=spec.qkv_bias)
        self.q_norm, self.k_norm = (RMSNorm(c) if qk_norm else None for _ in range(2))
        self.mixing = self.create_parameter(list(start.shape), default_initializer=Assign(start))
        self.lepe = conv2d(c, c, 5, padding=2, groups=c) if local_term else None
        self.proj = Linear(c, c)

    def layout(self, hw: tuple[int, int]) -> tuple[int, int, int, int]:
        """Rows and columns of blocks on the grid hw, and of tokens in a block."""
        if ops.is_dynamic(*hw):
            raise UserError("mhla attention is exported for one input size: its blocks depend on the grid.")
        if self.spec.sequence:
            return 1, -(-hw[1] // self.segment), 1, self.segment
        side = piece_side(hw, self.piece_size)
        return hw[0] // side, hw[1] // side, side, side

    def project(self, x: Tensor, context: Context) -> Parts:
        """q and k [B, N, C], positive, in float32 or better; v [B, N, C]."""
        q, k, v = ops.split_tensor(self.qkv(self.norm(x)), 3)
        q, k = ops.as_float32(q), ops.as_float32(k)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return Parts(F.relu(q) + self.eps, F.relu(k) + self.eps, v)

    def mixing_for(self, blocks: tuple[int, int]) -> Tensor:
        """The mixing matrix [M, M] for these rows and columns of blocks, in float32 or better."""
        matrix = ops.as_float32(self.mixing)
        if self.spec.sequence:
            return matrix[: blocks[1], : blocks[1]]
        return matrix if blocks == self.blocks else resize_mixing(matrix, self.blocks, blocks)

    @ops.full_precision
    def attend(self, parts: Parts, context: Context) -> Tensor:
        q, k, v = parts.q, parts.k, ops.as_float32(parts.v)
        p, h, d, hw = self.spec.num_prefix, self.num_heads, self.head_dim, context.hw
        blocks = self.layout(hw)[:2]
        m, mixing = blocks[0] * blocks[1], self.mixing_for(blocks)
        qs, ks, vs = (self.cut(part[:, p:] if p else part, hw) for part in (q, k, v))
        state, total = paddle.matmul(ks, vs, transpose_x=True), ks.sum(axis=3, keepdim=True)  # of every block
        mixed = paddle.matmul(mixing, state.reshape([-1, h, m, d * d])).reshape([-1, h, m, d, d])
        below = paddle.matmul(mixing, paddle.matmul(qs, total, transpose_y=True).squeeze(-1)).unsqueeze(-1)
        if not p:
            return self.join(paddle.matmul(qs, mixed) / (below + self.eps), hw)
        first_q, first_k = ops.split_heads(q[:, :p], h), ops.split_heads(k[:, :p], h)
        first_v = ops.split_heads(v[:, :p], h)
        first_state, first_total = paddle.matmul(first_k, first_v, transpose_x=True), first_k.sum(axis=2, keepdim=True)
        mixed = mixed + first_state.unsqueeze(2) / m
        below = below + paddle.matmul(qs, first_total.unsqueeze(2), transpose_y=True) / m
        y = self.join(paddle.matmul(qs, mixed) / (below + self.eps), hw)
        state, total = state.sum(axis=2) + first_state, total.sum(axis=2) + first_total
        seen = paddle.matmul(first_q, state) / (paddle.matmul(first_q, total, transpose_y=True) + self.eps)
        return paddle.concat([ops.merge_heads(seen), y], axis=1)

    def cut(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """Grid tokens [B, H*W, C] by head and block [B, h, M, w*w, d]; zeros fill up the last block of a sequence."""
        rows, columns, height, width = self.layout(hw)
        x = ops.pad_end(x, 1, columns * width - hw[1])
        x = x.reshape([-1, rows, height, columns, width * self.spec.dim]).transpose([0, 1, 3, 2, 4])
        x = x.reshape([-1, rows * columns, height * width, self.num_heads, self.head_dim])
        return x.transpose([0, 3, 1, 2, 4])

    def join(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """[B, h, M, w*w, d] -> [B, H*W, C]."""
        rows, columns, height, width = self.layout(hw)
        x = x.transpose([0, 2, 3, 1, 4]).reshape([-1, rows, columns, height, width * self.spec.dim])
        x = x.transpose([0, 1, 3, 2, 4]).reshape([-1, rows * height * columns * width, self.spec.dim])
        return x if columns * width == hw[1] else x[:, : hw[1]]

    @ops.full_precision
    def weights(self, parts: Parts, context: Context) -> Tensor:
        rows, columns, height, width = self.layout(context.hw)
        p, n, m, mixing = self.spec.num_prefix, parts.q.shape[1], rows * columns, self.mixing_for((rows, columns))
        q, k = (ops.pad_end(part, 1, columns * width - context.hw[1]) for part in (parts.q, parts.k))
        q, k = ops.split_heads(q, self.num_heads), ops.split_heads(k, self.num_heads)
        scores = paddle.matmul(q, k, transpose_y=True)
        tokens = np.arange(m * height * width).reshape(rows, height, columns, width)
        tokens = tokens.transpose(0, 2, 1, 3).reshape(m, -1)  # of every block
        block, place = np.divmod(np.argsort(tokens.reshape(-1)), height * width)  # of every token
        inside = paddle.to_tensor(np.eye(m)[block], scores.dtype)  # [N, M]
        sums = paddle.matmul(scores[:, :, p:, p:], inside)  # q_n . z_c [B, h, N, M]
        sums = paddle.take_along_axis(sums, paddle.to_tensor(tokens.T[place])[None, None], axis=2)  # q_{n(c)} . z_c
        shares = paddle.matmul(inside, mixing)  # m[b(n), c]
        first = scores[:, :, p:, :p] / m
        below = (sums * shares).sum(axis=-1, keepdim=True) + first.sum(axis=-1, keepdim=True) + self.eps
        grid = scores[:, :, p:, p:] * paddle.matmul(shares, inside, transpose_y=True)
        grid = paddle.concat([first, grid], axis=-1) / below
        if p:
            top = scores[:, :, :p]
            grid = paddle.concat([top / (self.eps + top.sum(axis=-1, keepdim=True)), grid], axis=2)
        return grid[:, :, :n, :n]

    def resized(self, name: str, array: np.ndarray, img_size: tuple[int, int] | None) -> np.ndarray | None:
        """The mixing matrix of a weights file for the blocks of this layer; None if it fits already."""
        other = name == "mixing" and (img_size is not None or len(array) != len(self.mixing))
        built = grid_of(len(array), img_size) if other else None
        if built in (None, self.blocks) or array.shape[0] != array.shape[1]:
            return None
        return resize_mixing(paddle.to_tensor(array.astype("float32")), built, self.blocks).numpy()

    @classmethod
    def from_official(cls, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        out = super().from_official(arrays)
        if "piece_attn.conv.weight" in out:
            out["mixing"] = out.pop("piece_attn.conv.weight")[:, :, 0, 0]
        return out


class RMSNorm(nn.Layer):
    """x / sqrt(mean x^2 + 2^-23) * weight over the last axis."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = self.create_parameter([dim], default_initializer=Constant(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * paddle.rsqrt((x * x).mean(axis=-1, keepdim=True) + RMS_EPS) * self.weight


def piece_side(hw: tuple[int, int], piece_size: int | None) -> int:
    """The side of a block on the grid hw; see the option `piece_size`, which must divide both sides."""
    sides = [w for w in range(1, min(hw) + 1) if hw[0] % w == hw[1] % w == 0]
    if piece_size is None:
        tokens = hw[0] * hw[1]
        return max([w for w in sides if 4 <= tokens // w**2 <= math.isqrt(tokens)] or sides)
    if piece_size not in sides:
        fit = f"{', '.join(map(str, sides))} or null fit"
        raise UserError(f"mhla: piece_size = {piece_size} does not divide the grid of {hw[0]} x {hw[1]} tokens; {fit}.")
    return piece_size


def mixing_start(blocks: tuple[int, int], transform: str, local_thres: float, exp_sigma: float) -> np.ndarray:
    """The mixing matrix [M, M] before training."""
    place = np.stack(np.meshgrid(*map(np.arange, blocks), indexing="ij"), -1).reshape(-1, 2)
    distance = np.linalg.norm(place[:, None] - place, axis=-1)
    largest = distance.max() or 1.0
    if transform == "gaussian":
        return np.exp(-9 * distance**2 / (2 * largest**2)).astype("float32")
    start = {
        "linear": 1.0 - distance / largest,
        "cos": np.cos(np.pi / 4 * distance / largest),
        "exp": np.exp(-distance / exp_sigma),
        "local": (distance <= local_thres).astype("float64"),
    }[transform]
    return (start / start.sum(axis=0)).astype("float32")


def resize_mixing(matrix: Tensor, built: tuple[int, int], wanted: tuple[int, int]) -> Tensor:
    """A mixing matrix for other blocks: its rows and its columns are interpolated on the grid of blocks."""
    rows, columns = (ops.interpolation_matrix(built[axis], wanted[axis], matrix.dtype) for axis in (0, 1))
    resize = paddle.kron(rows, columns)
    return paddle.matmul(paddle.matmul(resize, matrix), resize, transpose_y=True)
