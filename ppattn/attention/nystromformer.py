r"""Nystromformer: softmax attention by the Nystrom method (Xiong et al., AAAI 2021, arXiv 2102.03902).

With L(X) the landmarks of X and s(X, Y) = softmax(X Y^T / sqrt(d)) over the rows (eq. 13-14):

    Y = s(Q, L(K)) Z (s(L(Q), K) V) + convolution of V
    A = s(L(Q), L(K));   Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4  from  Z = A^T / (|A|_1 |A|_inf)

Cost per layer: 4 N m C + 2 m^2 C + 4 pinv_iters h m^3 + kernel_size^2 N C multiply-accumulates besides the projections
(4 N C^2), and 2 C (b H W + a b H) for the means; linear in N.

Landmarks are means over a x b cells of the map, those of adaptive average pooling (cells overlap by a token if the side
is not divisible). a and b are the square root of `num_landmarks`, or the side of the map at the build if it is shorter:
m = P + a b is the same for any input size. A sequence has `num_landmarks` segments. Prefix tokens are landmarks, too.

Options: `num_landmarks` (49, a square); `pinv_iters` (6, the published count); `kernel_size` (3, odd; 0: none).
Kernels and inverse run in float32; the gradient is that of the iteration.

Differences from the official code: means and convolution (one kernel per head) are two-dimensional; prefix tokens get
no convolution. |A|_1 is per image and head (the official language code takes its maximum over the batch), |A|_inf 1.
"""

from typing import Annotated

import paddle
import paddle.nn.functional as F
from paddle import Tensor

from ppattn import ops
from ppattn.attention.base import Attention, AttentionSpec, Context, PackedParts, grid_means, register_attention
from ppattn.attention.soft import identity_like
from ppattn.layers import Linear, conv2d
from ppattn.ops import as_float32, full_precision, merge_heads, split_heads
from ppattn.validation import Count, Square, must

OddOrNone = Annotated[Count, must(lambda size: size == 0 or size % 2, "odd, or 0 for none")]


@register_attention("nystromformer")
class NystromformerAttention(Attention):
    convolution, per_head = "conv", True

    def __init__(
        self, spec: AttentionSpec, *, num_landmarks: Square = 49, pinv_iters: Count = 6, kernel_size: OddOrNone = 3
    ):
        super().__init__(spec)
        h, (rows, columns) = self.num_heads, spec.cells(num_landmarks)
        self.cells = min(rows, spec.grid[0]), min(columns, spec.grid[1])
        self.pinv_iters = pinv_iters
        self.qkv, self.proj = Linear(spec.dim, 3 * spec.dim, bias=spec.qkv_bias), Linear(spec.dim, spec.dim)
        self.conv = conv2d(h, h, kernel_size, padding=kernel_size // 2, groups=h, bias=False) if kernel_size else None

    def project(self, x: Tensor, context: Context) -> PackedParts:
        """q [B, N, C], and k, v [B, N, 2C], in float32 or better."""
        q, kv = self.qkv(x).split([self.spec.dim, 2 * self.spec.dim], axis=-1)
        return PackedParts(as_float32(q), as_float32(kv))

    @full_precision
    def attend(self, parts: PackedParts, context: Context) -> Tensor:
        h, scale = self.num_heads, self.head_dim**-0.5
        near_q, near_k, inverse = self.landmarks(parts, context.hw)
        u = split_heads(ops.softmax_attention(near_q, h, scale, parts.kv), h)
        u = merge_heads(paddle.matmul(inverse, u))
        return ops.softmax_attention(parts.q, h, scale, paddle.concat([near_k, u], axis=-1))

    def weights(self, parts: PackedParts, context: Context) -> Tensor:
        near_q, near_k, inverse = self.landmarks(parts, context.hw)
        left = self.kernel(parts.q, near_k)
        return paddle.matmul(paddle.matmul(left, inverse), self.kernel(near_q, parts.kv[:, :, : self.spec.dim]))

    def landmarks(self, parts: PackedParts, hw: tuple[int, int]) -> tuple[Tensor, ...]:
        """L(Q) and L(K) [B, m, C], Z [B, h, m, m]."""
        prefix, near = self.spec.num_prefix, []
        for t in (parts.q, parts.kv[:, :, : self.spec.dim]):
            means = grid_means(t, hw, self.cells, prefix)
            near.append(paddle.concat([t[:, :prefix], means], axis=1) if prefix else means)
        near_q, near_k = near
        return near_q, near_k, pseudo_inverse(self.kernel(near_q, near_k), self.pinv_iters)

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        """s(q, k) [B, h, N, M]."""
        q, k = (split_heads(t, self.num_heads) for t in (q, k))
        return F.softmax(paddle.matmul(q * self.head_dim**-0.5, k, transpose_y=True))


def pseudo_inverse(kernel: Tensor, iters: int) -> Tensor:
    eye = identity_like(kernel)
    inverse = kernel.transpose([0, 1, 3, 2]) / kernel.sum(axis=-2, keepdim=True).max(axis=-1, keepdim=True)
    for _ in range(iters):
        product = paddle.matmul(kernel, inverse)
        inner = 15.0 * eye - paddle.matmul(product, 7.0 * eye - product)
        inverse = 0.25 * paddle.matmul(inverse, 13.0 * eye - paddle.matmul(product, inner))
    return inverse
