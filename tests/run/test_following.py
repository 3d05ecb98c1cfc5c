"""Promise: a tracker is told each cell's own numbers now and then and at the end; a scorer that fails ends its scores alone."""

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


class Scores:
    def __init__(self, fails_at: int | None = None) -> None:
        self.asked: list = []
        self.fails_at = fails_at

    def of(self, answers):
        self.asked.append(answers)
        if len(self.asked) == self.fails_at:
            raise RuntimeError("no scorer")
        return [{"hit": float(text == "right")} for _, text in answers]


def rows(doc_id: int, a: str, b: str | None) -> list[dict]:
    return [
        {"cell": cell, "doc_id": doc_id, "answer": text, "status": "ok" if text else "oom", "measured": "group"}
        for cell, text in (("a", a), ("b", b))
    ]


def test_scores_run_over_answers_that_are_there_each_text_scored_once(monkeypatch):
    monkeypatch.setattr(following, "REPORT_INTERVAL_S", 0.0)
    monkeypatch.setattr(following, "SCORING_FACTOR", 0.0)
    told, scores = Told(), Scores()
    follow = DatasetTracker(PART, NONE, 9, told, scores)
    for doc_id, texts in enumerate((("right", "right"), ("wrong", "right"), ("right", None))):
        follow.add(rows(doc_id, *texts))
    assert [step["d/a@8/hit"] for step in told] == [1, 0.5, 2 / 3] and [step["d/b@8/hit"] for step in told] == [1, 1, 1]
    assert scores.asked == [[(0, "right")], [(1, "wrong"), (1, "right")], [(2, "right")]]
    assert (told[-1]["d/b@8/failures"], told[-1]["d/b@8/answers"], told[-1]["d/failed"]) == (1, 3, 1 / 3)


def test_what_came_after_the_last_report_is_told_at_the_end(monkeypatch):
    told, scores = Told(), Scores()
    follow = DatasetTracker(PART, NONE, 9, told, scores)
    for doc_id in range(3):
        follow.add(rows(doc_id, "right", "wrong"))
    assert [("d/a@8/hit" in step) for step in told] == [True, False, False]  # no sooner than every so many seconds
    follow.close()
    assert (told[-1]["d/a@8/hit"], told[-1]["d/b@8/hit"], told[-1]["d/a@8/answers"]) == (1, 0, 3)
    before = len(told)
    follow.close()
    assert len(told) == before and len(scores.asked) == 2


def test_a_scorer_that_fails_is_not_asked_again_and_the_rest_is_told(monkeypatch, caplog):
    monkeypatch.setattr(following, "REPORT_INTERVAL_S", 0.0)
    monkeypatch.setattr(following, "SCORING_FACTOR", 0.0)
    told, scores = Told(), Scores(fails_at=2)
    follow = DatasetTracker(PART, NONE, 9, told, scores)
    for doc_id in range(4):
        follow.add(rows(doc_id, "right", "wrong"))
    assert len(scores.asked) == 2 and caplog.text.count("no running scores: no scorer") == 1
    assert told[-1]["d/a@8/answers"] == 4


def test_a_groups_largest_peak_stands_under_the_datasets_name():
    told = Told()
    follow = DatasetTracker(PART, NONE, 9, told)
    for peak in (5, 9, 7):
        follow.add([{**row, "peak_device_bytes": peak} for row in rows(0, "right", "wrong")])
    assert [step["d/peak_device_bytes"] for step in told] == [5, 9, 9]
    assert not any("@8/peak" in name for name in told[-1])
