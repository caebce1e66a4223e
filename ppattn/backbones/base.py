"""What all backbones share: attention layers from names, the transformer block, the classifier around the features."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import paddle
from paddle import Tensor, nn

from ppattn.attention import ATTENTIONS, Attention, AttentionSpec
from ppattn.errors import UserError, unknown
from ppattn.layers import LayerNorm, Linear, Mlp, PositionConv, drop_path, residual_mlp
from ppattn.registry import Registry
from ppattn.schema import Names, Size, check_arguments

BACKBONES = Registry("backbone")


register_backbone = BACKBONES.register  # class decorator: `backbone: name` in models.yaml


def names_per_block(attention: Names, depths: Sequence[int], options: dict | None) -> list[list[tuple[str, bool]]]:
    """`attention` as given in a config -> for every stage and block (name, named for this stage explicitly).

    Raises:
        UserError: for an unknown name, a wrong number of names, or one of the `options` that no mechanism in use knows.
    """
    stages: list = [attention] * len(depths) if isinstance(attention, str) else list(attention)
    explicit = not isinstance(attention, str)
    if explicit and len(depths) == 1 and len(stages) == depths[0] and all(isinstance(s, str) for s in stages):
        stages = [stages]  # a plain backbone has one stage: a flat list means its blocks
    if len(stages) != len(depths):
        raise UserError(f"attention lists {len(stages)} stages, but the model has {len(depths)}.")
    out = []
    for number, (stage, depth) in enumerate(zip(stages, depths, strict=True), 1):
        blocks = [stage] * depth if isinstance(stage, str) else list(stage)
        if len(blocks) != depth:
            raise UserError(f"attention lists {len(blocks)} blocks for stage {number}, which has {depth}.")
        for name in blocks:
            ATTENTIONS.get(name)
        out.append([(name, explicit) for name in blocks])
    used = sorted({name for stage in out for name, _ in stage})
    known = {option for name in used for option in ATTENTIONS.get(name).options()}
    for option in options or {}:
        if option not in known:
            if not known:
                raise UserError(f"Unknown attention option {option!r}: {', '.join(used)} has no options.")
            raise unknown(f"attention option (of {', '.join(used)})", option, known)
    return out


def build_attention(name: str, spec: AttentionSpec, options: dict | None = None) -> Attention:
    """The mechanism called `name`, with those of `options` that it knows."""
    cls = ATTENTIONS.get(name)
    own = {key: value for key, value in (options or {}).items() if key in cls.options()}
    check_arguments(cls, own, f"{name} attention")
    return cls(spec, **own)


def stage_attention(
    names: list[tuple[str, bool]],
    options: dict | None,
    previous: Attention | None,
    grid: tuple[int, int],
    shape: dict[str, Any],
    window: int | None = None,
    always_shift: bool = False,
) -> Iterator[Attention]:
    """Builds the mechanisms of one stage, each when it is asked for.

    Args:
        names: those of the stage, from `names_per_block`.
        options: the mechanisms' own settings.
        previous: the last mechanism of the stage before, where it saw its whole map, else None.
        grid: (H, W) of the map.
        shape: the fields of `AttentionSpec` that are the same for all of them.
        window: side of the windows that windowed mechanisms see; None: they see the whole map as all others do.
        always_shift: shift the windows of every second block, also where one is the whole map.
    """
    seen: dict[tuple[str, bool], int] = {}
    for j, (name, explicit) in enumerate(names):
        kind, seen_grid, shifted = ATTENTIONS.get(name), grid, False
        before = previous.spec if previous is not None and type(previous) is kind else None
        if kind.windowed and window is not None:
            seen_grid, shifted = (window, window), j % 2 == 1 and (always_shift or min(grid) > window)
            before = None  # at another size of the images, windows of two stages do not lie on each other
        index = seen[name, shifted] = seen.get((name, shifted), -1) + 1
        spec = AttentionSpec(**shape, grid=seen_grid, index=index, shifted=shifted, previous=before, explicit=explicit)
        yield build_attention(name, spec, options)


class Block(nn.Layer):
    """A transformer block around a mechanism.

    pre-norm:  x + attention(LN(x)), then x + MLP(LN(x)), each branch under stochastic depth.
    post-norm: LN(x + dropout(attention(x))), then the same with the MLP, whose GELU is the tanh form (SOFT).

    Args:
        attn: the mechanism.
        mlp_ratio: width inside the MLP as a multiple of that of the tokens.
        drop: dropout in the MLP.
        path: probability of stochastic depth, or of dropout where post-norm.
        epsilon: of the norms.
        post: post-norm.
        cpe: a `PositionConv` before all of it.
    """

    mlp_type: type[nn.Layer] = Mlp

    def __init__(
        self,
        attn: Attention,
        mlp_ratio: float,
        drop: float,
        path: float,
        epsilon: float,
        post: bool = False,
        cpe: bool = False,
    ):
        super().__init__()
        dim = attn.spec.dim
        self.cpe = PositionConv(dim, attn.spec.num_prefix) if cpe else None
        self.norm1, self.norm2 = LayerNorm(dim, epsilon), LayerNorm(dim, epsilon)
        self.attn = attn
        if dim * mlp_ratio < 1:
            raise UserError(f"mlp_ratio = {mlp_ratio} is not allowed: it leaves no channel of {dim}.")
        self.mlp = self.mlp_type(dim, int(dim * mlp_ratio), drop, approximate=post)
        self.path, self.post = path, post

    def forward(self, x: Tensor, hw: tuple[int, int], carry: dict | None = None) -> tuple[Tensor, dict]:
        if self.cpe is not None:
            x = self.cpe(x, hw)
        if self.post:
            y, carry = self.attend(x, hw, carry)
            x = self.norm1(x + nn.functional.dropout(y, self.path, training=self.training))
            return self.norm2(x + nn.functional.dropout(self.mlp(x), self.path, training=self.training)), carry
        y, carry = self.attend(self.norm1(x), hw, carry)
        x = x + drop_path(y, self.path, self.training)
        return residual_mlp(x, self.norm2, self.mlp, self.path), carry

    def attend(self, x: Tensor, hw: tuple[int, int], carry: dict | None) -> tuple[Tensor, dict]:
        return self.attn(x, hw, carry=carry)


class Backbone(nn.Layer):
    """A classifier: subclasses give `tokens(x) -> (pooled [B, C], carry, list of feature maps)`.

    Attributes:
        img_size: (H, W) it was built for. num_classes, in_chans: as given; num_classes = 0: no head.
        feat_channels, strides: channels of each feature map, and pixels of the image per token along each side.
        recompute: recompute each block in the backward pass instead of keeping its activations.
        idle: names of parameters that forward never touches (training freezes them).
        record: a list that the output of every block is added to, or None; see `recorded_blocks`.
    """

    def __init__(self, img_size: Size, in_chans: int, num_classes: int, feat_channels: list[int], strides: list[int]):
        super().__init__()
        self.img_size, self.in_chans, self.num_classes = as_size(img_size), in_chans, num_classes
        self.feat_channels, self.strides = feat_channels, strides
        self.recompute = False
        self.idle: list[str] = []
        self.record: list | None = None

    def build_head(self) -> None:
        self.head = Linear(self.feat_channels[-1], self.num_classes) if self.num_classes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, in_chans, H, W], normalised -> logits [B, num_classes], or pooled features [B, C] without head."""
        return self.head(self.tokens(self.checked(x))[0])

    def forward_train(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """(logits, additional losses by name); the losses are weighted already, scalars, and usually none."""
        pooled, carry, _ = self.tokens(self.checked(x))
        losses = {key.removeprefix("aux/"): value for key, value in carry.items() if key.startswith("aux/")}
        return self.head(pooled), losses

    def forward_features(self, x: Tensor) -> list[Tensor]:
        """Maps for dense prediction: a list of [B, feat_channels[i], H / strides[i], W / strides[i]] (rounded)."""
        return self.tokens(self.checked(x))[2]

    def tokens(self, x: Tensor) -> tuple[Tensor, dict, list[Tensor]]:
        raise NotImplementedError

    def checked(self, x: Tensor) -> Tensor:
        empty = paddle.in_dynamic_mode() and 0 in x.shape[2:]
        if x.ndim != 4 or x.shape[1] not in (self.in_chans, -1) or empty:
            raise UserError(f"The model takes images [B, {self.in_chans}, H, W], not {list(x.shape)}.")
        return x

    def run(self, block: Block, x: Tensor, hw: tuple[int, int], carry: dict) -> tuple[Tensor, dict]:
        """One block, recomputed in the backward pass where that was asked for; its output is recorded."""
        if self.recompute and self.training and not x.stop_gradient:  # Paddle recomputes only what wants gradients
            y, carry = self.recomputed(block, x, hw, carry)
        else:
            y, carry = block(x, hw, carry)
        if self.record is not None:
            self.record.append(y)
        return y, carry

    @staticmethod
    def recomputed(block: Block, x: Tensor, hw: tuple[int, int], carry: dict) -> tuple[Tensor, dict]:
        from paddle.distributed.fleet.utils import recompute

        keys = list(carry)
        out_keys: list[str] = []

        def flat(x, *values):
            y, out = block(x, hw, dict(zip(keys, values, strict=True)))
            out_keys[:] = out
            return (y, *out.values())

        found = recompute(flat, x, *carry.values())
        y, *values = found if isinstance(found, (tuple, list)) else (found,)
        return y, dict(zip(out_keys, values, strict=True))

    @staticmethod
    def official_name(name: str) -> str | None:
        """What is called `name` in the authors' state dict, in ours; None for what is not kept in weights here."""
        return name

    def remarks(self) -> list[str]:
        """What the log says about the attention mechanisms of this model; usually nothing."""
        kinds: dict[type[Attention], list[Attention]] = {}
        for layer in self.sublayers():
            if isinstance(layer, Attention):
                kinds.setdefault(type(layer), []).append(layer)
        without = [
            kind.__name__ for kind, layers in kinds.items() if layers[0].spec.attn_drop and not kind.drops_weights
        ]
        lines = [f"attn_drop_rate has no part in {', '.join(without)}"] if without else []
        return lines + [line for kind, layers in kinds.items() for line in kind.remarks(layers)]

    def no_weight_decay(self) -> set[str]:
        """Parameters of two or more dimensions that the papers' recipes do not decay: `undecayed` of every layer."""
        layers = self.named_sublayers()
        return {f"{prefix}.{name}" for prefix, layer in layers for name in getattr(layer, "undecayed", ())}

    def blocks_in_order(self) -> list[str]:
        """Prefixes of the blocks from input to output, for layer-wise lr decay and for Muon."""
        raise NotImplementedError

    def layer_groups(self) -> list[list[str]]:
        """Parameter names from the stem (first) over the blocks to the head (last)."""
        prefixes = self.blocks_in_order()
        groups: list[list[str]] = [[] for _ in range(len(prefixes) + 2)]
        for name, _ in self.named_parameters():
            place = next((i for i, prefix in enumerate(prefixes, 1) if name.startswith(f"{prefix}.")), None)
            if place is None:
                place = len(groups) - 1 if name.startswith(("norm.", "head.")) else self.stem_group(name)
            groups[place].append(name)
        return groups

    def stem_group(self, name: str) -> int:
        return 0


class Pyramid(Backbone):
    """A backbone of stages, `stages.i.blocks.j`; what leads into a stage belongs to its first block.

    A stage has half the height and width of the one before; `dims` are the channels of each. All `per_stage` settings
    must be equally long.
    """

    def __init__(
        self, img_size: Size, in_chans: int, num_classes: int, patch_size: int, dims: Sequence[int], **per_stage
    ):
        lengths = {name: len(value) for name, value in per_stage.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            raise UserError(f"Per-stage settings differ in length: {listed}.")
        strides = [patch_size * 2**i for i in range(len(dims))]
        super().__init__(img_size, in_chans, num_classes, feat_channels=list(dims), strides=strides)

    def blocks_in_order(self) -> list[str]:
        return [f"stages.{i}.blocks.{j}" for i, stage in enumerate(self.stages) for j in range(len(stage.blocks))]

    def stem_group(self, name: str) -> int:
        if not name.startswith("stages."):
            return self.stem_group(f"stages.{len(self.stages) - 1}.")
        stage = int(name.split(".")[1])
        return sum(len(s.blocks) for s in list(self.stages)[:stage]) + (1 if stage else 0)


@contextlib.contextmanager
def recorded_blocks(model: Backbone) -> Iterator[list]:
    """A list that fills with the outputs [B, N, C] of the model's blocks, in order, while the model runs."""
    model.record = []
    try:
        yield model.record
    finally:
        model.record = None


class Stage(nn.Layer):
    """The parts of one stage, which the backbone's `tokens` runs: its blocks, and what leads into it or out of it."""

    def __init__(self, **parts: nn.Layer | list[Block] | None):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, nn.LayerList(part) if isinstance(part, list) else part)


def numbered_stages(name: str) -> str:
    """The numbered attributes of the PVT code as stages: block2.0.norm1 is stages.1.blocks.0.norm1."""
    name = re.sub(r"^(patch_embed|pos_embed|norm)(\d)\b", lambda m: f"stages.{int(m[2]) - 1}.{m[1]}", name)
    return re.sub(r"^block(\d)\.", lambda m: f"stages.{int(m[1]) - 1}.blocks.", name)


def as_size(img_size: Size) -> tuple[int, int]:
    """One side or [H, W] as (H, W)."""
    height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
    return height, width


def divided(size: tuple[int, int], by: int) -> tuple[int, int]:
    """(H / by, W / by), rounded up."""
    return -(-size[0] // by), -(-size[1] // by)


def stack_prefix(token: Tensor, x: Tensor) -> Tensor:
    """A class token [1, 1, C] in front of [B, N, C]."""
    return paddle.concat([token.expand([x.shape[0], -1, -1]), x], axis=1)
