"""Families of configuration files that differ in a few values: one table instead of a file each (`conf/dataset/tables`).

A table holds `template`, what every member is; `rows`, member -> its own columns; `kinds`, columns that several rows share
(a row names its kinds under `kinds`); and `columns`, their defaults. `{column}` in a text of the template, or of another
column, stands for the column's value: the value itself where it is the whole text, spliced where it is a list inside a
list, and its key is left out where it is null. `{name}` is the member's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from mmkv_bench.errors import ConfigError

FOLDER = "tables"
"""Folder of a config group that holds its tables."""

_COLUMN = re.compile(r"\{(\w+)\}")
_NOTHING = object()


def names(group: Path) -> set[str]:
    """The members of all tables of a group's folder."""
    return {name for table in _tables(group) for name in table["rows"]}


def member(group: Path, name: str) -> dict[str, Any] | None:
    """A member's content, as a file of its own would have it; None for a name that no table has."""
    for table in _tables(group):
        if name in table["rows"]:
            row = dict(table["rows"][name])
            kinds = {key: value for kind in row.pop("kinds", ()) for key, value in table["kinds"][kind].items()}
            columns = {**(table.get("columns") or {}), **kinds, **row, "name": name}
            return _filled(table["template"], columns)
    return None


def _tables(group: Path) -> list[Mapping[str, Any]]:
    return [_read(file, file.stat().st_mtime_ns) for file in sorted((group / FOLDER).glob("*.yaml"))]


@cache
def _read(file: Path, changed: int) -> Mapping[str, Any]:
    import yaml

    table = yaml.safe_load(file.read_text(encoding="utf-8"))
    if not isinstance(table, Mapping) or not {"template", "rows"} <= set(table):
        raise ConfigError(f"{file} is no table; a table has template and rows")
    return table


def _filled(value: Any, columns: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping):
        filled = {key: _filled(inner, columns) for key, inner in value.items()}
        return {key: inner for key, inner in filled.items() if inner is not _NOTHING}
    if isinstance(value, list):
        items = [(item, _filled(item, columns)) for item in value]
        return [
            part
            for item, inner in items
            if inner is not _NOTHING
            for part in (inner if isinstance(inner, list) and isinstance(item, str) else [inner])
        ]
    if not isinstance(value, str):
        return value
    reference = _COLUMN.fullmatch(value)
    if reference:
        inner = columns[reference[1]]
        return _NOTHING if inner is None else _filled(inner, columns)
    return _COLUMN.sub(lambda match: str(_filled(columns[match[1]], columns)), value)
