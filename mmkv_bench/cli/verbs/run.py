"""`mmkv-bench run` runs one configuration, `sweep` several, `launch` one in several processes; `score` only scores."""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from textwrap import indent, wrap
from typing import Any, NoReturn

from mmkv_bench import __version__
from mmkv_bench.cli.grammar import VERBS, overrides_of
from mmkv_bench.cli.main import discard_output, refusal, run_guarded
from mmkv_bench.config.files import groups, options
from mmkv_bench.config.schema import EFFICIENCY, SCHEMAS, RunConfig, keys
from mmkv_bench.errors import ConfigError, MMKVError, first_line
from mmkv_bench.secrecy import literal_secret


def usage() -> str:
    """Return the text of `mmkv-bench run --help`: groups with their options, keys, flags and examples."""
    lines = [
        f"mmkv_bench {__version__}: what KV-cache compression costs multimodal models, in counted budgets.",
        "",
        "usage: mmkv-bench [run] [group=choice ...] [key=value ...] [flags]     (or: python -m mmkv_bench ...)",
        "",
        "groups (group=choice, 'group=[a,b]' where several are taken)",
    ]
    help_entry = VERBS["run"]["help"]
    for group in dict.fromkeys([*help_entry["groups"], *groups()]):
        lines += [
            f"  {group:<12}{help_entry['groups'].get(group, '')}",
            indent("\n".join(wrap(", ".join(options(group)), 96)), " " * 14),
        ]
    for name, title in help_entry["keys"].items():
        lines += ["", title]
        for key, (text, allowed) in keys(SCHEMAS[name]).items():
            allowed_text = allowed if isinstance(allowed, str) else " | ".join(allowed)
            lines.append(f"  {key:<18}{text}" + (f" [{allowed_text}]" if allowed_text else ""))
    return "\n".join([*lines, "", help_entry["end"]])


def run(given: argparse.Namespace) -> int:
    """Run a configuration, or print it. Return the exit code."""
    overrides = overrides_of(given)
    if given.cfg or given.info or given.resolve or given.package:
        from mmkv_bench.config.compose import print_composed

        print_composed(overrides, given.cfg, given.info, given.package, given.resolve)
        return 0
    return run_sweep(overrides) if given.multirun else run_once(overrides)


def run_once(overrides: Sequence[str]) -> int:
    """Run one configuration and return its exit code.

    Raises:
        ConfigError: a configuration that cannot run.
        MMKVError: also if the output was closed before the end.
    """
    from mmkv_bench.run.progress import waiting

    with waiting("reading the configuration"):
        from mmkv_bench.plan.validate import compose_checked, refuse_missing_requirements

        _refuse_keys_of_hydra(overrides)
        config = compose_checked(overrides)
        refuse_missing_requirements(config.answering, config.stage, config.out)
        remedy = "write `mmkv-bench plan` for what a run would do, or `mmkv-bench sweep launcher=slurm`"
        _refuse_keys_of_slurm(config.shards, config.dry, remedy)
    return _carry_out(config)


def _carry_out(config: RunConfig) -> int:
    from mmkv_bench.run.progress import waiting

    with waiting("loading", log=True):  # after the checks, so that a mistake stays one sentence in logs too
        if config.scenario == EFFICIENCY:
            from mmkv_bench.efficiency.run import run
        else:
            from mmkv_bench.run.run import run
    try:
        return run(config)
    except BrokenPipeError:
        discard_output()
        raise MMKVError(
            "the output was closed before the run's end; run the same command again to continue, with its output to a "
            "file or a terminal"
        ) from None


def _refuse_keys_of_hydra(overrides: Sequence[str]) -> None:
    """Raise ConfigError for settings `hydra.*` that only jobs on Slurm read."""
    from mmkv_bench.config.compose import for_hydra

    for text in for_hydra(overrides):
        if text.lstrip("+~").startswith("hydra.") and "searchpath" not in text:
            raise ConfigError(
                f"{text} only affects jobs on Slurm; write it with `mmkv-bench sweep launcher=slurm`, or leave it out"
            )


def _refuse_keys_of_slurm(shards: int, dry: bool, remedy: str) -> None:
    """Raise ConfigError for `shards` and `dry`, which only jobs on Slurm read. remedy: end of the message."""
    for key, changed in (("shards", shards != 1), ("dry", dry)):
        if changed:
            raise ConfigError(f"{key} only affects a sweep on Slurm; {remedy}, or drop it")


# ---------------------------------------------------------------------- sweep
def sweep(given: argparse.Namespace) -> int:
    """Check the configuration of every job of a sweep, then run all. Return the highest exit code."""
    return run_sweep(overrides_of(given))


def run_sweep(overrides: Sequence[str]) -> int:
    """Run the jobs of a sweep, here one after another or on Slurm. Return the highest exit code."""
    from mmkv_bench.config.compose import launcher_of
    from mmkv_bench.plan.validate import compose_checked_jobs

    if (secret := literal_secret(overrides)) is not None:
        raise ConfigError(
            f"{secret} is given in plain text, which the sweep's jobs and scripts would store; name an "
            f"environment variable instead: '{secret}=${{oc.env:NAME}}'"
        )
    jobs = compose_checked_jobs(overrides)
    first_overrides, config = jobs[0]
    launcher = launcher_of(first_overrides)
    launcher_class = str(launcher["_target_"]).rpartition(".")[2]
    on_slurm = launcher_class == "SlurmLauncher"
    if not on_slurm and launcher_class != "BasicLauncher":
        raise ConfigError(
            f"{launcher_class} is not a launcher of this package; allowed: launcher=local or slurm; give one of them"
        )
    if not on_slurm:
        _refuse_keys_of_hydra(first_overrides)
        _refuse_keys_of_slurm(config.shards, False, "add launcher=slurm")
    if config.dry:
        return _print_sweep(overrides, jobs, launcher if on_slurm else None)
    if not on_slurm:
        return _sweep_here(jobs)
    from mmkv_bench.slurm.sweep import sweep as submit

    return submit(jobs, launcher, SlurmJob)


def _sweep_here(jobs: Sequence[tuple[list[str], RunConfig]]) -> int:
    """Run all jobs (overrides, configuration) in this process, also after a failure. Return the highest exit code."""
    print(f"mmkv_bench: {len(jobs)} jobs", file=sys.stderr)
    failures: list[tuple[str, int, str]] = []
    for words, config in jobs:
        try:
            exit_code, sentence = _carry_out(config), "see its messages above"
        except Exception as error:  # noqa: BLE001 - the other jobs run; the exception is dropped, since it holds the model
            sentence_and_code = refusal(error)
            if sentence_and_code is None:
                traceback.print_exc()
            sentence, exit_code = sentence_and_code or (first_line(error), 1)
        if exit_code:
            failures.append((" ".join(words) or "(defaults)", exit_code, sentence))
    for name, exit_code, sentence in failures:
        print(f"mmkv_bench: job {name} failed with exit code {exit_code}: {sentence}", file=sys.stderr)
    return max([exit_code for _, exit_code, _ in failures], default=0)


def _print_sweep(
    overrides: Sequence[str], jobs: Sequence[tuple[list[str], RunConfig]], launcher: Mapping[str, Any] | None
) -> int:
    """Print each job's plan and the number of prefills, and for Slurm the scripts, without opening data. Return 0."""
    from mmkv_bench.cli.verbs.plan import print_plan
    from mmkv_bench.config.compose import compose, expand_sweep, forked
    from mmkv_bench.forecast.forecast import prefills
    from mmkv_bench.plan.planner import outline
    from mmkv_bench.slurm.sweep import dry
    from mmkv_bench.store.store import Store

    plans = [outline(config) for _, config in jobs] if launcher is None else dry(jobs, launcher)
    for plan in plans:
        print()
        print_plan(plan, launcher)
    prefills_per_job = [prefills(plan, plan.coverage(Store(plan.out))) for plan in plans]
    print(f"\nprefills   {sum(prefills_per_job):,} prompts in {len(jobs)} run{'s' * (len(jobs) > 1)}")
    overrides_with_lists = forked(overrides)
    if overrides_with_lists != list(overrides):
        plans_with_lists = [outline(compose(job)) for job in expand_sweep(overrides_with_lists)]
        shared_prefills = sum(prefills(plan, plan.coverage(Store(plan.out))) for plan in plans_with_lists)
        changed_overrides = " ".join(shlex.quote(text) for text in overrides_with_lists if text not in overrides)
        print(
            f"           {shared_prefills:,} with lists in place of comma lists, whose runs share them: {changed_overrides}"
        )
    return 0


# ---------------------------------------------------------------------- launch, score
def launch(given: argparse.Namespace) -> int:
    """Generate answers in several processes, then score once. Return the exit code."""
    from mmkv_bench.run.launch import launch

    for text in given.overrides:
        if text.startswith("processes="):
            raise ConfigError(f"{text} is not a setting but a flag; write --processes {text.partition('=')[2]}")
    return launch(overrides_of(given), given.processes)


def score(given: argparse.Namespace) -> int:
    """Score answers without a current score, and print the tables. Return the exit code."""
    overrides = overrides_of(given)
    for text in overrides:
        if text.partition("=")[0].lstrip("+") == "stage" and text.partition("=")[2] != "score":
            raise ConfigError(f"{text}: `score` generates nothing; drop {text}, or use `mmkv-bench run`")
    return run_once([*overrides, "stage=score"])


# ---------------------------------------------------------------------- a job on Slurm
_REQUEUE_SIGNALS = (signal.SIGUSR2, signal.SIGUSR1)


@dataclass(frozen=True)
class SlurmJob:
    """A Slurm job that does one run; submitit calls it on its node.

    A stop signal ends the job between two samples and queues it again, to continue at the first missing sample.

    Attributes:
        overrides: the run's overrides of the configuration.
        devices: number of requested GPUs, one process each; 1 means one process.
    """

    overrides: tuple[str, ...]
    devices: int = 1

    def __call__(self) -> None:
        """Run the configuration. A failure becomes the exit code of the job."""
        exit_code = run_guarded(self.overrides, self._work)
        if exit_code:
            sys.exit(exit_code)

    def checkpoint(self) -> Any:
        """Return the submission that submitit queues again after a stop: the same job."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    def _work(self, overrides: Sequence[str]) -> int:
        from mmkv_bench.signals import Stopped
        from mmkv_bench.slurm.submission import ASK

        requeue_handler = _bind_signals()
        try:
            if self.devices > 1:
                from mmkv_bench.run.launch import launch_in_job

                return launch_in_job(overrides, self.devices)
            return run_once(overrides)
        except Stopped as stop:
            is_wanted = _is_running() if stop.signal == signal.SIGTERM else True
            clause_by_wanted = {
                True: ", to be queued again",
                False: ", not queued again, since it was cancelled",
                None: "; whether it was cancelled or preempted cannot be asked from this node",
            }
            print(f"mmkv_bench: ended by {stop} after the current sample{clause_by_wanted[is_wanted]}", file=sys.stderr)
            if is_wanted:
                requeue_handler(signal.SIGUSR2, None)
            return ASK if is_wanted is None else 128 + stop.signal


def _bind_signals() -> Callable[[int, Any], NoReturn]:
    """Make both user signals (USR1, USR2) queue the job again. Return the signal handler.

    submitit binds only one of these signals; the other would end the job.
    """
    submitit_handler = next(
        (handler for number in _REQUEUE_SIGNALS if callable(handler := signal.getsignal(number))), None
    )
    requeue_handler = partial(_queue_again, submitit_handler)
    for number in _REQUEUE_SIGNALS:
        signal.signal(number, requeue_handler)
    return requeue_handler


def _queue_again(submitits: Callable[[int, Any], Any] | None, number: int, frame: Any) -> NoReturn:
    """Queue the job again by submitit's signal handler, and end the process.

    In an image without scontrol, the exit code makes the job's script queue it again.
    """
    from mmkv_bench.slurm.submission import REQUEUE

    if submitits is not None and shutil.which("scontrol") is not None:
        submitits(number, frame)
    sys.exit(REQUEUE)


def _is_running() -> bool | None:
    """Tell whether Slurm still lists this job as running; None if Slurm cannot be asked.

    After TERM, a running job was preempted and any other job was cancelled.
    """
    from submitit.slurm.slurm import SlurmJobEnvironment

    from mmkv_bench.slurm.queue import ask

    # A task of an array is asked by its own name: the array's id is one task's number too, and squeue lists all tasks for it.
    answer = ask(["squeue", "-h", "-j", SlurmJobEnvironment().job_id, "-o", "%T"], 10)
    return None if answer is None or answer.returncode else answer.stdout.strip() == "RUNNING"
