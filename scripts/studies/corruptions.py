"""Accuracy of the released models under eight corruptions of the CIFAR-10 test images at three strengths.

python -m scripts.studies.corruptions --data data/cifar10 [--models NAME ...]

The corruptions are this project's own, in the spirit of CIFAR-10-C; their figures do not compare with those of that
data set. The noise of an image is a function of the corruption, its strength and the image's number. Results:
results/cifar10/corruptions.csv, a row per model, corruption and strength.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Callable

import cv2
import numpy as np

import ppattn
from ppattn import zoo
from ppattn.cli import guarded
from ppattn.data import EvalLoader, build_datasets
from ppattn.data.splits import Split
from ppattn.engine.evaluate import evaluate, model_runner
from ppattn.trained import load_run
from scripts.run_grid import ROOT
from scripts.tables.runs import read_csv, write_csv

RESULTS = ROOT / "results/cifar10/corruptions.csv"
Corrupt = Callable[[np.ndarray, float, np.random.Generator], np.ndarray]


def levels(values: np.ndarray) -> np.ndarray:
    return np.rint(values).clip(0, 255).astype(np.uint8)


def gaussian_noise(image: np.ndarray, deviation: float, rng: np.random.Generator) -> np.ndarray:
    """Add noise of this standard deviation, in levels of 0..255."""
    return levels(image + deviation * rng.standard_normal(image.shape))


def impulse_noise(image: np.ndarray, part: float, rng: np.random.Generator) -> np.ndarray:
    """Make this part of the pixels black or white."""
    draw = rng.random(image.shape[:2])
    image = image.copy()
    image[draw < part / 2] = 0
    image[draw > 1 - part / 2] = 255
    return image


def motion_blur(image: np.ndarray, length: float, rng: np.random.Generator) -> np.ndarray:
    """Average over a line of this many pixels in a random direction."""
    side, angle = int(length) | 1, rng.random() * math.pi
    kernel = np.zeros((side, side), np.float32)
    for step in np.linspace(-(side // 2), side // 2, 8 * side):
        kernel[round(side // 2 + step * math.sin(angle)), round(side // 2 + step * math.cos(angle))] = 1
    return cv2.filter2D(image, -1, kernel / kernel.sum())


def darkness(image: np.ndarray, factor: float, rng: np.random.Generator) -> np.ndarray:
    return levels(image * factor)


def contrast(image: np.ndarray, factor: float, rng: np.random.Generator) -> np.ndarray:
    """Move every channel towards its mean."""
    mean = image.mean(axis=(0, 1), keepdims=True)
    return levels(mean + factor * (image - mean))


def jpeg(image: np.ndarray, quality: float, rng: np.random.Generator) -> np.ndarray:
    _, data = cv2.imencode(".jpg", image[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, int(quality)])
    return cv2.imdecode(data, cv2.IMREAD_COLOR)[:, :, ::-1]


def pixelate(image: np.ndarray, part: float, rng: np.random.Generator) -> np.ndarray:
    """Shrink both sides to this part and enlarge them again without interpolation."""
    height, width = image.shape[:2]
    small = cv2.resize(image, (round(width * part), round(height * part)), interpolation=cv2.INTER_AREA)
    return cv2.resize(small, (width, height), interpolation=cv2.INTER_NEAREST)


CORRUPTIONS: dict[str, tuple[Corrupt, tuple[float, float, float]]] = {
    "gaussian noise": (gaussian_noise, (10, 20, 40)),
    "impulse noise": (impulse_noise, (0.02, 0.05, 0.1)),
    "gaussian blur": (lambda image, sigma, _: cv2.GaussianBlur(image, (0, 0), sigma), (0.5, 1.0, 1.5)),
    "motion blur": (motion_blur, (3, 5, 7)),
    "darkness": (darkness, (0.6, 0.4, 0.2)),
    "contrast": (contrast, (0.6, 0.4, 0.2)),
    "jpeg": (jpeg, (50, 25, 10)),
    "pixelate": (pixelate, (0.75, 0.5, 0.375)),
}


class Corrupted(Split):
    """The first images of a split, corrupted."""

    def __init__(self, split: Split, count: int, name: str, strength: int):
        super().__init__(split.labels[:count], split.root)
        self.split, self.place = split, [list(CORRUPTIONS).index(name), strength]
        self.corrupt, values = CORRUPTIONS[name]
        self.value = values[strength]

    def image(self, i: int) -> np.ndarray:
        return self.corrupt(self.split.image(i), self.value, np.random.default_rng([*self.place, i]))


def measure(args) -> None:
    """Fill in what is missing of the table, a row at a time."""
    ppattn.setup(threads=args.threads)
    found = {(row["model"], row["corruption"], row["strength"]): row for row in read_csv(RESULTS)}
    for name in args.models:
        config, model, _, preprocess = load_run(name, overrides=["data.name=cifar10", f"data.root={args.data}"])
        split, runner = build_datasets(config).val, model_runner(model)
        count = min(args.images, len(split))
        for corruption, strength in itertools.product(CORRUPTIONS, range(3)):
            key = (name, corruption, str(strength + 1))
            if key in found and int(found[key]["images"]) == count:
                continue
            corrupted = Corrupted(split, count, corruption, strength)
            result = evaluate(runner, EvalLoader(corrupted, preprocess, 500), corrupted)
            row = dict(zip(("model", "corruption", "strength"), key, strict=True))
            found[key] = row | {"top1": round(result.metrics["top1"], 4), "images": count}
            write_csv(RESULTS, list(found.values()))
            print(*found[key].values(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=zoo.table.released(), metavar="NAME")
    parser.add_argument("--data", default="data/cifar10", help="CIFAR-10: folder or archive")
    parser.add_argument("--images", type=int, default=10_000, help="of the test images, the first ones")
    parser.add_argument("--threads", type=int, help="CPU threads (default: all cores)")
    args = parser.parse_args()
    sys.exit(guarded(lambda: measure(args)))


if __name__ == "__main__":
    main()
