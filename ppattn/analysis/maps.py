"""The explicit attention maps of a trained model, layer by layer, image by image.

A windowed layer (Swin) has one small map per window; `LayerMap.whole` assembles them to one map over all tokens.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import paddle

from ppattn.attention import ATTENTIONS, Attention, Context
from ppattn.attention.softmax import SoftmaxAttention
from ppattn.backbones.base import Block
from ppattn.backbones.swin import roll_map
from ppattn.errors import UserError
from ppattn.layers import evaluating
from ppattn.ops import partition_windows
from ppattn.runtime import memory


@dataclass
class LayerMap:
    """The map of one attention layer for one image, in G windows; G = 1 if the layer sees the complete map."""

    name: str  # of the block, as in `blocks.3` or `stages.1.blocks.0`
    layer: Attention
    hw: tuple[int, int]  # (H, W) of all grid tokens
    prefix: int  # P, tokens in front of the grid
    tokens: paddle.Tensor  # input of the layer, [G, N, C]
    weights: np.ndarray  # [G, h, N, M]
    window: int | None = None  # side of the windows in tokens
    shift: int = 0  # tokens by which the windows are shifted
    mask: np.ndarray | None = None  # of windows [G, N, M], 0 where a key may be seen

    @property
    def key_hw(self) -> tuple[int, int]:
        """The grid of the keys; raises `UserError` if they lie on none (Linformer)."""
        if self.window is not None:
            return self.hw
        (h, w), keys = self.hw, self.weights.shape[-1] - self.prefix
        grids = ((max(1, h // ratio), max(1, w // ratio)) for ratio in range(1, max(h, w) + 1))
        found = next((grid for grid in grids if grid[0] * grid[1] == keys), None)
        if found is None or not self.layer.spatial_keys:
            name = ATTENTIONS.name_of(type(self.layer))
            raise UserError(f"The keys of {name} attention lie on no grid: there is no map to draw.")
        return found

    @property
    def own_keys(self) -> bool:
        """Whether the keys are the queries' own tokens."""
        return self.layer.spatial_keys and self.weights.shape[-1] == self.weights.shape[-2]

    def whole(self) -> np.ndarray:
        """[h, P + H * W, M]: windows assembled, zero between tokens of different windows."""
        return self.assembled(self.weights)

    def visible(self) -> np.ndarray:
        """[P + H * W, M] bool: the keys that a query may see."""
        seen = np.ones((self.weights.shape[0], 1, *self.weights.shape[2:]), bool)
        return self.assembled(seen if self.mask is None else seen & (self.mask[:, None] > -1))[0]

    @cached_property
    def place(self) -> np.ndarray:
        """[G, side * side] of a windowed layer: which grid token stands where in the windows; -1 is padding."""
        assert self.window is not None
        (h, w), side = self.hw, self.window
        tokens = np.full((1, -(-h // side) * side, -(-w // side) * side, 1), -1)
        tokens[0, :h, :w, 0] = np.arange(h * w).reshape(h, w)
        return partition_windows(roll_map(paddle.to_tensor(tokens), -self.shift), side, side)[..., 0].numpy()

    def assembled(self, maps: np.ndarray) -> np.ndarray:
        """[G, h, N, M], a map per window, as [h, P + H * W, M]."""
        if self.window is None:
            return maps[0]
        h, w = self.hw
        out = np.zeros((maps.shape[1], h * w, h * w), maps.dtype)
        for index, weights in zip(self.place, maps, strict=True):
            real = np.flatnonzero(index >= 0)
            out[:, index[real][:, None], index[real]] = weights[:, real[:, None], real]
        return out

    def query(self, y: int, x: int) -> np.ndarray:
        """Weights of the grid token at row y, column x over the keys' grid, mean over the heads: [*key_hw]."""
        token = y * self.hw[1] + x
        if self.window is None:
            return self.weights[0, :, self.prefix + token, self.prefix :].mean(0).reshape(self.key_hw)
        ((window, place),) = np.argwhere(self.place == token)
        row = np.zeros(self.hw[0] * self.hw[1] + 1, self.weights.dtype)  # padding, -1, comes last
        row[self.place[window]] = self.weights[window, :, place].mean(0)
        return row[:-1].reshape(self.hw)


class Call(NamedTuple):
    """A call of a block's attention: (H, W) of the map, tokens [G, N, C], context."""

    name: str
    block: Block
    hw: tuple[int, int]
    x: paddle.Tensor
    context: Context

    def weights(self) -> paddle.Tensor:
        """The map [G, h, N, M]; raises `UserError` for an attention without one."""
        return self.block.attn.attention_map(self.x, self.context)

    def size(self, whole: bool) -> int:
        """Numbers in the map; `whole`: with its windows assembled."""
        attn, tokens = self.block.attn, self.x.shape[1]
        if getattr(self.block, "window", None) is not None:
            return attn.num_maps * (math.prod(self.hw) ** 2 if whole else self.x.shape[0] * tokens**2)
        reduced = attn.spec.sr_ratio**2 if isinstance(attn, SoftmaxAttention) else 1
        return attn.num_maps * tokens**2 // reduced if attn.spatial_keys else 0

    def layer_map(self) -> LayerMap:
        side, attn = getattr(self.block, "window", None), self.block.attn
        shift = self.block.shift(self.hw) if side is not None else 0
        mask = attn.key_mask(self.context)
        found = self.x, self.weights().numpy(), side, shift, None if mask is None else mask.numpy()
        return LayerMap(self.name, attn, self.hw, attn.spec.num_prefix, *found)


@contextmanager
def attention_calls(model: paddle.nn.Layer, check: Callable[[list], object] = len) -> Iterator[list[Call]]:
    """A list that fills with the blocks' calls of attentions while the model runs; `check` gets it before each one."""
    calls, entered = list[Call](), list[tuple[int, int]]()

    def watch(name: str, block: Block) -> list:
        def look(_, inputs):
            calls.append(Call(name, block, entered.pop(), *inputs))
            check(calls)

        enter = block.register_forward_pre_hook(lambda _, inputs: entered.append(tuple(inputs[1])))
        return [enter, block.attn.register_forward_pre_hook(look)]

    with ExitStack() as hooks:
        for name, block in model.named_sublayers():
            for hook in watch(name, block) if isinstance(block, Block) else ():
                hooks.callback(hook.remove)
        yield calls


@paddle.no_grad()
def attention_maps(model: paddle.nn.Layer, image: paddle.Tensor, whole: bool = True) -> list[LayerMap]:
    """The maps of all layers for an image, a tensor [1, C, H, W]; `UserError` if they do not fit into memory."""

    def check(calls: list[Call]) -> None:
        sizes = [call.size(whole) for call in calls]
        needed, free = 4 * (sum(sizes) + 4 * max(sizes)) / 1e6, memory.host()
        if needed > free:
            gigabytes = f"{needed / 1e3:.1f} GB of memory or more, and {free / 1e3:.1f} are free"
            side = int(max(image.shape[2:]) * (free / needed) ** 0.25)
            raise UserError(f"The attention maps take {gigabytes}: about {side} pixels fit (-o model.img_size={side}).")

    with evaluating(model), attention_calls(model, check) as calls:
        model(image)
        return [call.layer_map() for call in calls]


def spread(labels: np.ndarray, count: int) -> list[int]:
    """Indices of `count` images, the classes in turn: the first of each, then the second of each, ..."""
    turn = np.empty(len(labels), int)
    for label in np.unique(labels):
        own = np.flatnonzero(labels == label)
        turn[own] = np.arange(len(own))
    return np.lexsort((labels, turn))[:count].tolist()
