"""How an answer ended, as its row says it: `ok`, or the status and the sentence of what went wrong."""

from __future__ import annotations

import torch

from mmkv_bench.compression.compressor import NonFiniteScoreError
from mmkv_bench.errors import GenerationTimeout, MMKVError, out_of_memory


class NonFiniteLogitsError(MMKVError):
    """The model produced NaN logits: the row gets status `nan`."""


def status_of(error: BaseException) -> str:
    """The row status that an exception stands for."""
    if isinstance(error, torch.OutOfMemoryError) or out_of_memory(error):
        return "oom"
    if isinstance(error, (NonFiniteScoreError, NonFiniteLogitsError)):
        return "nan"
    return "timeout" if isinstance(error, GenerationTimeout) else "error"


def describe(error: BaseException) -> str:
    """One line for the row's `error` column: class and the first line of the message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:500]}" if lines else type(error).__name__
