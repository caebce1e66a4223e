"""ppattn: efficient attention for vision transformers in PaddlePaddle.

Importing the package imports nothing heavy and changes no global state; names load on first use.
"""

import importlib
from pathlib import Path

__version__ = "0.1.0"

_ROOT = Path(__file__).resolve().parent
CONFIGS = next(p for p in (_ROOT.parent / "configs", _ROOT / "configs") if p.parent == _ROOT or (p / "base").is_dir())

_HOME = {
    **dict.fromkeys(("create_model", "list_models", "list_backbones", "list_attentions"), "ppattn.zoo"),
    "attention_layer": "ppattn.attention.base",
    "load_official": "ppattn.weights",
    "load_run": "ppattn.trained",
    "train": "ppattn.engine.trainer",
    "setup": "ppattn.runtime.startup",
    "export": "ppattn.deploy.exporter",
    "Predictor": "ppattn.deploy.predictor",
}
__all__ = ["CONFIGS", "__version__", *_HOME]


def __getattr__(name: str):
    if name in _HOME:
        if name not in ("list_models", "list_backbones", "setup", "Predictor"):  # those need no Paddle, or import it
            importlib.import_module("ppattn.runtime.startup").import_paddle()  # without its noise
        return getattr(importlib.import_module(_HOME[name]), name)
    if (_ROOT / name).is_dir() or (_ROOT / f"{name}.py").is_file():
        return importlib.import_module(f"ppattn.{name}")
    raise AttributeError(f"module 'ppattn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
