"""DINOv3: a plain encoder with rotary positions, for any attention (Simeoni et al., arXiv 2508.10104).

Tokens are the class token, registers and the patches; no position table. q and k of the patches rotate by their place
in the image (`ppattn.attention.rotary`); attentions with q . k logits (`softmax`, `window`, `inline`) take part, others
ignore the positions, as the log says. Blocks scale both branches (`layer_scale`), their MLP is a SwiGLU in S+, H+ and
7B (`swiglu`), and keys have no bias: that part of `qkv.bias` is zero and stays so. LayerNorm eps 1e-5. Without classes
the model gives the class token after the final norm; a head takes the class token and the mean over the patches.

Any input size: positions are relative to each side, and an image that is no multiple of the patch is cropped at the
bottom and right. Not here: the random rescaling of the coordinates in training.
"""

from ppattn.backbones.base import register_backbone
from ppattn.backbones.deit import DeiT

UNUSED = ("mask_token", "rope_embed.", "local_cls_norm.")  # of training, or computed here


@register_backbone("dinov3")
class DINOv3(DeiT):
    rotary, epsilon = True, 1e-5

    @staticmethod
    def official_name(name: str) -> str | None:
        return None if name.startswith(UNUSED) or name.endswith(".bias_mask") else name
