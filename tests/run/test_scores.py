"""Promise: scores are lmms-eval's own over the stored answers, for every sample and metric there is."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from mmkv_bench.datasets import page_data
from mmkv_bench.datasets.drawn_page_tasks import PAGE_TASKS
from mmkv_bench.statistics.metric_kinds import FIDELITY
from mmkv_bench.store.schema import COLUMNS
from mmkv_bench.store.store import Store
from mmkv_bench.tables.build import build
from mmkv_bench.tables.stored_rows import load
from tests.each import each
from tests.run import setting
from tests.run.setting import done, responses
from tests.tables.examples import markdown

MIXES = {task for task, kinds in PAGE_TASKS.items() if len(kinds) > 1}


def replace_answers(root: Path, answer) -> None:
    """Commit every stored row once more, with the text that `answer(row)` gives."""
    stamped = {column.name for column in COLUMNS["responses"] if column.stamped}
    by_sample = defaultdict(list)
    for row in responses(root).values():
        changed = {name: value for name, value in row.items() if name not in stamped} | {"answer": answer(row)}
        by_sample[row["dataset"], row["sample_id"]].append(changed)
    with Store(root).writer("forced") as writer:
        for rows in by_sample.values():
            writer.commit(rows)


@pytest.fixture(scope="module")
def forced(tmp_path_factory):
    """All pages tasks, answered right and wrong by rule and then scored: the rows, and what is right by definition."""
    root = tmp_path_factory.mktemp("forced") / "rows"
    others = ",".join(task for task in PAGE_TASKS if task != "pages")
    commands = [("dataset=pages", "limit=16"), (f"dataset=[{others}]", "limit=4")]
    for command in commands:
        done(root, *command, "method=full", "stage=generate")
    known = {
        task: page_data.load(f"{task}_small", "test", 16).remove_columns("images").to_list() for task in PAGE_TASKS
    }
    right = {}

    def answer(row) -> str:
        document = known[row["dataset"].removesuffix("_small")][row["doc_id"]]
        assert document["sample_id"] == row["sample_id"]
        hit = right[row["dataset"], row["doc_id"]] = row["doc_id"] % 3 != 1
        return document["answer"] if hit else document["answer"][:-1] + "!"

    replace_answers(root, answer)
    for command in commands:
        done(root, *command, "method=full", "stage=score")
    return root, right, known


@pytest.mark.full
@each("task", PAGE_TASKS)
def test_lmms_evals_aggregate_is_ours_and_both_are_right(forced, task):
    root, right, known = forced
    dataset = f"{task}_small"
    hits = defaultdict(list)
    for (of, doc_id), hit in right.items():
        if of == dataset:
            hits["exact_match"].append(hit)
            if task in MIXES:
                hits[f"exact_match_{known[task][doc_id]['kind']}"].append(hit)
    rows = {row["metric"]: row for row in setting.metrics(root) if row["dataset"] == dataset}
    assert set(rows) - set(FIDELITY) == set(hits)
    for metric, row in ((metric, row) for metric, row in rows.items() if metric not in FIDELITY):
        assert (row["n"], row["n_ok"]) == (len(hits[metric]),) * 2
        assert row["value"] == pytest.approx(sum(hits[metric]) / len(hits[metric]), abs=1e-12)
        assert row["lmms_eval"] == pytest.approx(row["value"], abs=1e-12) and row["lmms_eval_reason"] is None
    assert 0 < rows["exact_match"]["value"] < 1


@pytest.mark.full
def test_a_mix_scores_every_sample_once_over_all_and_once_under_its_own_kind(forced):
    root, right, known = forced
    found = defaultdict(set)
    for row in setting.scores(root):
        if row["dataset"] == "pages_small" and row["metric"] not in FIDELITY:
            found[row["sample_id"]].add(row["metric"])
    kinds = {document["sample_id"]: document["kind"] for document in known["pages"]}
    assert found == {sample: {"exact_match", f"exact_match_{kind}"} for sample, kind in kinds.items()}
    assert len(set(kinds.values())) == 8


@pytest.mark.full
def test_no_table_of_a_mix_calls_another_kinds_answers_unscored(forced):
    root, _, _ = forced
    tables = build(load(root), datasets=["pages_small"])
    assert len(tables) == 1 + 8
    assert all(table.waiting == {} for table in tables)
    assert "without scores yet" not in markdown(tables)
    printed = done(root, "dataset=pages", "limit=16", "method=full").out
    assert "**pages_small, exact_match**" in printed and "exact_match_" not in printed.split("rows: ")[0]


@pytest.mark.full
def test_answers_of_a_larger_limit_are_told_until_they_are_scored(tmp_path):
    command = ("dataset=pages", "method=snapkv", "budget=16")
    done(tmp_path, *command, "limit=2")
    done(tmp_path, *command, "limit=3", "stage=generate")
    tables = build(load(tmp_path), metrics=["exact_match"])
    assert [table.waiting for table in tables] == [{("full", ""): 1, ("snapkv", "16"): 1}]
    done(tmp_path, *command, "limit=3", "stage=score")
    assert [table.waiting for table in build(load(tmp_path))] == [{}] * 4
