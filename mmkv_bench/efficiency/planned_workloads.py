"""`mmkv-bench plan scenario=efficiency`: workloads of the missing passes (`todo`), and the prompts of a dry run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from mmkv_bench.config.schema import TOGETHER
from mmkv_bench.efficiency.plan import DATASETS, TEXT, EfficiencyPlan, PassId, kind_of
from mmkv_bench.efficiency.run import plan_summary
from mmkv_bench.forecast.forecast import Workload, kept_entries
from mmkv_bench.forecast.prompt_length import PromptLength
from mmkv_bench.forecast.roofline import weights_text

if TYPE_CHECKING:
    from mmkv_bench.forecast.memory import DryPrompt


def workloads_of(plan: EfficiencyPlan, todo: Sequence[PassId]) -> list[Workload]:
    """Return one workload per kind of prompts, length and batch size for a forecast, empty without missing passes."""
    batches = sorted({*plan.batches, *(unit.batch for unit in todo)}) or [1]
    return [_workload(plan, todo, *shape) for shape in product(plan.kinds, sorted(plan.lengths), batches)]


def notes_of(plan: EfficiencyPlan) -> list[str]:
    """Return sentences about what a forecast leaves out."""
    notes = ["times and bytes exclude the vision tower; --memory counts its bytes"] * (plan.kinds != [TEXT])
    return notes + ["times exclude the search for the largest batch"] * plan.searches


def text(plan: EfficiencyPlan, todo: Sequence[PassId]) -> str:
    """Return the text of `mmkv-bench plan`: the passes, the tokens that they read, and the weights."""
    tokens = sum(unit.tokens * unit.batch for unit in todo)
    reads_line = f"reads     {tokens:,} prompt tokens in these passes, {_warm_up_tokens(todo):,} more to warm up"
    return "\n".join([plan_summary(plan, len(todo)), reads_line, f"model     {weights_text(plan)}"])


def document(plan: EfficiencyPlan, todo: Sequence[PassId]) -> dict[str, Any]:
    """Return the summary of the passes as data for JSON."""
    return {
        "out": str(plan.out),
        "model": plan.model.name,
        "notes": list(plan.notes),
        "passes": len(plan.units),
        "missing": len(todo),
        "prompt_tokens": sum(unit.tokens * unit.batch for unit in todo) + _warm_up_tokens(todo),
        "cells": [{"cell": cell.cell, "label": cell.label, "prompts": kind_of(cell.dataset)} for cell in plan.cells],
    }


def prompts(plan: EfficiencyPlan) -> list[DryPrompt]:
    """Return the prompts of all kinds and lengths for a dry run. This loads torch and the processor.

    Raises ConfigError: the model's shape or processor is not on this machine, or a length is too short for a picture.
    """
    from mmkv_bench.efficiency.prompts import visual_prompt
    from mmkv_bench.forecast.dry_run import prompt_types
    from mmkv_bench.forecast.memory import DryPrompt, without_weights

    loaded = without_weights(plan) if plan.kinds != [TEXT] else None
    dry_prompts = []
    for kind, tokens in product(plan.kinds, sorted(plan.lengths)):
        if loaded is None or kind == TEXT:
            dry_prompts.append(DryPrompt(prompt_types(tokens, 0)))
        else:
            prompt = visual_prompt(loaded, kind, tokens, plan.model.frames, plan.model.video_max_pixels)
            dry_prompts.append(DryPrompt(prompt.types, prompt.inputs))
    return dry_prompts


def _workload(plan: EfficiencyPlan, todo: Sequence[PassId], kind: str, tokens: int, batch: int) -> Workload:
    new_tokens, cells = int(plan.pass_config.new_tokens), [cell for cell in plan.cells if kind_of(cell.dataset) == kind]
    passes_by_cell: Counter[str] = Counter()
    prefills_by_length: Counter[int] = Counter()
    entry_reads = 0.0
    for cell in cells:
        passes_of_cell = [unit for unit in todo if (unit.cell, unit.tokens, unit.batch) == (cell.cell, tokens, batch)]
        warm_up = any(unit.repeat is not None for unit in passes_of_cell)
        passes_by_cell[cell.cell] = len(passes_of_cell) + warm_up
        kept_per_head = kept_entries(cell.budget, tokens)
        # `pixels` shrinks pictures before the prefill
        prefills_by_length[kept_per_head if cell.compressor.resamples else tokens] += passes_by_cell[cell.cell] * batch
        entry_reads += passes_by_cell[cell.cell] * batch * (kept_per_head + new_tokens / 2)
    return Workload(
        DATASETS[kind],
        PromptLength(tokens, "lengths"),
        new_tokens,
        cells,
        prefills_by_length,
        new_tokens * passes_by_cell.total(),
        new_tokens * entry_reads,
        batch,
        plan.pass_config.batch_prefill == TOGETHER,
        state_reads=new_tokens * batch * passes_by_cell.total(),
    )


def _warm_up_tokens(todo: Sequence[PassId]) -> int:
    """Return the number of prompt tokens of warm-up passes: one pass for each cell, length and batch that is timed."""
    return sum(shape.tokens * shape.batch for shape in {unit.shape for unit in todo if unit.repeat is not None})
