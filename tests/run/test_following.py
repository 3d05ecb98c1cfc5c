"""Promise: a tracker is told each cell's own numbers now and then and at the end."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from mmkv_bench.run import tracking as following
from mmkv_bench.run.tracking import DatasetTracker

CELLS = [SimpleNamespace(cell=name, label=f"{name}@8") for name in ("a", "b")]
PART = SimpleNamespace(dataset="d", cells=CELLS)
NONE = SimpleNamespace(answered=lambda part: np.zeros((2, 4), bool), statuses=lambda part: np.full((2, 4), -1))


class Told(list):
    log = list.append


def rows(doc_id: int, a: str, b: str | None) -> list[dict]:
    return [
        {"cell": cell, "doc_id": doc_id, "answer": text, "status": "ok" if text else "oom", "measured": "group"}
        for cell, text in (("a", a), ("b", b))
    ]


def test_each_cells_answers_and_failures_are_counted(monkeypatch):
    monkeypatch.setattr(following, "EVERY", 0.0)
    told = Told()
    follow = DatasetTracker(PART, NONE, 9, told)
    for doc_id, texts in enumerate((("right", "right"), ("wrong", "right"), ("right", None))):
        follow.add(rows(doc_id, *texts))
    assert [step["d/a@8/answers"] for step in told] == [1, 2, 3]
    assert (told[-1]["d/b@8/failures"], told[-1]["d/b@8/answers"], told[-1]["d/failed"]) == (1, 3, 1 / 3)


def test_what_came_after_the_last_report_is_told_at_the_end():
    told = Told()
    follow = DatasetTracker(PART, NONE, 9, told)
    for doc_id in range(3):
        follow.add(rows(doc_id, "right", "wrong"))
    assert ["d/a@8/answers" in step for step in told] == [True, False, False]  # no sooner than every so many seconds
    follow.close()
    assert (told[-1]["d/a@8/answers"], told[-1]["d/b@8/failures"]) == (3, 0)
    before = len(told)
    follow.close()
    assert len(told) == before


def test_a_groups_largest_peak_stands_under_the_datasets_name():
    told = Told()
    follow = DatasetTracker(PART, NONE, 9, told)
    for peak in (5, 9, 7):
        follow.add([{**row, "peak_device_bytes": peak} for row in rows(0, "right", "wrong")])
    assert [step["d/peak_device_bytes"] for step in told] == [5, 9, 9]
    assert not any("@8/peak" in name for name in told[-1])
