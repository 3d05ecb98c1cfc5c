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
    packed: responses whose entries are stored in fewer bits than the model's; retrievable: responses that can read more
    entries than are resident. Their cells are not told by entries alone: device and host are the mean bytes there, with
    metadata, over those of the full cache, and reach is the mean of reachable over resident entries.
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

    @property
    def entries_only(self) -> bool:
        """Whether the number of entries says all about what the cells hold."""
        return not self.packed and not self.retrievable


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
        **_storage(responses),
    )


_PACKED = 0.9  # full-width entries take at least their share of the full cache's bytes, ragged heads' padding more


def _storage(responses: pd.DataFrame) -> dict[str, float]:
    """What the bytes and the reachable entries say; rows without those columns say nothing."""
    names = ("entries_resident", "entries_reachable", "bytes_device", "bytes_host", "bytes_metadata", "bytes_full")
    names += ("entries_asked", "budget_entries", "context_tokens")
    if any(name not in responses for name in names):
        return {}
    resident, reachable, device, host, metadata, full, asked, budget, tokens = (
        _floats(responses[name]) for name in names
    )
    # Entries of the full cache: what was asked is the budget, or the whole prompt, of every head; without a budget
    # nothing is evicted.
    whole = np.where(np.isnan(asked), resident, asked * tokens / np.fmin(budget, tokens))
    known = full > 0
    packed = known & (device < _PACKED * full * resident / whole)
    reached = reachable > resident
    return {
        "packed": int(packed.sum()),
        "retrievable": int(reached.sum()),
        "device": float(np.mean(((device + metadata) / full)[known])) if known.any() else 1.0,
        "host": float(np.mean((np.nan_to_num(host) / full)[known])) if known.any() else 0.0,
        "reach": float(np.mean((reachable / resident)[reached])) if reached.any() else 1.0,
    }


def _floats(column: pd.Series) -> np.ndarray:
    return column.to_numpy(np.float64, na_value=np.nan)
