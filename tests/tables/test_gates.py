"""The full-cache gate, fixture data and random weights in tables."""

from __future__ import annotations

import json

import pytest

from mmkv_bench.errors import ConfigError
from mmkv_bench.tables.build import build
from mmkv_bench.tables.comparable_cells import find, verdict
from tests.each import each
from tests.tables.examples import Example, notes, zeros_and_ones

PRINTED = {
    "dataset": "walk3",
    "metric": "exact_match",
    "expected": 75.0,
    "tolerance": 1.0,
    "scale": 100,
    "source": "table 1",
}

ONE = {"datasets": {"walk3": {"metrics": ["exact_match", "ppl"]}}}


def gated(full: list[float | None], config: dict) -> list[str]:
    """Notes of a table of `full` and snapkv, whose rows ran under this configuration."""
    example = Example()
    example.add("full", None, full, config=json.dumps(config))
    example.add("snapkv", 64, [0.0 if value is not None else None for value in full], config=json.dumps(config))
    (table,) = build(example.rows())
    return [note for note in notes(table) if note.startswith("Full-cache gate")]


@each(("ones", "word"), [(74, "passed"), (75, "passed"), (76, "passed"), (73, "failed"), (77, "failed"), (0, "failed")])
def test_full_passes_within_the_printed_tolerance_in_the_printed_unit(ones: int, word: str) -> None:
    (note,) = gated(zeros_and_ones(ones, 100), {"model": {"gates": [PRINTED]}})
    assert note.startswith(
        f"Full-cache gate {word}: full scores {ones}, expected 75 +- 1 (table 1); n=100, transformers 5.23"
    )


def test_a_failed_sample_leaves_the_gate_not_run() -> None:
    (note,) = gated([1.0, 1.0, 1.0, None], {"model": {"gates": [PRINTED]}})
    assert note.startswith("Full-cache gate not run: full has no score here")


def test_a_dataset_that_no_paper_prints_is_not_run() -> None:
    (note,) = gated([1.0], {"model": {"gates": [PRINTED | {"dataset": "docvqa"}]}})
    assert note.startswith("Full-cache gate not run: no paper prints a full-cache score")


def test_what_nobody_expects_is_not_mentioned() -> None:
    assert gated([1.0], {"model": {"gates": None}, "gate": {"expected": None, "tolerance": None}}) == []
    assert gated([1.0], {}) == []


def test_a_gate_of_the_run_goes_before_the_models_and_is_in_the_tables_own_unit() -> None:
    config = {"model": {"gates": [PRINTED]}, "gate": {"expected": 0.5, "tolerance": None}, **ONE}
    (note,) = gated([1.0, 0.0], config)
    assert note.startswith("Full-cache gate passed: full scores 0.5, expected 0.5 +- 0.01 (gate.expected)")
    assert find(json.dumps(config), "walk3", "exact_match").tolerance == pytest.approx(0.01)  # 1.0 of 100
    alone = find(json.dumps({"gate": {"expected": 0.5, "tolerance": 0.2}, **ONE}), "walk3", "exact_match")
    assert (alone.passes(0.7), alone.passes(0.3), alone.passes(0.71)) == (True, True, False)


def test_a_gate_of_the_run_is_of_the_first_metric_of_its_one_dataset_alone() -> None:
    asked = {"gate": {"expected": 0.5, "tolerance": None}}
    one, two = (
        json.dumps(asked | ONE),
        json.dumps(asked | {"datasets": ONE["datasets"] | {"docvqa": {"metrics": ["anls"]}}}),
    )
    assert find(one, "walk3", "exact_match").expected == 0.5
    others = [
        (one, "walk3", "ppl"),
        (one, "docvqa", "exact_match"),
        (two, "walk3", "exact_match"),
        (two, "docvqa", "anls"),
    ]
    assert [find(*other) for other in others] == [None] * 4
    printed = json.dumps(asked | ONE | {"model": {"gates": [PRINTED | {"metric": "ppl"}]}})
    assert find(printed, "walk3", "ppl").source == "table 1"


def test_fixture_data_have_no_gate() -> None:
    datasets = {"docvqa_fixture": {"metrics": ["anls"]}}
    gates = [PRINTED | {"dataset": "docvqa_fixture", "metric": "anls"}]
    config = {"gate": {"expected": 0.5}, "datasets": datasets, "model": {"gates": gates}}
    assert find(json.dumps(config), "docvqa_fixture", "anls") is None


def test_a_tolerance_of_the_run_replaces_the_models() -> None:
    config = json.dumps({"model": {"gates": [PRINTED]}, "gate": {"expected": None, "tolerance": 0.1}})
    assert find(config, "walk3", "exact_match").passes(0.65)
    assert "passed" in verdict(find(config, "walk3", "exact_match"), 0.65, 5, "5.23.0")


def test_random_weights_have_no_table_of_scores() -> None:
    example = Example()
    example.add("full", None, [1.0, 0.0])
    example.add("snapkv", 64, [1.0, 0.0])
    rows = example.rows()
    rows.cells["weights"] = "random"
    with pytest.raises(ConfigError, match="come from random weights"):
        build(rows)


def test_random_weights_beside_trained_ones_are_left_out() -> None:
    example = Example()
    example.add("full", None, [1.0, 0.0])
    example.add("snapkv", 64, [1.0, 0.0])
    rows = example.rows()
    rows.cells["weights"] = [None, "random"]
    (table,) = build(rows)
    assert [method.name for method in table.methods] == ["full"]


def test_fixture_data_are_told() -> None:
    example = Example()
    example.add("full", None, [1.0], dataset="docvqa_fixture")
    (table,) = build(example.rows())
    assert notes(table)[0].startswith("Fixture data")
