"""Run the tests that cover each mutation, in copies of the checkout, until one of them fails."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.mutations.covering import Test
from tools.mutations.kinds import Mutation, applied

HEAVY = ("torch", "torchvision", "transformers", "pandas", "pyarrow.dataset", "scipy.stats", "hydra")
ROUNDS = (6, 12, 24, 48)
"""A mutation that survives so many tests after each other, the narrowest first, counts as one that survives."""
CPU_SECONDS, WALL_SECONDS = 5, 1800
"""Of a test, and of a round; tests that need more hang."""


@contextmanager
def copies(root: Path, count: int) -> Iterator[list[Path]]:
    """Clones of what is committed in a checkout; they go when the work is done."""
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        found = [Path(folder) / str(n) for n in range(count)]
        for copy in found:
            command = ["git", "-c", "advice.detachedHead=false", "clone", "--quiet", "--shared", str(root), str(copy)]
            subprocess.run(command, check=True)
        yield found


def judged(mutation: Mutation, tests: list[Test], copy: Path) -> dict:
    """What tests say of one mutation of a clone: the first that fails, or how many did not notice."""
    path = copy / mutation.file
    source = path.read_text()
    path.write_text(applied(mutation, source))
    said, done = {"killed": False, "by": None}, 0
    try:
        for size in ROUNDS:
            batch = tests[done : done + size]
            if said["killed"] or not batch:
                break
            said, done = _run(batch, copy), done + len(batch)
            if "error" in said:
                raise SystemExit(f"{mutation}: {said['error']}")
    finally:
        path.write_text(source)
    return {**said, "covering": len(tests), "run": done}


def warm() -> None:
    """Import what every test needs and no mutation touches, once for all forks."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    for name in HEAVY:
        __import__(name)


def _run(tests: list[str], copy: Path) -> dict:
    """Run tests in a fork, stopping at the first that fails; what does not end is killed, and so is the mutation."""
    answer = copy.parent / f"{copy.name}.json"
    answer.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        os.setsid()
        try:
            _in_fork(tests, copy, answer)
        finally:
            os._exit(70)
    end = time.monotonic() + WALL_SECONDS
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended and not answer.exists():
            hung = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU
            return {"killed": True, "by": "time" if hung else "the process of the tests died"}
        if ended:
            return json.loads(answer.read_text())
        time.sleep(0.1)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return {"killed": True, "by": "time"}


def _in_fork(tests: list[str], copy: Path, answer: Path) -> None:
    import pytest

    resource.setrlimit(resource.RLIMIT_CPU, (60 + CPU_SECONDS * len(tests), resource.RLIM_INFINITY))
    log = os.open(copy.parent / f"{copy.name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(copy)
    for name in [n for n in sys.modules if n.split(".")[0] in ("tools", "tests", "mmkv_bench")]:
        del sys.modules[name]
    sys.path.insert(0, str(copy))
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(copy.parent / f"{copy.name}.hypothesis")
    failed: list[str] = []

    class Listener:
        def pytest_runtest_logreport(self, report):
            failed.extend([report.nodeid] if report.failed else [])

        def pytest_collectreport(self, report):
            failed.extend([report.nodeid] if report.failed else [])

    code = int(pytest.main(["-x", "-q", "-m", "not full", "-p", "no:cacheprovider", *tests], plugins=[Listener()]))
    said = {"killed": bool(failed), "by": failed[0] if failed else None}
    if not failed and code:
        said["error"] = f"pytest ended with {code}: {copy.parent / copy.name}.log"
    answer.write_text(json.dumps(said))
    os._exit(0)
