"""Promise: a run compiles its decode step once, however many datasets it has."""

from __future__ import annotations

import pytest

from mmkv_bench.generation.decode import CompiledStep
from tests.run.setting import done


@pytest.mark.full
def test_one_compiled_step_serves_all_datasets_of_a_run(tmp_path, monkeypatch):
    made = []

    class Counted(CompiledStep):
        def __init__(self, model):
            made.append(model)
            super().__init__(model, "eager")

    monkeypatch.setattr("mmkv_bench.run.generate.CompiledStep", Counted)
    words = ["dataset=[pages_lookup,pages_walk]", "method=snapkv", "budget=32", "limit=1", "fidelity=off"]
    outcome = done(tmp_path, *words, "decode=compiled")
    assert len(made) == 1 and sorted(outcome.document["generated"].values()) == [1, 1]
