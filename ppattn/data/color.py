"""Brightness, contrast, saturation and hue of uint8 RGB images [h, w, 3], as torchvision defines them."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np

_LEVELS = np.arange(256.0)


def _table(values: np.ndarray) -> np.ndarray:
    """256 values as a lookup table, truncated to integers as torchvision does."""
    return np.clip(values, 0, 255).astype(np.uint8)


def adjust_brightness(image: np.ndarray, factor: float) -> np.ndarray:
    """`factor * image`: 0 is black, 1 the image."""
    return cv2.LUT(image, _table(_LEVELS * factor))


def adjust_contrast(image: np.ndarray, factor: float) -> np.ndarray:
    """Blend with the image's mean grey level (rounded): 0 is that grey, 1 the image."""
    grey = int(cv2.mean(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY))[0] + 0.5)
    return cv2.LUT(image, _table(grey + (_LEVELS - grey) * factor))


def adjust_saturation(image: np.ndarray, factor: float) -> np.ndarray:
    """Blend with the grey image: 0 is grey, 1 the image."""
    grey = cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
    return cv2.addWeighted(image, factor, grey, 1 - factor, 0)


def adjust_hue(image: np.ndarray, shift: float) -> np.ndarray:
    """Turn the hue by `shift` of the circle, -0.5..0.5."""
    hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV_FULL)
    hsv[..., 0] += np.uint8(int(shift * 255) % 256)  # wraps around
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL)


def color_jitter(image: np.ndarray, strengths: Sequence[float], rng: np.random.Generator) -> np.ndarray:
    """Brightness, contrast, saturation (factors in max(0, 1 - s)..1 + s) and hue (-s..s), in random order."""
    draws = rng.random(4)
    for which in rng.permutation(len(strengths)):
        strength, draw = strengths[which], draws[which]
        if strength == 0:
            continue
        if which == 3:
            image = adjust_hue(image, strength * (2 * draw - 1))
        else:
            low = max(0.0, 1 - strength)
            adjust = (adjust_brightness, adjust_contrast, adjust_saturation)[which]
            image = adjust(image, low + (1 + strength - low) * draw)
    return image
