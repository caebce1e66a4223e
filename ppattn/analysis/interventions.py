"""Analyses beside the maps: masked attention weights, Grad-CAM, Newton's iterates in SOFT, PolaFormer's powers."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import paddle

from ppattn.analysis.maps import LayerMap
from ppattn.analysis.measures import near
from ppattn.attention import Attention
from ppattn.attention.base import Context, as_context
from ppattn.attention.polaformer import PolaFormerAttention
from ppattn.attention.soft import SoftAttention, identity_like
from ppattn.ops import combine_by_window, gaussian_kernel, merge_heads, newton_inverse, split_heads


@contextmanager
def masked(model: paddle.nn.Layer, size: int, local: bool) -> Iterator[list[float]]:
    """Set attention weights to zero, in every layer whose keys are the queries' own tokens.

    For every grid query these are the weights in the size x size window around it (`local`), or as many weights of
    random grid tokens, the same for all images of a batch. The other weights, prefix tokens and local terms stay.
    Every call of such a layer appends the mean number of masked keys of a query to the list: at a border it is smaller.
    """
    counts: list[float] = []
    rng = np.random.default_rng(0)

    def mask_output(layer, inputs, outputs):
        x, context = inputs[0], as_context(inputs[1])
        parts, prefix = layer.project(x, context), layer.spec.num_prefix
        weights, mask = layer.attention_map(x, context, parts), layer.key_mask(context)
        if weights.shape[2] != weights.shape[3]:
            return outputs
        visible = np.array([True]) if mask is None else mask.numpy()[:, prefix:, prefix:] > -1
        drop = near(context.hw, size)[None] & visible
        real = np.broadcast_to(visible, drop.shape).diagonal(0, 1, 2)  # not the padding of a window
        counts.append(drop.sum(-1)[real].mean())
        if not local:
            order = np.where(visible, rng.random(drop.shape), 2.0).argsort(-1).argsort(-1)
            drop = order < drop.sum(-1, keepdims=True)
        drop = np.pad(drop, ((0, 0), (prefix, 0), (prefix, 0)))
        lost = combine_by_window(weights, paddle.to_tensor(drop[:, None], weights.dtype), paddle.multiply)
        lost = merge_heads(paddle.matmul(lost, layer.values(parts, context)))
        return layer.finish(layer.normalised(layer.mix(parts, context) - lost), parts), outputs[1]

    with ExitStack() as hooks:
        for layer in model.sublayers():
            if isinstance(layer, Attention) and layer.spatial_keys:
                hooks.callback(layer.register_forward_post_hook(mask_output).remove)
        yield counts


def gradcam(model: Any, image: paddle.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """relu(sum_c a_c A_c) on the grid [H, W], and the logits [K] of an image [1, C, H, W].

    A_c is channel c of the grid tokens that the last block receives, a_c the mean over the grid of the derivative of
    the largest logit (Selvaraju et al., ICCV 2017, equations 1 and 2).
    """
    received: list = []
    hook = model.blocks_flat()[-1].register_forward_pre_hook(lambda _, inputs: received.extend(inputs[:2]))
    logits = model(image)[0]
    hook.remove()
    tokens, hw = received
    (slopes,) = paddle.grad(logits.max(), tokens)
    grid, slopes = (one[0, -hw[0] * hw[1] :].numpy() for one in (tokens, slopes))
    return np.maximum(grid @ slopes.mean(0), 0).reshape(hw), logits.numpy()


@paddle.no_grad()
def newton(found: LayerMap) -> dict | None:
    """Newton's inverse in a SOFT layer with landmarks; None for other layers.

    `residuals` are |I - K V_t| / |I| (Frobenius) after t = 0, 1, ... steps, mean over the heads; `cosine` and, for
    `soft`, the relative `error` compare the approximated map with the full Gaussian kernel (SOFT-Norm scales its map).
    """
    layer = found.layer
    if not isinstance(layer, SoftAttention) or not layer.uses_landmarks:
        return None
    tokens = layer.project(found.tokens, Context(found.hw)).q
    q, landmarks = (split_heads(t, layer.num_heads) for t in (tokens, layer.landmarks(tokens, found.hw)[0]))
    kernel, inverse = layer.newton_inputs(gaussian_kernel(landmarks, landmarks))
    eye = identity_like(kernel)
    residuals = []
    for _ in range(layer.newton_iters + 1):
        rest = eye - paddle.matmul(kernel, inverse)
        residuals.append(float(((rest * rest).sum([-1, -2]) / eye.shape[-1]).sqrt().mean()))
        inverse = newton_inverse(kernel, inverse, 1)
    full, low = gaussian_kernel(q, q).numpy(), found.weights
    cosine = float((full * low).sum() / (np.linalg.norm(full) * np.linalg.norm(low)))
    error = float(np.linalg.norm(full - low) / np.linalg.norm(full))
    return {"residuals": residuals, "cosine": cosine} | ({"error": error} if type(layer) is SoftAttention else {})


@paddle.no_grad()
def polarity(found: LayerMap) -> dict | None:
    """Powers 1 + alpha sigmoid(.) of a PolaFormer layer, and the correlation of its two streams' gates; else None."""
    layer = found.layer
    if not isinstance(layer, PolaFormerAttention):
        return None
    gate = layer.project(found.tokens, Context(found.hw)).gate
    if gate is None:
        return None
    power = 1 + layer.alpha / (1 + np.exp(-layer.power.numpy()))
    halves = gate.numpy().reshape(-1, layer.num_heads, 2, layer.head_dim // 2)
    same, opposite = halves.transpose(2, 0, 1, 3).reshape(2, -1)
    powers = {"power": power.mean(), "smallest_power": power.min(), "largest_power": power.max()}
    row = powers | {"gate_correlation": np.corrcoef(same, opposite)[0, 1]}
    return {key: float(value) for key, value in row.items()}
