"""inference.json: the description of an exported folder. It has a checksum and is checked when it is read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ppattn.data.layout import check_names
from ppattn.download import checksum
from ppattn.errors import UserError, reading
from ppattn.schema import validated


class Input(BaseModel):
    """The images that the program takes."""

    model_config = ConfigDict(strict=True)
    stride: Annotated[int, Field(ge=1, le=2**14)]


class Description(BaseModel):
    """The settings that a predictor needs; others are for people."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    format: Literal["paddle", "onnx"]
    precision: Literal["fp32", "bf16", "int8"]
    engine: Literal["plain", "stock", "bf16", "onnx", "int8"]
    differences: dict[str, float | str]
    output: Literal["logits", "features"]
    dynamic_size: bool
    input: Input
    classes: Annotated[list[str], Field(max_length=10**6)]  # none for features
    preprocess: dict[str, Any]
    source: dict[str, Any]
    sha256: dict[str, str]


def read_description(folder: Path) -> Description:
    """The description of an exported folder whose files are those that were exported.

    Raises:
        UserError: for a folder that is no export, misses a file, or was changed.
    """
    path = folder / "inference.json"
    if not path.is_file():
        raise UserError(f"{folder} is not an exported model: it has no inference.json. Make one with export.")
    with reading(path, "what export wrote; export the model again"):
        content = unseal(path)
    description = validated(Description, content, f"{path} is not what export wrote, export the model again")
    if (description.output == "logits") != bool(description.classes):
        raise UserError(f"{path} is not what export wrote: classes belong to logits. Export the model again.")
    if description.classes:
        check_names(description.classes, str(path))
    program = ("model.onnx",) if description.format == "onnx" else ("model.pdiparams",)
    for name in (*program, "golden.npz"):
        if name not in description.sha256:
            raise UserError(f"{path} is not what export wrote: it has no checksum of {name}. Export the model again.")
    for name, wanted in description.sha256.items():
        file = folder / name
        if Path(name).name != name or not file.is_file():
            raise UserError(f"{folder} is not whole: {name} is missing. Export the model again.")
        if checksum(file) != wanted:
            raise UserError(f"{file} is not the file that was exported: its checksum differs. Export it again.")
    return description


def seal(path: Path, description: dict) -> None:
    """Write a description with a checksum of its own text (the text with an empty checksum)."""
    text = json.dumps(description | {"checksum": ""}, indent=1) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    head, key, tail = text.rpartition('"checksum": "')
    path.write_text(head + key + digest + tail, encoding="utf-8")


def unseal(path: Path) -> dict:
    """The description in a file; raises `ValueError` unless it is the text that `seal` wrote."""
    text = path.read_text(encoding="utf-8")
    description = json.loads(text)
    digest = description.get("checksum") if isinstance(description, dict) else None
    if not digest or hashlib.sha256(text.replace(digest, "").encode()).hexdigest() != digest:
        raise ValueError("its checksum does not fit")
    return description
