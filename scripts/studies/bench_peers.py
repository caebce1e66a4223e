"""Speed and memory against other implementations: all candidates of a row stay loaded and run in turn.

python scripts/studies/bench_peers.py                                          # all rows but PaddleClas's
python scripts/studies/bench_peers.py --rows train_deit_tiny export_soft_tiny

PyTorch is installed into .venv-peers (requirements-peers.txt), unless --torch names a Python that has it. Its models
are in peers_torch.py. --paddleclas: a Python with paddlepaddle and `pip install --no-deps paddleclas==2.6.0`.

Rows: train_MODEL, export_MODEL and single_MODEL (training, and exports with every engine at batch 8 and 1, against
PyTorch in the official formulation, with scaled_dot_product_attention and with torch.compile; the weights are the same,
and the first logits must be), export_deit_nano and single_deit_nano (InLine, without PyTorch), nano_BACKBONE (training
with every attention against softmax), drop_path, inline_export, product (2048^3), settings_MODEL, paddleclas. Ratios
are to the last candidate of a row, which is PyTorch eager where it takes part.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import venv
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from ppattn import zoo
from ppattn.benchmark import GEMM_FLOPS, Spec, Worker, build, measure, random_batches, ratio, serve
from ppattn.cli import guarded
from ppattn.errors import UserError
from ppattn.runtime import cpu

ROOT = Path(__file__).resolve().parents[2]
PEERS = ("deit_tiny", "inline_deit_tiny", "inline_pvt_tiny", "inline_swin_tiny", "pola_pvt_tiny", "pola_swin_tiny")
PEERS += ("soft_tiny", "swin_tiny")
NANO_EXPORT = {"attention": "inline", "num_classes": 10}
BACKBONES = ("deit_nano", "pvt_nano", "swin_nano")
ROWS = ["product", *(f"{mode}_{model}" for mode in ("train", "export", "single") for model in PEERS)]
ROWS += [f"{mode}_deit_nano" for mode in ("export", "single")]
ROWS += [*(f"nano_{backbone}" for backbone in BACKBONES), "drop_path", "inline_export"]
ROWS += ["settings_deit_tiny", "settings_inline_deit_tiny", "paddleclas"]
EXPORTED = {"Paddle Inference": "paddle", "ONNX Runtime": "onnxruntime", "OpenVINO": "openvino", "auto": "auto"}
FEW = {"batch": 8, "threads": 2}
TORCH = {"torch_compile": "PyTorch compiled", "torch_sdpa": "PyTorch SDPA", "torch": "PyTorch eager"}
WITHOUT_SOFTMAX = ("inline_deit_tiny", "inline_pvt_tiny", "pola_pvt_tiny")  # nothing for SDPA to do
CLOSE = 1e-4  # largest difference of first logits
SELF = [str(Path(__file__).resolve())]


def torch_step(spec: dict):
    """One step of the other implementation."""
    import peers_torch
    import torch

    torch.set_num_threads(spec["threads"])
    if spec["engine"] == "torch_product":
        a = torch.randn(2048, 2048)
        return lambda: (a @ a).numpy(), {}
    torch.manual_seed(0)
    model = peers_torch.build(spec["model"], sdpa=spec["engine"] != "torch")
    batches = random_batches(spec["batch"], tuple(spec["img_size"]))
    model.eval()
    with torch.inference_mode():
        answer = model(torch.from_numpy(next(batches)))[0, :10].tolist()
    if spec["engine"] == "torch":
        np.savez(spec["weights"], **{name: t.detach().numpy() for name, t in model.state_dict().items()})
    elif spec["engine"] == "torch_compile":
        model = torch.compile(model)
    if spec["mode"] == "infer":

        def step():
            with torch.inference_mode():
                model(torch.from_numpy(next(batches))).numpy()

        return step, {"answer": answer}
    y = torch.arange(spec["batch"])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, weight_decay=0.05)
    model.train()

    def step():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(torch.from_numpy(next(batches))), y).backward()
        optimizer.step()

    return step, {"answer": answer}


def paddleclas_step(spec: dict):
    """PaddleClas's DeiT-tiny in a plain loop with Paddle's default flags."""
    import paddle
    from paddleclas.ppcls.arch.backbone.model_zoo.distilled_vision_transformer import DeiT_tiny_patch16_224

    model = DeiT_tiny_patch16_224()
    batches, y = random_batches(spec["batch"], (224, 224)), paddle.arange(spec["batch"])
    optimizer = paddle.optimizer.AdamW(1e-4, parameters=model.parameters(), weight_decay=0.05)

    def step():
        paddle.nn.functional.cross_entropy(model(paddle.to_tensor(next(batches))), y).backward()
        optimizer.step()
        optimizer.clear_grad()

    return step, {}


def exported(folder: Path, model: str, weights: str = "", **arguments) -> str:
    """Export a model for Paddle Inference and as ONNX; the folder."""
    import ppattn

    ppattn.setup(seed=0)
    ppattn.export(build(model, weights, **arguments), folder, format="both")
    return str(folder)


def candidates(args, row: str) -> list[Worker]:
    """The workers of one comparison; the last one is what the others are divided by."""
    work = Path(args.work).resolve()
    work.mkdir(parents=True, exist_ok=True)
    kind, _, name = row.partition("_")
    if row == "product":
        torch = Spec("torch", "torch_product", batch=1, threads=2)
        return [
            Worker(Spec("paddle.matmul after setup()", "gemm", batch=1, threads=2)),
            Worker(Spec("paddle.matmul, Paddle's defaults", "gemm", batch=1, threads=2, settings="none")),
            Worker(Spec("numpy", "numpy_product", batch=1, threads=2)),
            Worker(torch, args.torch, SELF),
        ]
    if kind in ("train", "export", "single"):
        few = FEW | {"batch": 1} if kind == "single" else FEW
        weights = str(work / f"{name}.npz")
        mode = "train" if kind == "train" else "infer"
        engines = [engine for engine in TORCH if engine != "torch_sdpa" or name not in WITHOUT_SOFTMAX]
        if name == "deit_nano":
            few, weights, engines = few | {"img_size": (32, 32), "arguments": NANO_EXPORT}, "", []
        peers = [
            Worker(Spec(TORCH[engine], engine, name, weights=weights, mode=mode, **few), args.torch, SELF)
            for engine in engines
        ]
        if kind == "train":
            return [Worker(Spec("ppattn", model=name, weights=weights, mode="train", **FEW)), *peers]
        folder = exported(work / name, name, weights, **few.get("arguments", {}))
        ours = [Spec(label, engine, name, folder=folder, **few) for label, engine in EXPORTED.items()]
        if "avx512_bf16" in cpu.cpuinfo("flags"):
            ours.append(Spec("OpenVINO bf16", "openvino", name, folder=folder, precision="bf16", **few))
        return [*map(Worker, ours), Worker(Spec("dygraph", model=name, weights=weights, **few)), *peers]
    if kind == "nano":
        more = {"mode": "train", "batch": 64, "img_size": (32, 32), "threads": 2}
        order = [mechanism for mechanism in zoo.attentions() if mechanism != "softmax"] + ["softmax"]
        return [Worker(Spec(m, model=name, arguments={"attention": m, "num_classes": 10}, **more)) for m in order]
    if row == "drop_path":
        return [
            Worker(
                Spec(f"drop path {rate}", model="deit_tiny", arguments={"drop_path_rate": rate}, mode="train", **FEW)
            )
            for rate in (0.1, 0.0)
        ]
    if row == "inline_export":
        kinds = ("inline", "softmax")
        folders = [exported(work / f"deit_tiny_{kind}", "deit_tiny", attention=kind) for kind in kinds]
        return [
            Worker(Spec(f"{kind}, 3 heads", "paddle", folder=folder, threads=2))
            for kind, folder in zip(kinds, folders, strict=True)
        ]
    if kind == "settings":
        settings = {"all": "ppattn.setup()", "plain": "without the compiled kernels", "none": "Paddle's defaults"}
        return [Worker(Spec(text, model=name, mode="train", settings=key, **FEW)) for key, text in settings.items()]
    return [
        Worker(Spec("ppattn", model="deit_tiny", mode="train", **FEW)),
        Worker(Spec("PaddleClas 2.6.0", "paddleclas", mode="train", batch=8), args.paddleclas, SELF),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", help="Python interpreter with torch (default: that of .venv-peers)")
    parser.add_argument("--paddleclas", help="Python interpreter with paddleclas")
    parser.add_argument("--rows", nargs="*", choices=ROWS, metavar="ROW")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--work", default="runs/bench_peers", help="for weights and exported folders")
    parser.add_argument("--output", default="results/benchmark", help="folder for peers_VENDOR.json")
    args = parser.parse_args()
    sys.exit(guarded(lambda: compare(args)))


def check(args) -> None:
    """Find the other implementations that the rows need, or install PyTorch."""
    if "paddleclas" in args.rows and not args.paddleclas:
        raise UserError("Row paddleclas needs --paddleclas; --rows names others.")
    for option in ("torch", "paddleclas"):
        given = getattr(args, option)
        if given and not Path(given).is_file():
            raise UserError(f"--{option} {given} is not a file.")
    if not args.torch and any(row.startswith(("train_", "export_", "single_", "product")) for row in args.rows):
        args.torch = str(environment())


def environment() -> Path:
    """The Python of .venv-peers, which is created on first use."""
    python = ROOT / ".venv-peers/bin/python"
    if not python.exists():
        print("Installing PyTorch into .venv-peers ...", flush=True)
        venv.create(python.parents[1], with_pip=True)
    wanted = Path(__file__).with_name("requirements-peers.txt")
    subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-r", wanted], check=True)
    return python


def compare(args) -> None:
    args.rows = args.rows or [row for row in ROWS if row != "paddleclas" or args.paddleclas]
    check(args)
    vendor = cpu.cpuinfo("vendor_id").removeprefix("Genuine").removeprefix("Authentic").lower() or "unknown"
    out = Path(args.output) / f"peers_{vendor}.json"
    found = json.loads(out.read_text()) if out.exists() else {}
    from ppattn.runtime import environment as run

    commit = run.environment(" ".join(sys.argv))["git_commit"]
    for row in args.rows:
        workers = candidates(args, row)
        if row != "product":
            workers.insert(0, Worker(Spec("matrix product", "gemm", batch=1, threads=2)))
        try:
            rows = measure(workers, args.rounds, args.seconds)
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
            "gemm_gflops": round(1e-9 * GEMM_FLOPS * rows[0]["images_per_second"], 1),
            "largest_difference": difference,
            "candidates": [
                {
                    "name": r["name"],
                    "per_second": round(r["images_per_second"], 2),
                    "spread": [round(r["slowest_round"], 2), round(r["fastest_round"], 2)],
                    "ratio": round(ratio(r, rows[-1]), 3),
                    "p50_ms": round(r["step_ms_p50"], 2),
                    "p95_ms": round(r["step_ms_p95"], 2),
                    "step_mb": round(r["step_mb"]),
                }
                for r in (rows if row == "product" else rows[1:])
            ],
        }
        print(f"{row}: GEMM {found[row]['gemm_gflops']:.0f} GFLOP/s, first logits differ by at most {difference}")
        for r in found[row]["candidates"]:
            spread = f"[{r['spread'][0]}, {r['spread'][1]}]"
            print(
                f"  {r['name']:<28} {r['per_second']:8.2f}/s {spread:>20}  ratio {r['ratio']:.2f}  {r['step_mb']} MB",
                flush=True,
            )
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        given = json.loads(sys.argv[1])
        serve(lambda: (paddleclas_step if given["engine"] == "paddleclas" else torch_step)(given))
    else:
        main()
