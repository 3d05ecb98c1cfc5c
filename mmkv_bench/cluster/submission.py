"""Jobs as submitit submits them: parameters of `hydra.launcher` and `slurm`, the script, one array for many."""

from __future__ import annotations

import io
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from submitit.core.utils import FailedJobError, FailedSubmissionError, JobPaths
from submitit.slurm.slurm import SlurmExecutor

from mmkv_bench.config.schema import as_list, plain
from mmkv_bench.errors import ConfigError, MMKVError, nearest

if TYPE_CHECKING:
    from omegaconf import DictConfig

REQUEUE = 75
"""Exit code of a job in an image, where there is no scontrol, that wants to be queued again (EX_TEMPFAIL of sysexits.h)."""
ASK = 76
"""Exit code of a job that got TERM and could not ask Slurm whether it was preempted or cancelled; its script asks."""

_OWN_NAMES = ("_target_", "submitit_folder", "max_num_timeout")
_LARGEST_ARRAY = 1001  # MaxArraySize where Slurm is not asked; indices end one below


class Executor(SlurmExecutor):
    """submitit's executor for Slurm, which also says what it would submit where there is no Slurm."""

    @classmethod
    def affinity(cls) -> int:
        return 2

    def script(self, count: int) -> str:
        """The script of an array of so many jobs, as sbatch would get it."""
        if count > 1:
            self.parameters["map_count"] = count
        try:
            return self._make_submission_file_text(self._submitit_command_str, "")
        finally:
            self.parameters.pop("map_count", None)


def for_model(launcher: DictConfig, slurm: DictConfig, model: str) -> DictConfig:
    """`hydra.launcher` with what `slurm.models` says of a model.

    Raises:
        ConfigError: keys that the launcher does not have.
    """
    from omegaconf import OmegaConf

    own = (plain(slurm)["models"] or {}).get(model) or {}
    known = [str(key) for key in launcher if key not in ("_target_", "submitit_folder")]
    for key in own:
        if key not in known:
            raise ConfigError(f"slurm.models.{model}.{key} is no key of hydra.launcher; {nearest(str(key), known)}")
    return cast("DictConfig", OmegaConf.merge(launcher, own))


def executor(launcher: DictConfig, slurm: DictConfig, out: Path) -> Executor:
    """What submits these jobs; nothing is asked of Slurm yet, and no folder is made that could not be there anyhow.

    Args:
        launcher: `hydra.launcher`, checked; slurm: the configuration's node; out: folder of the rows.
    """
    given = {name: value for name, value in plain(launcher).items() if name not in _OWN_NAMES and value is not None}
    given |= beside(given, slurm, out, int(launcher.max_num_timeout))
    made = Executor(
        Path(str(launcher.submitit_folder)).absolute(),
        max_num_timeout=int(launcher.max_num_timeout),
        python=_python(slurm, out),
    )
    made.update_parameters(**made._convert_parameters(dict(given)))
    return made


def beside(given: Mapping[str, Any], slurm: DictConfig, out: Path, attempts: int) -> dict[str, Any]:
    """Parameters of submitit that `slurm.<key>` comes to: modules before the user's own lines, flags of srun, and in an
    image, which has neither squeue nor scontrol, the lines that queue a job again from outside of it."""
    modules = [shlex.quote(str(name)) for name in as_list(slurm.modules)]
    setup = [f"module load {' '.join(modules)}"] if modules else []
    srun = [str(flag) for flag in as_list(slurm.srun)]
    if slurm.container is not None and slurm.runtime == "pyxis":
        srun += [f"--container-image={slurm.container}", f"--container-mounts={','.join(_mounts(slurm, out))}"]
    found: dict[str, Any] = {}
    if slurm.container is not None:
        setup = ["trap : TERM", *setup]  # preemption may signal the script, too, and would end it before its last lines
        found["teardown"] = _again(attempts)
    if setup:
        found["setup"] = [*setup, *(given.get("setup") or ())]
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
        f'{ASK}) [ "$(squeue -h -j "$job" -o %T)" = RUNNING ] ;;  # preempted; after scancel it is on its way out',
        "*) false ;;",
        'esac && scontrol requeue "$job"',
        'exit "$code"',
    ]


def _python(slurm: DictConfig, out: Path) -> str | None:
    """The command that is Python in a job; None: this interpreter."""
    if slurm.container is None:
        return None if slurm.python is None else shlex.quote(str(slurm.python))
    python = shlex.quote(str(slurm.python or "python"))
    if slurm.runtime == "pyxis":
        return python
    binds = ",".join(_mounts(slurm, out))
    return f"apptainer exec --nv --bind {shlex.quote(binds)} {shlex.quote(str(slurm.container))} {python}"


def _mounts(slurm: DictConfig, out: Path) -> list[str]:
    """source:target of what an image sees; the rows lie at their own place."""
    named = [str(folder) for folder in as_list(slurm.mounts)]
    return [text if ":" in text else f"{text}:{text}" for text in [str(out.absolute()), *named]]


def submit(made: Executor, jobs: Sequence[Callable[[], None]], before: int = 0) -> Iterator[list[str]]:
    """The jobs' ids, in order, `<array>_<place>` where there are several; those of each array as soon as Slurm took it, so
    that they can be noted whatever becomes of the next one.

    Args:
        before: how many jobs of this sweep Slurm has already.

    Raises:
        ConfigError: Slurm refuses them, in its own words. What it took before stays queued.
    """
    largest = largest_array()
    for start in range(0, len(jobs), largest):
        try:
            with redirect_stderr(io.StringIO()), made.batch():  # submitit prints sbatch's words and raises them, too
                taken = [made.submit(job) for job in jobs[start : start + largest]]
        except (FailedJobError, FailedSubmissionError) as error:
            count = before + start
            stays = f"{count} jobs were taken before and stay queued" if count else "nothing was submitted"
            raise ConfigError(f"sbatch refuses: {_words(str(error))}; {stays}") from error
        except OSError as error:
            raise MMKVError(f"the jobs cannot be written below {made.folder}: {error.strerror or error}") from error
        yield [job.job_id for job in taken]


def largest_array() -> int:
    """How many jobs an array may have here."""
    told = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", told, re.MULTILINE)
    return max(1, int(found[1]) if found else _LARGEST_ARRAY)


def log_of(folder: Path, job: str) -> Path:
    """Where a job's stderr goes; a task of an array has a folder of its own."""
    return JobPaths(folder, job, 0).stderr


def _words(text: str) -> str:
    """What sbatch said, in one line."""
    lines = [re.sub(r"^sbatch: (error: )?", "", line.strip()) for line in text.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line)) or "it says nothing"
