"""benchmarks/gpu.py on this machine's CPU: what can go wrong without a GPU does so here and not in somebody's ten minutes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.setting import CHECKOUT

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="decode=compiled needs a C++ compiler")
def test_a_rehearsal_goes_through_every_step_and_measures_every_number(tmp_path):
    words = [sys.executable, "-P", "benchmarks/gpu.py", "--rehearse", str(tmp_path)]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT, env=CHECKOUT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = (tmp_path / "report.md").read_text()
    assert report.startswith("# Rehearsal on the embedded model: no statement about any GPU")
    table, steps = report.split("## Steps")
    assert table.count("\n| ") == 2 + 7 and "not measured" not in table  # two lines of heads
    assert re.findall(r"(\w+), \d+ s$", steps, re.MULTILINE) == ["ok"] * 5
