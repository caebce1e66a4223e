"""Every setting: its type, its default, its meaning. `ppattn.config` reads them from YAML files and overrides."""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ppattn.validation import (
    AboveZero,
    BelowOne,
    Count,
    Epsilon,
    Fraction,
    Mean,
    Names,
    NotNegative,
    Pair,
    Portion,
    Positive,
    Section,
    Seed,
    Size,
    Std,
    Triple,
    must,
)


def _is_fold(text: str) -> bool:
    found = re.fullmatch(r"([1-9]\d?)/([1-9]\d?)", text)
    return found is not None and int(found[1]) <= int(found[2]) > 1


ordered = must(lambda pair: pair[0] <= pair[1], "[smallest, largest]")
named = must(lambda path: Path(path).name not in ("", ".."), "a folder with a name of its own, which is made")
File = Annotated[str, AfterValidator(os.path.expanduser)]
Range = Annotated[Pair[AboveZero], ordered]
Parts = Annotated[Pair[Portion], ordered]
Fold = Annotated[str, must(_is_fold, '"NUMBER/FOLDS", such as "2/5"')]
half = must(lambda strengths: max(strengths[3:], default=0) <= 0.5, "of a hue of at most 0.5, half the circle")
Jitter = Annotated[list[NotNegative], Field(min_length=3, max_length=4), half]


class Model(Section):
    """What `ppattn.create_model` gets, and how training uses it.

    The arguments of the named model's backbone (img_size, embed_dim, drop_path_rate, ...) are keys as well. A key left
    at null keeps the value of the named backbone or model.
    """

    name: str = Field("deit_tiny", description="backbone or model of the zoo, see `ppattn list`")
    attention: Names | None = Field(None, description="one name, one per stage, or a list of one per block for a stage")
    attention_options: dict[str, Any] = Field({}, description="options of the attentions")
    num_classes: Positive | None = Field(None, description="null: as many as the data set has")
    init: Literal["normal", "xavier"] | None = Field(None, description="linear layers: normal(0, 0.02), or Glorot's")
    norm_eps: Epsilon | None = Field(None, description="epsilon of every LayerNorm; null: the backbone's own")
    weights: File | None = Field(None, description="file, run, model's name or `pretrained` to begin with")
    reset_head: bool = Field(False, description="with `weights`: the classifier is re-initialised")
    allow: list[str] = Field([], description='with `weights`: parameters to re-initialise on a misfit: "*.attn.*"')
    freeze: list[str] = Field([], description='patterns of parameters that are not trained, such as "patch_embed*"')
    recompute: bool = Field(False, description="recompute each block in the backward pass: less memory, more time")

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `create_model`: everything that was given."""
        own = {"name", "weights", "reset_head", "allow", "freeze", "recompute"}
        return {key: value for key, value in self.model_dump(exclude=own).items() if value not in (None, {})}


class Data(Section):
    """The images, and how they are read."""

    name: str = Field("digits", description="digits, cifar10, cifar100, imagenet, folder, list, shards, or your own")
    root: File | None = Field(None, description="folder or archive; null: `data/<name>`")
    train: File | None = Field(None, description="folder, list file or shards within `root`; null: the data set's own")
    val: File | None = Field(None, description="the same for validation")
    sampler: Literal["balanced"] | None = Field(None, description="balanced: every class equally often in an epoch")
    shuffle_buffer: Positive = Field(4096, description="shards: samples held back for shuffling, per process")
    holdout: Count | BelowOne = Field(0, description="validate on this many training images, or this part, instead")
    fold: Fold | None = Field(None, description="2/5: cross-validation on the second fifth, instead of `holdout`")
    holdout_seed: Seed | None = Field(None, description="draws the images of `holdout`; null: `train.seed`")
    labels: bool = Field(True, description="false: no labels, no classifier; a folder may hold images anywhere")
    changed: Literal["refuse", "accept"] = Field("refuse", description="resuming with other images or labels")
    download: bool = Field(True, description="CIFAR only: fetch the archive where it is not there")
    batch_size: Positive = Field(64, description="images per process and micro-batch")
    eval_batch_size: Positive | None = Field(None, description="the same in evaluation; null: `batch_size`")
    num_workers: Count = Field(0, description="processes that load images; 0: load in the training process")
    crop_ratio: Portion = Field(1.0, description="evaluation: resize to img_size / ratio, then crop the centre")
    crop_keep_aspect: bool = Field(False, description="evaluation: scale by the short side, not to a square")
    interpolation: Literal["bilinear", "bicubic", "area", "nearest"] = Field("bicubic", description="of every resize")
    max_value: AboveZero | None = Field(None, description="value of white above 8 bits: 4095 for 12 bits; null: 65535")
    mean: Triple[Mean] | None = Field(None, description="per channel, for pixels in 0..1; null: the data set's own")
    std: Triple[Std] | None = Field(None, description="standard deviation per channel; null: the data set's own")
    options: dict[str, Any] = Field({}, description="options of the data set; those of the package have none")

    @property
    def held(self) -> int | float | str:
        """What is held out of the training images: `fold` or `holdout`."""
        return self.fold or self.holdout

    @property
    def location(self) -> Path:
        """`root`, or where the data set is looked for without one."""
        return Path(self.root or f"data/{self.name}")


class RandomResizedCrop(Section):
    """A random part of the image, resized to img_size."""

    scale: Parts = Field([0.08, 1.0], description="smallest and largest part of the image's area")
    ratio: Range = Field([0.75, 4 / 3], description="smallest and largest width / height")


class ProgressiveResize(Section):
    """Smaller training images in the first epochs; evaluation keeps the model's size."""

    img_size: Size = Field(description="pixels of the training images in these epochs, one side or [height, width]")
    epochs: Positive = Field(description="number of these epochs")


class Augment(Section):
    """Training transforms, applied in this order; everything is off until it is asked for."""

    random_resized_crop: RandomResizedCrop | None = Field(None, description="null: plain resize to img_size")
    pad_crop: Count = Field(0, description="pad by reflection, crop back at random; pixels of img_size")
    color_jitter: Jitter | None = Field(None, description="[brightness, contrast, saturation] or with hue")
    horizontal_flip: Fraction = Field(0.0, description="probability")
    vertical_flip: Fraction = Field(0.0, description="probability")
    alternating_flip: bool = Field(False, description="flip in every second epoch, the first one drawn per image")
    rotation: NotNegative = Field(0.0, description="degrees to either side")
    translate: Fraction = Field(0.0, description="random shift to either side, as a part of the size")
    rand_augment: str | None = Field(None, description='timm\'s notation: "rand-m9-mstd0.5-inc1"')
    random_erasing: Fraction = Field(0.0, description="probability")
    erasing_mode: Literal["pixel", "const"] = Field("pixel", description="unit noise, or zero, in normalised values")
    mixup: NotNegative = Field(0.0, description="alpha of the beta distribution")
    cutmix: NotNegative = Field(0.0, description="alpha of the beta distribution")
    mix_prob: Fraction = Field(1.0, description="probability that a batch is mixed")
    mix_switch_prob: Fraction = Field(0.5, description="CutMix rather than Mixup where both are on")
    repeats: Positive = Field(1, description="repeated augmentation: copies of each image in an epoch of equal length")
    progressive_resize: ProgressiveResize | None = Field(None, description="null: every epoch at img_size")


class EarlyStop(Section):
    """Ends a run that no longer gets better by `train.best`."""

    patience: Positive = Field(10, description="evaluations without a new best")
    min_delta: NotNegative = Field(0.0, description="a new best is more than this above the one before it")


class Train(Section):
    """The training loop: length, precision, saving and logging."""

    epochs: Positive = Field(10, description="passes over the training images, warm-up included")
    max_steps: Positive | None = Field(None, description="stop after this many steps; the schedule keeps its length")
    seed: Seed = Field(42, description="of weights, order of the images and augmentation")
    amp: Literal["bf16", "fp16"] | None = Field(None, description="mixed precision, GPU only")
    amp_level: Literal["O1", "O2"] = Field("O1", description="O2: the weights are in half precision too")
    ema: Annotated[float, Field(gt=0.0, lt=1.0)] | None = Field(
        None, description="decay per step of a moving average of the weights, which is evaluated and kept as the model"
    )
    ema_warmup: bool | None = Field(None, description="min(ema, (1 + t) / (10 + t)) at step t; null: in short runs")
    clip_grad: AboveZero | None = Field(None, description="largest global norm of the gradient")
    accumulate: Positive = Field(1, description="micro-batches of `data.batch_size` per optimizer step")
    eval_every: Positive = Field(1, description="epochs from one evaluation to the next")
    save_every_steps: Positive | None = Field(None, description="steps between saves, besides one after every epoch")
    save_every_minutes: AboveZero | None = Field(10.0, description="minutes from one save to the next")
    log_every: Positive = Field(50, description="steps from one line of the log to the next")
    best: Literal["top1", "loss", "balanced", "f1", "map"] | None = Field(
        None, description="what the best checkpoint is chosen by, then the loss; null: top1, or map of several labels"
    )
    early_stop: EarlyStop | None = Field(None, description="null: never")
    device: str = Field("auto", description="auto, cpu, gpu, gpu:1, ...")
    threads: Positive | None = Field(None, description="of the CPU; null: the cores divided by the processes")


class Optimizer(Section):
    """How weights follow gradients."""

    name: Literal["adam", "adamw", "muon", "sgd"] = Field(
        "adamw", description="muon: for the matrices of the blocks, AdamW for the rest"
    )
    lr: AboveZero = Field(1.0e-3, description="learning rate after the warm-up")
    weight_decay: NotNegative = Field(0.05, description="adam, sgd: L2 on all; adamw, muon: decoupled, in groups")
    betas: Pair[BelowOne] = Field([0.9, 0.999], description="of Adam and AdamW")
    eps: AboveZero = Field(1.0e-8, description="of Adam and AdamW")
    momentum: Fraction = Field(0.9, description="sgd, and muon (0.95 was tried)")
    muon_convs: bool = Field(False, description="muon: also for convolutions, but not depth-wise or on the pixels")
    lr_batch: Positive | None = Field(None, description="`lr`, warm-up and minimum times total batch / lr_batch")
    lr_batch_scales: Literal["all", "peak"] = Field("all", description="peak: warm-up and minimum stay as written")
    layer_decay: Portion | None = Field(None, description="factor of the learning rate per block, from the head down")
    lr_scale: dict[str, AboveZero] = Field({}, description='learning rate factor by name pattern: {"*.attn.dwc.*": 20}')


class Schedule(Section):
    """The learning rate over the run: linear warm-up, then the named curve down to `min_lr`."""

    name: Literal["cosine", "constant", "step"] = Field("cosine", description="the curve")
    decay_epochs: Positive = Field(30, description="step: epochs from one drop to the next")
    decay_rate: Portion = Field(0.1, description="step: factor of every drop")
    warmup_epochs: NotNegative = Field(0.0, description="epochs from `warmup_lr` up to `optimizer.lr`")
    warmup_lr: NotNegative = Field(0.0, description="learning rate of the first step or epoch (`per`)")
    min_lr: NotNegative = Field(0.0, description="learning rate at the end")
    cooldown_epochs: Count = Field(0, description="epochs at `min_lr` after `train.epochs`")
    per: Literal["step", "epoch"] = Field("step", description="how often the learning rate changes")


class Loss(Section):
    """The loss of the labels; formulas in ppattn/engine/loss.py."""

    name: Literal["ce", "focal", "bce"] = Field("ce", description="cross-entropy, focal, or binary for several labels")
    gamma: NotNegative = Field(2.0, description="exponent of the focal loss")
    class_weights: list[AboveZero] | Literal["balanced"] | None = Field(
        None, description="factors of the classes, or `balanced`: labels / (classes * labels of the class)"
    )
    label_smoothing: BelowOne = Field(0.0, description="part of the label that is spread over all classes")


class Distill(Section):
    """Learn from a teacher besides the labels; it has no part in the run's checkpoints. The loss is

        labels * cross-entropy + logits * T^2 KL(teacher || student)
            + blocks * mean |student - teacher|^2 / |teacher|^2 + attention * the same mean for the attention outputs
            + features * the same mean for the final features, pooled and map

    with the means over blocks and images (ppattn/engine/loss.py).
    """

    teacher: File | None = Field(None, description="run, weights file, published model or exported folder; null: none")
    temperature: AboveZero = Field(1.0, description="T, of both logits")
    labels: NotNegative = Field(1.0, description="factor of the cross-entropy")
    logits: NotNegative = Field(1.0, description="factor of the divergence from the teacher's logits")
    blocks: NotNegative = Field(0.0, description="factor for block outputs; the teacher needs equal depth and width")
    attention: NotNegative = Field(0.0, description="factor for the attentions' projected outputs; needs the same")
    features: NotNegative = Field(0.0, description="factor for the final features; the teacher needs equal shapes")
    inputs: Literal["student", "teacher"] = Field("student", description="with `attention`: whose tokens they get")


class Config(Section):
    model: Model = Model()
    data: Data = Data()
    augment: Augment = Augment()
    train: Train = Train()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    loss: Loss = Loss()
    distill: Distill = Distill()
    imports: list[str] = Field([], description="modules with your own attentions, backbones or data sets")
    output: Annotated[File, named] = Field("runs/default", description="the run folder")

    @property
    def holdout_seed(self) -> int:
        """The seed by which the held-out images are drawn."""
        return self.train.seed if self.data.holdout_seed is None else self.data.holdout_seed
