"""Columns: influences of aggregates, Holm's correction, the best and the ranks, failures, and how often all that is wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mmkv_bench.statistics.cluster_sums import Samples, blocks, cluster_sums
from mmkv_bench.statistics.metric_kinds import METEOR, PERPLEXITY, Pooled
from mmkv_bench.statistics.paired_tests import compare_column, compare_pairs, holm
from tests.each import each
from tools.simulate import APART, CASES, corpus_bleu, f1, nll, power, rates

SHORT = settings(max_examples=60, deadline=None)


def named(m: int) -> list[str]:
    return [f"m{i}" for i in range(m)]


MEAN = Pooled(lambda totals: totals[..., 0] / totals[..., 1])


def test_a_mean_is_its_clusters_sums_over_its_samples():
    values = np.array([[1.0, 0, 1, 0.5, 0.25], [0, 0, 0, 1, 1]])
    found = cluster_sums(values, np.array([0, 1, 0, 2, 1]), 3)
    assert found.sums.tolist() == [[2, 0.25, 0.5], [0, 1, 1]] and found.sizes.tolist() == [2, 2, 1]
    assert found.values == pytest.approx(values.mean(axis=1))


def test_left_out_clusters_give_a_mean_the_same_sums_as_counting():
    rng = np.random.default_rng(0)
    values, index = rng.random((3, 40)), np.sort(rng.integers(0, 12, 40))
    index = np.unique(index, return_inverse=True)[1]
    plain = cluster_sums(values, index, index.max() + 1)
    parts = np.stack([values, np.ones_like(values)], axis=2)
    left_out = cluster_sums(parts, index, index.max() + 1, MEAN)
    np.testing.assert_allclose(left_out.sums, plain.sums, atol=1e-10)


def test_an_aggregate_is_of_the_samples_that_two_methods_have():
    rng = np.random.default_rng(0)
    scores = rng.random((4, 40, 2))
    scores[rng.random(scores.shape[:2]) < 0.1] = np.nan
    samples = Samples(scores, rng.permutation(np.repeat(np.arange(10), 4)), MEAN, False)
    a, b = np.triu_indices(4, 1)
    for block in blocks(samples, a, b, np.arange(6)):
        for pair, *values in zip(block.at, block.of_a, block.of_b, strict=True):
            both = scores[:, samples.ok[a[pair]] & samples.ok[b[pair]]]
            assert values == pytest.approx([samples.aggregator(both[method]) for method in (a[pair], b[pair])])


@each("make", [f1, corpus_bleu])
def test_influences_of_an_aggregate_are_its_derivative_along_each_cluster(make):
    """Against the gradient at the totals by differences: what a cluster's parts add to the aggregate."""
    samples = make(np.random.default_rng(1), np.zeros(2), clusters=400, per=4)
    parts, aggregator = samples.scores, samples.aggregator
    found = cluster_sums(parts, samples.index, samples.count, aggregator)
    assert found.values == pytest.approx([aggregator(own) for own in parts])
    n, total = len(samples.index), parts[0].sum(axis=0)
    step = 1e-6 * total
    gradient = [
        (aggregator.function(total + e) - aggregator.function(total - e)) / (2 * e.sum())
        for e in np.diag(step)
        if e.sum()
    ]
    by_cluster = np.stack([np.bincount(samples.index, own) for own in parts[0].T], axis=1)
    expected = found.values[0] * found.sizes + n * by_cluster @ np.array(gradient)
    np.testing.assert_allclose(found.sums[0], expected, atol=0.03 * np.ptp(expected))
    assert found.sums[0].sum() / n == pytest.approx(found.values[0])


def test_perplexities_are_compared_by_sums_of_log_likelihoods_on_the_log_scale():
    samples = nll(np.random.default_rng(2), np.array([0.0, 0.3]), clusters=80)
    parts = samples.scores
    found = compare_column(named(2), samples, falling=True)
    ppl = [math.exp(own[:, 0].sum() / own[:, 1].sum()) for own in parts]
    assert found.difference[0] == pytest.approx(ppl[0] - ppl[1])
    (low, high), logs = found.intervals()[0], np.log(ppl)
    assert low < ppl[0] - ppl[1] < high and found.best.tolist() == [False, True]
    # The same as the mean over tokens of a score per token: what the test sees is a ratio of sums.
    sums = cluster_sums(parts, samples.index, samples.count, PERPLEXITY)
    np.testing.assert_allclose(sums.sums, parts[..., 0])
    np.testing.assert_allclose(sums.sizes, parts[0, :, 1])
    assert sums.sums.sum(axis=1) / sums.sizes.sum() == pytest.approx(logs)


def test_meteor_is_compared_too():
    rng = np.random.default_rng(3)
    parts = rng.integers(1, 9, (2, 50, 23)).astype(float)
    found = compare_column(named(2), Samples(parts, np.arange(50), METEOR))
    assert found.difference[0] == pytest.approx(METEOR(parts[0]) - METEOR(parts[1])) and 0 < found.p[0] <= 1


def test_unclustered_zeros_and_ones_are_tested_by_exact_mcnemar_and_their_intervals_agree_with_it():
    rng = np.random.default_rng(4)
    for share in (0.03, 0.3):
        scores = (rng.random((6, 200)) < np.linspace(0.5, 0.5 + share, 6)[:, None]).astype(float)
        found = compare_column(named(6), Samples(scores, np.arange(200)))
        for alpha in (0.05, 0.05 / 15):
            ends = found.intervals(alpha=alpha)
            for at, (i, j) in enumerate(zip(found.a, found.b, strict=True)):
                only, other = (scores[i] > scores[j]).sum(), (scores[i] < scores[j]).sum()
                assert found.p[at] == pytest.approx(stats.binomtest(int(only), int(only + other), 0.5).pvalue)
                assert ((ends[at] > 0).all() or (ends[at] < 0).all()) == (found.p[at] <= alpha)
                assert ends[at, 0] <= found.difference[at] <= ends[at, 1]


def test_the_resolution_of_a_column_is_the_smallest_gap_that_its_best_known_pair_is_separated_at():
    rng = np.random.default_rng(9)
    graded = rng.random((3, 80))
    found = compare_column(named(3), Samples(graded, np.arange(80)))
    half = found.intervals(alpha=0.05 / 3)
    assert found.resolution == pytest.approx(np.diff(half, axis=1).min() / 2)
    shifted = np.stack([graded[0], graded[0] + rng.normal(0, 0.01, 80)])
    assert compare_column(named(2), Samples(shifted, np.arange(80))).resolution < found.resolution
    nats = np.stack([graded[0], graded[0], graded[1]])
    apart = Samples(nats[1:], np.arange(80), share=False)
    same = compare_column(named(3), Samples(nats, np.arange(80), share=False))
    assert same.resolution > compare_column(named(2), apart).resolution, "two that are the same say nothing of a gap"
    assert compare_column(named(2), Samples(nats[:2], np.arange(80), share=False)).resolution == np.inf
    few = np.zeros((2, 100))
    few[0, :3] = 1.0  # three discordant samples decide nothing, whichever way they fall
    assert compare_column(named(2), Samples(few, np.arange(100))).resolution == np.inf
    assert compare_column(named(2), Samples(graded[:2], np.repeat(np.arange(4), 20))).resolution is None


def test_a_column_that_one_cluster_decides_claims_nothing():
    scores = np.stack([np.linspace(0.5, 1.0, 60), np.zeros(60)])
    for largest, decidable in ((6, True), (7, False)):
        pages = np.concatenate([np.zeros(largest, int), 1 + np.arange(60 - largest)])
        found = compare_column(named(2), Samples(scores, pages))
        assert found.decidable.tolist() == [decidable] and found.separated[0] == decidable
        assert np.isnan(found.intervals()).all() == (not decidable)


def test_four_discordant_samples_of_one_side_separate_nothing():
    for scale in (1.0, 0.5):
        scores = np.zeros((2, 500))
        scores[0, :4] = scale
        assert compare_column(named(2), Samples(scores, np.arange(500))).p[0] >= 0.125


def test_clustered_zeros_and_ones_are_not_taken_for_independent():
    scores = np.stack([np.tile([1.0, 1, 0], 8).repeat(25), np.tile([0.0, 1, 0], 8).repeat(25)])
    alone = compare_column(named(2), Samples(scores, np.arange(600)))
    pages = compare_column(named(2), Samples(scores, np.arange(24).repeat(25)))
    assert alone.p[0] < 1e-6 < 1e-3 < pages.p[0]


def test_seeds_that_are_averaged_before_count_once():
    rng = np.random.default_rng(5)
    seeds = (rng.random((2, 3, 120)) < np.array([0.4, 0.6])[:, None, None]).astype(float)
    averaged = compare_column(named(2), Samples(seeds.mean(axis=1), np.arange(120)))
    told_apart = compare_column(named(2), Samples(seeds.reshape(2, -1), np.arange(360)))
    assert averaged.n[0] == 120 and averaged.p[0] > told_apart.p[0]
    assert not Samples(seeds.mean(axis=1), np.arange(120)).binary.any()


def test_only_samples_ok_in_both_are_compared_and_a_pair_is_the_same_as_alone():
    rng = np.random.default_rng(6)
    scores = (rng.random((6, 90)) + np.linspace(0, 0.5, 6)[:, None]) / 1.5
    scores[rng.random(scores.shape) < 0.1] = np.nan
    scores[5] = np.nan
    pages = rng.permutation(np.arange(90) // 3)
    a, b = np.triu_indices(6, 1)
    found = compare_pairs(named(6), Samples(scores, pages), a, b)
    ends = found.intervals(alpha=0.05)
    for at, (i, j) in enumerate(zip(a, b, strict=True)):
        both = ~np.isnan(scores[i] + scores[j])
        assert found.n[at] == both.sum()
        if not both.any():
            assert found.p[at] == 1 and np.isnan(ends[at]).all()
            continue
        alone = compare_column(named(2), Samples(scores[[i, j]][:, both], pages[both]))
        assert found.difference[at] == pytest.approx(np.mean(scores[i, both] - scores[j, both]))
        assert found.p[at] == pytest.approx(alone.p[0], rel=1e-9)
        assert ends[at] == pytest.approx(alone.intervals(alpha=0.05)[0], rel=1e-6)


def test_a_pairs_numbers_do_not_depend_on_the_other_methods_of_its_column():
    rng = np.random.default_rng(7)
    base = rng.random(100)
    close = np.stack([base, base + 0.05 + rng.normal(0, 0.05, 100)])
    far = np.concatenate([close, base[None] + np.where(np.arange(100) == 3, 6.0, 0.0)])
    for share in (True, False):
        alone = compare_column(named(2), Samples(close, np.arange(100), None, share))
        among = compare_column(named(3), Samples(far, np.arange(100), None, share))
        assert alone.p[0] == among.p[0] < 0.01
        assert (alone.intervals(alpha=0.05)[0] == among.intervals(alpha=0.05)[0]).all()


def test_holm_on_a_hand_worked_example():
    # Sorted: .005 <= .05/4, .01 <= .05/3, .03 > .05/2: two are rejected, and the last two keep level .05/2.
    adjusted, level = holm(np.array([0.01, 0.04, 0.03, 0.005]))
    assert adjusted == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert level == pytest.approx([0.05 / 3, 0.025, 0.025, 0.0125])
    assert [len(each) for each in holm(np.array([]))] == [0, 0]


@SHORT
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_rejects_what_its_adjusted_p_values_say(p_values):
    p = np.array(p_values)
    adjusted, level = holm(p)
    clear = np.abs(adjusted - 0.05) > 1e-12
    assert ((p <= level) == (adjusted <= 0.05))[clear].all()
    assert ((p <= adjusted) & (adjusted <= 1)).all()


def test_bold_is_lost_to_one_rival_at_a_level_of_all_rivals_and_to_any_holm_separated_pair():
    rng = np.random.default_rng(8)
    seen = set()
    for gap in np.linspace(0, 0.12, 12):
        found = compare_column(
            named(6), Samples(rng.random((6, 100)) * 0.4 + gap * np.arange(6)[:, None], np.arange(100))
        )
        for i in range(6):
            rivals = [
                (found.p[at], found.separated[at])
                for at, pair in enumerate(zip(found.a, found.b, strict=True))
                if i in pair and found.a_better[at] == (pair[1] == i)
            ]
            beaten = any(p <= 0.05 / 5 or apart for p, apart in rivals)
            assert found.best[i] == (not beaten)
            assert found.ranks[i][0] == 1 + sum(p <= 0.05 / 5 or apart for p, apart in rivals)
            seen.add(bool(found.best[i]))
        low, high = found.ranks.T
        assert (low <= high).all() and (low == 1).tolist() == found.best.tolist()
    assert seen == {True, False}


def test_of_a_separated_pair_the_one_with_the_better_mean_wins_whichever_comes_first():
    """Of scores in [0, 1], whose differences are below 1; smaller is better for a metric that falls."""
    scores = np.random.default_rng(9).random((3, 120)) * 0.2 + np.array([[0.5], [0.1], [0.3]])
    for falling, ranks in ((False, [1, 3, 2]), (True, [3, 1, 2])):
        found = compare_column(named(3), Samples(scores, np.arange(120)), falling=falling)
        assert found.separated.all() and found.ranks.tolist() == [[rank, rank] for rank in ranks]
        assert found.winners == (f"m{ranks.index(1)}",)


def test_nobody_beats_without_a_rival():
    one = compare_column(["a"], Samples(np.ones((1, 30)), np.arange(30)))
    assert one.best.tolist() == [True] and one.ranks.tolist() == [[1, 1]] and one.intervals().shape == (0, 2)


COLUMNS = 25


def test_simulated_columns_of_equal_methods_are_seldom_told_apart():
    """Few columns of each kind; `make simulate` does 1,000. At a true rate of 5 % more than 5 of 25 have a chance of .003;
    plain t tests separate most columns of the skewed kind."""
    kinds = ["binary n=100", "graded 100 clusters of about 4", "three seeds 100 clusters of about 4"]
    for i, name in enumerate([*kinds, "NLL 100 clusters of about 4", "skew n=100"]):
        found = rates(CASES[name], COLUMNS, seed=100 + i)
        assert found.false * COLUMNS <= 5, name
        assert found.unbold <= 0.05, name


def test_in_simulated_columns_the_truly_best_method_is_bold_and_ranks_hold_the_true_ones():
    for i, name in enumerate(["graded 100 clusters of about 4", "NLL n=100"]):
        make, spread = APART[name]
        found = rates(make, COLUMNS, seed=200 + i, spread=spread, methods=12)
        assert found.unbold * COLUMNS <= 5 and found.rank <= 0.05, name


def test_large_gaps_are_separated_in_every_pair_and_small_ones_in_most():
    assert power(1.6, seed=0) == (275, 275)
    by_budget, together = power(0.16, seed=0)
    assert by_budget >= 260 and together >= 240
