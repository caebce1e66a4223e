"""Attentions: one file each, one class for all backbones."""

# Each file registers its attention.
from ppattn.attention import (  # noqa: F401
    agent,
    circulant,
    focused,
    gaussian,
    inline,
    less,
    linear,
    linformer,
    mala,
    mhla,
    mila,
    nalaformer,
    nystromformer,
    performer,
    polaformer,
    rala,
    soft,
    soft_norm,
    softmax,
    t5,
    vittt,
    window,
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
