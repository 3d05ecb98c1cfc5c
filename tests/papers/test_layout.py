"""Promise: every table and figure of the papers is laid out whole, and each printed value stands in exactly one of its cells."""

from __future__ import annotations

import copy

import pytest

from mmkv_bench.cli.grammar import VERBS
from mmkv_bench.errors import ConfigError
from mmkv_bench.papers import printed
from mmkv_bench.papers.address import MEAN, is_group
from mmkv_bench.papers.layout import PAPERS, load, parse, table_ids
from mmkv_bench.papers.margins import margin
from mmkv_bench.papers.non_score_metrics import DIAGNOSTICS, has_numbers
from tests.each import each


def test_every_table_and_figure_is_there():
    found = table_ids()
    assert len(found) == 77
    rows = printed.load()
    assert {*rows[rows["status"] != printed.CLAIM]["id"]} == {name for name in found if "_table" in name}
    assert {load(name).title for name in found if name.endswith("table01")} == {f"{p} Table 1" for p in PAPERS.values()}


def test_every_printed_value_joins_one_cell_and_no_cell_of_a_table_is_without():
    """Each file loads, so each of its addresses is complete and without contradiction."""
    joined = 0
    for name in table_ids():
        cells = [cell.address.printed for cell in load(name).cells]
        assert len({*cells}) == len(cells), f"{name} has an address twice"
        values = printed.of_table(name)
        assert not values or {*cells} == {*values}, name
        joined += sum(value.value != "" for value in values.values())
    assert joined == 2418


def test_what_a_printed_number_may_differ_by_is_fixed_for_every_cell():
    for name in table_ids():
        for cell in load(name).cells:
            for one in (cell.address, *cell.needed_addresses):
                assert not has_numbers(one.metric) or margin(one.dataset, one.metric).scale in (1, 100)
            assert (cell.address.metric == MEAN) == bool(cell.parts)
            assert (
                not is_group(cell.address.dataset)
                or len(cell.parts) > 1
                or cell.address.dataset.endswith(("IR", "S-5"))
            )


def test_an_analysis_names_a_diagnostic_that_there_is():
    analyses = {*VERBS["diagnose"]["arguments"]["name"]["choices"]}
    assert {one.name for one in DIAGNOSTICS.values()} == analyses - {"sinks", "vision"}  # which no paper's table has


TABLE = {
    "paper": "meda",
    "number": "Table 0",
    "caption": "made up",
    "kind": "accuracy",
    "cell": {"model": "llava_video_7b"},
    "rows": [
        {"method": "full"},
        {"method": "meda", "readings": {"released": {"reading": "released"}}},
        {"method": "h2o"},
    ],
    "columns": [
        {"dataset": "docvqa", "metric": "anls"},
        {"dataset": "mmmu", "metric": "mmmu_acc"},
        {"label": "Avg", "mean": "all"},
    ],
    "across": [{"budget": 0.1}, {"budget": 0.2}],
    "readings": {"no merge": {"only": {"method": "meda"}, "with": {"merge": "none"}}},
}


def test_rows_columns_and_across_add_up_to_cells():
    made = parse("made_up", TABLE)
    assert [cell.across for cell in made.cells if cell.row == 0] == [None] * 3, "full takes no budget and spans them"
    assert len(made.cells) == 3 + 2 * 6
    mean = made.cells[-1]
    assert mean.address.dataset == "avg" and [part.dataset for part in mean.parts] == ["docvqa", "mmmu"]
    assert {part.budget for part in mean.parts} == {"0.2"}
    meda = [cell for cell in made.cells if cell.row == 1]
    assert all([*cell.readings] == ["released"] for cell in meda), "a row's readings stand in the place of the table's"
    other, parts = meda[-1].readings["released"]
    assert other.reading == "released" and {part.reading for part in parts} == {"released"}
    assert not any(cell.readings for cell in made.cells if cell.row == 2)
    assert made.proposes(meda[0]) and not made.proposes(mean)


@each(
    ("key", "value", "said"),
    [
        ("papr", 1, "no key 'papr'; did you mean 'paper'"),
        ("number", None, "the key number is missing or empty"),
        ("kind", "acuracy", "did you mean 'accuracy'"),
        ("cell", {"model": "llava_video"}, "row 'full', column 'docvqa': unknown model"),
        ("cell", {}, "an address needs model"),
        ("cell", {"model": "llava_video_7b", "dataset": "vstar"}, "two parts give dataset different values"),
        ("rows", [{"method": "medda"}], "unknown method 'medda'"),
        ("rows", [{"metod": "meda"}], "an item of rows has no key 'metod'"),
        ("rows", "meda", "rows is not a list"),
        ("rows", [{"method": "meda", "mean": "all"}], "which only columns may have"),
        ("across", None, "an address needs a budget"),
        ("columns", [{"label": "Avg", "mean": ["docvq"], "dataset": "avg", "metric": "mean"}], "mean of 'docvq': "),
        ("columns", [{"group": "MileBench X"}], "metric=mean needs the key `mean` or `group`"),
    ],
)
def test_a_wrong_file_is_one_sentence(key: str, value: object, said: str) -> None:
    told = copy.deepcopy(TABLE) | {key: value}
    with pytest.raises(ConfigError) as error:
        parse("made_up", told)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_an_unknown_table_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'mmshift_table01'"):
        load("mmshift_tabel01")
