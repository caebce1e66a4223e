"""Export a trained model as an inference folder, which appears only after all checks have passed.

The folder holds the program and its weights (`model.json` with `model.pdiparams`, or `model.onnx`), `inference.json`
(preprocessing, class names, input size, versions, where it came from, which runtimes passed, checksums of all files)
and `golden.npz` (a batch and the trained model's answer to it). It takes any batch size and gives logits or features.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ppattn.data import Preprocess
from ppattn.data.layout import check_names
from ppattn.deploy.checks import answers, check, check_batches, python, reason
from ppattn.deploy.description import seal
from ppattn.deploy.engines import CALLS
from ppattn.download import checksum
from ppattn.errors import UserError, content_of
from ppattn.schema import Size

if TYPE_CHECKING:
    from paddle import nn

OPSET = 17
# precisions of a format -> the runtimes that are tried; the last one that passes is used
RUNTIMES = {
    "paddle": {"fp32": ["jit", "plain", "stock"], "bf16": ["jit", "plain", "stock", "bf16"]},
    "onnx": {"fp32": ["onnx"], "int8": ["onnx", "int8"]},
}


def export(
    model: nn.Layer,
    folder: str | Path,
    img_size: Size | None = None,
    format: str = "paddle",
    *,
    preprocess: Preprocess | None = None,
    classes: list[str] | None = None,
    features: bool = False,
    dynamic_size: bool = False,
    precision: str = "fp32",
    source: dict | None = None,
    images: np.ndarray | None = None,
    calibration: np.ndarray | None = None,
) -> dict:
    """Write an inference folder; it appears only if every check passed.

    The runtimes (paddle.jit.load and Paddle Inference without oneDNN and with its default settings, or ONNX Runtime)
    must give the model's own answer at batch 1, 3 and 8, on random images and on `images`. Where only the default
    settings fail, the folder is written, and `inference.json` and stderr name the call that other programs need.

    Args:
        model: what `create_model` built.
        folder: where it goes; an earlier export there is replaced.
        img_size: pixels or (height, width); default: the size the model was built for.
        format: "paddle" or "onnx" (opset 17; needs paddle2onnx and onnxruntime).
        preprocess: `ppattn.data.Preprocess`; default: ImageNet's at `img_size`.
        classes: class names in the order of the logits; default: their numbers.
        features: give the pooled features [B, C] that the head gets instead of logits [B, K]; a model without head
            always does. In fp32 only.
        dynamic_size: accept every image size that is a multiple of the model's stride, not only any batch.
        precision: "fp32", "bf16" for Paddle Inference on CPUs that have it, or "int8" for ONNX: weights and inputs of
            the linear layers, quantised statically by onnxruntime.
        source: where the model came from, kept as it is; must be JSON.
        images: real images, preprocessed, float32 [n, C, H, W]; 8 are used, 64 to judge bf16 and int8.
        calibration: training images, preprocessed, for int8; a few hundred are enough.

    Returns:
        {"engine": the runtime that will be used, "differences": {runtime: largest difference as a part of the largest
        output, or why it failed}, "by_batch": {runtime: {batch: difference}}}, and for bf16 and int8 "same_top1": the
        part of the images with fp32's first class.

    Raises:
        UserError: for a model that does not export this way, or that answers differently afterwards.
    """
    folder, features = Path(folder), features or not model.num_classes
    if folder.name in ("", ".."):
        raise UserError(f"{str(folder)!r} is not allowed: name a new folder for the export.")
    if folder.is_symlink():
        folder = Path(os.path.realpath(folder))  # the export replaces what the link points to, on its disk
    if format not in list(RUNTIMES):
        raise UserError(f"format = {format!r} is not allowed; choose paddle or onnx.")
    if precision not in RUNTIMES[format]:
        allowed = " or ".join(RUNTIMES[format])
        raise UserError(f"precision = {precision!r} is not allowed for {format}; choose {allowed}.")
    if features and precision != "fp32":
        raise UserError(f"{precision} is judged by the classes of images; features are exported as fp32.")
    if precision == "int8" and (calibration is None or images is None):
        raise UserError("int8 needs real images, of the training split to calibrate and others to judge it by.")
    if format == "onnx" and not all(map(importlib.util.find_spec, ("paddle2onnx", "onnxruntime"))):
        raise UserError("ONNX export needs Python 3.12 or older and two packages: pip install paddle2onnx onnxruntime.")
    if folder.exists() and not (folder.is_dir() and (_is_export(folder) or not any(folder.iterdir()))):
        raise UserError(f"{folder} holds something that is no export; give an empty or new folder.")
    pixels: Any = model.img_size if img_size is None else img_size
    size = Preprocess(pixels).img_size
    preprocess = preprocess or Preprocess(size, in_chans=model.in_chans)
    if not isinstance(classes, list | tuple | None):
        raise UserError(f"classes is a list of names, not {classes!r}.")
    classes = list(classes or map(str, range(model.num_classes)))
    if len(classes) != model.num_classes:
        raise UserError(f"The model has {model.num_classes} classes, but {len(classes)} class names were given.")
    if classes:
        check_names(classes, "export")
    if not isinstance(preprocess, Preprocess):
        raise UserError(f"preprocess is a ppattn.data.Preprocess, not a {type(preprocess).__name__}.")
    if (preprocess.in_chans, *preprocess.img_size) != (model.in_chans, *size):
        made = f"{preprocess.in_chans} x {preprocess.img_size[0]} x {preprocess.img_size[1]}"
        raise UserError(f"The preprocessing gives {made}, the export takes {model.in_chans} x {size[0]} x {size[1]}.")
    stride = model.strides[-1]
    if dynamic_size and (size[0] % stride or size[1] % stride):
        raise UserError(f"dynamic_size takes multiples of {stride} pixels, which {size[0]} x {size[1]} is not.")
    with content_of("source", "a mapping for JSON"):
        json.dumps(dict(source or {}), allow_nan=False)
    images = _checked("images", images, (model.in_chans, *size))
    calibration = _checked("calibration", calibration, (model.in_chans, *size))

    work = _work_folder(folder)
    try:
        batches = check_batches(model.in_chans, size, images, stride if dynamic_size else None)
        if precision != "fp32":
            many = np.random.default_rng(1).standard_normal((64, model.in_chans, *size)) if images is None else images
            batches["judged"] = np.asarray(many[:64], np.float32)
        with _as_exported(model, features):
            save_program(model, work, size, dynamic_size)
            start = time.monotonic()
            expected = answers(model, batches)
            limit = 180 + 20 * (time.monotonic() - start)
        report: dict = {"engine": None, "differences": {}, "by_batch": {}}
        engines = RUNTIMES[format][precision]
        if format == "onnx":
            to_onnx(work)
        if precision == "int8" and calibration is not None:
            check(work, batches, expected, engines[:1], limit, report)
            quantise(work, calibration)
            engines = engines[1:]
        check(work, batches, expected, engines, limit, report)
        golden = "real3" if "real3" in batches else "random3"
        np.savez(work / "golden.npz", input=batches[golden], output=expected[golden])
        facts = {"format": format, "precision": precision, **report, "dynamic_size": dynamic_size}
        facts |= {"output": "features", "classes": []} if features else {"output": "logits", "classes": classes}
        write_description(work, model, preprocess, facts, source)
        _put(work, folder)
    except OSError as error:
        raise UserError(f"Cannot write {folder}: {error.strerror or error}.") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if isinstance(problem := report["differences"].get("stock"), str):
        wrong = f"The default settings of paddle.inference.Config are wrong for this model ({problem})"
        print(f"{wrong}; other programs must call config.disable_mkldnn().", file=sys.stderr)
    return report


def _is_export(folder: Path) -> bool:
    """Whether a folder holds an export, and nothing else but an evaluation of it."""
    names = {path.name for path in folder.iterdir()}
    program = {"model.json", "model.pdmodel", "model.pdiparams", "model.onnx"}
    return {"inference.json", "golden.npz"} <= names <= {"inference.json", "golden.npz", "eval"} | program


def _checked(what: str, images: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray | None:
    """Images as float32 [n, *shape]; raises `UserError` for anything else."""
    if images is None:
        return None
    with content_of(what, "an array of preprocessed images"):
        images = np.asarray(images, np.float32)
    if images.shape[1:] != shape or not np.isfinite(images).all():
        raise UserError(f"{what} are finite numbers [n, {str(shape)[1:-1]}], not {list(images.shape)}.")
    return images


def _work_folder(folder: Path) -> Path:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent)).resolve()
    except OSError as error:
        raise UserError(f"Cannot write {folder}: {error.strerror}.") from None


def _put(work: Path, folder: Path) -> None:
    """Rename the finished folder to its place; what was there goes only when the new one is in."""
    os.chmod(work, 0o755)
    aside = work.with_name(f"{work.name}.old")
    if folder.exists():
        os.replace(folder, aside)
    try:
        os.replace(work, folder)
    except OSError:
        if aside.exists():
            os.replace(aside, folder)
        raise
    shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def _as_exported(model, features: bool) -> Iterator[None]:
    """The model in eval mode, and without its head for features; afterwards it is what it was."""
    import paddle

    from ppattn.tracing import evaluating

    head = model.head
    with evaluating(model):
        if features:
            model.head = paddle.nn.Identity()
        try:
            yield
        finally:
            model.head = head


def save_program(model: nn.Layer, work: Path, size: tuple[int, int], dynamic_size: bool) -> None:
    """model.json and model.pdiparams of a model in eval mode, for any batch and, if asked for, any height and width."""
    import paddle
    from paddle.static import InputSpec

    from ppattn.tracing import tracing

    shape = [None, model.in_chans, *((None, None) if dynamic_size else size)]
    try:
        with tracing():
            paddle.jit.save(model, str(work / "model"), input_spec=[InputSpec(shape, "float32", "images")])
    except UserError as error:  # Paddle put its own account of the traced code in front of the sentence
        raise UserError(str(error).rpartition("UserError: ")[2].strip()) from None
    except (TypeError, ValueError, RuntimeError) as error:
        if not dynamic_size:
            raise
        raise UserError(
            f"This model does not export with a free image size ({type(error).__name__} while tracing it). "
            "Leave --dynamic-size out and export a folder for each size."
        ) from None


def to_onnx(work: Path) -> None:
    """Replace the Paddle program in `work` by an ONNX one, in a process of its own: paddle2onnx aborts on failure."""
    program = (
        "import sys, paddle2onnx; paddle2onnx.export(sys.argv[1], sys.argv[2], save_file=sys.argv[3], "
        f"opset_version={OPSET}, verbose=False)"
    )
    paths = [str(work / name) for name in ("model.json", "model.pdiparams", "model.onnx")]
    done = python("-c", program, *paths)
    if done.returncode or not os.path.exists(paths[2]):
        errors = [line.rpartition("]")[2] for line in (done.stdout + done.stderr).splitlines() if "[ERROR]" in line]
        raise UserError(f"paddle2onnx could not convert this model: {(errors or [reason(done)])[0].strip()[:200]}")
    for path in paths[:2]:
        os.unlink(path)


def quantise(work: Path, calibration: np.ndarray) -> None:
    """Make the ONNX program in `work` an int8 one, in a process of its own: the library talks a lot."""
    with tempfile.TemporaryDirectory() as place:
        images = Path(place) / "images.npy"
        np.save(images, np.asarray(calibration, np.float32))
        done = python("-m", "ppattn.deploy.quantise", work / "model.onnx", images)
    if done.returncode:
        raise UserError(f"onnxruntime could not quantise this model: {reason(done)}")


def write_description(work: Path, model: nn.Layer, preprocess: Preprocess, facts: dict, source: dict | None) -> None:
    """inference.json, about the other files in the folder and sealed itself."""
    import paddle

    import ppattn

    versions = {"ppattn": ppattn.__version__, "paddle": paddle.__version__}
    if facts["format"] == "onnx":
        versions["opset"] = str(OPSET)
    else:
        facts["config_calls"] = CALLS[facts["engine"]]  # that any program makes on paddle.inference.Config
    description = {
        **facts,
        "model": getattr(model, "name", type(model).__name__),
        "input": {
            "name": "images",
            "shape": ["batch", preprocess.in_chans, *preprocess.img_size],
            "type": "float32",
            "stride": model.strides[-1],
        },
        "preprocess": preprocess.to_dict(),
        "versions": versions,
        "source": source or {},
        "sha256": {path.name: checksum(path) for path in sorted(work.iterdir())},
    }
    seal(work / "inference.json", description)
