"""Water-filling: exact totals, no share above its cap, and the one level that explains every count."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv_bench.compression.allocators.waterfill import water_fill
from tests import cover
from tests.each import each

many = settings(max_examples=cover.examples(300), deadline=None, derandomize=True)
weights = st.one_of(
    st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=33),
    st.lists(st.integers(0, 3).map(float), min_size=1, max_size=12),  # many ties and zeros
    st.lists(st.floats(-20, 5).map(lambda x: 2.718281828**x), min_size=1, max_size=33),
)


def real_shares(weights: list[float], total: int, caps: list[int]) -> list[Fraction]:
    """The level is found among its breakpoints: below each, a known set is full."""
    exact = [Fraction(w) for w in weights]
    positive = [i for i, w in enumerate(exact) if w > 0]
    if sum(caps[i] for i in positive) < total:
        left = total - sum(caps[i] for i in positive)
        others = {i: Fraction(1) for i, w in enumerate(exact) if w == 0}
        inner = real_shares([1.0] * len(others), left, [caps[i] for i in others])
        found = dict(zip(others, inner, strict=True))
        return [found.get(i, Fraction(caps[i])) for i in range(len(exact))]
    points = sorted({Fraction(caps[i]) / exact[i] for i in positive})
    for point in points:
        if sum(min(Fraction(caps[i]), point * exact[i]) for i in positive) >= total:
            filled = [i for i in positive if Fraction(caps[i]) / exact[i] < point]
            open_ = [i for i in positive if i not in filled]
            level = (total - sum(caps[i] for i in filled)) / sum(exact[i] for i in open_)
            return [min(Fraction(c), level * w) for c, w in zip(caps, exact, strict=True)]
    return [Fraction(0)] * len(exact)


@many
@given(weights=weights, share=st.floats(0, 1), data=st.data())
def test_counts_are_the_level_rounded_by_largest_remainder(weights, share, data):
    same = data.draw(st.booleans())
    one = data.draw(st.integers(0, 60))
    caps = (
        [one] * len(weights)
        if same
        else data.draw(st.lists(st.integers(0, 60), min_size=len(weights), max_size=len(weights)))
    )
    total = int(share * sum(caps))
    got = water_fill(weights, total, one if same else caps)
    assert sum(got) == total and all(0 <= g <= c for g, c in zip(got, caps, strict=True))
    want = real_shares(weights, total, caps)
    assert sum(want) == total
    floors = [int(w) for w in want]
    ups = sorted(range(len(want)), key=lambda i: (-(want[i] - floors[i]), i))[: total - sum(floors)]
    assert got == [f + (i in ups) for i, f in enumerate(floors)]


@each(
    ("weights", "total", "cap", "counts"),
    [
        ([1, 1, 1, 1], 10, 10, [3, 3, 2, 2]),  # equal remainders: lower index first
        ([8, 1, 1], 10, 5, [5, 3, 2]),  # 8 is cut to 5; the rest 5 is 2.5 each
        ([100, 10, 1, 1], 12, 5, [5, 5, 1, 1]),  # two rounds: 5; then 7 * 10/12 = 5.83 is cut too; then 1 each
        ([0, 0, 5], 7, 3, [2, 2, 3]),  # weight 0 gets what nobody else can take, equally
        ([0, 5], 3, 3, [0, 3]),
        ([3, 1], 0, 4, [0, 0]),
        ([3, 1], 8, 4, [4, 4]),
        ([3, 1], 4, [2, 9], [2, 2]),
        ([0.0, 0.0], 3, 4, [2, 1]),
    ],
)
def test_counts_by_hand(weights, total, cap, counts):
    assert water_fill(weights, total, cap) == counts


@each(
    ("weights", "total", "cap"),
    [
        ([1, 1], 9, 4),
        ([1, 1], -1, 4),
        ([-1, 1], 1, 4),
        ([float("nan")], 1, 4),
        ([float("inf")], 1, 4),
        ([1, 1], 1, [4]),
    ],
)
def test_impossible_divisions_are_refused(weights, total, cap):
    with pytest.raises(ValueError, match="allowed|cannot be divided"):
        water_fill(weights, total, cap)
