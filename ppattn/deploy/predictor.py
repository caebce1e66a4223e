"""Prediction with an exported folder. A folder that is incomplete or gives another golden answer is rejected."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ppattn.data import Preprocess, read_image
from ppattn.deploy.checks import TOLERANCE, difference, probabilities
from ppattn.deploy.engines import Engine, fastest, on_gpu, open_engine
from ppattn.deploy.folder import GOLDEN, read_about
from ppattn.errors import UserError, reading, unknown

Images = str | Path | np.ndarray | Sequence[str | Path | np.ndarray]
ENGINES = ("paddle", "onnxruntime", "openvino")
GPU_TOLERANCE = 1e-2  # matrix products may run in TF32 there, with ten bits


class Predictor:
    """An exported model. Threads may share it: ONNX Runtime answers them at the same time, the others in turn.

    Args:
        folder: what `ppattn.export` wrote.
        precision: None (as exported), "fp32" for a program exported as bf16, or "bf16" for a float32 one in OpenVINO.
        threads: CPU threads; default: all cores.
        engine: "paddle", "onnxruntime", "openvino" (the latter two need an export with `inference.onnx`), or "auto":
            the fastest of those that are installed, see `ppattn.deploy.engines.fastest`. Default: paddle, or
            onnxruntime for an export without a Paddle program, so that scores do not change from machine to machine.

    Attributes:
        output: "probabilities", "logits" or "features", what the program gives. classes: names in the order of the
        outputs; none for features. preprocess: `ppattn.data.Preprocess`. source: where the model came from, as given at
        export. format: paddle, onnx or both. precision: fp32, bf16 or int8, as exported. engine: the one that runs.

    Raises:
        UserError: for a folder that is no export, misses a file, was changed, or answers otherwise than when exported;
            or an engine that is not installed or not exported for.
    """

    def __init__(
        self,
        folder: str | Path,
        precision: str | None = None,
        threads: int | None = None,
        engine: str | None = None,
    ):
        self.folder = Path(folder)
        self._about = about = read_about(self.folder)
        self.output, self.classes = about.output, about.classes
        self.preprocess = Preprocess.from_dict(about.preprocess)
        self.source = about.source
        self.format, self.precision = about.format, about.precision
        self._stride, self._threads = about.stride if about.dynamic_size else None, threads
        path = self.folder / GOLDEN
        with reading(path, "what export wrote; export the model again"), np.load(path, allow_pickle=False) as golden:
            self._golden = golden["input"], golden["output"]
        if self.classes and self._golden[1].shape[1:] != (len(self.classes),):
            raise UserError(f"{self.folder} names other classes than its golden answer has; export the model again.")
        runtimes = self._runtimes(precision or about.precision)
        if engine == "auto":
            openers: dict[str, Any] = {
                name: partial(self._open, runtime) for name, runtime in runtimes.items() if find_spec(name)
            }
            engine = fastest(self.folder, openers, self._golden[0][:1], threads)
        self.engine = engine or ("onnxruntime" if about.format == "onnx" else "paddle")
        if self.engine not in ENGINES:
            raise unknown("engine", engine, [*ENGINES, "auto"])
        if self.engine not in runtimes:
            wanted = f"{precision or about.precision} with {self.engine}"
            raise UserError(
                f"{folder} was exported as {about.precision} for {about.format}, which cannot run {wanted}."
            )
        self._run = self._open(runtimes[self.engine])

    def _runtimes(self, precision: str) -> dict[str, str]:
        """Engines that this export can run in a precision -> what `open_engine` calls them."""
        about = self._about
        engines: dict[str, dict[str, str]] = {}
        if about.format != "onnx":
            stock = isinstance(about.differences.get("stock"), float)
            engines["paddle"] = {"fp32": "stock" if stock else "plain"}
            if about.precision == "bf16":
                engines["paddle"]["bf16"] = "bf16"
        if about.precision == "int8":
            engines |= {"onnxruntime": {"int8": "int8"}, "openvino": {"int8": "openvino_int8"}}
        elif about.format != "paddle":
            engines |= {
                "onnxruntime": {"fp32": "onnxruntime"},
                "openvino": {"fp32": "openvino", "bf16": "openvino_bf16"},
            }
        return {name: runtimes[precision] for name, runtimes in engines.items() if precision in runtimes}

    def _open(self, runtime: str) -> Engine:
        """The program in a runtime, after it has given its golden answer."""
        images, expected = self._golden
        with reading(self.folder, "a program that gives its golden answer here; export the model again"):
            run = open_engine(self.folder, runtime, self._threads)
            found = run(images)
        tolerance = 3 * TOLERANCE.get(runtime.removeprefix("openvino_"), TOLERANCE["fp32"])
        if on_gpu(runtime):
            tolerance = max(tolerance, GPU_TOLERANCE)
        if not difference(found, expected, self.output) <= tolerance:
            raise UserError(
                f"{self.folder} does not give its golden answer with {runtime} here; export the model again."
            )
        return run

    def run(self, batch: np.ndarray) -> np.ndarray:
        """Preprocessed images [B, C, H, W] -> probabilities [B, K], whose rows sum to 1, or features; all float32."""
        batch = np.asarray(batch, np.float32)
        wanted = (self.preprocess.in_chans, *self.preprocess.img_size)
        if batch.ndim != 4 or batch.shape[1:] != wanted and not self._fits(batch.shape):
            sizes = (
                f"{wanted}"[1:-1] if not self._stride else f"{wanted[0]}, H, W], H and W multiples of {self._stride}"
            )
            raise UserError(f"The model takes images [B, {sizes}], not {list(batch.shape)}.")
        if not np.isfinite(batch).all():
            raise UserError("The batch holds values that are not finite numbers.")
        found = self._run(batch) if len(batch) else np.zeros((0, self._golden[1].shape[1]), np.float32)
        return probabilities(found, self.output)

    def _fits(self, shape: tuple[int, ...]) -> bool:
        if not self._stride or shape[1] != self.preprocess.in_chans:
            return False
        return min(shape[2:]) > 0 and not any(side % self._stride for side in shape[2:])

    def predict(self, images: Images, topk: int = 5) -> list[list[tuple[str, float]]]:
        """The most probable classes of images, best first, as (name, score).

        Args:
            images: one image or several: uint8 RGB [H, W, 3] of any size, or paths of image files.
            topk: names per image; all classes where there are fewer.

        Raises:
            ImageError: for a file that cannot be read.
            UserError: for an array that is no image, or less than one name.
        """
        if self.output == "features":
            raise UserError(f"{self.folder} was exported with features instead of classes; embed() gives them.")
        return best(self._answers(images), self.classes, topk)

    def embed(self, images: Images) -> np.ndarray:
        """Features [n, C] float32 of images, given as for `predict`; of an export with features."""
        if self.output != "features":
            raise UserError(f"{self.folder} was exported with classes; export the model with features=True.")
        return self._answers(images)

    def _answers(self, images: Images) -> np.ndarray:
        if isinstance(images, (str, Path)) or getattr(images, "ndim", 0) == 3:
            images = [images]  # type: ignore[list-item]
        found = [np.zeros((0, self._golden[1].shape[1]), np.float32)]
        for start in range(0, len(images), 32):
            some = [read_image(i) if isinstance(i, (str, Path)) else i for i in images[start : start + 32]]
            found.append(self.run(self.preprocess.batch(some)))
        return np.concatenate(found)


def best(probabilities: np.ndarray, classes: Sequence[str], topk: int) -> list[list[tuple[str, float]]]:
    """The `topk` most probable names and scores of every row."""
    if topk < 1:
        raise UserError(f"topk = {topk} is not allowed; it is 1 or more.")
    if not np.isfinite(probabilities).all():
        raise UserError("The model's answers are not finite numbers: its weights are damaged.")
    order = np.argsort(-probabilities, axis=1, kind="stable")[:, : min(topk, len(classes))]
    return [[(classes[i], float(row[i])) for i in chosen] for row, chosen in zip(probabilities, order, strict=True)]
