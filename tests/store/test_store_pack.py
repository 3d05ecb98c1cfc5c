"""Packing: few files, the same rows; what is written later stands beside them; a kill at any file operation loses and
doubles nothing."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import multiprocessing
import os
import shutil
import signal
import tempfile

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from crash_points import die_before
from store_examples import cell, failed, metric_row, response, sample_score, write_scores

from mmkv_bench.errors import StoreError
from mmkv_bench.store import compact
from mmkv_bench.store.compact import RegroupedBlocks, pack
from mmkv_bench.store.packing import packed, rows_with_digest
from mmkv_bench.store.schema import SLIM
from mmkv_bench.store.store import Store
from tests.cli.setting import verb
from tests.each import each

main = verb("pack")

CELLS = ("c0", "c1", "c2")


def filled(root, journal: bool = False) -> Store:
    store = Store(root)
    store.write_cells([cell(name) for name in CELLS])
    for name in CELLS:
        write_scores(store, [sample_score(i, name, value=0.5) for i in range(3)], [metric_row(name, value=0.5)])
    for part in range(2):
        with store.writer(f"w{part}") as writer:
            writer.commit([response(part, name) for name in CELLS])
    return store


def content(store: Store) -> list:
    order = {"cells": [("cell", "ascending")], "metrics": [("cell", "ascending"), ("metric", "ascending")]}
    order["samples"] = [("cell", "ascending"), ("sample_id", "ascending"), ("metric", "ascending")]
    tables = [getattr(store, name)().sort_by(order[name]).to_pylist() for name in order]
    return [*tables, store.responses().to_pylist()]


def files(store: Store) -> list[str]:
    return sorted(str(path.relative_to(store.root)) for path in store.root.rglob("*.parquet"))


def test_a_packed_store_has_the_same_rows_in_few_files(tmp_path, capsys):
    store = filled(tmp_path)
    before = content(store)
    assert len(before[0]) == 3 and len(before[2]) == 9 and len(before[3]) == 6
    assert main([str(tmp_path)]) == 0
    assert "MiB" in capsys.readouterr().out
    packed = files(store)
    assert [name.split("-")[0] for name in packed] == [
        f"{t}/packed" for t in ("cells", "metrics", "responses", "samples")
    ]
    assert content(Store(tmp_path)) == before
    assert Store(tmp_path).cells(["c1", "c9"])["cell"].to_pylist() == ["c1"]
    assert Store(tmp_path).done(["c1"]) == {"c1": {"s0000", "s0001"}}
    pack(Store(tmp_path))
    assert content(Store(tmp_path)) == before and files(store) == packed, "nothing new: the same files"


@pytest.mark.full
def test_files_stay_below_a_size_and_no_cell_is_in_two(tmp_path):
    rows = pa.concat_tables([filled(tmp_path).responses().slice(0, 1)] * 600)
    rows = rows.set_column(1, rows.schema.field("cell"), pa.array([f"c{i // 20:02d}" for i in range(600)]))
    answers = [hashlib.sha256(bytes([i % 256, i // 256])).hexdigest() for i in range(600)]
    rows = rows.set_column(rows.schema.get_field_index("answer"), "answer", pa.array(answers))
    whole = len(packed(rows)[0])
    files = [pq.read_table(pa.BufferReader(data)) for data in packed(rows, whole // 2)]
    assert len(packed(rows)) == 1 and len(files) > 2
    assert all(len(data) <= whole // 2 for data in packed(rows, whole // 2))
    assert pa.concat_tables(files).select(rows.column_names).cast(rows.schema).equals(rows)
    cells = [set(file["cell"].to_pylist()) for file in files]
    assert sum(map(len, cells)) == len(set.union(*cells)) == 30
    assert len(packed(rows, 1)) == 30, "a cell stays whole"


@pytest.mark.slow
@each("slim, lot", [(False, 1), (True, 1 << 20)])
def test_a_large_store_is_packed_some_cells_at_a_time(tmp_path, monkeypatch, slim, lot):
    names = [f"c{number}" for number in range(9)]
    store = Store(tmp_path / "rows")
    store.write_cells([cell(name, budget_entries=9 - i) for i, name in enumerate(names[:-1])])
    with store.writer("w") as writer:
        for i in range(5):
            writer.commit([response(i, name) for name in names[: 9 - i % 2]])
    with store.writer("v") as writer:  # made again: the newer row counts
        writer.commit([response(3, name, answer="again") for name in names[:4]])
    for name in names:
        write_scores(store, [sample_score(i, name, value=0.5) for i in range(5)], [metric_row(name, value=0.5)])
    read: list[list[str]] = []
    aside: list[str] = []
    of, by_group = RegroupedBlocks.of, compact.read_by_group

    def reading(self, cells):
        read.append(cells)
        return of(self, cells)

    def grouping(path, schema):
        aside.append(path.name)
        return by_group(path, schema)

    whole = Store(shutil.copytree(store.root, tmp_path / "whole"))
    pack(whole, slim)
    monkeypatch.setattr(RegroupedBlocks, "of", reading)
    monkeypatch.setattr(compact, "read_by_group", grouping)
    monkeypatch.setattr(compact, "ROWS_AT_ONCE", 10)
    monkeypatch.setattr(compact, "BYTES_IN_MEMORY", 1)
    monkeypatch.setattr(compact, "BYTES_PER_LOT", lot)
    monkeypatch.setattr(compact, "ROWS_PER_BATCH", 8)
    pack(store, slim)
    assert read[0] == ["c7", "c6"] and [name for own in read for name in own] == [*names[7::-1], "c8"], (
        "alike, unknown last"
    )
    assert content(store) == content(Store(whole.root)) and len(aside) == 2
    assert len(files(store)) > len(files(whole)) and not [name for name in files(store) if "packed-" not in name]
    with store.writer("x") as writer:  # beside what is packed
        writer.commit([response(4, name, answer="once more") for name in names[:6]])
    whole = Store(shutil.copytree(store.root, tmp_path / "again"))
    pack(store, slim)
    monkeypatch.undo()
    pack(whole, slim)
    assert content(Store(store.root)) == content(Store(whole.root))
    assert len(aside) == 3, "packed files lie as they are packed"


def test_regrouped_rows_are_those_of_the_cells_in_the_order_in_which_they_came(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    for lot, batch in ((1, 1), (600, 5), (1 << 20, 5), (1 << 20, 1 << 20)):
        monkeypatch.setattr(compact, "BYTES_PER_LOT", lot)
        monkeypatch.setattr(compact, "ROWS_PER_BATCH", batch)
        cells = rng.integers(0, 9, 60)
        rows = pa.table({"cell": [f"c{cell}" for cell in cells], "n": range(60), "l": [[cell] * 3 for cell in cells]})
        wanted = [f"c{cell}" for cell in rng.permutation(9)[:7]] + ["c9"]
        tables = [rows.slice(start, 20) for start in (0, 20, 40)]
        with tempfile.TemporaryFile(dir=tmp_path) as file:
            found = RegroupedBlocks(file, rows.schema, tables, wanted)
            for start, end in ((0, 3), (3, 4), (2, 7), (7, 8), (0, 8)):
                own = found.of(wanted[start:end])
                for name in wanted[start:end]:
                    assert own.filter(pc.equal(own["cell"], name)).equals(rows.filter(pc.equal(rows["cell"], name)))
                assert set(own["cell"].to_pylist()) <= set(wanted[start:end])
        assert not list(tmp_path.iterdir()), "nothing is left"
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        found = RegroupedBlocks(file, rows.schema, [rows], wanted)
        file.seek(1000)
        file.write(b"?")
        with pytest.raises(StoreError, match="failed its checksum"):
            found.of(wanted)


def test_a_part_that_vanishes_while_it_is_packed_is_named(tmp_path, monkeypatch, capsys):
    store = filled(tmp_path)
    monkeypatch.setattr(compact, "ROWS_AT_ONCE", 1)
    (part, *_) = sorted((tmp_path / "responses").iterdir())

    def listed(self, table):
        found = files_of(self, table)
        if table == "responses":
            part.unlink(missing_ok=True)
        return found

    files_of = Store.files
    monkeypatch.setattr(Store, "files", listed)
    assert main([str(tmp_path)]) != 0
    said = capsys.readouterr().err
    assert f"{part} vanished while it was packed" in said and "Traceback" not in said
    monkeypatch.undo()
    assert store.responses().num_rows == 3, "the other part is as it was"


@pytest.mark.slow
def test_slim_rows_lose_what_the_schema_lists_and_nothing_else(tmp_path):
    store = Store(tmp_path)
    store.write_cells([cell("c0"), cell("c1")])
    lists = {"forced_kl": [0.0], "forced_agree": [True], "reference_nll": [0.5], "reference_samples": ["a", "b"]}
    times = {"decode_s": 0.5, "tpot_s": 0.1, "peak_resident_bytes": 7}
    with store.writer("w") as writer:
        for i in range(400):
            digests = {"kept_digest": f"{i:016x}", "fork_group": "p/1", **times}
            writer.commit([response(i, "c0", **digests, **lists), response(i, "c1", measured="own", **digests)])
        writer.commit([failed(400, "c0"), failed(400, "c1")])
    before = {(row["cell"], row["sample_id"]): row for row in store.responses().to_pylist()}
    assert main([str(tmp_path), "--slim"]) == 0
    after = {(row["cell"], row["sample_id"]): row for row in Store(tmp_path).responses().to_pylist()}
    assert after.keys() == before.keys() and all(row["slim"] for row in after.values())
    named = {name for names in SLIM for name in names.split(", ")}
    for key, row in after.items():
        own = row["measured"] == "own"
        same = row.keys() - named - {"slim"} | (times.keys() if own else set())
        assert {name: row[name] for name in same} == {name: before[key][name] for name in same}
        gone = named - {"committed_at", "kept_digest"} - (times.keys() if own else set())
        assert all(row[name] is None for name in gone)
        assert row["kept_digest"] in (None, before[key]["kept_digest"])
        assert row["committed_at"] == max(
            other["committed_at"] for (name, _), other in before.items() if name == key[0]
        )
    for name in ("c0", "c1"):
        digests = [row["kept_digest"] for (of, _), row in after.items() if of == name and row["kept_digest"]]
        assert 20 <= len(digests) <= 60, "about a tenth"
    pack(Store(tmp_path), slim=True)
    assert {key: after[key] for key in after} == {
        (row["cell"], row["sample_id"]): row for row in Store(tmp_path).responses().to_pylist()
    }
    with Store(tmp_path).writer("again") as writer:  # made again: the new row counts, whole
        writer.commit([response(0, "c0", answer="new")])
    row = next(row for row in Store(tmp_path).responses(["c0"]).to_pylist() if row["sample_id"] == "s0000")
    assert row["answer"] == "new" and row["slim"] is None


def test_the_digests_that_stay_depend_on_their_cell_and_sample_alone():
    def kept(cells, samples):
        rows = pa.array(cells).dictionary_encode(), pa.array(samples).dictionary_encode()
        return {
            pair for pair, stays in zip(zip(cells, samples, strict=True), rows_with_digest(*rows), strict=True) if stays
        }

    pairs = [(f"c{c}", f"s{s}") for c in range(9) for s in range(200)]
    whole = kept(*zip(*pairs, strict=True))
    assert kept(*zip(*pairs[::-1], strict=True)) == whole and 120 <= len(whole) <= 240
    some = [pair for pair in pairs if pair[0] in ("c3", "c7")]
    assert kept(*zip(*some, strict=True)) == {pair for pair in whole if pair in some}
    few = [("c0", "s0"), ("c0", "s1"), ("c1", "s0"), ("c1", "s1"), ("c1", "s2"), ("c1", "s3")]
    assert sorted(cell for cell, _ in kept(*zip(*few, strict=True))).count("c0") == 2
    assert len(kept(*zip(*few, strict=True))) >= 5
    assert kept((), ()) == set()


def test_packing_drops_cells_that_newer_numbers_supersede(tmp_path, capsys):
    store = Store(tmp_path)
    versions = {"old": None, "mid": 2, "new": 3, "part": 4}
    other = {"budget": {"budget_entries": 32}, "secret": {"parameters": '{"key":"<redacted>"}', "method_version": None}}
    store.write_cells([cell(name, method_version=version) for name, version in versions.items()])
    other |= {"secret2": {"parameters": '{"key":"<redacted>"}', "method_version": 2}}
    store.write_cells([cell(name, **changes) for name, changes in other.items()])
    names = [*versions, *other]
    for name in names:
        write_scores(store, [sample_score(i, name, value=0.5) for i in range(3)], [metric_row(name, value=0.5)])
    with store.writer("w") as writer:
        for i in range(3):
            writer.commit([response(i, name) for name in names if name != "part" or i < 2])
    assert main([str(tmp_path)]) == 0 and "dropped 2 cells" in capsys.readouterr().out
    left = set(names) - {"old", "mid"}  # the newest lacks a sample of theirs, the one before it does not
    for table in content(Store(tmp_path)):
        assert {row["cell"] for row in table} == left
    assert main([str(tmp_path)]) == 0 and "dropped" not in capsys.readouterr().out


def test_writing_to_a_packed_store_keeps_what_it_held(tmp_path):
    store = filled(tmp_path)
    before = content(store)
    pack(store)
    packed = {name: (tmp_path / name).stat().st_mtime_ns for name in files(store)}
    other = Store(tmp_path)
    write_scores(other, [sample_score(7, "c1", value=0.0)], [metric_row("c1", value=0.0)])
    assert other.metrics(["c1"])["value"].to_pylist() == [0.0] and other.metrics(["c0"])["value"].to_pylist() == [0.5]
    assert other.samples(["c1"])["sample_id"].to_pylist() == ["s0007"] and other.samples().num_rows == 7
    other.write_cells([cell("c3"), cell("c0")])
    with other.writer("late") as writer:
        writer.commit([response(5, name) for name in CELLS])
    assert other.cells().num_rows == 4 and other.responses().num_rows == 9
    write_scores(other, [sample_score(0, "c3", value=0.25)], [metric_row("c3", value=0.25)])
    after = content(other)
    assert packed == {name: (tmp_path / name).stat().st_mtime_ns for name in packed}, "packed files are written once"
    assert len(files(other)) == len(packed) + 6  # a cell, an answer, and two files for the scores of each of two cells
    pack(other)
    assert len(files(other)) == len(packed)
    assert content(Store(tmp_path)) == after and after[3][:2] == before[3][:2]


@pytest.mark.slow
def test_scores_that_are_written_while_packing_are_packed_or_stay(tmp_path):
    def late():
        write_scores(Store(tmp_path), [sample_score(7, "c1", value=0.0)], [metric_row("c1", value=0.0)])

    class Racing(Store):
        """A store of which a cell is scored again as soon as its metrics were read for packing."""

        def load(self, table, cells, columns=None, coded=False):
            rows = super().load(table, cells, columns, coded)
            if table == "metrics" and cells is None:
                process.start()
                process.join(0.5)
            return rows

    process = multiprocessing.get_context("fork").Process(target=late)
    filled(tmp_path)
    pack(Racing(tmp_path))
    process.join()
    store = Store(tmp_path)
    assert store.metrics(["c1"])["value"].to_pylist() == [0.0] == store.samples(["c1"])["value"].to_pylist()
    assert store.metrics().num_rows == 3 and store.samples().num_rows == 7


def test_a_store_that_is_being_written_is_not_packed(tmp_path, capsys):
    store = filled(tmp_path)
    with store.writer("busy") as writer:
        writer.commit([response(9, "c0")])
        with pytest.raises(StoreError, match="let the run finish"):
            pack(store)
        assert main([str(tmp_path)]) != 0
    assert "let the run finish" in capsys.readouterr().err
    assert main([str(tmp_path / "nothing")]) == 2
    assert "is not a folder of result rows" in capsys.readouterr().err


def test_without_locks_a_killed_run_keeps_its_journal_until_its_folder_has_locks(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", no_locks)
        store = filled(tmp_path)
        writer = store.writer("killed").__enter__()
        writer.commit([response(9, name) for name in CELLS])
        before = content(store)
        with pytest.raises(StoreError, match="copy a folder on a file system without locks"):
            pack(store)
        assert store.recover() == 0 and content(store) == before
    assert store.recover() and content(store) == before
    pack(store)
    assert store.journals() == [] and content(store) == before


class _Racing(Store):
    """A store to which a run adds a sample just after its responses were read."""

    def responses(self, cells=None, columns=None):
        rows = super().responses(cells, columns)
        with Store(self.root).writer("late") as writer:
            writer.commit([response(9, "c0")])
        return rows


def test_a_part_that_is_published_while_packing_stays(tmp_path):
    before = filled(tmp_path).responses().num_rows
    pack(_Racing(tmp_path))
    assert Store(tmp_path).responses().num_rows == before + 1


def scored_again(store: Store) -> None:
    write_scores(store, [sample_score(7, "c1", value=0.0)], [metric_row("c1", value=0.0)])


@pytest.mark.full
@each("doing", (pack, scored_again))
def test_a_kill_at_any_file_operation_loses_and_doubles_no_row(tmp_path, doing):
    model = filled(tmp_path / "model")
    allowed = [content(model)]
    if doing is scored_again:
        pack(model)
        after = Store(shutil.copytree(model.root, tmp_path / "after"))
        scored_again(after)
        allowed.append(content(after))  # the new scores of both tables, or the old ones
    for n in range(1, 300):
        store = Store(shutil.copytree(model.root, tmp_path / str(n)))
        child = os.fork()
        if child == 0:
            try:
                die_before(n, str(store.root))
                doing(store)
                os._exit(0)
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, -signal.SIGKILL)
        assert Store(store.root).recover() == 0 and not list(store.root.rglob(".*.tmp")), "leftovers of the killed"
        found = content(Store(store.root))
        assert found in allowed
        if code == 0:
            assert found == allowed[-1]
            return
    raise AssertionError("never came to the end")


def test_diagnostics_are_kept_by_sample_packed_and_replaced_by_newer_ones(tmp_path):
    """Of no cell: each sample is there when it is written, packing changes no row, and what comes later counts."""
    store = Store(tmp_path)

    def written(sample, value, measurements=("m", "n")):
        told = dict.fromkeys(("name", "model", "model_fingerprint", "dtype", "dataset", "dataset_fingerprint"), "a")
        told |= {"settings": "{}", "versions": "{}", "quantity": "q", "part": "", "sample_id": sample, "layer": 0}
        store.write_diagnostics(
            pa.Table.from_pylist(
                [told | {"measurement": one, "value": value, "head": None, "x": 0.5} for one in measurements]
            )
        )

    def held():
        return {(row["measurement"], row["sample_id"]): row["value"] for row in store.diagnostics().to_pylist()}

    written("first", 1.0)
    written("second", 2.0, ("m",))
    assert store.diagnosed(["m", "n", "o"]) == {"m": {"first", "second"}, "n": {"first"}, "o": set()}
    before = held()
    pack(store)
    assert [path.name[:7] for path in (tmp_path / "diagnostics").iterdir()] == ["packed-"] and held() == before
    written("first", 3.0)
    assert held() == before | {("m", "first"): 3.0, ("n", "first"): 3.0}
    pack(store)
    assert len(store.diagnostics()) == 3 and held()["n", "first"] == 3.0
    with pytest.raises(StoreError, match="rows of 2 samples"):
        store.write_diagnostics(store.diagnostics().drop(["schema_version", "committed_at"]))
