"""Rows as Python dicts: checked against the schema before writing, converted to Arrow tables for reading.

Rows of `cells` are stored without secrets and without folders in user input. Each row of `cells` and `metrics` has a
digest of its other columns, which detects a changed value even in a file with a correct checksum.
"""

from __future__ import annotations

import json
import math
import numbers
import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from mmkv_bench.errors import StoreError, nearest
from mmkv_bench.secrecy import REDACTED, without_secrets
from mmkv_bench.store.files import canonical_json, checksum
from mmkv_bench.store.schema import CELL_COLUMNS, COLUMNS, SCHEMAS, TIME, SchemaColumn

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_TYPE_NAMES = {"string": "text", "int64": "a 64-bit integer", "int32": "a 32-bit integer", "double": "a finite number"}


def check(table: str, row: Mapping[str, Any], stamps: Mapping[str, Any]) -> dict[str, Any]:
    """Check a row of `table`. Return it with all columns, in order, as plain Python values.

    stamps: values of the columns that the store fills.

    Raises StoreError, which names the column: an unknown or missing column, a wrong type, a value that is not allowed,
    or a broken rule between columns (such as an answer in a failed row).
    """
    known_columns(table, row)
    checked_row: dict[str, Any] = {}
    is_ok = row.get("status", "ok") == "ok"
    for column in COLUMNS[table]:
        if column.stamped and column.name in row:
            raise StoreError(f"{table}: column {column.name!r} is written by the store; leave it out of the row")
        value = stamps.get(column.name) if column.stamped else row.get(column.name)
        if value is None:
            if column.required == "always" or (column.required == "ok" and is_ok):
                condition = "" if column.required == "always" else " when status is 'ok'"
                raise StoreError(
                    f"{table}: column {column.name!r} is missing or null; it is required{condition} ({column.doc})"
                )
            checked_row[column.name] = None
        else:
            checked_row[column.name] = _value(table, column, value)
    if table in _RULES_BY_TABLE:
        _RULES_BY_TABLE[table](checked_row)
    return checked_row


def known_columns(table: str, columns: Iterable[str]) -> list[str]:
    """Return the column names `columns` as a list. Raises StoreError for a name that `table` does not have."""
    column_names = list(columns)
    for name in column_names:
        if name not in SCHEMAS[table].names:
            raise StoreError(f"{table}: unknown column {name!r}; {nearest(str(name), SCHEMAS[table].names)}")
    return column_names


def safe_name(what: str, name: str) -> str:
    """Return `name` if it is a safe file name, else raise StoreError. what: the kind of name, for the message."""
    if not _FILE_NAME.fullmatch(name):
        raise StoreError(f"{what} {name!r} cannot name a file; use letters, digits, '.', '_' and '-', at most 128")
    return name


def to_table(table: str, rows: Iterable[Mapping[str, Any]], columns: Iterable[str] | None = None) -> pa.Table:
    """Convert rows made by `check` to an Arrow table. Times may be datetimes or ISO text. columns: None keeps all."""
    schema = SCHEMAS[table] if columns is None else pa.schema([SCHEMAS[table].field(name) for name in columns])
    time_columns = [field.name for field in schema if field.type == TIME]
    plain_rows = []
    for row in rows:
        # A nullable column may be missing in a row that an earlier version wrote to a journal.
        selected_values = {field.name: row.get(field.name) if field.nullable else row[field.name] for field in schema}
        for name in time_columns:
            if isinstance(text := selected_values[name], str):
                selected_values[name] = datetime.fromisoformat(text)
        plain_rows.append(selected_values)
    return pa.Table.from_pylist(plain_rows, schema=schema)


def _value(table: str, column: SchemaColumn, value: Any) -> Any:
    try:
        converted = _convert(value, column.type)
    except (TypeError, ValueError) as problem:
        raise StoreError(
            f"{table}: column {column.name!r} needs {_describe(column.type)}, got {problem} ({column.doc})"
        ) from None
    if column.allowed and converted not in column.allowed:
        raise StoreError(f"{table}: column {column.name!r} is {converted!r}; {nearest(converted, column.allowed)}")
    if column.json:
        try:
            json.loads(converted, parse_constant=_refuse_constant)
        except ValueError as problem:
            raise StoreError(
                f"{table}: column {column.name!r} is not JSON ({problem}); got {converted[:80]!r}"
            ) from None
    return converted


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _describe(type: pa.DataType) -> str:
    if pa.types.is_list(type):
        return f"a list, each item {_describe(type.value_type)}"
    return _TYPE_NAMES.get(str(type), "True or False" if pa.types.is_boolean(type) else "a time with a zone")


def _convert(value: Any, type: pa.DataType) -> Any:
    """Convert `value` to a plain value of the column type, or raise TypeError or ValueError with the value."""
    if pa.types.is_list(type):
        if isinstance(value, list | tuple):
            return [_convert(item, type.value_type) for item in value]
    elif pa.types.is_string(type):
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError(f"{_got(value)}, which is not valid Unicode text") from None
            return str(value)
    elif pa.types.is_boolean(type):
        if _is_bool(value):
            return bool(value)
    elif pa.types.is_integer(type):
        if isinstance(value, numbers.Integral) and not _is_bool(value):
            if -(2 ** (type.bit_width - 1)) <= value < 2 ** (type.bit_width - 1):
                return int(value)
            raise ValueError(f"{_got(value)}, out of range")
    elif pa.types.is_floating(type):
        if isinstance(value, numbers.Real) and not _is_bool(value) and math.isfinite(value):
            return float(value)
    elif isinstance(value, datetime) and value.tzinfo is not None:
        return value
    raise TypeError(_got(value))


def _is_bool(value: Any) -> bool:
    return value.__class__.__name__ in ("bool", "bool_")  # numpy's is no subclass of Python's


def _got(value: Any) -> str:
    return f"{value!r:.80} ({value.__class__.__name__})"


def _response_rules(row: Mapping[str, Any]) -> None:
    if row["status"] != "ok" and row["answer"] is not None:
        raise StoreError(
            f"responses: column 'answer' must be null when status is {row['status']!r}, because a failed sample "
            f"is never scored as text; got {row['answer'][:80]!r}"
        )
    _check_error("responses", row)


def _cell_rules(row: Mapping[str, Any]) -> None:
    has_budget = {"entries": row["budget_entries"] is not None, "fraction": row["budget_fraction"] is not None}
    for kind, present in has_budget.items():
        if present != (row["budget_kind"] == kind):
            raise StoreError(
                f"cells: column 'budget_{kind}' must be given if budget_kind is {kind!r}, and only then; got "
                f"budget_kind {row['budget_kind']!r} with {row[f'budget_{kind}']!r}"
            )


def _timing_rules(row: Mapping[str, Any]) -> None:
    _check_error("timings", row)
    if (row["seconds"] is not None) != (row["status"] == "ok" and row["repeat"] is not None):
        raise StoreError(
            "timings: column 'seconds' must be given in timed passes with status 'ok', and only in these; got "
            f"{row['seconds']!r} with status {row['status']!r} and repeat {row['repeat']!r}"
        )


def _check_error(table: str, row: Mapping[str, Any]) -> None:
    if (row["status"] == "ok") != (row["error"] is None):
        raise StoreError(
            f"{table}: column 'error' must be null when status is 'ok', and otherwise say what failed; got status "
            f"{row['status']!r} with error {row['error']!r:.80}"
        )


_RULES_BY_TABLE = {"responses": _response_rules, "cells": _cell_rules, "timings": _timing_rules}


ROW_DIGEST = "row_digest"
_DIGESTED_COLUMNS = {
    table: tuple(column.name for column in COLUMNS[table] if not column.stamped and column.name != ROW_DIGEST)
    for table in ("cells", "metrics")
}
_REMEDY = {"cells": "which writes it", "metrics": "with stage=score, which computes metrics from the answers"}


def digest_of_row(table: str, row: Mapping[str, Any]) -> str:
    """Return a digest of a row, without nulls and columns that the store fills, so that new columns change none."""
    values = [[name, _short(row[name])] for name in _DIGESTED_COLUMNS[table] if row[name] is not None]
    return checksum(canonical_json(values).encode())


def with_row_digests(table: str, rows: pa.Table) -> pa.Table:
    """Return rows of `table` with their digests filled in."""
    digests = pa.array([digest_of_row(table, row) for row in rows.to_pylist()], pa.string())
    return rows.set_column(rows.column_names.index(ROW_DIGEST), rows.schema.field(ROW_DIGEST), digests)


def refuse_rewritten(table: str, rows: pa.Table, root: Path) -> None:
    """Raise StoreError if a row does not match its own digest."""
    for batch in rows.to_batches(max_chunksize=256):
        for row in batch.to_pylist():
            if row[ROW_DIGEST] is not None and row[ROW_DIGEST] != digest_of_row(table, row):
                metric_clause = f"{row['metric']} of " if table == "metrics" else ""
                raise StoreError(
                    f"the row of {metric_clause}cell {row['cell']} under {root} was rewritten with other values: restore "
                    f"its file in {table}/ from a copy, or move the file away and run the same command again, "
                    f"{_REMEDY[table]}"
                )


@lru_cache(maxsize=256)
def _digest(text: str) -> str:
    return checksum(text.encode())


def _short(value: Any) -> Any:
    """Return the digest of a long text, such as a configuration that many cells share; other values unchanged."""
    return _digest(value) if isinstance(value, str) and len(value) > 256 else value


# Rows of cells

_FOLDER = re.compile(r"(/|~/).*?([^/]+)/*", re.DOTALL)


def redact(value: Any) -> Any:
    """Return nested values without secrets. Absolute paths are reduced to their last part."""
    return without_secrets(value, also=_without_folders)


def _without_folders(text: str) -> str:
    path = _FOLDER.fullmatch(text)
    return text if path is None else f".../{path[2]}"


def redacted_columns(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the columns of a `cells` row that have user input, without secrets."""
    columns = {"config": canonical_json(redact(json.loads(row["config"]))), "model": without_secrets(row["model"])}
    for name in ("parameters", "generation"):
        value = json.loads(row[name])
        if (redacted := without_secrets(value)) != value:
            columns[name] = canonical_json(redacted)
    return columns


_HALF_DTYPES = ("bfloat16", "float16")


def processor(device: str | None, cpu: str | None, dtype: str, times: bool = False) -> str:
    """Return the CPU model if a run's results depend on it, else "". Timings on a CPU do, and answers in half
    precision.

    times: whether the results are timings.
    """
    return str(cpu or "") if device == "cpu" and (times or dtype in _HALF_DTYPES) else ""


def refuse_other(stored: Mapping[str, Any], row: Mapping[str, Any], root: Path) -> None:
    """Raise StoreError if a cell's new row and stored row differ in a column that the cell's hash covers."""
    for column in CELL_COLUMNS:
        old, new = stored[column.name], row[column.name]
        if REDACTED in f"{old}{new}":  # only one row may be redacted: the other process may not have known the secret
            continue
        if column.identity and (json.loads(old) != json.loads(new) if column.json else old != new):
            raise StoreError(
                f"cell {row['cell']} under {root} was stored with {column.name} {old!r}, but now it is {new!r}. "
                "Such rows must not mix: use another result folder, or restore the old setting."
            )


_OBJECT_KEYS = ("model", "data", "datasets", "methods", "variants", "calibrations")
_OF_OBJECTS = ("datasets", "methods", "variants")


def refuse_malformed(rows: pa.Table, root: Path) -> None:
    """Raise StoreError if config, parameters or generation in the table `cells` have a value that no run writes."""
    for name, problem_of in (("config", _malformed), ("parameters", _no_object), ("generation", _no_object)):
        if name not in rows.column_names:
            continue
        for text in rows[name].unique().to_pylist():
            if text is not None and (problem := problem_of(text)):
                raise StoreError(
                    f"{root}: column {name} of table cells was not written by a run ({problem}). Restore the "
                    "files in cells/ from a copy, or leave that folder out"
                )


def _no_object(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return "not JSON"
    return None if isinstance(value, dict) else f"{short_repr(value)} is not a JSON object"


@lru_cache(maxsize=256)
def _malformed(text: str) -> str | None:
    if (problem := _no_object(text)) is not None:
        return problem
    config = json.loads(text)
    objects_by_key = {key: config[key] for key in _OBJECT_KEYS if config.get(key) is not None}
    for key in _OF_OBJECTS:
        if isinstance(nodes := objects_by_key.get(key), dict):
            objects_by_key |= {f"{key}.{name}": node for name, node in nodes.items()}
    wrong_types = [
        f"{key} is {short_repr(value)}, not an object"
        for key, value in objects_by_key.items()
        if not isinstance(value, dict)
    ]
    if not isinstance(limit := config.get("limit"), int | None):
        wrong_types.append(f"limit is {short_repr(limit)}, not a number")
    return wrong_types[0] if wrong_types else None


def short_repr(value: Any) -> str:
    """Return the value's repr for a message, cut to 60 characters."""
    return f"{value!r:.60}"
