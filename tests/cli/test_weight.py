"""Promise: no checkout of this repository has a file over 10 MB, or more than 30 MB of results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "weight.py"


def weigh(folder: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, str(SCRIPT)], cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stderr


def test_this_checkout_is_light():
    assert weigh(ROOT) == (0, "")


@pytest.mark.slow
def test_a_large_file_and_large_results_are_refused(tmp_path):
    if subprocess.run(["git", "init", "-q", str(tmp_path)]).returncode:
        pytest.skip("no git here")
    (tmp_path / "results").mkdir()
    (tmp_path / ".gitignore").write_text("runs/\n")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "ignored").write_bytes(bytes(10_000_001))
    for name in ("a", "b", "c"):
        (tmp_path / "results" / name).write_bytes(bytes(10_000_000))
    assert weigh(tmp_path) == (0, "")
    (tmp_path / "results" / "d").write_bytes(bytes(1))
    code, said = weigh(tmp_path)
    assert code == 1 and "results/ has 30.0 MB" in said and "--slim" in said
    (tmp_path / "results" / "d").unlink()
    (tmp_path / "large file").write_bytes(bytes(10_000_001))
    subprocess.run(["git", "-C", str(tmp_path), "add", "-A"], check=True)
    code, said = weigh(tmp_path)
    assert code == 1 and said.startswith("error: large file has 10.0 MB") and "results/ has" not in said
    (tmp_path / "large file").write_bytes(b"")
    assert weigh(tmp_path) == (1, said), "what is staged is what a commit takes"
    (tmp_path / "large file").unlink()
    assert weigh(tmp_path) == (1, said)
    subprocess.run(["git", "-C", str(tmp_path), "add", "-A"], check=True)
    assert weigh(tmp_path) == (0, "")


def test_yaml_that_cannot_be_read_or_says_a_thing_twice_is_refused(tmp_path):
    good, twice, broken = (tmp_path / name for name in ("good.yaml", "twice.yaml", "broken.yaml"))
    good.write_text("a: 1\nb: {a: 2}\nc: !function utils.doc\n---\na: 3\n")
    twice.write_text("a: 1\nb:\n  - {c: 1, c: 2}\n")
    broken.write_text("a: [1\n")
    script = [sys.executable, str(ROOT / "scripts" / "yaml_files.py")]
    assert subprocess.run([*script, str(good)], capture_output=True).returncode == 0
    done = subprocess.run([*script, *map(str, (good, twice, broken))], capture_output=True, text=True)
    assert done.returncode == 1 and "good" not in done.stderr
    assert (
        "twice.yaml, line 3: 'c' occurs a second time" in done.stderr and "broken.yaml is not valid YAML" in done.stderr
    )
