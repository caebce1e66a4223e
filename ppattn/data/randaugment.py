"""RandAugment in timm's notation and with timm's operations and magnitudes, on uint8 arrays.

`rand-m9-mstd0.5-inc1`: two operations are drawn from the list with replacement, each is applied with probability 0.5,
at magnitude Normal(9, 0.5) cut to 0..10. Operations are Pillow's (ImageOps, ImageEnhance) written as lookup tables and
blends, equal to within one level. The deviation: shear, shift and rotation interpolate bilinearly whatever the
transform's interpolation is, and blend with the fill colour over half a pixel at the border.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np

from ppattn.data.color import adjust_brightness, adjust_contrast, adjust_saturation
from ppattn.errors import UserError

_LEVELS = np.arange(256)
Color = tuple[int, int, int]
Operation = tuple[Callable[..., np.ndarray], Callable[[float, int], Any] | None]  # and what it makes of a level


def autocontrast(image: np.ndarray) -> np.ndarray:
    """Stretch every channel to 0..255."""
    planes = []
    for plane in cv2.split(image):
        low, high, _, _ = cv2.minMaxLoc(plane)
        if high > low:
            scale = 255 / (high - low)
            plane = cv2.LUT(plane, np.clip(_LEVELS * scale - low * scale, 0, 255).astype(np.uint8))
        planes.append(plane)
    return cv2.merge(planes)


def equalize(image: np.ndarray) -> np.ndarray:
    """Even out every channel's histogram, by Pillow's formula."""
    planes = []
    for plane in cv2.split(image):
        counts = cv2.calcHist([plane], [0], None, [256], [0, 256]).ravel().astype(np.int64)
        step = (plane.size - counts[np.flatnonzero(counts)[-1]]) // 255
        if step:
            below = np.cumsum(counts) - counts
            plane = cv2.LUT(plane, np.minimum((step // 2 + below) // step, 255).astype(np.uint8))
        planes.append(plane)
    return cv2.merge(planes)


def posterize(image: np.ndarray, bits: int) -> np.ndarray:
    """Keep the `bits` highest bits, 0..8."""
    return cv2.LUT(image, (_LEVELS & ~(2 ** (8 - bits) - 1)).astype(np.uint8))


def solarize(image: np.ndarray, threshold: int) -> np.ndarray:
    """Invert the values from `threshold` on."""
    return cv2.LUT(image, np.where(threshold > _LEVELS, _LEVELS, 255 - _LEVELS).astype(np.uint8))


def solarize_add(image: np.ndarray, add: int) -> np.ndarray:
    """Add to the values below 128."""
    return cv2.LUT(image, np.where(_LEVELS < 128, np.minimum(_LEVELS + add, 255), _LEVELS).astype(np.uint8))


_SMOOTH = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13


def sharpness(image: np.ndarray, factor: float) -> np.ndarray:
    """Blend with the smoothed image: 0 is smooth, 1 the image; the border stays as it is."""
    smooth = image.copy()
    if min(image.shape[:2]) > 2:
        smooth[1:-1, 1:-1] = cv2.filter2D(image, -1, _SMOOTH)[1:-1, 1:-1]
    return cv2.addWeighted(image, factor, smooth, 1 - factor, 0)


def affine(image: np.ndarray, moved: tuple[float, float, float, float], fill: Color) -> np.ndarray:
    """Take each pixel (x, y), counted from centres, from (x + a y + right width, b x + y + down height)."""
    (a, b, right, down), (rows, cols) = moved, image.shape[:2]
    matrix = np.array([[1, a, a / 2 + right * cols], [b, 1, b / 2 + down * rows]], np.float64)
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    return cv2.warpAffine(image, matrix, (cols, rows), flags=flags, borderValue=fill)


def rotate(image: np.ndarray, degrees: float, fill: Color) -> np.ndarray:
    """Counter-clockwise about the centre."""
    rows, cols = image.shape[:2]
    matrix = cv2.getRotationMatrix2D(((cols - 1) / 2, (rows - 1) / 2), degrees, 1.0)
    return cv2.warpAffine(image, matrix, (cols, rows), flags=cv2.INTER_LINEAR, borderValue=fill)


# name: operation, argument at a level (part of the scale, 0..1 at magnitude 0..10) and sign (+1 or -1)
_COMMON: dict[str, Operation] = {
    "AutoContrast": (autocontrast, None),
    "Equalize": (equalize, None),
    "Invert": (cv2.bitwise_not, None),
    "SolarizeAdd": (solarize_add, lambda level, sign: min(128, int(level * 110))),
    "Rotate": (rotate, lambda level, sign: sign * level * 30),
    "ShearX": (affine, lambda level, sign: (sign * level * 0.3, 0, 0, 0)),
    "ShearY": (affine, lambda level, sign: (0, sign * level * 0.3, 0, 0)),
    "TranslateXRel": (affine, lambda level, sign: (0, 0, sign * level * 0.45, 0)),
    "TranslateYRel": (affine, lambda level, sign: (0, 0, 0, sign * level * 0.45)),
}
_ENHANCE = {
    "Color": adjust_saturation,
    "Contrast": adjust_contrast,
    "Brightness": adjust_brightness,
    "Sharpness": sharpness,
}
INCREASING: dict[str, Operation] = {  # severity grows with the magnitude
    **_COMMON,
    "PosterizeIncreasing": (posterize, lambda level, sign: max(0, 4 - int(level * 4))),
    "SolarizeIncreasing": (solarize, lambda level, sign: max(0, 256 - int(level * 256))),
    **{f"{k}Increasing": (op, lambda level, sign: max(0.1, 1 + sign * level * 0.9)) for k, op in _ENHANCE.items()},
}
PLAIN: dict[str, Operation] = {
    **_COMMON,
    "Posterize": (posterize, lambda level, sign: min(8, int(level * 4))),
    "Solarize": (solarize, lambda level, sign: min(256, int(level * 256))),
    **{k: (op, lambda level, sign: level * 1.8 + 0.1) for k, op in _ENHANCE.items()},
}
_FILLED = ("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel")


class RandAugment:
    """The policy that `spec` describes.

    Args:
        spec: `rand` and any of m (magnitude, 10), n (operations, 2), p (probability of each, 0.5), mstd (spread of the
            magnitude, 0; above 100: uniform in 0..m), mmax (largest magnitude, 10), inc (1: the increasing set).
        fill: colour (r, g, b) in 0..255 that shows outside the image.

    Raises:
        UserError: for a part that is not one of these, or out of its range.
    """

    def __init__(self, spec: str, fill: Color):
        settings = {"m": 10.0, "n": 2.0, "p": 0.5, "mstd": 0.0, "mmax": 10.0, "inc": 0.0}
        name, *parts = spec.split("-")
        matches = [re.fullmatch(r"([a-z]+)(\d+(?:\.\d+)?)", part) for part in parts]
        if name != "rand" or not all(match and match[1] in settings for match in matches):
            raise UserError(
                f"augment.rand_augment = {spec!r} is not in timm's notation: rand, then any of "
                f"{', '.join(settings)} with a number, as in rand-m9-mstd0.5-inc1."
            )
        settings |= {match[1]: float(match[2]) for match in matches if match}
        if settings["m"] > settings["mmax"] or settings["p"] > 1 or max(settings.values()) > 1000:
            raise UserError(
                f"augment.rand_augment = {spec!r}: m may be {settings['mmax']:g} (mmax) at most, p is "
                "a probability, and none is above 1000."
            )
        self.magnitude, self.count, self.prob = settings["m"], int(settings["n"]), settings["p"]
        self.spread, self.highest = settings["mstd"], settings["mmax"]
        self.table = INCREASING if settings["inc"] else PLAIN
        self.names = list(self.table)
        self.fill = fill

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """uint8 [h, w, 3] to the same shape."""
        for which in rng.integers(0, len(self.names), self.count):
            apply, sign, uniform = rng.random(3)
            normal = rng.standard_normal()
            if apply >= self.prob:
                continue
            magnitude = self.magnitude * uniform if self.spread > 100 else self.magnitude + self.spread * normal
            level = min(max(magnitude, 0.0), self.highest) / 10
            image = self.apply(image, self.names[which], level, -1 if sign < 0.5 else 1)
        return image

    def apply(self, image: np.ndarray, name: str, level: float, sign: int) -> np.ndarray:
        """One operation at `level` (magnitude / 10), in the direction of `sign` where it has one."""
        operation, argument = self.table[name]
        arguments = [] if argument is None else [argument(level, sign)]
        return operation(image, *arguments, *([self.fill] if name in _FILLED else []))
