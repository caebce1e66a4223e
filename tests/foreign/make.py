"""Weights files as other libraries write them, with the logits that these give: the truth for `tools/convert.py`.

TIMM/bin/python tests/foreign/make.py build timm FOLDER           # small models: tests/foreign/
TIMM/bin/python tests/foreign/make.py build torchvision FOLDER
HF/bin/python tests/foreign/make.py build transformers FOLDER
CLAS/bin/python tests/foreign/make.py build paddleclas FOLDER     # pip install --no-deps paddleclas==2.6.0
... --full --seed 3 [--initial]                                   # the tiny models in full size
python tests/foreign/make.py compare FOLDER                       # convert each, and compare its logits with ours

Every parameter is drawn anew, so that none is zero or one; --initial keeps the values that the library starts with.
"""

import argparse
import importlib.util
import json
import logging
import sys
import tempfile
import types
from pathlib import Path

import numpy as np

PLAIN = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
SMALL = {
    "deit": PLAIN, "dinov2": PLAIN, "dinov2_reg": PLAIN,
    "swin": {"img_size": 64, "embed_dim": 8, "depths": [1, 2, 2], "num_heads": [1, 2, 4], "window_size": 4},
    "pvt": {"img_size": 64, "embed_dims": [8, 16, 16, 24], "depths": [1, 2, 1, 1], "num_heads": [1, 2, 2, 3]},
    "pvt_v2": {"img_size": 64, "embed_dims": [8, 16, 16, 24], "depths": [1, 2, 1, 1], "num_heads": [1, 2, 2, 3]},
}  # fmt: skip
PYRAMID = {"img_size": 224, "depths": [2, 2, 2, 2], "num_heads": [1, 2, 5, 8]}
DINO = {"img_size": 518, "patch_size": 14, "embed_dim": 384, "depth": 12, "num_heads": 6}
FULL = {
    "deit": {"img_size": 224, "patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3}, "dinov2": DINO,
    "dinov2_reg": DINO,
    "swin": {"img_size": 224, "embed_dim": 96, "depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24], "window_size": 7},
    "pvt": {**PYRAMID, "embed_dims": [64, 128, 320, 512]}, "pvt_v2": {**PYRAMID, "embed_dims": [32, 64, 160, 256]},
}  # fmt: skip
NAMES = {
    "deit": "deit_tiny", "dinov2": "dinov2_small", "dinov2_reg": "dinov2_small_reg", "swin": "swin_tiny",
    "pvt": "pvt_tiny", "pvt_v2": "pvt_v2_b0",
}  # fmt: skip
CLASSES = 7


def images(size: int) -> np.ndarray:
    return np.random.RandomState(size).standard_normal((2, 3, size, size)).astype("float32")


def drawn(name: str, shape, rng) -> np.ndarray:
    """A value for a parameter in PyTorch's layout: near one for norms, of the scale of its inputs for matrices."""
    z = rng.standard_normal(shape)
    if len(shape) == 1:
        return 1 + 0.1 * z if name.endswith("weight") else 0.1 * z
    if name.endswith(("token", "embed", "embeddings", "bias_table")) or "pos_embed" in name:
        return 0.3 * z
    return z / np.sqrt(np.prod(shape[1:]))


# ---- builders: family -> model; each library spells the same shapes its own way --------------------------------------


def declare_operators() -> None:
    """Those of torchvision that are missing beside a PyTorch for the CPU, without which it does not import."""
    import torch

    declare_operators.library = torch.library.Library("torchvision", "FRAGMENT")  # they live as long as it does
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            declare_operators.library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def build_timm(family: str, shape: dict):
    import timm

    shape = dict(shape)
    name = {
        "deit": "deit_tiny_patch16_224",
        "dinov2": "vit_small_patch14_dinov2",
        "dinov2_reg": "vit_small_patch14_reg4_dinov2",
        "swin": "swin_tiny_patch4_window7_224",
        "pvt_v2": "pvt_v2_b0",
    }[family]
    if family == "pvt_v2":
        del shape["img_size"]
    return timm.create_model(name, num_classes=CLASSES, **shape)


def build_transformers(family: str, shape: dict):
    import transformers as hf

    common = {"num_labels": CLASSES, "image_size": shape["img_size"], "num_attention_heads": shape["num_heads"]}
    if family in ("deit", "dinov2", "dinov2_reg"):
        model, config = {
            "deit": (hf.ViTForImageClassification, hf.ViTConfig),
            "dinov2": (hf.Dinov2ForImageClassification, hf.Dinov2Config),
            "dinov2_reg": (hf.Dinov2WithRegistersForImageClassification, hf.Dinov2WithRegistersConfig),
        }[family]
        wide = {"intermediate_size": 4 * shape["embed_dim"]} if family == "deit" else {}
        sizes = {"hidden_size": shape["embed_dim"], "num_hidden_layers": shape["depth"]}
        return model(config(**common, **sizes, **wide, patch_size=shape["patch_size"]))
    if family == "swin":
        del common["num_attention_heads"]
        keys = ("embed_dim", "depths", "num_heads", "window_size")
        return hf.SwinForImageClassification(hf.SwinConfig(**common, **{key: shape[key] for key in keys}))
    kinds = {
        "pvt": (hf.PvtForImageClassification, hf.PvtConfig),
        "pvt_v2": (hf.PvtV2ForImageClassification, hf.PvtV2Config),
    }
    model, config = kinds[family]
    return model(config(**common, hidden_sizes=shape["embed_dims"], depths=shape["depths"]))


def build_torchvision(family: str, shape: dict):
    from torchvision.models import SwinTransformer, VisionTransformer

    if family == "swin":
        sides = [shape["window_size"]] * 2
        depths, heads = shape["depths"], shape["num_heads"]
        return SwinTransformer([4, 4], shape["embed_dim"], depths, heads, sides, num_classes=CLASSES)
    size, patch, depth, heads, width = (shape[k] for k in ("img_size", "patch_size", "depth", "num_heads", "embed_dim"))
    return VisionTransformer(size, patch, depth, heads, width, 4 * width, num_classes=CLASSES)


CLAS = "paddleclas.ppcls.arch.backbone"


def prepare_paddleclas() -> None:
    """Make its model files importable without the packages that the rest of it needs."""
    root = Path(importlib.util.find_spec("paddleclas").submodule_search_locations[0])
    for name in (
        "paddleclas",
        "paddleclas.ppcls",
        "paddleclas.ppcls.arch",
        "paddleclas.ppcls.utils",
        CLAS,
        f"{CLAS}.model_zoo",
        f"{CLAS}.legendary_models",
    ):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(root.parent.joinpath(*name.split(".")))]
    sys.modules["paddleclas.ppcls.utils"].logger = logging
    loader = sys.modules["paddleclas.ppcls.utils.save_load"] = types.ModuleType("save_load")
    loader.load_dygraph_pretrain = None


def build_paddleclas(family: str, shape: dict):
    module, name = {
        "deit": ("model_zoo.distilled_vision_transformer", "VisionTransformer"),
        "swin": ("legendary_models.swin_transformer", "SwinTransformer"),
        "pvt_v2": ("model_zoo.pvt_v2", "PyramidVisionTransformerV2"),
    }[family]
    more = {  # as its own constructors of the tiny models set them
        "deit": {"mlp_ratio": 4, "qkv_bias": True, "epsilon": 1e-6},
        "swin": {},
        "pvt_v2": {"mlp_ratios": [8, 8, 4, 4], "qkv_bias": True, "sr_ratios": [8, 4, 2, 1]},
    }[family]
    cls = getattr(importlib.import_module(f"{CLAS}.{module}"), name)
    if family == "pvt_v2":
        from functools import partial

        from paddle import nn

        more["norm_layer"] = partial(nn.LayerNorm, epsilon=1e-6)
    return cls(class_num=CLASSES, **shape, **more)


def build(args) -> None:
    folder = Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(args.seed)
    if args.library == "paddleclas":
        prepare_paddleclas()
    elif importlib.util.find_spec("torchvision"):
        declare_operators()
    families = {
        "timm": ["deit", "swin", "pvt_v2", "dinov2", "dinov2_reg"],
        "transformers": ["deit", "swin", "pvt_v2", "pvt", "dinov2", "dinov2_reg"],
        "torchvision": ["deit", "swin"],
        "paddleclas": ["deit", "swin", "pvt_v2"],
    }[args.library]
    for family in args.families or families:
        shape = (FULL if args.full else SMALL)[family]
        write = write_paddle if args.library == "paddleclas" else write_torch
        model = globals()[f"build_{args.library}"](family, shape)
        model.eval()
        stem = folder / f"{args.library}_{family}"
        logits = write(model, stem, images(shape["img_size"]), None if args.initial else rng)
        about = {"model": NAMES[family], "arguments": {**shape, "num_classes": CLASSES}, "logits": logits.tolist()}
        if family.startswith("dinov2"):
            about |= dinov2_features(model, shape, family == "dinov2_reg")
        stem.with_suffix(".json").write_text(json.dumps(about) + "\n")
        print(stem, logits.std(), flush=True)


def dinov2_features(model, shape: dict, registers: bool) -> dict:
    """Patch features at the size of the build, and at another with the table resized as in the authors' code."""
    import torch
    import torch.nn.functional as F

    side, patch = shape["img_size"] // shape["patch_size"], shape["patch_size"]
    prefix = 5 if registers else 1

    def features(pixels: np.ndarray) -> np.ndarray:
        x = torch.from_numpy(pixels)
        with torch.no_grad():
            if hasattr(model, "forward_features"):
                tokens = model.forward_features(x)
            else:
                tokens = model.base_model(x).last_hidden_state
        grid = [size // patch for size in pixels.shape[2:]]
        return tokens[:, prefix:].transpose(1, 2).reshape(len(x), -1, *grid).numpy()

    about = {"features": features(images(shape["img_size"])).tolist()}
    if not hasattr(model, "forward_features"):
        return about
    grid = (side + 2, side - 1)
    table = model.pos_embed.detach()
    own = table.shape[1] - side * side
    patches = table[:, own:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
    if registers:
        patches = F.interpolate(patches, size=grid, mode="bicubic", antialias=True)
    else:
        patches = F.interpolate(patches, scale_factor=tuple((g + 0.1) / side for g in grid), mode="bicubic")
    assert tuple(patches.shape[2:]) == grid
    patches = patches.permute(0, 2, 3, 1).reshape(1, grid[0] * grid[1], -1)
    model.pos_embed = torch.nn.Parameter(torch.cat([table[:, :own], patches], dim=1))
    size = [patch * g for g in grid]
    model.patch_embed.img_size, model.patch_embed.grid_size = tuple(size), grid
    pixels = np.random.RandomState(0).standard_normal((1, 3, *size)).astype("float32")
    return about | {"other_size": size, "other_features": features(pixels).tolist()}


def write_torch(model, stem: Path, x: np.ndarray, rng) -> np.ndarray:
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters() if rng else ():
            parameter.copy_(torch.from_numpy(drawn(name, tuple(parameter.shape), rng)))
        answer = model(torch.from_numpy(x))
    if hasattr(model, "save_pretrained"):
        with tempfile.TemporaryDirectory() as work:
            model.save_pretrained(work)
            stem.with_suffix(".safetensors").write_bytes((Path(work) / "model.safetensors").read_bytes())
        answer = answer.logits
    else:
        torch.save(model.state_dict(), stem.with_suffix(".pth"))
    return answer.numpy()


def write_paddle(model, stem: Path, x: np.ndarray, rng) -> np.ndarray:
    import paddle

    for name, parameter in model.named_parameters() if rng else ():
        shape = parameter.shape
        value = drawn(name, shape[::-1] if len(shape) == 2 else shape, rng)
        parameter.set_value((value.T if len(shape) == 2 else value).astype("float32"))
    with paddle.no_grad():
        answer = model(paddle.to_tensor(x)).numpy()
    paddle.save(model.state_dict(), str(stem.with_suffix(".pdparams")))
    return answer


# ---- comparison ------------------------------------------------------------------------------------------------------


def compare(folder: Path) -> int:
    """Largest error over the largest logit, for every file."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    import paddle

    import ppattn
    from ppattn import weights

    errors = []
    for path in sorted(folder.glob("*.json")):
        about = json.loads(path.read_text())
        (source,) = (p for p in folder.glob(f"{path.stem}.*") if p != path)
        report = weights.convert(converted := ppattn.create_model(about["model"], **about["arguments"]), source)
        model = ppattn.create_model(about["model"], **about["arguments"] | report.constants)
        model.set_state_dict(converted.state_dict())
        model.eval()
        with paddle.no_grad():
            logits = model(paddle.to_tensor(images(about["arguments"]["img_size"]))).numpy()
        expected = np.array(about["logits"])
        error = np.abs(logits - expected).max() / np.abs(expected).max()
        errors.append(error)
        print(f"{error:.1e}  {str(report).splitlines()[0]}", flush=True)
    return int(not all(error <= 1e-4 for error in errors))  # NaN fails, too


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("build")
    one.add_argument("library", choices=["timm", "transformers", "torchvision", "paddleclas"])
    one.add_argument("--full", action="store_true")
    one.add_argument("--families", nargs="+", choices=SMALL, help="default: all that the library has")
    one.add_argument("--initial", action="store_true")
    one.add_argument("--seed", type=int, default=0)
    for verb in (one, verbs.add_parser("compare")):
        verb.add_argument("folder")
    args = parser.parse_args()
    return build(args) or 0 if args.verb == "build" else compare(Path(args.folder))


if __name__ == "__main__":
    sys.exit(main())
