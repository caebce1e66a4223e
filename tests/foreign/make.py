"""Weights files as other libraries write them, with the logits that these give: the truth for `ppattn convert`.

TIMM/bin/python tests/foreign/make.py timm FOLDER           # or torchvision, transformers
CLAS/bin/python tests/foreign/make.py paddleclas FOLDER     # pip install --no-deps paddleclas==2.6.0

Builds what each LIBRARY_*.json beside this file names under `library` and writes into FOLDER the file of its weights
and the .json with its logits. Every parameter is drawn anew, so that none is zero or one. For another model, write
`model`, `arguments` and `library` of its .json by hand, and put its family last in ORDER.
"""

import importlib
import importlib.util
import json
import logging
import sys
import tempfile
import types
from functools import partial
from pathlib import Path

import numpy as np

ORDER = ("deit", "swin", "pvt_v2", "pvt", "dinov2", "dinov2_reg")  # in which the numbers are drawn; DINOv2 begins anew


def prepare_paddleclas(backbone: str = "paddleclas.ppcls.arch.backbone") -> None:
    """Make its model files importable without the packages that the rest of it needs."""
    root = Path(importlib.util.find_spec("paddleclas").submodule_search_locations[0]).parent
    parts = backbone.split(".")
    packages = [".".join(parts[: i + 1]) for i in range(len(parts))]
    for name in (*packages, "paddleclas.ppcls.utils", f"{backbone}.model_zoo", f"{backbone}.legendary_models"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(root.joinpath(*name.split(".")))]
    sys.modules["paddleclas.ppcls.utils"].logger = logging
    loader = sys.modules["paddleclas.ppcls.utils.save_load"] = types.ModuleType("save_load")
    loader.load_dygraph_pretrain = None


def built(call: str, arguments: dict):
    module, _, name = call.rpartition(".")
    make = getattr(importlib.import_module(module), name)
    if call.startswith("transformers"):
        return make(make.config_class(**arguments))
    if name == "PyramidVisionTransformerV2":
        from paddle import nn

        arguments = arguments | {"norm_layer": partial(nn.LayerNorm, epsilon=1e-6)}  # as its own constructors set it
    return make(**arguments)


def drawn(name: str, shape, rng) -> np.ndarray:
    """A value for a parameter in PyTorch's layout: near one for norms, of the scale of its inputs for matrices."""
    z = rng.standard_normal(shape)
    if len(shape) == 1:
        return 1 + 0.1 * z if name.endswith("weight") else 0.1 * z
    if name.endswith(("token", "embed", "embeddings", "bias_table")) or "pos_embed" in name:
        return 0.3 * z
    return z / np.sqrt(np.prod(shape[1:]))


def write_torch(model, stem: Path, x: np.ndarray, rng) -> np.ndarray:
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(drawn(name, tuple(parameter.shape), rng)))
        answer = model(torch.from_numpy(x))
    if not hasattr(model, "save_pretrained"):
        torch.save(model.state_dict(), stem.with_suffix(".pth"))
        return answer.numpy()
    with tempfile.TemporaryDirectory() as work:
        model.save_pretrained(work)
        stem.with_suffix(".safetensors").write_bytes((Path(work) / "model.safetensors").read_bytes())
    return answer.logits.numpy()


def write_paddle(model, stem: Path, x: np.ndarray, rng) -> np.ndarray:
    import paddle

    for name, parameter in model.named_parameters():
        matrix = parameter.ndim == 2
        value = drawn(name, parameter.shape[::-1] if matrix else parameter.shape, rng)
        parameter.set_value((value.T if matrix else value).astype("float32"))
    paddle.save(model.state_dict(), str(stem.with_suffix(".pdparams")))
    with paddle.no_grad():
        return model(paddle.to_tensor(x)).numpy()


def images(seed: int, batch: int, *size: int) -> np.ndarray:
    return np.random.RandomState(seed).standard_normal((batch, 3, *size)).astype("float32")


def dinov2_features(model, size: int, patch: int, registers: bool) -> dict:
    """Patch features at the size of the build, and of timm's models at another, resized as in the authors' code."""
    import torch
    import torch.nn.functional as F

    def features(pixels: np.ndarray) -> list:
        x = torch.from_numpy(pixels)
        with torch.no_grad():
            tokens = model.forward_features(x) if timm else model.base_model(x).last_hidden_state
        grid = [side // patch for side in pixels.shape[2:]]
        return tokens[:, 5 if registers else 1 :].transpose(1, 2).reshape(len(x), -1, *grid).tolist()

    timm = hasattr(model, "forward_features")
    about = {"features": features(images(size, 2, size, size))}
    if not timm:
        return about
    side = size // patch
    grid, table = (side + 2, side - 1), model.pos_embed.detach()
    own = table.shape[1] - side * side
    patches = table[:, own:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
    if registers:
        patches = F.interpolate(patches, size=grid, mode="bicubic", antialias=True)
    else:
        patches = F.interpolate(patches, scale_factor=tuple((g + 0.1) / side for g in grid), mode="bicubic")
    model.pos_embed = torch.nn.Parameter(torch.cat([table[:, :own], patches.flatten(2).transpose(1, 2)], dim=1))
    other = [patch * g for g in grid]
    model.patch_embed.img_size, model.patch_embed.grid_size = tuple(other), grid
    return about | {"other_size": other, "other_features": features(images(0, 1, *other))}


def main(library: str, folder: str) -> None:
    if library == "paddleclas":
        prepare_paddleclas()
    paths = {path.stem.removeprefix(f"{library}_"): path for path in Path(__file__).parent.glob(f"{library}_*.json")}
    write = write_paddle if library == "paddleclas" else write_torch
    for family in sorted(paths, key=ORDER.index):
        if family in (ORDER[0], "dinov2"):
            rng = np.random.default_rng(0)
        about = json.loads(paths[family].read_text())
        model, size = built(**about["library"]), about["arguments"]["img_size"]
        model.eval()
        about["logits"] = write(model, Path(folder) / paths[family].stem, images(size, 2, size, size), rng).tolist()
        if family.startswith("dinov2"):
            about |= dinov2_features(model, size, about["arguments"]["patch_size"], family == "dinov2_reg")
        (Path(folder) / paths[family].name).write_text(json.dumps(about) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
