"""A dataset split by the hash of clusters."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv_bench.errors import ConfigError
from mmkv_bench.plan.planner import index_of, longest_first
from mmkv_bench.plan.validate import parse_shard
from tests.each import each


@settings(deadline=None)
@given(st.text(), st.integers(1, 16))
def test_every_cluster_belongs_to_exactly_one_part(cluster, count):
    assert index_of(cluster, count) in range(count)


@settings(deadline=None)
@given(st.lists(st.text(), min_size=1))
def test_one_part_is_everything(clusters):
    assert all(index_of(cluster, 1) == 0 for cluster in clusters)


def test_parts_are_of_similar_size():
    sizes = [sum(index_of(f"page-{i}", 4) == part for i in range(4000)) for part in range(4)]
    assert sum(sizes) == 4000
    assert all(abs(size - 1000) < 120 for size in sizes)  # 120 = 4.4 standard deviations


def test_the_split_is_the_same_in_every_process_and_version():
    assert [i for i in range(12) if index_of(f"page-{i}", 3) == 1] == [0, 8, 9, 10, 11]


@each("text", ["1", "4/4", "-1/4", "a/b", "1/0", "1/4/2", "", "0.5/2"])
def test_what_is_no_part_is_refused(text):
    with pytest.raises(ConfigError, match=r"allowed: i/n with 0 <= i < n"):
        parse_shard(text)


def test_a_part_reads_as_it_is_written():
    assert parse_shard(" 1/4 ") == (1, 4)


def test_long_datasets_come_first():
    assert longest_first({"short": 1.0, "long": 9.0, "b": 3.0, "a": 3.0}) == ["long", "a", "b", "short"]
