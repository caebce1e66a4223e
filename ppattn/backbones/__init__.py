"""Backbones: each owns its geometry, and takes any attention of `ppattn.attention`."""

from ppattn.backbones import deit, pvt, pvt_v2, swin  # noqa: F401  (each registers its backbone)
from ppattn.backbones.base import BACKBONES, Backbone, register_backbone

__all__ = ["BACKBONES", "Backbone", "register_backbone"]
