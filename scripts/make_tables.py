r"""Write the tables and pictures of README, docs and results/ that come from result files.

Accuracy comes from the run folders in results/cifar10, speed from results/benchmark/peers_VENDOR.json
(scripts/bench_peers.py).

python scripts/make_tables.py            # write them
python scripts/make_tables.py --check    # compare instead, exit with 1 where one differs

A table is enclosed by `<!-- table NAME -->` and `<!-- end -->`; `released` lists the weights inside the package, the
others come from runs. A run counts only if its recipe is that of configs/cifar10 today. Accuracy is that of the last
epoch on the test images, mean and standard deviation (n - 1) over the seeds. Seconds are estimated: training images
divided by the images per second of one benchmark run on one machine (results/benchmark/cifar10), because the runs were
paused at times and used more than one machine:

python tools/benchmark.py --models deit_nano pvt_nano swin_nano --attentions softmax linear inline polaformer soft \
    soft_norm less agent focused --sizes 32 --modes train --batch 128 --output results/benchmark/cifar10

For longer runs the speed is that of a short run of the same config in results/benchmark/training:

python tools/train.py -c configs/cifar10/CONFIG.yaml -o train.max_steps=150 output=runs/speed/CONFIG

Time and memory of inference, against which accuracy is drawn, are those of the released models of these runs, in
results/benchmark/cifar10_infer:

python tools/benchmark.py --models softmax_deit_nano_cifar10 ... --sizes 32 --modes infer --batch 128 \
    --output results/benchmark/cifar10_infer
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml

from ppattn import zoo
from ppattn.plots.figure import colour_of, legend_below, picture
from ppattn.runtime.cpu import processor
from scripts.bench_peers import PEERS
from scripts.comparison import CERTAIN, VERDICTS, Comparison, compare, mean_and_error, pooled_deviation
from scripts.run_grid import CONFIGS, ROOT, Cell, is_complete, read_grid

BACKBONES = {"deit_nano": "DeiT", "pvt_nano": "PVT", "swin_nano": "Swin"}
MARKERS = {"deit_nano": "o", "pvt_nano": "s", "swin_nano": "^"}
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon", "adam": "Adam", "sgd": "SGD"}
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
TO_THE_END = 15  # epochs with Muon after which a run shows what a model reaches, not how fast it learns
TRAINING_IMAGES = 50_000
TENTH = "data.holdout=45000"
EXCEPTIONS = ("model.attention_options.num_landmarks=", "optimizer.lr_scale=")  # results/cifar10/README.md says why
SAME = ("model.name=", "model.attention=", *EXCEPTIONS)  # what leaves a run one of the common recipe
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
LOCAL_TERM = ("model.attention_options.residual=", "model.attention_options.local_term=")
PLAIN_DEIT = {"model.stem=patch", "model.class_token=true", "model.cpe=false"}  # as in the papers, at 32 pixels
LINEARIZED = {  # kinds of scripts/linearize_study.py
    "": "aligned, trained with AdamW",
    "long": "aligned, trained with Muon",
    "half": "aligned, trained with AdamW",
    "outputs": "copied; labels and attention outputs",
    "logits": "copied; labels and logits",
    "copied": "copied; labels",
    "mlp": "attentions not copied; labels",
    "scratch": "from scratch with Muon",
}
DRAWING = "8"  # counted up when `draw` changes: the pictures are then drawn again
NOTHING = "These runs are not finished.\n"
# headings, cells and beginnings of cells in README.zh.md and docs/zh
CHINESE = {
    "attention": "注意力",
    "paper": "论文",
    "cost in N": "计算量",
    "top-1 %, 5 epochs": "top-1（%），5 epoch",
    "top-1 %, 15 epochs": "top-1（%），15 epoch",
    "speed": "速度",
    "as `soft`": "同 `soft`",
    "2 h N³ up to 256 tokens, else 2 N² C": "不超过 256 个 token 时 2 h N³，否则 2 N² C",
    "[Linear attention]": "[线性注意力]",
    "[SOFT's full kernel]": "[SOFT 的完整核]",
    "model": "模型",
    "parameters": "参数量",
    "accuracy": "准确率",
    "cifar10 test: ": "CIFAR-10 测试集：",
    "[card]": "[说明]",
    "engine": "推理引擎",
    "images/s, batch 8": "张/秒，batch 8",
    "÷ PyTorch eager": "÷ PyTorch 动态图",
    "p50 / p95 ms, batch 1": "p50 / p95（ms），batch 1",
    "PyTorch eager": "PyTorch 动态图",
    "PyTorch compiled": "PyTorch compile",
}
# small models of others on CIFAR-10 from scratch: 10^15 operations of training, top-1 %
PUBLISHED = {
    "airbench94 (CNN)": (0.29, 94.01),
    "airbench96 (CNN)": (3.1, 96.00),
    "CCT-2/3x2": (2.0, 89.17),
    "CCT-4/3x2": (2.8, 91.45),
}
BLOCK = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass
class Row:
    """The runs of one config with the same overrides but for the seed."""

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
    inference: tuple[float, ...] = ()  # see `read_inference`; with default options

    @property
    def top1(self) -> list[float]:
        return list(self.by_seed.values())

    @property
    def accuracy(self) -> str:
        mean = f"{100 * statistics.mean(self.top1):.2f}"
        return f"{mean} ± {100 * statistics.stdev(self.top1):.2f}" if len(self.top1) > 1 else mean


def read_rows(
    cells: list[Cell],
    results: Path,
    speeds: dict[tuple[str, str], float],
    measured: dict[str, float],
    inference: dict[str, tuple[float, float]],
) -> list[Row]:
    """The configurations of the grid that have runs, in its order; seconds where the images/s are known.

    Args:
        cells: of the grid.
        results: the folder of their runs.
        speeds: training images/s by backbone and attention, with AdamW.
        measured: training images/s by config; these take precedence.
        inference: by released model, see `read_inference`.
    """
    rows: dict[tuple, Row] = {}
    for cell in cells:
        config, folder = cell.load(), results / cell.name
        if not is_complete(folder, config):
            continue
        overrides = tuple(item for item in cell.overrides if not item.startswith("train.seed="))
        backbone, attention = config.model.name, config.model.attention
        row = rows.setdefault(
            (cell.config, overrides),
            Row(cell.config, backbone, attention, overrides, config.train.epochs, config.optimizer.name),
        )
        summary = json.loads((folder / "summary.json").read_text())
        row.by_seed[config.train.seed] = summary["top1"]
        row.params, row.macs = summary["params"], summary["macs"]
        row.pflop = summary.get("train_pflop", 6e-15 * row.macs * row.epochs * TRAINING_IMAGES)
        own = {f"train.epochs={row.epochs}"}.issuperset(overrides)  # nothing is changed that changes the speed
        speed = measured.get(cell.config, speeds.get((backbone, attention)) if row.optimizer == "adamw" else None)
        row.seconds = row.epochs * TRAINING_IMAGES / speed if own and speed else None
        if unchanged(row):
            row.inference = inference.get(f"{attention}_{backbone}_cifar10", ())
    return list(rows.values())


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a file, none where it is missing."""
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines())) if path.is_file() else []


def read_speeds(folder: Path) -> tuple[dict[tuple[str, str], float], str, float]:
    """Training images/s by backbone and attention, the processor, and how far a round is from the median at most."""
    if not (folder / "benchmark.csv").is_file():
        return {}, "", 0.0
    rows = [row for row in read_csv(folder / "benchmark.csv") if row["mode"] == "train"]
    environment = json.loads((folder / "benchmark.json").read_text())["environment"]
    speeds = {tuple(row["name"].split(" ")[:2]): float(row["images_per_second"]) for row in rows}
    rounds = ("slowest_round", "fastest_round")
    spread = max(abs(float(row[end]) / float(row["images_per_second"]) - 1) for row in rows for end in rounds)
    return speeds, processor(environment), spread


def read_measured(folder: Path) -> dict[str, float]:
    """Training images per second by config, from short runs."""
    summaries = {path.parent.name: json.loads(path.read_text()) for path in sorted(folder.glob("*/summary.json"))}
    return {name: summary["images_per_second"] for name, summary in summaries.items()}


def read_inference(folder: Path) -> dict[str, tuple[float, float]]:
    """Milliseconds per image and MB above the loaded model, by released model."""
    rows = [row for row in read_csv(folder / "benchmark.csv") if row["mode"] == "infer"]
    return {row["name"]: (float(row["ms_per_image"]), float(row["step_mb"])) for row in rows}


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def in_language_of(page: Path, text: str) -> str:
    """A table for a page at this place in the repository; `text` is the one for README.md or docs/guide."""
    if page.name != "README.zh.md" and page.parts[:2] != ("docs", "zh"):
        return text
    if page.parts[0] == "docs":
        text = text.replace("](../", "](../../")
    known = "|".join(map(re.escape, CHINESE))
    return re.sub(rf"(?<=\| )({known})(?= \||\(|\d)", lambda found: CHINESE[found[0]], text)


def plain(rows: list[Row]) -> list[Row]:
    """The attentions with their default options, under the common recipe."""
    return [row for row in rows if not row.overrides and row.config == f"{row.attention}_{row.backbone}"]


def accuracy_table(rows: list[Row], source: str) -> str:
    """A row per attention, a column per backbone, and what it costs on DeiT."""
    if not rows:
        return NOTHING
    found = {(row.attention, row.backbone): row for row in plain(rows)}
    attentions = list(dict.fromkeys(row.attention for row in plain(rows)))
    seconds = any(row.seconds for row in plain(rows))
    head = ["attention", *(f"{title}, top-1 %" for title in BACKBONES.values()), "parameters (DeiT)", "MACs (DeiT)"]
    body = []
    for attention in attentions:
        own = [found.get((attention, backbone)) for backbone in BACKBONES]
        deit = own[0]
        costs = [f"{deit.params / 1e6:.2f} M", f"{deit.macs / 1e6:.1f} M"] if deit else ["", ""]
        if seconds:
            costs.append(f"{deit.seconds:,.0f}" if deit and deit.seconds else "")
        body.append([f"`{attention}`", *(row.accuracy if row else "" for row in own), *costs])
    return table([*head, *(["training seconds, estimated (DeiT)"] if seconds else [])], body) + note(rows, source)


def note(rows: list[Row], source: str) -> str:
    epochs = " or ".join(map(str, sorted({row.epochs for row in plain(rows)})))
    seeds = " or ".join(map(str, sorted({len(row.top1) for row in plain(rows)} - {1})))
    text = f"\nTest accuracy of the last of {epochs} epochs, " + (
        f"mean and standard deviation over {seeds} seeds; one seed where there is no ±." if seeds else "one seed."
    )
    speeds = (
        f" Estimated seconds: training images divided by the images/s of one benchmark run (batch 128) on {source}."
    )
    return text + (speeds if source else "") + "\n"


def common(rows: list[Row]) -> list[Row]:
    """The runs of 15 epochs with Muon, the attentions with any option."""
    return [row for row in rows if row.config.startswith("half_hour_") and row.epochs == TO_THE_END]


def trained(rows: list[Row]) -> list[Row]:
    """Of these the attentions as they are compared: with their default options but for the exceptions."""
    return [row for row in common(rows) if unchanged(row)]


def unchanged(row: Row, *but: str) -> bool:
    """Whether a run has the settings of its config, except for the attention, EXCEPTIONS and the keys in `but`."""
    return all(item.startswith((*SAME, *but)) for item in row.overrides)


RECIPES: dict[str, Callable[[list[Row]], list[Row]]] = {"15 epochs, Muon": trained, "5 epochs, AdamW": plain}


def compared(rows: list[Row]) -> list[tuple[str, Row, Row, Comparison]]:
    """Every attention against softmax on its backbone: recipe, attention, softmax and difference."""
    pairs = []
    for recipe, chosen in RECIPES.items():
        found = chosen(rows)
        softmax = {row.backbone: row for row in found if row.attention == "softmax"}
        deviation = pooled_deviation([row.top1 for row in found])
        for row in found:
            other = softmax.get(row.backbone)
            if other and row is not other:
                pairs.append((recipe, row, other, compare(row.by_seed, other.by_seed, deviation)))
    return pairs


def comparison_table(rows: list[Row]) -> str:
    """Differences to softmax, with what the seeds or the test images leave open."""
    body = []
    for recipe, row, other, found in compared(rows):
        low, high = found.ends
        body.append(
            [
                recipe,
                f"`{row.attention}` on {BACKBONES[row.backbone]}",
                f"{found.paired} pairs" if found.paired else f"{len(row.top1)} and {len(other.top1)}",
                f"{100 * found.difference:+.2f}",
                f"{100 * low:+.2f} to {100 * high:+.2f}",
                f"{found.p:.3f}" if found.p is not None else "",
                found.verdict,
            ]
        )
    head = ["recipe", "attention", "seeds", "points to softmax", "95 % interval", "sign-flip p", "verdict"]
    return table(head, body) if body else NOTHING


def verdicts(rows: list[Row]) -> str:
    """The same in sentences, what is certain first: a line per verdict and recipe."""
    lines, pairs = [], compared(rows)
    for verdict, recipe in product(VERDICTS, RECIPES):
        names = [named(row, found) for own, row, _, found in pairs if (own, found.verdict) == (recipe, verdict)]
        to = "from" if verdict == "not told apart" else "than"
        lines += [f"- {recipe}, **{verdict} {to} softmax**: {', '.join(names)}.\n"] if names else []
    if not pairs:
        return NOTHING
    certain = any(found.verdict in CERTAIN for *_, found in pairs)
    return "".join(lines) if certain else f"- **Better or worse than softmax** with certainty: none.\n{''.join(lines)}"


def named(row: Row, found: Comparison) -> str:
    """An attention with its points to softmax, and their interval where there are enough seeds."""
    interval = ""
    if found.interval:
        low, high = (100 * end for end in found.interval)
        interval = f", 95 % interval {low:+.1f} to {high:+.1f}"
    return f"`{row.attention}` ({BACKBONES[row.backbone]}, {100 * found.difference:+.1f}{interval})"


def summary(rows: list[Row], chinese: bool = False) -> str:
    """The comparison on DeiT after the longer recipe, for the front page."""
    own = {row.attention: row for row in trained(rows) if row.backbone == "deit_nano"}
    if "softmax" not in own:
        return NOTHING
    means = [100 * statistics.mean(row.top1) for row in own.values()]
    seeds = len(own["softmax"].top1)
    sure, likely = [], []
    for _, row, _, found in compared(rows):
        if own.get(row.attention) is row and found.verdict != "not told apart":
            (sure if found.verdict in CERTAIN else likely).append(f"`{row.attention}` ({100 * found.difference:+.1f})")
    low, high, softmax = (
        f"{value:.1f}" for value in (min(means), max(means), 100 * statistics.mean(own["softmax"].top1))
    )
    if chinese:
        told = "没有哪一种与 softmax 可以区分。"
        if sure or likely:
            told = (
                f"与 softmax 相比，确定更好或更差的：{'、'.join(sure) or '没有'}；"
                f"很可能更好或更差的（百分点）：{'、'.join(likely) or '没有'}；其余无法区分。"
            )
        return (
            f"用 Muon 训练 15 个 epoch 后，DeiT 上的 {len(own)} 种注意力的准确率为 {low}% 至 {high}%，"
            f"softmax 为 {softmax}%（{seeds} 个种子）。{told}\n"
        )
    told = "None is told apart from softmax."
    if sure or likely:
        told = (
            f"Better or worse than softmax with certainty: {', '.join(sure) or 'none'}; likely, in points: "
            f"{', '.join(likely) or 'none'}. The others are not told apart from it."
        )
    return (
        f"After 15 epochs with Muon, {len(own)} attentions on DeiT reach {low} to {high} %, softmax {softmax} % "
        f"({seeds} seeds). {told}\n"
    )


def recipe_table(rows: list[Row]) -> str:
    """A row per attention, a column per backbone, and the arithmetic on DeiT."""
    found = {(row.attention, row.backbone): row for row in rows}
    body = []
    for attention in dict.fromkeys(name for name, _ in found):
        own = [found.get((attention, backbone)) for backbone in BACKBONES]
        costs = [f"{own[0].params / 1e6:.2f} M", f"{own[0].pflop:.3f}"] if own[0] else ["", ""]
        seeds = max(len(row.by_seed) for row in own if row)
        body.append([f"`{attention}`", *(row.accuracy if row else "" for row in own), str(seeds), *costs])
    head = ["attention", *(f"{title}, top-1 %" for title in BACKBONES.values())]
    return table([*head, "seeds", "parameters (DeiT)", "PFLOP (DeiT)"], body) if body else NOTHING


def plain_deit_table(rows: list[Row]) -> str:
    """The same recipe for a DeiT without convolutions, the model of the analyses."""
    own = [row for row in common(rows) if PLAIN_DEIT.issubset(row.overrides)]
    body = [[f"`{row.attention}`", row.accuracy, f"{row.params / 1e6:.2f} M", f"{row.pflop:.3f}"] for row in own]
    return table(["attention", "top-1 %", "parameters", "PFLOP"], body) if body else NOTHING


def tenth_table(rows: list[Row]) -> str:
    """Top-1 on the training images that were left out, with a tenth of them to train on."""
    own = [row for row in rows if TENTH in row.overrides]
    body = [[f"`{row.attention}`", row.accuracy, str(row.epochs), f"{row.pflop:.3f}"] for row in own]
    return table(["attention", "top-1 %", "epochs", "PFLOP"], body) if body else NOTHING


def front(points: dict[str, tuple[float, float]]) -> list[str]:
    """Names of the points (cost, accuracy) that no other one beats in both, the cheapest first."""
    kept: list[str] = []
    for name in sorted(points, key=lambda name: (points[name][0], -points[name][1])):
        if not kept or points[name][1] > points[kept[-1]][1]:
            kept.append(name)
    return kept


def fronts(rows: list[Row]) -> dict[str, dict[str, tuple[float, float]]]:
    """Accuracy in percent against what inference costs: `trained` on DeiT."""
    own = [row for row in trained(rows) if row.backbone == "deit_nano" and row.inference]
    costs = ("milliseconds per image", "MB for a batch of 128")
    return {
        cost: {row.attention: (row.inference[number], 100 * statistics.mean(row.top1)) for row in own}
        for number, cost in enumerate(costs)
    }


def fronts_table(rows: list[Row]) -> str:
    """What inference costs, and which attentions no other one beats in both cost and accuracy."""
    (times, memory), body = fronts(rows).values(), []
    fastest, smallest = front(times), front(memory)
    for name, (milliseconds, top1) in sorted(times.items(), key=lambda item: item[1]):
        on = ["yes" if name in names else "" for names in (fastest, smallest)]
        body.append([f"`{name}`", f"{top1:.2f}", f"{milliseconds:.2f}", on[0], f"{memory[name][0]:.0f}", on[1]])
    head = ["attention", "top-1 %", "ms per image", "on the front", "MB", "on the front"]
    return table(head, body) if body else NOTHING


def local_terms(rows: list[Row]) -> dict[str, dict[tuple[bool, bool], Row]]:
    """The runs that switch convolutions off, by attention; the keys: with its local term, with position convolution."""
    found: dict[str, dict[tuple[bool, bool], Row]] = {}
    for row in common(rows):
        if row.backbone != "deit_nano" or PLAIN_DEIT.issubset(row.overrides):
            continue
        local = row.attention not in ("softmax", "linear")
        for item in row.overrides:
            if item.startswith(LOCAL_TERM):
                local = item.endswith("=true")
        found.setdefault(row.attention, {})[local, "model.cpe=false" not in row.overrides] = row
    return {name: cells for name, cells in found.items() if len(cells) > 1}


def local_table(rows: list[Row]) -> str:
    """Top-1 with and without the local term of the attention and the position convolution of the backbone."""
    body = [
        [f"`{name}`", *(cells[key].accuracy if key in cells else "" for key in LOCAL_KEYS.values())]
        for name, cells in local_terms(rows).items()
    ]
    return table(["attention", *LOCAL_KEYS], body) if body else NOTHING


def local_gains_table(rows: list[Row]) -> str:
    """What either convolution adds, with and without the other, and what the attention adds without both."""
    deviation, body, judged = pooled_deviation([row.top1 for row in common(rows)]), [], {}
    found, neither = local_terms(rows), LOCAL_KEYS["neither"]
    softmax = found.get("softmax", {}).get(neither)
    for name, cells in found.items():
        pairs = [(cells.get(having), cells.get(lacking)) for having, lacking in LOCAL_GAINS.values()]
        pairs.append((cells.get(neither), softmax if name != "softmax" else None))
        gains = [compare(row.by_seed, other.by_seed, deviation) if row and other else None for row, other in pairs]
        body.append([f"`{name}`", *(in_points(gain) for gain in gains)])
        if gains[-1]:
            judged[name] = gains[-1].verdict
    if not body:
        return NOTHING
    text = table(["attention", *LOCAL_GAINS, "neither, against `softmax`"], body)
    if judged:
        told_apart = [f"`{name}` ({verdict})" for name, verdict in judged.items() if verdict != "not told apart"]
        text += f"\nWithout both, told apart from `softmax`: {', '.join(told_apart) or 'none'}.\n"
    return text


def in_points(found: Comparison | None) -> str:
    """A difference in points with its interval."""
    if not found:
        return ""
    low, high = found.ends
    return f"{100 * found.difference:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def ablation_table(rows: list[Row]) -> str:
    """Every ablation below the attention that it changes."""
    if not rows:
        return NOTHING
    body = []
    for base in plain(rows):
        changed = [row for row in rows if row.overrides and (row.config, row.epochs) == (base.config, base.epochs)]
        for row in [base, *changed] if changed else []:
            what = ", ".join(f"`{item.removeprefix('model.attention_options.')}`" for item in row.overrides)
            cost = [f"{row.params / 1e6:.2f} M", f"{row.macs / 1e6:.1f} M", str(row.epochs)]
            body.append(
                [f"`{row.attention}` on {BACKBONES[row.backbone]}", what or "default options", row.accuracy, *cost]
            )
    if not body:
        return NOTHING
    return table(["attention", "change", "top-1 %", "parameters", "MACs", "epochs"], body)


def longer_table(rows: list[Row], half_hour: bool) -> str:
    """The runs with more epochs than the grid: 12 to 15 epochs of its recipe (half_hour_*), or the others."""
    grid = max((row.epochs for row in plain(rows)), default=0)
    body = []
    for row in sorted(rows, key=lambda row: (row.backbone, row.attention)):
        name = f"{row.attention}_{row.backbone}"
        if row.config.startswith("half_hour_") and row.overrides:
            continue  # in the table of its own
        if row.epochs > grid and half_hour == (row.config in (name, f"half_hour_{name}")):
            minutes = f"{row.seconds / 60:.0f}" if row.seconds else ""
            what = f"`{row.attention}` on {BACKBONES[row.backbone]}"
            optimizer = OPTIMIZERS[row.optimizer]
            config = " ".join((row.config, *row.overrides))
            body.append([f"`{config}`", what, optimizer, str(row.epochs), minutes, row.accuracy])
    return (
        table(["config", "attention", "optimizer", "epochs", "minutes, estimated", "top-1 %"], body)
        if body
        else NOTHING
    )


def runs_table(results: Path) -> str:
    """The runs of `NAMED_RUNS`, with the command that repeats each."""
    body = []
    for name in NAMED_RUNS:
        if not (results / name / "env.json").is_file():
            continue
        summary, facts = (json.loads((results / name / file).read_text()) for file in ("summary.json", "env.json"))
        config = yaml.safe_load((results / name / "config.yaml").read_text())
        machine = processor(facts, config["train"]["threads"])
        commit = facts["git_commit"][:7]
        command = f"its config.yaml, at commit {commit}"
        if not name.startswith("first"):
            command = f"`python scripts/run_grid.py {name}`"
        run = f"[{name}]({name}), seed {config['train']['seed']}, commit {commit}"
        time = f"{summary['seconds'] / 60:.0f} minutes, {summary['epochs']} epochs"
        body.append([run, command, machine, time, f"{100 * summary['top1']:.2f} %"])
    return table(["run", "command", "hardware", "wall time, epochs", "test top-1"], body) if body else NOTHING


def corruptions_table(path: Path) -> str:
    """Top-1 of the released models at the three strengths of each corruption, and the mean of all."""
    rows = read_csv(path)
    if not rows:
        return NOTHING
    counts = Counter(row["model"] for row in rows)
    rows = [row for row in rows if counts[row["model"]] == max(counts.values())]  # others are still being measured
    found: dict[str, dict[str, list[float]]] = {}
    for row in sorted(rows, key=lambda row: (row["model"], row["strength"])):
        cells = found.setdefault(row["model"], {})
        cells.setdefault(row["corruption"], []).append(100 * float(row["top1"]))
    names = list(next(iter(found.values())))
    body = [
        [
            f"`{model.removesuffix('_deit_nano_cifar10')}`",
            *(" / ".join(f"{top1:.1f}" for top1 in cells[name]) for name in names),
            f"{statistics.mean(top1 for strengths in cells.values() for top1 in strengths):.1f}",
        ]
        for model, cells in found.items()
    ]
    return table(["model", *names, "mean"], body)


def read_peers(root: Path, vendor: str) -> dict[str, dict]:
    """The rows of scripts/bench_peers.py on processors of one vendor."""
    path = root / f"results/benchmark/peers_{vendor}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def speed_table(peers: dict[str, dict]) -> str:
    """Training and exported inference of the eight models, ours divided by the other implementation."""
    body = []
    for model in PEERS:
        cells = [f"`{model}`"]
        for mode, passes in (("train", 3), ("export", 1)):
            if (row := peers.get(f"{mode}_{model}")) is None:
                cells += [""] * (4 if mode == "train" else 3)
                continue
            ours, other = row["candidates"][0], row["candidates"][-1]
            flops = 2e-9 * passes * zoo.costs()[model]["macs"] * ours["per_second"]
            cells += [
                f"{ours['per_second']:.1f} [{ours['spread'][0]:.1f}, {ours['spread'][1]:.1f}]",
                f"**{ours['ratio']:.2f}**",
                f"{100 * flops / row['gemm_gflops']:.0f}",
            ]
            if mode == "train":
                cells.append(f"{ours['step_mb'] / other['step_mb']:.2f}")
        body.append(cells)
    head = ["model", "training, images/s", "÷ PyTorch", "% of GEMM peak", "memory ÷ PyTorch"]
    return table([*head, "exported, images/s", "÷ PyTorch", "% of GEMM peak"], body)


def engines_table(peers: dict[str, dict]) -> str:
    """Exported models: images/s at batch 8 and the time of one image with every engine, beside PyTorch."""
    body = []
    for model in (*PEERS, "deit_nano"):
        eight, one = (
            {c["name"]: c for c in peers.get(f"{mode}_{model}", {}).get("candidates", [])}
            for mode in ("export", "single")
        )
        for name in [name for name in (eight or one) if name != "dygraph"]:
            cells = ["", "", ""]
            if name in eight:
                cells[0] = f"{eight[name]['per_second']:.1f}"
                cells[1] = f"{eight[name]['ratio']:.2f}" if "PyTorch eager" in eight else ""
            if name in one:
                cells[2] = f"{one[name]['p50_ms']:.1f} / {one[name]['p95_ms']:.1f}"
            body.append([f"`{model}`" + (", InLine" if model == "deit_nano" else ""), name, *cells])
    return table(["model", "engine", "images/s, batch 8", "÷ PyTorch eager", "p50 / p95 ms, batch 1"], body)


def nano_table(peers: dict[str, dict]) -> str:
    """Training speed of every attention on the nano backbones, divided by that of softmax on the same backbone."""
    backbones = {
        title: {c["name"]: c["ratio"] for c in peers[f"nano_{backbone}"]["candidates"]}
        for backbone, title in BACKBONES.items()
        if f"nano_{backbone}" in peers
    }
    names = dict.fromkeys(name for ratios in backbones.values() for name in ratios if name != "softmax")
    body = [[f"`{n}`", *(f"{ratios[n]:.2f}" if n in ratios else "" for ratios in backbones.values())] for n in names]
    return table(["attention ÷ softmax", *backbones], body)


def attentions_table(rows: list[Row], peers: dict[str, dict]) -> str:
    """Every attention: paper, cost in the number of tokens, accuracy and training speed on `deit_nano`."""
    accuracies = [
        {row.attention: row.accuracy for row in chosen(rows) if row.backbone == "deit_nano"}
        for chosen in (plain, trained)
    ]
    speed = {c["name"]: f"{c['ratio']:.2f}" for c in peers.get("nano_deit_nano", {}).get("candidates", [])}
    body = [
        [
            f"`{name}`",
            f"[{title}](https://arxiv.org/abs/{number}), {venue}",
            cost,
            *(accuracy.get(name, "") for accuracy in accuracies),
            speed.get(name, ""),
        ]
        for name, (title, venue, number, cost, _) in zoo.attentions().items()
        if name in zoo.list_attentions()
    ]
    head = ["attention", "paper", "cost in N", "top-1 %, 5 epochs", "top-1 %, 15 epochs", "speed"]
    return table(head, body)


def released_table() -> str:
    """The weights inside the package."""
    body = []
    for entry in map(zoo.entry, zoo.released()):
        card = f"[card](../../ppattn/zoo/{Path(entry.weights['file']).with_suffix('.md')})"
        body.append([f"`{entry.name}`", f"{zoo.costs()[entry.name]['params'] / 1e6:.2f} M", entry.note, card])
    return table(["model", "parameters", "accuracy", ""], body) if body else "No weights are in the package yet.\n"


def finetune_table(root: Path) -> str:
    """Accuracy by start and number of images, over the seeds."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in read_csv(root / "results/weights/finetune.csv"):
        found.setdefault((row["images_per_class"], row["start"]), []).append(100 * float(row["top1"]))
    body = [
        [
            count,
            start,
            f"{statistics.mean(top1):.1f} ± {statistics.stdev(top1):.1f}" if len(top1) > 1 else f"{top1[0]:.1f}",
        ]
        for (count, start), top1 in found.items()
    ]
    return table(["images per class", "start", "top-1 %"], body) if body else "Not run yet.\n"


def distill_table(root: Path) -> str:
    """Accuracy and processor time by attention and start."""
    body = [
        [f"`{row['attention']}`", row["start"], row["epochs"], row["cpu_seconds"], f"{100 * float(row['top1']):.2f}"]
        for row in sorted(
            read_csv(root / "results/weights/distill.csv"), key=lambda row: (row["attention"], row["start"])
        )
    ]
    return table(["attention", "start", "epochs", "CPU seconds", "top-1 %"], body) if body else "Not run yet.\n"


def read_linearized(root: Path) -> dict[str, list[dict]]:
    """Runs of scripts/linearize_study.py, those of several seeds together."""
    found: dict[str, list[dict]] = {}
    for path in sorted((root / "results/linearize").glob("*_4?.json")):
        found.setdefault(path.stem.rpartition("_")[0], []).append(json.loads(path.read_text()))
    return dict(sorted(found.items(), key=lambda item: list(LINEARIZED).index(linearized_kind(item[0]))))


def linearized_kind(name: str) -> str:
    first, _, last = name.partition("_")
    return first if first in LINEARIZED else last


def linearized_table(root: Path) -> str:
    """Accuracy on the test images by what was linearised, and how."""
    body, found = [], read_linearized(root)
    teacher = next((run for runs in found.values() for run in runs if "teacher_held_out_top1" in run), {})
    for name, runs in found.items():
        kind = linearized_kind(name)
        to = name.partition("_")[2 if kind and name.startswith(kind) else 0]
        top1 = [100 * run["test_top1"] for run in runs]
        spread = f" ± {statistics.stdev(top1):.2f}" if len(top1) > 1 else ""
        blocks = len(runs[0].get("chosen", range(6)))
        steps = " + ".join(str(runs[0]["steps"][part]) for part in ("align", "train") if part in runs[0]["steps"])
        mean = statistics.mean(top1)
        changes = [
            f"{100 * statistics.mean(run[ours] - run.get(theirs, teacher[theirs]) for run in runs):+.2f}"
            for ours, theirs in (("test_top1", "teacher_test_top1"), ("held_out_top1", "teacher_held_out_top1"))
        ]
        before = [
            f"{100 * statistics.mean(run[part] for run in runs):.2f}" if part in runs[0] and blocks == 6 else ""
            for part in ("copied_test_top1", "aligned_test_top1")
        ]
        line = [f"`{to}`", LINEARIZED[kind], str(blocks), steps, str(len(runs)), *before]
        body.append([*line, f"{mean:.2f}{spread}", *changes])
    head = ["attention", "how", "blocks", "steps", "seeds", "copied %", "aligned %", "top-1 %", "− teacher", "held-out"]
    return table(head, body) if body else "Not run yet.\n"


def linearized_blocks_table(root: Path) -> str:
    """Per block: error of the aligned attention, and change of accuracy with this block alone replaced."""
    body, count = [], 0
    for name, (run, *_) in read_linearized(root).items():
        if linearized_kind(name) == "" and "errors" in run:
            count = len(run["errors"])
            body.append([f"`{name}`", "error", *(f"{error:.3f}" for error in run["errors"])])
            changes = [f"{100 * (top1 - run['teacher_top1']):+.1f}" for top1 in run["alone"]]
            body.append(["", "change of top-1, points", *changes])
    return table(["attention", "", *(f"block {i + 1}" for i in range(count))], body) if body else "Not run yet.\n"


def linearized_seconds_table(root: Path) -> str:
    """Seconds per step of each kind of training, measured in turn on a quiet machine."""
    path = root / "results/linearize/speed.json"
    if not path.is_file():
        return "Not run yet.\n"
    rows = json.loads(path.read_text())["seconds_per_step"]
    kinds = ("scratch", "align", "train")
    body = [[f"`{to}`", *(f"{row[kind]:.3f}" if kind in row else "" for kind in kinds)] for to, row in rows.items()]
    return table(["attention", "from scratch", "alignment", "training with the teacher"], body)


def lra_table(root: Path) -> str:
    """Accuracy on the short tasks of Long Range Arena, every seed by itself, and the seconds of the runs."""
    runs: dict[str, dict[str, list[str]]] = {}
    for row in csv.DictReader((root / "results/lra/runs.csv").read_text(encoding="utf-8").splitlines()):
        cells = runs.setdefault(row["attention"], {})
        cells.setdefault(row["config"], []).append(f"{100 * float(row['top1']):.2f}")
        cells.setdefault(f"{row['config']} seconds", []).append(row["seconds"])
    columns = [f"{task}{what}" for task in ("listops_short", "image_short") for what in ("", " seconds")]
    body = [[f"`{name}`", *(", ".join(cells.get(key, [])) for key in columns)] for name, cells in runs.items()]
    return table(["attention", "ListOps, top-1 %", "seconds", "Image, top-1 %", "seconds"], body)


def lengths_table(root: Path, mode: str) -> str:
    """Milliseconds of a step of the sequence backbone in its fastest round, how they grow, and memory of training."""
    times: dict[str, dict[int, float]] = {}
    memory: dict[str, dict[int, float]] = {}
    path = root / f"results/benchmark/sequence_{mode}/benchmark.json"
    for row in json.loads(path.read_text())["rows"] if path.is_file() else []:
        name = row["name"].split()[1]
        times.setdefault(name, {})[row["tokens"]] = 1000 / row["fastest_round"]
        memory.setdefault(name, {})[row["tokens"]] = row["peak_mb"]
    low, middle, high = 512, 2048, 16384
    body = []
    for name, found in times.items():
        exponent = math.log(found[high] / found[middle], high / middle)
        faster = [tokens for tokens in sorted(found) if found[tokens] < times["softmax"][tokens]]
        crossover = "" if name == "softmax" else f"{faster[0]:,}" if faster else "none"
        cells = [f"{found[tokens]:.0f}" for tokens in (low, middle, high)]
        peaks = [f"{memory[name][tokens]:.0f}" for tokens in (low, high)] if mode == "train" else []
        body.append([f"`{name}`", *cells, f"{exponent:.2f}", crossover, *peaks])
    head = ["attention", *(f"{tokens:,} tokens, ms" for tokens in (low, middle, high)), "exponent"]
    head += ["faster than softmax from", *(["MB, 512 tokens", "MB, 16,384 tokens"] if mode == "train" else [])]
    return table(head, body) if body else "Not run yet.\n"


def tokens_table(root: Path, mode: str) -> str:
    """Milliseconds per image of DeiT-T by tokens, times as fast as softmax, how the time grows, and memory."""
    found: dict[str, dict[int, dict[str, str]]] = {}
    for row in read_csv(root / "results/benchmark/cells.csv"):
        if (row["backbone"], row["mode"]) == ("deit_tiny", mode):
            found.setdefault(row["attention"], {}).setdefault(int(row["tokens"]), row)
    counts, body = (196, 784, 3136, 12544), []
    for name, own in found.items():
        times = {tokens: float(row["ms_per_image"]) for tokens, row in own.items()}
        large = [(math.log(tokens), math.log(time)) for tokens, time in sorted(times.items()) if tokens >= counts[1]]
        slope = f"{statistics.linear_regression(*zip(*large, strict=True)).slope:.2f}" if len(large) > 1 else ""
        against = [
            float(own[tokens]["against_softmax"] or "nan") if tokens in own else math.nan for tokens in counts[:3]
        ]
        body.append(
            [
                f"`{name}`",
                *(f"{times[tokens]:,.0f}" if tokens in times else "" for tokens in counts),
                *("" if math.isnan(value) else f"{value:.2f}" for value in against),
                slope,
                *(f"{float(own[tokens]['step_mb']):,.0f}" if tokens in own else "" for tokens in counts[1:]),
            ]
        )
    head = [
        "attention",
        *(f"ms, {tokens:,}" for tokens in counts),
        *(f"× softmax, {tokens:,}" for tokens in counts[:3]),
    ]
    return table([*head, "exponent", *(f"MB, {tokens:,}" for tokens in counts[1:])], body) if body else "Not run yet.\n"


def tables(root: Path, rows: list[Row], source: str) -> dict[str, Callable[[], str]]:
    """What makes each table, by its name."""
    found: dict[str, Callable[[], str]] = {
        "attentions": lambda: attentions_table(rows, read_peers(root, "intel")),
        "cifar10": lambda: accuracy_table(rows, source),
        "comparison": lambda: comparison_table(rows),
        "verdicts": lambda: verdicts(rows),
        "summary": lambda: summary(rows),
        "summary_zh": lambda: summary(rows, chinese=True),
        "recipe": lambda: recipe_table(trained(rows)),
        "plain_deit": lambda: plain_deit_table(rows),
        "tenth": lambda: tenth_table(rows),
        "fronts": lambda: fronts_table(rows),
        "local_terms": lambda: local_table(rows),
        "local_gains": lambda: local_gains_table(rows),
        "cifar10_ablations": lambda: ablation_table(rows),
        "cifar10_half_hour": lambda: longer_table(rows, half_hour=True),
        "cifar10_long": lambda: longer_table(rows, half_hour=False),
        "runs": lambda: runs_table(root / "results/cifar10"),
        "corruptions": lambda: corruptions_table(root / "results/cifar10/corruptions.csv"),
        "released": released_table,
        "finetune": lambda: finetune_table(root),
        "distill": lambda: distill_table(root),
        "lra": lambda: lra_table(root),
        "tokens_infer": lambda: tokens_table(root, "infer"),
        "tokens_train": lambda: tokens_table(root, "train"),
        "lengths_infer": lambda: lengths_table(root, "infer"),
        "lengths_train": lambda: lengths_table(root, "train"),
        "linearized": lambda: linearized_table(root),
        "linearized_blocks": lambda: linearized_blocks_table(root),
        "linearized_seconds": lambda: linearized_seconds_table(root),
    }
    for vendor in ("amd", "intel"):
        found[f"speed_{vendor}"] = lambda vendor=vendor: speed_table(read_peers(root, vendor))
        found[f"engines_{vendor}"] = lambda vendor=vendor: engines_table(read_peers(root, vendor))
        found[f"nano_speed_{vendor}"] = lambda vendor=vendor: nano_table(read_peers(root, vendor))
    return found


def draw(path: Path, rows: list[Row], machine: str, digest: str) -> None:
    """Accuracy against MACs or seconds: a colour per attention, a marker per backbone."""
    from matplotlib.lines import Line2D

    against = "seconds" if "seconds" in path.stem else "macs"
    title = f"The same recipe, {rows[0].epochs} epochs"
    with picture(path, 8, 4.5, title, metadata={"Source": digest}) as figure:
        axes = figure.subplots()
        attentions = list(dict.fromkeys(row.attention for row in rows))
        for row in rows:
            x = row.seconds if against == "seconds" else row.macs / 1e6
            values = [100 * value for value in row.top1]
            spread = statistics.stdev(values) if len(values) > 1 else None
            style = {"marker": MARKERS[row.backbone], "color": colour_of(row.attention), "markersize": 8}
            axes.errorbar(x, statistics.mean(values), spread, capsize=3, alpha=0.85, **style)
        marks = [("grey", MARKERS[backbone], title) for backbone, title in BACKBONES.items()]
        marks += [(colour_of(name), "o", name) for name in attentions]
        marks += [("grey", "|", "standard deviation\nover seeds")]
        handles = [Line2D([], [], marker=marker, color=color, ls="", label=label) for color, marker, label in marks]
        figure.legend(handles=handles, loc="outside right center")
        label = "multiply-accumulates per image (millions)"
        label = f"estimated training seconds, {machine}" if against == "seconds" else label
        axes.set(xlabel=label, ylabel="CIFAR-10 test top-1 (%)")
        axes.grid(alpha=0.3)


def draw_pflop(path: Path, rows: list[Row], digest: str) -> None:
    """Accuracy against the arithmetic of training, with small models of others."""
    title = "Grey crosses: published results, not run here; those of airbench average six views of an image"
    with picture(path, 8, 4.5, title, metadata={"Source": digest}) as figure:
        axes = figure.subplots()
        for row in rows:
            style = {"marker": MARKERS[row.backbone], "color": colour_of(row.attention), "markersize": 8}
            axes.plot(row.pflop, 100 * statistics.mean(row.top1), ls="", **style)
        for name in dict.fromkeys(row.attention for row in rows):
            axes.plot([], [], "o", color=colour_of(name), label=name)
        for name, (pflop, top1) in PUBLISHED.items():
            axes.plot(pflop, top1, "x", color="grey")
            place = {"xytext": (6, 4)} if pflop < 2.5 else {"xytext": (-6, -3), "ha": "right"}
            axes.annotate(name, (pflop, top1), textcoords="offset points", color="grey", **place)
        axes.set(xscale="log", xlabel="operations of training (10^15)", ylabel="CIFAR-10 test top-1 (%)", ylim=(79, 97))
        axes.set_xticks((0.1, 0.2, 0.5, 1, 2, 5))
        axes.grid(alpha=0.3, which="both")
        legend_below(figure)


def draw_local_terms(path: Path, rows: list[Row], digest: str) -> None:
    """Accuracy with its 95 % error: a place per attention, a marker per combination."""
    with picture(path, 8, 4.5, "15 epochs with Muon, DeiT", metadata={"Source": digest}) as figure:
        axes, found, bars = figure.subplots(), local_terms(rows), error_bars(rows)
        for (label, key), marker, shift in zip(LOCAL_KEYS.items(), "sD^o", (-0.18, -0.06, 0.06, 0.18), strict=True):
            points = [(x + shift, cells[key]) for x, cells in enumerate(found.values()) if key in cells]
            values = [100 * statistics.mean(row.top1) for _, row in points]
            errors = [bars(row) for _, row in points]
            axes.errorbar([x for x, _ in points], values, errors, fmt=marker, elinewidth=0.7, label=label)
        axes.set_xticks(range(len(found)), list(found))
        axes.set(xlim=(-0.5, len(found) - 0.5), ylabel="CIFAR-10 test top-1 (%)")
        axes.grid(alpha=0.3, axis="y")
        legend_below(figure)


def draw_fronts(path: Path, rows: list[Row], digest: str) -> None:
    """Accuracy, with its 95 % error, against inference; a line joins what none beats in both."""
    from matplotlib.ticker import MaxNLocator

    with picture(path, 9, 4.5, "15 epochs with Muon, DeiT", metadata={"Source": digest}) as figure:
        bars = error_bars(rows)
        errors = {row.attention: bars(row) for row in rows}
        for axes, (cost, points) in zip(figure.subplots(1, 2, sharey=True), fronts(rows).items(), strict=True):
            best = front(points)
            axes.step(*zip(*(points[name] for name in best), strict=True), where="post", color="grey", zorder=0)
            for name, point in points.items():
                axes.errorbar(*point, yerr=errors[name], fmt="o", color=colour_of(name), elinewidth=0.7, label=name)
            axes.set(xlabel=f"inference: {cost}", xscale="log")
            axes.xaxis.set_major_locator(MaxNLocator(6))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        figure.axes[0].set(ylabel="CIFAR-10 test top-1 (%)")
        legend_below(figure)


def error_bars(rows: list[Row]) -> Callable[[Row], float]:
    """The 95 % error of a row's accuracy in percent, from the test images and the deviation over seeds of all rows."""
    deviation = pooled_deviation([row.top1 for row in rows])
    return lambda row: 196 * mean_and_error(row.top1, deviation)[1]


def drawn_from(path: Path) -> str:
    """The digest of the data that a picture was drawn from, or nothing."""
    from PIL import Image

    if not path.is_file():
        return ""
    with Image.open(path) as image:
        return image.info.get("Source", "")


def main(arguments: list[str] | None = None, root: Path = ROOT, grid: Path = CONFIGS / "grid.csv") -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if anything differs")
    args = parser.parse_args(arguments)
    speeds, machine, spread = read_speeds(root / "results/benchmark/cifar10")
    measured = read_measured(root / "results/benchmark/training")
    inference = read_inference(root / "results/benchmark/cifar10_infer")
    rows = read_rows(read_grid(grid), root / "results/cifar10", speeds, measured, inference)
    source = machine and f"{machine}; its rounds are within {100 * spread:.0f} % of the median"
    made = tables(root, rows, source)
    wrong = []
    for path in sorted([*root.glob("README*.md"), *root.glob("docs/**/*.md"), *root.glob("results/**/*.md")]):
        old = path.read_text(encoding="utf-8")
        place = path.relative_to(root)
        new = BLOCK.sub(lambda block, place=place: block[1] + in_language_of(place, made[block[2]]()) + block[3], old)
        if new != old:
            wrong.append(path)
            if not args.check:
                path.write_text(new, encoding="utf-8")
    pictures: dict[str, tuple[list[Row], Callable[[Path, list[Row], str], None]]] = {
        "accuracy_macs.png": (plain(rows), lambda path, chosen, digest: draw(path, chosen, machine, digest)),
        "accuracy_seconds.png": (
            [row for row in plain(rows) if row.seconds],
            lambda path, chosen, digest: draw(path, chosen, machine, digest),
        ),
        "accuracy_pflop.png": (
            [row for row in rows if row.epochs >= 12 and unchanged(row, "train.epochs=", "augment.")],
            draw_pflop,
        ),
        "local_terms.png": ([row for cells in local_terms(rows).values() for row in cells.values()], draw_local_terms),
        "accuracy_inference.png": ([row for row in trained(rows) if row.inference], draw_fronts),
    }
    for name, (chosen, drawing) in pictures.items():
        path = root / "results/cifar10" / name
        data = DRAWING + json.dumps(
            [[r.backbone, r.attention, r.top1, r.macs, r.seconds, r.epochs, *r.inference] for r in chosen] + [machine]
        )
        digest = hashlib.sha256(data.encode()).hexdigest()
        if chosen and drawn_from(path) != digest:
            wrong.append(path)
            if not args.check:
                drawing(path, chosen, digest)
        elif not chosen and path.is_file():
            wrong.append(path)
            if not args.check:
                path.unlink()
    for path in wrong:
        print(
            f"{path.relative_to(root)} {'differs from the runs: make_tables.py writes it' if args.check else 'written'}"
        )
    return int(bool(wrong) and args.check)


if __name__ == "__main__":
    sys.exit(main())
