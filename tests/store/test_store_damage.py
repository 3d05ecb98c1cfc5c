"""Promise: no damaged byte changes a stored value silently, and stores of earlier versions read as they did."""

from __future__ import annotations

import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bit_flips import flip
from store_examples import OLD, cell, metric_row, older_store, response, sample_score, write_scores

from mmkv_bench.errors import StoreError
from mmkv_bench.store import journal, parts
from mmkv_bench.store.compact import pack
from mmkv_bench.store.parts import parquet_bytes
from mmkv_bench.store.store import Store

METHODS = ["flashcache", "full", "flashcache"]
ANSWERS = ["809", "651", "622", "008", "951"]  # of the first cell
VALUES = [0.59, 1.0, 0.11333333333333333]
STAMPED = ("schema_version", "worker", "committed_at")


def filled(root: Path, packed: bool) -> Store:
    store = Store(root)
    names = ("c0", "c1", "c2")
    store.write_cells([cell(name) for name in names])
    with store.writer("w") as writer:
        for i in range(4):
            writer.commit([response(i, name, decode_s=3.77, answer=f"{i} {name} " * 5) for name in names])
    for name in names:
        values = [sample_score(i, name, value=i / 7) for i in range(4)]
        write_scores(store, values, [metric_row(name, value=0.25)])
    if packed:
        pack(store)
    left = journal.Journal(store.root / "journal", "killed")
    times = {"schema_version": 1, "worker": "killed", "committed_at": "2026-11-22T00:00:00.000000+00:00"}
    for i in (5, 6):
        row = dict.fromkeys(store.responses().column_names) | response(i, "c0") | times
        left.append({"schema_version": 1, "rows": [row]})
    left.close()
    return store


@pytest.mark.parametrize("packed", (False, True))
def test_a_flipped_bit_anywhere_is_noticed_or_changes_nothing(tmp_path, packed, caplog):
    caplog.set_level(logging.ERROR)
    store = filled(tmp_path / "rows", packed)
    assert store.responses().num_rows == 14
    counts, silent = flip(store.root, 60, seed=int(packed))
    assert silent == [] and counts["noticed"] > 50


def test_a_damaged_part_is_named_with_what_to_do(tmp_path):
    store = filled(tmp_path, packed=False)
    (part,) = (tmp_path / "responses").glob("*.parquet")
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 4
    part.write_bytes(data)
    with pytest.raises(StoreError, match=f"{part.name}.*checksum does not match.*Restore it.*or move it away"):
        store.responses()
    part.unlink()
    assert store.responses().num_rows == 2, "what is left in the journal"


def test_damage_after_a_first_reading_is_noticed_in_the_same_process(tmp_path):
    store = filled(tmp_path, packed=True)
    (part,) = (tmp_path / "metrics").glob("*.parquet")
    for place in (30, part.stat().st_size - 30):
        data = part.read_bytes()
        assert store.metrics().num_rows == 3
        part.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(StoreError, match="checksum does not match"):
            store.metrics()
        part.write_bytes(data)


def test_a_file_that_is_hashed_piece_by_piece_reads_the_same_and_no_flip_in_it_is_silent(tmp_path, monkeypatch):
    path = filled(tmp_path, packed=True).file("responses", next((tmp_path / "responses").glob("*.parquet")).stem)
    schema = parts.schema_of_columns("responses", ["cell", "sample_id", "answer"])
    whole = parts.read_file(path, schema)
    monkeypatch.setattr("mmkv_bench.store.parts.WHOLE_FILE_BYTES", 0)
    monkeypatch.setattr("mmkv_bench.store.parts._known", set())
    data = path.read_bytes()
    mark = data.rindex(b"mmkv_sha256")
    for piece in (len(data), 97, mark + 5):  # the digest's place is cut by the pieces' ends, too
        monkeypatch.setattr("mmkv_bench.store.parts._PIECE_BYTES", piece)
        assert parts.read_file(path, schema).equals(whole)
        for place in (10, len(data) // 2, mark - 3, mark + 20, len(data) - 9, *range(4, len(data), len(data) // 7)):
            path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            with pytest.raises(StoreError):
                parts.read_file(path, schema)
        path.write_bytes(data)


def test_pages_are_checked_too():
    table = pa.table({"value": [3.77] * 1000})
    file = pq.ParquetFile(pa.BufferReader(data := parquet_bytes(table)), page_checksum_verification=True)
    assert file.read().equals(table)
    column = file.metadata.row_group(0).column(0)
    end = column.dictionary_page_offset + column.total_compressed_size
    damaged = data[: end - 1] + bytes([data[end - 1] ^ 1]) + data[end:]
    with pytest.raises(OSError, match="CRC"):
        pq.ParquetFile(pa.BufferReader(damaged), page_checksum_verification=True).read()


def test_a_store_of_an_earlier_commit_reads_as_it_did_and_its_files_need_checksums(tmp_path):
    with pytest.raises(StoreError, match="it has no checksum"):
        Store(OLD).responses()
    root = older_store(tmp_path / "rows")
    store = Store(root)
    rows = store.responses().to_pylist()
    assert len(rows) == 15 and {row["status"] for row in rows} == {"ok"}
    assert all(row["slim"] is None and row["forced_kl"] is None and row["decode_s"] > 0 for row in rows)
    assert store.cells()["method"].to_pylist() == METHODS and store.cells()["method_version"].null_count == 3
    assert [row["answer"] for row in rows if row["cell"] == rows[0]["cell"]] == ANSWERS
    assert store.samples().num_rows == 12 and store.metrics()["value"].to_pylist() == VALUES
    with store.writer("new") as writer:
        writer.commit([{**{k: v for k, v in row.items() if k not in STAMPED}, "sample_id": "new"} for row in rows[:1]])
    assert store.recover() == 1
    pack(store)
    again = Store(root)
    assert again.responses().num_rows == 16 and again.samples().num_rows == 12 and again.cells().num_rows == 3
    kept = [row for row in again.responses().to_pylist() if row["sample_id"] != "new"]
    assert kept == rows
