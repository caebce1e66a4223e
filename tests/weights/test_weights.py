"""Weights files: round trips, damage, foreign and hostile files, the authors' formats, resized tables."""

import io
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

import cv2
import numpy as np
import paddle
import pytest

import ppattn
from ppattn import weights
from ppattn.backbones.swin import RelativePositionBias
from ppattn.data.classes import check_names
from ppattn.errors import UserError
from ppattn.files import pickles
from ppattn.layers import resize_grid
from tests.helpers import golden_data as golden
from tests.helpers.data_sets import Evil

ARRAYS = {"a.weight": np.arange(15, dtype="f4").reshape(3, 5), "b": np.array([1, -2], np.int64), "c": np.array(0.5)}


def tiny(**arguments):
    shape = {"img_size": 32, "patch_size": 16, "embed_dim": 12, "depth": 1, "num_heads": 3, "num_classes": 5}
    return ppattn.create_model("deit_tiny", **shape | arguments)


def arrays_of(model) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def by_hand(data: bytes, **header: list) -> bytes:
    """A safetensors file of tensors name=[dtype, shape, offsets], from the description of the format."""
    keys = ("dtype", "shape", "data_offsets")
    text = json.dumps({name: dict(zip(keys, row, strict=True)) for name, row in header.items()}).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_save_and_read_give_the_same_bytes_back(tmp_path):
    weights.save(tmp_path / "w.safetensors", ARRAYS, {"epoch": 3, "text": "Grüße"})
    for path in (tmp_path / "w.safetensors", tmp_path / "w"):
        arrays, metadata = weights.read(path)
        assert metadata == {"epoch": 3, "text": "Grüße"} and same(arrays, ARRAYS)
        assert all(arrays[name].dtype == array.dtype for name, array in ARRAYS.items())
    assert os.listdir(tmp_path) == ["w.safetensors"]


def test_a_truncated_or_changed_file_is_refused(tmp_path):
    weights.save(path := tmp_path / "w.safetensors", ARRAYS, {"classes": ["cat", "dog"]})
    data, incomplete = path.read_bytes(), "not a complete safetensors file"
    changed = data[:-7] + bytes([data[-7] ^ 4]) + data[-6:]
    for damaged, words in (
        *((data[:cut], incomplete) for cut in (0, 4, 100, -1)),
        (changed, "checksum"),
        (data.replace(b"cat", b"cow"), "checksum"),
        (data.replace(b"classes", b"\\\\asses"), "checksum|safetensors"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=words):
            weights.read(tmp_path / "w")


@pytest.mark.parametrize("suffix", [".pdparams", ".pth"])
def test_a_pickle_that_runs_code_is_refused_and_not_run(tmp_path, monkeypatch, suffix):
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"w{suffix}").write_bytes(pickle.dumps({"a": np.zeros(3), "b": Evil()}))
    with pytest.raises(UserError, match="mkdir"):
        weights.read(tmp_path / "w")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("dtype,rtol,nested", [("float32", 0, False), ("bfloat16", 2**-8, False), ("float32", 0, True)])
def test_a_paddle_state_dict_is_read(tmp_path, dtype, rtol, nested):
    model, other = tiny(), tiny()
    tensors = {n: t.astype(dtype) for n, t in model.state_dict().items()}
    paddle.save({"model": tensors, "epoch": 3} if nested else tensors, str(tmp_path / "m.pdparams"))
    weights.load(other, tmp_path / "m")
    assert all(np.allclose(array, arrays_of(other)[n], rtol=rtol, atol=0) for n, array in arrays_of(model).items())


@pytest.mark.parametrize("form", ["zip", "before_1.6"])
def test_pytorch_checkpoints_are_read_without_pytorch(form):
    """PyTorch 2.13 saved them with `_use_new_zipfile_serialization` True and False, and with the script's arguments."""
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    expected = {"a": a, "t": (a + 1).T, "part": a + 2, "c": a.T}  # transposed, the end of a storage, bfloat16
    expected |= {"b": np.array([5, 6, 7]), "h": np.array([0.5, -2.0], np.float16)}
    arrays, _ = weights.read(Path(__file__).resolve().parents[1] / f"foreign/pytorch_{form}.pth")
    assert same(arrays, expected) and all(arrays[k].dtype == v.dtype for k, v in expected.items())


def test_a_tensor_of_something_else_than_a_storage_is_refused():
    """A hostile pickle may hand a whole array to the function that makes tensors, and read behind its end."""
    with pytest.raises((ValueError, TypeError), match="buffer|strides"):
        pickles._rebuild_tensor(np.zeros((2, 4), "f4"), 2, (7,), (1,))


def test_official_weights_must_fit_completely():
    case = golden.CASES["shrunk_deit_softmax"]
    keys = ("img_size", "patch_size", "num_classes", "embed_dim", "depth", "num_heads")
    arguments = {key: case["kwargs"][key] for key in keys}
    arrays = golden.arrays(case)
    for change, words in (
        ({"blocks.1.norm1.bias": None}, "blocks.1.norm1.bias is missing"),
        ({"blocks.9.norm1.bias": np.zeros(48)}, "blocks.9.norm1.bias is not in the model"),
        ({"fc_norm.bias": np.zeros(48)}, "fc_norm.bias is not in the model"),  # that of a model with this norm
        ({"head.bias": np.zeros(11)}, "head.bias is [11], the model has [10]"),
        ({"pos_embed": np.zeros((1, 10, 48), "f4")}, "pos_embed"),
    ):
        changed = {k: v for k, v in {**arrays, **change}.items() if v is not None}
        model = ppattn.create_model("deit_tiny", **arguments)
        before = arrays_of(model)
        with pytest.raises(UserError, match=words.replace("[", r"\[")):
            ppattn.load_official(model, changed)
        assert same(before, arrays_of(model))
    assert ppattn.load_official(model, changed, resize=True).resized


def test_biases_of_another_number_of_agents_are_refused(tmp_path):
    nine, four = (tiny(attention="agent", attention_options={"agent_num": count}) for count in (9, 4))
    weights.save(tmp_path / "w.safetensors", nine.state_dict(), {})
    with pytest.raises(UserError, match="an_bias"):
        weights.load(four, tmp_path / "w")


def test_a_new_head_must_be_named_and_one_that_is_reset_stays_although_it_would_fit(tmp_path):
    source, other, third = tiny(), tiny(), tiny(num_classes=3)
    weights.save(tmp_path / "w.safetensors", source.state_dict(), {})
    with pytest.raises(UserError, match=r"head.weight is \[12, 5\], the model has \[12, 3\].*\. Do this\.$"):
        weights.load(third, tmp_path / "w", advice="Do this.")
    report = weights.load(third, tmp_path / "w", allow=["head"])
    assert [text.split(" ")[0] for text in report.missing] == ["head.weight", "head.bias"]
    expected = arrays_of(source) | {name: a for name, a in arrays_of(other).items() if name.startswith("head")}
    report = weights.load(other, tmp_path / "w", reset=["head"])
    assert same(arrays_of(other), expected)
    assert "left at initial values: head.weight; head.bias\n" in f"{report}\n" and "missing" not in str(report)


def test_a_run_folder_gives_its_best_checkpoint(tmp_path):
    for name, number in (("best", 1), ("latest", 2)):
        weights.save(tmp_path / f"run/checkpoints/{name}.safetensors", {"a": np.array([number])}, {})
    weights.save(tmp_path / "run.safetensors", {"a": np.array([3])}, {})  # beside the folder, as `release` may leave it
    for path in (tmp_path / "run", tmp_path / "run/checkpoints/best"):
        assert weights.read(path)[0]["a"].tolist() == [1]
    with pytest.raises(UserError, match="a run folder has checkpoints/best"):
        weights.read(tmp_path)


def zipped(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def torch_pickle(size: int, stride: int, count: int) -> bytes:
    """A state dict of one float tensor [size] in a storage of `count` numbers, by hand."""
    storage = b"(S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI%d\ntQ" % count
    shape = b"I0\n(I%d\nt(I%d\nt" % (size, stride)
    return b"\x80\x02}S'w'\nctorch._utils\n_rebuild_tensor_v2\n(" + storage + shape + b"\x89}tRs."


BEFORE_1_6 = b"".join(pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {}))
KEYS = pickle.dumps(["0"], 2) + struct.pack("<q", 1) + b"1234"
FIELDS = b"{'descr': '%s', 'fortran_order': False, 'shape': (3000000,), }"
NUMBERS, OBJECTS = (b"\x93NUMPY\x01\x00v\x00" + (FIELDS % kind).ljust(117) + b"\n" for kind in (b"<f4", b"|O"))
DAMAGED = "is damaged or not a complete (weights|safetensors) file"
NO_WEIGHTS = [b"<!DOCTYPE html>", b"PK\x03\x04" + bytes(200), b"\x89PNG\r\n" + bytes(200), b""]


@pytest.mark.parametrize(
    ("suffix", "content", "words"),
    [*((suffix, content, DAMAGED) for suffix in (".pth", ".safetensors", ".npz") for content in NO_WEIGHTS),
     (".safetensors", by_hand(bytes(8), w=["F8_E5M2", [8], [0, 8]]), r"holds quantised weights \(F8_E5M2\)"),
     (".safetensors", by_hand(bytes(8), w=["Q7", [8], [0, 8]]), DAMAGED),
     (".npz", zipped({"w.npy": OBJECTS}), "Object arrays cannot be loaded"),
     (".pth", zipped({"x/data/0": b"1234", "x/data.pkl": torch_pickle(10**6, 0, 1)}), "larger than its storage"),
     (".pth", zipped({"x/data/0": b"1234", "x/data.pkl": torch_pickle(8, 1, 1)}), "larger than its storage"),
     (".pth", zipped({"x/data/0": bytes(10**7), "x/data.pkl": torch_pickle(8, 1, 8)}), "unpack to more than 20"),
     (".npz", zipped({"w.npy": NUMBERS + bytes(12 * 10**6)}), "unpack to more than 20"),
     (".pth", BEFORE_1_6 + torch_pickle(10**6, 1, 10**6) + KEYS, "larger than the file"),
     (".pth", BEFORE_1_6 + torch_pickle(10**6, 0, 1) + KEYS, "larger than its storage")],
)  # fmt: skip
def test_files_without_weights_or_of_small_ones_that_would_become_large_are_refused(tmp_path, suffix, content, words):
    (tmp_path / f"w{suffix}").write_bytes(content)
    with pytest.raises(UserError, match=rf"w\{suffix} .*{words}"):
        weights.read(tmp_path / f"w{suffix}")


@pytest.mark.parametrize("kind", [">f4", ">f8", "<u4", ">u2", "<u8"])
def test_arrays_of_another_byte_order_or_type_are_read(tmp_path, kind):
    model = tiny()
    whole = {name: np.rint(9 * np.abs(array)) for name, array in arrays_of(model).items()}
    np.savez(tmp_path / "w.npz", **{name: array.astype(kind) for name, array in whole.items()})
    weights.load(model, tmp_path / "w.npz")
    assert same(whole, arrays_of(model))
    for odd in (np.full(12, 1e300), np.zeros(12, complex)):  # beyond float32, or no number of it
        np.savez(tmp_path / "w.npz", **whole | {"norm.bias": odd})
        with pytest.raises(UserError, match="not finite numbers"):
            weights.load(model, tmp_path / "w.npz")


def test_class_names_with_joiners_are_text(tmp_path):
    """Persian and emoji need them; a training that took such names must give a file that can be read."""
    known = {"config": {}, "preprocess": {"mean": [0.0] * 3, "std": [1.0] * 3}}
    names = ["می\u200cخواهم", "\U0001f468\u200d\U0001f469"]
    weights.save(tmp_path / "w", {"a": np.zeros(1)}, known | {"classes": check_names(names, "data")})
    assert weights.read(tmp_path / "w")[1]["classes"] == names
    weights.save(tmp_path / "w", {"a": np.zeros(1)}, known | {"classes": ["a\u2028b"]})
    with pytest.raises(UserError, match="should be printable text"):
        weights.read(tmp_path / "w")


def test_bfloat16_safetensors_are_read(tmp_path):
    """As published on the hub; numpy has no such type."""
    values = np.array([[1.0, -2.5, 3.140625], [0.0, 1e30, -1e-30]], np.float32)
    half = (values.view("<u4") >> 16).astype("<u2")  # cut, not rounded
    data = half.tobytes() + struct.pack("<q", 7)
    for name in ("w.safetensors", "w.bin"):
        (tmp_path / name).write_bytes(by_hand(data, w=["BF16", [2, 3], [0, 12]], n=["I64", [1], [12, 20]]))
        arrays, _ = weights.read(tmp_path / name)
        assert arrays["w"].dtype == np.float32 and arrays["n"].tolist() == [7]
        assert np.array_equal(arrays["w"], (half.astype("<u4") << 16).view("<f4"))
        assert np.allclose(arrays["w"], values, rtol=2**-7)


@pytest.mark.parametrize("sizes", [((24, 16), (32, 16)), ((24, 16), (16, 24)), ((42, 26), (32, 32))], ids=str)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("deit_nano", {"attention": "focused"}), ("pvt_nano", {"attention": "focused"}),
     ("deit_nano", {"attention": "agent", "attention_options": {"agent_num": 9}, "depth": 2}),
     ("swin_nano", {"ape": True, "window_size": 2})],
)  # fmt: skip
def test_tables_of_a_model_that_is_not_square_are_resized_as_at_run_time(name, arguments, sizes, tmp_path):
    """Also where both grids have the same number of tokens."""
    model, other = (ppattn.create_model(name, img_size=size, num_classes=4, **arguments) for size in sizes)
    for parameter_name, p in model.named_parameters():
        if parameter_name.endswith("positional_encoding"):
            p.set_value(paddle.randn(p.shape))
    built = {"img_size": sizes[0]}
    metadata = {"preprocess": built} if name == "pvt_nano" else {"config": {"model": built}}
    weights.save(tmp_path / "w.safetensors", model.state_dict(), metadata)
    assert weights.load(other, tmp_path / "w").resized
    x = paddle.randn([2, 3, *sizes[1]])
    model.eval(), other.eval()
    assert np.abs((model(x) - other(x)).numpy()).max() < 1e-5


def test_tables_of_the_soft_pyramid_have_one_grid_whatever_the_image():
    """Taken for those of the image they would be 112 x 28, 56 x 14, ... here, of as many tokens as the real ones."""
    shape = {"embed_dims": [32, 64, 64, 64], "num_heads": [1, 2, 2, 2], "depths": [1, 1, 1, 1], "num_classes": 4}
    model = ppattn.create_model("soft_tiny", img_size=64, **shape)
    arrays = arrays_of(model)
    assert not weights.assign(model, arrays, "it", weights.Metadata(preprocess={"img_size": [448, 112]})).resized
    assert same(arrays, arrays_of(model))


def test_a_model_in_half_precision_takes_weights():
    """As a run with `amp_level: O2` does that goes on; bfloat16 keeps eight bits."""
    arrays, model = arrays_of(tiny()), tiny()
    model.to(dtype="bfloat16")
    weights.assign(model, arrays, "file")
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == paddle.bfloat16
        assert np.abs(tensor.astype("float32").numpy() - arrays[name]).max() <= 2**-8 * np.abs(arrays[name]).max(), name


@pytest.mark.parametrize(("mode", "flag"), [("bilinear", cv2.INTER_LINEAR), ("bicubic", cv2.INTER_CUBIC)])
def test_tables_are_resized_as_opencv_resizes_images(mode, flag):
    table = np.random.default_rng(0).standard_normal((1, 2 + 3 * 5, 4)).astype("float32")
    found = resize_grid(paddle.to_tensor(table), (3, 5), (7, 9), num_prefix=2, mode=mode).numpy()
    expected = cv2.resize(table[0, 2:].reshape(3, 5, 4), (9, 7), interpolation=flag).reshape(-1, 4)
    assert np.array_equal(found[0, :2], table[0, :2]) and np.abs(found[0, 2:] - expected).max() < 1e-5
    table = table.reshape(-1, 2)[:25]  # the position bias of windows of 3 x 3
    expected = cv2.resize(table.reshape(5, 5, 2), (7, 7), interpolation=cv2.INTER_CUBIC).reshape(-1, 2)
    assert np.abs(RelativePositionBias(4, num_heads=2).resized("table", table, None) - expected).max() < 1e-5


def test_a_table_that_is_traced_for_any_size_is_unchanged_at_its_own():
    model = ppattn.create_model("dinov2_small", img_size=(28, 42), depth=1, embed_dim=8, num_heads=2)
    paddle.nn.initializer.Normal()(model.pos_embed)
    model.eval()
    traced = paddle.jit.to_static(model.forward, [paddle.static.InputSpec([None, 3, None, None])], full_graph=True)
    for x in (paddle.randn([1, 3, *size]) for size in ((28, 42), (28, 56), (42, 42))):
        assert np.abs((traced(x) - model(x)).numpy()).max() < 1e-5


@pytest.mark.parametrize("channels", [1, 4])
def test_weights_of_rgb_for_other_channels_and_a_new_head(tmp_path, channels):
    rgb = tiny()
    weights.save(tmp_path / "w.safetensors", rgb.state_dict(), {})
    model = tiny(weights=tmp_path / "w", num_classes=3, in_chans=channels)
    old, new = (one.patch_embed.proj.weight.numpy() for one in (rgb, model))
    expected = old.sum(1, keepdims=True) if channels == 1 else 0.75 * old[:, [0, 1, 2, 0]]
    assert np.allclose(new, expected) and model.head.weight.shape == [12, 3]
    assert np.array_equal(model.blocks[0].norm1.weight.numpy(), rgb.blocks[0].norm1.weight.numpy())
    if channels == 1:  # grey is answered as its three equal channels are
        rgb.eval(), model.eval()
        model.reset_classifier(0), rgb.reset_classifier(0)
        image = paddle.randn([2, 1, 32, 32])
        assert np.allclose(model(image).numpy(), rgb(image.tile([1, 3, 1, 1])).numpy(), atol=1e-5)
