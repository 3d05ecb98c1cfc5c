"""Meets a full disk: `full_disk_child.py ROOT`. RLIMIT_FSIZE stands in for the disk: a write beyond it fails (EFBIG)."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from store_examples import metric_row, response, sample_score, write_scores

from mmkv_bench.errors import StoreError
from mmkv_bench.store import compact
from mmkv_bench.store.compact import pack
from mmkv_bench.store.store import Store


def limit(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def refused(act, *parts: str) -> None:
    try:
        act()
    except StoreError as problem:
        assert all(part in str(problem) for part in parts), problem
        return
    raise AssertionError("nothing was refused")


def ids(store: Store) -> list[str]:
    return store.responses(columns=["sample_id"])["sample_id"].to_pylist()


def main(root: Path) -> None:
    store = Store(root)
    write_scores(store, [sample_score(0)], [metric_row(value=1.0)])
    scores = (store.samples(), store.metrics())
    with store.writer("w") as writer:
        writer.commit([response(0)])
        (journal,) = (root / "journal").glob("*.jsonl")
        size = journal.stat().st_size

        # A commit whose line fits in part: cut off again, and the store reads as before.
        limit(size + 100)
        refused(lambda: writer.commit([response(1)]), "Free space", "run the same command again", str(root))
        assert journal.stat().st_size == size
        assert ids(store) == ["s0000"]

        # Publishing and scoring: no part, no leftovers, the rows stay where they were.
        limit(50)
        refused(writer.publish, "they stay in the journal", "Free space")
        many = [sample_score(i) for i in range(100)]
        refused(lambda: write_scores(store, many, [metric_row(value=0.5)]), "writing scores")
        assert not list((root / "responses").iterdir())
        assert not list(root.rglob("*.tmp"))
        assert ids(store) == ["s0000"]
        assert scores[0].equals(store.samples())
        assert scores[1].equals(store.metrics())

        # Space again: the same writer goes on.
        limit(resource.RLIM_INFINITY)
        writer.commit([response(1)])
        writer.commit([response(2)])
    assert ids(store) == ["s0000", "s0001", "s0002"]
    assert not list((root / "journal").iterdir())

    # Full from the first write on.
    limit(10)
    fresh = Store(root / "fresh")
    refused(lambda: fresh.writer("w").commit([response(0)]), "Free space")
    limit(resource.RLIM_INFINITY)
    assert ids(fresh) == []
    with fresh.writer("w") as writer:
        writer.commit([response(0)])
    assert ids(fresh) == ["s0000"]

    # Packing what memory does not hold: what is put aside for it needs room, too.
    with store.writer("w") as writer:
        writer.commit([response(3, answer=os.urandom(1 << 15).hex())])
    compact.ROWS_AT_ONCE = 1
    rows, parts = store.responses(), sorted((root / "responses").iterdir())
    limit(1 << 16)  # what is packed is smaller
    refused(lambda: pack(store), "packing failed", "Free space")
    limit(resource.RLIM_INFINITY)
    assert store.responses().equals(rows) and sorted((root / "responses").iterdir()) == parts
    pack(store)
    assert store.responses().equals(rows) and sorted((root / "responses").iterdir()) != parts

    # A full disk while an exception is under way: the exception stays the one that is seen.
    try:
        with Store(root / "other").writer("w") as writer:
            writer.commit([response(0)])
            limit(50)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    limit(resource.RLIM_INFINITY)
    assert ids(Store(root / "other")) == ["s0000"]
    assert Store(root / "other").recover() == 1
    print("all as promised")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
