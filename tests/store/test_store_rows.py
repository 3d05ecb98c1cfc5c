"""Rows: what goes in comes out, and what the schema forbids is refused by the name of the column."""

from __future__ import annotations

import ast
import re
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_examples import (
    cell,
    complete,
    failed,
    metric_row,
    plain,
    response,
    response_strategy,
    sample_score,
    write_scores,
)

from mmkv_bench.errors import StoreError
from mmkv_bench.store.schema import COLUMNS, FALLBACKS, RESAMPLING, RESPONSES, SCHEMAS
from mmkv_bench.store.store import Store
from tests.each import each
from tools.rows_page import PAGE, markdown


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_valid_rows_come_back_equal_from_the_journal_and_from_the_part(data):
    rows = [data.draw(response_strategy(cell, "s1")) for cell in ("a", "b")]
    with tempfile.TemporaryDirectory() as root:
        store = Store(root)
        with store.writer("w") as writer:
            writer.commit(rows)
            from_journal = store.responses()
            writer.publish()
            assert not list((store.root / "journal").glob("*.jsonl"))
        from_part = Store(root).responses()
    assert plain(from_journal) == [complete(row) for row in rows]
    assert from_part.equals(from_journal)


def test_columns_that_are_all_null_keep_their_types(tmp_path):
    store = Store(tmp_path)
    for name in ("first", "second"):
        with store.writer(name) as writer:
            writer.commit([failed(0, cell=name)])
    rows = store.responses()
    assert rows.schema.equals(RESPONSES)
    assert rows["kept"].to_pylist() == [[[64, 64], [100, 28]]] * 2
    assert rows["ttft_s"].null_count == rows["shard"].null_count == 2
    part = next((tmp_path / "responses").glob("*.parquet"))
    assert pq.read_schema(part).field("ttft_s").type == pa.float64()
    assert pq.read_schema(part).field("shard").type == pa.string()
    assert pq.ParquetFile(part).metadata.row_group(0).column(0).compression == "ZSTD"


def test_an_empty_store_has_the_columns_and_no_rows_and_makes_no_folder(tmp_path):
    store = Store(tmp_path / "none")
    for table, schema in (
        (store.responses(), SCHEMAS["responses"]),
        (store.cells(), SCHEMAS["cells"]),
        (store.samples(), SCHEMAS["samples"]),
        (store.metrics(["c0"]), SCHEMAS["metrics"]),
    ):
        assert table.num_rows == 0
        assert table.schema.equals(schema)
    assert store.done(["c0"]) == {"c0": set()}
    with store.writer("w"):
        pass
    assert not (tmp_path / "none").exists()


REFUSED = {
    "unknown column": ({"anwser": "x"}, "'anwser'.*did you mean 'answer'"),
    "the store's own column": ({"worker": "me"}, "'worker'"),
    "missing required": ({"cluster": None}, "'cluster'"),
    "missing for ok": ({"token_ids": None}, "'token_ids'.*when status is 'ok'"),
    "text for a number": ({"prompt_tokens": "12"}, "'prompt_tokens'.*integer.*'12' \\(str\\)"),
    "float for an integer": ({"prompt_tokens": 1.0}, "'prompt_tokens'"),
    "bool for an integer": ({"prompt_tokens": True}, "'prompt_tokens'"),
    "numpy bool for an integer": ({"prompt_tokens": np.bool_(True)}, "'prompt_tokens'"),
    "integer too large": ({"token_ids": [2**31]}, "'token_ids'.*range"),
    "number for text": ({"answer": 3}, "'answer'"),
    "half a surrogate pair": ({"answer": "\ud800"}, "'answer'.*Unicode"),
    "nan time": ({"prefill_s": float("nan")}, "'prefill_s'.*finite"),
    "infinite time": ({"prefill_s": float("inf")}, "'prefill_s'.*finite"),
    "bool for a time": ({"prefill_s": True}, "'prefill_s'"),
    "text for a list": ({"fallback": "window_reduced"}, "'fallback'.*list"),
    "flat kept": ({"kept": [1, 2]}, "'kept'.*list"),
    "null inside a list": ({"kept": [[None]]}, "'kept'"),
    "unknown status": ({"status": "failed", "error": "x"}, "'status'"),
    "unknown enum value": ({"measured": "shared"}, "'measured'"),
    "an answer in a failed row": ({"status": "oom", "error": "x"}, "'answer' must be null"),
    "a failure without its message": ({"status": "oom", "answer": None}, "'error'"),
    "a success with an error": ({"error": "x"}, "'error'"),
    "a cell that is a path": ({"cell": "../c0"}, "cell '../c0' cannot name a file"),
}


@each("name", REFUSED)
def test_a_row_against_the_schema_is_refused_by_column_and_nothing_is_written(tmp_path, name):
    changes, message = REFUSED[name]
    store = Store(tmp_path / "store")
    with store.writer("w") as writer, pytest.raises(StoreError, match=message):
        writer.commit([response(0, cell="good"), response(0) | changes])
    assert not (tmp_path / "store").exists()


def test_numbers_from_numpy_are_stored_as_numbers(tmp_path):
    store = Store(tmp_path)
    row = response(0, prompt_tokens=np.int64(5), token_ids=[np.int32(3)], prefill_s=np.float32(0.5), encode_s=2)
    with store.writer("w") as writer:
        writer.commit([row])
    (read,) = store.responses().to_pylist()
    assert (read["prompt_tokens"], read["token_ids"], read["prefill_s"], read["encode_s"]) == (5, [3], 0.5, 2.0)


def test_a_commit_is_one_sample_and_each_cell_once(tmp_path):
    writer = Store(tmp_path).writer("w")
    for rows, message in (
        ([], "0 samples"),
        ([response(0), response(1, cell="c1")], "2 samples"),
        ([response(0), response(0)], "two rows of one cell"),
    ):
        with pytest.raises(StoreError, match=message):
            writer.commit(rows)


@each(
    ("write", "message"),
    [
        (lambda s: s.write_cells([cell(budget_entries=None)]), "budget_entries"),
        (lambda s: s.write_cells([cell(budget_fraction="0.2")]), "budget_fraction"),
        (lambda s: s.write_cells([cell(parameters="{window:32}")]), "'parameters' is not JSON"),
        (lambda s: s.write_cells([cell(parameters='{"g":NaN}')]), "'parameters' is not JSON"),
        (lambda s: s.write_cells([cell(tuned=0)]), "'tuned'"),
        (lambda s: write_scores(s, [sample_score(0, status="oom")], []), "'value' must be null"),
        (lambda s: write_scores(s, [sample_score(0)], [metric_row("c1")]), "a cell that has no samples"),
        (lambda s: write_scores(s, [sample_score(0), sample_score(0)], []), "same cell, sample_id and metric"),
        (lambda s: write_scores(s, [], [metric_row(value=0.5, n_ok=1)]), "'value' null unless"),
        (lambda s: write_scores(s, [], [metric_row(n_ok=3)]), "'n_ok'"),
        (lambda s: write_scores(s, [], [metric_row(), metric_row()]), "same cell and metric"),
        (lambda s: s.responses(columns=["sample"]), "'sample'.*did you mean 'sample_id'"),
        (lambda s: s.writer("a/b"), "worker 'a/b'"),
    ],
)
def test_other_tables_refuse_by_column_too(tmp_path, write, message):
    with pytest.raises(StoreError, match=message):
        write(Store(tmp_path / "store"))
    assert not (tmp_path / "store").exists()


def test_every_column_is_documented():
    text = markdown()
    for table, columns in COLUMNS.items():
        assert len({column.name for column in columns}) == len(columns)
        for column in columns:
            assert f"| `{column.name}` |" in text.split(f"## {table}")[1].split("\n## ")[0]
            assert len(column.doc) > 5
            if column.name.endswith("_s"):
                assert column.unit == "seconds"
            if "bytes" in column.name:
                assert column.unit == "bytes"


def test_every_fallback_of_a_built_in_part_is_documented():
    """Names are the string constants, docstrings aside, of the methods that give them."""
    import mmkv_bench.compression
    from mmkv_bench.efficiency.measure import ROW_BY_ROW
    from mmkv_bench.generation.decode import EAGER_DECODE
    from mmkv_bench.run.generate import CONTEXT_END, CONTROLS

    givers, found = ("fallbacks", "outcome", "answer_fallbacks", "observed_fallbacks"), set()
    for file in Path(mmkv_bench.compression.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name in givers:
                body = node.body[1:] if ast.get_docstring(node) else node.body
                constants = (part for statement in body for part in ast.walk(statement))
                found |= {c.value for c in constants if isinstance(c, ast.Constant) and isinstance(c.value, str)}
    names = {name for name in found if re.fullmatch(r"[a-z]+(_[a-z]+)+", name)}
    assert names | {
        CONTEXT_END,
        CONTROLS,
        EAGER_DECODE,
        ROW_BY_ROW,
        *(f"{base}_over_budget" for base in RESAMPLING),
    } == set(FALLBACKS)
    for name in FALLBACKS:
        assert f"| `{name}` |" in markdown().split("## Fallbacks")[1]


def test_the_page_of_rows_is_what_the_schema_prints():
    assert PAGE.read_text() == markdown() + "\n"
