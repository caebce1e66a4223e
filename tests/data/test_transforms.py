"""Transforms against Pillow, paddle.vision where it is equal by definition, and formulas written out in numpy."""

import colorsys
import json
import math
import subprocess
import sys

import cv2
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from ppattn.config import make_config
from ppattn.data import ImageError, Preprocess, TrainTransform, decode, mix, mix_draw, read_image, smooth_targets
from ppattn.data import randaugment as ra
from ppattn.data import transforms as T
from ppattn.errors import UserError
from ppattn.settings import Augment
from scripts.studies import corruptions
from tests.helpers.data_sets import numbered


def photo(rows=37, cols=53, seed=0):
    """A smooth colourful picture with some noise, uint8 [rows, cols, 3]."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (5, 7, 3)).astype(np.float32)
    smooth = cv2.resize(coarse, (cols, rows), interpolation=cv2.INTER_CUBIC) + rng.normal(0, 6, (rows, cols, 3))
    return smooth.clip(0, 255).astype(np.uint8)


def augment(**settings) -> Augment:
    return make_config({"augment": settings}).augment


def transform(size=(23, 31), interpolation="bicubic", **settings) -> TrainTransform:
    preprocess = Preprocess(size, (0.5, 0.4, 0.3), (0.2, 0.25, 0.3), interpolation=interpolation)
    return TrainTransform(augment(**settings), preprocess)


def pixels(tool: TrainTransform, image, seed):
    return tool.pixels(image, np.random.default_rng(seed))[0]


@pytest.mark.parametrize("rows,cols,keep", [(300, 411, False), (300, 411, True), (411, 300, True), (90, 70, True)])
def test_preprocess_equals_pillow_resize_and_centre_crop(rows, cols, keep):
    image = photo(rows, cols)
    long = round(256 / min(rows, cols) * max(rows, cols))  # PaddleX's ResizeByShort and Crop
    size = (256, 256) if not keep else (256, long) if rows < cols else (long, 256)
    whole = np.asarray(Image.fromarray(image).resize(size[::-1], Image.BICUBIC), np.float64)
    top, left = (size[0] - 224) // 2, (size[1] - 224) // 2
    cut = whole[top : top + 224, left : left + 224]
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    expected = ((cut / 255 - mean) / std).transpose(2, 0, 1)
    result = Preprocess(224, crop_ratio=0.875, crop_keep_aspect=keep)(image)
    assert result.shape == (3, 224, 224) and result.dtype == np.float32 and np.abs(result - expected).max() < 1e-6


def test_preprocess_is_data_and_batches_sizes_and_inverts():
    preprocess = Preprocess((15, 21), (0.5, 0.4, 0.3), (0.2, 0.25, 0.3), 0.9, True, "bilinear")
    again = Preprocess(**json.loads(json.dumps(preprocess.to_dict())))
    assert again == preprocess
    images = [photo(40, 30), photo(15, 21), photo(7, 90)]
    batch = again.batch(images)
    assert batch.shape == (3, 3, 15, 21)
    for image, row in zip(images, batch, strict=True):
        assert np.array_equal(row, preprocess(image))
        assert np.array_equal(preprocess.unnormalise(row), preprocess.pixels(image))


def test_preprocess_grey():
    preprocess, image = Preprocess((9, 11), (0.5, 0.4, 0.3), (0.2, 0.25, 0.3), in_chans=1), photo(9, 11)
    result, luma = preprocess(image), image @ np.array([0.299, 0.587, 0.114])
    assert result.shape == (1, 9, 11) and np.abs(result[0] - (luma / 255 - 0.4) / 0.25).max() < 0.6 / 255 / 0.25


@pytest.mark.parametrize(
    "settings", [{"img_size": (4,)}, {"img_size": 0}, {"crop_ratio": 0}, {"interpolation": "bicubc"}, {"in_chans": 2},
                 {"std": (1, 1, 0)}, {"mean": (1,)}, {"colour": 3}]
)  # fmt: skip
def test_preprocess_refuses(settings):
    with pytest.raises(UserError):
        Preprocess(**{"img_size": 8} | settings)


def test_read_applies_exif_orientation(tmp_path):
    image = np.zeros((20, 33, 3), np.uint8)
    image[:, :10] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # shown rotated clockwise by 90 degrees
    Image.fromarray(image).save(tmp_path / "turned.jpg", exif=exif)
    result = read_image(tmp_path / "turned.jpg")
    assert result.shape == (33, 20, 3) and result[2].mean() > 200 and result[-3].mean() < 50
    Image.fromarray(image[..., 0].astype(np.uint16)).save(tmp_path / "turned.png", exif=exif)
    assert np.array_equal(read_image(tmp_path / "turned.png", 255), np.rot90(image, -1))


@pytest.mark.parametrize("part", [0, 0.02, 0.5, 0.95, -2])
def test_truncated_images_are_refused(part):
    plain, thumbnail = (cv2.imencode(".jpg", image)[1].tobytes() for image in (photo(64, 80), photo(8, 8)))
    for data in (plain, plain[:2] + b"\xff\xe1" + (len(thumbnail) + 2).to_bytes(2, "big") + thumbnail + plain[2:]):
        assert decode(data, "x").shape == (64, 80, 3)
        cut = data[:part] if part < 0 else data[: int(len(data) * part)]
        with pytest.raises(ImageError, match="some.jpg"):
            decode(cut, "some.jpg")
    assert decode(plain + b"trailing bytes are harmless", "x").shape == (64, 80, 3)
    film = b"\xff\xd9 a film behind the image, in which a scan seems to begin \xff\xda\x00\x0c and never ends"
    assert decode(plain + film, "x").shape == (64, 80, 3)


def test_plain_transform_is_resize_and_normalise():
    image = photo()
    result = transform((37, 53))(image, np.random.default_rng(0))
    assert np.allclose(result.transpose(1, 2, 0), (image / 255 - [0.5, 0.4, 0.3]) / [0.2, 0.25, 0.3], atol=1e-6)


def test_a_side_that_shrinks_is_averaged_also_where_the_other_one_grows():
    image = photo(36, 53)
    shrunk = pixels(transform((12, 53), "bilinear"), image, 0)
    assert np.abs(shrunk - image.reshape(12, 3, 53, 3).mean(axis=1)).max() <= 0.51
    lines = np.zeros((600, 10, 3), np.uint8)
    lines[::2] = 254
    for name in ("bilinear", "bicubic", "area"):
        assert np.abs(T.resize_image(lines, (60, 20), name).astype(int) - 127).max() <= 1
        deep = np.dstack([image, image[::-1]])
        halves = [T.resize_image(np.ascontiguousarray(half), (25, 37), name) for half in (image, image[::-1])]
        assert np.array_equal(T.resize_image(deep, (25, 37), name), np.dstack(halves))


@pytest.mark.parametrize("factor", [0.0, 0.3, 1.0, 1.7])
def test_brightness_contrast_saturation(factor):
    image = photo()
    luma = image @ np.array([0.299, 0.587, 0.114])
    for which, middle in enumerate((0, luma.mean(), luma[..., None])):
        expected = (middle + factor * (image - middle)).clip(0, 255)
        assert np.abs(np.asarray(T.adjust(Image.fromarray(image), which, factor)) - expected).max() <= 2


@pytest.mark.parametrize("shift", [-0.5, -0.1, 0.0, 0.25])
def test_hue(shift):
    image = photo()
    result = np.asarray(T.adjust(Image.fromarray(image), 3, shift)) / 255
    for pixel, changed in zip(image.reshape(-1, 3) / 255, result.reshape(-1, 3), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
        expected = colorsys.hsv_to_rgb((hue + shift) % 1, saturation, value)
        assert np.abs(changed - expected).max() <= 0.045  # 6 / 255 for the 8-bit hue, and its shift is rounded, too


def test_colour_jitter_draws_factors_in_range_and_orders_at_random(monkeypatch):
    calls = []
    monkeypatch.setattr(T, "adjust", lambda image, which, f: calls.append((int(which), f)) or image)
    rng = np.random.default_rng(0)
    for _ in range(300):
        T.color_jitter(photo(4, 4), [0.2, 1.5, 0.4, 0.1], rng)
    orders = {tuple(name for name, _ in calls[i : i + 4]) for i in range(0, len(calls), 4)}
    assert len(calls) == 1200 and len(orders) == 24
    for name, (low, high) in {0: (0.8, 1.2), 1: (0.0, 2.5), 2: (0.6, 1.4), 3: (-0.1, 0.1)}.items():
        values = np.array([f for n, f in calls if n == name])
        assert values.min() >= low and values.max() <= high
        assert abs(values.mean() - (low + high) / 2) < 0.06 * (high - low)
        assert values.std() == pytest.approx((high - low) / math.sqrt(12), rel=0.1)
    calls.clear()
    T.color_jitter(photo(4, 4), [0.0, 0.5, 0.0], rng)
    assert [name for name, _ in calls] == [1]


@pytest.mark.parametrize("size", [(200, 200), (37, 53), (200, 40), (1, 1), (3, 100)])
def test_crop_boxes(size):
    rng = np.random.default_rng(0)
    scale, ratio = (0.3, 0.5), (0.75, 4 / 3)
    areas = []
    for _ in range(500):
        top, left, height, width = T.crop_box(size, scale, ratio, rng)
        assert min(top, left) >= 0 and min(height, width) > 0 and top + height <= size[0] and left + width <= size[1]
        areas.append(height * width / (size[0] * size[1]))
    if size == (200, 200):  # every try fits
        assert 0.295 < min(areas) < 0.305 and 0.495 < max(areas) < 0.505
        assert np.mean(areas) == pytest.approx(0.4, abs=0.01)
    if size == (3, 100):  # no box of 30 % fits: the largest of an allowed aspect, in the middle
        assert (top, left, height, width) == (0, 48, 3, 4)


def test_random_resized_crop_shows_the_drawn_box():
    image = photo(60, 70)
    top, left, rows, cols = T.crop_box((60, 70), (0.2, 0.5), (0.75, 4 / 3), np.random.default_rng(9))
    expected = T.resize_image(image[top : top + rows, left : left + cols], (20, 20), "bilinear")
    tool = transform((20, 20), "bilinear", random_resized_crop={"scale": [0.2, 0.5]})
    assert np.array_equal(pixels(tool, image, 9), expected)


def test_flip_with_probability():
    image = photo(9, 7)
    tool, views = transform((9, 7), horizontal_flip=0.3), [image.tobytes(), image[:, ::-1].tobytes()]
    assert np.mean([views.index(pixels(tool, image, i).tobytes()) for i in range(400)]) == pytest.approx(0.3, abs=0.07)


def test_pad_crop_is_a_window_of_the_reflected_image():
    image, tool = photo(9, 7), transform((9, 7), pad_crop=3)
    padded = np.pad(image, ((3, 3), (3, 3), (0, 0)), mode="reflect")
    windows = {padded[y : y + 9, x : x + 7].tobytes() for y in range(7) for x in range(7)}
    assert {pixels(tool, image, i).tobytes() for i in range(600)} == windows


def test_warp_flips_shifts_and_rotates():
    image = photo(21, 21)
    assert np.array_equal(T.warp(image, 0, flip=True), image[:, ::-1])
    assert np.array_equal(T.warp(image, 90), np.rot90(image))
    shifted = np.zeros_like(image)
    shifted[2:, :-5] = image[:-2, 5:]
    assert np.array_equal(T.warp(image, 0, (2, -5)), shifted)
    image = photo(61, 75)
    for degrees, flip in ((13, False), (-20, True)):
        expected = np.asarray(Image.fromarray(image[:, ::-1] if flip else image).rotate(degrees, Image.NEAREST))
        assert (T.warp(image, degrees, flip=flip) != expected).any(2).mean() < 0.01  # a tie between two nearest pixels


def test_random_erasing():
    image, tool = photo(50, 70), transform((50, 70), random_erasing=0.25)
    noises = [box[2] for i in range(1200) if (box := tool.pixels(image, np.random.default_rng(i))[1])]
    rows, cols = np.array([noise.shape[1:] for noise in noises]).T
    areas, values = rows * cols / 3500, np.concatenate([noise.ravel() for noise in noises])
    assert len(areas) / 1200 == pytest.approx(0.25, abs=0.04)
    assert min(areas) > 0.015 and max(areas) < 0.35 and np.mean(areas) == pytest.approx(0.17, abs=0.02)
    assert min(rows / cols) > 0.25 and max(rows / cols) < 3.9
    assert values.mean() == pytest.approx(0, abs=0.02) and values.std() == pytest.approx(1, abs=0.02)
    plain = transform((50, 70))(image, np.random.default_rng(3))
    for mode in ("pixel", "const"):
        tool = transform((50, 70), random_erasing=1.0, erasing_mode=mode)
        top, left, noise = tool.pixels(image, np.random.default_rng(3))[1]
        expected = plain.copy()
        expected[:, top : top + noise.shape[1], left : left + noise.shape[2]] = noise if mode == "pixel" else 0
        assert np.array_equal(tool(image, np.random.default_rng(3)), expected)


@pytest.mark.parametrize(
    "settings",
    [{"pad_crop": 23}, {"rand_augment": "rand-x9"}, {"rand_augment": "augmix-m3"}, {"rand_augment": "rand-m"}],
)
def test_transform_refuses(settings):
    with pytest.raises(UserError, match=next(iter(settings))):
        transform(**settings)


LEVEL = 0.9
PILLOW_OPERATIONS = {
    "AutoContrast": lambda im, s: ImageOps.autocontrast(im),
    "Equalize": lambda im, s: ImageOps.equalize(im),
    "Invert": lambda im, s: ImageOps.invert(im),
    "Rotate": lambda im, s: im.rotate(s * 27, Image.BILINEAR, fillcolor=(10, 20, 30)),
    "PosterizeIncreasing": lambda im, s: ImageOps.posterize(im, 1),
    "SolarizeIncreasing": lambda im, s: ImageOps.solarize(im, 26),
    "SolarizeAdd": lambda im, s: im.point([min(255, i + 99) if i < 128 else i for i in range(256)] * 3),
    "ColorIncreasing": lambda im, s: ImageEnhance.Color(im).enhance(1 + s * 0.81),
    "ContrastIncreasing": lambda im, s: ImageEnhance.Contrast(im).enhance(1 + s * 0.81),
    "BrightnessIncreasing": lambda im, s: ImageEnhance.Brightness(im).enhance(1 + s * 0.81),
    "SharpnessIncreasing": lambda im, s: ImageEnhance.Sharpness(im).enhance(1 + s * 0.81),
    "ShearX": lambda im, s: shifted(im, (1, s * 0.27, 0, 0, 1, 0)),
    "ShearY": lambda im, s: shifted(im, (1, 0, 0, s * 0.27, 1, 0)),
    "TranslateXRel": lambda im, s: shifted(im, (1, 0, s * 0.405 * im.size[0], 0, 1, 0)),
    "TranslateYRel": lambda im, s: shifted(im, (1, 0, 0, 0, 1, s * 0.405 * im.size[1])),
}


def shifted(image, matrix):
    return image.transform(image.size, Image.AFFINE, matrix, Image.BILINEAR, fillcolor=(10, 20, 30))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", PILLOW_OPERATIONS)
def test_rand_augment_operations_equal_pillow(name, sign):
    image = Image.fromarray(photo(41, 57, seed=3))
    assert np.array_equal(ra.operate(image, name, LEVEL, sign, (10, 20, 30)), PILLOW_OPERATIONS[name](image, sign))


def test_rand_augment_arguments():
    image = Image.fromarray(photo(9, 7))

    def same(name, level, sign, expected):
        assert np.array_equal(ra.operate(image, name, level, sign, (0, 0, 0)), expected), (name, level)

    for level, bits in ((0, 4), (0.26, 3), (0.9, 1)):
        same("PosterizeIncreasing", level, 1, ImageOps.posterize(image, bits))
    for level, bits in ((0.5, 2), (1, 4)):
        same("Posterize", level, 1, ImageOps.posterize(image, bits))
    for name, level in (("PosterizeIncreasing", 1), ("Posterize", 0)):
        same(name, level, 1, np.zeros((9, 7, 3)))
    for level, threshold in ((0, 256), (0.5, 128), (1, 0)):
        same("SolarizeIncreasing", level, 1, ImageOps.solarize(image, threshold))
    same("Color", 0.5, 1, image)
    same("ContrastIncreasing", 1, -1, ImageEnhance.Contrast(image).enhance(0.1))
    same("TranslateXRel", 1, -1, image.transform((7, 9), Image.AFFINE, (1, 0, -0.45 * 7, 0, 1, 0), Image.BILINEAR))


def test_rand_augment_draws(monkeypatch):
    policy, calls = ra.RandAugment("rand-m9-n3-mstd0.5-inc1", (0, 0, 0)), []
    monkeypatch.setattr(ra, "operate", lambda image, *what: calls.append(what[:3]) or image)
    rng = np.random.default_rng(0)
    for _ in range(2000):
        policy(photo(3, 3), rng)
    names, levels, signs = zip(*calls, strict=True)
    assert len(calls) / 6000 == pytest.approx(0.5, abs=0.03) and set(names) == set(PILLOW_OPERATIONS)
    assert max(levels) == 1.0 and np.mean(levels) == pytest.approx(0.9, abs=0.01)
    below = np.array(levels)[np.array(levels) < 0.9]
    assert (0.9 - below).mean() == pytest.approx(0.05 * math.sqrt(2 / math.pi), rel=0.1)
    assert np.mean(signs) == pytest.approx(0, abs=0.06)
    plain = {name.removesuffix("Increasing") for name in PILLOW_OPERATIONS}
    assert set(ra.RandAugment("rand-m5", (0, 0, 0)).names) == plain


def batch(n=7):
    rng = np.random.default_rng(2)
    return rng.normal(size=(n, 3, 11, 17)).astype(np.float32), rng.integers(0, 5, n)


@pytest.mark.parametrize("seed", range(6))
def test_mixup_formula(seed):
    images, labels = batch()
    mixed, settings = images.copy(), augment(mixup=0.8)
    share, box = mix_draw((11, 17), settings, np.random.default_rng(seed))
    assert box is None and 0 < share < 1
    targets = mix(mixed, smooth_targets(labels, 5, 0.1), settings, np.random.default_rng(seed))
    assert np.allclose(mixed, share * images + (1 - share) * images[::-1], atol=1e-6)
    one_hot = np.eye(5)[labels] * 0.9 + 0.02
    assert np.allclose(targets, share * one_hot + (1 - share) * one_hot[::-1], atol=1e-6)
    assert np.allclose(targets.sum(1), 1) and targets.dtype == np.float32


@pytest.mark.parametrize("seed", range(12))
def test_cutmix_pastes_a_box_and_counts_its_pixels(seed):
    images, labels = batch()
    mixed = images.copy()
    targets = mix(mixed, smooth_targets(labels, 5), augment(cutmix=1.0), np.random.default_rng(seed))
    pasted = (mixed != images).any(axis=(0, 1))  # the middle image of an odd batch meets itself
    share = 1 - pasted.mean()
    assert np.array_equal(mixed, np.where(pasted, images[::-1], images))
    if pasted.any():
        rows, cols = np.flatnonzero(pasted.any(1)), np.flatnonzero(pasted.any(0))
        assert pasted[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1].all()
    one_hot = np.eye(5)[labels]
    assert np.allclose(targets, share * one_hot + (1 - share) * one_hot[::-1], atol=1e-6)


def test_mix_probabilities_and_shares():
    rng, settings = np.random.default_rng(0), augment(mixup=0.8, cutmix=1.0, mix_prob=0.7, mix_switch_prob=0.4)
    draws = [mix_draw((32, 32), settings, rng) for _ in range(4000)]
    cut = [(share, *box) for share, box in draws if box is not None]
    up = [share for share, box in draws if box is None and share < 1]
    assert len(cut) / 4000 == pytest.approx(0.28, abs=0.02) and len(up) / 4000 == pytest.approx(0.42, abs=0.02)
    assert np.var(up) == pytest.approx(1 / (4 * (2 * 0.8 + 1)), rel=0.08)  # of Beta(a, a)
    for share, top, bottom, left, right in cut:
        assert 0 <= top <= bottom <= 32 and 0 <= left <= right <= 32
        assert share == 1 - (bottom - top) * (right - left) / 1024
    untouched, labels = batch()
    targets = mix(untouched, smooth_targets(labels, 5), augment(), rng)
    assert np.array_equal(untouched, batch()[0]) and np.array_equal(targets, np.eye(5)[labels])


def test_import_needs_no_paddle_and_changes_nothing():
    code = (
        "import cv2, sys, warnings, random, numpy as np;"
        "before = cv2.getNumThreads(), random.getstate(), np.random.get_state()[1].tolist(), list(warnings.filters);"
        "import ppattn.data, ppattn.data.shards, ppattn.data.check;"
        "after = cv2.getNumThreads(), random.getstate(), np.random.get_state()[1].tolist(), list(warnings.filters);"
        "assert before == after; assert 'paddle' not in sys.modules and 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_corruptions_have_the_stated_strength():
    rng, grey = np.random.default_rng(3), np.full((64, 65, 3), 128, np.uint8)
    assert corruptions.gaussian_noise(grey, 20, rng).std() == pytest.approx(20, rel=0.03)
    assert (corruptions.impulse_noise(grey, 0.1, rng) != 128).all(axis=2).mean() == pytest.approx(0.1, abs=0.02)
    image = rng.integers(0, 256, (9, 7, 3)).astype(np.uint8)
    assert np.array_equal(corruptions.darkness(image, 0.4, rng), np.rint(image * 0.4))
    weak = corruptions.contrast(image, 0.2, rng)
    assert np.abs(weak.mean(axis=(0, 1)) - image.mean(axis=(0, 1))).max() < 0.5
    assert weak.std(axis=(0, 1)) == pytest.approx(0.2 * image.std(axis=(0, 1)), rel=0.05)


@pytest.mark.parametrize("name", corruptions.CORRUPTIONS)
def test_every_corruption_grows_with_its_strength_and_repeats(name):
    split, count = numbered(20, size=32), 20
    split.images = np.stack([cv2.GaussianBlur(image, (0, 0), 2) for image in split.images])
    errors = []
    for strength in range(3):
        part = corruptions.Corrupted(split, count, name, strength)
        assert len(part) == count and np.array_equal(part.image(1), part.image(1))
        errors.append(float(np.mean([(part.image(i).astype(float) - split.image(i)) ** 2 for i in range(count)])))
    assert 0 < errors[0] < errors[1] < errors[2]
