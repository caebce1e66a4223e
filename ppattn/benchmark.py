"""Speed measured side by side: every candidate in a process of its own, all of them alive, in turn, round by round.

The parent asks one worker after the other for a burst of steps, so that a machine whose speed drifts slows all of them
alike; a figure is the median over the rounds, a comparison the median of the ratios of the same round. A worker
warms up before its first burst. A training step is forward, loss, backward and AdamW on random images that are there
already.

A worker is `python -m ppattn.benchmark SPEC`; it speaks JSON lines on its standard streams.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ppattn.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
WARM_UP = 3  # steps
COPY_BYTES = 512 << 20  # read and written by one step of the engine "copy"


@dataclass(frozen=True)
class Spec:
    """One thing to measure.

    engine: dygraph; paddle, paddle_bf16, onnx (an exported `folder`), paddle_fp32 (a bf16 one in float32); gemm, copy
        (the machine: 2048^3 product, 256 MB).
    processes: training only; each takes batch / processes images and one all-reduce joins the gradients.
    settings: "all" of `ppattn.setup`, "plain" without the compiled kernels, "none" for Paddle as it comes; "threads",
        and "stride" (threads and contiguous tensors), are parts of "plain".
    """

    name: str
    engine: str = "dygraph"
    model: str = ""
    arguments: dict = field(default_factory=dict)
    folder: str = ""
    mode: str = "infer"
    batch: int = 16
    img_size: tuple[int, int] = (224, 224)
    threads: int | None = None
    processes: int = 1
    settings: str = "all"


class Worker:
    """The processes of one spec, started and warm."""

    def __init__(self, spec: Spec, python: str = sys.executable, module: list[str] | None = None):
        self.spec, self.processes = spec, []
        ports = [_free_port() for _ in range(spec.processes)]
        for rank in range(spec.processes):
            environment = dict(os.environ)
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


def measure(workers: list[Worker], rounds: int = 5, seconds: float = 1.5, say=lambda text: None) -> list[dict]:
    """One row per worker: images/s in the median, slowest and fastest round, and what follows from them."""
    steps = [max(1, round(seconds / worker.step_seconds)) for worker in workers]
    times: list[list[float]] = [[] for _ in workers]
    for number in range(rounds):
        for i, worker in enumerate(workers):
            times[i].append(worker.run(steps[i]))
        say(f"round {number + 1} of {rounds}")
    rows = []
    for worker, taken in zip(workers, times, strict=True):
        spec, middle = worker.spec, statistics.median(taken)
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
                "slowest_round": spec.batch / max(taken),
                "fastest_round": spec.batch / min(taken),
                "peak_mb": sum(answer["peak_mb"] for answer in worker.last),
                "macs": worker.ready.get("macs"),
                "rounds": taken,
            }
        )
    return rows


def ratio(row: dict, other: dict) -> float:
    """How many times faster `row` is per image than `other`: the median over the rounds they were measured in."""
    pairs = zip(row["rounds"], other["rounds"], strict=True)
    return statistics.median(b / a for a, b in pairs) * row["batch"] / other["batch"]


def exported(folder: Path, engine: str, model: str, **arguments) -> str:
    """Export a model with fresh weights for one of the exported engines; returns the folder."""
    import ppattn

    ppattn.setup(seed=0)
    form, _, precision = engine.partition("_")
    ppattn.export(ppattn.create_model(model, **arguments), folder, format=form, precision=precision or "fp32")
    return str(folder)


def _free_port() -> int:
    with closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# ---- in the worker --------------------------------------------------------------------------------------------------


def serve(prepare) -> None:
    """Answer requests for bursts of steps until the parent closes its end; `prepare()` gives (step, facts)."""
    out, sys.stdout = sys.stdout, sys.stderr
    try:
        step, facts = prepare()
        for _ in range(WARM_UP):
            step()
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"[:500]}), file=out, flush=True)
        raise
    print(json.dumps(facts), file=out, flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        for _ in range(int(line)):
            step()
        seconds = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"seconds": seconds, "peak_mb": peak}), file=out, flush=True)


def prepare_step(spec: Spec):
    """(a function that does one step and waits for it, facts about the model)."""
    import numpy as np

    import ppattn
    from ppattn import ops

    if spec.settings in ("all", "plain"):
        ppattn.setup(threads=spec.threads, seed=0)
    if spec.settings == "plain":
        ops.enable(False)
    import paddle

    if spec.settings in ("threads", "stride"):
        paddle.base.core.set_num_threads(spec.threads)
        paddle.set_flags({"FLAGS_use_stride_kernel": spec.settings == "threads"})

    if spec.engine == "gemm":
        a = paddle.randn([2048, 2048])
        return lambda: paddle.matmul(a, a).numpy(), {"macs": 2048**3}
    if spec.engine == "copy":
        a = np.ones(COPY_BYTES // 16)
        b = np.empty_like(a)
        return lambda: np.copyto(b, a), {}
    images = np.random.default_rng(0).standard_normal(
        (spec.batch // spec.processes, 3, *spec.img_size), dtype="float32"
    )
    if spec.engine != "dygraph":
        predictor = ppattn.Predictor(spec.folder, "fp32" if spec.engine == "paddle_fp32" else None, spec.threads)
        return lambda: predictor.run(images), _model(spec)[1] if spec.model else {}
    model, facts = _model(spec)
    x = paddle.to_tensor(images)
    if spec.mode == "infer":
        model.eval()

        def infer():
            with paddle.no_grad():
                model(x).numpy()

        return infer, facts
    labels = paddle.to_tensor(np.arange(len(images)) % model.num_classes)
    layer = model
    if spec.processes > 1:
        paddle.distributed.init_parallel_env()
        layer = paddle.DataParallel(model)
    optimizer = paddle.optimizer.AdamW(1e-4, parameters=model.parameters(), weight_decay=0.05)
    model.train()

    def train():
        paddle.nn.functional.cross_entropy(layer(x), labels).backward()
        optimizer.step()
        optimizer.clear_grad()
        model.head.bias.numpy()

    return train, facts


def _model(spec: Spec):
    """The model of a spec, and its MACs and the tokens of its first stage."""
    import ppattn
    from ppattn import cost

    model = ppattn.create_model(spec.model, **{**spec.arguments, "img_size": list(spec.img_size)})
    block = model.blocks[0] if hasattr(model, "blocks") else model.stages[0].blocks[0]
    grid = getattr(model, "grid", None) or block.attn.spec.grid
    return model, {"macs": cost.macs(model), "tokens": grid[0] * grid[1]}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    given["img_size"] = tuple(given["img_size"])
    serve(lambda: prepare_step(Spec(**given)))
