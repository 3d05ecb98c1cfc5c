"""One run of one configuration, for `run` on this machine and for every job of a sweep on its node."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from mmkv_bench.cli.main import closed_output, guarded
from mmkv_bench.config.schema import EFFICIENCY
from mmkv_bench.errors import ConfigError, MMKVError

_AGAIN = (signal.SIGUSR2, signal.SIGUSR1)


def run_once(overrides: list[str]) -> int:
    """Run one configuration and return its exit code.

    Raises:
        ConfigError: a configuration that cannot run.
        MMKVError: also if the output was closed before the end.
    """
    from mmkv_bench.run.progress import waiting

    with waiting("reading the configuration"):
        from mmkv_bench.config.compose import compose, for_hydra
        from mmkv_bench.plan.validate import refuse_absent, validate

        for text in for_hydra(overrides):
            if text.lstrip("+~").startswith("hydra.") and "searchpath" not in text:
                raise ConfigError(
                    f"{text} only affects jobs on Slurm; write it with `mmkv-bench sweep launcher=slurm`, or "
                    "leave it out"
                )
        config = compose(overrides)
        validate(config)
        refuse_absent(config.answering, config.stage, config.out)
        refuse_keys_of_slurm(
            config.shards,
            config.dry,
            "write `mmkv-bench plan` for what a run would do, or `mmkv-bench sweep launcher=slurm`",
        )
    with waiting("loading", log=True):  # after the checks, so that a mistake stays one sentence in logs too
        if config.scenario == EFFICIENCY:
            from mmkv_bench.efficiency.run import run
        else:
            from mmkv_bench.run.run import run
    try:
        return run(config)
    except BrokenPipeError:
        closed_output()
        raise MMKVError(
            "the output was closed before the run's end; run the same command again to continue, with its output to a "
            "file or a terminal"
        ) from None


def refuse_keys_of_slurm(shards: int, dry: bool, remedy: str) -> None:
    """Refuse keys that a run on this machine would ignore."""
    for key, changed in (("shards", shards != 1), ("dry", dry)):
        if changed:
            raise ConfigError(f"{key} only affects a sweep on Slurm; {remedy}, or drop it")


# ---------------------------------------------------------------------- a job on Slurm
@dataclass(frozen=True)
class SlurmJob:
    """One run, called by submitit on its node.

    A stop signal ends it between two samples and queues it again. It then continues at the first missing sample.

    Attributes:
        overrides: the run's overrides of the configuration.
        devices: number of requested GPUs, one process each; 1 means one process.
    """

    overrides: tuple[str, ...]
    devices: int = 1

    def __call__(self) -> None:
        """Run the configuration. A failure becomes the exit code of the job."""
        code = guarded(self.overrides, self._work)
        if code:
            sys.exit(code)

    def checkpoint(self) -> Any:
        """Return the submission that replaces this job. It is the same job, because rows show what is missing."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    def _work(self, overrides: Sequence[str]) -> int:
        from mmkv_bench.run.stopping import Stopped
        from mmkv_bench.slurm.submission import ASK

        again = _bound()
        try:
            if self.devices > 1:
                from mmkv_bench.run.launch import launch_in_job

                return launch_in_job(overrides, self.devices)
            return run_once(list(overrides))
        except Stopped as stop:
            wanted = _wanted() if stop.signal == signal.SIGTERM else True
            goes_on = {
                True: ", to be queued again",
                False: ", not queued again, since it was cancelled",
                None: "; whether it was cancelled or preempted cannot be asked from this node",
            }
            print(f"mmkv_bench: ended by {stop} after the current sample{goes_on[wanted]}", file=sys.stderr)
            if wanted:
                again(signal.SIGUSR2, None)
            return ASK if wanted is None else 128 + stop.signal


def _bound() -> Callable[[int, Any], NoReturn]:
    """Make both user signals queue the job again, even while a model is loaded or answers are scored. Return the handler.

    submitit binds only one of these signals; the other would just end the job.
    """
    submitits = next((found for number in _AGAIN if callable(found := signal.getsignal(number))), None)
    again = partial(_queue_again, submitits)
    for number in _AGAIN:
        signal.signal(number, again)
    return again


def _queue_again(submitits: Callable[[int, Any], Any] | None, number: int, frame: Any) -> NoReturn:
    """Call submitit's handler, which queues the job again and ends the process. If it cannot, in an image without scontrol,
    the exit code makes the job's script queue it again."""
    from mmkv_bench.slurm.submission import REQUEUE

    if submitits is not None and shutil.which("scontrol") is not None:
        submitits(number, frame)
    sys.exit(REQUEUE)


def _wanted() -> bool | None:
    """Tell whether Slurm lists this job as running: then TERM means preemption; otherwise the job was cancelled. Return None
    if Slurm cannot be asked, as in an image."""
    from submitit.slurm.slurm import SlurmJobEnvironment

    from mmkv_bench.slurm.queue import ask

    # A task of an array is asked by its own name: the array's id is one task's number too, and squeue lists all tasks for it.
    answer = ask(["squeue", "-h", "-j", SlurmJobEnvironment().job_id, "-o", "%T"], 10)
    return None if answer is None or answer.returncode else answer.stdout.strip() == "RUNNING"
