"""One run split over processes of this machine."""

from __future__ import annotations

import json
import os
import re
import sys

import pytest

from mmkv_bench.errors import ConfigError
from mmkv_bench.run import launch as module
from mmkv_bench.run.launch import Worker, launch, run_all, visible_devices, workers
from tests.cli.setting import verb
from tests.each import each

main = verb("launch")

ONE = ("model.device=cpu", "limit=1")

# Stands in for `python -m mmkv_bench`: keeps what it was asked and given, prints, and dies where it is told to.
CHILD = """
import json, os, sys, pathlib
from mmkv_bench.run.dispatch import SampleQueueClient
given = SampleQueueClient()
number = next(n for n in range(9) if given.take("number", str(n)))
given.done("number", str(number))
out = pathlib.Path(next(word for word in sys.argv if word.startswith("out=")).removeprefix("out="))
out.mkdir(parents=True, exist_ok=True)
(out / f"asked-{number}.json").write_text(
    json.dumps({"argv": sys.argv[1:], "threads": os.environ.get("OMP_NUM_THREADS")}))
print("card of", number)
print("working on", number, file=sys.stderr)
sys.exit(3 if str(number) == os.environ.get("FAILING", "none") else 0)
"""


@pytest.fixture
def child(tmp_path, monkeypatch):
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(module, "_RUN", (sys.executable, str(script)))


@pytest.fixture
def scored(monkeypatch):
    import mmkv_bench.run.run as runner

    seen = []
    monkeypatch.setattr(runner, "carry_out", lambda plan: seen.append(plan) or 0)
    return seen


def asked(out):
    return [json.loads(file.read_text()) for file in sorted(out.glob("asked-*.json"))]


def test_every_process_generates_what_it_is_given_and_one_scores_at_the_end(child, scored, tmp_path, capfd):
    out = tmp_path / "rows"
    assert launch([*ONE, f"out={out}", "budget=16", "json=true"], 3) == 0
    got = asked(out)
    assert all(entry["threads"] for entry in got)
    assert [entry["argv"][-1] for entry in got] == ["stage=generate"] * 3
    assert all("budget=16" in entry["argv"] and "json=true" not in entry["argv"] for entry in got)
    assert [(plan.stage, plan.answering.selection.shard, plan.json) for plan in scored] == [("score", "0/1", True)]
    captured = capfd.readouterr()
    assert "[1/3] working on " in captured.err
    assert "card of" not in captured.out
    assert (out / "logs" / "process-1-of-3.log").read_text().count(" o") == 2


def test_a_process_that_fails_is_reported_and_nothing_is_scored(child, scored, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("FAILING", "1")
    out = tmp_path / "rows"
    assert launch([*ONE, f"out={out}"], 3) == 3
    err = capfd.readouterr().err
    (number,) = re.findall(r"process (\d)/3 ended with exit code 3; see ", err)
    assert f"see {out}/logs/process-{number}-of-3.log" in err and "run the same command again" in err
    assert len(asked(out)) == 3
    assert scored == []


def test_generating_only_scores_nothing(child, scored, tmp_path):
    assert launch([*ONE, f"out={tmp_path}/rows", "stage=generate"], 2) == 0
    assert scored == []


def test_cores_are_divided_and_devices_dealt_out(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    on_cpu = workers(["budget=16"], 3, [], tmp_path)
    assert [worker.environment for worker in on_cpu] == [{"OMP_NUM_THREADS": "2"}] * 3
    dealt = workers(["budget=16"], 3, ["4", "7"], tmp_path)
    assert [worker.environment["CUDA_VISIBLE_DEVICES"] for worker in dealt] == ["4", "7", "4"]
    spread = workers(["budget=16"], 2, ["0", "1", "2", "3"], tmp_path, spread=True)
    assert [worker.environment["CUDA_VISIBLE_DEVICES"] for worker in spread] == ["0,2", "1,3"]
    counts = [module._number_of_processes(asked, ["0", "1"], spread) for asked in (None, 2) for spread in (False, True)]
    assert counts == [2, 1, 2, 2]


@each(
    ("value", "devices"),
    [("", []), ("-1", []), ("0", ["0"]), ("2, 3", ["2", "3"]), ("GPU-ab,GPU-cd", ["GPU-ab", "GPU-cd"])],
)
def test_visible_devices_are_those_of_the_environment(monkeypatch, value, devices):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert visible_devices("auto") == devices
    assert visible_devices("cpu") == []


@each(
    ("overrides", "processes", "words"),
    [
        ((), None, "give --processes N"),
        (("shard=0/2",), 2, "launch divides the run itself"),
        (("stage=score",), 2, "stage=score needs only one process"),
        (("budget=0",), 2, "budget=0 keeps nothing"),
    ],
)
def test_what_cannot_be_split_is_refused(overrides, processes, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        launch([*ONE, f"out={tmp_path}/rows", *overrides], processes)
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_refuses_with_exit_code_2(capsys):
    assert main(["-m", *ONE, "budget=1,2"]) == 2
    assert main([*ONE, "--processes", "0"]) == 2
    assert main([*ONE, "--processes", "two"]) == 2
    assert main([*ONE, "processes=2"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert "'-m' is not written so; write `mmkv-bench launch" in lines[0]
    assert "'0' is not a whole number >= 1" in lines[1] and "'two'" in lines[2]
    assert "write --processes 2" in lines[3]


def test_processes_run_side_by_side(tmp_path):
    """Each process waits for the file that the other one makes: one after the other they would wait for ever."""
    code = (
        "import pathlib, sys, time\n"
        "mine, other = map(pathlib.Path, sys.argv[1:])\n"
        "mine.touch()\n"
        "while not other.exists(): time.sleep(0.01)\n"
    )
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    started = [
        Worker(f"{i}/2", (sys.executable, "-c", code, *pair), {}, tmp_path / f"{i}.log")
        for i, pair in enumerate([(first, second), (second, first)])
    ]
    assert run_all(started) == {}


def test_a_killed_process_is_told_by_its_signal(tmp_path):
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    ended = run_all([Worker("0/1", (sys.executable, "-c", code), {}, tmp_path / "log")])
    assert [*ended.values()] == [-9]


def test_ctrl_c_ends_all_processes(tmp_path, monkeypatch):
    code = "import time; print('up', flush=True); time.sleep(600)"
    started = [Worker(f"{i}/2", (sys.executable, "-c", code), {}, tmp_path / f"{i}.log") for i in range(2)]
    processes = []
    real = module.subprocess.Popen

    def popen(*args, **kwargs):
        processes.append(Interrupting(real(*args, **kwargs), first=not processes))
        return processes[-1]

    monkeypatch.setattr(module.subprocess, "Popen", popen)
    with pytest.raises(KeyboardInterrupt):
        run_all(started)
    assert all(process.poll() is not None for process in processes)


class Interrupting:
    """A process whose first wait is interrupted, as Ctrl-C would."""

    def __init__(self, process, first):
        self.process, self.pending = process, first

    def wait(self, timeout=None):
        if self.pending:
            self.pending = False
            raise KeyboardInterrupt
        return self.process.wait(timeout)

    def __getattr__(self, name):
        return getattr(self.process, name)
