"""Promise: scoring reads as many cells at a time as memory has room for, and each with its own answers."""

from __future__ import annotations

from types import SimpleNamespace

from mmkv_bench.run import score_rows as answers
from mmkv_bench.store.store import Store
from tests.each import each
from tests.store.store_examples import failed, response


@each(
    ("tokens", "blocks", "parts"),
    [
        (3, ["c0 c1 c2", "c3"], ["c0 c1", "c2", "c3"]),
        (128, ["c0 c1", "c2 c3"], ["c0 c1", "c2 c3"]),  # c1's answers count as two
        (640, ["c0", "c1", "c2 c3"], ["c0", "c1", "c2 c3"]),  # more than there is room for, and alone
    ],
)
def test_long_answers_count_as_several(tmp_path, monkeypatch, tokens, blocks, parts):
    store = Store(tmp_path / "rows")
    with store.writer("w") as writer:
        for sample in range(4):
            at = {"doc_id": 3 - sample}  # documents are in another order than the names of samples
            own = [response(sample, name, n_tokens=tokens if name == "c1" else 3, **at) for name in ("c3", "c1", "c0")]
            writer.commit([*own, failed(sample, "c2") | at])
    monkeypatch.setattr(answers, "AT_ONCE", 12)
    monkeypatch.setattr(answers, "ROWS_AT_ONCE", 8)
    cells = [SimpleNamespace(cell=name) for name in ("c0", "c1", "c2", "c3")]
    found = answers.Answers(store, [cell.cell for cell in cells])
    assert found.reach == dict.fromkeys(("c0", "c1", "c2", "c3"), 4) and found.failed == [0, 1, 2, 3]
    named, of_parts = [], []
    for block in found.blocks(cells):
        named.append(" ".join(cell.cell for cell in block))
        for part, rows in found.parts(block):
            of_parts.append(" ".join(cell.cell for cell in part))
            assert rows["cell"].to_pylist() == [cell.cell for cell in part for _ in range(4)]
        for cell in block:
            given = found.of(cell.cell)
            texts = [None if cell.cell == "c2" else f"answer of {cell.cell} to {sample}" for sample in (3, 2, 1, 0)]
            assert [own.text for own in given.values()] == texts and list(given) == [f"s{n:04d}" for n in (3, 2, 1, 0)]
            assert [(own.doc_id, own.status) for own in given.values()] == [
                (n, "oom" if cell.cell == "c2" else "ok") for n in range(4)
            ]
    assert (named, of_parts) == (blocks, parts)
