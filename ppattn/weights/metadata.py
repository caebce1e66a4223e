"""What the files that training writes say about the model in them, checked when they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from ppattn.errors import UserError
from ppattn.schema import Size, validated
from ppattn.text import is_text

Colour = Annotated[list[float], Field(min_length=3, max_length=3)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Preprocessing(_Part):
    img_size: Size | None = None
    mean: Colour = [0.0] * 3
    std: Colour = [1.0] * 3


class _Model(_Part):
    img_size: Size | None = None


class _Config(_Part):
    model: _Model = _Model()


class _Metadata(_Part):
    """Every entry may be absent: files of other projects have none."""

    config: _Config = _Config()
    classes: Annotated[list[str], Field(min_length=1, max_length=10**6)] = ["0"]
    preprocess: _Preprocessing = _Preprocessing()


def check_metadata(metadata: dict, path: Path) -> None:
    """Compare with the schema; raises `UserError` for an entry that training would not have written."""
    validated(_Metadata, metadata, f"{path} is not what training wrote")
    if "kind" in metadata and not metadata.get("preprocess", {}).keys() >= {"mean", "std"}:
        raise UserError(f"{path} is not what training wrote: it lacks preprocess.mean and preprocess.std.")
    for name in metadata.get("classes", []):
        if not is_text(name):
            raise UserError(f"{path} is not what training wrote: class name {name!r} is not printable text.")
