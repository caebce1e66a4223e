"""Where images come from: digits, CIFAR, class folders and list files, whole and damaged."""

import hashlib
import os
import pickle
import shutil

import numpy as np
import pytest

from ppattn.cli import main
from ppattn.data import cifar as cifar_module
from tests.helpers.browser import served
from tests.helpers.data_sets import build, build_refused, cifar_archive, cifar_files, fill, write_image


def test_digits():
    splits = build("digits")
    assert (len(splits.train), len(splits.val)) == (1437, 360)
    assert splits.classes == list("0123456789") and min(np.bincount(splits.val.labels)) >= 35
    image = splits.train.image(0)
    assert image.shape == (8, 8, 3) and image.dtype == np.uint8
    values = np.concatenate([splits.train.images, splits.val.images]) / 255
    assert values.max() == 1 and values.mean() == pytest.approx(splits.mean[0], abs=2e-3)
    assert values.std() == pytest.approx(splits.std[0], abs=2e-3)
    assert not {image.tobytes() for image in splits.train.images} & {image.tobytes() for image in splits.val.images}
    assert build("digits", mean=[0, 0, 0.1]).mean == [0, 0, 0.1]


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("where", ["a/cifar-10-python.tar.gz", "a", "b/cifar-10-batches-py", "b", "cifar-100"])
def test_places_of_cifar(tmp_path, where, protocol):
    name = "cifar100" if where == "cifar-100" else "cifar10"
    files, images, labels = cifar_files(int(name[5:]), protocol)
    if name == "cifar10":
        archive = cifar_archive(tmp_path / "a" / "cifar-10-python.tar.gz", files)
        shutil.unpack_archive(archive, tmp_path / "b", filter="data")
    else:
        cifar_archive(tmp_path / where / "cifar-100-python.tar.gz", files, "cifar-100-python")
    splits = build(name, tmp_path / where, download=False)
    assert splits.classes == ["ant", "bee", "cat"] and len(splits.val) == 4
    assert np.array_equal(np.concatenate([splits.train.images, splits.val.images]), images)
    assert [*splits.train.labels, *splits.val.labels] == labels


def test_holdout_takes_of_every_class_its_share_from_the_training_images(tmp_path):
    files, _, _ = cifar_files()
    archive = cifar_archive(tmp_path / "cifar-10-python.tar.gz", files)
    for source, root, count in (("digits", None, 143), ("cifar10", archive, 6)):
        whole = build(source, root)
        a, b = (build(source, root, holdout=count) for _ in range(2))
        assert len(a.val) == count and len(a.train) == len(whole.train) - count
        assert abs(np.bincount(a.val.labels) - np.bincount(whole.train.labels) * count / len(whole.train)).max() < 1
        names = [a.train.name(i) for i in range(len(a.train))] + [a.val.name(i) for i in range(count)]
        assert sorted(names) == sorted(whole.train.name(i) for i in range(len(whole.train)))
        for part, other, i in ((p, o, i) for p, o in ((a.train, b.train), (a.val, b.val)) for i in range(len(p))):
            original = int(part.name(i).rpartition("/")[2])
            assert part.name(i) == other.name(i) and part.label(i) == whole.train.label(original)
            assert np.array_equal(part.image(i), whole.train.image(original))
    for count in (1437, 5, 1430):
        build_refused("data.holdout", "digits", holdout=count)


@pytest.mark.parametrize("name", ["folder", "list"])
def test_holdout_needs_no_validation_images(tmp_path, name):
    fill(tmp_path, ["train"])
    (tmp_path / "train_list.txt").write_text("".join(f"train/cat/{i}.png 0\ntrain/dog/{i}.png 1\n" for i in range(4)))
    build_refused("val", name, tmp_path)
    splits = build(name, tmp_path, holdout=2)
    assert (len(splits.train), sorted(splits.val.labels)) == (6, [0, 1])


def test_cifar_damage_is_one_sentence(tmp_path):
    files, _, _ = cifar_files()
    whole = cifar_archive(tmp_path / "cifar-10-python.tar.gz", files).read_bytes()

    for size in (0, 100, len(whole) // 2, len(whole) - 5000):
        (tmp_path / "cifar-10-python.tar.gz").write_bytes(whole[:size])
        build_refused("not a complete|damaged|not found", "cifar10", tmp_path, download=False)
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"<html>not found</html>")
    build_refused("not a complete tar archive", "cifar10", tmp_path, download=False)

    def batch(labels, kind="u1", count=4):
        return pickle.dumps({b"data": np.zeros((count, 3072), kind), b"labels": labels}, 2)

    for name, data, match in (
        ("data_batch_2", None, "data_batch_2 not found"),
        ("data_batch_2", pickle.dumps([1]), "holds a list"),
        ("data_batch_2", files["data_batch_2"][:-50], "damaged"),
        ("data_batch_2", batch([0] * 4, "f4"), "3,072 bytes"),
        ("data_batch_2", batch([-1] * 4), "labels 0 to 2"),
        ("data_batch_2", batch([0.5] * 4), "labels 0 to 2"),
        ("data_batch_2", pickle.dumps({b"data": np.array([["a"] * 3072]), b"labels": [0]}, 2), "does not hold numbers"),
        ("test_batch", batch([], count=0), "not from CIFAR-10"),
        ("batches.meta", pickle.dumps({b"label_names": 5}, 2), "label_names"),
    ):
        changed = {k: v for k, v in (files | {name: data}).items() if v is not None}
        cifar_archive(tmp_path / "cifar-10-python.tar.gz", changed)
        build_refused(match, "cifar10", tmp_path, download=False)
    build_refused("put cifar-10-python.tar.gz", "cifar10", tmp_path / "nowhere", download=False)
    write_image(tmp_path / "photos/train/cat/0.jpg", 0)  # own pictures, and the config of a CIFAR model
    build_refused("put cifar-10-python.tar.gz.*or data.name=folder", "cifar10", tmp_path / "photos")


def test_download(tmp_path, monkeypatch, capsys):
    files, images, _ = cifar_files()
    archive = cifar_archive(tmp_path / "www" / "cifar-10-python.tar.gz", files)
    good, kind = hashlib.md5(archive.read_bytes()).hexdigest(), cifar_module.CIFAR["cifar10"]
    monkeypatch.setitem(cifar_module.CIFAR, "cifar10", type(kind)(**vars(kind) | {"md5": good}))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with served(tmp_path / "www") as address:
        monkeypatch.setattr(cifar_module, "HOSTS", ("http://127.0.0.1:9/", f"{address}/"))
        splits = build("cifar10", tmp_path / "new" / "place")
        archive.write_bytes(b"something else")
        build_refused("wrong checksum.*Put cifar-10-python.tar.gz there", "cifar10", tmp_path / "other")
    assert np.array_equal(splits.train.images, images[:20])
    assert "CIFAR-10" in capsys.readouterr().err  # the progress bar
    assert sorted(p.name for p in (tmp_path / "new" / "place").iterdir()) == ["cifar-10-python.tar.gz"]
    assert not list((tmp_path / "other").iterdir())


def test_folder(folder):
    splits = build("folder", folder)
    assert splits.classes == ["ant", "bee", "cat"]
    assert splits.train.labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5 and splits.val.name(4).endswith("val/bee/1.png")
    assert np.array_equal(splits.val.image(4), np.random.default_rng([1, 1, 1]).integers(0, 256, (12, 10, 3)))
    os.rename(folder / "val", folder / "test")
    assert len(build("folder", folder).val) == 9
    swapped = build("folder", folder, train="test", val="train")
    assert (len(swapped.train), len(swapped.val)) == (9, 15)
    os.rename(folder / "train", folder / "train_1"), shutil.copytree(folder / "train_1", folder / "train_2")
    assert len(build("folder", folder, train="train_2", holdout=6).train) == 9


def test_a_folder_without_labels_may_hold_images_anywhere(folder, tmp_path):
    apart, whole = (build("folder", folder, labels=False, holdout=holdout) for holdout in (0, 3))
    assert [(part.root.name, len(part)) for part in (apart.train, apart.val)] == [("train", 15), ("val", 9)]
    assert whole.classes == [] and len(whole.train) + len(whole.val) == len(build("folder", folder).train)
    assert len(set(whole.val.labels)) == 3 and not {*whole.train.indices} & {*whole.val.indices}  # folders are classes
    for i, name in enumerate(("a.png", "b.png", "deep/er/c.png")):
        write_image(tmp_path / "flat" / name, i)
    flat = build("folder", tmp_path / "flat", labels=False, holdout=1)
    assert (len(flat.train), len(flat.val)) == (2, 1) and set(flat.train.labels) == {0}  # one image makes no class
    assert main("check", ["--data", str(tmp_path / "flat"), "-o", "data.name=folder", "data.labels=false"]) == 0
    shutil.rmtree(tmp_path / "flat" / "deep"), (tmp_path / "flat" / "a.png").unlink()
    build_refused("holds 1 images .* two or more are needed", "folder", tmp_path / "flat", labels=False, holdout=1)
    digits = build("digits", labels=False)
    assert digits.classes == [] and len(set(digits.train.labels)) == 10


def test_folders_follow_links_and_leave_hidden_files_out(folder, tmp_path):
    before = build("folder", folder).train.labels.tolist()
    write_image(tmp_path / "elsewhere/linked.png", 0)
    (folder / "train/ant/more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/round").symlink_to(folder / "train/ant")
    for hidden in (".thumbnails/0.png", "._1.png"):
        write_image(folder / "train/bee" / hidden, 0)
    train = build("folder", folder).train
    assert train.labels.tolist() == sorted([*before, 0])
    assert [train.name(i).rsplit("/train/")[1] for i in range(6)].count("ant/more/linked.png") == 1


def test_imagenet_with_val_alone_serves_twice_and_says_so(folder, caplog):
    """With train/ alone it would choose the best checkpoint on training images."""
    os.rename(folder / "val", folder / "held_out")
    build_refused("val/ is not there", "imagenet", folder)
    splits = build("imagenet", folder, val="held_out")
    assert (len(splits.train), len(splits.val)) == (15, 9) and not caplog.text
    shutil.rmtree(folder / "train")
    os.rename(folder / "held_out", folder / "val")
    for root in (folder, folder / "val"):
        caplog.clear()
        splits = build("imagenet", root)
        assert len(splits.train) == len(splits.val) == 9 and "serve as both" in caplog.text
    build_refused("train/ is not there", "folder", folder)


def test_list_files(folder):
    (folder / "train_list.txt").write_text("train/ant/0.png 0\ntrain/cat/3.png\t2\n\n")
    (folder / "val_list.txt").write_text("val/bee/1.png 1\n")
    splits = build("list", folder)
    assert splits.classes == ["0", "1", "2"] and splits.train.labels.tolist() == [0, 2]
    assert splits.train.image(1).shape == (14, 11, 3)
    assert build("list", folder, val="train_list.txt").val.labels.tolist() == [0, 2]
    for name in ("classes.txt", "label.txt", "label_list.txt"):  # of PaddleX and PaddleClas
        (folder / name).write_text("2\n0\n1\n")  # names that are numbers, in an order of their own
        splits = build("list", folder)
        assert splits.classes == ["2", "0", "1"] and splits.train.labels.tolist() == [1, 0]
        (folder / name).unlink()
    os.rename(folder / "train_list.txt", folder / "train_1.txt")
    shutil.copy(folder / "val_list.txt", folder / "train_2.txt")
    assert build("list", folder, train="train_1.txt", val="val_list.txt").train.labels.tolist() == [0, 2]


@pytest.mark.parametrize(
    "text,match",
    [("train/ant/0.png\n", "train_list.txt:1"), ("", "empty"), ("a.png 5\n", "label 5, but there are 2 class names"),
     ("a.png puma\n", "puma")],
)  # fmt: skip
def test_list_mistakes(folder, text, match):
    (folder / "train_list.txt").write_text(text)
    (folder / "val_list.txt").write_text("val/bee/1.png 1\n")
    (folder / "classes.txt").write_text("ant\nbee\n")
    build_refused(match, "list", folder)
