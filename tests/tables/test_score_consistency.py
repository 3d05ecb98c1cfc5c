"""Promise: scores that are not those of the stored answers, or metrics of other scores, are refused or left out with a word."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmkv_bench.errors import StoreError
from mmkv_bench.statistics.metric_kinds import PERPLEXITY
from mmkv_bench.store.parts import parquet_bytes
from mmkv_bench.store.store import Store
from mmkv_bench.tables.build import build
from mmkv_bench.tables.score_consistency import drop_stale_scores
from mmkv_bench.tables.stored_rows import load
from tests.tables.examples import Example, _counted, markdown


def made(root):
    """A store of three cells with scores of two metrics, one of them no mean, and the metrics that follow from these."""
    example = Example()
    for method, budget in (("full", None), ("snapkv", 64), ("mmshift", 64)):
        cell = example.add(method, budget, [1.0, 0.0, 0.25])
        scores = [row for row in example.samples if row["cell"] == cell]
        parts = [[1.5, 1.0], [0.25, 1.0], [0.5, 2.0]]
        example.samples += [
            row | {"metric": "ppl", "value": 1.0, "parts": own} for row, own in zip(scores, parts, strict=True)
        ]
        for row in _counted([row for row in example.samples if row["cell"] == cell]):
            value = (
                PERPLEXITY(pa.array(parts).flatten().to_numpy().reshape(3, 2)) if row["metric"] == "ppl" else 1.25 / 3
            )
            example.metrics.append(row | {"value": value, "value_failures_zero": value})
    return example.write(root)


def changed(root, table, column, old, new):
    """One field of one file written again, as a forger would."""
    for file in sorted((root / table).glob("*.parquet")):
        rows = pq.read_table(file)
        values = rows[column].to_pylist()
        if old in values:
            values[values.index(old)] = new
            place = rows.schema.get_field_index(column)
            field = rows.schema.field(column)
            file.write_bytes(
                parquet_bytes(
                    rows.set_column(place, field, [pa.array(values, field.type)]).replace_schema_metadata(None)
                )
            )
            return
    raise AssertionError(f"no {column} is {old}")


def test_a_score_a_metric_and_a_count_that_contradict_each_other_are_refused(tmp_path):
    for number, (table, column, old, new, words) in enumerate(
        (
            ("samples", "value", 0.25, 0.75, "is 0.416667 in metrics/ and 0.583333"),
            ("samples", "parts", [0.25, 1.0], [2.25, 1.0], "ppl of cell"),
            ("samples", "status", "ok", "oom", "is of 3 samples in metrics/ and of 2"),
            ("samples", "cluster", "page-s001", "page-s000", "whose clusters differ from those of their answers"),
            (
                "metrics",
                "value",
                1.25 / 3,
                0.9,
                "the row of exact_match of cell .* was rewritten with other values",
            ),
            ("metrics", "lmms_eval", None, 0.5, "was rewritten with other values"),
            ("cells", "method", "snapkv", "sparkv", "rewritten with other values"),
        )
    ):
        root = made(tmp_path / str(number))
        load(root)
        changed(root, table, column, old, new)
        with pytest.raises(StoreError, match=words):
            load(root)


def test_cells_whose_scores_are_fewer_or_have_no_metrics_are_left_out_and_named(tmp_path):
    for number, change in enumerate(
        (
            lambda root: next((root / "metrics").glob("*")).unlink(),
            lambda root: next((root / "samples").glob("*")).unlink(),
            lambda root: changed(root, "samples", "metric", "exact_match", "exact_watch"),
        )
    ):
        root = made(tmp_path / str(number))
        change(root)
        rows = load(root)
        assert len(rows.samples["cell"].unique()) == 2
        assert "Answers without scores yet (stage=score" in markdown(build(rows))


def test_scores_of_some_metrics_are_compared_with_these_alone(tmp_path):
    store = Store(made(tmp_path))
    some = store.samples(coded=True, metrics=["ppl"])
    assert drop_stale_scores(store, some, store.metrics()).num_rows == 9


def test_a_file_with_another_cell_s_name_is_refused(tmp_path):
    root = made(tmp_path)
    first, second = sorted((root / "cells").glob("*.parquet"))[:2]
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)
    with pytest.raises(StoreError, match="has rows of cell"):
        load(root)
