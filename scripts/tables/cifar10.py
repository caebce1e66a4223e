"""The tables of results/cifar10/README.md, and that of the attentions in README.md."""

from __future__ import annotations

import statistics
from collections import Counter
from pathlib import Path

import yaml

from ppattn import zoo
from ppattn.runtime.cpu import processor
from scripts.tables.compare import Comparison, compare, mean_and_error, pooled_deviation
from scripts.tables.markdown import table
from scripts.tables.runs import (
    BACKBONES,
    RECIPES,
    SAME,
    Row,
    adamw,
    by_tokens,
    local_terms,
    muon,
    nano_times,
    read_csv,
    read_json,
    unchanged,
)
from scripts.tables.speed import against_softmax

NAMED_RUNS = (
    "first_recipe_inline_deit_nano",
    "inline_deit_nano_15_epochs",
    "half_hour_inline_deit_nano",
    "half_hour_polaformer_deit_nano",
    "half_hour_softmax_deit_nano",
    "long_inline_deit_nano",
    "long_inline_deit_nano_w128",
    "long_inline_deit_nano_w128_small20",
    "long_inline_deit_nano_w128_cutmix",
    "notebook_32px",
)
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon", "adam": "Adam"}
LOCAL_KEYS = {
    "both": (True, True),
    "local term only": (True, False),
    "position convolution only": (False, True),
    "neither": (False, False),
}
LOCAL_GAINS = {  # with, without
    "local term, beside `cpe`": ((True, True), (False, True)),
    "local term alone": ((True, False), (False, False)),
    "`cpe`, beside the local term": ((True, True), (True, False)),
    "`cpe` alone": ((False, True), (False, False)),
    "both": ((True, True), (False, False)),
}


def millions(count: int, digits: int) -> str:
    return f"{count / 1e6:.{digits}f} M"


def attentions(rows: list[Row], root: Path) -> str:
    """Every attention: paper, cost in the number of tokens, training speed on DeiT-T and accuracy on `deit_nano`."""
    accuracy = {row.attention: row.accuracy for row in muon(rows) if row.backbone == "deit_nano"}
    speeds = {f"{tokens:,} tokens": against_softmax(root, "train", tokens) for tokens in (196, 3136)}
    body = []
    for name in zoo.attentions():
        title, venue, number, cost, _ = zoo.attentions()[name]
        paper = f"[{title}](https://arxiv.org/abs/{number}), {venue}"
        measured = [*(speed.get(name, "") for speed in speeds.values()), accuracy.get(name, "")]
        body.append([f"`{name}`", paper, cost, *measured])
    return table(["attention", "paper", "cost in N", *(f"training speed, {size}" for size in speeds), "top-1 %"], body)


def by_attention(rows: list[Row]) -> dict[str, list[Row | None]]:
    """The rows of every attention on each of `BACKBONES`."""
    found = {(row.attention, row.backbone): row for row in rows}
    return {name: [found.get((name, backbone)) for backbone in BACKBONES] for name, _ in found}


TOP1 = [f"{title}, top-1 %" for title in BACKBONES.values()]


def adamw_table(rows: list[Row]) -> str:
    """A row per attention, a column per backbone, and what it costs on DeiT."""
    body = []
    for name, own in by_attention(adamw(rows)).items():
        costs = ["", "", ""]
        if deit := own[0]:
            seconds = f"{deit.seconds:,.0f}" if deit.seconds else ""
            costs = [millions(deit.params, 2), millions(deit.macs, 1), seconds]
        body.append([f"`{name}`", *(row.accuracy if row else "" for row in own), *costs])
    costs = ["parameters (DeiT)", "MACs (DeiT)", "training seconds, estimated (DeiT)"]
    return table(["attention", *TOP1, *costs], body)


def muon_table(rows: list[Row]) -> str:
    """A row per attention, a column per backbone, and the arithmetic on DeiT."""
    body = []
    for name, own in by_attention(muon(rows)).items():
        costs = [millions(own[0].params, 2), f"{own[0].pflop:.3f}"] if own[0] else ["", ""]
        seeds = max(len(row.by_seed) for row in own if row)
        body.append([f"`{name}`", *(row.accuracy if row else "" for row in own), str(seeds), *costs])
    return table(["attention", *TOP1, "seeds", "parameters (DeiT)", "PFLOP (DeiT)"], body)


def comparison_table(rows: list[Row]) -> str:
    """Differences of every attention to softmax on its backbone, with what the seeds or the test images leave open."""
    body = []
    for recipe, chosen in RECIPES.items():
        own = chosen(rows)
        softmax = {row.backbone: row for row in own if row.attention == "softmax"}
        deviation = pooled_deviation([row.top1 for row in own])
        for row in own:
            other = softmax.get(row.backbone)
            if not other or row is other:
                continue
            found = compare(row.by_seed, other.by_seed, deviation)
            low, high = found.ends
            seeds = f"{found.paired} pairs" if found.paired else f"{len(row.top1)} and {len(other.top1)}"
            points = [f"{100 * found.difference:+.2f}", f"{100 * low:+.2f} to {100 * high:+.2f}"]
            p = f"{found.p:.3f}" if found.p is not None else ""
            body.append([recipe, f"`{row.attention}` on {BACKBONES[row.backbone]}", seeds, *points, p, found.verdict])
    return table(["recipe", "attention", "seeds", "points to softmax", "95 % interval", "sign-flip p", "verdict"], body)


def plain_deit_table(rows: list[Row]) -> str:
    """The longer recipe for a DeiT without convolutions and with a class token, the model of the analyses."""
    own = [row for row in muon(rows, changed=True) if "model.class_token=true" in row.overrides]
    body = [[f"`{row.attention}`", row.accuracy, millions(row.params, 2), f"{row.pflop:.3f}"] for row in own]
    return table(["attention", "top-1 %", "parameters", "PFLOP"], body)


def tenth_table(rows: list[Row]) -> str:
    """Top-1 on the training images that were left out, with a tenth of them to train on."""
    own = [row for row in rows if "data.holdout=45000" in row.overrides]
    body = [[f"`{row.attention}`", row.accuracy, str(row.epochs), f"{row.pflop:.3f}"] for row in own]
    return table(["attention", "top-1 %", "epochs", "PFLOP"], body)


TOKENS = (64, 256, 1024)


def tokens_axis_table(rows: list[Row]) -> str:
    """Accuracy of `deit_nano` with 64, 256 and 1,024 tokens."""
    found, body = by_tokens(rows), []
    deviation = pooled_deviation([row.top1 for own in found.values() for row in own.values()])
    for name, own in found.items():
        ends = {n: mean_and_error(row.top1, deviation) for n, row in own.items()}
        cells = [f"{100 * ends[n][0]:.2f} ± {196 * ends[n][1]:.2f}" if n in ends else "" for n in TOKENS]
        pairs = [(own, 256, own, 64), *((own, n, found.get("softmax", {}), n) for n in TOKENS[1:] if name != "softmax")]
        for one, n, other, m in pairs:
            both = n in one and m in other
            cells.append(in_points(compare(one[n].by_seed, other[m].by_seed, deviation)) if both else "")
        cells += [""] * (6 - len(cells))
        body.append([f"`{name}`", *cells, *(f"{own[n].pflop:.2f}" if n in own else "" for n in TOKENS)])
    against = ["256 − 64", "256, − `softmax`", "1,024, − `softmax`"]
    sizes = [f"{n:,}" for n in TOKENS]
    return table(["attention", *(f"top-1 %, {n}" for n in sizes), *against, *(f"PFLOP, {n}" for n in sizes)], body)


def tokens_time_table(root: Path) -> str:
    """Training speed against softmax, and milliseconds in inference, of `deit_nano` with 64, 256 and 1,024 tokens."""
    train, infer = nano_times(root, "train"), nano_times(root, "infer")
    body = []
    for name in dict.fromkeys(name for name, _, _ in infer):
        cells = [train.get((name, 32, n), {}).get("against_softmax", "") for n in TOKENS]
        cells += [infer.get((name, batch, n), {}).get("ms_per_image", "") for batch in (1, 32) for n in TOKENS]
        body.append([f"`{name}`", *(f"{float(value):.2f}" if value else "" for value in cells)])
    heads = ("training speed", "ms, batch 1", "ms, batch 32")
    return table(["attention", *(f"{head}, {n:,} tokens" for head in heads for n in TOKENS)], body)


def front(points: dict[str, tuple[float, float]]) -> list[str]:
    """Names of the points (cost, accuracy) that no other one beats in both, the cheapest first."""
    kept: list[str] = []
    for name in sorted(points, key=lambda name: (points[name][0], -points[name][1])):
        if not kept or points[name][1] > points[kept[-1]][1]:
            kept.append(name)
    return kept


def fronts(rows: list[Row]) -> dict[str, dict[str, tuple[float, float]]]:
    """Accuracy in percent against what inference costs, on DeiT after 15 epochs."""
    own = [row for row in muon(rows) if row.backbone == "deit_nano" and row.inference]
    costs = ("milliseconds per image", "MB for a batch of 128")
    return {
        cost: {row.attention: (row.inference[number], row.mean) for row in own} for number, cost in enumerate(costs)
    }


def fronts_table(rows: list[Row]) -> str:
    """What inference costs, and which attentions no other one beats in both cost and accuracy."""
    (times, memory), body = fronts(rows).values(), []
    fastest, smallest = front(times), front(memory)
    for name, (milliseconds, top1) in sorted(times.items(), key=lambda item: item[1]):
        on = ["yes" if name in names else "" for names in (fastest, smallest)]
        body.append([f"`{name}`", f"{top1:.2f}", f"{milliseconds:.2f}", on[0], f"{memory[name][0]:.0f}", on[1]])
    return table(["attention", "top-1 %", "ms per image", "on the front", "MB", "on the front"], body)


def local_table(rows: list[Row]) -> str:
    """Top-1 with and without the local term of the attention and the position convolution of the backbone."""
    body = [
        [f"`{name}`", *(cells[key].accuracy if key in cells else "" for key in LOCAL_KEYS.values())]
        for name, cells in local_terms(rows).items()
    ]
    return table(["attention", *LOCAL_KEYS], body)


def local_gains_table(rows: list[Row]) -> str:
    """What either convolution adds, with and without the other, and what the attention adds without both."""
    found, neither, body = local_terms(rows), LOCAL_KEYS["neither"], []
    deviation = pooled_deviation([row.top1 for cells in found.values() for row in cells.values()])
    softmax = found.get("softmax", {}).get(neither)
    for name, cells in found.items():
        pairs = [(cells.get(having), cells.get(lacking)) for having, lacking in LOCAL_GAINS.values()]
        pairs.append((cells.get(neither), softmax if name != "softmax" else None))
        gains = [compare(row.by_seed, other.by_seed, deviation) if row and other else None for row, other in pairs]
        body.append([f"`{name}`", *(in_points(gain) if gain else "" for gain in gains)])
    return table(["attention", *LOCAL_GAINS, "neither, against `softmax`"], body)


def in_points(gain: Comparison) -> str:
    """A difference in points with its interval."""
    low, high = gain.ends
    return f"{100 * gain.difference:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def ablation_table(rows: list[Row]) -> str:
    """Every ablation of the shorter recipe below the attention that it changes."""
    body = []
    for base in adamw(rows):
        key = (base.config, base.attention, base.epochs)
        changed = [row for row in rows if (row.config, row.attention, row.epochs) == key and not unchanged(row)]
        for row in [base, *changed] if changed else []:
            items = [item for item in row.overrides if not item.startswith(SAME)]
            what = ", ".join(f"`{item.removeprefix('model.attention_options.')}`" for item in items)
            cost = [millions(row.params, 2), millions(row.macs, 1), str(row.epochs)]
            name = f"`{row.attention}` on {BACKBONES[row.backbone]}"
            body.append([name, what or "default options", row.accuracy, *cost])
    return table(["attention", "change", "top-1 %", "parameters", "MACs", "epochs"], body)


def runs_table(rows: list[Row], root: Path) -> str:
    """The runs of `NAMED_RUNS`, with the time that they took and that they would take undisturbed."""
    body, estimated = [], {row.name: row.seconds for row in rows}
    for name in NAMED_RUNS:
        folder = root / "results/cifar10/runs" / name
        if not folder.is_dir():
            continue
        summary, facts = read_json(folder / "summary.json"), read_json(folder / "env.json")
        config = yaml.safe_load((folder / "config.yaml").read_text())
        run = f"[{name}](runs/{name}), seed {config['train']['seed']}, commit {facts['git_commit'][:7]}"
        machine = processor(facts, config["train"]["threads"])
        seconds = estimated.get(name)
        minutes = [f"{summary['seconds'] / 60:.0f}", f"{seconds / 60:.0f}" if seconds else ""]
        optimizer, epochs = OPTIMIZERS[config["optimizer"]["name"]], str(summary["epochs"])
        body.append([run, machine, optimizer, epochs, *minutes, f"{100 * summary['top1']:.2f}"])
    head = ["run", "hardware", "optimizer", "epochs", "minutes, wall time", "minutes, estimated", "top-1 %"]
    return table(head, body)


def corruptions_table(path: Path) -> str:
    """Top-1 of the released models at the three strengths of each corruption, and the mean of all."""
    rows = read_csv(path)
    counts = Counter(row["model"] for row in rows)
    rows = [row for row in rows if counts[row["model"]] == max(counts.values())]  # others are still being measured
    found: dict[str, dict[str, list[float]]] = {}
    for row in sorted(rows, key=lambda row: (row["model"], row["strength"])):
        cells = found.setdefault(row["model"], {})
        cells.setdefault(row["corruption"], []).append(100 * float(row["top1"]))
    names = list(dict.fromkeys(name for cells in found.values() for name in cells))
    body = [
        [
            f"`{model.removesuffix('_deit_nano_cifar10')}`",
            *(" / ".join(f"{top1:.1f}" for top1 in cells[name]) for name in names),
            f"{statistics.mean(top1 for strengths in cells.values() for top1 in strengths):.1f}",
        ]
        for model, cells in found.items()
    ]
    return table(["model", *names, "mean"], body)
