"""Rows of `cells`: their user-written columns without secrets and folders, and the refusal of rows that are another cell's
or of no kind that a run writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import StoreError
from mmkv_bench.secrecy import REDACTED, without_secrets
from mmkv_bench.store.digests import canonical_json
from mmkv_bench.store.schema import CELL_COLUMNS

if TYPE_CHECKING:
    import pyarrow as pa


_FOLDER = re.compile(r"(/|~/).*?([^/]+)/*", re.DOTALL)


def redact(value: Any) -> Any:
    """`value` (nested mappings and lists) without secrets, and absolute paths by their last part."""
    return without_secrets(value, also=_without_folders)


def _without_folders(text: str) -> str:
    path = _FOLDER.fullmatch(text)
    return text if path is None else f".../{path[2]}"


def shown(row: Mapping[str, Any]) -> dict[str, str]:
    """The columns that hold what a user wrote, without secrets; those that have none stay as they are, to the letter."""
    columns = {"config": canonical_json(redact(json.loads(row["config"]))), "model": without_secrets(row["model"])}
    for name in ("parameters", "generation"):
        value = json.loads(row[name])
        if (hidden := without_secrets(value)) != value:
            columns[name] = canonical_json(hidden)
    return columns


_HALVES = ("bfloat16", "float16")


def processor(device: str | None, cpu: str | None, dtype: str, times: bool = False) -> str:
    """The kind of CPU where rows that a CPU made hang on it: in half precision, whose last digits follow from a CPU's
    instructions, and of times; "" elsewhere."""
    return str(cpu or "") if device == "cpu" and (times or dtype in _HALVES) else ""


def refuse_other(stored: Mapping[str, Any], row: Mapping[str, Any], root: Path) -> None:
    """Raise StoreError when the two rows of one cell differ in a column that its hash covers."""
    for column in CELL_COLUMNS:
        old, new = stored[column.name], row[column.name]
        if REDACTED in f"{old}{new}":  # in one of them, which need not have known the same secrets
            continue
        if column.identity and (json.loads(old) != json.loads(new) if column.json else old != new):
            raise StoreError(
                f"cell {row['cell']} under {root} was stored with {column.name} {old!r}; now it is {new!r}. "
                "Rows of the two must not mix: use another result folder, or go back to what it was."
            )


_OBJECTS = ("model", "data", "datasets", "methods", "variants", "calibrations")
_OF_OBJECTS = ("datasets", "methods", "variants")


def refuse_malformed(rows: pa.Table, root: Path) -> None:
    """Raise StoreError when a configuration, parameters or generation settings are of no kind that a run writes."""
    for name, problem_of in (("config", _malformed), ("parameters", _no_object), ("generation", _no_object)):
        if name not in rows.column_names:
            continue
        for text in rows[name].unique().to_pylist():
            if text is not None and (problem := problem_of(text)):
                raise StoreError(
                    f"{root}: the column {name} of cells was not written by a run ({problem}). Restore the files in cells/ "
                    "from a copy, or leave that folder out"
                )


def _no_object(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return "no JSON"
    return None if isinstance(value, dict) else f"{shortened(value)} is not a JSON object"


@lru_cache(maxsize=256)
def _malformed(text: str) -> str | None:
    if (problem := _no_object(text)) is not None:
        return problem
    config = json.loads(text)
    inner = [(key, config[key]) for key in _OBJECTS if config.get(key) is not None]
    inner += [
        (f"{key}.{name}", node) for key, value in inner if key in _OF_OBJECTS and isinstance(value, dict)
        for name, node in value.items()
    ]  # fmt: skip
    wrong = [f"{key} is {shortened(value)}, no object" for key, value in inner if not isinstance(value, dict)]
    if not isinstance(limit := config.get("limit"), int | None):
        wrong.append(f"limit is {shortened(limit)}, no number")
    return wrong[0] if wrong else None


def shortened(value: Any) -> str:
    """The value for a message, shortened."""
    return f"{value!r:.60}"
