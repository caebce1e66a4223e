"""Which plain forms of the attentions are right and fast on a GPU, with PyTorch.

python -m scripts.studies.gpu_inputs inputs                                  # with Paddle: operators.npz
python -m scripts.studies.gpu_forms --compare inputs/operators.npz           # only: are the transcriptions right?
python -m scripts.studies.gpu_forms --inputs inputs --output found           # on a GPU, two to five minutes
python -m scripts.studies.gpu_forms --inputs inputs --output rehearsal --device cpu --small

It measures the libraries that Paddle calls (cuBLAS, cuDNN, FlashAttention, CUTLASS) through the same sequence of eager
operators, not Paddle itself. Products of half precision accumulate in float32, as in Paddle.

operators.csv (torch_forms.py), for 196 to 12,544 tokens: distance of the output (`out_fro`) and of the worst gradient
(`grad_fro`, `grad_worst`) from float64, in the Frobenius norm by that of the exact value, for inputs of standard
deviation 1 and `large`; `rounded` is the exact value in that type. Then median milliseconds and peak megabytes, without
the inputs, of forward and of forward and backward, for 50,176 tokens in all, 384 channels in 6 heads (windows: 49
tokens, 12 heads). run.json: versions, the comparison with Paddle, errors, and what was left out after `--seconds`.
"""

import argparse
import contextlib
import csv
import datetime
import itertools
import json
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from scripts.studies.torch_forms import AGENTS, OPERATORS, Form, Shape, Tensors, forms


def run(inputs: Path, output: Path, device: str, small: bool, seconds: float) -> None:
    """All measurements; the files are written after each, so that what is there survives."""
    begin, rows = time.monotonic(), []
    name = torch.cuda.get_device_name() if device == "cuda" else device
    facts: dict[str, Any] = {"date": f"{datetime.date.today()}", "device": name, "torch": torch.__version__}
    facts |= {"comparison": compare(inputs / "operators.npz", device), "errors": {}, "left_out": []}
    output.mkdir(parents=True, exist_ok=True)
    types, sides = (torch.bfloat16, torch.float16, torch.float32), (14, 28) if small else (56, 14, 28, 112)
    for dtype, side, operator in itertools.product(types, sides, OPERATORS):
        if operator == "window" and side != 14:
            continue
        label = f"{operator} {dtype} {side * side}"
        if time.monotonic() > begin + seconds:
            facts["left_out"].append(label)
            continue
        try:
            rows += measure(operator, dtype, side, device, small)
        except Exception as error:  # one failure must not cost the rest
            facts["errors"][label] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        facts["seconds"] = round(time.monotonic() - begin, 1)
        print(f"{facts['seconds']:6.1f} s  {label}", flush=True)
        with (output / "operators.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, dict.fromkeys(key for row in rows for key in row), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        (output / "run.json").write_text(json.dumps(facts, indent=1) + "\n")


def use_tf32(on: bool) -> None:
    """Products and convolutions of float32 in TF32, or not."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = on


def measure(operator: str, dtype: torch.dtype, side: int, device: str, small: bool) -> list[dict]:
    """A row for every form of an operator."""
    heads, channels, total = (2, 64, 1_568) if small else (6, 384, 50_176)
    side, heads = (7, 2 * heads) if operator == "window" else (side, heads)
    few = 1 if operator == "softmax" and side > 28 else heads  # float64 stores a map
    checked = Shape(64 if operator == "window" else 2 if side <= 28 else 1, side, few, channels // heads * few)
    large = 2.0 if operator == "soft" else 8.0  # beyond 2 its kernels vanish
    common = {"operator": operator, "dtype": str(dtype).removeprefix("torch."), "tokens": side * side, "large": large}
    rows = {name: {**common, "form": name} for name in ("rounded", *forms(operator, dtype))}
    for prefix, size in (("", 1.0), ("large_", large)):
        for name, facts in accuracy(operator, dtype, checked, size, device).items():
            rows[name] |= {f"{prefix}{key}": value for key, value in facts.items()}
    s = Shape(max(total // (side * side), 1), side, heads, channels)
    t = draw(operator, s, dtype, 1.0, device)
    cotangent = torch.randn(s.batch, s.tokens, s.dim, device=device).to(dtype)
    for name, form in forms(operator, dtype).items():
        rows[name] |= {"batch": s.batch}
        use_tf32(form.tf32)
        with contextlib.suppress(torch.OutOfMemoryError):
            rows[name] |= costs("forward", partial(forward, form, t, s, dtype), device)
            rows[name] |= costs("both", partial(both, form, t, s, cotangent), device)
    return list(rows.values())


def compare(file: Path, device: str) -> list[dict]:
    """Distances of all forms, all in float32, from Paddle's outputs and gradients (operators.npz)."""
    with np.load(file) as arrays:
        known = {name: torch.tensor(array, device=device) for name, array in arrays.items()}
    s, rows = Shape(2, 10, 2, 32), []
    for operator in OPERATORS:
        names = [key.rpartition("/")[2] for key in known if key.startswith(f"{operator}/grad/")]
        t = {key: known.get(f"{operator}/in/{key}", known.get(f"shared/in/{key}")).requires_grad_() for key in names}
        for name, form in forms(operator, torch.float32).items():
            if form.tf32:
                continue
            y, gradients = both(form, t, s, known["shared/in/cotangent"])
            far = [distance(gradient, known[f"{operator}/grad/{key}"]) for key, gradient in gradients.items()]
            worst = max(far, key=lambda x: (math.isnan(x), x))
            facts = {"operator": operator, "form": name, "output": distance(y, known[f"{operator}/out"])}
            rows.append(facts | {"gradient": worst})
    return rows


@torch.no_grad()
def forward(form: Form, t: Tensors, s: Shape, dtype: torch.dtype) -> Tensor:
    return form.call(t, s).to(dtype)


def both(form: Form, t: Tensors, s: Shape, cotangent: Tensor) -> tuple[Tensor, Tensors]:
    """Output in the type of the cotangent, and the gradients of the inputs."""
    use_tf32(form.tf32)
    y = form.call(t, s).to(cotangent.dtype)
    return y, dict(zip(t, torch.autograd.grad(y, list(t.values()), cotangent), strict=True))


def distance(found: Tensor, exact: Tensor) -> float:
    """|found - exact| / |exact| in the Frobenius norm."""
    found, exact = found.detach().double(), exact.detach().double()
    return float(f"{float((found - exact).norm() / exact.norm()):.3g}")


def accuracy(operator: str, dtype: torch.dtype, s: Shape, size: float, device: str) -> dict[str, dict]:
    """Distances from float64 for inputs of standard deviation `size`, by form."""
    t = draw(operator, s, dtype, size, device)
    exact = {name: value.detach().double().requires_grad_() for name, value in t.items()}
    cotangent = torch.randn(s.batch, s.tokens, s.dim, device=device).to(dtype)
    truth = both(next(iter(forms(operator, torch.float64).values())), exact, s, cotangent.double())
    found = {"rounded": (truth[0].to(dtype), {name: value.to(t[name].dtype) for name, value in truth[1].items()})}
    found |= {name: both(form, t, s, cotangent) for name, form in forms(operator, dtype).items()}
    facts: dict[str, dict] = {}
    for name, (y, gradients) in found.items():
        far = {key: distance(gradient, truth[1][key]) for key, gradient in gradients.items()}
        worst = max(far, key=lambda key: far[key] if math.isfinite(far[key]) else math.inf)
        facts[name] = {"out_fro": distance(y, truth[0]), "grad_fro": far[worst], "grad_worst": worst}
        facts[name]["finite"] = all(bool(tensor.isfinite().all()) for tensor in (y, *gradients.values()))
    return facts


def costs(name: str, call: Callable[[], Any], device: str) -> dict[str, float]:
    """Median milliseconds, and peak megabytes besides what is there."""
    time_of_calls = Timer("f()", globals={"f": call}).blocked_autorange(min_run_time=0.05)
    found = {f"{name}_ms": round(1e3 * time_of_calls.median, 4)}
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        found[f"{name}_mb"] = round((torch.cuda.max_memory_allocated() - before) / 1e6, 1)
    return found


def draw(operator: str, s: Shape, dtype: torch.dtype, size: float, device: str) -> Tensors:
    """Inputs of an operator, with gradient: activations of this type and of standard deviation `size`, parameters.

    Half of the variance of q, k and v is that of the channels' means, which the tokens of an image share.
    """
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=generator, device=device)

    inputs, d, scale = (s.batch, s.tokens, s.dim), s.head_dim, size * 0.5**0.5
    names = {"local": "v", "soft": "qv"}.get(operator, "qkv")
    t = {x: (scale * (normal(*inputs) + normal(s.batch, 1, s.dim))).to(dtype) for x in names}
    if operator == "local":
        t["kernel"] = normal(s.batch, s.dim, 9, scale=0.3).to(dtype)
    elif operator == "window":
        t["bias"] = normal(s.heads, s.tokens, s.tokens)
    elif operator == "agent":
        t["on_keys"] = normal(s.heads, AGENTS**2, s.tokens, scale=0.5)
        t["on_agents"] = normal(s.heads, s.tokens, AGENTS**2, scale=0.5)
    elif operator == "polaformer":
        t["factor"] = normal(1, 1, s.dim, scale=0.2).exp() / 0.69
        t["power"] = 1.0 + 4.0 * torch.sigmoid(normal(1, s.heads, 1, d))
        t["table"] = normal(1, s.tokens, s.dim, scale=0.02)
    elif operator == "vittt":
        t |= {x: normal(1, s.heads, d, d, scale=d**-0.5) for x in ("w1", "w2")}
    elif operator == "soft":
        ratio = max(2, round(s.side / AGENTS))
        t["landmark"] = normal(d, d, ratio, ratio, scale=(d * ratio**2) ** -0.5)
        t["gain"], t["shift"] = 1.0 + normal(d, scale=0.1), normal(d, scale=0.1)
    return {x: value.detach().requires_grad_() for x, value in t.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", type=Path, metavar="FILE", help="operators.npz: compare with it, nothing else")
    parser.add_argument("--inputs", type=Path, metavar="DIR", default="inputs", help="folder of operators.npz")
    parser.add_argument("--output", type=Path, metavar="DIR", default="found", help="folder of the results")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="few tokens, to rehearse on a CPU")
    parser.add_argument("--seconds", type=float, default=270.0)
    given = parser.parse_args()
    matmul = torch.backends.cuda.matmul
    matmul.allow_fp16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction = False
    if given.compare:
        rows = compare(given.compare, given.device)
        for row in rows:
            print(f"{row['operator']:12} {row['form']:8} {row['output']:.1e} {row['gradient']:.1e}")
        return int(not all(row[key] <= 1e-4 for row in rows for key in ("output", "gradient")))
    run(given.inputs, given.output, given.device, given.small, given.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
