"""Counts over the answers of a method at a budget: answers over the budget, with fallbacks, or untouched by compression."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mmkv_bench.protocols import protocol
from mmkv_bench.store.store import Store
from mmkv_bench.tables.sample_scores import Sheet, is_text, lists_of, numbers, positions_in

if TYPE_CHECKING:
    import pandas as pd
COLUMNS = (
    *("entries_asked", "entries_resident", "tokens_from_compressed", "n_tokens", "question_text_before_cut"),
    *("entries_reachable", "bytes_device", "bytes_host", "bytes_metadata", "bytes_full", "budget_entries"),
    *("context_tokens", "bytes_held", "bytes_state"),
)
"""Columns of the responses that an audit reads, besides status, fallbacks and finish reasons."""
CHOSEN = "chosen"
FREE_COLUMNS = ("cell", "sample_id", "status", "token_ids", "finish_reason")
"""Columns of the responses of `full` that `free_share` reads."""
MOSTLY = 0.5
"""From this `free_share` on, compression hardly matters for a task."""
_PACKED_BYTES_RATIO = 0.9
"""Entries are packed if they take less than this part of the bytes that as many entries of the full cache take."""


@dataclass(frozen=True)
class Audit:
    """Facts about the scored ok responses of a method at a budget, over all seeds. Integers are numbers of responses.

    over: responses that keep more entries than the budget allows.
    excess_mean, excess_worst: mean and maximum of kept / allowed entries - 1 over these responses.
    fallbacks: reason -> number of responses.
    from_prefill: responses whose tokens, except the end token, all came from the full prefill, so that compression could
        not change them (one-token answers under protocol paper).
    text_before_cut: responses whose compressed context contained question text (protocol query_agnostic).
    packed: responses whose entries are stored in fewer bits than the model's dtype.
    retrievable: responses that can read more entries than are resident, for instance from host memory.
    device, host: mean bytes of entries on the device (with metadata) and in host memory, over the full cache's bytes; 1 and 0
        unless responses are packed or retrievable.
    reach: mean of readable / resident entries over the retrievable responses.
    held: mean of all bytes held for entries, with reserved slots and buffers, over the full cache's bytes; None if no response
        is packed or retrievable, or if a row lacks the column.
    chosen: responses to samples that were requested by id (`mask_chosen_apart`).
    of_all: mean of bytes left / bytes of the full state, including recurrent states and window layers; 0 for a model without
        these.
    """

    n: int = 0
    over: int = 0
    excess_mean: float = 0.0
    excess_worst: float = 0.0
    fallbacks: dict[str, int] = field(default_factory=dict)
    from_prefill: int = 0
    text_before_cut: int = 0
    packed: int = 0
    retrievable: int = 0
    device: float = 1.0
    host: float = 0.0
    reach: float = 1.0
    held: float | None = None
    chosen: int = 0
    of_all: float = 0.0

    @property
    def comparable(self) -> bool:
        """True if scores may be compared with other methods' scores at the same budget.

        Entries must be neither quantised nor offloaded, no answer may exceed the budget, and no sample was requested by id.
        """
        return not (self.packed or self.retrievable or self.over or self.chosen)


_FLAGS = ("over", "from_prefill", "text_before_cut", "packed", "retrievable", CHOSEN)
_SUMS = ("n", *_FLAGS, "known", "device", "host", "reach", "held", "of_all")


@dataclass
class _Counts:
    """Counts over the ok answers of one cell (stored setting) that have a score of one metric.

    sums: sums of the facts `_SUMS`. excess: kept / allowed entries - 1 of each answer over the budget.
    fallbacks: reason -> number of answers.
    """

    sums: np.ndarray
    excess: np.ndarray
    fallbacks: Mapping[str, int]


class Audits:
    """Audits of the cells (stored settings) of a sheet. Answers are counted frame by frame, to save memory.

    Args:
        blocks: frames of responses; all answers of a cell are in one frame.
        sheet: the scores of these answers.
    """

    def __init__(self, blocks: Iterable[pd.DataFrame], sheet: Sheet) -> None:
        self._counts: dict[tuple[int, str], _Counts] = {}
        self._unscored = np.zeros(len(sheet.cells), np.int64)
        self._metrics: dict[int, list[tuple[str, slice]]] = {}
        for cell, metric, at in sheet.slices():
            self._metrics.setdefault(cell, []).append((metric, at))
        for block in blocks:
            if not block.empty:
                self._add(block, sheet)

    def unscored(self, cell: int) -> int:
        """Return the number of answers of the sheet's cell at position `cell` that have no score of any metric.

        A dataset may score each kind of question with another metric, so a single metric would not tell.
        """
        return int(self._unscored[cell])

    def audit(self, cells: Sequence[int], metric: str) -> Audit:
        """Return the `Audit` of the ok answers that have a score of `metric`.

        cells: positions of cells of the sheet that differ only by seed.
        """
        counts = [self._counts[cell, metric] for cell in cells if (cell, metric) in self._counts]
        sums = dict(zip(_SUMS, np.sum([each.sums for each in counts], axis=0), strict=True)) if counts else {}
        if not sums or not sums["n"]:
            return Audit()
        excess_ratios = np.concatenate([each.excess for each in counts]) if sums["over"] else np.zeros(1)
        fallbacks = sum((Counter(each.fallbacks) for each in counts), Counter())
        answers_with_bytes = sums["known"] if sums["packed"] or sums["retrievable"] else 0
        return Audit(
            n=int(sums["n"]),
            excess_mean=float(np.mean(excess_ratios)),
            excess_worst=float(np.max(excess_ratios)),
            fallbacks=dict(sorted(fallbacks.items())),
            of_all=float(sums["of_all"] / sums["n"]),
            device=float(sums["device"] / answers_with_bytes) if answers_with_bytes else 1.0,
            host=float(sums["host"] / answers_with_bytes) if answers_with_bytes else 0.0,
            reach=float(sums["reach"] / sums["retrievable"]) if sums["retrievable"] else 1.0,
            held=float(sums["held"] / answers_with_bytes)
            if answers_with_bytes and not np.isnan(sums["held"])
            else None,
            **{name: int(sums[name]) for name in _FLAGS},
        )

    def _add(self, block: pd.DataFrame, sheet: Sheet) -> None:
        cells, samples = positions_in(block["cell"], sheet.cells), positions_in(block["sample_id"], sheet.ids)
        order = np.lexsort((samples, cells))
        order = order[cells[order] >= 0]
        samples, starts = samples[order], np.searchsorted(cells[order], np.arange(len(sheet.cells) + 1))
        facts, excess = _facts(block, order)
        reasons, reason, reason_row = _fallbacks(block, order)
        scored = np.zeros(len(order), dtype=bool)
        for cell in np.flatnonzero(np.diff(starts)).tolist():
            low, high = starts[cell : cell + 2]
            reason_span = slice(*np.searchsorted(reason_row, (low, high)))
            for metric, rows in self._metrics.get(cell, ()):
                scored_rows = low + np.flatnonzero(np.isin(samples[low:high], sheet.sample[rows]))
                scored[scored_rows] = True
                ok_rows = scored_rows[facts[scored_rows, 0] > 0]
                reasons_kept = reason[reason_span][np.isin(reason_row[reason_span], ok_rows)]
                self._counts[cell, metric] = _Counts(
                    facts[ok_rows].sum(axis=0),
                    excess[ok_rows][facts[ok_rows, 1] > 0],
                    {reasons[number]: int(count) for number, count in enumerate(np.bincount(reasons_kept)) if count},
                )
            self._unscored[cell] = np.count_nonzero(~scored[low:high])


def _facts(block: pd.DataFrame, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (facts, excess) of the answers at positions `order` of `block`.

    facts: float64 [answers, len(_SUMS)], one column per name in `_SUMS`; a condition is 0 where a column that it needs is null.
    excess: float64 [answers], kept / allowed entries - 1; NaN without a budget.
    """
    absent = np.full(len(order), np.nan)
    column = {name: numbers(block[name])[order] if name in block else absent for name in COLUMNS}
    entries_resident, entries_asked = column["entries_resident"], column["entries_asked"]
    compressed_tokens, is_ended = column["tokens_from_compressed"], is_text(block["finish_reason"], "eos")[order]
    bytes_full, context_tokens = column["bytes_full"], column["context_tokens"]
    zeros, state = np.zeros(len(order)), column["bytes_state"]
    stored_bytes = column["bytes_device"] + np.nan_to_num(column["bytes_host"])
    with np.errstate(divide="ignore", invalid="ignore"):
        excess = entries_resident / entries_asked - 1
        # Entries of the full cache. `entries_asked` counts min(budget, prompt) entries in each head; without a budget nothing
        # is evicted.
        full_entries = np.where(
            np.isnan(entries_asked),
            entries_resident,
            entries_asked * context_tokens / np.fmin(column["budget_entries"], context_tokens),
        )
        has_bytes, retrievable = bytes_full > 0, column["entries_reachable"] > entries_resident
        facts = {
            "n": is_text(block["status"], "ok")[order],
            "over": excess > 0,
            "from_prefill": (compressed_tokens - is_ended <= 0) & (compressed_tokens < column["n_tokens"]),
            "text_before_cut": column["question_text_before_cut"] > 0,
            "packed": has_bytes
            & (column["bytes_device"] < _PACKED_BYTES_RATIO * bytes_full * entries_resident / full_entries),
            "retrievable": retrievable,
            CHOSEN: block[CHOSEN].to_numpy()[order] if CHOSEN in block else zeros,
            "known": has_bytes,
            "device": np.where(has_bytes, (column["bytes_device"] + column["bytes_metadata"]) / bytes_full, 0.0),
            "host": np.where(has_bytes, np.nan_to_num(column["bytes_host"]) / bytes_full, 0.0),
            "reach": np.where(retrievable, column["entries_reachable"] / entries_resident, 0.0),
            "held": np.where(has_bytes, (column["bytes_held"] - np.nan_to_num(state)) / bytes_full, 0.0),
            "of_all": np.where(state > 0, (stored_bytes + state) / (bytes_full + state), 0.0),
        }
    return np.stack([facts[name].astype(np.float64) for name in _SUMS], axis=1), excess


def _fallbacks(block: pd.DataFrame, order: np.ndarray) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return the fallbacks that the answers at positions `order` of `block` report, one item per answer and fallback.

    They are (distinct names, position of each item's name among these, position in `order` of each item's answer).
    """
    lists_of_reasons = lists_of(block["fallback"], pa.string(), order)
    coded_reasons = lists_of_reasons.flatten().dictionary_encode()
    rows = pc.list_parent_indices(lists_of_reasons).to_numpy(zero_copy_only=False)
    return coded_reasons.dictionary.to_pylist(), coded_reasons.indices.to_numpy(zero_copy_only=False), rows


def free_share(answers: pd.DataFrame, name: str) -> float | None:
    """Return the mean share of an answer's tokens that the full prefill gives.

    The end token and final tokens that all answers share (unless all answers are equal) are not counted. An answer without
    other tokens has the share 1. None without ok answers, or if the protocol takes no token from the full prefill.

    Args:
        answers: `responses` rows of the full cache, with `FREE_COLUMNS`.
        name: name of the protocol.
    """
    free_tokens = protocol(name).from_prefill
    answers = answers[answers["status"] == "ok"]
    if not free_tokens or answers.empty:
        return None
    ended = answers["finish_reason"] == "eos"
    texts = [ids[:-1] if end else ids for ids, end in zip(map(list, answers["token_ids"]), ended, strict=True)]
    lengths = np.array([len(text) for text in texts]) - _closing(texts)
    return float(np.mean(np.where(lengths > 0, np.minimum(free_tokens, lengths) / np.maximum(lengths, 1), 1.0)))


def _closing(texts: Sequence[list[int]]) -> int:
    """Return the length of the longest ending that all texts share; 0 if all texts are equal."""
    shortest, closing_tokens = min(map(len, texts)), 0
    while closing_tokens < shortest and len({text[-closing_tokens - 1] for text in texts}) == 1:
        closing_tokens += 1
    return closing_tokens if len(set(map(tuple, texts))) > 1 else 0


def mask_chosen_apart(store: Store, answers: pa.Table) -> np.ndarray | None:
    """Mask the answers to samples requested by id that lie behind all samples which the same cell answered in dataset order.

    Return bool [answers], or None if there are no such answers. answers: rows of `responses`, with `cell` and `chosen`.
    """
    is_chosen = pc.fill_null(answers[CHOSEN], False).to_numpy()
    if not is_chosen.any():
        return None
    cells = answers["cell"].filter(answers[CHOSEN]).unique().to_pylist()
    names = pa.array(cells, pa.string())
    rows = np.flatnonzero(pc.is_in(answers["cell"].cast("string"), value_set=names).to_numpy())
    answers_read = store.responses(cells, ("cell", "sample_id", "doc_id"))
    if answers_read.num_rows != len(rows):  # somebody is writing, so positions are unknown
        return is_chosen
    doc_ids, rows_by_id = answers_read["doc_id"].to_numpy(), is_chosen[rows]
    cell = pc.index_in(answers_read["cell"], value_set=names).to_numpy()
    last_doc_ids = np.full(len(cells), -1, np.int64)
    np.maximum.at(last_doc_ids, cell[~rows_by_id], doc_ids[~rows_by_id])
    is_apart = np.zeros(len(is_chosen), bool)
    is_apart[rows] = rows_by_id & (doc_ids > last_doc_ids[cell])
    return is_apart if is_apart.any() else None
