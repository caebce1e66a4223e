"""A trained model as an inference folder that proved itself before anyone is told of it.

The folder holds the program and its weights (`model.json` with `model.pdiparams`, or `model.onnx`), `inference.json`
(preprocessing, class names, input size, versions, where it came from, which runtimes passed, checksums of all files)
and `golden.npz` (a batch and the trained model's answer to it). It takes any batch size and gives logits.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from ppattn.errors import UserError

OPSET = 17
BATCHES = (1, 3, 8)
# Largest difference that passes, as a part of the largest logit (at least 1): float32 rounding in another order of
# additions stays below 1e-5 for all models here, SOFT's inverse below 1e-4; bfloat16 has eight bits.
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}


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
) -> dict:
    """Write an inference folder; it appears only if every check passed.

    The runtimes (Paddle Inference with oneDNN off and on, or ONNX Runtime) must give the model's own answer at batch
    1, 3 and 8, on random images and on `images`. oneDNN is used later if it passed.

    Args:
        model: what `create_model` built.
        folder: where it goes; an earlier export there is replaced.
        img_size: pixels or (height, width); default: the size the model was built for.
        format: "paddle" or "onnx" (opset 17; needs paddle2onnx and onnxruntime).
        preprocess: `ppattn.data.Preprocess`; default: ImageNet's at `img_size`.
        classes: class names in the order of the logits; default: their numbers.
        dynamic_size: accept any image size, not only any batch.
        precision: "fp32", or "bf16" for Paddle Inference on CPUs that have it.
        source: where the model came from, kept as it is.
        images: real images, preprocessed, float32 [n, C, H, W].

    Returns:
        {"engine": the runtime that will be used, "differences": {runtime: largest difference or why it failed}}.

    Raises:
        UserError: for a model that does not export this way, or that answers differently afterwards.
    """
    from ppattn.data import Preprocess

    folder = Path(folder)
    if format not in ("paddle", "onnx"):
        raise UserError(f"format = {format!r} is not allowed; choose paddle or onnx.")
    if precision not in TOLERANCE or (precision == "bf16" and format == "onnx"):
        raise UserError(f"precision = {precision!r} is not allowed for {format}; choose fp32, or bf16 for paddle.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists() and any(folder.iterdir()) and not (folder / "inference.json").exists():
            raise UserError(f"{folder} holds something that is no export; give an empty or new folder.")
    except OSError as error:
        raise UserError(f"Cannot export to {folder}: {error.strerror}.") from None
    size = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size or model.img_size)
    preprocess = preprocess or Preprocess(size, in_chans=model.in_chans)
    classes = list(classes or map(str, range(model.num_classes)))
    if len(classes) != model.num_classes:
        raise UserError(f"The model has {model.num_classes} classes, but {len(classes)} class names were given.")
    if tuple(preprocess.img_size) != size:
        raise UserError(f"The preprocessing is for {preprocess.img_size}, the export for {size} pixels.")

    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        batches = check_batches(model.in_chans, size, images)
        expected = answers(model, batches)
        save_program(model, work, size, dynamic_size)
        if format == "onnx":
            to_onnx(work)
        differences, engine = check(work, batches, expected, format, precision)
        np.savez(work / "golden.npz", input=batches["random3"], output=expected["random3"])
        write_description(work, preprocess, classes, format, precision, dynamic_size, engine, differences, source)
        os.chmod(work, 0o755)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return {"engine": engine, "differences": differences}


def check_batches(channels: int, size: tuple[int, int], images: np.ndarray | None) -> dict[str, np.ndarray]:
    """Inputs of the checks: random batches of 1, 3 and 8, and as many real images as there are, up to 8."""
    rng = np.random.default_rng(0)
    batches = {f"random{n}": rng.standard_normal((n, channels, *size), dtype=np.float32) for n in BATCHES}
    if images is not None and len(images):
        batches |= {f"real{n}": np.asarray(images[:n], np.float32) for n in BATCHES if len(images) >= n}
    return batches


def answers(model, batches: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The model's own logits."""
    import paddle

    model.eval()
    with paddle.no_grad():
        return {name: model(paddle.to_tensor(batch)).numpy() for name, batch in batches.items()}


def save_program(model, work: Path, size: tuple[int, int], dynamic_size: bool) -> None:
    import paddle
    from paddle.static import InputSpec

    shape = [None, model.in_chans, *((None, None) if dynamic_size else size)]
    try:
        paddle.jit.save(model, str(work / "model"), input_spec=[InputSpec(shape, "float32", "images")])
    except UserError:
        raise
    except Exception as error:
        if not dynamic_size:
            raise
        raise UserError(
            f"{model.name} does not export with a free image size: its grid is computed from the size in Python "
            f"({type(error).__name__}). Leave --dynamic-size out and export a folder for each size."
        ) from None


def to_onnx(work: Path) -> None:
    """Replace the Paddle program in `work` by an ONNX one."""
    program = (
        "import sys, paddle2onnx; paddle2onnx.export(sys.argv[1], sys.argv[2], save_file=sys.argv[3], "
        f"opset_version={OPSET}, verbose=False)"
    )
    paths = [str(work / name) for name in ("model.json", "model.pdiparams", "model.onnx")]
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program, *paths], capture_output=True, text=True)
    if "No module named 'paddle2onnx'" in done.stderr:
        raise UserError("ONNX export needs paddle2onnx (Python 3.12 or older): pip install 'ppattn[onnx]'.")
    if done.returncode or not (work / "model.onnx").exists():
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UserError(f"paddle2onnx could not convert this model: {last[:200]}")
    for path in paths[:2]:
        os.unlink(path)


def check(work: Path, batches, expected, format: str, precision: str) -> tuple[dict, str]:
    """Run every runtime in a process of its own; returns the differences and the runtime to use."""
    engines = ["onnx"] if format == "onnx" else ["plain", "onednn"] + (["bf16"] if precision == "bf16" else [])
    differences: dict[str, float | str] = {}
    passed = []
    with tempfile.TemporaryDirectory() as place:
        inputs, outputs = Path(place) / "inputs.npz", Path(place) / "outputs.npz"
        np.savez(inputs, **batches)
        for engine in engines:
            command = [sys.executable, "-W", "ignore", "-m", "ppattn.deploy.engines", str(work), engine]
            paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
            done = subprocess.run(
                [*command, str(inputs), str(outputs)],
                capture_output=True,
                text=True,
                errors="replace",
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
            if done.returncode:
                last = (done.stderr.strip().splitlines() or [""])[-1]
                differences[engine] = f"failed with exit code {done.returncode}: {last[:160]}"
                continue
            with np.load(outputs) as found:
                differences[engine] = max(_difference(found[name], expected[name]) for name in batches)
            if differences[engine] <= TOLERANCE["bf16" if engine == "bf16" else "fp32"]:
                passed.append(engine)
    needed = {"onnx": "onnx", "paddle": "bf16" if precision == "bf16" else "plain"}[format]
    if needed not in passed:
        told = differences[needed]
        told = told if isinstance(told, str) else f"its answers differ by {told:.1e} of the largest logit"
        hint = " Export it as fp32." if needed == "bf16" else ""
        raise UserError(
            f"The exported model was refused, {needed} does not give the model's own answers: {told}.{hint}"
        )
    return differences, passed[-1]


def _difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference as a part of the largest logit (at least 1)."""
    if found.shape != expected.shape or not np.isfinite(found).all():
        return float("inf")
    return float(np.abs(found - expected).max() / max(1.0, np.abs(expected).max()))


def write_description(work, preprocess, classes, format, precision, dynamic_size, engine, differences, source) -> None:
    import paddle

    import ppattn

    versions = {"ppattn": ppattn.__version__, "paddle": paddle.__version__}
    if format == "onnx":
        versions["opset"] = str(OPSET)
    description = {
        "format": format,
        "precision": precision,
        "engine": engine,
        "input": {"name": "images", "shape": ["batch", preprocess.in_chans, *preprocess.img_size], "type": "float32"},
        "dynamic_size": dynamic_size,
        "output": "logits",
        "classes": classes,
        "preprocess": preprocess.to_dict(),
        "versions": versions,
        "source": source or {},
        "largest_difference": differences,
        "sha256": {path.name: sha256(path) for path in sorted(work.iterdir())},
    }
    (work / "inference.json").write_text(json.dumps(description, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
