"""Tables of the sequence backbone and of Long Range Arena."""

import math
from pathlib import Path

from scripts.tables.markdown import table
from scripts.tables.runs import read_csv, read_json


def lra_table(root: Path) -> str:
    """Accuracy on the short tasks of Long Range Arena, every seed by itself, and the seconds of the runs."""
    runs: dict[str, dict[str, list[str]]] = {}
    for row in read_csv(root / "results/lra/runs.csv"):
        cells = runs.setdefault(row["attention"], {})
        cells.setdefault(row["config"], []).append(f"{100 * float(row['top1']):.2f}")
        cells.setdefault(f"{row['config']} seconds", []).append(row["seconds"])
    columns = [f"{task}{what}" for task in ("listops_short", "image_short") for what in ("", " seconds")]
    body = [[f"`{name}`", *(", ".join(cells.get(key, [])) for key in columns)] for name, cells in runs.items()]
    return table(["attention", "ListOps, top-1 %", "seconds", "Image, top-1 %", "seconds"], body)


Lengths = dict[str, dict[int, float]]


def read_lengths(root: Path, mode: str) -> tuple[Lengths, Lengths]:
    """Milliseconds of a step of the sequence backbone in its fastest round, and MB, by attention and tokens."""
    times: Lengths = {}
    memory: Lengths = {}
    for row in read_json(root / f"results/benchmark/sequence_{mode}/benchmark.json").get("rows", []):
        name = row["name"].split()[1]
        times.setdefault(name, {})[row["tokens"]] = 1000 / row["fastest_round"]
        memory.setdefault(name, {})[row["tokens"]] = row["peak_mb"]
    return times, memory


def lengths_table(root: Path, mode: str) -> str:
    """Milliseconds of a step of the sequence backbone, how they grow, and memory of training."""
    times, memory = read_lengths(root, mode)
    low, middle, high = 512, 2048, 16384
    body = []
    for name, own in times.items():
        exponent = math.log(own[high] / own[middle], high / middle)
        faster = next((f"{tokens:,}" for tokens in sorted(own) if own[tokens] < times["softmax"][tokens]), "none")
        cells = [*(f"{own[n]:.0f}" for n in (low, middle, high)), f"{exponent:.2f}"]
        peaks = [f"{memory[name][tokens]:.0f}" for tokens in (low, high)] if mode == "train" else []
        body.append([f"`{name}`", *cells, faster if name != "softmax" else None, *peaks])
    head = ["attention", *(f"{tokens:,} tokens, ms" for tokens in (low, middle, high)), "exponent"]
    head += ["faster than softmax from", *(["MB, 512 tokens", "MB, 16,384 tokens"] if mode == "train" else [])]
    return table(head, body)
