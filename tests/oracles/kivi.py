"""KIVI, written from arXiv 2402.02750 (equation 1, section 4.2, algorithm 1) in float64 loops over single numbers.

Nothing of mmkv_bench runs here. Besides the quantiser there is the schedule, told by moving single tokens between lists,
and stock `generate()` over the numbers that result, every one in the column of its token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from tests import reference

TIE = 3e-5
"""Distance [levels] to the middle between two levels within which float32 rounding of a model decides: there, no two
ways to compute a key can be expected to agree, and either level is right."""


class Ties:
    """Which of the numbers within `TIE` of a middle, counted as they come, go to the other of their two levels."""

    def __init__(self, other: tuple[int, ...] = ()):
        self.other, self.met = other, 0

    def level(self, exact: float) -> int:
        level = round(exact)  # halves to even, as IEEE rounds
        if abs(abs(exact - level) - 0.5) >= TIE:
            return level
        self.met += 1
        return level if self.met - 1 not in self.other else level + (1 if exact > level else -1)


NONE = Ties()


def group(numbers: list[float], bits: int, storage: torch.dtype = torch.float64, ties: Ties = NONE) -> list[float]:
    """What one group comes back as; scale and minimum are stored in `storage`."""
    steps = 2**bits - 1
    low, high = min(numbers), max(numbers)
    scale = max((high - low) / steps, 1e-6)
    scale = torch.tensor(scale, dtype=torch.float64).to(storage).item()
    back = []
    for number in numbers:
        back.append(min(max(ties.level((number - low) / scale), 0), steps) * scale + low)
    return back


def keys(block: Tensor, bits: int, size: int, storage: torch.dtype = torch.float64, ties: Ties = NONE) -> Tensor:
    """One head's keys [n, D], n a multiple of `size`: every channel of every `size` consecutive tokens is a group."""
    n, channels = block.shape
    back = torch.empty(n, channels, dtype=torch.float64)
    for start in range(0, n, size):
        for channel in range(channels):
            numbers = [block[start + i, channel].item() for i in range(size)]
            for i, number in enumerate(group(numbers, bits, storage, ties)):
                back[start + i, channel] = number
    return back


def values(block: Tensor, bits: int, size: int, storage: torch.dtype = torch.float64, ties: Ties = NONE) -> Tensor:
    """One head's values [n, D]: every `size` consecutive channels of a token are a group."""
    n, channels = block.shape
    back = torch.empty(n, channels, dtype=torch.float64)
    for token in range(n):
        for start in range(0, channels, size):
            numbers = block[token, start : start + size].tolist()
            for i, number in enumerate(group(numbers, bits, storage, ties)):
                back[token, start + i] = number
    return back


class Head:
    """One KV head's cache as algorithm 1 keeps it; tokens are rows [D] in lists.

    `early` says when a full residual is quantised: before the attention of the token that filled it (algorithm 1), or
    after it (the released code). `seen()` is what that attention reads.
    """

    def __init__(self, bits: int, size: int, value_size: int, residual: int, early: bool, ties: Ties = NONE):
        self.bits, self.size, self.value_size, self.residual, self.early = bits, size, value_size, residual, early
        self.ties = ties
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
            self.key_quantised += list(keys(block, self.bits, self.size, ties=self.ties))
            self.key_rest = self.key_rest[self.residual :]
        while len(self.value_rest) > self.residual:
            oldest = self.value_rest[0][None]
            self.value_quantised += list(values(oldest, self.bits, self.value_size, ties=self.ties))
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


class Layer(DynamicLayer):
    """A stock cache layer that hands stock attention the numbers of one `Head` per KV head, in the columns of their
    tokens. Evicted columns hold what they held; a mask must hide them.

    Args:
        heads: one empty `Head` per KV head; kept: int64 [Hkv, m] tokens of the prompt that stay, -1 = padding;
        prompt: tokens that are the prompt's, also those fed after the reduction.
    """

    def __init__(self, heads: list[Head], kept: Tensor, prompt: int):
        super().__init__()
        self.heads, self.prompt = heads, prompt
        self.columns = [[j for j in row if j >= 0] for row in kept.tolist()]
        self.filled = False

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        key, value = super().update(key_states, value_states)
        new, total = key_states.shape[2], key.shape[2]
        if not self.filled:
            self.filled = True
            for head, columns in enumerate(self.columns):
                self.heads[head].prefill(key[0, head, columns], value[0, head, columns])
            return key, value
        key, value = key.clone(), value.clone()
        for head, columns in enumerate(self.columns):
            columns += range(total - new, total)
            fresh = key_states[0, head], value_states[0, head]
            read = self.heads[head].append(*fresh, prompt=total - new < self.prompt)
            key[0, head, columns], value[0, head, columns] = (part.to(key.dtype) for part in read)
        return key, value


@torch.no_grad()
def generate(model, inputs: dict[str, Tensor], kept: list[Tensor], cut: int, tokens: int, make) -> Tensor:
    """Logits [n, V] of stock greedy decoding over KIVI's numbers: `cut` tokens are prefilled in full precision and
    reduced to `kept` (per layer [Hkv, m]); what follows reads the cache. `make()` gives an empty `Head`."""
    ids = inputs["input_ids"]
    prompt = ids.shape[1]
    inputs = {**inputs, "attention_mask": torch.ones_like(ids)}
    keep = reference.keep_of([index[None] for index in kept], cut)
    layers = [Layer([make() for _ in index], index, prompt) for index in kept]
    options = {"max_new_tokens": tokens, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    with reference.masked(model, reference.visible(keep, cut)):
        cache = Cache(layers=layers)
        if cut < prompt:
            prefix = {k: v[:, :cut] if v.shape == ids.shape else v for k, v in inputs.items()}
            model(**prefix, past_key_values=cache, use_cache=True, logits_to_keep=1)
            inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        output = model.generate(**inputs, past_key_values=cache, **options)
    return torch.cat(output.logits)
