"""The deployment tables of `mmkv-bench plan scenario=efficiency`: measured costs, or else those of a dry run or a
forecast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from mmkv_bench.config.schema import ONE_BY_ONE
from mmkv_bench.efficiency.plan import TEXT, EfficiencyPlan, kind_of
from mmkv_bench.efficiency.summary import summary_lines
from mmkv_bench.forecast.device_speed import slug_of
from mmkv_bench.forecast.roofline import MS, prefill_operations
from mmkv_bench.plan.cells import Cell
from mmkv_bench.store.store import Store
from mmkv_bench.tables.build import build
from mmkv_bench.tables.costs import Key
from mmkv_bench.tables.deployment import (
    COUNTED,
    LEAST,
    MOST,
    Estimate,
    Measured,
    Option,
    ScoreLoss,
    Setting,
    deployment_table,
    measured_options,
    score_losses,
)
from mmkv_bench.tables.stored_rows import load
from mmkv_bench.tables.table import Note, Rank, Table
from mmkv_bench.tables.text import number

if TYPE_CHECKING:
    from mmkv_bench.forecast.forecast import DatasetForecast, Forecast
    from mmkv_bench.forecast.memory import CellPeaks


def deployment_of(
    plan: EfficiencyPlan, forecasts: Forecast, peaks: Sequence[CellPeaks], scores: Sequence[str]
) -> list[Table]:
    """Return one deployment table per kind and length of prompts. The full cache comes first at each batch size.

    forecasts: costs computed from the model's shapes.
    peaks: memory peaks of a dry run, empty without one.
    scores: folders with scored rows. Scores of the planned model are shown beside the costs.
    """
    passes, notes = _measured_passes(plan, forecasts)
    losses: list[ScoreLoss] = []
    for folder in scores:
        losses += (losses_of_folder := score_losses(build(load(folder)), folder))
        models = sorted({key[0] for loss in losses_of_folder for key in loss.lost})
        if plan.model.name not in models:
            warning = f"{folder} has scores of {', '.join(models) or 'no model'}, none of {plan.model.name}; no column shows it."
            notes = [*notes, Note(warning, Rank.WARNING)]
    largest_batches = _largest_batches(plan, forecasts) if passes else {}
    peaks_by_cell = {(one.cell, one.tokens, one.visual_tokens > 0, one.batch): one for one in peaks if one.peaks}
    tables = []
    for (prompts, tokens), group in groupby(forecasts.datasets, lambda one: (one.dataset, one.tokens)):
        options: dict[tuple[Key, int], Option] = {}
        used_measurements: dict[Setting, Measured] = {}
        for one in group:
            prefill_mode = plan.pass_config.batch_prefill if one.sequences > 1 else ONE_BY_ONE
            passes_of_forecast = {
                s: rows for s, rows in passes.items() if (s.prompts, s.tokens, s.way) == (prompts, tokens, prefill_mode)
            }
            measured_options = {
                (option.key, option.batch): option for rows in passes_of_forecast.values() for option in rows.options
            }
            used_measurements |= {
                setting: rows
                for setting, rows in passes_of_forecast.items()
                if any(o.batch == one.sequences for o in rows.options)
            }
            for cell in [cell for cell in plan.cells if cell.dataset == prompts]:
                label = cell.method if cell.budget is None else f"{cell.method}@{cell.budget}"
                label += f" {cell.reading}" if cell.reading not in (None, "paper") else ""
                option = _option(cell, one, peaks_by_cell.get((label, tokens, kind_of(prompts) != TEXT, one.sequences)))
                option_key = option.key, option.batch
                option = measured_options[option_key].over(option) if option_key in measured_options else option
                largest_batch = largest_batches.get((cell.cell, tokens))
                options.setdefault(
                    option_key, option if largest_batch is None else replace(option, largest=largest_batch)
                )
        device = ", ".join({setting.device: None for setting in used_measurements} or [forecasts.given.device])
        setting = Setting(plan.model.name, device, prompts, tokens, plan.pass_config.batch_prefill)
        disturbance_notes = [note for rows in used_measurements.values() for note in rows.notes]
        table_notes = [
            *notes,
            *disturbance_notes,
            *_prefill_notes(forecasts, tokens, plan.cells),
            *_ragged_notes(plan.cells),
        ]
        tables.append(deployment_table(setting, [*options.values()], losses, forecasts.given.memory, table_notes))
    return tables


def _option(cell: Cell, one: DatasetForecast, peak: CellPeaks | None) -> Option:
    """Return a line of the deployment table: a method at a budget, at the length and batch of a forecast.

    peak: memory peaks in a dry run, which replace the forecast's bytes.
    """
    line = next(
        (line for line in one.lines if line.label == str(cell.budget or "full") and cell.method in line.methods), None
    )
    estimates: dict[str, Any] = {}
    if line is not None:
        takes_whole_prompt = not cell.compressor.resamples  # a smaller prompt needs less while it is prefilled
        if takes_whole_prompt:
            estimates["nbytes"] = Estimate(line.needs, LEAST)
        if takes_whole_prompt and line.batch is not None:
            estimates["largest"] = Estimate(line.batch, MOST)
        if line.ms is not None:
            estimates["step_s"] = Estimate(line.ms / MS, LEAST)
            estimates["tokens_s"] = Estimate(one.sequences * MS / line.ms, MOST)
        if cell.budget is not None:
            estimates["speed_up"] = Estimate(line.speed_up, MOST)
    if peak is not None:
        estimates["nbytes"] = Estimate(peak.largest, COUNTED)
        if peak.largest_batch is not None:
            estimates["largest"] = Estimate(peak.largest_batch, COUNTED)
    budget_amount = {"entries": cell.budget_entries, "fraction": cell.budget_fraction}.get(cell.budget_kind, "")
    key = (
        cell.model,
        cell.protocol,
        cell.base,
        cell.reading or "",
        cell.parameters,
        f"{cell.budget_kind} {budget_amount}",
    )
    return Option(key, cell.method, str(cell.budget or "all"), one.sequences, **estimates)


def _measured_passes(plan: EfficiencyPlan, forecasts: Forecast) -> tuple[Mapping[Setting, Measured], list[Note]]:
    """Return the model's measured passes in the plan's folder, and notes. Passes on another device give only a note."""
    if not plan.out.is_dir():
        return {}, []
    assumptions = forecasts.given
    passes_of_model = {s: rows for s, rows in measured_options(plan.out).items() if s.model == plan.model.name}
    devices = dict.fromkeys(setting.device for setting in passes_of_model)
    planned = assumptions.device.partition(" with ")[0] or (
        None if assumptions.bandwidth is None else "the device that --bandwidth gives"
    )
    name = next(iter(devices), "cpu")
    is_planned_device = planned in (None, slug_of(name, "cuda", 0)) or (name == "cpu" and planned.endswith("-threads"))
    if not devices or (is_planned_device and len(devices) == 1):
        return passes_of_model, []
    warning = f"Passes in {plan.out} were measured on {', '.join(devices)}, not on {planned or 'one device'}, and are not used; "
    return {}, [
        Note(f"{warning}`mmkv-bench tables {plan.out} --metric tpot_s,tokens_s,peak` prints them.", Rank.WARNING)
    ]


def _largest_batches(plan: EfficiencyPlan, forecasts: Forecast) -> dict[tuple[str, int], Estimate]:
    """Map (cell, prompt length) to the largest batch that `batch=max` measured; empty if the memory limits differ."""
    if plan.memory_limit not in (None, forecasts.given.memory) and forecasts.given.memory is not None:
        return {}
    rows = Store(plan.out).timings([cell.cell for cell in plan.cells])
    lines = summary_lines(rows, plan.baselines, None, plan.memory_limit)
    if not len(lines):
        return {}
    lines = lines[lines["largest_batch"].notna() & lines["batch_prefill"].isin([plan.pass_config.batch_prefill])]
    keys = zip(lines["cell"], lines["prompt_tokens"].astype(int), strict=True)
    return {key: Estimate(float(most)) for key, most in zip(keys, lines["largest_batch"], strict=True)}


def _prefill_notes(forecasts: Forecast, tokens: int, cells: Sequence[Cell]) -> list[Note]:
    """Return a note with the least prefill time, which no budget shortens; [] if the rate is unknown."""
    rate, decoder = forecasts.given.rate, forecasts.sizes.decoder
    if rate is None or decoder is None:
        return []
    seconds = prefill_operations(decoder, tokens) / rate
    resampling_methods = dict.fromkeys(cell.method for cell in cells if cell.compressor.resamples)
    exception_clause = f"; {' and '.join(resampling_methods)}, whose prompts are smaller, less" * bool(
        resampling_methods
    )
    return [
        Note(
            f"The prefill of one prompt takes at least {number(seconds)} s, whatever the budget{exception_clause}.",
            Rank.MARK,
        )
    ]


def _ragged_notes(cells: Sequence[Cell]) -> list[Note]:
    """Return a note if methods at a budget let heads or layers keep different numbers of entries, else nothing."""
    ragged_methods = dict.fromkeys(
        cell.method
        for cell in cells
        if (allocator := cell.compressor.allocator) is not None and allocator.follows_prompt and cell.budget is not None
    )
    note_text = (
        f"{', '.join(ragged_methods)}: heads or layers keep different lengths, which follow from the prompt. "
        "On a CUDA device in half "
        "precision they lie without padding; elsewhere they are padded to the longest, and take more than a forecast says."
    )
    return [Note(note_text, Rank.MARK)] if ragged_methods else []
