"""benchmarks/gpu.py on this machine's CPU: what can go wrong without a GPU does so here and not in somebody's ten minutes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_pieces import GPU, pieces
from mmkv_bench.cli.main import main
from tests.cli.setting import CHECKOUT

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="decode=compiled needs a C++ compiler")
def test_a_rehearsal_goes_on_where_it_ended_and_measures_every_number(tmp_path):
    words = [sys.executable, "-P", "benchmarks/gpu.py", "--rehearse", str(tmp_path)]
    ended = subprocess.run([*words, "--minutes", "0.3"], capture_output=True, text=True, cwd=ROOT, env=CHECKOUT)
    assert ended.returncode == 1 and "not run yet; the same command goes on" in ended.stdout, ended.stderr
    kept = json.loads((tmp_path / "pieces.json").read_text())
    ended = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT, env=CHECKOUT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    state = json.loads((tmp_path / "pieces.json").read_text())
    assert {name: piece for name, piece in kept.items() if piece["ended"] == "ok"}.items() <= state.items()  # not again
    assert len(state) == 14 and {piece["ended"] for piece in state.values()} == {"ok"}
    report = (tmp_path / "report.md").read_text()
    assert report.startswith("# Rehearsal on the embedded model: no statement about any GPU")
    assert "not measured" not in report and report.count("\n| tiny | 400 |") == 3 * 6
    for sure in ("memory_limit=64MiB | ok", "memory_limit=3MiB | oom", "repeats=3 | 0 | 0", "of 5 | 1 |"):
        assert sure in report


@pytest.mark.full
def test_every_command_for_a_gpu_is_one_that_its_verb_takes(tmp_path, capsys, monkeypatch):
    """Planned, since there is no GPU here; the divisions of the budget that random weights need are made."""
    monkeypatch.chdir(ROOT)
    todo = {piece.name: list(piece.words) for piece in pieces(GPU, tmp_path)}
    for name in ("divided", "divided-7b", "divided-3b"):
        done = subprocess.run([sys.executable, *todo[name]], capture_output=True, text=True, env=CHECKOUT, cwd=ROOT)
        assert done.returncode == 0, done.stderr
    planned = 0
    for name, words in todo.items():
        if "mmkv_bench" in words and "divided" not in name:
            assert main(["plan", *words[words.index("run") + 1 :]]) == 0, (name, capsys.readouterr().err)
            planned += 1
    assert planned == 2 + 2 + 2 + 1 + 2 * 2 * 4
    assert {
        Path(word).exists() for words in todo.values() for word in words if word.startswith(("tests/", "benchmarks/"))
    } == {True}
