"""Prediction with an exported folder. A folder that is not complete or gives another golden answer is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ppattn.data import Preprocess, read_image
from ppattn.deploy.checks import TOLERANCE, softmax
from ppattn.deploy.description import read_description
from ppattn.deploy.engines import on_gpu, open_engine
from ppattn.errors import UserError, content_of, reading
from ppattn.schema import Positive, check_arguments

LARGEST = 1e6  # of a normalised pixel
Images = str | Path | np.ndarray | Sequence[str | Path | np.ndarray]
GPU_TOLERANCE = 1e-2  # matrix products may run in TF32 there, with ten bits


class Predictor:
    """An exported model. Positive may share it: a Paddle program answers them one after the other.

    Args:
        folder: what `ppattn.export` wrote.
        precision: None (as exported), or "fp32" for a program of Paddle; that of the export may be named.
        threads: CPU threads; default: all cores.

    Attributes:
        output: "logits" or "features", what the program gives. classes: names in the order of the logits; none for
        features. preprocess: `ppattn.data.Preprocess`. source: where the model came from, as given at export.
        format: paddle or onnx. precision: fp32, bf16 or int8, as exported.

    Raises:
        UserError: for a folder that is no export, misses a file, was changed, or answers otherwise than when exported.
    """

    def __init__(self, folder: str | Path, precision: str | None = None, threads: Positive | None = None):
        check_arguments(Predictor, {"threads": threads}, "Predictor")
        self.folder = Path(folder)
        about = read_description(self.folder)
        self.output, self.classes = about.output, about.classes
        self.preprocess = Preprocess.from_dict(about.preprocess)
        self.source = about.source
        self.format, self.precision = about.format, about.precision
        self._free_size, self._stride = about.dynamic_size, about.input.stride
        engine = about.engine
        if precision not in (None, "fp32" if about.format == "paddle" else None, about.precision):
            raise UserError(f"{folder} was exported as {about.precision}; export it as {precision}.")
        if precision == "fp32" and engine == "bf16":
            engine = "stock" if isinstance(about.differences.get("stock"), float) else "plain"
        with content_of(self.folder, "a program that gives its golden answer here; export the model again"):
            self._engine = open_engine(self.folder, engine, threads)
        tolerance = TOLERANCE.get(engine, TOLERANCE["fp32"])
        self._check_golden(max(3 * tolerance, GPU_TOLERANCE) if on_gpu(engine) else 3 * tolerance)

    def _check_golden(self, tolerance: float) -> None:
        path = self.folder / "golden.npz"
        with reading(path, "what export wrote; export the model again"), np.load(path, allow_pickle=False) as golden:
            images, expected = golden["input"], golden["output"]
        taken = (self.preprocess.in_chans, *self.preprocess.img_size)
        if (
            images.dtype != np.float32
            or images.ndim != 4
            or (images.shape[1:] != taken and not self._free_size)
            or expected.dtype != np.float32
            or expected.ndim != 2
            or len(expected) != len(images)
            or (self.classes and expected.shape[1] != len(self.classes))
            or not np.isfinite(expected).all()
        ):
            raise UserError(f"{self.folder}: its classes and image size are not those of its program; export it again.")
        with content_of(self.folder, "a program that gives its golden answer here; export the model again"):
            found = self._engine(images)
        limit = tolerance * np.abs(expected).max()
        if found.shape != expected.shape or not np.abs(found - expected).max() <= limit:
            raise UserError(
                f"{self.folder} does not give its golden answer on this machine; export the model again here."
            )
        self._width = expected.shape[1]

    def run(self, batch: np.ndarray) -> np.ndarray:
        """Preprocessed images [B, C, H, W] -> probabilities [B, K], whose rows sum to 1, or features; all float32."""
        with content_of("The batch", "an array of images"):
            batch = np.asarray(batch)
        if batch.dtype.kind not in "fiu":
            raise UserError(f"The batch holds {batch.dtype}, not numbers.")
        wanted = (self.preprocess.in_chans, *self.preprocess.img_size)
        if batch.ndim != 4 or batch.shape[1:] != wanted and not (self._free_size and self._fits(batch.shape)):
            sizes = (
                f"{wanted[0]}, H, W], H and W multiples of {self._stride}"
                if self._free_size
                else f"{wanted}"[1:-1] + "]"
            )
            raise UserError(f"The model takes images [B, {sizes}, not {list(batch.shape)}.")
        if not np.isfinite(batch).all() or len(batch) and np.abs(batch).max() > LARGEST:
            raise UserError("The batch holds values that are not finite numbers, or far beyond those of an image.")
        found = self._engine(batch) if len(batch) else np.zeros((0, self._width), np.float32)
        return softmax(found) if self.output == "logits" else found

    def _fits(self, shape: tuple[int, ...]) -> bool:
        sides = shape[2:]
        return shape[1] == self.preprocess.in_chans and min(sides) > 0 and not any(n % self._stride for n in sides)

    def predict(self, images: Images, topk: int = 5) -> list[list[tuple[str, float]]]:
        """The most probable classes of images, best first, as (name, score).

        Args:
            images: one image or several: uint8 RGB [H, W, 3] of any size, or paths of image files.
            topk: names per image; all classes where there are fewer.

        Raises:
            ImageError: for a file that cannot be read.
            UserError: for anything else than images, or less than one name.
        """
        if self.output == "features":
            raise UserError(f"{self.folder} was exported with features instead of classes; embed() gives them.")
        return best(self._answers(images), self.classes, topk)

    def embed(self, images: Images) -> np.ndarray:
        """Features [n, C] float32 of images, given as for `predict`; of an export with features."""
        if self.output == "logits":
            raise UserError(f"{self.folder} was exported with classes; export the model with features=True.")
        return self._answers(images)

    def _answers(self, images) -> np.ndarray:
        if isinstance(images, (str, Path)) or getattr(images, "ndim", 0) == 3:
            images = [images]
        if not isinstance(images, Sequence | np.ndarray):
            raise UserError(f"Images are arrays or paths, one or a list of them, not a {type(images).__name__}.")
        found = [np.zeros((0, self._width), np.float32)]
        for start in range(0, len(images), 32):
            some = [read_image(i) if isinstance(i, (str, Path)) else i for i in images[start : start + 32]]
            found.append(self.run(self.preprocess.batch(some)))
        return np.concatenate(found)


def best(probabilities: np.ndarray, classes: Sequence[str], topk: int) -> list[list[tuple[str, float]]]:
    """The `topk` most probable names and scores of every row."""
    if not isinstance(topk, int | np.integer) or isinstance(topk, bool) or topk < 1:
        raise UserError(f"topk = {topk!r} is not allowed; it is 1 or more.")
    if not np.isfinite(probabilities).all():
        raise UserError("The model's answers are not finite numbers: its weights are damaged.")
    order = np.argsort(-probabilities, axis=1, kind="stable")[:, : min(topk, len(classes))]
    return [[(classes[i], float(row[i])) for i in chosen] for row, chosen in zip(probabilities, order, strict=True)]
