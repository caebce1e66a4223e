"""Weights in and out: one atomic file format, strict loading with a report, and the authors' published checkpoints.

Our files are safetensors: the model's weights under their own names, other state under names with a slash
(`optimizer/...`, `ema/...`), and a JSON header with a SHA-256 over all tensors. Reading any format runs no code from
it.
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import json
import os
import pickle
import re
import struct
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ppattn.errors import UserError
from ppattn.unpickle import ArrayUnpickler, Refused

TABLES = ("pos_embed", "absolute_pos_embed", "positional_encoding")
SUFFIXES = (".safetensors", ".pdparams", ".npz", ".pth", ".pt", ".bin")
_BUFFERS = re.compile(r"(relative_position_index|attn_mask|num_batches_tracked)$")


# ---- files ----------------------------------------------------------------------------------------------------------


def find(path: str | Path) -> Path:
    """The file meant by a path with or without suffix; raises `UserError` where there is none."""
    path = Path(path)
    for candidate in (path, *(path.with_name(path.name + suffix) for suffix in SUFFIXES)):
        if candidate.is_file():
            return candidate
    raise UserError(
        f"No weights at {str(path)!r}: neither that file nor it with {', '.join(SUFFIXES[:3])} or .pth exists."
    )


def save(path: str | Path, tensors: dict, metadata: dict) -> None:
    """Write tensors and JSON metadata to one safetensors file: temporary file, flush to disk, rename.

    A crash or a full disk at any moment leaves the old file as it was. Raises `OSError` where the disk does not take
    it.
    """
    from safetensors.numpy import save_file

    path = Path(path)
    arrays = {name: _as_array(value) for name, value in tensors.items()}
    header = {"ppattn": json.dumps({**metadata, "sha256": _digest(arrays, json.loads(json.dumps(metadata)))})}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    try:
        try:
            save_file(arrays, temporary, header)
        except OSError:
            raise
        except Exception as error:  # safetensors wraps the system's errors in its own class
            raise OSError(f"cannot write {path}: {error}") from None
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def read(path: str | Path) -> tuple[dict[str, np.ndarray], dict]:
    """Arrays and metadata of a weights file (.safetensors, .pdparams, .npz, .pth), with or without its suffix.

    Raises:
        UserError: for a file that is missing, truncated, changed since it was written, or of another kind.
    """
    path = find(path)
    with path.open("rb") as file:
        head = file.read(8)
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix == ".npz":
        try:
            with np.load(path, allow_pickle=False) as archive:
                return dict(archive), {}
        except (ValueError, OSError, zipfile.BadZipFile, EOFError) as error:
            raise UserError(f"{path} is not a readable .npz file: {error}.") from None
    try:
        return _flatten(_read_torch_zip(path) if head[:2] == b"PK" else _read_pickle(path)), {}
    except Refused as error:
        raise UserError(
            f"{path} is refused: it asks for {error}, which is more than arrays. Nothing in it was run."
        ) from None
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        KeyError,
        IndexError,
        AttributeError,
        TypeError,
        struct.error,
    ) as error:
        raise UserError(f"{path} is not a readable weights file: truncated or of another kind ({error}).") from None
    except (zipfile.BadZipFile, OSError) as error:
        raise UserError(f"{path} is not a readable weights file: {error}.") from None


def _as_array(value) -> np.ndarray:
    if not isinstance(value, np.ndarray):
        if "bfloat16" in str(value.dtype):
            value = value.astype("float32")
        value = value.numpy()
    return np.ascontiguousarray(value)


def _digest(arrays: dict[str, np.ndarray], metadata: dict) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name}{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return digest.hexdigest()


def _read_safetensors(path: Path) -> tuple[dict[str, np.ndarray], dict]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="numpy") as file:
            text = (file.metadata() or {}).get("ppattn")
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, TypeError) as error:
        raise UserError(f"{path} is not a whole safetensors file (truncated, or of another kind): {error}.") from None
    if text is None:
        return arrays, {}
    try:
        metadata = json.loads(text)
        whole = metadata.pop("sha256", None) == _digest(arrays, metadata)
    except (ValueError, AttributeError):
        whole = False
    if not whole:
        raise UserError(f"{path} was damaged since it was written: its checksum does not fit its content.")
    return arrays, metadata


class _Storage:
    """What a torch pickle calls a storage class; only its element type matters."""

    def __init__(self, name):
        self.dtype = _TORCH_TYPES[name]


_TORCH_TYPES = {
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
    "HalfStorage": "<f2",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "|i1",
    "ByteStorage": "|u1",
    "BoolStorage": "|b1",
    "BFloat16Storage": "bf16",
}


def _rebuild_tensor(storage, offset, size, stride, *_):
    if min(offset, *size, *stride, 0) < 0:
        raise ValueError("a tensor begins before its storage")
    itemsize = storage.dtype.itemsize
    view = np.lib.stride_tricks.as_strided(storage[offset:], size, [s * itemsize for s in stride])
    last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if size else offset
    if min(size, default=1) and last >= storage.size:
        raise ValueError("a tensor reaches past the end of its storage")
    return view.copy()


def _rebuild_parameter(data, *_):
    return data


class _Settings(dict):
    """Stands for the settings that training scripts save beside the weights; keeps nothing."""


class _Unpickler(ArrayUnpickler):
    """Also knows how PyTorch keeps tensors, and the settings that training scripts save beside them."""

    known = ArrayUnpickler.known | {
        ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
        ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
        ("argparse", "Namespace"): _Settings,
        ("yacs.config", "CfgNode"): _Settings,
    }

    def __init__(self, file, storages=None):
        super().__init__(file)
        self.storages = storages

    def find_class(self, module, name):
        if module in ("torch", "torch.storage") and name in _TORCH_TYPES:
            return _Storage(name)
        return super().find_class(module, name)

    def persistent_load(self, key):
        kind, storage, number, _, count, *_ = key
        if kind != "storage" or self.storages is None:
            raise Refused(f"an object kept outside ({kind})")
        return self.storages(storage.dtype, str(number), count)


def _storage_array(data: bytes, dtype: str) -> np.ndarray:
    if dtype == "bf16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(data, dtype)


def _blank(dtype: str, count: int) -> np.ndarray:
    return np.zeros(count, "<f4" if dtype == "bf16" else dtype)


def _read_torch_zip(path: Path):
    with zipfile.ZipFile(path) as archive:
        names = {name.split("/", 1)[-1]: name for name in archive.namelist()}
        if "data.pkl" not in names:
            raise UserError(f"{path} is a zip archive, but not a PyTorch checkpoint.")

        def storages(dtype, number, count):
            return _storage_array(archive.read(names[f"data/{number}"]), dtype)

        return _Unpickler(io.BytesIO(archive.read(names["data.pkl"])), storages).load()


def _read_pickle(path: Path):
    """A Paddle state dict, or a PyTorch checkpoint of the format before 1.6."""
    with path.open("rb") as file:
        first = _Unpickler(file).load()
        if first != 0x1950A86A20F9469CFC6C:
            return first
        for _ in range(2):  # protocol, system information
            _Unpickler(file).load()
        start, wanted = file.tell(), {}
        # The storages come after the pickle that refers to them: read it twice, first for their types.
        _Unpickler(file, lambda dtype, number, count: _blank(wanted.setdefault(number, dtype), count)).load()
        keys = _Unpickler(file).load()
        storages = {}
        for key in keys:
            (count,) = struct.unpack("<q", file.read(8))
            dtype = wanted[str(key)]
            size = count * (2 if dtype == "bf16" else np.dtype(dtype).itemsize)
            storages[str(key)] = _storage_array(file.read(size), dtype)
        file.seek(start)
        return _Unpickler(file, lambda dtype, number, count: storages[number]).load()


def _flatten(tree) -> dict[str, np.ndarray]:
    """The state dict inside a checkpoint: itself, or under the usual keys."""
    if not isinstance(tree, dict):
        raise ValueError(f"it holds a {type(tree).__name__}, not a state dict")
    for key in ("model", "state_dict", "model_state", "module"):
        if isinstance(tree.get(key), dict):
            return _flatten(tree[key])
    arrays = {}
    for name, value in tree.items():
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], np.ndarray):
            value = value[1]  # paddle.save keeps (name, array)
        if isinstance(value, np.ndarray) and value.dtype == np.uint16:
            value = _storage_array(value.tobytes(), "bf16").reshape(value.shape)  # how Paddle hands out bfloat16
        if isinstance(value, np.ndarray):
            arrays[name.removeprefix("module.")] = value
    if not arrays:
        raise ValueError("it holds no arrays")
    return arrays


# ---- into a model ---------------------------------------------------------------------------------------------------


@dataclass
class LoadReport:
    """What `load` did, for the log."""

    source: str
    loaded: int = 0
    fresh: list[str] = field(default_factory=list)  # named by `allow`: keep their initial values
    resized: list[str] = field(default_factory=list)

    def __str__(self):
        lines = [f"{self.loaded} tensors loaded from {self.source}"]
        lines += [f"left at initial values: {text}" for text in self.fresh]
        lines += [f"resized: {text}" for text in self.resized]
        return "\n".join(lines)


def load(model, path: str | Path, allow: tuple[str, ...] | list[str] = ()) -> LoadReport:
    """Load a weights file written by this project into a model, completely or not at all.

    Position tables and relative position biases are resized where only their grid differs. The old grid is that of the
    img_size in the file; a file without one is taken to be of square images.

    Args:
        allow: names or patterns ("head") of parameters that may be missing or of another shape; they stay as they are.

    Raises:
        UserError: naming every missing, unexpected or misshapen tensor that `allow` does not cover.
    """
    tensors, metadata = read(path)
    return assign(model, model_tensors(tensors), str(path), allow, img_size=built_size(metadata))


def model_tensors(tensors: dict) -> dict:
    """Those of a weights file or checkpoint that make the model: the moving average where there is one."""
    average = {n.removeprefix("ema/"): a for n, a in tensors.items() if n.startswith("ema/")}
    return {name: array for name, array in tensors.items() if "/" not in name} | average


def built_size(metadata: dict) -> tuple[int, int] | None:
    """The img_size (H, W) of the model that a file holds, where its metadata say it."""
    size = metadata.get("preprocess", {}).get("img_size") or metadata.get("config", {}).get("model", {}).get("img_size")
    return (size, size) if isinstance(size, int) else size and tuple(size)


def assign(
    model, arrays: dict[str, np.ndarray], source: str, allow=(), resize: bool = True, img_size=None
) -> LoadReport:
    """Copy arrays (our names and layouts) of a model built for `img_size` (H, W; None: square) into this one.

    See `load`. A model without head ignores the head of the arrays.
    """
    own = model.state_dict()
    if getattr(model, "num_classes", None) == 0:
        arrays = {name: array for name, array in arrays.items() if not name.startswith("head.")}
    report, new, wrong = LoadReport(source), {}, []
    for name, tensor in own.items():
        shape = tuple(tensor.shape)
        if name not in arrays:
            problem = f"{name} is missing"
        else:
            resized = _resized(model, name, arrays[name], shape, img_size) if resize else None
            if resized is not None:
                new[name] = resized
                report.resized.append(f"{name} {list(arrays[name].shape)} -> {list(shape)}")
                continue
            if arrays[name].shape == shape:
                new[name] = arrays[name]
                continue
            problem = f"{name} is {list(arrays[name].shape)}, the model has {list(shape)}"
        (report.fresh if _allowed(name, allow) else wrong).append(problem)
    wrong += [f"{name} is not in the model" for name in arrays if name not in own and not _allowed(name, allow)]
    if wrong:
        shown = "; ".join(wrong[:6]) + (f"; and {len(wrong) - 6} more" if len(wrong) > 6 else "")
        hint = (
            " Use --allow head (or reset_head) for a new classifier."
            if all(w.startswith("head.") for w in wrong)
            else ""
        )
        raise UserError(f"{source} does not fit the model: {shown}.{hint}")
    for name, array in new.items():
        own[name].set_value(np.ascontiguousarray(array).astype(_numpy_type(own[name])))
    report.loaded = len(new)
    return report


def load_official(model, arrays: dict[str, np.ndarray], allow=(), resize: bool = False) -> LoadReport:
    """Load the authors' PyTorch weights.

    Args:
        resize: fit position tables and relative position biases of another grid instead of refusing them.
        arrays: official state-dict name -> array in official layout (Linear (out, in), Conv (out, in/groups, kh, kw)).

    Raises:
        UserError: on any missing, unexpected or misshapen entry that `allow` does not name.
    """
    return assign(model, from_official(model, arrays), "official weights", allow, resize)


def from_official(model, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Official names and layouts -> those of this model."""
    from ppattn.attention import Attention
    from ppattn.layers import Linear

    layers = dict(model.named_sublayers())
    plain: dict[str, np.ndarray] = {}
    inside: dict[str, dict[str, np.ndarray]] = {}
    for name, array in arrays.items():
        if _BUFFERS.search(name):
            continue
        name = _host_name(name)
        prefix, _, local = name.partition(".attn.")
        if local and isinstance(layers.get(f"{prefix}.attn"), Attention):
            inside.setdefault(f"{prefix}.attn", {})[local] = np.asarray(array)
        else:
            plain[name] = np.asarray(array)
    for prefix, local in inside.items():
        plain.update({f"{prefix}.{name}": array for name, array in layers[prefix].from_official(local).items()})
    out = {}
    for name, array in plain.items():
        owner, _, leaf = name.rpartition(".")
        if leaf == "weight" and isinstance(layers.get(owner), Linear) and array.ndim == 2:
            array = array.T
        out[name.replace("running_mean", "_mean").replace("running_var", "_variance")] = array
    return out


def _host_name(name: str) -> str:
    """Names of the official backbones -> ours: numbered attributes (PVT) and layers (Swin) are stages here."""
    name = re.sub(r"^(patch_embed|pos_embed|norm)(\d)\b", lambda m: f"stages.{int(m[2]) - 1}.{m[1]}", name)
    name = re.sub(r"^block(\d)\.", lambda m: f"stages.{int(m[1]) - 1}.blocks.", name)
    name = re.sub(r"^layers\.", "stages.", name)
    name = name.replace(".att.mha.", ".attn.").replace(".att.ff", ".mlp.fc").replace(".att.norm", ".norm")  # SOFT
    name = name.replace(".dwconv.dwconv.", ".dwconv.")  # PVT v2
    return name.replace(".attn.relative_position_bias_table", ".bias.table")


def _allowed(name: str, allow) -> bool:
    return any(fnmatch.fnmatch(name, pattern) or name.startswith(f"{pattern}.") for pattern in allow)


def _numpy_type(tensor) -> str:
    return str(tensor.dtype).removeprefix("paddle.")


def _resized(model, name: str, array: np.ndarray, shape: tuple[int, ...], img_size: tuple[int, int] | None):
    """What belongs to another grid for this one's; None for what does not, or already fits, or has no known grid."""
    import paddle
    import paddle.nn.functional as F

    from ppattn.layers import resize_grid

    leaf = name.rsplit(".", 1)[-1]
    if array.shape == shape and (leaf not in TABLES or img_size in (None, model.img_size)):
        return None
    if name.endswith("bias.table") and array.ndim == 2 and array.shape[1] == shape[1]:
        old, new = round(array.shape[0] ** 0.5), round(shape[0] ** 0.5)
        if old * old != array.shape[0]:
            return None
        grid = paddle.to_tensor(array.T.reshape(1, -1, old, old).astype("float32"))
        return F.interpolate(grid, [new, new], mode="bicubic").numpy().reshape(shape[1], -1).T
    layer = model
    for part in name.split(".")[:-1]:
        layer = layer[int(part)] if part.isdigit() else getattr(layer, part)
    if hasattr(layer, "resized"):
        return layer.resized(leaf, array, shape)
    if leaf not in TABLES or array.ndim != 3 or array.shape[2] != shape[2] or getattr(layer, "fixed", False):
        return None
    grid = layer.spec.grid if leaf == "positional_encoding" else getattr(layer, "table", None) or layer.grid
    prefix = shape[1] - grid[0] * grid[1]
    old = _grid(array.shape[1] - prefix, img_size)
    if old in (None, grid):
        return None
    mode = "bilinear" if hasattr(layer, "table") or leaf == "positional_encoding" else "bicubic"
    return resize_grid(paddle.to_tensor(array.astype("float32")), old, grid, prefix, mode).numpy()


def _grid(tokens: int, img_size: tuple[int, int] | None) -> tuple[int, int] | None:
    """The grid (H, W) of so many tokens: the sides of the image over one stride, both cut or both rounded up."""
    height, width = img_size or (tokens, tokens)
    for stride in range(1, max(height, width) + 1):
        for grid in ((height // stride, width // stride), (-(-height // stride), -(-width // stride))):
            if grid[0] * grid[1] == tokens:
                return grid
    return None
