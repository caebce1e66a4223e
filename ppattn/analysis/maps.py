"""What the attention layers of a trained model do on real images, from their explicit weights (`attention_map`).

The analyses of the InLine paper (arXiv 2412.06590, sections 3 and 4): how much weight falls on a query's 3 x 3
neighbourhood (local share), and whether different queries get different weights (injectivity).
"""

from __future__ import annotations

import numpy as np
import paddle

from ppattn.attention import Attention


@paddle.no_grad()
def attention_maps(model, x) -> list[tuple[str, tuple[int, int], int, np.ndarray]]:
    """Explicit weights of every attention layer for images [B, 3, H, W].

    Returns:
        Per layer: name, query grid (H, W), number of prefix tokens P, and the map [B', h, N, M] (B' counts windows;
        PolaFormer has 2h maps, one per stream).
    """
    found, handles = [], []

    def watch(name):
        def look(layer, inputs, kwargs):
            tokens, hw = inputs
            weights = layer.attention_map(tokens, hw, **kwargs)
            found.append((name, tuple(hw), layer.spec.num_prefix, weights.numpy()))

        return look

    for name, layer in model.named_sublayers():
        if isinstance(layer, Attention):
            handles.append(layer.register_forward_pre_hook(watch(name), with_kwargs=True))
    try:
        model.eval()
        model(x)
    finally:
        for handle in handles:
            handle.remove()
    return found


def key_grid(hw: tuple[int, int], keys: int) -> tuple[int, int]:
    """The grid of so many keys: the H x W map reduced by a whole ratio, or one row where there is none (Linformer)."""
    h, w = hw
    grids = ((max(1, h // ratio), max(1, w // ratio)) for ratio in range(1, max(hw) + 1))
    return next((grid for grid in grids if grid[0] * grid[1] == keys), (1, keys))


def local_share(weights: np.ndarray, hw: tuple[int, int], prefix: int, window: int = 3) -> tuple[float, float] | None:
    """Share of |weight| that grid queries put on the window around them, and what uniform weights would put there.

    None where the keys are not the queries' own grid (reduced keys).
    """
    h, w = hw
    if weights.shape[-1] != prefix + h * w:
        return None
    rows, columns = np.divmod(np.arange(h * w), w)
    near = np.maximum(np.abs(rows[:, None] - rows), np.abs(columns[:, None] - columns)) <= window // 2
    grid = np.abs(weights[:, :, prefix:])
    share = (grid[..., prefix:] * near).sum(-1) / grid.sum(-1)
    return float(share.mean()), float(near.sum(-1).mean() / weights.shape[-1])


def confusions(weights: np.ndarray, tolerance: float = 1e-3) -> float:
    """Pairs of different queries per image and head with the same weights: |a - b|_1 < tolerance * |a|_1."""
    b, h, n, m = weights.shape
    count = 0
    for rows in weights.reshape(b * h, n, m):
        limits = tolerance * np.abs(rows).sum(-1)
        for i in range(n - 1):
            count += int((np.abs(rows[i + 1 :] - rows[i]).sum(-1) < limits[i]).sum())
    return count / (b * h)
