"""Measure the speed of several candidates. Each runs in its own process, and they take turns, round by round.

The parent asks one worker after the other for a burst of steps, so that a machine whose speed drifts slows all of them
alike; a figure is the median over the rounds, a comparison the median of the ratios of the same round. A worker
warms up before its first burst. A training step is forward, loss, backward and AdamW; every step gets other random
images than the one before, which are in memory already.

A worker is `python -m ppattn.benchmark SPEC`; it speaks JSON lines on its standard streams.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppattn.cpu import MKL_VARIABLE
from ppattn.errors import UserError

if TYPE_CHECKING:
    from paddle import nn

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 3  # steps
BATCHES = 8  # random batches, cycled through
COPY_BYTES = 512 << 20  # read and written by one step of the engine "copy"
# Engines of an exported folder; paddle_fp32 runs a bf16 export in float32, openvino_bf16 a float32 one in bfloat16.
EXPORTED_BY = ("paddle", "paddle_bf16", "paddle_fp32", "onnxruntime", "openvino", "openvino_bf16", "auto")


@dataclass(frozen=True)
class Spec:
    """One thing to measure.

    engine: dygraph; one of `EXPORTED_BY` for a `folder`; gemm, numpy_product, copy (the machine: 2048^3 products,
        256 MB).
    processes: training only; each takes batch / processes images and one all-reduce joins the gradients.
    weights: an .npz file with the model's parameters under their official names; the worker then reports its first
        logits for a seeded batch as `answer`, so that implementations can be compared.
    settings: "all" of `ppattn.setup`, "plain" without the compiled kernels, "none" for Paddle's own settings.
    """

    name: str
    engine: str = "dygraph"
    model: str = ""
    arguments: dict = field(default_factory=dict)
    folder: str = ""
    weights: str = ""
    mode: str = "infer"
    batch: int = 16
    img_size: tuple[int, int] = (224, 224)
    threads: int | None = None
    processes: int = 1
    settings: str = "all"


TRACING = threading.Lock()  # Paddle traces one program at a time; workers may get ready side by side


class Worker:
    """The processes of one spec, started and warm."""

    def __init__(self, spec: Spec, python: str = sys.executable, module: list[str] | None = None):
        self.spec = spec
        self.processes: list[Any] = []  # subprocess.Popen with all pipes
        ports = [_free_port() for _ in range(spec.processes)]
        for rank in range(spec.processes):
            environment = {name: value for name, value in os.environ.items() if name != MKL_VARIABLE}  # `setup` sets it
            if spec.threads:
                environment["OPENBLAS_NUM_THREADS"] = str(spec.threads)  # numpy's
            environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
            if spec.processes > 1:
                environment |= {
                    "PADDLE_TRAINER_ID": str(rank),
                    "PADDLE_TRAINERS_NUM": str(spec.processes),
                    "PADDLE_TRAINER_ENDPOINTS": ",".join(f"127.0.0.1:{port}" for port in ports),
                    "PADDLE_CURRENT_ENDPOINT": f"127.0.0.1:{ports[rank]}",
                    "PADDLE_DISTRI_BACKEND": "gloo",
                }
            self.processes.append(
                subprocess.Popen(
                    [python, *(module or ["-m", "ppattn.benchmark"]), json.dumps(asdict(spec))],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    env=environment,
                )
            )
        self.ready = self.answers()[0]
        if spec.engine in EXPORTED_BY and spec.model:  # known here, so that the worker's memory is the program's alone
            with TRACING:
                self.ready |= _model(spec)[1]
        self.step_seconds = self.run(1)

    def answers(self) -> list[dict]:
        lines = []
        for process in self.processes:
            line = process.stdout.readline()
            while line and not line.startswith("{"):
                line = process.stdout.readline()
            lines.append(json.loads(line) if line else {"error": f"the process ended with {process.wait()}"})
        error = next((line["error"] for line in lines if "error" in line), None)
        if error:
            self.close()
            raise UserError(f"{self.spec.name}: {error}")
        return lines

    def run(self, steps: int) -> float:
        """Seconds per step of a burst."""
        for process in self.processes:
            with suppress(BrokenPipeError):  # it has died, and `answers` says so
                process.stdin.write(f"{steps}\n")
                process.stdin.flush()
        self.last = self.answers()
        return max(answer["seconds"] for answer in self.last) / steps

    def close(self) -> None:
        for process in self.processes:
            with suppress(BrokenPipeError):
                process.stdin.close()
        for process in self.processes:
            process.wait()
            process.stdout.close()


def measure(
    workers: list[Worker], rounds: int = 5, seconds: float = 1.5, say: Callable[[str], object] = lambda text: None
) -> list[dict]:
    """One row per worker: images/s in the median, slowest and fastest round, and what follows from them."""
    steps = [max(1, round(seconds / worker.step_seconds)) for worker in workers]
    times: list[list[float]] = [[] for _ in workers]
    latencies: list[list[tuple[float, float]]] = [[] for _ in workers]
    for number in range(rounds):
        for i, worker in enumerate(workers):
            times[i].append(worker.run(steps[i]))
            latencies[i].append((worker.last[0]["p50"], worker.last[0]["p95"]))
        say(f"round {number + 1} of {rounds}")
    rows = []
    for worker, taken, latency in zip(workers, times, latencies, strict=True):
        spec, middle = worker.spec, statistics.median(taken)
        p50, p95 = (1000 * statistics.median(column) for column in zip(*latency, strict=True))
        rows.append(
            {
                "name": spec.name,
                "engine": spec.engine,
                "mode": spec.mode,
                "img_size": "x".join(map(str, spec.img_size)),
                "tokens": worker.ready.get("tokens"),
                "batch": spec.batch,
                "processes": spec.processes,
                "images_per_second": spec.batch / middle,
                "ms_per_image": 1000 * middle / spec.batch,
                "step_ms_p50": p50,
                "step_ms_p95": p95,
                "slowest_round": spec.batch / max(taken),
                "fastest_round": spec.batch / min(taken),
                "peak_mb": sum(answer["peak_mb"] for answer in worker.last),
                "step_mb": sum(answer["peak_mb"] for answer in worker.last) - worker.ready["start_mb"] * spec.processes,
                "macs": worker.ready.get("macs"),
                "rounds": taken,
            }
        )
    return rows


def machine(threads: int | None = None) -> tuple[list[dict], list[str]]:
    """Measure what this machine and this Paddle give, and say what is slow and how to correct it.

    Args:
        threads: of every process; default: all cores.

    Returns:
        (rows of `measure`, sentences).
    """
    from ppattn import cpu

    product: dict[str, Any] = {"batch": 1, "threads": threads}
    training: dict[str, Any] = {"model": "deit_nano", "mode": "train", "batch": 64, "img_size": (32, 32)}
    training["threads"] = threads
    workers = [
        Worker(Spec("product, Paddle after setup()", "gemm", **product)),
        Worker(Spec("product, Paddle's own settings", "gemm", settings="none", **product)),
        Worker(Spec("product, numpy", "numpy_product", **product)),
        Worker(Spec("copy", "copy", **product)),
        Worker(Spec("training deit_nano, setup()", **training)),
        Worker(Spec("training deit_nano, compiled kernels off", settings="plain", **training)),
        Worker(Spec("training deit_nano, Paddle's own settings", settings="none", **training)),
    ]
    try:
        rows = measure(workers, 3, 1.0)
    finally:
        for worker in workers:
            worker.close()
    setup, _, numpy, _, compiled, plain, _ = rows
    advice = [f"Processor: {cpu.cpuinfo('model name') or 'unknown'}, {cpu.available_cores()} cores for this process."]
    advice += workers[0].ready["setup"]
    if ratio(setup, numpy) < cpu.SLOW:
        advice.append(
            f"Paddle's product runs at {100 * ratio(setup, numpy):.0f} % of numpy's: this Paddle does not use all "
            "vector instructions of the processor. Install the Paddle version of requirements-cpu.txt."
        )
    if ratio(compiled, plain) < 1.1:
        advice.append(
            f"The compiled kernels give only {ratio(compiled, plain):.2f} times the speed of the plain form; "
            "the line above says whether they are on, and what they need."
        )
    if len(advice) == 1 + len(workers[0].ready["setup"]):
        advice.append("Nothing is off.")
    return rows, advice


def ratio(row: dict, other: dict) -> float:
    """How many times faster `row` is per image than `other`: the median over the rounds they were measured in."""
    pairs = zip(row["rounds"], other["rounds"], strict=True)
    return statistics.median(b / a for a, b in pairs) * row["batch"] / other["batch"]


def build(model: str, weights: str = "", **arguments) -> nn.Layer:
    """A model with fresh weights, or with those of an official .npz file."""
    import numpy as np

    import ppattn

    built = ppattn.create_model(model, **arguments)
    if weights:
        with np.load(weights) as arrays:
            ppattn.load_official(built, dict(arrays))
    return built


def exported(folder: Path, engine: str, model: str, weights: str = "", **arguments) -> str:
    """Export what `build` makes for one of the exported engines; the folder."""
    import ppattn

    ppattn.setup(seed=0)
    form, _, precision = engine.partition("_")
    ppattn.export(build(model, weights, **arguments), folder, format=form, precision=precision or "fp32")
    return str(folder)


def _free_port() -> int:
    with closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# ---- in the worker --------------------------------------------------------------------------------------------------


def serve(prepare: Callable[[], tuple[Callable[[], object], dict]]) -> None:
    """Answer requests for bursts of steps until the parent closes its end; `prepare()` gives (step, facts)."""
    out, sys.stdout = sys.stdout, sys.stderr
    try:
        step, facts = prepare()
        facts["start_mb"] = peak_mb()
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
        print(json.dumps({"seconds": sum(taken), "p50": p50, "p95": p95, "peak_mb": peak_mb()}), file=out, flush=True)


def peak_mb() -> float:
    """Largest memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def random_batches(batch: int, img_size: tuple[int, int]) -> Iterator:
    """Seeded random images [batch, 3, H, W] in float32 without end, cycling through `BATCHES` batches."""
    import numpy as np

    rng = np.random.default_rng(0)
    return itertools.cycle([rng.standard_normal((batch, 3, *img_size), dtype="float32") for _ in range(BATCHES)])


def prepare_step(spec: Spec) -> tuple[Callable[[], object], dict]:
    """(a function that does one step and waits for it, facts about the model)."""
    import numpy as np

    import ppattn
    from ppattn import ops

    settings: list[str] = []
    if spec.settings in ("all", "plain"):
        settings = ppattn.setup(threads=spec.threads, seed=0)
    if spec.settings == "plain":
        ops.enable(False)
    import paddle

    if spec.engine == "gemm":
        a = paddle.randn([2048, 2048])
        return lambda: paddle.matmul(a, a).numpy(), {"macs": 2048**3, "setup": settings}
    if spec.engine == "numpy_product":
        a = np.random.default_rng(0).standard_normal((2048, 2048), "float32")
        return lambda: a @ a, {"macs": 2048**3}
    if spec.engine == "copy":
        a = np.ones(COPY_BYTES // 16)
        b = np.empty_like(a)
        return lambda: np.copyto(b, a), {}
    batches = random_batches(spec.batch // spec.processes, spec.img_size)
    if spec.engine != "dygraph":
        engine, _, precision = spec.engine.partition("_")
        predictor = ppattn.Predictor(spec.folder, precision or None, spec.threads, engine=engine)
        return lambda: predictor.run(next(batches)), {}
    model, facts = _model(spec)
    if spec.weights:
        model.eval()
        with paddle.no_grad():
            facts["answer"] = model(paddle.to_tensor(next(batches)))[0, :10].numpy().tolist()
    if spec.mode == "infer":
        model.eval()

        def infer():
            with paddle.no_grad():
                model(paddle.to_tensor(next(batches))).numpy()

        return infer, facts
    labels = paddle.arange(spec.batch // spec.processes) % model.num_classes
    layer = model
    if spec.processes > 1:
        paddle.distributed.init_parallel_env()
        layer = paddle.DataParallel(model)
    optimizer = paddle.optimizer.AdamW(1e-4, parameters=model.parameters(), weight_decay=0.05)
    model.train()

    def train():
        paddle.nn.functional.cross_entropy(layer(paddle.to_tensor(next(batches))), labels).backward()
        optimizer.step()
        optimizer.clear_grad()
        model.head.bias.numpy()

    return train, facts


def _model(spec: Spec):
    """The model of a spec, and its MACs and the tokens of its first stage."""
    from ppattn import cost

    model = build(spec.model, spec.weights, **spec.arguments | {"img_size": list(spec.img_size)})
    block = model.blocks[0] if hasattr(model, "blocks") else model.stages[0].blocks[0]
    grid = getattr(model, "grid", None) or block.attn.spec.grid
    return model, {"macs": cost.macs(model), "tokens": grid[0] * grid[1]}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    given["img_size"] = tuple(given["img_size"])
    serve(lambda: prepare_step(Spec(**given)))
