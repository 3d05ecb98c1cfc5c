"""Promise: LaTeX of tables compiles: every mark, every character of their words, and as many of them as there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmkv_bench.papers.evidence import Evidence
from mmkv_bench.papers.judgement import fill
from mmkv_bench.papers.layout import load
from mmkv_bench.papers.table import render
from mmkv_bench.tables import score_notes
from mmkv_bench.tables.latex import PACKAGES, escape, latex
from mmkv_bench.tables.table import Grid, GridCell, Note, Table
from tests.cli.setting import verb
from tests.latex import compiled

TINY = Path(__file__).resolve().parents[2] / "results" / "tiny"
MARKS = (*(score_notes.OVER, score_notes.PREFILL, score_notes.BEFORE_CUT, score_notes.PACKED, score_notes.RETRIEVED),)


def test_long_headers_of_narrow_columns_are_broken_before_a_page_is_turned():
    header = ["method", *(f"pages_handwritten_{name}, exact_match" for name in ("large", "small", "other")), "mean"]
    text = latex([Table("Ranks", "", [Grid(header, [["snapkv", "1-3", "2", "4-25", "2.0"]])])])
    assert "landscape" not in text and r"\shortstack{pages\_" in text


@pytest.mark.full
def test_marks_special_characters_and_many_tables_compile(tmp_path):
    words = escape("".join(MARKS) + r" \ { } _ % & # $ ^ ~ < > [0.1, 0.2]")
    assert words.isascii()
    cell = GridCell(
        "0.1", 0.1, "[0.1, 0.2]", MARKS, bold=True, verdict="agrees", further=(GridCell("0.2", verdict="differs"),)
    )
    one = Table("".join(MARKS), r"\ { } _ % & # $ ^ ~ < >", [Grid(["", "<"], [["%", cell]], groups=["$"])], [Note("^")])
    compiled(latex([one] * 40), tmp_path)
    paper = fill(load("mmshift_table01"), Evidence.of([]))
    said = compiled(render([paper, fill(load("prefixkv_table13"), Evidence.of([]))], "latex"), tmp_path)
    assert "Overfull \\hbox" not in said, "a wide table is made to fit"


@pytest.mark.full
def test_two_tasks_by_four_budgets_by_eight_methods_need_booktabs_alone_and_no_box_is_overfull(tmp_path, capsys):
    names = [f"--name={line}=Our_{line} & {number}% \\x" for number, line in enumerate(("mmshift", "snapkv"))]
    for number, words in enumerate(([], ["--no-interval", "--notes", "all"], ["--no-interval", "--notes", "none"])):
        assert verb("tables")([str(TINY / "large"), "--join", "--format", "latex", *words, *names]) == 0
        text = capsys.readouterr().out
        alone = words[2:] == ["none"]
        said = compiled(text, tmp_path, ["booktabs"] if alone else PACKAGES)
        assert (text.splitlines()[0] == "% needs booktabs") >= alone and text.count(r"\multicolumn{4}{c}{") >= 2, number
        assert "Overfull \\hbox" not in said and "Float too large" not in said


@pytest.mark.full
@pytest.mark.parametrize("which", ["all", "standins"])
def test_every_table_of_the_papers_compiles(which, tmp_path, capsys):
    assert verb("papers")([which, "--format", "latex"]) == 0
    said = compiled(capsys.readouterr().out, tmp_path)
    assert "Overfull \\hbox" not in said and "Float too large" not in said


@pytest.mark.full
@pytest.mark.parametrize(
    "rows", [["methods"], ["ablations", "--pairs"], ["efficiency", "--metric", "tpot_s,peak"]], ids=str
)
def test_every_committed_table_compiles(rows, tmp_path, capsys):
    assert verb("tables")([str(TINY / rows[0]), *rows[1:], "--format", "latex"]) == 0
    compiled(capsys.readouterr().out, tmp_path)
