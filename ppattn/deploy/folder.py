"""The files of an exported folder, in the layout of Paddle 3, and its description `ppattn.json`."""

import json
import re
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel

from ppattn.data import Preprocess
from ppattn.data.images import PILLOW_FILTERS
from ppattn.errors import UserError, reading_untrusted
from ppattn.files.atomic import checksum
from ppattn.validation import Positive

ABOUT, GOLDEN, PADDLEX = "ppattn.json", "golden.npz", "inference.yml"
PROGRAM, WEIGHTS, ONNX = "inference.json", "inference.pdiparams", "inference.onnx"
FILES = {ABOUT, GOLDEN, PADDLEX, PROGRAM, WEIGHTS, ONNX, "eval", "eval_mirror"}  # an export, and what eval adds
# Operators that read or write files, run code or reach other processes. Every other one computes.
HARMFUL = re.compile(r"(load|save)(_combine)?|read_file|py_func|run_program|(partial_)?(send|recv)(_v2)?|barrier|c_\w+")


class About(BaseModel):
    """What a predictor reads of `ppattn.json`; the other entries are for people and other programs."""

    format: Literal["paddle", "onnx", "both"]
    precision: Literal["fp32", "bf16", "fp16", "int8"]
    engine: Literal["plain", "stock", "bf16", "onnxruntime", "fp16", "int8"]
    differences: dict[str, float | str]
    output: Literal["probabilities", "logits", "features"]
    classes: list[str]
    dynamic_size: bool
    stride: Positive
    sigmoid: bool = False
    preprocess: dict[str, Any]
    source: dict[str, Any]
    sha256: dict[str, str]


def read_about(folder: Path) -> About:
    """The description of an exported folder, after comparing every file with its checksum."""
    path = folder / ABOUT
    if not path.is_file():
        raise UserError(f"{folder} is not an exported model: it has no {ABOUT}. Make one with export.")
    with reading_untrusted(path, "what export wrote; export the model again"):
        about = About.model_validate(json.loads(path.read_bytes()))
    for name, digest in about.sha256.items():
        file = folder / Path(name).name
        if not file.is_file():
            raise UserError(f"{folder} is incomplete: {name} is missing. Export the model again.")
        if checksum(file) != digest:
            raise UserError(f"{file} is not the file that was exported: its checksum differs. Export it again.")
    return about


def check_operators(program: Path) -> None:
    """Raise `UserError` for a file that is no program of Paddle 3, or for an operator that is `HARMFUL`."""
    with reading_untrusted(program, "a program of Paddle 3"):
        waiting, found = [json.loads(program.read_bytes())["program"]], set()
        while waiting:
            item = waiting.pop()
            if isinstance(item, dict):
                found |= {operator["#"].rpartition(".")[2].rstrip("_") for operator in item.get("ops", ())}
                waiting += item.values()
            elif isinstance(item, list):
                waiting += item
    if harmful := sorted(filter(HARMFUL.fullmatch, found)):
        raise UserError(f"{program} reads or writes files or runs code ({', '.join(harmful[:5])}): not opened.")


def paddlex_config(model: str, preprocess: Preprocess, classes: list[str], output: str) -> tuple[str, str | None]:
    """`inference.yml` for PaddleX and PaddleClas, which repeats the preprocessing, or why it cannot: (text, reason)."""
    height, width = preprocess.img_size
    if output != "probabilities":
        return "", f"it has no pipeline for {output}"
    if preprocess.in_chans != 3:
        return "", "its operators make images of three channels"
    if preprocess.max_value:
        return "", "its operators know 8 bits only"
    if preprocess.crop_keep_aspect and height != width:
        return "", "its operators do not cover an oblong window"
    target = [int(side / preprocess.crop_ratio) for side in (width, height)]
    resize: dict[str, Any] = {"backend": "pil", "interpolation": PILLOW_FILTERS[preprocess.interpolation]}
    resize |= {"resize_short": target[0]} if preprocess.crop_keep_aspect else {"size": target}
    normalise = {"mean": [*preprocess.mean], "std": [*preprocess.std], "scale": 1 / 255, "order": "", "channel_num": 3}
    operators: list[dict] = [{"ResizeImage": resize}, {"CropImage": {"size": [width, height]}}]
    operators += [{"NormalizeImage": normalise}, {"ToCHWImage": None}]
    content = {
        "Global": {"model_name": model},
        "PreProcess": {"transform_ops": operators},
        "PostProcess": {"Topk": {"topk": min(5, len(classes)), "label_list": classes}},
    }
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True), None
