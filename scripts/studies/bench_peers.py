"""Speed and memory against other implementations: all candidates of a row stay loaded and run in turn.

python -m scripts.studies.bench_peers                                          # all rows
python -m scripts.studies.bench_peers --rows train_deit_tiny export_soft_tiny

PyTorch is installed into .venv-peers (requirements-peers.txt), unless --torch names a Python that has it. Its models
are in peers_torch.py.

Rows: train_MODEL, export_MODEL and single_MODEL (training, and exports with every engine at batch 8 and 1, against
PyTorch in the official formulation, with scaled_dot_product_attention and with torch.compile; the weights are the same,
and the first logits must be), export_deit_nano and single_deit_nano (InLine, without PyTorch), nano_BACKBONE (training
with every attention against softmax), inline_export, settings_MODEL. Ratios are to the last candidate of a row, which
is PyTorch eager where it takes part.
"""

import argparse
import json
import subprocess
import sys
import time
import venv
from pathlib import Path

import numpy as np

from ppattn import zoo
from ppattn.benchmark import GEMM_FLOPS, Spec, Worker, measure, model_to_measure, random_batches, ratio, serve
from ppattn.cli import guarded
from ppattn.errors import UserError
from ppattn.runtime import cpu

PEERS = ("deit_tiny", "inline_deit_tiny", "inline_pvt_tiny", "inline_swin_tiny", "pola_pvt_tiny", "pola_swin_tiny")
PEERS += ("soft_tiny", "swin_tiny")
NANO_EXPORT = {"attention": "inline", "num_classes": 10}
ROWS = [f"{mode}_{model}" for mode in ("train", "export", "single") for model in PEERS]
ROWS += ["export_deit_nano", "single_deit_nano", "nano_deit_nano", "nano_pvt_nano", "nano_swin_nano"]
ROWS += ["inline_export", "settings_deit_tiny", "settings_inline_deit_tiny"]
EXPORTED = {"Paddle Inference": "paddle", "ONNX Runtime": "onnxruntime", "OpenVINO": "openvino", "auto": "auto"}
FEW = {"batch": 8, "threads": 2}
TORCH = {"torch_compile": "PyTorch compiled", "torch_sdpa": "PyTorch SDPA", "torch": "PyTorch eager"}
WITHOUT_SOFTMAX = ("inline_deit_tiny", "inline_pvt_tiny", "pola_pvt_tiny")  # nothing for SDPA to do
WITH_TORCH = ("train_", "export_", "single_")
FIGURES = {"per_second": "images_per_second", "p50_ms": "step_ms_p50", "p95_ms": "step_ms_p95", "step_mb": "step_mb"}
CLOSE = 1e-4  # largest difference of first logits
SELF = ["-m", "scripts.studies.bench_peers"]


def torch_step(spec: dict):
    """One step of the other implementation."""
    import torch

    from scripts.studies import peers_torch

    torch.set_num_threads(spec["threads"])
    torch.manual_seed(0)
    model = peers_torch.build(spec["model"], sdpa=spec["engine"] != "torch")
    batches, labels = random_batches(spec["batch"], tuple(spec["img_size"])), torch.arange(spec["batch"])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, weight_decay=0.05)

    def infer():
        with torch.inference_mode():
            return model(torch.from_numpy(next(batches))).numpy()

    def train():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(torch.from_numpy(next(batches))), labels).backward()
        optimizer.step()

    model.eval()
    facts = {"answer": infer()[0, :10].tolist()}
    if spec["engine"] == "torch":
        np.savez(spec["weights"], **{name: t.detach().numpy() for name, t in model.state_dict().items()})
    elif spec["engine"] == "torch_compile":
        model = torch.compile(model)
    if spec["mode"] == "infer":
        return infer, facts
    model.train()
    return train, facts


def exported(folder: Path, model: str, weights: str = "", **arguments) -> str:
    """Export a model for Paddle Inference and as ONNX; the folder."""
    import ppattn

    ppattn.setup(seed=0)
    ppattn.export(model_to_measure(model, weights, **arguments), folder, format="both")
    return str(folder)


def candidates(row: str, torch: Path | None, work: Path) -> list[Worker]:
    """The workers of one comparison; the last one is what the others are divided by."""
    kind, _, name = row.partition("_")
    if kind == "nano":
        more = {"mode": "train", "batch": 64, "img_size": (32, 32), "threads": 2}
        order = [attention for attention in zoo.attentions() if attention != "softmax"] + ["softmax"]
        return [Worker(Spec(x, model=name, arguments={"attention": x, "num_classes": 10}, **more)) for x in order]
    if row == "inline_export":
        folders = {x: exported(work / f"deit_tiny_{x}", "deit_tiny", attention=x) for x in ("inline", "softmax")}
        return [Worker(Spec(f"{x}, 3 heads", "paddle", folder=folder, threads=2)) for x, folder in folders.items()]
    if kind == "settings":
        settings = {"all": "ppattn.setup()", "plain": "without the compiled kernels", "none": "Paddle's defaults"}
        return [Worker(Spec(text, model=name, mode="train", settings=key, **FEW)) for key, text in settings.items()]
    few: dict = FEW | {"batch": 1} if kind == "single" else FEW
    weights, mode = str(work / f"{name}.npz"), "train" if kind == "train" else "infer"
    engines = [engine for engine in TORCH if engine != "torch_sdpa" or name not in WITHOUT_SOFTMAX]
    if name == "deit_nano":
        few, weights, engines = few | {"img_size": (32, 32), "arguments": NANO_EXPORT}, "", []
    peers = [
        Worker(Spec(TORCH[engine], engine, name, weights=weights, mode=mode, **few), str(torch), SELF)
        for engine in engines
    ]
    if kind == "train":
        return [Worker(Spec("ppattn", model=name, weights=weights, mode="train", **FEW)), *peers]
    folder = exported(work / name, name, weights, **few.get("arguments", {}))
    ours = [Spec(label, engine, name, folder=folder, **few) for label, engine in EXPORTED.items()]
    if "avx512_bf16" in cpu.cpuinfo("flags"):
        ours.append(Spec("OpenVINO bf16", "openvino", name, folder=folder, precision="bf16", **few))
    return [*map(Worker, ours), Worker(Spec("dygraph", model=name, weights=weights, **few)), *peers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", type=Path, help="Python interpreter with torch (default: that of .venv-peers)")
    parser.add_argument("--rows", nargs="*", choices=ROWS, metavar="ROW")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--work", type=Path, default="runs/bench_peers", help="for weights and exported folders")
    parser.add_argument("--output", type=Path, default="results/benchmark", help="folder for peers_VENDOR.json")
    args = parser.parse_args()
    sys.exit(guarded(lambda: compare(args)))


def torch_python() -> Path:
    """The Python of .venv-peers with the packages of requirements-peers.txt, which is made where it is not there."""
    python = Path(__file__).resolve().parents[2] / ".venv-peers/bin/python"
    if not python.exists():
        print("Installing into .venv-peers ...", flush=True)
        venv.create(python.parents[1], with_pip=True)
    wanted = Path(__file__).with_name("requirements-peers.txt")
    subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-r", wanted], check=True)
    return python


def compare(args) -> None:
    from ppattn.runtime.environment import environment  # imports Paddle, which the processes of PyTorch lack

    if args.torch and not args.torch.is_file():
        raise UserError(f"--torch {args.torch} is not a file.")
    rows = args.rows or ROWS
    torch = args.torch or (torch_python() if any(row.startswith(WITH_TORCH) for row in rows) else None)
    work = args.work.resolve()
    for folder in (work, args.output):
        folder.mkdir(parents=True, exist_ok=True)
    vendor = cpu.cpuinfo("vendor_id").removeprefix("Genuine").removeprefix("Authentic").lower() or "unknown"
    out = args.output / f"peers_{vendor}.json"
    found = json.loads(out.read_text()) if out.exists() else {}
    commit = environment(" ".join(sys.argv))["git_commit"]
    for row in rows:
        workers = [Worker(Spec("matrix product", "gemm", batch=1, threads=2)), *candidates(row, torch, work)]
        try:
            gemm, *measured = measure(workers, args.rounds, args.seconds)
        finally:
            for worker in workers:
                worker.close()
        answers = [worker.ready["answer"] for worker in workers if "answer" in worker.ready]
        difference = max((float(np.abs(np.subtract(a, answers[-1])).max()) for a in answers), default=None)
        if difference is not None and not difference < CLOSE:
            raise UserError(f"{row}: the first logits differ by {difference}: these are not the same models.")
        found[row] = {
            "processor": cpu.cpuinfo("model name"),
            "date": time.strftime("%Y-%m-%d"),
            "commit": commit,
            "gemm_gflops": round(1e-9 * GEMM_FLOPS * gemm["images_per_second"], 1),
            "largest_difference": difference,
            "candidates": [
                {"name": r["name"], "ratio": round(ratio(r, measured[-1]), 3)}
                | {key: round(r[own], 2) for key, own in FIGURES.items()}
                | {"spread": [round(r["slowest_round"], 2), round(r["fastest_round"], 2)]}
                for r in measured
            ],
        }
        print(f"{row}: GEMM {found[row]['gemm_gflops']:.0f} GFLOP/s, first logits differ by at most {difference}")
        for r in found[row]["candidates"]:
            print(
                f"  {r['name']:<28} {r['per_second']:8.2f}/s  ratio {r['ratio']:.2f}  {r['step_mb']:.0f} MB", flush=True
            )
        out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        serve(lambda: torch_step(json.loads(sys.argv[1])))
    else:
        main()
