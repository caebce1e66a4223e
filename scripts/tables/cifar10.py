"""The tables of results/cifar10/README.md, and that of the attentions in README.md."""

import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import yaml

from ppattn import zoo
from ppattn.runtime.cpu import processor
from scripts.tables.compare import compare, mean_and_error, pooled_deviation
from scripts.tables.markdown import number, table
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


def attentions(rows: list[Row], root: Path) -> str:
    """Every attention: paper, cost in the number of tokens, training speed on DeiT-T and accuracy on `deit_nano`."""
    accuracy = {row.attention: row.accuracy for row in muon(rows) if row.backbone == "deit_nano"}
    speeds = {f"training speed, {n:,} tokens": against_softmax(root, "train", n) for n in (196, 3136)}
    body = []
    for name, (title, venue, arxiv, cost, _) in zoo.attentions().items():
        paper = f"[{title}](https://arxiv.org/abs/{arxiv}), {venue}"
        body.append([f"`{name}`", paper, cost, *(speed.get(name) for speed in speeds.values()), accuracy.get(name)])
    return table(["attention", "paper", "cost in N", *speeds, "top-1 %"], body)


def by_attention(rows: list[Row]) -> Iterator[tuple[str, list[str | None], Row | None]]:
    """Name of every attention, its accuracies on `BACKBONES`, and its row on DeiT."""
    found = {(row.attention, row.backbone): row for row in rows}
    for name in dict.fromkeys(name for name, _ in found):
        own = [found.get((name, backbone)) for backbone in BACKBONES]
        yield f"`{name}`", [row.accuracy if row else None for row in own], own[0]


TOP1 = [f"{title}, top-1 %" for title in BACKBONES.values()]


def adamw_table(rows: list[Row]) -> str:
    """A row per attention, a column per backbone, and what it costs on DeiT."""
    body = [
        [name, *top1, *([deit.size, deit.work, number(deit.seconds, ",.0f")] if deit else [None] * 3)]
        for name, top1, deit in by_attention(adamw(rows))
    ]
    costs = ["parameters (DeiT)", "MACs (DeiT)", "training seconds, estimated (DeiT)"]
    return table(["attention", *TOP1, *costs], body)


def muon_table(rows: list[Row]) -> str:
    """A row per attention, a column per backbone, and the arithmetic on DeiT."""
    chosen = muon(rows)
    body = []
    for name, top1, deit in by_attention(chosen):
        seeds = max(len(row.by_seed) for row in chosen if f"`{row.attention}`" == name)
        body.append([name, *top1, seeds, *([deit.size, f"{deit.pflop:.3f}"] if deit else [None] * 2)])
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
            what = f"`{row.attention}` on {BACKBONES[row.backbone]}"
            body.append([recipe, what, seeds, *points, number(found.p, ".3f"), found.verdict])
    return table(["recipe", "attention", "seeds", "points to softmax", "95 % interval", "sign-flip p", "verdict"], body)


def plain_deit_table(rows: list[Row]) -> str:
    """The longer recipe for a DeiT without convolutions and with a class token, the model of the analyses."""
    own = [row for row in muon(rows, changed=True) if "model.class_token=true" in row.overrides]
    body = [[f"`{row.attention}`", row.accuracy, row.size, f"{row.pflop:.3f}"] for row in own]
    return table(["attention", "top-1 %", "parameters", "PFLOP"], body)


def tenth_table(rows: list[Row]) -> str:
    """Top-1 on the training images that were left out, with a tenth of them to train on."""
    own = [row for row in rows if "data.holdout=45000" in row.overrides]
    body = [[f"`{row.attention}`", row.accuracy, row.epochs, f"{row.pflop:.3f}"] for row in own]
    return table(["attention", "top-1 %", "epochs", "PFLOP"], body)


TOKENS = (64, 256, 1024)


def tokens_axis_table(rows: list[Row]) -> str:
    """Accuracy of `deit_nano` with 64, 256 and 1,024 tokens."""
    found, body = by_tokens(rows), []
    deviation = pooled_deviation([row.top1 for own in found.values() for row in own.values()])
    for name, own in found.items():
        ends = {n: mean_and_error(row.top1, deviation) for n, row in own.items()}
        cells: list[str | None] = [
            f"{100 * ends[n][0]:.2f} ± {196 * ends[n][1]:.2f}" if n in ends else None for n in TOKENS
        ]
        softmax = found.get("softmax", {}) if name != "softmax" else {}
        pairs = [(own.get(256), own.get(64)), *((own.get(n), softmax.get(n)) for n in TOKENS[1:])]
        cells += [in_points(one, other, deviation) for one, other in pairs]
        body.append([f"`{name}`", *cells, *(f"{own[n].pflop:.2f}" if n in own else None for n in TOKENS)])
    against = ["256 − 64", "256, − `softmax`", "1,024, − `softmax`"]
    sizes = [f"{n:,}" for n in TOKENS]
    return table(["attention", *(f"top-1 %, {n}" for n in sizes), *against, *(f"PFLOP, {n}" for n in sizes)], body)


def tokens_time_table(root: Path) -> str:
    """Training speed against softmax, and milliseconds in inference, of `deit_nano` with 64, 256 and 1,024 tokens."""
    train, infer = nano_times(root, "train"), nano_times(root, "infer")
    body = []
    for name in dict.fromkeys(name for name, _, _ in infer):
        cells = [train.get((name, 32, n), {}).get("against_softmax") for n in TOKENS]
        cells += [infer.get((name, batch, n), {}).get("ms_per_image") for batch in (1, 32) for n in TOKENS]
        body.append([f"`{name}`", *(number(value, ".2f") for value in cells)])
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
        on = ["yes" if name in names else None for names in (fastest, smallest)]
        body.append([f"`{name}`", f"{top1:.2f}", f"{milliseconds:.2f}", on[0], f"{memory[name][0]:.0f}", on[1]])
    return table(["attention", "top-1 %", "ms per image", "on the front", "MB", "on the front"], body)


def local_table(rows: list[Row]) -> str:
    """Top-1 with and without the local term of the attention and the position convolution of the backbone."""
    body = [
        [f"`{name}`", *(cells[key].accuracy if key in cells else None for key in LOCAL_KEYS.values())]
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
        body.append([f"`{name}`", *(in_points(one, other, deviation) for one, other in pairs)])
    return table(["attention", *LOCAL_GAINS, "neither, against `softmax`"], body)


def in_points(one: Row | None, other: Row | None, deviation: float) -> str | None:
    """The difference of two rows in points with its interval, if both are there."""
    if not one or not other:
        return None
    gain = compare(one.by_seed, other.by_seed, deviation)
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
            name = f"`{row.attention}` on {BACKBONES[row.backbone]}"
            body.append([name, what or "default options", row.accuracy, row.size, row.work, row.epochs])
    return table(["attention", "change", "top-1 %", "parameters", "MACs", "epochs"], body)


def runs_table(rows: list[Row], root: Path) -> str:
    """The runs of `NAMED_RUNS`, with the time that they took and that they would take undisturbed."""
    body, estimated = [], {row.name: row.seconds / 60 for row in rows if row.seconds}
    for name in NAMED_RUNS:
        folder = root / "results/cifar10/runs" / name
        if not folder.is_dir():
            continue
        summary, facts = read_json(folder / "summary.json"), read_json(folder / "env.json")
        config = yaml.safe_load((folder / "config.yaml").read_text())
        run = f"[{name}](runs/{name}), seed {config['train']['seed']}, commit {facts['git_commit'][:7]}"
        machine = processor(facts, config["train"]["threads"])
        minutes = [f"{summary['seconds'] / 60:.0f}", number(estimated.get(name), ".0f")]
        optimizer = OPTIMIZERS[config["optimizer"]["name"]]
        body.append([run, machine, optimizer, summary["epochs"], *minutes, f"{100 * summary['top1']:.2f}"])
    head = ["run", "hardware", "optimizer", "epochs", "minutes, wall time", "minutes, estimated", "top-1 %"]
    return table(head, body)


def corruptions_table(path: Path) -> str:
    """Top-1 of the released models at the three strengths of each corruption, and the mean of all."""
    rows = read_csv(path)
    counts = Counter(row["model"] for row in rows)
    rows = [row for row in rows if counts[row["model"]] == max(counts.values())]  # others are still being measured
    found: dict[str, dict[str, list[float]]] = {}
    for row in sorted(rows, key=lambda row: (row["model"], row["strength"])):
        found.setdefault(row["model"], {}).setdefault(row["corruption"], []).append(100 * float(row["top1"]))
    names = list(dict.fromkeys(row["corruption"] for row in rows))
    body = []
    for model, cells in found.items():
        mean = statistics.mean(top1 for strengths in cells.values() for top1 in strengths)
        strengths = [" / ".join(f"{top1:.1f}" for top1 in cells[name]) for name in names]
        body.append([f"`{model.removesuffix('_deit_nano_cifar10')}`", *strengths, f"{mean:.1f}"])
    return table(["model", *names, "mean"], body)
