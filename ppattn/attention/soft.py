r"""SOFT: softmax-free attention, a Gaussian kernel with Nystrom landmarks (Lu et al., NeurIPS 2021, arXiv 2110.11945).

    q = k = W x / d^(1/4);    S_ij = exp(-|q_i - q_j|^2 / 2)
    L = GELU(LN(downsample(q)))  [m landmarks];   K1 = exp(-|q - L|^2 / 2);   K2 = exp(-|L - L|^2 / 2)
    Y = K1 (K2 + 0.01 I)^-1 K1^T V + depth-wise convolution of V over the heads

The inverse is `newton_iters` steps V <- 2V - V P V with P = K2 + 0.01 I from V0 = a P with a = 1.8 / (largest row sum
of K2)^2 per image and head. Twenty steps (the default) often do not converge for 49 landmarks, so the count is part of
the definition. The backward pass is the published rule dK2 = -V^T G V^T; it does not differentiate the iteration.

Cost per layer: 3 N m C + 2 m^2 C + 2 newton_iters h m^3 multiply-accumulates besides the projections (3 N C^2), k^2 N C
for the convolution and N C d for the landmarks. Where the backbone has no ratio, parameters grow with the grid (conv).
Options: `landmarks`: "conv" (published: kernel = stride = ratio; m = N / ratio^2 grows with N, so the cost is not
linear) or "pool" (adaptive average pooling to `num_landmarks` = 49, 7 x 7: linear in N); `newton_iters` (20);
`local_term` (False: no convolution of V).
The ratio is the backbone's `sr_ratio`. Otherwise it follows from m <= `num_landmarks` at the build size (as published).
With "conv" a ratio of 1 means the full kernel, Y = S V, without landmarks or inverse. Kernels and inverse run in
float32. A sequence has a landmark for every `ratio` tokens; its last segment is filled up with zeros.

Differences from the official code: prefix tokens join the landmarks (without downsampling) and get no convolution; the
convolution size k = 9, 5, 3 of the stages is derived from the ratio 8, 4, 2, is at most 9, and is 3 with pooled
landmarks in backbones without a ratio; squared distances are clamped at zero.
"""

import math
from typing import Any, ClassVar, Literal

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor

from ppattn import ops
from ppattn.attention.base import Attention, AttentionSpec, Context, Parts, merge_rows, register_attention
from ppattn.errors import UserError
from ppattn.layers import LayerNorm, Linear, conv2d
from ppattn.validation import Count, Square


@register_attention("soft")
class SoftAttention(Attention):
    convolution, per_head = "conv", True
    official: ClassVar = {
        "attn.Qlandmark_op": "landmark", "attn.Qnorm_act.0": "landmark_norm", "attn.conv": "conv", "ff": "proj"
    }  # fmt: skip

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        newton_iters: Count = 20,
        landmarks: Literal["conv", "pool"] = "conv",
        num_landmarks: Square = 49,
        local_term: bool = True,
    ):
        super().__init__(spec)
        ratio = spec.sr_ratio
        if ratio == 1:
            share = spec.grid[0] * spec.grid[1] / num_landmarks
            ratio = math.ceil(share if spec.sequence else math.sqrt(share))
        self.newton_iters, self.ratio = newton_iters, ratio
        self.pooled = spec.cells(num_landmarks) if landmarks == "pool" else None
        if self.uses_landmarks and self.pooled is None:
            self.check_ratio(spec.grid)
        self.qv, self.proj = Linear(spec.dim, 2 * spec.dim, bias=spec.qkv_bias), Linear(spec.dim, spec.dim)
        cell = 2 if landmarks == "pool" and spec.sr_ratio == 1 else min(ratio, 8)
        size, h = max(3, 2 * (cell // 2) + 1), self.num_heads
        self.conv = conv2d(h, h, size, padding=size // 2, groups=h, bias=False) if local_term else None
        if self.uses_landmarks:
            d, step = self.head_dim, (1 if spec.sequence else ratio, ratio)
            self.landmark: Any = None if self.pooled else conv2d(d, d, step, step, bias=False)
            self.landmark_norm = LayerNorm(self.head_dim)
            for layer in filter(None, (self.landmark, self.landmark_norm)):
                ops.keep_float32(layer)  # `attend` runs in float32

    @property
    def uses_landmarks(self) -> bool:
        return self.ratio > 1 or self.pooled is not None

    def project(self, x: Tensor, context: Context) -> Parts:
        """q = k [B, N, C], scaled, in float32 or better, and v [B, N, C]."""
        q, v = ops.split_tensor(self.qv(x), 2)
        q = ops.as_float32(q) * self.head_dim**-0.25
        return Parts(q, q, v)

    @ops.full_precision
    def attend(self, parts: Parts, context: Context) -> Tensor:
        q, v, h = parts.q, ops.as_float32(parts.v), self.num_heads
        if not self.uses_landmarks:
            return ops.gaussian_attention(q, q, v, h)
        landmarks, inverse = self.landmarks(q, context.hw)
        return ops.gaussian_nystrom(q, landmarks, inverse, v, h)

    def weights(self, parts: Parts, context: Context) -> Tensor:
        q = ops.split_heads(parts.q, self.num_heads)
        if not self.uses_landmarks:
            return ops.gaussian_kernel(q, q)
        landmarks, inverse = self.landmarks(parts.q, context.hw)
        k1 = ops.gaussian_kernel(q, ops.split_heads(landmarks, self.num_heads))
        return paddle.matmul(paddle.matmul(k1, inverse), k1, transpose_y=True)

    def landmarks(self, q: Tensor, hw: tuple[int, int]) -> tuple[Tensor, ...]:
        """The landmarks of q [B, N, C] as tokens [B, m, C], and the pseudo-inverse of K2 [B, h, m, m]."""
        prefix, c, d = self.spec.num_prefix, self.spec.dim, self.head_dim
        grid = ops.grid_map(q, hw, prefix).reshape([-1, d, *hw])
        if self.pooled:
            grid = F.adaptive_avg_pool2d(grid, list(self.pooled))
        else:
            self.check_ratio(hw)
            if self.spec.sequence:
                grid = ops.pad_end(grid, 3, -hw[1] % self.ratio)
            grid = self.landmark(grid)
        tokens = grid.reshape([-1, c, grid.shape[2] * grid.shape[3]]).transpose([0, 2, 1])
        if prefix:
            tokens = paddle.concat([q[:, :prefix], tokens], axis=1)
        tokens = self.landmark_norm(tokens.reshape([-1, tokens.shape[1], self.num_heads, d]))
        tokens = ops.gelu(tokens).reshape([-1, tokens.shape[1], c])
        by_head = ops.split_heads(tokens, self.num_heads)
        return tokens, self.invert(ops.gaussian_kernel(by_head, by_head))

    def check_ratio(self, hw: tuple[int, int]) -> None:
        if not self.spec.sequence and not ops.is_dynamic(*hw) and min(hw) < self.ratio:
            raise UserError(f"soft: a map of {hw[0]} x {hw[1]} is smaller than its landmark ratio {self.ratio}.")

    def invert(self, kernel: Tensor) -> Tensor:
        """Newton inverse of the regularised landmark kernel, with the published backward rule."""
        if paddle.in_dynamic_mode() and not kernel.stop_gradient:
            return _NewtonInverse.apply(kernel, self)
        return ops.newton_inverse(*self.newton_inputs(kernel), self.newton_iters)

    def newton_inputs(self, kernel: Tensor) -> tuple[Tensor, Tensor]:
        """The matrix that is inverted, and V0."""
        row_sum = kernel.sum(axis=-1).max(axis=-1)[..., None, None]
        regular = kernel + 0.01 * identity_like(kernel)
        return regular, 1.8 * row_sum**-2.0 * regular

    @classmethod
    def from_official(cls, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return super().from_official(merge_rows(arrays, {"qv": [("W_q", 1, 0), ("W_v", 1, 0)]}))


def identity_like(kernel: Tensor) -> Tensor:
    """The identity [m, m] for a kernel [B, h, m, m]; a constant where m is known, since ONNX has no `eye`."""
    m = kernel.shape[-1]
    if ops.is_dynamic(m):
        index = paddle.arange(m)
        return (index.unsqueeze(1) == index).astype(kernel.dtype)
    return identity(m, kernel.dtype)


@ops.constant
def identity(m: int, dtype: paddle.dtype) -> Tensor:
    return paddle.to_tensor(np.eye(m, dtype="float32"), dtype)


class _NewtonInverse(paddle.autograd.PyLayer):
    @staticmethod
    def forward(ctx: Any, kernel: Tensor, layer: SoftAttention) -> Tensor:
        inverse = ops.newton_inverse(*layer.newton_inputs(kernel), layer.newton_iters)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensor()
        return -paddle.matmul(paddle.matmul(inverse, grad, transpose_x=True), inverse, transpose_y=True)
