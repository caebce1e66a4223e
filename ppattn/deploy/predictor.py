"""Prediction with an exported folder. A folder that is incomplete or gives another golden answer is rejected."""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from timeit import repeat
from typing import Any

import numpy as np
from PIL import Image

from ppattn.data import Preprocess, decode
from ppattn.data.images import image_from_pillow
from ppattn.deploy.checks import TOLERANCE, output_difference, output_probabilities
from ppattn.deploy.engines import Engine, on_gpu, open_engine, silenced
from ppattn.deploy.folder import ABOUT, GOLDEN, read_about
from ppattn.errors import UserError, reading_untrusted, unknown_name
from ppattn.files.atomic import checksum, write_json
from ppattn.files.cache import cache_folder
from ppattn.files.pickles import check_unpacked_size
from ppattn.runtime.cpu import available_cores, cpuinfo

Picture = str | Path | bytes | np.ndarray | Image.Image
Images = Picture | Sequence[Picture]
ENGINES = ("paddle", "onnxruntime", "openvino")
PACKAGES = ("paddlepaddle", "paddlepaddle-gpu", "onnxruntime", "openvino")
GPU_TOLERANCE = 1e-2  # matrix products may run in TF32 there, with ten bits


class Predictor:
    """An exported model. Threads may share it: ONNX Runtime answers them at the same time, the others in turn.

    Args:
        folder: what `ppattn.export` wrote.
        precision: None (as exported), "fp32" for a program exported as bf16, or "bf16" for a float32 one in OpenVINO.
        threads: CPU threads; default: all cores.
        engine: "paddle", "onnxruntime", "openvino" (the latter two need an export with `inference.onnx`), or "auto":
            the fastest of those that are installed, measured once and printed. Default: paddle, or onnxruntime for an
            export without a Paddle program, so that scores do not change from machine to machine.

    Attributes: `output` ("probabilities", "logits" or "features"), `classes` (names in the order of the outputs),
    `source`, `preprocess`, `format`, `precision`, `sigmoid` and `stride` (None: one size of images) as exported, and
    the `engine` that runs. Raises `UserError` for an incomplete or changed export, other answers, or a wrong engine.
    """

    def __init__(
        self, folder: str | Path, precision: str | None = None, threads: int | None = None, engine: str | None = None
    ):
        self.folder = Path(folder)
        self._about = about = read_about(self.folder)
        self.output, self.classes, self.sigmoid = about.output, about.classes, about.sigmoid
        self.preprocess, self.source = Preprocess(**about.preprocess), about.source
        self.format, self.precision = about.format, about.precision
        self.stride, self._threads = about.stride if about.dynamic_size else None, threads
        path = self.folder / GOLDEN
        wanted = "what export wrote; export the model again"
        with reading_untrusted(path, wanted), np.load(path, allow_pickle=False) as golden:
            check_unpacked_size(golden.zip, path)
            self._golden = golden["input"], golden["output"]
        if self.classes and self._golden[1].shape[1:] != (len(self.classes),):
            raise UserError(f"{self.folder} names other classes than its golden answer has; export the model again.")
        if self._golden[0].shape[1:] != (self.preprocess.in_chans, *self.preprocess.img_size):
            raise UserError(f"{self.folder} describes another input than its golden pair has; export the model again.")
        precision = precision or about.precision
        runtimes = self._runtimes(precision)
        self.engine = engine or ("onnxruntime" if about.format == "onnx" else "paddle")
        if self.engine not in (*ENGINES, "auto"):
            raise unknown_name("engine", engine, [*ENGINES, "auto"])
        if not runtimes or self.engine not in (*runtimes, "auto"):
            exported = f"was exported as {about.precision} for {about.format}"
            raise UserError(f"{folder} {exported}, which cannot run {precision} with {self.engine}.")
        if self.engine == "auto":
            self.engine, self._run = self._fastest(runtimes)
        else:
            self._run = self._open(runtimes[self.engine])

    def _runtimes(self, precision: str) -> dict[str, str]:
        """Engines that this export can run in a precision -> what `open_engine` calls them."""
        exported, found = self._about.precision, {}
        if self.format != "onnx" and precision in ("fp32", exported):
            stock = isinstance(self._about.differences.get("stock"), float)
            found["paddle"] = "bf16" if precision == "bf16" else "stock" if stock else "plain"
        if self.format != "paddle" and precision == exported:
            found["onnxruntime"] = "onnxruntime" if precision == "fp32" else precision
        if self.format != "paddle" and (precision == exported or (exported, precision) == ("fp32", "bf16")):
            found["openvino"] = f"openvino_{precision}"
        return found

    def _fastest(self, runtimes: dict[str, str]) -> tuple[str, Engine]:
        """The fastest engine for one image, of those that are installed and answer correctly; kept in
        `~/.cache/ppattn/engines.json` for this machine, export, threads and versions of the engines."""
        versions = sorted(f"{one.name} {one.version}" for one in metadata.distributions() if one.name in PACKAGES)
        cores = f"{self._threads or available_cores()} x {cpuinfo('model name')}"
        key, known = ", ".join([checksum(self.folder / ABOUT)[:16], cores, *versions, *runtimes.values()]), {}
        with suppress(OSError, ValueError, TypeError, RecursionError, UserError):
            known = dict(json.loads((cache_folder() / "engines.json").read_text()))
        if known.get(key) in [*runtimes]:
            return known[key], self._open(runtimes[known[key]])
        image, opened, milliseconds = self._golden[0][:1], {}, {}
        for name, runtime in runtimes.items():
            with suppress(UserError):
                opened[name] = self._open(runtime)
                times = repeat("run(image)", number=1, repeat=10, globals={"run": opened[name], "image": image})
                milliseconds[name] = 1e3 * min(times)  # of the least disturbed run
        if not opened:
            raise UserError(f"{self.folder} gives its golden answer with none of the engines {', '.join(runtimes)}.")
        chosen = min(milliseconds, key=milliseconds.__getitem__)
        shown = ", ".join(f"{name} {value:.1f} ms" for name, value in milliseconds.items())
        print(f"engine of {self.folder}: {chosen} ({shown} per image)", file=sys.stderr)
        with suppress(OSError, UserError):
            write_json(cache_folder() / "engines.json", known | {key: chosen})
        return chosen, opened[chosen]

    def _open(self, runtime: str) -> Engine:
        """The program in a runtime, after it has given its golden answer."""
        images, expected = self._golden
        with reading_untrusted(self.folder, "a program that gives its golden answer here; export the model again"):
            run = open_engine(self.folder, runtime, self._threads)
            with silenced():
                found = run(images)
        tolerance = 3 * TOLERANCE.get(runtime.removeprefix("openvino_"), TOLERANCE["fp32"])
        if on_gpu(runtime):
            tolerance = max(tolerance, GPU_TOLERANCE)
        if not output_difference(found, expected, self.output) <= tolerance:
            raise UserError(f"{self.folder} does not give its golden answer with {runtime}: export the model again.")
        return run

    def run(self, batch: np.ndarray) -> np.ndarray:
        """Preprocessed images [B, C, H, W] -> probabilities [B, K], whose rows sum to 1, or features; all float32."""
        batch = np.asarray(batch, np.float32)
        channels, stride, (height, width) = self.preprocess.in_chans, self.stride, self.preprocess.img_size
        wanted, fits = f"{channels}, {height}, {width}]", batch.shape[1:] == (channels, height, width)
        if stride:
            wanted = f"{channels}, H, W], H and W multiples of {stride}"
            sides = batch.shape[2:] if batch.ndim == 4 and batch.shape[1] == channels else (0,)
            fits = all(side > 0 and side % stride == 0 for side in sides)
        if not fits:
            raise UserError(f"The model takes images [B, {wanted}, not {list(batch.shape)}.")
        if not np.isfinite(batch).all():
            raise UserError("The batch holds values that are not finite numbers.")
        if not len(batch):
            return np.zeros((0, self._golden[1].shape[1]), np.float32)
        with reading_untrusted(self.folder, f"a program for images of {batch.shape[2]} x {batch.shape[3]} pixels"):
            return output_probabilities(self._run(batch), self.output)

    def predict(self, images: Images, topk: int = 5) -> list[list[tuple[str, float]]]:
        """The `topk` most probable classes of each image, best first, as (name, score).

        `images` are one or several: uint8 RGB [H, W, 3] or grey [H, W] of any size, paths of image files, their bytes,
        or images of Pillow. Raises `ImageError` for a damaged file, `UserError` for an array that is no image.
        """
        if self.output == "features":
            raise UserError(f"{self.folder} was exported with features instead of classes; embed() gives them.")
        return top_predictions(self._answers(images), self.classes, topk)

    def embed(self, images: Images) -> np.ndarray:
        """Features [n, C] float32 of images, given as for `predict`; of an export with features."""
        if self.output != "features":
            raise UserError(f"{self.folder} was exported with classes; export the model with features=True.")
        return self._answers(images)

    def _answers(self, images: Images) -> np.ndarray:
        single = isinstance(images, (str, bytes, Image.Image)) or getattr(images, "ndim", 0) in (2, 3)
        given: list[Any] = [images] if single or not isinstance(images, Iterable) else [*images]
        found = [np.zeros((0, self._golden[1].shape[1]), np.float32)]
        for start in range(0, len(given), 32):
            some = enumerate(given[start : start + 32], start + 1)
            arrays = [as_array(one, f"Image {i}", self.preprocess) for i, one in some]
            found.append(self.run(self.preprocess.batch(arrays)))
        return np.concatenate(found)


def as_array(image: Any, name: str, preprocess: Preprocess) -> np.ndarray:
    """An image as `predict` takes it -> uint8 [H, W, C] as the preprocessing does."""
    if isinstance(image, (str, Path)):
        return preprocess.read(image)
    if isinstance(image, Image.Image):
        with reading_untrusted(name, "a readable image"):  # Pillow decodes when the pixels are asked for
            return image_from_pillow(image, name, preprocess.max_value, preprocess.planes)
    if isinstance(image, bytes):
        return decode(image, name, preprocess.max_value, preprocess.planes)
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim not in (2, 3):
        kind = f"{image.dtype} {list(image.shape)}" if isinstance(image, np.ndarray) else f"a {type(image).__name__}"
        raise UserError(f"{name} is {kind}: give uint8 [height, width, 3], a path, bytes or an image of Pillow.")
    return np.repeat(image.reshape(*image.shape[:2], 1), 3, axis=2) if image.shape[2:] in ((), (1,)) else image


def top_predictions(probabilities: np.ndarray, classes: Sequence[str], topk: int) -> list[list[tuple[str, float]]]:
    """The `topk` most probable names and scores of every row."""
    if topk < 1:
        raise UserError(f"topk = {topk} is not allowed; it is 1 or more.")
    if not np.isfinite(probabilities).all():
        raise UserError("The model's answers are not finite numbers: its weights are damaged.")
    order = np.argsort(-probabilities, axis=1, kind="stable")[:, : min(topk, len(classes))]
    return [[(classes[i], float(row[i])) for i in chosen] for row, chosen in zip(probabilities, order, strict=True)]


def exported_runner(predictor: Predictor) -> Callable[[np.ndarray], np.ndarray]:
    """A `ppattn.Predictor`, which gives probabilities, as a function to their logarithms, or logits of a sigmoid."""
    tiny = np.finfo("float32").tiny

    def run(images: np.ndarray) -> np.ndarray:
        found = predictor.run(images).astype(np.float64)
        return np.log(np.maximum(found, tiny)) - (np.log(np.maximum(1 - found, tiny)) if predictor.sigmoid else 0)

    return run
