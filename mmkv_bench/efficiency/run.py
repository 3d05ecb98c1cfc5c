"""The scenario, top to bottom: plan the passes, refuse what cannot be measured, run what has no rows, print what the rows say."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mmkv_bench import devices
from mmkv_bench.efficiency.kinds import TEXT, kind_of
from mmkv_bench.efficiency.planned import Planned, Unit, planned
from mmkv_bench.errors import ConfigError
from mmkv_bench.store.store import Store

if TYPE_CHECKING:
    import pyarrow as pa
    from omegaconf import DictConfig

    from mmkv_bench.efficiency.measure import Bench, Held
    from mmkv_bench.generation.encode import EncodedPrompt
    from mmkv_bench.generation.result import CellSpec


def run(config: DictConfig) -> int:
    """Run a validated configuration of `scenario=efficiency`. Returns 0, or 1 when some pass failed (its row says how).

    Raises:
        MMKVError: what stops the run as a whole, with its exit code.
    """
    started = time.perf_counter()
    plan = planned(config)
    store = Store(plan.out)
    store.check_writable()
    todo = missing(plan, store.timings([cell.cell for cell in plan.cells]), list(config.retry))
    print(card(plan, len(todo)), flush=True)
    if todo:
        _measure(plan, store, todo)
    return _close(plan, store, len(todo), time.perf_counter() - started)


def missing(plan: Planned, rows: pa.Table, retry: Sequence[str] = ()) -> list[Unit]:
    """Units without rows, in order. What failed once is not tried again at its cell, length and batch, unless `retry` says so."""
    found = zip(
        *(rows[name].to_pylist() for name in ("cell", "prompt_tokens", "batch", "repeat", "status")), strict=True
    )
    done, failed = set(), set()
    for *unit, status in found:
        if status not in retry:
            done.add(Unit(*unit))
            if status != "ok":
                failed.add(tuple(unit[:3]))
    return [unit for unit in plan.units if unit not in done and tuple(unit[:3]) not in failed]


# ---------------------------------------------------------------------- before work
def card(plan: Planned, todo: int) -> str:
    """What is measured, and how many passes are to be done."""
    config = plan.config
    lengths = ", ".join(map(str, sorted({unit.tokens for unit in plan.units})))
    counts = f"of every cell and length one that counts memory and {config.repeats} timed; {todo} to do"
    lines = [
        f"efficiency of {config.model.name} ({plan.family.name}), {plan.cells[0].dtype}, decode={config.decode}",
        f"prompts   made-up {_kinds(plan)} of {lengths} tokens, one sequence at a time; {config.new_tokens} new tokens",
        f"cells     {', '.join(cell.label for cell in plan.cells)}",
        f"passes    {len(plan.units)}: {counts}",
        f"rows      {plan.out}",
    ]
    return "\n".join([*lines, *plan.notes])


def _kinds(plan: Planned) -> str:
    return " and ".join(dict.fromkeys(kind_of(cell.dataset) for cell in plan.cells))


def _measure(plan: Planned, store: Store, todo: Sequence[Unit]) -> None:
    from mmkv_bench.compression.flash import check as check_flash
    from mmkv_bench.efficiency.measure import Bench
    from mmkv_bench.generation.compiled import COMPILED, CompiledStep, check_compiler
    from mmkv_bench.models.source import Source
    from mmkv_bench.models.threads import computing_with, threads_for
    from mmkv_bench.plan import identity
    from mmkv_bench.plan.cells import stored_rows

    config = plan.config
    if config.decode == COMPILED:
        check_compiler()
    place = devices.kind_of(config.model.device)
    check_flash(config.model.attention, place, plan.cells[0].dtype, config.decode == COMPILED)
    provenance = identity.provenance(config, plan.cells[0].dtype)
    loaded = Source.of(config.model).load()
    Source.of(config.model).confirm(plan.cells[0].model_fingerprint)
    step = CompiledStep(loaded.model) if config.decode == COMPILED else None
    bench = Bench(loaded, config.new_tokens, config.model.attention, step)
    if bench.device.waits_for_launches():
        raise ConfigError(
            "CUDA_LAUNCH_BLOCKING is set, so every kernel is waited for and no time is that of a served model; unset it"
        )
    store.write_cells(stored_rows(plan.cells, config, provenance))
    with computing_with(threads_for(loaded, config.model.threads)):
        _Passes(plan, store, bench).run(todo)


class _Passes:
    """Runs passes in their order and stores each as it ends."""

    def __init__(self, plan: Planned, store: Store, bench: Bench):
        self.plan, self.store, self.bench = plan, store, bench
        self.places = {unit: place for place, unit in enumerate(plan.units)}
        self.prompts: dict[tuple[str, int], EncodedPrompt] = {}
        self.datasets = {cell.cell: cell.dataset for cell in plan.cells}
        self.warm: set[tuple[str, int, int]] = set()

    def run(self, todo: Sequence[Unit]) -> None:
        """All of them; after one that fails the others of its cell, length and batch are left out."""
        from mmkv_bench.run.progress import Progress

        failed: set[tuple[str, int, int]] = set()
        for unit in todo:
            self._prompt(unit)  # what cannot be made is refused before any pass
        with Progress(len(todo), "passes", unit="passes") as bar:
            for unit in todo:
                shape = (unit.cell, unit.tokens, unit.batch)
                if shape not in failed:
                    rows = self._rows(unit)
                    self.store.write_timings(rows)
                    if rows[0]["status"] != "ok":
                        failed.add(shape)
                bar.advance()

    def _rows(self, unit: Unit) -> list[dict[str, Any]]:
        from mmkv_bench.generation.status import describe, status_of
        from mmkv_bench.secrecy import without_secrets

        common = self._common(unit)
        try:
            rows = self._pass(unit)
        except Exception as error:  # noqa: BLE001 - what goes wrong is the pass's status; the others go on
            rows = [{"phase": "total", "status": status_of(error), "error": without_secrets(describe(error))}]
        gc.collect()  # a failed pass is held by its traceback's cycle
        self.bench.device.release()
        return [common | row for row in rows]

    def _common(self, unit: Unit) -> dict[str, Any]:
        return {
            "cell": unit.cell,
            "dataset": self.datasets[unit.cell],
            "prompts": kind_of(self.datasets[unit.cell]),
            "prompt_tokens": unit.tokens,
            "visual_tokens": self._prompt(unit).visual_tokens,
            "profile": self.plan.profiles[unit.cell].digest if unit.cell in self.plan.profiles else None,
            "batch": unit.batch,
            "new_tokens": self.bench.new_tokens,
            "repeat": unit.repeat,
            "status": "ok",
            "place": self.places[unit],
            "order_seed": self.plan.config.order_seed,
            "measured": "own",
        }

    def _pass(self, unit: Unit) -> list[dict[str, Any]]:
        prompt, cell = self._prompt(unit).to(self.bench.loaded.device), self._spec(unit.cell)
        if unit.repeat is None:
            counted = self.bench.counted(prompt, cell)
            peaks = {name: peak for name, peak in counted.peaks.items() if name != "account"}
            rows = {name: {"peak_allocated": p.allocated, "peak_reserved": p.reserved} for name, p in peaks.items()}
            return _finished(rows, counted.held, {"peak_resident": counted.resident})
        shape = (unit.cell, unit.tokens, unit.batch)
        if shape not in self.warm:
            self.bench.timed(prompt, cell)
            self.warm.add(shape)
        before = self._disturbed()
        timed = self.bench.timed(prompt, cell)
        times: dict[str, dict[str, Any]] = {name: {"seconds": value} for name, value in timed.seconds.items()}
        times["decode"]["steps_s"] = timed.steps
        disturbed = list(dict.fromkeys([*before, *self._disturbed()]))
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        return _finished(
            times, timed.held, {"disturbed": disturbed, "load": load, "threads": self.bench.device.threads()}
        )

    def _disturbed(self) -> list[str]:
        import torch

        device, asked = self.bench.device, torch.get_num_threads()
        others, held_down = device.foreign_processes(), device.throttled()
        found = [f"{len(others)} other processes on the device"] if others else []
        found += [f"clock held down: {reason}" for reason in held_down or ()]
        return found + ([f"{device.threads()} of {asked} threads"] if device.threads() < asked else [])

    def _prompt(self, unit: Unit) -> EncodedPrompt:
        """Made once, and kept on the host: no pass holds the pictures of another."""
        from mmkv_bench.efficiency.prompts import text_prompt
        from mmkv_bench.efficiency.visual_prompts import visual_prompt

        kind, tokens = kind_of(self.datasets[unit.cell]), unit.tokens
        if (kind, tokens) not in self.prompts:
            loaded, model = self.bench.loaded, self.plan.config.model
            self.prompts[kind, tokens] = (
                text_prompt(loaded, tokens)
                if kind == TEXT
                else visual_prompt(loaded, kind, tokens, model.frames, model.video_max_pixels)
            )
        return self.prompts[kind, tokens]

    def _spec(self, name: str) -> CellSpec:
        from mmkv_bench.generation.result import CellSpec

        cell = self.plan.cell(name)
        return CellSpec(cell.cell, cell.compressor, cell.budget, cell.protocol, cell.seed or 0)


def _finished(rows: Mapping[str, dict[str, Any]], held: Held, last: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of a pass with what belongs to its decoding and to all of it."""
    held_bytes = {"bytes_held": held.held, "bytes_useful_step": held.useful, "bytes_read_step": held.read}
    more = {"decode": held_bytes, "total": {**last, "fallback": held.fallback}}
    return [{"phase": name} | row | more.get(name, {}) for name, row in rows.items()]


# ---------------------------------------------------------------------- after work
def _close(plan: Planned, store: Store, ran: int, seconds: float) -> int:
    from mmkv_bench.efficiency.limits import limits_of
    from mmkv_bench.efficiency.show import shown
    from mmkv_bench.efficiency.summary import document, summarised

    rows = store.timings([cell.cell for cell in plan.cells])
    if not ran:
        print("every pass has its rows; nothing to do")
    limits = limits_of(plan, rows)
    summary = summarised(rows, plan.baselines, limits)
    print(shown(plan, summary, limits))
    failed = sum(status != "ok" for status in rows["status"].to_pylist())
    if failed:
        print(f"{failed} of {len(plan.units)} passes failed; retry=[oom,error] runs them again")
    print(f"{ran} passes in {seconds:.1f} s; raw times in the table timings of {plan.out}")
    if plan.config.json:
        print(
            json.dumps(
                {"out": str(plan.out), "ran": ran, "failed": failed, "efficiency": document(summary, plan.cells)}
            )
        )
    return 1 if failed else 0
