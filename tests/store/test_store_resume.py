"""Resume: what is committed is done, once, whatever happened in between."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from store_examples import cell, failed, metric_row, plain, response, sample_score, write_scores

from mmkv_bench.errors import StoreError
from mmkv_bench.store.files import checksum
from mmkv_bench.store.parts import parquet_bytes
from mmkv_bench.store.rows import check, to_table
from mmkv_bench.store.schema import SCHEMA_VERSION
from mmkv_bench.store.store import Store


def test_done_is_what_has_a_row_failures_included(tmp_path):
    store = Store(tmp_path)
    with store.writer("w", publish_every=2) as writer:
        writer.commit([response(0), response(0, cell="c1")])
        writer.commit([failed(1, status="oom")])
        writer.commit([failed(2, status="nan")])
        for _ in range(2):  # once with the last sample in the journal, once with all in parts
            assert store.done(["c0", "c1", "c9"]) == {"c0": {"s0000", "s0001", "s0002"}, "c1": {"s0000"}, "c9": set()}
            writer.publish()


def test_the_newest_row_wins_in_parts_and_journals_alike(tmp_path):
    store = Store(tmp_path)
    with store.writer("a") as writer:
        writer.commit([failed(0)])
    with store.writer("b") as writer:
        writer.commit([response(0, answer="second")])
        assert store.responses(["c0"], ["answer"]).to_pylist() == [{"answer": "second"}]
    with store.writer("c") as writer:
        writer.commit([response(0, answer="third")])
    assert store.responses(columns=["answer"]).to_pylist() == [{"answer": "third"}]
    assert store.done(["c0"]) == {"c0": {"s0000"}}


def test_a_retry_wins_over_a_row_from_a_machine_whose_clock_runs_ahead(tmp_path):
    hour_ahead = datetime.now(UTC) + timedelta(hours=1)
    row = check("responses", failed(0), {"schema_version": SCHEMA_VERSION, "worker": "a", "committed_at": hour_ahead})
    store = Store(tmp_path)
    store.prepare()
    (tmp_path / "responses" / "a.parquet").write_bytes(parquet_bytes(to_table("responses", [row])))
    assert store.responses(columns=["status"]).to_pylist() == [{"status": "oom"}]
    with store.writer("b") as writer:
        writer.commit([response(0)])
    assert store.responses(columns=["status"]).to_pylist() == [{"status": "ok"}]


def test_a_crash_between_publishing_and_removing_the_journal_duplicates_nothing(tmp_path):
    store = Store(tmp_path)
    with store.writer("w") as writer:
        for sample in range(3):
            writer.commit([response(sample), response(sample, cell="c1")])
        journal = next((tmp_path / "journal").glob("*.jsonl"))
        shutil.copy(journal, tmp_path / "kept")
    once = store.responses()
    shutil.move(tmp_path / "kept", journal)  # the crash: the part is there, and so is the journal
    assert store.responses().equals(once)
    assert store.recover() == 3
    assert store.responses().equals(once)
    assert len(list((tmp_path / "responses").glob("*.parquet"))) == 1
    assert pq.read_table(tmp_path / "responses").num_rows == 6


def test_rows_are_sorted_and_selected_whatever_the_order_of_commits(tmp_path):
    one, other = Store(tmp_path / "one"), Store(tmp_path / "other")
    for store, order, every in ((one, (0, 1, 2, 3), 256), (other, (2, 0, 3, 1), 1)):
        with store.writer("w", publish_every=every) as writer:
            for sample in order:
                writer.commit([response(sample, cell=name) for name in ("c1", "c0")])
    assert plain(one.responses()) == plain(other.responses())
    ids = other.responses(columns=["cell", "sample_id"]).to_pylist()
    assert [tuple(row.values()) for row in ids] == [(c, f"s000{s}") for c in ("c0", "c1") for s in range(4)]
    assert set(other.responses(["c1"])["cell"].to_pylist()) == {"c1"}
    assert other.responses([]).num_rows == other.responses(["c7"]).num_rows == 0


def test_stores_can_be_merged_by_copying_their_parts(tmp_path):
    for name in ("a", "b"):
        with Store(tmp_path / name).writer("w") as writer:
            writer.commit([response(0, cell=name)])
    shutil.copytree(tmp_path / "b" / "responses", tmp_path / "a" / "responses", dirs_exist_ok=True)
    assert Store(tmp_path / "a").done(["a", "b"]) == {"a": {"s0000"}, "b": {"s0000"}}


def test_leftovers_of_killed_writers_are_no_rows(tmp_path):
    store = Store(tmp_path)
    with store.writer("w") as writer:
        writer.commit([response(0)])
    for table in ("responses", "cells"):
        (tmp_path / table / ".x.parquet.1-abc.tmp").write_bytes(b"PAR1 half")
    (tmp_path / "journal" / ".w-1.jsonl.tmp").write_bytes(b"")
    assert store.responses().num_rows == 1
    assert store.cells().num_rows == 0


# Another schema version


def _read_all(store: Store) -> None:
    for read in (store.responses, store.cells, store.samples, store.metrics):
        read()


def test_a_store_of_another_schema_version_is_refused_with_both_versions(tmp_path):
    store = Store(tmp_path)
    with store.writer("w") as writer:
        writer.commit([response(0)])
    before = sorted(tmp_path.rglob("*"))
    (tmp_path / "store.json").write_text(json.dumps({"schema_version": 99}))
    for use in (
        _read_all,
        lambda s: s.done(["c0"]),
        lambda s: s.check_writable(),
        lambda s: s.recover(),
        lambda s: s.write_cells([cell()]),
        lambda s: write_scores(s, [sample_score(0)], [metric_row()]),
        lambda s: s.writer("w").commit([response(1)]),
    ):
        with pytest.raises(StoreError, match=f"version 99.*version {SCHEMA_VERSION}"):
            use(Store(tmp_path))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_part_of_another_schema_version_is_refused_by_name(tmp_path):
    store = Store(tmp_path)
    with store.writer("w") as writer:
        writer.commit([response(0)])
    part = next((tmp_path / "responses").glob("*.parquet"))
    rows = pq.read_table(part)
    at = rows.column_names.index("schema_version")
    part.with_name("other.parquet").write_bytes(parquet_bytes(rows.set_column(at, "schema_version", pa.array([99]))))
    with pytest.raises(StoreError, match=f"other.parquet.*version 99.*version {SCHEMA_VERSION}"):
        store.responses(columns=["answer"])
    strange = pa.table({"schema_version": [99], "cell": [1], "sample_id": [2.5]})
    part.with_name("other.parquet").write_bytes(parquet_bytes(strange))
    with pytest.raises(StoreError, match=r"other\.parquet.*version 99"):
        store.responses()


def test_a_journal_of_another_schema_version_is_refused_by_name(tmp_path):
    (tmp_path / "journal").mkdir()
    text = b'{"rows":[],"schema_version":99}'
    (tmp_path / "journal" / "w-1.jsonl").write_bytes(checksum(text).encode() + b" " + text + b"\n")
    with pytest.raises(StoreError, match=f"w-1.jsonl.*version 99.*version {SCHEMA_VERSION}"):
        Store(tmp_path).responses()


def test_a_damaged_part_is_refused_by_name(tmp_path):
    store = Store(tmp_path)
    with store.writer("w", publish_every=1) as writer:
        for sample in range(3):
            writer.commit([response(sample)])
    part = sorted((tmp_path / "responses").glob("*.parquet"))[1]
    part.write_bytes(part.read_bytes()[:-50])
    with pytest.raises(StoreError, match=f"{part.name} is not a readable part"):
        store.responses()
