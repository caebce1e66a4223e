"""Tables of speed and memory, from results/benchmark, and of Long Range Arena."""

import math
from itertools import product

from ppattn import zoo
from scripts.studies.bench_peers import PEERS
from scripts.tables.markdown import number, table
from scripts.tables.runs import BACKBONES, Results


def peers_table(results: Results, vendor: str) -> str:
    """Training and exported inference of the eight models, divided by PyTorch eager."""
    peers, body = results.json(f"benchmark/peers_{vendor}.json"), []
    for model in PEERS:
        cells = []
        for mode, passes in (("train", 3), ("export", 1)):
            row = peers[f"{mode}_{model}"]
            ours, other = row["candidates"][0], row["candidates"][-1]
            share = f"{2e-7 * passes * zoo.costs()[model]['macs'] * ours['per_second'] / row['gemm_gflops']:.0f}"
            cells += [f"{ours['per_second']:.1f}", f"**{ours['ratio']:.2f}**", share]
            cells += [f"{ours['step_mb'] / other['step_mb']:.2f}"] if mode == "train" else []
        body.append([f"`{model}`", *cells])
    head = ["model", "training, images/s", "÷ PyTorch", "% of GEMM peak", "memory ÷ PyTorch"]
    return table([*head, "Paddle Inference, images/s", "÷ PyTorch", "% of GEMM peak"], body)


ENGINES = {  # candidates of scripts/studies/bench_peers.py: columns of the table
    **{name: name for name in ("Paddle Inference", "ONNX Runtime", "OpenVINO", "auto", "OpenVINO bf16")},
    **{"PyTorch compiled": "torch.compile", "PyTorch SDPA": "PyTorch SDPA", "PyTorch eager": "PyTorch eager"},
}


def engines_table(results: Results, vendor: str, mode: str) -> str:
    """Exported models with every engine and PyTorch: images/s at batch 8, or median milliseconds of one image."""
    peers, body = results.json(f"benchmark/peers_{vendor}.json"), []
    for model in (*PEERS, "deit_nano"):
        found = {one["name"]: one for one in peers.get(f"{mode}_{model}", {}).get("candidates", [])}
        cells = []
        for name in ENGINES:
            one = found.get(name)
            if one and mode == "export":
                compared = "PyTorch eager" in found and name != "PyTorch eager"
                cells.append(f"{one['per_second']:,.0f}" + (f" ({one['ratio']:.2f})" if compared else ""))
            else:
                cells.append(f"{one['p50_ms']:.1f}" if one else None)
        if found:
            body.append([f"`{model}`" + (", InLine" if model == "deit_nano" else ""), *cells])
    return table(["model", *ENGINES.values()], body)


def nano_speed_table(results: Results) -> str:
    """Training speed of every attention on the nano backbones, divided by that of softmax, on both machines."""
    found = {}
    for vendor, machine in (("amd", "AMD"), ("intel", "Intel")):
        for backbone, title in BACKBONES.items():
            if row := results.json(f"benchmark/peers_{vendor}.json").get(f"nano_{backbone}"):
                found[f"{title}, {machine}"] = {c["name"]: f"{c['ratio']:.2f}" for c in row["candidates"]}
    names = dict.fromkeys(name for ratios in found.values() for name in ratios if name != "softmax")
    body = [[f"`{name}`", *(ratios.get(name) for ratios in found.values())] for name in names]
    return table(["attention", *found], body)


SIDES = {196: 224, 784: 448, 3136: 896, 12544: 1792}  # pixels, by the tokens of DeiT-T
TOKENS = tuple(SIDES)


def read_tokens(results: Results, mode: str) -> dict[str, dict[int, dict[str, str]]]:
    """Rows of DeiT-T in results/benchmark/cells.csv by attention and number of tokens; changed options come last."""
    found: dict[str, dict[int, dict[str, str]]] = {}
    for row in results.csv("benchmark/cells.csv"):
        if (row["backbone"], row["mode"]) == ("deit_tiny", mode):
            found.setdefault(row["attention"], {}).setdefault(int(row["tokens"]), row)
    order = {name: place for place, name in enumerate(zoo.attentions())}
    return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))


def against_softmax(results: Results, mode: str, tokens: int) -> dict[str, str]:
    """Times as fast as softmax in the same run, by attention."""
    found = {name: own.get(tokens, {}).get("against_softmax") for name, own in read_tokens(results, mode).items()}
    return {name: f"{float(ratio):.2f}" for name, ratio in found.items() if ratio}


def tokens_table(results: Results) -> str:
    """Times as fast as softmax on DeiT-T by tokens; milliseconds and memory at 3,136 tokens."""
    rows = {mode: read_tokens(results, mode) for mode in ("infer", "train")}
    ratios = [against_softmax(results, mode, size) for mode in rows for size in TOKENS[:3]]
    costs = (("infer", "ms_per_image"), ("train", "ms_per_image"), ("train", "step_mb"))
    body = []
    for name in rows["infer"]:
        at = {mode: own.get(name, {}).get(3136, {}) for mode, own in rows.items()}
        cells = [number(at[mode].get(column), ",.0f") for mode, column in costs]
        body.append([f"`{name}`", *(ratio.get(name) for ratio in ratios), *cells])
    sizes = [str(TOKENS[1]), f"{TOKENS[2]:,}"]
    head = ["attention", f"inference, {TOKENS[0]}", *sizes, f"training, {TOKENS[0]}", *sizes]
    return table([*head, "inference, ms", "training, ms", "training, MB"], body)


def nano_times(results: Results, mode: str) -> dict[tuple[str, int, int], dict[str, str]]:
    """Rows of `deit_nano` in results/benchmark/cells.csv by attention, batch and tokens."""
    own = [r for r in results.csv("benchmark/cells.csv") if (r["backbone"], r["mode"]) == ("deit_nano", mode)]
    return {(row["attention"], int(row["batch"]), int(row["tokens"])): row for row in own}


def pyramids_table(results: Results) -> str:
    """Times as fast as softmax on PVT-T and Swin-T at three image sizes; of softmax the milliseconds."""
    found = {}
    for row in results.csv("benchmark/cells.csv"):
        softmax = row["attention"] == "softmax"
        cell = f"{float(row['ms_per_image']):,.0f} ms" if softmax else number(row["against_softmax"], ".2f")
        found[row["backbone"], row["mode"], row["img_size"].partition("x")[0], row["attention"]] = cell
    titles, modes = {"pvt_tiny": "PVT-T", "swin_tiny": "Swin-T"}, {"infer": "inference", "train": "training"}
    names = dict.fromkeys(key[3] for key in found if key[0] in titles)
    body = [
        [f"{titles[cell[0]]}, {modes[cell[1]]}, {int(cell[2]):,} pixels", *(found.get((*cell, name)) for name in names)]
        for cell in product(titles, modes, ("224", "512", "1024"))
    ]
    return table(["", *(f"`{name}`" for name in names)], body)


def lra_table(results: Results) -> str:
    """Accuracy on the short tasks of Long Range Arena, every seed by itself, and the seconds of the runs."""
    runs: dict[str, dict[str, list[str]]] = {}
    for row in results.csv("lra/runs.csv"):
        cells = runs.setdefault(row["attention"], {})
        cells.setdefault(row["config"], []).append(f"{100 * float(row['top1']):.2f}")
        cells.setdefault(f"{row['config']} seconds", []).append(row["seconds"])
    columns = [f"{task}{what}" for task in ("listops_short", "image_short") for what in ("", " seconds")]
    body = [[f"`{name}`", *(", ".join(cells.get(key, [])) for key in columns)] for name, cells in runs.items()]
    return table(["attention", "ListOps, top-1 %", "seconds", "Image, top-1 %", "seconds"], body)


Lengths = dict[str, dict[int, float]]


def read_lengths(results: Results, mode: str) -> tuple[Lengths, Lengths]:
    """Milliseconds of a step of the sequence backbone in its fastest round, and MB, by attention and tokens."""
    times: Lengths = {}
    memory: Lengths = {}
    for row in results.json(f"benchmark/sequence_{mode}/benchmark.json").get("rows", []):
        name = row["name"].split()[1]
        times.setdefault(name, {})[row["tokens"]] = 1000 / row["fastest_round"]
        memory.setdefault(name, {})[row["tokens"]] = row["peak_mb"]
    return times, memory


def lengths_table(results: Results, mode: str) -> str:
    """Milliseconds of a step of the sequence backbone, how they grow, and memory of training."""
    (times, memory), body = read_lengths(results, mode), []
    low, middle, high = 512, 2048, 16384
    for name, own in times.items():
        exponent = math.log(own[high] / own[middle], high / middle)
        faster = next((f"{tokens:,}" for tokens in sorted(own) if own[tokens] < times["softmax"][tokens]), "none")
        cells = [*(f"{own[n]:.0f}" for n in (low, middle, high)), f"{exponent:.2f}"]
        peaks = [f"{memory[name][tokens]:.0f}" for tokens in (low, high)] if mode == "train" else []
        body.append([f"`{name}`", *cells, faster if name != "softmax" else None, *peaks])
    head = ["attention", *(f"{tokens:,} tokens, ms" for tokens in (low, middle, high)), "exponent"]
    head += ["faster than softmax from", *(["MB, 512 tokens", "MB, 16,384 tokens"] if mode == "train" else [])]
    return table(head, body)
