"""Checks of a sweep on Slurm before it submits anything."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import ConfigError
from mmkv_bench.slurm.queue import ask
from mmkv_bench.store.files import new_locked, try_lock

if TYPE_CHECKING:
    from mmkv_bench.config.schema import Model

_SHORTEST = 11
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


def check_launcher(launcher: Mapping[str, Any]) -> None:
    """Refuse settings under which a stopped job is not queued again, or several tasks of a job do the same work."""
    if launcher["timeout_min"] < _SHORTEST:
        raise ConfigError(
            f"hydra.launcher.timeout_min={launcher['timeout_min']}: submitit takes any stop signal in a job's "
            "last 10 minutes for its time limit, so a preempted job this short would never be queued again; "
            f"allowed: {_SHORTEST} or more"
        )
    if launcher["max_num_timeout"] < 1:
        raise ConfigError(
            f"hydra.launcher.max_num_timeout={launcher['max_num_timeout']}: a job at its time limit would not be "
            "queued again, although it could continue at its first missing sample; allowed: 1 or more (8 by "
            "default)"
        )
    for name in ("nodes", "tasks_per_node"):
        if launcher[name] != 1:
            raise ConfigError(
                f"hydra.launcher.{name}={launcher[name]}: all tasks of a job would answer the same samples; "
                "allowed: 1; to split a dataset, give shards=<number>"
            )


def devices_of(launcher: Mapping[str, Any], model: Model) -> int:
    """Return a job's number of processes: one per requested GPU, or one if the model takes all GPUs or uses the CPU."""
    return 1 if model.device_map is not None or model.device == "cpu" else max(1, gpus_of(launcher))


def gpus_of(launcher: Mapping[str, Any]) -> int:
    """Return the number of GPUs per node that a job's `hydra.launcher` requests, in either of Slurm's spellings."""
    requests = [request.split(":") for request in str(launcher["gres"] or "").split(",")]
    counts = [int(fields[-1]) if fields[-1].isdigit() else 1 for fields in requests if fields[0] == "gpu"]
    return max(int(launcher["gpus_per_node"] or 0), sum(counts))


def check_here() -> None:
    """Raise ConfigError if this machine cannot submit jobs."""
    for program in ("sbatch", "squeue", "scontrol", "sinfo", "srun"):
        if shutil.which(program) is None:
            raise ConfigError(
                f"launcher=slurm needs {program}, which is not on PATH; start the sweep on a login node of the "
                "cluster, or print its scripts with dry=true"
            )


def check_folder(folder: Path) -> None:
    """Create a result folder, and refuse it if several nodes cannot write to it.

    Reasons are a folder in this machine's memory while the cluster has other nodes, and a file system without locks or
    without atomic renames.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sinfo_result = ask(["sinfo", "-h", "-N", "-o", "%N"])
    nodes = set() if sinfo_result is None else set(sinfo_result.stdout.split())
    file_system, other_nodes = _file_system(folder), sorted(nodes - {socket.gethostname().partition(".")[0]})
    if file_system in _IN_MEMORY and other_nodes:
        raise ConfigError(
            f"out={folder} is in this machine's memory ({file_system}), which {other_nodes[0]} and other nodes do not see; "
            "give a folder on a file system that all nodes mount"
        )
    first_probe, second_probe = (folder / f".probe-{os.getpid()}-{place}.tmp" for place in ("a", "b"))
    try:
        descriptors = []
        try:
            descriptors = [new_locked(first_probe), new_locked(second_probe)]
            has_locks = all(try_lock(file) is not None for file in descriptors)
            os.replace(first_probe, second_probe)
        finally:
            for file in descriptors:
                os.close(file)
            for path in (first_probe, second_probe):
                path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"out={folder}: its file system cannot replace a file by a locked file ({error.strerror or error}), "
            "as jobs do to publish rows; give another folder"
        ) from error
    if not has_locks:
        raise ConfigError(
            f"out={folder}: its file system has no locks (flock), by which jobs distinguish living writers from "
            "dead ones; give a folder on a file system with locks (NFS 4, Lustre mounted with flock, GPFS)"
        )


def _file_system(folder: Path) -> str | None:
    """Return the type of a folder's file system, or None if unknown."""
    try:
        lines = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return None
    resolved_folder = folder.resolve()
    mount_points = [(Path(at.encode().decode("unicode_escape")), kind) for _, at, kind, *_ in lines]
    mounts_above = [(len(at.parts), kind) for at, kind in mount_points if resolved_folder.is_relative_to(at)]
    return max(mounts_above, key=lambda one: one[0])[1] if mounts_above else None
