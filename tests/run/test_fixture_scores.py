"""Promise: whole runs over datasets in their upstream schema score what is known, on one scale, and tell what was no answer."""

from __future__ import annotations

import shutil
from collections import defaultdict
from pathlib import Path

import pytest

from mmkv_bench.datasets import fixtures
from mmkv_bench.store.schema import COLUMNS
from mmkv_bench.store.store import Store
from tests.each import each
from tests.run import setting
from tests.run.setting import done, responses
from tools.fixtures import known as known_answers

DATASETS = ("mmmu", "synthdog", "vstar")


def first_answers(name: str) -> dict[int, str]:
    """The first known answer to each document."""
    found: dict[int, str] = {}
    for entry in known_answers(name):
        found.setdefault(entry.doc_id, entry.answer)
    return found


def replace_answers(root: Path) -> None:
    """Commit every stored row once more, with a known answer as its text."""
    stamped = {column.name for column in COLUMNS["responses"] if column.stamped}
    texts = {f"{name}_fixture": first_answers(name) for name in DATASETS}
    with Store(root).writer("forced") as writer:
        for row in responses(root).values():
            changed = {name: value for name, value in row.items() if name not in stamped}
            writer.commit([changed | {"answer": texts[row["dataset"]].get(row["doc_id"], "")}])


@pytest.fixture(scope="module")
def forced(tmp_path_factory):
    """Runs over three fixtures whose stored answers are the known ones; the rows, and what the last run printed."""
    root = tmp_path_factory.mktemp("fixtures") / "rows"
    for name in DATASETS:
        done(root, f"dataset={name}", "data=fixture", "method=full", "stage=generate")
    replace_answers(root)
    printed = {
        name: done(root, f"dataset={name}", "data=fixture", "method=full", "stage=score").out for name in DATASETS
    }
    return root, printed


@pytest.mark.full
@each("name", DATASETS)
def test_samples_of_a_run_have_the_known_values(forced, name):
    root, _ = forced
    first = first_answers(name)
    found = {(row["sample_id"], row["metric"]): row for row in setting.scores(root)}
    checked = 0
    for entry in known_answers(name):
        if first[entry.doc_id] == entry.answer:
            row = found[f"{name}_fixture-{entry.doc_id:06d}", entry.metric]
            assert row["value"] == pytest.approx(entry.value, abs=1e-9), entry
            checked += 1
    assert checked >= 4


@pytest.mark.full
def test_rows_keep_lmms_evals_own_number_and_tables_compare_it_on_our_scale(forced):
    root, printed = forced
    rows = {(row["dataset"], row["metric"]): row for row in setting.metrics(root)}
    sums, percent = rows["synthdog_fixture", "tree_edit_distance"], rows["vstar_fixture", "vstar_overall_acc"]
    assert sums["lmms_eval"] == pytest.approx(4 * sums["value"])
    assert percent["lmms_eval"] == pytest.approx(100 * percent["value"])
    assert "aggregate (a sum over samples, rescaled here) is the same" in printed["synthdog"]
    assert "aggregate (percent, rescaled here) is the same" in printed["vstar"]


@pytest.mark.full
def test_answers_without_a_readable_choice_are_counted_and_told_where_the_score_stands(forced):
    root, printed = forced
    rows = {(row["dataset"], row["metric"]): row for row in setting.metrics(root)}
    by_document = defaultdict(float)
    for entry in known_answers("mmmu"):
        by_document[entry.doc_id] += entry.value * (entry.metric == "parse_failed")
    unread = int(sum(by_document.values()))
    assert rows["mmmu_fixture", "parse_failed"]["value"] == pytest.approx(unread / 6)
    assert rows["mmmu_fixture", "mmmu_acc"]["value"] < rows["mmmu_fixture", "mmmu_acc"]["lmms_eval"]
    told = next(line for line in printed["mmmu"].splitlines() if "no choice can be read count as 0" in line)
    assert f"count as 0: full ({unread} of 6)." in told
    assert "parse_failed" not in printed["mmmu"].split("rows: ")[0]
    assert ("synthdog_fixture", "parse_failed") not in rows


@pytest.mark.full
def test_a_picture_that_does_not_decode_is_a_row_with_a_status_and_the_run_goes_on(tmp_path):
    import pyarrow.parquet as pq

    shutil.copytree(fixtures.folder("chartqa"), tmp_path / "data" / "chartqa")
    file = next((tmp_path / "data").rglob("*.parquet"))
    table = pq.read_table(file)
    damaged = table.to_pylist()
    damaged[1]["image"]["bytes"] = damaged[1]["image"]["bytes"][:150]
    pq.write_table(type(table).from_pylist(damaged, schema=table.schema), file)
    root = tmp_path / "rows"
    outcome = setting.go(root, "dataset=chartqa", f"data.root={tmp_path / 'data'}", "method=full")
    rows = sorted(responses(root).values(), key=lambda row: row["doc_id"])
    assert [row["status"] for row in rows] == ["ok", "error", "ok", "ok", "ok", "ok"]
    assert "chartqa-000001" in rows[1]["error"]
    assert "5/6 ok" in outcome.out
    (metric,) = [row for row in setting.metrics(root) if row["metric"] == "relaxed_overall"]
    assert (metric["n"], metric["n_ok"], metric["value"]) == (6, 5, None)
