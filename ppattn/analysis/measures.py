"""Measures of attention maps: locality, injectivity, concentration, change from layer to layer, rollout.

Weights are [..., N, M], a row per query. Shares are |weight| over its sum, since some weights may be negative.
"""

import numpy as np

from ppattn.analysis.maps import LayerMap


def near(hw: tuple[int, int], size: int) -> np.ndarray:
    """[H * W, H * W] bool: whether the key is in the size x size window around the query."""
    rows, columns = np.divmod(np.arange(hw[0] * hw[1]), hw[1])
    return np.maximum(np.abs(rows[:, None] - rows), np.abs(columns[:, None] - columns)) <= size // 2


def shares(weights: np.ndarray) -> np.ndarray:
    """|weight| over its sum."""
    size = np.abs(weights)
    return size / np.maximum(size.sum(-1, keepdims=True), 1e-30)


def local_share(found: LayerMap, size: int) -> tuple[float, float] | None:
    """Share of the weights of grid queries in the size x size window around them, and of uniform weights there
    (exactly: windows are cut at the border, prefix tokens are keys); None unless the keys are the queries' own."""
    if not found.own_keys:
        return None
    seen, p = found.visible(), found.prefix
    inside, keys = near(found.hw, size) & seen[p:, p:], seen[p:].sum(-1)
    return float((shares(found.whole())[:, p:, p:] * inside).sum(-1).mean()), float((inside.sum(-1) / keys).mean())


def confusions(weights: np.ndarray, tolerance: float) -> float:
    """Pairs of different queries with the same weights, |a - b|_1 < tolerance |a|_1, per head of [h, N, M]."""
    count, limits = 0, tolerance * np.abs(weights).sum(-1)
    for i in range(weights.shape[1] - 1):
        count += int((np.abs(weights[:, i + 1 :] - weights[:, i, None]).sum(-1) < limits[:, i, None]).sum())
    return count / len(weights)


def entropy(found: LayerMap) -> float:
    """Entropy of the rows as a share of the entropy of uniform weights on the visible keys, mean over rows."""
    p, largest = shares(found.whole()), np.log(np.maximum(found.visible().sum(-1), 2))
    return float((-(p * np.log(np.maximum(p, 1e-30))).sum(-1) / largest).mean())


def effective_rank(weights: np.ndarray) -> float:
    """exp of the entropy of the singular values' shares (Roy and Vetterli, EUSIPCO 2007), mean over the maps."""
    p = shares(np.linalg.svd(weights, compute_uv=False))
    return float(np.exp(-(p * np.log(np.maximum(p, 1e-30))).sum(-1)).mean())


def similarity(a: np.ndarray, b: np.ndarray) -> float:
    """Cosine between maps of the same shape, averaged over rows and heads."""
    return float(((a * b).sum(-1) / np.linalg.norm([a, b], axis=-1).prod(0).clip(1e-30)).mean())


def diagonality(weights: np.ndarray) -> float:
    """Share of the queries whose largest weight is on themselves."""
    return float((weights.argmax(-1) == np.arange(weights.shape[-2])).mean())


def symmetry(weights: np.ndarray) -> float:
    """1 - |A - A^T| / (2 |A|) in the sum of absolute values: 1 is symmetric."""
    difference = np.abs(weights - weights.swapaxes(-1, -2)).sum((-1, -2))
    return float((1 - difference / np.maximum(2 * np.abs(weights).sum((-1, -2)), 1e-30)).mean())


def rollout(maps: list[np.ndarray]) -> np.ndarray:
    """Attention rollout (Abnar and Zuidema, ACL 2020, arXiv 2005.00928): [N, N], rows sum to 1, the share of each input
    token in each output token. Per layer half the mean map over the heads (shares), half the identity."""
    total = np.eye(maps[0].shape[-1])
    for weights in maps:
        total = (0.5 * shares(weights.mean(0)) + 0.5 * np.eye(len(total))) @ total
    return total
