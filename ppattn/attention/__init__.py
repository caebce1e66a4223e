"""Attentions: one file each, one class for all backbones."""

# Each file registers its attention.
from ppattn.attention import (  # noqa: F401
    agent,
    focused,
    gaussian,
    inline,
    less,
    linear,
    linformer,
    nystromformer,
    performer,
    polaformer,
    soft,
    soft_norm,
    softmax,
)
from ppattn.attention.base import (  # noqa: F401
    ATTENTIONS,
    Attention,
    AttentionSpec,
    Context,
    LayerState,
    StageLinks,
    attention_layer,
    build_attention,
    register_attention,
)
