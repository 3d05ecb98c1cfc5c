"""Parts that fail on purpose, a clock that only they advance, and hooks that make a model fail."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mmkv_bench.compression.allocators.uniform import Uniform
from mmkv_bench.compression.compressor import Compressor
from mmkv_bench.compression.reducers.evict import Evict
from mmkv_bench.compression.scorers.base import Scorer
from mmkv_bench.compression.selectors.topk import TopK
from tests.core.parts import RandomScores

OOM = "out of memory, on purpose"


class Clock:
    """Stands in for the `time` module of the generation code: time passes only when a part says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


CLOCK = Clock()


def boom(kind: str) -> None:
    if kind == "oom":
        raise torch.OutOfMemoryError(OOM)
    if kind == "host_oom":
        raise MemoryError(OOM)
    if kind == "error":
        raise RuntimeError("broken, on purpose")
    if kind == "timeout":
        CLOCK.now += 100.0


@dataclass(frozen=True)
class FaultyReducer(Evict):
    """Fails at the given call of a fork (its first layer is call 0), or writes NaN into what it hands back."""

    kind: str
    layer: int = 0

    def reduce(self, key: Tensor, value: Tensor, index: Tensor, types: Tensor | None = None) -> tuple[Tensor, Tensor]:
        boom(self.kind)
        key, value = super().reduce(key, value, index)
        if self.kind == "nan_key":
            key[0, -1] = float("nan")
        if self.kind == "nan_value":
            value[-1, 0, 0] = float("nan")
        return key, value


@dataclass(frozen=True)
class FaultyScorer(Scorer):
    """Fails in one layer, or gives scores that are no numbers."""

    kind: str
    layer: int = 1

    def key(self, budget: int, length: int) -> tuple:
        return (self.kind, self.layer)

    def score(self, obs, budget: int, seed: int) -> Tensor:
        score = RandomScores().score(obs, budget, seed)
        if obs.layer == self.layer:
            boom(self.kind)
            if self.kind in ("nan", "inf"):
                score[-1, 0] = float(self.kind)
        return score


class FaultyKey(RandomScores):
    """Cannot even say which parameters it runs with."""

    def key(self, budget: int, length: int) -> tuple:
        raise RuntimeError("no key, on purpose")


class FaultyFallbacks(RandomScores):
    def fallbacks(self, budget: int, length: int, types=None) -> tuple[str, ...]:
        raise RuntimeError("no fallbacks, on purpose")


class FaultyAllocator(Uniform):
    def caps(self, scores, budget, layers, n_layers, context=None):
        raise RuntimeError("no caps, on purpose")


class Overdraw(Uniform):
    """Grants one entry more than there is."""

    def caps(self, scores, budget, layers, n_layers, context=None):
        return super().caps(scores, budget + 1, layers, n_layers)


def compressor(name: str, **parts) -> Compressor:
    default = {"scorer": RandomScores(), "allocator": Uniform(), "selector": TopK(), "reducer": Evict()}
    return Compressor(name, **(default | parts))


@contextlib.contextmanager
def failing(model, when: Callable[[dict], bool], error: Callable[[], BaseException]) -> Iterator[list]:
    """Inside, a forward of the text model raises when `when(kwargs)` says so; yields a list that grows with each of them."""
    raised = []

    def before(module, args, kwargs):
        if when(kwargs):
            raised.append(tokens(kwargs))  # not the error, whose traceback would keep tensors alive
            raise error()

    hook = model.get_decoder().register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield raised
    finally:
        hook.remove()


def oom() -> BaseException:
    return torch.OutOfMemoryError(OOM)


def rows(kwargs: dict) -> int:
    return kwargs["inputs_embeds"].shape[0]


def tokens(kwargs: dict) -> int:
    return kwargs["inputs_embeds"].shape[1]
