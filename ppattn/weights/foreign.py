"""Weights of other libraries, recognised by their names and shapes.

Names become those that `from_official` takes: the authors' inside an attention, the authors' or ours outside.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ppattn.errors import UserError, reading_untrusted
from ppattn.files.tables import read_table
from ppattn.weights.assign import LoadReport, assign, from_official
from ppattn.weights.files import read

TABLE = Path(__file__).with_name("sources.yaml")
AUTHORS = "the authors"
BLOCK = r"blocks\.\d+\.(norm\d|attn\.(qkv|proj)|mlp\.fc\d)"
PLAIN = rf"cls_token|pos_embed|(patch_embed\.proj|norm|head|{BLOCK})\.(weight|bias)"
DISTILLED = ("dist_token", "head_dist.", "cls_classifier.", "distillation_classifier.")
SWIGLU = r"\.mlp\.(?:w12|weights_in)\.weight$"
UNUSED = ("pooler.", "decoder", "dino_head.", "ibot_head.")  # heads of a pre-training, which lead to no logits


@dataclass(frozen=True)
class Source:
    """How a library names the parameters of one family; sources.yaml explains the fields."""

    library: str
    backbone: str
    mark: str
    without: str = "$^"
    renames: dict[str, str] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)


@cache
def foreign_sources() -> list[Source]:
    """The sources of sources.yaml, in their order, each with all renames."""
    tree = read_table(TABLE)
    found = []
    for row in tree["sources"]:
        groups = [tree["groups"][name] for name in row.pop("also", ())]
        parts = [tree["first"].get(row["library"], {}), row.pop("renames", {}), *groups]
        found.append(Source(**row, renames={old: new for part in parts for old, new in part.items()}))
    return found


def recognise(arrays: dict[str, np.ndarray], path: str | Path) -> tuple[Source, dict[str, np.ndarray]]:
    """The source of a state dict, and the arrays under names and in layouts that `from_official` takes."""
    bias, weight = (arrays.get(f"blocks.0.mlp.{name}") for name in ("fc1.bias", "fc2.weight"))  # as timm has them
    if (bias is not None and weight is not None and bias.size == 2 * max(weight.shape)) or _matches(SWIGLU, arrays):
        raise UserError(f"{path} holds a model with both halves of a SwiGLU in one layer: no model here has that.")
    source = next((s for s in foreign_sources() if _matches(s.mark, arrays) and not _matches(s.without, arrays)), None)
    if source is None:
        shown = ", ".join(sorted(arrays)[:3])
        known = "no DeiT, Swin, PVT or PVT v2 of the authors, timm, transformers, torchvision or PaddleClas"
        raise UserError(f"{path} holds {known}: its {len(arrays)} names begin with {shown}.")
    renamed = {}
    for name, array in arrays.items():
        for pattern, new in source.renames.items():
            name = re.sub(pattern, new, name)
        renamed[name] = array
    if any(name.startswith(DISTILLED) for name in renamed):
        token = "a distillation token, which no model here has"
        raise UserError(f"{path} holds a DeiT with {token}: convert one that was trained without distillation.")
    if source.library.startswith(AUTHORS) and _stored_in_out(renamed, path):
        shifts = {"always_shift": True} if source.backbone == "swin" else {}
        source = replace(source, library="PaddleClas", constants=shifts)
        renamed = {n: a.T if n.endswith(".weight") and a.ndim == 2 else a for n, a in renamed.items()}
    return source, _fused(renamed, "kv" if source.backbone.startswith("pvt") else "qkv")


def convert(model: Any, path: str | Path, allow: Iterable[str] = (), part: str | None = None) -> LoadReport:
    """Load weights of another library into a model of the zoo; tables of another grid are resized.

    `allow` are names or patterns ("head") of parameters that may be missing or of another shape; `part` chooses among
    the weights of a checkpoint, such as `teacher` or `model_ema`. Raises `UserError` for a file that is not of this
    model's family and size; it says what the file looks like.
    """
    arrays, metadata = read(path, part)
    if metadata:
        raise UserError(f"{path} is already a ppattn weights file; there is nothing to convert.")
    from ppattn.backbones import BACKBONES

    with reading_untrusted(path, f"weights of {model.name}"):
        source, arrays = recognise(arrays, path)
        arrays = _as_official_dinov3(arrays, model) if source.backbone == "dinov3" else arrays
        family = BACKBONES.get(source.backbone)
        here = f"a {family.__name__} of {source.library} with {_shape(arrays)}"
        own = _shape(model.state_dict())
        if not isinstance(model, family) or _shape(arrays) != own:
            raise UserError(f"{path} looks like {here}, but {model.name} is a {type(model).__name__} with {own}.")
        arrays = _as_official_dinov2(arrays, model) if source.backbone == "deit" else arrays
        left = [name for name in arrays if name.startswith(UNUSED)]
        arrays = from_official(model, {name: array for name, array in arrays.items() if name not in left})
        classes = f"--num-classes {arrays['head.bias'].size} keeps it" if "head.bias" in arrays else "the file has none"
        advice = f"The classifier: {classes}, --num-classes 0 leaves it out, --allow head starts with a new one."
        report = assign(model, arrays, str(path), allow=allow, advice=advice)
        if windows := [line for line in report.resized if line.startswith("stages.0.blocks.0.bias.")]:
            raise UserError(f"{path} has windows of another size than {model.name}: {windows[0]}.")
    report.source = f"{path}, {here}"
    report.unused += left
    report.constants |= source.constants
    return report


def to_timm(model: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """timm's names and layouts of a DeiT with softmax attention, and the arguments of its `VisionTransformer`."""
    from ppattn.attention import ATTENTIONS
    from ppattn.layers import Linear

    linear = {name for name, layer in model.named_sublayers() if isinstance(layer, Linear)}
    arrays = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    arrays = {name: array.T if name.removesuffix(".weight") in linear else array for name, array in arrays.items()}
    other = {ATTENTIONS.name_of(type(block.attn)) for block in model.blocks_flat()} - {"softmax"}
    other |= {name for name in arrays if not re.fullmatch(PLAIN, name)}
    other |= {key for key in ("fc_norm", "mean_pool") if getattr(model, key, False)}
    other |= {f"no {name}" for name in ("cls_token", "pos_embed", "blocks.0.attn.qkv.bias") if name not in arrays}
    if other:
        raise UserError(f"{model.name} is no plain DeiT with softmax attention, which timm would need: {min(other)}.")
    width, keys = arrays["norm.weight"].size, ("img_size", "in_chans", "num_classes")
    facts = {key: getattr(model, key) for key in keys} | {"patch_size": model.strides[-1], "embed_dim": width}
    facts |= {"depth": len(model.blocks), "num_heads": model.blocks[0].attn.num_heads}
    return arrays, facts | {"mlp_ratio": arrays["blocks.0.mlp.fc1.bias"].size / width}


def _as_official_dinov2(arrays: dict[str, np.ndarray], model: Any) -> dict[str, np.ndarray]:
    """timm's forms: a position of the class token that is in the token already, and a head on that token alone."""
    if "blocks.0.ls1.gamma" not in arrays:
        return arrays
    table, width = arrays["pos_embed"], arrays["blocks.0.ls1.gamma"].size
    tokens, grid = table.shape[1], math.prod(model.grid)
    if tokens == grid or (tokens != grid + 1 and math.isqrt(tokens) ** 2 == tokens):
        arrays = arrays | {"pos_embed": np.pad(table, ((0, 0), (1, 0), (0, 0)))}
    if (head := arrays.get("head.weight")) is not None and head.shape[1] == width and model.mean_pool:
        arrays = arrays | {"head.weight": np.pad(head, ((0, 0), (0, width)))}
    return arrays


def _as_official_dinov3(arrays: dict[str, np.ndarray], model: Any) -> dict[str, np.ndarray]:
    """One bias of queries, keys and values, that of the keys zero; the layers of timm's SwiGLU under their names."""
    if "blocks.0.mlp.fc1_g.weight" in arrays:
        for theirs, ours in (("fc1_g", "w1"), ("fc1_x", "w2"), ("fc2", "w3")):
            arrays = {name.replace(f".mlp.{theirs}.", f".mlp.{ours}."): array for name, array in arrays.items()}
    biases, own = {}, model.state_dict()
    for weight in (name for name in arrays if name.endswith(".attn.qkv.weight")):
        name, width = weight.replace(".weight", ".bias"), arrays[weight].shape[1]
        if name in arrays or name in own:
            bias = arrays.get(name, np.zeros(2 * width, np.float32))
            biases[name] = np.concatenate([bias[:width], np.zeros(width, np.float32), bias[-width:]])
    return arrays | biases


def _matches(pattern: str, names: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for name in names)


def _stored_in_out(arrays: dict[str, np.ndarray], path: str | Path) -> bool:
    """Whether the weights of linear layers are stored [in, out], as Paddle does; all that are not square must agree."""
    found = set()
    for name, weight in arrays.items():
        bias = arrays.get(name.removesuffix("weight") + "bias")
        if name.endswith(".weight") and weight.ndim == 2 and bias is not None and weight.shape[0] != weight.shape[1]:
            found.add(weight.shape[1] == bias.size)
    if len(found) > 1:
        raise UserError(f"{path} holds linear layers in both layouts, [in, out] and [out, in].")
    return found == {True}


def _fused(arrays: dict[str, np.ndarray], parts: str) -> dict[str, np.ndarray]:
    """The separate layers of transformers for query, key and value as one, as the authors have it: qkv, or q and kv."""
    fused = {}
    for name, array in arrays.items():
        if not re.search(rf"\.attn\.[{parts}]\.", name):
            fused[name] = array
        elif f".attn.{parts[0]}." in name:
            names = [name.replace(f".attn.{parts[0]}.", f".attn.{part}.") for part in (parts, *parts)]
            fused[names[0]] = np.concatenate([arrays[part] for part in names[1:] if part in arrays])
    return fused


def _shape(arrays: Mapping[str, Any]) -> str:
    """Widths and numbers of blocks of a state dict, in words."""
    stages: dict[int, list[int]] = {}
    for name, array in arrays.items():
        found = re.match(r"(?:(?:layers|stages)\.(\d+)\.|block(\d)\.)?(?:blocks\.)?\d+\..*norm1\.weight$", name)
        if found and array.ndim:
            stages.setdefault(int(found[1] or found[2] or 0), []).append(array.shape[0])
    widths = ", ".join(str(stages[i][0]) for i in sorted(stages))
    return f"{widths} channels and {', '.join(str(len(stages[i])) for i in sorted(stages))} blocks"
