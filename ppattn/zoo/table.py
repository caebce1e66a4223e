"""The tables of the package, read without Paddle: models.yaml, costs.csv, released weights, attentions.yaml."""

import csv
import fnmatch
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ppattn.errors import UserError, unknown_name
from ppattn.files.tables import read_table

PACKAGE = Path(__file__).parent
TABLE = PACKAGE / "models.yaml"
RELEASED = PACKAGE / "released" / "models.yaml"  # written by scripts/release_weights.py
COSTS = PACKAGE / "costs.csv"
ATTENTIONS = PACKAGE.parent / "attention" / "attentions.yaml"


@dataclass(frozen=True)
class Entry:
    """One model of models.yaml, which explains the fields, or of released/models.yaml."""

    name: str
    backbone: str
    arguments: dict[str, Any]
    top1: float | None = None
    source: str = ""
    note: str = ""
    weights: dict[str, str] = field(default_factory=dict)
    variant: bool = False

    @property
    def family(self) -> str:
        return self.name.rpartition("_")[0]

    @property
    def published(self) -> bool:
        """Whether it is a model of the zoo; the others are backbones of this project's own."""
        return not self.variant or self.top1 is not None


@cache
def model_entries() -> dict[str, Entry]:
    """All backbones and models by name."""
    tree, released = read_table(TABLE), read_table(RELEASED)
    rows = {name: Entry(name, **row, variant=True) for name, row in tree["variants"].items()}
    return rows | {name: Entry(name, **row) for name, row in (tree["models"] | released).items()}


@cache
def aliases() -> dict[str, str]:
    """Regular expressions of other libraries' names, and what names them here."""
    return read_table(TABLE)["aliases"]


def known(name: object) -> str | None:
    """The name here of a model by any of its names: here, of timm, transformers or PaddleClas; None for another."""
    if isinstance(name, str) and name in model_entries():
        return name
    plain = _plain(name)
    found = (match.expand(ours) for theirs, ours in aliases().items() if (match := re.fullmatch(theirs, plain)))
    return next(found, plain if plain in model_entries() else None)


def _plain(name: object) -> str:
    """A name without owner and weights' tag (`timm/deit_tiny_patch16_224.fb_in1k`), in small letters."""
    owners, tags = "facebook|google|microsoft|timm|opengvlab|zetatech", r"(?:fb_|ms_)?in1k|lvd\d+m"
    return re.sub(rf"^(?:{owners})/|\.(?:{tags})$", "", str(name).lower()).replace("-", "_")


def add_model(name: str, backbone: str, **arguments: Any) -> None:
    """Make a registered backbone with other defaults, such as img_size, known by a new name, as models.yaml does."""
    if (old := model_entries().get(name)) and (old.published or old.weights):
        raise UserError(f"{name} is a model of this package: choose another name.")
    model_entries()[name] = Entry(name, backbone, arguments, variant=True)


@cache
def costs() -> dict[str, dict[str, int]]:
    """Parameters and MACs by name, as scripts/make_model_costs.py measured them."""
    with COSTS.open(newline="", encoding="utf-8") as file:
        return {row["name"]: {"params": int(row["params"]), "macs": int(row["macs"])} for row in csv.DictReader(file)}


def model_entry(name: str) -> Entry:
    """The entry of a backbone or model, by its name here or elsewhere; `UserError` with the nearest one for another."""
    if (ours := known(name)) is not None:
        return model_entries()[ours]
    if like := re.match(r"(?:vit|deit|swin)_(tiny|small|base)_patch(16|4_window7)_(224|384)", _plain(name)):
        ours = f"{'deit' if like[2] == '16' else 'swin'}_{like[1]}"
        raise UserError(f"{name} has the architecture of {ours} (img_size {like[3]}): its weights convert to that.")
    if name == "sequence":
        raise UserError("sequence is an example: write `imports: [examples.lra]` and run in the repository's root.")
    raise unknown_name("model", name, model_entries())


def list_models(pattern: str = "*", pretrained: bool = False) -> list[str]:
    """Models of the zoo whose name matches the shell pattern; `pretrained`: those with weights for `create_model`."""
    rows = [row for row in model_entries().values() if row.published and fnmatch.fnmatch(row.name, pattern)]
    return [row.name for row in rows if not pretrained or row.name in with_weights()]


def with_weights() -> list[str]:
    """Models with weights that are in the package or downloaded."""
    return [row.name for row in model_entries().values() if {"url", "file"} & row.weights.keys()]


def released() -> list[str]:
    """Models whose weights are files of the package."""
    return [row.name for row in model_entries().values() if "file" in row.weights]


def list_backbones(pattern: str = "*") -> list[str]:
    """Backbones whose name matches the shell pattern."""
    return [name for name, row in model_entries().items() if row.variant and fnmatch.fnmatch(name, pattern)]


class AttentionFacts(NamedTuple):
    """A row of attention/attentions.yaml, which explains the fields."""

    title: str
    venue: str
    arxiv: str
    cost: str
    colour: str


@cache
def attentions() -> dict[str, AttentionFacts]:
    """What is known of every attention of the package, in the order of the tables."""
    return {name: AttentionFacts(**row) for name, row in read_table(ATTENTIONS).items()}


def main_attention(names: Any) -> str:
    """The attention by which a model is known: the first that is not softmax, of a name or lists of names."""
    flat = [names] if isinstance(names, str) else [main_attention(one) for one in names]
    return next((name for name in flat if name != "softmax"), "softmax")


def model_attention(name: str, given: dict) -> str:
    """The attention by which a model with these arguments is known, see `main_attention`."""
    row = model_entries().get(name)
    return main_attention(given.get("attention") or (row and row.arguments.get("attention")) or "softmax")
