"""Colour jitter as torchvision defines it, with Pillow's enhancers, on uint8 RGB images [h, w, 3]."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageEnhance

FACTORS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)  # 0 is black or grey, 1 the image


def adjust(image: Image.Image, which: int, amount: float) -> Image.Image:
    """Brightness, contrast and saturation (0, 1, 2) by a factor, or rotate the hue (3) by a part of the circle."""
    if which < 3:
        return FACTORS[which](image).enhance(amount)
    hue, saturation, value = image.convert("HSV").split()
    hue = hue.point([(level + round(amount * 255)) % 256 for level in range(256)])
    return Image.merge("HSV", (hue, saturation, value)).convert("RGB")


def color_jitter(image: np.ndarray, strengths: Sequence[float], rng: np.random.Generator) -> np.ndarray:
    """Brightness, contrast, saturation (factors in max(0, 1 - s)..1 + s) and hue (-s..s), in random order."""
    picture = Image.fromarray(image)
    draws = rng.random(4)
    for which in rng.permutation(len(strengths)):
        if strength := strengths[which]:
            low, high = (-strength, strength) if which == 3 else (max(0.0, 1 - strength), 1 + strength)
            picture = adjust(picture, which, low + (high - low) * draws[which])
    return np.asarray(picture)
