"""DREAM-1K through a real judge server on the loopback: AutoDQ's questions in rounds, its scores, and what comes without."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mmkv_bench.config.schema import Judge
from mmkv_bench.datasets.specs import spec_from_config
from mmkv_bench.evaluation.scoring import score
from mmkv_bench.judging.answers import JudgeAnswers
from mmkv_bench.statistics.metric_kinds import aggregate_of, lower_is_better
from tests.evaluation.conftest import answered, ask_all, values
from tests.judging import judge_server as judge
from tools.fixtures import _scripted_autodq as scripted
from tools.fixtures import known as known_answers

CONF = Path(__file__).parents[2] / "conf" / "dataset" / "dream1k.yaml"


@pytest.fixture(scope="module")
def spec():
    return spec_from_config("dream1k", yaml.safe_load(CONF.read_text()), {"source": "fixture"})


@pytest.fixture(scope="module")
def requests(spec):
    return ask_all(spec)


@pytest.fixture
def server():
    with judge.serving(lambda messages: scripted.reply(messages[0]["content"])) as running:
        yield running


@pytest.fixture
def new_judge(server):
    return lambda **change: JudgeAnswers(
        Judge("local", "judge-7b", server.url, timeout_s=5.0, backoff_s=0.001, **change)
    )


def known_texts() -> list[str]:
    return list({entry.doc_id: entry.answer for entry in known_answers("dream1k")}.values())


def test_known_descriptions_have_their_known_scores(spec, requests, server, new_judge):
    found = score(spec, answered(requests, known_texts()), judge=new_judge())
    rows = {(row.sample_id, row.metric): row.value for row in found.samples}
    for entry in known_answers("dream1k"):
        assert rows[requests[entry.doc_id].sample_id, entry.metric] == pytest.approx(entry.value), entry
    # precision 0.5, 1, 1, 0, 0 and recall 0.5, 1, 0.5, 0, 0
    assert found.aggregate["autodq_precision"] == pytest.approx(0.5)
    assert found.aggregate["autodq_recall"] == pytest.approx(0.4)
    assert found.aggregate["autodq_f1"] == pytest.approx(2 * 0.5 * 0.4 / 0.9)
    assert found.aggregate["autodq_f1_animation"] == pytest.approx(0.5)
    assert found.judged["autodq_f1"].model == "judge-7b" and not found.not_judged


def test_the_table_s_f1_is_the_paper_s(spec, requests, new_judge):
    import numpy as np

    found = score(spec, answered(requests, known_texts()), judge=new_judge())
    parts = np.array([row.parts for row in found.samples if row.metric == "autodq_f1"])
    assert aggregate_of("autodq_f1")(parts) == pytest.approx(2 * 0.5 * 0.4 / 0.9)
    assert aggregate_of("autodq_f1_live_action")(parts[1:2]) == pytest.approx(1.0)
    assert aggregate_of("autodq_f1")(parts[4:]) == 0.0
    assert aggregate_of("autodq_precision") is None
    assert lower_is_better("autodq_no_events")


def test_references_with_events_are_not_extracted_again(spec, requests, server, new_judge):
    score(spec, answered(requests, known_texts()), judge=new_judge())
    asked = [request["messages"][0]["content"] for request in server.requests]
    extracted = [text for text in asked if "Reply with [] when nothing happens" in text]
    assert len(asked) == len(set(asked))
    assert len(extracted) == 5  # four answers with a text, one reference without events
    assert sum("The orange square moves down." in text for text in extracted) == 1
    assert len(asked) - len(extracted) == 7  # both ways for four answers; one is the reference, which is one question
    assert {request["temperature"] for request in server.requests} == {0.0}


def test_without_a_judge_only_empty_answers_have_a_score(spec, requests):
    found = score(spec, answered(requests, known_texts()))
    assert values(found, "autodq_f1") == [None, None, None, None, 0.0]
    overall = {"autodq_f1", "autodq_precision", "autodq_recall"}
    categories = {"animation", "live_action", "stock", "youtube"}  # the empty answer is tiktok's
    assert set(found.not_judged) == overall | {f"{name}_{c}" for name in overall for c in categories} | {
        "autodq_no_events"
    }
    assert found.not_judged["autodq_f1"].startswith("not judged: 4 of 5 samples")
    assert "autodq_f1" not in found.aggregate
    assert all(row.parts == (0.0, 0.0, 1.0) for row in found.samples if row.metric == "autodq_f1")


def test_samples_that_failed_count_as_nothing_found(spec, requests, new_judge):
    found = score(spec, answered(requests, [*known_texts()[:4], None]), judge=new_judge())
    (failed,) = (row for row in found.samples if row.metric == "autodq_f1" and row.status == "oom")
    assert (failed.value, failed.parts) == (None, (0.0, 0.0, 1.0))
    (of_category,) = (row for row in found.samples if row.metric == "autodq_f1_tiktok")
    assert (of_category.value, of_category.status, of_category.parts) == (None, "oom", (0.0, 0.0, 1.0))
    assert values(found, "autodq_no_events") == [0.0, 0.0, 0.0, 0.0, None]
    nothing = score(spec, answered(requests, [None] * 5), judge=new_judge())
    assert {row.parts for row in nothing.samples if row.metric == "autodq_f1"} == {(0.0, 0.0, 1.0)}


def test_a_judge_that_writes_something_else_leaves_its_sample_not_judged(spec, requests, server, new_judge):
    def garbled(messages):
        text = messages[0]["content"]
        return "I cannot tell." if "The blue square moves up." in text else scripted.reply(text)

    server.reply = garbled
    found = score(spec, answered(requests, known_texts()), judge=new_judge(retries=1))
    assert [value is None for value in values(found, "autodq_f1")] == [False, True, False, False, False]
    assert "not judged: 1 of 5 samples" in found.not_judged["autodq_precision"]
    for metric in ("autodq_f1_live_action", "autodq_recall_live_action"):  # the category of the one that is lost
        assert values(found, metric) == [None] and metric in found.not_judged and metric not in found.aggregate
    assert [value is None for value in values(found, "autodq_no_events")] == [False, True, False, False, False]
    assert found.aggregate["autodq_f1_animation"] == pytest.approx(0.5)  # whole


def test_where_less_is_better_failures_and_what_is_not_judged_leave_no_headline(spec, requests, server, new_judge):
    import pandas as pd

    from mmkv_bench.tables.metric_rows import headlines
    from tests.tables.examples import gather

    server.reply = lambda messages: "I cannot tell."
    found = score(spec, answered(requests, known_texts()), judge=new_judge(retries=0))
    rows = pd.DataFrame([row._asdict() | {"cell": "c"} for row in found.samples])
    for metric in ("autodq_no_events", "autodq_f1_stock", "autodq_f1"):
        (made,) = headlines([gather(rows[rows["metric"] == metric])], "dream1k", metric)
        assert (made["value"], made["value_failures_zero"]) == (None, None)


def test_a_reply_with_too_few_relations_is_asked_again(spec, requests, server, new_judge):
    short = iter([True])

    def once_short(messages):
        text = messages[0]["content"]
        if "numbered:" in text and next(short, False):
            return '["entailed", "entailed", "entailed", "entailed"]'
        return scripted.reply(text)

    server.reply = once_short
    found = score(spec, answered(requests, known_texts()), judge=new_judge(retries=2))
    assert values(found, "autodq_f1") == pytest.approx([0.5, 1.0, 2 / 3, 0.0, 0.0])
