"""Promise: no answer of another model, and none to another picture, stands in a cell."""

from __future__ import annotations

import shutil
from importlib.resources import files
from pathlib import Path

from mmkv_bench.planning import run as stages
from mmkv_bench.store.store import Store
from tests.run.setting import go

WALK = ("dataset=pages_walk", "method=[full]", "limit=1", "fidelity=off", "dataset.generation.max_new_tokens=2")


def test_weights_that_change_while_they_are_loaded_leave_no_row(tmp_path, monkeypatch):
    weights = tmp_path / "model"
    shutil.copytree(Path(str(files("mmkv_bench") / "tiny" / "weights")), weights)
    load = stages._load

    def and_changed(config):
        loaded = load(config)
        file = weights / "generation_config.json"
        file.write_text(file.read_text() + " ")
        return loaded

    monkeypatch.setattr(stages, "_load", and_changed)
    asked = (*WALK, "model=hf", f"model.path={weights}")
    outcome = go(tmp_path / "rows", *asked)
    assert outcome.code == 2 and "changed while this run was loading them" in outcome.err
    store = Store(tmp_path / "rows")
    assert store.cells().num_rows == store.responses().num_rows == 0
    monkeypatch.undo()
    assert go(tmp_path / "rows", *asked).code == 0
