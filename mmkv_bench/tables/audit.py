"""What the responses of a table cell say about it beside its score: excess entries, fallbacks, answers not tested."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mmkv_bench.tables.sample_filter import COLUMN
from mmkv_bench.tables.scores import Sheet, coded, is_text, numbers

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Audit:
    """Counts over the ok responses of one table cell (all its seeds together).

    over: responses with more resident entries than asked; excess_mean, excess_worst: resident / asked - 1 among those.
    fallbacks: reason -> responses. from_prefill: answers whose every token but the end token came from the full
    prefill (protocol paper, one-token answers): compression could not change them.
    text_before_cut: responses whose compressed context held question text (protocol query_agnostic).
    packed: responses whose entries are stored in fewer bits than the model's; retrievable: responses that can read more
    entries than are resident. Their cells are not told by entries alone: device and host are the mean bytes there, with
    metadata, over those of the full cache, and reach is the mean of reachable over resident entries. held: the mean of all
    bytes that are held, reserved slots and buffers included, over the same; None where a row is older than that column.
    chosen: answers to samples that were asked for by id (`chosen.apart`).
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

    @property
    def entries_only(self) -> bool:
        """Whether the number of entries says all about what the cells hold."""
        return not self.packed and not self.retrievable

    @property
    def comparable(self) -> bool:
        """Whether the cells may be compared by entries: within the budget, and of samples that nobody chose."""
        return self.entries_only and not self.over and not self.chosen


_EXCESS = ("entries_asked", "entries_resident")
_NUMBERS = (*_EXCESS, "tokens_from_compressed", "n_tokens", "question_text_before_cut")
_BYTES = ("entries_reachable", "bytes_device", "bytes_host", "bytes_metadata", "bytes_full")
_STORAGE = (*_BYTES, "budget_entries", "context_tokens")
_HELD = "bytes_held"
COLUMNS = (*_NUMBERS, *_STORAGE, _HELD)
"""Of the responses, what an audit is counted from beside status, fallbacks and ends."""


@dataclass(frozen=True)
class Answers:
    """The `responses` rows of a sheet's cells as arrays, sorted by cell and sample.

    starts    int [cells + 1]; the rows of the i-th cell are those from starts[i] to starts[i + 1]
    sample    int [rows], positions in the sheet's sample ids; -1 where the sample has no score in any cell
    ok        bool [rows], the response's status
    columns   float64 [rows] each, NaN for null: `_EXCESS` and, where the responses tell it, the first five of `_STORAGE`, then
              `_HELD` where they have it
    flags     what an audit counts, by the names of its fields, bool [rows] each
    reasons   names of fallbacks; reason, reason_row: int [found], which of them and in which row, sorted by row
    scored    bool [rows], some metric has a score of the sample
    """

    starts: np.ndarray
    sample: np.ndarray
    ok: np.ndarray
    columns: Mapping[str, np.ndarray]
    flags: Mapping[str, np.ndarray]
    reasons: tuple[str, ...]
    reason: np.ndarray
    reason_row: np.ndarray
    scored: np.ndarray

    @classmethod
    def of(cls, responses: pd.DataFrame | Iterable[pd.DataFrame], sheet: Sheet) -> Answers | None:
        """The rows of the sheet's cells; None where no row is given.

        Args:
            responses: all rows, or some cells after the other: each cell in one of the frames.
        """
        import pandas as pd

        frames = [responses] if isinstance(responses, pd.DataFrame) else responses
        made = joined([cls._of(frame, sheet) for frame in frames if not frame.empty])
        if made is None:
            return None
        for cell, _, at in sheet.every():
            made.scored[made.behind(cell, sheet.sample[at])] = True
        return made

    @classmethod
    def _of(cls, responses: pd.DataFrame, sheet: Sheet) -> Answers:
        names, of_cell = coded(responses["cell"])
        place = {name: position for position, name in enumerate(sheet.cells)}
        of_cell = np.array([place.get(name, -1) for name in names], dtype=np.int64)[of_cell]
        ids, of_sample = coded(responses["sample_id"])
        known = {name: position for position, name in enumerate(sheet.ids)}
        of_sample = np.array([known.get(name, -1) for name in ids], dtype=np.int64)[of_sample]
        key = of_cell * (len(known) + 1) + of_sample
        order = np.flatnonzero(of_cell >= 0)
        if np.any(np.diff(key[order]) < 0):
            order = order[np.argsort(key[order], kind="stable")]
        storage = _STORAGE if all(name in responses for name in _STORAGE) else ()
        held = (_HELD,) if storage and _HELD in responses else ()
        starts = np.searchsorted(of_cell[order], np.arange(len(sheet.cells) + 1))
        columns = {name: numbers(responses[name])[order] for name in (*_NUMBERS, *storage, *held)}
        flags = _flags(columns, is_text(responses["finish_reason"], "eos")[order])
        if COLUMN in responses:
            flags[COLUMN] = responses[COLUMN].to_numpy()[order]
        return cls(
            starts=starts,
            sample=of_sample[order].astype(np.int32),
            ok=is_text(responses["status"], "ok")[order],
            columns={name: columns[name] for name in (*_EXCESS, *(_BYTES if storage else ()), *held)},
            flags=flags,
            **_reasons(responses, order),
            scored=np.zeros(len(order), dtype=bool),
        )

    def behind(self, cell: int, samples: np.ndarray) -> slice | np.ndarray:
        """The rows of a cell's answers to these samples, int [n]; both ascending."""
        at = slice(int(self.starts[cell]), int(self.starts[cell + 1]))
        own = self.sample[at]
        if np.array_equal(own, samples):
            return at
        if not len(own):
            return np.array([], dtype=np.int64)
        found = np.minimum(np.searchsorted(own, samples), len(own) - 1)
        return at.start + found[own[found] == samples]

    def unscored(self, cell: int) -> int:
        """Answers of a cell without any score: not every sample has every metric (those of a mix are for one kind)."""
        at = slice(int(self.starts[cell]), int(self.starts[cell + 1]))
        return int((~self.scored[at]).sum())

    def audit(self, rows: Sequence[slice | np.ndarray]) -> Audit:
        """The audit of these rows of a table cell; rows that are not ok carry no audit and are left out."""
        kept = self._ok(rows)
        n = self.ok[kept].size
        if not n:
            return Audit()
        found = {name: int(np.count_nonzero(flag[kept])) for name, flag in self.flags.items()}
        excess = self._excess(kept) if found["over"] else np.zeros(1)
        return Audit(
            n=n,
            excess_mean=float(np.mean(excess)),
            excess_worst=float(np.max(excess)),
            fallbacks=self._fallbacks(kept),
            **found,
            **(self._storage(kept) if found.get("packed") or found.get("retrievable") else {}),
        )

    def _ok(self, rows: Sequence[slice | np.ndarray]) -> slice | np.ndarray:
        """Those that are ok; a slice where that is all of one, which costs no copies."""
        if len(rows) == 1 and isinstance(rows[0], slice) and self.ok[rows[0]].all():
            return rows[0]
        own = [np.arange(at.start, at.stop) if isinstance(at, slice) else at for at in rows]
        return np.concatenate([at[self.ok[at]] for at in own])

    def _excess(self, kept: slice | np.ndarray) -> np.ndarray:
        """resident / asked - 1 of those of these rows that are over."""
        excess = self.columns["entries_resident"][kept] / self.columns["entries_asked"][kept] - 1
        return excess[self.flags["over"][kept]]

    def _storage(self, kept: slice | np.ndarray) -> dict[str, Any]:
        """What the bytes and the reachable entries of rows say that are not told by entries alone."""
        resident, reachable, device, host, metadata, full = (
            self.columns[name][kept] for name in ("entries_resident", *_BYTES)
        )
        known, reached = full > 0, self.flags["retrievable"][kept]
        return {
            "device": float(np.mean(((device + metadata) / full)[known])) if known.any() else 1.0,
            "host": float(np.mean((np.nan_to_num(host) / full)[known])) if known.any() else 0.0,
            "reach": float(np.mean((reachable / resident)[reached])) if reached.any() else 1.0,
            "held": self._held(kept, known),
        }

    def _held(self, kept: slice | np.ndarray, known: np.ndarray) -> float | None:
        """Mean bytes held over those of the full cache; rows that are older than the column say nothing of them."""
        if _HELD not in self.columns or not known.any():
            return None
        share = (self.columns[_HELD][kept] / self.columns["bytes_full"][kept])[known]
        return None if np.isnan(share).any() else float(np.mean(share))

    def _fallbacks(self, kept: slice | np.ndarray) -> dict[str, int]:
        """Reason -> how often, in these rows, by name."""
        # The rows of a cell stand together, so this looks at little more than theirs.
        ends = (kept.start, kept.stop) if isinstance(kept, slice) else (kept.min(), kept.max() + 1)
        low, high = np.searchsorted(self.reason_row, ends)
        if low == high:
            return {}
        reason = self.reason[low:high]
        if not isinstance(kept, slice):
            reason = reason[np.isin(self.reason_row[low:high], kept)]
        counts = np.bincount(reason, minlength=len(self.reasons))
        return {self.reasons[number]: int(counts[number]) for number in np.flatnonzero(counts)}


def joined(parts: list[Answers]) -> Answers | None:
    """Answers of some cells after the other as one; `parts` is emptied on the way, so that little is held twice."""
    if len(parts) < 2:
        return parts[0] if parts else None
    names = sorted({name for part in parts for name in part.reasons})
    before = np.cumsum([0, *(len(part.ok) for part in parts)])
    columns: dict[str, list[np.ndarray]] = {}
    flags: dict[str, list[np.ndarray]] = {name: [] for part in parts for name in part.flags}
    reason, reason_row = [], []
    rest: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    starts = np.sum([part.starts for part in parts], axis=0)
    runs = [np.diff(part.starts) for part in parts]
    while parts:
        part, first = parts.pop(0), before[len(rest)]
        for name, values in part.columns.items():
            columns.setdefault(name, []).append(values)
        for name, found in flags.items():
            found.append(part.flags.get(name, np.zeros(len(part.ok), dtype=bool)))
        rank = np.array([names.index(name) for name in part.reasons], dtype=np.int64)
        reason.append(rank[part.reason] if len(rank) else part.reason)
        reason_row.append(part.reason_row + first)
        rest.append((part.sample, part.ok, part.scored))
    order = _by_cell(runs)
    row_of = np.concatenate(reason_row)
    if order is not None:
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        row_of = place[row_of]
    by_row = np.argsort(row_of, kind="stable")

    def whole(values: Sequence[np.ndarray]) -> np.ndarray:
        found = np.concatenate(values)
        return found if order is None else found[order]

    sample, ok, scored = (whole(each) for each in zip(*rest, strict=True))
    return Answers(
        starts=starts,
        sample=sample,
        ok=ok,
        columns={name: whole(columns.pop(name)) for name in list(columns)},
        flags={name: whole(flags.pop(name)) for name in list(flags)},
        reasons=tuple(names),
        reason=np.concatenate(reason)[by_row],
        reason_row=row_of[by_row],
        scored=scored,
    )


def _by_cell(runs: Sequence[np.ndarray]) -> np.ndarray | None:
    """int64 [rows]: the order in which rows lie cell after cell, those of a cell as they are; None where they do. runs: of
    each part, how many rows it has of each cell."""
    of_cell = np.concatenate([np.repeat(np.arange(len(run), dtype=np.int32), run) for run in runs])
    return None if (of_cell[1:] >= of_cell[:-1]).all() else np.argsort(of_cell, kind="stable")


def _reasons(responses: pd.DataFrame, order: np.ndarray) -> dict[str, Any]:
    """The fallbacks of the rows in that order, without a Python object for each row."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lists = pa.array(responses["fallback"], type=pa.list_(pa.string()), from_pandas=True)
    lists = (lists.combine_chunks() if isinstance(lists, pa.ChunkedArray) else lists).take(pa.array(order))
    found = lists.flatten().dictionary_encode()
    names = np.array(found.dictionary.to_pylist(), dtype=object)
    by_name = np.argsort(names.astype(str), kind="stable")
    rank = np.empty(len(names), dtype=np.int64)
    rank[by_name] = np.arange(len(names))
    return {
        "reasons": tuple(names[by_name]),
        "reason": rank[found.indices.to_numpy(zero_copy_only=False)] if len(names) else np.array([], dtype=np.int64),
        "reason_row": pc.list_parent_indices(lists).to_numpy(zero_copy_only=False),
    }


_PACKED = 0.9  # full-width entries take at least their share of the full cache's bytes, ragged heads' padding more


def _flags(columns: Mapping[str, np.ndarray], eos: np.ndarray) -> dict[str, np.ndarray]:
    """What an audit counts, bool [rows] each, by the names of its fields; comparisons with NaN (null, no budget) are
    false."""
    resident, asked = columns["entries_resident"], columns["entries_asked"]
    compressed = columns["tokens_from_compressed"]
    with np.errstate(divide="ignore", invalid="ignore"):
        found = {
            "over": resident / asked - 1 > 0,
            "from_prefill": (compressed - eos <= 0) & (compressed < columns["n_tokens"]),
            "text_before_cut": columns["question_text_before_cut"] > 0,
        }
        if _STORAGE[0] not in columns:
            return found
        reachable, device, _, _, full, budget, tokens = (columns[name] for name in _STORAGE)
        # Entries of the full cache: what was asked is the budget, or the whole prompt, of every head; without a budget
        # nothing is evicted.
        whole = np.where(np.isnan(asked), resident, asked * tokens / np.fmin(budget, tokens))
        packed = (full > 0) & (device < _PACKED * full * resident / whole)
    return found | {"packed": packed, "retrievable": reachable > resident}
