"""kill -9 at any moment: what was acknowledged is there, once; the rest resumes; readers never see anything else."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_examples import ENVIRONMENT, complete, plain, response
from writer_child import CELLS, write_missing

from mmkv_bench.store.store import Store

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., list[dict]]]:
    """Runs writers side by side, killed as asked (see kill_server.py), and tells what became of each."""
    command = [sys.executable, str(HERE / "kill_server.py")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=ENVIRONMENT
    ) as server:

        def ask(*requests: dict) -> list[dict]:
            server.stdin.write(json.dumps(requests) + "\n")
            return json.loads(server.stdout.readline())

        yield ask
        server.stdin.close()


@pytest.fixture
def kill(run) -> Callable[..., dict]:
    """Runs one writer, killed as asked."""

    def ask(root: Path, samples: int, publish_every: int, **when: float) -> dict:
        return run({"root": str(root), "samples": samples, "publish_every": publish_every} | when)[0]

    return ask


def counted(store: Store) -> dict[str, set[str]]:
    """The samples of every cell, after checking that none is there twice and that every sample has all cells."""
    rows = store.responses(columns=["cell", "sample_id"])
    found = Counter(zip(rows["cell"].to_pylist(), rows["sample_id"].to_pylist(), strict=True))
    assert set(found.values()) <= {1}
    samples = {cell: {sample for of, sample in found if of == cell} for cell in CELLS}
    assert samples["c0"] == samples["c1"]
    return samples


def everything(samples: int) -> list[dict]:
    return [complete(response(sample, cell=cell)) for cell in CELLS for sample in range(samples)]


@pytest.mark.full
def test_kill_at_20_random_moments_loses_no_acknowledged_sample_and_duplicates_none(tmp_path, kill):
    moments = random.Random(2)
    present: set[str] = set()
    for moment in range(20):  # every fourth may die before its first sample, the others die at work
        at_work = int(moment % 4 > 0)
        killed = kill(tmp_path, 9999, 3, after=moments.uniform(0.0, 0.1), acknowledged=at_work)
        assert killed["code"] == -9
        new = set(killed["acknowledged"])
        assert not present & new, "a sample that was done has been made again"
        found = counted(Store(tmp_path))["c0"]
        assert present | new <= found
        assert len(found) <= len(present) + len(new) + 1  # at most the sample whose acknowledgement the kill cut off
        assert len(new) >= at_work
        present = found
    samples = len(present) + 10
    write_missing(str(tmp_path), "last", samples, 100)
    assert plain(Store(tmp_path).responses()) == everything(samples)
    assert not list((tmp_path / "journal").glob("*.jsonl"))


@pytest.mark.full
def test_kill_before_every_single_file_operation_loses_and_duplicates_nothing(tmp_path, kill):
    samples, died_before = 3, set()
    for n in range(1, 1000):
        root = tmp_path / str(n)
        killed = kill(root, samples, 2, before=n)
        if killed["code"] == 0:
            break
        assert killed["code"] == -9
        died_before.add(killed["operation"])
        assert set(killed["acknowledged"]) <= counted(Store(root))["c0"], killed
        again = kill(root, samples, 2, before=10_000)
        assert again["code"] == 0
        assert not set(killed["acknowledged"]) & set(again["acknowledged"])
        assert plain(Store(root).responses()) == everything(samples), killed
        assert not list((root / "journal").glob("*.jsonl")), killed
    assert n > 20
    assert {"open", "os.mkdir", "os.rename", "os.remove", "fcntl.flock"} <= died_before


@pytest.mark.full
def test_kill_during_recovery_loses_and_duplicates_nothing(tmp_path, kill):
    for n in range(1, 1000):
        root = tmp_path / str(n)
        assert kill(root, 2, 256, after=0, acknowledged=0)["code"] in (-9, 0)
        writer = Store(root).writer("before")
        writer.commit([response(0, cell=cell) for cell in CELLS])
        writer._journal.close()  # as the death of its process does
        killed = kill(root, 1, 256, before=n)
        assert counted(Store(root))["c0"] >= {"s0000"}, killed
        if killed["code"] == 0:
            break
    assert n > 10


@pytest.mark.full
def test_readers_see_every_acknowledged_sample_exactly_once_at_any_time(tmp_path):
    command = [sys.executable, str(HERE / "writer_child.py"), str(tmp_path), "w", "120", "5", *CELLS]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    acknowledged: list[str] = []
    listener = threading.Thread(target=lambda: acknowledged.extend(line.split()[1] for line in child.stdout))
    listener.start()
    store, reads, over = Store(tmp_path), 0, False
    while not over:
        over = child.poll() is not None
        before = set(acknowledged)
        assert before <= counted(store)["c0"]
        reads += bool(before) and not over
    listener.join()
    assert child.returncode == 0
    assert reads >= 1
    assert plain(store.responses()) == everything(120)


@pytest.mark.full
def test_two_writers_side_by_side_on_the_same_samples_end_with_each_row_once(tmp_path, run):
    both = run(*[{"root": str(tmp_path), "samples": 40, "publish_every": every} for every in (6, 7)])
    assert [writer["code"] for writer in both] == [0, 0]
    assert set(both[0]["acknowledged"]) | set(both[1]["acknowledged"]) == {f"s{i:04d}" for i in range(40)}
    assert plain(Store(tmp_path).responses()) == everything(40)


@pytest.mark.full
def test_two_writers_of_different_cells_do_not_disturb_each_other(tmp_path, run):
    both = run(*[{"root": str(tmp_path), "samples": 40, "publish_every": 6, "cells": [cell]} for cell in CELLS])
    assert [writer["code"] for writer in both] == [0, 0]
    assert [len(writer["acknowledged"]) for writer in both] == [40, 40]
    assert plain(Store(tmp_path).responses()) == everything(40)
