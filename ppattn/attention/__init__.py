"""Attention mechanisms: one file each, one class for all hosts."""

# Each file registers its mechanism.
from ppattn.attention import agent, focused, inline, less, linear, polaformer, soft, soft_norm, softmax  # noqa: F401
from ppattn.attention.base import ATTENTIONS, Attention, AttentionSpec, register_attention

__all__ = ["ATTENTIONS", "Attention", "AttentionSpec", "register_attention"]
