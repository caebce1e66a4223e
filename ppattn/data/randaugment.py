"""RandAugment in timm's notation and with timm's operations and magnitudes, on uint8 RGB images [h, w, 3].

`rand-m9-mstd0.5-inc1`: two operations are drawn from the list with replacement, each is applied with probability 0.5,
at magnitude Normal(9, 0.5) cut to 0..10. Unlike in timm, Pillow's shear, shift and rotation are always bilinear.
"""

import re

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from ppattn.errors import UserError

# In the order in which they are drawn. Of the second kind the severity of `...Increasing` grows with the magnitude.
MOVES = ["ShearX", "ShearY", "TranslateXRel", "TranslateYRel"]
COMMON = ["AutoContrast", "Equalize", "Invert", "SolarizeAdd", "Rotate", *MOVES]
VARIED = ["Posterize", "Solarize", "Color", "Contrast", "Brightness", "Sharpness"]
PLAIN, INCREASING = COMMON + VARIED, COMMON + [f"{name}Increasing" for name in VARIED]


class RandAugment:
    """The policy that `spec` describes; `fill` is the colour (r, g, b) in 0..255 that shows outside the image.

    `spec` is `rand` and any of m (magnitude, 10), n (operations, 2), p (probability of each, 0.5), mstd (spread of the
    magnitude, 0; above 100: uniform in 0..m), mmax (largest magnitude, 10), inc (1: the increasing set).
    """

    def __init__(self, spec: str, fill: tuple[int, int, int]):
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
        self.names = INCREASING if settings["inc"] else PLAIN
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
            direction = -1 if sign < 0.5 else 1
            image = np.asarray(operate(Image.fromarray(image), self.names[which], level, direction, self.fill))
        return image


def operate(image: Image.Image, name: str, level: float, sign: int, fill: tuple[int, int, int]) -> Image.Image:
    """One operation at `level` (magnitude / 10), in the direction of `sign` where it has one."""
    plain = name.removesuffix("Increasing")
    increasing = plain != name
    match plain:
        case "AutoContrast" | "Equalize" | "Invert":
            return getattr(ImageOps, plain.lower())(image)
        case "Color" | "Contrast" | "Brightness" | "Sharpness":
            factor = max(0.1, 1 + sign * level * 0.9) if increasing else level * 1.8 + 0.1
            return getattr(ImageEnhance, plain)(image).enhance(factor)
        case "Posterize":  # `ImageOps.posterize` takes no 0
            bits = max(0, 4 - int(level * 4)) if increasing else min(8, int(level * 4))
            return image.point([value & ~(2 ** (8 - bits) - 1) for value in range(256)] * 3)
        case "Solarize":
            threshold = int(level * 256)
            return ImageOps.solarize(image, max(0, 256 - threshold) if increasing else min(256, threshold))
        case "SolarizeAdd":
            add = min(128, int(level * 110))
            return image.point([min(255, value + add) if value < 128 else value for value in range(256)] * 3)
        case "Rotate":
            return image.rotate(sign * level * 30, Image.Resampling.BILINEAR, fillcolor=fill)
    move = sign * level * (0.3 if plain.startswith("Shear") else 0.45)
    across, down, right, below = (move if plain == name else 0 for name in MOVES)
    # Each pixel (x, y) is taken from (x + across y + right width, down x + y + below height).
    matrix = (1, across, right * image.width, down, 1, below * image.height)
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor=fill)
