"""Promise: cells that another version made are named before they are made again beside, and cells of this version never."""

from __future__ import annotations

from dataclasses import replace

from mmkv_bench.config.compose import compose
from mmkv_bench.plan.cells import stored_rows
from mmkv_bench.plan.planner import outline
from mmkv_bench.plan.stale_answers import other_versions
from mmkv_bench.store.store import Store

ORIGIN = dict.fromkeys(("git_commit", "git_dirty", "versions", "device", "driver", "cpu", "weights", "weights_file"))


def test_rows_of_another_version_are_named_once_and_those_of_this_one_never(tmp_path):
    plan = outline(compose(["method=[snapkv,keydiff]", "budget=[16,32]", "limit=2", f"out={tmp_path}/rows"]))
    store = Store(plan.out)
    assert other_versions(plan, store) == []
    older = [replace(cell, cell=f"{number:064d}", transformers="4.0.0") for number, cell in enumerate(plan.cells[:3])]
    other = replace(plan.cells[3], cell="f" * 64, transformers="4.0.0", parameters='{"scorer": 1}')  # another setting
    origin = ORIGIN | {"versions": "{}", "device": "cpu", "weights": "folder", "git_dirty": False}
    store.write_cells(stored_rows([*older, other], plan.resolved, origin))
    (said,) = other_versions(plan, store)
    now = plan.cells[0].transformers
    assert said.startswith("3 of the 5 cells have rows of another version") and f"transformers 4.0.0 for {now}" in said
    store.write_cells(stored_rows(plan.cells[:2], plan.resolved, origin))
    assert other_versions(plan, store)[0].startswith("1 of the 5 cells")
