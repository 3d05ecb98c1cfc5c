"""Valid example rows, and hypothesis strategies that make valid rows from the schema alone."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import mmkv_bench
from mmkv_bench.store import journal
from mmkv_bench.store.parts import parquet_bytes
from mmkv_bench.store.schema import COLUMNS, SCHEMAS, SchemaColumn
from mmkv_bench.store.store import Store

# For the processes that tests start: the package under test, also where it is not installed.
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(mmkv_bench.__file__).parents[1])}


def bind_to_permissions() -> None:
    """Let permissions bind this process for the rest of its life, also where root runs the tests: on Linux it gives up
    the rights to pass over them (capabilities 1 and 2). It stays the same user, who can read what is root's alone."""
    if os.geteuid() != 0 or not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0, os.strerror(ctypes.get_errno())
    for place in range(3):  # effective, permitted, inheritable; capabilities from 32 on are the other half
        sets[place] &= ~0b110
    assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())


def response(sample: int, cell: str = "c0", **changes: Any) -> dict[str, Any]:
    """A response row without the store's own columns; the answer tells sample and cell apart."""
    row = {
        "cell": cell,
        "dataset": "pages",
        "sample_id": f"s{sample:04d}",
        "doc_id": sample,
        "cluster": f"page{sample // 2}",
        "prompt_hash": "0" * 16,
        "status": "ok",
        "fallback": [],
        "answer": f"answer of {cell} to {sample}",
        "token_ids": [sample, 7, 9],
        "n_tokens": 3,
        "tokens_from_compressed": 2,
        "finish_reason": "eos",
        "prompt_tokens": 300,
        "context_tokens": 300,
        "visual_tokens": 256,
        "entries_resident": 512,
        "kept": [[64, 64], [100, 28]],
        "kept_digest": "f" * 16,
        "measured": "group",
    }
    return row | changes


def failed(sample: int, cell: str = "c0", status: str = "oom") -> dict[str, Any]:
    return response(sample, cell, status=status, error="out of memory", answer=None)


def cell(name: str = "c0", **changes: Any) -> dict[str, Any]:
    row = {
        "cell": name,
        "model": "tiny",
        "model_fingerprint": "m1",
        "dataset": "pages",
        "dataset_fingerprint": "d1",
        "method": "snapkv",
        "base": "snapkv",
        "reading": "paper",
        "protocol": "paper",
        "budget_kind": "entries",
        "budget_entries": 64,
        "parameters": '{"window":32}',
        "tuned": False,
        "dtype": "float32",
        "attention": "sdpa",
        "generation": '{"max_new_tokens":8}',
        "numerics_version": 1,
        "torch": "2.15.0",
        "transformers": "5.23.0",
        "config": "{}",
        "versions": "{}",
        "device": "cpu",
    }
    return row | changes


def sample_score(sample: int, cell: str = "c0", metric: str = "exact_match", **changes: Any) -> dict[str, Any]:
    row = {"cell": cell, "dataset": "pages", "sample_id": f"s{sample:04d}", "metric": metric}
    row["cluster"] = f"page{sample // 2}"
    return row | {"value": 1.0, "status": "ok"} | changes


def metric_row(cell: str = "c0", metric: str = "exact_match", **changes: Any) -> dict[str, Any]:
    return {"cell": cell, "dataset": "pages", "metric": metric, "n": 2, "n_ok": 2, "interval": "wilson"} | changes


def value_strategy(column: SchemaColumn):
    """Any value the column's type, enumeration and JSON flag allow (rules between columns aside)."""
    from hypothesis import strategies as st

    text = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
    if column.allowed:
        return st.sampled_from(column.allowed)
    if column.json:
        return st.dictionaries(text, st.none() | st.integers() | text, max_size=3).map(json.dumps)

    def of(type: pa.DataType):
        if pa.types.is_list(type):
            return st.lists(of(type.value_type), max_size=4)
        if pa.types.is_string(type):
            return text
        if pa.types.is_boolean(type):
            return st.booleans()
        if pa.types.is_floating(type):
            return st.floats(allow_nan=False, allow_infinity=False)
        bits = type.bit_width - 1
        return st.integers(-(2**bits), 2**bits - 1)

    return of(column.type)


def response_strategy(cell: str, sample: str):
    """Valid response rows for one cell and sample, failed ones included; nullable columns may be absent or null."""
    from hypothesis import strategies as st

    @st.composite
    def build(draw):
        status = draw(value_strategy(next(c for c in COLUMNS["responses"] if c.name == "status")))
        row: dict[str, Any] = {}
        for column in COLUMNS["responses"]:
            if column.stamped:
                continue
            must = column.required == "always" or (column.required == "ok" and status == "ok")
            if must or draw(st.booleans()):
                row[column.name] = draw(value_strategy(column) if must else st.none() | value_strategy(column))
        row |= {"cell": cell, "sample_id": sample, "dataset": "pages", "status": status}
        row["error"] = None if status == "ok" else draw(st.text(st.characters(exclude_categories=("Cs",))))
        if status != "ok":
            row["answer"] = None
        return row

    return build()


def plain(rows: pa.Table) -> list[dict[str, Any]]:
    """Rows without what the store stamps, for comparison with what was handed in."""
    stamped = ("schema_version", "worker", "committed_at", "created_at", "row_digest")
    listed = rows.drop_columns([name for name in stamped if name in rows.column_names]).to_pylist()
    assert all(not isinstance(value, datetime) for row in listed for value in row.values())
    return listed


def complete(row: dict[str, Any], table: str = "responses") -> dict[str, Any]:
    """The row as the store gives it back: every column of the table, null where none was given."""
    return {column.name: row.get(column.name) for column in COLUMNS[table] if not column.stamped}


def write_tables(store: Store, samples: pa.Table, metrics: pa.Table) -> None:
    """Replace the scores of the cells that samples has."""
    store.write_scores([samples], lambda _: metrics)


def write_scores(store: Store, samples: Iterable[Mapping[str, Any]], metrics: Iterable[Mapping[str, Any]]) -> None:
    """The same from rows as Python dicts."""
    write_tables(
        store,
        *(
            pa.Table.from_pylist([complete(row, name) for row in rows], pa.schema(list(SCHEMAS[name])[1:]))
            for name, rows in (("samples", samples), ("metrics", metrics))
        ),
    )


def journal_damage(store: Store) -> dict[str, int]:
    """Journals of dead writers that end in a torn line: file name -> bytes dropped."""
    torn = {path: journal.read(path).torn for path in store.journals()}
    return {path.name: count for path, count in torn.items() if count and not journal.in_use(path)}


OLD = Path(__file__).parent / "stores" / "ad8597f"
"""Written by the code of commit ad8597f out of its results/tiny/ablations: three cells of pages_lookup_small with four
samples, packed by it, and a fifth sample in the journal of a writer that was killed. Its files have no checksums."""


def older_store(root: Path) -> Path:
    """A copy of `OLD` whose files have checksums."""
    shutil.copytree(OLD, root)
    for path in root.rglob("*.parquet"):
        path.write_bytes(parquet_bytes(pq.read_table(path)))
    return root
