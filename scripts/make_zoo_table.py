"""Write ppattn/zoo.csv: parameters and traced MACs of every zoo entry and backbone, beside the published accuracy.

python scripts/make_zoo_table.py            # all entries, a few minutes
python scripts/make_zoo_table.py deit_tiny  # the named ones; the other rows stay
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ppattn
from ppattn import cost, zoo

COLUMNS = ("name", "family", "img_size", "params", "macs", "top1", "source", "note")
LAVIT = "heedless-backbones, LaViT.yml (a transcription of the paper's table)"
AGENT = "Agent-Attention README"
PUBLISHED = {
    "deit": ("DeiT README", {"tiny": 72.2, "small": 79.9, "base": 81.8}),
    "inline_deit": ("InLine README", {"tiny": 74.5, "small": 80.2, "base": 82.3}),
    "pvt": ("PVT README", {"tiny": 75.1, "small": 79.8, "medium": 81.2, "large": 81.7}),
    "pvt_v2": ("PVT README", {"b0": 70.5, "b1": 78.7, "b2": 82.0, "b3": 83.1, "b4": 83.6, "b5": 83.8}),
    "inline_pvt": ("InLine README", {"tiny": 78.2, "small": 82.0, "medium": 83.2, "large": 83.6}),
    "pola_pvt": ("PolaFormer README", {"tiny": 78.8, "small": 81.9}),
    "swin": ("Swin README", {"tiny": 81.2, "small": 83.2, "base": 83.5}),
    "inline_swin": ("InLine README", {"tiny": 82.4, "small": 83.6, "base": 84.1}),
    "pola_swin": ("PolaFormer README", {"tiny": 82.6, "small": 83.6, "base": 83.8}),
    "soft": ("SOFT README", {"tiny": 79.3, "small": 82.2, "medium": 82.9, "large": 83.1, "huge": 83.3}),
    "soft_norm": ("SOFT README", {"tiny": 79.4, "small": 82.4, "medium": 83.1, "large": 83.3, "huge": 83.4}),
    "flatten_pvt": ("FLatten README", {"tiny": 77.8}),
    "flatten_swin": ("FLatten README", {"tiny": 82.1, "small": 83.5, "base": 83.8}),
    "agent_deit": (AGENT, {"tiny": 74.9, "small": 80.5, "base": 82.0}),
    "agent_pvt": (AGENT, {"tiny": 78.4, "small": 82.2, "medium": 83.4, "large": 83.7}),
    "agent_swin": (AGENT, {"tiny": 82.6, "small": 83.7, "base": 84.0}),
    "lavit": (LAVIT, {"tiny": 79.2, "small": 82.6, "base": 83.1}),
}


def row(name: str) -> dict:
    """All columns of one entry."""
    model = ppattn.create_model(name)
    family, _, size = name.rpartition("_")
    source, accuracies = PUBLISHED.get(family, ("", {}))
    top1 = accuracies.get(size, "")
    vanilla = [sum(getattr(b.attn, "vanilla", False) for b in s.blocks) for s in getattr(model, "stages", [])]
    depths = [len(s.blocks) for s in getattr(model, "stages", [])]
    note = ""
    if family == "lavit":
        split = ", ".join(f"{depth - va} of {depth}" for va, depth in zip(vanilla, depths, strict=True))
        note = f"less-attention layers per stage: {split}; the others stay vanilla (max_tokens 256)"
    elif family in ("pola_pvt", "flatten_pvt") and not top1:
        note = "configuration published without an accuracy"
    elif name in ("soft_small", "soft_norm_small"):
        note = "depths 1, 3, 7, 4 as published; the official code has 1, 3, 20, 4"
    elif size == "nano":
        note = "this project's own, for 32-pixel images"
    return {
        "name": name,
        "family": family,
        "img_size": "x".join(map(str, dict.fromkeys(model.img_size))),
        "params": cost.params(model),
        "macs": cost.macs(model),
        "top1": top1,
        "source": source if top1 else "",
        "note": note,
    }


def main() -> None:
    ppattn.setup(device="cpu")
    names = list(dict.fromkeys([*zoo.MODELS, *zoo.BACKBONES]))
    rows = {r["name"]: r for r in (zoo.table() if sys.argv[1:] else [])}
    for name in sys.argv[1:] or names:
        rows[name] = row(name)
        print(name, rows[name]["params"], rows[name]["macs"], flush=True)
    with zoo.TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[name] for name in names if name in rows)


if __name__ == "__main__":
    main()
