"""Promise: a measured number beside a printed one gets exactly one word, by rules that were fixed beforehand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv_bench.papers.layout import load, table_ids
from mmkv_bench.papers.margins import (
    AGREES,
    CONFIRMED,
    CONTRADICTED,
    DIFFERS,
    UNDECIDED,
    UNINFORMATIVE,
    Tolerance,
    _of_gap,
    _rival,
    drop,
    lead,
    level,
    margin,
    ratio_tolerance,
    seed_half_width,
    tolerance,
)
from mmkv_bench.papers.non_score_metrics import has_numbers
from mmkv_bench.papers.printed import COMPARABLE, OPEN, Printed, of_table
from tests import cover
from tests.each import each

numbers = st.floats(0.01, 200)
halves = st.sampled_from([0.5, 0.05, 0.005])
SHARE = Tolerance(0.05, 1.0)


@settings(max_examples=cover.examples(100), deadline=None)
@given(
    numbers, numbers, halves, st.floats(0, 5), st.floats(0, 5), st.booleans(), st.floats(0, 3),
)  # fmt: skip
def test_exactly_one_word(m, p, half, d, step, relative, seeds):
    """Against the rules written out one by one, each of which may say its word or nothing."""
    found = level(m, p, Tolerance(half, d, relative, step), seeds)
    gap = math.log(m) - math.log(p) if relative else m - p
    low, high, e = gap - half - seeds, gap + half + seeds, 1e-9
    blind = half + step > d + e
    inside, outside = -d - e <= low and high <= d + e, low > d + e or high < -d - e
    words = [UNINFORMATIVE] * blind + [AGREES] * (inside and not blind) + [DIFFERS] * (outside and not blind)
    words += [UNDECIDED] * (not inside and not outside and not blind)
    assert words == [found.word]


def test_the_interval_lies_wholly_inside_wholly_outside_or_neither():
    assert [level(m, 82.3, SHARE).word for m in (82.3, 83.25, 83.26, 83.35, 83.36)] == [
        AGREES, AGREES, UNDECIDED, UNDECIDED, DIFFERS
    ]  # fmt: skip
    assert level(82.3, 82.3, Tolerance(0.05, 0.04)).word == UNINFORMATIVE, "printed more coarsely than it may be off"
    assert level(20.0, 82.3, Tolerance(0.05, 1.0, step=1.56)).word == UNINFORMATIVE, "one of 64 answers turns the word"


def test_seeds_are_in_the_interval():
    """Student's t at 2 degrees of freedom, 4.303, for a difference of two means of three."""
    assert seed_half_width([70.0, 71.0, 72.0]) == pytest.approx(4.3027 * math.sqrt(2 / 3), rel=1e-4)
    assert seed_half_width([]) == seed_half_width([70.0]) == seed_half_width([70.0] * 3) == 0
    assert seed_half_width([5.0, 5.5], relative=True) == pytest.approx(12.706 * math.log(1.1) / math.sqrt(2), rel=1e-4)
    assert level(82.3, 82.3, SHARE, seed_half_width([82.2, 82.3, 82.4])).word == AGREES
    assert level(82.3, 82.3, SHARE, seed_half_width([81.0, 82.3, 83.6])).word == UNDECIDED
    assert level(90.0, 82.3, SHARE, seed_half_width([89.0, 90.0, 91.0])).word == DIFFERS


def test_perplexities_and_times_are_compared_as_ratios():
    limits = Tolerance(0.001, margin("mmvet_prefixkv", "ppl").margin, True)
    assert level(5.38, 5.28, limits).word == AGREES and level(5.40, 5.28, limits).word == DIFFERS
    assert level(5.28 * 0.985, 5.28, limits).word == AGREES and level(5.28 * 0.97, 5.28, limits).word == DIFFERS


def test_a_drop_to_full_allows_for_the_rounding_of_both_printed_numbers():
    both = Tolerance(0.1, 1.0)
    words = [drop((60.0, 90.0), (62.0, full), both).word for full in (92.9, 93.0, 93.11)]
    assert words == [AGREES, UNDECIDED, DIFFERS]


def test_a_margin_is_at_most_half_of_the_printed_gap_to_the_strongest_baseline():
    """MM-ShiftKV Table 1 at 64: DocVQA 81.6 over SnapKV's 75.6; MMMU 50.6 under 50.9; FAVOR's NSM has 64 questions."""
    held = {}
    for table in ("mmshift_table01", "mmshift_table03", "flashcache_table04"):
        values = of_table(table)
        for cell in load(table).cells:
            printed = values.get(cell.address.printed)
            if printed is not None and printed.number is not None:
                held[table, str(cell.address)] = tolerance(load(table), cell, printed)
    names = ("docvqa anls mmshift budget 64", "docvqa anls mmshift budget 512", "docvqa anls snapkv budget 512",
             "mmmu mmmu_acc mmshift budget 64")  # fmt: skip
    own = [held["mmshift_table01", f"qwen2_5_vl_7b {name}"] for name in names]
    assert [(round(one.margin, 3), one.rival, one.informative) for one in own] == [
        (1.0, "", True), (0.1, "snapkv", True), (0.1, "mmshift", True), (0.15, "expected_attention", False),
    ]  # fmt: skip
    free = held["mmshift_table01", "qwen2_5_vl_7b textvqa exact_match mmshift budget 256"]
    assert not own[0].full and free.full, "82.8 within .4 of the full cache's 83.0: dropping nothing would agree too"
    full = held["mmshift_table01", "qwen2_5_vl_7b mmmu mmmu_acc full"]
    assert (full.margin, full.rival, full.informative) == (1.0, "", True), "the gate of the others has its metric's"
    nsm = [one for (_, name), one in held.items() if " favor_acc_NSM " in name]
    assert len(nsm) == 13 and not any(one.informative for one in nsm) and nsm[0].step == 100 / 64
    ours = [one for (table, name), one in held.items() if table == "mmshift_table03" and " minus " in name]
    assert ours and all(one.margin <= 2 for one in ours) and {one.rival for one in ours} >= {"no effect"}


def test_no_baseline_and_no_effect_agrees_in_the_place_of_a_papers_own_number():
    """The strongest baseline's number where the method's is printed, 0 for a gain, the full cache's time for a method's."""
    judged = 0
    for spec in map(load, table_ids()):
        values = of_table(spec.id)
        for cell in spec.cells if any(one.status in (COMPARABLE, OPEN) for one in values.values()) else ():
            at, printed = cell.address, values.get(cell.address.printed)
            if printed is None or printed.number is None or not has_numbers(at.metric):
                continue
            if printed.status not in (COMPARABLE, OPEN) or not (spec.proposes(cell) or at.minus):
                continue
            held = tolerance(spec, cell, printed)
            _, gap = _rival(spec, cell, printed.number, held.relative)
            if gap is not None:
                judged += held.informative
                assert _of_gap(gap, held, 0.0).word in (DIFFERS, UNINFORMATIVE), str(at)
    assert judged > 200
    own, full = (Printed(str(number), number, 0.005, "", "", "", None) for number in (16.98, 29.26))
    ratio = ratio_tolerance(
        next(one for one in load("mmshift_table09").cells if one.address.metric == "total_s"), own, full
    )
    assert level(1.0, 16.98 / 29.26, ratio).word == DIFFERS and level(0.58, 16.98 / 29.26, ratio).word == AGREES


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


def test_a_gate_has_the_tolerance_of_its_metric():
    assert margin("mmvet_prefixkv", "ppl").gate == 0.1 and margin("docvqa", "anls").gate is None
    assert margin("MileBench T", "mean").scale == 100
    with pytest.raises(Exception, match=r"margins.yaml has no margin for 'anl'; did you mean 'anls'"):
        margin("docvqa", "anl")
