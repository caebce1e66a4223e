"""What the files that training writes say about themselves, checked when they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ppattn.errors import UserError
from ppattn.schema import Positive, Size
from ppattn.text import printable

Count = Annotated[int, Field(ge=0, lt=2**63)]
Colour = Annotated[list[float], Field(min_length=3, max_length=3)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class Preprocessing(_Part):
    img_size: Size | None = None
    mean: Colour | None = None
    std: Colour | None = None


class ModelSettings(_Part):
    img_size: Size | None = None


class Settings(_Part):
    model: ModelSettings = ModelSettings()


class Row(_Part):
    epoch: Count
    step: Count
    lr: float
    train_loss: float
    images_per_second: float | None


class Progress(_Part):
    epoch: Count = 0
    step: Count = 0
    best_top1: float = -1.0
    best_epoch: Count = 0
    waited: Count = 0
    skipped: Count = 0
    seconds: float = 0.0
    loss_sum: float = 0.0
    loss_count: Count = 0
    unreadable: Count = 0
    times: dict[str, float] = {}
    history: list[Row] = []


class DataPart(_Part):
    images: Count
    sha256: str


class DataParts(_Part):
    train: DataPart
    val: DataPart


class Metadata(_Part):
    """Every entry may be absent: weights files of other projects have none."""

    kind: Literal["weights", "state"] | None = None
    config: Settings = Settings()
    classes: Annotated[list[str], Field(min_length=1, max_length=10**6)] = ["0"]
    preprocess: Preprocessing = Preprocessing()
    world: Positive = 1
    data: DataParts = None  # type: ignore[assignment]  # of the first version there is none
    runtime: dict[str, Any] | list[str] = {}
    progress: Progress = Progress()
    ema_updates: Count = 0
    scaler: dict[str, Any] = {}


STATE = {"config", "classes", "preprocess", "world", "runtime", "progress", "ema_updates", "scaler"}


def check_metadata(metadata: dict, path: Path) -> None:
    """Compare with the schema; raises `UserError` for an entry that training would not have written."""
    try:
        Metadata.model_validate(metadata)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(f"{path} is not what training wrote: {key} is wrong ({first['msg']}).") from None
    if "kind" in metadata and not metadata.get("preprocess", {}).keys() >= {"mean", "std"}:
        raise UserError(f"{path} is not what training wrote: it lacks preprocess.mean and preprocess.std.")
    for name in metadata.get("classes", []):
        if printable(name) != name:
            raise UserError(f"{path} is not what training wrote: class name {name!r} is not printable text.")
    if metadata.get("kind") == "state" and not metadata.keys() >= STATE:
        raise UserError(f"{path} is not what training wrote: it lacks {', '.join(sorted(STATE - metadata.keys()))}.")
