"""Prediction with an exported folder. A folder that is incomplete or gives another golden answer is rejected."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ppattn.data import Preprocess, read_image
from ppattn.deploy.checks import TOLERANCE, difference, probabilities
from ppattn.deploy.engines import on_gpu, open_engine
from ppattn.deploy.folder import GOLDEN, read_about
from ppattn.errors import UserError, content_of, reading

Images = str | Path | np.ndarray | Sequence[str | Path | np.ndarray]
GPU_TOLERANCE = 1e-2  # matrix products may run in TF32 there, with ten bits


class Predictor:
    """An exported model. Positive may share it: a Paddle program answers them one after the other.

    Args:
        folder: what `ppattn.export` wrote.
        precision: None (as exported), or "fp32" for a program of Paddle; that of the export may be named.
        threads: CPU threads; default: all cores.

    Attributes:
        output: "probabilities", "logits" or "features", what the program gives. classes: names in the order of the
        outputs; none for features. preprocess: `ppattn.data.Preprocess`. source: where the model came from, as given at
        export. format: paddle, onnx or both. precision: fp32, bf16 or int8, as exported.

    Raises:
        UserError: for a folder that is no export, misses a file, was changed, or answers otherwise than when exported.
    """

    def __init__(self, folder: str | Path, precision: str | None = None, threads: int | None = None):
        self.folder = Path(folder)
        about = read_about(self.folder)
        self.output, self.classes = about.output, about.classes
        self.preprocess = Preprocess.from_dict(about.preprocess)
        self.source = about.source
        self.format, self.precision = about.format, about.precision
        self._stride = about.stride if about.dynamic_size else None
        engine = about.engine
        if precision not in (None, "fp32" if about.format == "paddle" else None, about.precision):
            raise UserError(f"{folder} was exported as {about.precision}; export it as {precision}.")
        if precision == "fp32" and engine == "bf16":
            engine = "stock" if isinstance(about.differences.get("stock"), float) else "plain"
        path = self.folder / GOLDEN
        with reading(path, "what export wrote; export the model again"), np.load(path, allow_pickle=False) as golden:
            images, expected = golden["input"], golden["output"]
        with content_of(self.folder, "a program that gives its golden answer here; export the model again"):
            self._engine = open_engine(self.folder, engine, threads)
            found = self._engine(images)
        tolerance = 3 * TOLERANCE.get(engine, TOLERANCE["fp32"])
        if on_gpu(engine):
            tolerance = max(tolerance, GPU_TOLERANCE)
        if not difference(found, expected, self.output) <= tolerance:
            raise UserError(
                f"{self.folder} does not give its golden answer on this machine; export the model again here."
            )
        self._width = expected.shape[1]
        if self.classes and len(self.classes) != self._width:
            raise UserError(
                f"{self.folder} names {len(self.classes)} classes and gives {self._width}; export it again."
            )

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
        found = self._engine(batch) if len(batch) else np.zeros((0, self._width), np.float32)
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
        found = [np.zeros((0, self._width), np.float32)]
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
