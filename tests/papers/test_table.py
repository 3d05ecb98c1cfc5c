"""Promise: a paper's table shows the full cache once, every word with a sign and a colour, and its numbers in a picture."""

from __future__ import annotations

import re

import pytest

from mmkv_bench.papers import margins
from mmkv_bench.papers.evidence import Evidence
from mmkv_bench.papers.figure import save_pictures
from mmkv_bench.papers.judgement import fill
from mmkv_bench.papers.layout import load
from mmkv_bench.papers.measurement import State
from mmkv_bench.papers.table import SAME, Reasons, render
from mmkv_bench.tables.table import VERDICTS
from tests.papers.forgeries import scored
from tools import reproducibility_page as summary


def test_every_word_has_a_sign_and_a_colour():
    words = {*margins.WORDS, margins.CONFIRMED, margins.CONTRADICTED, margins.NOT_COMPARABLE}
    words |= {summary.HOLDS, summary.FAILS, summary.UNDECIDED, summary.NOT_TESTED, summary.AMBIGUOUS}
    words |= {*State} - {State.MEASURED, State.COMPUTED, State.PLANNED, State.PART}
    assert words <= {*VERDICTS} and all(VERDICTS[word].sign and VERDICTS[word].colour for word in words)


def test_the_full_cache_stands_once_in_its_row_in_every_part_of_a_wide_table():
    table = fill(load("mmshift_table01"), Evidence.of([]))
    (row,) = [line for line in render([table], "md").splitlines() if line.startswith("| FullKV")]
    benchmarks, budgets = len(table.layout.columns), len(table.layout.across)
    assert row.count("not run") == benchmarks and row.count(SAME) == benchmarks * (budgets - 1)
    latex = render([table], "latex")
    rows = re.findall(r"^FullKV & (.*) \\\\$", latex, re.MULTILINE)
    spans = [int(span) for row in rows for span in re.findall(r"multicolumn\{(\d)\}", row)]
    assert (
        SAME not in latex and sum(spans) + sum(row.count("&") + 1 for row in rows) - len(spans) == benchmarks * budgets
    )
    assert latex.count(r"\begin{tabular}") + latex.count(r"\begin{longtable}") > 1 and r"\tiny" not in latex


@pytest.mark.slow
def test_measured_stands_against_printed_in_a_picture(tmp_path):
    layout, evidence = scored(tmp_path / "rows")
    files = save_pictures(fill(layout, evidence), tmp_path)
    assert [file.name for file in files] == ["hybridkv_table01.printed.png", "hybridkv_table01.printed.svg"]
    assert all(file.stat().st_size > 1000 for file in files)


def test_letters_of_reasons_never_run_out():
    reasons = Reasons()
    letters = [reasons.letter(str(n)) for n in range(30)]
    assert letters[:2] == ["a", "b"] and letters[25:28] == ["z", "aa", "ab"] and reasons.letter("1") == "b"
