"""Training transforms: OpenCV on uint8 as long as possible, floats last; every random number from one generator.

Names and meaning are torchvision's (those of paddle.vision, where it does what it documents). The deviations:

- Shrinking uses area averaging, so that it does not alias; enlarging uses `interpolation` as OpenCV defines it.
- Where a crop is enlarged, colour jitter runs on the crop before the resize. Brightness, contrast and saturation
  commute with interpolation up to rounding and clipping; the mean that contrast turns on is that of the crop.
- Rotation takes the nearest pixel and fills with black, which is torchvision's and Paddle's default; flip, rotation and
  translation are one warp, exact because a flip and a whole-pixel shift need no interpolation.
- Paddle's own OpenCV colour jitter turns contrast on the constant 74 and draws the saturation factor twice; not here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import cv2
import numpy as np
from PIL import Image, ImageEnhance

from ppattn.data.images import Preprocess
from ppattn.data.randaugment import RandAugment
from ppattn.errors import UserError
from ppattn.settings import Augment

FILTERS = {"nearest": "NEAREST", "bilinear": "LINEAR", "bicubic": "CUBIC", "area": "AREA"}  # cv2.INTER_...
ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
Erased = tuple[int, int, np.ndarray]


def crop_box(
    size: tuple[int, int], scale: Sequence[float], ratio: Sequence[float], rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """RandomResizedCrop's (top, left, height, width); after ten tries the largest centred box of an allowed aspect."""
    rows, cols = size
    logs = math.log(ratio[0]), math.log(ratio[1])
    for area, aspect, y, x in rng.random((10, 4)):
        area = rows * cols * (scale[0] + (scale[1] - scale[0]) * area)
        aspect = math.exp(logs[0] + (logs[1] - logs[0]) * aspect)
        height, width = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < height <= rows and 0 < width <= cols:
            return int(y * (rows - height + 1)), int(x * (cols - width + 1)), height, width
    height, width = min(rows, max(1, round(cols / ratio[0]))), min(cols, max(1, round(rows * ratio[1])))
    return (rows - height) // 2, (cols - width) // 2, height, width


def resize_image(image: np.ndarray, size: tuple[int, int], interpolation: str) -> np.ndarray:
    """Resize to (height, width): area averaging along a side that shrinks, then OpenCV's `interpolation`."""
    small = min(image.shape[0], size[0]), min(image.shape[1], size[1])
    if small != image.shape[:2] and interpolation != "nearest":
        parts = np.split(image, range(4, image.shape[2], 4), axis=2)  # OpenCV averages at most four channels at once
        image = cv2.merge([cv2.resize(part, small[::-1], interpolation=cv2.INTER_AREA) for part in parts])
    if image.shape[:2] == tuple(size):
        return image
    return cv2.resize(image, size[::-1], interpolation=getattr(cv2, f"INTER_{FILTERS[interpolation]}"))


def adjust(image: Image.Image, which: int, amount: float) -> Image.Image:
    """Brightness, contrast and saturation (0, 1, 2) by a factor, or rotate the hue (3) by a part of the circle."""
    if which < 3:
        return ENHANCERS[which](image).enhance(amount)
    hue, saturation, value = image.convert("HSV").split()
    hue = hue.point([(level + round(amount * 255)) % 256 for level in range(256)])
    return Image.merge("HSV", (hue, saturation, value)).convert("RGB")


def color_jitter(image: np.ndarray, strengths: Sequence[float], rng: np.random.Generator) -> np.ndarray:
    """Brightness, contrast, saturation (factors in max(0, 1 - s)..1 + s) and hue (-s..s), in random order."""
    picture, draws = Image.fromarray(image), rng.random(4)
    for which in rng.permutation(len(strengths)):
        if strength := strengths[which]:
            low, high = (-strength, strength) if which == 3 else (max(0.0, 1 - strength), 1 + strength)
            picture = adjust(picture, which, low + (high - low) * draws[which])
    return np.asarray(picture)


def pad_crop(image: np.ndarray, pad: int, rng: np.random.Generator) -> np.ndarray:
    """Pad by reflection (the border pixel is not repeated) and cut the old size out at a random place."""
    rows, cols = image.shape[:2]
    top, left = rng.integers(0, 2 * pad + 1, 2)
    return cv2.copyMakeBorder(image, pad, pad, pad, pad, cv2.BORDER_REFLECT_101)[top : top + rows, left : left + cols]


def warp(image: np.ndarray, degrees: float, shift: tuple[int, int] = (0, 0), flip: bool = False) -> np.ndarray:
    """Flip left-right, rotate counter-clockwise about the centre, shift by (down, right) pixels; black outside."""
    rows, cols = image.shape[:2]
    matrix: np.ndarray = cv2.getRotationMatrix2D(((cols - 1) / 2, (rows - 1) / 2), degrees, 1.0)
    if flip:
        matrix[:, 2] += matrix[:, 0] * (cols - 1)
        matrix[:, 0] *= -1
    matrix[:, 2] += shift[1], shift[0]
    # Four bytes are copied as one number, in three quarters of the time that three take.
    pixels = cv2.cvtColor(image, cv2.COLOR_RGB2RGBA).view(np.float32)[..., 0]
    turned = cv2.warpAffine(pixels, matrix, (cols, rows), flags=cv2.INTER_NEAREST)
    return cv2.cvtColor(turned.view(np.uint8).reshape(rows, cols, 4), cv2.COLOR_RGBA2RGB)


def erase_box(size: tuple[int, int], rng: np.random.Generator) -> tuple[int, int, int, int] | None:
    """Random erasing's box (top, left, height, width): 2..33 % of the area, aspect log-uniform in 0.3..1/0.3."""
    rows, cols = size
    for area, aspect, y, x in rng.random((10, 4)):
        area = rows * cols * (0.02 + (1 / 3 - 0.02) * area)
        aspect = math.exp(math.log(0.3) * (1 - 2 * aspect))
        height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if height < rows and width < cols:
            return int(y * (rows - height + 1)), int(x * (cols - width + 1)), height, width
    return None


class TrainTransform:
    """The transforms of `augment` in the order of its keys, then the normalisation of `preprocess`, then erasing."""

    def __init__(self, augment: Augment, preprocess: Preprocess):
        self.augment, self.preprocess = augment, preprocess
        self.img_size, self.slot = preprocess.img_size, preprocess.slot
        self.jitter = augment.color_jitter
        red, green, blue = (round(255 * mean) for mean in preprocess.mean)
        self.rand_augment = RandAugment(augment.rand_augment, (red, green, blue)) if augment.rand_augment else None
        if preprocess.planes > 3 and (self.jitter or augment.rand_augment or augment.rotation or augment.translate):
            raise UserError("augment.color_jitter, rand_augment, rotation and translate need one or three channels.")
        if augment.pad_crop >= min(self.img_size):
            raise UserError(f"augment.pad_crop = {augment.pad_crop} must be below the image size {self.img_size}.")
        if augment.alternating_flip and augment.horizontal_flip:
            raise UserError("augment.alternating_flip goes without augment.horizontal_flip: set that to 0.")

    def resized(self, img_size: int | list[int]) -> TrainTransform:
        """The same for images that are at most as large."""
        small = TrainTransform(self.augment, Preprocess(**self.preprocess.to_dict() | {"img_size": img_size}))
        if any(a > b for a, b in zip(small.img_size, self.img_size, strict=True)):
            largest = f"larger than model.img_size {list(self.img_size)}"
            raise UserError(f"augment.progressive_resize.img_size = {img_size} is {largest}.")
        return small

    def pixels(
        self, image: np.ndarray, rng: np.random.Generator, flipped: bool = False
    ) -> tuple[np.ndarray, Erased | None]:
        """uint8 [*img_size, 3], and what `assemble` erases; `flipped`: it is the turn of `augment.alternating_flip`."""
        augment = self.augment
        height, width = self.img_size
        if crop := augment.random_resized_crop:
            top, left, rows, cols = crop_box(image.shape[:2], crop.scale, crop.ratio, rng)
            image = image[top : top + rows, left : left + cols]
        enlarged = image.shape[0] * image.shape[1] < height * width
        if self.jitter and enlarged:
            image = color_jitter(image, self.jitter, rng)
        image = resize_image(image, self.img_size, self.preprocess.interpolation)
        if augment.pad_crop:
            image = pad_crop(image, augment.pad_crop, rng)
        if self.jitter and not enlarged:
            image = color_jitter(image, self.jitter, rng)
        flip, turn, down, right, erase = rng.random(5)
        flip = flipped or flip < augment.horizontal_flip
        if augment.rotation or augment.translate:
            shift = tuple(round(augment.translate * n * (2 * u - 1)) for n, u in ((height, down), (width, right)))
            image = warp(image, augment.rotation * (2 * turn - 1), shift, flip)
        elif flip:
            image = cv2.flip(image, 1)
        if augment.vertical_flip and rng.random() < augment.vertical_flip:
            image = cv2.flip(image, 0)
        if self.rand_augment:
            image = self.rand_augment(image, rng)
        box = erase_box(self.img_size, rng) if erase < augment.random_erasing else None
        if box is None:
            return image, None
        shape = (self.preprocess.in_chans, *box[2:])
        noise = rng.standard_normal(shape, np.float32) if augment.erasing_mode == "pixel" else np.zeros(shape, "f4")
        return image, (*box[:2], noise)

    def assemble(self, pixels: np.ndarray, erased: list[Erased | None]) -> np.ndarray:
        """A batch of what `pixels` made, in slots of this size or larger, to float32 [b, in_chans, *img_size]."""
        height, width = self.img_size
        images = self.preprocess.assemble(pixels[:, :height, :width])
        for image, box in zip(images, erased, strict=True):
            if box is not None:
                top, left, noise = box
                image[:, top : top + noise.shape[1], left : left + noise.shape[2]] = noise
        return images

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """uint8 [h, w, 3] of any size to float32 [in_chans, *img_size]."""
        pixels, erased = self.pixels(image, rng)
        return self.assemble(pixels[None], [erased])[0]
