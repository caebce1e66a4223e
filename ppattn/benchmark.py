"""Speed of several candidates. Each runs in a process of its own, and they take turns, round by round.

The parent asks one worker after the other for a burst of steps, so a machine whose speed drifts slows all of them
alike. A figure is the median over the rounds, a comparison the median of the ratios within the rounds. A training step
is forward pass, loss, backward pass and AdamW on random images, which differ from step to step.

A worker is `python -m ppattn.benchmark SPEC`; it speaks JSON lines on its standard streams.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppattn import cost, zoo
from ppattn.errors import UserError
from ppattn.runtime import cpu, memory
from ppattn.runtime.plugins import IMPORTED, import_modules
from ppattn.text import aligned_table, progress_line

if TYPE_CHECKING:
    from ppattn.backbones import Backbone
    from ppattn.settings import Model

WARM_UP = 3  # steps
BATCHES = 8  # random batches that the steps take in turn
GEMM_FLOPS = 2 * 2048**3  # of one step of the engines "gemm" and "numpy_product"
COPY_BYTES = 512 << 20  # read and written by one step of the engine "copy"
LONGEST = 5  # seconds of a step that `measure_layers` measures
PIXELS = (1, 2, 4)  # sizes of `measure_costs`, in multiples of the pixels of the model's own size


@dataclass(frozen=True)
class Spec:
    """One thing to measure."""

    name: str
    engine: str = "dygraph"  # or one of `ppattn.Predictor` for `folder`, or of the machine: gemm, numpy_product, copy
    model: str = ""
    arguments: dict = field(default_factory=dict)
    folder: str = ""  # of an exported model
    precision: str = "fp32"
    weights: str = ""  # .npz of official names; the worker then gives logits of a seeded batch, as `answer`
    mode: str = "infer"
    batch: int = 16
    img_size: tuple[int, int] = (224, 224)
    threads: int | None = None
    settings: str = "all"  # of `ppattn.setup`; "plain": no compiled kernels; "none": Paddle's defaults
    imports: dict[str, str] = field(default_factory=lambda: dict(IMPORTED))  # modules of the user, and folders


class Worker:
    """The process of one spec, started and warm."""

    def __init__(self, spec: Spec, python: str = sys.executable, module: list[str] | None = None):
        self.spec = spec
        environment = {name: value for name, value in os.environ.items() if name != cpu.MKL_VARIABLE}  # `setup` sets it
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
        self.process.communicate()  # waits, and closes the streams


@contextmanager
def running(specs: Iterable[Spec]) -> Iterator[list[Worker]]:
    """A worker for each spec, until the end of the block."""
    with ExitStack() as stack:
        yield [stack.enter_context(closing(Worker(spec))) for spec in specs]


def measure(workers: list[Worker], rounds: int, seconds: float) -> list[dict]:
    """One row per worker: images/s in the median, slowest and fastest round, milliseconds per step, peak memory."""
    steps = [max(1, round(seconds / worker.step_seconds)) for worker in workers]
    bursts: list[list[tuple[float, float, float]]] = [[] for _ in workers]  # seconds: of a step, their p50 and p95
    with progress_line("measuring", rounds * len(workers)) as begin:
        for number in range(rounds):
            for i, worker in enumerate(workers):
                begin(f"round {number + 1} of {rounds}, {worker.spec.name}")
                bursts[i].append((worker.run(steps[i]), worker.last["p50"], worker.last["p95"]))
            if not sys.stderr.isatty():
                print(f"  round {number + 1} of {rounds}", flush=True)
    rows = []
    for worker, burst in zip(workers, bursts, strict=True):
        spec, (taken, *percentiles) = worker.spec, zip(*burst, strict=True)
        middle, p50, p95 = map(statistics.median, (taken, *percentiles))
        row: dict[str, Any] = {key: getattr(spec, key) for key in ("name", "engine", "precision", "mode")}
        row |= {"img_size": "x".join(map(str, spec.img_size)), "batch": spec.batch}
        row |= {"images_per_second": spec.batch / middle, "ms_per_image": 1000 * middle / spec.batch}
        row |= {"step_ms_p50": 1000 * p50, "step_ms_p95": 1000 * p95}
        row |= {"slowest_round": spec.batch / max(taken), "fastest_round": spec.batch / min(taken)}
        peak = worker.last["peak_mb"]
        rows.append(row | {"peak_mb": peak, "step_mb": peak - worker.ready["start_mb"], "rounds": list(taken)})
    return rows


def ratio(row: dict, other: dict) -> float:
    """How many times faster `row` is per image than `other`: the median over the rounds they were measured in."""
    pairs = zip(row["rounds"], other["rounds"], strict=True)
    return statistics.median(b / a for a, b in pairs) * row["batch"] / other["batch"]


def measure_speeds(title: str, specs: list[Spec], rounds: int, seconds: float, threads: int | None) -> list[dict]:
    """`measure` of those that start, with the models' costs, shares of the machine's peak, ratios to the first row."""
    machine = [Spec(engine, engine, batch=1, threads=threads) for engine in ("gemm", "copy")]
    with running(machine) as workers, ExitStack() as stack:
        with progress_line("starting", len(specs)) as begin:
            for spec in specs:
                begin(spec.name)
                try:
                    workers.append(stack.enter_context(closing(Worker(spec))))
                except UserError as error:
                    print(f"  left out: {error}", flush=True)
        if len(workers) == len(machine):
            raise UserError(f"{title}: none of the candidates can be measured.")
        gemm, copy, *rows = measure(workers, rounds, seconds)
    for row, worker in zip(rows, workers[len(machine) :], strict=True):
        row |= {"group": title, **size_and_cost(worker.spec)}
        row["gemm_gflops"] = 1e-9 * GEMM_FLOPS * gemm["images_per_second"]
        row["copy_gb_per_s"] = 1e-9 * COPY_BYTES * copy["images_per_second"]
        flops = 2 * row["macs"] * (3 if row["mode"] == "train" else 1) if row["macs"] else None
        row["share_of_peak"] = flops * ratio(row, gemm) / GEMM_FLOPS if flops else None
        row["against_first"] = ratio(row, rows[0])
    return rows


def size_and_cost(spec: Spec) -> dict[str, Any]:
    """The size that a model was built for, its parameters, MACs of an input, tokens of the first stage, attention."""
    if not spec.model:
        return dict.fromkeys(("params", "macs", "tokens", "attention"))
    model = model_to_measure(spec.model, **spec.arguments | {"img_size": list(spec.img_size)})
    height, width = getattr(model, "grid", None) or model.blocks_flat()[0].attn.spec.grid
    tokens, attention = height * width, zoo.table.model_attention(spec.model, spec.arguments)
    found = {"img_size": "x".join(map(str, model.img_size)), "params": cost.params(model), "macs": cost.macs(model)}
    return found | {"tokens": tokens, "attention": attention}


def speed_summary(rows: list[dict]) -> list[str]:
    """Sentences about the fastest engine of every export that several ran; a hint where only Paddle did."""
    exports: dict[tuple, list[dict]] = {}
    for row in rows:
        if row["engine"] != "dygraph":
            label = row["name"].removesuffix(f" {row['engine']} {row['precision']}")
            exports.setdefault((label, row["group"], row["precision"]), []).append(row)
    lines = []
    for (label, group, _), own in exports.items():
        if len(own) > 1:
            last, *_, best = sorted(own, key=lambda row: row["images_per_second"])
            gain = f"{ratio(best, last):.2f} times as fast as {last['engine']}"
            lines.append(f"{label}, {group}: {best['engine']} is the fastest, {gain}")
    if exports and {row["engine"] for own in exports.values() for row in own} == {"paddle"}:
        advice = "`export --format both`, then --engines paddle onnxruntime openvino"
        lines.append(f"Another engine may be faster, most of all for small models: {advice}.")
    return lines


def measure_costs(models: Mapping[str, Model], like: Backbone, side: int | None = None) -> list[dict]:
    """Parameters, MACs, images/s and memory of models with `like`'s classes at 1, 2, 4 times its pixels or `side`."""
    rows, stride, classes = [], max(like.strides), {"num_classes": like.num_classes}
    for factor in PIXELS if side is None else (1,):
        own = like.img_size if side is None else (side, side)
        size = tuple(round(length * factor**0.5 / stride) * stride for length in own)
        shared: dict[str, Any] = {"img_size": size, "batch": 1 if side else max(1, 32 // factor)}
        specs = [Spec(n, model=m.name, arguments=m.arguments() | classes, **shared) for n, m in models.items()]
        with running(specs) as workers:
            measured = measure(workers, rounds=3, seconds=0.5)
        for spec, row in zip(specs, measured, strict=True):
            rows.append({key: row[key] for key in ("name", "images_per_second", "peak_mb")} | size_and_cost(spec))
    return rows


def machine_report(threads: int | None) -> list[str]:
    """Lines about the speed of this machine and this Paddle, what is slow and how to correct it."""
    product = Spec("product, Paddle after setup()", "gemm", batch=1, threads=threads)
    training = replace(product, name="training deit_nano, setup()", engine="dygraph", model="deit_nano", mode="train")
    training = replace(training, batch=64, img_size=(32, 32))
    specs = [
        product,
        replace(product, name="product, Paddle's defaults", settings="none"),
        replace(product, name="product, numpy", engine="numpy_product"),
        replace(product, name="copy", engine="copy"),
        training,
        replace(training, name="training deit_nano, compiled kernels off", settings="plain"),
        replace(training, name="training deit_nano, Paddle's defaults", settings="none"),
    ]
    flops = (1e-9 * GEMM_FLOPS, "GFLOP/s")
    units = {"gemm": flops, "numpy_product": flops, "copy": (1e-9 * COPY_BYTES, "GB/s"), "dygraph": (1.0, "img/s")}
    with running(specs) as workers:
        rows = measure(workers, 3, 1.0)
    lines = []
    for row in rows:
        scale, unit = units[row["engine"]]
        lines.append(f"  {row['name']:<42} {scale * row['images_per_second']:8.1f} {unit}")
    processor = cpu.cpuinfo("model name") or "unknown"
    lines.append(f"Processor: {processor}, {cpu.available_cores()} cores for this process.")
    lines += workers[0].ready["setup"]
    setup, _, numpy, _, compiled, plain, _ = rows
    product_share, gain = ratio(setup, numpy), ratio(compiled, plain)
    slow = []
    if product_share < 0.6:
        advice = "it does not use all instructions of the processor. Install a version that ppattn is tested with"
        slow.append(f"Paddle's product runs at {100 * product_share:.0f} % of numpy's speed: {advice}.")
    if gain < 1.1:
        compared = f"The compiled kernels give only {gain:.2f} times the speed of the plain form"
        slow.append(f"{compared}; the line above says whether they are on, and what they need.")
    return lines + (slow or ["Nothing is slow."])


def model_to_measure(model: str, weights: str = "", img_size: Any = None, **arguments) -> Backbone:
    """A model with random weights, or with the weights of an official .npz file; `img_size`: see `Backbone.sized`."""
    import numpy as np

    import ppattn
    from ppattn.backbones import BACKBONES

    built = ppattn.create_model(model, **arguments, **BACKBONES.get(zoo.model_entry(model).backbone).sized(img_size))
    if weights:
        with np.load(weights) as arrays:
            ppattn.load_official(built, dict(arrays))
    return built


def measure_layers(
    grid: tuple[int, int], dim: int, heads: int, batch: int, mode: str, names: list[str], rounds: int, seconds: float
) -> list[dict]:
    """Time and memory of attention layers alone on a grid, and on its halves down to 64 tokens, small grids first.

    "against_softmax" is the median over the rounds of the ratio of the times; "memory_mb" is the peak of a step for the
    whole batch. What would need more than the free memory, or `LONGEST` seconds a step, at the next grid is left out.
    """
    grids = [grid]
    while grids[0][0] * grids[0][1] >= 256:
        grids.insert(0, (max(1, grids[0][0] // 2), max(1, grids[0][1] // 2)))
    rows: list[dict] = []
    for height, width in grids:
        steps = {}
        for name in names:
            needed, taken = (_expected(rows, name, key) for key in ("memory_mb", "seconds"))
            if needed < memory.free() and (taken < LONGEST or name == "softmax"):
                try:
                    steps[name] = LayerStep(name, dim, heads, (height, width), batch, mode == "train")
                except UserError as error:
                    print(f"  left out with {height}x{width} tokens: {name}: {error}", flush=True)
        times: dict[str, list[float]] = {name: [] for name in steps}
        with progress_line(f"{height * width} tokens", rounds) as begin:
            for number in range(rounds):
                begin(f"round {number + 1} of {rounds}")
                for name, step in steps.items():
                    times[name].append(step.burst(seconds))
        common: dict = {"mode": mode, "grid": f"{height}x{width}", "tokens": height * width, "batch": batch}
        for name, step in steps.items():
            taken = statistics.median(times[name])
            ratios = [a / b for a, b in zip(times.get("softmax", ()), times[name], strict=False)]
            row = {"attention": name, **common, "seconds": taken, "ms_per_image": 1000 * taken / batch}
            row["against_softmax"] = statistics.median(ratios) if ratios else None
            rows.append(row | {"memory_mb": step.memory_mb, "params": step.params})
    return rows


def _expected(rows: list[dict], name: str, key: str) -> float:
    """A figure of `name` at four times the tokens of its last row: it grows as it did before, 4 to 16 times."""
    values = [row[key] for row in rows if row["attention"] == name]
    if not rows:
        return 0.0
    if not values or len(values) < len({row["tokens"] for row in rows}):
        return math.inf  # left out before
    growth = values[-1] / max(values[-2], 1e-9) if len(values) > 1 else 16
    return values[-1] * min(max(growth, 4), 16)


def speed_table(rows: list[dict]) -> list[str]:
    """Lines: a table of the last grid, the fastest attention first, and where softmax stops being the fastest."""
    grids = list(dict.fromkeys(row["tokens"] for row in rows))
    speeds = {(row["attention"], row["tokens"]): row["against_softmax"] for row in rows}

    def slowness(row: dict) -> float:
        return 1 / row["against_softmax"] if row["against_softmax"] else row["seconds"]

    last = sorted((row for row in rows if row["tokens"] == grids[-1]), key=slowness)
    lines = [["tokens:", *(f"{tokens:,}" for tokens in grids), "ms per image", "MB per step", "parameters"]]
    for row in last:
        own = [speeds.get((row["attention"], tokens)) for tokens in grids]
        figures = [f"{row['ms_per_image']:.2f}", f"{row['memory_mb']:.0f}", f"{row['params']:,}"]
        lines.append([row["attention"], *(f"{speed:.2f}" if speed else "-" for speed in own), *figures])
    first = [min((row for row in rows if row["tokens"] == tokens), key=slowness) for tokens in grids]
    best = [f"{row['tokens']:,}: {row['attention']} ({row['against_softmax'] or 0:.2f})" for row in first]
    said = ["Speed of the layer alone, softmax = 1:", *aligned_table(lines), f"The fastest at {', '.join(best)}."]
    if left := {name for name, _ in speeds} - {row["attention"] for row in last}:
        said.append(f"Too slow or too large here at {grids[-1]:,} tokens: {', '.join(sorted(left))}.")
    return said


class LayerStep:
    """A step of an attention layer alone, warm; its parameters and the memory of a step."""

    def __init__(self, name: str, dim: int, num_heads: int, grid: tuple[int, int], batch: int, train: bool):
        import paddle

        import ppattn

        self.layer = ppattn.attention_layer(name, dim, num_heads, grid)
        self.layer.train() if train else self.layer.eval()
        self.x = paddle.randn([batch, grid[0] * grid[1], dim])
        self.x.stop_gradient = not train
        self.params = cost.params(self.layer)
        self.run()
        before = memory.allocated()
        self.run()
        self.memory_mb = memory.peak_allocated() - before

    def run(self) -> None:
        import paddle

        with paddle.set_grad_enabled(not self.x.stop_gradient):
            out = self.layer(self.x)
        if not self.x.stop_gradient:
            out.sum().backward()
            self.layer.clear_gradients()
            self.x.clear_gradient()
        out[0, 0].numpy()

    def burst(self, seconds: float) -> float:
        """Seconds per step of a burst of about this length."""
        began, steps, taken = time.perf_counter(), 0, 0.0
        while taken < seconds:
            self.run()
            steps, taken = steps + 1, time.perf_counter() - began
        return taken / steps


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
        p50, p95 = (sorted(taken)[math.ceil(part * len(taken)) - 1] for part in (0.5, 0.95))
        print(json.dumps({"seconds": sum(taken), "p50": p50, "p95": p95, "peak_mb": _peak_mb()}), file=out, flush=True)


def _peak_mb() -> float:
    """Peak of a GPU's tensors, else peak RSS of this process only (getrusage includes the parent's)."""
    import paddle

    resident = int(Path("/proc/self/status").read_text(encoding="utf-8").partition("VmHWM:")[2].split()[0]) / 1024
    return memory.peak_allocated() or resident if paddle.get_device().startswith("gpu") else resident


def random_batches(batch: int, img_size: tuple[int, int], channels: int = 3) -> Iterator:
    """Seeded random images [batch, channels, H, W] in float32, `BATCHES` batches over and over."""
    import numpy as np

    rng = np.random.default_rng(0)
    return itertools.cycle([rng.standard_normal((batch, channels, *img_size), dtype="float32") for _ in range(BATCHES)])


def prepare_step(spec: Spec) -> tuple[Callable[[], object], dict]:
    """(a function that does one step and waits for it, facts for the parent)."""
    import numpy as np

    import ppattn

    facts: dict[str, list] = {}
    for name, folder in spec.imports.items():
        import_modules([name], folder)
    if spec.settings != "none":
        kernels = "plain" if spec.settings == "plain" else None
        facts["setup"] = ppattn.setup(threads=spec.threads, seed=0, kernels=kernels)
    import paddle

    if spec.engine == "gemm":
        a = paddle.randn([2048, 2048])
        return lambda: paddle.matmul(a, a)[0, 0].numpy(), facts
    if spec.engine == "numpy_product":
        a = np.random.default_rng(0).standard_normal((2048, 2048), "float32")
        return lambda: a @ a, facts
    if spec.engine == "copy":
        a, b = np.ones(COPY_BYTES // 16), np.empty(COPY_BYTES // 16)
        return lambda: np.copyto(b, a), facts
    if spec.engine != "dygraph":
        predictor = ppattn.Predictor(spec.folder, spec.precision, spec.threads, spec.engine)
        batches = random_batches(spec.batch, spec.img_size, predictor.preprocess.in_chans)
        return lambda: predictor.run(next(batches)), facts
    model: Any = model_to_measure(spec.model, spec.weights, **spec.arguments | {"img_size": list(spec.img_size)})
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
    labels = paddle.arange(spec.batch) % (model.num_classes or model.feat_channels[-1])
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
