"""Weights and inputs of the golden cases: functions of a name, a shape and a seed, through PCG64 and Box-Muller."""

import json
import math
import zlib
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).resolve().parents[1] / "golden"
INDEX = json.loads((FOLDER / "index.json").read_text())
CASES = {case["name"]: case for case in INDEX["cases"]}


def normals(key: str, shape) -> np.ndarray:
    """Standard normal float64 values that depend on the text `key` alone."""
    count = math.prod(shape)
    raw = np.random.PCG64(zlib.crc32(key.encode())).random_raw(count + count % 2)
    uniform = ((raw >> np.uint64(11)).astype(np.float64) + 0.5) / 2**53
    radius, angle = np.sqrt(-2 * np.log(uniform[::2])), 2 * np.pi * uniform[1::2]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)[:count].reshape(shape)


def weight(name: str, shape, salt: int = 0) -> np.ndarray:
    """The value of the official parameter or buffer `name`; its scale follows from what the name says it is."""
    z = normals(f"{name}#{salt}" if salt else name, shape)
    leaf, vector = name.split(".")[-1], len(shape) == 1
    named = ("absolute_pos_embed", "positional_encoding", "scale")
    if leaf in ("running_mean", "power"):
        z = (0.1 if leaf == "running_mean" else 0.5) * z
    elif leaf == "running_var":
        z = 1 + 0.1 * np.abs(z)
    elif leaf == "weight" and "Qnorm_act" in name:
        z = 0.3 + 0.05 * z
    elif leaf == "weight" and vector:
        z = 1 + 0.1 * z
    elif leaf.startswith("pos_embed") or leaf.endswith(("_token", "_bias", "_bias_table")) or leaf in named:
        z = 0.2 * z
    else:
        z = 0.05 * z if vector else z / np.sqrt(float(math.prod(shape[1:]))) * (0.5 if "W_q." in name else 1)
    return np.ascontiguousarray(z, np.float32)


def image(seed: int, shape) -> np.ndarray:
    """White noise; a four-dimensional shape gets a smooth field added, as images have."""
    z = normals(f"image:{seed}", shape)
    if len(shape) == 4:
        batch, channels, height, width = shape
        coarse = (max(2, height // 16 + 1), max(2, width // 16 + 1))
        field = normals(f"image-grid:{seed}", (batch, channels, *coarse))
        z = 0.4 * z + 1.2 * (_resize(height, coarse[0]) @ field @ _resize(width, coarse[1]).T)
    return z.astype(np.float32)


def _resize(size: int, coarse: int) -> np.ndarray:
    """Matrix of linear interpolation from `coarse` points to `size` points, ends on ends."""
    position = np.linspace(0.0, coarse - 1.0, size)
    left, matrix = np.minimum(position.astype(int), coarse - 2), np.zeros((size, coarse))
    matrix[np.arange(size), left] = 1 - (position - left)
    matrix[np.arange(size), left + 1] = position - left
    return matrix


def arrays(case: dict) -> dict[str, np.ndarray]:
    """All official parameters and filled buffers of a case; the few that have no formula are stored."""
    stored = {name: kind for name, _, kind in case["state_dict"] if kind in ("param_stored", "buffer_stored")}
    found = {
        name: weight(name, shape, case["salt"]) * np.float32(kind.removeprefix("param*") if "*" in kind else 1)
        for name, shape, kind in case["state_dict"]
        if kind != "buffer_as_built"
    }
    return found | {name: reference(case)[f"{kind.removesuffix('_stored')}/{name}"] for name, kind in stored.items()}


def reference(case: dict) -> dict[str, np.ndarray]:
    with np.load(FOLDER / case["npz"]) as archive:
        return dict(archive)
