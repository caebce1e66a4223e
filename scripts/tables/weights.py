"""Tables of trained weights and of exported models."""

import math
from pathlib import Path

from ppattn import zoo
from scripts.tables.markdown import table
from scripts.tables.runs import percent, read_csv


def released_table() -> str:
    """The weights inside the package."""
    body = []
    for entry in map(zoo.entry, zoo.released()):
        card = f"[card](../../ppattn/zoo/{Path(entry.weights['file']).with_suffix('.md')})"
        body.append([f"`{entry.name}`", f"{zoo.costs()[entry.name]['params'] / 1e6:.2f} M", entry.note, card])
    return table(["model", "parameters", "accuracy", ""], body)


def finetune_table(root: Path) -> str:
    """Accuracy by start and number of images, over the seeds."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in read_csv(root / "results/weights/finetune.csv"):
        found.setdefault((row["images_per_class"], row["start"]), []).append(float(row["top1"]))
    body = [[count, start, percent(top1, 1)] for (count, start), top1 in found.items()]
    return table(["images per class", "start", "top-1 %"], body)


def clients_table(root: Path) -> str:
    """Largest difference of exported models to the model, over the backbones and batches."""
    found: dict[str, dict[str, float]] = {}
    for row in read_csv(root / "results/clients.csv"):
        parts = [math.inf if row["problem"] else float(row[key]) for key in row if key.startswith("batch_")]
        cells = found.setdefault(row["attention"], {})
        cells[row["client"]] = max(cells.get(row["client"], 0.0), *parts)
    body = [
        [f"`{name}`", *("fails" if math.isinf(part) else f"{part:.0e}" for part in cells.values())]
        for name, cells in found.items()
    ]
    return table(["attention", "Paddle Inference", "ONNX Runtime", "OpenVINO"], body)
