"""Comparison of accuracies over seeds."""

import math
import statistics
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from scipy import stats

TEST_IMAGES = 10_000
ENOUGH = 6  # seeds; with fewer no sign-flip test of two sides reaches 0.05
LEVEL = 0.05


@dataclass(frozen=True)
class Comparison:
    """Top-1 of one configuration minus that of another."""

    paired: int  # seeds that both were trained with, if there are `ENOUGH`; else 0
    difference: float  # mean over these pairs, or of each over all its own seeds
    error: float  # standard error of the difference of these means that the test images and the seeds leave
    interval: tuple[float, float] | None  # 95 % bootstrap interval of the mean over the pairs; None without them
    p: float | None  # of the exact sign-flip test, two-sided; None without pairs

    @property
    def ends(self) -> tuple[float, float]:
        """The 95 % interval: of the bootstrap, or 1.96 standard errors where seeds are few."""
        return self.interval or (self.difference - 1.96 * self.error, self.difference + 1.96 * self.error)

    @property
    def verdict(self) -> str:
        """Better or worse: by p where there are enough seeds, else "likely" beyond 1.96 standard errors."""
        significant = self.p <= LEVEL if self.p is not None else abs(self.difference) > 1.96 * self.error
        if not significant:
            return "not significant"
        return ("" if self.p is not None else "likely ") + ("better" if self.difference > 0 else "worse")


def compare(first: dict[int, float], second: dict[int, float], seed_deviation: float = 0.0) -> Comparison:
    """Compare top-1 accuracies (0..1) given by seed.

    With `ENOUGH` seeds in both, the pairs are compared. With fewer, the means over all seeds are: two models with the
    same seed agree no more than with different ones, so a seed that only one of them has counts too.

    Args:
        seed_deviation: standard deviation of top-1 over seeds, for the error where seeds are few.
    """
    means, errors = zip(*(mean_and_error(top1.values(), seed_deviation) for top1 in (first, second)), strict=True)
    error = math.hypot(*errors)
    seeds = sorted(first.keys() & second.keys())
    if len(seeds) < ENOUGH:
        return Comparison(0, means[0] - means[1], error, None, None)
    differences = np.array([first[seed] - second[seed] for seed in seeds])
    spread = stats.bootstrap((differences,), np.mean, method="percentile", rng=0).confidence_interval
    test = stats.permutation_test((differences,), np.mean, permutation_type="samples", n_resamples=np.inf)
    interval = float(spread.low), float(spread.high)
    return Comparison(len(seeds), float(differences.mean()), error, interval, float(test.pvalue))


def mean_and_error(top1: Collection[float], seed_deviation: float) -> tuple[float, float]:
    """Mean of accuracies (0..1) over seeds, with the standard error from the test images and the seeds."""
    mean = statistics.mean(top1)
    images = mean * (1 - mean) / TEST_IMAGES  # the same for all seeds: not divided by their number
    return mean, math.sqrt(images + seed_deviation**2 / len(top1))


def pooled_deviation(groups: list[list[float]]) -> float:
    """Standard deviation over seeds, pooled over the groups that have several; 0 without any."""
    squares = sum(float(np.var(group, ddof=1)) * (len(group) - 1) for group in groups if len(group) > 1)
    freedom = sum(len(group) - 1 for group in groups)
    return math.sqrt(squares / freedom) if freedom else 0.0
