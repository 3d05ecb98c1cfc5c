"""Promise: medians of many groups are those of each alone, and 95 % of their intervals hold the true median."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import quantile_test

from mmkv_bench.statistics.intervals import medians

VALUES = st.lists(st.floats(-1e3, 1e3) | st.just(float("nan")), max_size=40)


@given(st.lists(VALUES, min_size=1, max_size=5))
def test_each_group_has_the_median_and_the_exact_interval_that_it_has_alone(lists):
    values = np.array([value for own in lists for value in own], dtype=float)
    groups = np.repeat(np.arange(len(lists)), [len(own) for own in lists])
    shuffle = np.random.default_rng(0).permutation(len(values))
    found = medians(values[shuffle], groups[shuffle], shuffle, len(lists))  # each a cluster of its own
    for place, own in enumerate(lists):
        known = np.array([value for value in own if value == value])
        assert found.n[place] == len(known)
        if not len(known):
            assert np.isnan([found.median[place], found.low[place], found.high[place]]).all()
            continue
        assert found.median[place] == np.median(known)
        if len(known) == 1:
            assert np.isnan([found.low[place], found.high[place], found.level[place]]).all()
        elif len(known) < 6:  # no two order statistics have 95 %
            assert (found.low[place], found.high[place]) == (known.min(), known.max())
            assert found.level[place] == 1 - 0.5 ** (len(known) - 1) < 0.95
        else:
            ends = quantile_test(known, q=0, p=0.5).confidence_interval(0.95)
            assert (found.low[place], found.high[place]) == (ends.low, ends.high)
            assert found.level[place] == 0.95


def covered(runs: int, clusters: int, size: int, shared: float) -> float:
    """Share of runs whose interval holds the median, 0, of values that are skewed and alike within clusters."""
    draw = np.random.default_rng(clusters * 100 + size)
    common, own = draw.normal(size=(2, runs, clusters, size))
    common = np.broadcast_to(common[..., :1], own.shape)
    values = np.sqrt(shared) * common + np.sqrt(1 - shared) * own
    values = np.expm1(values)  # the median stays where it is
    groups = np.repeat(np.arange(runs), clusters * size)
    within = np.tile(np.repeat(np.arange(clusters), size), runs)
    found = medians(values.reshape(-1), groups, within, runs)
    return float(np.mean((found.low <= 0) & (found.high >= 0)))


def test_intervals_hold_the_median_as_often_as_they_say_also_where_values_share_clusters():
    for clusters, size, shared in ((12, 1, 0.0), (101, 1, 0.0), (15, 6, 0.6), (40, 3, 0.9), (40, 5, 0.0)):
        assert 0.935 <= covered(2000, clusters, size, shared) <= 0.99, (clusters, size, shared)


def test_one_cluster_says_nothing_of_what_varies():
    found = medians(np.array([1.0, 2.0, 3.0]), np.zeros(3, int), np.zeros(3, int), 1)
    assert found.median == [2.0]
    assert np.isnan([found.low, found.high, found.level]).all()
