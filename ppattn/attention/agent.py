r"""Agent attention: softmax attention in two steps over a few agent tokens (Han et al., ECCV 2024, arXiv 2312.08874).

    a = pool(q)   n agent tokens: means of q over a square grid of bins
    u = softmax(a K^T / sqrt(d) + B1) V,   y = softmax(q a^T / sqrt(d) + B2) u + DWC(v)            (eq. 5-7)

B1 and B2 are learned biases: a 7 x 7 map per head and agent, enlarged bilinearly to the grid, plus one number per row
and one per column; DWC is a depth-wise 3 x 3 convolution. Cost per layer: 4 n N C + 9 N C + (sqrt(n) + n / W) N C
multiply-accumulates (attention, convolution, pooling) besides the projections (4 N C^2); linear in N. Parameters that
grow with the grid: the biases of rows and columns, 2 h n (H + W).

Options: `agent_num` n (49, a square; a list holds one number per stage), `local_term` (False: no DWC). Prefix tokens
are queries and keys with one bias per agent; they are no agents and get no convolution. Softmax runs in float32.

Differences from the official code: keys are never reduced (nor are they in the released models), and the biases of rows
and columns are resized for another grid.
"""

import math
from dataclasses import dataclass

import numpy as np
import paddle
from paddle import Tensor
from paddle.nn.initializer import Normal

from ppattn import ops
from ppattn.attention.base import Attention, AttentionSpec, Context, grid_means, register_attention
from ppattn.errors import UserError
from ppattn.layers import Linear, conv2d
from ppattn.ops import interpolation_matrix, is_dynamic, softmax, split_heads
from ppattn.validation import Square

BIAS_SIDE = 7
LINES = {"ah_bias": 3, "aw_bias": 4, "ha_bias": 2, "wa_bias": 3}  # the axis as long as a side of the grid


@dataclass(eq=False)
class AgentParts:
    q: Tensor  # [B, N, C]
    agents: Tensor  # [B, n, C]
    kv: Tensor  # packed k, v [B, N, 2C]


@register_attention("agent")
class AgentAttention(Attention):
    drops_weights, convolution = True, "dwc"

    def __init__(self, spec: AttentionSpec, *, agent_num: Square | list[Square] = 49, local_term: bool = True):
        super().__init__(spec)
        numbers = agent_num if isinstance(agent_num, (list, tuple)) else [agent_num] * (spec.stage + 1)
        if len(numbers) <= spec.stage:
            raise UserError(f"agent attention: agent_num = {agent_num} has no number for stage {spec.stage + 1}.")
        n = numbers[spec.stage]
        self.cells = spec.cells(n)
        c, h, (height, width) = spec.dim, spec.num_heads, spec.grid
        self.scale = self.head_dim**-0.5
        self.qkv, self.proj = Linear(c, 3 * c, bias=spec.qkv_bias), Linear(c, c)
        self.dwc = conv2d(c, c, 3, padding=1, groups=c) if local_term else None

        def bias(*shape):
            return self.create_parameter(shape, default_initializer=Normal(0.0, 0.02))

        self.an_bias, self.na_bias = bias(h, n, BIAS_SIDE, BIAS_SIDE), bias(h, n, BIAS_SIDE, BIAS_SIDE)
        self.ah_bias, self.aw_bias = bias(1, h, n, height, 1), bias(1, h, n, 1, width)
        self.ha_bias, self.wa_bias = bias(1, h, height, 1, n), bias(1, h, 1, width, n)
        if spec.num_prefix:
            self.ac_bias, self.ca_bias = bias(1, h, n, spec.num_prefix), bias(1, h, spec.num_prefix, n)

    def project(self, x: Tensor, context: Context) -> AgentParts:
        q, kv = self.qkv(x).split([self.spec.dim, 2 * self.spec.dim], axis=-1)
        return AgentParts(q, grid_means(q, context.hw, self.cells, self.spec.num_prefix), kv)

    def biases(self, hw: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """B1 [h, n, N] of agents on keys, B2 [h, N, n] of queries on agents."""
        h, n, (height, width) = self.num_heads, math.prod(self.cells), hw
        resize_line = first if self.spec.sequence else resized_line
        keys = resize(self.an_bias, hw).unsqueeze(0)
        keys = keys + resize_line(self.ah_bias, 3, height) + resize_line(self.aw_bias, 4, width)
        queries = resize(self.na_bias, hw).transpose([0, 2, 3, 1]).unsqueeze(0)
        queries = queries + resize_line(self.ha_bias, 2, height) + resize_line(self.wa_bias, 3, width)
        keys, queries = keys.reshape([1, h, n, height * width]), queries.reshape([1, h, height * width, n])
        if self.spec.num_prefix:
            keys = paddle.concat([self.ac_bias, keys], axis=-1)
            queries = paddle.concat([self.ca_bias, queries], axis=2)
        return keys[0], queries[0]

    def attend(self, parts: AgentParts, context: Context) -> Tensor:
        on_keys, on_agents = self.biases(context.hw)
        settings = {"num_heads": self.num_heads, "scale": self.scale}  # no `partial`: Paddle does not trace into it
        settings["drop"] = self.spec.attn_drop if self.training else 0.0
        u = ops.softmax_attention(parts.agents, kv=parts.kv, bias=on_keys, **settings)
        return ops.softmax_attention(parts.q, kv=paddle.concat([parts.agents, u], axis=-1), bias=on_agents, **settings)

    def weights(self, parts: AgentParts, context: Context) -> Tensor:
        q, agents = split_heads(parts.q, self.num_heads), split_heads(parts.agents, self.num_heads)
        k, _ = split_heads(parts.kv, self.num_heads, 2)
        on_keys, on_agents = self.biases(context.hw)
        gather = softmax(paddle.matmul(agents * self.scale, k, transpose_y=True) + on_keys)
        return paddle.matmul(softmax(paddle.matmul(q * self.scale, agents, transpose_y=True) + on_agents), gather)

    def resized(self, name: str, array: np.ndarray, img_size: tuple[int, int] | None) -> np.ndarray | None:
        """Biases of rows or columns of another grid, for the grid of this layer."""
        axis, shape = LINES.get(name), getattr(self, name).shape
        if axis is None or array.shape[axis] == shape[axis]:
            return None
        if np.any(np.delete(array.shape, axis) != np.delete(shape, axis)):
            return None
        return resized_line(paddle.to_tensor(array.astype("float32")), axis, shape[axis]).numpy()


def resize(table: Tensor, hw: tuple[int, int]) -> Tensor:
    """[h, n, 7, 7] -> [h, n, H, W], bilinear."""
    if not is_dynamic(*hw) and tuple(table.shape[2:]) == tuple(hw):
        return table
    rows, columns = (interpolation_matrix(BIAS_SIDE, side, table.dtype) for side in hw)
    return paddle.matmul(paddle.matmul(rows, table), columns, transpose_y=True)


def first(table: Tensor, axis: int, length: int) -> Tensor:
    """The first `length` numbers along `axis`."""
    return paddle.slice(table, [axis], [0], [length])


def resized_line(table: Tensor, axis: int, length: int) -> Tensor:
    """A bias of five dimensions, interpolated linearly to `length` numbers along `axis`."""
    if not is_dynamic(length) and table.shape[axis] == length:
        return table
    order = [*(a for a in range(5) if a != axis), axis]
    matrix = interpolation_matrix(table.shape[axis], length, table.dtype)
    return paddle.matmul(table.transpose(order), matrix, transpose_y=True).transpose(np.argsort(order).tolist())
