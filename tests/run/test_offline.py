"""Promise: a run that needs nothing from a hub tells the Hugging Face libraries so, before they are imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests import cover

CODE = """
import sys
from mmkv_bench.cli.main import main
assert "huggingface_hub" not in sys.modules
code = main(sys.argv[1:])
from huggingface_hub import constants
print(code, constants.HF_HUB_OFFLINE, "lmms_eval" in sys.modules)
"""


@pytest.mark.slow
@cover.few(
    ("dataset", "offline"),
    [
        (("dataset=pages",), True),
        (("dataset=lmms_eval", "datasets.lmms_eval.task=docvqa_val"), True),
        (("dataset=[pages,lmms_eval]", "datasets.lmms_eval.task=mme", "datasets.lmms_eval.offline=false"), False),
    ],
    first=1,
)
def test_the_libraries_are_offline_unless_a_dataset_is_to_be_fetched(tmp_path, dataset, offline):
    """The model is of no supported family, so that the run ends once the libraries are there."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (folder / "model.safetensors").write_bytes(b"")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    ended = subprocess.run(
        [sys.executable, "-c", CODE, "model=hf", f"model.path={folder}", f"out={tmp_path}/rows", *dataset],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert ended.stdout == f"2 {offline} False\n", ended.stderr
    assert not (tmp_path / "rows").exists()
