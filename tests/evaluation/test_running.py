"""Promise: scores while answers come are those that the score stage gives, and what is no one sample's has none."""

from __future__ import annotations

import random

import pytest

from mmkv_bench.errors import ScoringError
from mmkv_bench.evaluation.grader import RunningScores
from tests.evaluation.conftest import ANSWERS, answered, answered_scores, ask_all, pages, score, values

FILTERS = "[{name: only, filter: [{function: !function utils.FirstIsFor}]}]"


@pytest.mark.slow
def test_single_answers_score_as_the_score_stage_scores_them(own_task):
    texts = ["a", "x", "c", "a"]
    for name, yaml in {
        "own": {},
        "guess": {"process_results": "!function utils.guessing"},
        "filtered": {"filter_list": FILTERS},
    }.items():
        spec = own_task(name, **yaml)
        wanted = values(answered_scores(spec, texts), "acc")
        running, before = RunningScores(spec, None), random.getstate()
        found = [running.of([(doc_id, text)])[0]["acc"] for doc_id, text in enumerate(texts)]  # as they come
        assert found == wanted and random.getstate() == before
        every = running.of([*enumerate(texts), (0, "b")])
        assert [each["acc"] for each in every] == [*wanted, 0.0]


@pytest.mark.slow
def test_pages_have_running_scores_of_their_headline():
    spec = pages("pages")
    requests = ask_all(spec, 3)
    wanted = values(score(spec, answered(requests, ["no"] * 3), 3), "exact_match")
    assert [
        each["exact_match"] for each in RunningScores(spec, 3).of([(number, "no") for number in range(3)])
    ] == wanted


def test_judged_scores_run_with_no_judge_and_a_scorer_that_fails_says_so(own_task):
    asking = own_task("asks", process_results="!function utils.asking_beside")
    assert RunningScores(asking, None).of([(0, "a")]) is None
    with pytest.raises(ScoringError, match="cannot score b"):
        RunningScores(own_task("raises", process_results="!function utils.raising"), None).of([*enumerate(ANSWERS)])
