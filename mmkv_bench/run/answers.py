"""The stored answers of a dataset's cells for scoring, some cells at a time: those of all of them fit into no memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mmkv_bench.evaluation.extra_metrics import COLUMNS

if TYPE_CHECKING:
    import pyarrow as pa

    from mmkv_bench.evaluation.contract import Answer
    from mmkv_bench.plan.cells import Cell
    from mmkv_bench.store.store import Store

AT_ONCE = 1 << 18  # answers that are read at a time, or those of one cell; a long one counts as several
ROWS_AT_ONCE = 1 << 16  # answers whose scores and measures are rows in memory at a time, or those of one cell
_TOKENS = 64  # up to which an answer counts as one
_OF_ANSWERS = ("sample_id", "answer", "status", "doc_id", "prompt_hash")


class Answers:
    """reach: cell -> 1 + the last document that it has an answer to, of all cells that have one; failed: the documents whose
    answer failed in some cell.
    """

    def __init__(self, store: Store, cells: Sequence[str]) -> None:
        import pyarrow as pa
        import pyarrow.compute as pc

        from mmkv_bench.store.parts import codes_of, numbers_of

        self._store = store
        self._held: ByCell | None = None
        rows = store.responses(cells, ("cell", "doc_id", "status", "n_tokens"), coded=True)
        codes, docs = rows["cell"].combine_chunks(), numbers_of(rows["doc_id"]).astype(np.int64)
        names, of_cell = codes.dictionary.to_pylist(), codes_of(codes)
        reach = np.zeros(len(names), np.int64)
        np.maximum.at(reach, of_cell, docs + 1)
        tokens = numbers_of(pc.fill_null(rows["n_tokens"], 0))
        room = np.bincount(of_cell, np.maximum(tokens / _TOKENS, 1), len(names)).astype(np.int64)
        counts = np.bincount(of_cell, minlength=len(names))
        self.reach = {name: int(own) for name, own in zip(names, reach, strict=True) if own}
        self._counts, self._room = (dict(zip(names, each.tolist(), strict=True)) for each in (counts, room))
        self.failed = np.unique(docs[~_is_ok(rows["status"])]).tolist()
        del rows, codes, docs, of_cell, tokens
        pa.default_memory_pool().release_unused()  # lmms-eval needs more than a gigabyte beside

    def blocks(self, cells: Sequence[Cell]) -> Iterator[list[Cell]]:
        """The cells in their order, as many at a time as have `AT_ONCE` answers together, which are then in memory."""
        columns = list(dict.fromkeys([*COLUMNS, *_OF_ANSWERS]))
        for block in _some(cells, self._room, AT_ONCE):
            self._held = None  # before the next ones are read
            self._held = ByCell(self._store.responses([cell.cell for cell in block], columns))
            yield block

    def parts(self, block: Sequence[Cell]) -> Iterator[tuple[list[Cell], pa.Table]]:
        """The cells of a block in their order, as many at a time as have `ROWS_AT_ONCE` answers together; with their response
        rows, as measures need them."""
        assert self._held is not None, "a block that `blocks` gave last"
        for part in _some(block, self._counts, ROWS_AT_ONCE):
            yield part, self._held.of(*(cell.cell for cell in part))

    def of(self, cell: str) -> dict[str, Answer]:
        """Sample id -> answer, in the order of the documents."""
        from mmkv_bench.evaluation.contract import Answer
        from mmkv_bench.store.parts import column_of, numbers_of

        own = self._held.of(cell) if self._held is not None and cell in self._held.places else None
        if own is None:
            own = self._store.responses([cell], _OF_ANSWERS)
        own = own.select(_OF_ANSWERS)
        docs = numbers_of(own["doc_id"])
        if (docs[1:] < docs[:-1]).any():
            own = own.take(column_of(np.argsort(docs, kind="stable")))
        samples, *fields = (own[name].to_pylist() for name in _OF_ANSWERS)
        return dict(zip(samples, map(Answer, *fields), strict=True))


def _some(cells: Sequence[Cell], counts: Mapping[str, int], at_once: int) -> Iterator[list[Cell]]:
    from mmkv_bench.store.blocks import blocks

    by_name = {cell.cell: cell for cell in cells}
    for names in blocks(by_name, counts, at_once):
        yield [by_name[name] for name in names]


class ByCell:
    """A table cut by cell; the rows of a cell stand together. places: cell -> (start, length)."""

    def __init__(self, rows: pa.Table) -> None:
        self._rows = rows
        self.places: dict[str, tuple[int, int]] = {}
        if rows.num_rows:
            found = rows["cell"].combine_chunks().dictionary_encode()
            codes = found.indices.to_numpy()
            starts = np.append(0, np.flatnonzero(np.diff(codes)) + 1)
            lengths = np.diff(np.append(starts, len(codes)))
            names = found.dictionary.take(found.indices.take(starts)).to_pylist()
            self.places = dict(zip(names, zip(starts.tolist(), lengths.tolist(), strict=True), strict=True))

    def of(self, *cells: str) -> pa.Table:
        import pyarrow as pa

        own = [self._rows.slice(*self.places[cell]) for cell in cells if cell in self.places]
        return pa.concat_tables(own) if own else self._rows.slice(0, 0)


def _is_ok(column: pa.ChunkedArray) -> np.ndarray:
    from mmkv_bench.store.parts import texts_in

    found = texts_in(column, lambda text: text == "ok")
    return found.to_numpy(zero_copy_only=False)
