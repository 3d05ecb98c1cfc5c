"""One job of a sweep on Slurm, as submitit calls it on its node."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmkv_bench.cli.guard import guarded


@dataclass(frozen=True)
class Job:
    """One run. A stop signal ends it between two samples and queues it again; it then continues at the first missing one.

    Attributes:
        overrides: of the run.
    """

    overrides: tuple[str, ...]

    def __call__(self) -> None:
        """Run; a failure is the exit code of the job."""
        code = guarded(self.overrides, self._work)
        if code:
            sys.exit(code)

    def checkpoint(self) -> Any:
        """What submitit submits in this job's place: the same, since rows say what is left."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    def _work(self, overrides: Sequence[str]) -> int:
        from mmkv_bench.cli.once import once
        from mmkv_bench.run.stopping import Stopped

        try:
            return once(list(overrides))
        except Stopped as stop:
            again = stop.signal != signal.SIGTERM or _wanted()
            goes_on = "to be queued again" if again else "not queued again, since it was cancelled"
            print(f"mmkv_bench: ended by {stop} after the sample in flight, {goes_on}", file=sys.stderr)
            return _queue_again() if again else 128 + stop.signal


def _wanted() -> bool:
    """Whether Slurm still has this job as running: TERM says preempted then, after scancel the job is on its way out."""
    squeue = shutil.which("squeue")
    if squeue is None:
        return False
    asked = [squeue, "-h", "-j", os.environ.get("SLURM_JOB_ID", ""), "-o", "%T"]
    told = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=10)
    return told.stdout.strip() == "RUNNING"


def _queue_again() -> int:
    """Hand over to submitit's handler, which queues the job again and ends the process; where it cannot, in an image
    without scontrol, the exit code tells the job's script to."""
    from mmkv_bench.cluster.submission import REQUEUE

    handler = signal.getsignal(signal.SIGUSR2)
    if shutil.which("scontrol") is None or not callable(handler):
        return REQUEUE
    handler(signal.SIGUSR2, None)
    return REQUEUE
