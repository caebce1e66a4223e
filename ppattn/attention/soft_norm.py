r"""SOFT with a normalised kernel (Lu et al., "Softmax-free Linear Transformers", IJCV 2024, arXiv 2207.03341).

As SOFT (see soft.py), but the pseudo-inverse is scaled by the row sums D of K2 and nothing is added to the diagonal:

    Y = K1 D^-1/2 K2^-1 D^-1/2 K1^T V + convolution of V

Newton steps V <- 2V - V K2 V start from V0 = a K2 with a = 1.98 / (largest row sum)^2, halved up to ten times while
the largest absolute column sum of I - a K2 K2 exceeds 1.01. The gradient is that of the iteration itself, which often
has not converged to the inverse. Cost per layer: that of SOFT and h m^3; parameters grow with the grid.

Options: those of SOFT, and `newton_start`: "matrix" (default: one a per image and head) or "batch" (published: one a
for the batch and all heads, so that the output for an image depends on the rest of its batch).

Differences from the official code: the default of `newton_start`, and with it 1.98 instead of 2, which makes the first
step from a matrix with equal row sums (all with one or two landmarks) end at zero; in a program that is exported or
runs on a GPU the halvings are a fixed number of masked steps.
"""

from typing import Any, Literal

import paddle
from paddle import Tensor

from ppattn import ops
from ppattn.attention.base import AttentionSpec, register_attention
from ppattn.attention.soft import SoftAttention, identity_like
from ppattn.validation import Count, Square

HALVINGS, LIMIT = 10, 1.01


@register_attention("soft_norm")
class SoftNormAttention(SoftAttention):
    def __init__(
        self,
        spec: AttentionSpec,
        *,
        newton_iters: Count = 20,
        landmarks: Literal["conv", "pool"] = "conv",
        num_landmarks: Square = 49,
        newton_start: Literal["matrix", "batch"] = "matrix",
        local_term: bool = True,
    ):
        shared: dict[str, Any] = {"landmarks": landmarks, "num_landmarks": num_landmarks, "local_term": local_term}
        super().__init__(spec, newton_iters=newton_iters, **shared)
        self.per_matrix = newton_start == "matrix"

    def invert(self, kernel: Tensor) -> Tensor:
        inverse = ops.newton_inverse(*self.newton_inputs(kernel), self.newton_iters)
        root = kernel.sum(axis=-1, keepdim=True) ** 0.5
        for _ in range(2):  # rows, then columns; a division along rows has a gradient three times slower
            inverse = (inverse / root).transpose([0, 1, 3, 2])
        return inverse

    def newton_inputs(self, kernel: Tensor) -> tuple[Tensor, Tensor]:
        degree = kernel.sum(axis=-1)
        largest = degree.max(axis=-1) if self.per_matrix else degree.max(axis=[0, 1, 2]).reshape([1, 1])
        divisor = largest[..., None, None] ** 2 / (1.98 if self.per_matrix else 2.0)  # 1 / a, [B or 1, h or 1, 1, 1]
        square = paddle.matmul(kernel, kernel).detach()
        diagonal = (square * identity_like(kernel)).sum(axis=-2, keepdim=True)
        others = square.sum(axis=-2, keepdim=True) - diagonal  # no entry is negative
        trial = divisor.detach()
        for _ in range(HALVINGS):
            norm = (1.0 - diagonal / trial).abs() + others / trial  # column sums of |I - a square|
            norm = norm.max(axis=-1, keepdim=True) if self.per_matrix else norm.max(axis=[0, 1, 2, 3], keepdim=True)
            if ops.eager() and trial.place.is_cpu_place() and not bool((norm > LIMIT).any()):
                break  # reading the data is free on the CPU
            trial = paddle.where(norm > LIMIT, 2.0 * trial, trial)
        divisor = trial / divisor.detach() * divisor
        # Three axes: Paddle Inference with oneDNN is wrong for a division by [B, h, 1, 1].
        return kernel, (kernel.flatten(2) / divisor.flatten(2)).reshape(kernel.shape)
