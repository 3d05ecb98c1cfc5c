"""Measures that no task defines, computed from stored rows: fidelity to `full`, perplexity, ROUGE-L against own answers.

They are made, of many cells at once and column by column, of the response rows of a cell and of the `full` cell of the same
protocol; no model, no data.

Fidelity. `full` stands beside the others with what the forks' path makes of the full cache: the noise floor.

- `fidelity_kl`: KL(full || cell) in nats, mean over the tokens of full's greedy answer. Under `paper` without its first
  token, which comes from the full prefill for every cell (an answer of one token has no value then);
  `fidelity_kl_all` is the mean with it. Under the other protocols it is among the tokens, and `fidelity_kl_first` is
  its KL alone.
- `fidelity_top1`: share of the tokens of `fidelity_kl` at which both rank the same token first.
- `same_answer`: 1 where the cell's own answer has exactly full's tokens.
- `divergence`: tokens of the cell's own answer before the first that differs from full's. An answer that never differs
  is censored at its end and counts with its length, so the mean over samples is the restricted mean; it can be read
  against that of `full`, which is the mean length.

`ppl`: exp of the mean negative log-likelihood of the reference answers' tokens, pooled over the dataset; under `paper` the
first token's is that of the full prefill. `ppl_without_first` leaves it out.

`rouge_l_sampled`: ROUGE-L (F) of the answer against an answer of `full` sampled at temperature 0.2; for `full` itself that
of a second sample, as in PrefixKV. `rouge_l_greedy`: against full's greedy answer; `full` has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np

from mmkv_bench.datasets.rouge import rouge_l
from mmkv_bench.evaluation.paired import MEANINGLESS, UNMEASURED, VALUE, Measured, PairedAnswers, agreed, is_there

if TYPE_CHECKING:
    import pyarrow as pa


COLUMNS = (
    "cell",
    "sample_id",
    "cluster",
    "status",
    "answer",
    "token_ids",
    "forced_kl",
    "forced_agree",
    "reference_nll",
    "reference_samples",
    "slim",
)
"""What the measures read of a response row."""

POOLED = ("ppl", "ppl_without_first")
NAMES = frozenset(
    {"fidelity_kl", "fidelity_kl_all", "fidelity_kl_first", "fidelity_top1", "divergence", "same_answer"}
    | {"rouge_l_sampled", "rouge_l_greedy", *POOLED}
)


def measured(
    answers: pa.Table,
    full: pa.Table,
    protocols: Mapping[str, str],
    baselines: Collection[str],
    before: pa.Table | None = None,
) -> Iterator[pa.Table]:
    """Rows of the table samples (without dataset), measure after measure: one per sample, in the order of the answers.

    A measure that no row of a cell has is left out of the cell. Where some have it, a failed sample and one that could not
    be measured have a row without a value, and a sample for which it means nothing has none.

    Args:
        answers: response rows with `COLUMNS`, of any cells; full: those of one cell of `full` per protocol, which the
            others are held against. protocols: cell -> its protocol, of all of them; baselines: cells that are `full`.
        before: stored rows of the cells (table samples). A slim row has lost what some measures were made of: what it
            cannot make stays.
    """
    import pyarrow.compute as pc

    rows = PairedAnswers(answers, full, protocols, baselines)
    for name, measure in MEASURES.items():
        measurement = measure(rows)
        if before is not None and before.num_rows:
            measurement = rows.kept(measurement, before.filter(pc.equal(before["metric"], name)))
        table = rows.table(name, measurement)
        if table.num_rows:
            yield table


def _mean(column: str, rows: PairedAnswers, skip: bool = True) -> Measured:
    """The mean over a row's tokens; skip: without those that come from the full prefill."""
    lists = rows.lists(column)
    kept = lists.after(rows.free) if skip else lists
    kinds = np.where(lists.there, np.where(kept.lengths > 0, VALUE, MEANINGLESS), UNMEASURED)
    return Measured(kinds, kept.sums() / np.maximum(kept.lengths, 1))


def _kl_all(rows: PairedAnswers) -> Measured:
    mean = _mean("forced_kl", rows, skip=False)
    return mean._replace(kinds=np.where(rows.free > 0, mean.kinds, MEANINGLESS))


def _kl_first(rows: PairedAnswers) -> Measured:
    first = rows.lists("forced_kl").first()
    kinds = np.where(first.lengths > 0, VALUE, UNMEASURED)
    return Measured(np.where(rows.free > 0, MEANINGLESS, kinds), first.sums())


# A second greedy answer of `full` follows the first as long as the second measurement ranks the same tokens first.
def _alike(rows: PairedAnswers, whole: bool) -> Measured:
    """Tokens before the first that differs; whole: 1 where none does and both end there, else 0."""
    tokens, other, agree = rows.lists("token_ids"), rows.full_tokens, rows.lists("forced_agree")
    both = rows.ok & rows.full_ok
    kinds = np.where(rows.other < 0, MEANINGLESS, np.where(both, VALUE, UNMEASURED))
    kinds[rows.is_full] = np.where(agree.there, VALUE, UNMEASURED)[rows.is_full]
    picked = np.flatnonzero((kinds == VALUE) & ~rows.is_full)
    values = agree.leading()
    end = agree.lengths
    values[picked] = agreed(tokens, other, picked, rows.other[picked])
    if whole:
        end = end.copy()
        end[picked] = np.maximum(tokens.lengths[picked], other.lengths[rows.other[picked]])
        values = values == end
    return Measured(kinds, values.astype(np.float64))


def _pooled(rows: PairedAnswers, skip: int) -> Measured:
    """The sample's own perplexity, and the sums that the dataset's is made of."""
    lists = rows.lists("reference_nll")
    kept = lists.after(np.full(len(lists.lengths), skip))
    kinds = np.where(lists.there, np.where(kept.lengths > 0, VALUE, MEANINGLESS), UNMEASURED)
    totals, lengths = kept.sums(), np.maximum(kept.lengths, 1)
    values = np.array([math.exp(each) for each in np.minimum(totals / lengths, 700.0).tolist()])
    return Measured(kinds, values, np.stack([totals, lengths.astype(np.float64)], 1))


_rouge_l = lru_cache(maxsize=1 << 16)(rouge_l)


def _rouge(rows: PairedAnswers, sampled: bool) -> Measured:
    """Against an answer of `full` that was sampled, or its greedy one where sampled ones were asked for too. Of `full` itself
    a second sample against the first, and nothing."""
    nothing = UNMEASURED if sampled else MEANINGLESS
    kinds, values = np.where(rows.is_full, nothing, UNMEASURED), np.zeros(len(rows.other))
    references = _firsts(rows.full["reference_samples"]) if sampled else rows.full["answer"].to_pylist()
    sampled_too = np.append(is_there(rows.full["reference_samples"]), False)[rows.other]
    picked = np.flatnonzero(sampled_too & is_there(rows.answers["answer"]) & ~rows.is_full)
    texts = rows.answers["answer"].take(picked).to_pylist()
    scores = [_rouge_l(text, references[at]) for text, at in zip(texts, rows.other[picked].tolist(), strict=True)]
    kinds[picked], values[picked] = VALUE, scores
    if sampled:
        picked = np.flatnonzero(rows.is_full & is_there(rows.answers["reference_samples"]))
        pairs = rows.answers["reference_samples"].take(picked).to_pylist()
        kinds[picked], values[picked] = VALUE, [_rouge_l(second, first) for first, second, *_ in pairs]
    return Measured(kinds, values)


def _firsts(column: pa.ChunkedArray) -> list[str | None]:
    return [None if samples is None else samples[0] for samples in column.to_pylist()]


MEASURES: dict[str, Callable[[PairedAnswers], Measured]] = {
    "fidelity_kl": partial(_mean, "forced_kl"),
    "fidelity_top1": partial(_mean, "forced_agree"),
    "fidelity_kl_all": _kl_all,
    "fidelity_kl_first": _kl_first,
    "divergence": partial(_alike, whole=False),
    "same_answer": partial(_alike, whole=True),
    "ppl": partial(_pooled, skip=0),
    "ppl_without_first": partial(_pooled, skip=1),
    "rouge_l_sampled": partial(_rouge, sampled=True),
    "rouge_l_greedy": partial(_rouge, sampled=False),
}
