"""Sources, loaders and the check verb: what is read, in which order, and what happens when it cannot be read."""

import functools
import hashlib
import http.server
import io
import json
import logging
import os
import pickle
import signal
import struct
import subprocess
import sys
import tarfile
import threading
import time
import zlib
from pathlib import Path

import cv2
import numpy as np
import pytest

from ppattn.cli import main
from ppattn.cli.export import _real_images
from ppattn.config import make_config
from ppattn.data import (
    ImageError,
    Preprocess,
    TrainTransform,
    WorkerDied,
    build_datasets,
    decode,
    eval_loader,
    sources,
    train_loader,
)
from ppattn.data.loader import sample_rng
from ppattn.data.shards import ShardSplit, samples, write_shards
from ppattn.data.sources import ArraySplit, FileSplit
from ppattn.errors import UserError

ROOT = Path(__file__).resolve().parents[1]


def config(name="folder", root=None, augment=None, **data):
    data |= {"name": name, "root": root and str(root)}
    return make_config({"data": data, "augment": augment or {}})


def write_image(path, seed, shape=(11, 9, 3)):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)
    cv2.imwrite(str(path), image[..., ::-1])
    return image


@pytest.fixture
def folder(tmp_path):
    """train/{ant,bee,cat} and val/{ant,bee,cat} with 5 and 3 PNG images each, of odd sizes."""
    root = tmp_path / "photos"
    for part, count in (("train", 5), ("val", 3)):
        for c, name in enumerate(("ant", "bee", "cat")):
            for i in range(count):
                write_image(root / part / name / f"{i}.png", [part == "val", c, i], (11 + i, 9 + c, 3))
    return root


def numbered(n, size=6):
    """n images that carry their own index in their first pixel, labels index % 7."""
    images = np.random.default_rng(0).integers(0, 256, (n, size, size, 3)).astype(np.uint8)
    images[:, 0, 0, 0], images[:, 0, 0, 1] = np.arange(n) % 256, np.arange(n) // 256
    return ArraySplit(images, np.arange(n) % 7, "numbered")


def plain(size=(6, 6)):
    """No augmentation and no scaling: 0..255 becomes 0..1."""
    return TrainTransform(make_config({}).augment, size, (0, 0, 0), (1, 1, 1))


def indices(images):
    values = np.rint(images[:, :2, 0, 0] * 255).astype(int)
    return (values[:, 0] + 256 * values[:, 1]).tolist()


def same(first, second):
    assert len(first) == len(second)
    assert all(all(np.array_equal(a, b) for a, b in zip(x, y, strict=True)) for x, y in zip(first, second, strict=True))


# digits and CIFAR


def test_digits():
    splits = build_datasets(config("digits"))
    assert (len(splits.train), len(splits.val)) == (1437, 360)
    assert splits.classes == list("0123456789")
    assert min(np.bincount(splits.val.labels)) >= 35
    image = splits.train.image(0)
    assert image.shape == (8, 8, 3) and image.dtype == np.uint8
    values = np.concatenate([splits.train.images, splits.val.images]) / 255
    assert values.max() == 1 and values.mean() == pytest.approx(splits.mean[0], abs=2e-3)
    assert values.std() == pytest.approx(splits.std[0], abs=2e-3)
    everything = {image.tobytes() for image in splits.train.images} & {image.tobytes() for image in splits.val.images}
    assert not everything
    assert config("digits", mean=[0, 0, 0.1]).data.mean == build_datasets(config("digits", mean=[0, 0, 0.1])).mean


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
    meta = "batches.meta" if kind == 10 else "meta"
    files[meta] = pickle.dumps({names: [b"ant", b"bee", b"cat"]}, protocol)
    return files, np.concatenate(images), labels


def cifar_archive(path, files, folder="cifar-10-batches-py", mode="w:gz"):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("where", ["archive", "folder of archive", "extracted", "folder of extracted"])
def test_cifar10_places(tmp_path, where, protocol):
    files, images, labels = cifar_files(protocol=protocol)
    archive = cifar_archive(tmp_path / "a" / "cifar-10-python.tar.gz", files)
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "b", filter="data")
    root = {
        "archive": archive,
        "folder of archive": archive.parent,
        "extracted": tmp_path / "b" / "cifar-10-batches-py",
        "folder of extracted": tmp_path / "b",
    }[where]
    splits = build_datasets(config("cifar10", root, download=False))
    assert splits.classes == ["ant", "bee", "cat"]
    assert np.array_equal(np.concatenate([splits.train.images, splits.val.images]), images)
    assert [*splits.train.labels, *splits.val.labels] == labels
    assert len(splits.train) == 20 and len(splits.val) == 4


def test_cifar100(tmp_path):
    files, images, labels = cifar_files(100)
    cifar_archive(tmp_path / "cifar-100-python.tar.gz", files, "cifar-100-python")
    splits = build_datasets(config("cifar100", tmp_path))
    assert np.array_equal(splits.val.images, images[4:]) and splits.train.labels.tolist() == labels[:4]


class Evil:
    def __reduce__(self):
        return os.mkdir, (str(Evil.target),)


def test_cifar_pickle_runs_no_code(tmp_path):
    files, _, _ = cifar_files()
    Evil.target = tmp_path / "executed"
    files["data_batch_3"] = pickle.dumps({b"data": Evil()}, 2)
    archive = cifar_archive(tmp_path / "cifar-10-python.tar.gz", files)
    with pytest.raises(UserError, match="data_batch_3.*mkdir"):
        build_datasets(config("cifar10", archive))
    assert not Evil.target.exists()


def test_cifar_damage_is_one_sentence(tmp_path):
    files, _, _ = cifar_files()
    whole = cifar_archive(tmp_path / "cifar-10-python.tar.gz", files).read_bytes()

    def refused(match, **changes):
        with pytest.raises(UserError, match=match):
            build_datasets(config("cifar10", **{"root": tmp_path, "download": False} | changes))

    for size in (0, 100, len(whole) // 2, len(whole) - 5000):
        (tmp_path / "cifar-10-python.tar.gz").write_bytes(whole[:size])
        refused("not a complete|damaged|not found")
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"<html>not found</html>")
    refused("not a complete tar archive")
    for name, data, match in (
        ("data_batch_2", None, "data_batch_2 not found"),
        ("data_batch_2", pickle.dumps([1]), "holds a list"),
        ("data_batch_2", files["data_batch_2"][:-50], "damaged"),
        (
            "data_batch_2",
            pickle.dumps({b"data": np.zeros((4, 3072), np.float32), b"labels": [0] * 4}, 2),
            "3,072 bytes",
        ),
        ("batches.meta", pickle.dumps({}, 2), "label_names"),
    ):
        changed = {k: v for k, v in (files | {name: data}).items() if v is not None}
        cifar_archive(tmp_path / "cifar-10-python.tar.gz", changed)
        refused(match)
    refused("put cifar-10-python.tar.gz", root=tmp_path / "nowhere")


@pytest.fixture
def server(tmp_path):
    """An HTTP server for tmp_path/www; yields its address and that folder."""
    www = tmp_path / "www"
    www.mkdir()
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(www))
    handler.log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}/", www
        httpd.shutdown()
        thread.join()


def test_download(tmp_path, server, monkeypatch, capsys):
    address, www = server
    files, images, _ = cifar_files()
    archive = cifar_archive(www / "cifar-10-python.tar.gz", files)
    good = hashlib.md5(archive.read_bytes()).hexdigest()
    kind = sources._CIFAR["cifar10"]
    monkeypatch.setitem(sources._CIFAR, "cifar10", type(kind)(**vars(kind) | {"md5": good}))
    monkeypatch.setattr(sources, "_CIFAR_HOSTS", ("http://127.0.0.1:9/", address))
    splits = build_datasets(config("cifar10", tmp_path / "new" / "place"))
    assert np.array_equal(splits.train.images, images[:20])
    assert "CIFAR-10" in capsys.readouterr().err  # the progress bar
    assert sorted(p.name for p in (tmp_path / "new" / "place").iterdir()) == ["cifar-10-python.tar.gz"]
    archive.write_bytes(b"something else")
    with pytest.raises(UserError, match="wrong checksum.*Put cifar-10-python.tar.gz there"):
        build_datasets(config("cifar10", tmp_path / "other"))
    assert not list((tmp_path / "other").iterdir())


# folders and lists


def test_folder(folder):
    splits = build_datasets(config("folder", folder))
    assert splits.classes == ["ant", "bee", "cat"]
    assert splits.train.labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert splits.val.name(4).endswith("val/bee/1.png")
    assert splits.val.image(4).shape == (12, 10, 3)
    expected = np.random.default_rng([1, 1, 1]).integers(0, 256, (12, 10, 3))
    assert np.array_equal(splits.val.image(4), expected)
    os.rename(folder / "val", folder / "test")
    assert len(build_datasets(config("folder", folder)).val) == 9
    swapped = build_datasets(config("folder", folder, train="test", val="train"))
    assert (len(swapped.train), len(swapped.val)) == (9, 15)


def test_imagenet_with_one_split_serves_twice_and_says_so(folder, caplog):
    import shutil

    shutil.rmtree(folder / "train")
    for root in (folder, folder / "val"):
        caplog.clear()
        splits = build_datasets(config("imagenet", root))
        assert len(splits.train) == len(splits.val) == 9
        assert "serve as both" in caplog.text
    with pytest.raises(UserError, match="train/ is not there"):
        build_datasets(config("folder", folder))


def test_imagenet_without_val_is_refused(folder, caplog):
    """It would choose the best checkpoint on training images."""
    os.rename(folder / "val", folder / "held_out")
    with pytest.raises(UserError, match="val/ is not there"):
        build_datasets(config("imagenet", folder))
    splits = build_datasets(config("imagenet", folder, val="held_out"))
    assert (len(splits.train), len(splits.val)) == (15, 9) and not caplog.text


def test_folder_mistakes(folder, tmp_path):
    def refused(match, root=folder, **data):
        with pytest.raises(UserError, match=match):
            build_datasets(config("folder", root, **data))

    refused("not a folder", root=tmp_path / "nowhere")
    refused("data.val = 'vall'", val="vall")
    write_image(folder / "val" / "dog" / "0.png", 0)
    refused("dog")
    (tmp_path / "empty" / "train" / "ant").mkdir(parents=True)
    (tmp_path / "empty" / "val").mkdir()
    refused("holds no images", root=tmp_path / "empty")
    (tmp_path / "flat").mkdir()
    write_image(tmp_path / "flat" / "train" / "0.png", 0)
    (tmp_path / "flat" / "val").mkdir()
    refused("no class folders", root=tmp_path / "flat")


def test_list_files(folder):
    (folder / "train_list.txt").write_text("train/ant/0.png 0\ntrain/cat/3.png\t2\n\n")
    (folder / "val_list.txt").write_text("val/bee/1.png 1\n")
    splits = build_datasets(config("list", folder))
    assert splits.classes == ["0", "1", "2"] and splits.train.labels.tolist() == [0, 2]
    assert splits.train.image(1).shape == (14, 11, 3)
    (folder / "classes.txt").write_text("0 ant\n1 bee\n2 tabby cat\n")
    assert build_datasets(config("list", folder)).classes == ["ant", "bee", "tabby cat"]
    (folder / "named.txt").write_text("train/ant/0.png tabby\nval/a photo.png puma\n")
    (folder / "classes.txt").unlink()
    splits = build_datasets(config("list", folder, train="named.txt", val="named.txt"))
    assert splits.classes == ["puma", "tabby"] and splits.val.paths[1] == "val/a photo.png"


@pytest.mark.parametrize(
    "text,match",
    [("train/ant/0.png\n", "train_list.txt:1"), ("", "empty"), ("a.png 5\n", "label 5, but there are 2 class names"),
     ("a.png puma\n", "puma")],
)  # fmt: skip
def test_list_mistakes(folder, text, match):
    (folder / "train_list.txt").write_text(text)
    (folder / "val_list.txt").write_text("val/bee/1.png 1\n")
    (folder / "classes.txt").write_text("ant\nbee\n")
    with pytest.raises(UserError, match=match):
        build_datasets(config("list", folder))


# shards


@pytest.fixture
def shards(tmp_path):
    """61 images in shards of 8 (the last has 5), image i's shard order known; as a split and its images by name."""
    root = tmp_path / "files"
    images = [write_image(root / f"{i}.png", i, (6, 6, 3)) for i in range(61)]
    split = FileSplit(root, [f"{i}.png" for i in range(61)], np.arange(61) % 7)
    for part in ("train", "val"):
        write_shards(split, tmp_path / "shards", part, per_shard=8, seed=part == "val")
    return tmp_path / "shards", images


def test_shards_hold_every_image_byte_for_byte(shards):
    root, images = shards
    splits = build_datasets(config("shards", root))
    assert isinstance(splits.train, ShardSplit) and len(splits.train) == 61 and len(splits.train.paths) == 8
    seen = {splits.train.image(i).tobytes(): splits.train.label(i) for i in range(61)}
    assert seen == {image.tobytes(): i % 7 for i, image in enumerate(images)}
    names = []
    for path in splits.train.paths:
        with tarfile.open(path) as tar:
            names += tar.getnames()
    assert len(names) == 122 and all(name.endswith((".png", ".cls")) for name in names)


def test_an_index_that_cannot_be_written_is_done_without(shards, monkeypatch):
    def full(self, target):
        raise OSError(28, "No space left on device", str(target))

    root, _ = shards
    (root / "shards.json").unlink()
    monkeypatch.setattr(Path, "replace", full)
    assert len(build_datasets(config("shards", root)).train) == 61
    assert {path.suffix for path in root.iterdir()} == {".tar"}


def test_foreign_shards_are_indexed_once(shards, monkeypatch):
    root, _ = shards
    known = build_datasets(config("shards", root))
    (root / "shards.json").unlink()
    again = build_datasets(config("shards", root, train="train-{000000..000007}.tar", val="val-*.tar"))
    assert again.train.labels.tolist() == known.train.labels.tolist()
    monkeypatch.setattr("ppattn.data.shards.samples", None)  # from now on the index is enough
    assert len(build_datasets(config("shards", root)).train) == 61


def shard_epoch(root, workers=0, epoch=2, start=0, rank=0, world=1, buffer=12, repeats=1):
    settings = config("shards", root, {"repeats": repeats}, batch_size=5, num_workers=workers, shuffle_buffer=buffer)
    loader = train_loader(build_datasets(settings).train, plain(), settings, epoch, start, rank, world)
    return list(loader)


def test_shards_shuffle_resume_and_split(shards):
    root, images = shards
    whole = shard_epoch(root)
    assert len(whole) == 12
    seen = [image.tobytes() for batch, _ in whole for image in np.rint(batch * 255).astype(np.uint8)]
    known = {image.transpose(2, 0, 1).tobytes(): i for i, image in enumerate(images)}
    order = [known[image] for image in seen]
    assert len(set(order)) == 60
    assert [i % 7 for i in order] == [label for _, labels in whole for label in labels.tolist()]
    same(shard_epoch(root, workers=2), whole)
    for start in (1, 7, 11):
        same(shard_epoch(root, start=start), whole[start:])
    same(shard_epoch(root, workers=3, start=4), whole[4:])
    assert not np.array_equal(shard_epoch(root, epoch=3)[0][1], whole[0][1])
    parts = [shard_epoch(root, rank=rank, world=2) for rank in (0, 1)]
    assert [len(part) for part in parts] == [6, 6]
    both = [image.tobytes() for part in parts for batch, _ in part for image in batch]
    assert len(set(both)) == 60
    twice = [label for _, labels in shard_epoch(root, repeats=2) for label in labels.tolist()]
    assert len(twice) == 60 and twice[::2] == twice[1::2]


def test_shards_are_read_in_sequence_and_only_where_needed(shards, monkeypatch):
    root, _ = shards
    opened = []
    monkeypatch.setattr("ppattn.data.shards.samples", lambda path: opened.append(path) or samples(path))
    shard_epoch(root, buffer=4)
    assert len(opened) == len(set(opened)) == 8
    opened.clear()
    shard_epoch(root, buffer=4, start=10)
    assert len(opened) <= 3


def test_shard_evaluation_counts_each_image_once(shards):
    root, _ = shards
    split = build_datasets(config("shards", root)).val
    seen = []
    for rank in range(3):
        for _, labels, found in eval_loader(split, Preprocess(6), 4, rank, 3, num_workers=rank):
            assert np.array_equal(labels, split.labels[found])
            seen += found.tolist()
    assert sorted(seen) == list(range(61))


def test_shard_mistakes(shards, tmp_path):
    root, _ = shards
    with pytest.raises(UserError, match="No shards"):
        build_datasets(config("shards", tmp_path))
    with pytest.raises(UserError, match="train-000008.tar is missing"):
        build_datasets(config("shards", root, train="train-{000000..000008}.tar"))
    with pytest.raises(UserError, match="already has shards"):
        write_shards(FileSplit(tmp_path / "files", ["0.png"], np.array([0])), root, "train")
    path = root / "train-000003.tar"
    data = path.read_bytes()
    for content in (data[: len(data) // 2], data[:1024], data[:700], b"x" * 3000, b""):
        path.write_bytes(content)
        with pytest.raises(UserError, match="train-000003.tar is damaged"):
            build_datasets(config("shards", root))
    with tarfile.open(path, "w") as tar:
        tar.addfile(tarfile.TarInfo("lonely.png"))  # no .cls beside it
    with pytest.raises(UserError, match="lonely"):
        build_datasets(config("shards", root))


# loaders


AUGMENT = {"random_resized_crop": {}, "horizontal_flip": 0.5, "color_jitter": [0.2, 0.2, 0.2], "random_erasing": 0.3,
           "rand_augment": "rand-m9-mstd0.5-inc1", "rotation": 5.0}  # fmt: skip


def epoch(split, workers=0, epoch=1, start=0, rank=0, world=1, augment=None, batch=8, seed=42):
    settings = config("digits", None, augment, batch_size=batch, num_workers=workers)
    settings.train.seed = seed
    transform = TrainTransform(settings.augment, (13, 9), (0.5, 0.5, 0.5), (0.2, 0.2, 0.2)) if augment else plain()
    return train_loader(split, transform, settings, epoch, start, rank, world)


def test_content_does_not_depend_on_workers_or_on_where_an_epoch_starts():
    split = numbered(61)
    whole = list(epoch(split, augment=AUGMENT))
    assert len(whole) == len(epoch(split)) == 7
    assert whole[0][0].shape == (8, 3, 13, 9) and whole[0][0].dtype == np.float32 and whole[0][1].dtype == np.int64
    for workers in (1, 2, 3):
        same(list(epoch(split, workers, augment=AUGMENT)), whole)
    for start in (0, 3, 6, 7):
        same(list(epoch(split, start=start, augment=AUGMENT)), whole[start:])
    same(list(epoch(split, 2, start=5, augment=AUGMENT)), whole[5:])
    other = list(epoch(split, epoch=2, augment=AUGMENT))
    assert not np.array_equal(other[0][1], whole[0][1])
    assert not np.array_equal(list(epoch(split, augment=AUGMENT, seed=43))[0][1], whole[0][1])


def test_a_sample_is_a_function_of_seed_epoch_and_index():
    split = numbered(61)
    settings = make_config({"augment": AUGMENT}).augment
    transform = TrainTransform(settings, (13, 9), (0.5, 0.5, 0.5), (0.2, 0.2, 0.2))
    order = np.random.default_rng([42, 1]).permutation(61)
    images, labels = list(epoch(split, 2, augment=AUGMENT))[3]
    for k, index in enumerate(order[24:32]):
        assert labels[k] == index % 7
        assert np.array_equal(images[k], transform(split.image(index), sample_rng(42, 1, int(index), 0)))


def test_training_batches_of_all_ranks_make_the_single_process_batch():
    split = numbered(1003)
    single = [indices(images) for images, _ in epoch(split, batch=24)]
    ranks = [[indices(images) for images, _ in epoch(split, rank=r, world=3)] for r in range(3)]
    assert len(single) == 41
    for step, batch in enumerate(single):
        assert sorted(batch) == sorted(sum((rank[step] for rank in ranks), []))
    assert len(set(sum(single, []))) == 984


def test_repeated_augmentation():
    split, world = numbered(50), 3
    rows = {}
    for rank in range(world):
        loader = epoch(split, rank=rank, world=world, augment={"repeats": 3, "horizontal_flip": 0.5}, batch=4)
        loader.transform = TrainTransform(loader.transform.augment, (6, 6), (0, 0, 0), (1, 1, 1))
        assert len(loader) == 4  # as without repeats
        rows[rank] = loader.order.tolist()
    order = np.random.default_rng([42, 1]).permutation(50)
    dealt = [rows[k % world][k // world] for k in range(world * 16)]
    assert dealt == [[int(order[k // 3]), k % 3] for k in range(48)]  # the copies go to different processes


def test_evaluation_counts_each_of_1003_images_once_over_two_ranks():
    split = numbered(1003)
    preprocess = Preprocess((6, 6), (0, 0, 0), (1, 1, 1))
    for workers in (0, 2):
        seen = []
        for rank in range(2):
            loader = eval_loader(split, preprocess, 64, rank, 2, workers)
            batches = list(loader)
            assert len(batches) == len(loader)
            for images, labels, found in batches:
                assert indices(images) == found.tolist()
                assert np.array_equal(labels, found % 7)
                seen += found.tolist()
        assert len(seen) == 1003 and sorted(seen) == list(range(1003))
    assert list(eval_loader(numbered(1), preprocess, 4, rank=1, world=2)) == []


def test_too_few_images_for_a_step():
    with pytest.raises(UserError, match="7 training images do not fill one step of 1 x 8"):
        epoch(numbered(7))


@pytest.fixture
def damaged(folder):
    (folder / "train" / "bee" / "1.png").write_bytes(b"no image")
    (folder / "train" / "bee" / "2.png").write_bytes(b"")
    (folder / "val" / "cat" / "2.png").write_text("nothing")
    return build_datasets(config("folder", folder))


def test_an_image_of_impossible_size_is_named():
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 1_000_000, 1_000_000, 8, 2, 0, 0, 0))
    png = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    with pytest.raises(ImageError, match="giant.png"):
        decode(png, "giant.png")


def test_export_is_checked_on_the_images_that_can_be_read(damaged, folder):
    images = _real_images(config("folder", folder), Preprocess(6), "int8")
    assert len(images["images"]) == 8 and len(images["calibration"]) == 13


@pytest.mark.parametrize("workers", [0, 2])
def test_corrupt_training_image_is_logged_counted_and_replaced_by_the_next(damaged, caplog, workers):
    split = damaged.train
    with caplog.at_level(logging.WARNING, "ppattn.data"):
        loader = epoch(split, workers, batch=15)
        ((images, labels),) = list(loader)
    order = np.random.default_rng([42, 1]).permutation(15).tolist()
    stand_in = {6: 8, 7: 8}  # bee/1 and bee/2 by bee/3
    expected = np.stack([plain()(split.image(stand_in.get(i, i)), np.random.default_rng(0)) for i in order])
    assert np.array_equal(images, expected)
    assert labels.tolist() == [i // 5 for i in order]
    assert sorted(Path(name).name for name in loader.skipped) == ["1.png", "2.png", "2.png"]  # bee/2 also after bee/1
    assert caplog.text.count("1.png") == 1 and caplog.text.count("2.png") == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_corrupt_evaluation_image_stops_or_is_counted(damaged, caplog, workers):
    with pytest.raises(ImageError, match="cat/2.png"):
        list(eval_loader(damaged.val, Preprocess(6), 4, num_workers=workers))
    loader = eval_loader(damaged.val, Preprocess(6), 4, num_workers=workers, tolerate=True)
    found = np.concatenate([i for _, _, i in loader])
    assert found.tolist() == list(range(8))
    assert [Path(name).name for name in loader.unreadable] == ["2.png"] and "cat/2.png" in caplog.text


def test_all_training_images_corrupt(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(b"x")
    split = FileSplit(tmp_path, [f"{i}.png" for i in range(3)], np.zeros(3))
    with pytest.raises(UserError, match="in succession cannot be read"):
        list(epoch(split, batch=3))


def test_corrupt_image_in_a_shard(tmp_path):
    for i in range(12):
        write_image(tmp_path / f"{i}.png", i)
    (tmp_path / "5.png").write_bytes(b"bad")
    write_shards(FileSplit(tmp_path, [f"{i}.png" for i in range(12)], np.arange(12)), tmp_path / "s", "train", 4)
    settings = config("shards", tmp_path / "s", val="train-*.tar", batch_size=6)
    split = build_datasets(settings).train
    results = []
    for workers in (0, 2):
        settings.data.num_workers = workers
        loader = train_loader(split, plain(), settings, 0)
        results.append(list(loader))
        assert len(loader.skipped) == 1 and "sample" in loader.skipped[0]
    same(*results)
    labels = np.concatenate([labels for _, labels in results[0]])
    assert 5 not in labels and len(labels) == 12
    with pytest.raises(ImageError, match="train-00000"):
        list(eval_loader(split, Preprocess(6), 4))


class Deadly(ArraySplit):
    """The worker that reads image 30 is killed, as the kernel does when memory runs out."""

    def image(self, i):
        if i == 30 and os.getpid() != self.parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.images[i]


@pytest.mark.timeout(60)
def test_killed_worker_is_an_error_and_no_hang():
    split = numbered(61)
    split.__class__, split.parent = Deadly, os.getpid()
    with pytest.raises(WorkerDied, match="data.num_workers"):
        list(epoch(split, 2))
    with pytest.raises(UserError, match="data.num_workers"):  # every verb makes a sentence of it
        list(eval_loader(split, Preprocess(6), 4, num_workers=2))


class Slow(ArraySplit):
    def image(self, i):
        time.sleep(0.02)
        return self.images[i]


def children(pid):
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and needs sigtimedwait")
@pytest.mark.timeout(60)
def test_workers_survive_a_clusters_sigterm_and_go_with_their_parent():
    code = (
        "import sys; sys.path.insert(0, 'tests'); import test_data as t\n"
        "split = t.numbered(600); split.__class__ = t.Slow\n"
        "for step, _ in enumerate(t.epoch(split, 2)): print(step, flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout.readline() == "0\n"
        workers = children(process.pid)
        assert len(workers) == 2
        for worker in workers:
            os.kill(worker, signal.SIGTERM)
            os.kill(worker, signal.SIGINT)
        for step in range(1, 20):
            assert process.stdout.readline() == f"{step}\n"
        assert children(process.pid) == workers
        process.kill()
    deadline = time.time() + 15
    while any(map(alive, workers)) and time.time() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, workers))


def test_leaving_an_epoch_early_ends_its_workers():
    before = set(children(os.getpid()))
    batches = iter(epoch(numbered(200), 2))
    next(batches)
    assert len(set(children(os.getpid())) - before) == 2
    batches.close()
    assert not set(children(os.getpid())) - before


# check


def test_check_finds_nothing_in_good_data(folder, capsys):
    assert main("check", ["--data", str(folder)]) == 0
    output = capsys.readouterr().out
    assert "train: 15 images, 5 to 5 per class" in output and "nothing wrong" in output


def test_check_lists_all_that_is_wrong(damaged, folder, capsys, tmp_path):
    (folder / "train" / "dog").mkdir()
    write_image(folder / "val" / "ant" / "copy.png", [0, 0, 3], (14, 9, 3))  # train/ant/3.png
    write_image(folder / "train" / "cat" / "again.png", [0, 2, 1], (12, 11, 3))
    (folder / "val" / "ant" / "0.png").write_bytes((folder / "val" / "ant" / "0.png").read_bytes()[:-30])
    report_file = tmp_path / "reports" / "check.json"
    assert main("check", ["--data", str(folder), "--json", str(report_file)]) == 2
    captured = capsys.readouterr()
    assert "error: the data has the faults" in captured.err
    report = json.loads(report_file.read_text())
    assert report["ok"] is False
    unreadable = {part: sorted(Path(e["name"]).name for e in report[part]["unreadable"]) for part in ("train", "val")}
    assert unreadable == {"train": ["1.png", "2.png"], "val": ["0.png", "2.png"]}
    assert report["train"]["empty_classes"] == ["dog"] and report["val"]["empty_classes"] == ["dog"]
    assert report["train"]["images_per_class"] == {"ant": 5, "bee": 5, "cat": 6, "dog": 0}
    assert [[Path(n).name for n in pair] for pair in report["duplicates"]] == [["3.png", "copy.png"]]
    assert report["train"]["copies_within"] == 1
    for words in ("bee/1.png", "dog", "copy.png", "unreadable in val: 2"):
        assert words in captured.out


def test_check_takes_configs_shards_and_archives(shards, folder, tmp_path, capsys):
    root, _ = shards
    assert main("check", ["--data", str(root)]) == 2  # the same images in both splits
    assert "in both splits: 61" in capsys.readouterr().out
    (tmp_path / "c.yaml").write_text(f"data: {{name: folder, root: {folder}}}\n")
    assert main("check", ["-c", str(tmp_path / "c.yaml")]) == 0
    assert main("check", ["-c", str(tmp_path / "c.yaml"), "-o", "data.val=train"]) == 2
    files, _, _ = cifar_files()
    archive = cifar_archive(tmp_path / "cifar-10-python.tar.gz", files)
    assert main("check", ["--data", str(archive)]) in (0, 2)
    assert "train: 20 images" in capsys.readouterr().out
    assert main("check", ["--data", str(tmp_path / "absent")]) == 2
    assert "absent" in capsys.readouterr().err


def test_make_shards_script(folder, tmp_path):
    script = [sys.executable, ROOT / "scripts" / "make_shards.py"]
    arguments = ["--data", folder, "--output", tmp_path / "out", "--per-shard", "4"]
    done = subprocess.run([*script, *arguments], capture_output=True, text=True)
    assert done.returncode == 0 and "train: 15 images in 4 shards" in done.stdout
    splits = build_datasets(config("shards", tmp_path / "out"))
    assert splits.classes == ["ant", "bee", "cat"] and np.bincount(splits.train.labels).tolist() == [5, 5, 5]
    again = subprocess.run([*script, *arguments], capture_output=True, text=True)
    assert again.returncode == 2 and "already has shards" in again.stderr
