r"""Full Gaussian kernel attention, which SOFT approximates (Lu et al., NeurIPS 2021, arXiv 2110.11945).

    q = k = W x;    S_ij = exp(-|q_i - k_j|^2 / (2 sqrt(d)));    Y = S V + convolution of V

Without normalisation, as in the paper, landmarks and inverse. Projections and convolution are those of `soft`.

Cost per layer: 2 N^2 C multiply-accumulates and h N^2 stored weights (none in the compiled form for the CPU), besides
the projections (3 N C^2) and the convolution; quadratic in N. No options. The kernel runs in float32. Where the
backbone gives no ratio, the size of the convolution and its parameters grow with the grid, as in `soft`.
"""

from ppattn.attention.base import AttentionSpec, register_attention
from ppattn.attention.soft import SoftAttention


@register_attention("gaussian")
class GaussianAttention(SoftAttention):
    uses_landmarks = False

    def __init__(self, spec: AttentionSpec):
        super().__init__(spec)
