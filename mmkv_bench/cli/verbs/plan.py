"""`mmkv-bench plan`: what a run would do, lower bounds of its time and memory, and how much is done."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from mmkv_bench.cli.grammar import count, overrides_of, reader
from mmkv_bench.errors import ConfigError

if TYPE_CHECKING:
    from mmkv_bench.efficiency.plan import EfficiencyPlan
    from mmkv_bench.forecast.forecast import Assumptions, Forecast
    from mmkv_bench.forecast.memory import CellPeaks, DryPrompt
    from mmkv_bench.plan.plan import Plan

_UNITS = {"device_memory": 2**30, "bandwidth": 1e9, "matmul": 1e12}


def plan(given: argparse.Namespace) -> int:
    """Print what a run would do, without opening a model or data and without a connection. Return 0.

    Raises ConfigError: flags about prompts under `scenario=efficiency`, whose settings describe the prompts.
    """
    if given.devices:
        from mmkv_bench.forecast import device_speed

        speeds = list(device_speed.stored_speeds().values())
        device_lines = "\n".join(map(str, speeds)) or f"no device was measured yet: {device_speed.folder()} has no file"
        print(json.dumps([asdict(one) | {"device": one.slug} for one in speeds]) if given.json else device_lines)
        return 0
    from mmkv_bench.config.compose import launcher_of
    from mmkv_bench.config.schema import EFFICIENCY
    from mmkv_bench.plan.planner import outline
    from mmkv_bench.plan.validate import compose_checked

    overrides = overrides_of(given)
    config = compose_checked(overrides)
    has_launcher = any(override.partition("=")[0] == "launcher" for override in overrides)
    launcher = launcher_of(overrides) if has_launcher else None  # the plan is then a sweep's
    if config.scenario == EFFICIENCY:
        from mmkv_bench.efficiency.plan import plan_passes

        for flag in ("prompt-tokens", "visual-tokens", "image"):
            if getattr(given, flag.replace("-", "_")):
                raise ConfigError(f"--{flag} does not work with scenario=efficiency; give lengths=[...] and prompts=")
        document = _print_passes(plan_passes(config, outline=True), given, launcher)
    else:
        if given.scores:
            raise ConfigError(
                "--scores needs the times and bytes of scenario=efficiency; add scenario=efficiency, or leave "
                "--scores out"
            )
        document = print_plan(outline(config), launcher, given)
    if given.json:
        print(json.dumps(document))
    return 0


def print_plan(
    plan: Plan, launcher: Mapping[str, Any] | None, given: argparse.Namespace | None = None
) -> dict[str, Any]:
    """Print the plan of a run, and return its content as data for JSON.

    launcher: `hydra.launcher` if Slurm runs the jobs, else None.
    given: flags of `mmkv-bench plan`, by default none.
    """
    from mmkv_bench.forecast import prefill_counts, throughput
    from mmkv_bench.forecast.forecast import forecast, workloads_of
    from mmkv_bench.forecast.text import text
    from mmkv_bench.plan import preflight, stale_answers
    from mmkv_bench.run.console_output import schedule, schedule_document
    from mmkv_bench.store.store import Store

    given = reader("plan")[1].read([]) if given is None else given
    store = Store(plan.out)
    coverage, assumptions = plan.coverage(store), _assumptions(given, plan, launcher)
    forecasts = forecast(
        plan, workloads_of(plan, coverage, store, assumptions), assumptions, prefill_counts.notes_of(plan)
    )
    rates, version_notes = throughput.rates(plan, coverage, store), stale_answers.other_versions(plan, store)
    disk_space = preflight.disk_of(plan, coverage, store)
    missing_inputs = preflight.missing_inputs(plan, disk_space)
    notes = [f"note       {sentence}" for sentence in version_notes]
    print("\n".join([schedule(plan, coverage), "", text(forecasts), "", *throughput.lines(rates), *notes]))
    print(preflight.preflight_text(disk_space, missing_inputs, plan.out))
    return {
        **schedule_document(plan, coverage),
        "forecast": asdict(forecasts),
        "measured": [asdict(rate) | {"hours": rate.hours} for rate in rates],
        "other_versions": version_notes,
        "disk": asdict(disk_space),
        "lacking": [asdict(lack) for lack in missing_inputs],
        **(_memory(forecasts, *_peaks(plan, forecasts)) if given.memory else {}),
    }


def _print_passes(
    plan: EfficiencyPlan, given: argparse.Namespace, launcher: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Print the plan of a run with scenario=efficiency, and return its content as data for JSON.

    given, launcher: see `print_plan`.
    """
    from mmkv_bench.cli.deployment import deployment_of
    from mmkv_bench.efficiency import planned_workloads as passes
    from mmkv_bench.efficiency.run import missing_passes, stored_outcomes
    from mmkv_bench.forecast.forecast import forecast
    from mmkv_bench.forecast.text import text
    from mmkv_bench.plan import preflight
    from mmkv_bench.store.store import Store
    from mmkv_bench.tables.formats import write

    todo = missing_passes(plan, stored_outcomes(plan, Store(plan.out).timings(plan.names)))
    assumptions = _assumptions(given, plan, launcher)
    if plan.memory_limit is not None and given.device_memory is None:
        assumptions = replace(assumptions, memory=plan.memory_limit)
    forecasts = forecast(plan, passes.workloads_of(plan, todo), assumptions, passes.notes_of(plan))
    missing_inputs = preflight.missing_weights(plan.model)
    peaks: list[CellPeaks] = []
    notes: list[str] = []
    if given.memory:
        peaks, notes = _peaks(plan, forecasts, passes.prompts(plan), plan.pass_config.new_tokens - 1)
    tables = deployment_of(plan, forecasts, peaks, given.scores or ())
    forecast_text = text(forecasts, write(tables, "md"))
    input_lines = preflight.missing_input_lines(missing_inputs)
    print("\n".join([passes.text(plan, todo), forecast_text, *input_lines]))
    plan_as_data = {
        **passes.document(plan, todo),
        "forecast": asdict(forecasts),
        "deployment": [dict(record) for table in tables for record in table.records()],
        "lacking": [asdict(lack) for lack in missing_inputs],
    }
    return plan_as_data | (_memory(forecasts, peaks, notes) if given.memory else {})


def _peaks(
    plan: Plan, forecasts: Forecast, prompts: Sequence[DryPrompt] | None = None, reserve: int = 32
) -> tuple[list[CellPeaks], list[str]]:
    from mmkv_bench.forecast.memory import count_peaks  # torch
    from mmkv_bench.run.progress import duration

    start_time = time.monotonic()

    def tell(done: int, total: int, label: str) -> None:
        time_left_clause = f", {duration((time.monotonic() - start_time) / done * (total - done))} left" if done else ""
        progress_text = (
            f"counting memory in dry runs of the model's code: {done} of {total} done{time_left_clause}; next {label}"
        )
        print(progress_text, file=sys.stderr)

    return count_peaks(plan, forecasts, prompts, reserve, tell)


def _memory(forecasts: Forecast, peaks: Sequence[CellPeaks], notes: Sequence[str]) -> dict[str, Any]:
    """Print the memory peaks of a dry run, and return them as data for JSON."""
    from mmkv_bench.forecast import memory

    print(memory.text(peaks, notes, forecasts.given.memory))
    return {"memory": memory.document(peaks, notes)}


def _assumptions(given: argparse.Namespace, plan: Plan, launcher: Mapping[str, Any] | None) -> Assumptions:
    """Return what a forecast assumes about prompts and device: the numbers in the flags, completed from a measured
    device.

    The measured device is the one that `--device` or `--measure` names. Without such a flag and without numbers in the
    flags, it is the only measured device of the planned kind.
    """
    from mmkv_bench.forecast import device_speed
    from mmkv_bench.forecast.forecast import Assumptions

    prompts = _prompts(given)
    value_by_flag = {flag: getattr(given, flag) and getattr(given, flag) * unit for flag, unit in _UNITS.items()}
    given_flags = [f"--{flag.replace('_', '-')}" for flag, number in value_by_flag.items() if number is not None]
    device = None
    if given.measure:
        if given.device:
            raise ConfigError(
                f"--measure {given.measure} plans for this machine's device; leave out --device {given.device}"
            )
        device = device_speed.speed_of_device(given.measure, again=True)
        print(device)
    elif given.device:
        device = device_speed.stored_speed(given.device)
    elif not given_flags:
        device_kind = _kind(plan, launcher)
        devices_of_kind = [one for one in device_speed.stored_speeds().values() if device_kind in (None, one.kind)]
        device = devices_of_kind[0] if len(devices_of_kind) == 1 else None
    if device is None or len(given_flags) == len(_UNITS):
        return Assumptions(
            *prompts, value_by_flag["device_memory"], value_by_flag["bandwidth"], value_by_flag["matmul"]
        )
    device_limits = device.memory_bytes, device.bandwidth, device.rates.get(plan.cells[0].dtype)
    memory, bandwidth, rate = (
        b if a is None else a for a, b in zip(value_by_flag.values(), device_limits, strict=True)
    )
    name = device.slug + (f" with {' and '.join(given_flags)} as given" if given_flags else "")
    return Assumptions(*prompts, memory, bandwidth, rate, name)


def _kind(plan: Plan, launcher: Mapping[str, Any] | None) -> str | None:
    """Return the kind of device that the plan will use, `cpu` or `cuda`; None if torch will choose."""
    from mmkv_bench.devices.requirements import sign_here

    if plan.model.device != "auto":
        return plan.model.device
    if launcher is not None and "gpus_per_node" in launcher:
        from mmkv_bench.slurm.checks import gpus_of
        from mmkv_bench.slurm.submission import launcher_of_model

        return (
            "cuda" if gpus_of(launcher_of_model(launcher, plan.resolved["slurm"]["models"], plan.model.name)) else "cpu"
        )
    return None if sign_here() is None else "cuda"


def _prompts(given: argparse.Namespace) -> tuple[list[int], int | None, list[tuple[int, int]]]:
    """Return what the flags state about prompts: lengths, number of visual tokens, and image sizes."""
    try:
        lengths = [count(text) for text in given.prompt_tokens or ()]
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--prompt-tokens: {error}; give lengths such as 2048,8192") from error
    for text in given.image or ():
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
            raise ConfigError(f"--image {text} is not a size in pixels; give width and height, such as 1344x896")
    if given.image and (given.prompt_tokens or given.visual_tokens):
        raise ConfigError("--image determines the length of prompts; leave out --prompt-tokens and --visual-tokens")
    image_sizes = [
        (int(width), int(height)) for width, _, height in (text.partition("x") for text in given.image or ())
    ]
    return lengths, given.visual_tokens, image_sizes
