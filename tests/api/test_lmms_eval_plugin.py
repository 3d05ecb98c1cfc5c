"""Promise: `lmms-eval --model mmkv` answers as a run does, under lmms-eval's own command line."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest

import mmkv_bench
from mmkv_bench.errors import ConfigError
from tests.cli.setting import CHECKOUT
from tests.run.setting import done, responses

ROOT = Path(mmkv_bench.__file__).parent
GROUP = "lmms_eval.models"


def test_the_entry_point_names_a_class_that_is_there():
    declared = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    module, _, function = declared["mmkv"].partition(":")
    plugin = importlib.import_module(module)
    assert callable(getattr(plugin, function))
    where, _, name = plugin.MODEL.rpartition(".")
    tree = ast.parse(Path(find_spec(where).origin).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


@pytest.mark.full
def test_lmms_evals_command_gets_the_answers_of_a_run(tmp_path):
    """A stochastic method with a parameter of its own: random numbers are drawn under the same names."""
    if not entry_points(group=GROUP, name="mmkv"):
        pytest.skip("this environment was installed before the entry point was there: uv pip install -e .")
    told = "pretrained=tiny,method=mmshift,budget=24,seed=1,gamma=3"
    command = [sys.executable, "-m", "lmms_eval", "--model", "mmkv", "--model_args", told, "--batch_size", "1"]
    command += ["--tasks", "pages_small", "--include_path", str(ROOT / "datasets" / "tasks" / "pages"), "--limit", "8"]
    command += ["--log_samples", "--output_path", str(tmp_path / "out"), "--device", "cpu"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=CHECKOUT, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    (log,) = (tmp_path / "out").rglob("*_samples_pages_small.jsonl")
    theirs = {row["doc_id"]: row["filtered_resps"] for row in map(json.loads, log.read_text().splitlines())}
    done(
        tmp_path / "rows",
        "method=mmshift",
        "budget=24",
        "seed=1",
        "methods.mmshift.gamma=3",
        "limit=8",
        "baseline=none",
    )
    ours = {row["doc_id"]: row["answer"].strip() for row in responses(tmp_path / "rows").values()}
    assert theirs == ours and len(ours) == 8 and len(set(ours.values())) > 4


@pytest.mark.full
def test_what_a_run_refuses_is_refused_and_nothing_is_ignored():
    from mmkv_bench.api.lmms_eval_model import MMKV

    for arguments, words in (
        ({"pretrained": "tiny", "method": "snapkw"}, "unknown method 'snapkw'"),
        ({"pretrained": "tiny", "method": "snapkv", "windw": 8}, "windw"),
        ({"pretrained": "tiny", "batch_size": 8}, "prompts are answered one by one"),
        ({"pretrained": "tiny", "method": "snapkv", "budget": 0}, "budget"),
    ):
        with pytest.raises(ConfigError, match=words):
            MMKV(**arguments)
    made = MMKV("tiny", "snapkv", budget=0.2, window=8, dtype="float32", device="cpu")
    (cell,) = made.plan.cells
    assert (cell.budget_fraction, json.loads(cell.parameters)["window"], cell.dtype) == ("0.2", 8, "float32")
