"""Export a trained model as an inference folder, which appears only after all checks have passed.

The folder holds the program and its weights (`inference.json` with `inference.pdiparams`, `inference.onnx`, or both),
`inference.yml` (for PaddleX), `ppattn.json` (preprocessing, class names, input size, where it came from, which runtimes
passed, checksums) and `golden.npz` (a batch and the trained model's answer to it).
"""

import contextlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import paddle
from paddle import nn
from paddle.static import InputSpec

import ppattn
from ppattn.data import Preprocess
from ppattn.data.classes import check_names
from ppattn.deploy.checks import TOLERANCE, Arrays, check, check_batches, failure_reason, run_python
from ppattn.deploy.engines import CALLS, TABLE
from ppattn.deploy.folder import ABOUT, FILES, GOLDEN, ONNX, PADDLEX, PROGRAM, WEIGHTS, paddlex_config
from ppattn.errors import UserError, install_command, reading_untrusted, unknown_name
from ppattn.files.atomic import atomic_folder, checksum
from ppattn.layers import evaluating
from ppattn.ops import marking_float32, tracing
from ppattn.text import progress_line
from ppattn.validation import Size

OPSET = 17
# What an export says of itself. Without VNNI a processor adds two products of an unsigned 8-bit input and a weight in
# 16 bits, where weights of 8 bits overflow; without AVX512 Paddle Inference ignores `enable_mkldnn_bfloat16`.
SEVEN_BITS = "weights have 7 bits, so that processors without VNNI give the same answers"
NOT_VERIFIED = "this processor computes bfloat16 programs in float32: not verified"
RUNTIMES: dict[str, dict[str, list[str]]] = TABLE["exported"]


@dataclass(frozen=True)
class Plan:
    """What `export` was asked for, with the defaults filled in; these are entries of ppattn.json, too."""

    format: str
    precision: str
    output: str  # probabilities, logits or features
    classes: list[str]  # none for features
    dynamic_size: bool
    stride: int
    preprocess: Preprocess
    sigmoid: bool


def export(
    model: nn.Layer,
    folder: str | Path,
    img_size: Size | None = None,
    format: str = "paddle",
    *,
    preprocess: Preprocess | None = None,
    classes: list[str] | None = None,
    features: bool = False,
    logits: bool = False,
    sigmoid: bool = False,
    dynamic_size: bool = False,
    precision: str = "fp32",
    source: dict | None = None,
    images: np.ndarray | None = None,
    calibration: np.ndarray | None = None,
) -> dict:
    """Write an inference folder; it appears only if every check passed.

    The runtimes (paddle.jit.load and Paddle Inference without oneDNN and with its default settings, ONNX Runtime) must
    give the model's own answer at batch 1, 3 and 8, on random images and on `images`. Where only Paddle Inference's
    default settings fail, the folder is written, and `ppattn.json` and stderr name the call that other programs need.
    Raises `UserError` for a model that does not export this way, or that answers differently afterwards.

    Args:
        model: what `create_model` built.
        folder: where it goes; an earlier export there is replaced.
        img_size: pixels or (height, width); default: that of `preprocess`, or the size the model was built for.
        format: "paddle", "onnx" (opset 17; needs paddle2onnx and onnxruntime), or "both".
        preprocess: `ppattn.data.Preprocess`; default: ImageNet's at `img_size`.
        classes: class names in the order of the outputs; default: their numbers.
        features: the program gives pooled features [B, C], as a model without head always does. In fp32 only.
        logits: the program gives logits [B, K] instead of probabilities.
        sigmoid: probabilities are those of each class alone, as of a model that was trained with `loss.name: bce`.
        dynamic_size: accept every image size that is a multiple of the model's stride, not only any batch.
        precision: "fp32"; "bf16" for Paddle Inference on CPUs that have it; "fp16" for ONNX, with float32 inside as in
            training; or "int8" for ONNX: linear layers with inputs of 8 and weights of 7 bits, quantised statically.
        source: where the model came from, kept as it is; must be JSON.
        images: real images, preprocessed, float32 [n, C, H, W]; 8 are used, 64 to judge the others.
        calibration: training images, preprocessed, for int8; a few hundred are enough.

    Returns:
        {"engine": the runtime that will be used, "differences": {runtime: largest difference as a part of the largest
        output, or why it failed}, "by_batch": {runtime: {batch: difference}}, "paddlex": None, or why PaddleX cannot
        read the folder, "note": None, or what else a user must know, "same_top1": images with fp32's class, a share}.
    """
    model.check_images()
    output = "features" if features or not model.num_classes else "logits" if logits else "probabilities"
    size = Preprocess(img_size or (preprocess or model).img_size).img_size
    preprocess = preprocess or Preprocess(size, in_chans=model.in_chans)
    names = [] if output == "features" else check_names(list(classes or map(str, range(model.num_classes))), "export")
    plan = Plan(format, precision, output, names, dynamic_size, model.strides[-1], preprocess, sigmoid)
    if sigmoid and output == "logits":
        raise UserError("Logits are read as those of one class per image; this model has several: leave --logits out.")
    check_runtimes(format, precision, output)
    if names and len(names) != model.num_classes:
        raise UserError(f"The model has {model.num_classes} classes, but {len(names)} class names were given.")
    if (preprocess.in_chans, *preprocess.img_size) != (model.in_chans, *size):
        made, taken = [preprocess.in_chans, *preprocess.img_size], [model.in_chans, *size]
        raise UserError(f"The preprocessing gives images {made}, the export takes {taken}.")
    if dynamic_size and any(side % plan.stride for side in size):
        raise UserError(f"dynamic_size takes multiples of {plan.stride} pixels, which {size[0]} x {size[1]} is not.")
    if precision == "int8" and (calibration is None or images is None):
        raise UserError("int8 needs real images, of the training split to calibrate and others to judge it by.")
    batches = check_batches(model.in_chans, size, images, plan.stride if dynamic_size else None)
    if precision != "fp32":
        noise = np.random.default_rng(1).standard_normal((64, model.in_chans, *size))
        batches["judged"] = np.asarray(noise if images is None else images[:64], np.float32)

    folder = Path(os.path.realpath(folder))  # behind a link, the export goes to where the link points
    steps = 3 + (format != "paddle") + 2 * (precision == "int8")
    with atomic_folder(folder, FILES, "export") as work, progress_line("export", steps) as begin:
        report = _write(model, plan, work, batches, calibration, begin)
        _describe(model.name, plan, work, report, source or {})
    if isinstance(problem := report["differences"].get("stock"), str):
        wrong = f"The default settings of paddle.inference.Config are wrong for this model ({problem})"
        print(f"{wrong}; other programs must call config.disable_mkldnn().", file=sys.stderr)
    return report


def check_runtimes(format: str, precision: str, output: str) -> None:
    if format not in RUNTIMES:
        raise unknown_name("format", format, RUNTIMES)
    if precision not in RUNTIMES[format]:
        others = " or ".join(f"--format {other}" for other in RUNTIMES if precision in RUNTIMES[other])
        allowed = f"it needs {others}" if others else f"choose {' or '.join(RUNTIMES[format])}"
        raise UserError(f"precision = {precision!r} is not allowed for {format}: {allowed}.")
    if output == "features" and precision != "fp32":
        raise UserError(f"{precision} is judged by the classes of images; features are exported as fp32.")
    if format != "paddle" and not all(map(importlib.util.find_spec, ("paddle2onnx", "onnxruntime"))):
        raise UserError(f"ONNX export needs Python 3.12 or older and two packages: {install_command('onnx')}")


def _write(
    model: nn.Layer, plan: Plan, work: Path, batches: Arrays, calibration: np.ndarray | None, begin: Callable
) -> dict:
    """Write program, weights and golden pair into `work` and check them; returns what `export` returns."""
    size = (None, None) if plan.dynamic_size else plan.preprocess.img_size
    begin("tracing the program")
    with _as_exported(model, plan.output, plan.sigmoid) as program:
        with marking_float32() if plan.precision == "fp16" else contextlib.nullcontext():
            save_program(program, work, (model.in_chans, *size))
        begin("answers of the model")
        if paddle.is_compiled_with_cuda():  # no TF32
            paddle.base.core.set_cublas_switch(False), paddle.base.core.set_cudnn_switch(False)
        start = time.monotonic()
        with paddle.no_grad():
            expected = {name: program(paddle.to_tensor(batch)).numpy() for name, batch in batches.items()}
        limit = 180 + 20 * (time.monotonic() - start)
    report: dict = {"engine": None, "differences": {}, "by_batch": {}, "note": None}
    if plan.format != "paddle":
        begin("conversion to ONNX")
        to_onnx(work, keep=plan.format == "both")
    if plan.precision == "fp16":
        from ppattn.deploy.half import to_half

        to_half(work / ONNX)
    if plan.precision == "int8" and calibration is not None:
        begin("check of the float32 program")
        check(work, batches, expected, plan.output, ["onnxruntime"], limit, report)
        begin("quantisation")
        quantise(work, calibration)
        report["note"] = SEVEN_BITS
    runtimes = RUNTIMES[plan.format][plan.precision]
    begin(f"check of {', '.join(runtimes)}")
    check(work, batches, expected, plan.output, runtimes, limit, report)
    if report["differences"].get("bf16", 1.0) < TOLERANCE["fp32"]:
        report["note"] = NOT_VERIFIED
    golden = "real3" if "real3" in batches else "random3"
    np.savez(work / GOLDEN, input=batches[golden], output=expected[golden])
    return report


def _describe(name: str, plan: Plan, work: Path, report: dict, source: dict) -> None:
    """Write ppattn.json about the other files in the folder, and PaddleX's description."""
    text, report["paddlex"] = paddlex_config(name, plan.preprocess, plan.classes, plan.output)
    about = {"model": name, **vars(plan), **report, "source": source}
    if plan.format != "onnx":
        about["config_calls"] = CALLS[report["engine"]]  # that any program makes on paddle.inference.Config
    shape = ["batch", plan.preprocess.in_chans, *plan.preprocess.img_size]
    about |= {
        "input": {"name": "images", "shape": shape, "type": "float32"},
        "preprocess": plan.preprocess.to_dict(),
        "versions": {"ppattn": ppattn.__version__, "paddle": paddle.__version__},
        "sha256": {path.name: checksum(path) for path in sorted(work.iterdir())},
    }
    (work / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    if text:  # without a checksum: PaddleX's users edit it
        (work / PADDLEX).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _as_exported(model: nn.Layer, output: str, sigmoid: bool) -> Iterator[nn.Layer]:
    """The layer to export, in eval mode; afterwards the model is what it was."""
    head, classes = model.head, model.num_classes
    with evaluating(model):
        if output == "features":
            model.reset_classifier(0)
        try:
            last = nn.Sigmoid() if sigmoid else nn.Softmax(axis=-1)
            yield nn.Sequential(model, last) if output == "probabilities" else model
        finally:
            model.head, model.num_classes = head, classes


def save_program(model: nn.Layer, work: Path, shape: tuple[int | None, ...]) -> None:
    """inference.json and inference.pdiparams of a layer in eval mode, for any batch of images [C, H, W] (None: any)."""
    try:
        with tracing():
            images = InputSpec([None, *shape], "float32", "images")
            paddle.jit.save(model, str(work / Path(PROGRAM).stem), input_spec=[images])
    except UserError as error:  # strip Paddle's traceback prefix
        raise UserError(str(error).rpartition("UserError: ")[2].strip()) from None
    except (TypeError, ValueError, RuntimeError) as error:
        if None not in shape:
            raise
        kind = f"a free image size ({type(error).__name__} while tracing it)"
        raise UserError(f"This model does not export with {kind}: leave --dynamic-size out.") from None


def to_onnx(work: Path, keep: bool = False) -> None:
    """inference.onnx from the Paddle program, which goes unless `keep`; in another process: paddle2onnx aborts."""
    program = f"import sys, paddle2onnx; paddle2onnx.export(*sys.argv[1:], opset_version={OPSET}, verbose=False)"
    done = run_python("-c", program, *(work / name for name in (PROGRAM, WEIGHTS, ONNX)))
    if done.returncode or not (work / ONNX).exists():
        errors = [line.rpartition("]")[2] for line in (done.stdout + done.stderr).splitlines() if "[ERROR]" in line]
        why = (errors or [failure_reason(done)])[0].strip()[:200]
        raise UserError(f"paddle2onnx could not convert this model: {why}")
    for name in () if keep else (PROGRAM, WEIGHTS):
        (work / name).unlink()


def quantise(work: Path, calibration: np.ndarray) -> None:
    """Make the ONNX program in `work` a static int8 one: weights (per output channel, 7 bits) and inputs of the linear
    layers; everything else stays float32, which is where accuracy is lost and little time is spent."""
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    from onnxruntime.quantization.quant_utils import add_pre_process_metadata

    path, images = work / ONNX, np.asarray(calibration, np.float32)
    model = onnx.load(path)
    add_pre_process_metadata(model)  # otherwise two warnings ask for it
    graph = model.graph
    matrices = {array.name for array in graph.initializer if len(array.dims) == 2}
    linear = [node.name for node in graph.node if node.op_type == "MatMul" and node.input[1] in matrices]

    class Batches(CalibrationDataReader):
        batches = iter([{graph.input[0].name: images[i : i + 16]} for i in range(0, len(images), 16)])

        def get_next(self):
            return next(self.batches, None)

    kinds = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8, "reduce_range": True}
    chosen = {"op_types_to_quantize": ["MatMul"], "nodes_to_quantize": linear}
    with reading_untrusted("The ONNX program", "one that onnxruntime quantises"):
        quantize_static(model, path, Batches(), per_channel=True, **kinds, **chosen)
