"""The checkpoint that a run continues, and the check that the run is still the same."""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ppattn import weights
from ppattn.config import config_differences, make_config
from ppattn.engine.state import Progress, State
from ppattn.errors import UserError, reading_untrusted
from ppattn.files.atomic import checksum
from ppattn.zoo import other_attention

logger = logging.getLogger("ppattn.engine")

LAYOUT = 2  # of checkpoints
# What may differ in a continuation: where things and the teacher are, how often they are written and when a run stops.
MAY_DIFFER = {
    "data": ("root", "changed", "download", "num_workers", "eval_batch_size"),
    "model": ("weights", "reset_head", "allow", "recompute"),
    "distill": ("teacher",),
    "train": ("max_steps", "save_every_steps", "save_every_minutes", "log_every", "device", "threads", "early_stop"),
}
FREE = {"output", "imports", *(f"{section}.{key}" for section, keys in MAY_DIFFER.items() for key in keys)}


class RunFacts(weights.Metadata):
    """Facts about a run that checkpoints keep besides its state."""

    layout: int = LAYOUT
    world: int  # processes
    runtime: dict[str, Any]  # see `ppattn.runtime.environment.arithmetic_facts`
    teacher: str | None = None  # SHA-256 of its weights
    extends: dict[str, Any] | None = None  # the state that the run began with: checkpoint, sha256, steps


class Found(NamedTuple):
    """A state to continue."""

    path: Path
    tensors: dict[str, np.ndarray]
    metadata: dict

    def facts(self) -> RunFacts:
        with reading_untrusted(self.path, "the state of a run"):
            return RunFacts.model_validate(self.metadata)


def find_state(wanted: str | None, run: Path) -> Found | None:
    """The state that `--resume` names, or None to start fresh."""
    if wanted is None:
        return None
    if wanted == "auto":
        folder, reasons = run / "checkpoints", []
        for path in filter(Path.exists, (folder / "latest.safetensors", folder / "previous.safetensors")):
            try:
                return _read_state(path)
            except UserError as error:
                logger.warning("%s Trying the checkpoint before it.", error)
                reasons.append(error)
        if reasons:
            raise UserError(f"No checkpoint in {folder} can be read; delete it to start over. ({reasons[0]})")
        logger.info("there is no checkpoint in %s: a new run", folder)
        return None
    path = Path(wanted)
    if path.is_dir():
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        path = folder / "latest.safetensors"
        if not path.exists():
            raise UserError(f"{wanted} has no state to continue: there is no {path}.")
    return _read_state(weights.find(path))


def _read_state(path: Path) -> Found:
    tensors, metadata = weights.read(path)
    start = f"start a new run from its weights with -o model.weights={path}"
    if metadata.get("kind") != "state":
        raise UserError(f"{path} holds weights but no training state; resume from checkpoints/latest, or {start}.")
    if metadata.get("layout") != LAYOUT:
        raise UserError(f"{path} was written by another version of ppattn, which alone can resume it; {start}.")
    logger.info("resumed from %s", path)
    return Found(path, tensors, metadata)


def restore(state: State, found: Found, facts: RunFacts, accept: bool) -> None:
    """Load a found state; raises `UserError` if it is of another run, or of other data unless those are accepted."""
    with reading_untrusted(found.path, "the state of this run"):
        saved = found.facts()
        check_same(saved, facts)
        state.load(found.tensors, found.metadata)
        facts.extends = saved.extends
        logger.info("%s steps are done", state.progress.step)
        for part, name in (("train", "training"), ("val", "validation")):
            before, now = saved.data[part], facts.data[part]
            if before != now:
                counts = f"{before.images:,} {name} images when the checkpoint was written, {now.images:,} now"
                counts += ", with other names or labels" if before.images == now.images else ""
                if not accept:
                    advice = "put it back, or continue with what is there by -o data.changed=accept"
                    raise UserError(f"Cannot resume: the data has changed ({counts}); {advice}.")
                logger.info(f"the data has changed ({counts}) and the run continues with what is there")
        old, new = saved.runtime, facts.runtime
        if changed := [f"{key} was {old.get(key)} and is {new[key]}" for key in new if old.get(key) != new[key]]:
            logger.info("the last bits may differ from an undisturbed run: %s", "; ".join(changed))


def extend(state: State, found: Found, facts: RunFacts) -> None:
    """Begin a new run with the weights, moving average and optimizer state of another one of the same kind."""
    with reading_untrusted(found.path, "the state of a run with this model"):
        saved = found.facts()
        before, now = make_config(saved.config), make_config(facts.config)
        for key, one, other in (
            ("optimizer.name", before.optimizer.name, now.optimizer.name),
            ("train.amp with train.amp_level", *((t.amp, t.amp and t.amp_level) for t in (before.train, now.train))),
            ("train.ema being set", before.train.ema is not None, now.train.ema is not None),
            ("the list of classes", saved.classes, facts.classes),
            ("model.freeze", before.model.freeze, now.model.freeze),
        ):
            if one != other:
                raise UserError(f"Cannot extend {found.path}: {key} was {one!r} there and is {other!r} here.")
        if differs := other_attention(saved, now.model.model_dump()):
            raise UserError(f"Cannot extend {found.path}, which {differs}.")
        state.load(found.tensors, found.metadata)
        pixels = [[one.preprocess.get(key) for key in ("mean", "std")] for one in (saved, facts)]
    if pixels[0] != pixels[1]:
        logger.warning("warning: it was trained on pixels of mean and std %s, not %s: see data.mean, data.std", *pixels)
    facts.extends = {"checkpoint": str(found.path), "sha256": checksum(found.path), "steps": state.progress.step}
    state.progress = Progress()
    logger.info("a new run, which begins with the state of %(checkpoint)s after %(steps)s steps", facts.extends)


def check_same(saved: RunFacts, facts: RunFacts) -> None:
    """Refuse other settings than the checkpoint was written with; those that did not exist count as their defaults."""

    def compared(config: dict, of: RunFacts) -> dict:
        others = {"the number of processes": of.world, "the list of classes": of.classes}
        return config | others | {"the SHA-256 of distill.teacher": of.teacher}

    before = compared(make_config(saved.config).model_dump(), saved)
    for key, old, new in config_differences(before, compared(facts.config, facts)):
        if key not in FREE and not key.startswith("train.early_stop."):
            changed = f"{key} was {old!r} when the checkpoint was written and is {new!r} now"
            raise UserError(f"Cannot resume: {changed}. Put it back, or start a new run from model.weights.")
