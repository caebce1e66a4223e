"""scikit-learn's 1,797 handwritten digits (8 x 8 pixels, grey), which need no download."""

from __future__ import annotations

import numpy as np

from ppattn.data.splits import ArraySplit, Splits
from ppattn.errors import optional


def digits() -> Splits:
    """1,437 images to train on and 360 to test, by a fixed stratified split."""
    with optional("train"):
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

    data = load_digits()
    grey = np.rint(data.images * (255 / 16)).astype(np.uint8)
    images = np.repeat(grey[..., None], 3, axis=3)
    train, test = train_test_split(np.arange(len(images)), test_size=360, random_state=0, stratify=data.target)
    return Splits(
        ArraySplit(images[train], data.target[train], "digits/train"),
        ArraySplit(images[test], data.target[test], "digits/test"),
        [str(name) for name in data.target_names],
        [0.3053] * 3,
        [0.3760] * 3,
    )
