"""The paired test and its interval against brute force, scipy, and each other."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mmkv_bench.statistics.paired_tests import LARGEST_SHARE, UNSEEN, UNSEEN_OPEN, McNemar, PairedTest

SHORT = settings(max_examples=25, deadline=None)


def slow(sums: np.ndarray, sizes: np.ndarray, rate: float, unseen: float, alpha: float) -> tuple[float, float]:
    """(p-value, half of the interval) of one pair, cluster by cluster."""
    sums, sizes = sums[sizes > 0], sizes[sizes > 0]
    g, n = len(sums), sizes.sum()
    estimate = sums.sum() / n
    usual = sum(size**2 for size in sizes) / g
    variance = sum((d - estimate * size) ** 2 for d, size in zip(sums, sizes, strict=True)) + unseen * rate**2 * usual
    error = np.sqrt(variance * g / (g - 1)) / n
    return 2 * stats.t.sf(abs(estimate) / error, g - 1), stats.t.isf(alpha / 2, g - 1) * error


def test_p_values_and_intervals_are_those_of_the_definition_on_both_kinds_of_scale():
    rng = np.random.default_rng(3)
    for g in (30, 60):
        sums, sizes = rng.normal(0.3, 1, (8, g)), rng.integers(1, 4, (8, g)).astype(float)
        sums[:, :2] = sizes[:, :2] = 0.0  # clusters in which a pair has nothing
        for rate, unseen in ((1.0, UNSEEN), (None, UNSEEN_OPEN)):
            test = PairedTest(sums, sizes, rate)
            seen = [max(abs(d) / n for d, n in zip(*pair, strict=True) if n) for pair in zip(sums, sizes, strict=True)]
            wanted = [slow(*pair, max(r, rate or 0), unseen, 0.01) for *pair, r in zip(sums, sizes, seen, strict=True)]
            assert np.ptp(test.p) > 1e-4
            np.testing.assert_allclose(np.stack([test.p, test.critical(0.01)], axis=1), wanted, rtol=1e-9)
            low, high = test.ends(0.01)
            np.testing.assert_allclose((low + high) / 2, test.difference)
            np.testing.assert_allclose((high - low) / 2, test.critical(0.01))


def test_a_pair_is_tested_where_no_cluster_holds_more_than_a_tenth_of_its_samples():
    assert LARGEST_SHARE == 0.1
    for sizes, decidable in (([1] * 9, False), ([1] * 10, True), ([2] + [1] * 18, True), ([2] + [1] * 17, False)):
        sizes = np.array([sizes], float)
        test = PairedTest(sizes.copy(), sizes, 1.0)
        assert test.decidable[0] == decidable and (test.p[0] < 0.01) == decidable
        assert np.isfinite(test.ends(0.05)).all() == decidable == np.isfinite(test.critical(0.05)).all()
    assert not PairedTest(np.zeros((1, 5)), np.zeros((1, 5)), 1.0).decidable[0]


def test_what_a_rare_event_may_undo_is_no_finding():
    """Ninety of a hundred samples lose .01 each: one win of .9 that was not drawn would make up for them."""
    sums = np.where(np.arange(100) < 90, -0.01, 0.0)[None]
    assert stats.ttest_1samp(sums[0], 0).pvalue < 1e-40 and PairedTest(sums, np.ones((1, 100)), 1.0).p[0] > 0.3
    assert PairedTest(np.zeros((1, 50)), np.ones((1, 50))).p[0] == 1.0  # equal answers on an open scale


def test_the_worst_rare_event_makes_a_pair_wrong_about_as_often_as_the_level_says():
    """A method wins 1 with probability k / n and loses a little otherwise, by exact sums over how often it wins."""
    worst = 0.0
    for n, k in product((50, 300), np.arange(0.5, 12, 0.5)):
        wins = np.arange(40)
        loss = (k / n) / (1 - k / n)
        sums = np.where(np.arange(n) < wins[:, None], 1.0, -loss)
        p = PairedTest(sums, np.ones((1, n)), 1.0).p
        worst = max(worst, stats.binom.pmf(wins, n, k / n)[p <= 0.05].sum())
    assert 0.05 < worst < 0.065


@SHORT
@given(
    st.integers(10, 40),
    st.integers(0, 2**31),
    st.sampled_from([0.0, 0.3, 2.0]),
    st.sampled_from([0.05, 0.0002]),
    st.sampled_from([1.0, None]),
)
def test_an_interval_excludes_zero_exactly_where_its_test_rejects_and_turns_with_the_sign(g, seed, shift, alpha, rate):
    rng = np.random.default_rng(seed)
    sums = rng.choice([-1.0, 0.5, 1.0], (4, g)) * (rng.random((4, g)) < 0.5) + shift
    test, back = (PairedTest(sign * sums, np.ones((1, g)), rate) for sign in (1, -1))
    low, high = test.ends(alpha)
    clear = np.abs(test.p - alpha) > 1e-9
    assert (((low > 0) | (high < 0)) == (test.p <= alpha))[clear].all()
    np.testing.assert_array_equal(back.p, test.p)
    np.testing.assert_array_equal(back.ends(alpha), (-high, -low))
    # A pair's numbers do not depend on how many pairs are tested at once.
    alone = PairedTest(sums[2:3], np.ones((1, g)), rate)
    np.testing.assert_allclose([alone.p[0], alone.ends(alpha)[0][0]], [test.p[2], low[2]], rtol=1e-12)


def test_exact_mcnemar_equals_the_binomial_test_its_interval_and_the_smallest_gap_by_counting():
    cases = np.array([(0, 0), (1, 0), (4, 0), (5, 5), (12, 3), (100, 0), (260, 199)])
    test = McNemar(*cases.T, np.full(len(cases), 500))
    for at, (b, c) in enumerate(cases.tolist()):
        found = stats.binomtest(b, b + c, 0.5) if b + c else None
        assert test.p[at] == pytest.approx(found.pvalue if found else 1.0, rel=1e-9)
        for alpha in (0.05, 0.05 / 435):
            ends = found.proportion_ci(1 - alpha) if found else (0.0, 1.0)
            assert [end[at] for end in test.ends(alpha)] == pytest.approx([(2 * e - 1) * (b + c) / 500 for e in ends])
            gaps = [2 * k - b - c for k in range((b + c + 1) // 2, b + c + 1)]
            small = [gap for gap in gaps if stats.binomtest((b + c + gap) // 2, b + c or 1, 0.5).pvalue <= alpha]
            assert test.critical(alpha)[at] == pytest.approx(min(small, default=np.inf) / 500), (b, c)


def test_intervals_cover_the_true_difference_as_often_as_they_say():
    """Skewed differences in clusters of 1 to 5 samples with the true mean .1."""
    rng = np.random.default_rng(7)
    sizes = rng.integers(1, 6, (1, 60)).astype(float)
    sums = rng.gamma(1.0, 1.0, (1500, 60)) * 0.3 * sizes - 0.2 * sizes
    low, high = PairedTest(sums, sizes).ends(0.05)
    assert np.mean((low <= 0.1) & (high >= 0.1)) >= 0.95
