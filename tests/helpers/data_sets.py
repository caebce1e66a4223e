"""Small data sets for the tests."""

import io
import os
import pickle
import tarfile
from itertools import product
from zlib import crc32

import cv2
import numpy as np
import pytest

from ppattn.config import make_config
from ppattn.data import build_datasets
from ppattn.data.splits import ArraySplit
from ppattn.errors import UserError


class Evil:
    """Its pickle makes a folder `executed` in the current one when it is read as others read pickles."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


def config(name="folder", root=None, augment=None, **data):
    data |= {"name": name, "root": root and str(root)}
    return make_config({"data": data, "augment": augment or {}})


def build(name, root=None, **data):
    return build_datasets(config(name, root, **data))


def build_refused(match, name, root=None, **data):
    with pytest.raises(UserError, match=match):
        build(name, root, **data)


def write_image(path, seed, shape=(11, 9, 3)):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)
    cv2.imwrite(str(path), image[..., ::-1])
    return image


def fill(root, parts, classes=("cat", "dog"), images=4, shape=(11, 9, 3)):
    """Class folders of images in root / part, each image another noise."""
    for part, (k, name), i in product(parts, enumerate(classes), range(images)):
        write_image(root / part / name / f"{i}.png", [crc32(part.encode()), k, i], shape)


def numbered(n, size=6):
    """n images that carry their own index in their first pixel, labels index % 7."""
    images = np.random.default_rng(0).integers(0, 256, (n, size, size, 3)).astype(np.uint8)
    images[:, 0, 0, 0], images[:, 0, 0, 1] = np.arange(n) % 256, np.arange(n) // 256
    return ArraySplit(images, np.arange(n) % 7, "numbered")


def cifar_files(kind=10, protocol=2):
    """The files of a CIFAR archive with 4 images each, and the images and labels in order."""
    rng = np.random.default_rng(kind)
    label, names = (b"labels", b"label_names") if kind == 10 else (b"fine_labels", b"fine_label_names")
    members = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"] if kind == 10 else ["train", "test"]
    files, images, labels = {}, [], []
    for member in members:
        data, targets = rng.integers(0, 256, (4, 3072)).astype(np.uint8), rng.integers(0, 3, 4).tolist()
        files[member] = pickle.dumps({b"data": data, label: targets, b"filenames": [b"x"]}, protocol)
        images.append(data.reshape(4, 3, 32, 32).transpose(0, 2, 3, 1))
        labels += targets
    files["batches.meta" if kind == 10 else "meta"] = pickle.dumps({names: [b"ant", b"bee", b"cat"]}, protocol)
    return files, np.concatenate(images), labels


def cifar_archive(path, files, folder="cifar-10-batches-py", mode="w:gz"):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path
