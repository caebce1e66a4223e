"""Parts of all backbones: attention layers from names, the transformer block, the classifier around the features."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import Tensor, nn

from ppattn.attention import ATTENTIONS, Attention, AttentionSpec, Context, LayerState, StageLinks, build_attention
from ppattn.attention.rotary import image_rotary_table
from ppattn.data import Preprocess, TrainTransform
from ppattn.errors import UserError, unknown_name
from ppattn.layers import LayerNorm, LayerScale, Linear, Mlp, PositionConv, add_mlp_branch, resized_table
from ppattn.ops import as_float32, drop_path
from ppattn.registry import Registry
from ppattn.settings import Augment, Config
from ppattn.validation import Names, Size, check_arguments

BACKBONES = Registry("backbone")

register_backbone = BACKBONES.register  # class decorator: `backbone: name` in models.yaml


def names_per_block(attention: Names, depths: Sequence[int], options: dict | None) -> list[list[str]]:
    """`attention` as given in a config -> a name for every block of every stage, each known and with known options."""
    stages: list = [attention] * len(depths) if isinstance(attention, str) else list(attention)
    if len(depths) == 1 and len(stages) == depths[0] and all(isinstance(s, str) for s in stages):
        stages = [stages]  # a plain backbone has one stage: a flat list names its blocks
    if len(stages) != len(depths):
        raise UserError(f"attention lists {len(stages)} stages, but the model has {len(depths)}.")
    out = []
    for number, (stage, depth) in enumerate(zip(stages, depths, strict=True), 1):
        out.append([stage] * depth if isinstance(stage, str) else list(stage))
        if len(out[-1]) != depth:
            raise UserError(f"attention lists {len(out[-1])} blocks for stage {number}, which has {depth}.")
    used = sorted({name for blocks in out for name in blocks})
    known = {option for name in used for option in ATTENTIONS.get(name).options()}
    for option in (options or {}).keys() - known:
        raise unknown_name(f"attention option (of {', '.join(used)})", option, known)
    return out


class StageBuilder:
    """Builds the blocks of a backbone, stage by stage; `shared` are fields of `AttentionSpec` that all layers share."""

    def __init__(self, attention: Names, options: dict | None, depths: Sequence[int], drop_path: float, **shared: Any):
        self.stages = enumerate(names_per_block(attention, depths, options))
        total = sum(depths)  # the rate rises linearly from 0 at the first block
        self.rates = iter([drop_path * i / max(total - 1, 1) for i in range(total)])
        self.options, self.shared, self.explicit = options or {}, shared, not isinstance(attention, str)
        self.previous: Attention | None = None

    def blocks(
        self, block: Callable[..., Block], grid: tuple[int, int], shape: dict, window: int = 0, shift: bool = False
    ) -> list[Block]:
        """The blocks of the next stage, whose map is of the size `grid` (H, W).

        `block` makes one from `(attn, drop_path=probability of stochastic depth)`; `shape` are fields of
        `AttentionSpec` that the layers of this stage share. Windowed attentions see windows of the side `window`, those
        of every second block shifted if `shift`; without a window the whole map.
        """
        out: list[Block] = []
        seen: dict[tuple[str, bool], int] = {}
        stage, names = next(self.stages)
        for j, name in enumerate(names):
            cls, seen_grid, shifted, previous = ATTENTIONS.get(name), grid, False, None
            if cls.windowed and window:  # windows of two stages do not cover each other: no link
                seen_grid, shifted = (window, window), shift and j % 2 == 1
            elif self.previous is not None and type(self.previous) is cls:
                previous = self.previous.spec
            index = seen[name, shifted] = seen.get((name, shifted), -1) + 1
            links = StageLinks(index, shifted, previous, self.explicit)
            spec = AttentionSpec(**self.shared, **shape, grid=seen_grid, stage=stage, block=j, links=links)
            own = {key: value for key, value in self.options.items() if key in cls.options()}
            out.append(block(build_attention(name, spec, own), drop_path=next(self.rates)))
        self.previous = out[-1].attn
        return out


class AttentionCall(NamedTuple):
    x: Tensor  # [B, N, C]
    hw: tuple[int, int]
    y: Tensor  # [B, N, C], after the output projection


class Block(nn.Layer):
    """A transformer block.

    pre-norm:  x + attention(LN(x)), then x + MLP(LN(x)), each branch under stochastic depth.
    post-norm: LN(x + dropout(attention(x))), then the same with the MLP, whose GELU is the tanh form (SOFT).
    """

    record: list[AttentionCall] | None = None  # filled within `recording_blocks`

    def __init__(
        self,
        attn: Attention,
        drop_path: float,  # probability of stochastic depth, or of dropout if post-norm
        mlp_ratio: float,  # hidden width of the MLP divided by the width of the tokens
        drop: float,  # dropout in the MLP
        epsilon: float,  # of the norms
        post: bool = False,  # post-norm
        cpe: bool = False,  # conditional position encoding, a `PositionConv` in front
        layer_scale: float | None = None,  # initial factor of both branches of a pre-norm block, see `LayerScale`
        rotary: bool = False,  # with the rotary positions of DINOv3
        mlp_type: type[nn.Layer] = Mlp,
    ):
        super().__init__()
        dim = attn.spec.dim
        self.cpe = PositionConv(dim, attn.spec.num_prefix) if cpe else None
        self.norm1, self.norm2 = LayerNorm(dim, epsilon), LayerNorm(dim, epsilon)
        self.attn = attn
        if dim * mlp_ratio < 1:
            raise UserError(f"mlp_ratio = {mlp_ratio} is not allowed: it leaves no channel of {dim}.")
        self.mlp = mlp_type(dim, int(dim * mlp_ratio), drop, approximate=post)
        self.drop_path, self.post, self.rotary = drop_path, post, rotary
        self.ls1, self.ls2 = (None if layer_scale is None else LayerScale(dim, layer_scale) for _ in range(2))

    def forward(self, x: Tensor, hw: tuple[int, int], state: LayerState) -> tuple[Tensor, LayerState]:
        if self.cpe is not None:
            x = self.cpe(x, hw)
        if self.post:
            y, state = self.attend(x, hw, state)
            x = self.norm1(x + nn.functional.dropout(y, self.drop_path, training=self.training))
            return self.norm2(x + nn.functional.dropout(self.mlp(x), self.drop_path, training=self.training)), state
        y, state = self.attend(self.norm1(x), hw, state)
        x = x + drop_path(y if self.ls1 is None else self.ls1(y), self.drop_path, self.training)
        if self.ls2 is None:
            return add_mlp_branch(x, self.norm2, self.mlp, self.drop_path), state
        return x + drop_path(self.ls2(self.mlp(self.norm2(x))), self.drop_path, self.training), state

    def attend(self, x: Tensor, hw: tuple[int, int], state: LayerState) -> tuple[Tensor, LayerState]:
        """The attention of this block, output projection included: tokens [B, N, C] -> [B, N, C]."""
        y, state = self.apply_attention(x, hw, state)
        if self.record is not None:
            self.record.append(AttentionCall(x, hw, y))
        return y, state

    def apply_attention(self, x: Tensor, hw: tuple[int, int], state: LayerState) -> tuple[Tensor, LayerState]:
        """`attend` without the record, for blocks that prepare tokens or context in another way."""
        rotation = image_rotary_table(self.attn, hw, x) if self.rotary and self.attn.rotates else None
        return self.attn(x, Context(hw, state=state, rotation=rotation))


class Backbone(nn.Layer):
    """A classifier of images: subclasses implement `tokens`. One of other input overrides `sized` to `train_transform`.

    `img_size` is the (H, W) it was built for; without classes it has no head. `feat_channels` and `strides` are the
    channels of each feature map, and the pixels of the image per token along each side.
    """

    mean_pool = False  # the mean of the patch tokens beside the class token, for the classifier
    input_kind = "images"  # what it takes, and its splits contain, in the plural
    refusal = ""  # of another kind: why it has no export, prediction and analysis, as a sentence

    def __init__(self, img_size: Size, in_chans: int, num_classes: int, feat_channels: list[int], strides: list[int]):
        super().__init__()
        height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
        self.img_size, self.in_chans, self.num_classes = (height, width), in_chans, num_classes
        self.name, self.feat_channels, self.strides = type(self).__name__, feat_channels, strides
        self.recompute = False  # each block in the backward pass, instead of keeping its activations
        self.record: list | None = None  # to which the output of every block is appended, see `recording_blocks`
        self.arguments: dict[str, Any] = {}  # of the constructor, where `create_model` built it

    @classmethod
    def sized(cls, size: Size) -> dict[str, Any]:
        """The arguments that build it for inputs of a size, one number or (H, W)."""
        return {"img_size": size}

    def example(
        self, batch: int = 1, size: tuple[int, int] | None = None, rng: np.random.Generator | None = None
    ) -> np.ndarray:
        """Random input to measure with: float32 [batch, in_chans, H, W], by default of the size of the build."""
        shape = batch, self.in_chans, *(size or self.img_size)
        return (rng or np.random.default_rng(0)).standard_normal(shape, np.float32)

    def preprocess(self, config: Config, mean: Any, std: Any) -> Preprocess:
        """What the config says to do with an item of a split before the model sees it; `mean`, `std`: of the pixels."""
        resizing = config.data.model_dump(include={"crop_ratio", "crop_keep_aspect", "interpolation", "max_value"})
        return Preprocess(self.img_size, mean=mean, std=std, in_chans=self.in_chans, **resizing)

    def train_transform(self, augment: Augment, preprocess: Preprocess) -> TrainTransform:
        """What training does with an item instead."""
        return TrainTransform(augment, preprocess)

    def check_images(self) -> None:
        """Raise `UserError` for a model that takes something else: nothing but images is exported or looked at."""
        if self.input_kind != "images":
            raise UserError(f"{type(self).__name__} takes {self.input_kind}, not images. {self.refusal}".strip())

    def build_head(self) -> None:
        """A linear layer on the pooled features, with `mean_pool` two vectors of the last width."""
        width = self.feat_channels[-1] * (1 + self.mean_pool)
        self.head = Linear(width, self.num_classes) if self.num_classes else nn.Identity()

    def reset_classifier(self, num_classes: int) -> None:
        """A new classifier with `num_classes` outputs; 0: none, the model then gives pooled features."""
        self.num_classes = num_classes
        self.build_head()

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, in_chans, H, W], normalised -> logits [B, num_classes], or pooled features [B, C] without head."""
        return self.head(self.tokens(self.checked(x))[0])

    def forward_train(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits as from `forward`, and the sum of the auxiliary losses, a weighted scalar; usually None."""
        pooled, _, state = self.tokens(self.checked(x))
        return self.head(pooled), state.loss

    def final_features(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Pooled features [B, C], the last map [B, C', H', W'], and the sum of the auxiliary losses."""
        pooled, maps, state = self.tokens(self.checked(x))
        return pooled, maps[-1], state.loss

    def forward_features(self, x: Tensor) -> list[Tensor]:
        """Maps for dense prediction: a list of [B, feat_channels[i], H / strides[i], W / strides[i]] (rounded)."""
        return self.tokens(self.checked(x))[1]

    def forward_intermediates(
        self, x: Tensor, indices: int | Sequence[int] | None = None, norm: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """The last map [B, C, H', W'] after the final norm, and maps [B, C_i, H_i, W_i], as timm's method of this name.

        `indices` are blocks (plain backbones) or stages (pyramids), counted from 0, or from the end if negative; a
        number: this many, the last ones; None: all. `norm` applies the final norm to all maps of a plain backbone.
        """
        last, maps = self.intermediates(self.checked(x), norm)
        wanted = range(-indices, 0) if isinstance(indices, int) else range(len(maps)) if indices is None else indices
        if not all(-len(maps) <= i < len(maps) for i in wanted) or not len(wanted):
            raise UserError(f"indices = {indices} is not allowed: there are {len(maps)} maps.")
        return last, [maps[i] for i in sorted(i % len(maps) for i in wanted)]

    def intermediates(self, x: Tensor, norm: bool) -> tuple[Tensor, list[Tensor]]:
        """All maps for `forward_intermediates`."""
        maps = self.tokens(x)[1]
        return maps[-1], maps

    def set_input_size(self, img_size: Size) -> None:
        """Rebuild it for images of another size, in place, before the optimizer: tables resized, weights kept."""
        if not self.arguments:
            raise UserError("set_input_size is for models of create_model, whose arguments are known.")
        check_arguments(type(self), self.sized(img_size), "set_input_size")
        fresh = type(self)(**{**self.arguments, **self.sized(img_size), "num_classes": self.num_classes})
        fresh.to(dtype=next((p.dtype for p in self.parameters() if p.dtype != paddle.float32), None))
        old, new = self.state_dict(), fresh.state_dict()
        for name in old | new:
            array = as_float32(old[name]).numpy() if name in old else np.empty(0)
            resized = resized_parameter(fresh, name, array, self.img_size) if name in new else None
            array = array if resized is None else resized
            if name not in new or list(array.shape) != new[name].shape:
                raise UserError(f"{name} depends on the image size or was added: it does not fit {img_size} pixels.")
            new[name].set_value(paddle.to_tensor(array).astype(new[name].dtype))
            new[name].stop_gradient = old[name].stop_gradient
        fresh.name, fresh.recompute, fresh.arguments = self.name, self.recompute, self.arguments | self.sized(img_size)
        tensors, kept = ("_parameters", "_buffers", "_non_persistable_buffer_names_set"), ("training", "epsilon")
        layers = dict(self.named_sublayers(include_self=True))  # these stay, with their hooks
        for name, layer in fresh.named_sublayers(include_self=True):
            facts = {k: v for k, v in vars(layer).items() if k in tensors or k[0] != "_" and k not in kept}
            layers.get(name, layer).__dict__.update(facts)

    def tokens(self, x: Tensor) -> tuple[Tensor, list[Tensor], LayerState]:
        """Images -> (pooled features [B, C], feature maps, state of the last layer)."""
        raise NotImplementedError

    def with_class_token(self, x: Tensor) -> Tensor:
        """The class token in front of [B, N, C]."""
        return paddle.concat([self.cls_token.expand([x.shape[0], -1, -1]), x], axis=1)

    def checked(self, x: Tensor) -> Tensor:
        empty = paddle.in_dynamic_mode() and 0 in x.shape[2:]
        if x.ndim != 4 or x.shape[1] not in (self.in_chans, -1) or empty:
            raise UserError(f"The model takes images [B, {self.in_chans}, H, W], not {list(x.shape)}.")
        return x

    def run(
        self, blocks: Iterable[Block], x: Tensor, hw: tuple[int, int], state: LayerState
    ) -> tuple[Tensor, LayerState]:
        """Blocks in turn, recomputed in the backward pass if `recompute` is set; their outputs are recorded."""
        for block in blocks:
            if self.recompute and self.training and not x.stop_gradient:  # Paddle recomputes only with a gradient
                from paddle.distributed.fleet.utils import recompute

                x, state = recompute(block, x, hw, state, use_reentrant=False)
            else:
                x, state = block(x, hw, state)
            if self.record is not None:
                self.record.append(x)
        return x, state

    def official_name(self, name: str) -> str | None:
        """Our name of a parameter of the authors' state dict; None if the weights here do not have it."""
        return name

    def remarks(self) -> list[str]:
        """Sentences for the log about the attentions of this model; usually none."""
        layers = [layer for layer in self.sublayers() if isinstance(layer, Attention)]
        kinds = {type(layer): [other for other in layers if type(other) is type(layer)] for layer in layers}
        without = [kind.__name__ for kind in kinds if layers[0].spec.attn_drop and not kind.drops_weights]
        lines = [f"attn_drop_rate has no effect in {', '.join(without)}"] if without else []
        return lines + [line for kind, own in kinds.items() for line in kind.remarks(own)]

    def no_weight_decay(self) -> set[str]:
        """Parameters of two or more dimensions that the papers' recipes do not decay: `no_decay` of every layer."""
        layers = self.named_sublayers(include_self=True)
        names = {f"{prefix}.{name}" for prefix, layer in layers for name in getattr(layer, "no_decay", ())}
        return {name.removeprefix(".") for name in names}

    def block_names(self) -> list[str]:
        """Prefixes of the blocks from input to output, for layer-wise lr decay and for Muon."""
        return [f"blocks.{i}" for i in range(len(self.blocks))]

    def blocks_flat(self) -> list[Block]:
        """The blocks from input to output."""
        return [attrgetter(name)(self) for name in self.block_names()]

    def layer_groups(self) -> list[list[str]]:
        """Parameter names from the stem (first) over the blocks to the head (last)."""
        prefixes = self.block_names()
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
    """A backbone of stages, `stages.i.blocks.j`, each with half the height and width of the one before.

    Layers in front of a stage belong to its first block. `dims`: channels per stage; `lists` must be equally long.
    """

    def __init__(self, img_size: Size, in_chans: int, num_classes: int, patch_size: int, dims: Sequence[int], **lists):
        if len(set(map(len, lists.values()))) > 1:
            listed = ", ".join(f"{name} has {len(value)}" for name, value in lists.items())
            raise UserError(f"Per-stage settings differ in length: {listed}.")
        strides = [patch_size * 2**i for i in range(len(dims))]
        super().__init__(img_size, in_chans, num_classes, feat_channels=list(dims), strides=strides)

    def block_names(self) -> list[str]:
        return [f"stages.{i}.blocks.{j}" for i, stage in enumerate(self.stages) for j in range(len(stage.blocks))]

    def stem_group(self, name: str) -> int:
        if not name.startswith("stages."):
            return self.stem_group(f"stages.{len(self.stages) - 1}.")
        stage = int(name.split(".")[1])
        return sum(len(s.blocks) for s in list(self.stages)[:stage]) + (1 if stage else 0)


@contextlib.contextmanager
def recording_blocks(layers: Sequence[Backbone | Block]) -> Iterator[list]:
    """A list that fills while the model runs, in order: for `[model]` with the outputs [B, N, C] of its blocks, for
    `model.blocks_flat()` with the calls of their attentions, `AttentionCall`."""
    record: list = []
    for layer in layers:
        layer.record = record
    try:
        yield record
    finally:
        for layer in layers:
            layer.record = None


class Stage(nn.Layer):
    """The parts of one stage by name: its blocks, and embedding, norm or downsampling around them."""

    def __init__(self, **parts: nn.Layer | list[Block] | None):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, nn.LayerList(part) if isinstance(part, list) else part)


def resized_parameter(model: nn.Layer, name: str, array: np.ndarray, size: tuple[int, int] | None) -> np.ndarray | None:
    """A parameter of a model built for another image size or for RGB, for this one; None if it is used unchanged.

    A layer says which of its parameters are position tables: `grid_tables`, name to (grid, prefix tokens, mode of
    interpolation). For other shapes it has a method `resized(name, array, img_size)`.
    """
    path, _, leaf = name.rpartition(".")
    layer: Any = attrgetter(path)(model) if path else model
    shape = tuple(getattr(layer, leaf).shape)
    if array.ndim != len(shape):
        return None
    if leaf in getattr(layer, "grid_tables", {}):
        return resized_table(array, shape, size, layer.grid_tables[leaf])
    if hasattr(layer, "resized"):
        return layer.resized(leaf, array, size)
    if array.ndim == 4 and array.shape[1] == 3 != shape[1] == model.in_chans and array.shape[2:] == shape[2:]:
        if model.in_chans == 1:  # grey is the same in the three channels
            return array.sum(axis=1, keepdims=True)
        return array[:, np.arange(model.in_chans) % 3] * np.float32(3 / model.in_chans)
    return None


def numbered_stages(name: str) -> str:
    """The numbered attributes of the PVT code as stages: block2.0.norm1 is stages.1.blocks.0.norm1."""
    name = re.sub(r"^(patch_embed|pos_embed|norm)(\d)\b", lambda m: f"stages.{int(m[2]) - 1}.{m[1]}", name)
    return re.sub(r"^block(\d)\.", lambda m: f"stages.{int(m[1]) - 1}.blocks.", name)


def divided(size: tuple[int, int], by: int) -> tuple[int, int]:
    """(H / by, W / by), rounded up."""
    return -(-size[0] // by), -(-size[1] // by)
