"""`mmkv-bench launch`: one run split over N processes of this machine.

The processes answer samples from one queue (`dispatch.py`), the datasets with the most work first, into the same result
folder. Each has its own device if the machine has devices. This process then scores all rows once. If a process dies, the
others answer its samples; if all die, the same command continues.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from mmkv_bench import devices
from mmkv_bench.errors import ConfigError
from mmkv_bench.run.dispatch import VARIABLE, Dispatcher
from mmkv_bench.run.progress import waiting
from mmkv_bench.signals import check_stop, defer_stop_signals

if TYPE_CHECKING:
    from mmkv_bench.plan.plan import Plan

_POLL_S = 0.5  # seconds between checks for a stop signal
RUN = (sys.executable, "-m", "mmkv_bench")


@dataclass(frozen=True, eq=False)
class Worker:
    """A process to start: its command line, additional environment variables, and the file for its output."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path


def launch_in_job(overrides: Sequence[str], asked: int) -> int:
    """Run one job of a sweep in several processes, one per device. Return the exit code.

    A stop signal is passed on to the processes, which store their current samples. Then `Stopped` is raised.

    overrides: overrides of a run, perhaps of one shard.
    asked: number of devices that the job requested.

    Raises:
        ConfigError: as `launch`, or the job sees no device.
    """
    visible = visible_devices("auto")[:asked]
    if not visible:
        raise ConfigError(
            f"this job requested {asked} GPUs but sees none "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}); check its node's driver and "
            "hydra.launcher.setup, or give model.device=cpu"
        )
    if len(visible) < asked:
        print(f"mmkv_bench: the job requested {asked} GPUs but sees {len(visible)}; it uses those", file=sys.stderr)
    with defer_stop_signals():
        return launch(overrides, seen=visible)


def launch(
    overrides: Sequence[str],
    processes: int | None = None,
    run: Sequence[str] = RUN,
    seen: Sequence[str] | None = None,
) -> int:
    """Run one configuration in several processes of this machine, then score it unless `stage=generate`. Return the exit
    code.

    Args:
        overrides: as for a run.
        processes: number of processes; None starts one per visible device.
        run: the command that starts every process.
        seen: the devices of a job of a sweep, whose overrides may name a shard; None uses this machine's devices.

    Raises:
        ConfigError: a configuration that cannot run, a shard or `stage=score` among the overrides, or no number of processes
            on a machine without devices.
    """
    from mmkv_bench.plan.validate import validated

    for text in overrides:
        if text.partition("=")[0].lstrip("+") == "shard" and seen is None:
            raise ConfigError(
                f"{text}: launch divides the run itself; drop {text}, or run the shard with mmkv-bench run"
            )
    config = validated(overrides)
    if config.stage == "score":
        raise ConfigError(
            "stage=score needs only one process; allowed with launch: both, generate; use "
            "mmkv-bench run for stage=score"
        )
    spans_devices = config.model.device_map is not None
    with waiting("loading", log=True):
        from mmkv_bench.evaluation.documents import documents
        from mmkv_bench.plan.planner import make_plan
        from mmkv_bench.run.run import carry_out
        from mmkv_bench.store.store import Store

        devices = visible_devices(config.model.device) if seen is None else list(seen)
        number_of_processes = _count(processes, devices, spans_devices)
        plan = make_plan(config)
    store = Store(plan.out)
    coverage = plan.coverage(store)
    incomplete = [part for part in plan.parts if coverage.missing(part)]
    if incomplete:
        plan.check_device()
    for part in incomplete:  # once, before the processes start
        documents(part.spec, plan.limit)
    log_prefix = "process"
    if seen is not None:  # a name for this attempt of a job, unique among all that write to one folder
        job_id, restart_count = (os.environ.get(f"SLURM_{name}") for name in ("JOB_ID", "RESTART_COUNT"))
        log_prefix = f"job-{job_id or os.getpid()}-{restart_count or 0}-process"
    ordered_overrides = [*overrides, *_longest_first(plan)]
    exit_code_by_worker = run_all(
        workers(
            ordered_overrides,
            number_of_processes,
            devices,
            Path(config.out),
            run,
            spread=spans_devices,
            named=log_prefix,
        )
    )
    for worker, code in exit_code_by_worker.items():
        print(f"mmkv_bench: process {worker.name} ended with exit code {code}; see {worker.log}", file=sys.stderr)
    stopped_lines = _stopped(exit_code_by_worker)
    for line in stopped_lines:
        print(f"mmkv_bench: {line}", file=sys.stderr)
    store.recover()  # publish what a dead process had committed
    if exit_code_by_worker and not stopped_lines and plan.unanswered(store):
        print("mmkv_bench: run the same command again to continue at the first missing sample", file=sys.stderr)
        return max(abs(code) if code < 128 else 1 for code in exit_code_by_worker.values())
    if any(code != 1 for code in exit_code_by_worker.values()):
        print("mmkv_bench: the others answered what was left", file=sys.stderr)
    if config.stage == "generate":
        return int(1 in exit_code_by_worker.values())
    score_exit_code = carry_out(plan.at_stage("score"))
    return max(score_exit_code, int(bool(stopped_lines)))


def _stopped(failed: Mapping[Worker, int]) -> list[str]:
    """Return log lines about datasets that stopped early, if processes failed for that reason only; else no lines.

    If there are lines, the other datasets can be scored.

    failed: process to its exit code.
    """
    from mmkv_bench.run.console_output import STOPPED

    if any(code != 1 for code in failed.values()):
        return []
    lines = [line for worker in failed for line in worker.log.read_text(errors="replace").splitlines()]
    return list(dict.fromkeys(line for line in lines if STOPPED in line))


def workers(
    overrides: Sequence[str],
    count: int,
    devices: Sequence[str],
    out: Path,
    run: Sequence[str] = RUN,
    spread: bool = False,
    named: str = "process",
) -> list[Worker]:
    """Return the processes of a split run, not started yet.

    Args:
        overrides: overrides of the run.
        count: number of processes.
        devices: visible devices, assigned in turn. Empty on CPU, where the cores are divided instead.
        out: the result folder, whose `logs` get the processes' output.
        spread: whether a process takes several devices (`model.device_map`).
        named: prefix of the logs' names. Jobs that share a folder need different prefixes.
    """
    new_workers = []
    for index in range(count):
        name = f"{index}/{count}"
        if devices:
            own_devices = devices[index::count] if spread and count <= len(devices) else [devices[index % len(devices)]]
            environment = {"CUDA_VISIBLE_DEVICES": ",".join(own_devices)}
        else:
            threads = max(1, (os.cpu_count() or 1) // count)
            environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
        quiet_overrides = [text for text in overrides if text.lstrip("+") != "json=true"]
        command = (*run, *quiet_overrides, "stage=generate")
        new_workers.append(Worker(name, command, environment, out / "logs" / f"{named}-{index}-of-{count}.log"))
    return new_workers


def run_all(started: Sequence[Worker]) -> dict[Worker, int]:
    """Start processes, distribute samples to them, and wait until all have ended. Return those that failed, with their exit
    codes.

    Exit codes are negative for a signal. Each line that a process writes to stderr is shown with the process's name in front.
    Ctrl-C, or a remembered stop signal (`signals.defer_stop_signals`), ends all processes and is raised again.
    """
    running_processes, dispatcher = [], Dispatcher()
    for worker in started:
        worker.log.parent.mkdir(parents=True, exist_ok=True)
        log = worker.log.open("w")
        with dispatcher.connect() as theirs:
            process = subprocess.Popen(
                worker.command,
                stdout=log,
                stderr=subprocess.PIPE,
                env={**os.environ, **worker.environment, VARIABLE: str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                text=True,
            )
        thread = threading.Thread(target=_forward, args=(worker.name, process.stderr, log), daemon=True)
        thread.start()
        running_processes.append((worker, process, thread, log))
    try:
        for _, process, _, _ in running_processes:
            while process.poll() is None:
                check_stop()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
    except BaseException:
        for _, process, _, _ in running_processes:
            process.terminate()
        raise
    finally:
        for _, process, thread, log in running_processes:
            process.wait()
            thread.join()
            log.close()
    return {worker: process.returncode for worker, process, _, _ in running_processes if process.returncode}


def visible_devices(setting: str) -> list[str]:
    """List the devices of this machine in the form of CUDA_VISIBLE_DEVICES. Empty without devices and for `setting` cpu.

    setting: value of `model.device`.
    """
    if setting == "cpu":
        return []
    listed_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed_devices is not None:
        return [device for device in (part.strip() for part in listed_devices.split(",")) if device and device != "-1"]
    return [str(index) for index in range(devices.KINDS["cuda"].count())]


def _count(processes: int | None, devices: Sequence[str], spread: bool) -> int:
    """Return the number of processes: `processes` if given, else one per device.

    A model that spans several devices (`spread`) gets one process, because its number of devices is unknown.
    """
    if processes is None and not devices:
        raise ConfigError(
            "this machine has no device, so the number of processes cannot be derived; give --processes N"
        )
    return processes or (1 if spread else len(devices))


def _longest_first(plan: Plan) -> list[str]:
    """Return an override that sorts the datasets by work (samples times maximum tokens per answer), the most first."""
    if len(plan.parts) < 2:
        return []
    from mmkv_bench.plan.planner import longest_first

    tokens = {part.name: json.loads(part.cells[0].generation).get("max_new_tokens") or 1 for part in plan.parts}
    work_by_dataset = {part.name: float(len(part.samples) * tokens[part.name]) for part in plan.parts}
    return [f"dataset=[{','.join(longest_first(work_by_dataset))}]"]


def _forward(name: str, lines: IO[str], log: IO[str]) -> None:
    for line in lines:
        log.write(line)
        log.flush()
        print(f"[{name}] {line}", end="", file=sys.stderr, flush=True)
