"""Every setting: its type, its default, its unit. `ppattn.config` reads them from YAML files and overrides."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from ppattn.schema import (
    AboveZero,
    BelowOne,
    Count,
    Epsilon,
    Fraction,
    Mean,
    Names,
    NotNegative,
    Positive,
    Section,
    Seed,
    Size,
    Std,
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
    num_classes: Positive | None = None  # null: as many as the data set has
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
    holdout: Count = 0  # validate on so many training images; val stays unseen
    changed: Literal["refuse", "accept"] = "refuse"  # a run is resumed and its images or labels are other ones
    download: bool = True  # CIFAR only: fetch the archive where it is not there
    batch_size: Positive = 64  # images per process and micro-batch
    eval_batch_size: Positive | None = None  # null: batch_size
    num_workers: Count = 0  # 0: load in the training process
    crop_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0  # evaluation: resize to img_size / ratio, centre crop
    crop_keep_aspect: bool = False  # evaluation: scale the short side instead of resizing to a square
    interpolation: Literal["bilinear", "bicubic", "area", "nearest"] = "bicubic"
    mean: Annotated[list[Mean], Field(min_length=3, max_length=3)] | None = (
        None  # null: the data set's own, for pixels in 0..1
    )
    std: Annotated[list[Std], Field(min_length=3, max_length=3)] | None = None

    @property
    def location(self) -> Path:
        """`root`, or where the data set is looked for without one."""
        return Path(self.root or f"data/{self.name}")


class RandomResizedCrop(Section):
    scale: Parts = [0.08, 1.0]  # part of the image's area
    ratio: Range = [0.75, 4 / 3]  # width / height


class ProgressiveResize(Section):
    img_size: Size  # of the training images in the first epochs; evaluation keeps the model's size
    epochs: Positive  # how many


class Augment(Section):
    """Training transforms, applied in this order; everything is off until it is asked for."""

    random_resized_crop: RandomResizedCrop | None = None  # null: plain resize to img_size
    pad_crop: Count = 0  # pad by reflection, crop back at random; pixels of img_size
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
    repeats: Positive = 1  # repeated augmentation: each image this many times per epoch of the same length
    progressive_resize: ProgressiveResize | None = None  # smaller images in the first epochs


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
    eval_every: Positive = 1  # epochs
    save_every_steps: Positive | None = None  # besides the end of every epoch
    save_every_minutes: AboveZero | None = 10.0
    log_every: Positive = 50  # steps
    early_stop: EarlyStop | None = None
    device: str = "auto"  # auto, cpu, gpu, gpu:1, ...
    threads: Positive | None = None  # null: the cores divided by the processes

    @model_validator(mode="before")
    @classmethod
    def _removed(cls, given: Any) -> Any:
        """`nonfinite: stop` is in the configs of older weights; a loss that is not finite now always ends a run."""
        if isinstance(given, dict) and given.get("nonfinite") == "stop":
            return {key: value for key, value in given.items() if key != "nonfinite"}
        return given


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
    lr_scale: dict[str, AboveZero] = {}  # lr factor per pattern of parameter names, e.g. {"*.attn.dwc.*": 20}


class Schedule(Section):
    name: Literal["cosine", "constant"] = "cosine"
    warmup_epochs: NotNegative = 0.0
    warmup_lr: NotNegative = 0.0
    min_lr: NotNegative = 0.0
    cooldown_epochs: Count = 0  # epochs at min_lr after train.epochs
    per: Literal["step", "epoch"] = "step"


class Loss(Section):
    label_smoothing: BelowOne = 0.0


class Distill(Section):
    """Learn from a teacher besides the labels; it has no part in the run's checkpoints. The loss is

    labels * cross-entropy + logits * T^2 KL(teacher || student) + blocks * mean |student - teacher|^2 / |teacher|^2
    + attention * the same mean for the attention outputs

    with the last means over blocks and images (ppattn/engine/loss.py).
    """

    teacher: str | None = None  # a run folder, weights file or model with published weights; null: no teacher
    temperature: AboveZero = 1.0  # T, of both logits
    labels: NotNegative = 1.0
    logits: NotNegative = 1.0
    blocks: NotNegative = 0.0  # needs a teacher on the same backbone with as many blocks and channels
    attention: NotNegative = 0.0  # outputs of the blocks' attentions, after the projection; needs the same
    inputs: Literal["student", "teacher"] = "student"  # with attention: whose tokens the student's attentions get


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
