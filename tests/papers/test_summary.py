"""Promise: docs/reproducibility.md is what the command makes; every sentence is tested by cells that exist."""

from __future__ import annotations

import pytest

from mmkv_bench.config.schema import conf_dir
from mmkv_bench.papers import claims
from mmkv_bench.papers.evidence import Evidence
from mmkv_bench.papers.filled_table import fill
from mmkv_bench.papers.layout import load, table_ids
from mmkv_bench.papers.summary import summary
from tests.each import each


@pytest.mark.full
def test_the_committed_page_is_what_the_command_makes():
    evidence = Evidence.of([])
    made = summary([fill(load(name), evidence) for name in table_ids()])
    assert (conf_dir().parent / "docs" / "reproducibility.md").read_text(encoding="utf-8") == made


def test_every_claim_is_of_cells_that_exist_and_states_a_printed_number():
    found = claims.claims()
    assert len(found) >= 20 and {claim.paper for claim in found} == {
        "mmshift",
        "prefixkv",
        "flashcache",
        "hybridkv",
        "meda",
    }
    pages = [fill(load(name), Evidence.of([])) for name in {claim.table for claim in found}]
    assert {one.word for one in claims.tested(pages)} == {claims.NOT_TESTED, claims.AMBIGUOUS}


@each(
    ("by", "how", "a", "b", "word"),
    [
        ("ratio", "about", 1.9, 1.0, claims.HOLDS),
        ("ratio", "about", 1.5, 1.0, claims.FAILS),
        ("ratio", "at least", 2.5, 1.0, claims.HOLDS),
        ("ratio", "at most", 2.5, 1.0, claims.FAILS),
        ("gain", "about", 101.9, 100.0, claims.HOLDS),
        ("reduction", "about", 98.1, 100.0, claims.HOLDS),
        ("gain", "at least", 101.0, 100.0, claims.FAILS),
    ],
)
def test_a_sentence_holds_by_its_own_operation(by, how, a, b, word):
    from dataclasses import replace

    from mmkv_bench.papers.measurement import MEASURED, NOT_RUN, PART, Measurement

    claim = claims.Claim("mmshift", "1.9", 1.9, 0.05, "mmshift_fig03", by, how, ())
    cells = [
        replace(one, measured=Measurement(MEASURED, value=value)) for one, value in zip(_two(), (a, b), strict=True)
    ]
    assert claims._tested(claim, cells).word == word
    part = [cells[0], replace(cells[1], measured=Measurement(PART, value=b))]
    assert claims._tested(claim, part).word == claims.UNDECIDED
    assert claims._tested(claim, [cells[0], replace(cells[1], measured=Measurement(NOT_RUN))]).word == claims.NOT_TESTED


def _two():
    return fill(load("mmshift_fig03"), Evidence.of([])).cells[:2]
