"""Where images come from: digits, CIFAR, class folders and list files, whole and damaged."""

import hashlib
import os
import pickle
import shutil
import tarfile

import numpy as np
import pytest

from ppattn.data import build_datasets
from ppattn.data import cifar as cifar_module
from ppattn.errors import UserError
from tests.helpers.browser import served
from tests.helpers.data_sets import cifar_archive, cifar_files, config, write_image


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


def test_holdout_takes_of_every_class_its_share_from_the_training_images(tmp_path):
    files, _, _ = cifar_files()
    archive = cifar_archive(tmp_path / "cifar-10-python.tar.gz", files)
    for source, root, count in (("digits", None, 143), ("cifar10", archive, 6)):
        whole = build_datasets(config(source, root))
        a, b = (build_datasets(config(source, root, holdout=count)) for _ in range(2))
        assert len(a.val) == count and len(a.train) == len(whole.train) - count
        share = np.bincount(a.val.labels) - np.bincount(whole.train.labels) * count / len(whole.train)
        assert abs(share).max() < 1
        names = [a.train.name(i) for i in range(len(a.train))] + [a.val.name(i) for i in range(count)]
        assert sorted(names) == sorted(whole.train.name(i) for i in range(len(whole.train)))
        for part, other in ((a.train, b.train), (a.val, b.val)):
            for i in range(len(part)):
                original = int(part.name(i).rpartition("/")[2])
                assert part.name(i) == other.name(i) and part.label(i) == whole.train.label(original)
                assert np.array_equal(part.image(i), whole.train.image(original))
    for count in (1437, 5, 1430):
        with pytest.raises(UserError, match="data.holdout"):
            build_datasets(config("digits", holdout=count))


@pytest.mark.parametrize("name", ["folder", "list"])
def test_holdout_needs_no_validation_images(tmp_path, name):
    for i in range(8):
        write_image(tmp_path / "train" / "ab"[i % 2] / f"{i}.png", i)
    (tmp_path / "train_list.txt").write_text("".join(f"train/{'ab'[i % 2]}/{i}.png {i % 2}\n" for i in range(8)))
    with pytest.raises(UserError, match="val"):
        build_datasets(config(name, tmp_path))
    splits = build_datasets(config(name, tmp_path, holdout=2))
    assert (len(splits.train), sorted(splits.val.labels)) == (6, [0, 1])


def test_cifar100(tmp_path):
    files, images, labels = cifar_files(100)
    cifar_archive(tmp_path / "cifar-100-python.tar.gz", files, "cifar-100-python")
    splits = build_datasets(config("cifar100", tmp_path))
    assert np.array_equal(splits.val.images, images[4:]) and splits.train.labels.tolist() == labels[:4]


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

    def batch(labels, kind="u1", count=4):
        return pickle.dumps({b"data": np.zeros((count, 3072), kind), b"labels": labels}, 2)

    itself: list = []
    itself.append(itself)
    for name, data, match in (
        ("data_batch_2", None, "data_batch_2 not found"),
        ("data_batch_2", pickle.dumps([1]), "holds a list"),
        ("data_batch_2", files["data_batch_2"][:-50], "damaged"),
        ("data_batch_2", batch([0] * 4, "f4"), "3,072 bytes"),
        ("data_batch_2", batch([-1] * 4), "labels 0 to 2"),
        ("data_batch_2", batch([0.5] * 4), "labels 0 to 2"),
        ("data_batch_2", pickle.dumps({b"data": itself, b"labels": [0]}, 2), "not from CIFAR-10"),
        ("data_batch_2", pickle.dumps({b"data": np.array([["a"] * 3072]), b"labels": [0]}, 2), "does not hold numbers"),
        ("test_batch", batch([], count=0), "not from CIFAR-10"),
        ("batches.meta", pickle.dumps({b"label_names": 5}, 2), "label_names"),
    ):
        changed = {k: v for k, v in (files | {name: data}).items() if v is not None}
        cifar_archive(tmp_path / "cifar-10-python.tar.gz", changed)
        refused(match)
    refused("put cifar-10-python.tar.gz", root=tmp_path / "nowhere")


@pytest.fixture
def server(tmp_path, monkeypatch):
    """An HTTP server for tmp_path/www; yields its address and that folder."""
    www = tmp_path / "www"
    www.mkdir()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with served(www) as address:
        yield f"{address}/", www


def test_download(tmp_path, server, monkeypatch, capsys):
    address, www = server
    files, images, _ = cifar_files()
    archive = cifar_archive(www / "cifar-10-python.tar.gz", files)
    good = hashlib.md5(archive.read_bytes()).hexdigest()
    kind = cifar_module.CIFAR["cifar10"]
    monkeypatch.setitem(cifar_module.CIFAR, "cifar10", type(kind)(**vars(kind) | {"md5": good}))
    monkeypatch.setattr(cifar_module, "HOSTS", ("http://127.0.0.1:9/", address))
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


def test_a_folder_without_labels_may_hold_images_anywhere(folder, tmp_path):
    whole, labelled = build_datasets(config("folder", folder, labels=False, holdout=3)), config("folder", folder)
    assert whole.classes == [] and len(whole.train) + len(whole.val) == len(build_datasets(labelled).train)
    assert len(set(whole.val.labels)) == 3 and not {*whole.train.indices} & {*whole.val.indices}  # folders are classes
    for i, name in enumerate(("a.png", "b.png", "deep/er/c.png")):
        write_image(tmp_path / "flat" / name, i)
    flat = build_datasets(config("folder", tmp_path / "flat", labels=False, holdout=1))
    assert (len(flat.train), len(flat.val)) == (2, 1) and set(flat.train.labels) == {0}  # one image makes no class
    shutil.rmtree(tmp_path / "flat" / "deep"), (tmp_path / "flat" / "a.png").unlink()
    with pytest.raises(UserError, match="holds 1 images .* two or more are needed"):
        build_datasets(config("folder", tmp_path / "flat", labels=False, holdout=1))
    digits = build_datasets(config("digits", labels=False))
    assert digits.classes == [] and len(set(digits.train.labels)) == 10


def test_folders_follow_links_and_leave_hidden_files_out(folder, tmp_path):
    before = build_datasets(config("folder", folder)).train.labels.tolist()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(folder / "train/ant/0.png", elsewhere / "linked.png")
    (folder / "train/ant/more").symlink_to(elsewhere)
    (elsewhere / "round").symlink_to(folder / "train/ant")
    hidden = folder / "train/bee/.thumbnails"
    hidden.mkdir()
    for place in (hidden / "0.png", folder / "train/bee/._1.png"):
        shutil.copy(folder / "train/bee/0.png", place)
    train = build_datasets(config("folder", folder)).train
    assert train.labels.tolist() == sorted([*before, 0])
    assert [train.name(i).rsplit("/train/")[1] for i in range(6)].count("ant/more/linked.png") == 1


def test_imagenet_with_one_split_serves_twice_and_says_so(folder, caplog):
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
    (folder / "classes.txt").write_text("2\n0\n1\n")  # names that are numbers, in an order of their own
    before = "classes.txt"
    for name in ("classes.txt", "label.txt", "label_list.txt"):  # of PaddleX and PaddleClas
        (folder / before).rename(folder / name)
        before = name
        splits = build_datasets(config("list", folder))
        assert splits.classes == ["2", "0", "1"] and splits.train.labels.tolist() == [1, 0]


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
