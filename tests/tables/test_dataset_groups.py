"""Means over the datasets of a group: when there is one, what it is, its interval, its difference to full."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from mmkv_bench.errors import ConfigError, StoreError
from mmkv_bench.statistics.intervals import wilson
from mmkv_bench.tables.build import build
from mmkv_bench.tables.dataset_groups import (
    DatasetGroup,
    GroupTable,
    Mean,
    group_tables,
    groups_of,
    mean,
    tables_of_groups,
)
from mmkv_bench.tables.formats import markdown as as_markdown
from tests.cli.setting import verb
from tests.each import each
from tests.tables.examples import Example, zeros_and_ones

main = verb("tables")


def printed(tables, **how) -> str:
    return as_markdown(tables_of_groups(tables, **how))


CONFIG = json.dumps(
    {
        "datasets": {
            "walk": {"metrics": ["exact_match"], "about": {"groups": {"Bench": {"G": 2}}}},
            "look": {"metrics": ["exact_match", "x"], "about": {"groups": {"Bench": {"G": 2, "H": 1}}}},
            "free": {"metrics": ["exact_match"], "about": {}},
        }
    }
)


def two_datasets(**changed) -> Example:
    """full 30/40 and 20/80 right; snapkv loses the first right answers: 20/40 and 12/80."""
    example = Example()
    for budget in ("0.2", "0.05"):
        example.add("snapkv", budget, [0.0] * 10 + zeros_and_ones(20, 30), dataset="walk", **changed)
        example.add("snapkv", budget, [0.0] * 8 + zeros_and_ones(12, 72), dataset="look", **changed)
    example.add("full", None, zeros_and_ones(30, 40), dataset="walk")
    example.add("full", None, zeros_and_ones(20, 80), dataset="look")
    return example


def made(example: Example) -> list[GroupTable]:
    for cell in example.cells:
        cell["config"] = CONFIG
    rows = example.rows()
    return group_tables(build(rows), rows)


def test_groups_are_read_from_the_configuration_in_the_rows() -> None:
    example = two_datasets()
    example.add("full", None, [1.0], dataset="free")
    made(example)
    assert groups_of(example.rows()) == [
        DatasetGroup("Bench", "G", {"look": "exact_match", "walk": "exact_match"}, 2),
        DatasetGroup("Bench", "H", {"look": "exact_match"}, 1),
    ]
    alone = Example()
    alone.add("full", None, [1.0], dataset="free")
    with pytest.raises(ConfigError, match="belongs to a group"):
        made(alone)


def test_every_dataset_counts_once_however_many_samples_it_has() -> None:
    low, high = made(two_datasets())
    assert [(t.axis, t.budget, t.groups, t.methods) for t in (low, high)] == [
        ("fraction", "0.05", ("G", "H"), ("full", "snapkv")),
        ("fraction", "0.2", ("G", "H"), ("full", "snapkv")),
    ]
    assert low.means["full", "G"].value == pytest.approx((30 / 40 + 20 / 80) / 2)
    assert low.means["snapkv", "G"].value == pytest.approx((20 / 40 + 12 / 80) / 2)
    assert low.means["snapkv", "H"].value == pytest.approx(12 / 80)
    assert low.absent == {}


def test_the_interval_is_that_of_independent_datasets() -> None:
    found = made(two_datasets())[0].means["full", "G"]
    error = math.sqrt(0.75 * 0.25 / 40 + 0.25 * 0.75 / 80) / 2
    assert (found.low, found.high) == pytest.approx((found.value - 1.96 * error, found.value + 1.96 * error), abs=0.015)


def test_a_group_of_one_dataset_has_its_interval_and_zeros_have_a_width() -> None:
    example = Example()
    example.add("full", None, [0.0] * 20, dataset="look")
    (table,) = made(example)
    found = table.means["full", "H"]
    assert (found.value, found.low, found.high) == pytest.approx((0.0, *wilson(0.0, 20)))


def test_intervals_hold_the_true_mean_in_19_of_20_cases() -> None:
    rng = np.random.default_rng(0)
    chances, sizes = (0.02, 0.3, 0.9), (40, 80, 30)
    held = 0
    for _ in range(1000):
        shares = [rng.binomial(n, p) / n for n, p in zip(sizes, chances, strict=True)]
        found = mean([Mean(share, *wilson(share, n)) for share, n in zip(shares, sizes, strict=True)])
        held += found.low <= np.mean(chances) <= found.high
    assert 0.93 <= held / 1000 <= 0.99


def test_the_difference_is_paired_within_each_dataset() -> None:
    table = made(two_datasets())[0]
    difference = table.against["snapkv", "G"]
    assert difference.value == pytest.approx((-10 / 40 - 8 / 80) / 2)
    rng = np.random.default_rng(1)  # samples drawn again: what was lost, for both methods at once
    lost = [np.array([1.0] * 10 + [0.0] * 30), np.array([1.0] * 8 + [0.0] * 72)]
    draws = [-np.mean([rng.choice(part, len(part)).mean() for part in lost]) for _ in range(4000)]
    assert (difference.low, difference.high) == pytest.approx(np.quantile(draws, (0.025, 0.975)), abs=0.03)
    assert ("full", "G") not in table.against


def test_a_group_has_no_number_where_a_dataset_has_no_headline_or_no_table() -> None:
    example = two_datasets()
    example.add("keydiff", "0.2", [1.0] * 39 + [None], dataset="walk")
    example.add("keydiff", "0.2", [1.0] * 80, dataset="look")
    table = made(example)[1]
    assert ("keydiff", "G") not in table.means
    assert table.means["keydiff", "H"].value == 1.0
    alone = Example()
    alone.add("full", None, [1.0, 0.0], dataset="walk")
    (table,) = made(alone)
    assert (table.groups, table.means, table.absent) == ((), {}, {"G": (1, 2)})


def test_other_metrics_of_a_dataset_do_not_count() -> None:
    example = two_datasets()
    example.samples += [row | {"metric": "parse_failed", "value": 1.0} for row in example.samples]
    assert made(example)[0].means["full", "G"].value == pytest.approx(0.5)


def test_one_cluster_gives_no_interval() -> None:
    example = Example()
    example.add("full", None, [1.0, 0.5, 0.5, 0.0], dataset="walk", sample={"cluster": "one"})
    example.add("full", None, [1.0, 0.0], dataset="look")
    (table,) = made(example)
    assert (table.budget, table.means["full", "G"].low, table.means["full", "G"].value) == ("", None, 0.5)


def test_protocols_stay_apart_and_two_versions_of_a_dataset_are_refused() -> None:
    example = two_datasets()
    example.add("snapkv", "0.2", [1.0] * 80, dataset="look", protocol="strict")
    assert [t.context["protocol"] for t in made(example)] == ["paper", "paper", "strict"]
    example.add("snapkv", "0.2", [1.0] * 80, dataset="look", dataset_fingerprint="e" * 16)
    with pytest.raises(StoreError, match="look has two tables that differ in dataset_fingerprint"):
        made(example)


def test_markdown_has_a_line_a_method_and_a_column_a_group() -> None:
    lines = printed(made(two_datasets())[:1]).splitlines()
    assert lines[0].startswith("**Bench, means over datasets**: model=tiny; protocol=paper; budget=0.05; each dataset")
    assert [cell.strip() for cell in lines[2].strip("|").split("|")] == ["method", "G", "H"]
    assert lines[4].startswith("| full") and "0.50 [0.4" in lines[4] and "0.25 [" in lines[4]
    assert "*Minus full, paired by sample*" in lines and any("-0.17 [-0.2" in line for line in lines)
    assert "[" not in printed(made(two_datasets())[:1], intervals=False)
    alone = Example()
    alone.add("full", None, [1.0, 0.0], dataset="walk")
    assert printed(made(alone)).splitlines()[-1] == "- Not complete: G (1 of 2 datasets)."


def test_calibrated_lines_are_named() -> None:
    text = printed(made(two_datasets(parameters={"calibration": {"sparsemm": "a" * 16}})))
    assert "dataset's table): snapkv.\n" in text
    assert "alibrated" not in printed(made(two_datasets()))


@each(("expected", "word"), [(50.4, "passed"), (51.6, "failed")])
def test_a_printed_mean_of_the_full_cache_is_held_against_the_groups(expected: float, word: str) -> None:
    gates = [
        {"group": name, "expected": expected, "tolerance": 1.0, "scale": 100, "source": "Table 1"}
        for name in ("Bench G", "Bench H", "Other G")
    ]
    example = two_datasets()
    for cell in example.cells:
        cell["config"] = json.dumps(json.loads(CONFIG) | {"model": {"gates": gates}})
    rows = example.rows()
    low, high = group_tables(build(rows), rows)
    assert low.gates == high.gates
    of_g, of_h = low.gates
    goal = f"expected {expected} +- 1 (Table 1)"
    assert of_g.startswith(
        f"G: Full-cache gate {word}: full scores 50, {goal}; n=120, transformers 5.23"
    )  # 30/40 and 20/80
    assert of_h.startswith(f"H: Full-cache gate failed: full scores 25, {goal}; n=80, transformers 5.23")
    assert f"- {of_g}\n" in printed([low]) and f"- {of_h}\n" in printed([low])
    cut = Example()
    cut.add("full", None, zeros_and_ones(30, 40), dataset="walk", config=example.cells[0]["config"])
    rows = cut.rows()
    (table,) = group_tables(build(rows), rows)
    assert table.gates == (
        f"G: Full-cache gate not run: full has no score here to compare with {goal.removeprefix('expected ')}.",
    )


def test_made_data_have_no_gate() -> None:
    example = Example()
    datasets = {"walk_fixture": {"metrics": ["exact_match"], "about": {"groups": {"Bench": {"G": 1}}}}}
    gate = {"group": "Bench G", "expected": 75, "tolerance": 1.0, "scale": 100, "source": "Table 1"}
    config = json.dumps({"datasets": datasets, "model": {"gates": [gate]}})
    example.add("full", None, zeros_and_ones(30, 40), dataset="walk_fixture", config=config)
    rows = example.rows()
    (table,) = group_tables(build(rows), rows)
    assert table.means["full", "G"].value == 0.75 and table.gates == ()


def test_the_command_prints_them(tmp_path, capsys) -> None:
    example = two_datasets()
    tables = made(example)
    root = example.write(tmp_path / "rows")
    assert main([str(root), "--groups"]) == 0
    assert capsys.readouterr().out == printed(tables)
    assert main([str(root), "--groups", "--format", "csv"]) == 2
    assert "does not work with csv" in capsys.readouterr().err
