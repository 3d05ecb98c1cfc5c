"""Merging by position and by feature, and ElasticCache's buckets, against naive versions of their equations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv_bench.compression.reducers.evict import Evict
from mmkv_bench.compression.reducers.feature_merge import FeatureMerge
from mmkv_bench.compression.reducers.merging import Merging
from mmkv_bench.compression.reducers.position_merge import PositionMerge
from tests import cover
from tests.oracles import prefix as oracle

many = settings(max_examples=cover.examples(120), deadline=None, derandomize=True)


@st.composite
def kept_sets(draw):
    """Ragged kept sets of a layer: index [Hkv,m] and the lists it stands for; one head may keep nothing."""
    heads, n = draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, 50))
    g = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    counts = [draw(st.integers(0 if head else 1, n)) for head in range(heads)]
    kept = [sorted(torch.randperm(n, generator=g)[:count].tolist()) for count in counts]
    width = max(counts)
    index = torch.tensor([[-1] * (width - len(row)) + row for row in kept])
    key, value = torch.randn(heads, n, 6, generator=g), torch.randn(heads, n, 6, generator=g)
    return key, value, index, kept


def compare(got, entries, kept, groups):
    for head, (row, chosen) in enumerate(zip(got, kept, strict=True)):
        real = row[row.shape[0] - len(chosen) :]
        want = oracle.merged(entries[head], groups[head])
        assert torch.allclose(real.double(), want, atol=3e-6)
        assert (row[: row.shape[0] - len(chosen)] == 0).all()
        for place, token in enumerate(chosen):
            if not groups[head][token]:
                assert torch.equal(real[place], entries[head, token])  # untouched


@many
@given(problem=kept_sets(), spread=st.booleans())
def test_position_merging_averages_each_bucket(problem, spread):
    key, value, index, kept = problem
    before = key.clone(), value.clone()
    got_key, got_value = PositionMerge().reduce(key, value, index)
    groups = [oracle.clusters(row, key.shape[1], lambda m, row=row: oracle.by_position(row, m)) for row in kept]
    compare(got_key, key, kept, groups)
    compare(got_value, value, kept, groups)
    assert torch.equal(key, before[0]) and torch.equal(value, before[1])
    for row, group in zip(kept, groups, strict=True):  # the buckets are cut at the midpoints between anchors
        for left, right in zip(row, row[1:], strict=False):
            middle = (left + right) / 2
            assert all(m <= middle for m in group[left]) and all(m > middle for m in group[right] if m < right)


@many
@given(problem=kept_sets())
def test_feature_merging_averages_what_points_the_same_way(problem):
    key, value, index, kept = problem
    got_key, got_value = FeatureMerge().reduce(key, value, index)
    groups = [
        oracle.clusters(row, key.shape[1], lambda m, row=row, head=head: oracle.by_feature(row, m, key[head]))
        for head, row in enumerate(kept)
    ]
    compare(got_key, key, kept, groups)
    compare(got_value, value, kept, groups)  # values follow their keys, not their own likeness


@many
@given(problem=kept_sets())
def test_released_elastic_merging_takes_the_token_before(problem):
    key, value, index, kept = problem
    n = key.shape[1]
    kept = [sorted({0, n - 1, *row}) for row in kept]
    width = max(map(len, kept))
    index = torch.tensor([[-1] * (width - len(row)) + row for row in kept])
    got = PositionMerge(shift=1, closed=1).reduce(key, value, index)
    for entries, reduced in zip((key, value), got, strict=True):
        for head, row in enumerate(kept):
            want = oracle.released_elastic(entries[head], row)
            assert torch.allclose(reduced[head, width - len(row) :].double(), want, atol=3e-6)


def test_equal_distances_go_to_the_lower_token_and_divisors_count_all():
    key = torch.tensor([[[1.0], [2], [3], [4], [5], [6]]])
    got, _ = PositionMerge().reduce(key, key, torch.tensor([[1, 3]]))
    assert got.flatten().tolist() == [2.0, 5.0]  # (1 + 2 + 3) / 3 and (4 + 5 + 6) / 3: token 2 went to 1
    shifted, _ = PositionMerge(shift=1, closed=1).reduce(key, key, torch.tensor([[0, 2, 5]]))
    # pruned 1, 3, 4 bring the contents of 0, 2, 3; all go to anchor 2: (3 + 1 + 3 + 4) / 4
    assert shifted.flatten().tolist() == [1.0, 2.75, 6.0]


def test_equal_cosines_go_to_the_lower_token_and_length_does_not_matter():
    key = torch.tensor([[[1.0, 0], [5, 0], [0, 2], [3, 0], [0, 0]]])
    value = torch.tensor([[[1.0], [2], [3], [4], [5]]])
    got_key, got_value = FeatureMerge().reduce(key, value, torch.tensor([[0, 1, 2]]))
    assert got_value.flatten().tolist() == [
        pytest.approx(10 / 3),
        2.0,
        3.0,
    ]  # 3 points like 0 and 1; 4 has no direction
    assert got_key[0].tolist() == [[pytest.approx(4 / 3), 0.0], [5.0, 0.0], [0.0, 2.0]]


def test_merging_duplicates_changes_nothing_and_half_precision_sums_in_float32():
    same = torch.full((1, 900, 2), 0.1, dtype=torch.bfloat16)
    for reducer in (PositionMerge(), FeatureMerge()):
        got, _ = reducer.reduce(same, same, torch.tensor([[4, 500]]))
        assert got.dtype == torch.bfloat16 and torch.equal(got, same[:, :2])


@many
@given(problem=kept_sets())
def test_no_merging_is_eviction(problem):
    key, value, index, _ = problem
    pairs = {"none": Evict(), "position": PositionMerge(), "feature": FeatureMerge()}
    for metric, reducer in pairs.items():
        for got, want in zip(Merging(metric).reduce(key, value, index), reducer.reduce(key, value, index), strict=True):
            assert torch.equal(got, want)
        assert Merging(metric).merges == (metric != "none") == reducer.merges
