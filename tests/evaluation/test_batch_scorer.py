"""Promise: scoring many cells at once gives what scoring each by itself gives, or scores each by itself."""

from __future__ import annotations

import gc
import random
import weakref

import pytest

from mmkv_bench.datasets.specs import spec_from_config
from mmkv_bench.evaluation import grader
from mmkv_bench.evaluation.grader import Grader
from mmkv_bench.evaluation.replay import Replay
from mmkv_bench.evaluation.scoring import score
from tests.each import each
from tests.evaluation.conftest import answered, ask_all, pages

CELLS = [f"c{number}" for number in range(6)]


def own_task(folder, code: str, metrics: tuple[str, ...] = ("hit",)):
    """A task in lmms-eval's format with six questions and the given scorer."""
    from datasets import Dataset

    data = folder / "data"
    Dataset.from_dict({"question": [f"q{i}" for i in range(6)], "answer": list("abcabc")}).to_parquet(
        data / "test.parquet"
    )
    names = "".join(
        f"  - metric: {name}\n    aggregation: {how}\n    higher_is_better: true\n"
        for name, how in zip(metrics, ("mean", "!function utils.total"), strict=False)
    )
    (folder / "mine.yaml").write_text(
        "task: mine\ndataset_path: parquet\ntest_split: test\noutput_type: generate_until\n"
        f"dataset_kwargs:\n  data_files:\n    test: {data / 'test.parquet'}\n"
        "doc_to_visual: !function utils.nothing\ndoc_to_text: question\ndoc_to_target: answer\n"
        f"process_results: !function utils.scored\nmetric_list:\n{names}"
    )
    (folder / "utils.py").write_text("import random\n\ndef nothing(doc):\n    return []\n\n" + code)
    return spec_from_config("mine", {"task": "mine", "include_path": str(folder), "metrics": ["hit"]})


def cells_of(requests, seed: int = 0) -> dict[str, dict]:
    """Answers of every cell, many of them the same, some failed."""
    rng = random.Random(seed)
    letters = ["a", "b", "c", None]
    return {
        cell: answered(requests, [letters[rng.choice((0, 0, 1, 2, 3)[: 4 + (cell > "c2")])] for _ in requests])
        for cell in CELLS
    }


def counted(monkeypatch) -> list:
    """The cells that were scored by themselves."""
    alone = []
    monkeypatch.setattr(grader, "score", lambda spec, given, *rest: alone.append(given) or score(spec, given, *rest))
    return alone


def scored(spec, given: dict[str, dict], at_once: int = 2, failed=()) -> list:
    """(cell, its scores), of some cells at a time."""
    reach = {cell: 1 + max(answer.doc_id for answer in own.values()) for cell, own in given.items()}
    scorer, cells = Grader(spec, reach, given.get, failed=failed), list(given)
    blocks = [cells[start : start + at_once] for start in range(0, len(cells), at_once)]
    return [found for block in blocks for found in scorer.scores(block)]


STATELESS = "def scored(doc, results):\n    doc['seen'] = True\n    return {'hit': float(results[0] == doc['answer'])"
TOTAL = "\n\ndef total(values):\n    return sum(values)\n"


@pytest.mark.slow
@each(
    ("code", "metrics"),
    [
        (STATELESS + "}\n", ("hit",)),
        (STATELESS + ", 'draws': random.random(), 'other': 1}" + TOTAL, ("hit", "draws")),
    ],
)
def test_many_cells_have_the_scores_that_each_has_by_itself(tmp_path, monkeypatch, code, metrics):
    spec = own_task(tmp_path, code, metrics)
    given = cells_of(ask_all(spec))
    wanted = [(cell, score(spec, given[cell], 6)) for cell in CELLS]
    alone = counted(monkeypatch)
    assert scored(spec, given) == wanted
    assert len(alone) == 2  # the first and the last, held against what is shared
    monkeypatch.setattr(grader, "AT_ONCE", 7)
    monkeypatch.setattr(grader, "READ", 6)  # one cell after the other
    monkeypatch.setattr(grader, "HELD", 8)  # some are asked again
    assert scored(spec, given, failed=range(6)) == wanted
    assert {scores.aggregate is None for _, scores in wanted} == {True, False}


@pytest.mark.slow
def test_what_a_pass_held_goes_with_it_and_not_when_python_looks_for_circles(tmp_path, monkeypatch):
    spec = own_task(tmp_path, STATELESS + "}\n")
    given, tasks = cells_of(ask_all(spec)), []
    made = Replay.open
    monkeypatch.setattr(Replay, "open", lambda own, *rest: (made(own, *rest), tasks.append(weakref.ref(own.task)))[0])
    gc.collect()
    gc.disable()
    try:
        scored(spec, given, at_once=len(CELLS))
        left = [task() for task in tasks if task() is not None]
        assert len(tasks) > 4 and len(left) == 1  # aggregates of all cells are made by one that is kept
    finally:
        gc.enable()


@pytest.mark.full
def test_pages_of_several_kinds_are_shared_too(monkeypatch):
    spec = pages("pages")
    requests = ask_all(spec, 4)
    texts = ["right", "wrong"]
    given = {cell: answered(requests, [texts[(i + j) % 2] for j in range(4)]) for i, cell in enumerate(CELLS)}
    wanted = [(cell, score(spec, given[cell], 4)) for cell in CELLS]
    alone = counted(monkeypatch)
    assert scored(spec, given) == wanted and len(alone) == 2


def test_a_scorer_that_remembers_what_it_saw_scores_each_cell_by_itself(tmp_path, monkeypatch):
    code = (
        "seen = []\n\ndef scored(doc, results):\n    seen.append(results[0])\n"
        "    return {'hit': float(seen.count(results[0]))}\n"
    )
    spec = own_task(tmp_path, code)
    given = cells_of(ask_all(spec))
    wanted = [(cell, score(spec, given[cell], 6)) for cell in CELLS]
    alone = counted(monkeypatch)
    assert scored(spec, given) == wanted
    assert len(alone) > len(CELLS)
