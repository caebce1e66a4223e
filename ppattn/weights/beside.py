"""What lies beside the weights of another library: how images are prepared, and the names of the classes."""

import json
from pathlib import Path
from typing import Any

from ppattn.data.classes import check_names, class_file
from ppattn.errors import UserError, reading_untrusted
from ppattn.settings import Data

FILTERS = {0: "nearest", 2: "bilinear", 3: "bicubic", 4: "area"}  # by Pillow's numbers


def _of_transformers(tree: dict[str, Any]) -> dict[str, Any]:
    """preprocessor_config.json, with the defaults of ViT, as settings of `data`."""
    size, crop = (
        next(filter(None, side.values()), 0) if isinstance(side, dict) else side or 0
        for side in (tree.get("size"), tree.get("crop_size"))
    )
    keep = "shortest_edge" in tree["size"] if isinstance(tree.get("size"), dict) else "Bit" in str(tree)
    ratio = crop / size if tree.get("do_center_crop") and size else 1.0
    if tree.get("crop_pct"):  # ConvNeXT does not crop from 384 pixels on
        keep, ratio = (True, tree["crop_pct"]) if size < 384 else (False, 1.0)
    if not tree.get("do_rescale", True) or abs(255 * tree.get("rescale_factor", 1 / 255) - 1) > 1e-3:
        raise ValueError("it does not divide pixels by 255")
    mean, std = (tree.get(f"image_{key}") or [0.5] * 3 for key in ("mean", "std"))
    mean, std = (mean, std) if tree.get("do_normalize", True) else ([0.0] * 3, [1.0] * 3)
    kind = FILTERS.get(number := tree.get("resample", 2), f"resample = {number}")
    return {"mean": mean, "std": std, "crop_ratio": ratio, "crop_keep_aspect": keep, "interpolation": kind}


def _of_timm(tree: dict[str, Any]) -> dict[str, Any]:
    """The same of `pretrained_cfg`."""
    if (mode := tree.get("crop_mode", "center")) not in ("center", "squash"):
        raise ValueError(f"crop_mode {mode}")
    rest = {"crop_ratio": tree.get("crop_pct", 1.0), "interpolation": tree.get("interpolation", "bicubic")}
    return {"mean": tree["mean"], "std": tree["std"], "crop_keep_aspect": mode == "center", **rest}


def settings_beside_weights(folder: Path, outputs: int, heads: int = 0) -> tuple[dict[str, Any], list[str], list[str]]:
    """Settings of `data`, class names, and sentences that say what was found and what not.

    From the JSON files of transformers or timm, or labels of PaddleClas. `outputs`, `heads`: the model's (0: any).
    """
    config, said = _read(source := folder / "config.json"), list[str]()
    if heads and isinstance(theirs := config.get("num_attention_heads", heads), int) and theirs != heads:
        raise UserError(f"{source} has {theirs} heads, the model {heads}: name one that has as many.")
    timm, pixels = config.get("pretrained_cfg") or (config if "mean" in config else {}), dict[str, Any]()
    file = folder / "preprocessor_config.json"
    if processor := _read(file) or timm:
        file = source if processor is timm else file
        with reading_untrusted(file, "known here; without it, images are prepared as in the model's recipe"):
            pixels = (_of_timm if processor is timm else _of_transformers)(processor)
            if (kind := pixels["interpolation"]) not in FILTERS.values():
                said.append(f"{kind} is not known here: bicubic is used")
                pixels["interpolation"] = "bicubic"
            pixels = Data(**pixels).model_dump(exclude_unset=True)
        said.append(f"{file}: " + ", ".join(f"{key} {value}" for key, value in pixels.items()))
    else:
        said.append("how images are prepared is not known: as in the model's recipe, with ImageNet's mean and std")
    described, names, lists = config.get("label_descriptions") or {}, list[str](), sorted(folder.glob("*label*.txt"))
    with reading_untrusted(source, "known here, in its class names"):
        if given := config.get("id2label"):
            names = [given[key] for key in sorted(given, key=int)]
        elif given := config.get("label_names") or timm.get("label_names"):
            names = [described.get(name, name) for name in given]
    if len(lists) == 1 and not names:
        names, source = class_file(lists[0]).names, lists[0]
    if len(names) == outputs and set(names) != {f"LABEL_{i}" for i in range(outputs)}:  # where nobody gave names
        return pixels, check_names(names, str(source)), [*said, f"{source}: {outputs} class names"]
    other = "those of ImageNet" if outputs == 1000 else "numbers"
    return pixels, [], [*said, f"names of {outputs} classes are not known: {other}"] if outputs else said


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    with reading_untrusted(path, "a JSON file"):
        return dict(json.loads(path.read_bytes()))
