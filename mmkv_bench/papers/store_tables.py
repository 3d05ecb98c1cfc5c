"""Tables of the stores behind a body of evidence, each read once and only for the cells that some address needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from mmkv_bench.papers.address import Address
from mmkv_bench.papers.evidence import Evidence
from mmkv_bench.papers.metrics import REDUCTIONS
from mmkv_bench.tables.agreement import agreeing
from mmkv_bench.tables.cost_rows import passes
from mmkv_bench.tables.rows import SAMPLE_COLUMNS, frame
from mmkv_bench.tables.scores import Sheet

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from mmkv_bench.store.store import Store

T = TypeVar("T")
ANSWERS, OVER = "answers", "more entries than asked"
_ANSWER = ["cell", "sample_id", "metric"]
_TEXTS = dict.fromkeys(("cell", "sample_id", "cluster", "metric", "status"), "object")
_SCORER = ("judge", "judge_prompts", "judge_temperature", "scorer_digest")


class StoreTables:
    """Tables by store; a row is a place in the evidence's cells."""

    def __init__(self, evidence: Evidence, addresses: set[Address]) -> None:
        self.evidence = evidence
        self._addresses = addresses

    def responses(self, row: int) -> pd.DataFrame:
        """Return the answers of a cell, columns that metrics reduce."""
        return self._of_cell(self._responses, row)

    def timings(self, row: int) -> pd.DataFrame:
        """Return the timed passes of a cell."""
        return self._of_cell(self._timings, row)

    def counts(self, row: int) -> Mapping[str, int]:
        """Return the number of a cell's answers, and of those that kept more than asked, fell back or saw text before a cut."""
        store, cell = self.evidence.cell(row)
        return self._counts[store].get(cell, {})

    def scorer(self, row: int, metric: str) -> tuple[str, ...]:
        """Return who gave a cell's scores of a metric."""
        return self._scorers.get((*self.evidence.cell(row), metric), ())

    def prompts(self, row: int) -> np.ndarray:
        """Return digests of a cell's samples with their prompts, one an answer, from all its copies."""
        none = np.array([], dtype=np.uint64)
        places = [self.evidence.cell(place) for place in (row, *self.evidence.copies(row))]
        return np.unique(np.concatenate([self._prompts[store].get(cell, none) for store, cell in places]))

    def scored(self, row: int) -> int:
        """Return the number of a cell's samples with a score of any metric, in all its copies."""
        tables = [self._of_cell(self._samples, place) for place in (row, *self.evidence.copies(row))]
        return len({one for table in tables for one in table["sample_id"].astype(str)})

    def sheet(self, rows: Sequence[int], metric: str) -> tuple[Sheet, list[int]] | None:
        """Return the scores of cells, one a seed, and their places in the sheet; None if two stores contradict each other."""
        names = [self.evidence.cell(row)[1] for row in rows]
        places = {place for row in rows for place in (row, *self.evidence.copies(row))}
        stores = sorted({self.evidence.cell(place)[0] for place in places})
        if len(stores) == 1:
            sheet = self._sheets[stores[0]]
            return sheet, [sheet.cells.index(name) for name in names]
        import pandas as pd

        tables = [self._samples[store] for store in stores]
        tables = [table[table["cell"].isin(names) & (table["metric"] == metric)].astype(_TEXTS) for table in tables]
        scores = pd.concat(tables, ignore_index=True)  # seeds in several stores, or parts of a cell
        if len(scores[[*_ANSWER, "value", "status"]].drop_duplicates()) > len(scores[_ANSWER].drop_duplicates()):
            return None
        return Sheet.of(scores.drop_duplicates(_ANSWER), names), [*range(len(names))]

    def _of_cell(self, tables: Mapping[int, pd.DataFrame], row: int) -> pd.DataFrame:
        store, cell = self.evidence.cell(row)
        table = tables[store]
        return table[table["cell"] == cell] if len(table) else table

    def _read(self, read: Callable[[Store, list[str]], T]) -> dict[int, T]:
        """Read from every store the cells that some address needs."""
        from mmkv_bench.store.store import Store

        return {number: read(Store(self.evidence.roots[number]), cells) for number, cells in self._cells.items()}

    @cached_property
    def _cells(self) -> dict[int, list[str]]:
        cells: dict[int, list[str]] = {}
        for row in sorted({row for one in self._addresses for row in self.evidence.candidates(one).tolist()}):
            store, cell = self.evidence.cell(row)
            cells.setdefault(store, []).append(cell)
        return cells

    @cached_property
    def _samples(self) -> Mapping[int, pd.DataFrame]:
        """Scores of complete cells; a StoreError where scores, metrics and answers contradict each other."""
        return self._read(
            lambda store, cells: frame(
                agreeing(store, store.samples(cells, SAMPLE_COLUMNS, coded=True), store.metrics(cells))
            )
        )

    @cached_property
    def _sheets(self) -> Mapping[int, Sheet]:
        return {number: Sheet.of(self._samples[number], cells) for number, cells in self._cells.items()}

    @cached_property
    def _prompts(self) -> Mapping[int, Mapping[str, np.ndarray]]:
        columns = ["cell", "sample_id", "prompt_hash"]
        return self._read(lambda store, cells: _digests(frame(store.responses(cells, columns, coded=True))))

    @cached_property
    def _scorers(self) -> Mapping[tuple[int, str, str], tuple[str, ...]]:
        tables = self._read(lambda store, cells: store.metrics(cells, ["cell", "metric", *_SCORER]).to_pylist())
        return {
            (store, line["cell"], line["metric"]): tuple(str(line[name]) for name in _SCORER)
            for store, table in tables.items()
            for line in table
        }

    @cached_property
    def _responses(self) -> Mapping[int, pd.DataFrame]:
        columns = ["cell", "sample_id", "cluster", "status", "measured", "context_tokens"]
        columns += dict.fromkeys(one.column for one in REDUCTIONS.values())
        return self._read(lambda store, cells: store.responses(cells, columns).to_pandas())

    @cached_property
    def _timings(self) -> Mapping[int, pd.DataFrame]:
        return self._read(lambda store, cells: passes(store.timings(cells)))

    @cached_property
    def _counts(self) -> Mapping[int, Mapping[str, Mapping[str, int]]]:
        columns = ("cell", "fallback", "entries_asked", "entries_resident", "question_text_before_cut")
        return self._read(lambda store, cells: _counts(store.responses(cells, columns)))


def _counts(answers: pa.Table) -> dict[str, Counter[str]]:
    """Return cell -> `StoreTables.counts`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    cells, reasons = answers["cell"], answers["fallback"].combine_chunks()
    over = pc.fill_null(pc.greater(answers["entries_resident"], answers["entries_asked"]), False)
    cut = pc.fill_null(pc.greater(answers["question_text_before_cut"], 0), False)
    counts: dict[str, Counter[str]] = {}
    for what, named in (
        (ANSWERS, cells),
        (OVER, cells.filter(over)),
        ("question text before a cut", cells.filter(cut)),
    ):
        for one in named.value_counts().to_pylist():
            counts.setdefault(one["values"], Counter())[what] = one["counts"]
    of_reason = cells.combine_chunks().take(pc.list_parent_indices(reasons))
    fallbacks = pa.table({"cell": of_reason, "reason": reasons.flatten()}).group_by(["cell", "reason"])
    for one in fallbacks.aggregate([([], "count_all")]).to_pylist():
        counts[one["cell"]][f"fallback {one['reason']}"] = one["count_all"]
    return counts


def _digests(answers: pd.DataFrame) -> dict[str, np.ndarray]:
    """Return cell -> a digest of each sample with its prompt, uint64 [n]."""
    from pandas.util import hash_pandas_object

    digests = hash_pandas_object(answers[["sample_id", "prompt_hash"]], index=False).to_numpy()
    return {str(cell): digests[places] for cell, places in answers.groupby("cell", observed=True).indices.items()}
