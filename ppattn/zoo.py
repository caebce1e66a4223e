"""Names to models: backbones, published variants, and `create_model`.

A backbone is a host with its official shape; a zoo entry is a backbone with the mechanism and shape of a publication.
This file imports no Paddle until a model is built.
"""

from __future__ import annotations

import csv
import fnmatch
import inspect
from functools import cache
from pathlib import Path

from ppattn.arguments import check_arguments
from ppattn.errors import UserError, unknown

TABLE = Path(__file__).with_name("zoo.csv")

PVT_DEPTHS = {"tiny": [2, 2, 2, 2], "small": [3, 4, 6, 3], "medium": [3, 4, 18, 3], "large": [3, 8, 27, 3]}
PVT_V2_SHAPES = {
    "b0": {"embed_dims": [32, 64, 160, 256]},
    "b1": {},
    "b2": {"depths": [3, 4, 6, 3]},
    "b3": {"depths": [3, 4, 18, 3]},
    "b4": {"depths": [3, 8, 27, 3]},
    "b5": {"depths": [3, 6, 40, 3], "mlp_ratios": [4, 4, 4, 4]},
}
SWIN_SHAPES = {
    "tiny": {"embed_dim": 96, "depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24]},
    "small": {"embed_dim": 96, "depths": [2, 2, 18, 2], "num_heads": [3, 6, 12, 24]},
    "base": {"embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32]},
}
PYRAMID_HEADS = [2, 4, 10, 16]  # InLine-PVT and SOFT: 32 channels per head

# This project's own small hosts for 32-pixel images. Few epochs need early locality, the same for every mechanism, and
# Glorot's initial values: normal(0, 0.02) in layers of 128 channels makes branches that training has to wake up first.
NANO = {"init": "xavier", "stem": "conv", "cpe": True}

# name -> (host class, its arguments)
BACKBONES: dict[str, tuple[str, dict]] = {
    "deit_nano": (
        "deit",
        {
            "img_size": 32,
            "patch_size": 4,
            "embed_dim": 128,
            "depth": 6,
            "num_heads": 4,
            "mlp_ratio": 4,
            **NANO,
            "class_token": False,
        },
    ),
    "deit_tiny": ("deit", {"embed_dim": 192, "num_heads": 3}),
    "deit_small": ("deit", {"embed_dim": 384, "num_heads": 6}),
    "deit_base": ("deit", {"embed_dim": 768, "num_heads": 12}),
    "pvt_nano": (
        "pvt",
        {
            "img_size": 32,
            "patch_size": 2,
            "embed_dims": [32, 64, 128, 160],
            "depths": [1, 1, 2, 1],
            "num_heads": [1, 2, 4, 5],
            "mlp_ratios": [4, 4, 4, 4],
            "sr_ratios": [4, 2, 1, 1],
            **NANO,
            "class_token": False,
        },
    ),
    **{f"pvt_{size}": ("pvt", {"depths": depths}) for size, depths in PVT_DEPTHS.items()},
    **{f"pvt_v2_{size}": ("pvt_v2", shape) for size, shape in PVT_V2_SHAPES.items()},
    "swin_nano": (
        "swin",
        {
            "img_size": 32,
            "patch_size": 2,
            "embed_dim": 32,
            "depths": [1, 2, 2],
            "num_heads": [1, 2, 4],
            "window_size": 4,
            **NANO,
        },
    ),
    **{f"swin_{size}": ("swin", shape) for size, shape in SWIN_SHAPES.items()},
}


def _soft(depths: list[int], width: int = 320) -> tuple[str, dict]:
    shape = {"embed_dims": [64, 128, width, 512], "depths": depths, "num_heads": [2, 4, width // 32, 16]}
    return "pvt", {**shape, "mlp_ratios": [8, 8, 4, 4], "soft": True}


SOFT_SHAPES = {
    "tiny": _soft([1, 2, 3, 2]),
    "small": _soft([1, 3, 7, 4]),
    "medium": _soft([1, 3, 29, 5], 288),
    "large": _soft([1, 3, 40, 5]),
    "huge": _soft([1, 5, 49, 5], 352),
}
LAVIT_DEPTHS = {"tiny": [1, 2, 2, 2], "small": [2, 3, 8, 3], "base": [3, 4, 18, 3]}
AGENTS = {"agent_num": [9, 16, 49, 49]}  # per stage

# name -> (host class, arguments with attention)
MODELS: dict[str, tuple[str, dict]] = {
    **{
        name: (host, dict(shape, attention="softmax"))
        for name, (host, shape) in BACKBONES.items()
        if "nano" not in name
    },
    "inline_deit_tiny": ("deit", {"attention": "inline", "embed_dim": 192, "num_heads": 6}),
    "inline_deit_small": ("deit", {"attention": "inline", "embed_dim": 320, "num_heads": 10, "img_size": 288}),
    "inline_deit_base": ("deit", {"attention": "inline", "embed_dim": 384, "num_heads": 12, "img_size": 448}),
    **{
        f"inline_pvt_{size}": (
            "pvt",
            {"attention": "inline", "depths": depths, "num_heads": PYRAMID_HEADS, "class_token": False},
        )
        for size, depths in PVT_DEPTHS.items()
    },
    **{
        f"{family}_pvt_{size}": (
            "pvt",
            {"attention": name, "depths": depths, "class_token": False, "idle_norm": True},
        )
        for family, name in (("pola", "polaformer"), ("flatten", "focused"))
        for size, depths in PVT_DEPTHS.items()
    },
    **{
        f"agent_pvt_{size}": (
            "pvt",
            {"attention": "agent", "attention_options": AGENTS, "depths": depths, "class_token": False},
        )
        for size, depths in PVT_DEPTHS.items()
    },
    "agent_deit_tiny": ("deit", {"attention": "agent", "embed_dim": 192, "num_heads": 3}),
    "agent_deit_small": ("deit", {"attention": "agent", "embed_dim": 384, "num_heads": 6}),
    "agent_deit_base": (
        "deit",
        {
            "attention": ["agent"] * 4 + ["softmax"] * 8,
            "attention_options": {"agent_num": 81},
            "embed_dim": 768,
            "num_heads": 12,
        },
    ),
    "inline_swin_tiny": ("swin", dict(SWIN_SHAPES["tiny"], attention=["inline"] * 3 + ["softmax"])),
    "inline_swin_small": ("swin", dict(SWIN_SHAPES["small"], attention=["inline"] * 2 + ["softmax"] * 2)),
    "inline_swin_base": (
        "swin",
        dict(SWIN_SHAPES["base"], attention=["inline", "inline", ["inline"] * 2 + ["softmax"] * 16, "softmax"]),
    ),
    **{
        f"{family}_swin_{size}": ("swin", dict(shape, attention=[name, name, "softmax", "softmax"]))
        for family, name in (("pola", "polaformer"), ("flatten", "focused"))
        for size, shape in SWIN_SHAPES.items()
    },
    **{
        f"agent_swin_{size}": (
            "swin",
            dict(SWIN_SHAPES[size], attention=["agent", "agent", *stages], attention_options=AGENTS),
        )
        for size, stages in {
            "tiny": ["agent", "softmax"],
            "small": ["softmax", "softmax"],
            "base": [["agent"] * 2 + ["softmax"] * 16, "softmax"],
        }.items()
    },
    **{
        f"{kind}_{size}": (host, dict(shape, attention=[kind] * 3 + ["softmax"]))
        for kind in ("soft", "soft_norm")
        for size, (host, shape) in SOFT_SHAPES.items()
    },
    **{
        f"lavit_{size}": (
            "pvt",
            {"attention": "less", "depths": depths, "embed_dims": [64, 128, 320, 448], "num_heads": [1, 2, 5, 7]},
        )
        for size, depths in LAVIT_DEPTHS.items()
    },
}


def list_models(pattern: str = "*") -> list[str]:
    """Zoo entries whose name matches the shell pattern."""
    return [name for name in MODELS if fnmatch.fnmatch(name, pattern)]


def list_backbones(pattern: str = "*") -> list[str]:
    """Backbones whose name matches the shell pattern."""
    return [name for name in BACKBONES if fnmatch.fnmatch(name, pattern)]


def list_attentions(pattern: str = "*") -> list[str]:
    """Mechanisms whose name matches the shell pattern."""
    from ppattn.attention import ATTENTIONS

    return ATTENTIONS.list(pattern)


def entry(name: str) -> tuple[str, dict]:
    """Host class and arguments of a backbone or zoo entry; raises `UserError` with the nearest name for another."""
    entries = {**BACKBONES, **MODELS}
    if name not in entries:
        raise unknown("model", name, entries)
    return entries[name]


@cache
def table() -> list[dict[str, str]]:
    """Rows of zoo.csv (scripts/make_zoo_table.py): parameters, MACs, published accuracy of every zoo entry."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def create_model(name: str, *, attention=None, attention_options: dict | None = None, weights=None, **overrides):
    """Build a classifier.

    Args:
        name: a backbone (`list_backbones()`) or a zoo entry (`list_models()`).
        attention: one mechanism, a list with one per stage, or with a list of one per block for a stage; default:
            that of the zoo entry, softmax for a backbone.
        attention_options: the mechanisms' own settings; each must be known to a mechanism in use.
        weights: a checkpoint, weights file or run's `checkpoints/best`; must fit in every name and shape.
        **overrides: any argument of the host: img_size, num_classes, embed_dim, depths, drop_path_rate, ...; and
            init: "normal" (published: Linear weights from normal(0, 0.02)) or "xavier" (the nano hosts' default).

    Returns:
        A `paddle.nn.Layer` in training mode: images [B, in_chans, H, W] -> logits [B, num_classes], or with
        num_classes = 0 pooled features [B, C]. `feat_channels` and `strides` describe the maps of `forward_features`.

    Raises:
        UserError: for an unknown name, an argument the host does not have, or a value or shape that cannot be built.
    """
    import importlib

    host, defaults = entry(name)
    module = importlib.import_module(f"ppattn.backbones.{host}")
    cls = next(c for c in vars(module).values() if inspect.isclass(c) and c.__name__.lower() == host.replace("_", ""))
    arguments = {"init": "normal", **defaults}
    hidden = {"self", "soft", "idle_norm", "attention", "attention_options"}
    allowed = {"init", *inspect.signature(cls.__init__).parameters} - hidden
    for key in overrides:
        if key not in allowed:
            raise unknown(f"argument of {name}", key, allowed)
    chosen = {"attention": attention, "attention_options": attention_options}
    given = {**overrides, **{key: value for key, value in chosen.items() if value is not None}}
    check_arguments(cls.__init__, {k: v for k, v in given.items() if (k, v) != ("num_classes", 0)}, name, least=1)
    arguments |= overrides
    if attention is not None:
        arguments["attention"] = attention
        arguments.pop("attention_options", None)  # of the published mechanism
    if attention_options:
        arguments["attention_options"] = {**arguments.get("attention_options", {}), **attention_options}
    init = arguments.pop("init")
    if init not in ("normal", "xavier"):
        raise UserError(f"init = {init!r} is not allowed; choose from normal, xavier.")
    try:
        model = cls(**arguments)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    model.name = name
    if init == "xavier":
        from ppattn.layers import xavier

        xavier(model)
    if weights is not None:
        from ppattn.weights import load

        load(model, weights)
    return model
