"""Backbones: each owns its geometry, and takes any attention of `ppattn.attention`."""

import warnings

from ppattn.backbones import deit, pvt, pvt_v2, swin  # noqa: F401  (each registers its backbone)
from ppattn.backbones.base import BACKBONES, Backbone, register_backbone

__all__ = ["BACKBONES", "Backbone", "register_backbone"]

RENAMED = {"HOSTS": "BACKBONES", "register_host": "register_backbone"}


def __getattr__(name: str):
    if name in RENAMED:
        warnings.warn(f"{name} is now called {RENAMED[name]}.", DeprecationWarning, stacklevel=2)
        return globals()[RENAMED[name]]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
