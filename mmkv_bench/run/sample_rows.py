"""`samples` rows of many cells, gathered column by column."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

    from mmkv_bench.evaluation.contract import SampleScore

_COLUMNS = ("cell", "dataset", "sample_id", "cluster", "metric", "value", "status", "parts")
_HELD = 1 << 17  # rows as Python values at a time


class SampleRows:
    """Rows as they come; `table` gives them cell by cell.

    cells: the names of all cells that have a row.
    """

    def __init__(self) -> None:
        self.cells: dict[str, None] = {}
        self._tables: list[pa.Table] = []
        self._columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}

    def add(self, cell: str, dataset: str, scores: Iterable[SampleScore]) -> None:
        """The scores of a cell; samples not generated yet (another shard, an interrupted run) have no row."""
        own = [score for score in scores if score.status != "missing"]
        if own:
            given: dict[str, Sequence[Any]] = dict(zip(own[0]._fields, zip(*own, strict=True), strict=True))
            given |= {"cell": [cell] * len(own), "dataset": [dataset] * len(own)}
            for name, values in self._columns.items():
                values.extend(given[name])
            self._added(cell)

    def add_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows as dicts with all columns but the schema's version."""
        cells = self._columns["cell"]
        for row in rows:
            for name, values in self._columns.items():
                values.append(row[name])
        for cell in cells[-1:]:
            self._added(cell)

    def _added(self, cell: str) -> None:
        self.cells[cell] = None
        if len(self._columns["cell"]) >= _HELD:
            self._flush()

    def add_table(self, rows: pa.Table, without: Collection[str] = ()) -> None:
        """Rows as a table, but for those of the metrics in `without`; `parts` may be left out."""
        import pyarrow as pa
        import pyarrow.compute as pc

        self._flush()
        if "parts" not in rows.column_names:
            rows = rows.append_column("parts", pa.nulls(rows.num_rows, _schema().field("parts").type))
        kept = rows.select(_COLUMNS).cast(_schema())
        if without:
            kept = kept.filter(pc.invert(pc.is_in(kept["metric"], value_set=pa.array(sorted(without)))))
        self.cells |= dict.fromkeys(rows["cell"].unique().to_pylist())
        self._tables.append(kept)

    def table(self) -> pa.Table:
        """All rows, those of a cell together, in the order in which they came."""
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        self._flush()
        rows = pa.concat_tables(self._tables)
        place = pc.index_in(rows["cell"], value_set=pa.array(list(self.cells), pa.string())).to_numpy()
        return rows.take(np.argsort(place, kind="stable"))

    def _flush(self) -> None:
        import pyarrow as pa

        self._tables.append(pa.table(self._columns, _schema()))
        self._columns = {name: [] for name in _COLUMNS}


def _schema() -> pa.Schema:
    import pyarrow as pa

    from mmkv_bench.store.schema import SAMPLES

    return pa.schema([SAMPLES.field(name) for name in _COLUMNS])
