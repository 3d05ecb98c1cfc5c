"""What jobs that have not begun are to answer: cells without a row, noted beside the rows by who submits the jobs.

A cell's row is written by the process that answers it first, which alone knows its device. Until then `status` counts it from
here. Rows decide what is done: a note of a cell that has a row counts for nothing, and the file may be removed at any time.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mmkv_bench.store.files import disk_errors, write_bytes

if TYPE_CHECKING:
    from mmkv_bench.store.store import Store

_NAME = "planned.json"


def note(store: Store, cells: Mapping[str, tuple[str, int]]) -> None:
    """Adds cells, hash -> (dataset, samples). Raises StoreError where the folder cannot be written."""
    store.prepare()
    with store.locked():
        _write(store.root, {**noted(store.root), **cells})


def forget(store: Store, cells: Collection[str]) -> None:
    """Takes them out again. Raises StoreError where the folder cannot be written."""
    if (store.root / _NAME).exists():
        with store.locked():
            _write(store.root, {name: told for name, told in noted(store.root).items() if name not in cells})


def noted(root: Path) -> dict[str, tuple[str, int]]:
    """Cell -> (dataset, samples); none where the file is not there or cannot be read."""
    try:
        found = json.loads((root / _NAME).read_text(encoding="utf-8"))
        return {str(name): (str(dataset), int(samples)) for name, (dataset, samples) in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(root: Path, cells: Mapping[str, tuple[str, int]]) -> None:
    with disk_errors("noting what is planned", root):
        if cells:
            write_bytes(root / _NAME, json.dumps(cells).encode())
        else:
            (root / _NAME).unlink(missing_ok=True)
