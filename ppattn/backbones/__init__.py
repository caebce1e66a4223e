"""Backbones: each owns its geometry, and takes any attention of `ppattn.attention`.

Arguments of their constructors, which are keys of `model` in a config, too; every backbone has its own choice of them:

    attention: one name, a list with one per stage, or a list with one per block in place of a stage
    attention_options: options of the attentions
    img_size: pixels, one side or [height, width]
    patch_size: pixels of the side of a patch; in pyramids of the first stage
    in_chans: channels of the images
    num_classes: outputs of the classifier; 0: none
    embed_dim: channels; in Swin of the first stage, each further one has twice as many
    embed_dims: channels per stage
    depth: number of blocks
    depths: number of blocks per stage
    num_heads: heads of the attention; in pyramids per stage
    mlp_ratio: width of the MLP divided by the channels
    mlp_ratios: the same per stage
    sr_ratios: spatial reduction of keys and values per stage; 1: none
    window_size: tokens of the side of a window
    qkv_bias: bias in the projections to queries, keys and values
    ape: absolute position table
    drop_rate: dropout of tokens, projections and MLPs
    attn_drop_rate: dropout of attention weights
    drop_path_rate: stochastic depth of the last block; it rises linearly from 0 in the first
    stem: patch embedding as published, or a stack of 3 x 3 convolutions
    class_token: classify by a class token; false: by the mean over the tokens
    cpe: position convolution in every block
    pos_embed: learned position table
    fc_norm: the final norm after the mean over the tokens instead of before
    layer_scale: initial value of a learned factor per channel of both branches of a block; null: no factors
    registers: register tokens
    mean_pool: classify by the class token and the mean over the patch tokens together
    resize: how the position table is resized: bicubic; with the offset of DINOv2; with antialiasing
    swiglu: SwiGLU for MLP
    always_shift: shift windows also where one covers the map
"""

from ppattn.backbones import deit, dinov3, pvt, pvt_v2, soft_pyramid, swin  # noqa: F401  (each registers its backbone)
from ppattn.backbones.base import BACKBONES, Backbone, register_backbone

__all__ = ["BACKBONES", "Backbone", "register_backbone"]
