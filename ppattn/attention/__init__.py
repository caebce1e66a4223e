"""Attentions: one file each, one class for all backbones."""

import importlib
import pkgutil

from ppattn.attention.base import ATTENTIONS, Attention, AttentionSpec, Context, LayerState, StageLinks, build_attention

for _file in pkgutil.iter_modules(__path__):  # each registers its attention
    importlib.import_module(f"{__name__}.{_file.name}")
