"""The state of a run in one file.

`checkpoints/latest.safetensors` holds the tensors of `state.State` under its names (bare ones for the weights,
`optimizer/<parameter>/<accumulator>`, `ema/<name>`); everything else (config, progress, scaler) is JSON in its
metadata. Random numbers are functions of the position in the run, so the progress is all there is to keep of them.
Before a new `latest` takes its place the old one becomes `previous`. `checkpoints/best.safetensors` holds weights only.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ppattn import weights
from ppattn.engine.state import State

if TYPE_CHECKING:
    from paddle import nn


def save_state(folder: Path, state: State, facts: dict) -> None:
    """Write `latest`, after which the one before it is `previous`.

    Args:
        folder: the folder `checkpoints`.
        state: what to keep.
        facts: what else the file says about the run: config, class names, preprocessing, number of processes.
    """
    tensors = state.tensors()
    for name in [name for name in tensors if name.endswith("/master")]:  # the float32 weights of half precision
        tensors[name.removeprefix("optimizer/").removesuffix("/master")] = tensors[name]
    latest, previous, fresh = (folder / f"{name}.safetensors" for name in ("latest", "previous", "next"))
    weights.save(fresh, tensors, facts | {"kind": "state", "progress": asdict(state.progress)} | state.counts())
    if latest.exists():
        os.replace(latest, previous)
    os.replace(fresh, latest)


def save_best(folder: Path, model: nn.Layer, metrics: dict, facts: dict) -> None:
    """Write `best` with the present weights of the model."""
    weights.save(folder / "best.safetensors", model.state_dict(), facts | {"kind": "weights", "metrics": metrics})
