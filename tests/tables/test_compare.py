"""Paired differences and Holm's correction against independent references."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from mmkv_bench.tables.compare import (
    correct,
    holm,
    mcnemar_exact,
    mcnemar_score,
    paired,
    separated_pairs,
    tango_low,
)
from mmkv_bench.tables.intervals import cluster_draws

SHORT = settings(max_examples=60, deadline=None)
COUNTS = st.integers(1, 300).flatmap(
    lambda n: st.integers(0, n).flatmap(lambda b: st.tuples(st.just(b), st.integers(0, n - b), st.just(n)))
)


def slow_tango(b: int, c: int, n: int, level: float) -> tuple[float, float]:
    """Score interval of (b - c) / n from the trinomial likelihood, maximised numerically under each hypothesis."""
    z2 = stats.norm.isf((1 - level) / 2) ** 2

    def statistic(delta: float) -> float:
        least, most = max(0.0, -delta), (1 - delta) / 2

        def minus_log_likelihood(q: float) -> float:
            parts = ((b, q + delta), (c, q), (n - b - c, 1 - 2 * q - delta))
            return -sum(count * math.log(max(p, 1e-300)) for count, p in parts if count)

        q = optimize.minimize_scalar(minus_log_likelihood, bounds=(least, most), options={"xatol": 1e-13}).x
        return (b - c - n * delta) ** 2 / (n * (2 * q + delta * (1 - delta)))

    estimate, edges = (b - c) / n, []
    for outside in (-1 + 1e-9, 1 - 1e-9):
        inside = estimate
        for _ in range(60):
            middle = (outside + inside) / 2
            outside, inside = (middle, inside) if statistic(middle) > z2 else (outside, middle)
        edges.append(inside)
    return edges[0], edges[1]


@pytest.mark.parametrize(("b", "c", "n"), [(1, 7, 21), (40, 12, 200), (3, 3, 50), (0, 5, 30), (150, 20, 500)])
@pytest.mark.parametrize("level", [0.95, 0.999])
def test_tangos_interval_equals_one_from_the_likelihood(b: int, c: int, n: int, level: float) -> None:
    low, high = tango_low(b, c, n, 1 - level), -tango_low(c, b, n, 1 - level)
    assert (low, high) == pytest.approx(slow_tango(b, c, n, level), abs=2e-6)


def test_tangos_interval_without_discordant_samples_has_its_closed_form() -> None:
    z2 = stats.norm.isf(0.025) ** 2
    assert tango_low(0, 0, 500) == pytest.approx(-z2 / (500 + z2), abs=1e-12)


@pytest.mark.parametrize(("b", "c"), [(0, 0), (1, 0), (4, 0), (5, 5), (12, 3), (100, 0), (260, 199)])
def test_exact_mcnemar_equals_the_binomial_test(b: int, c: int) -> None:
    expected = stats.binomtest(b, b + c, 0.5).pvalue if b + c else 1.0
    assert mcnemar_exact(b, c) == pytest.approx(expected, rel=1e-9)


@SHORT
@given(COUNTS, st.floats(0.001, 0.3))
def test_tangos_interval_excludes_zero_exactly_when_mcnemars_score_test_rejects(
    counts: tuple[int, int, int], alpha: float
) -> None:
    b, c, n = counts
    p = mcnemar_score(b, c)
    if abs(p - alpha) > 1e-6:
        assert (tango_low(b, c, n, alpha) > 0 or tango_low(c, b, n, alpha) > 0) == (p < alpha)
    assert tango_low(b, c, n, alpha) <= (b - c) / n <= -tango_low(c, b, n, alpha)


def test_tangos_interval_covers_the_true_difference_as_often_as_it_says() -> None:
    rng = np.random.default_rng(7)
    probabilities = [0.12, 0.05, 0.83]  # only a right, only b right, both or none
    covered = 0
    for b, c, _ in rng.multinomial(150, probabilities, size=2000):
        covered += tango_low(b, c, 150) <= 0.07 <= -tango_low(c, b, 150)
    assert 0.93 < covered / 2000 < 0.975


def test_zeros_and_ones_count_the_discordant_samples() -> None:
    a = np.array([1.0, 1, 1, 1, 0, 0, 1, 0])
    b = np.array([1.0, 0, 0, 0, 0, 1, 0, 0])
    found = paired(a, b, np.arange(8), "any")
    assert (found.kind, found.discordant, found.n, found.value) == ("mcnemar", (4, 1), 8, 3 / 8)
    assert found.p == pytest.approx(stats.binomtest(4, 5, 0.5).pvalue)


def test_four_discordant_samples_of_one_side_separate_nothing() -> None:
    a, b = np.zeros(500), np.zeros(500)
    a[:4] = 1
    for scale in (1.0, 0.5):  # as zeros and ones, and as graded scores
        found = paired(a * scale, b, np.arange(500), "any")
        assert found.p >= 0.125
        assert not correct([("64", "a", "b", found)])[0].separated


def test_amounts_that_happen_to_be_zeros_and_ones_are_no_successes() -> None:
    a, b = np.array([1.0, 1, 1, 1, 0, 0, 1, 0]), np.array([1.0, 0, 0, 0, 0, 1, 0, 0])
    found = paired(a, b, np.arange(8), "any", share=False)
    assert (found.kind, found.discordant, found.value) == ("bootstrap", None, 3 / 8)
    same = paired(a + 1, b + 1, np.arange(8), "any")
    assert (found.p, found.interval()) == (same.p, same.interval())


def slow_difference(a: list[float], b: list[float], clusters: list[str], dataset: str) -> list[float]:
    names = sorted(set(clusters))
    found = []
    for block in cluster_draws(dataset, len(names)):
        for counts in block.tolist():
            total = size = 0.0
            for name, count in zip(names, counts, strict=True):
                own = [x - y for x, y, cluster in zip(a, b, clusters, strict=True) if cluster == name]
                total, size = total + count * math.fsum(own), size + count * len(own)
            found.append(total / size)
    return found


def test_graded_scores_are_compared_by_a_bootstrap_of_differences_over_clusters() -> None:
    a = [0.2, 0.9, 0.4, 1.0, 0.0, 0.7, 0.33, 0.5]
    b = [0.1, 0.9, 0.2, 0.8, 0.3, 0.1, 0.30, 0.4]
    clusters = ["b", "a", "b", "c", "d", "a", "b", "e"]
    found = paired(np.array(a), np.array(b), np.array(clusters), "docvqa")
    slow = sorted(slow_difference(a, b, clusters, "docvqa"))
    assert found.kind == "bootstrap"
    assert found.interval(0.05) == pytest.approx((slow[249], slow[-250]), abs=1e-14)
    tail = min(sum(d <= 0 for d in slow), sum(d >= 0 for d in slow))
    assert found.p == pytest.approx(max(2 * (tail + 1) / 10_001, 2.0 ** (1 - 5)))


def test_clustered_zeros_and_ones_are_not_taken_for_independent() -> None:
    a, b = np.repeat([1.0, 1, 1, 0], 25), np.repeat([0.0, 1, 0, 0], 25)
    clustered = paired(a, b, np.repeat(np.arange(4), 25), "any")
    independent = paired(a, b, np.arange(100), "any")
    assert clustered.kind == "bootstrap" and independent.kind == "mcnemar"
    assert independent.p < 1e-6 < 0.4 < clustered.p


def test_an_aggregate_that_is_no_mean_is_compared_on_the_same_draws() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.random(40), rng.random(40)

    def median(drawn: np.ndarray) -> float:
        return float(np.median(drawn))

    found = paired(a, b, np.arange(40), "any", median)
    assert found.value == pytest.approx(np.median(a) - np.median(b))
    rows = np.concatenate(list(cluster_draws("any", 40)))[:50]
    slow = [np.median(np.repeat(a, row)) - np.median(np.repeat(b, row)) for row in rows]
    np.testing.assert_allclose(found.draws[:50], slow)


def test_only_samples_ok_in_both_are_compared() -> None:
    a = np.array([1.0, np.nan, 1.0, 0.0])
    b = np.array([0.0, 0.0, np.nan, 0.0])
    assert paired(a, b, np.arange(4), "any").n == 2
    assert paired(a, np.full(4, np.nan), np.arange(4), "any") is None
    lonely = paired(np.array([0.4]), np.array([0.1]), np.array(["x"]), "any")
    assert lonely.interval() == (None, None) and lonely.p == 1.0


@SHORT
@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 1.0, 0.25, math.nan]), st.sampled_from([0.0, 1.0]), st.integers(0, 9)),
        min_size=2,
        max_size=30,
    ),
    st.booleans(),
)
def test_b_against_a_is_minus_a_against_b(samples: list[tuple[float, float, int]], own_clusters: bool) -> None:
    a, b, clusters = (np.array(column) for column in zip(*samples, strict=True))
    clusters = np.arange(len(a)) if own_clusters else clusters
    forth, back = paired(a, b, clusters, "any"), paired(b, a, clusters, "any")
    if forth is None:
        assert back is None
        return
    assert back.value == -forth.value and back.p == forth.p and back.kind == forth.kind
    low, high = forth.interval(0.01)
    assert back.interval(0.01) == ((None, None) if low is None else (-high, -low))


def test_holm_on_a_hand_worked_example() -> None:
    # Sorted: .005 <= .05/4, .01 <= .05/3, .03 > .05/2: two are rejected, and the last two keep level .05/2.
    steps = holm([0.01, 0.04, 0.03, 0.005], 0.05)
    assert [step.rejected for step in steps] == [True, False, False, True]
    assert [step.adjusted for step in steps] == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert [step.level for step in steps] == pytest.approx([0.05 / 3, 0.025, 0.025, 0.0125])
    assert holm([]) == []


@SHORT
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_rejects_what_its_adjusted_p_values_say(p_values: list[float]) -> None:
    for step, p in zip(holm(p_values), p_values, strict=True):
        if abs(step.adjusted - 0.05) > 1e-12:
            assert step.rejected == (step.adjusted <= 0.05)
        assert p <= step.adjusted <= 1 and step.rejected == (p <= step.level)


def test_a_pair_needs_more_evidence_among_many() -> None:
    a, b = np.zeros(300), np.zeros(300)
    a[:9], b[9:10] = 1, 1
    found = paired(a, b, np.arange(300), "any")
    same = paired(b, b, np.arange(300), "any")
    alone = correct([("64", "a", "b", found)])
    among = correct([("64", "a", "b", found)] + [("64", "b", f"c{i}", same) for i in range(20)])
    assert alone[0].separated and (alone[0].better, alone[0].worse) == ("a", "b")
    assert not among[0].separated and among[0].better is None
    assert among[0].low < 0 < among[0].high


def test_separated_pairs_are_listed_per_budget_with_the_better_one_first() -> None:
    ones, zeros = np.ones(100), np.zeros(100)
    up, down, same = (paired(x, y, np.arange(100), "any") for x, y in ((ones, zeros), (zeros, ones), (ones, ones)))
    pairs = correct([("64", "full", "b", up), ("64", "a", "b", down), ("64", "full", "a", up), ("128", "a", "b", same)])
    assert separated_pairs(pairs) == {"64": [("full", "b"), ("b", "a"), ("full", "a")], "128": []}
    assert separated_pairs(pairs, without=["full"]) == {"64": [("b", "a")], "128": []}


def test_equal_methods_are_seldom_separated() -> None:
    rng = np.random.default_rng(11)
    tables_with_a_claim = 0
    for _ in range(300):
        scores = (rng.random((5, 60)) < 0.6).astype(float)
        compared = [
            ("64", str(i), str(j), paired(scores[i], scores[j], np.arange(60), "any"))
            for i in range(5)
            for j in range(i)
        ]
        tables_with_a_claim += any(pair.separated for pair in correct(compared))
    assert tables_with_a_claim / 300 <= 0.05
