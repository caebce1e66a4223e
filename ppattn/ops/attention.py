"""Softmax attention and InLine attention on packed projections, each in a plain and in a compiled form."""

import math
from collections.abc import Callable
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from ppattn.ops.convolution import dynamic_conv3x3
from ppattn.ops.dense import token_mean
from ppattn.ops.dispatch import FUSED, as_dtype_of, as_float32, compiled, eager, fused, grad_mask, is_half, run, run_all

EXCLUDED = -3e4  # the logit of a key that gets no weight; float16 has it


def split_tensor(x: Tensor, parts: int, axis: int = 2) -> list[Tensor]:
    """Equal parts along an axis; slices in exported programs, since oneDNN has no bfloat16 split."""
    if compiled(x) and axis == x.ndim - 1 and parts <= 4:
        return run_all("split", x, parts)[:parts]
    if eager():
        return x.split(parts, axis=axis)
    size = x.shape[axis] // parts
    return [paddle.slice(x, [axis], [i * size], [(i + 1) * size]) for i in range(parts)]


def split_heads(x: Tensor, num_heads: int, parts: int = 1) -> Any:
    """[B, N, parts * C] -> [B, h, N, d], or a list of these for several parts."""
    tokens, width = x.shape[1:]
    x = x.reshape([-1, tokens, parts * num_heads, width // (parts * num_heads)]).transpose([0, 2, 1, 3])
    return x if parts == 1 else split_tensor(x, parts, axis=1)


def merge_heads(x: Tensor) -> Tensor:
    """[B, h, N, d] -> [B, N, C]."""
    return x.transpose([0, 2, 1, 3]).flatten(2)


full_precision = paddle.amp.auto_cast(enable=False)  # decorator: matrix products of float32 tensors stay float32


def keep_float32(layer: nn.Layer) -> None:
    """Keep the layer's own parameters and buffers in float32 under AMP O2: `paddle.amp.decorate` reads a private
    attribute; without it, give it the layers with `keeps_float32` as `excluded_layers`, as training does."""
    layer.keeps_float32 = True
    layer._cast_to_low_precision = False


def combine_by_window(scores: Tensor, mask: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """combine(scores, mask) for scores [B, h, N, M] and a mask [G, h or 1, N, M]; B counts windows, an image has G."""
    return combine(scores.reshape([-1, mask.shape[0], *scores.shape[1:]]), mask).flatten(0, 1)


def softmax(scores: Tensor, bias: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """Softmax over the last axis of scores [B, h, N, M] + bias [h, N, M] + mask [G, N, M], computed in float32."""
    if mask is not None:  # One sum: constant in exported programs; oneDNN is slow if two axes are broadcast.
        mask = mask.unsqueeze(1)
        scores = combine_by_window(scores, mask if bias is None else mask + bias, paddle.add)
    elif bias is not None:
        scores = scores + bias
    return as_dtype_of(F.softmax(as_float32(scores)), scores) if is_half(scores) else F.softmax(scores)


def softmax_attention(
    qkv: Tensor,
    num_heads: int,
    scale: float,
    kv: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    drop: float = 0.0,
) -> Tensor:
    """softmax(scale q k^T + bias + mask) v [B, N, C] for h heads, with dropout of the weights.

    qkv packs the projections [B, N, 3 * C] (q, k, v, each by head); with kv [B, M, 2 * C] of other tokens it is only q.
    bias [h, N, M] and mask [G, N, M] are additive logits, the mask without gradient; B counts G windows an image.
    """
    if not drop and compiled(qkv, kv, bias, mask) and (mask is None or mask.stop_gradient):
        inputs = (qkv, kv, None, bias, mask)
        return run("softmax_attention", *inputs, num_heads, scale, False, grad_mask(*inputs))
    if fused(qkv):
        if kv is None:
            q, k, v = qkv.reshape([0, 0, 3, num_heads, -1]).unbind(2)
        else:
            q, (k, v) = qkv.reshape([0, 0, num_heads, -1]), kv.reshape([0, 0, 2, num_heads, -1]).unbind(2)
        return fused_attention(q, k, v, scale, additive(bias, mask, len(q)), drop).flatten(2)
    if kv is None:
        q, k, v = split_heads(qkv, num_heads, 3)
    else:
        q, (k, v) = split_heads(qkv, num_heads), split_heads(kv, num_heads, 2)
    # Inference engines fuse a factor behind the product into it.
    scores = paddle.matmul(q * scale, k, transpose_y=True) if eager() else paddle.matmul(q, k, transpose_y=True) * scale
    weights = softmax(scores, bias, mask)
    if drop:
        weights = F.dropout(weights, drop)
    return merge_heads(paddle.matmul(weights, v))


def fused_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, drop: float) -> Tensor:
    """Softmax attention by Paddle's fused kernels: q [B, N, h, d], k and v [B, M, h, d] -> [B, N, h, d].

    Additive logits `mask` [B, h or 1, N, M] go with an explicit factor, to the memory-efficient kernel, which wants a
    multiple of 8 keys: flash takes no factor and gives a mask no gradient. `training` stays true, as by default: that
    kernel else keeps no sums for the gradient, which then reads memory that is not there.
    """
    factor = scale * math.sqrt(q.shape[3])
    if mask is None:
        return FUSED(q if math.isclose(factor, 1.0) else q * factor, k, v, dropout_p=drop)
    missing = -k.shape[1] % 8
    if missing:
        mask = paddle.concat([mask, paddle.full([*mask.shape[:3], missing], EXCLUDED, mask.dtype)], axis=-1)
        k, v = (paddle.concat([t, paddle.zeros([len(t), missing, *t.shape[2:]], t.dtype)], axis=1) for t in (k, v))
    return FUSED(q, k, v, attn_mask=mask.astype(q.dtype), dropout_p=drop, scale=scale)


def additive(bias: Tensor | None, mask: Tensor | None, batch: int) -> Tensor | None:
    """The sum of bias [h, N, M] and mask [G, N, M] for a batch of images * G: [batch, h or 1, N, M]."""
    if mask is None:
        return None if bias is None else bias.expand([batch, *bias.shape])
    both = mask.unsqueeze(1) if bias is None else mask.unsqueeze(1) + bias
    return both.unsqueeze(0).expand([batch // len(mask), *both.shape]).flatten(0, 1)


@full_precision
def covariance(k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """scale Cov(k, v) [B, h, d, d] over the tokens, and the mean of v [B, h, 1, d], in float32 or better."""
    k, v = as_float32(k), as_float32(v)
    k_mean, v_mean = token_mean(k), token_mean(v)
    product = paddle.matmul(k, v, transpose_x=True) / k.shape[2]
    return scale * (product - paddle.matmul(k_mean, v_mean, transpose_x=True)), v_mean


def inline_attention(
    qkv: Tensor, kernel: Tensor | None, num_heads: int, grid: tuple[int, int], scale: float, num_prefix: int = 0
) -> Tensor:
    """InLine attention q (scale Cov(k, v)) + mean(v) and its local term kernel * v: [B, P + H * W, C].

    qkv packs the projections [B, P + H * W, 3 * C]; kernel [B, C, 9] is dynamic, without effect on the P prefix tokens.
    """
    if compiled(qkv, kernel) and (kernel is None or qkv.shape[1] == num_prefix + grid[0] * grid[1]):
        return run("inline_attention", qkv, kernel, num_heads, *grid, scale)
    q, k, v = split_heads(qkv, num_heads, 3)
    state, mean = covariance(k, v, scale)
    # Subtract the negative: Paddle Inference fuses a product and a broadcast sum into a kernel 200 times slower.
    y = merge_heads(paddle.matmul(q, as_dtype_of(state, q)) - as_dtype_of(-mean, q))
    return y if kernel is None else y + dynamic_conv3x3(qkv[:, :, 2 * y.shape[2] :], kernel, grid, num_prefix)
