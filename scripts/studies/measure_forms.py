"""Distances from float64, times and memory of the forms of an operator, for gpu_forms.py."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from form_table import OPERATORS, Form, draw, forms, reference, settings
from torch import Tensor
from torch_forms import HALF, Shape, Tensors

TOKENS, CHANNELS, HEADS, WINDOW, WINDOW_HEADS = 50_176, 384, 6, 7, 12
FEW_TOKENS, MANY_TOKENS = 1_000, 3_000  # two images below; a single head from here on where float64 stores a map
LARGE = {"soft": 2.0}  # beyond that its kernels vanish; all others 8
TOO_SLOW = 400.0  # milliseconds: not repeated, and no backward pass
Call = Callable[[Tensors, Shape], Tensor]


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def compare(arrays: dict[str, np.ndarray], device: str) -> list[dict]:
    """Distances of all forms in float32 from Paddle's outputs and gradients (operators.npz)."""
    s, rows = Shape(2, 10, 2, 32), []

    def tensor(name: str) -> Tensor:
        return torch.tensor(arrays[name], device=device)

    for operator in OPERATORS:
        source = operator.replace("_map", "_elu")
        names = [key.rpartition("/")[2] for key in arrays if key.startswith(f"{source}/grad/")]
        for name, form in forms(operator, torch.float32).items():
            if name == "static" or form.tf32:
                continue
            own = {key: source if f"{source}/in/{key}" in arrays else "shared" for key in names}
            t = {key: tensor(f"{place}/in/{key}").requires_grad_() for key, place in own.items()}
            with settings(form):
                y, gradients = both(form.call, t, s, tensor("shared/in/cotangent"))
            far = [distance(gradient, tensor(f"{source}/grad/{key}"))[0] for key, gradient in gradients.items()]
            out = distance(y, tensor(f"{source}/out"))[0]
            rows.append({"operator": operator, "form": name, "output": out, "gradient": max(far)})
    return rows


def both(call: Call, t: Tensors, s: Shape, cotangent: Tensor) -> tuple[Tensor, Tensors]:
    """Output in the type of the cotangent, and the gradients of the inputs."""
    y = call(t, s).to(cotangent.dtype)
    return y, dict(zip(t, torch.autograd.grad(y, list(t.values()), cotangent), strict=True))


def distance(found: Tensor, exact: Tensor) -> tuple[float, float]:
    """|found - exact| / |exact| in the Frobenius norm, and largest difference by largest value."""
    found, exact = found.detach().double(), exact.detach().double()
    difference = found - exact
    return float(difference.norm() / exact.norm()), float(difference.abs().max() / exact.abs().max())


def measure(operator: str, dtype: torch.dtype, side: int, device: str, small: bool) -> list[dict]:
    """A row for every form of an operator; the form `rounded` is the reference, rounded to the type."""
    heads, channels, total = (2, 64, 1_568) if small else (HEADS, CHANNELS, TOKENS)
    if operator == "window":
        side, heads = WINDOW, heads if small else WINDOW_HEADS
    tokens, large = side * side, LARGE.get(operator, 8.0)
    few = 1 if operator == "softmax" and tokens >= MANY_TOKENS else heads
    images = 64 if operator == "window" else 2 if tokens < FEW_TOKENS else 1
    checked = Shape(images, side, few, channels // heads * few)
    common = {"operator": operator, "dtype": str(dtype).removeprefix("torch."), "tokens": tokens, "large": large}
    rows = {name: {**common, "form": name} for name in ["rounded", *forms(operator, dtype)]}
    for prefix, size in (("", 1.0), ("large_", large)):
        for name, facts in accuracy(operator, dtype, checked, size, device).items():
            rows[name] |= {key if key == "error" else f"{prefix}{key}": value for key, value in facts.items()}
    whole = Shape(max(total // tokens, 1), side, heads, channels)
    for name, form in forms(operator, dtype).items():
        rows[name] |= fitting_costs(operator, form, dtype, whole, device)
    return list(rows.values())


def accuracy(operator: str, dtype: torch.dtype, s: Shape, size: float, device: str) -> dict[str, dict]:
    """Distances from float64 for inputs of standard deviation `size`, by form."""
    t = draw(operator, s, dtype, size, device)
    exact = {name: value.detach().double().requires_grad_() for name, value in t.items()}
    cotangent = torch.randn(s.batch, s.tokens, s.dim, device=device).to(dtype)
    truth = both(reference(operator), exact, s, cotangent.double())
    rounded = {name: value.to(t[name].dtype) for name, value in truth[1].items()}
    found = {"rounded": judged((truth[0].to(dtype), rounded), truth)}
    for name, form in forms(operator, dtype).items():
        if name != "static":
            try:
                with settings(form):
                    found[name] = judged(both(form.call, t, s, cotangent), truth)
            except Exception as error:
                found[name] = {"error": reason(error)}
    return found


def judged(found: tuple[Tensor, Tensors], truth: tuple[Tensor, Tensors]) -> dict[str, Any]:
    """Distances of the output and of the worst gradient; numbers that are not finite are None."""
    each = {name: distance(gradient, truth[1][name]) for name, gradient in found[1].items()}
    worst = max(each, key=lambda name: each[name][0] if math.isfinite(each[name][0]) else math.inf)
    numbers = (*distance(found[0], truth[0]), *each[worst])
    facts: dict[str, Any] = dict(zip(("out_fro", "out_max", "grad_fro", "grad_max"), map(brief, numbers), strict=True))
    facts |= {"grad_worst": worst, "grads": {name: brief(far) for name, (far, _) in each.items()}}
    return facts | {"finite": all(bool(tensor.isfinite().all()) for tensor in (found[0], *found[1].values()))}


def brief(number: float) -> float | None:
    return float(f"{number:.3g}") if math.isfinite(number) else None


def fitting_costs(operator: str, form: Form, dtype: torch.dtype, s: Shape, device: str) -> dict[str, Any]:
    """`costs` at this batch, or at a quarter of it, and so on, where memory is short."""
    while True:
        try:
            t = draw(operator, s, dtype, 1.0, device)
            with settings(form):
                return {"batch": s.batch} | costs(form.call, t, s, dtype, device)
        except torch.OutOfMemoryError as error:
            t, failed = {}, reason(error)
        except Exception as error:
            return {"error": reason(error)}
        if device == "cuda":
            torch.cuda.empty_cache()
        if s.batch < 4:
            return {"error": failed}
        s = s._replace(batch=s.batch // 4)


def costs(call: Call, t: Tensors, s: Shape, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Median milliseconds and peak megabytes besides the inputs, of forward alone and of forward and backward."""
    cotangent, found = torch.randn(s.batch, s.tokens, s.dim, device=device).to(dtype), {}

    def forward() -> None:
        with torch.no_grad():
            call(t, s).to(dtype)

    for name, step, limit in (("forward", forward, 0.03), ("both", lambda: both(call, t, s, cotangent), 0.06)):
        if found.get("forward_ms", 0.0) > TOO_SLOW:
            return found | {"error": "too slow to go on"}
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        found[f"{name}_ms"] = round(timed(step, device, limit), 4)
        if device == "cuda":
            found[f"{name}_mb"] = round((torch.cuda.max_memory_allocated() - before) / 1e6, 1)
    return found


def timed(call: Callable[[], Any], device: str, seconds: float, most: int = 30) -> float:
    """Median milliseconds of a call; as many calls as fit into the time, at least three. On the CPU one."""
    if device == "cpu":
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    for _ in range(2):
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        took = time.perf_counter() - start
    if 1e3 * took > TOO_SLOW:
        return 1e3 * took
    count = min(max(int(seconds / took), 3), most)
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for first, last in marks:
        first.record()
        call()
        last.record()
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(last) for first, last in marks)


def environment(device: str) -> dict[str, Any]:
    """Names and versions, and two ceilings: bytes per second of a copy, operations per second of a product."""
    found: dict[str, Any] = {"torch": torch.__version__, "numpy": np.__version__, "device": device}
    if device == "cpu":
        return found
    properties = torch.cuda.get_device_properties(0)
    found |= {"device": properties.name, "multiprocessors": properties.multi_processor_count}
    found |= {"memory_gb": round(properties.total_memory / 1e9, 1), "cuda": torch.version.cuda}
    found["cudnn"] = torch.backends.cudnn.version()
    x = torch.randn(2**29, device=device)
    y = torch.empty_like(x)
    found["copy_gb_per_s"] = round(2 * 4 * x.numel() / timed(lambda: y.copy_(x), device, 0.2) / 1e6)
    kinds = {"bf16": (torch.bfloat16, False), "tf32": (torch.float32, True), "f32": (torch.float32, False)}
    for name, (dtype, tf32) in kinds.items():
        a, b = (torch.randn(8192, 8192, device=device, dtype=dtype) for _ in range(2))
        with settings(Form(reference("local"), tf32=tf32)):
            milliseconds = timed(lambda a=a, b=b: a @ b, device, 0.2)
        found[f"{name}_tflop_per_s"] = round(2 * 8192**3 / milliseconds / 1e9, 1)
    return found


def overhead(device: str) -> dict[str, float]:
    """Microseconds of small operators one after another, and milliseconds of forms for 49 tokens of one image."""
    a, found = torch.randn(1, 2, 16, 16, device=device), {}
    calls = {"add": lambda: a + a, "matmul": lambda: a @ a, "softmax": lambda: a.softmax(-1), "cast": lambda: a.half()}
    for name, call in calls.items():
        found[f"{name}_us"] = round(5.0 * timed(lambda call=call: [call() for _ in range(200)], device, 0.1), 2)
    s = Shape(1, WINDOW, HEADS, CHANNELS)
    for operator in ("softmax", "linear_elu", "inline", "polaformer", "local"):
        t = draw(operator, s, HALF[0], 1.0, device)
        for name, form in forms(operator, HALF[0]).items():
            with torch.no_grad(), settings(form):
                found[f"{operator}_{name}_ms"] = round(timed(lambda f=form, t=t: f.call(t, s), device, 0.05), 3)
    return found
