"""The files that other libraries wrote (tests/foreign), beside the logits that these gave, and models for them."""

import json
from pathlib import Path

import numpy as np
import paddle

import ppattn
from ppattn import weights, zoo

FOLDER = Path(__file__).resolve().parents[1] / "foreign"


def source(name: str) -> Path:
    return next(path for path in FOLDER.glob(f"{name}.*") if path.suffix != ".json")


def facts(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text())


SHAPE = facts("timm_deit")["arguments"]  # also of transformers' and PaddleClas's DeiT


def small_deit(monkeypatch, **weights: str) -> str:
    """The name of a model of this shape in the zoo, a published one where it has addresses of weights."""
    entry = zoo.table.Entry("small_deit", "deit", SHAPE.copy(), 50.0 if weights else None, "", "", weights, True)
    monkeypatch.setitem(zoo.model_entries(), "small_deit", entry)
    return "small_deit"


def converted(name: str, path=None, **arguments):
    about = facts(name)
    model = ppattn.create_model(about["model"], **about["arguments"] | arguments)
    return model, weights.convert(model, path or source(name)), about


def changed(tmp_path, name: str, change) -> Path:
    """A fixture with other arrays, as .npz."""
    arrays, _ = weights.read(source(name))
    np.savez(tmp_path / "changed.npz", **change(dict(arrays)))
    return tmp_path / "changed.npz"


def images_of(seed: int, *shape: int) -> paddle.Tensor:
    return paddle.to_tensor(np.random.RandomState(seed).standard_normal(shape).astype("float32"))


def agree(found: paddle.Tensor, expected: list) -> bool:
    """To 1e-5 of the largest value."""
    return np.abs(found.numpy() - np.array(expected)).max() <= 1e-5 * np.abs(expected).max()
