"""How much of a task's answers no method can change: the tokens that the full prefill gives before anything is evicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mmkv_bench.protocols import protocol

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("cell", "sample_id", "status", "token_ids", "finish_reason")
"""Of the responses of `full`, what a share is counted from."""

MOSTLY = 0.5
"""From this share on a task is mostly free."""


def share(answers: pd.DataFrame, name: str) -> float | None:
    """Mean over the answers of the share of their tokens that come from the full prefill; None where there are none.

    The end token is left out, and so is the closing mark that all answers end with, where they differ at all: what
    stands in every answer tests nothing. An answer of which nothing is left is wholly free.

    Args:
        answers: `responses` rows of one cell of `full`, with `COLUMNS`: what is right, or nearest to it, and the same
            whichever methods a table holds. name: the protocol's.
    """
    free = protocol(name).from_prefill
    answers = answers[answers["status"] == "ok"]
    if not free or answers.empty:
        return None
    ended = answers["finish_reason"] == "eos"
    texts = [ids[:-1] if end else ids for ids, end in zip(map(list, answers["token_ids"]), ended, strict=True)]
    lengths = np.array([len(text) for text in texts]) - _closing(texts)
    return float(np.mean(np.where(lengths > 0, np.minimum(free, lengths) / np.maximum(lengths, 1), 1.0)))


def _closing(texts: Sequence[list[int]]) -> int:
    """Length of the longest ending that all texts have; 0 where they are all the same."""
    shortest = min(map(len, texts))
    same = 0
    while same < shortest and len({text[-same - 1] for text in texts}) == 1:
        same += 1
    return same if len(set(map(tuple, texts))) > 1 else 0
