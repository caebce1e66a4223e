"""Mixup and CutMix per batch (timm's mode `batch`), and soft targets."""

import math

import numpy as np

from ppattn.settings import Augment


def smooth_targets(
    labels: np.ndarray, num_classes: int, smoothing: float = 0.0, table: np.ndarray | None = None
) -> np.ndarray:
    """float32 [b, num_classes]: 1 - s + s / K at the label, else s / K; labels of a `Split.table` move towards 1/2."""
    if table is not None:
        return ((1 - smoothing) * table[labels] + smoothing / 2).astype(np.float32)
    if not num_classes:
        return np.empty((len(labels), 0), np.float32)
    targets = np.full((len(labels), num_classes), smoothing / num_classes, np.float32)
    targets[np.arange(len(labels)), labels] = 1 - smoothing + smoothing / num_classes
    return targets


def mix_draw(
    size: tuple[int, int], augment: Augment, rng: np.random.Generator
) -> tuple[float, tuple[int, int, int, int] | None]:
    """The share of each image's own label, and CutMix's box (top, bottom, left, right) or None.

    Mixup: share ~ Beta(mixup, mixup). CutMix: share ~ Beta(cutmix, cutmix) sizes a box around a random centre, which
    the border may cut; the share is then that of the pixels that stay.
    """
    apply, switch = rng.random(2)
    if apply >= augment.mix_prob or not (augment.mixup or augment.cutmix):
        return 1.0, None
    if not augment.cutmix or (augment.mixup and switch >= augment.mix_switch_prob):
        return rng.beta(augment.mixup, augment.mixup), None
    side = math.sqrt(1 - rng.beta(augment.cutmix, augment.cutmix))
    box = []
    for length in size:
        half, centre = int(length * side) // 2, int(rng.integers(length))
        box += [max(centre - half, 0), min(centre + half, length)]
    top, bottom, left, right = box
    return 1 - (bottom - top) * (right - left) / (size[0] * size[1]), (top, bottom, left, right)


def mix(images: np.ndarray, targets: np.ndarray, augment: Augment, rng: np.random.Generator) -> np.ndarray:
    """Mix images [b, c, h, w] in place with their mirror image in the batch; returns the targets, mixed alike."""
    share, box = mix_draw(images.shape[2:], augment, rng)
    if share == 1:
        return targets
    if box is None:
        for i in range(len(images) // 2):
            first, last = images[i], images[-1 - i]
            first[:], last[:] = share * first + (1 - share) * last, share * last + (1 - share) * first
    else:
        top, bottom, left, right = box
        patch = images[:, :, top:bottom, left:right]
        patch[:] = patch[::-1].copy()
    return (share * targets + (1 - share) * targets[::-1]).astype(np.float32)
