"""The state of a run in one file, and models out of it.

`checkpoints/latest.safetensors` holds the weights under their bare names, `optimizer/<parameter>/<accumulator>` and
`ema/<name>`; everything else (config, position, best metric, history, scaler) is JSON in its metadata. Random numbers
are functions of (seed, epoch, step), so the position is all there is to keep of them. Before a new `latest` takes its
place the old one becomes `previous`. `checkpoints/best.safetensors` holds weights only.
"""

from __future__ import annotations

import errno
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from ppattn import weights
from ppattn.config import Config, override
from ppattn.engine.optim import load_optimizer, optimizer_tensors
from ppattn.errors import UserError

# What may differ between a run and its continuation: where things are and how often they are written, not the numbers.
FREE = {
    "output",
    "data.root",
    "data.download",
    "data.num_workers",
    "data.eval_batch_size",
    "model.weights",
    "model.reset_head",
    "model.recompute",
    "train.max_steps",
    "train.nonfinite",
    "train.save_every_steps",
    "train.save_every_minutes",
    "train.log_every",
    "train.device",
    "train.threads",
    "train.early_stop",
}


@dataclass
class Progress:
    """How far a run is, and what it has measured on the way."""

    epoch: int = 0  # finished epochs
    step: int = 0  # optimizer steps done in the present epoch
    best_top1: float = -1.0
    best_epoch: int = 0
    waited: int = 0  # evaluations since the best one
    skipped: int = 0  # steps left out because of a non-finite loss
    seconds: float = 0.0
    loss_sum: float = 0.0  # over the steps of the present epoch
    loss_count: int = 0
    unreadable: int = 0  # training images of the present epoch that could not be read, by all processes
    times: dict = field(default_factory=dict)  # of the present epoch, see watch.Clock
    history: list = field(default_factory=list)  # rows of metrics.csv

    def mean_loss(self) -> float:
        return self.loss_sum / self.loss_count if self.loss_count else float("nan")

    def finish_epoch(self) -> None:
        self.epoch, self.step, self.times = self.epoch + 1, 0, {}
        self.loss_sum, self.loss_count, self.unreadable = 0.0, 0, 0


def as_numpy(tensor) -> np.ndarray:
    """float32 for floating types (half precision included), the type itself for others."""
    return (tensor.astype("float32") if tensor.is_floating_point() else tensor).numpy()


def write(path: Path, tensors: dict, metadata: dict) -> None:
    """Write one checkpoint; a disk that is full leaves what was there and no temporary file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        weights.save(path, tensors, metadata)
    except OSError as error:
        raise cannot_write(path, error) from None


def cannot_write(path: Path | str, error: OSError) -> UserError:
    """What to tell where the disk does not take what a run writes."""
    numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    full = error.errno in numbers or any(f"os error {n})" in str(error) for n in numbers)  # as safetensors words it
    return UserError(
        f"Could not write {path}: {'the disk is full' if full else error}. The last good checkpoint is untouched; "
        "make room and run again with --resume auto."
    )


def save_state(folder: Path, model, optimizer, ema, scaler, progress: Progress, facts: dict) -> None:
    """Write `latest`, after which the one before it is `previous`."""
    state = optimizer_tensors(optimizer, model)
    tensors = {name: as_numpy(t) for name, t in model.state_dict().items()}
    tensors |= {name.removesuffix("/master"): as_numpy(t) for name, t in state.items() if name.endswith("/master")}
    tensors |= {f"optimizer/{name}": as_numpy(t) for name, t in state.items()}
    if ema is not None:
        tensors |= {f"ema/{name}": as_numpy(t) for name, t in ema.average.items()}
    metadata = facts | {
        "kind": "state",
        "progress": asdict(progress),
        "ema_updates": ema.updates if ema is not None else 0,
        "scaler": {k: np.asarray(v).tolist() for k, v in scaler.state_dict().items()} if scaler is not None else {},
    }
    latest, previous, fresh = (folder / f"{name}.safetensors" for name in ("latest", "previous", "next"))
    write(fresh, tensors, metadata)
    if latest.exists():
        os.replace(latest, previous)
    os.replace(fresh, latest)


def save_best(folder: Path, model, metrics: dict, facts: dict) -> None:
    """Write `best` with the weights that the model carries now."""
    tensors = {name: as_numpy(t) for name, t in model.state_dict().items()}
    write(folder / "best.safetensors", tensors, facts | {"kind": "weights", "metrics": metrics})


def find_state(resume: str | None, run: Path) -> tuple[Path, dict, dict, list[str]] | None:
    """The state that `--resume` names: (file, tensors, metadata, sentences for the log), or None to start fresh.

    Raises:
        UserError: nothing where a folder or file was named, a damaged or foreign file, or weights without a state.
    """
    if resume is None:
        return None
    if resume == "auto":
        notes = []
        candidates = [run / "checkpoints" / f"{name}.safetensors" for name in ("latest", "previous")]
        candidates = [path for path in candidates if path.exists()]
        for path in candidates:
            try:
                tensors, metadata = _read_state(path)
            except UserError as error:
                notes.append(f"{error} Trying the checkpoint before it.")
                continue
            return path, tensors, metadata, [*notes, f"resumed from {path}"]
        if candidates:
            raise UserError(
                f"No checkpoint in {run / 'checkpoints'} can be read; remove that folder to start afresh. ({notes[0]})"
            )
        return None
    path = Path(resume)
    if path.is_dir():
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        path = folder / "latest.safetensors"
        if not path.exists():
            raise UserError(f"--resume {resume}: there is no {path}; `--resume auto` starts fresh where nothing is.")
    tensors, metadata = _read_state(path)
    return weights.find(path), tensors, metadata, [f"resumed from {path}"]


def _read_state(path: Path) -> tuple[dict, dict]:
    tensors, metadata = weights.read(path)
    if metadata.get("kind") != "state":
        raise UserError(
            f"{path} holds weights but no training state; resume from checkpoints/latest, or start a new run from "
            f"these weights with -o model.weights={path}."
        )
    return tensors, metadata


def check_same(saved: dict, facts: dict) -> None:
    """Refuse to continue a run under other settings; names the first that differs."""
    before, now = _flat(saved["config"]), _flat(json.loads(json.dumps(facts["config"])))
    before["the number of processes"], now["the number of processes"] = saved["world"], facts["world"]
    for key in sorted(before.keys() | now.keys()):
        if key not in FREE and not key.startswith("train.early_stop.") and before.get(key) != now.get(key):
            raise UserError(
                f"Cannot resume: {key} was {before.get(key)!r} when the checkpoint was written and is "
                f"{now.get(key)!r} now. "
                "Put it back, or start a new run (other output) from model.weights."
            )
    if saved["classes"] != facts["classes"]:
        raise UserError("Cannot resume: the class names of the data differ from those in the checkpoint.")


def _flat(tree: dict, prefix: str = "") -> dict:
    """Dotted names to values; what is null or empty is left out, so that it equals what is not there."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        elif value not in (None, []):
            flat[prefix + key] = value
    return flat


def restore(tensors: dict, metadata: dict, model, optimizer, ema, scaler) -> Progress:
    """Put a state back into freshly built objects; returns the position."""
    own = {name: t for name, t in tensors.items() if "/" not in name}
    weights.assign(model, own, "the checkpoint")
    load_optimizer(optimizer, model, _under("optimizer/", tensors))
    if ema is not None:
        for name, value in _under("ema/", tensors).items():
            ema.average[name].set_value(value)
        ema.updates = metadata["ema_updates"]
    if scaler is not None:
        scaler.load_state_dict(metadata["scaler"])
    return Progress(**metadata["progress"])


def _under(prefix: str, tensors: dict) -> dict:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def load_run(run: str | Path, which: str = "best", overrides: list[str] | None = None):
    """The trained model of a run folder, ready for inference.

    Args:
        run: a run folder, or a checkpoint file that training wrote.
        which: "best", "latest" (EMA weights where the run kept them) or "previous"; ignored for a file.
        overrides: `section.key=value` items on the run's config.

    Returns:
        (config, model in eval mode, class names, Preprocess).

    Raises:
        UserError: no such run or checkpoint, or a file that training did not write.
    """
    path = Path(run)
    if path.is_dir():
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        path = folder / f"{which}.safetensors"
        if not path.exists():
            raise UserError(f"{run} is not a run folder with a checkpoint {which!r}: there is no {path}.")
    tensors, metadata = weights.read(path)
    if not metadata.keys() >= {"config", "classes", "preprocess"}:
        raise UserError(
            f"{path} does not say how its model is built: give the config with -c and the file with --weights."
        )
    config, _ = override(metadata["config"], overrides or [])
    return config, *_built(config, tensors, metadata, str(path))


def load_weights(config: Config, path: str | Path):
    """The model of a config with the weights of a file, for inference.

    Class names come from the file where training wrote it, and so do mean and standard deviation of the pixels where
    the config gives none; otherwise from the config's data set.

    Returns:
        (model in eval mode, class names, Preprocess).
    """
    from ppattn.data import build_datasets

    tensors, metadata = weights.read(path)
    if not metadata.keys() >= {"classes", "preprocess"}:
        splits = build_datasets(config)
        metadata |= {"classes": list(splits.classes), "preprocess": {"mean": splits.mean, "std": splits.std}}
    return _built(config, tensors, metadata, str(path))


def _built(config: Config, tensors: dict, metadata: dict, source: str):
    from ppattn.zoo import create_model

    arguments = weights.constants(metadata) | config.model.arguments() | {"num_classes": len(metadata["classes"])}
    model = create_model(config.model.name, **arguments)
    weights.assign(model, weights.model_tensors(tensors), source, img_size=weights.built_size(metadata))
    model.eval()
    mean, std = (getattr(config.data, key) or metadata["preprocess"][key] for key in ("mean", "std"))
    return model, metadata["classes"], preprocess_for(config, model, mean, std)


def preprocess_for(config: Config, model, mean: list[float], std: list[float]):
    """What the config says to do with an image before it goes into this model; `mean` and `std` as in `Preprocess`."""
    from ppattn.data import Preprocess

    return Preprocess(
        img_size=model.img_size,
        mean=mean,
        std=std,
        crop_ratio=config.data.crop_ratio,
        crop_keep_aspect=config.data.crop_keep_aspect,
        interpolation=config.data.interpolation,
        in_chans=model.in_chans,
    )
