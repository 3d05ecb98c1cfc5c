"""Cells whose method has newer numbers in the same store: packing drops them, as their answers are nobody's any more."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from mmkv_bench.secrecy import REDACTED
from mmkv_bench.store.interface import Opened
from mmkv_bench.store.schema import CELL_COLUMNS

_REST = [column.name for column in CELL_COLUMNS if column.identity and column.name != "method_version"]


def superseded(store: Opened, cells: pa.Table) -> set[str]:
    """Cells of which `store` holds the same cell in a newer `method_version`, scored, with all samples of the older.

    cells: the table of that name, whole. Cells that hide a secret are left alone: two of them may look the same and differ
    in it.
    """
    groups: dict[tuple[Any, ...], list[tuple[int, str]]] = {}
    for row in cells.select([*_REST, "method_version", "cell"]).to_pylist():
        same = tuple(row[name] for name in _REST)
        if REDACTED not in str(same):
            groups.setdefault(same, []).append((row["method_version"] or 1, row["cell"]))
    several = {same: sorted(found) for same, found in groups.items() if len({version for version, _ in found}) > 1}
    names = {cell for found in several.values() for _, cell in found}
    if not names:
        return set()
    answered = store.done(names)
    scored = set(store.metrics(names, ["cell"])["cell"].to_pylist())
    return {
        old
        for found in several.values()
        for version, old in found
        if any(newer > version and new in scored and answered[new] >= answered[old] for newer, new in found)
    }
