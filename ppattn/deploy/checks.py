"""Whether the runtimes give the trained model's answers: each is tried in a process of its own, with a time limit."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from ppattn.errors import UserError

Arrays = dict[str, Any]  # numpy arrays by the name of a batch
BATCHES = (1, 3, 8)
# Largest difference that passes, as a part of the largest output. float32: other orders of addition stay below 1e-5, a
# wrong operator is off by 1e-3 and more. float16 keeps eleven bits (0.1 % is usual), bfloat16 eight (1 to 3 %).
TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 1e-1, "int8": 3e-1}
OPTIONAL = "stock"  # may fail: the export says so
# Low precision is judged by the first class on up to 64 images: near ties (NEAR, in fp32's probability) may swap, and
# MAY_LOSE of the images may change to a class that was not near.
NEAR, MAY_LOSE = 0.05, 0.02


def check_batches(channels: int, size: tuple[int, int], images: np.ndarray | None, stride: int | None = None) -> Arrays:
    """Random batches of 1, 3 and 8, with `stride` also of two larger sizes, and up to 8 real images."""
    rng = np.random.default_rng(0)
    batches = {f"random{n}": rng.standard_normal((n, channels, *size), dtype=np.float32) for n in BATCHES}
    if stride:
        for n, h, w in ((1, size[0], size[1] + stride), (3, size[0] + 2 * stride, size[1] + stride)):
            batches[f"random{n}_{h}x{w}"] = rng.standard_normal((n, channels, h, w), dtype=np.float32)
    if images is not None and len(images):
        batches |= {f"real{n}": np.asarray(images[:n], np.float32) for n in BATCHES if len(images) >= n}
    return batches


def check(
    work: Path, batches: Arrays, expected: Arrays, output: str, engines: list[str], limit: float, report: dict
) -> None:
    """Run engines in another process, on the CPU, for at most `limit` seconds, and compare their answers with the
    model's `expected` probabilities, logits or features (`output`); `UserError` where one but `OPTIONAL` differs."""
    with tempfile.TemporaryDirectory() as place:
        np.savez(f"{place}/inputs.npz", **batches)
        waiting = list(engines)
        while waiting:
            try:
                given = (work, f"{place}/inputs.npz", place, *waiting)
                failed = "it failed: " + failure_reason(run_python("-m", "ppattn.deploy.engines", *given, limit=limit))
            except subprocess.TimeoutExpired:
                failed = f"it did not answer within {limit:.0f} s"
            answered = True
            while waiting and answered:
                engine, problem = waiting.pop(0), failed
                if answered := (result := Path(place) / f"{engine}.npz").exists():
                    with np.load(result) as found:
                        problem = _compare(engine, dict(found), expected, output, report)
                if not problem:
                    report["engine"] = engine
                elif engine == OPTIONAL:
                    report["differences"][engine] = problem
                else:
                    hint = " Export it as fp32." if engine in TOLERANCE else ""
                    raise UserError(f"Not exported: {engine} does not give the model's own answers, {problem}.{hint}")


def _compare(engine: str, found: dict, expected: dict, output: str, report: dict) -> str:
    """Write the differences into the report; returns what is wrong with them, or nothing."""
    by_batch = {name: output_difference(found[name], expected[name], output) for name in expected}
    worst = max(by_batch.values())
    if not np.isfinite(worst):
        return "it gives numbers that are not finite"
    report["differences"][engine], report["by_batch"][engine] = worst, by_batch
    tolerance = TOLERANCE.get(engine, TOLERANCE["fp32"])
    if worst > tolerance:
        return f"its answers differ by {worst:.1e} of the largest output, and {tolerance:.0e} is allowed"
    if engine in TOLERANCE:
        truth, found_class = output_probabilities(expected["judged"], output), found["judged"].argmax(1)[:, None]
        lost = truth.max(1, keepdims=True) - np.take_along_axis(truth, found_class, 1)
        if (lost > NEAR).mean() > MAY_LOSE:
            return f"{100 * (lost > NEAR).mean():.0f} % of the images get another class that was not near"
        report["same_top1"] = float((found_class[:, 0] == truth.argmax(1)).mean())
    return ""


def run_python(*arguments, limit: float | None = None) -> subprocess.CompletedProcess:
    """Run Python with this copy of the package on the CPU, in a folder of its own: converters leave files there."""
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    own = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "CUDA_VISIBLE_DEVICES": ""}
    call = [sys.executable, "-W", "ignore", *map(str, arguments)]
    with tempfile.TemporaryDirectory() as place:
        return subprocess.run(call, capture_output=True, text=True, errors="replace", timeout=limit, cwd=place, env=own)


def failure_reason(done: subprocess.CompletedProcess) -> str:
    """The most informative line of a failed process's errors."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "Error:" in line or "Fatal" in line]
    return (errors or lines or [f"exit code {done.returncode}"])[-1][:200]


def output_difference(found: np.ndarray, expected: np.ndarray, output: str) -> float:
    """Largest difference as a part of the largest output; probabilities [B, K] are compared by their logarithms."""
    if found.shape != expected.shape or not np.isfinite(found).all():
        return float("inf")
    if output == "probabilities":  # which are logits but for a constant per row; below 1e-9 all are the same
        found, expected = (np.log(np.maximum(rows, 1e-9)) for rows in (found, expected))
    return float(np.abs(found - expected).max() / max(np.abs(expected).max(), np.finfo("float32").tiny))


def output_probabilities(found: np.ndarray, output: str) -> np.ndarray:
    """What a program gave, [B, K], as probabilities float32 where it gave logits."""
    if output != "logits":
        return found
    exponents = np.exp(found.astype(np.float64) - found.max(axis=1, keepdims=True))
    return (exponents / exponents.sum(axis=1, keepdims=True)).astype(np.float32)
