"""Status from what is remembered of each file: the same as a slow count of all rows, whatever became of the memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest
from store_examples import ENVIRONMENT, cell, metric_row, response, sample_score, write_scores

from mmkv_bench import file_state
from mmkv_bench.store import parts, tally
from mmkv_bench.store.compact import pack
from mmkv_bench.store.store import Store
from mmkv_bench.tables.status import status


@pytest.fixture
def opened(monkeypatch):
    """Names of the files that were read; every file is worth remembering, at once."""
    read, real = [], parts.read_file

    def reading(path, *rest):
        read.append(f"{path.parent.name}/{path.name}")
        return real(path, *rest)

    monkeypatch.setattr(parts, "read_file", reading)
    monkeypatch.setattr(tally, "MIN_FILES", 0)
    monkeypatch.setattr(file_state, "SETTLED_NS", -1)
    return read


def slowly(store: Store) -> dict:
    """What a status says, counted row by row."""
    kept = {}
    for row in store.responses().to_pylist():
        kept[row["cell"], row["sample_id"]] = row
    cells = {row["cell"]: row["dataset"] for row in store.cells().to_pylist()}
    n = {}
    for row in store.metrics().to_pylist():
        n[row["cell"]] = max(n.get(row["cell"], 0), row["n"])
    found = {}
    for dataset in sorted(set(cells.values())):
        own = [name for name in cells if cells[name] == dataset]
        answered = {name: [row for (of, _), row in kept.items() if of == name] for name in own}
        samples = len({row["sample_id"] for rows in answered.values() for row in rows})
        found[dataset] = {
            "cells": len(own),
            "samples": samples,
            "rows": sum(map(len, answered.values())),
            "complete": sum(len(rows) >= samples for rows in answered.values()),
            "failed": sum(row["status"] != "ok" for rows in answered.values() for row in rows),
            "scored": sum(0 < n.get(name, 0) >= len(answered[name]) for name in own),
        }
    failures = Counter(
        (cells[row["cell"]], row["status"], row["error"]) for row in kept.values() if row["status"] != "ok"
    )
    return {"datasets": found, "failures": dict(failures)}


def quickly(store: Store) -> dict:
    found = status(store)
    names = ("cells", "samples", "rows", "complete", "failed", "scored")
    return {
        "datasets": {one.dataset: {name: getattr(one, name) for name in names} for one in found.datasets},
        "failures": dict(found.failures),
    }


def drawn(rng: np.random.Generator, name: str, sample: int, dataset: str) -> dict:
    row = response(sample, name, dataset=dataset)
    if rng.random() < 0.2:
        row |= {
            "status": str(rng.choice(["oom", "nan"])),
            "error": str(rng.choice(["no room", "a nan"])),
            "answer": None,
        }
    return row


@pytest.mark.slow
def test_status_is_a_slow_count_of_rows_that_come_at_random(tmp_path, opened):
    """Parts, journals, samples answered again in the same file or another, scores in layers, packed files."""
    rng = np.random.default_rng(0)
    store = Store(tmp_path / "rows")
    names = {f"c{number}": f"d{number % 2}" for number in range(4)}
    store.write_cells([cell(name, dataset=dataset) for name, dataset in names.items()])
    writer = store.writer("live", publish_every=1000)
    for step in range(9):
        with store.writer(f"w{step}", publish_every=int(rng.integers(1, 4))) as made:
            for sample in rng.integers(0, 6, 3):
                for dataset in ("d0", "d1"):
                    own = [name for name in names if names[name] == dataset and rng.random() < 0.7]
                    if own:
                        made.commit([drawn(rng, name, int(sample), dataset) for name in own])
        if step in (3, 7):
            writer.commit([drawn(rng, "c0", step, "d0"), drawn(rng, "c2", step, "d0")])
        if step in (4, 9):
            scored = [name for name in names if rng.random() < 0.5]
            for name in scored:
                metric = metric_row(name, dataset=names[name], n=50, n_ok=50)
                write_scores(store, [sample_score(0, name, dataset=names[name])], [metric])
        if step == 8:
            writer.publish()
            pack(store)
        before = status(store)
        assert quickly(store) == slowly(store), step
        assert (before.writers, before.running) == ((1, 2) if step in (3, 4, 5, 6, 7) else (0, 0)), step
    writer.publish()


def test_only_new_files_are_read_and_a_lost_or_damaged_memory_is_made_again(tmp_path, opened):
    store = Store(tmp_path / "rows")
    store.write_cells([cell(f"c{number}") for number in range(3)])
    for number in range(3):
        with store.writer(f"w{number}") as writer:
            writer.commit([response(number, f"c{one}") for one in range(3)])
    memory = store.root / tally.INDEX_FOLDER
    assert not memory.exists()
    wanted = slowly(store)
    opened.clear()
    assert quickly(store) == wanted and len(opened) == 6
    opened.clear()
    assert quickly(store) == wanted and opened == []

    with store.writer("w3") as writer:
        writer.commit([response(3, "c0")])
    wanted = slowly(store)
    opened.clear()
    assert quickly(store) == wanted and len(opened) == 1

    for file in memory.iterdir():
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    opened.clear()
    assert quickly(store) == wanted and len(opened) == 7
    shutil.rmtree(memory)
    assert quickly(store) == wanted
    other = Store(tmp_path / "copied")  # the memory of other files
    shutil.copytree(store.root, other.root)
    opened.clear()
    assert quickly(other) == wanted and len(opened) == 7


READ_ONLY = """
import sys
sys.path.insert(0, sys.argv[2])
from store_examples import bind_to_permissions
bind_to_permissions()
from mmkv_bench import file_state
from mmkv_bench.store import tally
tally.MIN_FILES, file_state.SETTLED_NS = 0, -1
from mmkv_bench.cli.main import main
raise SystemExit(main(["status", sys.argv[1]]) or "pandas" in sys.modules or "torch" in sys.modules)
"""


def test_a_store_that_cannot_be_written_has_its_status_without_pandas_or_torch(tmp_path):
    store = Store(tmp_path / "rows")
    store.write_cells([cell()])
    with store.writer("w") as writer:
        writer.commit([response(0)])
    write_scores(store, [sample_score(0)], [metric_row(n=1, n_ok=1)])
    os.chmod(store.root, 0o555)
    done = subprocess.run(
        [sys.executable, "-c", READ_ONLY, str(store.root), os.path.dirname(__file__)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT | {"PATH": ""},
    )
    os.chmod(store.root, 0o755)
    assert done.returncode == 0, done.stderr
    assert "1 of 1 answers" in done.stdout and not (store.root / tally.INDEX_FOLDER).exists()


def test_of_some_cells_only_their_row_groups_are_decoded(tmp_path, monkeypatch):
    rows = [response(sample, name) for name in ("c0", "c1", "c2") for sample in range(2)]
    store = Store(tmp_path / "rows")
    monkeypatch.setattr(parts, "ROW_GROUP", 2)
    with store.writer("w") as writer:
        for sample in range(2):
            writer.commit([row for row in rows if row["doc_id"] == sample])
    whole = store.responses()
    decoded, looked, real = [], [], pq.ParquetFile.read_row_group

    def decoding(file, number, columns):
        only_cells = set(columns) == {"schema_version", "cell"}
        (looked if only_cells else decoded).append(number)
        return real(file, number, columns)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", decoding)
    for coded in (False, True):
        for wanted, groups in ((["c1"], [1]), (["c2", "c0"], [0, 2]), (["other"], []), ([], [])):
            decoded.clear()
            found = store.responses(wanted, coded=coded)
            assert decoded == groups
            assert found.to_pylist() == [row for row in whole.to_pylist() if row["cell"] in wanted]
    assert looked == [0, 1, 2]  # once
    with store.writer("w") as writer:
        writer.commit([response(2, "c1"), response(2, "c3")])
    assert store.responses(["c3"])["doc_id"].to_pylist() == [2] and looked == [0, 1, 2, 0]  # the new part's alone
    assert store.responses(["c1"])["doc_id"].to_pylist() == [0, 1, 2]
