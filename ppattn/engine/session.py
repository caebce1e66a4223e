"""Everything a run needs, built or restored before its first step."""

from __future__ import annotations

import math
import os
import shutil
import time
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import paddle

from ppattn import weights
from ppattn.attention import less
from ppattn.config import Config, to_yaml
from ppattn.data import Preprocess, TrainTransform, build_datasets, train_loader
from ppattn.engine import checkpoint, distributed, log
from ppattn.engine.ema import Ema
from ppattn.engine.optim import build_optimizer, freeze
from ppattn.engine.step import TrainStep
from ppattn.engine.watch import Clock
from ppattn.errors import UserError
from ppattn.runtime import setup
from ppattn.zoo import create_model

READ_EVERY = 10  # on a GPU: steps between two readings of the loss, each of which waits for the device


@dataclass
class Session:
    """What the functions of the trainer share."""

    config: Config
    run: Path
    processes: distributed.Processes
    splits: Any
    model: Any
    step_layer: TrainStep
    parallel: Any  # step_layer, or DataParallel around it
    optimizer: Any
    ema: Ema | None
    autocast: Any  # a context factory, or None for float32
    scaler: Any
    transform: TrainTransform
    preprocess: Preprocess
    progress: checkpoint.Progress
    facts: dict  # what a checkpoint says about the run besides its progress
    book: log.Log
    clock: Clock
    read_every: int
    micro_per_epoch: int
    steps_per_epoch: int
    total_batch: int
    epochs: int
    last_step: int
    seconds_before: float  # of earlier parts of the run
    began: float
    saved_at: float


def prepare(config: Config, resume: str | None, command: str) -> Session:
    """Build or restore everything that training needs, and open the run folder."""
    began, settings, run = time.monotonic(), config.train, Path(config.output)
    notes = setup(settings.device, settings.threads, settings.seed)
    gpu = paddle.get_device() != "cpu"
    autocast, scaler = mixed_precision(settings, gpu)
    processes = distributed.join()
    lines: list[str] = []
    with processes.main_first(), log.heard(lines.append):  # log.txt is not open yet
        splits = build_datasets(config)
    found = checkpoint.find_state(resume, run)

    model, more = build_model(config, splits.classes, fresh=found is None)
    lines += more
    optimizer = build_optimizer(config, model)
    if settings.amp and settings.amp_level == "O2":
        paddle.amp.decorate(model, optimizer, level="O2", dtype=autocast.keywords["dtype"])
    ema = Ema(model, settings.ema, settings.ema_warmup) if settings.ema else None
    preprocess = checkpoint.preprocess_for(config, model, splits.mean, splits.std)
    look = (splits.mean, splits.std, config.data.interpolation, model.in_chans)
    transform = TrainTransform(config.augment, model.img_size, *look)
    facts = {
        "config": config.model_dump(),
        "world": processes.world,
        "classes": list(splits.classes),
        "preprocess": preprocess.to_dict(),
        "runtime": notes,
    }

    progress = checkpoint.Progress()
    if found:
        source, tensors, metadata, more = found
        checkpoint.check_same(metadata, facts)
        progress = checkpoint.restore(tensors, metadata, model, optimizer, ema, scaler)
        lines += [*more, f"{progress.epoch} epochs and {progress.step} steps are done"]
        if metadata["runtime"] != notes:
            lines.append(
                f"the last bits may differ from an undisturbed run, which had: {'; '.join(metadata['runtime'])}"
            )
    place = progress.epoch * 10**9 + progress.step
    if processes.total(place) != place * processes.world:
        raise UserError(f"The processes found different checkpoints in {run}: all of them must see the same folder.")

    loader = train_loader(splits.train, transform, config, 0, 0, processes.rank, processes.world)
    steps_per_epoch = math.ceil(len(loader) / settings.accumulate)
    epochs = settings.epochs + config.schedule.cooldown_epochs
    total_batch = config.data.batch_size * processes.world * settings.accumulate
    lines.append(
        f"{config.model.name}: {sum(math.prod(p.shape) for p in model.parameters()):,} parameters; "
        f"{len(splits.train):,} images to train on, {len(splits.val):,} to validate, {len(splits.classes)} classes; "
        f"{epochs} epochs of {steps_per_epoch} steps of {total_batch} images on {processes.world} process(es)"
    )
    book = open_folder(config, command, found and source, progress, [*notes, *lines], processes)
    step_layer = TrainStep(model)
    return Session(
        config=config,
        run=run,
        processes=processes,
        splits=splits,
        model=model,
        step_layer=step_layer,
        parallel=paddle.DataParallel(step_layer) if processes.world > 1 else step_layer,
        optimizer=optimizer,
        ema=ema,
        autocast=autocast or nullcontext,
        scaler=scaler,
        transform=transform,
        preprocess=preprocess,
        progress=progress,
        facts=facts,
        book=book,
        clock=Clock(gpu),
        read_every=READ_EVERY if gpu and settings.nonfinite == "stop" else 1,
        micro_per_epoch=len(loader),
        steps_per_epoch=steps_per_epoch,
        total_batch=total_batch,
        epochs=epochs,
        last_step=min(epochs * steps_per_epoch, settings.max_steps or epochs * steps_per_epoch),
        seconds_before=progress.seconds,
        began=began,
        saved_at=time.monotonic(),
    )


def bring_best(source: Path, folder: Path, progress: checkpoint.Progress, processes) -> None:
    """A run that goes on in another folder takes its best checkpoint along; without one the next is the best."""
    name = "best.safetensors"
    if processes.main and source.resolve() != folder.resolve() and (source / name).exists():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{name}.{os.getpid()}"
        shutil.copyfile(source / name, temporary)
        os.replace(temporary, folder / name)
    processes.meet()
    if not (folder / name).exists():
        progress.best_top1 = -1.0


def mixed_precision(settings, gpu: bool):
    """(autocast context factory, loss scaler), each None where it is not needed."""
    if settings.amp is None:
        return None, None
    if not gpu:
        raise UserError(
            f"train.amp = {settings.amp} needs a GPU: on a CPU Paddle computes in float32 whatever is asked for. "
            "Leave train.amp at null."
        )
    dtype = {"bf16": "bfloat16", "fp16": "float16"}[settings.amp]
    scaler = paddle.amp.GradScaler(init_loss_scaling=2.0**16) if settings.amp == "fp16" else None
    return partial(paddle.amp.auto_cast, level=settings.amp_level, dtype=dtype), scaler


def build_model(config: Config, classes: list[str], fresh: bool):
    """The model with the weights it starts from: a resumed state goes before model.weights, that before random."""
    wanted, lines = config.model, []
    if wanted.num_classes not in (None, len(classes)):
        raise UserError(
            f"model.num_classes = {wanted.num_classes}, but the data has {len(classes)} classes; leave it at null."
        )
    model = create_model(wanted.name, **wanted.arguments() | {"num_classes": len(classes)})
    model.recompute = wanted.recompute
    lines += less.limits(model)
    if fresh and wanted.weights:
        reset, advice = (
            ["head"] if wanted.reset_head else [],
            "`-o model.reset_head=true` starts with a new classifier.",
        )
        lines += str(weights.load(model, wanted.weights, reset=reset, advice=advice)).splitlines()
    if wanted.freeze or model.idle:
        lines.append(f"{len(freeze(model, [*wanted.freeze, *model.idle]))} parameters are frozen")
    return model, lines


def open_folder(config: Config, command: str, source: Path | None, progress, lines: list[str], processes) -> log.Log:
    """Make the run folder with config.yaml, env.json and the best checkpoint so far, and open its log with `lines`.

    A run that lies there and is not the one to go on from (`source`: its checkpoint) is moved aside, not overwritten.
    """
    run = Path(config.output)
    try:
        with ExitStack() as undo:
            if processes.main:
                inside = source is not None and source.resolve().is_relative_to(run.resolve())
                if (run / "checkpoints").is_dir() and not inside:
                    number = next(n for n in range(1, 10**6) if not Path(f"{run}.{n}").exists())
                    with log.claim(run):
                        os.rename(run, f"{run}.{number}")
                    lines = [*lines, f"an earlier run in {run} is now in {run}.{number}"]
                run.mkdir(parents=True, exist_ok=True)
            processes.meet()
            book = undo.enter_context(closing(log.Log(run, processes.rank)))
            if processes.main:
                for left in [*run.glob("checkpoints/.*.safetensors.*"), *run.glob("checkpoints/next.safetensors")]:
                    left.unlink()  # of a process that was killed while it wrote
                log.write_text(run / "config.yaml", to_yaml(config))
                log.write_json(run / "env.json", log.environment(command))
            if source:
                bring_best(source.parent, run / "checkpoints", progress, processes)
            for line in lines:
                book.say(line)
            undo.pop_all()
            return book
    except OSError as error:
        raise UserError(f"Cannot write the run folder {run}: {error.strerror or error}.") from None
