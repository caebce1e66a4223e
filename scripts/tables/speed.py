"""Tables of speed and memory, from results/benchmark."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from ppattn import zoo
from scripts.studies.bench_peers import PEERS
from scripts.tables.markdown import table
from scripts.tables.runs import BACKBONES, read_csv, read_json


def read_peers(root: Path, vendor: str) -> dict[str, dict]:
    """The rows of scripts/studies/bench_peers.py on processors of one vendor."""
    return read_json(root / f"results/benchmark/peers_{vendor}.json")


def peers_table(root: Path, vendor: str) -> str:
    """Training and exported inference of the eight models, ours divided by the other implementation."""
    peers, body = read_peers(root, vendor), []
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


def engines_table(root: Path, vendor: str) -> str:
    """Exported models: images/s at batch 8 and the time of one image with every engine, beside PyTorch."""
    peers, body = read_peers(root, vendor), []
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


def nano_ratios(root: Path, vendor: str, backbone: str) -> dict[str, str]:
    """Training speed of every attention on a nano backbone, divided by that of softmax."""
    row = read_peers(root, vendor).get(f"nano_{backbone}", {})
    return {c["name"]: f"{c['ratio']:.2f}" for c in row.get("candidates", [])}


def nano_table(root: Path, vendor: str) -> str:
    ratios = {title: nano_ratios(root, vendor, backbone) for backbone, title in BACKBONES.items()}
    ratios = {title: own for title, own in ratios.items() if own}
    names = dict.fromkeys(name for own in ratios.values() for name in own if name != "softmax")
    body = [[f"`{name}`", *(own.get(name, "") for own in ratios.values())] for name in names]
    return table(["attention ÷ softmax", *ratios], body)


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
        against = [own[tokens]["against_softmax"] if tokens in own else "" for tokens in counts[:3]]
        body.append(
            [
                f"`{name}`",
                *(f"{times[tokens]:,.0f}" if tokens in times else "" for tokens in counts),
                *(f"{float(ratio):.2f}" if ratio else "" for ratio in against),
                slope,
                *(f"{float(own[tokens]['step_mb']):,.0f}" if tokens in own else "" for tokens in counts[1:]),
            ]
        )
    head = ["attention", *(f"ms, {tokens:,}" for tokens in counts)]
    head += [*(f"× softmax, {tokens:,}" for tokens in counts[:3]), "exponent"]
    return table([*head, *(f"MB, {tokens:,}" for tokens in counts[1:])], body)
