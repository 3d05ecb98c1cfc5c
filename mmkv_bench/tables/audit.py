"""What the responses of a table cell say about it beside its score: excess entries, fallbacks, answers not tested."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Audit:
    """Counts over the ok responses of one table cell (all its seeds together).

    over: responses with more resident entries than asked; excess_mean, excess_worst: resident / asked - 1 among those.
    fallbacks: reason -> responses. from_prefill: answers whose every token but the end token came from the full
    prefill (protocol paper, one-token answers): compression could not change them.
    text_before_cut: responses whose compressed context held question text (protocol query_agnostic).
    """

    n: int = 0
    over: int = 0
    excess_mean: float = 0.0
    excess_worst: float = 0.0
    fallbacks: dict[str, int] = field(default_factory=dict)
    from_prefill: int = 0
    text_before_cut: int = 0


def audit(responses: pd.DataFrame) -> Audit:
    """The audit of the `responses` rows of one table cell; rows that are not ok carry no audit and are left out."""
    responses = responses[responses["status"] == "ok"]
    if responses.empty:
        return Audit()
    asked, resident = (_floats(responses[name]) for name in ("entries_asked", "entries_resident"))
    excess = resident / asked - 1
    excess = excess[excess > 0]  # comparisons with NaN (no budget) are false
    fallbacks = Counter(reason for reasons in responses["fallback"] if reasons is not None for reason in reasons)
    compressed = _floats(responses["tokens_from_compressed"])
    tested = compressed - (responses["finish_reason"] == "eos").to_numpy(np.float64)
    return Audit(
        n=len(responses),
        over=len(excess),
        excess_mean=float(np.mean(excess)) if len(excess) else 0.0,
        excess_worst=float(np.max(excess)) if len(excess) else 0.0,
        fallbacks=dict(sorted(fallbacks.items())),
        from_prefill=int(np.sum((tested <= 0) & (compressed < _floats(responses["n_tokens"])))),
        text_before_cut=int(np.sum(_floats(responses["question_text_before_cut"]) > 0)),
    )


def _floats(column: pd.Series) -> np.ndarray:
    return column.to_numpy(np.float64, na_value=np.nan)
