"""Names to models: the table of models.yaml, and `create_model`. This file imports no Paddle until a model is built."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from ppattn.errors import UserError, did_you_mean, verb_command
from ppattn.files.cache import download_folder, locked
from ppattn.files.download import fetch
from ppattn.runtime.startup import import_paddle
from ppattn.validation import Epsilon, Names, argument_types, check_arguments
from ppattn.zoo import table
from ppattn.zoo.table import add_model, attentions, costs, list_backbones, list_models, model_entries, model_entry

if TYPE_CHECKING:
    from ppattn.weights import Metadata


def list_attentions(pattern: str = "*") -> list[str]:
    """Attentions whose name matches the shell pattern."""
    from ppattn.attention import ATTENTIONS

    return ATTENTIONS.list(pattern)


def other_attention(metadata: Metadata, model: dict) -> str:
    """How the attention or heads that weights were trained with differ from a `model` section, as a clause, or ''."""
    saved = metadata.model
    if saved.get("name") not in model_entries():
        return ""
    keys = ("attention", "attention_options", "num_heads")
    given = ({key: value for key, value in one.items() if value is not None} for one in (saved, model))
    theirs, ours = ({"attention": "softmax"} | model_arguments(one["name"], one) for one in given)
    differ = [key for key in keys if json.dumps(theirs.get(key)) != json.dumps(ours.get(key))]
    made, built = (", ".join(f"{key} {one.get(key)}" for key in differ) for one in (theirs, ours))
    return f"was trained with {made}, and {model['name']} is built with {built}" if differ else ""


def model_arguments(name: str, given: dict) -> dict:
    """The arguments of an entry and those given; another attention drops the entry's attention options."""
    row = model_entry(name)
    options = {} if "attention" in given else row.arguments.get("attention_options", {})
    return row.arguments | given | {"attention_options": options | given.get("attention_options", {})}


def backbone_arguments(name: str | None = None) -> dict[str, Any]:
    """Arguments of a model's backbone, or of all backbones, with their annotations."""
    import_paddle()
    from ppattn.backbones import BACKBONES

    names = BACKBONES.list() if name is None else [model_entry(name).backbone]
    return {key: hint for one in names for key, hint in argument_types(BACKBONES.get(one)).items()}


def check_attention(names: Names) -> None:
    """Raise `UserError` for a name that is no attention."""
    from ppattn.attention import ATTENTIONS

    for one in [names] if isinstance(names, str) else names:
        ATTENTIONS.get(one) if isinstance(one, str) else check_attention([*one])


def find_weights(source: str | Path, name: str = "") -> Path:
    """The file meant by `weights`: a path, see `weights.find`; `pretrained`, of the model `name`; or a model's name."""
    from ppattn import weights

    if source == "pretrained":
        return weights_file(name)
    try:
        return weights.find(source)
    except UserError as error:
        if ours := table.known(str(source)):
            return weights_file(ours)
        raise UserError(f"{error}{did_you_mean(source, table.with_weights())}") from None


def weights_file(name: str) -> Path:
    """The published weights of a model as a file of this project: downloaded once, converted once, then cached.

    PPATTN_CACHE says where (~/.cache/ppattn); PPATTN_MIRROR is a mirror or folder of files by their published names.
    """
    from ppattn import weights

    row = model_entry(name)
    name, published = row.name, row.weights
    if "file" in published:
        return table.PACKAGE / published["file"]
    convert = f"`{verb_command('convert')} --model {name} --from FILE --output {name}.safetensors`"
    if "page" in published and "url" not in published:
        raise UserError(f"The weights of {name} have no address: get them from {published['page']}, then {convert}.")
    if "url" not in published:
        raise UserError(f"No published weights of {name} are known; `{verb_command('list')} models` shows which are.")
    cache = download_folder()
    converted = cache / f"{name}.safetensors"
    url, mirror = published["url"], os.environ.get("PPATTN_MIRROR", "")
    file = Path(urlsplit(url).path).name
    file = file if Path(file).suffix else f"{name}.pth"
    if mirror:
        folder = mirror if "://" in mirror else Path(mirror).expanduser().resolve().as_uri()
        url = f"{folder.rstrip('/')}/{file}"
    digest = ("sha256", published["sha256"]) if "sha256" in published else None
    with locked(cache):
        if converted.is_file():
            return converted
        advice = f"Or get the file by hand and convert it: {convert}."
        theirs = (cache / file).exists()
        downloaded = fetch([url], cache / file, f"{name}: {file}", digest, advice)
        try:
            model = create_model(name)
            report = weights.convert(model, downloaded)
            facts = {"name": name, "img_size": list(model.img_size), **report.constants}
            weights.save(converted, model.state_dict(), {"config": {"model": facts}})
        finally:
            if not theirs:
                downloaded.unlink()  # what was converted, or is of no use, is not kept
    return converted


def create_model(
    name: str,
    *,
    attention: Names | None = None,
    attention_options: dict[str, Any] | None = None,
    init: Literal["normal", "xavier"] | None = None,
    norm_eps: Epsilon | None = None,
    weights: str | Path | None = None,
    pretrained: bool = False,
    **overrides: Any,
) -> Any:
    """Build a classifier.

    Args:
        name: a backbone (`list_backbones()`) or a model of the zoo (`list_models()`), by its name here or that of
            PaddleClas or timm (`DeiT_tiny_patch16_224`).
        attention: one name, a list with one per stage, or with a list of one per block for a stage; default:
            that of the zoo entry, softmax for a backbone.
        attention_options: settings of the attentions in use; default: the zoo entry's, none with `attention`.
        init: "normal" (published: Linear weights from normal(0, 0.02)) or "xavier" (the nano backbones' default).
        norm_eps: epsilon of every LayerNorm; default: the backbone's own.
        weights: a checkpoint, weights file or run folder, or the name of a model with published weights; must fit in
            every name and shape, but for the head where num_classes is given and not theirs, and the channels where
            in_chans is not 3: the weights of RGB are summed up for grey, and repeated for more channels. Constants of
            the file's model (norm_eps, always_shift, fc_norm, resize) are taken over. Weights trained with another
            attention, other options or heads are refused, unless `attention_options` or another `attention` is given.
        pretrained: start from the published weights (`list_models(pretrained=True)`), downloaded and converted once;
            the head is new where num_classes is not theirs.
        **overrides: any argument of the backbone: img_size, num_classes, embed_dim, ...; None keeps the entry's value.

    Returns:
        A `paddle.nn.Layer` in training mode: images [B, in_chans, H, W] -> logits [B, num_classes], or with
        num_classes = 0 pooled features [B, C]. `feat_channels` and `strides` describe the maps of `forward_features`.
    """
    row = model_entry(name)
    name = row.name
    draw = import_paddle().nn.initializer.XavierNormal()
    from ppattn.backbones import BACKBONES
    from ppattn.layers import LayerNorm, Linear
    from ppattn.weights import Metadata, assign, read_with_metadata, stored_constants

    backbone = BACKBONES.get(row.backbone)
    if pretrained and weights is not None:
        raise UserError(f"{name}: weights and pretrained=True exclude each other.")
    source = weights_file(name) if pretrained else weights
    tensors, metadata = read_with_metadata(find_weights(source, name)) if source is not None else ({}, Metadata())
    given = {**overrides, "attention": attention, "attention_options": attention_options, "norm_eps": norm_eps}
    given = stored_constants(metadata) | {key: value for key, value in given.items() if value is not None}
    norm_eps = given.pop("norm_eps", None)
    differs = other_attention(metadata, {"name": name, "attention": attention, **overrides})
    if differs and attention in (None, metadata.model.get("attention")) and attention_options is None:
        raise UserError(f"{source} {differs}; pass the attention or attention_options that you want.")
    check_arguments(create_model, {"init": init, "norm_eps": norm_eps}, name)
    check_arguments(backbone, given, name)
    given = model_arguments(name, given)
    own_init = given.pop("init", "normal")
    try:
        model = backbone(**given)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    model.name, model.arguments = name, given
    for layer in model.sublayers():
        if isinstance(layer, Linear) and (init or own_init) == "xavier":  # Glorot and Bengio, 2010, equation 12
            draw(layer.weight)
        if isinstance(layer, LayerNorm) and norm_eps is not None:
            layer.epsilon = norm_eps
    if source is not None:
        other = getattr(tensors.get("head.bias"), "size", 0) != model.num_classes
        reset = ["head"] if other and (pretrained or overrides.get("num_classes") is not None) else []
        assign(model, tensors, str(source), metadata, reset=reset)
    return model
