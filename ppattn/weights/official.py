"""The authors' state dicts: their names and layouts to ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ppattn.errors import reading
from ppattn.weights.assign import LoadReport, assign

if TYPE_CHECKING:
    from paddle import nn


def load_official(model: nn.Layer, arrays: dict[str, np.ndarray]) -> LoadReport:
    """Load the authors' PyTorch weights.

    Args:
        arrays: official state-dict name -> array in official layout (Linear (out, in), Conv (out, in/groups, kh, kw)).

    Raises:
        UserError: on any missing, unexpected or misshapen entry.
    """
    with reading("official weights", "those of this model"):
        moved = from_official(model, arrays)
    return assign(model, moved, "official weights", resize=False)


def from_official(model: nn.Layer, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Official names and layouts -> those of this model.

    A backbone says what it calls its parts (`official_name`), an attention how it converts the arrays inside its module
    (`from_official`), any other layer which names next to it belong to it (`official_names`).
    """
    from ppattn.attention import Attention
    from ppattn.layers import Linear

    layers = dict(model.named_sublayers())
    moved = {
        f"{prefix.rpartition('.')[0]}.{theirs}": ours and f"{prefix}.{ours}"
        for prefix, layer in layers.items()
        for theirs, ours in getattr(layer, "official_names", {}).items()
    }
    rename = getattr(model, "official_name", str)
    plain: dict[str, np.ndarray] = {}
    inside: dict[str, dict[str, np.ndarray]] = {}
    for official, array in arrays.items():
        name = rename(official)
        name = moved.get(name, name)
        if not name or name.endswith("num_batches_tracked"):
            continue
        prefix, _, local = name.partition(".attn.")
        if local and isinstance(layers.get(f"{prefix}.attn"), Attention):
            inside.setdefault(f"{prefix}.attn", {})[local] = np.asarray(array)
        else:
            plain[name] = np.asarray(array)
    for prefix, local in inside.items():
        plain.update({f"{prefix}.{name}": array for name, array in layers[prefix].from_official(local).items()})
    out = {}
    for name, array in plain.items():
        owner, _, leaf = name.rpartition(".")
        if leaf == "weight" and isinstance(layers.get(owner), Linear) and array.ndim == 2:
            array = array.T
        out[name.replace("running_mean", "_mean").replace("running_var", "_variance")] = array
    return out
