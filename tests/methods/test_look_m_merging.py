"""LOOK-M's and MEDA's merging: the paper's sums, its release's misaligned sources, memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from mmkv_bench.compression.reducers.lookm_merge import LookMMerge
from mmkv_bench.errors import UnsupportedError
from tests import cover
from tests.compression import oracles
from tests.each import each
from tests.oracles import look_m as oracle

many = settings(
    max_examples=cover.examples(60), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@st.composite
def token_types(draw, length: int) -> list[int]:
    """Runs of text, images and videos, in any order, one kind alone included."""
    types: list[int] = []
    while len(types) < length:
        types += [draw(st.sampled_from([0, 1, 2]))] * draw(st.integers(1, max(1, length // 2)))
    return types[:length]


@st.composite
def caches(draw):
    """Keys, values, kept rows (the same number in every head, padding on the left), types."""
    length, heads = draw(st.integers(1, 60)), draw(st.integers(1, 3))
    g = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    key, value = torch.randn(heads, length, 6, generator=g), torch.randn(heads, length, 6, generator=g)
    types = draw(token_types(length))
    kept = draw(st.integers(1, length))
    rows = [sorted(torch.randperm(length, generator=g)[:kept].tolist()) for _ in range(heads)]
    return key, value, rows, types, draw(st.integers(0, 3))


def reduce(reducer, key, value, rows, types, padding=0):
    index = torch.tensor([[-1] * padding + row for row in rows])
    before = key.clone(), value.clone()
    made = reducer.reduce(key, value, index, None if types is None else torch.tensor(types))
    assert torch.equal(key, before[0]) and torch.equal(value, before[1]), "a reducer never writes to its inputs"
    for part in made:
        assert part.shape == (*index.shape, key.shape[-1]) and part.dtype == key.dtype
        assert not part[:, :padding].any()
    return tuple(part[:, padding:] for part in made)


@many
@given(case=caches(), variant=st.sampled_from(["average", "pivot", "weighted"]))
def test_merged_entries_are_the_papers_sums(case, variant):
    key, value, rows, types, padding = case
    keys, values, margin = oracle.reduced(key, value, rows, types, variant)
    assume(margin > 1e-5)
    got = reduce(LookMMerge(variant), key, value, rows, types, padding)
    for mine, want in zip(got, (keys, values), strict=True):
        assert torch.allclose(mine.double(), torch.stack(want), rtol=1e-5, atol=1e-5)


@many
@given(case=caches(), variant=st.sampled_from(["average", "weighted"]))
def test_misaligned_sources_are_the_releases(case, variant):
    key, value, rows, types, padding = case
    keys, values, margin = oracle.reduced(key, value, rows, types, variant, misaligned=True)
    assume(margin > 1e-5)
    got = reduce(LookMMerge(variant, "misaligned"), key, value, rows, types, padding)
    for mine, want in zip(got, (keys, values), strict=True):
        assert torch.allclose(mine.double(), torch.stack(want), rtol=1e-5, atol=1e-5)


KEYS = torch.tensor([[[1.0, 0], [2, 0], [0, 1], [3, 4], [9, 0], [0, 0.5]]])  # 0 and 2 are kept; 4 is text
VALUES = torch.tensor([[[1.0, 1], [5, 1], [2, 2], [4, 0], [99, 99], [0, 8]]])
KINDS = [0, 1, 0, 2, 0, 1]  # 1 and 4 go to 0; 3 (cosine .8 against .6) and 5 go to 2


@each(
    ("variant", "keys", "values"),
    [
        ("average", [[4.0, 0], [1, 5.5 / 3]], [[35, 101 / 3], [2, 10 / 3]]),
        ("pivot", [[2.5, 0], [0.5, (1 + 2.5 + 0.75) / 3]], [[18, 52 / 3], [(2 + 3 + 1) / 3, (2 + 1 + 5) / 3]]),
        ("weighted", [[4.0, 0], [0.8, (1 + 3.2 + 0.5) / 3]], [[35, 101 / 3], [(2 + 3.2) / 3, 10 / 3]]),
        ("none", [[1.0, 0], [0, 1]], [[1.0, 1], [2, 2]]),
    ],
)
def test_merging_by_hand(variant, keys, values):
    """The divisor is n + 1 also where weights do not add up to it, values follow the assignment of keys, and text that was
    evicted (4) is merged as visual tokens are."""
    got = reduce(LookMMerge(variant), KEYS, VALUES, [[0, 2]], KINDS)
    assert torch.allclose(got[0][0], torch.tensor(keys)) and torch.allclose(got[1][0], torch.tensor(values))


def test_released_average_merges_the_wrong_rows_by_hand():
    """All text is kept, as the release does. Cosines 1, .8, 1 (mean .933): rows 0 and 2 pass, to slots 0 and 1, but the
    rows merged there are 0 and 1."""
    kept = [[0, 2, 4]]
    keys, values = reduce(LookMMerge("average", "misaligned"), KEYS, VALUES, kept, KINDS)
    assert torch.allclose(keys[0], torch.tensor([[1.5, 0], [1.5, 2.5], [9, 0]]))
    assert torch.allclose(values[0], torch.tensor([[3.0, 1], [3, 1], [99, 99]]))
    keys, _ = reduce(LookMMerge("weighted", "misaligned"), KEYS, VALUES, kept, KINDS)
    assert torch.allclose(keys[0, :2], torch.tensor([[1.5, 0], [0, 0.75]]))  # 3 is left out, 5 merged in place
    same = [reduce(LookMMerge("pivot", how), KEYS, VALUES, kept, KINDS)[0] for how in ("aligned", "misaligned")]
    assert torch.equal(*same)


def test_misaligned_sources_need_heads_that_evict_alike():
    index = torch.tensor([[-1, 0], [0, 2]])
    with pytest.raises(UnsupportedError, match=r"these heads evict \[5, 4\]; allowed: equal numbers in all heads"):
        LookMMerge("average", "misaligned").reduce(
            KEYS.repeat(2, 1, 1), VALUES.repeat(2, 1, 1), index, torch.tensor(KINDS)
        )


def test_merging_equal_entries_leaves_them_equal_and_lonely_entries_untouched():
    g = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 30, 8, generator=g).bfloat16(), torch.randn(2, 30, 8, generator=g).bfloat16()
    key[:, 10:], value[:, 10:] = key[:, :10].repeat(1, 2, 1), value[:, :10].repeat(1, 2, 1)  # twins of the kept ones
    types = [0] * 10 + [1] * 10 + [0] * 10
    for variant in ("average", "pivot"):
        got = reduce(LookMMerge(variant), key, value, [list(range(10))] * 2, types)
        assert torch.equal(got[0], key[:, :10]) and torch.equal(got[1], value[:, :10])
    key[:, 10:] = key[:, :1]  # all like entry 0: the others have no partner
    got = reduce(LookMMerge("average"), key, value, [list(range(10))] * 2, types)
    assert torch.equal(got[0][:, 1:], key[:, 1:10]) and torch.equal(got[1][:, 1:], value[:, 1:10])
    assert not torch.equal(got[1][:, 0], value[:, 0])


@each("types", [None, [0] * 6])
def test_a_prompt_without_visual_tokens_merges_nothing(types):
    got = reduce(LookMMerge("average"), KEYS, VALUES, [[0, 2]], types)
    assert torch.equal(got[0], KEYS[:, [0, 2]]) and torch.equal(got[1], VALUES[:, [0, 2]])


def test_a_head_that_keeps_nothing_merges_nothing():
    index = torch.tensor([[-1, -1], [0, 2]])
    key, value = KEYS.repeat(2, 1, 1), VALUES.repeat(2, 1, 1)
    keys, values = LookMMerge().reduce(key, value, index, torch.tensor(KINDS))
    assert not keys[0].any() and not values[0].any()
    assert torch.equal(keys[1:], LookMMerge().reduce(KEYS, VALUES, index[1:], torch.tensor(KINDS))[0])


def test_merging_holds_one_tile_and_nothing_of_the_prompts_square():
    g = torch.Generator().manual_seed(0)
    key, value = torch.randn(1, 9000, 8, generator=g), torch.randn(1, 9000, 8, generator=g)
    index = torch.arange(0, 9000, 6)[None]
    types = torch.ones(9000, dtype=torch.int64)
    peak = oracles.allocator_peak(lambda: LookMMerge().reduce(key, value, index, types))
    assert peak < 40e6, f"{peak} bytes; the whole map of evicted and kept tokens is {7500 * 1500 * 4}"
