"""The README's own example of a method runs as printed there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _block(text: str, language: str, path: str) -> str:
    """The code block of `language` that follows the mention of `path`."""
    match = re.search(rf"`{re.escape(path)}`:\n\n```{language}\n(.*?)```", text, re.DOTALL)
    assert match, f"README no longer shows {path}"
    return match[1]


def test_the_example_method_of_the_readme_runs_beside_a_built_in_one(tmp_path):
    text = (ROOT / "README.md").read_text()
    scorer = "mmkv_bench/compression/scorers/value_norm.py"
    method = "conf/method/value_norm.yaml"
    modules, conf = tmp_path / "modules", tmp_path / "conf"
    (conf / "method").mkdir(parents=True)
    modules.mkdir()
    (modules / "value_norm.py").write_text(_block(text, "python", scorer))
    (conf / "method" / "value_norm.yaml").write_text(_block(text, "yaml", method))
    # Where the README adds a file to the checkout, the test adds a folder to the package's path.
    code = (
        "import sys, mmkv_bench.compression.scorers as scorers\n"
        "scorers.__path__.append(sys.argv[1])\n"
        "from mmkv_bench.__main__ import main\n"
        "sys.exit(main(sys.argv[2:]))\n"
    )
    command = re.search(r"python -m mmkv_bench ('method=\[snapkv,value_norm\]'.*)", text)[1]
    overrides = [word.strip("'") for word in command.split()]
    done = subprocess.run(
        [sys.executable, "-c", code, str(modules), *overrides]
        + ["--config-dir", str(conf), "limit=2", f"out={tmp_path / 'out'}", "--json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["cells"] == 3 and document["failed"] == 0  # full, snapkv, value_norm
    assert re.search(r"^\| value_norm \(tuned\)", done.stdout, re.MULTILINE)  # power=2 is not the default
