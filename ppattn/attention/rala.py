r"""RALA: rank-augmented linear attention (Fan et al., CVPR 2025, arXiv 2411.07635).

    q, k <- elu(.) + 1,   alpha = softmax over tokens j of s (mean_i q_i) . k_j,   k_j <- N alpha_j k_j,   s = d^-1/2
    r_i = (1/N) sum_j (q~_i . k~_j) v_j / (q_i . mean_j k_j + eps),   y = (r + LePE(v)) * o

The tilde is the rotary position encoding (options and precision: rotary.py); alpha is computed without it. LePE is a
depth-wise 5 x 5 convolution of the values, o a linear gate of x without activation. The weights alpha raise the rank of
the state sum_j k_j v_j^T, the gate that of the result. Cost per layer: 2 N C d + (26 + h) N C multiply-accumulates
besides the projections (5 N C^2), state h d^2; linear in N.

Written from the formulas of the paper and the names of the official state dict (qhfan/RALA, classfication/RALA.py,
class GateLinearAttentionNoSilu). Differences from the official code: 1/N multiplies the state, not its square root
k and v; `qkv_bias` can be false, and there may be prefix tokens.
"""

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor

from ppattn import ops
from ppattn.attention.base import Context, Parts, register_attention
from ppattn.attention.mala import GatedRotaryAttention
from ppattn.ops import full_precision


@register_attention("rala")
class RALAttention(GatedRotaryAttention):
    def project(self, x: Tensor, context: Context) -> Parts:
        """q and the weighted k [B, N, C] in float32 or better; v and the gate o [B, N, C]."""
        parts = super().project(x, context)
        return Parts(parts.q, self.weighted(parts.q, parts.k), parts.v, parts.gate)

    @full_precision
    def weighted(self, q: Tensor, k: Tensor) -> Tensor:
        """N alpha_j k_j [B, N, C] for q and k [B, N, C]."""
        (n, c), h = k.shape[1:], self.num_heads
        heads = head_columns(h, c, k.dtype)
        mean = self.scale * q.mean(axis=1).unsqueeze(-1)
        alpha = F.softmax(paddle.matmul(k, mean * heads), axis=1)  # a product, as sums over a head's channels are slow
        return (k.reshape([-1, n, h, c // h]) * (n * alpha).unsqueeze(-1)).reshape([-1, n, c])


@ops.constant
def head_columns(h: int, c: int, dtype: paddle.dtype) -> Tensor:
    """[C, h]: 1 where the channel belongs to the head, else 0."""
    return paddle.to_tensor(np.kron(np.eye(h), np.ones([c // h, 1]))).astype(dtype)
