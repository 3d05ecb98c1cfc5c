"""Submission by submitit: parameters from `hydra.launcher` and `slurm`, the script, and one array for many jobs."""

from __future__ import annotations

import re
import shlex
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.slurm.slurm import SlurmExecutor

from mmkv_bench.config.schema import Slurm, merged
from mmkv_bench.errors import ConfigError, MMKVError, nearest
from mmkv_bench.slurm import queue
from mmkv_bench.slurm.queue import SUBMIT_S, ask

REQUEUE = 75
"""Exit code of a job in a container image without scontrol that must be queued again (EX_TEMPFAIL of sysexits.h)."""
ASK = 76
"""Exit code of a job that got TERM and could not ask Slurm whether it was preempted or cancelled. Its script then asks.
"""

_STRICT_LINES = (
    "set -e",
    """trap '[ "$SETUP_DONE" ] || echo "mmkv_bench: the job ends without work: its script failed at: $BASH_COMMAND" >&2' EXIT""",
    "SETUP_DONE=",
)
"""Lines of a script before its setup. A failing setup line (such as no such module) then ends the job."""
_LENIENT_LINES = ("SETUP_DONE=1", "set +e")
"""Lines of a script after its setup, so that the job's exit code can be read. A trap of the user's setup is kept."""

_OWN_NAMES = ("_target_", "submitit_folder", "max_num_timeout")
_SUBMITTED_LINE = re.compile(r"^[ \t]*Submitted batch job (\d+)(?: on cluster \S+)?[ \t]*$", re.MULTILINE)
_PARSABLE_ID = re.compile(r"(\d+)(?:;\S+)?")  # output of sbatch --parsable, which a wrapper may use
_LARGEST_ARRAY = 1001  # MaxArraySize if Slurm does not say; the largest index is one lower


class Executor(SlurmExecutor):
    """submitit's executor for Slurm, which can also print its scripts without Slurm."""

    @classmethod
    def affinity(cls) -> int:
        return 2

    def script(self, count: int) -> str:
        """Return the sbatch script of an array of `count` jobs."""
        if count > 1:
            self.parameters["map_count"] = count
        try:
            return self._make_submission_file_text(self._submitit_command_str, "")
        finally:
            self.parameters.pop("map_count", None)

    def array(self, jobs: Sequence[Callable[[], None]]) -> list[str]:
        """Submit jobs as one Slurm array. Return their ids in order, `<array>_<index>`, or the id of a single job.

        Raises:
            ConfigError: sbatch refuses the jobs, or it is unknown whether they were submitted.
            OSError: the jobs' files cannot be written.
        """
        folder = JobPaths.get_first_id_independent_folder(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        file_stem = uuid.uuid4().hex
        pickle_files = [folder / f"{file_stem}-{place}.pkl" for place in range(len(jobs))]
        for job, path in zip(jobs, pickle_files, strict=True):
            delayed_job = DelayedSubmission(job)
            delayed_job.set_timeout(self.parameters["time"], self.max_num_timeout)
            delayed_job.dump(path)
        script = folder / f".submission_file_{file_stem}.sh"
        script.write_text(self.script(len(jobs)))
        try:
            array_id = _submit_script(script)
        except ConfigError:
            for path in pickle_files:
                path.unlink(missing_ok=True)
            raise
        job_ids = [array_id] if len(jobs) == 1 else [f"{array_id}_{place}" for place in range(len(jobs))]
        for name, path in zip(job_ids, pickle_files, strict=True):
            JobPaths(self.folder, name).move_temporary_file(path, "submitted_pickle")
        JobPaths(self.folder, array_id).move_temporary_file(script, "submission_file", keep_as_symlink=True)
        return job_ids


def _submit_script(script: Path) -> str:
    """Submit a script by sbatch. Return the id of the job or array.

    Raises ConfigError: sbatch refuses, or prints no id and squeue has no job with this script.
    """
    sbatch_result = ask(["sbatch", str(script)], SUBMIT_S)
    if sbatch_result is not None and sbatch_result.returncode:
        raise ConfigError(f"sbatch refuses: {_words(sbatch_result.stderr or sbatch_result.stdout)}")
    array_id = None if sbatch_result is None else job_id_in_output(sbatch_result.stdout)
    array_id = array_id or queue.job_of_script(script)
    if array_id is not None:
        return array_id
    silence_sentence = f"sbatch does not answer within {SUBMIT_S:.0f} s"
    problem = silence_sentence if sbatch_result is None else f"sbatch prints {_words(sbatch_result.stdout)!r}"
    raise ConfigError(
        f"{problem} instead of 'Submitted batch job <id>', and squeue shows no job of {script}; search for it "
        "with squeue, and cancel it before you run the same command again"
    )


def job_id_in_output(text: str) -> str | None:
    """Return the job id in sbatch's output, or None if no id is certain. Lines of a wrapper script are ignored."""
    job_ids = set(_SUBMITTED_LINE.findall(text))
    parsable_match = _PARSABLE_ID.fullmatch(text.strip())
    if parsable_match is not None:
        job_ids.add(parsable_match[1])
    return job_ids.pop() if len(job_ids) == 1 else None


def launcher_of_model(launcher: Mapping[str, Any], models: Mapping[str, Any] | None, model: str) -> dict[str, Any]:
    """Return `hydra.launcher` with the changes for one model. Unknown keys are refused.

    models: `slurm.models`, model name to changes.
    """
    changes = (models or {}).get(model) or {}
    known_keys = [str(key) for key in launcher if key not in ("_target_", "submitit_folder")]
    for key in changes:
        if key not in known_keys:
            raise ConfigError(
                f"slurm.models.{model}.{key} is not a key of hydra.launcher; {nearest(str(key), known_keys)}"
            )
    return merged(launcher, changes)


def executor(launcher: Mapping[str, Any], slurm: Slurm, out: Path) -> Executor:
    """Return an executor for the jobs of a sweep, without asking Slurm.

    launcher: `hydra.launcher`, checked.
    slurm: the settings `slurm`.
    out: folder of the rows.
    """
    parameters = {name: value for name, value in launcher.items() if name not in _OWN_NAMES and value is not None}
    parameters |= slurm_parameters(parameters, slurm, out, int(launcher["max_num_timeout"]))
    # Sites that check keys refuse submitit's default; additional_parameters may set one.
    parameters["wckey"] = None
    new_executor = Executor(
        Path(str(launcher["submitit_folder"])).absolute(),
        max_num_timeout=int(launcher["max_num_timeout"]),
        python=_python(slurm, out),
    )
    new_executor.update_parameters(**new_executor._convert_parameters(dict(parameters)))
    return new_executor


def slurm_parameters(given: Mapping[str, Any], slurm: Slurm, out: Path, attempts: int) -> dict[str, Any]:
    """Return submitit's parameters for the settings `slurm`: setup lines (modules, then the user's) and flags of srun.

    A container image lacks squeue and scontrol, so lines outside of the image queue the job again.

    given: the parameters from `hydra.launcher`.
    attempts: see `_requeue_lines`.
    """
    modules = [shlex.quote(str(name)) for name in slurm.modules]
    environment_lines = [*([f"module load {' '.join(modules)}"] if modules else []), *(given.get("setup") or ())]
    setup_lines = [*_STRICT_LINES, *environment_lines, *_LENIENT_LINES] if environment_lines else []
    srun_flags = [str(flag) for flag in slurm.srun]
    if slurm.container is not None and slurm.runtime == "pyxis":
        srun_flags += [f"--container-image={slurm.container}", f"--container-mounts={','.join(_mounts(slurm, out))}"]
    teardown_lines: list[str] = []
    if slurm.container is not None:
        # Preemption may also signal the script, and would end it before its last lines.
        setup_lines = ["trap : TERM", *setup_lines]
        teardown_lines = _requeue_lines(attempts)
    lines_by_parameter = {"setup": setup_lines, "srun_args": srun_flags, "teardown": teardown_lines}
    return {name: values for name, values in lines_by_parameter.items() if values}


def _requeue_lines(attempts: int) -> list[str]:
    """Return script lines that run after the job and decide whether to queue it again.

    A task of an array is queued by array and index, because the array's id alone would queue all tasks.

    attempts: how often a job that exits with `REQUEUE` may be queued again. After `ASK` only Slurm's answer decides.
    """
    return [
        "code=$?",
        "job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}; job=${job:-$SLURM_JOB_ID}",
        "case $code in",
        f'{REQUEUE}) [ "${{SLURM_RESTART_COUNT:-0}}" -lt {attempts} ] ;;',
        f'{ASK}) [ "$(timeout 30 squeue -h -j "$job" -o %T)" = RUNNING ] ;;  # preempted; after scancel it is on its way out',
        "*) false ;;",
        'esac && scontrol requeue "$job"',
        'exit "$code"',
    ]


def _python(slurm: Slurm, out: Path) -> str | None:
    """Return the command that starts Python in a job; None for the interpreter of this process."""
    if slurm.container is None:
        return None if slurm.python is None else shlex.quote(str(slurm.python))
    python = shlex.quote(str(slurm.python or "python"))
    if slurm.runtime == "pyxis":
        return python
    bind_mounts = ",".join(_mounts(slurm, out))
    return f"apptainer exec --nv --bind {shlex.quote(bind_mounts)} {shlex.quote(str(slurm.container))} {python}"


def _mounts(slurm: Slurm, out: Path) -> list[str]:
    """Return the mounts of a container image as source:target. The rows' folder keeps its path."""
    user_mounts = [str(folder) for folder in slurm.mounts]
    return [text if ":" in text else f"{text}:{text}" for text in [str(out.absolute()), *user_mounts]]


Split = tuple[Executor, Sequence[Callable[[], None]]]
"""An executor and the jobs of one array."""


def submit(arrays: Sequence[Split], parallelism: int) -> Iterator[list[str]]:
    """Submit arrays of jobs. Yield the jobs' ids of each array, to be recorded before the next is submitted.

    Args:
        arrays: executor and jobs of each array.
        parallelism: maximum number of running jobs over all arrays. An executor's own limit applies to its array.

    Raises:
        ConfigError: Slurm refuses an array. Arrays accepted before stay queued.
        MMKVError: the jobs' files cannot be written.
    """
    accepted_arrays: list[str] = []
    accepted_jobs = 0
    for (made, jobs), (share, before) in zip(
        arrays, lanes([len(jobs) for _, jobs in arrays], parallelism), strict=True
    ):
        limit_parameters: dict[str, Any] = {
            "array_parallelism": min(share, made.parameters.get("array_parallelism", share))
        }
        if before is not None:
            user_dependency = made.parameters.get("dependency")
            limit_parameters["dependency"] = ",".join(
                filter(None, (user_dependency, f"afterany:{accepted_arrays[before]}"))
            )
        earlier_parameters = dict(made.parameters)
        made.update_parameters(**limit_parameters)
        try:
            job_ids = made.array(jobs)
        except ConfigError as error:
            accepted_sentence = (
                f"{accepted_jobs} jobs were accepted before and stay queued"
                if accepted_jobs
                else "nothing was submitted"
            )
            raise ConfigError(f"{error}; {accepted_sentence}") from error
        except OSError as error:
            raise MMKVError(f"the jobs cannot be written below {made.folder}: {error.strerror or error}") from error
        finally:
            made.parameters = earlier_parameters
        accepted_arrays.append(job_ids[0].partition("_")[0])
        accepted_jobs += len(job_ids)
        yield job_ids


def lanes(sizes: Sequence[int], most: int) -> list[tuple[int, int | None]]:
    """Divide a limit of running jobs over arrays. Return each array's limit, and the index of the array it waits for,
    or None.

    Arrays that run at once share the limit, each with no more than it can use. Arrays beyond the limit start when an
    earlier one has ended.

    Args:
        sizes: number of jobs of each array.
        most: maximum number of running jobs, at least 1.
    """
    number_of_lanes = min(len(sizes), most)
    largest_array_of_lane = [max(sizes[lane::number_of_lanes]) for lane in range(number_of_lanes)]
    share_of_lane = [1] * number_of_lanes
    for _ in range(most - number_of_lanes):
        lanes_below_largest = [
            lane for lane in range(number_of_lanes) if share_of_lane[lane] < largest_array_of_lane[lane]
        ]
        if not lanes_below_largest:
            break
        share_of_lane[min(lanes_below_largest, key=lambda lane: share_of_lane[lane] / largest_array_of_lane[lane])] += 1
    return [
        (share_of_lane[place % number_of_lanes], place - number_of_lanes if place >= number_of_lanes else None)
        for place in range(len(sizes))
    ]


def largest_array() -> int:
    """Return the largest number of jobs that this cluster allows in an array."""
    scontrol_result = ask(["scontrol", "show", "config"])
    size_match = re.search(
        r"^MaxArraySize\s*=\s*(\d+)", scontrol_result.stdout if scontrol_result else "", re.MULTILINE
    )
    return max(1, int(size_match[1]) if size_match else _LARGEST_ARRAY)


def log_of(folder: Path, job: str) -> Path:
    """Return the path of a job's stderr."""
    return JobPaths(folder, job, 0).stderr


def _words(text: str) -> str:
    """Return sbatch's message as one line."""
    lines = [re.sub(r"^sbatch: (error: )?", "", line.strip()) for line in text.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line)) or "it printed nothing"
