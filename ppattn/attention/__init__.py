"""Attention mechanisms: one file each, one class for all hosts."""

from ppattn.attention import inline, less, linear, polaformer, soft, soft_norm, softmax  # noqa: F401  (they register themselves)
from ppattn.attention.base import ATTENTIONS, Attention, AttentionSpec, register_attention

__all__ = ["ATTENTIONS", "Attention", "AttentionSpec", "register_attention"]
