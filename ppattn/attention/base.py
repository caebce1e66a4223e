"""One contract for every attention mechanism and every backbone.

Shape legend, used by all files of this package: B images (times windows where the backbone partitions its map),
N tokens, M keys, C channels, h heads, d channels per head, P prefix tokens (class token) in front of the H x W grid
tokens, so N = P + H * W. Names end in their shape where it helps: `q_BhNd`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle
from paddle import Tensor, nn

from ppattn.errors import UserError
from ppattn.layers import as_dtype, dropout, exact_dtype, is_dynamic
from ppattn.ops import HALF
from ppattn.registry import Registry

ATTENTIONS = Registry("attention")


@dataclass(frozen=True)
class AttentionSpec:
    """What a backbone knows when it builds an attention layer."""

    dim: int
    num_heads: int
    grid: tuple[int, int]  # (H, W) this layer sees at the build size: the window where it is windowed, else the map
    num_prefix: int = 0  # P
    sr_ratio: int = 1  # spatial reduction of the keys (PVT), landmark stride (SOFT)
    stage: int = 0
    index: int = 0  # position among the layers of the same mechanism and window partition in this stage
    shifted: bool = False  # the backbone shifts the windows of this layer
    previous: AttentionSpec | None = None  # last layer of the stage before, if of the same mechanism and not windowed
    qkv_bias: bool = True
    attn_drop: float = 0.0
    proj_drop: float = 0.0
    explicit: bool = False  # the mechanism was named for this very stage, not for the whole model

    @property
    def tokens(self) -> int:
        """N."""
        return self.num_prefix + self.grid[0] * self.grid[1]

    @property
    def key_grid(self) -> tuple[int, int]:
        """The grid after spatial reduction."""
        return max(1, self.grid[0] // self.sr_ratio), max(1, self.grid[1] // self.sr_ratio)

    @property
    def key_tokens(self) -> int:
        """M."""
        return self.num_prefix + self.key_grid[0] * self.key_grid[1]


@dataclass(frozen=True)
class Context:
    """What a backbone tells a mechanism at each call.

    Attributes:
        hw: (H, W) of the grid tokens; tensors while a program is traced for any size.
        bias: additive logits [h, N, N] (relative position); windowed mechanisms only.
        mask: additive 0 / -100 [G, N, N] for the G windows of one image, B = images * G; windowed mechanisms only.
        carry: what earlier layers handed on; a mechanism that hands something on adds it here (Less-Attention).
    """

    hw: tuple[int, int]
    bias: Tensor | None = None
    mask: Tensor | None = None
    carry: dict = field(default_factory=dict)


class Attention(nn.Layer):
    """A mechanism. `forward` is the same for all of them, in training, evaluation and export:

        parts = project(x)                      queries, keys, values, gates, taps: what is computed from x
        y = attend(parts) + local(parts)        the global term, and the local term of those that have one
        y = finish(y, parts)                    gate or norm of those that have one, output projection, dropout

    A mechanism supplies `project` and `attend`, and `weights` and `values`: the global term as an explicit map, for
    analysis and for the test that compares `forward` with it. The others have defaults.

    Subclasses take `(spec, *, own options)`; an option's name, type and default are the signature's, and a value that
    does not fit the type is refused (`ppattn/schema.py`). They make the output projection `self.proj`, unless they
    replace `finish`.

    Class attributes that a backbone reads when it builds:
        windowed: a windowing backbone gives it windows, with position bias and mask; others see the whole map.
        uses_bias: the windowed mechanism adds the position bias.
        drops_weights: it drops attention weights by `spec.attn_drop`; the others leave that rate out.
        spatial_keys: keys lie on a grid, the tokens' own or a smaller one; analyses then draw them as maps.
    """

    windowed = False
    uses_bias = True
    spatial_keys = True
    drops_weights = False

    def __init__(self, spec: AttentionSpec):
        super().__init__()
        if not isinstance(spec.num_heads, int) or spec.num_heads < 1:
            raise UserError(f"num_heads = {spec.num_heads!r} is not allowed here: a whole number of heads.")
        if spec.dim % spec.num_heads:
            raise UserError(
                f"num_heads = {spec.num_heads} does not divide the width {spec.dim} of stage {spec.stage + 1}."
            )
        self.spec = spec
        self.num_heads, self.head_dim = spec.num_heads, spec.dim // spec.num_heads

    def forward(
        self,
        x: Tensor,
        hw: tuple[int, int],
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        carry: dict | None = None,
    ) -> tuple[Tensor, dict]:
        """Mix tokens x [B, P + H*W, C]; the other arguments are those of `Context`.

        Returns:
            (y [B, P + H*W, C], carry for the next layer).
        """
        context = Context(hw, bias, mask, dict(carry or {}))
        parts = self.project(x, context)
        y, local = self.attend(parts, context), self.local(parts, context)
        if local is not None:
            y = y + local
        if x.dtype in HALF:  # `attend` may compute in float32
            y = y.astype(x.dtype)
        return self.finish(y, parts), context.carry

    def project(self, x: Tensor, context: Context) -> Any:
        """What the mechanism computes from x [B, N, C], in any form: the other hooks get it as `parts`."""
        raise NotImplementedError

    def attend(self, parts: Any, context: Context) -> Tensor:
        """The global term [B, N, C], and the local term where one operator computes both."""
        raise NotImplementedError

    def local(self, parts: Any, context: Context) -> Tensor | None:
        """The local term [B, N, C], zero for prefix tokens; None: there is none."""
        return None

    def finish(self, y: Tensor, parts: Any) -> Tensor:
        """Output projection and dropout of the sum y [B, N, C]: the layer's result [B, N, C]."""
        return dropout(self.proj(y), self.spec.proj_drop, self.training)

    def weights(self, parts: Any, context: Context) -> Tensor | None:
        """The explicit weights [B, h, N, M] of the global term; None for a mechanism that is not linear in its values.

        There may be several maps per head, each with a share of the values (PolaFormer).
        """
        return None

    def values(self, parts: Any, context: Context) -> Tensor:
        """The values [B, h, M, d] that the weights are for: `weights @ values`, heads merged, is the global term."""
        raise NotImplementedError

    def attention_map(
        self,
        x: Tensor,
        hw: tuple[int, int],
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        carry: dict | None = None,
    ) -> Tensor:
        """`weights` for the arguments of `forward`.

        Raises:
            UserError: the mechanism has no explicit weights.
        """
        context = Context(hw, bias, mask, dict(carry or {}))
        weights = self.weights(self.project(x, context), context)
        if weights is None:
            raise UserError(f"{type(self).__name__} is not linear in its values and has no attention map.")
        return weights

    @staticmethod
    def remarks(layers: list[Attention]) -> list[str]:
        """Sentences for the log about all layers of this mechanism in a model."""
        return []

    @classmethod
    def options(cls) -> dict[str, object]:
        """Names and defaults of the mechanism's own settings."""
        parameters = inspect.signature(cls.__init__).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    @staticmethod
    def from_official(arrays: dict) -> dict:
        """Official names and layouts inside one attention module -> ours (Linear weights still (out, in))."""
        return merge_rows(arrays, {"qkv": [("qkv", 1, 0)] if "qkv.weight" in arrays else [("q", 1, 0), ("kv", 1, 0)]})


register_attention = ATTENTIONS.register  # class decorator: the mechanism's name in configs and `create_model`


def merge_rows(arrays: dict, merges: dict[str, list[tuple[str, int, int]]]) -> dict:
    """Fuse Linear layers: target name -> parts (source name, number of equal chunks of its rows, which chunk)."""
    out, used = dict(arrays), set()
    for target, parts in merges.items():
        for leaf in ("weight", "bias"):
            names = [f"{source}.{leaf}" for source, _, _ in parts]
            if not all(name in arrays for name in names):
                continue
            rows = [np.split(arrays[f"{s}.{leaf}"], chunks)[i] for s, chunks, i in parts]
            used.update(names)
            out[f"{target}.{leaf}"] = np.concatenate(rows)
    fused = {f"{target}.{leaf}" for target in merges for leaf in ("weight", "bias")}
    return {name: value for name, value in out.items() if name not in used or name in fused}


def check_grid(mechanism: str, spec: AttentionSpec, hw: tuple[int, int]) -> None:
    """Refuse any grid but the one of the build: for weights whose shape is the number of tokens."""
    if is_dynamic(*hw):
        raise UserError(f"{mechanism} attention is exported for one input size: its weights fix the number of tokens.")
    if tuple(hw) != tuple(spec.grid):
        built, got = (f"{h} x {w}" for h, w in (spec.grid, hw))
        raise UserError(
            f"{mechanism} attention was built for a grid of {built} tokens and got {got}; "
            "build the model with img_size set to the size it will see."
        )


def cell_means(size: int, count: int, dtype: paddle.dtype) -> Tensor:
    """[count, size]: row i is the mean over the indices floor(i size / count) ... ceil((i + 1) size / count) - 1."""
    library = paddle if is_dynamic(size) else np  # a constant where the size is known
    cell, index, exact = library.arange(count).reshape([count, 1]), library.arange(size), exact_dtype(dtype)
    first, end = cell * size // count, ((cell + 1) * size + count - 1) // count
    inside = ((index >= first) & (index < end)).astype(exact)
    return as_dtype(paddle.to_tensor(inside / (end - first).astype(exact)), dtype)


def grid_means(x: Tensor, hw: tuple[int, int], cells: tuple[int, int], num_prefix: int) -> Tensor:
    """Means of the grid tokens of x [B, P + H*W, C] over a x b cells, as adaptive pooling forms them: [B, a*b, C]."""
    (a, b), c = cells, x.shape[2]
    rows, columns = cell_means(hw[0], a, x.dtype), cell_means(hw[1], b, x.dtype)
    x = paddle.matmul(columns, x[:, num_prefix:].reshape([-1, *hw, c]))
    return paddle.matmul(rows, x.reshape([-1, hw[0], b * c])).reshape([-1, a * b, c])
