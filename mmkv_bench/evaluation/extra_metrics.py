"""Measures that no task defines, computed from stored rows: fidelity to `full`, perplexity, ROUGE-L against answers of `full`.

They are computed column by column, for many cells at once, from the response rows of a cell and of the `full` cell with the
same protocol. They need no model and no data.

Fidelity. The row of `full` compares the full cache with a copy of itself that is decoded as compressed caches are. It shows the
noise of the measurement.

- `fidelity_kl`: KL(full || cell) in nats, mean over the tokens of full's greedy answer. Under `paper` without the first token,
  which comes from the full prefill for every cell (an answer of one token then has no value); `fidelity_kl_all` is the mean
  with it. Other protocols include the first token, and `fidelity_kl_first` is its KL alone.
- `fidelity_top1`: share of the tokens of `fidelity_kl` at which both caches rank the same token first.
- `same_answer`: 1 if the cell's own answer has exactly full's tokens.
- `divergence`: number of tokens of the cell's own answer before the first that differs from full's. An answer that never
  differs is censored at its end and counts with its length, so the mean over samples is a restricted mean. The value of `full`
  is its mean length, for comparison.

For a continuation (a dataset's measure) KL and agreement are taken at the reference's tokens, and `full` has no `same_answer`
and no `divergence`. `fidelity_kl_to_N` and `fidelity_top1_to_N` are means over a stretch of the reference's tokens that ends
at token N (`metric_kinds.POSITIONS`).

`ppl`: exp of the mean negative log-likelihood of the reference answers' tokens, pooled over the dataset. Under `paper` the
first token's likelihood is the full prefill's. `ppl_without_first` leaves the first token out.

`rouge_l_sampled`: ROUGE-L (F) of the answer against an answer of `full` sampled at temperature 0.2; for `full` itself, ROUGE-L
of a second sample, as in PrefixKV. `rouge_l_greedy`: against full's greedy answer; `full` has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mmkv_bench.datasets.rouge import rouge_l
from mmkv_bench.protocols import protocol
from mmkv_bench.statistics.metric_kinds import FIDELITY, KL_TO, POSITIONS, TOP1_TO

if TYPE_CHECKING:
    import pyarrow as pa


AT_ONCE = 1 << 20  # numbers compared at a time


@dataclass(frozen=True)
class RaggedArray:
    """Rows of numbers with different lengths.

    flat: all numbers [n]. starts, lengths: int64 [rows], of each row's numbers in `flat`. there: bool [rows], False for null
    (length 0).
    """

    flat: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    there: np.ndarray

    @classmethod
    def of(cls, column: pa.ChunkedArray) -> RaggedArray:
        import pyarrow.compute as pc

        list_column = column.combine_chunks()
        lengths = pc.fill_null(pc.list_value_length(list_column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        is_valid = pc.is_valid(list_column).to_numpy(zero_copy_only=False)
        flat = list_column.flatten().to_numpy(zero_copy_only=False)  # without the values of null rows
        return cls(flat, np.cumsum(lengths) - lengths, lengths, is_valid)

    def after(self, skipped: np.ndarray) -> RaggedArray:
        """Return the rows without their first `skipped` numbers. skipped: int [rows]."""
        skipped = np.minimum(skipped, self.lengths)
        return replace(self, starts=self.starts + skipped, lengths=self.lengths - skipped)

    def first(self, count: int = 1) -> RaggedArray:
        """Return the first `count` numbers of each row, as rows."""
        return replace(self, lengths=np.minimum(self.lengths, count))

    def sums(self) -> np.ndarray:
        """Return the sum of each row's numbers, correctly rounded, float64 [rows]."""
        spans = zip(self.starts.tolist(), (self.starts + self.lengths).tolist(), strict=True)
        return np.array([math.fsum(self.flat[start:end].tolist()) for start, end in spans], np.float64)

    def leading(self) -> np.ndarray:
        """Return how many numbers of each row come before its first 0 (or False), int64 [rows]."""
        disagreement_places = np.flatnonzero(self.flat == 0)
        next_disagreement = np.append(disagreement_places, len(self.flat))[
            np.searchsorted(disagreement_places, self.starts)
        ]
        return np.minimum(next_disagreement - self.starts, self.lengths)


def common_prefix_lengths(
    answers: RaggedArray, references: RaggedArray, rows: np.ndarray, others: np.ndarray
) -> np.ndarray:
    """Return how many first numbers of row rows[i] of `answers` and row others[i] of `references` are equal, int64
    [len(rows)]."""
    counts = np.minimum(answers.lengths[rows], references.lengths[others])
    block_bounds = np.searchsorted(np.cumsum(counts + 1), np.arange(AT_ONCE, int(counts.sum()) + len(counts), AT_ONCE))
    for start, end in pairwise(np.unique([0, *block_bounds.tolist(), len(counts)]).tolist()):
        row_slice = slice(start, end)  # successive rows with about `AT_ONCE` numbers together
        common_lengths = counts[row_slice]
        pair_numbers = np.repeat(np.arange(len(common_lengths)), common_lengths)
        token_places = np.arange(len(pair_numbers)) - np.repeat(
            np.cumsum(common_lengths) - common_lengths, common_lengths
        )
        differ = np.flatnonzero(
            answers.flat[answers.starts[rows[row_slice]][pair_numbers] + token_places]
            != references.flat[references.starts[others[row_slice]][pair_numbers] + token_places]
        )
        first, first_places = np.unique(pair_numbers[differ], return_index=True)
        common_lengths[first] = token_places[differ[first_places]]
    return counts


VALUE, UNMEASURED, MEANINGLESS = range(3)


class Measured(NamedTuple):
    """Values of one measure, one per response row.

    kinds: int [rows], `VALUE`, `UNMEASURED` or `MEANINGLESS`. values: float64 [rows], valid where the kind is `VALUE`.
    parts: float64 [rows, 2], sums for a measure that is pooled over samples (perplexity); otherwise None.
    """

    kinds: np.ndarray
    values: np.ndarray
    parts: np.ndarray | None = None


class PairedAnswers:
    """Response rows, each paired with the row of `full` for the same sample and protocol.

    names: the cells. of_cell: int [rows], the row's cell as index into `names`.
    other: int [rows], index of the paired row in the table `full`; -1 for none.
    ok, full_ok: bool [rows], whether the row and its paired row have status ok.
    is_full: bool [rows], whether the row's cell is `full` itself.
    free: int [rows], number of tokens that the cell's protocol takes from the full prefill.
    slim: bool [rows], whether `pack --slim` removed the row's per-token values, from which measures are computed.
    """

    def __init__(
        self, answers: pa.Table, full: pa.Table, protocols: Mapping[str, str], baselines: Collection[str]
    ) -> None:
        import pyarrow.compute as pc

        self.answers, self.full = answers, full
        encoded_cells = answers["cell"].combine_chunks().dictionary_encode()
        self.names, self.of_cell = encoded_cells.dictionary.to_pylist(), encoded_cells.indices.to_numpy()
        self.ok = _flags(pc.equal(answers["status"], "ok"))
        self.slim = _flags(pc.fill_null(answers["slim"], False))
        self.is_full = self._by_cell([name in baselines for name in self.names], bool)
        self.free = self._by_cell([protocol(protocols[name]).from_prefill for name in self.names], np.int64)
        full_cell_of_protocol = {protocols[cell]: cell for cell in full["cell"].unique().to_pylist()}
        self.other = self.places(full, [full_cell_of_protocol.get(protocols[name]) for name in self.names])
        self.full_ok = np.append(_flags(pc.equal(full["status"], "ok")), False)[self.other]
        self._lists: dict[str, RaggedArray] = {}

    def _by_cell(self, values: list, kind: type) -> np.ndarray:
        return np.array(values, kind)[self.of_cell]

    def places(self, among: pa.Table, cells: list[str | None]) -> np.ndarray:
        """Return for each answer the row number in `among` of the same sample, int [rows]; -1 without one.

        cells: for each of `names`, the cell whose rows in `among` are searched; None: no cell.
        """
        import pandas as pd
        import pyarrow as pa
        import pyarrow.compute as pc

        ids, names = among["sample_id"].unique(), among["cell"].unique()
        samples = [
            pc.fill_null(pc.index_in(rows["sample_id"], value_set=ids), -1).to_numpy().astype(np.int64)
            for rows in (among, self.answers)
        ]
        cell_codes = pc.fill_null(pc.index_in(pa.array(cells, pa.string()), value_set=names), -1).to_numpy()
        cell = pc.index_in(among["cell"], value_set=names).to_numpy().astype(np.int64)
        width = max(len(ids), 1)
        keys = np.where(samples[1] < 0, -1, cell_codes.astype(np.int64)[self.of_cell] * width + samples[1])
        return pd.Index(cell * width + samples[0]).get_indexer(keys)

    def lists(self, column: str) -> RaggedArray:
        return self._lists.setdefault(column, RaggedArray.of(self.answers[column]))

    @cached_property
    def full_tokens(self) -> RaggedArray:
        return RaggedArray.of(self.full["token_ids"])

    @cached_property
    def continued(self) -> np.ndarray:
        """Whether each answer belongs to a continuation dataset (fidelity at a reference text's tokens), bool [rows].

        Such an answer has fidelity at more tokens than the answer of `full` has.
        """
        answered = np.append(self.full_tokens.lengths, 0)[self.other]
        return self.full_ok & (self.lists("forced_kl").lengths > answered)

    def restored(self, measure: Measured, stored: pa.Table) -> Measured:
        """Return a measure with stored values where `pack --slim` has removed the answer's per-token values.

        stored: rows of the table `samples` of this measure.
        """
        cells = set(stored["cell"].unique().to_pylist())
        is_lost = (
            (measure.kinds == UNMEASURED) & self.slim & self._by_cell([name in cells for name in self.names], bool)
        )
        if not is_lost.any():
            return measure
        stored_places = self.places(stored, self.names)
        rows = np.flatnonzero(is_lost & (stored_places >= 0))
        kinds, values = np.where(is_lost, MEANINGLESS, measure.kinds), measure.values.astype(np.float64)
        values[rows] = stored["value"].to_numpy()[stored_places[rows]]
        kinds[rows] = np.where(np.isnan(values[rows]), UNMEASURED, VALUE)
        restored_parts = measure.parts
        if restored_parts is not None:
            stored_sums, restored_parts = RaggedArray.of(stored["parts"]), restored_parts.copy()
            restored_parts[rows] = stored_sums.flat[stored_sums.starts[stored_places[rows]][:, None] + np.arange(2)]
        return Measured(kinds, values, restored_parts)

    def table(self, metric: str, measure: Measured) -> pa.Table:
        """Return a measure as rows of the table `samples`, without the column `dataset` and without cells that have
        no values."""
        import pyarrow as pa

        has_value = (measure.kinds == VALUE) & self.ok
        is_counted = np.zeros(len(self.names), dtype=bool)
        is_counted[self.of_cell[has_value]] = True
        rows = np.flatnonzero(is_counted[self.of_cell] & (~self.ok | (measure.kinds != MEANINGLESS)))
        table = self.answers.select(["cell", "sample_id", "cluster", "status"]).take(pa.array(rows))
        is_missing = ~has_value[rows]
        table = table.append_column("metric", pa.repeat(pa.scalar(metric), len(rows)))
        table = table.append_column("value", pa.array(measure.values[rows].astype(np.float64), mask=is_missing))
        if measure.parts is None:
            return table
        # Rows without a value get the parts of an empty answer.
        part_columns = np.where(is_missing[:, None], 0.0, measure.parts[rows])
        list_offsets = np.arange(0, 2 * len(rows) + 1, 2, dtype=np.int32)
        return table.append_column("parts", pa.ListArray.from_arrays(list_offsets, part_columns.ravel()))


def _flags(column: pa.ChunkedArray) -> np.ndarray:
    return column.to_numpy().astype(bool)


COLUMNS = (
    *("cell", "sample_id", "cluster", "status", "answer", "token_ids", "forced_kl", "forced_agree", "reference_nll"),
    *("reference_samples", "slim"),
)
"""Columns of a response row that the measures read."""

POOLED = ("ppl", "ppl_without_first")
NAMES = frozenset({*FIDELITY, "rouge_l_sampled", "rouge_l_greedy", *POOLED})


def measured(
    answers: pa.Table,
    full: pa.Table,
    protocols: Mapping[str, str],
    baselines: Collection[str],
    before: pa.Table | None = None,
) -> Iterator[pa.Table]:
    """Yield one table per measure, with rows of the table `samples` (without dataset) in the order of the answers.

    A cell in which no sample was measured gets no rows. Otherwise a failed or unmeasured sample gets a row without a value,
    and a sample for which the measure is meaningless gets none.

    Args:
        answers: response rows with `COLUMNS`, of any cells.
        full: response rows of one cell of `full` per protocol, with which the others are compared.
        protocols: cell -> protocol.
        baselines: cells that are `full`.
        before: stored rows of the cells (table samples). Measures that slim rows can no longer give are kept from these.
    """
    import pyarrow.compute as pc

    rows = PairedAnswers(answers, full, protocols, baselines)
    for name, measure in MEASURES.items():
        measurement = measure(rows)
        if before is not None and before.num_rows:
            measurement = rows.restored(measurement, before.filter(pc.equal(before["metric"], name)))
        table = rows.table(name, measurement)
        if table.num_rows:
            yield table


def _mean(column: str, rows: PairedAnswers, skip: bool = True) -> Measured:
    """Return the mean of a per-token column over each answer. skip: leave out the tokens that come from the full prefill."""
    kinds, sums, lengths = _sums(rows.lists(column), rows.free if skip else np.zeros_like(rows.free))
    return Measured(kinds, sums / lengths)


def _stretch(column: str, start: int, end: int, rows: PairedAnswers) -> Measured:
    """Return the mean of a per-token column over tokens start + 1 to end of a continuation, without those of the
    full prefill."""
    token_lists = rows.lists(column)
    kinds, sums, lengths = _sums(token_lists.first(end), np.maximum(rows.free, start))
    return Measured(np.where(rows.continued | ~token_lists.there, kinds, MEANINGLESS), sums / lengths)


def _sums(lists: RaggedArray, skipped: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (kinds, sums, counts), each [rows], of each row's numbers without its first `skipped`. Counts are at
    least 1."""
    lists_after_skip = lists.after(skipped)
    kinds = np.where(lists.there, np.where(lists_after_skip.lengths > 0, VALUE, MEANINGLESS), UNMEASURED)
    return kinds, lists_after_skip.sums(), np.maximum(lists_after_skip.lengths, 1)


def _kl_all(rows: PairedAnswers) -> Measured:
    mean = _mean("forced_kl", rows, skip=False)
    return mean._replace(kinds=np.where(rows.free > 0, mean.kinds, MEANINGLESS))


def _kl_first(rows: PairedAnswers) -> Measured:
    first_tokens = rows.lists("forced_kl").first()
    kinds = np.where(first_tokens.lengths > 0, VALUE, UNMEASURED)
    return Measured(np.where(rows.free > 0, MEANINGLESS, kinds), first_tokens.sums())


# A second greedy answer of `full` follows the first as long as the second measurement ranks the same tokens first.
def _alike(rows: PairedAnswers, exactly: bool) -> Measured:
    """Return for each answer the number of tokens before the first that differs from the answer of `full`.

    exactly: return whether the answers are equal instead (1 or 0).
    """
    tokens, other, agree = rows.lists("token_ids"), rows.full_tokens, rows.lists("forced_agree")
    both_ok = rows.ok & rows.full_ok
    kinds = np.where(rows.other < 0, MEANINGLESS, np.where(both_ok, VALUE, UNMEASURED))
    kinds[rows.is_full] = np.where(agree.there, VALUE, UNMEASURED)[rows.is_full]
    kinds[rows.is_full & rows.continued] = MEANINGLESS
    picked_rows = np.flatnonzero((kinds == VALUE) & ~rows.is_full)
    values = agree.leading()
    agreed_tokens = agree.lengths
    values[picked_rows] = common_prefix_lengths(tokens, other, picked_rows, rows.other[picked_rows])
    if exactly:
        agreed_tokens = agreed_tokens.copy()
        agreed_tokens[picked_rows] = np.maximum(tokens.lengths[picked_rows], other.lengths[rows.other[picked_rows]])
        values = values == agreed_tokens
    return Measured(kinds, values.astype(np.float64))


def _pooled(rows: PairedAnswers, skip: int) -> Measured:
    """Return each sample's perplexity without its first `skip` tokens, and the sums for the dataset's perplexity."""
    nll_lists = rows.lists("reference_nll")
    kinds, totals, lengths = _sums(nll_lists, np.full(len(nll_lists.lengths), skip))
    values = np.array([math.exp(each) for each in np.minimum(totals / lengths, 700.0).tolist()])
    return Measured(kinds, values, np.stack([totals, lengths.astype(np.float64)], 1))


_rouge_l = lru_cache(maxsize=1 << 16)(rouge_l)


def _rouge(rows: PairedAnswers, sampled: bool) -> Measured:
    """Return ROUGE-L of each answer against an answer of `full`; no value if `full` has no sampled answers to the sample.

    sampled: compare with the first sampled answer of `full`, and for `full` itself its second sample with the first. Otherwise
        compare with the greedy answer of `full`; `full` itself then has no value.
    """
    kind_of_full = UNMEASURED if sampled else MEANINGLESS
    kinds, values = np.where(rows.is_full, kind_of_full, UNMEASURED), np.zeros(len(rows.other))
    references = rows.full["reference_samples" if sampled else "answer"].to_pylist()
    references = [each[0] if sampled and each else each for each in references]
    sampled_too = np.append(_flags(rows.full["reference_samples"].is_valid()), False)[rows.other]
    picked_rows = np.flatnonzero(sampled_too & _flags(rows.answers["answer"].is_valid()) & ~rows.is_full)
    texts = rows.answers["answer"].take(picked_rows).to_pylist()
    scores = [_rouge_l(text, references[at]) for text, at in zip(texts, rows.other[picked_rows].tolist(), strict=True)]
    kinds[picked_rows], values[picked_rows] = VALUE, scores
    if sampled:
        picked_rows = np.flatnonzero(rows.is_full & _flags(rows.answers["reference_samples"].is_valid()))
        pairs = rows.answers["reference_samples"].take(picked_rows).to_pylist()
        kinds[picked_rows], values[picked_rows] = VALUE, [_rouge_l(second, first) for first, second, *_ in pairs]
    return Measured(kinds, values)


MEASURES: dict[str, Callable[[PairedAnswers], Measured]] = {
    "fidelity_kl": partial(_mean, "forced_kl"),
    "fidelity_top1": partial(_mean, "forced_agree"),
    "fidelity_kl_all": _kl_all,
    "fidelity_kl_first": _kl_first,
    "divergence": partial(_alike, exactly=False),
    "same_answer": partial(_alike, exactly=True),
    "ppl": partial(_pooled, skip=0),
    "ppl_without_first": partial(_pooled, skip=1),
    "rouge_l_sampled": partial(_rouge, sampled=True),
    "rouge_l_greedy": partial(_rouge, sampled=False),
    **{
        name: partial(_stretch, column, start, end)
        for column, names in (("forced_kl", KL_TO), ("forced_agree", TOP1_TO))
        for name, start, end in zip(names, (0, *POSITIONS), POSITIONS, strict=False)
    },
}
