"""Paired statistics against enumeration by hand."""

from itertools import product

import numpy as np
import pytest

from scripts.tables.compare import compare, pooled_deviation

SIX = [0.011, 0.004, 0.009, -0.002, 0.007, 0.006]


def by_seed(values, first=42):
    return dict(enumerate(values, first))


def test_the_p_value_counts_the_sign_flips_at_least_as_far_from_zero():
    base = by_seed([0.80, 0.81, 0.82, 0.83, 0.84, 0.85])
    found = compare(by_seed([value + d for value, d in zip(base.values(), SIX, strict=True)]), base)
    sums = [abs(np.dot(signs, SIX)) for signs in product((1, -1), repeat=6)]
    assert found.p == pytest.approx(np.mean([s >= sum(SIX) - 1e-12 for s in sums])) == pytest.approx(4 / 64)
    assert found.verdict == "not significant"
    assert found.difference == pytest.approx(0.035 / 6)
    low, high = found.interval
    assert found.paired == 6 and found.ends == found.interval
    assert -0.002 < low < found.difference < high < 0.011


def test_six_equal_signs_are_significant_and_five_seeds_never():
    base = by_seed([0.8] * 6)
    better = by_seed([0.81, 0.812, 0.808, 0.811, 0.809, 0.813])
    assert compare(better, base).p == pytest.approx(2 / 64)
    assert compare(better, base).verdict == "better" and compare(base, better).verdict == "worse"
    five = {seed: top1 + 0.01 for seed, top1 in list(better.items())[:5]}
    assert compare(five, base).p is None and compare(five, base).verdict == "likely better"


def test_few_seeds_use_all_seeds_and_the_error_of_the_test_images_and_of_the_seeds():
    """One seed at 80 %: the error of a difference is sqrt(2 * 0.8 * 0.2 / 10,000), 0.57 points."""
    found = compare({42: 0.808}, {42: 0.8})
    assert found.paired == 0 and found.interval is None
    assert found.error == pytest.approx(np.sqrt((0.808 * 0.192 + 0.8 * 0.2) / 10_000))
    assert found.verdict == "not significant"
    assert compare({42: 0.812}, {42: 0.8}).verdict == "likely better"
    assert compare({42: 0.812}, {42: 0.8}, seed_deviation=0.01).verdict == "not significant"
    two = compare({42: 0.812, 43: 0.812}, {42: 0.8, 43: 0.8}, seed_deviation=0.01)  # on the same test images
    assert two.error == pytest.approx(np.sqrt((0.812 * 0.188 + 0.8 * 0.2) / 10_000 + 2 * 0.01**2 / 2))
    lucky = {42: 0.83, 43: 0.79, 44: 0.78}  # the seed in common is the best of three
    found = compare({42: 0.8}, lucky, seed_deviation=0.02)
    assert found.difference == pytest.approx(0)
    assert found.ends == pytest.approx((-1.96 * found.error, 1.96 * found.error))
    assert found.error == pytest.approx(np.sqrt(2 * 0.8 * 0.2 / 10_000 + 0.02**2 * (1 + 1 / 3)))


def test_the_deviation_over_seeds_is_pooled_by_degrees_of_freedom():
    groups = [[0.7, 0.72, 0.74], [0.8, 0.81], [0.5]]
    assert pooled_deviation(groups) == pytest.approx(np.sqrt((2 * 0.02**2 + 0.005**2 * 2) / 3))
    assert pooled_deviation([[0.5]]) == 0
