"""A real Slurm cluster of this one machine: munged, slurmctld and slurmd started by hand, everything in one folder."""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

HOST = socket.gethostname().partition(".")[0]
SBIN = "/usr/sbin:/sbin:/usr/local/sbin:" + os.environ.get("PATH", "")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol")
_PATIENCE_S = 120  # what a busy machine may take for what takes a second

_CONF = """\
ClusterName=bench
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# a requeued job waits for as long as a credential lives: two minutes by default
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
KillWait=3
MinJobAge=600
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=16000 State=UNKNOWN
PartitionName=low Nodes={host} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
PartitionName=high Nodes={host} MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


@dataclass(frozen=True)
class Cluster:
    """A running cluster. environment: variables of a process that talks to it."""

    folder: Path
    environment: Mapping[str, str]

    def ask(self, *command: str) -> str:
        """What a client prints on stdout; it must succeed."""
        done = subprocess.run(command, env={**self.environment}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout


def missing() -> list[str]:
    """Programs of Slurm that this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=SBIN) is None]


def until(what: str, holds: Callable[[], object], seconds: float = _PATIENCE_S) -> None:
    """Returns when `holds()` does."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.05)


def start(folder: Path) -> Cluster:
    """A cluster with an idle node and two partitions, `low` (the default) and `high`, which preempts it."""
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)  # munged refuses a folder in which others could replace its socket
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    conf = folder / "slurm.conf"
    conf.write_text(_CONF.format(host=HOST, user=getpass.getuser(), folder=folder, ports=_free_ports(2)))
    ours = {name: text for name, text in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
    cluster = Cluster(folder, {**ours, "SLURM_CONF": str(conf), "PATH": SBIN})
    files = [
        f"--{name}-file={folder}/munge{end}" for name, end in (("key", ".key"), ("pid", "d.pid"), ("log", "d.log"))
    ]
    cluster.ask("munged", "--force", f"--socket={folder}/munge.sock", f"--seed-file={folder}/munged.seed", *files)
    cluster.ask("slurmctld", "-c")
    cluster.ask("slurmd")
    states = ["sinfo", "-h", "-o", "%t"]
    said = lambda: subprocess.run(states, env={**cluster.environment}, capture_output=True, text=True).stdout  # noqa: E731
    until("an idle node", lambda: set(said().split()) == {"idle"})
    return cluster


def clear(cluster: Cluster) -> None:
    """Ends its jobs."""
    if cluster.ask("squeue", "-h"):
        subprocess.run(["scancel", "-u", getpass.getuser(), "--full"], env={**cluster.environment}, capture_output=True)
        until("an empty queue", lambda: not cluster.ask("squeue", "-h"))


def stop(cluster: Cluster) -> None:
    """Ends its daemons."""
    for name in ("slurmd", "slurmctld", "munged"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
            process = int((cluster.folder / f"{name}.pid").read_text())
            if name in os.readlink(f"/proc/{process}/exe"):  # the number may be another's by now
                os.kill(process, signal.SIGTERM)


def _free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    for one in held:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports
