r"""Less-Attention: score maps computed from those of the layer before (Zhang et al., CVPR 2024, arXiv 2406.00427).

The first layers of a stage are vanilla attention (VA). The others (LA) transform the scores of the layer before:

    VA   A_l = Q K^T / sqrt(d) [+ position bias];   Z = softmax(A_l) V                                 (eq. 1-4)
    LA   A_l = Psi(Theta(A_{l-1})^T)^T;             Z = softmax(A_l) V,   only V is projected         (eq. 5)

Theta is a linear map over the M keys, Psi over the N queries. Between the stages of a pyramid the first VA layer adds
the last map of the stage before, downsampled (eq. 6-7): A = Q K^T / sqrt(d) + LayerScale(Conv1x1(DWConv(A_before))).
Training adds a diagonality-preserving loss over the LA maps (eq. 8-9, bounded form):

    L = dp_weight sum_{LA} (mean |A - A^T| + mean_i relu(max_{j != own(i)} A_ij - A_{i,own(i)})),    A after softmax

Cost of an LA layer: h N M (N + M) multiply-accumulates; parameters that grow with the grid: Theta and Psi, N^2 + M^2.
It saves N M C + N C^2 + M C^2 multiply-accumulates and 2 C^2 weights for queries and keys, so it pays off only if N is
below about C, and never for long sequences (DeiT-T: 0.331, not 0.374 GMACs at 65 tokens, 1.517, not 1.254 at 197).

There is no official code. Our choices where the paper is silent:
  - Theta and Psi have a bias, belong to one layer, are shared by its heads, and start as the identity: an LA layer
    starts from the map it receives.
  - `num_va` (1) VA layers per stage. In Swin shifted and unshifted windows have separate chains of layers, since their
    maps do not match: layer l reads layer l - 2, and masked pairs are set to zero before Theta mixes them.
  - The map between stages is downsampled on its grids: 2 x 2 over the queries, and over the keys only if the key grid
    shrinks (kernel = stride = the factor, initialised to the mean), then 1 x 1 from heads to heads. Rows and columns of
    a class token that joins later are zero. LayerScale starts at 0.1 (CaiT). Swin has no such residual.
  - The symmetry term needs M = N, else it is left out; own(i) is the key that covers query i. `dp_weight` is 0.01.
  - `max_tokens` (256): layers with more tokens stay VA. Naming `less` for such a stage explicitly is an error.
Theta and Psi fix the grid: an LA layer rejects any other size.
"""

import math
from dataclasses import dataclass, replace

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn
from paddle.nn.initializer import Assign, Constant

from ppattn.attention.base import Attention, AttentionSpec, Context, LayerState, check_grid, register_attention
from ppattn.attention.softmax import SoftmaxAttention
from ppattn.errors import UserError
from ppattn.layers import Linear, conv2d
from ppattn.ops import combine_by_window, constant, dropout, is_dynamic, merge_heads, pad_end, softmax, split_heads
from ppattn.validation import Count, NotNegative, Positive


@dataclass(eq=False)
class LessParts:
    """Score maps instead of `PackedParts`."""

    scores: Tensor  # A, before mask and softmax [B, h, N, M]
    weights: Tensor  # after them [B, h, N, M]
    v: Tensor  # [B, h, M, d]


@register_attention("less")
class LessAttention(SoftmaxAttention):
    def __init__(
        self, spec: AttentionSpec, *, num_va: Positive = 1, max_tokens: Count = 256, dp_weight: NotNegative = 0.01
    ):
        links = spec.links
        if spec.sequence:
            raise UserError("less attention transforms score maps of one size; a sequence may be shorter than max_len.")
        too_large = spec.tokens > max_tokens
        if too_large and links.explicit:
            limit = f"max_tokens = {max_tokens} allows less; `attention: less` leaves such stages vanilla"
            raise UserError(f"less attention in stage {spec.stage + 1}, of {spec.tokens} tokens: {limit}.")
        super().__init__(spec)
        self.vanilla = too_large or links.index < num_va
        self.max_tokens, self.too_large, self.dp_weight = max_tokens, too_large, dp_weight
        self.uses_bias = self.vanilla
        self.slot = "shifted" if links.shifted else "plain"
        self.inherit = None
        if self.vanilla:
            if links.previous is not None and links.index == 0 and not links.shifted and not too_large:
                self.inherit = ScoreDownsample(links.previous, spec)
            return
        del self.qkv
        self.v = Linear(spec.dim, spec.dim, bias=spec.qkv_bias)
        self.theta_weight, self.theta_bias = self.identity(key_tokens(spec))
        self.psi_weight, self.psi_bias = self.identity(spec.tokens)

    def identity(self, size: int) -> tuple[Tensor, Tensor]:
        weight = self.create_parameter([size, size], default_initializer=Assign(paddle.eye(size)))
        return weight, self.create_parameter([size], is_bias=True)

    def project(self, x: Tensor, context: Context) -> LessParts:  # type: ignore[override]
        if is_dynamic(*context.hw) or not self.vanilla or self.inherit is not None:
            check_grid("less", self.spec, context.hw)
        if self.vanilla:
            q, k, v = self.heads(super().project(x, context))
            scores = self.logits(q, k)
            if context.bias is not None:
                scores = scores + context.bias
            if self.inherit is not None:
                scores = scores + self.inherit(context.state.plain)
        else:
            v = split_heads(self.v(self.keys(x, context.hw)), self.num_heads)
            scores = self.transform(getattr(context.state, self.slot), context.mask)
        return LessParts(scores, softmax(scores, mask=context.mask), v)

    def attend(self, parts: LessParts, context: Context) -> Tensor:  # type: ignore[override]
        return merge_heads(paddle.matmul(dropout(parts.weights, self.spec.attn_drop, self.training), parts.v))

    def next_state(self, parts: LessParts, context: Context) -> LayerState:
        """The scores of this layer instead of the last ones, and its part of the diagonality loss."""
        loss = context.state.loss
        if self.training and not self.vanilla and self.dp_weight:
            own_loss = self.dp_weight * diagonality_loss(parts.weights, own_key(self.spec))
            loss = own_loss if loss is None else loss + own_loss
        return replace(context.state, **{self.slot: parts.scores, "loss": loss})

    def weights(self, parts: LessParts, context: Context) -> Tensor:  # type: ignore[override]
        return parts.weights

    def values(self, parts: LessParts, context: Context) -> Tensor:  # type: ignore[override]
        return parts.v

    def transform(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        """Psi(Theta(A)^T)^T."""
        if mask is not None:
            scores = combine_by_window(scores, (mask == 0).astype(scores.dtype).unsqueeze(1), paddle.multiply)
        h, n, m = scores.shape[1:]
        scores = scores.reshape([-1, n, m])  # oneDNN reads out of bounds for four dimensions and one head
        scores = paddle.matmul(scores, self.theta_weight) + self.theta_bias
        scores = paddle.matmul(self.psi_weight, scores, transpose_x=True) + self.psi_bias.unsqueeze(-1)
        return scores.reshape([-1, h, n, m])

    @staticmethod
    def remarks(layers: list[Attention]) -> list[str]:
        large = " and ".join(map(str, sorted({layer.spec.tokens for layer in layers if layer.too_large})))
        used = f"{sum(not layer.vanilla for layer in layers)} of {len(layers)} layers"
        vanilla = f"those with {large} tokens stay vanilla (max_tokens is {layers[0].max_tokens})"
        return [f"Less-Attention is used in {used}: {vanilla}"] if large else []


class ScoreDownsample(nn.Layer):
    """The last score map of a stage on the grids of the next: [B, h, N, M] -> [B, h', P + N', P + M']."""

    def __init__(self, before: AttentionSpec, after: AttentionSpec):
        super().__init__()
        h = before.num_heads
        self.before, self.after, self.size = before, after, [before.tokens, key_tokens(before)]
        keys, keys2 = key_grid(before), key_grid(after)
        if keys2[0] > keys[0] or keys2[1] > keys[1]:
            grow = f"has more keys than the stage before it ({keys2} after {keys}): choose other sr_ratios"
            raise UserError(f"less attention: stage {after.stage + 1} {grow}.")
        self.factors = [(round(a / c), round(b / d)) for (a, b), (c, d) in ((before.grid, after.grid), (keys, keys2))]
        self.query_weight, self.key_weight = (
            self.create_parameter([h, a, b], default_initializer=Constant(1.0 / (a * b))) for a, b in self.factors
        )
        self.heads = conv2d(h, after.num_heads, 1)
        self.layer_scale = self.create_parameter([after.num_heads, 1, 1], default_initializer=Constant(0.1))

    def forward(self, scores: Tensor) -> Tensor:
        before, after = self.before, self.after
        if list(scores.shape[2:]) != self.size:
            built = f"a grid of {before.grid[0]} x {before.grid[1]} in stage {before.stage + 1}"
            raise UserError(f"less attention was built for {built} and got another one: set img_size to match.")
        scores = scores[:, :, before.num_prefix :, before.num_prefix :]
        x = self.pool(scores, self.query_weight, before.grid, after.grid, self.factors[0])
        x = x.transpose([0, 1, 3, 2])
        x = self.pool(x, self.key_weight, key_grid(before), key_grid(after), self.factors[1])
        x = self.heads(x.transpose([0, 1, 3, 2])) * self.layer_scale
        p = after.num_prefix
        if p:
            x = paddle.concat([0.0 * x[:, :, :p], x], axis=2)
            x = paddle.concat([0.0 * x[:, :, :, :p], x], axis=3)
        return x

    @staticmethod
    def pool(x: Tensor, weight: Tensor, grid: tuple[int, int], target: tuple[int, int], by: tuple[int, int]) -> Tensor:
        """Weighted sums over `by` blocks of the grid, made to fit, that the third axis of [B, h, n, r] runs over."""
        (a, b), (fh, fw), h, r = target, by, x.shape[1], x.shape[3]
        x = x.reshape([-1, h, *grid, r])[:, :, : a * fh, : b * fw]
        x = pad_end(pad_end(x, 2, a * fh - x.shape[2]), 3, b * fw - x.shape[3])
        # Images and heads share an axis: Paddle's oneDNN predictor is wrong for tensors of seven dimensions.
        x = x.reshape([-1, a, fh, b, fw, r]).transpose([0, 2, 4, 1, 3, 5]).reshape([-1, h, fh * fw, a * b * r])
        return paddle.matmul(weight.reshape([1, h, 1, fh * fw]), x).reshape([-1, h, a * b, r])


def key_grid(spec: AttentionSpec) -> tuple[int, int]:
    """The grid after spatial reduction."""
    return max(1, spec.grid[0] // spec.sr_ratio), max(1, spec.grid[1] // spec.sr_ratio)


def key_tokens(spec: AttentionSpec) -> int:
    """M."""
    return spec.num_prefix + math.prod(key_grid(spec))


@constant
def own_key(spec: AttentionSpec) -> Tensor:
    """For every query the index of the key that covers it, int64 [N]."""
    (h, w), (kh, kw), p = spec.grid, key_grid(spec), spec.num_prefix
    rows = paddle.clip(paddle.arange(h) // spec.sr_ratio, max=kh - 1)
    columns = paddle.clip(paddle.arange(w) // spec.sr_ratio, max=kw - 1)
    grid = (rows.unsqueeze(1) * kw + columns.unsqueeze(0)).flatten() + p
    return paddle.concat([paddle.arange(p), grid]) if p else grid


def diagonality_loss(weights: Tensor, own: Tensor) -> Tensor:
    """Bounded form of the loss for maps [B, h, N, M] after softmax; own [N] is each query's own key."""
    diagonal = F.one_hot(own, weights.shape[-1]).astype(weights.dtype)
    own_weight = (weights * diagonal).sum(axis=-1)
    others = weights * (1.0 - diagonal)
    # Not `max`: its gradient is seventy times slower on the CPU.
    others = paddle.take_along_axis(others, others.detach().argmax(axis=-1, keepdim=True), axis=-1).squeeze(-1)
    loss = F.relu(others - own_weight).mean(axis=[0, 1, 2])
    if weights.shape[-1] == weights.shape[-2]:
        loss = loss + (weights - weights.transpose([0, 1, 3, 2])).abs().mean(axis=[0, 1, 2, 3])
    return loss
