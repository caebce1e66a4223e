"""Copy arrays into a model, all of them or none, and report it; the authors' names and layouts to ours."""

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ppattn.errors import UserError, reading_untrusted, verb_command
from ppattn.weights.files import Metadata, read_with_metadata

CONSTANTS = ("norm_eps", "always_shift", "fc_norm", "resize")  # arguments that change logits, and no shape


@dataclass
class LoadReport:
    """What was loaded, for the log."""

    source: str
    loaded: int = 0
    missing: list[str] = field(default_factory=list)  # parameters that keep their initial values
    resized: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)  # tensors of the file that no model here has
    constants: dict[str, Any] = field(default_factory=dict)  # arguments of `create_model` that the weights ask for
    metadata: Metadata = field(default_factory=Metadata)  # of the file

    def __str__(self):
        lines = [f"{self.loaded} tensors loaded from {self.source}"]
        lines += [f"left at initial values: {_some(self.missing, 3)}"] * bool(self.missing)
        lines += [f"resized: {_some(self.resized, 3)}"] * bool(self.resized)
        lines += [f"the library computes with {name} = {value}" for name, value in self.constants.items()]
        lines += [f"left out: {text}, a head of the other library" for text in self.unused]
        return "\n".join(lines)


def load(
    model: Any, path: str | Path, allow: Iterable[str] = (), reset: Iterable[str] = (), advice: str = ""
) -> LoadReport:
    """Load a weights file of this project, or the best checkpoint of a run folder, into a model.

    Position tables are resized if only their grid differs. The old grid follows from the img_size in the file, which is
    square by default. `allow` and `reset` are names or patterns ("head"): of parameters that may be missing or differ
    in shape, and of those that keep their values whatever the file contains. The error names every tensor that does not
    fit; `advice` is its last sentence if only the classifier does not.
    """
    tensors, metadata = read_with_metadata(path)
    return assign(model, tensors, str(path), metadata, allow, reset, advice=advice)


def stored_constants(metadata: Metadata) -> dict:
    """Those of `CONSTANTS` that a weights file names in its metadata."""
    return {key: metadata.model[key] for key in CONSTANTS if metadata.model.get(key) is not None}


def assign(
    model: Any,
    tensors: dict[str, np.ndarray],
    source: str,
    metadata: Metadata | None = None,
    allow: Iterable[str] = (),
    reset: Iterable[str] = (),
    resize: bool = True,
    advice: str = "",
) -> LoadReport:
    """`load` for what `read` returns, or for arrays of our names and layouts; a moving average takes precedence."""
    import paddle

    from ppattn.backbones.base import resized_parameter

    foreign = metadata is not None and not metadata.model_fields_set
    metadata = metadata or Metadata()
    average = {name.removeprefix("ema/"): array for name, array in tensors.items() if name.startswith("ema/")}
    arrays = {name: array for name, array in tensors.items() if not name.startswith(("ema/", "optimizer/"))} | average
    if odd := [name for name, array in arrays.items() if array.dtype.kind not in "fiub" or not _finite(array)]:
        raise UserError(f"{source} holds values that are not finite numbers, in {', '.join(odd[:5])}.")
    report = LoadReport(source, constants=stored_constants(metadata), metadata=metadata)
    own, new, wrong = model.state_dict(), {}, list[str]()
    ignored = [*reset, *(["head"] if getattr(model, "num_classes", None) == 0 else [])]
    arrays = {name: array for name, array in arrays.items() if not _named(name, ignored)}
    size = metadata.preprocess.get("img_size") or metadata.model.get("img_size")
    size = (size, size) if isinstance(size, int) else size and tuple(size)
    size = None if size == getattr(model, "img_size", None) else size
    for name, tensor in own.items():
        shape = tuple(tensor.shape)
        if name in arrays and arrays[name].dtype.itemsize == 1 and tensor.is_floating_point():
            raise UserError(f"{source} holds {arrays[name].dtype} for {name}, not floats, as quantised models do.")
        rejected = report.missing if _named(name, allow) else wrong
        if _named(name, reset):
            report.missing.append(name)
        elif name not in arrays:
            rejected.append(f"{name} is missing")
        elif resize and (array := resized_parameter(model, name, arrays[name], size)) is not None:
            new[name] = array
            report.resized.append(f"{name} {list(arrays[name].shape)} -> {list(shape)}")
        elif arrays[name].shape == shape:
            new[name] = arrays[name]
        else:
            rejected.append(f"{name} is {list(arrays[name].shape)}, the model has {list(shape)}")
    wrong += [f"{name} is not in the model" for name in arrays if name not in own and not _named(name, allow)]
    if wrong:
        hint = f" {advice}" if advice and all(text.startswith("head.") for text in wrong) else ""
        if foreign and not hint:
            call = f"{verb_command('convert')} --model {getattr(model, 'name', 'MODEL')} --from {source} --output FILE"
            hint = f" If another library wrote it, `{call}` makes a file that fits."
        elif any(".attn." in text or ".bias.table" in text for text in wrong):
            steps = f"step by step `{verb_command('linearize')}`"
            hint = f' For another attention `-o \'model.allow=["*.attn.*","*.bias.table"]\'`, or {steps}.'
        raise UserError(f"{source} does not fit the model: {_some(wrong, 6)}.{hint}")
    for name, array in new.items():
        own[name].set_value(paddle.to_tensor(array).astype(own[name].dtype))
    report.loaded = len(new)
    return report


def _some(texts: list[str], most: int) -> str:
    return "; ".join(texts[:most]) + (f"; and {len(texts) - most} more" if len(texts) > most else "")


def _finite(array: np.ndarray) -> bool:
    """Whether all values are finite as float32, too."""
    with np.errstate(over="ignore"):
        return bool(np.isfinite(array.astype(np.float32, copy=False)).all())


def _named(name: str, patterns) -> bool:
    return any(fnmatch.fnmatch(name, pattern) or name.startswith(f"{pattern}.") for pattern in patterns)


def load_official(model: Any, arrays: dict[str, np.ndarray], resize: bool = False) -> LoadReport:
    """Load the authors' PyTorch weights: any missing, unexpected or misshapen entry is a `UserError`.

    `arrays` have official names and layouts (Linear (out, in), Conv (out, in/groups, kh, kw)); `resize`: tables, too.
    """
    with reading_untrusted("official weights", "those of this model"):
        moved = from_official(model, arrays)
    return assign(model, moved, "official weights", resize=resize)


def from_official(model: Any, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
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
        if leaf == "weight" and isinstance(layers.get(owner), Linear) and array.ndim > 1 and array[0, 0].size == 1:
            array = array.reshape(len(array), -1).T  # 1 x 1 convolutions, too
        out[name.replace("running_mean", "_mean").replace("running_var", "_variance")] = array
    return out
