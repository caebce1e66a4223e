"""Speed of several candidates. Each runs in a process of its own, and they take turns, round by round.

The parent asks one worker after the other for a burst of steps, so a machine whose speed drifts slows all of them
alike. A figure is the median over the rounds, a comparison the median of the ratios within the rounds. A worker warms
up before its first burst. A training step is forward pass, loss, backward pass and AdamW; the random images of each
step are in memory already and differ from those of the step before.

A worker is `python -m ppattn.benchmark SPEC`; it speaks JSON lines on its standard streams.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppattn.errors import UserError
from ppattn.runtime.cpu import MKL_VARIABLE
from ppattn.runtime.plugins import IMPORTED, import_modules
from ppattn.text import progress

if TYPE_CHECKING:
    from paddle import nn

WARM_UP = 3  # steps
BATCHES = 8  # random batches that the steps take in turn
GEMM_FLOPS = 2 * 2048**3  # of one step of the engines "gemm" and "numpy_product"
COPY_BYTES = 512 << 20  # read and written by one step of the engine "copy"


@dataclass(frozen=True)
class Spec:
    """One thing to measure.

    engine: dygraph; one of the engines of `ppattn.Predictor` for an exported `folder`; gemm, numpy_product, copy (the
        machine: products of 2048 x 2048 matrices, 256 MB).
    weights: an .npz file with the model's parameters under their official names; the worker then returns its first
        logits for a seeded batch as `answer`, so that implementations can be compared.
    imports: modules of the user, with their folders.
    settings: "all" of `ppattn.setup`, "plain" without the compiled kernels, "none" for Paddle's defaults.
    """

    name: str
    engine: str = "dygraph"
    model: str = ""
    arguments: dict = field(default_factory=dict)
    folder: str = ""
    precision: str = "fp32"
    weights: str = ""
    mode: str = "infer"
    batch: int = 16
    img_size: tuple[int, int] = (224, 224)
    threads: int | None = None
    settings: str = "all"
    imports: dict[str, str] = field(default_factory=lambda: dict(IMPORTED))


class Worker:
    """The process of one spec, started and warm."""

    def __init__(self, spec: Spec, python: str = sys.executable, module: list[str] | None = None):
        self.spec = spec
        environment = {name: value for name, value in os.environ.items() if name != MKL_VARIABLE}  # `setup` sets it
        if spec.threads:
            environment["OPENBLAS_NUM_THREADS"] = str(spec.threads)  # numpy's
        self.process: Any = subprocess.Popen(
            [python, *(module or ["-m", "ppattn.benchmark"]), json.dumps(asdict(spec))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[1],  # -m imports from here first
        )
        try:
            self.ready = self._answer()
            self.step_seconds = self.run(1)
        except BaseException:
            self.close()
            raise

    def _answer(self) -> dict:
        line = next((line for line in self.process.stdout if line.startswith("{")), None)
        answer = json.loads(line) if line else {"error": f"the process ended with {self.process.wait()}"}
        if "error" in answer:
            raise UserError(f"{self.spec.name}: {answer['error']}")
        return answer

    def run(self, steps: int) -> float:
        """Seconds per step of a burst."""
        with suppress(BrokenPipeError):  # a dead worker, which `_answer` reports
            self.process.stdin.write(f"{steps}\n")
            self.process.stdin.flush()
        self.last = self._answer()
        return self.last["seconds"] / steps

    def close(self) -> None:
        self.process.kill()
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def measure(workers: list[Worker], rounds: int, seconds: float) -> list[dict]:
    """One row per worker: images/s in the median, slowest and fastest round, milliseconds per step, peak memory."""
    steps = [max(1, round(seconds / worker.step_seconds)) for worker in workers]
    times: list[list[float]] = [[] for _ in workers]
    latencies: list[list[tuple[float, float]]] = [[] for _ in workers]
    with progress("measuring", rounds * len(workers)) as begin:
        for number in range(rounds):
            for i, worker in enumerate(workers):
                begin(f"round {number + 1} of {rounds}, {worker.spec.name}")
                times[i].append(worker.run(steps[i]))
                latencies[i].append((worker.last["p50"], worker.last["p95"]))
            if not sys.stderr.isatty():
                print(f"  round {number + 1} of {rounds}", flush=True)
    rows = []
    for worker, taken, latency in zip(workers, times, latencies, strict=True):
        spec, middle = worker.spec, statistics.median(taken)
        p50, p95 = (1000 * statistics.median(column) for column in zip(*latency, strict=True))
        rows.append(
            {
                "name": spec.name,
                "engine": spec.engine,
                "precision": spec.precision,
                "mode": spec.mode,
                "img_size": "x".join(map(str, spec.img_size)),
                "batch": spec.batch,
                "images_per_second": spec.batch / middle,
                "ms_per_image": 1000 * middle / spec.batch,
                "step_ms_p50": p50,
                "step_ms_p95": p95,
                "slowest_round": spec.batch / max(taken),
                "fastest_round": spec.batch / min(taken),
                "peak_mb": worker.last["peak_mb"],
                "step_mb": worker.last["peak_mb"] - worker.ready["start_mb"],
                "rounds": taken,
            }
        )
    return rows


def ratio(row: dict, other: dict) -> float:
    """How many times faster `row` is per image than `other`: the median over the rounds they were measured in."""
    pairs = zip(row["rounds"], other["rounds"], strict=True)
    return statistics.median(b / a for a, b in pairs) * row["batch"] / other["batch"]


def build(model: str, weights: str = "", img_size: Any = None, **arguments) -> nn.Layer:
    """A model with fresh weights, or with those of an official .npz file; `img_size`: what `Backbone.sized` gets."""
    import numpy as np

    import ppattn
    from ppattn.backbones import BACKBONES
    from ppattn.zoo.table import entry

    built = ppattn.create_model(model, **arguments, **BACKBONES.get(entry(model).backbone).sized(img_size))
    if weights:
        with np.load(weights) as arrays:
            ppattn.load_official(built, dict(arrays))
    return built


# ---- in the worker --------------------------------------------------------------------------------------------------


def serve(prepare: Callable[[], tuple[Callable[[], object], dict]]) -> None:
    """Answer requests for bursts of steps until the parent closes its end; `prepare()` gives (step, facts)."""
    out, sys.stdout = sys.stdout, sys.stderr
    try:
        step, facts = prepare()
        facts["start_mb"] = _peak_mb()
        for _ in range(WARM_UP):
            step()
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"[:500]}), file=out, flush=True)
        raise
    print(json.dumps(facts), file=out, flush=True)
    for line in sys.stdin:
        taken = []
        for _ in range(int(line)):
            began = time.perf_counter()
            step()
            taken.append(time.perf_counter() - began)
        p50, p95 = (sorted(taken)[int(part * (len(taken) - 1))] for part in (0.5, 0.95))
        print(json.dumps({"seconds": sum(taken), "p50": p50, "p95": p95, "peak_mb": _peak_mb()}), file=out, flush=True)


def _peak_mb() -> float:
    """Peak RSS of this process only (getrusage includes the parent's)."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def random_batches(batch: int, img_size: tuple[int, int]) -> Iterator:
    """Seeded random images [batch, 3, H, W] in float32 without end, cycling through `BATCHES` batches."""
    import numpy as np

    rng = np.random.default_rng(0)
    return itertools.cycle([rng.standard_normal((batch, 3, *img_size), dtype="float32") for _ in range(BATCHES)])


def prepare_step(spec: Spec) -> tuple[Callable[[], object], dict]:
    """(a function that does one step and waits for it, what the parent gets to know)."""
    import numpy as np

    import ppattn
    from ppattn import ops

    facts: dict[str, list] = {}
    for name, folder in spec.imports.items():
        import_modules([name], folder)
    if spec.settings != "none":
        facts["setup"] = ppattn.setup(threads=spec.threads, seed=0)
    if spec.settings == "plain":
        ops.enable("plain")
    import paddle

    if spec.engine == "gemm":
        a = paddle.randn([2048, 2048])
        return lambda: paddle.matmul(a, a).numpy(), facts
    if spec.engine == "numpy_product":
        a = np.random.default_rng(0).standard_normal((2048, 2048), "float32")
        return lambda: a @ a, facts
    if spec.engine == "copy":
        a = np.ones(COPY_BYTES // 16)
        b = np.empty_like(a)
        return lambda: np.copyto(b, a), facts
    if spec.engine != "dygraph":
        batches = random_batches(spec.batch, spec.img_size)
        predictor = ppattn.Predictor(spec.folder, spec.precision, spec.threads, spec.engine)
        return lambda: predictor.run(next(batches)), facts
    model: Any = build(spec.model, spec.weights, **spec.arguments | {"img_size": list(spec.img_size)})
    rng = np.random.default_rng(0)
    batches = itertools.cycle([model.example(spec.batch, rng=rng) for _ in range(BATCHES)])

    def infer():
        with paddle.no_grad():
            return model(paddle.to_tensor(next(batches))).numpy()

    model.eval()
    if spec.weights:
        facts["answer"] = infer()[0, :10].tolist()
    if spec.mode == "infer":
        return infer, facts
    labels = paddle.arange(spec.batch) % model.num_classes
    optimizer = paddle.optimizer.AdamW(1e-4, parameters=model.parameters(), weight_decay=0.05)
    model.train()

    def train():
        paddle.nn.functional.cross_entropy(model(paddle.to_tensor(next(batches))), labels).backward()
        optimizer.step()
        optimizer.clear_grad()
        model.parameters()[-1].numpy()

    return train, facts


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    given["img_size"] = tuple(given["img_size"])
    serve(lambda: prepare_step(Spec(**given)))
