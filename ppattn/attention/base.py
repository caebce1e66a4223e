"""The contract between attentions and backbones.

Shape legend, used by all files of this package: B images (times windows where the backbone partitions its map),
N tokens, M keys, C channels, h heads, d channels per head, P prefix tokens (class token) in front of the H x W grid
tokens, so N = P + H * W. Names end in their shape where it helps: `q_BhNd`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import Tensor, nn

from ppattn import ops
from ppattn.errors import UserError
from ppattn.ops import as_dtype, as_dtype_of, as_float32, dropout, exact_dtype, is_dynamic, is_half, split_heads
from ppattn.registry import Registry
from ppattn.validation import Count, Positive, Size, check_arguments, keyword_defaults

ATTENTIONS = Registry("attention")


@dataclass(frozen=True)
class StageLinks:
    """The place of a layer among those it can share score maps with (Less-Attention)."""

    index: int = 0  # among the layers of the same attention and window partition in this stage
    shifted: bool = False  # the backbone shifts the windows of this layer
    previous: AttentionSpec | None = None  # last layer of the stage before, if of the same attention and not windowed
    explicit: bool = False  # the attention was named for this very stage, not for the whole model


@dataclass(frozen=True)
class AttentionSpec:
    """What a backbone knows when it builds an attention layer."""

    dim: int
    num_heads: int
    grid: tuple[int, int]  # (H, W) this layer sees at the build size: one window if windowed, else the map
    num_prefix: int = 0  # P
    sr_ratio: int = 1  # spatial reduction of the keys (PVT), landmark stride (SOFT)
    stage: int = 0
    block: int = 0  # position in the stage
    qkv_bias: bool = True
    key_bias: bool = True  # false: softmax attention has no bias of the keys
    attn_drop: float = 0.0
    proj_drop: float = 0.0
    links: StageLinks = StageLinks()
    sequence: bool = False  # no map, but a sequence of at most W tokens: grid (1, W)

    @property
    def tokens(self) -> int:
        """N."""
        return self.num_prefix + self.grid[0] * self.grid[1]

    def cells(self, count: int) -> tuple[int, int]:
        """`count` cells, a square number, as rows and columns; those of a sequence are one row."""
        side = math.isqrt(count)
        return (1, count) if self.sequence else (side, side)


@dataclass(eq=False)
class LayerState:
    """What layers hand to later layers. Only Less-Attention reads and writes it."""

    plain: Tensor | None = None  # scores [B, h, N, M] of the last layer on the map or on unshifted windows
    shifted: Tensor | None = None  # those of the last layer on shifted windows
    loss: Tensor | None = None  # sum of the auxiliary losses so far, weighted; a scalar


@dataclass(eq=False)
class Context:
    """What an attention layer gets besides its tokens; `bias` and `mask` are for windowed attentions only."""

    hw: tuple[int, int]  # (H, W) of the grid tokens; tensors while a program is traced for any size
    bias: Tensor | None = None  # additive logits [h, N, N] (relative position)
    mask: Tensor | None = None  # additive 0 / -100 [G, N, N] for the G windows of one image, B = images * G
    state: LayerState = LayerState()  # from the layers before
    rotation: tuple[Tensor, Tensor] | None = None  # cos and sin [N, d] for `Attention.placed`, if positions are rotary


@dataclass(eq=False)
class Parts:
    """What most attentions compute from the tokens; each says in `project` which forms they have."""

    q: Tensor
    k: Tensor
    v: Tensor  # [B, N, C]
    gate: Tensor | None = None  # [B, N, C]


@dataclass(eq=False)
class PackedParts:
    """Projections as operators take them, and the dynamic kernel of a local term."""

    q: Tensor  # packed q, k, v [B, N, 3C], or with `kv` q [B, N, C]
    kv: Any = None  # packed k, v [B, M, 2C] of other tokens
    kernel: Tensor | None = None  # [B, C, 9]


class Attention(nn.Layer):
    """Base class of all attentions. `forward` is the same for all, in training, evaluation and export:

        parts = project(x)                      what is computed from x: queries, keys, values, gates, kernels
        y = attend(parts) + local(parts)        the global term and, in some attentions, a local term
        y = finish(normalised(y), parts)        norm and gate if any, output projection, dropout

    An attention implements `project` and `attend`, and `weights` and `values`: the global term as an explicit map, for
    analysis and for the test that compares `forward` with it. Subclasses take `(spec, *, own options)`, checked against
    the annotations, and create the output projection `self.proj`, unless they replace `finish`.

    Class attributes that a backbone reads when it builds:
        windowed: a backbone with windows gives it windows, position bias and mask; other attentions see the whole map.
        uses_bias: a windowed attention adds the position bias.
        drops_weights: it applies `spec.attn_drop` to its attention weights; other attentions ignore that rate.
        rotates: it applies the rotary positions of the backbone; other attentions ignore them.
        spatial_keys: keys lie on a grid, that of the tokens or a smaller one, so that analyses can draw them as maps.
    """

    windowed = drops_weights = rotates = False
    uses_bias = spatial_keys = True
    official: ClassVar[dict[str, str]] = {}  # official names of layers -> ours
    convolution, per_head = "", False  # the name of the convolution in `local`, and whether a head has one kernel

    def __init__(self, spec: AttentionSpec):
        super().__init__()
        if not isinstance(spec.num_heads, int) or spec.num_heads < 1:
            raise UserError(f"num_heads = {spec.num_heads!r} is not allowed: a positive integer is needed.")
        if spec.dim % spec.num_heads:
            raise UserError(f"num_heads = {spec.num_heads} does not divide {spec.dim}, the width of its stage.")
        self.spec = spec
        self.num_heads = self.num_maps = spec.num_heads  # maps: of `weights`
        self.head_dim = spec.dim // spec.num_heads

    def forward(self, x: Tensor, context: Context | tuple[int, int]) -> tuple[Tensor, LayerState]:
        """Mix the tokens x [B, P + H*W, C]; `context` may be just (H, W). Returns y like x, and the next state."""
        context = as_context(context)
        parts = self.project(x, context)
        y = self.normalised(self.mix(parts, context))
        if is_half(x):  # `attend` may compute in float32
            y = as_dtype_of(y, x)
        return self.finish(y, parts), self.next_state(parts, context)

    def project(self, x: Tensor, context: Context) -> Any:
        """Everything that is computed from x [B, N, C]: a dataclass, which the other methods get as `parts`."""
        raise NotImplementedError

    def mix(self, parts: Any, context: Context) -> Tensor:
        """Global and local term [B, N, C]."""
        y, local = self.attend(parts, context), self.local(parts, context)
        return y if local is None else y + local

    def attend(self, parts: Any, context: Context) -> Tensor:
        """The global term [B, N, C], and the local term if one operator computes both."""
        raise NotImplementedError

    def local(self, parts: Any, context: Context) -> Tensor | None:
        """The local term [B, N, C], zero for prefix tokens: the values under a depth-wise convolution; None without."""
        conv, prefix = getattr(self, self.convolution, None), self.spec.num_prefix
        if conv is None:
            return None
        return ops.depthwise_conv(self.plain_values(parts), conv.weight, conv.bias, context.hw, prefix, self.per_head)

    def plain_values(self, parts: Any) -> Tensor:
        """The values [B, N, C] among what `project` returned, as `v` or behind the keys in `kv`."""
        return parts.v if hasattr(parts, "v") else parts.kv[:, :, self.spec.dim :]

    def placed(self, qkv: Tensor, context: Context) -> Tensor:
        """Packed q, k, v [B, N, 3C], q and k rotated in float32 or better where the backbone has such positions."""
        if context.rotation is None:
            return qkv
        c = self.spec.dim
        qk = ops.rotate(as_float32(qkv[:, :, : 2 * c]), *context.rotation, width=self.head_dim)
        return paddle.concat([as_dtype_of(qk, qkv) if is_half(qkv) else qk, qkv[:, :, 2 * c :]], axis=-1)

    def normalised(self, y: Tensor) -> Tensor:
        """The norm of the sum y [B, N, C], if there is one, before half precision."""
        return y

    def finish(self, y: Tensor, parts: Any) -> Tensor:
        """Output projection and dropout of the sum y [B, N, C], times the gate if `parts` has one."""
        gate = getattr(parts, "gate", None)
        return dropout(self.proj(y if gate is None else y * gate), self.spec.proj_drop, self.training)

    def next_state(self, parts: Any, context: Context) -> LayerState:
        """The state for the next layer."""
        return context.state

    def weights(self, parts: Any, context: Context) -> Tensor | None:
        """The explicit weights [B, h, N, M] of the global term, or several maps per head, each with a share of the
        values; None for an attention that is not linear in its values."""
        return None

    def key_mask(self, context: Context) -> Tensor | None:
        """[G, N, M]: 0 where a query may see a key, and numbers far below where not; None: it may see all."""
        return context.mask

    def values(self, parts: Any, context: Context) -> Tensor:
        """The values [B, h, M, d] that belong to the weights: the global term is `weights @ values`, heads merged."""
        return as_float32(split_heads(self.plain_values(parts), self.num_heads))

    def attention_map(self, x: Tensor, context: Context | tuple[int, int], parts: Any = None) -> Tensor:
        """`weights` for the arguments of `forward`, from `parts` if known; raises `UserError` where there are none."""
        context = as_context(context)
        weights = self.weights(self.project(x, context) if parts is None else parts, context)
        if weights is None:
            raise UserError(f"{type(self).__name__} is not linear in its values and has no attention map.")
        return weights

    @staticmethod
    def remarks(layers: list[Attention]) -> list[str]:
        """Sentences for the log about all layers of this attention in a model."""
        return []

    @classmethod
    def options(cls) -> dict[str, object]:
        """Names and defaults of the attention's own options."""
        return keyword_defaults(cls)

    @classmethod
    def from_official(cls, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Official names and layouts inside one attention module -> ours (Linear weights still (out, in))."""
        return merge_rows(renamed(arrays, cls.official), {"qkv": [("q", 1, 0), ("kv", 1, 0)]})


def as_context(context: Context | tuple[int, int]) -> Context:
    """A `Context`, also from a plain (H, W)."""
    return context if isinstance(context, Context) else Context(context)


register_attention = ATTENTIONS.register  # class decorator: the attention's name in configs and `create_model`


def build_attention(name: str, spec: AttentionSpec, options: dict | None = None) -> Attention:
    """The attention called `name`; raises `UserError` for an unknown name or option, or a value not allowed."""
    cls = ATTENTIONS.get(name)
    check_arguments(cls, options or {}, f"{name} attention")
    return cls(spec, **(options or {}))


class AttentionLayer(nn.Layer):
    """A stand-alone attention layer for any model: `layer(x, hw=None)` takes and returns tokens [B, N, C].

    It includes the projections and the attention's own local term and position encoding, but no norm and no residual
    connection. The attention is `layer.block.attn`, and `ppattn.load_official(layer, arrays)` loads official weights
    named `block.attn.*`. `less` alone is its own first layer, which is softmax attention.

    Args:
        name, **options: of the attention, see `ppattn.list_attentions()`; for example `kernel="relu"` for `inline`.
        dim, num_heads: C and h, which divides it.
        grid: (H, W) of the tokens, or one side. At another size pass `hw`; `linformer` raises `UserError` there.
        num_prefix: P, tokens in front of the grid (class token); N = P + H * W.
        qkv_bias: bias in the input projections.
    """

    def __init__(
        self,
        name: str,
        dim: Positive,
        num_heads: Positive,
        grid: Size = 14,
        *,
        num_prefix: Count = 0,
        qkv_bias: bool = True,
        **options: Any,
    ):
        super().__init__()
        self.block, given = nn.Layer(), {"dim": dim, "num_heads": num_heads, "grid": grid, "num_prefix": num_prefix}
        check_arguments(AttentionLayer.__init__, given, f"attention_layer({name!r})")
        height, width = (grid, grid) if isinstance(grid, int) else grid
        spec = AttentionSpec(dim, num_heads, (height, width), num_prefix=num_prefix, qkv_bias=qkv_bias)
        self.block.attn = build_attention(name, spec, options)

    def forward(self, x: Tensor, hw: tuple[int, int] | None = None) -> Tensor:
        """Tokens [B, P + H*W, C] of the grid hw = (H, W), by default the grid of the build, to [B, P + H*W, C]."""
        spec = self.block.attn.spec
        height, width = spec.grid if hw is None else hw
        tokens = spec.num_prefix + height * width
        if x.ndim != 3 or x.shape[2] != spec.dim or (not is_dynamic(tokens, x.shape[1]) and x.shape[1] != tokens):
            built = f"a grid of {height} x {width} and {spec.num_prefix} prefix tokens"
            takes = f"[B, {tokens}, {spec.dim}] for {built}, not {list(x.shape)}"
            raise UserError(f"The layer takes {takes}; pass hw=(H, W) for another grid.")
        return self.block.attn(x, (height, width))[0]


attention_layer = AttentionLayer


def merge_rows(arrays: dict, merges: dict[str, list[tuple[str, int, int]]]) -> dict:
    """Fuse Linear layers: target name -> parts (source name, number of equal chunks of its rows, which chunk)."""
    fused, used = {}, set()
    for target, parts in merges.items():
        for leaf in ("weight", "bias"):
            names = [f"{source}.{leaf}" for source, _, _ in parts]
            if all(name in arrays for name in names):
                rows = [np.split(arrays[f"{source}.{leaf}"], chunks)[i] for source, chunks, i in parts]
                fused[f"{target}.{leaf}"] = np.concatenate(rows)
                used.update(names)
    return {name: value for name, value in arrays.items() if name not in used} | fused


def renamed(arrays: dict, layers: dict[str, str]) -> dict:
    """Arrays under other names of their layers: official name -> ours."""
    owners = ((name.rpartition("."), array) for name, array in arrays.items())
    return {f"{layers.get(layer, layer)}{dot}{leaf}": array for (layer, dot, leaf), array in owners}


def check_grid(name: str, spec: AttentionSpec, hw: tuple[int, int]) -> None:
    """Reject any grid but the one of the build, for attentions whose weights depend on the number of tokens."""
    if is_dynamic(*hw):
        raise UserError(f"{name} attention is exported for one input size: its weights fix the number of tokens.")
    if tuple(hw) != tuple(spec.grid):
        built, got = (f"{h} x {w}" for h, w in (spec.grid, hw))
        raise UserError(f"{name} attention was built for a grid of {built} tokens, not {got}: set img_size to match.")


@ops.constant
def cell_means(size: int, count: int, dtype: paddle.dtype) -> Tensor:
    """[count, size]: row i is the mean over the indices floor(i size / count) ... ceil((i + 1) size / count) - 1."""
    library = paddle if is_dynamic(size) else np  # a constant where the size is known
    cell, index, exact = library.arange(count).reshape([count, 1]), library.arange(size), exact_dtype(dtype)
    first, end = cell * size // count, ((cell + 1) * size + count - 1) // count
    inside = ((index >= first) & (index < end)).astype(exact)
    return as_dtype(paddle.to_tensor(inside / (end - first).astype(exact)), dtype)


def grid_means(x: Tensor, hw: tuple[int, int], cells: tuple[int, int], num_prefix: int) -> Tensor:
    """Means of the grid tokens of x [B, P + H*W, C] over a x b cells, by adaptive pooling: [B, a*b, C]."""
    (a, b), c = cells, x.shape[2]
    rows, columns = cell_means(hw[0], a, x.dtype), cell_means(hw[1], b, x.dtype)
    x = paddle.matmul(columns, x[:, num_prefix:].reshape([-1, *hw, c]))
    return paddle.matmul(rows, x.reshape([-1, hw[0], b * c])).reshape([-1, a * b, c])
