"""Hosts: each owns its geometry, and takes any mechanism of `ppattn.attention`."""

from ppattn.backbones import deit, pvt, pvt_v2, swin  # noqa: F401  (each registers its host)
from ppattn.backbones.base import HOSTS, Backbone, register_host

__all__ = ["HOSTS", "Backbone", "register_host"]
