"""What lies beside the weights of another library: how images are prepared, and the names of the classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from ppattn.data.classes import check_names, listed_classes
from ppattn.errors import reading
from ppattn.settings import Data
from ppattn.validation import Mean, Portion, Section, Std, Triple, validated

PILLOW = {0: "nearest", 2: "bilinear", 3: "bicubic", 4: "area"}  # its numbers of filters
KNOWN = get_args(Data.model_fields["interpolation"].annotation)


class Pixels(Section):
    """Settings of `data` that a file gives."""

    mean: Triple[Mean]
    std: Triple[Std]
    crop_ratio: Portion = 1.0
    crop_keep_aspect: bool = False
    interpolation: str = "bicubic"


class Processor(BaseModel):
    """preprocessor_config.json of transformers."""

    image_processor_type: str = ""
    do_normalize: bool = True
    image_mean: Triple[float] | None = None
    image_std: Triple[float] | None = None
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_center_crop: bool = False
    size: dict[str, int | None] | int | None = 0
    crop_size: dict[str, int | None] | int | None = 0
    crop_pct: float | None = None
    resample: int = 2

    def pixels(self) -> dict[str, Any]:
        size, crop = (
            next(filter(None, given.values()), 0) if isinstance(given, dict) else given or 0
            for given in (self.size, self.crop_size)
        )
        short = (
            bool(self.size.get("shortest_edge")) if isinstance(self.size, dict) else "Bit" in self.image_processor_type
        )
        ratio = crop / size if self.do_center_crop and size else 1.0
        if self.crop_pct is not None:  # of ConvNeXT: from 384 pixels on without crop
            short, ratio = (True, self.crop_pct) if size < 384 else (False, 1.0)
        mean, std = (self.image_mean or [0.5] * 3, self.image_std or [0.5] * 3)
        mean, std = (mean, std) if self.do_normalize else ([0.0] * 3, [1.0] * 3)
        if not self.do_rescale or abs(255 * self.rescale_factor - 1) > 1e-3:
            raise ValueError("values that are not pixels / 255")
        filters = {"interpolation": PILLOW.get(self.resample, f"resample {self.resample}")}
        return {"mean": mean, "std": std, "crop_ratio": ratio, "crop_keep_aspect": short, **filters}


class Pretrained(BaseModel):
    """`pretrained_cfg` in config.json of timm."""

    mean: Triple[float]
    std: Triple[float]
    crop_pct: float = 1.0
    crop_mode: str = "center"
    interpolation: str = "bicubic"

    def pixels(self) -> dict[str, Any]:
        if self.crop_mode not in ("center", "squash"):
            raise ValueError(f"crop_mode {self.crop_mode}")
        keep = {"crop_ratio": self.crop_pct, "crop_keep_aspect": self.crop_mode == "center"}
        return {"mean": self.mean, "std": self.std, "interpolation": self.interpolation, **keep}


def beside(folder: Path, outputs: int) -> tuple[dict[str, Any], list[str], list[str]]:
    """Settings of `data`, class names, and sentences that say what was found and what not.

    Args:
        folder: of the weights: preprocessor_config.json and config.json of transformers, config.json of timm, and a
            list of labels (*label*.txt) of PaddleClas are read.
        outputs: how many classes the model has.

    Raises:
        UserError: for such a file with another content.
    """
    config, processor = _read(folder / "config.json"), _read(folder / "preprocessor_config.json")
    timm = config.get("pretrained_cfg") or (config if "mean" in config else {})
    pixels, said, names = dict[str, Any](), list[str](), list[str]()
    kinds: list[tuple[type[Processor | Pretrained], dict, str]]
    kinds = [(Processor, processor, "preprocessor_config.json"), (Pretrained, timm, "config.json")]
    for kind, tree, file in kinds:
        if tree and not pixels:
            where = str(folder / file)
            with reading(where, "known here: remove it, and images are prepared as in the model's recipe"):
                pixels = validated(Pixels, validated(kind, tree, where).pixels(), where).model_dump()
                if pixels["interpolation"] not in KNOWN:
                    said.append(f"{where}: {pixels.pop('interpolation')} is not known here, bicubic is used")
            said.append(f"{where}: " + ", ".join(f"{key} {value}" for key, value in pixels.items()))
    labels = sorted(folder.glob("*label*.txt"))
    described = config.get("label_descriptions") or {}
    with reading(folder / "config.json", "known here: its class names"):
        if isinstance(given := config.get("id2label"), dict):
            names = [given[key] for key in sorted(given, key=int)]
        elif given := config.get("label_names") or timm.get("label_names"):
            names = [described.get(name, name) for name in given]
    source = folder / "config.json"
    if not names and len(labels) == 1:
        names, source = listed_classes(labels[0]), labels[0]
    if names and all(name == f"LABEL_{i}" for i, name in enumerate(names)):
        names = []  # what transformers writes where nobody gave names
    if names and len(names) != outputs:
        said.append(f"{source}: {len(names)} class names are left out, since the model has {outputs} classes")
        names = []
    said += [f"{source}: {len(names)} class names"] if names else []
    if not pixels:
        said.append("how images are prepared is not known: as in the model's recipe, with ImageNet's mean and std")
    if not names and outputs:
        said.append(f"names of the classes are not known: {'those of ImageNet' if outputs == 1000 else 'numbers'}")
    return pixels, check_names(names, str(source)) if names else [], said


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    with reading(path, "a JSON file"):
        return dict(json.loads(path.read_bytes()))
