"""Promise: asking for some lines and budgets changes what is shown and no verdict: bold, ranks and proof stay those of all."""

from __future__ import annotations

import pytest

from mmkv_bench.errors import ConfigError
from mmkv_bench.tables.build import build
from mmkv_bench.tables.compare import better, comparisons, select_lines, separated_pairs
from mmkv_bench.tables.formats import markdown as as_markdown
from mmkv_bench.tables.score_table import ScoreTable
from mmkv_bench.tables.score_text import tables_of_scores
from tests.tables.examples import Example, csv_cells, csv_pairs, latex, markdown

METHODS = ("snapkv", "keydiff", "mmshift", "streamingllm", "pyramidkv", "h2o")


def table() -> ScoreTable:
    """Nine of 60 samples tell keydiff and mmshift apart: enough for a pair alone, too few among fifteen."""
    made = Example()
    made.add("full", None, [1.0] * 60)
    for budget in (64, 128):
        for method in METHODS:
            values = [1.0] * 30 + [0.0] * 30
            if method == "mmshift":
                values = [1.0] * 38 + [0.0] * 22
            elif method == "h2o":
                values = [0.0] * 60
            made.add(method, budget, values)
    [whole] = build(made.rows())
    return whole


def test_what_is_asked_for_keeps_bold_ranks_and_proof_of_the_whole_table():
    whole = table()
    pairs = {(pair.budget, pair.a, pair.b): pair for pair in comparisons(whole)}
    for methods, budgets in ((["keydiff", "mmshift"], None), (["h2o", "full", "keydiff"], ["128"]), (None, ["64"])):
        [part] = select_lines([whole], methods, budgets)
        assert {line.label for line in part.methods} == set(methods or [*METHODS, "full"])
        assert list(part.budgets) == (budgets or ["64", "128"])
        for line in part.methods:
            for budget in part.budgets:
                assert part.rank(line.label, budget) == whole.rank(line.label, budget)
                assert (line.label in part.best(budget)) == (line.label in whole.best(budget))
                assert part.entry(line.label, budget) is whole.entry(line.label, budget)
        for one in comparisons(part):
            assert one.adjusted == pairs[one.budget, one.a, one.b].adjusted
        assert latex([part]) and csv_cells([part]).count("\n") == 1 + len(part.entries)
        assert csv_pairs([part]).count("\n") == 1 + len(comparisons(part))
    assert markdown([whole]) == markdown(select_lines([whole]))


def test_choosing_two_methods_buys_no_significance():
    [part] = select_lines([table()], ["keydiff", "mmshift"], ["64"])
    [one] = comparisons(part)
    assert one.p_requested == one.p <= 0.05 < one.adjusted
    assert better(one, one.p_requested, False) == "mmshift" and better(one, one.adjusted, False) == "undecided"
    said = as_markdown(tables_of_scores([part], compare=True))
    assert "1 comparisons here; the whole table has 15 at 64." in said
    assert "not in the whole table: keydiff and mmshift at 64." in said


def test_p_values_of_what_was_asked_for_are_holms_over_the_pairs_with_that_line():
    found = comparisons(select_lines([table()], ["keydiff", "h2o"], None, "mmshift")[0], "mmshift")
    assert [(one.budget, one.a, one.b) for one in found] == [
        (budget, "mmshift", other) for budget in ("64", "128") for other in ("h2o", "keydiff")
    ]
    for budget in ("64", "128"):
        own = sorted((one for one in found if one.budget == budget), key=lambda one: one.p)
        assert [one.p_requested for one in own] == [min(1, 2 * own[0].p), max(2 * own[0].p, own[1].p)]
        assert all(one.difference > 0 for one in own), "mmshift's score minus the other's"
    with_full = comparisons(select_lines([table()], ["full"], None, "mmshift")[0], "mmshift")
    assert {one.adjusted for one in with_full} == {None} and better(with_full[0], None, False) == "no rivals"


def test_separated_pairs_are_of_the_lines_that_were_asked_for():
    [part] = select_lines([table()], ["keydiff", "h2o"], ["64"], "mmshift")
    assert [{pair.a, pair.b} for pair in separated_pairs(part)] == [{"h2o", "keydiff"}, {"h2o", "mmshift"}]
    assert [{pair.a, pair.b} for pair in separated_pairs(part, "mmshift")] == [{"h2o", "mmshift"}]
    said = as_markdown(tables_of_scores([part], pairs=True, against="mmshift"))
    assert "Separated pairs of the compared methods: 1 of 2 at 64." in said and "snapkv" not in said


def test_what_no_row_holds_is_refused_with_the_nearest_name():
    for asked, words in (
        ((["snapkw"], None, None), "no method 'snapkw': did you mean 'snapkv'"),
        ((None, ["46"], None), "no budget '46'"),
        ((None, None, "mmshit"), "no method 'mmshit': did you mean 'mmshift'"),
    ):
        with pytest.raises(ConfigError, match=words):
            select_lines([table()], *asked)


def test_many_tables_have_their_contents_before_them():
    whole = table()
    assert markdown([whole] * 9).startswith("**walk3")
    assert markdown([whole] * 10).startswith("10 tables:\n\n1. walk3, exact_match: budget: entries kept per KV head;")
