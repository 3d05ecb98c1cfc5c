"""Promise: where ppl is measured, a request carries the task's reference answer; nowhere else is it even looked at."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mmkv_bench.tiny.pages import make_sample
from tests.evaluation.conftest import ANSWERS, ask_all, pages

TARGETS = {
    "a field": ("answer", list(ANSWERS)),
    "a template": ("'it is {{answer}}'", [f"it is {a}" for a in ANSWERS]),
    "the first of several": ("\"['{{answer}}', 'other']\"", list(ANSWERS)),
    "the choice of an index": ("'2'", ["z"] * 4),
    "nothing": ("'   '", [None] * 4),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_the_reference_is_the_tasks_target(own_task, kind):
    target, expected = TARGETS[kind]
    choices = {"doc_to_choice": "['x', 'y', 'z']"} if "index" in kind else {}
    spec = own_task(doc_to_target=target, **choices)
    asked = ask_all(replace(spec, measures=("ppl",)))
    assert [request.reference for request in asked] == expected
    assert [request.reference for request in ask_all(spec)] == [None] * 4
    assert [request.reference for request in ask_all(replace(spec, measures=("self_rouge",)))] == [None] * 4


def test_pages_have_their_answer_as_reference():
    (request,) = ask_all(replace(pages("pages_walk"), measures=("ppl",)), 1)
    assert request.reference == make_sample("walk3", "small", "test", 0).answer
