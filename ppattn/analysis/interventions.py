"""Analyses that read or change what an attention computes: masks, Newton's iterates in SOFT, PolaFormer's powers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import paddle

from ppattn.analysis.maps import LayerMap, watched
from ppattn.analysis.measures import near
from ppattn.attention import Attention
from ppattn.attention.base import Context, as_context
from ppattn.attention.polaformer import PolaFormerAttention
from ppattn.attention.soft import SoftAttention, identity_like
from ppattn.ops import by_window, gaussian, merge_heads, newton_inverse, split_heads
from ppattn.tracing import evaluating


@contextmanager
def masked(model: paddle.nn.Layer, size: int, local: bool, seed: int = 0) -> Iterator[list[float]]:
    """Sets attention weights to zero in every layer whose keys are the queries' own tokens.

    Of every grid query, those of the size x size window around it (`local`), or of as many random grid tokens, the same
    for all images of a batch. The other weights stay as they are; prefix tokens and local terms are not masked.

    Yields:
        A list that every call of such a layer extends: keys masked per query, mean over the queries. Windows are cut at
        the border, so that this is less than size^2.
    """
    counts: list[float] = []
    rng = np.random.default_rng(seed)

    def without_them(layer, inputs, outputs):
        x, context = inputs[0], as_context(inputs[1])
        parts, prefix = layer.project(x, context), layer.spec.num_prefix
        weights = layer.weights(parts, context)
        if weights.shape[2] != weights.shape[3]:
            return outputs
        visible = np.ones((1, *[weights.shape[2] - prefix] * 2), bool)
        if context.mask is not None:
            visible = context.mask.numpy() > -1
        drop = near(context.hw, size) & visible
        counts.append(drop.sum(-1).mean())
        if not local:  # as many of the visible keys
            order = np.where(visible, rng.random(drop.shape), 2.0).argsort(-1).argsort(-1)
            drop = order < drop.sum(-1, keepdims=True)
        drop = np.pad(drop, ((0, 0), (prefix, 0), (prefix, 0)))
        lost = by_window(weights, paddle.to_tensor(drop[:, None], weights.dtype), paddle.multiply)
        lost = merge_heads(paddle.matmul(lost, layer.values(parts, context)))
        return layer.finish(layer.mix(parts, context) - lost, parts), outputs[1]

    layers = [layer for layer in model.sublayers() if isinstance(layer, Attention) and layer.spatial_keys]
    handles = [layer.register_forward_post_hook(without_them) for layer in layers]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


@paddle.no_grad()
def newton(model: paddle.nn.Layer, image: paddle.Tensor) -> list[dict]:
    """Per SOFT layer that uses landmarks, for one image [1, C, H, W].

    Returns:
        name; `residuals`, |I - K V_t| / |I| in the Frobenius norm after t = 0, 1, ... steps, mean over the heads;
        `cosine` between the map from landmarks and the full Gaussian kernel; for `soft` the relative `error`, too
        (SOFT-Norm divides its map by degrees).
    """
    rows = []
    with watched(model) as calls, evaluating(model):
        model(image)
        for name, block, hw, x, context in calls:
            layer = block.attn
            if not isinstance(layer, SoftAttention) or not layer.uses_landmarks:
                continue
            parts = layer.project(x, context)
            q, landmarks = (split_heads(t, layer.num_heads) for t in (parts[0], layer.landmarks(parts[0], hw)[0]))
            kernel, inverse = layer.newton_inputs(gaussian(landmarks, landmarks))
            eye = identity_like(kernel)
            residuals = []
            for _ in range(layer.newton_iters + 1):
                rest = eye - paddle.matmul(kernel, inverse)
                residuals.append(float(((rest * rest).sum([-1, -2]) / eye.shape[-1]).sqrt().mean()))
                inverse = newton_inverse(kernel, inverse, 1)
            full, low = gaussian(q, q).numpy(), layer.weights(parts, context).numpy()
            cosine = float((full * low).sum() / (np.linalg.norm(full) * np.linalg.norm(low)))
            row = {"layer": name, "residuals": residuals, "cosine": cosine}
            if type(layer) is SoftAttention:
                row["error"] = float(np.linalg.norm(full - low) / np.linalg.norm(full))
            rows.append(row)
    return rows


@paddle.no_grad()
def polarity(found: LayerMap) -> dict | None:
    """A PolaFormer layer's powers 1 + alpha sigmoid(.) and how its gates treat the two streams; None for others.

    Returns:
        mean, smallest and largest power; `gate_correlation`, over tokens and channels, between the gates of the
        same-sign and of the opposite-sign half of every head.
    """
    layer = found.layer
    if not isinstance(layer, PolaFormerAttention) or not layer.gates:
        return None
    power = 1 + layer.alpha / (1 + np.exp(-layer.power.numpy()))
    gate = layer.project(found.tokens, Context(found.hw))[-1][0].numpy()
    same, opposite = gate.reshape(-1, layer.num_heads, 2, layer.head_dim // 2).transpose(2, 0, 1, 3).reshape(2, -1)
    return {
        "power": float(power.mean()),
        "smallest_power": float(power.min()),
        "largest_power": float(power.max()),
        "gate_correlation": float(np.corrcoef(same, opposite)[0, 1]),
    }
