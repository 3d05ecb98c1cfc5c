"""The paired test and its interval against brute force, scipy, and each other."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mmkv_bench.statistics.paired_test import LEAST, paired_ends, paired_p
from mmkv_bench.statistics.sign_flip import ENUMERATED, flip_p
from tests.each import each

SHORT = settings(max_examples=25, deadline=None)


def counted(terms: np.ndarray) -> float:
    """The share of all sign patterns whose sum is at least as far from 0 as that of `terms`."""
    sums = np.zeros(1)
    for size in np.abs(terms[terms != 0]):
        sums = np.concatenate([sums + size, sums - size])
    return float(np.mean(np.abs(sums) >= abs(terms.sum()) * (1 - 1e-9)))


def test_up_to_16_clusters_and_the_adverse_one_are_enumerated_exactly():
    rng = np.random.default_rng(1)
    for k in (1, 2, 5, 9, 16, ENUMERATED):
        terms = np.zeros((6, 40))
        terms[:, rng.permutation(40)[:k]] = rng.choice([0.25, 0.5, 1, -1, -0.1], (6, k))
        assert flip_p(terms) == pytest.approx([counted(row) for row in terms], rel=1e-9)


def test_beyond_that_the_saddlepoint_tail_is_near_the_count_of_all_sign_patterns():
    rng = np.random.default_rng(2)
    for k, shift in product((18, 19, 20), (0.2, 0.6, 1.2)):
        terms = rng.normal(shift, 1, (3, k))
        exact = np.array([counted(row) for row in terms])
        found = flip_p(terms)
        common = exact > 1e-3
        assert found[common] == pytest.approx(exact[common], rel=0.06), (k, shift)
        assert (found > exact / 2).all() and (found < exact * 1.1).all()  # among the last few patterns it is coarser


def test_no_sign_flip_claims_more_than_its_differing_terms_allow():
    for k in (3, 16, 40):
        terms = np.zeros((1, 60))
        terms[0, :k] = 1.0
        assert flip_p(terms)[0] == pytest.approx(2.0 ** (1 - k))
    assert flip_p(np.zeros((1, 60)))[0] == 1.0
    assert flip_p(np.tile([1.0, -1.0], (1, 40)))[0] == 1.0


def slow_p(sums: np.ndarray, sizes: np.ndarray, largest: float) -> float:
    """The larger of the t test's and the counted p-value, with the adverse cluster put in by hand."""
    sign = np.sign(sums.sum())
    sums, sizes = np.append(sums, -sign * largest), np.append(sizes, sizes.mean())
    if np.sign(sums.sum()) != sign:
        return 1.0
    estimate = sums.sum() / sizes.sum()
    g = len(sums)
    error = np.sqrt(np.sum((sums - estimate * sizes) ** 2) * g / (g - 1)) / sizes.sum()
    return max(2 * stats.t.sf(abs(estimate / error), g - 2), counted(sums))


def test_the_p_value_is_that_of_the_definition():
    rng = np.random.default_rng(3)
    for g in (10, 13, 16):
        sums, sizes = rng.normal(0.8, 1, (8, g)), rng.integers(1, 8, (1, g)).astype(float)
        found = paired_p(sums, sizes, 1.5)
        assert found == pytest.approx([slow_p(row, sizes[0], 1.5) for row in sums], rel=1e-9)
    assert np.ptp(found) > 0.01


def test_without_an_adverse_cluster_equal_sizes_give_students_t_or_the_sign_flip():
    rng = np.random.default_rng(4)
    sums = rng.normal(0.4, 1, (6, 60))
    found = paired_p(sums, np.ones((1, 60)), 0.0)
    student = stats.ttest_1samp(sums, 0, axis=1).pvalue
    assert (found >= student * 0.97).all() and found == pytest.approx(student, rel=0.15)


def test_fewer_than_ten_clusters_claim_nothing():
    for g, claimed in ((LEAST - 1, False), (LEAST, True)):
        sums, sizes = np.full((1, g), 1.0) + np.arange(g) / 100, np.ones((1, g))
        p = paired_p(sums, sizes, 0.01)
        ends = paired_ends(sums, sizes, 0.01, 0.05, p)
        assert (p[0] < 0.05) == claimed and np.isfinite(ends).all() == claimed
    assert LEAST == 10


def test_an_adverse_cluster_that_turns_the_sign_leaves_no_claim():
    sums = np.zeros((1, 50))
    sums[0, :4] = 0.2
    assert paired_p(sums, np.ones((1, 50)), 0.9)[0] == 1.0


@each("alpha", [0.05, 0.05 / 435])
def test_at_the_ends_of_an_interval_the_shifted_test_just_rejects(alpha):
    """p of the differences less an end is alpha; a little inside it is above."""
    rng = np.random.default_rng(5)
    for g in (60, 300):
        sums, sizes = rng.normal(0.3, 1, (5, g)) * rng.integers(0, 2, (5, g)), rng.integers(1, 8, (1, g)).astype(float)
        sums[0] = 0.1
        ends = paired_ends(sums, sizes, 2.0, alpha, paired_p(sums, sizes, 2.0))
        width = ends[1] - ends[0]
        for end, inward in zip(ends, (1, -1), strict=True):
            assert paired_p(sums - end[:, None] * sizes, sizes, 2.0) == pytest.approx(alpha, rel=1e-4)
            near = (end + inward * 0.01 * width)[:, None]
            assert (paired_p(sums - near * sizes, sizes, 2.0) > alpha).all()


@SHORT
@given(
    st.integers(10, 40),
    st.integers(0, 2**31),
    st.sampled_from([0.0, 0.3, 2.0]),
    st.sampled_from([0.05, 0.01, 0.0002]),
    st.sampled_from([1.0, 0.15]),
)
def test_an_interval_excludes_zero_exactly_where_its_test_rejects_and_turns_with_the_sign(g, seed, shift, alpha, share):
    rng = np.random.default_rng(seed)
    sums = rng.choice([-1.0, 0.5, 1.0], (4, g)) * (rng.random((4, g)) < share) + shift * (rng.random((4, g)) < share)
    sizes, largest = np.ones((1, g)), np.abs(sums).max()
    p = paired_p(sums, sizes, largest)
    low, high = paired_ends(sums, sizes, largest, alpha, p)
    assert (((low > 0) | (high < 0)) == (p <= alpha)).all()
    assert ((low <= sums.mean(axis=1)) & (sums.mean(axis=1) <= high)).all()
    assert (paired_p(-sums, sizes, largest) == p).all()
    back = paired_ends(-sums, sizes, largest, alpha, p)
    np.testing.assert_array_equal(back, (-high, -low))


def test_a_pairs_numbers_do_not_depend_on_how_many_pairs_are_tested_at_once():
    rng = np.random.default_rng(6)
    for g in (14, 200):
        sums, sizes = rng.normal(0.2, 1, (30, g)), rng.integers(1, 8, (1, g)).astype(float)
        p = paired_p(sums, sizes, 1.0)
        ends = np.stack(paired_ends(sums, sizes, 1.0, 0.05, p))
        for i in (0, 17):
            own = sums[i : i + 1]
            assert paired_p(own, sizes, 1.0)[0] == p[i]
            assert (np.stack(paired_ends(own, sizes, 1.0, 0.05, p[i : i + 1]))[:, 0] == ends[:, i]).all()


def test_intervals_cover_the_true_difference_as_often_as_they_say():
    """Skewed differences in clusters of 1 to 5 samples with the true mean .1."""
    rng = np.random.default_rng(7)
    sizes = rng.integers(1, 6, (1, 60)).astype(float)
    sums = rng.gamma(1.0, 1.0, (1500, 60)) * 0.3 * sizes - 0.2 * sizes
    low, high = paired_ends(sums, sizes, 3.0, 0.05, paired_p(sums, sizes, 3.0))
    assert np.mean((low <= 0.1) & (high >= 0.1)) >= 0.95
