"""Intervals against independent, slower references."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mmkv_bench.statistics import intervals
from mmkv_bench.statistics.intervals import (
    NO_INTERVAL,
    Interval,
    bootstrap_statistics,
    cluster_draws,
    clustered_n,
    percentile_ends,
    wilson,
)
from tests.each import each

SHORT = settings(max_examples=60, deadline=None)


def interval(values: np.ndarray, clusters: np.ndarray, dataset: str) -> Interval:
    """The interval of one cell."""
    (found,) = intervals.intervals([(values, clusters)], dataset)
    return found


def effective_n(values: np.ndarray, index: np.ndarray) -> float:
    """`clustered_n` of one cell."""
    mean = float(values.mean())
    (found,) = clustered_n(np.bincount(index), np.bincount(index, weights=values - mean)[None], [mean])
    return found


def slow_wilson(k: int, n: int, level: float) -> tuple[float, float]:
    """The proportions that a two-sided score test of k out of n does not reject, found by bisection."""
    z = stats.norm.isf((1 - level) / 2)

    def rejected(p: float) -> bool:
        return abs(k / n - p) > z * math.sqrt(p * (1 - p) / n)

    def edge(outside: float, inside: float) -> float:
        if not rejected(outside):
            return outside
        for _ in range(200):
            middle = (outside + inside) / 2
            outside, inside = (middle, inside) if rejected(middle) else (outside, middle)
        return inside

    return edge(0.0, k / n), edge(1.0, k / n)


@each("level", [0.8, 0.95, 0.999])
@each(("k", "n"), [(0, 1), (1, 1), (0, 30), (30, 30), (1, 2), (15, 20), (387, 500), (1, 5000)])
def test_wilson_equals_the_inverted_score_test_and_scipy(k: int, n: int, level: float) -> None:
    assert wilson(k / n, n, level) == pytest.approx(slow_wilson(k, n, level), abs=1e-12)
    found = stats.binomtest(k, n).proportion_ci(level, method="wilson")
    assert wilson(k / n, n, level) == pytest.approx((found.low, found.high), abs=1e-12)


@SHORT
@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.floats(0.5, 0.9999))
def test_wilson_holds_its_estimate_and_mirrors(kn: tuple[int, int], level: float) -> None:
    k, n = kn
    low, high = wilson(k / n, n, level)
    assert 0 <= low <= k / n <= high <= 1
    mirrored = wilson((n - k) / n, n, level)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-12)


def test_effective_n_is_n_for_independent_samples_and_the_clusters_for_copies() -> None:
    values = np.array([0.0, 1, 1, 0, 1, 0, 0])
    assert effective_n(values, np.arange(7)) == 7
    copies = np.repeat(values, 3)
    assert effective_n(copies, np.repeat(np.arange(7), 3)) == pytest.approx(7)
    uneven = np.repeat(np.arange(4), [1, 2, 3, 6])  # as many as say as much about a mean
    assert effective_n(np.ones(12), uneven) == pytest.approx(144 / 50)
    assert effective_n(np.ones(21), np.repeat(np.arange(7), 3)) == 7
    alternating = np.tile([0.0, 1.0], 10)  # clusters that balance themselves vary less: never counted as more samples
    assert effective_n(alternating, np.repeat(np.arange(10), 2)) == 20


def test_wilson_of_copied_samples_is_that_of_the_originals_with_students_quantile() -> None:
    values = np.array([1.0] * 13 + [0.0] * 9)
    alone = interval(values, np.arange(22), "any")
    copied = interval(np.repeat(values, 4), np.repeat(np.arange(22), 4), "any")
    assert alone.kind == copied.kind == "wilson"
    assert (copied.low, copied.high) == pytest.approx(wilson(13 / 22, 22, clusters=22))
    assert 0.005 < alone.low - copied.low < 0.02 and 0.005 < copied.high - alone.high < 0.02


def test_wilson_of_few_unequal_pages_covers_as_often_as_it_says() -> None:
    """Thirty pages, most with a few questions and some with many, of which nearly all are right or wrong together: .85 with
    the normal quantile and the plain variance over clusters."""
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(600):
        index = np.repeat(np.arange(30), np.minimum(np.ceil(rng.pareto(1.2, 30) + 1e-3), 60).astype(int))
        values = (np.sqrt(0.9) * rng.normal(size=30)[index] + np.sqrt(0.1) * rng.normal(size=len(index)) < 0).astype(
            float
        )
        found = interval(values, index, "any")
        held += found.low <= 0.5 <= found.high
    assert held >= 0.93 * 600


def test_draws_hold_every_cluster_once_on_average_and_depend_on_the_dataset_alone() -> None:
    draws = np.concatenate(list(cluster_draws("walk3", 40)))
    assert draws.shape == (10_000, 40)
    assert (draws.sum(1) == 40).all()
    # 400,000 picks over 40 clusters: each cluster's count is binomial(400000, 1/40), standard deviation below 99.
    assert np.abs(draws.sum(0).astype(int) - 10_000).max() < 5 * 99
    assert np.array_equal(draws, np.concatenate(list(cluster_draws("walk3", 40))))
    assert not np.array_equal(draws, np.concatenate(list(cluster_draws("lookup", 40))))


def test_draws_of_large_datasets_are_made_in_blocks_that_need_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = np.concatenate(list(cluster_draws("walk3", 300, draws=500)))
    monkeypatch.setattr(intervals, "_CACHE_ENTRIES", 1000)
    anew = list(cluster_draws("walk3", 300, draws=500))
    assert np.array_equal(np.concatenate(anew), whole)
    assert len(list(cluster_draws("walk3", intervals._BLOCK_ENTRIES // 100, draws=250))) == 3


def slow_bootstrap(values: list[float], clusters: list[str], dataset: str) -> list[float]:
    """Means of the drawn samples, cluster by cluster and sample by sample."""
    names = sorted(set(clusters))
    means = []
    for block in cluster_draws(dataset, len(names)):
        for counts in block.tolist():
            drawn = []
            for name, count in zip(names, counts, strict=True):
                for _ in range(count):
                    drawn += [value for value, cluster in zip(values, clusters, strict=True) if cluster == name]
            means.append(math.fsum(drawn) / len(drawn))
    return means


def test_bootstrap_equals_a_loop_over_draws_clusters_and_samples() -> None:
    values = [0.2, 0.9, 0.4, 1.0, 0.0, 0.7, 0.33, 0.5]
    clusters = ["b", "a", "b", "c", "d", "a", "b", "e"]
    slow = slow_bootstrap(values, clusters, "docvqa")
    index = np.unique(clusters, return_inverse=True)[1]
    (fast,) = bootstrap_statistics([np.array(values)], index, 5, "docvqa")
    np.testing.assert_allclose(fast, slow, atol=1e-14)
    ordered = sorted(slow)
    found = interval(np.array(values), np.array(clusters), "docvqa")
    # 95% of 10,000 draws: 249 draws are cut at each end (the 250th smallest of 10,001 intervals between draws).
    assert found.kind == "bootstrap"
    assert (found.low, found.high) == pytest.approx((ordered[249], ordered[-250]), abs=1e-14)


def test_bootstrap_agrees_with_scipy_on_unclustered_samples() -> None:
    values = np.random.default_rng(3).gamma(2.0, size=150)
    found = interval(values, np.arange(150), "any")
    other = stats.bootstrap((values,), np.mean, method="percentile", n_resamples=10_000, rng=np.random.default_rng(1))
    spread = np.std(values) / np.sqrt(150)
    assert found.low == pytest.approx(other.confidence_interval.low, abs=0.12 * spread)
    assert found.high == pytest.approx(other.confidence_interval.high, abs=0.12 * spread)


@SHORT
@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 4)), min_size=2, max_size=25),
    st.randoms(use_true_random=False),
)
def test_intervals_do_not_depend_on_the_order_of_samples(samples: list[tuple[float, int]], random) -> None:
    shuffled = list(samples)
    random.shuffle(shuffled)
    found, other = (
        interval(*(np.array(column) for column in zip(*rows, strict=True)), "any") for rows in (samples, shuffled)
    )
    assert found.kind == other.kind
    if found.kind != "none":
        assert (found.low, found.high) == pytest.approx((other.low, other.high), abs=1e-12)


@SHORT
@given(st.lists(st.integers(-3, 8), min_size=20, max_size=400), st.floats(1e-4, 0.9))
def test_the_percentile_interval_excludes_zero_exactly_when_few_draws_are_beyond_it(
    draws: list[int], alpha: float
) -> None:
    low, high = percentile_ends(np.array(draws, float), alpha)
    tail = min(sum(draw <= 0 for draw in draws), sum(draw >= 0 for draw in draws))
    p = 2 * (tail + 1) / (len(draws) + 1)
    if abs(p - alpha) > 1e-9:  # at the very edge rounding decides
        assert (low > 0 or high < 0) == (p <= alpha)


def test_a_level_finer_than_the_draws_claims_nothing() -> None:
    assert percentile_ends(np.ones(100), 0.01) == (-math.inf, math.inf)
    assert percentile_ends(np.ones(100), 2 / 101) == (1.0, 1.0)


def test_no_interval_without_samples_or_from_a_single_cluster() -> None:
    assert interval(np.array([]), np.array([]), "any") == NO_INTERVAL
    assert interval(np.array([0.2, 0.7]), np.array(["a", "a"]), "any") == NO_INTERVAL
