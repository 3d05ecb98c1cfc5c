"""Sweeps in processes of their own, against a cluster; and what must be equal of the rows of two folders."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mmkv_bench.store.store import Store
from tests.cluster.slurm import Cluster
from tests.run.setting import CIRCUMSTANCES

SMALL = ("hydra.launcher.gpus_per_node=null", "hydra.launcher.cpus_per_task=1", "hydra.launcher.mem_gb=1")
WORK = ("model=tiny", "dataset=[pages_walk,pages_lookup]", "method=[snapkv,random]", "budget=[8,32]", "limit=6")


def start(cluster: Cluster, out: Path, *overrides: str, verb: Sequence[str] = ("sweep",)) -> subprocess.Popen[str]:
    """A sweep of `launcher=slurm`, begun."""
    command = [sys.executable, "-m", "mmkv_bench", *verb, "launcher=slurm", "model.device=cpu", f"out={out}", *SMALL]
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, *overrides], env={**cluster.environment}, stdout=pipe, stderr=pipe, text=True)


def finished(process: subprocess.Popen[str], seconds: float = 400) -> tuple[int, str, str]:
    """Its exit code, stdout and stderr."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


def rows(root: Path) -> tuple[dict, dict]:
    """(answers by cell and sample, metrics by cell and name) without what tells how a row came about."""
    store = Store(root)
    answers = {
        (row["cell"], row["sample_id"]): {name: value for name, value in row.items() if name not in CIRCUMSTANCES}
        for row in store.responses().to_pylist()
    }
    metrics = {(row["cell"], row["metric"]): row for row in store.metrics().to_pylist()}
    return answers, metrics
