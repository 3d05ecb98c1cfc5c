"""Random layers of a model that does not exist, on which a method's parts are tested without weights.

`mmkv-bench check` uses `problems`; the tests of shipped methods make their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from mmkv_bench.compression.numerics.moments import rotate
from mmkv_bench.compression.observation import Chunk, Needs, Observation

LAYERS = 3
SHAPES = ((1, 2, 1), (2, 1, 2), (3, 2, 2), (17, 2, 1), (40, 2, 3), (130, 1, 4))
"""(prompt tokens, KV heads, query heads per KV head) of the prompts."""
_DIM, _WIDTH = 8, 12


def prompt(length: int, heads: int, group: int, needs: Needs, seed: int = 0, identity: str = "x") -> list[Observation]:
    """Return observations of `LAYERS` layers with random weights, of a prompt of `length` tokens: an image inside text.

    heads: KV heads. group: query heads per KV head. identity: name of the prompt, which seeds stochastic scorers.
    """

    def rope(positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = positions.double()[:, None] * 100.0 ** (-torch.arange(_DIM // 2, dtype=torch.float64) / (_DIM // 2))
        angle = torch.cat([angle, angle], -1)
        return angle.cos().float(), angle.sin().float()

    layers = []
    for layer in range(LAYERS):
        stream = torch.Generator().manual_seed(1000 * seed + layer)
        hidden = torch.randn(length, _WIDTH, generator=stream)
        weights = [torch.randn(n * _DIM, _WIDTH, generator=stream) * 0.4 for n in (heads * group, heads, heads)]
        query, key, value = (_project(weight, hidden) for weight in weights)
        cos, sin = rope(torch.arange(length))
        types = torch.zeros(length, dtype=torch.int64)
        types[length // 4 : length // 4 + max(1, length // 2)] = 1
        layers.append(
            Observation(
                layer,
                LAYERS,
                needs,
                scaling=_DIM**-0.5,
                length=length,
                token_types=types,
                project_query=partial(_project, weights[0]),
                future_rope=lambda offsets: rope(offsets + length - 1),
                identity=identity,
                module=nn.Identity(),
            )
        )
        layers[-1].observe(Chunk(rotate(query, cos, sin), rotate(key, cos, sin), value, hidden, cos, sin))
    return layers


def _project(weight: Tensor, hidden: Tensor) -> Tensor:
    return (hidden @ weight.T).unflatten(-1, (-1, _DIM)).transpose(0, 1)


@dataclass(frozen=True)
class Problem:
    """A prompt of random layers, and a budget smaller than its number of tokens."""

    observe: Callable[[Needs], list[Observation]]  # returns an observation per layer; every call gives the same numbers
    budget: int
    name: str
    layers: int = LAYERS  # number of layers of the model

    def __str__(self) -> str:
        return self.name


def problems() -> list[Problem]:
    """Return the problems of `mmkv-bench check`: each shape of layers, with budgets of 1, 2, a third and all but one token."""
    cases = {(shape, budget) for shape in SHAPES for budget in (1, 2, shape[0] // 3, shape[0] - 1)}
    return [problem(shape, budget) for shape, budget in sorted(cases) if 0 < budget < shape[0]]


def problem(shape: tuple[int, int, int], budget: int) -> Problem:
    length, heads, group = shape
    name = f"{length} tokens, {heads} KV heads, {heads * group} query heads, budget {budget}"
    return Problem(partial(prompt, *shape), budget, name)
