"""The corruptions of scripts/studies/corruptions.py: what they do to known images, and that they repeat."""

import cv2
import numpy as np
import pytest

from scripts.studies import corruptions
from scripts.studies.corruptions import CORRUPTIONS, Corrupted
from tests.helpers.data_sets import numbered


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def test_noise_has_the_stated_strength(rng):
    grey = np.full((64, 65, 3), 128, np.uint8)
    assert corruptions.gaussian_noise(grey, 20, rng).std() == pytest.approx(20, rel=0.03)
    spoilt = (corruptions.impulse_noise(grey, 0.1, rng) != 128).all(axis=2)
    assert spoilt.mean() == pytest.approx(0.1, abs=0.02)


def test_light_and_contrast_are_linear(rng):
    image = rng.integers(0, 256, (9, 7, 3)).astype(np.uint8)
    assert np.array_equal(corruptions.darkness(image, 0.4, rng), np.rint(image * 0.4))
    weak = corruptions.contrast(image, 0.2, rng)
    assert np.abs(weak.mean(axis=(0, 1)) - image.mean(axis=(0, 1))).max() < 0.5
    assert weak.std(axis=(0, 1)) == pytest.approx(0.2 * image.std(axis=(0, 1)), rel=0.05)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_every_strength_changes_more_and_repeats(name):
    split, count = numbered(20, size=32), 20
    split.images = np.stack([cv2.GaussianBlur(image, (0, 0), 2) for image in split.images])
    errors = []
    for strength in range(3):
        part = Corrupted(split, count, name, strength)
        assert len(part) == count and np.array_equal(part.image(1), part.image(1))
        errors.append(float(np.mean([(part.image(i).astype(float) - split.image(i)) ** 2 for i in range(count)])))
    assert 0 < errors[0] < errors[1] < errors[2]
