"""Muon for the matrices of the blocks (K. Jordan et al., 2024), in the form that shares AdamW's learning rate."""

from __future__ import annotations

from collections.abc import Iterable

import paddle
from paddle import Tensor

from ppattn.errors import UserError

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5


def orthogonalised(matrix: Tensor) -> Tensor:
    """[m, n] -> [m, n] with the same singular vectors and singular values near 1 (about 0.7 to 1.2).

    Five steps of X <- a X + (b A + c A A) X with A = X X^T, from X of Frobenius norm 1; the coefficients are those of
    github.com/KellerJordan/Muon.
    """
    a, b, c = COEFFICIENTS
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x = x / (x.norm() + 1e-7)
    for _ in range(STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.T


class Muon(paddle.optimizer.AdamW):
    """M <- mu M + (1 - mu) G;  W <- (1 - lr decay) W - lr 0.2 sqrt(max(m, n)) orthogonalised(mu M + (1 - mu) G).

    The factor 0.2 sqrt(max(m, n)) gives an update about the root mean square of AdamW's (Liu et al., "Muon is scalable
    for LLM training", 2025, equation 4), so one learning rate and one decay serve both. A fused projection such as
    queries, keys and values [C, 3C] counts as one matrix. All other parameters take AdamW's step.

    Args:
        matrices: Paddle's names of the 2-D parameters [m, n] to update this way.
        momentum: mu. M is AdamW's `moment1`; its `moment2` of these matrices stays zero.
    """

    def __init__(self, matrices: Iterable[str], momentum: float, **adamw):
        if not hasattr(paddle.optimizer.AdamW, "_append_optimize_op"):  # private: else this would be plain AdamW
            raise UserError(f"Muon does not work with Paddle {paddle.__version__}: set optimizer.name to adamw.")
        super().__init__(**adamw)
        self.matrices, self.momentum = frozenset(matrices), momentum

    def _append_optimize_op(self, block, param_and_grad):
        parameter, gradient = param_and_grad
        if parameter.name not in self.matrices:
            return super()._append_optimize_op(block, param_and_grad)
        momentum = self._get_accumulator_master(self._moment1_acc_str, parameter)
        weight = self._master_weights.get(parameter.name, parameter)
        gradient = gradient.astype(momentum.dtype)
        paddle.assign(paddle.lerp(gradient, momentum, self.momentum), momentum)
        direction = orthogonalised(paddle.lerp(gradient, momentum, self.momentum))
        rate = self._create_param_lr(param_and_grad)
        scale = 0.2 * max(parameter.shape) ** 0.5
        paddle.assign(weight * (1 - rate * self._weight_decay) - rate * scale * direction, weight)
        if weight is not parameter:
            paddle.assign(weight.astype(parameter.dtype), parameter)
