"""Half precision emulated on a CPU: what rounds on a GPU under `paddle.amp.auto_cast` rounds here.

python -m tests.helpers.half half.csv     # all attentions and sizes, about an hour on one core

Inputs and outputs of matrix products, linear layers and convolutions are rounded to the half type, and so are their
gradients; everything else runs in float32. Functions under `ops.full_precision` are left in float32, as on a GPU.
"""

import contextlib
import csv
import sys
from collections.abc import Iterator
from itertools import product
from unittest.mock import patch

import numpy as np
import paddle
import paddle.nn.functional as F

import ppattn
from ppattn import ops
from ppattn.errors import UserError
from ppattn.ops.attention import full_precision

ROUNDED = ((paddle, "matmul"), (paddle, "bmm"), (F, "linear"), (F, "conv2d"))
COLUMNS = ("attention", "backbone", "tokens", "dtype", "guarded", "logits", "gradients_finite", "worst_gradient")
SIDES = {64: 8, 196: 14, 4096: 64}  # tokens of deit_nano, and patches along a side


@contextlib.contextmanager
def half_precision(dtype: str, guarded: bool = True) -> Iterator[None]:
    """Round as `dtype` ("bfloat16" or "float16") does; not `guarded`: also inside `ops.full_precision`."""
    inside = 0

    def rounded(x):
        return x.astype(dtype).astype(x.dtype) if isinstance(x, paddle.Tensor) and x.dtype == paddle.float32 else x

    def rounding(function):
        def call(*arguments, **settings):
            if inside:
                return function(*arguments, **settings)
            settings = {name: rounded(value) for name, value in settings.items()}
            return rounded(function(*map(rounded, arguments), **settings))

        return call

    def entered(*_, **__) -> Iterator[None]:
        nonlocal inside
        inside += guarded
        try:
            yield
        finally:
            inside -= guarded

    with contextlib.ExitStack() as stack:
        for owner, name in ROUNDED:
            stack.enter_context(patch.object(owner, name, rounding(getattr(owner, name))))
        stack.enter_context(patch.object(full_precision, "func", entered))
        yield


def logits_and_gradients(model: paddle.nn.Layer, images: paddle.Tensor) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logits, and the gradients of all trained parameters for a fixed gradient of the logits."""
    logits = model(images)
    paddle.seed(1)
    (logits * paddle.randn(logits.shape)).sum().backward()
    gradients = {name: p.grad.numpy().astype("float64") for name, p in model.named_parameters() if p.grad is not None}
    model.clear_gradients()
    return logits.numpy(), gradients


def compare(attention: str, backbone: str, side: int, dtype: str, guarded: bool) -> dict:
    """Distance of the logits from float32 by the largest logit, and of the worst gradient by its norm.

    `deit_nano` has the weights trained here where they fit the tokens, position tables resized; others are random."""
    ops.enable("plain")
    paddle.seed(0)
    size, trained = side * (4 if backbone == "deit_nano" else 2), f"{attention}_deit_nano_cifar10"
    model = None
    if backbone == "deit_nano" and trained in ppattn.list_models(pretrained=True):
        with contextlib.suppress(UserError):  # the number of tokens is fixed by the weights
            model = ppattn.create_model(trained, pretrained=True, img_size=size)
    model = model or ppattn.create_model(backbone, attention=attention, img_size=size, num_classes=10)
    model.eval()
    images = paddle.randn([2 if side < 32 else 1, 3, size, size])
    wanted, exact = logits_and_gradients(model, images)
    with half_precision(dtype, guarded):
        got, found = logits_and_gradients(model, images)
    norms = {name: np.linalg.norm(gradient) for name, gradient in exact.items()}
    largest = max(norms.values())
    errors = [np.linalg.norm(found[name] - exact[name]) / max(norms[name], 1e-3 * largest) for name in exact]
    finite = all(np.isfinite(gradient).all() for gradient in found.values())
    error, worst = np.abs(got - wanted).max() / np.abs(wanted).max(), max(errors) if finite else np.nan
    values = (attention, backbone, side * side, dtype, guarded, float(error), finite, float(worst))
    return dict(zip(COLUMNS, values, strict=True))


def main(path: str) -> None:
    ppattn.setup(device="cpu", kernels="plain")
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for tokens, side in SIDES.items():
            backbones = ("deit_nano", "pvt_nano", "swin_nano") if tokens == 64 else ("deit_nano",)
            choices = product(backbones, ppattn.list_attentions(), ("bfloat16", "float16"), (False, True))
            for backbone, attention, dtype, guarded in choices:
                row = compare(attention, backbone, side, dtype, guarded)
                writer.writerow({key: f"{v:.2e}" if isinstance(v, float) else v for key, v in row.items()})
                file.flush()


if __name__ == "__main__":
    main(sys.argv[1])
