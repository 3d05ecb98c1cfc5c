"""Refusals of a sweep on Slurm before it submits anything."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import ConfigError
from mmkv_bench.slurm.queue import ask
from mmkv_bench.store.files import locked, new_locked

if TYPE_CHECKING:
    from mmkv_bench.config.schema import Model

_SHORTEST = 11
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


def check_launcher(launcher: Mapping[str, Any]) -> None:
    """Refuse settings under which a job that is stopped would not come back, or would work twice.

    Raises:
        ConfigError: one of them.
    """
    if launcher["timeout_min"] < _SHORTEST:
        raise ConfigError(
            f"hydra.launcher.timeout_min={launcher['timeout_min']}: submitit takes any stop signal in a job's last 10 minutes "
            f"for its time limit, so that a preempted job this short would never be queued again; allowed: {_SHORTEST} or more"
        )
    if launcher["max_num_timeout"] < 1:
        raise ConfigError(
            f"hydra.launcher.max_num_timeout={launcher['max_num_timeout']}: a job at its time limit would end and not be queued "
            "again, though it continues at its first missing sample; allowed: 1 or more (8 by default)"
        )
    for name in ("nodes", "tasks_per_node"):
        if launcher[name] != 1:
            raise ConfigError(
                f"hydra.launcher.{name}={launcher[name]}: every task of a job would answer the same samples; allowed: 1; split "
                "a dataset with shards=<how many>"
            )


def devices_of(launcher: Mapping[str, Any], model: Model) -> int:
    """Number of processes of a job: one for each GPU that it asks for, unless one process takes them all.

    Args:
        launcher: `hydra.launcher` of the run's model; model: how that is loaded.
    """
    if model.device_map is not None or model.device == "cpu":
        return 1
    return max(1, gpus_of(launcher))


def gpus_of(launcher: Mapping[str, Any]) -> int:
    """Number of GPUs of a node that a job asks for, by either of Slurm's ways; launcher: as of `devices_of`."""
    named = re.search(r"gpu(?::[^:,]+)?(?::(\d+))?(?:,|$)", str(launcher["gres"] or ""))
    return max(int(launcher["gpus_per_node"] or 0), int(named[1] or 1) if named else 0)


def check_here() -> None:
    """Raises ConfigError where nothing can be submitted."""
    for program in ("sbatch", "squeue", "scontrol", "sinfo", "srun"):
        if shutil.which(program) is None:
            raise ConfigError(
                f"launcher=slurm needs {program}, which is not on PATH; start the sweep on a login node of the cluster, or "
                "look at its scripts with dry=true"
            )


def check_folder(folder: Path) -> None:
    """Refuse a folder of rows that several nodes cannot write to together. Leaves nothing there but the folder.

    Raises:
        ConfigError: it lies in this machine's memory while the cluster has other nodes, or its file system has no locks or
            cannot replace a file in one step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kind, others = _file_system(folder), sorted(_nodes() - {socket.gethostname().partition(".")[0]})
    if kind in _IN_MEMORY and others:
        raise ConfigError(
            f"out={folder} lies in the memory of this machine ({kind}), which {others[0]} and other nodes do not see; give a "
            "folder on a file system that all nodes mount"
        )
    first, second = (folder / f".probe-{os.getpid()}-{place}.tmp" for place in ("a", "b"))
    try:
        files = []
        try:
            files = [new_locked(first), new_locked(second)]
            held = all(locked(file) is not None for file in files)
            os.replace(first, second)
        finally:
            for file in files:
                os.close(file)
            for path in (first, second):
                path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"out={folder}: its file system cannot make a locked file and put it in another's place "
            f"({error.strerror or error}); jobs publish their rows that way; give another folder"
        ) from error
    if not held:
        raise ConfigError(
            f"out={folder}: its file system has no locks (flock), by which jobs tell a living writer's rows from a dead one's; "
            "give a folder on one that has (NFS 4, Lustre mounted with flock, GPFS)"
        )


def _file_system(folder: Path) -> str | None:
    """The kind of file system that a folder lies on, None where it cannot be told."""
    try:
        lines = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return None
    place = folder.resolve()
    mounts = [(Path(at.encode().decode("unicode_escape")), kind) for _, at, kind, *_ in lines]
    over = [(len(at.parts), kind) for at, kind in mounts if place.is_relative_to(at)]
    return max(over, key=lambda one: one[0])[1] if over else None


def _nodes() -> set[str]:
    """The cluster's nodes, as Slurm names them; none where it does not answer."""
    answer = ask(["sinfo", "-h", "-N", "-o", "%N"])
    return set() if answer is None else set(answer.stdout.split())
