"""Write four small data sets, as they come from cameras and annotators: `python examples/own_data.py DIR`.

`rare/`: one class with 95 % of the images; `several/`: two digits in a picture, hence several labels; `deep/`: grey
TIFF of 12 bits; `channels/`: NumPy files of four channels. All are made of scikit-learn's handwritten digits.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def main(root: Path) -> None:
    digits = load_digits()
    images, labels = digits.images / 16, digits.target
    split = np.where(np.arange(len(labels)) < 1400, "Training", "Test")
    eights, others = np.flatnonzero(labels == 8), np.flatnonzero(labels != 8)
    lists: dict[str, list[str]] = {"Training": [], "Test": []}

    def place(*parts: str) -> Path:
        path = root.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    for i in [*eights[::2], *others]:
        name = "eight" if labels[i] == 8 else "other"
        Image.fromarray((255 * images[i]).astype(np.uint8)).save(place("rare", split[i], name, f"{i}.png"))
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        deep = Image.fromarray((4095 * image).astype(np.uint16))
        deep.save(place("deep", split[i], NAMES[label], f"{i}.tif"))
        bands = np.stack([image, image.T, image[::-1], image**2], axis=-1)
        np.save(place("channels", split[i], NAMES[label], f"{i}.npy"), (255 * bands).astype(np.uint8))
        other = (i * 7 + 3) % 1400 if split[i] == "Training" else 1400 + (i * 7 + 3) % (len(labels) - 1400)
        pair = np.concatenate([image, images[other]], axis=1)
        Image.fromarray((255 * pair).astype(np.uint8)).save(place("several", "images", f"{i}.png"))
        names = sorted({NAMES[label], NAMES[labels[other]]})
        lists[split[i]].append(f"images/{i}.png\t{','.join(names)}\n")
    for part, lines in lists.items():
        place("several", f"{part.lower()}_list.txt").write_text("".join(lines))


if __name__ == "__main__":
    main(Path(*sys.argv[1:] or ["data/own"]))
