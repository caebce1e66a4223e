"""Speed against other implementations, all in one interleaved run: PyTorch eager and PaddleClas as it comes.

python scripts/bench_peers.py --torch TORCH/bin/python --peer peers_torch.py --paddleclas CLAS/bin/python
python scripts/bench_peers.py --torch TORCH/bin/python --peer peers_torch.py --rows train_224_inline infer_inline

--torch: a Python with torch 2.13; --peer: a file with `DeiT(kind, dim, depth, heads, classes, size, patch)`, kind
softmax or inline; --paddleclas: a Python with paddlepaddle and `pip install --no-deps paddleclas==2.6.0`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppattn.benchmark import Spec, Worker, exported, measure, ratio, serve
from ppattn.cli import guarded
from ppattn.errors import UserError

TINY = {"softmax": {"dim": 192, "depth": 12, "heads": 3}, "inline": {"dim": 192, "depth": 12, "heads": 6}}
NANO = {"dim": 128, "depth": 6, "heads": 4, "classes": 10, "size": 32, "patch": 4}


def torch_step(spec: dict):
    """One step of the peer: eager, float32 or bfloat16 autocast."""
    import importlib.util

    import torch

    torch.set_num_threads(spec["threads"])
    loader = importlib.util.spec_from_file_location("peer", spec["folder"])
    peer = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(peer)
    torch.manual_seed(0)
    model = peer.DeiT(spec["model"], **spec["arguments"])
    x = torch.randn(spec["batch"], 3, *spec["img_size"])
    y = torch.arange(len(x)) % 10
    half = spec["engine"] == "torch_bf16"
    if spec["mode"] == "infer":
        model.eval()

        def step():
            with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=half):
                model(x).float().numpy()

        return step, {}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, weight_decay=0.05)

    def step():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step, {}


def paddleclas_step(spec: dict):
    """PaddleClas's DeiT-tiny in a plain loop with Paddle's default flags."""
    import paddle
    from paddleclas.ppcls.arch.backbone.model_zoo.distilled_vision_transformer import DeiT_tiny_patch16_224

    model = DeiT_tiny_patch16_224()
    x, y = paddle.randn([spec["batch"], 3, 224, 224]), paddle.arange(spec["batch"])
    optimizer = paddle.optimizer.AdamW(1e-4, parameters=model.parameters(), weight_decay=0.05)

    def step():
        paddle.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.clear_grad()

    return step, {}


def ours(name: str, model: str, **more) -> Worker:
    return Worker(Spec(name, model=model, **more))


def peer(args, name: str, kind: str, arguments: dict, engine: str = "torch", **more) -> Worker:
    spec = Spec(name, engine, kind, arguments, str(Path(args.peer).resolve()), threads=2, **more)
    return Worker(spec, args.torch, [str(Path(__file__).resolve())])


def candidates(args, row: str) -> list[Worker]:
    """The workers of one comparison; the last one is what the others are divided by."""
    work = Path(args.work)
    if row in ("train_224_softmax", "train_224_inline"):
        kind = row.rpartition("_")[2]
        model = "deit_tiny" if kind == "softmax" else "inline_deit_tiny"
        return [
            ours("2 processes x 1 thread", model, mode="train", processes=2, threads=1),
            ours("1 process x 2 threads", model, mode="train", threads=2),
            peer(args, "PyTorch eager, 2 threads", kind, TINY[kind], mode="train"),
        ]
    if row in ("train_32_softmax", "train_32_inline"):
        kind = row.rpartition("_")[2]
        more = {"mode": "train", "batch": 128, "img_size": (32, 32)}
        cell = {"arguments": {"attention": kind, "num_classes": 10}}
        return [
            ours("2 processes x 1 thread", "deit_nano", processes=2, threads=1, **cell, **more),
            ours("1 process x 2 threads", "deit_nano", threads=2, **cell, **more),
            peer(args, "PyTorch eager, 2 threads", kind, NANO, **more),
        ]
    if row in ("infer_softmax", "infer_inline"):
        kind = row.rpartition("_")[2]
        model = "deit_tiny" if kind == "softmax" else "inline_deit_tiny"
        folder = exported(work / model, "paddle", model)
        return [
            Worker(Spec("exported", "paddle", folder=folder, threads=2)),
            ours("dygraph", model, threads=2),
            peer(args, "PyTorch eager, 2 threads", kind, TINY[kind]),
        ]
    if row == "infer_bf16":
        folder = exported(work / "deit_tiny_bf16", "paddle_bf16", "deit_tiny")
        return [
            Worker(Spec("exported bf16", "paddle_bf16", folder=folder, threads=2)),
            peer(args, "PyTorch bfloat16 autocast", "softmax", TINY["softmax"], "torch_bf16"),
        ]
    if row in ("inline_train", "inline_infer"):
        mode = row.rpartition("_")[2]
        more = {"mode": mode, "threads": 2}
        if mode == "train":
            more = {"mode": mode, "threads": 1, "processes": 2}
        return [
            ours("inline, 3 heads", "deit_tiny", arguments={"attention": "inline"}, **more),
            ours("softmax, 3 heads", "deit_tiny", **more),
        ]
    if row == "inline_export":
        kinds = ("inline", "softmax")
        folders = [exported(work / f"deit_tiny_{kind}", "paddle", "deit_tiny", attention=kind) for kind in kinds]
        return [
            Worker(Spec(f"{kind}, 3 heads", "paddle", folder=folder, threads=2))
            for kind, folder in zip(kinds, folders, strict=True)
        ]
    if row in ("settings_softmax", "settings_inline"):
        model = "deit_tiny" if row == "settings_softmax" else "inline_deit_tiny"
        return [
            ours("ppattn.setup()", model, mode="train", threads=2),
            ours("without the compiled kernels", model, mode="train", threads=2, settings="plain"),
            ours("threads and contiguous tensors", model, mode="train", threads=2, settings="stride"),
            ours("threads alone", model, mode="train", threads=2, settings="threads"),
            ours("Paddle as it comes", model, mode="train", settings="none"),
        ]
    return [
        ours("2 processes x 1 thread", "deit_tiny", mode="train", processes=2, threads=1),
        Worker(Spec("PaddleClas 2.6.0", "paddleclas", mode="train"), args.paddleclas, [str(Path(__file__).resolve())]),
    ]


ROWS = ("train_224_softmax", "train_224_inline", "train_32_softmax", "train_32_inline", "infer_softmax", "infer_inline")
ROWS += (
    "infer_bf16",
    "inline_train",
    "inline_infer",
    "inline_export",
    "paddleclas",
    "settings_softmax",
    "settings_inline",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", help="Python interpreter with torch")
    parser.add_argument("--peer", help="file with the PyTorch model")
    parser.add_argument("--paddleclas", help="Python interpreter with paddleclas")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=ROWS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--work", default="runs/bench_peers", help="for exported folders")
    parser.add_argument("--output", default="results/benchmark/peers.json")
    args = parser.parse_args()
    sys.exit(guarded(lambda: compare(args)))


def check(args) -> None:
    """Refuse a row whose other implementation is not there."""
    for row in args.rows:
        torch = row.startswith(("train_", "infer_"))
        for option in ("torch", "peer") if torch else ("paddleclas",) if row == "paddleclas" else ():
            given = getattr(args, option)
            if given is None:
                raise UserError(f"Row {row} needs --{option}; --rows names others.")
            if not Path(given).is_file():
                raise UserError(f"--{option} {given} is not a file.")


def compare(args) -> None:
    check(args)
    out = Path(args.output)
    found = json.loads(out.read_text()) if out.exists() else {}
    for row in args.rows:
        workers = [Worker(Spec("matrix product", "gemm", batch=1, threads=2)), *candidates(args, row)]
        try:
            peak, *rows = measure(workers, args.rounds, args.seconds)
        finally:
            for worker in workers:
                worker.close()
        found[row] = {
            "gemm_gflops": 2e-9 * peak["macs"] * peak["images_per_second"],
            "candidates": [
                {
                    "name": r["name"],
                    "images_per_second": round(r["images_per_second"], 2),
                    "spread": [round(r["slowest_round"], 2), round(r["fastest_round"], 2)],
                    "ratio": round(ratio(r, rows[-1]), 3),
                }
                for r in rows
            ],
        }
        print(row, f"GEMM {found[row]['gemm_gflops']:.0f} GFLOP/s")
        for r in found[row]["candidates"]:
            print(
                f"  {r['name']:<28} {r['images_per_second']:8.1f} img/s  {r['spread']}  ratio {r['ratio']:.2f}",
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
