"""Rows of `cells`: what is shown of what a user wrote, and whether two rows of one hash are the same cell."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmkv_bench.errors import StoreError
from mmkv_bench.secrecy import REDACTED, without_secrets
from mmkv_bench.store.digests import canonical_json
from mmkv_bench.store.redaction import redact
from mmkv_bench.store.schema import CELL_COLUMNS


def shown(row: Mapping[str, Any]) -> dict[str, str]:
    """The columns that hold what a user wrote, without secrets; those that have none stay as they are, to the letter."""
    found = {"config": canonical_json(redact(json.loads(row["config"]))), "model": without_secrets(row["model"])}
    for name in ("parameters", "generation"):
        value = json.loads(row[name])
        if (hidden := without_secrets(value)) != value:
            found[name] = canonical_json(hidden)
    return found


def refuse_other(stored: Mapping[str, Any], row: Mapping[str, Any], root: Path) -> None:
    """Raises StoreError when the two rows of one cell differ in what its hash covers."""
    for column in CELL_COLUMNS:
        old, new = stored[column.name], row[column.name]
        if REDACTED in f"{old}{new}":  # in one of them, which need not have known the same secrets
            continue
        if column.identity and (json.loads(old) != json.loads(new) if column.json else old != new):
            raise StoreError(
                f"cell {row['cell']} under {root} was stored with {column.name} {old!r}; now it is {new!r}. "
                "Rows of the two must not mix: use another result folder, or go back to what it was."
            )
