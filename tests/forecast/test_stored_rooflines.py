"""Promise: limits beside stored times are those of the very model of the rows, and nobody is asked for it."""

from __future__ import annotations

import json

import pytest

from mmkv_bench.config.compose import compose
from mmkv_bench.forecast.device_speed import DeviceSpeed, save
from mmkv_bench.forecast.roofline import roofline_by_context, stored_roofline, stored_rooflines
from mmkv_bench.store.store import Store
from tests.tables.examples import cell_row

RANDOM = ("model=qwen2_5_vl_3b", "model.weights=random")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    """A cache folder with a processor without a name, as the cells' is."""
    monkeypatch.setenv("MMKV_BENCH_CACHE", str(tmp_path / "cache"))
    save(DeviceSpeed("cpu", "cpu", 2, 1e10, {"float32": 1e12}, 1 << 34, "2", "2026-11-22"))


def timed(root, *models: tuple[str, ...]) -> Store:
    """A store with a pass of each of these models, of two threads."""
    store = Store(root)
    for place, words in enumerate(models):
        config = compose([*words]).resolved
        model = config["model"]
        changed = {
            "model": model["name"],
            "model_fingerprint": f"{place}" * 16,
            "config": json.dumps({"model": model}),
        }
        store.write_cells([cell_row(f"c{place}", "full", dataset="made_up_text", **changed)])
        row = {"cell": f"c{place}", "dataset": "made_up_text", "prompt_tokens": 8, "visual_tokens": 0, "batch": 1}
        row |= {"new_tokens": 4, "status": "ok", "place": 0, "order_seed": 0, "measured": "own", "repeat": 0}
        store.write_timings([row | {"phase": "total", "seconds": 1.0, "threads": 2}])
    return store


def test_models_of_one_name_and_other_layers_have_limits_of_their_own(tmp_path):
    store = timed(tmp_path / "rows", (*RANDOM, "model.layers=1"), (*RANDOM, "model.layers=4"))
    limit_of = roofline_by_context(store)
    one, four = (limit_of(cell) for cell in store.cells().to_pylist())
    assert (one.decoder.layers, four.decoder.layers) == (1, 4) and one.step_s(0, 1) < four.step_s(0, 1)
    assert stored_roofline(store, store.timings()) is None, "of two models there is no one limit"


def test_a_model_of_the_hub_is_known_by_its_shape_and_one_without_is_left_out(tmp_path):
    """Tests are offline: who asked the hub for a configuration would have none."""
    store = timed(tmp_path / "rows", ("model=qwen2_5_vl_7b",), ("model=hf", "model.path=org/name"))
    (found,) = stored_rooflines(store, store.timings()).values()
    assert (found.decoder.layers, found.decoder.hidden, found.device) == (28, 3584, "cpu-2-threads")
