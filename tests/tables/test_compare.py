"""Competing lines of a column, its bold ones, and every pair of a table."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv_bench.config.files import content, options
from mmkv_bench.tables.build import build
from mmkv_bench.tables.compare import every_pair, separated_pairs
from mmkv_bench.tables.score_notes import OVER, PACKED, RETRIEVED
from mmkv_bench.tables.score_table import CONTROLS, PRESETS, Line, family
from tests.tables.examples import HEADS, PROMPT, Example, markdown, notes, zeros_and_ones


def line(
    name: str, base: str | None = None, tuned: bool = False, reading: str = "paper", parameters: str = "{}"
) -> Line:
    label = name if reading == "paper" else f"{name} (released)"
    return Line(label, name, base or name, tuned, None if base in CONTROLS else reading, parameters, True)


def rivals(*lines: Line) -> list[str]:
    return [method.label for method in family(lines).competitors]


def test_controls_and_second_presets_do_not_compete():
    found = family(
        [
            line("full"),
            line("blind"),
            line("oracle", parameters='{"reads_answer": true}'),
            line("random"),
            line("random_sinks", "random", tuned=True),
            line("adakv"),
            line("adakv_official"),
            line("snapkv"),
            line("snapkv_kvpress"),
            line("snapkv", reading="released"),
            line("h2o"),
        ]
    )
    assert [method.label for method in found.competitors] == ["random", "adakv", "snapkv", "h2o"]
    assert found.presets == {
        "random_sinks": "random",
        "adakv_official": "adakv",
        "snapkv_kvpress": "snapkv",
        "snapkv (released)": "snapkv",
    }
    assert found.method == ""


def test_presets_compete_where_the_predeclared_one_is_not_there_and_among_themselves():
    assert rivals(line("snapkv_kvpress"), line("h2o"), line("keydiff")) == ["snapkv_kvpress", "h2o", "keydiff"]
    ablation = [line("mmshift"), *(line(f"t{i}", "mmshift", tuned=True) for i in range(3)), line("last_query")]
    found = family(ablation)
    assert found.competitors == tuple(ablation) and (found.method, found.presets) == ("mmshift", {})
    assert rivals(*ablation[:3], line("h2o")) == ["mmshift", "h2o"]


def test_every_press_and_every_file_of_ones_own_is_a_method():
    presses = [line(f"p{i}", "kvpress", True, parameters=f'{{"press": "P{i}"}}') for i in (1, 2)]
    again = line("p1_sinks", "kvpress", True, parameters='{"press": "P1", "sinks": 4}')
    own = [line(name, "custom", True, parameters=f'{{"path": "{name}.py"}}') for name in "ab"]
    assert rivals(*presses, *own, line("snapkv")) == ["p1", "p2", "a", "b", "snapkv"]
    assert family([*presses, again, *own]).method == ""


def test_what_counts_as_a_preset_has_the_parts_of_its_method():
    """Another file of conf/method with the same parts and other constants than a method of the same paper."""

    def parts(name: str) -> list[str]:
        node = content("method", name)
        return sorted(part["_target_"] for part in node.values() if isinstance(part, dict) and "_target_" in part)

    for preset, of in PRESETS.items():
        assert parts(preset) == parts(of)
    assert {*PRESETS, *PRESETS.values(), *CONTROLS} <= set(options("method"))


def scored(example: Example, budgets: dict[int, dict[str, int]], n: int = 100) -> None:
    for budget, methods in budgets.items():
        for method, right in methods.items():
            example.add(method, budget, zeros_and_ones(right, n))


@settings(max_examples=5, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([16, 32, 128, 256]),
        st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), st.integers(0, 100), min_size=1),
        min_size=1,
    ),
    st.booleans(),
)
def test_what_is_said_at_one_budget_does_not_depend_on_the_others(others, failed):
    """Neither which other budgets are in the folder, nor what fails there, changes bold, ranks or pairs at 64."""
    own = {"a": 80, "b": 75, "c": 30, "d": 24}
    alone, among = Example(), Example()
    scored(alone, {64: own})
    scored(among, {64: own} | others)
    if failed:
        among.add("e", 512, [None, 1.0])
    (small,), (large,) = build(alone.rows()), build(among.rows())
    assert small.best("64") == large.best("64") == ("a", "b")
    assert [small.rank(name, "64") for name in "abcd"] == [large.rank(name, "64") for name in "abcd"]
    assert every_pair(small) == [pair for pair in every_pair(large) if pair.budget == "64"]


def test_bold_is_told_with_what_it_promises_and_who_does_not_compete():
    example = Example()
    example.add("full", None, zeros_and_ones(100, 100))
    scored(example, {64: {"adakv": 80, "adakv_official": 99, "blind": 100, "h2o": 20}, 32: {"adakv": 3, "h2o": 4}})
    (table,) = build(example.rows())
    assert table.best("64") == ("adakv",) and table.best("32") == ()
    told = "\n".join(notes(table))
    assert "The best method is among them with 95% confidence." in told and "no proof of being worse" in told
    assert "corrected for m = 2)" in told and "No bold at 32: no method is proven better than another." in told
    assert "Shown but not compared: blind (control); presets of adakv." in told and "adakv_official (of adakv)." in told
    text = markdown([table])
    assert "| adakv  | 1   |\n| h2o    | 2   |" in text and "**0.99**" not in text
    line = next(row for row in text.splitlines() if row.startswith("| adakv_official"))
    assert line.count("∥") == 1 and "0.99 [0.95, 1.00] ∥" in line  # at 32 there is no bold to be above
    assert "∥ = better than a bold cell, but a preset is not compared" in told and "∥ adakv_official." in told


def test_cells_with_more_entries_or_fewer_bytes_than_their_budget_are_told_as_not_compared():
    stored = {"bytes_full": 1_000_000, "bytes_device": 64 * 1_000_000 // PROMPT, "entries_reachable": 64 * HEADS}
    kinds = {
        OVER: {"entries_resident": 65 * HEADS},
        PACKED: stored | {"bytes_device": 50_000},
        RETRIEVED: stored | {"entries_reachable": PROMPT * HEADS},
    }
    for signs in ([OVER], [PACKED], [RETRIEVED], [*kinds]):
        example = Example()
        scored(example, {64: {"adakv": 80, "h2o": 20}})
        for number, sign in enumerate(signs):
            example.add(f"other{number}", 64, zeros_and_ones(99, 100), answer=kinds[sign])
        (table,) = build(example.rows())
        assert table.best("64") == ("adakv",)
        assert f"Shown but not compared: cells marked {' '.join(signs)}." in notes(table)


def test_a_table_without_any_bold_says_why_and_what_it_could_have_separated():
    example = Example()
    scored(example, {64: {"adakv": 50, "h2o": 52}})
    told = "\n".join(notes(build(example.rows())[0]))
    assert "No bold at 64: no method is proven better than another." in told and "Bold:" not in told
    assert "Smallest difference that could be detected: none at 64." in told and "Shown but not compared" not in told
    few = Example()
    for name, right in (("adakv", 9), ("h2o", 0)):
        few.add(name, 64, zeros_and_ones(right, 9))
    told = "\n".join(notes(build(few.rows())[0]))
    assert "Not decidable at 64: one document, image or video holds more than 10% of the samples. A test needs" in told


def test_all_lines_of_an_ablation_compete_and_the_table_says_so():
    example = Example()
    for name, right, tuned in (("mmshift", 90, False), ("t1", 88, True), ("t2", 20, True)):
        example.add(name, 64, zeros_and_ones(right, 100), base="mmshift", tuned=tuned, parameters={"gamma": name})
    (table,) = build(example.rows())
    assert table.best("64") == ("mmshift", "t1") and table.rank("t2", "64") == (3, 3)
    assert "All lines are compared, because nearly all are presets of mmshift." in notes(table)


def test_a_failed_cell_leaves_its_own_budget_without_bold_only():
    example = Example()
    scored(example, {64: {"a": 80, "b": 10}, 128: {"a": 80}})
    example.add("b", 128, [None, *zeros_and_ones(10, 99)])
    (table,) = build(example.rows())
    assert table.best("64") == ("a",) and table.best("128") == ()
    told = "No bold at 128: the cells that are compared are not ok on the same samples."
    assert told in notes(table)


def test_pairs_of_those_that_compete_are_corrected_together_and_others_stand_by_themselves():
    example = Example()
    example.add("full", None, zeros_and_ones(100, 100))
    scored(example, {64: {"snapkv": 60, "snapkv_kvpress": 95, "keydiff": 20, "h2o": 58}})
    (table,) = build(example.rows())
    pairs = {(pair.a, pair.b): pair for pair in every_pair(table)}
    assert len(pairs) == 10
    inner = [pair for pair in pairs.values() if pair.compete]
    assert {frozenset((pair.a, pair.b)) for pair in inner} == {
        frozenset(names) for names in (("snapkv", "keydiff"), ("snapkv", "h2o"), ("keydiff", "h2o"))
    }
    assert [pair for pair in inner if pair.better] == separated_pairs(table)
    for pair in inner:
        assert (pair.better is not None) == (pair.p <= pair.level) == (pair.low > 0 or pair.high < 0)
    other = pairs["full", "snapkv_kvpress"]
    assert (other.adjusted, other.level, other.better, other.test) == (None, None, None, "paired")
    assert (other.low > 0) == (other.p <= 0.05) and other.difference == pytest.approx(0.05)


def test_where_a_difference_rests_on_few_clusters_nothing_is_claimed():
    example = Example()
    for method, right in (("a", 90), ("b", 5)):
        cell = example.add(method, 64, zeros_and_ones(right, 90))
        for i, row in enumerate(row for row in example.samples if row["cell"] == cell):
            row["cluster"] = f"page-{i // 10}"
    (table,) = build(example.rows())
    (pair,) = every_pair(table)
    assert (pair.p, pair.low, pair.high, pair.test, pair.better) == (1.0, None, None, "none", None)
    assert table.best("64") == () and np.isfinite(pair.difference)
