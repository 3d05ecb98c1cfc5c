"""Promise: every layout is filled by the embedded model, and no number of a paper stands in such a file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mmkv_bench.cli.verbs.tables import STAND_INS
from mmkv_bench.errors import ConfigError
from mmkv_bench.papers import printed
from mmkv_bench.papers.evidence import Evidence
from mmkv_bench.papers.figure import PICTURES, pictures
from mmkv_bench.papers.judgement import FilledTable, fill
from mmkv_bench.papers.layout import FIGURES, load, parse, stand_in_ids, table_ids
from mmkv_bench.papers.table import render
from mmkv_bench.store.store import Store

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "tiny"
FOLDER = RESULTS / "papers"
OURS = re.compile(r"([A-Za-z]+ (in the lowest eighth |std |mean |within 1 |the top 20 % |5 % of the tokens )?)?"
                  r"-?\d+(\.\d+)?(e-?\d+)?( \[-?[\d.]+, -?[\d.]+\])?")  # fmt: skip
"""A measured number: that, its interval, the name of a line of a figure, and nothing besides."""


def page(name: str) -> FilledTable:
    spec = load(name)
    return fill(spec, Evidence.of([RESULTS / store for store in spec.stores], stand_in=True))


def test_every_layout_of_cells_has_one_stand_in():
    stood_for = [table for name in stand_in_ids() for table in load(name).stands_for]
    assert len(stood_for) == len({*stood_for})
    assert {*stood_for} == {*table_ids()}


def test_no_printed_number_can_be_joined_to_a_stand_in():
    with pytest.raises(ConfigError, match="so no paper prints its numbers"):
        printed.of_table("standin.benchmarks")
    told = {
        "caption": "made up",
        "kind": "accuracy",
        "rows": [{"method": "full"}],
        "columns": [{"model": "tiny", "dataset": "pages_walk_small", "metric": "exact_match"}],
    }
    with pytest.raises(ConfigError, match="only stand-in tables may use model tiny"):
        parse("mmshift_table99", told | {"paper": "mmshift", "number": "Table 99"})
    with pytest.raises(ConfigError, match="no key 'number'"):
        parse("standin.other", told | {"stands_for": ["mmshift_table01"], "stores": ["x"], "number": "Table 1"})
    assert {None} == {one.printed for one in fill(load("standin.benchmarks"), Evidence.of([])).cells}


def test_the_committed_stand_ins_hold_measured_numbers_alone_and_say_what_they_are():
    files = sorted(FOLDER.glob("*.md"))
    assert [file.stem for file in files] == [*stand_in_ids()]
    values = printed.load()
    for file in files:
        spec, text = load(file.stem), file.read_text(encoding="utf-8")
        assert text.startswith(f"**Stand-in ({spec.id})**: ") and "- a stand-in: the embedded model" in text
        assert "**" not in text.split("\n", 1)[1], "nothing is marked best"
        told = text.replace("measured [95%]", "", 1).splitlines()
        lines = [line for line in told if not line.startswith("- made with torch")]
        cells = [cell.strip() for line in lines if line.startswith("| ") for cell in line.strip("|").split("|")[1:]]
        numbers = [cell for cell in cells if OURS.fullmatch(re.split(" ?; ", cell)[0])]
        assert numbers and all(OURS.fullmatch(part) for cell in numbers for part in re.split(" ?; ", cell))
        rest = "\n".join([*(line for line in lines if not line.startswith("|")), *({*cells} - {*numbers})])
        theirs = values[values["id"].isin(spec.stands_for)]["value"]
        assert not [
            value for value in {*theirs} if re.search(rf"(?<![\w.]){re.escape(value or 'none')}(?![\w.])", rest)
        ]


def test_a_pictures_panels_all_say_what_they_are():
    assert {*PICTURES} == {*FIGURES}
    for spec in map(load, stand_in_ids()):
        assert {load(name).figure for name in spec.stands_for} == {spec.figure}
    (figure,) = pictures(page("standin.budget_curves")).values()
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert len(panels) == 2
    assert all("STAND-IN" in [text.get_text() for text in axes.texts] for axes in panels)
    full, random = (axes_lines(panels[0], label) for label in ("full", "random"))
    assert len({*full}) == 1, "full has no budget and is a level"
    assert len(random) == 4
    with pytest.raises(ConfigError, match="nothing to draw"):
        pictures(fill(load("standin.radar"), Evidence.of([])))
    with pytest.raises(ConfigError, match="is not a figure"):
        pictures(fill(load("standin.gains"), Evidence.of([])))


def test_an_analysis_is_drawn_from_the_rows_of_its_cells_and_every_committed_picture_says_what_it_is(tmp_path):
    """Another method in the same store is no line of it; SVG keeps the words as text."""
    drawn = pictures(page("standin.feature_errors"))
    ((name, figure),) = drawn.items()
    (panel,) = figure.axes
    labels = [line.get_label() for line in panel.lines]
    assert name == ".feature_error" and "STAND-IN" in [text.get_text() for text in panel.texts]
    assert labels == ["elastic_cache@50%", "h2o@50%", "local@50%", "prefixkv@50%"]
    told = dict(zip(labels, panel.lines, strict=True))
    rows = Store(RESULTS / "diagnostics").diagnostics().to_pandas()
    own = rows[(rows["name"] == "feature_error") & (rows["part"] == "h2o@50%")].groupby("layer")["value"].mean()
    assert list(told["h2o@50%"].get_ydata()) == pytest.approx(list(own))
    files = sorted(FOLDER.glob("*.svg"))
    assert not [*FOLDER.glob("*.png")] and len(files) >= 10
    asked = {name for name in stand_in_ids() if load(name).figure}
    assert {next(name for name in asked if file.name.startswith(f"{name}.")) for file in files} == asked
    for file in files:
        assert ">STAND-IN</text>" in file.read_text(encoding="utf-8"), file.name


def axes_lines(axes, label: str) -> list[float]:
    (line,) = [line for line in axes.lines if line.get_label() == label]
    return list(line.get_ydata())


def test_a_stand_in_is_no_paper_table_and_no_result_of_the_readme():
    assert not {*stand_in_ids()} & {*table_ids()}
    assert STAND_INS not in table_ids()
    assert "results/tiny/papers" not in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.full
def test_the_committed_stand_ins_are_what_the_command_makes():
    for name in stand_in_ids():
        made = page(name)
        assert render([made], "md") == Path(FOLDER / f"{name}.md").read_text(encoding="utf-8"), name
        assert {*made.states} == {"measured"}, f"{name} has cells without a number"
