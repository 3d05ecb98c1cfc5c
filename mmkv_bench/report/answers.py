"""Single answers: which samples are shown, and what every cell of a context answered to each.

Cells that answered the same prompts under the same conditions are a group; `full` among them is what others are compared with.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mmkv_bench.report.cells import counted, first_difference, kept_by_head
from mmkv_bench.report.columns import number
from mmkv_bench.statistics.metric_kinds import FIDELITY
from mmkv_bench.tables.scores import coded, is_text, numbers

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_COUNTED = ("entries_asked", "entries_resident", "n_tokens", "tokens_from_compressed")
_TEXTS = ("status", "error", "answer", "token_ids", "fallback", "prompt_hash", "kept", "kept_indices", "kept_digest")
COLUMNS = ("cell", "sample_id", "dataset", "doc_id", *_TEXTS, *_COUNTED)


@dataclass(frozen=True)
class Answers:
    """Response rows of one store, sorted by cell and sample, as arrays.

    starts: int [cells + 1]; the rows of the i-th cell of `names` are those from starts[i] to starts[i + 1].
    doc, sample: int [rows], the sample's place in its dataset and that of its id in `ids`.
    """

    table: pa.Table
    names: tuple[str, ...]
    starts: np.ndarray
    sample: np.ndarray
    doc: np.ndarray
    ids: np.ndarray
    numbers: Mapping[str, np.ndarray]
    statuses: tuple[str, ...]

    @classmethod
    def of(cls, table: pa.Table) -> Answers:
        """table: of `Store.responses` with `COLUMNS`, texts coded."""
        from mmkv_bench.tables.rows import frame

        narrow = frame(table.select(["cell", "sample_id", "doc_id", "status", *_COUNTED]))
        names, of_cell = coded(narrow["cell"])
        ids, sample = coded(narrow["sample_id"])
        statuses, status = coded(narrow["status"])
        told = {name: numbers(narrow[name]) for name in _COUNTED} | {"status": status}
        starts = np.searchsorted(of_cell, np.arange(len(names) + 1))
        return cls(table, tuple(names), starts, sample, narrow["doc_id"].to_numpy(), ids, told, tuple(statuses))

    @cached_property
    def _places(self) -> Mapping[str, int]:
        return {name: place for place, name in enumerate(self.names)}

    def rows(self, cell: str) -> slice:
        """The rows of a cell; none where it has none."""
        if cell not in self._places:
            return slice(0, 0)
        place = self._places[cell]
        return slice(int(self.starts[place]), int(self.starts[place + 1]))

    def of_samples(self, cell: str, samples: Sequence[str]) -> list[int | None]:
        """The row of a cell's answer to each of these samples."""
        at = self.rows(cell)
        place = {str(self.ids[number]): at.start + i for i, number in enumerate(self.sample[at])}
        return [place.get(sample) for sample in samples]

    def account(self, cell: str) -> dict[str, Any]:
        """What was counted in all answers of a cell; nothing where it has none."""
        at = self.rows(cell)
        if at.start == at.stop:
            return {"counted": None, "kept": None}
        kept = self.table["kept"].slice(at.start, at.stop - at.start).combine_chunks()
        return {"counted": counted(at, self.numbers, self.statuses), "kept": kept_by_head(kept)}

    def hashes(self, cells: Sequence[str], samples: Sequence[str]) -> dict[str, str]:
        """Sample -> the hash of its prompt, from the first of these cells that has one."""
        found: dict[str, str] = {}
        for cell in cells:
            left = [sample for sample in samples if sample not in found]
            if not left:
                break
            hashes = self.table["prompt_hash"].take(pa_places(self.of_samples(cell, left))).to_pylist()
            found |= {sample: one for sample, one in zip(left, hashes, strict=True) if one}
        return found


class Values:
    """Scores of samples: (cell, metric) -> sample id -> value; of these cells and samples alone."""

    def __init__(self, samples: pd.DataFrame, cells: Collection[str], shown: Collection[str]) -> None:
        self._found: dict[str, dict[str, dict[str, float | None]]] = {}
        kept = samples["cell"].isin(list(cells)).to_numpy() & samples["sample_id"].isin(list(shown)).to_numpy()
        kept &= ~samples["metric"].isin(list(FIDELITY)).to_numpy()
        part = samples.loc[kept, ["cell", "sample_id", "metric", "value", "status"]]
        ok = is_text(part["status"], "ok")
        rows = zip(part["cell"], part["metric"], part["sample_id"], numbers(part["value"]), ok, strict=True)
        for cell, metric, sample, value, good in rows:
            self._found.setdefault(cell, {}).setdefault(metric, {})[sample] = number(value) if good else None

    def of(self, cell: str, samples: Sequence[str]) -> dict[str, list[float | None]]:
        """Metric -> the values of these samples."""
        return {metric: [own.get(sample) for sample in samples] for metric, own in self._found.get(cell, {}).items()}


def chosen(answers: Answers, cells: Sequence[str], most: int) -> tuple[list[str], int]:
    """The ids of the first samples, at most so many, that any of these cells answered, and how many there are in all."""
    rows = [np.arange(at.start, at.stop) for at in map(answers.rows, cells)]
    every = np.concatenate(rows) if rows else np.array([], dtype=int)
    sample, first = np.unique(answers.sample[every], return_index=True)
    order = np.argsort(answers.doc[every][first], kind="stable")
    return [str(answers.ids[place]) for place in sample[order[:most]]], len(sample)


def of_cell(
    answers: Answers, cell: str, samples: Sequence[str], full: str | None, values: Values
) -> dict[str, list[Any]] | None:
    """What a cell answered to these samples, each column in their order, null where it has no row; None without any row.

    `differs`: the token at which the answer first leaves that of `full`, -1 where it never does.
    """
    rows = answers.of_samples(cell, samples)
    if not any(row is not None for row in rows):
        return None
    names = ["status", "error", "answer", "fallback", "entries_resident"]
    part = answers.table.select([*names, "token_ids"]).take(pa_places(rows))
    found: dict[str, Any] = {name: part[name].to_pylist() for name in names[:4]}
    found["fallback"] = ["; ".join(words or ()) for words in found["fallback"]]
    found["resident"] = part["entries_resident"].to_pylist()
    found["values"] = values.of(cell, samples)
    if full is not None and full != cell:
        others = answers.table["token_ids"].take(pa_places(answers.of_samples(full, samples)))
        found["differs"] = first_difference(part["token_ids"].combine_chunks(), others.combine_chunks())
    return found


def pa_places(places: Sequence[int | None]) -> pa.Array:
    """Places for `take`, null where there is none."""
    import pyarrow as pa

    return pa.array(places, pa.int64())
