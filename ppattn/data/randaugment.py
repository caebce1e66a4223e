"""RandAugment in timm's notation and with timm's operations and magnitudes, on uint8 RGB images [h, w, 3].

`rand-m9-mstd0.5-inc1`: two operations are drawn from the list with replacement, each is applied with probability 0.5,
at magnitude Normal(9, 0.5) cut to 0..10. The operations are Pillow's. Unlike in timm, shear, shift and
rotation always interpolate bilinearly.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from ppattn.errors import UserError

Color = tuple[int, int, int]
# From image, argument and fill colour to an image; and from level (0..1 at magnitude 0..10) and sign (+1, -1) to the
# argument.
Operation = tuple[Callable[[Image.Image, Any, Color], Image.Image], Callable[[float, int], Any]]


def affine(image: Image.Image, moved: tuple[float, float, float, float], fill: Color) -> Image.Image:
    """Take each pixel (x, y) from (x + a y + right width, b x + y + down height); `moved` is (a, b, right, down)."""
    a, b, right, down = moved
    matrix = (1, a, right * image.width, b, 1, down * image.height)
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor=fill)


def posterize(image: Image.Image, bits: int, fill: Color) -> Image.Image:
    """Keep the upper bits; `ImageOps.posterize` takes no 0."""
    return image.point([level & ~(2 ** (8 - bits) - 1) for level in range(256)] * 3)


def solarize_add(image: Image.Image, add: int, fill: Color) -> Image.Image:
    """Add to the values below 128."""
    return image.point([min(255, level + add) if level < 128 else level for level in range(256)] * 3)


def solarize(image: Image.Image, threshold: int, fill: Color) -> Image.Image:
    return ImageOps.solarize(image, threshold)


def enhance(name: str) -> Callable:
    """An operation out of one of Pillow's enhancers, whose argument is a factor; 1 is the image itself."""
    return lambda image, factor, fill: getattr(ImageEnhance, name)(image).enhance(factor)


_COMMON: dict[str, Operation] = {
    "AutoContrast": (lambda image, _, fill: ImageOps.autocontrast(image), lambda level, sign: None),
    "Equalize": (lambda image, _, fill: ImageOps.equalize(image), lambda level, sign: None),
    "Invert": (lambda image, _, fill: ImageOps.invert(image), lambda level, sign: None),
    "SolarizeAdd": (solarize_add, lambda level, sign: min(128, int(level * 110))),
    "Rotate": (
        lambda image, degrees, fill: image.rotate(degrees, Image.Resampling.BILINEAR, fillcolor=fill),
        lambda level, sign: sign * level * 30,
    ),
    "ShearX": (affine, lambda level, sign: (sign * level * 0.3, 0, 0, 0)),
    "ShearY": (affine, lambda level, sign: (0, sign * level * 0.3, 0, 0)),
    "TranslateXRel": (affine, lambda level, sign: (0, 0, sign * level * 0.45, 0)),
    "TranslateYRel": (affine, lambda level, sign: (0, 0, 0, sign * level * 0.45)),
}
_ENHANCE = {name: enhance(name) for name in ("Color", "Contrast", "Brightness", "Sharpness")}
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


class RandAugment:
    """The policy that `spec` describes; `fill` is the colour (r, g, b) in 0..255 that shows outside the image.

    `spec` is `rand` and any of m (magnitude, 10), n (operations, 2), p (probability of each, 0.5), mstd (spread of the
    magnitude, 0; above 100: uniform in 0..m), mmax (largest magnitude, 10), inc (1: the increasing set).
    """

    def __init__(self, spec: str, fill: Color):
        settings = {"m": 10.0, "n": 2.0, "p": 0.5, "mstd": 0.0, "mmax": 10.0, "inc": 0.0}
        name, *parts = spec.split("-")
        matches = [re.fullmatch(r"([a-z]+)(\d+(?:\.\d+)?)", part) for part in parts]
        known = name == "rand" and all(match and match[1] in settings for match in matches)
        settings |= {match[1]: float(match[2]) for match in matches if match}
        if not known or settings["m"] > settings["mmax"] or settings["p"] > 1 or max(settings.values()) > 1000:
            form = f"rand, then any of {', '.join(settings)} with a number up to 1000, m <= mmax, p <= 1"
            raise UserError(f"augment.rand_augment = {spec!r} is not in timm's notation: {form}.")
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
        return np.asarray(operation(Image.fromarray(image), argument(level, sign), self.fill))
