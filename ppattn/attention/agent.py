r"""Agent attention: softmax attention in two steps over a few agent tokens (Han et al., ECCV 2024, arXiv 2312.08874).

    a = pool(q)   n agent tokens, the averages of q over a grid of sqrt(n) x sqrt(n) bins
    u = softmax(a K^T / sqrt(d) + B1) V,   y = softmax(q a^T / sqrt(d) + B2) u + DWC(v)            (eq. 5-7)

B1 and B2 are learned biases: a 7 x 7 map per head and agent, enlarged bilinearly to the grid, plus one number per row
and one per column; DWC is a depth-wise 3 x 3 convolution. Cost per layer: 4 n N C + 9 N C + (sqrt(n) + n / W) N C
multiply-accumulates (attention, convolution, pooling) besides the projections (4 N C^2); linear in N.

Options: `agent_num` n (49, a square; a list holds one number per stage). Prefix tokens are queries and keys with one
bias per agent; they are no part of the agents and get no convolution. Softmax runs in float32.

Where we differ from the official code: keys are never reduced (the released models do not), and on another grid the
biases of rows and columns are resized (there the image size is fixed). The pooling is two products with constants.
"""

from __future__ import annotations

import numpy as np
import paddle
from paddle.nn.initializer import Normal

from ppattn.attention.base import (
    Attention,
    add_to_grid,
    cell_means,
    check_count,
    grid_map,
    grid_tokens,
    merge_heads,
    register_attention,
    split_heads,
)
from ppattn.attention.softmax import normalise
from ppattn.errors import UserError
from ppattn.layers import Linear, between, conv2d, dropout, unknown_size

BIAS_SIDE = 7
LINES = {"ah_bias": 3, "aw_bias": 4, "ha_bias": 2, "wa_bias": 3}  # the axis that is as long as a side of the grid


@register_attention("agent")
class AgentAttention(Attention):
    def __init__(self, spec, *, agent_num: int | list = 49):
        super().__init__(spec)
        numbers = agent_num if isinstance(agent_num, (list, tuple)) else [agent_num] * (spec.stage + 1)
        if len(numbers) <= spec.stage:
            raise UserError(f"agent attention: agent_num = {agent_num} has no number for stage {spec.stage + 1}.")
        n = numbers[spec.stage]
        check_count("agent attention: agent_num", n)
        self.side = round(n**0.5)
        if self.side**2 != n:
            raise UserError(f"agent attention: agent_num = {n} is not allowed: a square, like 9, 16 or 49.")
        c, h, (height, width) = spec.dim, spec.num_heads, spec.grid
        self.scale = self.head_dim**-0.5
        self.qkv = Linear(c, 3 * c, bias=spec.qkv_bias)
        self.proj = Linear(c, c)
        self.dwc = conv2d(c, c, 3, padding=1, groups=c)

        def bias(*shape):
            return self.create_parameter(shape, default_initializer=Normal(0.0, 0.02))

        self.an_bias, self.na_bias = bias(h, n, BIAS_SIDE, BIAS_SIDE), bias(h, n, BIAS_SIDE, BIAS_SIDE)
        self.ah_bias, self.aw_bias = bias(1, h, n, height, 1), bias(1, h, n, 1, width)
        self.ha_bias, self.wa_bias = bias(1, h, height, 1, n), bias(1, h, 1, width, n)
        if spec.num_prefix:
            self.ac_bias, self.ca_bias = bias(1, h, n, spec.num_prefix), bias(1, h, spec.num_prefix, n)

    def agents(self, q, hw):
        """Averages of the grid tokens of q [B, h, N, d] over the bins: [B, h, n, d]."""
        grid = merge_heads(q)[:, self.spec.num_prefix :]
        rows, columns = (cell_means(side, self.side, q.dtype) for side in hw)
        grid = paddle.matmul(columns, grid.reshape([-1, *hw, self.spec.dim]))
        grid = paddle.matmul(rows, grid.reshape([-1, hw[0], self.side * self.spec.dim]))
        return split_heads(grid.reshape([-1, self.side**2, self.spec.dim]), self.num_heads)

    def biases(self, hw):
        """B1 [1, h, n, N] of agents on keys, B2 [1, h, N, n] of queries on agents."""
        h, n, (height, width) = self.num_heads, self.side**2, hw
        keys = resize(self.an_bias, hw).unsqueeze(0)
        keys = keys + resize_line(self.ah_bias, 3, height) + resize_line(self.aw_bias, 4, width)
        queries = resize(self.na_bias, hw).transpose([0, 2, 3, 1]).unsqueeze(0)
        queries = queries + resize_line(self.ha_bias, 2, height) + resize_line(self.wa_bias, 3, width)
        keys, queries = keys.reshape([1, h, n, height * width]), queries.reshape([1, h, height * width, n])
        if not self.spec.num_prefix:
            return keys, queries
        return paddle.concat([self.ac_bias, keys], axis=-1), paddle.concat([self.ca_bias, queries], axis=2)

    def weights(self, x, hw):
        """Weights of agents on keys [B, h, n, N] and of queries on agents [B, h, N, n], and v [B, h, N, d]."""
        q, k, v = split_heads(self.qkv(x), self.num_heads, 3)
        agents, (on_keys, on_agents) = self.agents(q, hw), self.biases(hw)
        gather = normalise(paddle.matmul(agents * self.scale, k, transpose_y=True) + on_keys)
        spread = normalise(paddle.matmul(q * self.scale, agents, transpose_y=True) + on_agents)
        return gather, spread, v

    def forward(self, x, hw, bias=None, mask=None, carry=None):
        gather, spread, v = self.weights(x, hw)
        gather, spread = (dropout(w, self.spec.attn_drop, self.training) for w in (gather, spread))
        y = merge_heads(paddle.matmul(spread, paddle.matmul(gather, v)))
        local = grid_tokens(self.dwc(grid_map(merge_heads(v), hw, self.spec.num_prefix)))
        y = add_to_grid(y, local, self.spec.num_prefix)
        return dropout(self.proj(y), self.spec.proj_drop, self.training), carry

    def global_term(self, x, hw):
        gather, spread, v = self.weights(x, hw)
        return merge_heads(paddle.matmul(spread, paddle.matmul(gather, v)))

    def attention_map(self, x, hw, bias=None, mask=None, carry=None):
        gather, spread, _ = self.weights(x, hw)
        return paddle.matmul(spread, gather)

    def values(self, x, hw):
        return self.weights(x, hw)[2]

    def resized(self, name: str, array: np.ndarray, img_size: tuple[int, int] | None) -> np.ndarray | None:
        """Biases of rows or columns of another grid for this one; see `Backbone.resized`."""
        axis, shape = LINES.get(name), getattr(self, name).shape
        if axis is None or array.ndim != 5 or array.shape[axis] == shape[axis]:
            return None
        if np.delete(array.shape, axis).tolist() != np.delete(shape, axis).tolist():
            return None
        return resize_line(paddle.to_tensor(array.astype("float32")), axis, shape[axis]).numpy()


def resize(table, hw):
    """[h, n, 7, 7] -> [h, n, H, W], bilinear."""
    if not unknown_size(*hw) and tuple(table.shape[2:]) == tuple(hw):
        return table
    rows, columns = (between(BIAS_SIDE, side, table.dtype) for side in hw)
    return paddle.matmul(paddle.matmul(rows, table), columns, transpose_y=True)


def resize_line(table, axis: int, length: int):
    """A bias of five dimensions with `length` numbers along `axis`, linear between those it has."""
    if not unknown_size(length) and table.shape[axis] == length:
        return table
    order = [*(a for a in range(5) if a != axis), axis]
    line = paddle.matmul(table.transpose(order), between(table.shape[axis], length, table.dtype), transpose_y=True)
    return line.transpose(np.argsort(order).tolist())
