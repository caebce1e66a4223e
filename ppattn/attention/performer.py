r"""Performer: softmax attention estimated by random features (FAVOR+; Choromanski et al., ICLR 2021, arXiv 2009.14794).

    x' = x / d^(1/4);    phi(x) = exp(W x' - |x'|^2 / 2 - c) + eps     [positive features, lemma 1]
    y_i = phi(q_i) (sum_j phi(k_j)^T v_j) / (phi(q_i) . sum_j phi(k_j))            [eq. 4]

E[phi(q) . phi(k)] is proportional to exp(q . k / sqrt(d)) for eps = 0. W [r, d] consists of blocks of d orthogonal rows
with the norms of Gaussian vectors. It is seeded by stage and block, not by the training seed, and stored with the
weights. c, the largest exponent, cancels in the quotient up to eps; it is taken per query, and for the keys over all
keys of an image and head. It gets no gradient, as in the official code.

Cost per layer: 4 N r C + N r h multiply-accumulates and h r (d + 1) state, besides the projections; linear in N.
Option: `num_features` r, by default int(d ln d), the order that theorem 4 asks for (110 for d = 32), at least 1.
Features, sums and normaliser run in float32.

Differences from the official code: W is never redrawn; its directions are uniform; c includes the norm term, so that
the features of long keys do not vanish in eps; eps = 1e-6 as in its TensorFlow form (JAX: 1e-4).
"""

import math

import numpy as np
import paddle
from paddle import Tensor

from ppattn.attention.base import AttentionSpec, register_attention
from ppattn.attention.linear import EPS, LinearAttention
from ppattn.ops import as_float32, full_precision, keep_float32
from ppattn.validation import Positive


@register_attention("performer")
class PerformerAttention(LinearAttention):
    eps = 0.0  # features are at least EPS, so the normaliser needs no other

    def __init__(self, spec: AttentionSpec, *, num_features: Positive | None = None):
        super().__init__(spec)
        count = num_features or max(1, int(self.head_dim * math.log(self.head_dim)))
        rows = orthogonal_rows(count, self.head_dim, np.random.default_rng([spec.stage, spec.block]))
        self.register_buffer("projection", paddle.to_tensor(rows, dtype=paddle.get_default_dtype()))
        keep_float32(self)  # `features` runs in float32

    @full_precision
    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        (tokens, _), h, d = q.shape[1:], self.num_heads, self.head_dim
        q, k = (t.reshape([-1, tokens, h, d]) * d**-0.25 for t in (q, k))
        r, rows = len(self.projection), as_float32(self.projection).t()
        on_q, on_k = (paddle.matmul(t.reshape([-1, d]), rows).reshape([-1, tokens, h, r]) for t in (q, k))
        on_q = on_q - 0.5 * (q * q).sum(axis=-1, keepdim=True)
        on_k = on_k - 0.5 * (k * k).sum(axis=-1, keepdim=True)
        q = paddle.exp(on_q - on_q.detach().max(axis=-1, keepdim=True)) + EPS
        k = paddle.exp(on_k - on_k.detach().max(axis=[1, 3], keepdim=True)) + EPS
        return q.reshape([-1, tokens, h * r]), k.reshape([-1, tokens, h * r])


def orthogonal_rows(count: int, dim: int, rng: np.random.Generator) -> np.ndarray:
    """[count, dim]: each row normally distributed, rows of the same block of `dim` orthogonal."""
    blocks = []
    for _ in range(-(-count // dim)):
        q, r = np.linalg.qr(rng.standard_normal((dim, dim)))
        blocks.append((q * np.sign(np.diag(r))).T)
    return np.linalg.norm(rng.standard_normal((count, dim)), axis=1, keepdims=True) * np.concatenate(blocks)[:count]
