"""The authors' weights, in each format they come in, become a file of ours that gives the same outputs."""

from __future__ import annotations

import io
import pickle
import sys
import types
import zipfile
from argparse import Namespace

import golden_data
import numpy as np
import paddle
import pytest
from safetensors.numpy import save_file

import ppattn
from ppattn.cli import main

CASE = golden_data.CASES["full_deit_tiny"]


def rebuild(*_):
    raise AssertionError("only its name goes into the file")


class Storage:
    """Pickles as torch.save would write a float storage: by kind, number and length."""

    def __init__(self, kind, number, size):
        self.key = ("storage", kind, str(number), "cpu", size)


class Tensor:
    def __init__(self, kind, number, array):
        strides = tuple(s // array.itemsize for s in array.strides)
        self.parts = (Storage(kind, number, array.size), 0, array.shape, strides, False, None)

    def __reduce__(self):
        return sys.modules["torch._utils"]._rebuild_tensor_v2, self.parts


class Pickler(pickle.Pickler):
    def persistent_id(self, obj):
        return obj.key if isinstance(obj, Storage) else None


def write_pth(path, arrays, monkeypatch):
    """A PyTorch checkpoint (format of 1.6 and later) without PyTorch."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    torch.FloatStorage = type("FloatStorage", (), {"__module__": "torch"})
    rebuild.__module__, rebuild.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
    utils._rebuild_tensor_v2 = rebuild
    content = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", torch)
        patch.setitem(sys.modules, "torch._utils", utils)
        tensors = {name: Tensor(torch.FloatStorage, i, a) for i, (name, a) in enumerate(arrays.items())}
        Pickler(content, protocol=2).dump({"model": tensors, "epoch": 300, "args": Namespace(lr=1e-3, tags={"a"})})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content.getvalue())
        for i, array in enumerate(arrays.values()):
            archive.writestr(f"archive/data/{i}", array.tobytes())


@pytest.mark.parametrize("suffix", ["pth", "safetensors", "npz"])
def test_converted_file_gives_the_official_output(suffix, tmp_path, monkeypatch, capsys):
    arrays = golden_data.arrays(CASE)
    source = tmp_path / f"official.{suffix}"
    if suffix == "pth":
        write_pth(source, arrays, monkeypatch)
    elif suffix == "npz":
        np.savez(source, **arrays)
    else:
        save_file(arrays, source)
    assert main("convert", ["--model", "deit_tiny", "--from", str(source), "--output", str(tmp_path / "ours")]) == 0
    said = capsys.readouterr().out
    assert f"{len(arrays)} tensors loaded from {source}" in said and "ours.safetensors" in said
    direct = ppattn.create_model("deit_tiny")
    ppattn.load_official(direct, arrays)
    ours = ppattn.create_model("deit_tiny", weights=tmp_path / "ours")
    x = paddle.to_tensor(golden_data.image(3, [2, 3, 224, 224]))
    direct.eval(), ours.eval()
    with paddle.no_grad():
        np.testing.assert_array_equal(ours(x).numpy(), direct(x).numpy())


def test_position_table_is_resized_and_reported(tmp_path, capsys):
    np.savez(tmp_path / "official.npz", **golden_data.arrays(CASE))
    command = ["--model", "deit_tiny", "--from", str(tmp_path / "official.npz"), "--output", str(tmp_path / "ours")]
    assert main("convert", [*command, "--img-size", "160"]) == 0
    assert "resized: pos_embed [1, 197, 192] -> [1, 101, 192]" in capsys.readouterr().out
    model = ppattn.create_model("deit_tiny", img_size=160, weights=tmp_path / "ours")
    assert model(paddle.zeros([1, 3, 160, 160])).shape == [1, 1000]


def test_another_head_needs_allow(tmp_path, capsys):
    arrays = golden_data.arrays(CASE)
    arrays["head.weight"], arrays["head.bias"] = np.zeros([21841, 192], "float32"), np.zeros([21841], "float32")
    np.savez(tmp_path / "official.npz", **arrays)
    command = ["--model", "deit_tiny", "--from", str(tmp_path / "official.npz"), "--output", str(tmp_path / "ours")]
    assert main("convert", command) == 2
    assert "head.weight" in capsys.readouterr().err and not (tmp_path / "ours.safetensors").exists()
    assert main("convert", [*command, "--allow", "head"]) == 0
    said = capsys.readouterr().out
    assert f"{len(arrays) - 2} tensors loaded" in said and "left at initial values: head.weight" in said
