"""Promise: scores of many cells written together are read like those written cell by cell, and a kill mixes nothing."""

from __future__ import annotations

import time

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from mmkv_bench.errors import StoreError
from mmkv_bench.store import files
from mmkv_bench.store.compact import pack
from mmkv_bench.store.schema import METRICS, SAMPLES
from mmkv_bench.store.store import Store
from tests.each import each
from tests.store.store_examples import write_scores, write_tables
from tests.tables.examples import cell_row, sample_rows

MANY = [f"cell{number:03d}" for number in range(70)]


def tables(cells: list[str], value: float) -> tuple[pa.Table, pa.Table]:
    samples = [row for cell in cells for row in sample_rows(cell, [value, value])]
    metrics = [
        {
            "cell": cell,
            "dataset": "walk3",
            "metric": "exact_match",
            "n": 2,
            "n_ok": 2,
            "value": value,
            "interval": "none",
        }
        for cell in cells
    ]
    made = []
    for rows, schema in ((samples, SAMPLES), (metrics, METRICS)):
        fields = [field for field in schema if field.name in rows[0]]
        made.append(pa.Table.from_pylist(rows, pa.schema(fields)))
    return made[0], made[1]


def values(store: Store) -> dict[str, tuple[set, set]]:
    found: dict[str, tuple[set, set]] = {}
    for place, table in enumerate((store.samples(), store.metrics())):
        for row in table.to_pylist():
            found.setdefault(row["cell"], (set(), set()))[place].add(row["value"])
    return found


def of(value: float, cells: list[str]) -> dict[str, tuple[set, set]]:
    return {cell: ({value}, {value}) for cell in cells}


@pytest.mark.slow
def test_the_newest_scores_of_a_cell_count_however_they_were_written(tmp_path):
    store = Store(tmp_path)
    store.write_cells([{k: v for k, v in cell_row(cell, "snapkv", 64).items() if v is not None} for cell in MANY])
    write_tables(store, *tables(MANY[:3], 0.1))
    assert values(store) == of(0.1, MANY[:3])
    write_tables(store, *tables(MANY, 0.2))
    assert values(store) == of(0.2, MANY)
    assert [len(list((tmp_path / name).glob("*.parquet"))) for name in ("samples", "metrics")] == [1, 1]
    write_tables(store, *tables(MANY[:1], 0.3))
    assert values(store) == of(0.2, MANY[1:]) | of(0.3, MANY[:1])
    store.forget_scores({MANY[1]: {"s000", "s001"}})
    forgotten = {MANY[1]: (set(), {0.2})}
    assert values(store) == of(0.2, MANY[2:]) | of(0.3, MANY[:1]) | forgotten
    pack(store)
    assert values(store) == of(0.2, MANY[2:]) | of(0.3, MANY[:1]) | forgotten and not list(
        tmp_path.glob("*/together-*")
    )
    store.forget_scores({MANY[0]: {"s000", "s001"}})  # of a packed cell
    assert values(store) == of(0.2, MANY[2:]) | forgotten | {MANY[0]: (set(), {0.3})}
    write_tables(store, *tables(MANY, 0.4))
    assert values(store) == of(0.4, MANY)


def test_scores_without_metrics_show_no_older_metrics(tmp_path):
    store = Store(tmp_path)
    for fill in (lambda: None, lambda: pack(store)):  # beside a file of many cells, and beside a packed one
        write_tables(store, *tables(MANY, 0.1))
        fill()
        write_scores(store, tables(MANY[:1], 0.2)[0].to_pylist(), [])
        assert values(store) == of(0.1, MANY[1:]) | {MANY[0]: ({0.2}, set())}


def test_samples_that_are_forgotten_are_scored_no_more_wherever_their_scores_stand(tmp_path):
    store = Store(tmp_path)
    write_tables(store, *tables(MANY, 0.1))
    for cells in (MANY[:3], MANY[2:5]):
        store.forget_scores({cell: {"s000"} for cell in cells} | {MANY[9]: {"other"}})
        assert store.samples(cells)["sample_id"].to_pylist() == ["s001"] * 3
        assert store.metrics().num_rows == len(MANY)
        pack(store)
    store.forget_scores({MANY[0]: {"s000", "s001"}})
    assert store.samples().num_rows == 2 * len(MANY) - 6 and store.samples(MANY[:1]).num_rows == 0
    assert store.metrics(MANY[:1])["value"].to_pylist() == [0.1]


def test_scores_that_come_cell_by_cell_are_those_that_come_at_once(tmp_path):
    """And a failure while they come, or a kill, leaves those that were there."""
    store, metrics = Store(tmp_path), tables(MANY, 0.1)[1]
    write_tables(store, *tables(MANY, 0.3))
    asked = []

    def blocks(many: int):
        for cell in MANY[:many]:
            yield tables([cell], 0.1)[0]
        if many < len(MANY):
            raise ArithmeticError

    def metrics_of(samples: pa.Table) -> pa.Table:
        asked.append((samples.num_rows, samples["metric"].unique().to_pylist()))
        return metrics

    with pytest.raises(ArithmeticError):
        store.write_scores(blocks(9), metrics_of)
    assert values(store) == of(0.3, MANY) and not list(tmp_path.glob("*/.*.tmp"))
    store.write_scores(blocks(len(MANY)), metrics_of)
    assert values(store) == of(0.1, MANY) and asked == [(2 * len(MANY), ["exact_match"])]
    assert [len(list((tmp_path / name).glob("*.parquet"))) for name in ("samples", "metrics")] == [1, 1]
    assert store.samples().num_rows == 2 * len(MANY)
    with pytest.raises(StoreError, match="no samples"):
        store.write_scores((tables([cell], 0.1)[0] for cell in MANY[:2]), lambda _: metrics)


def test_metrics_are_made_of_some_cells_at_a_time_beside_those_that_they_are_held_against(tmp_path, monkeypatch):
    store, metrics, full = Store(tmp_path), tables(MANY, 0.1)[1], MANY[5]
    monkeypatch.setattr("mmkv_bench.store.score_files.AT_ONCE", 6)
    asked = []

    def metrics_of(samples: pa.Table) -> pa.Table:
        asked.append(samples["cell"].unique().to_pylist())
        assert samples.num_rows == 2 * len(asked[-1]) <= 8
        return metrics.filter(pc.is_in(metrics["cell"], pa.array(asked[-1])))

    store.write_scores((tables([cell], 0.1)[0] for cell in MANY), metrics_of, beside=[full])
    assert len(asked) == -(-len(MANY) // 3) and all(full in cells for cells in asked)
    assert values(store) == of(0.1, MANY) and store.metrics().num_rows == len(MANY)


def test_scores_of_some_metrics_are_hidden_by_newer_ones_of_any(tmp_path):
    """A cell's newer file without a metric hides older, packed scores of that metric, whichever metric is asked for."""
    store = Store(tmp_path)
    for value, metric in ((0.1, "other"), (0.2, "exact_match")):
        samples, metrics = tables(MANY[:3], value)
        named = pa.array([metric] * samples.num_rows)
        write_tables(store, samples.set_column(samples.schema.get_field_index("metric"), "metric", named), metrics)
        assert store.samples(metrics=[metric]).num_rows == 6 and store.samples(metrics=["another"]).num_rows == 0
        assert store.samples(metrics=[metric], coded=True).num_rows == 6
        pack(store) if metric == "other" else None
    assert store.samples(metrics=["other"]).num_rows == 0
    write_tables(store, *tables(MANY, 0.3))
    assert store.samples(metrics=["exact_match"])["value"].unique().to_pylist() == [0.3]
    assert store.samples(MANY[:2], metrics=["exact_match", "other"]).num_rows == 4


def test_later_scores_count_also_where_clocks_disagree(tmp_path, monkeypatch):
    now, store = time.time_ns(), Store(tmp_path)
    for late, value in ((10**12, 0.1), (0, 0.2)):  # the second machine's clock is a quarter of an hour behind
        monkeypatch.setattr(time, "time_ns", lambda late=late: now + late)
        write_tables(store, *tables(MANY, value))
    assert values(store) == of(0.2, MANY)


def test_a_kill_between_the_two_files_leaves_the_old_scores_of_both(tmp_path, monkeypatch):
    store = Store(tmp_path)
    write_tables(store, *tables(MANY, 0.1))
    place, placed = files.Staged.place, []

    def killed(self):
        if placed:
            raise KeyboardInterrupt
        placed.append(place(self))

    monkeypatch.setattr(files.Staged, "place", killed)
    with pytest.raises(KeyboardInterrupt):
        write_tables(store, *tables(MANY, 0.2))
    assert len(list((tmp_path / "metrics").glob("*.parquet"))) == 2
    assert values(store) == of(0.1, MANY)
    monkeypatch.undo()
    write_tables(store, *tables(MANY, 0.2))
    assert values(store) == of(0.2, MANY)


@each(("column", "value"), [("status", "fine"), ("value", float("nan")), ("cell", None), ("sample_id", "s000")])
def test_rows_against_the_schema_are_refused_together(tmp_path, column, value):
    samples, metrics = tables(MANY, 0.1)
    rows = samples.to_pylist()
    rows[1][column] = value
    with pytest.raises(StoreError, match="samples"):
        write_tables(Store(tmp_path), pa.Table.from_pylist(rows, samples.schema), metrics)
    assert not list(tmp_path.glob("*/*.parquet"))
