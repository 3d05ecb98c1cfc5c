"""One job of a sweep on Slurm, as submitit calls it on its node."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from mmkv_bench.cli.guard import guarded

_AGAIN = (signal.SIGUSR2, signal.SIGUSR1)


@dataclass(frozen=True)
class SlurmJob:
    """One run. A stop signal ends it between two samples and queues it again; it then continues at the first missing one.

    Attributes:
        overrides: of the run. devices: GPUs that it asked for, each for a process of its own; 1: the run is one process.
    """

    overrides: tuple[str, ...]
    devices: int = 1

    def __call__(self) -> None:
        """Run; a failure is the exit code of the job."""
        code = guarded(self.overrides, self._work)
        if code:
            sys.exit(code)

    def checkpoint(self) -> Any:
        """The submission in this job's place: the same, since rows say what is left."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    def _work(self, overrides: Sequence[str]) -> int:
        from mmkv_bench.cli.single_run import run_once
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
                None: "; whether it was cancelled or preempted cannot be asked from here",
            }
            print(f"mmkv_bench: ended by {stop} after the sample in flight{goes_on[wanted]}", file=sys.stderr)
            if wanted:
                again(signal.SIGUSR2, None)
            return ASK if wanted is None else 128 + stop.signal


def _bound() -> Callable[[int, Any], NoReturn]:
    """Both user signals queue the job again, also where no sample is in flight: while a model is loaded, while answers are
    scored. submitit binds one of them only; the other one would just end the job. Returns what they call."""
    submitits = next((found for number in _AGAIN if callable(found := signal.getsignal(number))), None)
    again = partial(_queue_again, submitits)
    for number in _AGAIN:
        signal.signal(number, again)
    return again


def _queue_again(submitits: Callable[[int, Any], Any] | None, number: int, frame: Any) -> NoReturn:
    """Hand over to submitit's handler, which queues the job again and ends the process; where it cannot, in an image
    without scontrol, the exit code tells the job's script to."""
    from mmkv_bench.slurm.submission import REQUEUE

    if submitits is not None and shutil.which("scontrol") is not None:
        submitits(number, frame)
    sys.exit(REQUEUE)


def _wanted() -> bool | None:
    """Tell whether Slurm still has this job as running: TERM says preempted then, after scancel the job is on its way out. None
    where it cannot be asked, as in an image."""
    from submitit.slurm.slurm import SlurmJobEnvironment

    # A task of an array by its own name: by the array's id, which is one task's number, too, squeue lists all of them.
    command = ["squeue", "-h", "-j", SlurmJobEnvironment().job_id, "-o", "%T"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if answer.returncode else answer.stdout.strip() == "RUNNING"
