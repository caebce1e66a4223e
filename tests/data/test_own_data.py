"""Data as people have it: layouts, lists, class names, files of all kinds, each with the right value or a refusal."""

import json
import os
import struct
import sys
import tracemalloc
import unicodedata
import zlib
from pathlib import Path
from zlib import crc32

import cv2
import numpy as np
import pytest
from PIL import Image

from ppattn.cli import main
from ppattn.data import ImageError, Preprocess, decode, read_image
from ppattn.data.folders import files_in
from ppattn.data.sources import leaked_images, shared_images
from ppattn.deploy.predictor import as_array
from ppattn.engine.trainer import train
from ppattn.errors import UserError
from scripts import make_shards
from tests.helpers.data_sets import build, build_refused, cifar_archive, cifar_files, config, fill, write_image

NFC, NFD = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))


@pytest.mark.parametrize(
    "train,val",
    [("training_set", "test_set"), ("Train", "Test"), ("TRAINING", "Valid"), ("images/train", "images/val"),
     ("inner/Training", "inner/Validation"), ("seg_train/seg_train", "seg_test/seg_test"), ("train2017", "val2017"),
     ("raw/images/train_data", "raw/images/test_data"), ("train/images", "val/images"), ("train", "dev")],
)  # fmt: skip
def test_usual_layouts(tmp_path, train, val, capsys):
    fill(tmp_path, [train], images=5)
    fill(tmp_path, [val])
    for holdout, sizes in ((0, (10, 8)), (2, (8, 2))):
        splits = build("folder", tmp_path, holdout=holdout)
        assert splits.classes == ["cat", "dog"] and (len(splits.train), len(splits.val)) == sizes
    assert main("check", ["--data", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "train: 10 images, 5 to 5 per class" in printed and "nothing wrong" in printed


@pytest.mark.parametrize("classes", [("cat", "dog"), ("car", "train")])  # this train is a vehicle
@pytest.mark.parametrize("place", [".", "images", "data/Images", "flowers/flower_photos"])
def test_class_folders_alone_and_in_a_wrapping(tmp_path, place, classes, capsys):
    fill(tmp_path, [place], classes)
    splits = build("folder", tmp_path, holdout=2)
    assert splits.classes == [*classes] and len(splits.val) == 2
    paths = [split.key(i) for split in (splits.train, splits.val) for i in range(len(split))]
    assert sorted(paths) == sorted(str(path.relative_to(tmp_path / place)) for path in tmp_path.rglob("*.png"))
    build_refused("data.holdout = N", "folder", tmp_path)
    check = ["--data", str(tmp_path)]
    assert main("check", check) == 0 and "train: 8 images, 4 to 4 per class" in (told := capsys.readouterr().out)
    assert told.endswith("\nnothing wrong; to train, set data.holdout\n")
    assert main("check", [*check, "-o", "data.holdout=2"]) == 0
    assert "val: 2 images, 1 to 1 per class" in capsys.readouterr().out
    for name in ("folder", "imagenet"):
        inside = {"data": {"name": name, "root": str(tmp_path), "holdout": 2}, "output": str(tmp_path / place / "run")}
        with pytest.raises(UserError, match="is among the class folders"):
            train(inside | {"model": {"name": "deit_nano"}})
    assert main("check", [*check, "-o", "data.holdot=4"]) == 2
    assert "Did you mean 'data.holdout'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "make,said",
    [(lambda root: fill(root, ["cat/train", "cat/test", "dog/train", "dog/test"]), "several folders"),
     (lambda root: fill(root, ["."], classes=("Training", "Test_Set")), "names of parts"),
     (lambda root: fill(root, ["Training", "TRAIN", "test"]), "may both be meant"),
     (lambda root: fill(root, [NFC, NFD], classes=("x",)), "encoded in two ways")],
)  # fmt: skip
def test_other_layouts_are_refused_with_what_is_there(tmp_path, make, said):
    make(tmp_path)
    build_refused(said, "folder", tmp_path, holdout=2)


def test_a_single_class_and_a_root_without_effect_are_told(tmp_path, caplog):
    fill(tmp_path, ["train", "val"], classes=("everything",))
    build("folder", tmp_path)
    assert "single class, 'everything'" in caplog.text
    build("digits", tmp_path)
    assert "data.root = " in caplog.text and "has no effect: digits has fixed images" in caplog.text


def written(root, lines, classes=None):
    """The paths and class names that are read from these lists."""
    for name, text in (("train_list.txt", lines), ("val_list.txt", lines), ("classes.txt", classes)):
        if text is not None:
            (root / name).write_text(text, encoding="utf-8")
    splits = build("list", root)
    return splits.train.paths, [splits.classes[k] for k in splits.train.labels]


@pytest.mark.parametrize(
    "line,path,label",
    [("a.png\tgolden retriever", "a.png", "golden retriever"), ("a b.png\tcat", "a b.png", "cat"),
     ("a.png golden retriever", "a.png", "golden retriever"),
     ("a b.png golden retriever", "a b.png", "golden retriever"),
     ("a b  c", "a b", "c"), (" a.png  cat ", "a.png", "cat"), (f"{NFD}.png {NFD}", f"{NFC}.png", NFC),
     ("sub\\a.png cat", "sub/a.png", "cat"), ("gone x.png two words", "gone x.png", "two words")],
)  # fmt: skip
def test_lines_of_lists(tmp_path, line, path, label):
    for name in ("a.png", "a b.png", "a b", f"{NFC}.png", "sub/a.png", "other.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    assert written(tmp_path, f"{line}\nother.png other\n") == ([path, "other.png"], [label, "other"])


@pytest.mark.parametrize(
    "classes,labels,names",
    [("2 bird\n0 cat\n1 dog\n", "0 1 2", "cat dog bird"), ("1 cat\n2 dog\n3 bird\n", "1 2 3", "cat dog bird"),
     ("10: cat\n20: dog\n", "20 10", "dog cat"), ("dog,1\ncat,0\n", "0 1", "cat dog"), ("cat\ndog\n", "0 1", "cat dog"),
     ("1 euro\n2 euro\n", "0 1", "1_euro 2_euro"), ("ant\nbee", "ant, bee|;", "ant bee"),
     ("a,x\na,y\nb,x\nb,y", "a,x, a,y b,x|; b,y", "a,x a,y b,x b,y")],
)  # fmt: skip
def test_label_maps_in_any_order_from_any_number(tmp_path, classes, labels, names):
    write_image(tmp_path / "a.png", 0)
    _, found = written(tmp_path, "".join(f"a.png {label}\n" for label in labels.split()), classes)
    assert [name.replace(" ", "_") for name in found] == names.split()


SEVERAL = ["0,1,0|1,0,0|1,1,0", "0 1|1 0", "0\t1\t1|1\t0\t0", "3 7|7", "cat,dog|cat|dog", "cat;dog|dog;bird|bird; cat"]


@pytest.mark.parametrize(
    "labels,classes,words",
    [*((labels, None, "several classes for an image") for labels in SEVERAL),
     ("0|1", "1 cat\n2 dog\n", "numbered from 1 to 2"), ("0|0", "0 cat\n0 dog\n", "the same number")],
)  # fmt: skip
def test_lists_that_do_not_fit_are_refused(tmp_path, labels, classes, words):
    write_image(tmp_path / "a.png", 0)
    with pytest.raises(UserError, match=words):
        written(tmp_path, "".join(f"a.png\t{label}\n" for label in labels.split("|")), classes)
    if labels in SEVERAL:
        splits = build("list", tmp_path, labels=False)
        assert splits.classes == [] and splits.train.table is splits.val.table is None


def test_a_list_of_other_files_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"None of the images in \S+/val_list.txt is there"):
        written(tmp_path, "my photo.jpg,cat\nmy other.jpg,dog\n")


def test_a_header_and_one_image_under_two_labels_are_found(tmp_path, capsys, caplog):
    fill(tmp_path, ["train", "val"])
    write_image(tmp_path / "train/dog/again.png", [crc32(b"train"), 0, 1])
    assert main("check", ["--data", str(tmp_path)]) == 2 and "cat/1.png (cat) = " in capsys.readouterr().out
    assert written(tmp_path, "train\tclass\ntrain/cat/1.png \tcat\ntrain/cat/1.png\tdog\n")[1] == ["cat", "dog"]
    assert "'train\\tclass', is left out" in caplog.text and "1 images under several labels" in caplog.text


def test_files_are_images_by_their_content(tmp_path, caplog, capsys):
    fill(tmp_path, ["train", "val"])
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 8, 3)).astype(np.uint8))
    kinds = {"a.jfif": "JPEG", "b.jpe": "JPEG", "c": "PNG", "d.JPEG2": "JPEG", "e.dat": "TIFF", "f.tmp": "WEBP"}
    for name, kind in kinds.items():
        picture.save(tmp_path / "train/cat" / name, kind)
    (tmp_path / "train/cat/notes.txt").write_text("no image")
    splits = build("folder", tmp_path)
    assert len(splits.train) == 8 + len(kinds) and splits.train.left_out == 1 and "1 files are left out" in caplog.text
    assert all(splits.train.image(i).ndim == 3 for i in range(len(splits.train)))
    assert main("check", ["--data", str(tmp_path)]) == 0 and "1 files left out" in capsys.readouterr().out
    assert not [*files_in(tmp_path / "gone")] and "left out: [Errno 2]" in caplog.text


@pytest.mark.parametrize("bits", [10, 12, 14])
@pytest.mark.parametrize("suffix", ["png", "tif", "npy"])
def test_max_value_is_white(tmp_path, bits, suffix, caplog):
    deep = np.random.default_rng(bits).integers(0, 2**bits, (13, 11)).astype(np.uint16)
    for place in ("train/cat", "train/dog", "val/cat", "val/dog"):
        (path := tmp_path / place / f"a.{suffix}").parent.mkdir(parents=True)
        np.save(path, deep) if suffix == "npy" else Image.fromarray(deep).save(path)
    assert np.array_equal(build("folder", tmp_path).train.image(0), np.repeat(deep[..., None] >> 8, 3, 2))
    assert ("cat/a." in caplog.text and "data.max_value" in caplog.text) == (bits <= 12)
    scaled = build("folder", tmp_path, max_value=2**bits - 1).train.image(0)
    assert np.array_equal(scaled, np.repeat(np.rint(deep[..., None] / (2**bits - 1) * 255), 3, 2))
    for given, wanted in ((Image.fromarray(deep), scaled), (p := Image.fromarray(scaled).quantize(), p.convert("RGB"))):
        assert np.array_equal(as_array(given, "it", Preprocess((9, 7), max_value=2**bits - 1)), wanted)


def test_colours_of_16_bits_keep_the_upper_ones(tmp_path):
    image = np.random.default_rng(0).integers(0, 65536, (7, 5, 3)).astype(np.uint16)
    cv2.imwrite(str(tmp_path / "deep.png"), image[..., ::-1])
    assert np.array_equal(read_image(tmp_path / "deep.png"), image >> 8)
    tag = b"\x1c\x01\x03\0\x01\0\0\0"  # PlanarConfiguration, one short number
    with pytest.raises(ImageError, match="planes of more than 8 bits"):
        decode(cv2.imencode(".tif", image)[1].tobytes().replace(tag + b"\1", tag + b"\2"), "x.tif")


def test_floats_need_a_range(tmp_path):
    floats = np.random.default_rng(0).random((7, 5)).astype(np.float32)
    Image.fromarray(floats).save(tmp_path / "a.tif")
    with pytest.raises(ImageError, match="range is not known"):
        read_image(tmp_path / "a.tif")
    assert np.array_equal(read_image(tmp_path / "a.tif", 1.0)[..., 1], np.rint(floats * 255))


STORED = {
    "PNG": ["RGBA", "LA", "P", "L", "I;16", "1"], "TIFF": ["RGBA", "LA", "P", "CMYK", "L", "I;16", "1"],
    "WEBP": ["RGBA", "LA", "P", "CMYK", "L", "1"], "JPEG": ["CMYK", "L", "1"],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "mode"), [(kind, mode) for kind in STORED for mode in STORED[kind]])
def test_pixels_do_not_depend_on_the_container(tmp_path, mode, kind):
    """Of what a format can store, the pixels are Pillow's `convert("RGB")`; 16 bits lose the lower ones."""
    rng = np.random.default_rng(3)
    if mode == "I;16":
        picture = Image.fromarray(rng.integers(0, 65536, (9, 7)).astype(np.uint16))
    elif mode in ("P", "1"):
        picture = Image.fromarray(rng.integers(0, 256, (9, 7)).astype(np.uint8)).convert(mode)
    else:
        picture = Image.frombytes(mode, (7, 9), rng.integers(0, 256, 63 * len(mode)).astype(np.uint8).tobytes())
    path = tmp_path / f"a.{kind.lower()}"
    picture.save(path, kind, **({"lossless": True, "exact": True} if kind == "WEBP" else {}))
    with Image.open(path) as again:
        expected = np.asarray(again.convert("RGB"))
    if mode == "I;16":
        expected = np.repeat((np.asarray(picture) >> 8)[..., None], 3, axis=2)
    for top in [None] if mode == "I;16" else [None, 255]:
        assert abs(read_image(path, top).astype(int) - expected).max() <= (0 if mode == "CMYK" or kind != "JPEG" else 2)


@pytest.mark.parametrize("size,settings", [((1, 60_000), {}), ((60_000, 1), {"interpolation": "bilinear"})])
def test_a_very_long_picture_takes_little_memory(size, settings):
    image = np.broadcast_to(np.arange(max(size), dtype=np.uint8).reshape(*size, 1), (*size, 3)).copy()
    preprocess = Preprocess((32, 32), crop_ratio=0.875, crop_keep_aspect=True, **settings)
    tracemalloc.start()
    assert preprocess.pixels(image).shape == (32, 32, 3) and tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()
    short = np.ascontiguousarray(image[:1500, :1500])  # resized as a whole, then cut
    whole = preprocess.pixels(short)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ppattn.data.images.LARGEST_RESIZED", 0)
        assert abs(preprocess.pixels(short).astype(int) - whole).max() <= 1


def test_a_huge_picture_is_refused_with_its_limit():
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 33_000, 33_000, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(9))) + chunk(b"IEND", b"")
    with pytest.raises(ImageError, match=r"slide.png is too large: OpenCV takes 2\^30 pixels.*tiles"):
        decode(png, "slide.png")


def test_the_order_of_images_is_not_that_of_the_disk(tmp_path, monkeypatch):
    fill(tmp_path, ["train", "val"])
    (tmp_path / "train/cat/inner").mkdir()
    write_image(tmp_path / "train/cat/inner/x.png", 1)
    (tmp_path / "train/cat/again").symlink_to(tmp_path / "train/cat/inner")
    (tmp_path / "train" / NFD).mkdir()
    for name in (NFC + "z.png", NFD + "a.png"):
        write_image(tmp_path / "train" / NFD / name, 2)
    (tmp_path / "val" / NFC).mkdir()
    walk, splits = os.walk, build("folder", tmp_path)

    def turned(*arguments, **options):
        for here, folders, names in walk(*arguments, **options):
            folders.reverse()
            yield here, folders, names[::-1]

    monkeypatch.setattr(os, "walk", turned)
    again = build("folder", tmp_path).train
    assert again.paths == splits.train.paths and "cat/inner/x.png" in again.paths
    assert again.digest() == splits.train.digest() and splits.classes == [NFC, "cat", "dog"]
    first = [unicodedata.normalize("NFC", path) for path in again.paths[:2]]
    assert first == [f"{NFC}/{NFC}a.png", f"{NFC}/{NFC}z.png"]
    (tmp_path / "train" / NFD).rename(tmp_path / "train" / NFC)
    assert build("folder", tmp_path).train.digest() == again.digest()


def test_copies_in_a_list_stay_together_when_images_are_held_out(tmp_path):
    fill(tmp_path, ["train"], images=6)
    lines = [f"train/{name}/{i}.png {name}\n" for name in ("cat", "dog") for i in range(6)]
    (tmp_path / "train_list.txt").write_text("".join(lines * 3))
    splits = build("list", tmp_path, holdout=4)
    train, val = ({split.key(i) for i in range(len(split))} for split in (splits.train, splits.val))
    assert len(val) == len(splits.val) == 4 and not train & val and len(splits.train) == 24


def test_a_link_to_the_training_images_is_a_leak(tmp_path):
    fill(tmp_path, ["train", "other"])
    (tmp_path / "val").symlink_to(tmp_path / "train")
    assert shared_images(build("folder", tmp_path)) == 8 and shared_images(build("folder", tmp_path, val="other")) == 0
    for i in range(2):
        (tmp_path / f"other/cat/link{i}.png").symlink_to(tmp_path / f"train/cat/{i}.png")
    assert shared_images(build("folder", tmp_path, val="other")) == 2


def test_images_that_were_added_hide_a_leak_and_that_is_told(tmp_path, caplog):
    fill(tmp_path, ["."], images=10)
    before = build("folder", tmp_path, holdout=4)
    digests = {part: getattr(before, part).digest() for part in ("train", "val")}
    assert leaked_images(before, digests, 4, 42) == 0 and not caplog.text
    fill(tmp_path, ["."], images=13)
    leaked_images(build("folder", tmp_path, holdout=4), digests, 4, 42)
    assert "accuracy on the 4 held-out ones is too high; data.holdout=0" in caplog.text


def test_a_part_and_folds_of_the_training_images(tmp_path):
    fill(tmp_path, ["."], images=10)
    assert len(build("folder", tmp_path, holdout=0.2).val) == 4
    seen = []
    for fold in range(1, 6):
        splits = build("folder", tmp_path, fold=f"{fold}/5")
        train, val = ([split.key(i) for i in range(len(split))] for split in (splits.train, splits.val))
        assert not set(train) & set(val) and len(train) == 16 and sorted(splits.val.labels) == [0, 0, 1, 1]
        seen += val
    assert len(set(seen)) == 20
    for wrong in ("6/5", "5", "0/5", "1/1"):
        with pytest.raises(UserError, match=r"data\.fold"):
            config("folder", tmp_path, fold=wrong)
    build_refused("in every fold", "folder", tmp_path, fold="1/11")


@pytest.mark.parametrize("channels,bits", [(4, 8), (4, 12), (6, 8)])
@pytest.mark.parametrize("kind", ["npy", "npy, channels first", "tif", "pages"])
def test_channels_of_files(tmp_path, kind, channels, bits):
    dtype = np.uint8 if bits == 8 else np.uint16
    array = np.random.default_rng(channels).integers(0, 2**bits, (9, 7, channels)).astype(dtype)
    path = tmp_path / f"a.{'npy' if 'npy' in kind else 'tif'}"
    if "npy" in kind:
        np.save(path, array if kind == "npy" else array.transpose(2, 0, 1))
    elif kind == "tif" and channels == 4:  # OpenCV writes no more
        cv2.imwrite(str(path), array[..., [2, 1, 0, 3]])
    else:
        first, *rest = (Image.fromarray(array[..., k]) for k in range(channels))
        first.save(path, save_all=True, append_images=rest)
    preprocess = Preprocess((9, 7), in_chans=channels, max_value=2**bits - 1, mean=[0.1, 0.2, 0.3], std=[1.0, 1.0, 1.0])
    levels = array if bits == 8 else np.rint(array / 4095 * 255)
    image = preprocess.read(path)
    assert np.array_equal(image, levels)
    expected = levels.transpose(2, 0, 1) / 255 - np.resize([0.1, 0.2, 0.3], channels)[:, None, None]
    assert np.allclose(preprocess(image), expected, atol=1e-6)
    for other in (5, 3) if channels == 6 and "npy" in kind else (5,):
        with pytest.raises(ImageError, match=f"channels, the model takes {other}"):
            Preprocess((9, 7), in_chans=other, max_value=2**bits - 1).read(path)


def test_check_lists_all_that_is_wrong(damaged, folder, capsys, tmp_path):
    (folder / "train" / "dog").mkdir()
    write_image(folder / "val" / "ant" / "copy.png", [0, 0, 3], (14, 9, 3))  # train/ant/3.png
    write_image(folder / "train" / "cat" / "again.png", [0, 2, 1], (12, 11, 3))
    (folder / "val" / "ant" / "0.png").write_bytes((folder / "val" / "ant" / "0.png").read_bytes()[:-30])
    report_file = tmp_path / "reports" / "check.json"
    assert main("check", ["--data", str(folder), "--json", str(report_file)]) == 2
    captured = capsys.readouterr()
    assert "error: the data has the problems" in captured.err
    report = json.loads(report_file.read_text())
    assert report["ok"] is False
    unreadable = {part: sorted(Path(e["name"]).name for e in report[part]["unreadable"]) for part in ("train", "val")}
    assert unreadable == {"train": ["1.png", "2.png"], "val": ["0.png", "2.png"]}
    assert report["train"]["empty_classes"] == ["dog"] and report["val"]["empty_classes"] == ["dog"]
    assert report["train"]["images_per_class"] == {"ant": 5, "bee": 5, "cat": 6, "dog": 0}
    assert [[Path(n).name for n in pair] for pair in report["duplicates"]] == [["3.png", "copy.png"]]
    assert report["train"]["copies_within"] == 1
    assert all(words in captured.out for words in ("bee/1.png", "dog", "copy.png", "unreadable in val: 2"))


def test_check_takes_configs_shards_and_archives(shards, folder, tmp_path, capsys):
    root, _ = shards
    assert main("check", ["--data", str(root)]) == 2  # the same images in both splits
    assert "in both splits: 61" in capsys.readouterr().out
    (tmp_path / "c.yaml").write_text(f"data: {{name: folder, root: {folder}}}\n")
    assert main("check", ["-c", str(tmp_path / "c.yaml")]) == 0
    assert main("check", ["-c", str(tmp_path / "c.yaml"), "-o", "data.val=train"]) == 2
    files, _, _ = cifar_files()
    assert main("check", ["--data", str(cifar_archive(tmp_path / "cifar-10-python.tar.gz", files))]) == 0
    assert "train: 20 images" in capsys.readouterr().out
    assert main("check", ["--data", str(tmp_path / "absent")]) == 2 and "absent" in capsys.readouterr().err


def test_make_shards_script(folder, tmp_path, monkeypatch, capsys):
    arguments = ["--data", str(folder), "--output", str(tmp_path / "out"), "--per-shard", "4"]
    monkeypatch.setattr(sys, "argv", ["make_shards.py", *arguments])
    for code in (0, 2):
        with pytest.raises(SystemExit) as stop:
            make_shards.main()
        assert stop.value.code == code
    printed = capsys.readouterr()
    assert "train: 15 images in 4 shards" in printed.out and "already has shards" in printed.err
    splits = build("shards", tmp_path / "out")
    assert splits.classes == ["ant", "bee", "cat"] and np.bincount(splits.train.labels).tolist() == [5, 5, 5]
    monkeypatch.setattr(sys, "argv", f"x --data {folder}/train --output {tmp_path}/held -o data.holdout=3".split())
    with pytest.raises(SystemExit, match="^0$"):
        make_shards.main()
    assert len(build("shards", tmp_path / "held").val) == 3
