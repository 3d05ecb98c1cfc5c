"""Promise: a measured number beside a printed one gets exactly one word, by rules that were fixed beforehand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv_bench.papers.measures import margin
from mmkv_bench.papers.verdict import (
    AGREES,
    CONFIRMED,
    CONTRADICTED,
    DIFFERS,
    NOT_COMPARABLE,
    UNDECIDED,
    Limits,
    Verdict,
    drop,
    lead,
    level,
    of_readings,
)
from tests.each import each

numbers = st.floats(0.01, 200)
halves = st.sampled_from([0.5, 0.05, 0.005])
SHARE = Limits(0.05, 1.0)


@settings(max_examples=100, deadline=None)
@given(
    numbers, numbers, halves, st.floats(0, 5), st.floats(0, 1), st.booleans(), st.booleans(),
    st.floats(0, 40), st.floats(0, 40), st.integers(1, 5000), st.integers(1, 5000) | st.none(),
)  # fmt: skip
def test_exactly_one_word(m, p, half, d, v, relative, same, below, above, n, n_paper):
    """Against the rules written out one by one, each of which may say its word or nothing."""
    limits = Limits(half, d, v, relative)
    ends = (max(m - below, 1e-6), m + above)
    found = level(m, p, limits, same_items=same, interval=ends, n=n, n_paper=n_paper)
    scale = math.log if relative else float
    r = math.log((p + half) / p) if relative else half
    gap, words = scale(m) - scale(p), []
    if same:
        words += [AGREES] * (abs(gap) <= r + d + v + 1e-9) + [DIFFERS] * (abs(gap) > r + d + v + 1e-9)
    elif n_paper is None:
        words.append(UNDECIDED)
    else:
        wide = math.sqrt(1 + n / n_paper)
        low, high = (gap + wide * (scale(end) - scale(m)) for end in ends)
        inside, outside = -(r + d) <= low and high <= r + d, low > r + d or high < -(r + d)
        words += [AGREES] * inside + [DIFFERS] * outside + [UNDECIDED] * (not inside and not outside)
    assert words == [found.word]
    assert found.needed is None or (found.word == UNDECIDED and found.needed > n)


def test_an_exact_reproduction_agrees_whatever_our_sampling_interval_is():
    assert level(82.3, 82.3, SHARE, interval=(79.8, 84.5), n=1000, n_paper=1000).word == AGREES
    assert level(83.35, 82.3, SHARE).word == AGREES and level(83.36, 82.3, SHARE).word == DIFFERS
    assert level(83.36, 82.3, Limits(0.05, 1.0, 0.1)).word == AGREES, "what a rerun differs by is no difference"


def test_another_draw_says_how_many_samples_would_decide():
    few = level(70.0, 70.0, SHARE, same_items=False, interval=(60.0, 80.0), n=100, n_paper=10_000)
    assert few.word == UNDECIDED
    width = 10.0 * math.sqrt(1.01)
    assert few.needed == math.ceil(100 * (width / 1.05) ** 2)
    half = 10.0 * math.sqrt(100 / few.needed) * math.sqrt(1.01)
    assert half <= 1.05 + 1e-9, "with so many the interval lies inside"
    assert level(70.0, 71.05, SHARE, same_items=False, interval=(69, 71), n=9, n_paper=9).needed is None, "none would"
    assert level(50.0, 70.0, SHARE, same_items=False, interval=(45.0, 55.0), n=100, n_paper=10_000).word == DIFFERS


def test_perplexities_and_times_are_compared_as_ratios():
    found = margin("mmvet_prefixkv", "ppl")
    limits = Limits(0.005, found.margin, found.spread, found.relative)
    assert level(5.38, 5.28, limits).word == AGREES and level(5.42, 5.28, limits).word == DIFFERS
    assert level(5.28 * 0.985, 5.28, limits).word == AGREES and level(5.28 * 0.97, 5.28, limits).word == DIFFERS


def test_a_drop_to_full_allows_for_the_rounding_of_both_printed_numbers():
    assert drop((60.0, 90.0), (62.0, 93.09), (0.05, 0.05), SHARE).word == AGREES
    assert drop((60.0, 90.0), (62.0, 93.11), (0.05, 0.05), SHARE).word == DIFFERS


@each(
    ("low", "high", "word"),
    [
        (0.1, 2.0, CONFIRMED),
        (-2.0, -0.1, CONTRADICTED),
        (-1.0, 1.0, UNDECIDED),
        (0.0, 1.0, UNDECIDED),
        (None, None, UNDECIDED),
    ],
)
def test_a_lead_is_confirmed_only_where_our_interval_excludes_none(low, high, word):
    assert lead(low, high).word == word


def test_open_settings_differ_only_if_every_declared_reading_does():
    a, d, u = Verdict(AGREES), Verdict(DIFFERS), Verdict(UNDECIDED, needed=5)
    none = Verdict(NOT_COMPARABLE, why="max_new_tokens 8, the table has 64")

    def of(*verdicts):
        return of_readings(dict(zip(("", "per head", "released"), verdicts, strict=False)))

    assert of(d, d).word == DIFFERS and of(d, a).word == AGREES
    assert of(d, u) == u and of(u, a).word == AGREES and of(d) == d
    assert str(of(d, d, None)) == "undecided: differs as read here; not judged as released"
    assert of(d, none, d).word == UNDECIDED and of(d, None, a).word == AGREES
    assert of(None, d) is None and of(none, a) == none


def test_a_gate_has_the_tolerance_of_its_metric():
    assert margin("mmvet_prefixkv", "ppl").tolerance == 0.1 and margin("docvqa", "anls").tolerance == 1.0
    assert margin("MileBench T", "mean").scale == 100
    with pytest.raises(Exception, match=r"margins.yaml fixes nothing for 'anl'; did you mean 'anls'"):
        margin("docvqa", "anl")
