"""Jobs as submitit submits them: parameters of `hydra.launcher` and `slurm`, the script, one array for many."""

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
"""Exit code of a job in an image, where there is no scontrol, that wants to be queued again (EX_TEMPFAIL of sysexits.h)."""
ASK = 76
"""Exit code of a job that got TERM and could not ask Slurm whether it was preempted or cancelled; its script asks."""

_STRICT = (
    "set -e",
    """trap '[ "$SETUP_DONE" ] || echo "mmkv_bench: the job ends without work: its script failed at: $BASH_COMMAND" >&2' EXIT""",
    "SETUP_DONE=",
)
"""Lines of a script before its setup: a line that fails (no such module, no such file to source) ends the job."""
_LENIENT = ("SETUP_DONE=1", "set +e")
"""And after it: the exit code of the job's command is read. A trap that the setup put in place of ours stays."""

_OWN_NAMES = ("_target_", "submitit_folder", "max_num_timeout")
_TAKEN = re.compile(r"^[ \t]*Submitted batch job (\d+)(?: on cluster \S+)?[ \t]*$", re.MULTILINE)
_PARSABLE = re.compile(r"(\d+)(?:;\S+)?")  # what sbatch --parsable prints, where a wrapper asks for it
_LARGEST_ARRAY = 1001  # MaxArraySize where Slurm is not asked; indices end one below


class Executor(SlurmExecutor):
    """submitit's executor for Slurm, which also says what it would submit where there is no Slurm."""

    @classmethod
    def affinity(cls) -> int:
        return 2

    def script(self, count: int) -> str:
        """The script of an array of so many jobs, as sbatch gets it."""
        if count > 1:
            self.parameters["map_count"] = count
        try:
            return self._make_submission_file_text(self._submitit_command_str, "")
        finally:
            self.parameters.pop("map_count", None)

    def array(self, jobs: Sequence[Callable[[], None]]) -> list[str]:
        """Submit jobs as one array; their ids in order, `<array>_<place>`, of a single one its own.

        Raises:
            ConfigError: sbatch refuses them, or does not say what became of them; OSError: they cannot be written.
        """
        folder = JobPaths.get_first_id_independent_folder(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        stem = uuid.uuid4().hex
        written = [folder / f"{stem}-{place}.pkl" for place in range(len(jobs))]
        for job, path in zip(jobs, written, strict=True):
            delayed = DelayedSubmission(job)
            delayed.set_timeout(self.parameters["time"], self.max_num_timeout)
            delayed.dump(path)
        script = folder / f".submission_file_{stem}.sh"
        script.write_text(self.script(len(jobs)))
        try:
            array = _sent(script)
        except ConfigError:
            for path in written:
                path.unlink(missing_ok=True)
            raise
        names = [array] if len(jobs) == 1 else [f"{array}_{place}" for place in range(len(jobs))]
        for name, path in zip(names, written, strict=True):
            JobPaths(self.folder, name).move_temporary_file(path, "submitted_pickle")
        JobPaths(self.folder, array).move_temporary_file(script, "submission_file", keep_as_symlink=True)
        return names


def _sent(script: Path) -> str:
    """Hand a script to sbatch; the id of the job or array.

    Raises:
        ConfigError: sbatch refuses it, in its own words, or does not say its id and squeue knows no job of it.
    """
    answer = ask(["sbatch", str(script)], SUBMIT_S)
    if answer is not None and answer.returncode:
        raise ConfigError(f"sbatch refuses: {_words(answer.stderr or answer.stdout)}")
    array = None if answer is None else submitted(answer.stdout)
    array = array or queue.of_script(script)
    if array is not None:
        return array
    problem = (
        f"sbatch does not answer within {SUBMIT_S:.0f} s"
        if answer is None
        else f"sbatch prints {_words(answer.stdout)!r}"
    )
    raise ConfigError(
        f"{problem}, no line 'Submitted batch job <id>', and squeue shows no job of {script}; look for one with squeue, and "
        "cancel it before the same command is run again"
    )


def submitted(text: str) -> str | None:
    """The id in what sbatch prints, whatever a site's wrapper prints around it; None without one that is certain."""
    ids = set(_TAKEN.findall(text))
    alone = _PARSABLE.fullmatch(text.strip())
    if alone is not None:
        ids.add(alone[1])
    return ids.pop() if len(ids) == 1 else None


def for_model(launcher: Mapping[str, Any], models: Mapping[str, Any] | None, model: str) -> dict[str, Any]:
    """`hydra.launcher` with what `slurm.models` (models) says of a model.

    Raises:
        ConfigError: keys that the launcher does not have.
    """
    own = (models or {}).get(model) or {}
    known = [str(key) for key in launcher if key not in ("_target_", "submitit_folder")]
    for key in own:
        if key not in known:
            raise ConfigError(f"slurm.models.{model}.{key} is no key of hydra.launcher; {nearest(str(key), known)}")
    return merged(launcher, own)


def executor(launcher: Mapping[str, Any], slurm: Slurm, out: Path) -> Executor:
    """Make what submits these jobs; nothing is asked of Slurm yet, and no folder is made that could not be there anyhow.

    Args:
        launcher: `hydra.launcher`, checked; slurm: the configuration's node; out: folder of the rows.
    """
    given = {name: value for name, value in launcher.items() if name not in _OWN_NAMES and value is not None}
    given |= beside(given, slurm, out, int(launcher["max_num_timeout"]))
    given["wckey"] = None  # submitit's own, which sites that check keys refuse; additional_parameters may name one
    made = Executor(
        Path(str(launcher["submitit_folder"])).absolute(),
        max_num_timeout=int(launcher["max_num_timeout"]),
        python=_python(slurm, out),
    )
    made.update_parameters(**made._convert_parameters(dict(given)))
    return made


def beside(given: Mapping[str, Any], slurm: Slurm, out: Path, attempts: int) -> dict[str, Any]:
    """Parameters of submitit that `slurm.<key>` comes to: modules before the user's own lines, flags of srun, and in an
    image, which has neither squeue nor scontrol, the lines that queue a job again from outside of it."""
    modules = [shlex.quote(str(name)) for name in slurm.modules]
    lines = [*([f"module load {' '.join(modules)}"] if modules else []), *(given.get("setup") or ())]
    setup = [*_STRICT, *lines, *_LENIENT] if lines else []
    srun = [str(flag) for flag in slurm.srun]
    if slurm.container is not None and slurm.runtime == "pyxis":
        srun += [f"--container-image={slurm.container}", f"--container-mounts={','.join(_mounts(slurm, out))}"]
    found: dict[str, Any] = {}
    if slurm.container is not None:
        setup = ["trap : TERM", *setup]  # preemption may signal the script, too, and would end it before its last lines
        found["teardown"] = _again(attempts)
    if setup:
        found["setup"] = setup
    if srun:
        found["srun_args"] = srun
    return found


def _again(attempts: int) -> list[str]:
    """Lines of a script after its job: whether to queue it again. A task of an array has a name of its own: by the array's
    id, which is one task's number, too, Slurm would take all of them."""
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
    """The command that is Python in a job; None: this interpreter."""
    if slurm.container is None:
        return None if slurm.python is None else shlex.quote(str(slurm.python))
    python = shlex.quote(str(slurm.python or "python"))
    if slurm.runtime == "pyxis":
        return python
    binds = ",".join(_mounts(slurm, out))
    return f"apptainer exec --nv --bind {shlex.quote(binds)} {shlex.quote(str(slurm.container))} {python}"


def _mounts(slurm: Slurm, out: Path) -> list[str]:
    """source:target of what an image sees; the rows lie at their own place."""
    named = [str(folder) for folder in slurm.mounts]
    return [text if ":" in text else f"{text}:{text}" for text in [str(out.absolute()), *named]]


Split = tuple[Executor, Sequence[Callable[[], None]]]
"""An executor and the jobs of one array."""


def submit(arrays: Sequence[Split], parallelism: int) -> Iterator[list[str]]:
    """The jobs' ids of each array as soon as Slurm took it, so that they can be noted whatever becomes of the next one.

    Args:
        parallelism: how many jobs of all arrays may run at a time; an executor's own limit holds for its array.

    Raises:
        ConfigError: Slurm refuses them, in its own words. What it took before stays queued.
    """
    taken: list[str] = []
    count = 0
    for (made, jobs), (share, before) in zip(
        arrays, lanes([len(jobs) for _, jobs in arrays], parallelism), strict=True
    ):
        limits: dict[str, Any] = {"array_parallelism": min(share, made.parameters.get("array_parallelism", share))}
        if before is not None:
            wanted = made.parameters.get("dependency")
            limits["dependency"] = ",".join(filter(None, (wanted, f"afterany:{taken[before]}")))
        given = dict(made.parameters)
        made.update_parameters(**limits)
        try:
            names = made.array(jobs)
        except ConfigError as error:
            stays = f"{count} jobs were taken before and stay queued" if count else "nothing was submitted"
            raise ConfigError(f"{error}; {stays}") from error
        except OSError as error:
            raise MMKVError(f"the jobs cannot be written below {made.folder}: {error.strerror or error}") from error
        finally:
            made.parameters = given
        taken.append(names[0].partition("_")[0])
        count += len(names)
        yield names


def lanes(sizes: Sequence[int], most: int) -> list[tuple[int, int | None]]:
    """Divide a limit of running jobs over arrays: of each its share, and the place of the array that it waits for.

    Arrays that run side by side share the limit, no more than each can use; where there are more arrays than the limit, each
    further one begins when an earlier one has ended.

    Args:
        sizes: jobs of each array; most: jobs that may run at a time, at least 1.
    """
    count = min(len(sizes), most)
    largest = [max(sizes[lane::count]) for lane in range(count)]
    shares = [1] * count
    for _ in range(most - count):
        lanes_below_largest = [lane for lane in range(count) if shares[lane] < largest[lane]]
        if not lanes_below_largest:
            break
        shares[min(lanes_below_largest, key=lambda lane: shares[lane] / largest[lane])] += 1
    return [(shares[place % count], place - count if place >= count else None) for place in range(len(sizes))]


def largest_array() -> int:
    """Largest number of jobs in an array here."""
    answer = ask(["scontrol", "show", "config"])
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", answer.stdout if answer else "", re.MULTILINE)
    return max(1, int(found[1]) if found else _LARGEST_ARRAY)


def log_of(folder: Path, job: str) -> Path:
    """File of a job's stderr; a task of an array has a folder of its own."""
    return JobPaths(folder, job, 0).stderr


def _words(text: str) -> str:
    """The words of sbatch in one line."""
    lines = [re.sub(r"^sbatch: (error: )?", "", line.strip()) for line in text.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line)) or "it says nothing"
