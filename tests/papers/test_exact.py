"""Promise: whoever measures exactly what a paper prints gets the word `agrees` in every cell that is judged, and no sentence
fails; whoever measures no effect gets no sentence that states one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from mmkv_bench.papers import judgement
from mmkv_bench.papers.evidence import Evidence
from mmkv_bench.papers.layout import load, table_ids
from mmkv_bench.papers.margins import AGREES, NOT_COMPARABLE, UNINFORMATIVE
from mmkv_bench.papers.measurement import Measurement, State
from mmkv_bench.papers.non_score_metrics import has_numbers
from mmkv_bench.papers.printed import COMPARABLE, OPEN, RATIOS, of_table
from tools import reproducibility_page as summary


class Exact:
    """A reader whose every number is the printed one, with an interval of no width."""

    def __init__(self, table: str) -> None:
        tables = [name for name in table_ids() if load(name).paper == load(table).paper]
        every = [of_table(name).items() for name in (*tables, table)]
        self.values = {key: one.number for values in every for key, one in values if one.number is not None}

    def measure(self, address, parts=(), like=()):
        value = self.values.get(address.printed)
        return (
            Measurement(State.NOT_RUN)
            if value is None
            else Measurement(State.MEASURED, "", value, value, value, n=1, of=1)
        )


@cache
def exact(name: str) -> judgement.FilledTable:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judgement, "EvidenceReader", lambda evidence, wanted: Exact(name))
        return judgement.fill(load(name), Evidence.of([]))


def judged(one: judgement.FilledCell) -> bool:
    if one.printed is None or one.measured.value is None or not has_numbers(one.cell.address.metric):
        return False
    return one.printed.status in (COMPARABLE, OPEN) or (
        one.printed.status == RATIOS and one.cell.address.method.base != "full" and one.measured.value > 0
    )


@pytest.mark.slow
def test_every_judged_cell_of_every_table_agrees_with_itself():
    lost, wrong, words = 0, [], {COMPARABLE: Counter(), OPEN: Counter(), RATIOS: Counter()}
    for name in table_ids():
        for one in filter(judged, exact(name).cells):
            word = one.verdict.word if one.verdict else "no word"
            words[one.printed.status][word] += 1
            every = [word, *(verdict.word for verdict in one.words.values())]
            if one.printed.status == RATIOS and word == NOT_COMPARABLE:
                lost += 1
            elif {*every} - {AGREES, UNINFORMATIVE}:
                wrong.append(f"{name} {one.cell.address}: {one.verdict}")
            if one.drop is not None and one.drop.word not in (AGREES, UNINFORMATIVE):
                wrong.append(f"{name} {one.cell.address}: drop {one.drop}")
    assert not wrong, f"{len(wrong)}: {wrong[:20]}"
    assert lost == 2, "PrefixKV Table 3 prints OOM for full at batch 48: no ratio to it"


def test_every_sentence_holds_of_the_papers_own_numbers_and_no_effect_proves_none():
    pages = {name: exact(name) for name in {claim.table for claim in summary.claims()}}
    found = summary.tested(list(pages.values()))
    words = Counter(one.word for one in found)
    assert {*words} <= {summary.HOLDS, summary.NOT_TESTED, summary.AMBIGUOUS} and words[summary.HOLDS] >= 10
    effects = 0
    for one in found:
        cells = [summary.find(pages[one.claim.table], where) for where in one.claim.of]
        if one.word != summary.HOLDS or len(cells) < 2 or one.claim.how == "at most":
            continue
        effects += 1
        none = [replace(cells[0], measured=cells[1].measured), cells[1]]
        assert summary._tested(one.claim, none).word == summary.FAILS, one.claim.quote
    assert effects >= 8
