"""Backbones: each owns its geometry, and takes any attention. arguments.yaml explains their arguments."""

from ppattn.backbones import deit, dinov3, pvt, pvt_v2, soft_pyramid, swin  # noqa: F401  (each registers its backbone)
from ppattn.backbones.base import BACKBONES, Backbone, register_backbone

__all__ = ["BACKBONES", "Backbone", "register_backbone"]
