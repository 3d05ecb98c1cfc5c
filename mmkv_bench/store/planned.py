"""What jobs that have not begun are to answer: cells without a row, noted beside the rows by who submits the jobs.

A cell's row is written by the process that answers it first, which alone knows its device. Until then `status` counts it from
here. Rows decide what is done: a note of a cell that has a row counts for nothing, and the file may be removed at any time. Its
first line is the checksum of the rest, so that damage is said and counts nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mmkv_bench.store.digests import checksum
from mmkv_bench.store.files import disk_errors, write_bytes

if TYPE_CHECKING:
    from mmkv_bench.store.store import Store

_NAME = "planned.json"
log = logging.getLogger(__name__)


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
    """Cell -> (dataset, samples); none where there is no file, or a damaged one, which is logged."""
    file = root / _NAME
    try:
        raw = file.read_bytes()
        first, _, rest = raw.partition(b"\n")
        if raw[:1] != b"{":  # older files have no checksum
            if first != checksum(rest).encode():
                raise ValueError(first)
            raw = rest
        return {str(name): (str(dataset), int(samples)) for name, (dataset, samples) in json.loads(raw).items()}
    except OSError:
        return {}
    except (ValueError, TypeError, AttributeError):
        log.warning("%s is damaged and counts nothing; the next sweep writes it again, or remove it", file)
        return {}


def _write(root: Path, cells: Mapping[str, tuple[str, int]]) -> None:
    with disk_errors("noting what is planned", root):
        if cells:
            text = json.dumps(cells).encode()
            write_bytes(root / _NAME, checksum(text).encode() + b"\n" + text)
        else:
            (root / _NAME).unlink(missing_ok=True)
