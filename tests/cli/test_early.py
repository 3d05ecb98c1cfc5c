"""Promise: what can be refused without torch is refused before it is imported."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from mmkv_bench import devices
from mmkv_bench.cli.main import main
from mmkv_bench.run import generate
from tests.cli.setting import CHECKOUT

SCRIPT = """
import sys
from mmkv_bench import devices
from mmkv_bench.cli.main import main
devices.KINDS["cuda"].ruled_out = classmethod(lambda cls: True)
mistakes = ["method=custom"], ["method=bad.py"], ["method=nowhere.py"], ["model.device=cuda"]
for words in (*mistakes, ["decode=compiled"], ["scenario=efficiency", "model.attention=flash_attention_2"]):
    assert main([*words, "out=rows"]) == 2, words
for words in (["check", "bad.py"], ["diagnose", "lorenz", "limit=1"], ["calibrate", "prefixkv", "foo=1"]):
    assert main(words) == 2, words
print(sorted({"torch", "transformers", "lmms_eval", "datasets"} & set(sys.modules)))
"""


@pytest.mark.slow
def test_what_needs_no_torch_to_be_refused_is_refused_without_it(tmp_path):
    (tmp_path / "bad.py").write_text("x = 1\ndef y(:\n")
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env={**CHECKOUT, "CXX": "no-such-compiler"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stdout == "[]\n", ended.stdout + ended.stderr
    said = [line.partition(": ")[2] for line in ended.stderr.splitlines()]
    assert [text[:40] for text in said] == [
        "method=custom needs a file; allowed: met",
        "bad.py:2: the file is not valid Python: ",
        "the method's file nowhere.py does not ex",
        "model.device=cuda, but this machine has ",
        "decode=compiled needs a C++ compiler, bu",
        "model.attention=flash_attention_2 needs ",
        "bad.py:2: the file is not valid Python: ",
        "limit=1 has no effect on lorenz; allowed",
        "foo=1 is not a setting of the samples; a",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["bad.py"]


def test_a_device_is_ruled_out_by_its_drivers_files_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    for files, gone in ((["null", "tty"], True), (["nvidia0"], False), (["kfd"], False), (["nvhost-gpu"], False)):
        monkeypatch.setattr("mmkv_bench.devices.cuda.os.listdir", lambda folder, files=files: files)
        assert devices.Cuda.ruled_out() is gone, files
    monkeypatch.setattr(sys, "platform", "win32")
    assert not devices.Cuda.ruled_out()


def test_progress_is_told_of_every_commit(monkeypatch):
    """Of each cell's own where they share nothing, of all cells' at once where they share a prefill."""
    monkeypatch.setattr(generate, "prompt_row", lambda *given: {})
    for results, told in (([["a"], ["b"], ["c"]], [1, 1, 1]), ([["a", "b", "c"]], [3])):
        found: list[int] = []
        cells = [SimpleNamespace(cell=name, dataset="pages", model_fingerprint="m") for name in "abc"]
        answering = generate.Answering.__new__(generate.Answering)
        vars(answering).update(
            cells=cells, done=dict.fromkeys("abc", ()), specs=dict.fromkeys("abc"), committed=found.append
        )
        vars(answering).update(writer=SimpleNamespace(commit=lambda *given: None), after=lambda rows: None)
        vars(answering).update(_results=lambda *given, r=results: r, _row=lambda *given: {"answer": "x"})
        assert answering(SimpleNamespace(sample_id="1", dataset="pages", error=None)) == "x"
        assert found == told and answering.pending("1") == 3


@pytest.mark.full
def test_cells_one_by_one_are_counted_one_by_one(tmp_path, capsys):
    words = ["method=snapkv", "budget=32", "limit=2", "dataset=pages_lookup", "sharing=off", "model.device=cpu"]
    assert main([*words, f"out={tmp_path}"]) == 0
    err = capsys.readouterr().err
    assert "2 cells one by one: 1/4, " in err and "2 cells one by one: 4/4, " in err
