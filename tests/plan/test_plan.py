"""Promise: every shipped configuration comes to a plan at once, and a plan counts what a store holds of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from mmkv_bench.config.compose import compose
from mmkv_bench.plan.plan import Coverage
from mmkv_bench.plan.planner import make_plan, outline
from mmkv_bench.store.response import STATUSES
from tests.cli.setting import CHECKOUT
from tests.plan.outline_all import answering, choices


@pytest.mark.slow
@pytest.mark.parametrize("every", [24, pytest.param(1, marks=pytest.mark.full)])
def test_every_shipped_configuration_comes_to_a_plan_without_model_data_or_heavy_imports(every):
    script = Path(__file__).with_name("outline_all.py")
    ended = subprocess.run(
        [sys.executable, script, str(every)], capture_output=True, text=True, check=False, env=CHECKOUT
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout.splitlines()[-1])
    assert (told["heavy"], told["left"]) == ([], [])
    plans = told["plans"]
    assert {*plans} == {"method=", *(f"{g}={name}" for g in ("model", "experiment") for name in answering(g)[::every])}
    for name, plan in plans.items():
        assert plan["family"] and plan["datasets"], name
        assert all(cells and (samples or counted == "unknown") for cells, samples, counted in plan["datasets"].values())
    everything = plans["method="]
    assert {*everything["methods"]} == {*choices("method")[::every], "full"}
    assert len(everything["datasets"]) == len(choices("dataset")[::every])


def test_an_outline_of_what_is_at_hand_is_the_plan(tmp_path):
    """Pages and the embedded model are known without being opened; so are their cells."""
    words = ("dataset=[pages_walk,pages]", "method=[full,snapkv]", "limit=7", "shard=1/2", f"out={tmp_path}/rows")
    known, guessed = make_plan(compose(words)), outline(compose(words))
    assert guessed.names == known.names and guessed.notes == known.notes and guessed.family == known.family
    assert [part.samples for part in guessed.parts] == [part.samples for part in known.parts]
    for plan in (known, guessed):
        assert [part.name for part in plan.parts] == ["pages_walk", "pages"]
        labels = [part.dataset for part in plan.parts]
        assert list(plan.resolved["datasets"]) == labels == ["pages_walk_small", "pages_small"]
    assert 0 < len(known.parts[1].samples) < 7
    assert not (tmp_path / "rows").exists()


def test_a_standing_counts_as_a_slow_loop_does(tmp_path):
    plan = make_plan(compose(["method=[full,snapkv,random]", "limit=9", f"out={tmp_path}/rows"]))
    (part,) = plan.parts
    rng = np.random.default_rng(3)
    ends = rng.choice([None, *STATUSES], (len(part.cells), len(part.samples) + 2), p=[0.3, 0.3, 0.1, 0.1, 0.1, 0.1])
    names = [*part.samples, "not-of-this-limit", "nor-this"]
    rows = [
        (cell.cell, name, end, "group")
        for cell, of_cell in zip(part.cells, ends, strict=True)
        for name, end in zip(names, of_cell, strict=True)
        if end is not None
    ] + [("another-cell", names[0], "ok", "group")]
    columns = [pa.array(values).dictionary_encode() for values in zip(*rows, strict=True)]
    table = pa.table(columns, ["cell", "sample_id", "status", "measured"])
    changed = {part.cells[1].cell: {names[0], names[4]}}
    (part,) = plan.with_changed(changed).parts
    for retry in ((), ("oom",), ("nan", "changed")):
        coverage = Coverage(table, retry)
        done = {
            cell.cell: {
                name
                for name, end in zip(part.samples, of_cell, strict=False)
                if end is not None and end not in retry
                if "changed" not in retry or name not in changed.get(cell.cell, ())
            }
            for cell, of_cell in zip(part.cells, ends, strict=True)
        }
        assert coverage.done(part) == done
        assert coverage.count(part) == sum(map(len, done.values()))
        assert coverage.missing(part) == sum(any(name not in own for own in done.values()) for name in part.samples)
        assert coverage.failed(part) == sum(end not in (None, "ok") for end in ends[:, :9].flatten())


@pytest.mark.slow
def test_a_calibration_that_is_not_there_is_a_note_of_the_outline_and_stops_the_plan(tmp_path):
    words = ("model=qwen2_5_vl_3b", "model.weights=random", "method=[sparsemm,snapkv]", f"out={tmp_path}/rows")
    plan = outline(compose(words))
    assert {cell.method for cell in plan.cells} == {"full", "sparsemm", "snapkv"}
    assert any("sparsemm" in note and "calibration" in note for note in plan.notes)
    with pytest.raises(Exception, match="calibration"):
        make_plan(compose([*words, "dataset=pages_walk"]))
