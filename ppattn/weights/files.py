"""Weights files: our own atomic format, and common third-party formats, read without running their code.

Our files are safetensors: the model's weights under their own names, other state under names with a slash
(`optimizer/...`, `ema/...`), and a JSON header with a SHA-256 over all tensors.
"""

import hashlib
import json
import re
import zipfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, TypeAdapter
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.numpy import save_file

from ppattn.errors import UserError, reading_untrusted
from ppattn.files.atomic import replacing
from ppattn.files.pickles import Refused, check_unpacked_size, from_bfloat16, read_pickle, read_torch_zip
from ppattn.text import is_text
from ppattn.validation import Size, must, validated
from ppattn.weights import checkpoint

SUFFIXES = (".safetensors", ".pdparams", ".npz", ".pth", ".pt", ".bin")
SHARED = ("model.safetensors", "pytorch_model.bin")  # of transformers, in one file or several with an index
FOLDERS = ["checkpoints/best.safetensors", "checkpoints/latest.safetensors"]
FOLDERS += [f"{name}{end}" for name in SHARED for end in ("", ".index.json")]
EARLY: dict[str, Any] = {"name": str, "attention_options": dict[str, Any] | None, "img_size": Size | None}


def _used(tree: Any) -> Any:
    """A section, what is used of which before `make_config` checks the whole has the right type."""
    TypeAdapter(dict[str, Any]).validate_python(tree)
    for key in EARLY.keys() & tree.keys():
        TypeAdapter(EARLY[key]).validate_python(tree[key], strict=True)
    return tree


class SplitDigest(BaseModel):
    images: int
    sha256: str  # of its names and labels


class Metadata(BaseModel):
    """What a weights file says about its model; every entry is optional."""

    model_config = ConfigDict(strict=True, extra="allow")

    config: Annotated[dict[str, Any], AfterValidator(lambda tree: tree | {"model": _used(tree.get("model", {}))})] = {}
    classes: list[Annotated[str, must(is_text, "printable text")]] = []
    preprocess: Annotated[dict[str, Any], AfterValidator(_used)] = {}
    data: dict[str, SplitDigest] = {}  # of train and val
    untrained: list[str] = []  # parameters with random values, which `convert --allow` let through

    @property
    def model(self) -> dict[str, Any]:
        """The model section of the config."""
        return self.config.get("model", {})


def find(path: str | Path) -> Path:
    """The file meant by a path: a file with or without suffix, or that in a run folder or a folder of transformers."""
    path = Path(path)
    beside = (path.with_name(path.name + suffix) for suffix in SUFFIXES if path.name)
    for candidate in (path, *(path / name for name in FOLDERS), *beside):
        if candidate.is_file():
            return candidate
    if path.is_dir():
        raise UserError(f"No weights in the folder {str(path)!r}: a run folder has {FOLDERS[0]}.")
    suffixes = ", ".join(SUFFIXES)
    raise UserError(f"No weights at {str(path)!r}: no run folder, and no file with or without a suffix of {suffixes}.")


def save(path: str | Path, tensors: dict, metadata: dict | None) -> None:
    """Write tensors and JSON metadata to a safetensors file, completely or not at all; None: for other libraries."""
    path = Path(path)
    arrays = {name: _as_array(value) for name, value in tensors.items()}
    header = None
    if metadata is not None:
        header = {"ppattn": json.dumps({**metadata, "sha256": _digest(arrays, json.loads(json.dumps(metadata)))})}
    try:
        with replacing(path, sync=True) as file:
            save_file(arrays, str(file), header)
    except SafetensorError as error:  # the system's errors in its own class
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else None, str(error), str(path)) from None


def read(path: str | Path, part: str | None = None) -> tuple[dict[str, np.ndarray], dict]:
    """Arrays and metadata of a weights file (safetensors, .npz, a pickle of PyTorch or Paddle); see `find` for `path`.

    `part`: the model of a third-party checkpoint, see `select_model`. A damaged or other file is a `UserError`.
    """
    path = find(path)
    arrays: dict[str, np.ndarray] = {}
    for file in checkpoint.weight_shards(path):
        found, metadata = _read_file(file)
        arrays |= found
    if metadata is None:
        arrays = checkpoint.select_model(arrays, path, part)
    return {name: _plain(array) for name, array in arrays.items()}, metadata or {}


def _read_file(path: Path) -> tuple[dict[str, np.ndarray], dict | None]:
    """All arrays of one file, and the metadata of one that is ours."""
    with path.open("rb") as file:
        head = file.read(9)
    if path.suffix == ".safetensors" or head[8:] == b"{":
        return _read_safetensors(path)
    with reading_untrusted(path, "a complete weights file"):
        try:
            tree = _read_archive(path) if head.startswith(b"PK") else read_pickle(path)
        except Refused as error:
            asks = f"{path} asks for {error}, which is more than arrays, and nothing in it was run"
            raise UserError(f"{asks}: save the model's state_dict() alone.") from None
        return checkpoint.flat_arrays(tree, path), None


def read_with_metadata(path: str | Path) -> tuple[dict[str, np.ndarray], Metadata]:
    """`read` with a typed view of the metadata."""
    arrays, metadata = read(path)
    return arrays, Metadata.model_validate(metadata)


def _read_archive(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        check_unpacked_size(archive, path)
        if any(name.endswith("data.pkl") for name in names):
            return read_torch_zip(archive)
    if not all(name.endswith(".npy") for name in names):
        raise UserError(f"{path} is a zip archive, but neither a PyTorch checkpoint nor an .npz file.")
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


def _plain(array: np.ndarray) -> np.ndarray:
    """The array in the machine's byte order and a type that Paddle has."""
    wide = array.dtype.kind == "u" and array.dtype.itemsize > 1  # Paddle takes uint16 for bfloat16
    return array.astype(np.int64 if wide else array.dtype.newbyteorder("="), copy=False)


def _as_array(value) -> np.ndarray:
    if not isinstance(value, np.ndarray):
        value = (value.astype("float32") if str(value.dtype).endswith("float16") else value).numpy()  # or bfloat16
    return np.asarray(value, order="C")  # unlike ascontiguousarray, with no axis where there was none


def _digest(arrays: dict[str, np.ndarray], metadata: dict) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name}{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _read_safetensors(path: Path) -> tuple[dict[str, np.ndarray], dict | None]:
    with reading_untrusted(path, "a complete safetensors file"):
        with safe_open(str(path), framework="numpy") as file:
            text, names = (file.metadata() or {}).get("ppattn"), list(file.keys())
            kinds = {name: file.get_slice(name).get_dtype() for name in names}
            if packed := sorted({kind for kind in kinds.values() if re.match("F[468]_", kind)}):
                raise UserError(f"{path} holds quantised weights ({packed[0]}): take the model as it was before that.")
            half = {name for name in names if kinds[name] == "BF16"}
            arrays = {name: file.get_tensor(name) for name in names if name not in half}
        for name, tensor in deserialize(path.read_bytes()) if half else ():  # numpy has no bfloat16
            if name in half:
                arrays[name] = from_bfloat16(bytes(tensor["data"])).reshape(tensor["shape"])
    if text is None:
        return arrays, None
    with reading_untrusted(path, "what training or convert wrote"):
        metadata = json.loads(text)
        if metadata.pop("sha256", None) != _digest(arrays, metadata):
            raise UserError(f"{path} was damaged since it was written: its checksum does not fit its content.")
    validated(Metadata, metadata, f"{path} is not what training or convert wrote")
    return arrays, metadata
