"""Tables of trained weights, of exported models and of results/linearize (scripts/studies/linearize_study.py)."""

import math
import statistics
from pathlib import Path

from ppattn import zoo
from scripts.tables.markdown import table
from scripts.tables.runs import Results, percent


def released_table(results: Results) -> str:
    """The weights inside the package."""
    body = []
    for entry in map(zoo.model_entry, zoo.table.released()):
        card = f"[card](../../ppattn/zoo/{Path(entry.weights['file']).with_suffix('.md')})"
        body.append([f"`{entry.name}`", f"{zoo.costs()[entry.name]['params'] / 1e6:.2f} M", entry.note, card])
    return table(["model", "parameters", "accuracy", ""], body)


def finetune_table(results: Results) -> str:
    """Accuracy by start and number of images, over the seeds."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in results.csv("weights/finetune.csv"):
        found.setdefault((row["images_per_class"], row["start"]), []).append(float(row["top1"]))
    body = [[count, start, percent(top1, 1)] for (count, start), top1 in found.items()]
    return table(["images per class", "start", "top-1 %"], body)


def clients_table(results: Results) -> str:
    """Largest difference of exported models to the model, over the backbones and batches."""
    found: dict[str, dict[str, float]] = {}
    for row in results.csv("clients.csv"):
        parts = [math.inf if row["problem"] else float(row[key]) for key in row if key.startswith("batch_")]
        cells = found.setdefault(row["attention"], {})
        cells[row["client"]] = max(cells.get(row["client"], 0.0), *parts)
    body = [
        [f"`{name}`", *("fails" if math.isinf(part) else f"{part:.0e}" for part in cells.values())]
        for name, cells in found.items()
    ]
    return table(["attention", "Paddle Inference", "ONNX Runtime", "OpenVINO"], body)


KINDS = {  # of the study, in the order of the table
    "": "aligned, trained with AdamW",
    "long": "aligned, trained with Muon",
    "half": "aligned, trained with AdamW",
    "256long": "aligned, trained with Muon",
    "256free": "aligned, trained with Muon, without labels and head",
    "256half": "aligned, trained with Muon",
    "256": "aligned, trained with AdamW",
    "outputs": "copied; labels and attention outputs",
    "logits": "copied; labels and logits",
    "copied": "copied; labels",
    "mlp": "attentions not copied; labels",
    "scratch": "from scratch with Muon",
}


def kind_and_attention(name: str) -> tuple[str, str]:
    """Of a run without its seed: `inline`, `inline_half` or `copied_inline`."""
    first, _, last = name.partition("_")
    return (first, last) if first in KINDS else (last, first)


def read_linearized(results: Results) -> dict[tuple[str, str], list[dict]]:
    """The runs by kind and attention, those of several seeds together."""
    found: dict[tuple[str, str], list[dict]] = {}
    for name, run in results.json("linearize/runs.json").items():
        found.setdefault(kind_and_attention(name.rpartition("_")[0]), []).append(run)
    return dict(sorted(found.items(), key=lambda item: list(KINDS).index(item[0][0])))


def linearized_table(results: Results, tokens: str = "64") -> str:
    """Accuracy on the test images by what was linearised, and how; with 256 tokens features and speed as well."""
    every, body = read_linearized(results), []
    found = {key: runs for key, runs in every.items() if key[0].startswith("256") == (tokens == "256")}
    fair = [run["measured"] for run, *_ in found.values() if run.get("teacher_saw_held_out_images") is False]
    for (kind, to), runs in found.items():
        blocks = len(runs[0].get("chosen", range(6)))
        steps = " + ".join(str(runs[0]["steps"][part]) for part in ("align", "train") if part in runs[0]["steps"])
        before = [
            f"{100 * statistics.mean(run[part] for run in runs):.2f}" if part in runs[0] and blocks == 6 else ""
            for part in ("copied_test_top1", "aligned_test_top1")
        ]
        top1 = percent([run["test_top1"] for run in runs], 2)
        change = f"{100 * statistics.mean(run['test_top1'] - run['teacher_test_top1'] for run in runs):+.2f}"
        row = [f"`{to}`", KINDS[kind], str(blocks), steps, str(len(runs)), *before, top1, change, ""]
        if not runs[0].get("teacher_saw_held_out_images"):
            lost = statistics.mean(run["held_out_top1"] for run in runs) - fair[0]["teacher, every image"]
            row[-1] = f"{100 * lost:+.2f}"
        if tokens == "256":
            pairs = [[row["images_per_second"] for row in run["cost"]] for run in runs]  # run and teacher at four sizes
            speeds = [f"{statistics.mean(one[i] / one[i + 1] for one in pairs):.2f}" for i in (0, 4, 6)]
            row += [f"{statistics.mean(run['test_cosine'] for run in runs):.3f}", *speeds]
        body.append(row)
    head = ["attention", "how", "blocks", "steps", "seeds", "copied %", "aligned %", "top-1 %", "− teacher", "held-out"]
    more = ["cosine", "speed, 256 tokens", "speed, 1,024 tokens", "speed, 4,096 tokens"] if tokens == "256" else []
    return table(head + more, body)


def linearized_blocks_table(results: Results) -> str:
    """Per block: error of the aligned attention, and change of accuracy with this block alone replaced."""
    body, count = [], 0
    for (kind, to), (run, *_) in read_linearized(results).items():
        if kind == "" and "errors" in (measured := run.get("measured", {})):
            count = len(measured["errors"])
            body.append([f"`{to}`", "error", *(f"{error:.3f}" for error in measured["errors"])])
            changes = [f"{100 * (measured[f'alone {i}'] - measured['teacher']):+.1f}" for i in range(count)]
            body.append(["", "change of top-1, points", *changes])
    return table(["attention", "", *(f"block {i + 1}" for i in range(count))], body)


def linearized_seconds_table(results: Results) -> str:
    """Seconds per step of each kind of training, measured in turn on a quiet machine."""
    rows = results.json("linearize/speed.json").get("seconds_per_step", {})
    kinds = ("scratch", "align", "train")
    body = [[f"`{to}`", *(f"{row[kind]:.3f}" if kind in row else "" for kind in kinds)] for to, row in rows.items()]
    return table(["attention", "from scratch", "alignment", "training with the teacher"], body)


def dinov3_table(results: Results) -> str:
    """Inference of DINOv3 with one attention or two, by the side of the image."""
    rows = {(*r["name"].rsplit("_", 1), r["img_size"].split("x")[0]): r for r in results.csv("linearize/dinov3.csv")}
    models, names, sides = (list(dict.fromkeys(key[i] for key in rows)) for i in range(3))
    body = []
    for model in models:
        cells = [f"{float(rows[model, 'softmax', side]['ms_per_image']):,.0f}" for side in sides]
        cells += [f"{float(rows[model, n, side]['against_first']):.2f}" for n in names[1:] for side in sides]
        body.append([f"`{model}`", *cells])
    heads = [f"`softmax`, ms at {sides[0]}", *sides[1:]]
    heads += [head for n in names[1:] for head in (f"`{n}`, speed at {sides[0]}", *sides[1:])]
    return table(["model", *heads], body)
