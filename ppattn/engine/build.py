"""Build a run, or restore it from a checkpoint, before its first step."""

from __future__ import annotations

import time
from dataclasses import dataclass
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from ppattn import cost, weights
from ppattn.data import EvalLoader, Preprocess, Splits, TrainLoader, TrainTransform, build_datasets
from ppattn.engine import distributed, log, resume
from ppattn.engine.checkpoint import preprocess_for
from ppattn.engine.clock import Clock
from ppattn.engine.distributed import Processes
from ppattn.engine.ema import Ema
from ppattn.engine.environment import arithmetic
from ppattn.engine.network import DTYPES, Network, mixed_precision
from ppattn.engine.optim import build_optimizer, freeze
from ppattn.engine.outputs import Outputs, open_outputs
from ppattn.engine.plan import Plan
from ppattn.engine.signals import Signals
from ppattn.engine.state import Progress, State
from ppattn.engine.teacher import build_teacher
from ppattn.errors import UserError, content_of
from ppattn.runtime import setup
from ppattn.settings import Config
from ppattn.zoo import create_model, describe_attention, entries, find_weights

READ_EVERY = {"cpu": 1, "gpu": 10}  # steps between two readings of the loss, each of which waits for the device


@dataclass(frozen=True)
class Run:
    """A training: what never changes, what a checkpoint holds, what it writes, and what it works with."""

    config: Config
    plan: Plan
    state: State
    outputs: Outputs
    splits: Splits
    transform: TrainTransform
    preprocess: Preprocess
    network: Network
    processes: Processes
    signals: Signals
    clock: Clock
    began: float  # on `time.monotonic`, as if earlier parts of the run had been just before this one

    def seconds(self) -> float:
        return time.monotonic() - self.began


def build_run(config: Config, resumed: str | None, command: str) -> Run:
    """Everything that training needs, with the run folder open.

    Args:
        config: the checked configuration.
        resumed: the checkpoint to go on from, see `trainer.train`.
        command: for env.json.
    """
    began, settings, folder = time.monotonic(), config.train, Path(config.output)
    lines = setup(settings.device, settings.threads, settings.seed)
    gpu = paddle.get_device() != "cpu"
    autocast, scaler = mixed_precision(settings)
    processes = distributed.join()
    early = MemoryHandler(10**6)  # log.txt is not open yet
    with processes.in_turn(), log.attached(early):
        splits = build_datasets(config)
    lines += [record.getMessage() for record in early.buffer]
    found = resume.find_state(resumed, folder)

    model, notes = build_model(config, splits, fresh=found is None)
    lines += notes
    teacher, digest = build_teacher(config, model, splits)
    if digest:
        lines.append(f"the teacher is {config.distill.teacher}, weights {digest[:12]}")
    optimizer = build_optimizer(config, model)
    if settings.amp and settings.amp_level == "O2":
        float32 = [layer for layer in model.sublayers() if getattr(layer, "keeps_float32", False)]
        paddle.amp.decorate(model, optimizer, level="O2", dtype=DTYPES[settings.amp], excluded_layers=float32)
    ema = Ema(model, settings.ema, settings.ema_warmup) if settings.ema else None
    state = State(model, optimizer, ema, scaler, Progress())
    preprocess = preprocess_for(config, model, splits.mean, splits.std)
    facts: dict[str, Any] = {
        "config": config.model_dump(),
        "world": processes.world,
        "classes": list(splits.classes),
        "preprocess": preprocess.to_dict(),
        "data": resume.describe_data(splits),
        "runtime": arithmetic(),
        "teacher": digest,
    }
    if found:
        resume.check_same(found.metadata, facts)
        with content_of(found.path, "the state of this run"):
            state.load(found.tensors, found.metadata)
        lines += [*found.notes, f"{state.progress.epoch} epochs and {state.progress.step} steps are done"]
        lines += resume.check_data(found.metadata, facts, config.data.changed == "accept")
        lines += resume.compare_runtime(found.metadata["runtime"], facts["runtime"])
    position = state.progress.epoch * 10**9 + state.progress.step
    data = sum(int(part["sha256"][:10], 16) for part in facts["data"].values())
    same = {f"checkpoints in {folder}": position, f"images or labels in {config.data.root}": data}
    same |= {f"weights in {config.distill.teacher}": int(digest[:10], 16)} if digest else {}
    for what, number in same.items():
        if processes.sum(number) != number * processes.world:
            raise UserError(f"The processes found different {what}: all of them must see the same.")

    pixels = (splits.mean, splits.std, config.data.interpolation, model.in_chans)
    transform = TrainTransform(config.augment, model.img_size, *pixels)
    loader = TrainLoader(splits.train, transform, config, 0, 0, processes.rank, processes.world)
    evaluated = config.data.eval_batch_size or config.data.batch_size
    EvalLoader(splits.val, preprocess, evaluated, processes.rank, processes.world)  # refuses a batch beyond the memory
    plan = Plan(config, len(loader), processes.world, READ_EVERY["gpu" if gpu else "cpu"])
    if config.train.accumulate > plan.micro_batches:
        given, most = config.train.accumulate, plan.micro_batches
        raise UserError(f"train.accumulate = {given} is not allowed: an epoch has {most} micro-batches.")
    if config.data.changed == "accept":
        state.progress.step = min(state.progress.step, plan.steps_per_epoch)  # there may be fewer images
    for what, done, all_ in (
        ("epochs", state.progress.epoch, plan.epochs),
        ("steps of an epoch", state.progress.step, plan.steps_per_epoch),
    ):
        if done > all_:
            raise UserError(f"{found and found.path} has {done} {what} done, of which the run has {all_}.")
    lines.append(
        f"{config.model.name}: {cost.params(model):,} parameters; "
        f"{len(splits.train):,} images to train on, {len(splits.val):,} to validate, {len(splits.classes)} classes; "
        f"{plan.epochs} epochs of {plan.steps_per_epoch} steps of {plan.total_batch} images on "
        f"{processes.world} process(es)"
    )
    if config.schedule.warmup_epochs >= plan.epochs:
        lines.append(f"schedule.warmup_epochs = {config.schedule.warmup_epochs:g}: the rate never comes to its peak")
    counts = np.bincount(splits.train.labels, minlength=len(splits.classes))
    if empty := [name for name, count in zip(splits.classes, counts, strict=True) if not count]:
        lines.append(f"{len(empty)} classes have no training images: {', '.join(empty[:5])}")
    if loader.left_out:
        lines.append(
            f"every epoch leaves out {loader.left_out} images ({100 * loader.left_out / len(splits.train):.0f} %), "
            "others each time: they fill no whole batch (data.batch_size)"
        )
    outputs = open_outputs(config, command, found and found.path, facts, lines, processes)
    if not (outputs.checkpoints / "best.safetensors").exists():
        state.progress.best_top1 = -1.0  # the next evaluation makes it
    network = Network(model, processes.world, autocast, scaler, teacher, config.distill)
    tools = (network, processes, Signals(processes.world > 1), Clock(gpu), began - state.progress.seconds)
    return Run(config, plan, state, outputs, splits, transform, preprocess, *tools)


def build_model(config: Config, splits: Splits, fresh: bool) -> tuple[paddle.nn.Layer, list[str]]:
    """The model, and lines for the log.

    Args:
        config: uses `model`.
        splits: of the data; their classes, and mean and standard deviation of their pixels are used.
        fresh: start from `model.weights`; a resumed state goes before them.
    """
    wanted, classes, lines = config.model, splits.classes, []
    if wanted.num_classes not in (None, len(classes)):
        raise UserError(
            f"model.num_classes = {wanted.num_classes}, but the data has {len(classes)} classes; leave it at null."
        )
    model = create_model(wanted.name, **wanted.arguments() | {"num_classes": len(classes)})
    model.recompute = wanted.recompute
    lines += model.remarks()
    if fresh and wanted.weights:
        reset = ["head"] if wanted.reset_head else []
        advice = "`-o model.reset_head=true` starts with a new classifier."
        source = find_weights(wanted.weights, wanted.name)
        report = weights.load(model, source, wanted.allow, reset, advice)
        lines += [*str(report).splitlines(), *differences(report.metadata, config, splits)]
    if wanted.freeze:
        lines.append(f"{len(freeze(model, wanted.freeze))} parameters are frozen")
    return model, lines


def differences(metadata: dict, config: Config, splits: Splits) -> list[str]:
    """Lines for the log about what a weights file was trained with, where this run differs and no shape shows it.

    Raises:
        UserError: for another mechanism, other options or heads, where the config names none.
    """
    wanted, lines = config.model, []
    saved = metadata.get("config", {}).get("model", {})
    if saved.get("name") in entries():
        made, own = describe_attention(saved), describe_attention(wanted.model_dump())
        if made != own:
            if not wanted.arguments().keys() & {"attention", "attention_options", "num_heads"}:
                raise UserError(
                    f"model.weights was trained with {made}, and {wanted.name} is built with {own}; set "
                    "model.attention, model.attention_options or model.num_heads to what you want."
                )
            lines.append(f"the weights were trained with {made}, this model has {own}")
    pixels = metadata.get("preprocess", {})
    for key, given in (("mean", splits.mean), ("std", splits.std)):
        if key in pixels and [*map(float, pixels[key])] != [*map(float, given)]:
            lines.append(f"the weights were trained on pixels of {key} {pixels[key]}, data.{key} is {list(given)} here")
    return lines
