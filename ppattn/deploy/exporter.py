"""A trained model as an inference folder that proved itself before anyone is told of it.

The folder holds the program and its weights (`model.json` with `model.pdiparams`, or `model.onnx`), `inference.json`
(preprocessing, class names, input size, versions, where it came from, which runtimes passed, checksums of all files)
and `golden.npz` (a batch and the trained model's answer to it). It takes any batch size and gives logits.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from ppattn.deploy.description import seal, sha256
from ppattn.errors import UserError

OPSET = 17
BATCHES = (1, 3, 8)
# Largest difference that passes, as a part of the largest logit. float32: other orders of addition stay below 1e-5 for
# all models here, a wrong operator is off by 1e-3 and more. bfloat16 keeps eight bits (1 to 3 % is usual), int8 fewer.
TOLERANCE = {"fp32": 1e-4, "bf16": 1e-1, "bf16_all": 1e-1, "int8": 3e-1}
OPTIONAL = ("onednn", "onednn_all", "bf16_all")  # may fail; used where they pass
# Low precision is judged by the first class on up to 64 images: near ties (NEAR, in fp32's probability) may swap, and
# MAY_LOSE of the images may change to a class that was not near.
NEAR, MAY_LOSE = 0.05, 0.02
FORMATS = {"paddle": ("fp32", "bf16"), "onnx": ("fp32", "int8")}


def export(
    model,
    folder: str | Path,
    img_size=None,
    format: str = "paddle",
    *,
    preprocess=None,
    classes: list[str] | None = None,
    dynamic_size: bool = False,
    precision: str = "fp32",
    source: dict | None = None,
    images: np.ndarray | None = None,
    calibration: np.ndarray | None = None,
) -> dict:
    """Write an inference folder; it appears only if every check passed.

    The runtimes (paddle.jit.load and Paddle Inference with oneDNN off and on, or ONNX Runtime) must give the model's
    own answer at batch 1, 3 and 8, on random images and on `images`. oneDNN is used later if it passed.

    Args:
        model: what `create_model` built.
        folder: where it goes; an earlier export there is replaced.
        img_size: pixels or (height, width); default: the size the model was built for.
        format: "paddle" or "onnx" (opset 17; needs paddle2onnx and onnxruntime).
        preprocess: `ppattn.data.Preprocess`; default: ImageNet's at `img_size`.
        classes: class names in the order of the logits; default: their numbers.
        dynamic_size: accept every image size that is a multiple of the model's stride, not only any batch.
        precision: "fp32", "bf16" for Paddle Inference on CPUs that have it, or "int8" for ONNX: weights and inputs of
            the linear layers, quantised statically by onnxruntime.
        source: where the model came from, kept as it is; must be JSON.
        images: real images, preprocessed, float32 [n, C, H, W]; 8 are used, 64 to judge bf16 and int8.
        calibration: training images, preprocessed, for int8; a few hundred are enough.

    Returns:
        {"engine": the runtime that will be used, "differences": {runtime: largest difference as a part of the largest
        logit, or why it failed}, "by_batch": {runtime: {batch: difference}}}, and for bf16 and int8 "same_top1": the
        part of the images with fp32's first class.

    Raises:
        UserError: for a model that does not export this way, or that answers differently afterwards.
    """
    from ppattn.data import Preprocess

    folder = Path(folder)
    if folder.name in ("", ".."):
        raise UserError(f"{str(folder)!r} is not allowed: name a new folder for the export.")
    if folder.is_symlink():
        folder = folder.resolve()  # the export replaces what the link points to, on its disk
    if format not in FORMATS:
        raise UserError(f"format = {format!r} is not allowed; choose paddle or onnx.")
    if precision not in FORMATS[format]:
        raise UserError(
            f"precision = {precision!r} is not allowed for {format}; choose {' or '.join(FORMATS[format])}."
        )
    if precision == "int8" and (calibration is None or images is None):
        raise UserError("int8 needs real images, of the training split to calibrate and others to judge it by.")
    if format == "onnx" and not all(map(importlib.util.find_spec, ("paddle2onnx", "onnxruntime"))):
        raise UserError("ONNX export needs Python 3.12 or older and two packages: pip install paddle2onnx onnxruntime.")
    if folder.exists() and not (folder.is_dir() and (_is_export(folder) or not any(folder.iterdir()))):
        raise UserError(f"{folder} holds something that is no export; give an empty or new folder.")
    size = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size or model.img_size)
    preprocess = preprocess or Preprocess(size, in_chans=model.in_chans)
    classes = list(classes or map(str, range(model.num_classes)))
    if len(classes) != model.num_classes:
        raise UserError(f"The model has {model.num_classes} classes, but {len(classes)} class names were given.")
    if (preprocess.in_chans, *preprocess.img_size) != (model.in_chans, *size):
        given = f"{preprocess.in_chans} x {preprocess.img_size[0]} x {preprocess.img_size[1]}"
        raise UserError(f"The preprocessing gives {given}, the export takes {model.in_chans} x {size[0]} x {size[1]}.")
    stride = model.strides[-1]
    if dynamic_size and (size[0] % stride or size[1] % stride):
        raise UserError(f"dynamic_size takes multiples of {stride} pixels, which {size[0]} x {size[1]} is not.")

    work = _work_folder(folder)
    modes = {layer: layer.training for layer in model.sublayers(include_self=True)}
    try:
        batches = check_batches(model.in_chans, size, images, stride if dynamic_size else None)
        if precision != "fp32":
            many = np.random.default_rng(1).standard_normal((64, model.in_chans, *size)) if images is None else images
            batches["judged"] = np.asarray(many[:64], np.float32)
        save_program(model, work, size, dynamic_size)
        start = time.monotonic()
        expected = answers(model, batches)
        limit = 180 + 20 * (time.monotonic() - start)
        report: dict = {"engine": None, "differences": {}, "by_batch": {}}
        if format == "onnx":
            to_onnx(work)
            check(work, batches, expected, ["onnx"], limit, report)
        else:
            check(work, batches, expected, ["jit", "plain", "onednn", "onednn_all"], limit, report)
        if precision == "int8":
            quantise(work, calibration)
            check(work, batches, expected, ["int8"], limit, report)
        if precision == "bf16":
            check(work, batches, expected, ["bf16", "bf16_all"], limit, report)
        golden = "real3" if "real3" in batches else "random3"
        np.savez(work / "golden.npz", input=batches[golden], output=expected[golden])
        facts = {"format": format, "precision": precision, **report, "dynamic_size": dynamic_size}
        write_description(work, model, preprocess, classes, facts, source)
        _put(work, folder)
    except OSError as error:
        raise UserError(f"Cannot write {folder}: {error.strerror or error}.") from None
    finally:
        for layer, training in modes.items():
            layer.training = training
        shutil.rmtree(work, ignore_errors=True)
    return report


def _is_export(folder: Path) -> bool:
    return (folder / "inference.json").exists() and (folder / "golden.npz").exists()


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
    os.replace(work, folder)
    shutil.rmtree(aside, ignore_errors=True)


def check_batches(
    channels: int, size: tuple[int, int], images: np.ndarray | None, stride: int | None = None
) -> dict[str, np.ndarray]:
    """Inputs of the checks: random batches of 1, 3 and 8, and as many real images as there are, up to 8.

    With `stride` also random batches of two other sizes, wider and higher by it.
    """
    rng = np.random.default_rng(0)
    batches = {f"random{n}": rng.standard_normal((n, channels, *size), dtype=np.float32) for n in BATCHES}
    if stride:
        for n, h, w in ((1, size[0], size[1] + stride), (3, size[0] + 2 * stride, size[1] + stride)):
            batches[f"random{n}_{h}x{w}"] = rng.standard_normal((n, channels, h, w), dtype=np.float32)
    if images is not None and len(images):
        batches |= {f"real{n}": np.asarray(images[:n], np.float32) for n in BATCHES if len(images) >= n}
    return batches


def answers(model, batches: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The model's own logits, in eval mode, which it stays in."""
    import paddle

    model.eval()
    with paddle.no_grad():
        return {name: model(paddle.to_tensor(batch)).numpy() for name, batch in batches.items()}


def save_program(model, work: Path, size: tuple[int, int], dynamic_size: bool) -> None:
    """model.json and model.pdiparams; any batch, and with `dynamic_size` any height and width. Ends in eval mode."""
    import paddle
    from paddle.static import InputSpec

    from ppattn import ops
    from ppattn.tracing import tracing

    model.eval()
    shape = [None, model.in_chans, *((None, None) if dynamic_size else size)]
    try:
        with ops.constants(model), tracing():
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
    done = _python("-c", program, *paths)
    if done.returncode or not os.path.exists(paths[2]):
        told = [line.rpartition("]")[2] for line in (done.stdout + done.stderr).splitlines() if "[ERROR]" in line]
        raise UserError(f"paddle2onnx could not convert this model: {(told or [_reason(done)])[0].strip()[:200]}")
    for path in paths[:2]:
        os.unlink(path)


def quantise(work: Path, calibration: np.ndarray) -> None:
    """Make the ONNX program in `work` an int8 one, in a process of its own: the library talks a lot."""
    with tempfile.TemporaryDirectory() as place:
        images = Path(place) / "images.npy"
        np.save(images, np.asarray(calibration, np.float32))
        done = _python("-m", "ppattn.deploy.quantise", work / "model.onnx", images)
    if done.returncode:
        raise UserError(f"onnxruntime could not quantise this model: {_reason(done)}")


def check(work: Path, batches, expected, engines: list[str], limit: float, report: dict) -> None:
    """Run engines apart from this process, for at most `limit` seconds, and write what they gave into the report.

    Raises:
        UserError: where one of them does not give the model's answers and is not `OPTIONAL`.
    """
    with tempfile.TemporaryDirectory() as place:
        np.savez(Path(place) / "inputs.npz", **batches)
        waiting = list(engines)
        while waiting:
            problem = _try_engines(work, Path(place), waiting, limit)
            while waiting and (result := Path(place) / f"{waiting[0]}.npz").exists():
                with np.load(result) as found:
                    _judge(waiting.pop(0), dict(found), expected, report)
            if waiting:
                _record(waiting.pop(0), problem, report)


def _judge(engine: str, found: dict, expected: dict, report: dict) -> None:
    by_batch = {name: _difference(found[name], expected[name]) for name in expected}
    difference = report["differences"][engine] = max(by_batch.values())
    if not np.isfinite(difference):
        return _record(engine, "it gives numbers that are not finite", report)
    report["by_batch"][engine] = by_batch
    tolerance = TOLERANCE.get(engine, TOLERANCE["fp32"])
    if difference > tolerance:
        told = f"its answers differ by {difference:.1e} of the largest logit, of which {tolerance:.0e} may be"
        return _record(engine, told, report)
    if engine in TOLERANCE:
        same, lost = _winners(found["judged"], expected["judged"])
        if lost > MAY_LOSE:
            return _record(engine, f"{100 * lost:.0f} % of the images get another class that was not near", report)
        report["same_top1"] = same
    report["engine"] = engine
    return None


def _record(engine: str, problem: str, report: dict) -> None:
    """Keep a failure in the report where the engine may fail, raise it where it may not."""
    if engine not in OPTIONAL:
        hint = " Export it as fp32." if engine in TOLERANCE else ""
        raise UserError(f"Not exported: {engine} does not give the model's own answers, {problem}.{hint}")
    report["differences"][engine] = problem


def _try_engines(work: Path, place: Path, engines: list[str], limit: float) -> str:
    """Why the first engine that left no result failed, if one did."""
    try:
        done = _python("-m", "ppattn.deploy.engines", work, place / "inputs.npz", place, *engines, limit=limit)
        return f"it failed: {_reason(done)}"
    except subprocess.TimeoutExpired:
        return f"it did not answer within {limit:.0f} s"


def _python(*arguments, limit: float | None = None) -> subprocess.CompletedProcess:
    """Run Python with this copy of the package, in a folder of its own: converters leave files where they run."""
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as place:
        return subprocess.run(
            [sys.executable, "-W", "ignore", *map(str, arguments)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit,
            cwd=place,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )


def _reason(done: subprocess.CompletedProcess) -> str:
    """The line of a failed process's errors that says most."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    told = [line for line in lines if "Error:" in line or "Fatal" in line]
    return (told or lines or [f"exit code {done.returncode}"])[-1][:200]


def _difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference as a part of the largest logit."""
    if found.shape != expected.shape or not np.isfinite(found).all():
        return float("inf")
    return float(np.abs(found - expected).max() / max(np.abs(expected).max(), np.finfo("float32").tiny))


def _winners(found: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Parts of the rows with the same first class, and with one that the model gives `NEAR` less probability."""
    truth = softmax(expected)
    rows, winner = np.arange(len(truth)), truth.argmax(1)
    lost = truth[rows, winner] - truth[rows, found.argmax(1)]
    return float((found.argmax(1) == winner).mean()), float((lost > NEAR).mean())


def softmax(logits: np.ndarray) -> np.ndarray:
    """Rows of [B, K] as probabilities, float32."""
    exponents = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return (exponents / exponents.sum(axis=1, keepdims=True)).astype(np.float32)


def write_description(work: Path, model, preprocess, classes: list[str], facts: dict, source: dict | None) -> None:
    """inference.json, about the other files in the folder and sealed itself."""
    import paddle

    import ppattn

    versions = {"ppattn": ppattn.__version__, "paddle": paddle.__version__}
    if facts["format"] == "onnx":
        versions["opset"] = str(OPSET)
    description = {
        **facts,
        "model": getattr(model, "name", type(model).__name__),
        "input": {
            "name": "images",
            "shape": ["batch", preprocess.in_chans, *preprocess.img_size],
            "type": "float32",
            "stride": model.strides[-1],
        },
        "output": "logits",
        "classes": classes,
        "preprocess": preprocess.to_dict(),
        "versions": versions,
        "source": source or {},
        "sha256": {path.name: sha256(path) for path in sorted(work.iterdir())},
    }
    seal(work / "inference.json", description)
