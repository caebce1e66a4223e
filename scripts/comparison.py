"""Paired comparison of accuracies over seeds, for scripts/make_tables.py."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

TEST_IMAGES = 10_000
ENOUGH = 6  # seeds; with fewer no sign-flip test of two sides reaches 0.05
LEVEL = 0.05
VERDICTS = ("better", "likely better", "not told apart", "likely worse", "worse")


@dataclass(frozen=True)
class Comparison:
    """Top-1 of one configuration minus that of another, over the seeds that both were trained with.

    Attributes:
        seeds: their number.
        difference: mean of the paired differences.
        error: standard error of `difference` that the test images and the seeds leave; used where seeds are few.
        interval: 95 % bootstrap interval of the mean over seeds; None for fewer than `ENOUGH`.
        p: of the exact sign-flip test, two-sided; None for fewer than `ENOUGH`.
    """

    seeds: int
    difference: float
    error: float
    interval: tuple[float, float] | None
    p: float | None

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`: by p where there are enough seeds, else "likely" beyond 1.96 standard errors."""
        told = self.p <= LEVEL if self.p is not None else abs(self.difference) > 1.96 * self.error
        if not told:
            return "not told apart"
        return ("" if self.p is not None else "likely ") + ("better" if self.difference > 0 else "worse")


def compare(first: dict[int, float], second: dict[int, float], seed_deviation: float = 0.0) -> Comparison:
    """Compare top-1 accuracies (0..1) given by seed, where at least one seed is in both.

    Args:
        seed_deviation: standard deviation of top-1 over seeds, for the error where seeds are few.
    """
    seeds = sorted(first.keys() & second.keys())
    a, b = (np.array([top1[seed] for seed in seeds]) for top1 in (first, second))
    differences = a - b
    binomial = (a * (1 - a) + b * (1 - b)) / TEST_IMAGES
    error = math.sqrt(binomial.mean() + 2 * seed_deviation**2 / len(seeds))  # all seeds share the test images
    interval = p = None
    if len(seeds) >= ENOUGH:
        spread = stats.bootstrap((differences,), np.mean, method="percentile", rng=0).confidence_interval
        interval = float(spread.low), float(spread.high)
        p = float(
            stats.permutation_test((differences,), np.mean, permutation_type="samples", n_resamples=np.inf).pvalue
        )
    return Comparison(len(seeds), float(differences.mean()), error, interval, p)


def pooled_deviation(groups: list[list[float]]) -> float:
    """Standard deviation over seeds, pooled over the groups that have several; 0 without any."""
    squares = sum(float(np.var(group, ddof=1)) * (len(group) - 1) for group in groups if len(group) > 1)
    freedom = sum(len(group) - 1 for group in groups)
    return math.sqrt(squares / freedom) if freedom else 0.0
