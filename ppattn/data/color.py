"""Colour jitter as torchvision defines it, with Pillow's enhancers, on uint8 RGB images [h, w, 3]."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageEnhance


def adjust_brightness(image: Image.Image, factor: float) -> Image.Image:
    """`factor * image`: 0 is black, 1 the image."""
    return ImageEnhance.Brightness(image).enhance(factor)


def adjust_contrast(image: Image.Image, factor: float) -> Image.Image:
    """Blend with the mean grey level of the image: 0 is that grey, 1 the image."""
    return ImageEnhance.Contrast(image).enhance(factor)


def adjust_saturation(image: Image.Image, factor: float) -> Image.Image:
    """Blend with the grey image: 0 is grey, 1 the image."""
    return ImageEnhance.Color(image).enhance(factor)


def adjust_hue(image: Image.Image, shift: float) -> Image.Image:
    """Rotate the hue by `shift` of the circle, -0.5..0.5."""
    hue, saturation, value = image.convert("HSV").split()
    hue = hue.point([(level + round(shift * 255)) % 256 for level in range(256)])
    return Image.merge("HSV", (hue, saturation, value)).convert("RGB")


def color_jitter(image: np.ndarray, strengths: Sequence[float], rng: np.random.Generator) -> np.ndarray:
    """Brightness, contrast, saturation (factors in max(0, 1 - s)..1 + s) and hue (-s..s), in random order."""
    picture = Image.fromarray(image)
    draws = rng.random(4)
    for which in rng.permutation(len(strengths)):
        strength, draw = strengths[which], draws[which]
        if strength:
            low, high = (-strength, strength) if which == 3 else (max(0.0, 1 - strength), 1 + strength)
            adjust = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)[which]
            picture = adjust(picture, low + (high - low) * draw)
    return np.asarray(picture)
