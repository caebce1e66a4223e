"""Writes digit scenes: handwritten digits on crops of photographs, with exact masks and boxes.

    python examples/digit_scenes.py --output data/digit_scenes

Everything comes from scikit-learn: its 1,797 digits of 8 x 8 pixels (1,437 for training, 360 for validation, as in
`ppattn.data`) and its photographs china.jpg (by danielbuechele, flickr.com/photos/danielbuechele) and flower.jpg (by
vultilion, flickr.com/photos/vultilion), both CC BY 2.0. Training scenes take their backgrounds from the left 60 % of
a photograph, validation scenes from the rest. The same arguments write the same files.

    images/train_00000.png    the scene
    masks/train_00000.png     0: background, 1 + d: digit d                      (PaddleSeg)
    train.txt                 a line per scene: image and mask                   (PaddleSeg)
    annotations/train.json    boxes, categories 1 + d                            (COCO)

and the same for `val` (scenes of `--size` pixels) and `val_2x` (twice as high and wide, four times as many digits).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import cv2
import numpy as np
from sklearn.datasets import load_sample_images

from ppattn.data.sources import digits

MARGIN = 2  # pixels that stay free around every digit
CONTRAST = 70  # least difference between the grey of a digit and of what it covers


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("data/digit_scenes"))
    parser.add_argument("--size", type=int, default=64, help="height and width in pixels, 48 to 128")
    parser.add_argument("--train", type=int, default=2000, help="number of training scenes")
    parser.add_argument("--val", type=int, default=200, help="number of validation scenes of each size")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if not 48 <= args.size <= 128 or min(args.train, args.val) < 1:
        parser.error("--size must be 48 to 128, --train and --val at least 1")
    splits = digits()
    write(args.output, "train", splits.train, args.train, args.size, args.seed)
    write(args.output, "val", splits.val, args.val, args.size, args.seed + 1)
    write(args.output, "val_2x", splits.val, args.val, 2 * args.size, args.seed + 2)
    print(f"{args.train} + {args.val} + {args.val} digit scenes are in {args.output}.")


def write(folder: Path, name: str, source, count: int, size: int, seed: int) -> None:
    """Writes `count` scenes of size x size pixels with digits of `source`, a split of `ppattn.data`."""
    for part in ("images", "masks", "annotations"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    photographs = [cut(photograph, name) for photograph in load_sample_images().images]
    coco = {
        "images": [],
        "annotations": [],
        "categories": [{"id": 1 + digit, "name": str(digit)} for digit in range(10)],
    }
    lines = []
    for i in range(count):
        image, mask, boxes = scene(rng, source, photographs, size)
        stem = f"{name}_{i:05}.png"
        cv2.imwrite(str(folder / "images" / stem), image[..., ::-1])
        cv2.imwrite(str(folder / "masks" / stem), mask)
        lines.append(f"images/{stem} masks/{stem}\n")
        coco["images"].append({"id": i + 1, "file_name": stem, "height": size, "width": size})
        for category, box, area in boxes:
            coco["annotations"].append(
                {
                    "id": len(coco["annotations"]) + 1,
                    "image_id": i + 1,
                    "category_id": category,
                    "bbox": box,
                    "area": area,
                    "iscrowd": 0,
                }
            )
    (folder / f"{name}.txt").write_text("".join(lines))
    (folder / "annotations" / f"{name}.json").write_text(json.dumps(coco))


def cut(photograph: np.ndarray, name: str) -> np.ndarray:
    """The part of a photograph [H, W, 3] that the scenes called `name` may show."""
    border = photograph.shape[1] * 6 // 10
    return photograph[:, :border] if name == "train" else photograph[:, border:]


def scene(rng: np.random.Generator, source, photographs: list[np.ndarray], size: int):
    """One scene: image [size, size, 3] uint8 RGB, mask [size, size] uint8, list of (category, [x, y, w, h], area).

    Digits are enlarged 2 to 3 times and do not overlap. A box is the smallest that holds the digit's pixels in the
    mask; its area is their number.
    """
    image = background(rng, photographs[rng.integers(len(photographs))], size).astype("float32")
    mask, boxes = np.zeros((size, size), np.uint8), []
    most = 4 * size**2 // 64**2
    for _ in range(rng.integers(most // 2, most + 1)):
        i = int(rng.integers(len(source)))
        side = int(rng.integers(16, 25))
        opacity = cv2.resize(source.image(i)[..., 0], (side, side), interpolation=cv2.INTER_LINEAR) / np.float32(255)
        digit = opacity > 0.3
        for _ in range(20):
            y, x = rng.integers(0, size - side + 1, 2)
            window = slice(y, y + side), slice(x, x + side)
            around = mask[max(0, y - MARGIN) : y + side + MARGIN, max(0, x - MARGIN) : x + side + MARGIN]
            if not around.any():
                break
        else:
            continue
        ink = colour(rng, image[window][digit].mean())
        image[window] += opacity[..., None] * (ink - image[window])
        category = 1 + source.label(i)
        mask[window][digit] = category
        left, top, width, height = cv2.boundingRect(digit.astype(np.uint8))
        boxes.append((category, [int(x) + left, int(y) + top, width, height], int(digit.sum())))
    return image.round().astype(np.uint8), mask, boxes


def background(rng: np.random.Generator, photograph: np.ndarray, size: int) -> np.ndarray:
    """A crop of size x size pixels, half of them mirrored."""
    y, x = (rng.integers(0, side - size + 1) for side in photograph.shape[:2])
    crop = photograph[y : y + size, x : x + size]
    return crop[:, ::-1] if rng.random() < 0.5 else crop


def colour(rng: np.random.Generator, grey: float) -> np.ndarray:
    """A random RGB colour whose mean differs from `grey` by at least `CONTRAST`."""
    while True:
        ink = rng.integers(0, 256, 3).astype("float32")
        if abs(ink.mean() - grey) >= CONTRAST:
            return ink


if __name__ == "__main__":
    main()
