"""`mmkv-bench launch`: split one run over N processes of this machine.

The processes take samples from one queue (`dispatch.py`) and write to the same result folder. Each process has its own
device if the machine has devices. When all processes have ended, the starting process scores the answers once. If a
process dies, the others answer its samples. If all processes die, the same command continues the run.
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
_RUN = (sys.executable, "-m", "mmkv_bench")


@dataclass(frozen=True, eq=False)
class Worker:
    """A process to start: command line, additional environment variables, and log file."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path


def launch_in_job(overrides: Sequence[str], requested: int) -> int:
    """Run one Slurm job of a sweep in several processes, one per device. Return the exit code.

    overrides: overrides of a run, which may name a shard.
    requested: number of devices that the job requested.

    Raises:
        ConfigError: the job sees no device, or an error of `launch`.
        Stopped: the job got a stop signal. The processes have stored their current samples.
    """
    visible = visible_devices("auto")[:requested]
    if not visible:
        raise ConfigError(
            f"this job requested {requested} GPUs but sees none "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}); check its node's driver and "
            "hydra.launcher.setup, or give model.device=cpu"
        )
    if len(visible) < requested:
        print(f"mmkv_bench: the job requested {requested} GPUs but sees {len(visible)}; it uses those", file=sys.stderr)
    with defer_stop_signals():
        return launch(overrides, job_devices=visible)


def launch(overrides: Sequence[str], processes: int | None = None, job_devices: Sequence[str] | None = None) -> int:
    """Generate one run's answers in several processes, then score them unless `stage=generate`. Return the exit code.

    Args:
        overrides: as for `mmkv-bench run`.
        processes: number of processes; None starts one per visible device.
        job_devices: devices of a Slurm job, whose overrides may name a shard. None uses this machine's devices.

    Raises:
        ConfigError: the configuration cannot run; the overrides have a shard or `stage=score`; or `processes` is None
            on a machine without devices.
    """
    from mmkv_bench.plan.validate import compose_checked

    for text in overrides:
        if text.partition("=")[0].lstrip("+") == "shard" and job_devices is None:
            raise ConfigError(
                f"{text}: launch divides the run itself; drop {text}, or run the shard with mmkv-bench run"
            )
    config = compose_checked(overrides)
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

        devices = visible_devices(config.model.device) if job_devices is None else list(job_devices)
        number_of_processes = _number_of_processes(processes, devices, spans_devices)
        plan = make_plan(config)
    store = Store(plan.out)
    coverage = plan.coverage(store)
    incomplete = [part for part in plan.parts if coverage.missing(part)]
    if incomplete:
        plan.check_device()
    for part in incomplete:  # once, before the processes start
        documents(part.spec, plan.limit)
    log_prefix = "process"
    if job_devices is not None:  # a name for this attempt of a job, unique among all that write to one folder
        job_id, restart_count = (os.environ.get(f"SLURM_{name}") for name in ("JOB_ID", "RESTART_COUNT"))
        log_prefix = f"job-{job_id or os.getpid()}-{restart_count or 0}-process"
    ordered_overrides = [*overrides, *_longest_first_override(plan)]
    exit_code_by_worker = run_all(
        workers(ordered_overrides, number_of_processes, devices, Path(config.out), spans_devices, log_prefix)
    )
    for worker, code in exit_code_by_worker.items():
        print(f"mmkv_bench: process {worker.name} ended with exit code {code}; see {worker.log}", file=sys.stderr)
    stopped_lines = _stopped_dataset_lines(exit_code_by_worker)
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


def _stopped_dataset_lines(failed: Mapping[Worker, int]) -> list[str]:
    """Return log lines about datasets that stopped early, if all failed processes have exit code 1; else none.

    failed: failed process to exit code.
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
    spread: bool = False,
    log_prefix: str = "process",
) -> list[Worker]:
    """Return the processes of a split run. This function does not start them.

    Args:
        overrides: overrides of the run.
        count: number of processes.
        devices: visible devices, assigned in turn. Without devices, the CPU cores are divided.
        out: result folder; logs go to its subfolder `logs`.
        spread: whether the model spans several devices (`model.device_map`).
        log_prefix: prefix of the log files' names, different for each job that writes to the folder.
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
        command = (*_RUN, *quiet_overrides, "stage=generate")
        new_workers.append(Worker(name, command, environment, out / "logs" / f"{log_prefix}-{index}-of-{count}.log"))
    return new_workers


def run_all(new_workers: Sequence[Worker]) -> dict[Worker, int]:
    """Start processes, serve samples to them, and wait until all have ended. Return the failed processes with their
    exit codes.

    The exit code of a process that a signal ended is negative. Each line of a process's stderr is printed after the
    process's name. After Ctrl-C or a stop signal (`signals.defer_stop_signals`), all processes are terminated and the exception
    is raised again.
    """
    running_processes, dispatcher = [], Dispatcher()
    for worker in new_workers:
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
        thread = threading.Thread(target=_print_with_name, args=(worker.name, process.stderr, log), daemon=True)
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
    """List this machine's devices as CUDA_VISIBLE_DEVICES does, or none if `setting` (`model.device`) is cpu."""
    if setting == "cpu":
        return []
    listed_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed_devices is not None:
        return [device for device in (part.strip() for part in listed_devices.split(",")) if device and device != "-1"]
    return [str(index) for index in range(devices.KINDS["cuda"].count())]


def _number_of_processes(processes: int | None, devices: Sequence[str], spread: bool) -> int:
    """Return `processes` if given, else the number of devices, or 1 for a model on several devices (`spread`)."""
    if processes is None and not devices:
        raise ConfigError(
            "this machine has no device, so the number of processes cannot be derived; give --processes N"
        )
    return processes or (1 if spread else len(devices))


def _longest_first_override(plan: Plan) -> list[str]:
    """Return an override that sorts the datasets by samples times maximum answer tokens, largest first."""
    if len(plan.parts) < 2:
        return []
    from mmkv_bench.plan.planner import longest_first

    tokens = {part.name: json.loads(part.cells[0].generation).get("max_new_tokens") or 1 for part in plan.parts}
    work_by_dataset = {part.name: float(len(part.samples) * tokens[part.name]) for part in plan.parts}
    return [f"dataset=[{','.join(longest_first(work_by_dataset))}]"]


def _print_with_name(name: str, lines: IO[str], log: IO[str]) -> None:
    for line in lines:
        log.write(line)
        log.flush()
        print(f"[{name}] {line}", end="", file=sys.stderr, flush=True)
