"""Runs of the CIFAR-10 grid, and which of them are compared.

A run counts only if its recipe is that of configs/cifar10 today. Accuracy is that of the last epoch on the test images.
Seconds are estimated: training images divided by the images per second of a benchmark on one machine, because the runs
were paused at times and used more than one machine.
"""

import csv
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ppattn.files.atomic import write_rows
from ppattn.runtime.cpu import describe_processor
from scripts.run_grid import is_complete, read_grid

BACKBONES = {"deit_nano": "DeiT", "pvt_nano": "PVT", "swin_nano": "Swin"}
MUON = "deit_nano_muon_15ep"  # the config of 15 epochs; the others of the grid are named like the backbones
TRAINING_IMAGES = 50_000
SAME = (  # what leaves a run one of the common recipe; results/cifar10/README.md explains the last two
    "model.name=",
    "model.attention=",
    "model.attention_options.num_landmarks=",
    "optimizer.lr_scale=",
)
LOCAL_TERM = ("model.attention_options.residual=", "model.attention_options.local_term=")


@dataclass
class Row:
    """The runs of one config with the same overrides but for the seed; `name` is that of the first."""

    name: str
    config: str
    backbone: str
    attention: str
    overrides: tuple[str, ...]
    epochs: int
    optimizer: str
    by_seed: dict[int, float] = field(default_factory=dict)  # top-1, 0..1
    params: int = 0
    macs: int = 0
    pflop: float = 0.0
    seconds: float | None = None
    inference: tuple[float, ...] = ()  # milliseconds per image and MB above the loaded model, with default options

    @property
    def top1(self) -> list[float]:
        return list(self.by_seed.values())

    @property
    def mean(self) -> float:
        """Top-1 in percent."""
        return 100 * statistics.mean(self.top1)

    @property
    def accuracy(self) -> str:
        return percent(self.top1, 2)

    @property
    def size(self) -> str:
        return f"{self.params / 1e6:.2f} M"

    @property
    def work(self) -> str:
        return f"{self.macs / 1e6:.1f} M"


def percent(values: list[float], digits: int) -> str:
    """The mean of fractions in percent, and ± the standard deviation (n - 1) of several."""
    mean = f"{100 * statistics.mean(values):.{digits}f}"
    return f"{mean} ± {100 * statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a file, none where it is missing."""
    return list(csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines())) if path.is_file() else []


def write_csv(path: Path, rows: list[dict]) -> None:
    """Write mappings with the same keys."""
    write_rows(path, [[*rows[0]], *([*row.values()] for row in rows)], "\n")


@dataclass(frozen=True)
class Results:
    """The folder results/ of a repository, and the table of its runs on CIFAR-10."""

    root: Path
    grid: Path

    def json(self, name: str) -> Any:
        """The content of a file in results/, an empty mapping where it is missing."""
        path = self.root / "results" / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def csv(self, name: str) -> list[dict[str, str]]:
        return read_csv(self.root / "results" / name)

    def speeds(self, name: str, mode: str) -> dict[str, dict]:
        """Rows of a benchmark by their names."""
        return {row["name"]: row for row in self.json(f"benchmark/{name}.json").get("rows", []) if row["mode"] == mode}

    def machine(self, name: str = "cifar10", threads: int | None = None) -> str:
        """The processor of a benchmark; by default that of `Row.seconds`."""
        environment = self.json(f"benchmark/{name}.json").get("environment")
        return describe_processor(environment, threads) if environment else ""

    @cached_property
    def rows(self) -> list[Row]:
        """The rows of the grid that have runs, in its order; seconds where the images/s are known."""
        trained, inferred = self.speeds("cifar10", "train"), self.speeds("cifar10_infer", "infer")
        measured = {row["run"]: float(row["images_per_second"]) for row in self.csv("benchmark/training.csv")}
        rows: dict[tuple, Row] = {}
        for cell in read_grid(self.grid):
            config, folder = cell.load(), self.root / "results/cifar10/runs" / cell.name
            if not is_complete(folder, config):
                continue
            overrides = tuple(item for item in cell.overrides if not item.startswith("train.seed="))
            backbone, attention = config.model.name, config.model.attention
            row = rows.setdefault(
                (cell.config, overrides),
                Row(cell.name, cell.config, backbone, attention, overrides, config.train.epochs, config.optimizer.name),
            )
            summary = self.json(f"cifar10/runs/{cell.name}/summary.json")
            row.by_seed[config.train.seed] = summary["top1"]
            row.params, row.macs = summary["params"], summary["macs"]
            row.pflop = summary.get("train_pflop", 6e-15 * row.macs * row.epochs * TRAINING_IMAGES)
            if row.name == cell.name and unchanged(row, "train.epochs="):
                adamw = trained.get(f"{backbone} {attention}", {}) if row.optimizer == "adamw" else {}
                speed = measured.get(cell.name, adamw.get("images_per_second"))
                row.seconds = row.epochs * TRAINING_IMAGES / speed if speed else None
            released = inferred.get(f"{attention}_{backbone}_cifar10")
            if released and unchanged(row):
                row.inference = released["ms_per_image"], released["step_mb"]
        return list(rows.values())


def unchanged(row: Row, *but: str) -> bool:
    """Whether a run has the settings of its config, except for `SAME` and the keys in `but`."""
    return all(item.startswith((*SAME, *but)) for item in row.overrides)


def adamw(rows: list[Row]) -> list[Row]:
    """The attentions with their default options after 5 epochs."""
    return [row for row in rows if row.config in BACKBONES and unchanged(row)]


def muon(rows: list[Row], changed: bool = False) -> list[Row]:
    """The attentions after 15 epochs with Muon, with default options or also with changed ones."""
    own = [row for row in rows if row.config == MUON and row.epochs == 15]
    return own if changed else [row for row in own if unchanged(row)]


RECIPES: dict[str, Callable[[list[Row]], list[Row]]] = {"15 epochs, Muon": muon, "5 epochs, AdamW": adamw}


def local_terms(rows: list[Row]) -> dict[str, dict[tuple[bool, bool], Row]]:
    """The runs that switch convolutions off, by attention; the keys: with its local term, with position convolution."""
    found: dict[str, dict[tuple[bool, bool], Row]] = {}
    for row in muon(rows, changed=True):
        if row.backbone != "deit_nano" or not unchanged(row, *LOCAL_TERM, "model.cpe="):
            continue
        local = row.attention not in ("softmax", "linear")
        for item in row.overrides:
            if item.startswith(LOCAL_TERM):
                local = item.endswith("=true")
        found.setdefault(row.attention, {})[local, "model.cpe=false" not in row.overrides] = row
    return {name: cells for name, cells in found.items() if len(cells) > 1}


LONGER = ("model.patch_size=2", "model.img_size=64", "model.weights=", "augment.pad_crop=4", "optimizer.lr=", "train.e")


def by_tokens(rows: list[Row]) -> dict[str, dict[int, Row]]:
    """The runs of `deit_nano` with 64, 256 and 1,024 tokens, of the attentions that have more than the first."""
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row.config == MUON and row.backbone == "deit_nano" and unchanged(row, *LONGER):
            pixels = 4 if "model.img_size=64" in row.overrides else 1
            tokens = 256 * pixels if "model.patch_size=2" in row.overrides else 64
            if row.epochs == (3 if tokens == 1024 else 15):
                found.setdefault(row.attention, {})[tokens] = row
    return {name: own for name, own in found.items() if len(own) > 1}
