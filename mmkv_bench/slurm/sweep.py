"""A sweep on Slurm: submit jobs for missing answers, wait, score and print tables.

A job belongs to one run and shard, and to one dataset or several short ones. It answers with all methods, budgets and
seeds of the run, from shared prefills.

Only stored rows decide, never Slurm's state of a job. So the same command continues a sweep that was killed or whose
nodes failed, even with another number of shards.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmkv_bench.config.schema import EFFICIENCY, RunConfig, Slurm
from mmkv_bench.errors import ConfigError
from mmkv_bench.evaluation.documents import sample_refs
from mmkv_bench.forecast.throughput import rates
from mmkv_bench.plan.plan import DatasetShare, Plan
from mmkv_bench.plan.planner import index_of, make_plan, outline
from mmkv_bench.plan.stale_answers import changed_answers, other_versions
from mmkv_bench.run.progress import waiting
from mmkv_bench.slurm import checks, queue, submission
from mmkv_bench.store import store_notes
from mmkv_bench.store.store import Store

Job = Callable[[tuple[str, ...], int], Callable[[], None]]
"""A function from a run's overrides and its number of GPUs (one process each) to the function that a job calls. This
function must be picklable and belong to a module that jobs can import."""


Requests = dict[str, tuple[Mapping[str, Any], int]]
"""Model to `hydra.launcher` of its jobs, and the number of processes of each."""

_SRUN_END_LINE = re.compile(r"srun: error: .*: tasks? .*: Exited with exit code \d+$|srun: Terminating StepId=")
"""Lines of srun after the last output of a failed program."""
_SWEEP_KEYS = ("launcher", "shards", "dry", "json", "only", "shard", "stage")
"""Keys that a sweep reads or sets itself."""


@dataclass(frozen=True)
class SweepJob:
    """One Slurm job of a sweep: the overrides of its run, its model, its datasets and its shard."""

    overrides: tuple[str, ...]
    model: str
    datasets: tuple[str, ...]
    shard: str

    @property
    def subjects(self) -> list[str]:
        """Names of what the job works on. Two jobs that may answer the same samples have a name in common."""
        return [f"{self.model} {dataset}" for dataset in self.datasets]

    def __str__(self) -> str:
        return f"{self.model} {', '.join(self.datasets)}" + ("" if self.shard == "0/1" else f" shard {self.shard}")


@dataclass(frozen=True)
class Run:
    """One run of a sweep: overrides, plan, store, shards of each dataset, and the maximum hours of a job with
    several datasets."""

    overrides: Sequence[str]
    plan: Plan
    store: Store
    shards: int
    job_hours: float

    @classmethod
    def all(cls, jobs: Sequence[tuple[list[str], RunConfig]], plan: Callable[[RunConfig], Plan]) -> list[Run]:
        """Return the runs of a sweep. jobs: (overrides, configuration) each. plan: maps a configuration to its plan."""
        plans = [plan(config) for _, config in jobs]
        return [
            cls(words, made, Store(made.out), config.shards, config.slurm.job_hours)
            for (words, config), made in zip(jobs, plans, strict=True)
        ]

    def missing(self, opened: bool = True) -> list[SweepJob]:
        """Return the jobs for samples that lack an answer in some cell (method at a budget). Scores alone need no job.

        opened: whether data may be opened. If not, answers to changed prompts count as done, and every shard gets a
        job.
        """
        plan = self.plan.with_changed(changed_answers(self.plan, self.store)[0]) if opened else self.plan
        coverage, slurm_prefixes = plan.coverage(self.store), ("slurm.", "hydra.launcher.", "hydra.sweep.", "hydra/")
        keys = [(text.partition("=")[0].lstrip("+~"), text) for text in self.overrides]
        run_overrides = [text for key, text in keys if key not in _SWEEP_KEYS and not key.startswith(slurm_prefixes)]
        # Scores are for whole datasets. If jobs have only parts of a dataset, the sweep itself scores at its end.
        stage = "generate" if self.shards > 1 else plan.stage
        missing_shards: list[tuple[DatasetShare, int]] = []
        for part in plan.parts:
            samples_to_answer = {
                part.samples[place] for place in np.flatnonzero(~coverage.answered(part).all(0)).tolist()
            }
            missing_shards += [
                (part, index) for index in sorted(_shards(part, samples_to_answer, plan, self.shards, opened))
            ]
        hours_by_dataset: dict[str, float] = {}  # for one shard, at the rate of stored rows
        if len(plan.parts) > 1 and self.job_hours:
            known_hours = {rate.dataset: rate.hours for rate in rates(plan, coverage, self.store)}
            hours_by_dataset = {
                dataset: whole / self.shards for dataset, whole in known_hours.items() if whole is not None
            }
        sweep_jobs = []
        for index, parts in _group_datasets(missing_shards, hours_by_dataset, self.job_hours):
            dataset_names, shard = [part.name for part in parts], f"{index}/{self.shards}"
            only_value = dataset_names[0] if len(dataset_names) == 1 else f"[{','.join(dataset_names)}]"
            job_overrides = (f"only={only_value}", f"shard={shard}", f"stage={stage}", "shards=1", "dry=false")
            sweep_jobs.append(
                SweepJob(
                    (*run_overrides, *job_overrides), plan.model.name, tuple(part.dataset for part in parts), shard
                )
            )
        return sweep_jobs


def sweep(jobs: Sequence[tuple[list[str], RunConfig]], launcher: Mapping[str, Any], job: Job) -> int:
    """Submit the missing work of a sweep to Slurm, wait, score and print tables. Return 0, or 1 if something is missing
    or failed.

    Args:
        jobs: the runs (overrides, configuration), checked.
        launcher: `hydra.launcher`.
        job: makes the object that submitit calls on a node (see `Job`).

    Raises:
        ConfigError: something cannot be submitted.
    """
    requests = _requests(jobs, launcher)
    checks.check_here()
    for folder in {Path(config.out).expanduser() for _, config in jobs}:
        Store(folder).check_writable()
        checks.check_folder(folder)
    with waiting("planning"):
        runs = Run.all(jobs, make_plan)
    for note in dict.fromkeys(note for run in runs for note in other_versions(run.plan, run.store)):
        _say(note)
    config, folder = jobs[0][1], Path(str(launcher["submitit_folder"])).absolute()
    while "%" in folder.name:
        folder = folder.parent  # of all jobs' folders: the list of submitted jobs is there
    subjects = {f"{run.plan.model.name} {part.dataset}" for run in runs for part in run.plan.parts}
    while True:
        with queue.sweep_lock(folder):
            earlier_jobs = queue.require_queued_jobs(queue.jobs_of_earlier_sweeps(folder, subjects))
            submitted_jobs = {} if earlier_jobs else _submit(runs, requests, launcher, config.slurm, folder, job)
        if not earlier_jobs:
            break
        _say(f"waiting for jobs of an earlier sweep in this folder: {' '.join(sorted(earlier_jobs))}")
        queue.wait_for(earlier_jobs)
    if submitted_jobs:
        array_ids = " ".join(dict.fromkeys(name.partition("_")[0] for name in submitted_jobs))
        _say(f"{len(submitted_jobs)} jobs submitted ({array_ids}); their logs are in {folder}")
    if submitted_jobs and not config.slurm.wait:
        _say("the same command, or mmkv-bench score, scores when they are done")
        return 0
    queue.wait_for(submitted_jobs)
    for run in runs:
        store_notes.forget_planned(run.store, _samples_by_cell(run))
    return _finish(runs, submitted_jobs, Path(str(launcher["submitit_folder"])).absolute())


def _submit(
    runs: Sequence[Run], requests: Requests, launcher: Mapping[str, Any], slurm: Slurm, folder: Path, job: Job
) -> dict[str, SweepJob]:
    """Submit the missing jobs of all runs, array by array, and record them in the folder. Return job id -> job.

    requests: what each model's jobs request from Slurm.

    Raises the errors of `submission.submit`.
    """
    missing_jobs = [piece for run in runs for piece in run.missing()]
    largest_array = submission.largest_array() if missing_jobs else 1
    executor_and_jobs = [
        (submission.executor(own, slurm, runs[0].plan.out), pieces_of[start : start + largest_array])
        for own, pieces_of in _by_requests(missing_jobs, requests)
        for start in range(0, len(pieces_of), largest_array)
    ]
    calls_of_arrays = [
        (made, [job(piece.overrides, requests[piece.model][1]) for piece in ours]) for made, ours in executor_and_jobs
    ]
    job_by_id: dict[str, SweepJob] = {}
    accepted_ids = submission.submit(calls_of_arrays, int(launcher["array_parallelism"]))
    for (_, pieces_of), names in zip(executor_and_jobs, accepted_ids, strict=True):
        new_jobs = dict(zip(names, pieces_of, strict=True))
        queue.record_jobs(folder, {name: piece.subjects for name, piece in new_jobs.items()})
        for run in runs if not job_by_id else ():  # after the submission, because refused jobs are not planned
            store_notes.note_planned(run.store, _samples_by_cell(run))
        job_by_id |= new_jobs
    return job_by_id


def dry(jobs: Sequence[tuple[list[str], RunConfig]], launcher: Mapping[str, Any]) -> list[Plan]:
    """Print the scripts for the missing work, and each job's run, without Slurm. Return the plans of the runs.

    The plans are those that are known without data. Raises the errors of `sweep` that need no Slurm.
    """
    requests = _requests(jobs, launcher)
    runs = Run.all(jobs, outline)
    missing_jobs = [piece for run in runs for piece in run.missing(opened=False)]
    for own, pieces_of in _by_requests(missing_jobs, requests) or [(launcher, [])]:
        print(submission.executor(own, jobs[0][1].slurm, runs[0].plan.out).script(max(1, len(pieces_of))).rstrip())
        number_of_gpus = max([requests[piece.model][1] for piece in pieces_of], default=1)
        processes_clause = f", by a process for each of {number_of_gpus} GPUs," if number_of_gpus > 1 else ""
        print(f"\n# {len(pieces_of)} jobs; each runs mmkv-bench{processes_clause} with")
        for place, piece in enumerate(pieces_of):
            print(f"# {place}: {piece}: {shlex.join(piece.overrides)}")
    return [run.plan for run in runs]


def _requests(jobs: Sequence[tuple[list[str], RunConfig]], launcher: Mapping[str, Any]) -> Requests:
    """Return what each model's jobs request from Slurm. Raises the errors of `_check` and `checks.check_launcher`."""
    checks.check_launcher(launcher)
    requests: Requests = {}
    for _, config in jobs:
        _check(config.scenario, config.stage, config.shard)
        launcher_of_model = submission.launcher_of_model(launcher, config.slurm.models, config.model.name)
        checks.check_launcher(launcher_of_model)
        requests[config.model.name] = launcher_of_model, checks.devices_of(launcher_of_model, config.model)
    return requests


def _by_requests(todo: Sequence[SweepJob], requests: Requests) -> list[tuple[Mapping[str, Any], list[SweepJob]]]:
    """Group jobs by their requests to Slurm, because an array has one. Return (request, jobs) per group."""
    group_by_request: dict[str, tuple[Mapping[str, Any], list[SweepJob]]] = {}
    for piece in todo:
        launcher_of_model, _ = requests[piece.model]
        group_by_request.setdefault(repr(launcher_of_model), (launcher_of_model, []))[1].append(piece)
    return [*group_by_request.values()]


def _samples_by_cell(run: Run) -> dict[str, tuple[str, int]]:
    """Map the hash of each cell of a run to (dataset, number of samples)."""
    return {cell.cell: (part.dataset, len(part.samples)) for part in run.plan.parts for cell in part.cells}


def _say(sentence: str) -> None:
    print(f"mmkv_bench: {sentence}", file=sys.stderr)


def _finish(runs: Sequence[Run], ids: dict[str, SweepJob], folder: Path) -> int:
    """Score the stored answers, print tables, and report missing samples, even if scoring fails. Return the exit code.

    Raises the errors of `carry_out`.

    ids: job id -> job.
    folder: the folder of the jobs' logs.
    """
    from mmkv_bench.run.run import carry_out

    missing_subjects = {subject for run in runs for piece in run.missing() for subject in piece.subjects}
    exit_code = int(bool(missing_subjects))
    try:
        for run in runs:
            coverage = run.plan.coverage(run.store)
            if run.plan.stage != "generate" and any(coverage.count(part) for part in run.plan.parts):
                exit_code = max(exit_code, carry_out(run.plan.at_stage("score")))
    finally:
        for name, piece in ids.items():
            if missing_subjects.intersection(piece.subjects):
                _say(f"job {name} ({piece}): {_last_words(submission.log_of(folder, name))}")
        retry_statuses = list(dict.fromkeys(status for run in runs for status in run.plan.retry))
        retry_clause = f", or still have rows to repeat by retry=[{','.join(retry_statuses)}]" if retry_statuses else ""
        if missing_subjects:
            subjects_text = ", ".join(sorted(missing_subjects))
            _say(f"samples of {subjects_text} are missing{retry_clause}; run the same command again to continue")
    return exit_code


def _last_words(log: Path) -> str:
    """Return the last message in a job's log, or a sentence if it has no log."""
    try:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return (
            f"it left no log at {log}: its node does not see this folder, or Slurm never started it; give an out "
            "that all nodes mount, and see `scontrol show job`"
        )
    lines = [line for line in lines if not _SRUN_END_LINE.match(line)]
    message_lines = [line for line in lines if line.startswith(("mmkv_bench: ", "slurmstepd: ", "srun: "))]
    last_message = (message_lines or lines or ["it said nothing"])[-1].removeprefix("mmkv_bench: ")
    return f"{last_message[:300]}; see {log}"


# ---------------------------------------------------------------------- the jobs that a sweep still has to do
def _check(scenario: str, stage: str, shard: str) -> None:
    """Raise ConfigError for settings that a sweep on Slurm cannot split."""
    if scenario == EFFICIENCY:
        raise ConfigError(
            "scenario=efficiency times its cells one after another in one process; allowed with launcher=slurm: "
            "scenario=quality; run it with mmkv-bench run inside a job"
        )
    if stage == "score":
        raise ConfigError(
            "stage=score needs only one process; allowed with launcher=slurm: both, generate; use "
            "mmkv-bench run for stage=score"
        )
    if shard != "0/1":
        raise ConfigError(f"shard={shard}: a sweep makes the shards itself; give shards=<number>")


def _group_datasets(
    missing_shards: Sequence[tuple[DatasetShare, int]], hours: Mapping[str, float], most: float
) -> list[tuple[int, list[DatasetShare]]]:
    """Group datasets of the same shard into jobs of at most `most` hours, in order. Return (shard, datasets) per job.

    A dataset with unknown hours gets its own job.

    missing_shards: pairs (dataset, shard).
    hours: dataset to its hours per shard.
    """
    jobs: list[tuple[int, list[DatasetShare]]] = []
    open_job_by_shard: dict[int, tuple[list[DatasetShare], float]] = {}
    for part, index in missing_shards:
        hours_of_dataset = hours.get(part.dataset, math.inf)
        datasets_of_job, open_job_hours = open_job_by_shard.get(index, ([], math.inf))
        total_hours = open_job_hours + hours_of_dataset
        if total_hours <= most:
            datasets_of_job.append(part)
        else:
            datasets_of_job, total_hours = [part], hours_of_dataset
            jobs.append((index, datasets_of_job))
        open_job_by_shard[index] = datasets_of_job, total_hours
    return jobs


def _shards(part: DatasetShare, missing_samples: set[str], plan: Plan, count: int, opened: bool) -> set[int]:
    """Return the shards with one of the samples `missing_samples`; all shards if this is unknown without the data.

    count: number of shards.
    opened: whether data may be opened.
    """
    opened = part.spec.is_pages or (opened and part.counted == "data")
    if not missing_samples or count == 1 or not opened:
        return set(range(count)) if missing_samples else set()
    refs = sample_refs(part.spec, plan.limit)
    return {index_of(ref.cluster, count) for ref in refs if ref.sample_id in missing_samples}
