"""What squeue and sacct say, without Slurm: programs of these names on PATH."""

from __future__ import annotations

import json
import os

import pytest

from mmkv_bench.cli.verbs.status import count_ended_jobs, count_queued_jobs
from mmkv_bench.store.store import Store
from tests.cli.setting import verb
from tests.store.store_examples import cell, response

FAKE = """#!/bin/sh
[ "$*" = "--me --array --noheader --format=%T %j" ] || { echo "squeue: unexpected $*" >&2; exit 3; }
printf 'RUNNING mmkv_bench\\nPENDING mmkv_bench\\nPENDING mmkv_bench\\nRUNNING somebody_elses\\n'
"""
ENDED = """#!/bin/sh
case "$*" in *--allocations*--format=State,JobName) ;; *) echo "sacct: unexpected $*" >&2; exit 3 ;; esac
printf 'COMPLETED|mmkv_bench\\nTIMEOUT|mmkv_bench\\nCANCELLED by 1000|mmkv_bench\\nOUT_OF_MEMORY|mmkv_bench\\n'
printf 'TIMEOUT|mmkv_bench\\nRUNNING|mmkv_bench\\nFAILED|somebody_elses\\n'
"""


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def put(text: str, name: str = "squeue") -> None:
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)

    return put


def test_jobs_of_ours_are_counted_by_state_and_a_queue_that_cannot_be_asked_stops_nothing(
    squeue, tmp_path, monkeypatch, capsys
):
    store = Store(tmp_path / "rows")
    store.write_cells([cell(config=json.dumps({"limit": 3, "datasets": {"pages": {"count": 3}}}))])
    with store.writer("w") as writer:
        writer.commit([response(0)])
    squeue(FAKE)
    assert verb("status")([str(store.root)]) == 0
    said = capsys.readouterr().out
    assert "1 of 3 answers" in said and "Slurm: 2 pending, 1 running" in said
    assert verb("status")([str(store.root), "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told["jobs"] == {"RUNNING": 1, "PENDING": 2} and told["seconds_left"] > 0
    squeue(ENDED, "sacct")
    assert verb("status")([str(store.root)]) == 0
    said = capsys.readouterr().out
    assert "Slurm: 2 pending, 1 running; ended within a day: 1 cancelled, 1 out_of_memory, 2 timeout\n" in said
    squeue("#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2\nexit 1\n", "sacct")
    assert verb("status")([str(store.root), "--json"]) == 0 and count_ended_jobs() == {}
    assert json.loads(capsys.readouterr().out)[0]["jobs_ended"] == {}
    squeue("#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact slurm controller' >&2\nexit 1\n")
    assert verb("status")([str(store.root)]) == 0
    assert "Unable to contact slurm controller" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "")
    assert count_queued_jobs() is None


def test_watching_goes_on_until_all_answers_are_there(tmp_path, monkeypatch, capsys):
    store = Store(tmp_path / "rows")
    store.write_cells([cell(config=json.dumps({"limit": 3, "datasets": {"pages": {"count": 3}}}))])
    writer = store.writer("w")
    writer.commit([response(0)])
    waits = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        writer.commit([response(len(waits))])

    monkeypatch.setattr("time.sleep", wait)
    monkeypatch.setenv("PATH", "")
    assert verb("status")([str(store.root), "--watch", "5"]) == 0
    said = capsys.readouterr().out
    writer.publish()
    assert waits == [5, 5]
    assert [f"{number} of 3 answers" in said for number in (1, 2, 3)] == [True] * 3
    assert "1 process writing, 1 cells running" in said
    assert verb("status")([str(store.root), "--watch", "0"]) == verb("status")(["--watch", "2", "--json"]) == 2
