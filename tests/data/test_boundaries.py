"""Whatever an untrusted file contains, what reads it gives checked content or a `UserError`, and runs nothing from it.

Inputs are made by Hypothesis: parts of right ones, put together at random, cut, and with bytes changed.
"""

import io
import json
import math
import pickle
import shutil
from contextlib import suppress

import cv2
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ppattn.config import override_config
from ppattn.data import ImageError, Preprocess, build_datasets, decode
from ppattn.deploy.folder import About, read_about
from ppattn.errors import UserError
from ppattn.files.pickles import ArrayUnpickler
from ppattn.settings import Config
from ppattn.text import csv_cell, printable
from tests.helpers.data_sets import Evil, cifar_archive, cifar_files, config

same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

numbers = st.one_of(st.integers(), st.floats(), st.integers(min_value=10**8, max_value=10**400))
plain = st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=8))
trees = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@st.composite
def damaged(draw, whole: bytes) -> bytes:
    """The bytes cut at the end, with some changed, or with a piece of themselves moved."""
    data = bytearray(whole[: draw(st.integers(0, len(whole)))] if draw(st.booleans()) else whole)
    for _ in range(draw(st.integers(0, 6))):
        if data:
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    if len(data) > 4 and draw(st.booleans()):
        start = draw(st.integers(0, len(data) - 2))
        piece = data[start : start + draw(st.integers(1, 64))]
        place = draw(st.integers(0, len(data)))
        data[place:place] = piece
    return bytes(data)


def test_no_setting_takes_a_number_that_is_not_finite():
    for section, field in Config.model_fields.items():
        for name in getattr(field.annotation, "model_fields", {}).keys() - {"attention_options"}:
            for value in (math.inf, -math.inf, math.nan, [math.nan] * 3):
                with pytest.raises(UserError, match=name):
                    override_config({section: {name: value}}, [])


ARRAY = {b"data": np.arange(24, dtype=np.uint8).reshape(2, 12), b"labels": [0, 1], b"x": {"a": (1.5, None, b"c")}}
PICKLES = [pickle.dumps(ARRAY, protocol) for protocol in range(5)] + [pickle.dumps([Evil(), ARRAY], 2)]
OPCODES = [
    *(b"]", b"}", b")", b"N", b"K\x01", b"(", b"a", b"e", b"s", b"u", b"t", b"R", b"b", b"0", b"1", b"2", b"."),
    *(b"q\x00", b"h\x00", b"r\xff\xff\xff\x7f", b"cnumpy\nndarray\n", b"cnumpy\ndtype\n", b"c_codecs\nencode\n", b"Q"),
    *(b"cos\nmkdir\n", b"X\x08\x00\x00\x00executed", b"\x82\x01", b"\x8e" + b"\xff" * 8, b"\x96" + b"\xff" * 8),
    b"U\x01b",
    *(b"\x81", b"cnumpy._core.multiarray\n_reconstruct\n", b"ccollections\nOrderedDict\n", b"cbuiltins\nset\n"),
]  # fmt: skip


def kinds(value: object, seen: set[int]) -> set[type]:
    if id(value) in seen:
        return set()
    seen.add(id(value))
    inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    parts = inner if isinstance(value, dict | list | tuple | set) else ()
    return {type(value)}.union(*(kinds(part, seen) for part in parts))


@given(
    st.one_of(st.sampled_from(PICKLES).flatmap(damaged), st.lists(st.sampled_from(OPCODES), max_size=30).map(b"".join))
)
@same_folder
def test_a_pickle_gives_containers_and_arrays_or_an_error(tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    try:
        value = ArrayUnpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception:
        value = None
    assert not (tmp_path / "executed").exists()
    for kind in kinds(value, set()):
        assert kind.__module__ in ("builtins", "collections", "ppattn.files.pickles"), kind


@pytest.mark.parametrize("member", [True, False])
@given(st.data())
@same_folder
def test_a_cifar_archive_gives_images_or_a_sentence(tmp_path, member, data):
    """Damaged in one of its pickles, or itself."""
    files, _, _ = cifar_files()
    if member:
        name = data.draw(st.sampled_from(sorted(files)))
        files[name] = data.draw(damaged(files[name]))
    archive = cifar_archive(tmp_path / "cifar.tar", files, mode="w")
    if not member:
        archive.write_bytes(data.draw(damaged(archive.read_bytes())))
    check_splits_or_sentence("cifar10", archive)


def check_splits_or_sentence(name, root):
    """Whatever is built has labels of its classes."""
    try:
        splits = build_datasets(config(name, root, download=False))
    except UserError as error:
        assert "\n" not in str(error)
        return
    for split in (splits.train, splits.val):
        assert split.labels.min() >= 0 and split.labels.max() < len(splits.classes) and len(splits.classes) <= 10**6
    assert all(isinstance(name, str) and name.isprintable() for name in splits.classes)


LABELS = ["0", "1", "2", "-1", "0.5", "1e3", "99999999999", "9" * 5000, "nan", "inf", "+1", "cat", "²", "٣", "1_0"]
lines = st.tuples(st.sampled_from(["a.png", "b c.png", "", "\0"]), st.sampled_from(LABELS)).map(" ".join)
list_texts = st.lists(lines | st.text(max_size=6), max_size=4).map("\n".join)
encodings = st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "latin-1", "gb18030"])


@given(list_texts, list_texts, st.none() | st.text(max_size=12), encodings)
@same_folder
def test_list_files_give_labels_or_a_sentence(tmp_path, train, val, classes, encoding):
    shutil.rmtree(tmp_path / "lists", ignore_errors=True)
    (tmp_path / "lists").mkdir()
    for name, text in (("train_list.txt", train), ("val_list.txt", val), ("classes.txt", classes)):
        if text is not None:
            (tmp_path / "lists" / name).write_bytes(text.encode(encoding, "replace"))
    check_splits_or_sentence("list", tmp_path / "lists")


@given(st.data())
@same_folder
def test_a_damaged_shard(shards, data):
    root, _ = shards
    (root / "train-000007.tar").write_bytes(data.draw(damaged((root / "train-000001.tar").read_bytes())))
    check_splits_or_sentence("shards", root)


PIXELS = np.random.default_rng(0).integers(0, 256, (9, 7, 3)).astype(np.uint8)
IMAGES = [cv2.imencode(kind, PIXELS)[1].tobytes() for kind in (".png", ".jpg", ".bmp", ".webp", ".tiff", ".ppm")]


@given(st.sampled_from(IMAGES).flatmap(damaged))
def test_a_damaged_image_is_an_image_or_a_sentence(data):
    with suppress(ImageError):
        image = decode(data, "a.png")
        assert image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3 and image.size


@given(st.dictionaries(st.sampled_from([*Preprocess(8).to_dict(), "x"]), trees, max_size=3))
def test_preprocessing_of_any_shape(changes):
    with suppress(UserError):
        assert np.isfinite(Preprocess(**Preprocess(8).to_dict() | changes).tables).all()


ABOUT = {
    "format": "paddle", "precision": "fp32", "engine": "plain", "output": "probabilities",
    "differences": {"plain": 1e-7}, "dynamic_size": False, "stride": 4, "classes": ["ant", "bee"],
    "preprocess": Preprocess(8).to_dict(), "source": {}, "sha256": {},
}  # fmt: skip


@given(st.dictionaries(st.sampled_from([*ABOUT]), trees, max_size=3), st.booleans(), st.data())
@same_folder
def test_a_description_of_any_shape(tmp_path, changes, intact, data):
    path = tmp_path / "ppattn.json"
    with suppress(UnicodeEncodeError):
        path.write_text(json.dumps(ABOUT | changes))
    if not intact:
        path.write_bytes(data.draw(damaged(path.read_bytes())))
    try:
        about = read_about(tmp_path)
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(about, About) and all(isinstance(name, str) for name in about.classes)


@given(st.text())
def test_shown_text_holds_no_control_characters(text):
    assert printable(text).isprintable() or all(ord(sign) > 127 for sign in printable(text) if not sign.isprintable())
    assert "\x1b" not in printable(text) and "\n" not in printable(text)
    assert printable(text).encode().decode() == printable(text)


@given(st.sampled_from(["=", "+", "-", "@", "\t=", "\r", ""]), st.text())
def test_no_cell_of_a_table_is_a_formula(sign, text):
    shown = csv_cell(sign + text)
    if shown.startswith(("=", "+", "-", "@")):
        assert math.isfinite(float(shown)) or shown.strip("+-0123456789.eE") == ""
    assert not shown.startswith(("\t", "\r", "\n"))
