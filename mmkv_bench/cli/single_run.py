"""One run of one configuration: what `run` does here, and every job of a sweep on its node."""

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
        ConfigError: a configuration that cannot run; MMKVError: also an output that was closed before the end.
    """
    from mmkv_bench.run.progress import waiting

    with waiting("reading the configuration"):
        from mmkv_bench.config.compose import compose, for_hydra
        from mmkv_bench.plan.validate import refuse_absent, validate

        for text in for_hydra(overrides):
            if text.lstrip("+~").startswith("hydra.") and "searchpath" not in text:
                raise ConfigError(
                    f"{text} only matters to jobs on Slurm; write it with `mmkv-bench sweep launcher=slurm`, or leave it out"
                )
        config = compose(overrides)
        validate(config)
        refuse_absent(config.answering, config.stage, config.out)
        refuse_keys_of_slurm(
            config.shards,
            config.dry,
            "write `mmkv-bench plan` for what a run would do, or `mmkv-bench sweep launcher=slurm`",
        )
    with waiting("loading", log=True):  # not before: a mistake in the words above stays one sentence, in logs too
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
    """Refuse keys that a run here would ignore."""
    for key, changed in (("shards", shards != 1), ("dry", dry)):
        if changed:
            raise ConfigError(f"{key} only matters to a sweep on Slurm; {remedy}, or drop it")


# ---------------------------------------------------------------------- a job on Slurm
@dataclass(frozen=True)
class SlurmJob:
    """One run, as submitit calls it on its node.

    A stop signal ends it between two samples and queues it again; it then continues at the first missing one.

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

    from mmkv_bench.slurm.queue import ask

    # A task of an array by its own name: by the array's id, which is one task's number, too, squeue lists all of them.
    answer = ask(["squeue", "-h", "-j", SlurmJobEnvironment().job_id, "-o", "%T"], 10)
    return None if answer is None or answer.returncode else answer.stdout.strip() == "RUNNING"
