"""Attention without softmax: linear attention and its features, Gaussian kernels, Newton's inverse.

Each operator has a plain and a compiled form. Tokens are [B, N, C], channels ordered by head.
"""

import paddle
import paddle.nn.functional as F
from paddle import Tensor

from ppattn.ops.attention import full_precision, merge_heads, split_heads
from ppattn.ops.dense import token_mean
from ppattn.ops.dispatch import compiled, eager, grad_mask, run

FLUSH = 1e-30  # smaller gradients of Newton steps are set to zero: denormal numbers are eighty times slower


@full_precision
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_heads: int,
    epsilon: float,
    polar: bool = False,
    rotation: tuple[Tensor, Tensor] | None = None,
    magnitude: float | None = None,
) -> Tensor:
    """q (k^T v / N) / (q . mean(k) + epsilon) for every head; q, k [B, N, h * r] and v [B, N, h * d] -> [B, N, h * d].

    Args:
        polar: q and k are [q+, q-] and [k+, k-] by head; the second half of v takes the queries [q-, q+] (PolaFormer).
        rotation: cos and sin for `rotate`, applied to q and k, but not in the normaliser.
        magnitude: s of MALA: with z = s q . mean(k) the result is s (1 + 1 / (z + epsilon)) q (k^T v / N) - z mean(v).
    """
    if compiled(q, k, v) and (rotation is None or q.shape[2] // num_heads % 2 == 0):  # a turned pair is in one head
        if rotation is None and magnitude is None:
            return run("linear_attention", q, k, v, num_heads, polar, epsilon)
        return run("rotary_attention", q, k, v, *(rotation or (None, None)), num_heads, epsilon, magnitude or 0.0)
    below, mean_k = split_heads(q, num_heads), split_heads(token_mean(k), num_heads)
    if rotation is not None:
        q, k = rotate(q, *rotation), rotate(k, *rotation)
    q, k, v = (split_heads(t, num_heads) for t in (q, k, v))
    state, mean = paddle.matmul(k, v, transpose_x=True) / k.shape[2], mean_k.transpose([0, 1, 3, 2])
    if magnitude is not None:
        z = magnitude * paddle.matmul(below, mean)
        factor = magnitude * ((z + (epsilon + 1.0)) / (z + epsilon))  # paddle2onnx divides no number by a free size
        return merge_heads(factor * paddle.matmul(q, state) - paddle.matmul(z, token_mean(v)))
    if not polar:
        return merge_heads(paddle.matmul(q, state) / (paddle.matmul(below, mean) + epsilon))
    # Swapping the halves of q equals swapping the rows of the state, so one product gives both streams.
    half, r = v.shape[3] // 2, q.shape[3] // 2
    first, second = (paddle.concat([part, mean], axis=-1) for part in (state[..., :half], state[..., half:]))
    second = paddle.concat([second[:, :, r:], second[:, :, :r]], axis=2)
    y = paddle.matmul(q, paddle.concat([first, second], axis=-1))
    same, below, opposite, other = paddle.split(y, [half, 1, half, 1], axis=-1)  # slices lose a free N in ONNX
    return merge_heads(paddle.concat([same / (below + epsilon), opposite / (other + epsilon)], axis=-1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, width: int = 2) -> Tensor:
    """Rotates pairs (u, v) of channels of x [B, N, C] to (u cos - v sin, v cos + u sin).

    The pairs are neighbours, or channels c and c + width / 2 of every `width`. cos and sin [N, T] repeat every T
    channels; both channels of a pair have its cosine, the first one minus its sine, the second one its sine.
    """
    n, c = x.shape[1:]
    repeat = c // cos.shape[1]
    if repeat > 1:
        cos, sin = paddle.tile(cos, [1, repeat]), paddle.tile(sin, [1, repeat])
    pairs = x.reshape([-1, n, c // width, width])
    swapped = paddle.concat([pairs[..., width // 2 :], pairs[..., : width // 2]], axis=-1).reshape([-1, n, c])
    return x * cos + swapped * sin


def signed_power(x: Tensor, shift: Tensor | None, scale: Tensor, power: Tensor, num_heads: int, tiny: float) -> Tensor:
    """relu(z)^power and relu(-z)^power for z = (x + shift) scale, |z| at least `tiny`: x [B, N, C], shift [1, N, C] or
    None, scale [1, 1, C], power [1, h, 1, d] -> [B, N, 2 C], for every head d positive parts, then d negative parts."""
    if compiled(x, shift, scale, power):
        return run("signed_power", x, shift, scale, power, num_heads, tiny, grad_mask(x, shift, scale, power))
    z = (x if shift is None else x + shift) * scale
    (n, c), d = z.shape[1:], power.shape[3]
    value = paddle.exp(power.reshape([1, 1, -1]) * paddle.log(paddle.clip(z.abs(), min=tiny)))
    positive = value * (z > 0).astype(z.dtype)
    parts = [part.reshape([-1, n, num_heads, d]) for part in (positive, value - positive)]
    return paddle.concat(parts, axis=-1).reshape([-1, n, 2 * c])


@full_precision
def direction_power(x: Tensor, num_heads: int, tiny: float) -> Tensor:
    """By head, with the norm n of x [B, N, C]: (relu(x) / n)^p and (relu(-x) / n)^p for p = 3 (1/2 + tanh n); |x| / n
    and n are at least `tiny` -> [B, N, 2 C], for every head d positive parts, then d negative parts."""
    if compiled(x):
        return run("direction_power", x, num_heads, tiny)
    n, c = x.shape[1:]
    x = x.reshape([-1, n, num_heads, c // num_heads])
    norm = paddle.sqrt((x * x).sum(axis=-1, keepdim=True) + tiny**2)
    value = paddle.exp(3.0 * (0.5 + paddle.tanh(norm)) * paddle.log(paddle.clip(x.abs() / norm, min=tiny)))
    return paddle.concat([value * (side > 0).astype(x.dtype) for side in (x, -x)], axis=-1).reshape([-1, n, 2 * c])


@full_precision
def gated_unit(q: Tensor, k: Tensor, v: Tensor, w1: Tensor, w2: Tensor, rate: float, tiny: float) -> Tensor:
    """By head (q W1') * silu(q W2'), after one gradient step of W1 and W2 on -rate sum_n <f(k_n), v_n> (ViT^3).

    With a = k W1, z = k W2 and e = -rate v the gradients are k^T (e * silu(z)) and k^T (e * a * silu'(z)); their
    columns are divided by their norm, at least `tiny`, + 1. q, k and v [B, N, C], w1 and w2 [1, h, d, d] -> [B, N, C].
    """
    weights = paddle.concat([w1, w2], axis=-1)
    if compiled(q, k, v, weights):
        return run("gated_unit", q, k, v, weights[0], rate, tiny)
    q, k, v = (split_heads(t, weights.shape[1]) for t in (q, k, v))
    a, z = head_product(k, weights).chunk(2, axis=-1)
    e, gate = rate * v, F.sigmoid(z)
    slope = gate * (1.0 + z * (1.0 - gate))
    step = paddle.matmul(k, paddle.concat([e * z * gate, e * a * slope], axis=-1), transpose_x=True)
    # The larger operand first: oneDNN writes the sum into its memory.
    a, z = paddle.matmul(q, clipped(step, 2, tiny) + weights).chunk(2, axis=-1)
    return merge_heads(a * z * F.sigmoid(z))


def head_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, h, N, d] times the matrix of every head, weight [1, h, d, e] -> [B, h, N, e]; one product per head, as
    oneDNN writes beyond its memory where it repeats the one matrix of a single head."""
    heads, n, d = x.shape[1:]
    y = paddle.matmul(x.transpose([1, 0, 2, 3]).reshape([heads, -1, d]), weight[0])
    return y.reshape([heads, -1, n, weight.shape[3]]).transpose([1, 0, 2, 3])


def clipped(step: Tensor, axis: int, tiny: float) -> Tensor:
    """A step divided by its norm along an axis + 1; norms are at least `tiny`."""
    return step / (1.0 + paddle.sqrt((step * step).sum(axis=axis, keepdim=True) + tiny**2))


@full_precision
def focused_power(x: Tensor, shift: Tensor | None, scale: Tensor, power: float, epsilon: float) -> Tensor:
    """|z| / |z^power| z^power for z = (relu(x + shift) + epsilon) scale, norms over all channels of a token: x [B, N,
    C], shift [1, N, C] or None, scale [1, 1, C], positive -> [B, N, C]."""
    if compiled(x, shift, scale):
        return run("focused_power", x, shift, scale, power, epsilon, grad_mask(x, shift, scale))
    z = (F.relu(x if shift is None else x + shift) + epsilon) * scale
    largest = z.max(axis=-1, keepdim=True).detach()  # the result is proportional to z; powers of z overflow
    z = z / largest
    high = z * z * z if power == 3 else z**power
    return largest * (high * paddle.sqrt((z * z).sum(axis=-1, keepdim=True) / (high * high).sum(axis=-1, keepdim=True)))


@full_precision
def gaussian_attention(q: Tensor, k: Tensor, v: Tensor, num_heads: int) -> Tensor:
    """sum_j exp(-|q_i - k_j|^2 / 2) v_j for every head, without normalisation; q [B, N, C], k and v [B, M, C]."""
    if compiled(q, k, v):
        return run("softmax_attention", q, k, v, None, None, num_heads, 1.0, True, 0)
    q, k, v = (split_heads(t, num_heads) for t in (q, k, v))
    return merge_heads(paddle.matmul(gaussian_kernel(q, k), v))


@full_precision
def gaussian_nystrom(q: Tensor, landmarks: Tensor, inverse: Tensor, v: Tensor, num_heads: int) -> Tensor:
    """K1 inverse K1^T v [B, N, C] with K1 = exp(-|q_i - l_j|^2 / 2) for every head of q and v [B, N, C], landmarks l
    [B, m, C], inverse [B, h, m, m]."""
    if compiled(q, landmarks, inverse, v):  # recomputes K1 instead of storing it
        u = split_heads(gaussian_attention(landmarks, q, v, num_heads), num_heads)
        return gaussian_attention(q, landmarks, merge_heads(paddle.matmul(inverse, u)), num_heads)
    q, landmarks, v = (split_heads(t, num_heads) for t in (q, landmarks, v))
    k1 = gaussian_kernel(q, landmarks)
    return merge_heads(paddle.matmul(k1, paddle.matmul(inverse, paddle.matmul(k1, v, transpose_x=True))))


def gaussian_kernel(a: Tensor, b: Tensor) -> Tensor:
    """exp(-|a_i - b_j|^2 / 2) for a [B, h, N, d] and b [B, h, m, d]."""
    product = paddle.matmul(a, b, transpose_y=True)
    a2, b2 = (a * a).sum(-1, keepdim=True), (b * b).sum(-1).unsqueeze(2)
    # Three axes: oneDNN is fifty times slower if the last of four axes is broadcast.
    kernel = (product.flatten(0, 1) - 0.5 * a2.flatten(0, 1) - 0.5 * b2.flatten(0, 1)).clip(max=0.0).exp()
    return kernel.reshape([-1, a.shape[1], *kernel.shape[1:]])


@full_precision
def newton_inverse(matrix: Tensor, start: Tensor, steps: int) -> Tensor:
    """`steps` Newton steps V <- 2 V - V K V towards the inverse of K [B, h, m, m], from V = `start`; differentiable."""
    if steps and compiled(matrix, start):
        return run("newton", matrix, start, steps, grad_mask(matrix, start))
    for _ in range(steps):
        start = newton_step(matrix, start)
    return start


def newton_step(matrix: Tensor, v: Tensor) -> Tensor:
    # A function of its own: Paddle cannot trace this condition inside the loop.
    v = 2.0 * v - paddle.matmul(paddle.matmul(v, matrix), v)
    if eager() and not v.stop_gradient:
        v.register_hook(lambda grad: paddle.where(grad.abs() < FLUSH, paddle.zeros_like(grad), grad))
    return v
