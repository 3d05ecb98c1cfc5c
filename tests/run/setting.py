"""Whole runs, many in one process: run one, read its rows, tell what must agree between two, run one in a fork."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from mmkv_bench.cli.main import main
from mmkv_bench.store.schema import RESPONSES
from mmkv_bench.store.store import Store

# Columns that tell how a row came about; everything else says what the answer is and what was kept for it.
TIMES = tuple(name for name in RESPONSES.names if name.endswith("_s"))
STAMPS = ("worker", "committed_at", "shard", "peak_device_bytes", "peak_resident_bytes")
# fork_rows: how many forks were pending beside this one; the last two are the same up to a batch shape's rounding
CIRCUMSTANCES = (*TIMES, *STAMPS, "fork_rows", "forced_kl", "reference_nll")
ROUNDED = ("fidelity_kl", "fidelity_kl_all", "fidelity_kl_first")  # and so are these metrics

Key = tuple[str, str]


@dataclass(frozen=True)
class Outcome:
    """What one run returned and printed; `document` is the last line of stdout, parsed."""

    code: int
    out: str
    err: str
    document: dict[str, Any]

    @property
    def generated(self) -> int:
        """Samples that were prefilled and answered."""
        return sum(self.document["generated"].values())


def go(root: Path, *overrides: str) -> Outcome:
    """`python -m mmkv_bench <overrides> --json` in this process, with its rows in `root`."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["model.device=cpu", f"out={root}", "--json", *overrides])
    lines = out.getvalue().splitlines()
    assert lines, f"the run said nothing: {err.getvalue()}"
    return Outcome(code, out.getvalue(), err.getvalue(), json.loads(lines[-1]))


def done(root: Path, *overrides: str) -> Outcome:
    """A run that must succeed."""
    outcome = go(root, *overrides)
    assert outcome.code == 0, outcome.err or outcome.out
    return outcome


def forked(work: Callable[[], Any]) -> Any:
    """What `work` returns in a forked process, which takes everything it changes with it."""
    return joined(*fork(work))


def joined(child: int, reading: int) -> Any:
    """What `fork` started, waited for."""
    with os.fdopen(reading, "rb") as stream:
        answer = stream.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, f"the forked process ended with {code}"
    return pickle.loads(answer)  # of our own child


def fork(work: Callable[[], Any]) -> tuple[int, int]:
    """Start `work` in a fork: its process id, and a pipe that gives its pickled result."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            answer = pickle.dumps(work())
            with os.fdopen(writing, "wb") as stream:
                stream.write(answer)
            os._exit(0)
        finally:
            os._exit(70)
    os.close(writing)
    return child, reading


@contextlib.contextmanager
def extended(package: ModuleType, folder: Path) -> Iterator[None]:
    """The package with the modules of a further folder, as if their files lay in it."""
    before = list(package.__path__)
    package.__path__ = [*before, str(folder)]
    try:
        yield
    finally:
        package.__path__ = before
        for file in folder.glob("*.py"):
            sys.modules.pop(f"{package.__name__}.{file.stem}", None)
            vars(package).pop(file.stem, None)


# ---------------------------------------------------------------------- rows
def responses(root: Path) -> dict[Key, dict[str, Any]]:
    """(cell, sample) -> response row, every column."""
    return {(row["cell"], row["sample_id"]): row for row in Store(root).responses().to_pylist()}


def answers(root: Path, ignore: Iterable[str] = ()) -> dict[Key, dict[str, Any]]:
    """(cell, sample) -> the columns that define the answer."""
    left_out = {*CIRCUMSTANCES, *ignore}
    return {key: {k: v for k, v in row.items() if k not in left_out} for key, row in responses(root).items()}


def scores(root: Path) -> list[dict[str, Any]]:
    """All `samples` rows, in one order."""
    rows = Store(root).samples().to_pylist()
    return sorted(rows, key=lambda row: (row["cell"], row["sample_id"], row["metric"]))


def metrics(root: Path) -> list[dict[str, Any]]:
    """All `metrics` rows, in one order."""
    return sorted(Store(root).metrics().to_pylist(), key=lambda row: (row["cell"], row["metric"]))


def everything(root: Path) -> dict[str, Any]:
    """All that two runs of the same command must agree on."""
    rows = {"scores": scores(root), "metrics": metrics(root)}
    exact = {name: [row for row in found if row["metric"] not in ROUNDED] for name, found in rows.items()}
    return {"answers": answers(root), **exact}


def cells(root: Path) -> dict[str, dict[str, Any]]:
    """Cell hash -> its row."""
    return {row["cell"]: row for row in Store(root).cells().to_pylist()}


def cell_of(root: Path, method: str, **columns: Any) -> str:
    """The hash of the one cell of a method (and of these columns)."""
    found = [
        name
        for name, row in cells(root).items()
        if row["method"] == method and all(row[key] == value for key, value in columns.items())
    ]
    assert len(found) == 1, f"{len(found)} cells of {method} with {columns}"
    return found[0]


def commits(root: Path) -> dict[Key, Any]:
    """(cell, sample) -> when and by whom the row was committed: equal for rows that were left alone."""
    return {key: (row["committed_at"], row["worker"]) for key, row in responses(root).items()}


def in_order(root: Path) -> list[int]:
    """doc_ids in the order in which samples were committed."""
    first = {}
    for row in responses(root).values():
        first[row["doc_id"]] = min(row["committed_at"], first.get(row["doc_id"], row["committed_at"]))
    return sorted(first, key=first.get)


def tree(root: Path) -> dict[str, Any]:
    """Every file and folder below `root` with its content, inode and time of change."""
    found = {}
    for path in [root, *sorted(root.rglob("*"))]:
        state = path.stat()
        content = path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(root))] = (state.st_ino, state.st_mtime_ns, content)
    return found
