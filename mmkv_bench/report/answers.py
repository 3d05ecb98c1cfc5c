"""Single cells, and their answers to the samples that are shown.

Cells that answered the same prompts under the same conditions are a group; `full` among them is what others are compared with.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from mmkv_bench.report.fields import number, number_words
from mmkv_bench.report.fields import numbers as rounded
from mmkv_bench.statistics.metric_kinds import FIDELITY, MEASURES
from mmkv_bench.tables.scores import coded, is_text, numbers

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

COUNTED = ("entries_asked", "entries_resident", "n_tokens", "tokens_from_compressed")
"""Columns of answers that are counts."""
_LEFT_OUT = ("config", "schema_version", "cell")  # shown elsewhere


def described(cells: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Cell -> its row as the page shows it, in the order of the schema, without what is null."""
    rows = {}
    for row in cells.to_dict("records"):
        shown = {key: _plain(value) for key, value in row.items() if key not in _LEFT_OUT}
        rows[row["cell"]] = {key: value for key, value in shown.items() if value is not None}
    return rows


def _plain(value: Any) -> Any:
    """A scalar of a frame as JSON has it; whole numbers that a null among them made floats are whole again."""
    if isinstance(value, str | bool):
        return value
    if hasattr(value, "isoformat"):
        return None if value != value else value.isoformat(timespec="seconds")
    return number(value.item() if hasattr(value, "item") else value)


def metric_rows(metrics: pd.DataFrame) -> dict[str, list[dict[str, Any]]]:
    """Cell -> its rows of `metrics`, those of the task before what every run measures."""
    metrics = metrics.sort_values("metric", key=lambda names: names.isin(list(MEASURES)), kind="stable")
    rows: dict[str, list[dict[str, Any]]] = {}
    kept = [name for name in metrics.columns if name not in ("schema_version", "dataset")]
    for row in metrics[kept].to_dict("records"):
        rows.setdefault(row.pop("cell"), []).append({key: _plain(value) for key, value in row.items()})
    return rows


def counted(cell: slice, answers: Mapping[str, np.ndarray], statuses: Sequence[str]) -> dict[str, Any]:
    """Sums over all answers of a cell; `answers`: columns of numbers, NaN for null, and `status`, int [rows]."""
    status = answers["status"][cell]
    ends = np.bincount(status, minlength=len(statuses))
    ok = np.flatnonzero(status == statuses.index("ok")) if "ok" in statuses else np.array([], dtype=int)
    counts: dict[str, Any] = {
        "answers": len(status),
        "ended": {word: int(n) for word, n in zip(statuses, ends, strict=True) if n},
    }
    for name in COUNTED:
        values = answers[name][cell][ok]
        values = values[~np.isnan(values)]
        counts[name] = rounded([values.min(), values.mean(), values.max()]) if len(values) else None
    asked, resident = (answers[name][cell][ok] for name in COUNTED[:2])
    counts["over"] = int(np.count_nonzero(resident > asked))
    return counts


def endings(ended: Mapping[str, int]) -> str:
    """`500 ok`, `498 ok, 2 oom`."""
    return ", ".join(f"{n} {status}" for status, n in sorted(ended.items(), key=lambda one: one[0] != "ok")) or "none"


def audit_sentences(counts: Mapping[str, Any] | None) -> list[str]:
    """The sums of `counted` in sentences."""
    if counts is None:
        return ["No answers of this cell are stored."]
    sentences = [f"{counts['answers']} answers: {endings(counts['ended'])}."]
    asked, resident = counts["entries_asked"], counts["entries_resident"]
    if resident:
        budget = "no budget" if asked is None else f"{_ends(asked)} asked"
        sentences.append(f"Entries over all layers and KV heads: {_ends(resident)} kept, {budget}.")
        over = counts["over"]
        sentences.append(f"{over} answers keep more than was asked." if over else "No answer is over the budget.")
    if counts["tokens_from_compressed"]:
        own, compressed = _ends(counts["n_tokens"]), _ends(counts["tokens_from_compressed"])
        sentences.append(f"Tokens of an answer: {own}; of these from the compressed cache: {compressed}.")
    return sentences


def _ends(values: Sequence[float]) -> str:
    """least, mean, most -> `512`, or `496 to 512, 508 on average`."""
    least, mean, most = map(number_words, values)
    return mean if values[0] == values[2] else f"{least} to {most}, {mean} on average"


def kept_by_head(kept: pa.ListArray) -> list[list[list[float | int | None]]] | None:
    """Mean, least and most entries of each layer and KV head over the answers of a cell: [3][layers][heads].

    Args:
        kept: of one cell, lists [layers] of lists [KV heads], null where an answer failed. None where no answer has any, or
            where their shapes differ.
    """
    layers = kept.drop_null().flatten()
    rows = len(kept) - kept.null_count
    if not rows or not len(layers):
        return None
    values = layers.flatten().to_numpy(zero_copy_only=False)
    widths = layers.value_lengths().to_numpy(zero_copy_only=False)
    if len(layers) % rows or len(np.unique(widths)) > 1 or not widths[0]:
        return None
    whole = values.reshape(rows, len(layers) // rows, int(widths[0])).astype(np.float64)
    ways = (whole.mean(axis=0), whole.min(axis=0), whole.max(axis=0))
    return [[rounded(layer) for layer in way.tolist()] for way in ways]


def first_difference(tokens: pa.ListArray, others: pa.ListArray) -> list[int | None]:
    """Compare lists of token ids pairwise: place of the first that differs, -1 where none does, None where one is null."""
    left, right = padded(tokens), padded(others)
    width = max(left.shape[1], right.shape[1])
    left, right = (np.pad(each, ((0, 0), (0, width - each.shape[1])), constant_values=-1) for each in (left, right))
    differs = left != right
    first = np.where(differs.any(axis=1), differs.argmax(axis=1), -1) if width else np.full(len(left), -1)
    answered = [a and b for a, b in zip(tokens.is_valid().to_pylist(), others.is_valid().to_pylist(), strict=True)]
    return [int(place) if there else None for place, there in zip(first, answered, strict=True)]


def padded(lists: pa.ListArray) -> np.ndarray:
    """int64 [n, longest], -1 behind the end of each."""
    lengths = np.nan_to_num(lists.value_lengths().to_numpy(zero_copy_only=False)).astype(np.int64)
    filled = np.full((len(lengths), int(lengths.max(initial=0))), -1, dtype=np.int64)
    filled[np.arange(filled.shape[1]) < lengths[:, None]] = lists.drop_null().flatten().to_numpy(zero_copy_only=False)
    return filled


def parsed(text: str) -> Any:
    """A configuration without what no page shows."""
    config = json.loads(text)
    for nodes in (config.get("methods") or {}, config.get("datasets") or {}):
        for node in nodes.values():
            if isinstance(node, dict):
                node.pop("about", None)
    return config


_TEXTS = ("status", "error", "answer", "token_ids", "fallback", "prompt_hash", "kept", "kept_indices", "kept_digest")
COLUMNS = ("cell", "sample_id", "dataset", "doc_id", *_TEXTS, *COUNTED)


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

        narrow = frame(table.select(["cell", "sample_id", "doc_id", "status", *COUNTED]))
        names, of_cell = coded(narrow["cell"])
        ids, sample = coded(narrow["sample_id"])
        statuses, status = coded(narrow["status"])
        columns = {name: numbers(narrow[name]) for name in COUNTED} | {"status": status}
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
