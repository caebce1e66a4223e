"""Training, top to bottom: config, data, model, optimizer, state, the loop, and what it leaves behind.

Every random number is a function of (seed, epoch, step, process), so a run that is stopped anywhere and resumed ends
with the same weights, bit for bit, as one that was not.
"""

from __future__ import annotations

import json
import math
import signal
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import paddle

from ppattn import weights
from ppattn.config import Config, to_yaml
from ppattn.data import Preprocess, TrainTransform, build_datasets, eval_loader, mix, train_loader
from ppattn.engine import distributed, log
from ppattn.engine.checkpoint import Progress, check_same, find_state, restore, save_best, save_state
from ppattn.engine.ema import Ema
from ppattn.engine.evaluate import draw_confusion, draw_predictions, evaluate, model_runner
from ppattn.engine.optim import build_optimizer, freeze, lr_at
from ppattn.engine.step import TrainStep, first_nonfinite, seed_step
from ppattn.errors import Preempted, UserError
from ppattn.runtime import setup
from ppattn.zoo import create_model

WARMUP = 5  # first steps of a process that no speed is measured on
READ_EVERY = 10  # on a GPU: steps between two readings of the loss, each of which waits for the device
PHASES = ("data", "wait", "forward", "backward", "optimizer")


def train(config: Config, resume: str | None = None, command: str = "") -> dict:
    """Train as the config says and leave a run folder at `config.output`.

    Args:
        config: the checked configuration.
        resume: None starts fresh, "auto" goes on where the run folder was left (or starts fresh), a folder or a file
            names the checkpoint.
        command: what the user typed, for env.json.

    Returns:
        What summary.json holds.

    Raises:
        UserError: wrong settings, data or checkpoint, a full disk, or a loss that is not finite.
        Preempted: SIGTERM or SIGINT came; the state is saved.
    """
    settings, run, seed = config.train, Path(config.output), config.train.seed
    began = time.perf_counter()
    notes = setup(settings.device, settings.threads, seed)
    autocast, scaler = mixed_precision(settings)
    processes = distributed.join()
    with processes.main_first():
        splits = build_datasets(config)
    found = find_state(resume, run)

    model, more = build_model(config, len(splits.classes), fresh=found is None)
    optimizer = build_optimizer(config, model)
    if settings.amp and settings.amp_level == "O2":
        model, optimizer = paddle.amp.decorate(model, optimizer, level="O2", dtype=autocast.keywords["dtype"])
    ema = Ema(model, settings.ema, settings.ema_warmup) if settings.ema else None
    look = (config.data.interpolation, splits.mean, splits.std)
    transform = TrainTransform(config.augment, model.img_size, splits.mean, splits.std, config.data.interpolation)
    preprocess = Preprocess.from_config(config.data, model.img_size, splits.mean, splits.std, model.in_chans)
    facts = {
        "config": config.model_dump(),
        "world": processes.world,
        "classes": splits.classes,
        "preprocess": preprocess.to_dict(),
    }
