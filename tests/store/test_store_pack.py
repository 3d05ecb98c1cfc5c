"""Packing: one file per table, the same rows; writing unpacks; a kill at any file operation loses and doubles nothing."""

from __future__ import annotations

import os
import signal

import pytest
from crash_points import die_before
from store_examples import cell, metric_row, response, sample_score

from mmkv_bench.errors import StoreError
from mmkv_bench.store.pack import main
from mmkv_bench.store.store import Store

CELLS = ("c0", "c1", "c2")


def filled(root, journal: bool = False) -> Store:
    store = Store(root)
    store.write_cells([cell(name) for name in CELLS])
    for name in CELLS:
        store.write_scores(name, [sample_score(i, name, value=0.5) for i in range(3)], [metric_row(name, value=0.5)])
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


def test_a_packed_store_has_the_same_rows_in_one_file_per_table(tmp_path, capsys):
    store = filled(tmp_path)
    before = content(store)
    assert len(before[0]) == 3 and len(before[2]) == 9 and len(before[3]) == 6
    assert main([str(tmp_path)]) == 0
    assert "MiB" in capsys.readouterr().out
    assert files(store) == [f"{table}/packed.parquet" for table in ("cells", "metrics", "responses", "samples")]
    assert content(Store(tmp_path)) == before
    assert Store(tmp_path).cells(["c1", "c9"])["cell"].to_pylist() == ["c1"]
    assert Store(tmp_path).done(["c1"]) == {"c1": {"s0000", "s0001"}}
    Store(tmp_path).pack()
    assert content(Store(tmp_path)) == before


def test_writing_to_a_packed_store_keeps_what_it_held(tmp_path):
    store = filled(tmp_path)
    before = content(store)
    store.pack()
    other = Store(tmp_path)
    other.write_scores("c1", [sample_score(7, "c1", value=0.0)], [metric_row("c1", value=0.0)])
    assert other.metrics(["c1"])["value"].to_pylist() == [0.0] and other.metrics(["c0"])["value"].to_pylist() == [0.5]
    assert other.samples(["c1"])["sample_id"].to_pylist() == ["s0007"] and other.samples().num_rows == 7
    other.write_cells([cell("c3"), cell("c0")])
    with other.writer("late") as writer:
        writer.commit([response(5, name) for name in CELLS])
    assert other.cells().num_rows == 4 and other.responses().num_rows == 9
    after = content(other)
    other.pack()
    assert content(Store(tmp_path)) == after and after[3][:2] == before[3][:2]


def test_a_store_that_is_being_written_is_not_packed(tmp_path, capsys):
    store = filled(tmp_path)
    with store.writer("busy") as writer:
        writer.commit([response(9, "c0")])
        with pytest.raises(StoreError, match="let it finish"):
            store.pack()
        assert main([str(tmp_path)]) != 0
    assert "let it finish" in capsys.readouterr().err
    assert main([str(tmp_path / "nothing")]) == 2
    assert "holds no result rows" in capsys.readouterr().err


class _Racing(Store):
    """A store to which a run adds a sample just after its responses were read."""

    def responses(self, cells=None, columns=None):
        rows = super().responses(cells, columns)
        with Store(self.root).writer("late") as writer:
            writer.commit([response(9, "c0")])
        return rows


def test_a_part_that_is_published_while_packing_stays(tmp_path):
    before = filled(tmp_path).responses().num_rows
    _Racing(tmp_path).pack()
    assert Store(tmp_path).responses().num_rows == before + 1


@pytest.mark.parametrize("doing", ("pack", "unpack"))
def test_a_kill_at_any_file_operation_loses_and_doubles_no_row(tmp_path, doing):
    before = content(filled(tmp_path / "model"))
    for n in range(1, 300):
        store = filled(tmp_path / str(n))
        if doing == "unpack":
            store.pack()
        child = os.fork()
        if child == 0:
            try:
                die_before(n, str(store.root))
                getattr(store, doing)()
                os._exit(0)
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, -signal.SIGKILL)
        found = content(Store(store.root))
        for table, expected in zip(found, before, strict=True):  # commit times differ between stores
            assert [{k: v for k, v in row.items() if not k.endswith("_at")} for row in table] == [
                {k: v for k, v in row.items() if not k.endswith("_at")} for row in expected
            ]
        if code == 0:
            return
    raise AssertionError("never came to the end")
