"""Promise: docs/reproducibility.md is what `make papers` makes; every sentence is tested by cells that exist."""

from __future__ import annotations

import pytest

from mmkv_bench.papers.evidence import Evidence
from mmkv_bench.papers.judgement import fill
from mmkv_bench.papers.layout import load, table_ids
from tests.each import each
from tools import reproducibility_page as summary


@pytest.mark.full
def test_the_committed_page_is_what_its_tool_makes():
    evidence = Evidence.of([])
    made = summary.summary([fill(load(name), evidence) for name in table_ids()])
    assert summary.PAGE.read_text(encoding="utf-8") == made


@pytest.mark.slow
def test_every_claim_is_of_cells_that_exist_and_states_a_printed_number():
    found = summary.claims()
    assert len(found) >= 20 and {claim.paper for claim in found} == {
        "mmshift",
        "prefixkv",
        "flashcache",
        "hybridkv",
        "meda",
    }
    pages = [fill(load(name), Evidence.of([])) for name in {claim.table for claim in found}]
    assert {one.word for one in summary.tested(pages)} == {summary.NOT_TESTED, summary.AMBIGUOUS}


@each(
    ("by", "how", "a", "b", "word"),
    [
        ("ratio", "about", 1.9, 1.0, summary.HOLDS),
        ("ratio", "about", 1.5, 1.0, summary.FAILS),
        ("ratio", "at least", 2.5, 1.0, summary.HOLDS),
        ("ratio", "at most", 2.5, 1.0, summary.FAILS),
        ("gain", "about", 101.9, 100.0, summary.HOLDS),
        ("reduction", "about", 98.1, 100.0, summary.HOLDS),
        ("gain", "at least", 101.0, 100.0, summary.FAILS),
    ],
)
def test_a_sentence_holds_by_its_own_operation(by, how, a, b, word):
    from dataclasses import replace

    from mmkv_bench.papers.measurement import Measurement, State

    claim = summary.Claim("mmshift", "1.9", 1.9, 0.05, "mmshift_fig03", by, how, ())
    cells = [
        replace(one, measured=Measurement(State.MEASURED, value=value))
        for one, value in zip(_two(), (a, b), strict=True)
    ]
    assert summary._tested(claim, cells).word == word
    part = [cells[0], replace(cells[1], measured=Measurement(State.PART, value=b))]
    assert summary._tested(claim, part).word == summary.UNDECIDED
    assert (
        summary._tested(claim, [cells[0], replace(cells[1], measured=Measurement(State.NOT_RUN))]).word
        == summary.NOT_TESTED
    )


def _two():
    return fill(load("mmshift_fig03"), Evidence.of([])).cells[:2]
