"""What stays: exact caps, protected first, ties to the lower index, indices ascending and left-padded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv_bench.compression.allocators.keep_all import KeepAll
from mmkv_bench.compression.allocators.uniform import Uniform
from mmkv_bench.compression.reducers.evict import Evict
from mmkv_bench.compression.selectors.topk import TopK
from mmkv_bench.errors import ConfigError
from tests import cover
from tests.compression import oracles
from tests.each import each


@st.composite
def problems(draw):
    heads, n = draw(st.integers(1, 4)), draw(st.integers(1, 60))
    score = st.integers(-3, 3)  # few values: many ties
    scores = draw(st.lists(st.lists(score, min_size=n, max_size=n), min_size=heads, max_size=heads))
    caps = draw(st.lists(st.integers(0, n + 5), min_size=heads, max_size=heads))
    protected = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    return torch.tensor(scores, dtype=torch.float32), caps, protected


@settings(max_examples=cover.examples(300), deadline=None, derandomize=True)
@given(problem=problems())
def test_selection_equals_the_loop(problem):
    scores, caps, protected = problem
    n = scores.shape[1]
    before = scores.clone()
    got = TopK().select(scores, torch.tensor(caps), torch.tensor(protected))
    want = oracles.select(scores, [min(c, n) for c in caps], protected)
    width = max(min(c, n) for c in caps)
    assert got.dtype == torch.int64 and got.shape == (len(caps), width)
    assert got.tolist() == [[-1] * (width - len(row)) + row for row in want]
    assert torch.equal(TopK().select(scores, torch.tensor(caps), torch.tensor(protected), TopK.order(scores)), got)
    assert torch.equal(scores, before)


def test_protected_beyond_the_cap_keep_the_last_ones():
    scores = torch.tensor([[9.0, 8.0, 1.0, 2.0, 3.0]])
    got = TopK().select(scores, torch.tensor([2]), torch.tensor([True, False, True, True, True]))
    assert got.tolist() == [[3, 4]]


def test_equal_scores_keep_the_lower_index():
    assert TopK().select(torch.zeros(1, 6), torch.tensor([3]), torch.zeros(6, dtype=torch.bool)).tolist() == [[0, 1, 2]]


def test_a_cap_of_zero_keeps_nothing():
    none = torch.zeros(4, dtype=torch.bool)
    assert TopK().select(torch.rand(2, 4), torch.tensor([0, 0]), none).shape == (2, 0)
    assert TopK().select(torch.rand(2, 4), torch.tensor([0, 2]), none)[0].tolist() == [-1, -1]


@each(
    ("selector", "length", "budget", "kept"),
    [
        (TopK(), 10, 3, [9]),
        (TopK(sinks=4), 10, 8, [0, 1, 2, 3, 9]),
        (TopK(sinks=4), 10, 3, [0, 1, 9]),  # C - 1 sinks
        (TopK(sinks=4), 10, 1, [9]),
        (TopK(sinks=4, recents=0), 10, 1, []),
        (TopK(sinks=4), 3, 8, [0, 1, 2]),
        (TopK(recents=32), 10, 2, list(range(10))),
        (TopK(recents=0.29), 300, 100, list(range(271, 300))),  # a share of C, exact
        (TopK(recents=0.25, sinks=1), 10, 3, [0, 9]),  # the last token at least
        (TopK(window=4), 10, 64, [6, 7, 8, 9]),
        (TopK(window=4), 10, 5, [8, 9]),  # min(window, C // 2)
        (TopK(window=4), 10, 1, [9]),
        (TopK(window=40), 6, 200, list(range(6))),
    ],
)
def test_protection_follows_prompt_and_budget(selector, length, budget, kept):
    got = selector.protected(length, budget, None)
    assert got.dtype == torch.bool and got.shape == (length,)
    assert got.nonzero().flatten().tolist() == kept


@settings(max_examples=cover.examples(100), deadline=None, derandomize=True)
@given(
    length=st.integers(1, 120),
    budget=st.integers(1, 125),
    heads=st.integers(1, 4),
    seed=st.integers(0, 999),
    selector=st.sampled_from([TopK(), TopK(sinks=4), TopK(window=32), TopK(sinks=4, recents=0)]),
)
def test_exactly_the_budget_is_kept(length, budget, heads, seed, selector):
    scores = torch.randn(heads, length, generator=torch.Generator().manual_seed(seed))
    (caps,) = Uniform().caps([scores], budget, [0], 1)
    got = selector.select(scores, caps, selector.protected(length, budget, None))
    assert (got >= 0).all() and got.shape == (heads, min(budget, length))
    assert (got.diff(dim=1) > 0).all() and int(got.max()) < length


def test_uniform_caps_every_head_and_declares_its_excess():
    scores = [torch.zeros(2, 10), torch.zeros(2, 10)]
    assert [c.tolist() for c in Uniform().caps(scores, 4, [0, 1], 2)] == [[4, 4], [4, 4]]
    assert [c.tolist() for c in Uniform().caps(scores, 40, [0, 1], 2)] == [[10, 10], [10, 10]]
    assert [c.tolist() for c in Uniform().caps(scores, 0, [0, 1], 2)] == [[0, 0], [0, 0]]
    assert Uniform.excess == 0 and KeepAll.excess == 0 and Uniform(excess=32).excess == 32
    assert [c.tolist() for c in Uniform(excess=3).caps(scores, 4, [0, 1], 2)] == [[7, 7], [7, 7]]
    assert [c.tolist() for c in KeepAll().caps(scores, 4, [0, 1], 2)] == [[10, 10], [10, 10]]


@each("bad", [{"sinks": -1}, {"recents": -2}, {"window": -3}])
def test_negative_protection_is_refused(bad):
    with pytest.raises(ConfigError, match="allowed: 0 or more tokens"):
        TopK(**bad)


@each("share", [0.0, 1.0, 1.5, -0.5, float("nan")])
def test_recents_are_tokens_or_a_share_below_the_budget(share):
    with pytest.raises(ConfigError, match=r"recents is .*; allowed: "):
        TopK(recents=share)


def test_negative_excess_is_refused():
    with pytest.raises(ConfigError, match="excess is -1"):
        Uniform(excess=-1)


def test_eviction_gathers_unchanged_entries_and_zeroes_padding():
    g = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 5, 3, generator=g), torch.randn(2, 5, 3, generator=g)
    copies = key.clone(), value.clone()
    new_key, new_value = Evict().reduce(key, value, torch.tensor([[-1, 0, 4], [1, 2, 3]]))
    assert torch.equal(new_key[0, 1:], key[0, [0, 4]]) and torch.equal(new_value[1], value[1, 1:4])
    assert (new_key[0, 0] == 0).all() and (new_value[0, 0] == 0).all()
    assert torch.equal(key, copies[0]) and torch.equal(value, copies[1])


def test_eviction_reads_nothing_of_what_it_drops():
    key = torch.full((1, 4, 2), float("nan"))
    key[0, 2] = 1.0
    new_key, new_value = Evict().reduce(key, key, torch.tensor([[-1, 2]]))
    assert torch.isfinite(new_key).all() and torch.isfinite(new_value).all()


@each(
    ("sinks", "recents", "budget", "cut"),
    [(4, 1, 5, False), (4, 1, 4, True), (100, 1, 16, True), (0, 100, 16, True), (0, 16, 16, False), (0, 1, 1, False)],
)
def test_protected_tokens_beyond_the_budget_are_told(sinks, recents, budget, cut):
    selector = TopK(sinks=sinks, recents=recents)
    assert selector.fallbacks(budget, 300) == (("protected_reduced",) if cut else ())
    kept = selector.select(torch.zeros(1, 300), torch.tensor([budget]), selector.protected(300, budget, None))
    asked = {*range(sinks), *range(300 - recents, 300)}
    assert (asked <= set(kept[0].tolist())) != cut
