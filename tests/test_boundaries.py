"""Whatever a file or an option holds, what reads it gives checked content or a `UserError`, and runs nothing from it.

Inputs are made by Hypothesis: parts of right ones, put together at random, cut, and with bytes changed.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import shutil
from contextlib import suppress

import cv2
import numpy as np
import pytest
from data_sets import cifar_archive, cifar_files, config, write_image
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ppattn.config import load_config, override
from ppattn.data import ImageError, Preprocess, build_datasets, decode
from ppattn.deploy.description import Description, read_description, seal
from ppattn.download import checksum
from ppattn.errors import UserError
from ppattn.safe_yaml import parse
from ppattn.settings import Config
from ppattn.text import cell, printable
from ppattn.unpickle import ArrayUnpickler

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


# YAML and the config language

YAML_PARTS = [
    *("{", "}", "[", "]", ": ", ", ", "- ", "\n", "  ", "&a ", "*a", "<<: ", "? ", "| ", "> ", "#", "'", '"', "---\n"),
    *("!!int ", "!!float ", "!!python/name:os.system ", "!!binary ", "!!timestamp ", "!!set ", "!x ", "%YAML 1.1\n"),
    *("train", "epochs", "model", "data", "optimizer", "lr", "base", "attention_options", "mean", "betas", "a"),
    *("1", "0", "-1", "1e400", ".inf", "-.inf", ".nan", "0x1f", "1_0", "1:30", "2024-13-45", "9" * 60, "~", "yes"),
    *("\0", "\x1b[31m", "\ud800", "\ufeff", "\\u0000", "\t"),
]
yaml_texts = st.lists(st.sampled_from(YAML_PARTS) | st.text(max_size=4), max_size=25).map("".join)


def finite_and_acyclic(value: object, depth: int = 0) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and finite_and_acyclic(item, depth + 1) for key, item in value.items())
    if isinstance(value, list):
        return depth < 100 and all(finite_and_acyclic(item, depth + 1) for item in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | int) or (isinstance(value, str) and "\0" not in value)


@given(yaml_texts)
def test_yaml_gives_plain_values_or_a_sentence(text):
    try:
        value, _ = parse(text, "config.yaml")
    except UserError as error:
        assert str(error).startswith("config.yaml is not valid YAML") and "\n" not in str(error)
    else:
        assert finite_and_acyclic(value)


DOUBLED = "".join(f"{new}: &{new} [*{old}, *{old}, *{old}, *{old}]\n" for old, new in zip("abcdefghi", "bcdefghij"))  # noqa: B905


@pytest.mark.parametrize(
    "text",
    ["[" * 10**5, "{a: " * 10**4, "- " * 10**4, "&a [*a]", "&a {b: *a}", "9" * 10**5, "a: 2024-99-99", "!!int x"]
    + ["!!bool x", "!!float ''", "1e400", "-.inf", ".NaN", "0x" + "f" * 5000, "1: 2", '"\\0"', "a" * 2 * 10**6]
    + ["a: &a [0, 0, 0, 0]\n" + DOUBLED],
    ids=lambda text: text[:12],
)
def test_yaml_that_would_hang_or_fill_the_memory(text):
    with pytest.raises(UserError, match="is not valid YAML"):
        parse(text, "config.yaml")


@given(yaml_texts)
@same_folder
def test_a_config_file_gives_a_config_or_a_sentence(tmp_path, text):
    path = tmp_path / "wrong.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    with suppress(UserError):
        assert isinstance(load_config(path)[0], Config)


@given(trees)
def test_settings_of_any_shape_give_a_config_or_a_sentence(tree):
    with suppress(UserError):
        assert isinstance(override(tree, [])[0], Config)


KEYS = [
    f"{section}.{key}"
    for section, field in Config.model_fields.items()
    if hasattr(field.annotation, "model_fields")
    for key in field.annotation.model_fields
]


@given(st.sampled_from(KEYS), yaml_texts)
def test_an_override_gives_a_config_or_a_sentence(key, text):
    with suppress(UserError):
        assert isinstance(override({}, [f"{key}={text}"])[0], Config)


def test_no_setting_takes_a_number_that_is_not_finite():
    for key in KEYS:
        for value in (math.inf, -math.inf, math.nan, [math.nan] * 3):
            section, _, name = key.partition(".")
            if name != "attention_options":
                with pytest.raises(UserError, match=name):
                    override({section: {name: value}}, [])


# pickles


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


ARRAY = {b"data": np.arange(24, dtype=np.uint8).reshape(2, 12), b"labels": [0, 1], b"x": {"a": (1.5, None, b"c")}}
PICKLES = [pickle.dumps(ARRAY, protocol) for protocol in range(5)] + [pickle.dumps([Evil(), ARRAY], 2)]
OPCODES = [
    *(
        b"]",
        b"}",
        b")",
        b"N",
        b"K\x01",
        b"(",
        b"a",
        b"e",
        b"s",
        b"u",
        b"t",
        b"R",
        b"b",
        b"0",
        b"1",
        b"2",
        b".",
        b"\x81",
    ),
    *(b"q\x00", b"h\x00", b"r\xff\xff\xff\x7f", b"cnumpy\nndarray\n", b"cnumpy\ndtype\n", b"c_codecs\nencode\n", b"Q"),
    *(b"cos\nmkdir\n", b"X\x08\x00\x00\x00executed", b"\x82\x01", b"\x8e" + b"\xff" * 8, b"\x96" + b"\xff" * 8),
    *(b"cnumpy._core.multiarray\n_reconstruct\n", b"ccollections\nOrderedDict\n", b"cbuiltins\nset\n", b"U\x01b"),
]


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
        assert kind.__module__ in ("builtins", "collections", "ppattn.unpickle"), kind


@given(st.data())
@same_folder
def test_a_cifar_folder_gives_images_or_a_sentence(tmp_path, data):
    files, _, _ = cifar_files()
    name = data.draw(st.sampled_from(sorted(files)))
    files[name] = data.draw(damaged(files[name]))
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir(exist_ok=True)
    for member, content in files.items():
        (folder / member).write_bytes(content)
    check_splits_or_sentence("cifar10", folder)


@given(st.data())
@same_folder
def test_a_cifar_archive_gives_images_or_a_sentence(tmp_path, data):
    whole = cifar_archive(tmp_path / "whole.tar", cifar_files()[0], mode="w").read_bytes()
    (tmp_path / "damaged.tar").write_bytes(data.draw(damaged(whole)))
    check_splits_or_sentence("cifar10", tmp_path / "damaged.tar")


def check_splits_or_sentence(name, root, **settings):
    """Whatever is built has labels of its classes."""
    try:
        splits = build_datasets(config(name, root, download=False, **settings))
    except UserError as error:
        assert "\n" not in str(error)
        return
    for split in (splits.train, splits.val):
        assert split.labels.min() >= 0 and split.labels.max() < len(splits.classes) and len(splits.classes) <= 10**6
    assert all(isinstance(name, str) and name.isprintable() for name in splits.classes)


# lists, shards, images

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


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    from ppattn.data.shards import write_shards
    from ppattn.data.splits import FileSplit

    root = tmp_path_factory.mktemp("packed")
    for i in range(6):
        write_image(root / f"{i}.png", i, (5, 6, 3))
    split = FileSplit(root, [f"{i}.png" for i in range(6)], np.arange(6) % 2)
    for part in ("train", "val"):
        write_shards(split, root / "shards", part, per_shard=3)
    return root / "shards"


@given(st.data())
def test_an_index_of_shards_of_any_shape(packed, data):
    whole = json.loads((packed / "shards.json").read_text()) if (packed / "shards.json").exists() else {}
    entry = st.fixed_dictionaries({}, optional={"stamp": trees, "labels": st.lists(numbers, max_size=3) | trees})
    index = data.draw(trees | st.dictionaries(st.sampled_from(["train-000000.tar", "x"]), entry | trees, max_size=2))
    (packed / "shards.json").write_text(json.dumps(index))
    try:
        check_splits_or_sentence("shards", packed)
    finally:
        (packed / "shards.json").write_text(json.dumps(whole))


@given(st.data())
def test_a_damaged_shard(packed, data):
    path = packed / "train-000001.tar"
    whole, index = path.read_bytes(), (packed / "shards.json").read_bytes()
    path.write_bytes(data.draw(damaged(whole)))
    try:
        check_splits_or_sentence("shards", packed)
    finally:
        path.write_bytes(whole)
        (packed / "shards.json").write_bytes(index)


@given(
    st.text(max_size=30) | st.sampled_from(["{0..99999999999}", "{a,{b,{c", "/etc/*.tar", "", "{..}", "**", "../*.tar"])
)
def test_a_pattern_of_shards(packed, pattern):
    check_splits_or_sentence("shards", packed, train=pattern.replace("\0", "") or "x")


PIXELS = np.random.default_rng(0).integers(0, 256, (9, 7, 3)).astype(np.uint8)
IMAGES = [cv2.imencode(kind, PIXELS)[1].tobytes() for kind in (".png", ".jpg", ".bmp", ".webp", ".tiff", ".ppm")]


@given(st.sampled_from(IMAGES).flatmap(damaged))
def test_a_damaged_image_is_an_image_or_a_sentence(data):
    with suppress(ImageError):
        image = decode(data, "a.png")
        assert image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3 and image.size


# exported folders


@given(st.dictionaries(st.sampled_from([*Preprocess(8).to_dict(), "x"]), trees, max_size=3))
def test_preprocessing_of_any_shape(changes):
    with suppress(UserError):
        preprocess = Preprocess.from_dict(Preprocess(8).to_dict() | changes)
        assert np.isfinite(preprocess.normalise(np.zeros((2, 2, 3), np.uint8))).all()


ABOUT = {
    "format": "paddle", "precision": "fp32", "engine": "plain", "output": "logits",
    "differences": {"plain": 1e-7}, "dynamic_size": False,
    "input": {"stride": 4}, "classes": ["ant", "bee"], "preprocess": Preprocess(8).to_dict(), "source": {},
}  # fmt: skip


@given(st.dictionaries(st.sampled_from([*ABOUT, "sha256"]), trees, max_size=3), st.booleans(), st.data())
@same_folder
def test_a_description_of_any_shape(tmp_path, changes, sealed, data):
    for name in ("model.pdiparams", "golden.npz"):
        (tmp_path / name).write_bytes(b"content")
    sums = {name: checksum(tmp_path / name) for name in ("model.pdiparams", "golden.npz")}
    path = tmp_path / "inference.json"
    with suppress(UnicodeEncodeError):
        seal(path, ABOUT | {"sha256": sums} | changes)
    if not sealed:
        path.write_bytes(data.draw(damaged(path.read_bytes())))
    try:
        about = read_description(tmp_path)
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(about, Description) and about.classes and all(isinstance(c, str) for c in about.classes)


# what is shown


@given(st.text())
def test_shown_text_holds_no_control_characters(text):
    assert printable(text).isprintable() or all(ord(sign) > 127 for sign in printable(text) if not sign.isprintable())
    assert "\x1b" not in printable(text) and "\n" not in printable(text)
    assert printable(text).encode().decode() == printable(text)


@given(st.sampled_from(["=", "+", "-", "@", "\t=", "\r", ""]), st.text())
def test_no_cell_of_a_table_is_a_formula(sign, text):
    shown = cell(sign + text)
    if shown.startswith(("=", "+", "-", "@")):
        assert math.isfinite(float(shown)) or shown.strip("+-0123456789.eE") == ""
    assert not shown.startswith(("\t", "\r", "\n"))
