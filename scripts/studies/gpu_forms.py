"""Which plain forms of the attentions are right and fast on a GPU, in float32, bfloat16 and float16.

python scripts/studies/gpu_forms.py --prepare gpu_inputs --data data/cifar10     # with Paddle: see gpu_inputs.py
python scripts/studies/gpu_forms.py --inputs gpu_inputs --output gpu_results     # with PyTorch 2.8 or newer on a GPU
python scripts/studies/gpu_forms.py --compare gpu_inputs/operators.npz           # only: are the transcriptions right?
python scripts/studies/gpu_forms.py --inputs gpu_inputs --output rehearsal --device cpu --small

It measures the libraries that Paddle calls (cuBLAS, cuDNN, FlashAttention, CUTLASS) through the same sequence of eager
operators in PyTorch, not Paddle itself: kernels that only Paddle has, above all its depth-wise convolution, and the
time its operators take on the host are not in the numbers. Products of half precision accumulate in float32, as in
Paddle.

Operators (torch_forms.py, torch_local.py), for 196 to 12,544 tokens: relative distances of outputs and gradients from
float64 (in the Frobenius norm, and largest difference by largest value) for inputs of standard deviation 1 and `large`,
at a batch of one or two; then median times and peak memory of forward, and of forward and backward together, for
50,176 tokens in all, 384 channels in 6 heads (windows: 49 tokens, 12 heads). Programs (onnx_torch.py): exported models
node by node, against their golden outputs, and latency. After `--seconds` what is left is skipped and listed.

Results: results.json (all), operators.csv, programs.csv; rewritten after every step.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
SIDES = (56, 14, 28, 112)  # of the grid; the most telling one first
MOST_WITH_MAP = 28  # side, for the order (q k^T) v
RESERVE = 3.0  # seconds for the summary
BATCHES = (1, 64, 8)
COLUMNS = ["operator", "form", "dtype", "tokens", "batch", "out_fro", "out_max", "grad_fro", "grad_max", "grad_worst"]
COLUMNS += ["finite", "large", "large_out_fro", "large_out_max", "large_grad_fro", "large_grad_max", "large_finite"]
COLUMNS += ["forward_ms", "both_ms", "forward_mb", "both_mb", "error"]


class Study:
    """The results, and the time that is left."""

    def __init__(self, output: Path, device: str, small: bool, seconds: float):
        self.output, self.device, self.small = output, device, small
        self.begin, self.end = time.monotonic(), time.monotonic() + seconds
        self.longest: dict[str, float] = {}
        self.exported: dict[str, Any] = {}
        self.results: dict[str, Any] = {"operators": [], "programs": [], "skipped": [], "errors": {}}
        output.mkdir(parents=True, exist_ok=True)

    def step(self, kind: str, label: str, call: Callable[[], None]) -> None:
        """Do it, unless the time left is less than the longest step of this kind took."""
        if self.end - time.monotonic() < RESERVE + self.longest.get(kind, 0.0):
            self.results["skipped"].append(label)
            return
        start = time.monotonic()
        try:
            call()
        except Exception as error:  # one failure must not cost the rest
            self.results["errors"][label] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        spent = time.monotonic() - start
        self.longest[kind] = max(spent, self.longest.get(kind, 0.0))
        print(f"{time.monotonic() - self.begin:6.1f} s  {label} ({spent:.1f} s)", flush=True)
        self.save()

    def save(self) -> None:
        (self.output / "results.json").write_text(json.dumps(self.results, indent=1) + "\n")
        for name in ("operators", "programs"):
            rows = self.results[name]
            columns = COLUMNS if name == "operators" else list(dict.fromkeys(key for row in rows for key in row))
            with (self.output / f"{name}.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, columns, extrasaction="ignore", restval="")
                writer.writeheader()
                writer.writerows(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="write the inputs, with Paddle")
    parser.add_argument("--data", help="folder of CIFAR-10, for --prepare")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="operators.npz: compare with it, nothing else")
    parser.add_argument("--inputs", type=Path, metavar="FOLDER", help="what --prepare wrote")
    parser.add_argument("--output", type=Path, help="folder of the results")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="few tokens, to rehearse on a CPU")
    parser.add_argument("--seconds", type=float, default=270.0)
    given = parser.parse_args()
    if given.prepare:
        sys.path.insert(0, str(ROOT))
        from gpu_inputs import prepare

        prepare(given.prepare, given.data)
    elif given.compare:
        rows = compared(given.compare, given.device)
        for row in rows:
            print(f"{row['operator']:12} {row['form']:17} {row['output']:.1e} {row['gradient']:.1e}")
        return int(max(max(row["output"], row["gradient"]) for row in rows) > 1e-4)
    elif given.output:
        run(Study(given.output, given.device, given.small, given.seconds), given.inputs)
    else:
        parser.error("--prepare, --compare or --output is needed")
    return 0


def compared(file: Path, device: str) -> list[dict]:
    from measure_forms import compare

    with np.load(file) as arrays:
        return compare(dict(arrays), device)


def run(study: Study, inputs: Path | None) -> None:
    import torch
    from gpu_summary import show, summarise
    from measure_forms import environment, overhead

    if study.device == "cpu":
        torch.set_num_threads(1)
    # Paddle's products of half precision accumulate in float32.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    results, device = study.results, study.device
    results["date"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    study.step("once", "environment", lambda: results.update(environment=environment(device)))
    study.step("once", "overhead", lambda: results.update(overhead=overhead(device)))
    if inputs:
        file = inputs / "operators.npz"
        study.step("once", "comparison", lambda: results.update(comparison=compared(file, device)))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        operators(study, dtype)
        if dtype == torch.bfloat16:
            study.step("operator", "linear_elu again", lambda: results.update(again=again(study)))
            if inputs:
                programs(study, inputs, "answers")
    if inputs:
        programs(study, inputs, "latency")
    results["summary"] = summarise(results["operators"])
    results["seconds"] = round(time.monotonic() - study.begin, 1)
    study.save()
    show(results)


def again(study: Study) -> list[dict]:
    """One operator a second time: what differs from its rows is noise."""
    import torch
    from measure_forms import measure

    rows = measure("linear_elu", torch.bfloat16, 14 if study.small else SIDES[0], study.device, study.small)
    return [{key: row.get(key) for key in ("form", "tokens", "forward_ms", "both_ms")} for row in rows]


def operators(study: Study, dtype: Any) -> None:
    from measure_forms import OPERATORS, measure

    def add(operator: str, side: int) -> None:
        study.results["operators"] += measure(operator, dtype, side, study.device, study.small)

    sides = (14, 28) if study.small else SIDES
    for side in sides:
        for operator in OPERATORS:
            once = operator == "window" and side != sides[0]
            if not once and (operator != "linear_map" or side <= MOST_WITH_MAP):
                label = f"{operator} {dtype} {side * side if operator != 'window' else 'windows'}"
                study.step("operator", label, lambda a=operator, b=side: add(a, b))


def programs(study: Study, inputs: Path, kind: str) -> None:
    """Answers: all modes against the golden outputs. Latency: four of them, by batch, one node after another."""
    import torch
    from measure_forms import timed
    from onnx_torch import MODES, Program, judged, names_in, read

    def answers(name: str) -> None:
        study.exported[name] = read(inputs, name)
        modes = [mode for mode in MODES if not study.small or mode in ("fp32", "bf16")]
        study.results["programs"] += [judged(study.exported[name], mode, study.device) for mode in modes]

    def latency(name: str) -> None:
        exported = study.exported[name]
        for row in study.results["programs"]:
            if row["program"] == name and row["mode"] in ("fp32", "tf32", "bf16", "fp16"):
                program = Program(exported.model, MODES[row["mode"]], study.device)
                row["nodes"] = len(program.steps)
                for batch in BATCHES[: 1 if study.small else None]:
                    images = torch.randn(batch, *exported.images.shape[1:], device=study.device)
                    row[f"batch{batch}_ms"] = round(timed(lambda p=program, x=images: p(x), study.device, 0.2, 5), 3)

    for name in names_in(inputs):
        if kind == "answers" or name in study.exported:
            study.step(kind, f"{name} {kind}", lambda name=name: (answers if kind == "answers" else latency)(name))


if __name__ == "__main__":
    sys.exit(main())
