"""The tables of results/cifar10/README.md, and that of the attentions in README.md."""

import re
import statistics
from collections.abc import Callable
from itertools import product

import numpy as np
import yaml

from ppattn import zoo
from ppattn.runtime.cpu import describe_processor
from scripts.tables.compare import compare, mean_and_error, pooled_deviation
from scripts.tables.markdown import number, table
from scripts.tables.runs import BACKBONES, RECIPES, SAME, Results, Row, adamw, by_tokens, local_terms, muon, unchanged
from scripts.tables.speed import against_softmax, nano_times

NAMED_RUNS = re.compile(r"first_recipe_inline|half_hour|long|notebook|\w+_15_epochs|\w+_nano_pool(_|$)")
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


def attentions_table(results: Results) -> str:
    """Every attention: paper, cost in the number of tokens, training speed on DeiT-T and accuracy on `deit_nano`."""
    accuracy = {row.attention: row.accuracy for row in muon(results.rows) if row.backbone == "deit_nano"}
    speeds = {f"training speed, {n:,} tokens": against_softmax(results, "train", n) for n in (196, 3136)}
    body = []
    for name, (title, venue, arxiv, cost, _) in zoo.attentions().items():
        paper = f"[{title}](https://arxiv.org/abs/{arxiv}), {venue}"
        body.append([f"`{name}`", paper, cost, *(speed.get(name) for speed in speeds.values()), accuracy.get(name)])
    return table(["attention", "paper", "cost in N", *speeds, "top-1 %"], body)


def by_attention(rows: list[Row], costs: dict[str, Callable[[Row], object]]) -> str:
    """A row per attention: its accuracy on every backbone with runs, and what it costs on DeiT."""
    found = {(row.attention, row.backbone): row for row in rows}
    titles = {key: f"{title}, top-1 %" for key, title in BACKBONES.items() if any(row.backbone == key for row in rows)}
    body = []
    for name in dict.fromkeys(name for name, _ in found):
        deit, *others = (found.get((name, backbone)) for backbone in titles)
        top1 = [row and row.accuracy for row in (deit, *others)]
        body.append([f"`{name}`", *top1, *(deit and cost(deit) for cost in costs.values())])
    return table(["attention", *titles.values(), *costs], body)


def cifar10_table(results: Results) -> str:
    """The shorter recipe."""
    costs: dict = {"parameters (DeiT)": lambda row: row.size, "MACs (DeiT)": lambda row: row.work}
    costs["training seconds, estimated (DeiT)"] = lambda row: number(row.seconds, ",.0f")
    return by_attention(adamw(results.rows), costs)


def recipe_table(results: Results) -> str:
    """The longer recipe."""
    costs: dict = {"seeds": lambda row: len(row.by_seed), "parameters (DeiT)": lambda row: row.size}
    return by_attention(muon(results.rows), costs | {"PFLOP (DeiT)": lambda row: f"{row.pflop:.3f}"})


def comparison_table(results: Results) -> str:
    """Differences of every attention to softmax on its backbone, with what the seeds or the test images leave open."""
    body = []
    for recipe, chosen in RECIPES.items():
        own = chosen(results.rows)
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


def plain_deit_table(results: Results) -> str:
    """The longer recipe for a DeiT without convolutions and with a class token, the model of the analyses."""
    own = [row for row in muon(results.rows, changed=True) if "model.class_token=true" in row.overrides]
    body = [[f"`{row.attention}`", row.accuracy, row.size, f"{row.pflop:.3f}"] for row in own]
    return table(["attention", "top-1 %", "parameters", "PFLOP"], body)


def tenth_table(results: Results) -> str:
    """Top-1 on the training images that were left out, with a tenth of them to train on."""
    own = [row for row in results.rows if "data.holdout=45000" in row.overrides]
    body = [[f"`{row.attention}`", row.accuracy, row.epochs, f"{row.pflop:.3f}"] for row in own]
    return table(["attention", "top-1 %", "epochs", "PFLOP"], body)


TOKENS = (64, 256, 1024)


def tokens_axis_table(results: Results) -> str:
    """Accuracy of `deit_nano` with 64, 256 and 1,024 tokens."""
    found, body = by_tokens(results.rows), []
    deviation = pooled_deviation([row.top1 for own in found.values() for row in own.values()])
    for name, own in found.items():
        ends = {n: mean_and_error(row.top1, deviation) for n, row in own.items()}
        cells: list = [f"{100 * ends[n][0]:.2f} ± {196 * ends[n][1]:.2f}" if n in ends else None for n in TOKENS]
        softmax = found.get("softmax", {}) if name != "softmax" else {}
        pairs = [(own.get(256), own.get(64)), *((own.get(n), softmax.get(n)) for n in TOKENS[1:])]
        cells += [in_points(one, other, deviation) for one, other in pairs]
        cells.append(at_equal_time(results, own.get(256), softmax.get(256)))
        body.append([f"`{name}`", *cells, *(f"{own[n].pflop:.2f}" if n in own else None for n in TOKENS)])
    against = ["256 − 64", "256, − `softmax`", "1,024, − `softmax`", "256, equal time, − `softmax`"]
    sizes = [f"{n:,}" for n in TOKENS]
    return table(["attention", *(f"top-1 %, {n}" for n in sizes), *against, *(f"PFLOP, {n}" for n in sizes)], body)


def at_equal_time(results: Results, one: Row | None, softmax: Row | None) -> str | None:
    """The same difference when the faster of the two has finished and the other one has not, from their curves."""
    if not one or not softmax:
        return None

    def top1(run: Row, share: float) -> float:
        curve = [row for row in results.csv(f"cifar10/runs/{run.name}/metrics.csv") if row["top1"]]
        epochs, values = ([float(row[key]) for row in curve] for key in ("epoch", "top1"))
        return 100 * float(np.interp(run.epochs * share, epochs, values))

    speed = float(nano_times(results, "train")[one.attention, 32, 256]["against_softmax"])
    return f"{top1(one, min(1, speed)) - top1(softmax, min(1, 1 / speed)):+.1f}"


def tokens_time_table(results: Results) -> str:
    """What training and inference of `deit_nano` with 64, 256 and 1,024 tokens cost; an epoch has 50,000 images."""
    heads = {"training speed": ".2f", "seconds an epoch": ",.0f", "MB, training": ",.0f"}
    heads |= {"ms, batch 1": ".2f", "ms, batch 32": ".2f", "MB, inference": ",.0f"}
    train, infer, body = nano_times(results, "train"), nano_times(results, "infer"), []
    for n, name in product(TOKENS, dict.fromkeys(name for name, _, _ in infer)):
        step, one, many = train[name, 32, n], infer[name, 1, n], infer[name, 32, n]
        cells = [step["against_softmax"], 50 * float(step["ms_per_image"]), step["step_mb"]]
        cells += [one["ms_per_image"], many["ms_per_image"], many["step_mb"]]
        body.append([f"{n:,}", f"`{name}`", *map(number, cells, heads.values())])
    return table(["tokens", "attention", *heads], body)


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
    return {cost: {row.attention: (row.inference[i], row.mean) for row in own} for i, cost in enumerate(costs)}


def fronts_table(results: Results) -> str:
    """What inference costs, and which attentions no other one beats in both cost and accuracy."""
    (times, memory), body = fronts(results.rows).values(), []
    fastest, smallest = front(times), front(memory)
    for name, (milliseconds, top1) in sorted(times.items(), key=lambda item: item[1]):
        on = ["yes" if name in names else None for names in (fastest, smallest)]
        body.append([f"`{name}`", f"{top1:.2f}", f"{milliseconds:.2f}", on[0], f"{memory[name][0]:.0f}", on[1]])
    return table(["attention", "top-1 %", "ms per image", "on the front", "MB", "on the front"], body)


def local_terms_table(results: Results) -> str:
    """Top-1 with and without the local term of the attention and the position convolution of the backbone."""
    body = [
        [f"`{name}`", *(cells[key].accuracy if key in cells else None for key in LOCAL_KEYS.values())]
        for name, cells in local_terms(results.rows).items()
    ]
    return table(["attention", *LOCAL_KEYS], body)


def local_gains_table(results: Results) -> str:
    """What either convolution adds, with and without the other, and what the attention adds without both."""
    found, neither, body = local_terms(results.rows), LOCAL_KEYS["neither"], []
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


def cifar10_ablations_table(results: Results) -> str:
    """Every ablation of the shorter recipe below the attention that it changes."""
    body = []
    for base in adamw(results.rows):
        key = (base.config, base.attention, base.epochs)
        changed = [row for row in results.rows if (row.config, row.attention, row.epochs) == key and not unchanged(row)]
        for row in [base, *changed] if changed else []:
            items = [item for item in row.overrides if not item.startswith(SAME)]
            what = ", ".join(f"`{item.removeprefix('model.attention_options.')}`" for item in items)
            name = f"`{row.attention}` on {BACKBONES[row.backbone]}"
            body.append([name, what or "default options", row.accuracy, row.size, row.work, row.epochs])
    return table(["attention", "change", "top-1 %", "parameters", "MACs", "epochs"], body)


def runs_table(results: Results) -> str:
    """The runs of `NAMED_RUNS`, with the time that they took and that they would take undisturbed."""
    body, estimated = [], {row.name: row.seconds / 60 for row in results.rows if row.seconds}
    work = {row.name: row.pflop for row in results.rows}
    runs = results.root / "results/cifar10/runs"
    for name in sorted(path.name for path in runs.glob("*") if NAMED_RUNS.match(path.name)):
        summary, facts = (results.json(f"cifar10/runs/{name}/{file}.json") for file in ("summary", "env"))
        config = yaml.safe_load((runs / name / "config.yaml").read_text())
        run = f"[{name}](runs/{name}), seed {config['train']['seed']}, commit {facts['git_commit'][:7]}"
        machine = describe_processor(facts, config["train"]["threads"])
        pflop = number(work.get(name.partition("_seed")[0]), ".2f")  # a row has the runs of all seeds
        minutes = [f"{summary['seconds'] / 60:.0f}", number(estimated.get(name), ".0f"), pflop]
        settings = [OPTIMIZERS[config["optimizer"]["name"]], summary["epochs"]]
        body.append([run, machine, *settings, *minutes, f"{100 * summary['top1']:.2f}"])
    head = ["run", "hardware", "optimizer", "epochs", "minutes, wall time", "minutes, estimated", "PFLOP", "top-1 %"]
    return table(head, body)


def corruptions_table(results: Results) -> str:
    """Top-1 of the released models at the three strengths of each corruption, and the mean of all."""
    rows = results.csv("cifar10/corruptions.csv")
    found: dict[str, dict[str, list[float]]] = {}
    for row in sorted(rows, key=lambda row: (row["model"], row["strength"])):
        found.setdefault(row["model"], {}).setdefault(row["corruption"], []).append(100 * float(row["top1"]))
    names, body = list(dict.fromkeys(row["corruption"] for row in rows)), []
    for model, cells in found.items():
        mean = statistics.mean(top1 for strengths in cells.values() for top1 in strengths)
        strengths = [" / ".join(f"{top1:.1f}" for top1 in cells[name]) for name in names]
        body.append([f"`{model.removesuffix('_deit_nano_cifar10')}`", *strengths, f"{mean:.1f}"])
    return table(["model", *names, "mean"], body)
