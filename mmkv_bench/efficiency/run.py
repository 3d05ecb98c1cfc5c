"""A run of `scenario=efficiency`: plan the passes, measure those without rows, print a summary of all rows."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from mmkv_bench.config.schema import ONE_BY_ONE, TOGETHER, RunConfig
from mmkv_bench.efficiency.plan import TEXT, EfficiencyPlan, PassId, kind_of, plan_passes
from mmkv_bench.efficiency.search import PassOutcome
from mmkv_bench.errors import ConfigError
from mmkv_bench.models.load import computing_with, threads_for
from mmkv_bench.plan.cells import stored_rows
from mmkv_bench.run.tracking import flat_config, summarise, tracker
from mmkv_bench.secrecy import without_secrets
from mmkv_bench.store.store import Store

if TYPE_CHECKING:
    from mmkv_bench.efficiency.measure import Bench, CacheBytes
    from mmkv_bench.generation.encode import EncodedPrompt
    from mmkv_bench.generation.result import CellSpec
    from mmkv_bench.plan.cells import Cell
    from mmkv_bench.store.tracking import WandbTracker


def run(config: RunConfig) -> int:
    """Run `scenario=efficiency`: measure the missing passes, print a summary. Return 0, or 1 if a pass failed (see its
    row).

    Raises MMKVError: the run as a whole stops. The exception has the exit code.
    """
    start_time = time.perf_counter()
    plan = plan_passes(config)
    store = Store(plan.out)
    store.check_writable()
    outcomes = stored_outcomes(plan, store.timings(plan.names))
    todo = missing_passes(plan, outcomes)
    has_tracker, shard, number_of_passes = plan.logger.kind != "none", plan.answering.selection.shard, 0
    track = tracker(plan.logger, shard, store) if has_tracker else None
    print(plan_summary(plan, len(todo)), flush=True)
    if todo:
        if track is not None:
            track.start(flat_config(plan.resolved, plan.cells))
        is_finished = False
        try:
            number_of_passes = _measure(plan, store, outcomes, track)
            is_finished = True
        finally:
            if track is not None:
                track.finish(failed=not is_finished)
    exit_code = _report(plan, store, outcomes, number_of_passes, time.perf_counter() - start_time)
    if has_tracker:
        summarise(plan.logger, shard, store, number_of_passes > 0)
    return exit_code


DISTINCT_PROMPTS = 16
"""Number of different prompts with pictures or videos in a batch. Further sequences repeat these under other names."""
PREFILLED_PROMPTS = 3
"""Number of prompts that are prefilled when a search tries a batch size, besides the last one. The others are copies.
"""
_PASS_COLUMNS = ("cell", "prompt_tokens", "batch", "repeat", "batch_prefill")


def stored_outcomes(plan: EfficiencyPlan, rows: pa.Table) -> dict[PassId, str]:
    """Map each stored pass to its status. rows: rows of the table `timings`.

    Passes with a status in the plan's `retry`, or that counted memory under another limit, are left out and so
    repeated.
    """
    outcomes: dict[PassId, str] = {}
    column_names = (*_PASS_COLUMNS, "phase", "status", "memory_limit", "peak_allocated", "copied")
    for *unit, phase, status, limit, peak, copied in zip(
        *(rows[name].to_pylist() for name in column_names), strict=True
    ):
        pass_id = PassId(*unit)
        if phase == "total" and status not in plan.retry and (pass_id.repeat is not None or limit == plan.memory_limit):
            outcomes[pass_id] = PassOutcome(status, peak, bool(copied))
    return outcomes


def missing_passes(plan: EfficiencyPlan, outcomes: Mapping[PassId, str]) -> list[PassId]:
    """Return the passes that have not run, also timed ones that wait for a search. outcomes: pass -> status."""
    return runnable_passes(plan, outcomes, plan.units)


def runnable_passes(plan: EfficiencyPlan, outcomes: Mapping[PassId, str], more: Sequence[PassId] = ()) -> list[PassId]:
    """Return the passes that can run now and have not run, in order, and then those of `more` that have not run.

    If a pass failed, no other pass of the same cell, prompt length and batch size runs. outcomes: pass -> status.
    """
    failed_shapes = {unit.shape for unit, status in outcomes.items() if status != "ok"}
    finished_passes = outcomes.keys() - plan.unconfirmed(outcomes)
    candidates = dict.fromkeys([*plan.passes(outcomes), *more])
    return [unit for unit in candidates if unit not in finished_passes and unit.shape not in failed_shapes]


# ---------------------------------------------------------------------- before work
def plan_summary(plan: EfficiencyPlan, todo: int) -> str:
    """Return the text printed before the work. todo: number of missing passes."""
    lengths, batch_sizes = (", ".join(map(str, sorted(numbers))) for numbers in (plan.lengths, plan.batches))
    batches_text = " and ".join([batch_sizes] * bool(batch_sizes) + ["the largest that fits"] * plan.searches)
    batches_text += "" if plan.memory_limit is None else f" into {plan.pass_config.memory_limit}"
    batches_text += "" if plan.batches == [1] and not plan.searches else f", prefilled {plan.pass_config.batch_prefill}"
    search_clause = ", and those of the search for the largest batch" if plan.searches else ""
    passes_text = (
        f"of every cell, length and batch one that counts memory and {plan.pass_config.repeats} timed; {todo} to do"
    )
    lines = [
        f"efficiency of {plan.model.name} ({plan.family.name}), {plan.cells[0].dtype}, decode={plan.answering.decode}",
        f"prompts   made-up {' and '.join(plan.kinds)} of {lengths} tokens; {plan.pass_config.new_tokens} new tokens",
        f"batch     {batches_text}",
        f"cells     {', '.join(cell.label for cell in plan.cells)}",
        f"passes    {len(plan.units)}{search_clause}: {passes_text}",
        f"rows      {plan.out}",
    ]
    return "\n".join([*lines, *plan.notes])


def _measure(plan: EfficiencyPlan, store: Store, outcomes: dict[PassId, str], track: WandbTracker | None) -> int:
    """Run missing passes until none is left. Return their number, and update `outcomes` (pass -> status)."""
    from mmkv_bench.efficiency.measure import Bench
    from mmkv_bench.run.generate import compiled_step
    from mmkv_bench.run.origin_checks import refuse_other_machine

    model, passes = plan.model, plan.pass_config
    plan.check_machine()
    loaded = plan.load()
    step = compiled_step(loaded, plan.answering)
    bench = Bench(loaded, passes.new_tokens, model.attention, step, passes.batch_prefill == TOGETHER)
    if bench.device.waits_for_launches():
        raise ConfigError(
            "CUDA_LAUNCH_BLOCKING is set, so the host waits for every kernel and times differ from those of a "
            "served model; unset it"
        )
    store.write_cells(stored_rows(plan.cells, plan.resolved, plan.provenance))
    refuse_other_machine(store, plan.names, plan.provenance, times=True)
    with computing_with(threads_for(loaded, model.threads)):
        return _Passes(plan, store, bench, outcomes, track).run()


class _Passes:
    """Runs passes in order; stores and tracks the rows of each when it ends. outcomes: pass -> status; updated."""

    def __init__(
        self, plan: EfficiencyPlan, store: Store, bench: Bench, outcomes: dict[PassId, str], track: WandbTracker | None
    ):
        self.plan, self.store, self.bench, self.outcomes, self.track = plan, store, bench, outcomes, track
        self.places: dict[PassId, int] = {}
        self.prompts: dict[tuple[str, int, int], EncodedPrompt] = {}
        self.warm: set[PassId] = set()

    def run(self) -> int:
        """Run all missing passes, and those that a search for the largest batch adds. Return their number."""
        number_of_passes = 0
        while passes_to_run := runnable_passes(self.plan, self.outcomes):
            self.places = {unit: place for place, unit in enumerate(self.plan.passes(self.outcomes))}
            number_of_passes += self._run(passes_to_run)
        return number_of_passes

    def _run(self, todo: Sequence[PassId]) -> int:
        """Run the passes `todo`, except those of a shape (cell, prompt length, batch size) that failed. Return their
        number."""
        from mmkv_bench.run.progress import Progress

        number_of_passes, failed_shapes = 0, set()
        for unit in todo:
            self._prompt(unit)  # refuse impossible prompts before any pass
        only_memory_passes = self.plan.searches and all(unit.repeat is None for unit in todo)
        with Progress(len(todo), "search" if only_memory_passes else "passes") as bar:
            for unit in todo:
                if unit.shape not in failed_shapes:
                    rows = self._rows(unit)
                    self.store.write_timings(rows)
                    if self.track is not None:
                        self.track.log(_tracked_numbers(self.plan.cell(unit.cell).label, rows))
                    total_row = next(row for row in rows if row["phase"] == "total")
                    self.outcomes[unit] = PassOutcome(
                        total_row["status"], total_row.get("peak_allocated"), bool(total_row["copied"])
                    )
                    number_of_passes += 1
                    if self.outcomes[unit] != "ok":
                        failed_shapes.add(unit.shape)
                bar.advance()
        return number_of_passes

    def _rows(self, unit: PassId) -> list[dict[str, Any]]:
        from mmkv_bench.generation.result import describe, status_of

        common_values = self._shared_values(unit)
        try:
            rows = self._pass(unit)
        except Exception as error:  # noqa: BLE001 - a failure becomes the pass's status; the others go on
            rows = [{"phase": "total", "status": status_of(error), "error": without_secrets(describe(error))}]
        gc.collect()  # a failed pass is held by its traceback's cycle
        self.bench.device.release()
        return [common_values | row for row in rows]

    def _shared_values(self, unit: PassId) -> dict[str, Any]:
        cell = self.plan.cell(unit.cell)
        return {
            "cell": unit.cell,
            "dataset": cell.dataset,
            "prompts": kind_of(cell.dataset),
            "prompt_tokens": unit.tokens,
            "visual_tokens": self._prompt_of_length(cell, unit.tokens).visual_tokens,
            "profile": self.plan.profiles[unit.cell].digest if unit.cell in self.plan.profiles else None,
            "batch": unit.batch,
            "batch_prefill": unit.prefill,
            "searched": None if unit.repeat is not None else unit.batch not in self.plan.batches,
            "copied": True if self._prefilled_prompts(unit) else None,
            "memory_limit": None if unit.repeat is not None else self.plan.memory_limit,
            "new_tokens": self.bench.new_tokens,
            "repeat": unit.repeat,
            "status": "ok",
            "place": self.places[unit],
            "order_seed": self.plan.pass_config.order_seed,
            "measured": "own",
        }

    def _pass(self, unit: PassId) -> list[dict[str, Any]]:
        prompts = [self._prompt(unit, number) for number in range(unit.batch)]
        cell = _cell_spec(self.plan.cell(unit.cell))
        if unit.repeat is None:
            memory = self.bench.measure_memory(prompts, cell, self.plan.memory_limit, self._prefilled_prompts(unit))
            peaks = {name: peak for name, peak in memory.peaks.items() if name != "account"}
            rows = {name: {"peak_allocated": p.allocated, "peak_reserved": p.reserved} for name, p in peaks.items()}
            return _pass_rows(rows, memory.held, {"peak_resident": memory.resident})
        if unit.shape not in self.warm:
            self._forget_storages()
            self.bench.measure_times(prompts, cell)
            gc.collect()  # the objects that traced a step hold its cache
            self.warm.add(unit.shape)
        earlier_disturbances = self._disturbances()
        timed = self.bench.measure_times(prompts, cell)
        values_by_phase: dict[str, dict[str, Any]] = {name: {"seconds": value} for name, value in timed.seconds.items()}
        values_by_phase["decode"]["steps_s"] = timed.steps
        disturbances = list(dict.fromkeys([*earlier_disturbances, *self._disturbances()]))
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        return _pass_rows(
            values_by_phase,
            timed.held,
            {"disturbed": disturbances, "load": load, "threads": self.bench.device.threads()},
        )

    def _prefilled_prompts(self, unit: PassId) -> int | None:
        """Return the number of prompts that are prefilled besides the last; the others are copies. None: no copies.

        Only a search for the largest batch uses copies.
        """
        is_search_pass = unit.repeat is None and unit.prefill == ONE_BY_ONE and unit.batch not in self.plan.batches
        uses_copies = (
            is_search_pass and unit.batch > PREFILLED_PROMPTS + 1 and unit not in self.plan.unconfirmed(self.outcomes)
        )
        return PREFILLED_PROMPTS if uses_copies else None

    def _forget_storages(self) -> None:
        """Free the storages of compiled steps before passes of a new shape. Each shape then needs a warm-up again."""
        if self.bench.step is not None:
            from mmkv_bench.compression.fixed_layer import pool_of

            pool_of(self.bench.loaded.model).clear()
            self.warm.clear()

    def _disturbances(self) -> list[str]:
        import torch

        device, asked_threads = self.bench.device, torch.get_num_threads()
        other_processes, throttle_reasons = device.foreign_processes(), device.throttled()
        reasons = [f"{len(other_processes)} other processes on the device"] if other_processes else []
        reasons += [f"clock held down: {reason}" for reason in throttle_reasons or ()]
        return reasons + (
            [f"{device.threads()} of {asked_threads} threads"] if device.threads() < asked_threads else []
        )

    def _prompt(self, unit: PassId, number: int = 0) -> EncodedPrompt:
        """Return the prompt of one sequence of a pass. number: index of the sequence in the batch.

        For the method `pixels` the prompt has as many tokens as the budget, with smaller pictures and less text.

        Raises ConfigError: the budget is too small for a picture.
        """
        cell = self.plan.cell(unit.cell)
        budget_entries = unit.tokens if cell.budget is None else cell.budget.entries_for(unit.tokens)
        if not cell.compressor.resamples or budget_entries >= unit.tokens:
            return self._prompt_of_length(cell, unit.tokens, number)
        try:
            return self._prompt_of_length(cell, budget_entries, number)
        except ConfigError as error:
            raise ConfigError(
                f"{cell.label} makes a prompt of {budget_entries} tokens from {unit.tokens} tokens, which is too short "
                "for a picture; raise the budget, or leave pixels out"
            ) from error

    def _prompt_of_length(self, cell: Cell, tokens: int, number: int = 0) -> EncodedPrompt:
        """Return the prompt of `tokens` tokens with index `number`. It is made once and kept on the host.

        Prompts with media repeat after `DISTINCT_PROMPTS` sequences.
        """
        from mmkv_bench.efficiency.prompts import text_prompt, visual_prompt

        prompt_kind = kind_of(cell.dataset)
        prompt_number = number if prompt_kind == TEXT else number % DISTINCT_PROMPTS
        if (prompt_kind, tokens, prompt_number) not in self.prompts:
            loaded, model = self.bench.loaded, self.plan.model
            self.prompts[prompt_kind, tokens, prompt_number] = (
                text_prompt(loaded, tokens, prompt_number)
                if prompt_kind == TEXT
                else visual_prompt(loaded, prompt_kind, tokens, model.frames, model.video_max_pixels, prompt_number)
            )
        prompt = self.prompts[prompt_kind, tokens, prompt_number]
        return prompt if prompt_number == number else replace(prompt, identity=f"{prompt.identity}/again/{number}")


def _cell_spec(cell: Cell) -> CellSpec:
    from mmkv_bench.compression.compressor import full
    from mmkv_bench.generation.result import CellSpec

    if cell.compressor.resamples:  # the full cache of a smaller prompt
        return CellSpec(cell.cell, full(), None, cell.protocol)
    return CellSpec(cell.cell, cell.compressor, cell.budget, cell.protocol, cell.seed or 0)


def _tracked_numbers(label: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return a pass's numbers for a tracker: times [s] or peak memory [bytes], and whether it failed.

    label: prefix of the names. rows: the pass's rows of the table `timings`.
    """
    first_row = rows[0]
    name = f"{first_row['dataset']}/{label}/{first_row['prompt_tokens']}x{first_row['batch']}"
    row_by_phase = {row["phase"]: row for row in rows}
    steps, peak = row_by_phase.get("decode", {}).get("steps_s"), row_by_phase.get("total", {}).get("peak_allocated")
    shown_numbers = {
        "ttft_s": row_by_phase.get("ttft", {}).get("seconds"),
        "tpot_s": median(steps) if steps else None,
        "peak_bytes": peak,
        "failed": float(first_row["status"] != "ok"),
    }
    return {f"{name}/{key}": value for key, value in shown_numbers.items() if value is not None}


def _pass_rows(rows: Mapping[str, dict[str, Any]], held: CacheBytes, last: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a finished pass, one per phase.

    rows: phase -> values. held: bytes of the cache, for the row `decode`. last: further values of the row `total`.
    """
    held_bytes = {"bytes_held": held.held, "bytes_useful_step": held.useful, "bytes_read_step": held.read}
    values_by_phase = {"decode": held_bytes, "total": {**last, "fallback": held.fallback}}
    return [{"phase": name} | row | values_by_phase.get(name, {}) for name, row in rows.items()]


# ---------------------------------------------------------------------- after work
def _report(plan: EfficiencyPlan, store: Store, outcomes: Mapping[PassId, str], ran: int, seconds: float) -> int:
    from mmkv_bench.efficiency.summary import document, summary_lines
    from mmkv_bench.efficiency.text import text
    from mmkv_bench.forecast.roofline import measured_roofline, stored_roofline

    rows = store.timings(plan.names)
    if not ran:
        print("every pass has its rows; nothing to do")
    limits = measured_roofline(plan.model, plan.cells[0].dtype, rows) if ran else stored_roofline(store, rows)
    summary = summary_lines(rows, plan.baselines, limits, plan.memory_limit)
    if len(summary):  # a prompt of `pixels` is shorter than its line's, so its operations are not those of the line
        resampling_cells = [cell.cell for cell in plan.cells if cell.compressor.resamples]
        summary.loc[summary["cell"].isin(resampling_cells), "prefill_mfu"] = float("nan")
    print(text(plan, summary, limits))
    expected_failures = {
        plan.shape(*place, batch)
        for place in (plan.places if plan.searches else ())
        for batch in plan.search(outcomes, *place).tried[1:]
        if batch not in plan.batches
    }  # that a search ends where memory does is no failure
    asked_passes = plan.passes(outcomes)
    failed_passes = sum(
        outcomes.get(unit, "ok") not in ("ok", "oom" if unit in expected_failures else "ok") for unit in asked_passes
    )
    if failed_passes:
        print(f"{failed_passes} of {len(asked_passes)} passes failed; retry=[oom,error] runs them again")
    print(f"{ran} passes in {seconds:.1f} s; raw times in the table timings of {plan.out}")
    if plan.json:
        document_values = {
            "out": str(plan.out),
            "ran": ran,
            "failed": failed_passes,
            "efficiency": document(summary, plan.cells),
        }
        print(json.dumps(document_values))
    return 1 if failed_passes else 0
