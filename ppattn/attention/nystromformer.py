r"""Nystromformer: softmax attention by the Nystrom method (Xiong et al., AAAI 2021, arXiv 2102.03902).

With L(X) the landmarks of X and s(X, Y) = softmax(X Y^T / sqrt(d)) over the rows (eq. 13-14):

    Y = s(Q, L(K)) Z (s(L(Q), K) V) + convolution of V
    A = s(L(Q), L(K));   Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4  from  Z = A^T / (|A|_1 |A|_inf)

Cost per layer: 4 N m C + 2 m^2 C + 4 pinv_iters h m^3 + kernel_size^2 N C multiply-accumulates besides the projections
(4 N C^2), and 2 C (a H W + a b W) for the means; linear in N.

Landmarks are means over a x b cells of the map, as adaptive average pooling forms them (cells overlap by a token where
the side does not divide), a and b the side of `num_landmarks` or that of the map at the build, where it is shorter:
m = P + a b stays the same for any input size. Prefix tokens join the landmarks as they are.

Options: `num_landmarks` (49, a square); `pinv_iters` (6, the published count); `kernel_size` (3, odd; 0: none).
Kernels and inverse run in float32; the gradient is that of the iteration.

Where we differ from the official code: it takes means of segments of the flattened tokens, and a convolution along
them (one kernel per head, as here), where we use the two dimensions of the map; prefix tokens get no convolution. |A|_1
is per image and head; the official language code takes its maximum over the whole batch, so that an image's output
depends on its batch mates. |A|_inf is 1.
"""

from __future__ import annotations

import paddle
import paddle.nn.functional as F

from ppattn import ops
from ppattn.attention.base import Attention, cell_means, check_count, register_attention
from ppattn.attention.soft import identity_like, landmark_side
from ppattn.errors import UserError
from ppattn.layers import Linear, conv2d
from ppattn.ops import as_float32, full_precision, merge_heads, split, split_heads


@register_attention("nystromformer")
class NystromformerAttention(Attention):
    def __init__(self, spec, *, num_landmarks: int = 49, pinv_iters: int = 6, kernel_size: int = 3):
        super().__init__(spec)
        side = landmark_side("nystromformer", num_landmarks)
        check_count("nystromformer attention: pinv_iters", pinv_iters, 0)
        check_count("nystromformer attention: kernel_size", kernel_size, 0)
        if kernel_size and kernel_size % 2 == 0:
            raise UserError(f"nystromformer attention: kernel_size = {kernel_size} must be odd, or 0 for none.")
        h = self.num_heads
        self.cells, self.pinv_iters = [min(side, length) for length in spec.grid], pinv_iters
        self.qkv = Linear(spec.dim, 3 * spec.dim, bias=spec.qkv_bias)
        self.proj = Linear(spec.dim, spec.dim)
        self.conv = conv2d(h, h, kernel_size, padding=kernel_size // 2, groups=h, bias=False) if kernel_size else None

    def project(self, x, context):
        """q (scaled) and k [B, h, N, d] in float32 or better, v [B, N, C]."""
        q, k, v = split(self.qkv(x), 3)
        q, k = (as_float32(split_heads(t, self.num_heads)) for t in (q, k))
        return q * self.head_dim**-0.5, k, v

    @full_precision
    def attend(self, parts, context):
        left, inverse, right = self.kernels(*parts[:2], context.hw)
        right = paddle.matmul(right, self.values(parts, context))
        return merge_heads(paddle.matmul(left, paddle.matmul(inverse, right)))

    def local(self, parts, context):
        if self.conv is None:
            return None
        return ops.depthwise_conv(parts[2], self.conv.weight, None, context.hw, self.spec.num_prefix, per_head=True)

    def weights(self, parts, context):
        left, inverse, right = self.kernels(*parts[:2], context.hw)
        return paddle.matmul(paddle.matmul(left, inverse), right)

    def values(self, parts, context):
        return as_float32(split_heads(parts[2], self.num_heads))

    def landmarks(self, x, hw):
        """[B, h, N, d] -> [B, h, m, d]."""
        prefix, h, d = self.spec.num_prefix, self.num_heads, self.head_dim
        a, b = self.cells
        grid = paddle.matmul(cell_means(hw[0], a, x.dtype), x[:, :, prefix:].reshape([-1, hw[0], hw[1] * d]))
        grid = paddle.matmul(cell_means(hw[1], b, x.dtype), grid.reshape([-1, hw[1], d])).reshape([-1, h, a * b, d])
        return paddle.concat([x[:, :, :prefix], grid], axis=2) if prefix else grid

    def kernels(self, q, k, hw):
        """s(Q, L(K)) [B, h, N, m], Z [B, h, m, m], s(L(Q), K) [B, h, m, N]."""
        near_q, near_k = self.landmarks(q, hw), self.landmarks(k, hw)
        inverse = pseudo_inverse(softmax_kernel(near_q, near_k), self.pinv_iters)
        return softmax_kernel(q, near_k), inverse, softmax_kernel(near_q, k)


def softmax_kernel(q, k):
    return F.softmax(paddle.matmul(q, k, transpose_y=True))


def pseudo_inverse(kernel, iters: int):
    eye = identity_like(kernel)
    inverse = kernel.transpose([0, 1, 3, 2]) / kernel.sum(axis=-2, keepdim=True).max(axis=-1, keepdim=True)
    for _ in range(iters):
        product = paddle.matmul(kernel, inverse)
        inner = 15.0 * eye - paddle.matmul(product, 7.0 * eye - product)
        inverse = 0.25 * paddle.matmul(inverse, 13.0 * eye - paddle.matmul(product, inner))
    return inverse
