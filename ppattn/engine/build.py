"""Build a run, or restore it from a checkpoint, before its first step."""

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import paddle

from ppattn import cost, weights
from ppattn.config import make_config
from ppattn.data import Preprocess, Splits, TrainLoader, build_datasets
from ppattn.data.classes import same_classes
from ppattn.data.sources import shared_images
from ppattn.engine.loss import ModelWithLoss, criterion
from ppattn.engine.optim import build_optimizer, freeze, lr_at
from ppattn.engine.outputs import Outputs
from ppattn.engine.resume import RunFacts, extend, find_state, restore
from ppattn.engine.signals import Signals
from ppattn.engine.state import Ema, Progress, State
from ppattn.engine.teacher import build_teacher
from ppattn.errors import UserError
from ppattn.runtime import processes as distributed
from ppattn.runtime.environment import arithmetic_facts
from ppattn.runtime.processes import Processes
from ppattn.runtime.startup import seed_all, setup
from ppattn.settings import Config, Train
from ppattn.trained import Provenance, provenance
from ppattn.weights import SplitDigest
from ppattn.zoo import create_model, find_weights, other_attention

logger = logging.getLogger("ppattn.engine")

NEW_HEAD = "`-o model.reset_head=true` starts with a new classifier."
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}  # of train.amp
AUTOCAST = ("gpu", "xpu", "npu", "intel_hpu", "iluvatar_gpu", "metax_gpu")  # devices on which Paddle 3.3 autocasts


@dataclass
class Run:
    """A training: what never changes, what a checkpoint holds (`state`), and what it works with."""

    config: Config
    state: State
    loss: ModelWithLoss  # images [B, C, H, W], targets [B, K] -> loss
    loader: TrainLoader
    splits: Splits
    preprocess: Preprocess
    autocast: Callable
    processes: Processes
    signals: Signals
    facts: RunFacts
    source: Path | None  # the checkpoint that it continues
    began: float  # on `time.monotonic`, as if earlier parts of the run had been just before this one
    outputs: Outputs = field(init=False)

    @property
    def epochs(self) -> int:
        return self.config.train.epochs + self.config.schedule.cooldown_epochs

    @property
    def last_step(self) -> int:
        steps = self.epochs * self.loader.steps_per_epoch
        return min(steps, self.config.train.max_steps or steps)

    @property
    def best(self) -> str:
        """What evaluations are compared by."""
        measured = "top1" if self.splits.val.table is None else "map"
        return self.config.train.best or (measured if self.splits.classes else "cosine")

    def images(self, step: int) -> int:
        """Images of a step, of all processes."""
        return len(self.loader.numbers(step)) * self.config.data.batch_size * self.processes.world

    def learning_rate(self, step: int) -> float:
        return lr_at(step, self.config, self.loader.steps_per_epoch, self.images(0))

    def seed(self, micro_batch: int) -> None:
        """Make dropout and stochastic depth a function of (seed, micro-batch, process): there is no state to keep."""
        numbers = [self.config.train.seed, micro_batch, self.processes.rank]
        seed_all(int(np.random.SeedSequence(numbers).generate_state(1)[0]))

    def position(self, step: int) -> str:
        """Human-readable position, 1-based."""
        epoch, step = divmod(step, self.loader.steps_per_epoch)
        return f"step {step + 1} of epoch {epoch + 1}"


def build_run(config: Config, resumed: str | None, extended: str | None = None) -> Run:
    """A run that writes nothing yet; `resumed`, `extended`: the checkpoint to start from, see `trainer.train`."""
    began, settings = time.monotonic(), config.train
    for line in setup(settings.device, settings.threads, settings.seed):
        logger.info(line)
    autocast, scaler = mixed_precision(settings)
    processes = distributed.join()
    with processes.in_turn():
        splits = build_datasets(config)
    output = config.data.name in ("folder", "imagenet") and Path(config.output).resolve()
    if output and output.is_relative_to(splits.train.root.resolve()):
        raise UserError(f"output = {config.output!r} is among the class folders of {str(splits.train.root)!r}.")
    unmeasured = ["map" if splits.val.table is None else "balanced"]
    if settings.best in (unmeasured if splits.classes else ["top1", "balanced", "f1", "map"]):
        raise UserError(f"train.best = {settings.best} is not measured on this data.")
    found = find_state(extended or resumed, Path(config.output))

    with processes.in_turn():  # both may download weights
        model = build_model(config, splits, fresh=found is None)
        teacher = build_teacher(config, model, splits)
    if teacher:
        logger.info("the teacher is %s, weights %.12s", config.distill.teacher, teacher.digest)
        warn_leakage("distill.teacher", teacher.provenance, splits)
    optimizer = build_optimizer(config, model)
    if settings.amp and settings.amp_level == "O2":
        float32 = [layer for layer in model.sublayers() if getattr(layer, "keeps_float32", False)]
        paddle.amp.decorate(model, optimizer, level="O2", dtype=DTYPES[settings.amp], excluded_layers=float32)
    preprocess = model.preprocess(config, splits.mean, splits.std)
    transform = model.train_transform(config.augment, preprocess)
    loader = TrainLoader(splits.train, len(splits.classes), transform, config, processes.rank, processes.world)
    settle_average(config, loader.steps_per_epoch, found.facts() if found and not extended else None)
    ema = Ema(model, settings.ema, bool(settings.ema_warmup)) if settings.ema else None
    state = State(model, optimizer, ema, scaler, Progress())
    parts = {"train": splits.train, "val": splits.val}
    facts = RunFacts(
        config=config.model_dump(mode="json"),
        world=processes.world,
        classes=list(splits.classes),
        preprocess=preprocess.to_dict(),
        data={name: SplitDigest(images=len(part), sha256=part.digest()) for name, part in parts.items()},
        runtime=arithmetic_facts(),
        teacher=teacher and teacher.digest,
    )
    if found and extended:
        extend(state, found, facts)
        warn_leakage("--extend", provenance(found.facts()), splits)
    elif found:
        restore(state, found, facts, config.data.changed == "accept")
    progress, steps = state.progress, loader.steps_per_epoch
    if progress.steps_per_epoch not in (0, steps):  # the data has changed: restart the current epoch
        whole, begun = divmod(progress.step, progress.steps_per_epoch)
        progress.step, progress.sums = whole * steps, {} if begun else progress.sums
    progress.steps_per_epoch = steps
    check_alike(config, processes, progress.step, facts)
    processes.broadcast(list(model.state_dict().values()))

    labels = criterion(config.loss, splits.train.counts(len(splits.classes)))
    loss = ModelWithLoss(model, teacher and teacher.model, config.distill, labels)
    signals = Signals(processes.world > 1)
    source, began = None if extended else found and found.path, began - progress.seconds
    run = Run(config, state, loss, loader, splits, preprocess, autocast, processes, signals, facts, source, began)
    log_run(run)
    return run


def settle_average(config: Config, steps_per_epoch: int, saved: RunFacts | None) -> None:
    """Set a null `train.ema_warmup`, when resuming to what it was; warn if initial weights stay in the average."""
    settings, epochs = config.train, config.train.epochs + config.schedule.cooldown_epochs
    left = settings.ema ** (epochs * steps_per_epoch) if settings.ema else 0.0
    if settings.ema_warmup is None:
        before = make_config(saved.config).train.ema_warmup if saved else None
        settings.ema_warmup = left > 0.01 if before is None else before
    if left > 0.01 and not settings.ema_warmup:
        part = f"{100 * left:.0f} % of the average are still the initial weights at the end of the run"
        logger.warning(f"warning: with train.ema = {settings.ema} {part}: set train.ema_warmup, or train.ema lower")


def mixed_precision(settings: Train) -> tuple[Callable, paddle.amp.GradScaler | None]:
    """A factory of autocast contexts, and the loss scaler that fp16 needs, as the settings ask for."""
    if settings.amp is None:
        return nullcontext, None
    device, dtype = paddle.get_device().partition(":")[0], DTYPES[settings.amp]
    if device not in AUTOCAST or (device == "gpu" and dtype == "bfloat16" and not paddle.amp.is_bfloat16_supported()):
        needed = f"needs a GPU or another device on which Paddle casts ({', '.join(AUTOCAST)}; bf16: Ampere or newer)"
        raise UserError(f"train.amp = {settings.amp} {needed}; this is {device}. Leave it at null.")
    if paddle.is_compiled_with_cuda():
        paddle.base.core.set_cublas_switch(False)  # no TF32: the sums that stay in float32 need its accuracy
    logger.info(f"{dtype}; in float32 stay softmax, norms, loss and the normalised sums of the attention")
    scaler = paddle.amp.GradScaler(init_loss_scaling=2.0**16) if settings.amp == "fp16" else None
    return partial(paddle.amp.auto_cast, level=settings.amp_level, dtype=dtype), scaler


def check_alike(config: Config, processes: Processes, step: int, facts: RunFacts) -> None:
    """Raise `UserError` if the processes found different checkpoints, data or teachers."""
    same = {
        f"checkpoints in {config.output}": step,
        f"images or labels in {config.data.location}": sum(int(part.sha256[:10], 16) for part in facts.data.values()),
        f"weights in {config.distill.teacher}": int((facts.teacher or "0")[:10], 16),
    }
    for what, number in same.items():
        if processes.sum(number) != number * processes.world:
            raise UserError(f"The processes found different {what}: all of them must see the same.")


def log_run(run: Run) -> None:
    """Log the run and settings that look unintended."""
    config, splits, loader = run.config, run.splits, run.loader
    what = splits.train.input_kind
    model = f"{config.model.name}: {cost.params(run.state.model):,} parameters"
    data = f"{len(splits.train):,} {what} to train on, {len(splits.val):,} to validate, {len(splits.classes)} classes"
    steps = f"{run.epochs} epochs of {loader.steps_per_epoch} steps of {run.images(0)} {what}"
    logger.info(f"{model}; {data}; {steps} on {run.processes.world} process(es)")
    if same := shared_images(splits):
        logger.warning(f"warning: {same:,} of the validation images are training images: the accuracy is too high")
    if config.schedule.warmup_epochs >= run.epochs:
        logger.info(f"schedule.warmup_epochs = {config.schedule.warmup_epochs:g}: the rate never reaches its peak")
    counts = splits.train.counts(len(splits.classes)) if splits.classes else np.zeros(0)
    if empty := [name for name, count in zip(splits.classes, counts, strict=True) if not count]:
        logger.info(f"{len(empty)} classes have no training images: {', '.join(empty[:5])}")
    if left := loader.left_out:
        share = f"{left} images ({100 * left / len(splits.train):.0f} %), others each time"
        logger.info(f"every epoch leaves out {share}: they do not fill a batch (data.batch_size)")


def build_model(config: Config, splits: Splits, fresh: bool) -> paddle.nn.Layer:
    """The model for the classes of the data; a `fresh` one starts from `model.weights`."""
    wanted, classes = config.model, splits.classes
    if wanted.num_classes not in (None, len(classes)):
        raise UserError(f"model.num_classes = {wanted.num_classes}, but the data has {len(classes)}: leave it at null.")
    model = create_model(wanted.name, **wanted.arguments() | {"num_classes": len(classes)})
    if model.input_kind != (held := splits.train.input_kind):
        raise UserError(f"{wanted.name} takes {model.input_kind}, but {config.data.name} holds {held}.")
    model.recompute = wanted.recompute
    lines = model.remarks()
    if fresh and wanted.weights:
        reset = ["head"] if wanted.reset_head else []
        report = weights.load(model, find_weights(wanted.weights, wanted.name), wanted.allow, reset, NEW_HEAD)
        lines += [*str(report).splitlines(), *compare_weights(report.metadata, config, splits)]
    for line in lines:
        logger.info(line)
    if wanted.freeze:
        logger.info("%s parameters are frozen", len(freeze(model, wanted.freeze)))
    return model


def warn_leakage(key: str, source: Provenance | None, splits: Splits) -> None:
    """Warn where the weights that a setting names were trained on images that this run validates on."""
    if source and (seen := source.leaked_images(splits)):
        images = f"{seen:,} of the {len(splits.val):,} validation images, so the accuracy on them is too high"
        part = "fold" if isinstance(source.holdout, str) else "holdout"
        own = f"data.{part}={source.holdout} and data.holdout_seed={source.seed} are its own"
        logger.warning(f"warning: {key} was trained on {images}; {own}")


def compare_weights(metadata: weights.Metadata, config: Config, splits: Splits) -> list[str]:
    """Lines for the log about other training than the config's; `UserError` for another attention or other classes."""
    wanted, classes, pixels = config.model, metadata.classes, metadata.preprocess or metadata.config.get("data", {})
    differs, keys = other_attention(metadata, wanted.model_dump()), ("attention", "attention_options", "num_heads")
    if differs and not wanted.arguments().keys() & {*keys}:
        raise UserError(f"model.weights {differs}; set {' or '.join(f'model.{key}' for key in keys)}.")
    warn_leakage("model.weights", provenance(metadata), splits)
    same = same_classes(classes, splits.classes, numbers=False)
    if len(classes) == len(splits.classes) and not same and not wanted.reset_head:
        a, b = next(pair for pair in zip(classes, splits.classes, strict=True) if pair[0] != pair[1])
        raise UserError(f"model.weights has other classes or another order: {a!r} where the data has {b!r}. {NEW_HEAD}")
    lines = [f"model.weights {differs}"] if differs else []
    for key, given in (("mean", splits.mean), ("std", splits.std)):
        if pixels.get(key) and [*map(float, pixels[key])] != [*map(float, given)]:
            lines.append(f"the weights were trained on pixels of {key} {pixels[key]}, data.{key} is {list(given)} here")
    return lines
