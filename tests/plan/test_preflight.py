"""Promise: a plan names what a run lacks here, weights, data, calibrations, judge and room, and asks no network."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest

from mmkv_bench.config.compose import compose
from mmkv_bench.config.schema import resolve_path
from mmkv_bench.plan.planner import outline
from mmkv_bench.plan.preflight import Disk, disk_of, missing_inputs, preflight_text
from mmkv_bench.store.store import Store

ENOUGH = Disk(rows=10, row=1.0, measured=True, free=100)
RUN = ("model=hf", "model.path=org/name", "model.dtype=float32", "dataset=[docvqa,mmvet]", "method=[snapkv,sparsemm]")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty hub cache, and no network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "converted"))
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a plan asked a network"))
    return tmp_path / "hub"


def lacks(*words: str, disk: Disk = ENOUGH) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in missing_inputs(outline(compose([*words, "out=rows/of/it"])), disk):
        found.setdefault(one.kind, []).append(one.what)
    return found


@pytest.mark.slow
def test_what_is_missing_is_named_and_what_is_there_is_not(cache, monkeypatch):
    found = lacks(*RUN, disk=Disk(rows=200, row=1.0, measured=True, free=100))
    assert {kind: len(of_kind) for kind, of_kind in found.items()} == {
        "weights": 1, "data": 2, "calibration": 1, "judge": 1, "disk": 1
    }  # fmt: skip
    assert "org/name is not in the hub cache" in found["weights"][0] and "hf download org/name" in found["weights"][0]
    assert "DocVQA is not in the hub cache" in found["data"][0] and "sparsemm" in found["calibration"][0]
    assert found["judge"][0].startswith("mmvet: needs a judge") and "200 bytes" in found["disk"][0]

    folder = cache / "models--org--name" / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    (cache / "models--org--name" / "refs").mkdir()
    (cache / "models--org--name" / "refs" / "main").write_text("0" * 40)
    shutil.copy(Path(resolve_path("pkg://mmkv_bench/tiny/weights")) / "config.json", folder)
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (folder / shards["a"]).touch()
    for name in ("DocVQA", "MMVet"):
        (cache / f"datasets--lmms-lab-encoder--{name}" / "snapshots" / "1").mkdir(parents=True)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    found = lacks(*RUN[:4], "method=snapkv", "judge=openai", "judge.model=m")
    assert {*found} == {"weights", "judge"} and "OPENAI_API_KEY is not set" in found["judge"][0]
    assert "1 of 2 files of org/name" in found["weights"][0] and shards["b"] in found["weights"][0]
    (folder / shards["b"]).touch()
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    assert lacks(*RUN[:4], "method=snapkv", "judge=openai", "judge.model=m") == {}


def test_room_is_that_of_missing_rows_where_they_go(cache, tmp_path):
    plan = outline(compose(["method=snapkv", "limit=7", f"out={tmp_path}/rows/of/it"]))
    store = Store(plan.out)
    disk = disk_of(plan, plan.coverage(store), store)
    assert (disk.rows, disk.measured) == (7 * 2 * 4096, False) and disk.free > 0
    text = preflight_text(disk, missing_inputs(plan, disk), plan.out)
    assert "56 KiB for the missing rows" in text and "ready      nothing" in text
    assert not (tmp_path / "rows").exists()


def test_a_file_that_goes_while_rows_are_counted_stops_no_plan(cache, tmp_path):
    """A journal ends when its job publishes: a link to nothing is listed, and gone when it is looked at."""
    plan = outline(compose(["method=snapkv", "limit=7", f"out={tmp_path}"]))
    store = Store(plan.out)
    coverage = plan.coverage(store)
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "gone.jsonl").symlink_to(tmp_path / "nothing")
    assert disk_of(plan, coverage, store).rows == 7 * 2 * 4096
