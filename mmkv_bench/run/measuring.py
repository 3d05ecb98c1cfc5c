"""The measures of stored answers beside the task's scores, of every cell anew: they need the rows of `full`, which may have
come later than a cell's. What slim rows have lost stays as it is stored."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from mmkv_bench.evaluation.extra_metrics import COLUMNS, NAMES

if TYPE_CHECKING:
    import pyarrow as pa

    from mmkv_bench.plan.cells import Cell
    from mmkv_bench.store.store import Store


class Measuring:
    """cells: those of a dataset; answered: which of them have answers."""

    def __init__(self, store: Store, cells: Sequence[Cell], answered: Collection[str]) -> None:
        self._store = store
        self._protocols = {cell.cell: cell.protocol for cell in cells}
        self._baselines = {cell.cell for cell in cells if cell.base == "full"}
        full = {cell.protocol: cell.cell for cell in cells if cell.base == "full" and cell.cell in answered}
        self._full = store.responses(list(full.values()), COLUMNS)

    def of(self, rows: pa.Table, dataset: str) -> Iterator[pa.Table]:
        """Rows of the table samples. rows: response rows of some of the cells, with the columns of measures."""
        import pyarrow as pa
        import pyarrow.compute as pc

        from mmkv_bench.evaluation.extra_metrics import measured

        slim = rows["cell"].filter(pc.fill_null(rows["slim"], False)).unique().to_pylist()
        before = self._store.samples(slim) if slim else None
        if before is not None:
            before = before.filter(pc.is_in(before["metric"], value_set=pa.array(sorted(NAMES))))
        for table in measured(rows.select(COLUMNS), self._full, self._protocols, self._baselines, before):
            yield table.append_column("dataset", pa.repeat(pa.scalar(dataset), table.num_rows))
