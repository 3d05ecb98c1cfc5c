"""Decode several answers at once, each as stock `generate()` would decode it alone.

A fork is what one cell continues with after a prefill that several cells share. The forks of one or several prompts are rows
of one batch. Decoding is greedy. Only the reference answers of `full` for ROUGE-L (PrefixKV) are sampled, see `Sampler`.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CompileConfig

from mmkv_bench import devices
from mmkv_bench.compression.batched_layer import join
from mmkv_bench.compression.cache import CompressedCache
from mmkv_bench.compression.fixed_layer import fixed_view, pool_of
from mmkv_bench.generation.prefill import PrefillGroup
from mmkv_bench.generation.result import GenerationTimeout, NonFiniteLogitsError
from mmkv_bench.generation.rules import DecodeRules


@dataclass
class Decoded:
    """The answer of one fork.

    entries: number of entries in its layers when the answer ended; None if not counted.
    """

    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    error: Exception | None = None
    entries: int | None = None

    @property
    def done(self) -> bool:
        return self.finish is not None or self.error is not None


class _Chooser:
    """Chooses the next token of each row, and records which rows have ended."""

    def __init__(self, rules: DecodeRules, prompt_ids: Tensor, rows: int, pick: Callable[[Tensor], Tensor]):
        self.pick = pick
        self.rules, self.rows = rules, [Decoded() for _ in range(rows)]
        self.processors = rules.processors(prompt_ids.shape[1], prompt_ids.device)
        self.stopper, self.eos = rules.stopper, set(rules.eos)
        reads_ids = bool(len(self.processors)) or self.stopper is not None
        self.ids = prompt_ids.expand(rows, -1) if reads_ids else None

    def choose(self, logits: Tensor) -> Tensor:
        """Return the next tokens, int64 `[R, 1]`, from logits float32 `[R, V]`.

        Each token is appended to its row, unless the row has ended. NaN logits end a row with an error.
        """
        broken = logits.isnan().any(-1).tolist()
        if self.ids is not None:
            logits = self.processors(self.ids, logits)
        token = self.pick(logits)
        stopped = [False] * len(self.rows)
        if self.ids is not None:
            self.ids = torch.cat([self.ids, token[:, None]], 1)
            if self.stopper is not None:
                stopped = self.stopper(self.ids, None).tolist()
        for row, value, is_nan, is_stop in zip(self.rows, token.tolist(), broken, stopped, strict=True):
            if row.done:
                continue
            if is_nan:
                row.error = NonFiniteLogitsError(f"NaN logits at new token {len(row.tokens) + 1}")
                continue
            row.tokens.append(value)
            if value in self.eos:
                row.finish = "eos"
            elif is_stop:
                row.finish = "stop"
            elif len(row.tokens) >= self.rules.max_new_tokens:
                row.finish = "length"
        return token[:, None]


def greedy(logits: Tensor) -> Tensor:
    """Return the likeliest tokens, int64 `[R]`, of logits `[R, V]`."""
    return logits.argmax(-1)


@dataclass
class Lead:
    """Rows of one question, ready for decoding: the prompt's tokens are in the cache, and the first new token is chosen.

    Attributes:
        cache: the stored entries, one row per fork.
        token: int64 `[R, 1]`, the first new token of each row.
        positions: position ids of `token`, `[..., R, 1]`.
    """

    model: nn.Module
    chooser: _Chooser
    cache: CompressedCache
    token: Tensor
    positions: Tensor


def decode(
    group: PrefillGroup,
    cache: CompressedCache,
    rows: int,
    protocol: str,
    deadline: float | None = None,
    acting: bool = False,
    pick: Callable[[Tensor], Tensor] = greedy,
    step: Callable[..., Any] | None = None,
) -> list[Decoded]:
    """Decode `rows` answers to one question from the reduced entries in `cache`, one row per fork.

    Args:
        group: the prefill that the rows share, see `lead`.
        protocol: name of the rows' protocol.
        deadline, acting, step: see `follow`.
        pick: function of processed logits `[R, V]` that returns the next tokens, int64 `[R]`; greedy unless answers are sampled.

    Returns:
        One `Decoded` per row. NaN logits end only the affected row.
    """
    if step is not None:
        cache = fixed_view(cache, pool_of(group.model))
    return follow([lead(group, cache, rows, protocol, deadline, pick, step)], deadline, acting, step)


@torch.no_grad()
def lead(
    group: PrefillGroup,
    cache: CompressedCache,
    rows: int,
    protocol: str,
    deadline: float | None = None,
    pick: Callable[[Tensor], Tensor] = greedy,
    step: Callable[..., Any] | None = None,
) -> Lead:
    """Feed the prompt tokens that `rows` forks of one question see before the answer, and choose the first answer token.

    Args:
        group: the shared prefill. It has the positions, the prompt that processors and stop strings read, and the prompt tokens
            to feed again. If there are none, it has the first token's logits.
        deadline, pick, step: see `decode`.
    """
    chooser = _Chooser(group.rules, group.prompt.input_ids, rows, pick)
    fed, offset = group.lead(protocol)
    if not fed.shape[1]:
        token = chooser.choose(group.prefilled.logits.expand(rows, -1))
    else:
        positions = group.prefilled.positions(offset, fed.shape[1], rows)
        forward = group.model if step is None or fed.shape[1] > 1 else step
        token = chooser.choose(_logits(forward, cache, fed.expand(rows, -1), positions, deadline))
    return Lead(group.model, chooser, cache, token, group.prefilled.positions(offset + fed.shape[1], 1, rows))


@torch.no_grad()
def follow(
    leads: Sequence[Lead],
    deadline: float | None = None,
    acting: bool = False,
    step: Callable[..., Any] | None = None,
) -> list[Decoded]:
    """Decode the rows of one or several questions to the end of their answers, as one batch.

    Args:
        leads: the rows of each question. The caches of several questions are joined, which empties them.
        deadline: `time.monotonic()` after which `GenerationTimeout` is raised.
        acting: whether the rows have decode policies, which change the cache while decoding. All rows then belong to one
            question, and the entries of each row are counted when its answer ends.
        step: function that feeds one token per row in place of the model (`CompiledStep`). Its storage has room for the whole
            answer. Not for rows with decode policies.

    Returns:
        One `Decoded` per row, in the order of `leads`.
    """
    model, cache = leads[0].model, leads[0].cache
    rows = [row for one in leads for row in one.chooser.rows]
    if len(leads) > 1:
        cache = join([one.cache for one in leads], leads[0].chooser.rules.max_new_tokens, stepwise=True)
        cache = cache if step is None else fixed_view(cache, pool_of(model))
    token, positions = torch.cat([one.token for one in leads]), torch.cat([one.positions for one in leads], -2)
    # Ended rows leave the batch: with policies, which take time, at once; otherwise when they are half of the rows, which is
    # worth copying the others. In low precision all shapes stay constant, because a change of shape alone can flip a token.
    # They also stay constant for a compiled step.
    alive, shrinks = list(range(len(rows))), model.dtype == torch.float32 and step is None
    while True:
        if acting:
            _count(rows, alive, cache)
        if all(row.done for row in rows):
            return rows
        if shrinks:
            alive = _leave(rows, alive, cache, 1 if acting else -(-len(alive) // 2))
        logits = _logits(step or model, cache, token[alive], positions[..., alive, :], deadline)
        if len(alive) < len(rows):
            logits = logits.new_zeros(len(rows), logits.shape[1]).index_copy_(
                0, torch.tensor(alive, device=logits.device), logits
            )
        logits_by_lead = logits.split([len(one.chooser.rows) for one in leads])
        token = torch.cat([one.chooser.choose(part) for one, part in zip(leads, logits_by_lead, strict=True)])
        positions = positions + 1


def _logits(
    forward: Callable[..., Any], cache: CompressedCache, fed: Tensor, positions: Tensor, deadline: float | None
) -> Tensor:
    """Feed tokens int64 `[R, n]` and return the logits of the last of them, float32 `[R, V]`."""
    if deadline is not None and time.monotonic() > deadline:
        raise GenerationTimeout("decoding ran past timeout_s")
    output = forward(  # a compiled step would be traced again for other strides
        input_ids=fed.clone(memory_format=torch.contiguous_format),
        position_ids=positions.clone(memory_format=torch.contiguous_format),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
        return_dict=True,
    )
    return output.logits[:, -1].to(torch.float32, copy=True)  # the next replay of a graph overwrites the output


def _leave(rows: list[Decoded], alive: list[int], cache: CompressedCache, least: int) -> list[int]:
    """Remove ended rows from the cache if there are at least `least` of them; return the numbers of the remaining rows.

    alive: numbers of the rows in the cache.
    """
    running_places = [place for place, row in enumerate(alive) if not rows[row].done]
    if len(alive) - len(running_places) < least:
        return alive
    cache.batch_select_indices(torch.tensor(running_places))
    return [alive[place] for place in running_places]


def _count(rows: list[Decoded], alive: list[int], cache: CompressedCache) -> None:
    """Record for each row that has just ended how many entries its layers have.

    Later the number would be wrong, because decode policies also evict from ended rows that are still in the batch.
    alive: numbers of the rows in the cache.
    """
    ended_rows = [(place, row) for place, row in enumerate(alive) if rows[row].done and rows[row].entries is None]
    if ended_rows:
        entries = torch.stack([layer.entries().sum(-1) for layer in cache.compressed]).sum(0)
        for place, row in ended_rows:
            rows[row].entries = int(entries[place])


EAGER_DECODE = "eager_decode"  # the fallback of cells whose decode policy acts, under decode=compiled
RECOMPILES = 64  # programs of one model: by rows (one or several), ragged or not, and the protocol's first step


def config_of(device: torch.device, backend: str | Callable[..., Any] = "inductor") -> CompileConfig:
    """Return the configuration with which stock `generate()` compiles its decode step as `CompiledStep` does."""
    config = CompileConfig(fullgraph=True, backend=backend, mode=_mode(device, backend))
    config._compile_all_devices = True
    return config


def _mode(device: torch.device, backend: str | Callable[..., Any]) -> str | None:
    return devices.at(device).compile_mode if backend == "inductor" else None


class CompiledStep:
    """The forward pass of one token per row, compiled at its first call; called like the model (`decode=compiled`).

    On CUDA the pass is replayed as a CUDA graph. One row and several rows have separate programs, and so do ragged and equal
    heads. Capacities and numbers of rows are symbolic, so the next prompt reuses the program.

    Args:
        model: has a session attached, with a cache of fixed capacity (`compression/fixed_layer.py`).
        backend: argument of `torch.compile`.
    """

    def __init__(self, model: nn.Module, backend: str | Callable[..., Any] = "inductor"):
        options: dict[str, Any] = {  # a graph break or too many programs are errors, never a silent eager step
            "fullgraph": True,
            "backend": backend,
            "mode": _mode(next(model.parameters()).device, backend),
            "recompile_limit": RECOMPILES,
            "isolate_recompiles": True,
        }
        self._forward: Callable[..., Any] = torch.compile(model.__call__, **options)

    def __call__(self, **inputs: Any) -> Any:
        return self._forward(**inputs)


TEMPERATURE = 0.2
SEEDS = (0, 1)
"""Seeds of the two samples in the row of `full`, the reference first; part of the meaning of `reference_samples`."""


class Sampler:
    """Samples tokens from softmax(logits / T), by inversion of the distribution function in float64 on the host.

    The stream of uniform numbers depends only on the seed and the sample's identity, not on the batch, the order of
    samples, other cells or the device. Neither top-k nor top-p is applied.

    Args:
        seed: one of `SEEDS`.
        identity: dataset and sample id.
    """

    def __init__(self, seed: int, identity: str, temperature: float = TEMPERATURE):
        digest = hashlib.sha256(f"{seed}/{identity}".encode()).digest()
        self.stream, self.temperature = random.Random(int.from_bytes(digest, "big")), temperature

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the next token, int64 `[1]`, from logits `[1, V]`."""
        weights = (logits[0].double().cpu() / self.temperature).softmax(-1).cumsum(-1)
        drawn = torch.tensor([self.stream.random()], dtype=torch.float64) * weights[-1]
        return torch.searchsorted(weights, drawn, right=True).clamp_max(len(weights) - 1).to(logits.device)
