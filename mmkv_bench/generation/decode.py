"""Greedy decoding of several answers in one batch, each as transformers' `generate()` would decode the answer alone.

Each row of the batch has the reduced cache (fork) of one (method, budget) setting and prompt. Only the reference answers of
`full` for ROUGE-L (PrefixKV) are sampled, see `Sampler`.
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
    """The answer of one row. entries: cache entries of all layers when the answer ended; None if not counted."""

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

        Each token is appended to the answer of its row, unless this answer has ended. NaN logits end an answer with an error.
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
    """Rows of one question whose prompt is in the cache and whose first answer token is chosen.

    Attributes:
        token: int64 `[R, 1]`, the first answer token of each row.
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
        group: the prefill that the rows share.
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
    """Feed the prompt tokens that follow the reduced entries in `cache`, if any, and choose the first answer tokens.

    group: the prefill that the `rows` rows share. deadline, pick, step: see `decode`.
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
    """Decode the answers of one or several questions as one batch.

    Args:
        leads: the rows of each question. Caches of several questions are joined, which empties the separate caches.
        deadline: `time.monotonic()` after which `GenerationTimeout` is raised.
        acting: whether decode policies change the cache. All rows then belong to one question, and `Decoded.entries` is counted.
        step: function that feeds one token per row in place of the model (`CompiledStep`); not for rows with decode policies.

    Returns:
        One `Decoded` per row, in the order of `leads`.
    """
    model, cache = leads[0].model, leads[0].cache
    rows = [row for one in leads for row in one.chooser.rows]
    if len(leads) > 1:
        cache = join([one.cache for one in leads], leads[0].chooser.rules.max_new_tokens, stepwise=True)
        cache = cache if step is None else fixed_view(cache, pool_of(model))
    token, positions = torch.cat([one.token for one in leads]), torch.cat([one.positions for one in leads], -2)
    # Ended rows leave the batch: at once with decode policies, which are slow; else when half of the rows have ended, which
    # is worth copying the others. Shapes stay constant for a compiled step, and in low precision, where a change of shape
    # alone can change a token.
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
    """Feed tokens int64 `[R, n]` and return the logits of the last token, float32 `[R, V]`."""
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
    """Remove ended rows from the cache if at least `least` rows have ended; return the numbers of the rows in the cache.

    alive: numbers of the rows that are in the cache before the call.
    """
    running_places = [place for place, row in enumerate(alive) if not rows[row].done]
    if len(alive) - len(running_places) < least:
        return alive
    cache.batch_select_indices(torch.tensor(running_places))
    return [alive[place] for place in running_places]


def _count(rows: list[Decoded], alive: list[int], cache: CompressedCache) -> None:
    """Count the entries of each row that has just ended. alive: numbers of the rows in the cache.

    A later count would be wrong, because decode policies also evict from ended rows that are still in the batch.
    """
    ended_rows = [(place, row) for place, row in enumerate(alive) if rows[row].done and rows[row].entries is None]
    if ended_rows:
        entries = torch.stack([layer.entries().sum(-1) for layer in cache.compressed]).sum(0)
        for place, row in ended_rows:
            rows[row].entries = int(entries[place])


EAGER_DECODE = "eager_decode"  # the fallback of cells whose decode policy acts, under decode=compiled
RECOMPILES = 64  # programs of one model: by rows (one or several), ragged or not, and the protocol's first step


def config_of(device: torch.device, backend: str | Callable[..., Any] = "inductor") -> CompileConfig:
    """Return the configuration with which transformers' `generate()` compiles as `CompiledStep` does."""
    config = CompileConfig(fullgraph=True, backend=backend, mode=_mode(device, backend))
    config._compile_all_devices = True
    return config


def _mode(device: torch.device, backend: str | Callable[..., Any]) -> str | None:
    return devices.at(device).compile_mode if backend == "inductor" else None


class CompiledStep:
    """Compiled forward pass of one token per row, called like the model (`decode=compiled`). On CUDA it is a CUDA graph.

    One row and several rows have separate programs, and so have equal and unequal head lengths. Capacities and numbers of rows
    are symbolic, so further prompts reuse the programs.

    Args:
        model: a model with a session attached. Its calls get caches of fixed capacity (`compression/fixed_layer.py`).
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
"""Seeds of the two sampled answers in `reference_samples`; the first answer is the reference."""


class Sampler:
    """Samples tokens from softmax(logits / T), by inversion of the distribution function in float64 on the host.

    The uniform random numbers depend only on the arguments `seed` and `identity`. Neither top-k nor top-p is applied.

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
