"""`mmkv-bench plan scenario=efficiency`: what its passes read and take at least, by arithmetic, and which are to be done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from mmkv_bench.efficiency.kinds import DATASETS, TEXT, kind_of
from mmkv_bench.efficiency.planned import Planned, Unit
from mmkv_bench.efficiency.run import card
from mmkv_bench.forecast import roofline
from mmkv_bench.forecast.forecast import HOUR, Counting, Forecast, Given, Lengths, forecast_of, groups
from mmkv_bench.plan.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv_bench.forecast.memory import PlannedMemory
    from mmkv_bench.plan.cells import Cell


def general(plan: Planned) -> Plan:
    """The same as a plan without datasets, as forecasts take it."""
    return Plan(plan.config, plan.cells, (), plan.notes, plan.family)


def forecast(plan: Planned, given: Given, todo: Sequence[Unit]) -> Forecast:
    """Of every kind of prompts at every length; hours are those of `todo`, and of one pass more where a cell is warmed up."""
    new, kinds = int(plan.config.new_tokens), dict.fromkeys(kind_of(cell.dataset) for cell in plan.cells)
    lengths = sorted(plan.lengths)

    def datasets(counted: Counting) -> list[Lengths]:
        found = []
        for kind, tokens in product(kinds, lengths):
            cells = [cell for cell in plan.cells if kind_of(cell.dataset) == kind]
            lines = [counted.line(*group, tokens, new) for group in groups(cells)]
            passes = [(cell, _passes(cell, tokens, todo)) for cell in cells]
            hours = _prefill_hours(counted, passes, tokens), _decode_hours(counted, passes, tokens, new)
            found.append(Lengths(DATASETS[kind], tokens, "asked", new, lines, *hours))
        return found

    told = forecast_of(general(plan), given, datasets)
    unseen = ["the vision tower is in no time and no byte here: `--memory` counts what it holds"]
    unknown = ["the search for the largest batch, and what is timed there, is in no time here"]
    more = [*([] if set(kinds) == {TEXT} else unseen), *(unknown if plan.searches else [])]
    return replace(told, missing=[*told.missing, *more])


def outlined(plan: Planned, todo: Sequence[Unit]) -> str:
    """The card, and how many tokens all passes read."""
    tokens = sum(unit.tokens * unit.batch for unit in todo)
    return (
        f"{card(plan, len(todo))}\nreads     {tokens:,} prompt tokens in these passes, {_warm(todo):,} more to warm up"
    )


def document(plan: Planned, todo: Sequence[Unit]) -> dict[str, Any]:
    """The same as data."""
    return {
        "out": str(plan.out),
        "model": plan.config.model.name,
        "notes": list(plan.notes),
        "passes": len(plan.units),
        "missing": len(todo),
        "prompt_tokens": sum(unit.tokens * unit.batch for unit in todo) + _warm(todo),
        "cells": [{"cell": cell.cell, "label": cell.label, "prompts": kind_of(cell.dataset)} for cell in plan.cells],
    }


def memory(plan: Planned, told: Forecast) -> tuple[list[PlannedMemory], list[str]]:
    """`--memory` of the scenario: the very prompts that are measured, in a dry run (loads torch and the processor).

    Raises:
        ConfigError: a model whose shape or processor is not here; a length that holds no picture.
    """
    from mmkv_bench.forecast import memory as planned_memory

    found, notes = planned_memory.planned(general(plan), told, _prompts(plan), int(plan.config.new_tokens) - 1)
    if plan.searches or set(plan.batches) - {1}:
        notes.append(
            "counted for one sequence, whatever batch says: how the caches of several are padded and joined follows from what "
            "each keeps, which the passes of a run that count memory measure"
        )
    return found, notes


def _prompts(plan: Planned) -> list[tuple[Tensor, Mapping[str, Tensor] | None]]:
    import torch

    from mmkv_bench.efficiency.visual_prompts import visual_prompt
    from mmkv_bench.forecast.memory import without_weights

    config = plan.config.model
    found: list[tuple[Tensor, Mapping[str, Tensor] | None]] = []
    kinds = dict.fromkeys(kind_of(cell.dataset) for cell in plan.cells)
    loaded = without_weights(general(plan)) if set(kinds) != {TEXT} else None
    for kind, tokens in product(kinds, sorted(plan.lengths)):
        if loaded is None or kind == TEXT:
            found.append((torch.zeros(1, tokens, dtype=torch.int64), None))
        else:
            prompt = visual_prompt(loaded, kind, tokens, config.frames, config.video_max_pixels)
            found.append((prompt.types, prompt.inputs))
    return found


def _passes(cell: Cell, tokens: int, todo: Sequence[Unit]) -> Counter[int]:
    """Sequences at a time -> how many passes of a cell over prompts of that length are still to be done, warming up included."""
    own = [unit for unit in todo if unit.cell == cell.cell and unit.tokens == tokens]
    warm = {unit.shape for unit in own if unit.repeat is not None}
    return Counter([unit.batch for unit in own]) + Counter([shape.batch for shape in warm])


def _warm(todo: Sequence[Unit]) -> int:
    """Prompt tokens of the passes that warm up."""
    return sum(shape.tokens * shape.batch for shape in {unit.shape for unit in todo if unit.repeat is not None})


def _prefill_hours(counted: Counting, passes: Sequence[tuple[Cell, Counter[int]]], tokens: int) -> float | None:
    decoder, rate = counted.sizes.decoder, counted.given.rate
    if rate is None or decoder is None:
        return None
    work = sum(
        rows * count * roofline.prefill_operations(decoder, _prefilled(cell, tokens))
        for cell, counts in passes
        for rows, count in counts.items()
    )
    return work / rate / HOUR


def _prefilled(cell: Cell, tokens: int) -> int:
    """Tokens of the prompt that a cell prefills; `pixels` as many as its budget."""
    if cell.budget is None or not cell.compressor.resamples:
        return tokens
    return min(tokens, cell.budget.entries_for(tokens))


def _decode_hours(
    counted: Counting, passes: Sequence[tuple[Cell, Counter[int]]], tokens: int, new: int
) -> float | None:
    if counted.given.bandwidth is None:
        return None
    read = 0.0
    for cell, counts in passes:
        kept = tokens if cell.budget is None else min(tokens, cell.budget.entries_for(tokens))
        for rows, count in counts.items():
            read += count * new * roofline.step_bytes(counted.read, (kept + new / 2) * counted.per_token, rows)
    return read / counted.given.bandwidth / HOUR
