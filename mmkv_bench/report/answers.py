"""Single answers: the samples that are shown, and the answers of every cell to them.

Cells that answered the same prompts under the same conditions are a group; `full` among them is what others are compared with.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from mmkv_bench.report.cells import counted, first_difference, kept_by_head
from mmkv_bench.report.formats import number
from mmkv_bench.statistics.metric_kinds import FIDELITY
from mmkv_bench.tables.scores import coded, is_text, numbers

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_COUNTED = ("entries_asked", "entries_resident", "n_tokens", "tokens_from_compressed")
_TEXTS = ("status", "error", "answer", "token_ids", "fallback", "prompt_hash", "kept", "kept_indices", "kept_digest")
COLUMNS = ("cell", "sample_id", "dataset", "doc_id", *_TEXTS, *_COUNTED)


@dataclass(frozen=True)
class AnswerTable:
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
    def of(cls, table: pa.Table) -> AnswerTable:
        """table: of `Store.responses` with `COLUMNS`, texts coded."""
        from mmkv_bench.tables.rows import frame

        narrow = frame(table.select(["cell", "sample_id", "doc_id", "status", *_COUNTED]))
        names, of_cell = coded(narrow["cell"])
        ids, sample = coded(narrow["sample_id"])
        statuses, status = coded(narrow["status"])
        columns = {name: numbers(narrow[name]) for name in _COUNTED} | {"status": status}
        starts = np.searchsorted(of_cell, np.arange(len(names) + 1))
        return cls(table, tuple(names), starts, sample, narrow["doc_id"].to_numpy(), ids, columns, tuple(statuses))

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
        """Counts over all answers of a cell; None where it has none."""
        at = self.rows(cell)
        if at.start == at.stop:
            return {"counted": None, "kept": None}
        kept = self.table["kept"].slice(at.start, at.stop - at.start).combine_chunks()
        return {"counted": counted(at, self.numbers, self.statuses), "kept": kept_by_head(kept)}

    def hashes(self, cells: Sequence[str], samples: Sequence[str]) -> dict[str, str]:
        """Sample -> the hash of its prompt, from the first of these cells that has one."""
        prompt_of: dict[str, str] = {}
        for cell in cells:
            left = [sample for sample in samples if sample not in prompt_of]
            if not left:
                break
            hashes = self.table["prompt_hash"].take(pa_places(self.of_samples(cell, left))).to_pylist()
            prompt_of |= {sample: one for sample, one in zip(left, hashes, strict=True) if one}
        return prompt_of


class SampleScores:
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


def first_samples(answers: AnswerTable, cells: Sequence[str], most: int) -> tuple[list[str], int]:
    """The ids of the first samples, at most so many, that any of these cells answered, and how many there are in all."""
    rows = [np.arange(at.start, at.stop) for at in map(answers.rows, cells)]
    every = np.concatenate(rows) if rows else np.array([], dtype=int)
    sample, first = np.unique(answers.sample[every], return_index=True)
    order = np.argsort(answers.doc[every][first], kind="stable")
    return [str(answers.ids[place]) for place in sample[order[:most]]], len(sample)


def left_at(tokens: Sequence[Any], others: Sequence[Any]) -> int | None:
    """Place of the first token, or character, that differs, from 0; None where none does."""
    if tokens == others:
        return None
    shared = zip(tokens, others, strict=False)
    return next((i for i, (a, b) in enumerate(shared) if a != b), min(len(tokens), len(others)))


@dataclass
class CellAnswers:
    """Answers of a cell to some samples, each list in their order; status None where it has no row.

    differs: the token at which an answer first leaves that of `full`, -1 where it never does; None where nothing is compared.
    markup: the answers, with what follows their first difference from full's marked; a failed one says how it ended.
    """

    status: list[str | None]
    error: list[str | None]
    answer: list[str | None]
    fallback: list[str]
    resident: list[int | None]
    differs: list[int | None]
    markup: list[Markup]
    scores: dict[str, list[float | None]]

    def leaves(self, place: int) -> str:
        """Where an answer leaves that of full: `token 4`, `never`, or "" where nothing is compared."""
        token = self.differs[place]
        return "" if token is None else "never" if token < 0 else f"token {token + 1}"


def cell_answers(
    answers: AnswerTable, cell: str, samples: Sequence[str], full: str | None, scores: SampleScores
) -> CellAnswers:
    """The answers of a cell to these samples, compared with those of the cell `full`."""
    names = ["status", "error", "answer", "fallback", "entries_resident", "token_ids"]
    rows = answers.table.select(names).take(pa_places(answers.of_samples(cell, samples)))
    status, error, answer, fallback, resident = (rows[name].to_pylist() for name in names[:5])
    differs: list[int | None] = [None] * len(samples)
    full_answers: list[str | None] = [None] * len(samples)
    if full is not None and full != cell:
        others = answers.table.select(["token_ids", "answer"]).take(pa_places(answers.of_samples(full, samples)))
        differs = first_difference(rows["token_ids"].combine_chunks(), others["token_ids"].combine_chunks())
        full_answers = others["answer"].to_pylist()
    fallbacks = ["; ".join(reasons or ()) for reasons in fallback]
    markup = list(map(_markup, status, error, answer, full_answers))
    return CellAnswers(status, error, answer, fallbacks, resident, differs, markup, scores.of(cell, samples))


def _markup(status: str | None, error: str | None, answer: str | None, full: str | None) -> Markup:
    if status is None:
        return Markup('<span class="quiet">no row</span>')
    if status != "ok":
        return Markup('<span class="bad" title="{}">{}</span>').format(error or "", status)
    answer = answer or ""
    if full is None or full == answer:
        return Markup('<span class="answer">{}</span>').format(answer)
    same = left_at(answer, full) or 0
    marked = Markup('<mark title="full: {}">{}</mark>').format(full, answer[same:] or "∅")
    return Markup('<span class="answer">{}{}</span>').format(answer[:same], marked)


def pa_places(places: Sequence[int | None]) -> pa.Array:
    """Places for `take`, null where there is none."""
    import pyarrow as pa

    return pa.array(places, pa.int64())
