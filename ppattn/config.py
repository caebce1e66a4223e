"""YAML files to a typed configuration: one `base:` level, `-o a.b=c`, and an error for everything that is not known.

The schema below is the documentation of every key, its default and its unit. Pydantic checks it; this module only
merges files and overrides, remembers where each value came from, and words the errors.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import yaml
from pydantic import AfterValidator, Field, ValidationError, create_model

from ppattn import zoo
from ppattn.errors import UserError, reading
from ppattn.runtime import import_paddle
from ppattn.safe_yaml import parse
from ppattn.schema import (
    AboveZero,
    BelowOne,
    Depth,
    Epsilon,
    Fraction,
    Images,
    Names,
    NotNegative,
    Positive,
    Section,
    Seed,
    Threads,
    Workers,
    arguments,
    reasons,
)


def _named(path: str) -> str:
    if Path(path).name in ("", ".."):
        raise ValueError("should be a folder with a name of its own, which is made")
    return path


def _ordered(pair: list[float]) -> list[float]:
    if pair[0] > pair[1]:
        raise ValueError("should be [smallest, largest]")
    return pair


def _at_most_one(pair: list[float]) -> list[float]:
    if pair[1] > 1:
        raise ValueError("should be parts of the area, at most 1")
    return pair


Range = Annotated[list[AboveZero], Field(min_length=2, max_length=2), AfterValidator(_ordered)]
Parts = Annotated[Range, AfterValidator(_at_most_one)]


class Model(Section):
    """What `ppattn.create_model` gets, and how training uses it.

    Every argument of the named model's backbone (img_size, embed_dim, drop_path_rate, ...: the constructors in
    ppattn/backbones/) is a key as well. A key left at null keeps the value of the named backbone or model.
    """

    name: str = "deit_tiny"  # a backbone or a model of the zoo, see `tools/list.py`
    attention: Names | None = None
    attention_options: dict[str, Any] = {}  # the mechanisms' own settings
    num_classes: Annotated[int, Field(ge=1, le=10**6)] | None = None  # null: as many as the data set has
    init: Literal["normal", "xavier"] | None = None  # Linear weights: normal(0, 0.02) as published, or Glorot's
    norm_eps: Epsilon | None = None  # epsilon of every LayerNorm; null: the backbone's own
    weights: str | None = None  # start from this file, run folder, model's name or `pretrained`; `--resume` goes first
    reset_head: bool = False  # with `weights`: the classifier starts afresh
    allow: list[str] = []  # with `weights`: patterns of parameters that start afresh where they do not fit: "*.attn.*"
    freeze: list[str] = []  # patterns of parameter names that are not trained, e.g. "patch_embed*"
    recompute: bool = False  # recompute each block in the backward pass: less memory, more time

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `create_model`: everything that was given."""
        own = {"name", "weights", "reset_head", "allow", "freeze", "recompute"}
        return {key: value for key, value in self.model_dump(exclude=own).items() if value not in (None, {})}


class Data(Section):
    name: Literal["digits", "cifar10", "cifar100", "imagenet", "folder", "list", "shards"] = "digits"
    root: str | None = None  # folder or archive; null: `data/<name>`
    train: str | None = None  # within root: a folder, list file or shard pattern; null: the data set's own
    val: str | None = None
    shuffle_buffer: Positive = 4096  # shards: how many samples may be held back for shuffling, per process
    holdout: Annotated[int, Field(ge=0, lt=2**31)] = 0  # validate on so many training images; val stays unseen
    changed: Literal["refuse", "accept"] = "refuse"  # a run is resumed and its images or labels are other ones
    download: bool = True  # CIFAR only: fetch the archive where it is not there
    batch_size: Images = 64  # images per process and micro-batch
    eval_batch_size: Images | None = None  # null: batch_size
    num_workers: Workers = 0  # 0: load in the training process
    crop_ratio: Annotated[float, Field(ge=0.01, le=1.0)] = 1.0  # evaluation: resize to img_size / ratio, centre crop
    crop_keep_aspect: bool = False  # evaluation: scale the short side instead of resizing to a square
    interpolation: Literal["bilinear", "bicubic", "area", "nearest"] = "bicubic"
    mean: list[float] | None = None  # null: the data set's own, for pixels in 0..1
    std: list[float] | None = None

    @property
    def location(self) -> Path:
        """`root`, or where the data set is looked for without one."""
        return Path(self.root or f"data/{self.name}")


class RandomResizedCrop(Section):
    scale: Parts = [0.08, 1.0]  # part of the image's area
    ratio: Range = [0.75, 4 / 3]  # width / height


class Augment(Section):
    """Training transforms, applied in this order; everything is off until it is asked for."""

    random_resized_crop: RandomResizedCrop | None = None  # null: plain resize to img_size
    pad_crop: Annotated[int, Field(ge=0, le=2**14)] = 0  # pad by reflection, crop back at random; pixels of img_size
    color_jitter: list[NotNegative] | None = None  # [brightness, contrast, saturation] or with hue as a fourth
    horizontal_flip: Fraction = 0.0
    alternating_flip: bool = False  # each image flipped in every second epoch, the first one drawn per image
    rotation: NotNegative = 0.0  # degrees to either side
    translate: Fraction = 0.0  # random shift to either side, as a part of the size
    rand_augment: str | None = None  # timm's notation: "rand-m9-mstd0.5-inc1"
    random_erasing: Fraction = 0.0
    erasing_mode: Literal["pixel", "const"] = "pixel"  # noise of unit variance, or zero, in normalised values
    mixup: NotNegative = 0.0  # alpha of the beta distribution
    cutmix: NotNegative = 0.0
    mix_prob: Fraction = 1.0  # part of the batches that are mixed at all
    mix_switch_prob: Fraction = 0.5  # CutMix rather than Mixup where both are on
    repeats: Depth = 1  # repeated augmentation: each image this many times per epoch of the same length


class EarlyStop(Section):
    patience: Positive = 10  # evaluations without a better top-1
    min_delta: NotNegative = 0.0  # a new best top-1 is more than this above the one before it


class Train(Section):
    epochs: Positive = 10
    max_steps: Positive | None = None  # stop after so many steps (the schedule keeps its length)
    seed: Seed = 42
    amp: Literal["bf16", "fp16"] | None = None  # GPU only
    amp_level: Literal["O1", "O2"] = "O1"
    ema: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None  # decay per step; evaluated and kept as the model
    ema_warmup: bool = False  # decay = min(ema, (1 + t) / (10 + t)) at step t
    clip_grad: AboveZero | None = None  # global norm
    accumulate: Positive = 1  # micro-batches of batch_size per optimizer step
    nonfinite: Literal["stop", "skip"] = "stop"  # what a loss that is not finite does
    eval_every: Positive = 1  # epochs
    save_every_steps: Positive | None = None  # besides the end of every epoch
    save_every_minutes: AboveZero | None = 10.0
    log_every: Positive = 50  # steps
    early_stop: EarlyStop | None = None
    device: str = "auto"  # auto, cpu, gpu, gpu:1, ...
    threads: Threads | None = None  # null: the cores divided by the processes


class Optimizer(Section):
    name: Literal["adam", "adamw", "muon", "sgd"] = "adamw"
    lr: AboveZero = 1.0e-3
    weight_decay: NotNegative = 0.05  # adam, sgd: coupled L2 on every parameter; adamw, muon: decoupled, papers' groups
    betas: Annotated[list[BelowOne], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    eps: AboveZero = 1.0e-8
    momentum: Fraction = 0.9  # sgd, and muon (0.95 was tried)
    lr_batch: Positive | None = None  # lr (with warm-up and minimum) is multiplied by total batch / lr_batch
    lr_batch_scales: Literal["all", "peak"] = "all"  # peak: warm-up and minimum stay as written
    layer_decay: Annotated[float, Field(gt=0.0, le=1.0)] | None = None  # lr factor per block, from the head down


class Schedule(Section):
    name: Literal["cosine", "constant"] = "cosine"
    warmup_epochs: NotNegative = 0.0
    warmup_lr: NotNegative = 0.0
    min_lr: NotNegative = 0.0
    cooldown_epochs: Annotated[int, Field(ge=0, lt=2**31)] = 0  # epochs at min_lr after train.epochs
    per: Literal["step", "epoch"] = "step"


class Loss(Section):
    label_smoothing: BelowOne = 0.0


class Distill(Section):
    """Learn from a teacher besides the labels; it has no part in the run's checkpoints. The loss is

    labels * cross-entropy + logits * T^2 KL(teacher || student) + blocks * mean |student - teacher|^2 / |teacher|^2

    with the last mean over blocks and images (ppattn/engine/loss.py).
    """

    teacher: str | None = None  # a run folder, weights file or model with published weights; null: no teacher
    temperature: AboveZero = 1.0  # T, of both logits
    labels: NotNegative = 1.0
    logits: NotNegative = 1.0
    blocks: NotNegative = 0.0  # needs a teacher on the same backbone with as many blocks and channels


class Config(Section):
    model: Model = Model()
    data: Data = Data()
    augment: Augment = Augment()
    train: Train = Train()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    loss: Loss = Loss()
    distill: Distill = Distill()
    output: Annotated[str, AfterValidator(_named)] = "runs/default"  # the run folder


def find_config(path: str | Path) -> Path:
    """The file itself, or one of the configs that ship with the package: `digits/inline_deit_nano`."""
    from ppattn import CONFIGS

    shipped = str(path).removeprefix("configs/")
    for candidate in (Path(path), Path(f"{path}.yaml"), CONFIGS / shipped, CONFIGS / f"{shipped}.yaml"):
        if candidate.is_file():
            return candidate
    names = [str(p.relative_to(CONFIGS)) for p in sorted(CONFIGS.rglob("*.yaml"))]
    near = difflib.get_close_matches(shipped, names, n=1, cutoff=0.4)
    raise UserError(f"No config file {str(path)!r}." + (f" Did you mean configs/{near[0]}?" if near else ""))


def _find_base(path: Path, base: str) -> Path:
    """The base file: relative to the file that names it, or one that ships with the package, as in base/imagenet."""
    beside = path.parent / base
    if beside.is_file():
        return beside
    try:
        return find_config(re.sub(r"^(\.\./)+", "", base))
    except UserError:
        raise UserError(
            f"{path}: base: {base} is neither a file ({beside}: No such file, relative to this one) nor a config that "
            "ships with the package, as in `base: base/imagenet.yaml`."
        ) from None


def _read(path: Path) -> tuple[dict, dict[str, str]]:
    """The mapping in a YAML file and, for every key of it, `file:line`."""
    with reading(path, "a text file in UTF-8"):
        text = path.read_text(encoding="utf-8")
    tree, node = parse(text, str(path))
    if tree is None:
        return {}, {}
    if not isinstance(tree, dict):
        raise UserError(f"{path} holds a {type(tree).__name__}, not a mapping of sections to settings.")
    origins: dict[str, str] = {}

    def walk(node, prefix):
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            origins[name] = f"{path}:{key.start_mark.line + 1}"
            if isinstance(value, yaml.MappingNode):
                walk(value, f"{name}.")

    walk(node, "")
    return tree, origins


def _merge(under: dict, over: dict) -> dict:
    """`over` laid on `under`, mapping by mapping; anything but a mapping replaces."""
    out = dict(under)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = _merge(out[key], value) if both else value
    return out


def dotted(tree: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names of everything in a tree, with the values."""
    for key, value in tree.items():
        yield f"{prefix}{key}", value
        if isinstance(value, dict):
            yield from dotted(value, f"{prefix}{key}.")


def _override(item: str) -> dict:
    key, sign, text = item.partition("=")
    parts = key.strip().split(".")
    if not sign or not all(parts) or len(parts) > 10:
        raise UserError(f"Override {item!r} is not of the form section.key=value.")
    value, _ = parse(text, f"The value of override {item[:200]!r}")
    for part in reversed(parts):
        value = {part: value}
    return value


def _section(root: type[Section], location: list[str]) -> type[Section] | None:
    """The section class at a dotted location of the schema."""
    section: Any = root
    for part in location:
        field = section.model_fields.get(part)
        options = [field.annotation, *getattr(field.annotation, "__args__", ())] if field is not None else []
        section = next((o for o in options if isinstance(o, type) and issubclass(o, Section)), None)
        if section is None:
            return None
    return section


def _explain(error: ValidationError, schema: type[Config], origins: dict[str, str]) -> UserError:
    first = next((e for e in error.errors() if e["type"] == "extra_forbidden"), error.errors()[0])
    names = [part for part in first["loc"] if isinstance(part, str)]
    while len(names) > 1 and ".".join(names) not in origins and _section(schema, names[:-1]) is None:
        names.pop()  # pydantic appends the branch of a union that it tried
    key = ".".join(names)
    where = origins.get(key, "defaults")
    if first["type"] == "extra_forbidden":
        allowed = sorted((_section(schema, names[:-1]) or schema).model_fields)
        near = difflib.get_close_matches(names[-1], allowed, n=1, cutoff=0.5)
        prefix = ".".join([*names[:-1], ""])
        hint = f" Did you mean {prefix}{near[0]}?" if near else ""
        here = f"for {schema.model_fields['model'].default.name}" if names[0] == "model" else "here"
        return UserError(f"{where}: unknown key {key!r}.{hint} Allowed {here}: {', '.join(allowed)}.")
    return UserError(f"{where}: {key} = {first['input']!r} is not allowed: {reasons(error, tuple(names))}.")


@cache
def _with_backbone(name: str) -> type[Config]:
    """`Config` with the arguments of a model's backbone as keys of its model section."""
    own = _backbone_arguments(zoo.entry(name).backbone)
    fields: dict[str, Any] = {key: (Optional[own[key]], None) for key in own if key not in Model.model_fields}  # noqa: UP045
    model = create_model("Model", __base__=Model, **fields)
    return create_model("Config", __base__=Config, model=(model, model(name=name)))


def _backbone_arguments(*backbones: str) -> dict[str, Any]:
    """Arguments and annotations of the named backbones' constructors, or of all backbones."""
    import_paddle()
    from ppattn.backbones import BACKBONES

    return {key: hint for name in backbones or BACKBONES.list() for key, hint in arguments(BACKBONES.get(name)).items()}


def load_config(path: str | Path, overrides: list[str] | None = None) -> tuple[Config, dict[str, str]]:
    """Read a config file, its base and the overrides.

    Returns:
        The checked configuration, and for every key that was set the place it was set at (`file:line` or `-o`).

    Raises:
        UserError: for a file that is missing or not YAML, an unknown key, a wrong type or an impossible value.
    """
    path = find_config(path)
    tree, origins = _read(path)
    base = tree.pop("base", None)
    if base is not None:
        if not isinstance(base, str):
            raise UserError(f"{origins['base']}: base must be one file name, not {base!r}.")
        below, below_origins = _read(_find_base(path, base))
        if "base" in below:
            raise UserError(f"{below_origins['base']}: a base file has no base of its own (one level only).")
        tree, origins = _merge(below, tree), {**below_origins, **origins}
    return override(tree, overrides or [], origins)


def _check_mapping(tree: object) -> None:
    if not isinstance(tree, dict):
        raise UserError(f"The settings are a {type(tree).__name__}, not a mapping of sections to settings.")


def override(tree: dict, overrides: list[str], origins: dict[str, str] | None = None) -> tuple[Config, dict[str, str]]:
    """Lay `section.key=value` items on a mapping and check it, as `load_config` does with a file."""
    _check_mapping(tree)
    origins = dict(origins or {})
    for item in overrides:
        change = _override(item)
        tree = _merge(tree, change)
        origins |= {name: f"-o {item}" for name, _ in dotted(change)}
    return make_config(tree, origins), origins


def make_config(tree: dict, origins: dict[str, str] | None = None) -> Config:
    """Check a mapping against the schema; a key of another backbone than the model's may stand there as null.

    Raises:
        UserError: with the origin of the key or value that does not fit.
    """
    _check_mapping(tree)
    origins, model, schema = origins or {}, tree.get("model", {}), Config
    if isinstance(model, dict):
        name, where = model.get("name", Model().name), origins.get("model.name", "defaults")
        if not isinstance(name, str):
            raise UserError(f"{where}: model.name = {name!r} is not allowed: should be text.")
        try:
            schema = _with_backbone(name)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        own = type(schema.model_fields["model"].default).model_fields
        foreign = {key for key, value in model.items() if value is None and key not in own} & {*_backbone_arguments()}
        tree = tree | {"model": {key: value for key, value in model.items() if key not in foreign}}
    try:
        config = schema.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, schema, origins) from None
    try:
        _check_attention(config.model.attention or [])
    except UserError as error:
        raise UserError(f"{origins.get('model.attention', 'defaults')}: {error}") from None
    return config


def _check_attention(names: Names) -> None:
    from ppattn.attention import ATTENTIONS

    for part in [names] if isinstance(names, str) else names:
        for name in [part] if isinstance(part, str) else part:
            ATTENTIONS.get(name)


def to_yaml(config: Config, origins: dict[str, str] | None = None) -> str:
    """The resolved configuration as YAML; with `origins`, every line says where its value came from."""
    lines: list[str] = []

    def emit(tree: dict, prefix: str, indent: str) -> None:
        for key, value in tree.items():
            name = prefix + key
            if isinstance(value, dict) and value:
                lines.append(f"{indent}{key}:")
                emit(value, f"{name}.", indent + "  ")
                continue
            text = yaml.safe_dump(value, default_flow_style=True, width=10**6).strip().removesuffix("\n...")
            line = f"{indent}{key}: {text}"
            if origins is not None:
                line = f"{line:<60}  # {origins.get(name, 'default')}"
            lines.append(line)

    emit(config.model_dump(), "", "")
    return "\n".join(lines) + "\n"
