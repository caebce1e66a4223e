r"""MILA: the mixer of Mamba-Inspired Linear Attention (Han et al., NeurIPS 2024, arXiv 2405.16605).

    v = silu(DWC(in_proj(x))),   (q, k) = elu(qk(v)) + 1
    r_i = (1/N) sum_j (q~_i . k~_j) v_j / (q_i . mean_j k_j + eps)
    y = (r + LePE(v)) * silu(act_proj(x))

The tilde is the rotary position encoding over all channels (options and precision: rotary.py). DWC and LePE are
depth-wise 3 x 3 convolutions. The values have no projection of their own: q and k are projections of v. Cost per layer:
2 N C d + 18 N C multiply-accumulates besides the projections (5 N C^2), state h d^2; linear in N. Without `local_term`
there is neither DWC nor LePE. DWC leaves prefix tokens unchanged: a zero would erase their query, key and value.

Differences from the official code (LeapLabTHU/MLLA), which takes one square grid, fixed at build time: any grid, and
prefix tokens. The two position convolutions of the official block belong to the backbone (`cpe` is the first).
"""

from typing import ClassVar

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor

from ppattn import ops
from ppattn.attention.base import AttentionSpec, Context, Parts, register_attention
from ppattn.attention.rotary import RotaryAttention
from ppattn.layers import Linear, conv2d
from ppattn.ops import as_float32, split_tensor


@register_attention("mila")
class MILAttention(RotaryAttention):
    full_table = True
    official: ClassVar = {"out_proj": "proj", "attn.qk": "qk", "attn.lepe": "lepe"}

    def __init__(self, spec: AttentionSpec, *, rope: bool = True, local_term: bool = True):
        super().__init__(spec)
        c = spec.dim
        self.in_proj, self.act_proj, self.proj = Linear(c, c), Linear(c, c), Linear(c, c)
        self.qk = Linear(c, 2 * c, bias=spec.qkv_bias)
        self.dwc = conv2d(c, c, 3, padding=1, groups=c) if local_term else None
        self.build_positions(rope, kernel_size=3, local_term=local_term)

    def project(self, x: Tensor, context: Context) -> Parts:
        """q and k [B, N, C], positive, in float32 or better; v and the gate [B, N, C]."""
        v, prefix = self.in_proj(x), self.spec.num_prefix
        if self.dwc is not None:
            y = ops.depthwise_conv(v, self.dwc.weight, self.dwc.bias, context.hw, prefix)
            v = paddle.concat([v[:, :prefix], y[:, prefix:]], axis=1) if prefix else y
        v = ops.silu(v)
        q, k = split_tensor(self.qk(v), 2)
        return Parts(F.elu(as_float32(q)) + 1.0, F.elu(as_float32(k)) + 1.0, v, ops.silu(self.act_proj(x)))

    @classmethod
    def from_official(cls, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The rotary table of the file is left out: it is computed."""
        return super().from_official({name: array for name, array in arrays.items() if "rotations" not in name})
