r"""Linformer: softmax attention over projected keys and values (Wang et al., 2020, arXiv 2006.04768).

    Y = softmax(Q (E K)^T / sqrt(d)) F V,    E, F [k, N]                    (eq. 7)

Cost per layer: 4 N k C multiply-accumulates and h N k stored weights, besides the projections (4 N C^2); linear in N
for a fixed k. Parameters that grow with the grid: E and F, 2 k N.
Option: `proj_tokens` k, by default 49 like the landmarks of SOFT and Nystromformer; at most the number of tokens.

E and F are shared by the heads of a layer ("headwise sharing", without loss in the paper) and start from normal(0, 1 /
sqrt(N)), which preserves the variance of keys and values. The class token is a token like the others. E and F fix the
grid: any other size is an error, but a shorter sequence takes the first columns. `sr_ratio` has no meaning here.
"""

from dataclasses import replace

import paddle
from paddle import Tensor
from paddle.nn.initializer import Normal

from ppattn.attention.base import AttentionSpec, Context, PackedParts, check_grid, register_attention
from ppattn.attention.softmax import SoftmaxAttention
from ppattn.ops import split_tensor
from ppattn.validation import Positive


@register_attention("linformer")
class LinformerAttention(SoftmaxAttention):
    windowed = spatial_keys = rotates = False

    def __init__(self, spec: AttentionSpec, *, proj_tokens: Positive = 49):
        super().__init__(replace(spec, sr_ratio=1))
        shape, normal = [min(proj_tokens, spec.tokens), spec.tokens], Normal(0.0, spec.tokens**-0.5)
        self.key_tokens = self.create_parameter(shape, default_initializer=normal)
        self.value_tokens = self.create_parameter(shape, default_initializer=normal)

    def project(self, x: Tensor, context: Context) -> PackedParts:
        """q [B, N, C], and (E k, F v) [B, k, 2C]."""
        e, f = self.key_tokens, self.value_tokens
        if self.spec.sequence:
            e, f = e[:, : x.shape[1]], f[:, : x.shape[1]]
        else:
            check_grid("linformer", self.spec, context.hw)
        q, k, v = split_tensor(self.qkv(x), 3)
        return PackedParts(q, paddle.concat([paddle.matmul(e, k), paddle.matmul(f, v)], axis=-1))
