"""Sweeps in processes of their own, against a cluster; and what must be equal of the rows of two folders."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mmkv_bench.store.store import Store
from tests.run.setting import CIRCUMSTANCES
from tests.slurm.slurm import Cluster, until

SMALL = ("hydra.launcher.gpus_per_node=null", "hydra.launcher.cpus_per_task=1", "hydra.launcher.mem_gb=1")
LONG = ("model=tiny", "dataset=[pages_walk]", "method=[snapkv,random]", "budget=[8,32]", "limit=40")
WORK = ("model=tiny", "dataset=[pages_walk,pages_lookup]", "method=[snapkv,random]", "budget=[8,32]", "limit=6")


def start(
    cluster: Cluster,
    out: Path,
    *overrides: str,
    verb: Sequence[str] = ("sweep",),
    unseen: Path | None = None,
    **variables: str,
) -> subprocess.Popen[str]:
    """A sweep of `launcher=slurm`, begun with further environment variables. unseen: a folder over which the sweep alone
    has a file system."""
    command = [sys.executable, "-m", "mmkv_bench", *verb, "launcher=slurm", "model.device=cpu", f"out={out}", *SMALL]
    if unseen is not None:
        mounted = 'mount -t tmpfs tmpfs "$0" && exec "$@"'
        command = ["unshare", "--mount", "sh", "-c", mounted, str(unseen), *command]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*command, *overrides], env={**cluster.environment, **variables}, stdout=pipe, stderr=pipe, text=True
    )


def finished(process: subprocess.Popen[str], seconds: float = 400) -> tuple[int, str, str]:
    """Its exit code, stdout and stderr."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


def answering(cluster: Cluster, root: Path) -> str:
    """Waits until a job has stored some samples, but not all; its id."""
    until("a first sample", lambda: any(path.stat().st_size for path in (root / "journal").glob("*.jsonl")), 300)
    return cluster.ask("squeue", "-h", "-o", "%i").split()[0]


def log_of(root: Path, job: str) -> str:
    """What a job printed on stderr, in all its attempts."""
    (log,) = (root / "sweep" / ".submitit").glob(f"{job}/*_log.err")
    return log.read_text()


def rows(root: Path) -> tuple[dict, dict]:
    """(answers by cell and sample, metrics by cell and name) without what tells how a row came about."""
    store = Store(root)
    answers = {
        (row["cell"], row["sample_id"]): {name: value for name, value in row.items() if name not in CIRCUMSTANCES}
        for row in store.responses().to_pylist()
    }
    metrics = {(row["cell"], row["metric"]): row for row in store.metrics().to_pylist()}
    return answers, metrics
