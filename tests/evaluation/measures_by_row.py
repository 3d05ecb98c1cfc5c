"""The measures of one cell row by row, in plain Python: what the columns of many cells are held against."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from mmkv_bench.datasets.rouge import rouge_l
from mmkv_bench.evaluation.extra_metrics import NAMES, POOLED
from mmkv_bench.evaluation.samples import SampleScore
from mmkv_bench.protocols import protocol as protocol_named

Row = Mapping[str, Any]
Value = tuple[float, tuple[float, ...] | None]
Stored = Mapping[str, Mapping[str, "Value | str"]]
"""Measure -> sample id -> what is stored of it: `stored`."""


def stored(samples: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Value | str]]:
    """The measures among a cell's rows of the table samples, for `measured`."""
    found: dict[str, dict[str, Value | str]] = {}
    for row in samples:
        if row["metric"] in NAMES:
            parts = None if row["parts"] is None else tuple(row["parts"])
            value = UNMEASURED if row["value"] is None else (row["value"], parts)
            found.setdefault(row["metric"], {})[row["sample_id"]] = value
    return found


def measured(
    rows: Sequence[Row], full: Mapping[str, Row], protocol: str, is_full: bool, before: Stored | None = None
) -> list[SampleScore]:
    """One score per sample and measure.

    A measure that no row of the cell has is left out. Where some have it, a failed sample and one that could not be
    measured have a score without a value, and a sample for which it means nothing has none.

    Args:
        rows: the cell's; full: sample id -> row of `full` of the same protocol, empty where there is none.
        is_full: the rows are full's own.
        before: the cell's stored measures. A slim row has lost what some were made of: what it cannot make stays.
    """
    scores = []
    for name, measure in _measures(protocol, is_full).items():
        found = [(row, measure(row, full.get(row["sample_id"]))) for row in rows]
        known = (before or {}).get(name)
        if known is not None:
            found = [
                (row, known.get(row["sample_id"], MEANINGLESS) if value == UNMEASURED and row["slim"] else value)
                for row, value in found
            ]
        if any(isinstance(value, tuple) for row, value in found if row["status"] == "ok"):
            scores += [score for row, value in found for score in _score(name, row, value)]
    return scores


def _score(name: str, row: Row, value: Value | str) -> Iterator[SampleScore]:
    if row["status"] != "ok" or value == UNMEASURED:
        empty = (0.0, 0.0) if name in POOLED else None
        yield SampleScore(row["sample_id"], row["cluster"], name, None, row["status"], empty)
    elif isinstance(value, tuple):
        number, parts = value
        yield SampleScore(row["sample_id"], row["cluster"], name, number, row["status"], parts)


UNMEASURED, MEANINGLESS = "unmeasured", "meaningless"
Measure = Callable[[Row, Row | None], Value | str]


def _measures(protocol: str, is_full: bool) -> dict[str, Measure]:
    free = protocol_named(protocol).from_prefill
    made: dict[str, Measure] = {
        "fidelity_kl": lambda row, _: _mean(row["forced_kl"], skip=free),
        "fidelity_top1": lambda row, _: _mean(row["forced_agree"], skip=free),
        ("fidelity_kl_all" if free else "fidelity_kl_first"): lambda row, _: _mean(
            row["forced_kl"] if free else (row["forced_kl"] or [])[:1] or None
        ),
        "divergence": _divergence_of_full if is_full else _divergence,
        "same_answer": _same_of_full if is_full else _same,
        "ppl": lambda row, _: _pooled(row["reference_nll"]),
        "ppl_without_first": lambda row, _: _pooled(row["reference_nll"], skip=1),
        "rouge_l_sampled": _second_sample if is_full else _against_sample,
    }
    stretches: dict[str, Measure] = {}
    for name, column in (("fidelity_kl", "forced_kl"), ("fidelity_top1", "forced_agree")):
        for start, end in ((free, 32), (32, 64), (64, 128), (128, 256), (256, 512)):
            stretches[f"{name}_to_{end}"] = partial(_stretch, column, start, end)
    return made | ({} if is_full else {"rouge_l_greedy": _against_greedy}) | stretches


def _mean(values: Sequence[float] | None, skip: int = 0) -> Value | str:
    if values is None:
        return UNMEASURED
    kept = values[skip:]
    return (math.fsum(kept) / len(kept), None) if kept else MEANINGLESS


def _continued(row: Row, full: Row | None) -> bool:
    """More tokens were fed than full's answer has."""
    return full is not None and full["status"] == "ok" and len(row["forced_kl"] or ()) > len(full["token_ids"])


def _stretch(column: str, start: int, end: int, row: Row, full: Row | None) -> Value | str:
    if row[column] is not None and not _continued(row, full):
        return MEANINGLESS
    return _mean(row[column] and row[column][:end], skip=start)


def _pooled(nll: Sequence[float] | None, skip: int = 0) -> Value | str:
    """The sample's own perplexity, and the sums that the dataset's is made of."""
    if nll is None:
        return UNMEASURED
    kept = nll[skip:]
    if not kept:
        return MEANINGLESS
    total = math.fsum(kept)
    return math.exp(min(total / len(kept), 700.0)), (total, float(len(kept)))


def _agreed(own: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first difference."""
    same = (a == b for a, b in zip(own, other, strict=False))
    return next((index for index, equal in enumerate(same) if not equal), min(len(own), len(other)))


def _divergence(row: Row, full: Row | None) -> Value | str:
    if full is None:
        return MEANINGLESS
    if row["status"] != "ok" or full["status"] != "ok":
        return UNMEASURED
    return float(_agreed(row["token_ids"], full["token_ids"])), None


def _same(row: Row, full: Row | None) -> Value | str:
    if full is None:
        return MEANINGLESS
    if row["status"] != "ok" or full["status"] != "ok":
        return UNMEASURED
    return float(row["token_ids"] == full["token_ids"]), None


# A second greedy answer of `full` follows the first as long as the second measurement ranks the same tokens first.
def _divergence_of_full(row: Row, full: Row | None) -> Value | str:
    agree = row["forced_agree"]
    if _continued(row, full):
        return MEANINGLESS
    return UNMEASURED if agree is None else (float(_agreed(agree, [True] * len(agree))), None)


def _same_of_full(row: Row, full: Row | None) -> Value | str:
    if _continued(row, full):
        return MEANINGLESS
    return UNMEASURED if row["forced_agree"] is None else (float(all(row["forced_agree"])), None)


def _second_sample(row: Row, _: Row | None) -> Value | str:
    samples = row["reference_samples"]
    return UNMEASURED if samples is None else (rouge_l(samples[1], samples[0]), None)


def _against_sample(row: Row, full: Row | None) -> Value | str:
    if full is None or row["answer"] is None or full["reference_samples"] is None:
        return UNMEASURED
    return rouge_l(row["answer"], full["reference_samples"][0]), None


def _against_greedy(row: Row, full: Row | None) -> Value | str:
    """Where sampled answers were asked for, too."""
    if full is None or row["answer"] is None or full["reference_samples"] is None:
        return UNMEASURED
    return rouge_l(row["answer"], full["answer"]), None
