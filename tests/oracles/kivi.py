"""KIVI, written from arXiv 2402.02750 (equation 1, section 4.2, algorithm 1) in float64 loops over single numbers.

Nothing of mmkv_bench runs here. Besides the quantiser there is the schedule: which of a head's kept tokens are
quantised when n tokens were appended one by one, told by simulating the list of tokens itself.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group(numbers: list[float], bits: int, storage: torch.dtype = torch.float64) -> list[float]:
    """What one group comes back as; scale and minimum are stored in `storage`."""
    steps = 2**bits - 1
    low, high = min(numbers), max(numbers)
    scale = max((high - low) / steps, 1e-6)
    scale = torch.tensor(scale, dtype=torch.float64).to(storage).item()
    back = []
    for number in numbers:
        level = round((number - low) / scale)  # halves to even, as IEEE rounds
        back.append(min(max(level, 0), steps) * scale + low)
    return back


def keys(block: Tensor, bits: int, size: int, storage: torch.dtype = torch.float64) -> Tensor:
    """One head's keys [n, D], n a multiple of `size`: every channel of every `size` consecutive tokens is a group."""
    n, channels = block.shape
    back = torch.empty(n, channels, dtype=torch.float64)
    for start in range(0, n, size):
        for channel in range(channels):
            numbers = [block[start + i, channel].item() for i in range(size)]
            for i, number in enumerate(group(numbers, bits, storage)):
                back[start + i, channel] = number
    return back


def values(block: Tensor, bits: int, size: int, storage: torch.dtype = torch.float64) -> Tensor:
    """One head's values [n, D]: every `size` consecutive channels of a token are a group."""
    n, channels = block.shape
    back = torch.empty(n, channels, dtype=torch.float64)
    for token in range(n):
        for start in range(0, channels, size):
            numbers = block[token, start : start + size].tolist()
            for i, number in enumerate(group(numbers, bits, storage)):
                back[token, start + i] = number
    return back


class Head:
    """One KV head's cache as algorithm 1 keeps it; tokens are rows [D] in lists.

    `early` says when a full residual is quantised: before the attention of the token that filled it (algorithm 1), or
    after it (the released code). `seen()` is what that attention reads.
    """

    def __init__(self, bits: int, size: int, value_size: int, residual: int, early: bool):
        self.bits, self.size, self.value_size, self.residual, self.early = bits, size, value_size, residual, early
        self.key_quantised: list[Tensor] = []
        self.key_rest: list[Tensor] = []
        self.value_quantised: list[Tensor] = []
        self.value_rest: list[Tensor] = []

    def prefill(self, key: Tensor, value: Tensor) -> None:
        """The kept entries [m, D] of the prompt, whose own attention was in full precision."""
        self.key_rest, self.value_rest = list(key.double()), list(value.double())
        self._flush()

    def _flush(self) -> None:
        while len(self.key_rest) >= self.residual:
            block = torch.stack(self.key_rest[: self.residual])
            self.key_quantised += list(keys(block, self.bits, self.size))
            self.key_rest = self.key_rest[self.residual :]
        while len(self.value_rest) > self.residual:
            self.value_quantised += list(values(self.value_rest[0][None], self.bits, self.value_size))
            self.value_rest = self.value_rest[1:]

    def append(self, key: Tensor, value: Tensor, prompt: bool = False) -> tuple[Tensor, Tensor]:
        """Tokens [n, D] that are fed together; returns what their attention reads, [entries, D] each.

        Tokens of the prompt (a re-fed last token, a question) are attended to in full precision, as in a prefill.
        """
        self.key_rest += list(key.double())
        self.value_rest += list(value.double())
        if self.early and not prompt:
            self._flush()
        read = self.seen()
        self._flush()
        return read

    def seen(self) -> tuple[Tensor, Tensor]:
        return torch.stack(self.key_quantised + self.key_rest), torch.stack(self.value_quantised + self.value_rest)
