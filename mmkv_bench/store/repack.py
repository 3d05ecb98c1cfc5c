"""From many files, as runs write them, to the few large ones that publishing needs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from mmkv_bench.errors import StoreError
from mmkv_bench.store.digests import checksum
from mmkv_bench.store.files import disk_errors, sync_folder, write_bytes
from mmkv_bench.store.interface import Opened
from mmkv_bench.store.packing import is_packed, ordered, packed
from mmkv_bench.store.slim import slim as slimmed
from mmkv_bench.store.superseded import superseded
from mmkv_bench.store.together import is_together


def pack(store: Opened, slim: bool = False) -> int:
    """Writes the tables of `store` as few files, each below 10 MB, in the place of what was there.

    Args:
        slim: response rows lose for good what `schema.SLIM` lists, as rows in git do.

    Returns:
        How many cells it dropped because the store holds newer numbers of their method.

    Raises:
        StoreError: samples are still in journals.
    """
    with disk_errors("packing", store.root), store.locked():
        return _pack(store, slim)


def _pack(store: Opened, slim: bool) -> int:
    if store.journals():
        raise StoreError(
            f"{store.root} has samples in journals: a run is writing, or was interrupted; let it finish (the same "
            "command continues it) and pack then"
        )
    cells, dropped = store.cells(), superseded(store)
    for table in ("metrics", "samples", "timings", "responses", "cells"):  # cells last: no row is ever without its cell
        # Listed before the rows are read: a file that a run adds in between stays.
        before = store.files(table)
        rows = {"responses": store.responses, "timings": store.timings}.get(table, partial(store.load, table, None))()
        if not rows.num_rows:
            continue
        if dropped:
            rows = rows.filter(pc.invert(pc.is_in(rows["cell"], value_set=pa.array(sorted(dropped)))))
        rows = slimmed(rows) if slim and table == "responses" else rows
        _replace(store.root / table, before, packed(ordered(rows, cells)))
    return len(dropped)


def _replace(folder: Path, before: list[Path], files: list[bytes]) -> None:
    """Packed files in the place of all that was there, in an order that a kill at any moment leaves readable: what counts
    before other files is removed after them."""
    placed = {folder / f"packed-{checksum(data)}.parquet": data for data in files}
    for path, data in placed.items():
        write_bytes(path, data)
    gone = [path for path in before if path not in placed]
    for path in sorted(gone, key=lambda path: (is_together(path), not is_packed(path), path.name)):
        path.unlink(missing_ok=True)
    sync_folder(folder)
