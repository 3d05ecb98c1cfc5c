"""The schema of all tables. `columns.yaml` and `Response` declare each column once: name, type, unit, meaning.

A new nullable column reads as null in older files. Any other change of columns, types or meanings raises
`SCHEMA_VERSION`. A store of another version is refused. `python -m tools.rows_page` writes all columns to docs/rows.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, Literal, get_args, get_type_hints

import pyarrow as pa

from mmkv_bench.declared import read_declared
from mmkv_bench.store.response import STATUSES, Response

SCHEMA_VERSION = 1

NUMERICS_VERSION = 1
"""Raised by hand when a change of this code changes answers of all methods, so that older rows are not reused. For one
method's numbers, raise the version of its part (`Scorer.method_version`)."""

IDENTITY = ("model", "dataset", "method", "base", "reading", "protocol", "budget_kind", "seed", "dtype", "attention")
"""Columns of `cells` that identify a stored cell, apart from its budget and versions."""

RESAMPLING = {"pixels": "shows smaller pictures or fewer frames", "cut_prompt": "leaves out the middle of the text"}
"""Controls that answer from the full cache of a smaller prompt: their `base`, and how they shrink the prompt."""

_DECLARED_COLUMNS = read_declared(__file__, "columns.yaml")
FALLBACKS: dict[str, str] = _DECLARED_COLUMNS["fallbacks"]
"""Names that built-in methods write to the column `fallback`, with their meaning. A user's parts may write others."""
SLIM: dict[str, str] = _DECLARED_COLUMNS["slim"]
"""Values that `pack --slim` removes from response rows. Running the cells again restores them."""
PHASES: dict[str, str] = _DECLARED_COLUMNS["phases"]
"""Values of `timings.phase`, with their meaning."""

TEXT, INT, FLOAT, BOOL, TIME = pa.string(), pa.int64(), pa.float64(), pa.bool_(), pa.timestamp("us", tz="UTC")
_LISTS = {str: pa.list_(TEXT), int: pa.list_(pa.int32()), float: pa.list_(FLOAT), bool: pa.list_(BOOL)}
_TYPES: dict[Any, pa.DataType] = {str: TEXT, int: INT, float: FLOAT, bool: BOOL}
_TYPES |= {list[kind]: column for kind, column in _LISTS.items()}  # type: ignore[valid-type]
_TYPES |= {list[list[int]]: pa.list_(pa.list_(pa.int32())), "text": TEXT, "int": INT, "float": FLOAT, "bool": BOOL}
_TYPES |= {"time": TIME, "texts": _LISTS[str], "floats": _LISTS[float]}
"""Type in `columns.yaml`, or type of a field of `Response`, to type of a column."""


@dataclass(frozen=True)
class SchemaColumn:
    """One column of a table. required: "always", "ok" (in rows with status "ok"), or "no" (may be null)."""

    name: str
    type: pa.DataType
    doc: str
    unit: str = ""
    required: Literal["always", "ok", "no"] = "no"
    allowed: tuple[str, ...] = ()  # the values of an enumeration; empty = any
    json: bool = False  # a string that must parse as JSON
    stamped: bool = False  # written by the store; callers leave it out
    identity: bool = False  # (cells) covered by the cell's hash: must be equal in all rows of one cell

    @property
    def field(self) -> pa.Field:
        return pa.field(self.name, self.type, nullable=self.required != "always")


def _generated() -> Iterator[SchemaColumn]:
    """Yield the columns of `responses` that generation fills: one for each field of `Response` but `cell`."""
    field_types = get_type_hints(Response)
    for one in fields(Response)[1:]:
        attributes = {key: value for key, value in one.metadata.items() if key != "counted"}
        union_members = set(get_args(field_types[one.name]))
        column_type = next(iter(union_members - {NoneType})) if NoneType in union_members else field_types[one.name]
        yield SchemaColumn(one.name, _TYPES[column_type], **attributes)


def _columns(declared: Mapping[str, Any]) -> Iterator[SchemaColumn]:
    """Yield the columns of one table. declared: the table's entry in `columns.yaml`."""
    allowed_by_name = {"statuses": STATUSES, "phases": tuple(PHASES)}
    for name, flags in declared.items():
        if name == "generated":
            yield from _generated()
            continue
        flags = _DECLARED_COLUMNS["shared"][name] if flags == "shared" else flags
        allowed = flags.get("allowed", ())
        allowed = allowed_by_name[allowed] if isinstance(allowed, str) else tuple(allowed)
        yield SchemaColumn(name, **flags | {"type": _TYPES[flags["type"]], "allowed": allowed})


_TABLES = ("responses", "cells", "samples", "metrics", "timings", "diagnostics", "prompts")
COLUMNS = {table: tuple(_columns(_DECLARED_COLUMNS[table])) for table in _TABLES}
CELL_COLUMNS = COLUMNS["cells"]
SCHEMAS = {table: pa.schema([column.field for column in columns]) for table, columns in COLUMNS.items()}
RESPONSES, CELLS, SAMPLES, METRICS = (SCHEMAS[table] for table in ("responses", "cells", "samples", "metrics"))
