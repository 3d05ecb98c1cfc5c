"""Judged tasks of lmms-eval, their own scorers asking a real HTTP server: right scores, and never 0 for no answer."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest

from mmkv_bench.config.schema import Judge
from mmkv_bench.datasets.specs import spec_from_config
from mmkv_bench.errors import ScoringError
from mmkv_bench.evaluation.samples import Answer
from mmkv_bench.evaluation.scoring import score
from mmkv_bench.evaluation.task_scorer import addresses
from mmkv_bench.judging.answers import JudgeAnswers
from tests import cover
from tests.evaluation.conftest import ANSWERS, answered, answered_scores, ask_all, values
from tests.judging import judge_server as judge
from tools.fixtures import _scripted_judge as scripted
from tools.fixtures import known as known_answers

CRITERIA = {
    "videochatgpt_gen": ("correctness", "detailed_orientation", "context"),
    "videochatgpt_temporal": ("temporal",),
    "videochatgpt_consistency": ("consistency",),
}
METRICS = {name: [f"gpt_eval_score_{criterion}" for criterion in own] for name, own in CRITERIA.items()}
METRICS |= {"mmvet": ["gpt_eval_score"], "worldqa": ["gpt_eval"]}
SCALE = {"mmvet": 100.0}  # of lmms-eval's aggregate


def fixture_spec(name: str):
    task = "worldqa_gen" if name == "worldqa" else name
    return spec_from_config(name, {"task": task, "metrics": METRICS[name]}, {"source": "fixture"})


@pytest.fixture(scope="module")
def asked():
    """Requests of each fixture, made once."""
    found = {}

    def requests(name: str) -> list:
        if name not in found:
            found[name] = ask_all(fixture_spec(name))
        return found[name]

    return requests


@pytest.fixture
def answers(asked):
    """Stored answers to a fixture: those whose score is known."""

    def stored(name: str) -> dict[str, Answer]:
        texts = {known.doc_id: known.answer for known in known_answers(name)}
        requests = asked(name)
        return answered(requests, [texts[request.doc_id] for request in requests])

    return stored


@pytest.fixture
def server():
    with judge.serving(scripted.reply) as running:
        yield running


@pytest.fixture
def no_waiting(monkeypatch):
    """Scorers sleep before they ask again; here that is a failure. Other threads (the server) may."""
    sleep = time.sleep

    def refuse(seconds):
        if threading.current_thread() is threading.main_thread():
            pytest.fail("a scorer waited")
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", refuse)


@pytest.fixture
def new_judge(server, tmp_path):
    return lambda **changes: JudgeAnswers(
        dataclasses.replace(
            Judge("local", "judge-7b", server.url, timeout_s=5.0, backoff_s=0.001, cache=str(tmp_path / "judge")),
            **changes,
        )
    )


@cover.few("name", METRICS, keep=1)
def test_known_answers_have_their_known_scores_and_the_second_time_nobody_is_asked(
    name, answers, server, new_judge, no_waiting
):
    scores = score(fixture_spec(name), answers(name), judge=new_judge())
    for metric in METRICS[name]:
        expected = [known.value for known in known_answers(name) if known.metric == metric]
        assert values(scores, metric) == expected
        assert scores.aggregate[metric] == pytest.approx(sum(expected) / len(expected) * SCALE.get(name, 1.0))
        assert scores.judged[metric].model == "judge-7b"
        assert scores.judged[metric].temperature == (0.2 if name == "worldqa" else 0.0)
        assert len(scores.judged[metric].prompts) == 64
    assert (scores.not_judged, scores.reason) == ({}, None)
    assert {request["model"] for request in server.requests} == {"judge-7b"}
    number = len(server.requests)
    assert number == len({str(request["messages"]) for request in server.requests}) > 0
    again = score(fixture_spec(name), answers(name), judge=new_judge())
    assert again == scores
    assert len(server.requests) == number


@pytest.mark.parametrize("name", METRICS)
def test_without_a_judge_nothing_is_asked_and_nothing_is_zero(name, answers, server, no_waiting):
    scores = score(fixture_spec(name), answers(name))
    for metric in METRICS[name]:
        assert set(values(scores, metric)) == {None}
        assert len(values(scores, metric)) == len(answers(name))
        number = len(answers(name))
        assert scores.not_judged[metric] == (
            f"not judged: {number} of {number} samples: no judge was asked (judge=none)"
        )
    assert all(row.status == "ok" for row in scores.samples)
    assert not set(METRICS[name]) & set(scores.aggregate)
    assert scores.judged == {}
    assert server.requests == []


@pytest.mark.slow
def test_prompt_hashes_tell_criteria_apart_and_not_answers(answers, asked, new_judge):
    name = "videochatgpt_gen"
    first = score(fixture_spec(name), answers(name), judge=new_judge())
    hashes = {metric: by.prompts for metric, by in first.judged.items()}
    assert len(set(hashes.values())) == 3
    other = answered(asked(name), ["something else"] * 4)
    assert {
        metric: by.prompts for metric, by in score(fixture_spec(name), other, judge=new_judge()).judged.items()
    } == hashes


def test_a_judge_that_fails_for_one_criterion_leaves_the_others(answers, server, new_judge):
    def partly(messages):
        return "I cannot say" if "detail orientation" in messages[0]["content"] else scripted.reply(messages)

    server.reply = partly
    name = "videochatgpt_gen"
    scores = score(fixture_spec(name), answers(name), judge=new_judge(retries=1))
    correctness, detail, context = METRICS[name]
    assert values(scores, detail) == [None] * 4
    assert scores.not_judged.keys() == {detail}
    assert "not judged: 4 of 4 samples" in scores.not_judged[detail] and "I cannot say" in scores.not_judged[detail]
    assert values(scores, correctness) == [5.0, 3.0, 0.0, 5.0]
    assert scores.aggregate.keys() == {correctness, context}
    server.reply = scripted.reply
    number = len(server.requests)
    complete = score(fixture_spec(name), answers(name), judge=new_judge())
    assert values(complete, detail) == [4.0, 2.0, 1.0, 4.0]
    assert complete.not_judged == {}
    assert len(server.requests) == number + 4  # only what was missing


@pytest.mark.slow
def test_one_unreadable_answer_costs_that_sample_alone(answers, server, new_judge):
    server.reply = lambda messages: "seven" if "| five |" in messages[0]["content"] else scripted.reply(messages)
    scores = score(fixture_spec("mmvet"), answers("mmvet"), judge=new_judge(retries=0))
    assert values(scores, "gpt_eval_score") == [1.0, 0.4, None, 1.0, 0.4]
    assert scores.not_judged["gpt_eval_score"].startswith("not judged: 1 of 5 samples: ")
    assert scores.aggregate == {}


def test_a_dead_judge_is_not_judged_and_quick(answers, new_judge, no_waiting):
    address = judge.dead_address()
    scores = score(fixture_spec("worldqa"), answers("worldqa"), judge=new_judge(url=address))
    assert values(scores, "gpt_eval") == [None] * 4
    assert f"{address}/chat/completions cannot be reached" in scores.not_judged["gpt_eval"]


def test_a_failed_half_leaves_its_pair_without_a_score(answers, new_judge):
    name = "videochatgpt_consistency"
    stored = answers(name)
    failed = list(stored)[2]
    stored[failed] = stored[failed]._replace(text=None, status="oom")
    scores = score(fixture_spec(name), stored, judge=new_judge())
    rows = {row.sample_id: (row.value, row.status) for row in scores.samples}
    assert rows[failed] == (None, "oom")
    assert list(stored)[3] not in rows
    assert [value for value, status in rows.values() if status == "ok"] == [5.0, 5.0, 0.0, 0.0]
    assert scores.aggregate is None


@pytest.mark.full
def test_the_environment_of_a_scorer_holds_no_key_and_is_put_back(answers, server, new_judge, monkeypatch):
    import os

    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-somebody-0123456789")
    monkeypatch.setenv("API_TYPE", "azure")
    monkeypatch.setenv("OPENAI_API_URL", "http://192.0.2.1/v1")
    monkeypatch.setenv("HTTP_PROXY", "http://192.0.2.1:3128")
    monkeypatch.setenv("NO_PROXY", "example.org")
    before = dict(os.environ)
    scores = score(fixture_spec("mmvet"), answers("mmvet"), judge=new_judge())
    assert values(scores, "gpt_eval_score") == [1.0, 0.4, 0.0, 1.0, 0.4]
    assert dict(os.environ) == before
    assert set(server.keys) == {None}


@pytest.mark.slow
def test_the_proxy_answers_nobody_else(answers, new_judge):
    import requests

    from mmkv_bench.judging.client import proxy

    score(fixture_spec("mmvet"), answers("mmvet"), judge=new_judge())
    address = proxy().root + "/v1/chat/completions"
    body = {"messages": [{"role": "user", "content": "what is the key?"}]}
    assert requests.post(address, json=body, timeout=5).status_code == 401
    mine = {"Authorization": f"Bearer {proxy().token}"}
    assert requests.post(address, json=body, headers=mine, timeout=5).status_code == 503  # nothing is being scored


# ---------------------------------------------------------------- tasks that ask a judge only where no rule reads
def choice_spec(tmp_path, task: str, rows: list[dict], split: str = "test"):
    from datasets import Dataset

    (tmp_path / "data").mkdir()
    Dataset.from_list(rows).to_parquet(str(tmp_path / "data" / f"{split}-00000-of-00001.parquet"))
    return spec_from_config("lmms_eval", {"task": task, "dataset_path": str(tmp_path)})


@pytest.fixture
def worldqa_mc(tmp_path):
    from tools.fixtures._clips import Scene, write_clip

    write_clip(tmp_path / "media" / "multi-hop-reasoning" / "videos" / "001.mp4", [Scene("red")])
    options = ["A. a boat", "B. a house", "C. a tree", "D. a bird"]
    common = {"video_idx": "001", "question": "What is it?", "object_description": "", "option": options}
    rows = [
        {**common, "question_idx": str(i), "answer": answer} for i, answer in enumerate(["A. a boat", "B. a house"] * 2)
    ]
    return choice_spec(tmp_path, "worldqa_mc", rows)


@pytest.fixture
def hrbench(tmp_path):
    import base64
    import io

    from PIL import Image

    picture = io.BytesIO()
    Image.new("RGB", (40, 30), "red").save(picture, "PNG")
    image = base64.b64encode(picture.getvalue()).decode()
    common = {"image": image, "question": "Which?", "A": "boat", "B": "house", "C": "tree", "D": "bird", "answer": "B"}
    rows = [
        {**common, "index": i, "category": category, "cycle_category": "0"}
        for i, category in enumerate(["single", "single", "cross", "cross"])
    ]
    return choice_spec(tmp_path, "hrbench4k", rows, "hrbench_4k")


def test_worldqa_choices_that_a_rule_reads_need_no_judge(worldqa_mc, server, new_judge):
    requests = ask_all(worldqa_mc)
    texts = ["A", "A.", "boat", "House"]
    alone = score(worldqa_mc, answered(requests, texts))
    found = values(alone, "gpt_eval")
    assert found[:2] == [1.0, 0.0]
    assert None in found[2:]
    judged = score(worldqa_mc, answered(requests, texts), judge=new_judge())
    assert None not in values(judged, "gpt_eval")
    assert values(judged, "gpt_eval")[:2] == [1.0, 0.0]
    assert judged.aggregate["gpt_eval"] == pytest.approx(sum(values(judged, "gpt_eval")) / 4)
    assert all(request["model"] == "judge-7b" for request in server.requests) and server.requests


def test_hrbench_letters_need_no_judge_and_other_answers_are_not_judged_without_one(hrbench, server, new_judge):
    requests = ask_all(hrbench)
    texts = ["B", "the house", "dwelling", "A"]
    alone = score(hrbench, answered(requests, texts))
    assert values(alone, "average") == [1.0, 1.0, None, 0.0]
    assert (values(alone, "single"), values(alone, "cross")) == ([1.0, 1.0], [None, 0.0])
    assert alone.not_judged.keys() == {"average", "cross"}
    assert alone.aggregate == {"single": 1.0}
    assert alone.judged == {}
    server.reply = lambda messages: "B"
    judged = score(hrbench, answered(requests, texts), judge=new_judge())
    assert values(judged, "average") == [1.0, 1.0, 1.0, 0.0]
    assert judged.aggregate == {"single": 1.0, "cross": 0.5, "average": 0.75}
    assert len(server.requests) == 1
    letters = score(hrbench, answered(requests, ["A", "B", "C", "D"]))
    assert (values(letters, "average"), letters.not_judged) == ([0.0, 1.0, 0.0, 0.0], {})


def test_the_scorers_parse_what_counts_as_readable_and_read_0_elsewhere():
    from mmkv_bench.evaluation.environment import task_environment

    with task_environment(None):  # hrbench keeps the judge's address of its first import
        from lmms_eval.tasks.hrbench.hrbench_evals import HRBenchEval
        from lmms_eval.tasks.videochatgpt.utils import parse_score
        from lmms_eval.tasks.worldqa.utils import worldq_gen_gpt_eval

    from mmkv_bench.judging.questions import criterion_score, one_letter_among_words, points

    texts = ["{'score': 4}", "{'score': 4.8}", "{'score': '3'}", "score: 4", "```{'score': 4}```", "4", "", "{'a': 4}"]
    assert [bool(parse_score(text)) for text in texts] == [criterion_score(text) for text in texts]
    texts = ["Point:\n1", "0.5", "Point: 1", "1\nindeed", ""]
    assert [worldq_gen_gpt_eval([{"eval_answer": text}], None) > 0 for text in texts] == list(map(points, texts))
    choices = {"A": "boat", "B": "house", "C": "tree", "D": "bird"}
    texts = ["A", "(B)", "The answer is C.", "Z", "A and B", "none of them", "E"]
    read = [bool(HRBenchEval("").can_infer_option(text, choices)) for text in texts]
    assert read == list(map(one_letter_among_words, texts))


# ---------------------------------------------------------------- tasks of one's own
def test_a_task_of_ones_own_asks_through_the_client(own_task, server, new_judge):
    server.reply = lambda messages: "yes" if messages[0]["content"] == "Is 'a' right?" else "no"
    spec = own_task(process_results="!function utils.asking")
    scores = answered_scores(spec, ANSWERS, judge=new_judge())
    assert values(scores, "acc") == [1.0, 0.0, 0.0, 0.0]
    assert (scores.aggregate, scores.not_judged) == ({"acc": 0.25}, {})
    follow_up = [request["messages"][0]["content"] for request in server.requests]
    assert follow_up.count("Are you sure that it is yes?") == 1 and len(follow_up) == 6
    assert len(scores.judged["acc"].prompts) == 64
    unjudged = answered_scores(spec, ANSWERS)
    assert values(unjudged, "acc") == [None] * 4
    assert unjudged.not_judged["acc"] == "not judged: 4 of 4 samples: no judge was asked (judge=none)"


def test_metrics_that_need_no_judge_stand_beside_one_that_does(own_task):
    rising = "aggregation: mean, higher_is_better: true"
    both = f"[{{metric: acc, {rising}}}, {{metric: length, {rising}}}]"
    scores = answered_scores(own_task(process_results="!function utils.asking_beside", metric_list=both), ANSWERS)
    assert values(scores, "length") == [1.0] * 4
    assert values(scores, "acc") == [None] * 4
    assert scores.aggregate == {"length": 1.0}
    assert scores.not_judged.keys() == {"acc"}


@pytest.mark.slow
def test_a_scorer_of_llm_judge_is_scored_through_the_proxy(own_task, server, new_judge):
    server.reply = lambda messages: "1"
    spec = own_task(name="judged", process_results="!function utils.judged")
    assert values(answered_scores(spec, ANSWERS, judge=new_judge()), "acc") == [1.0] * 4
    assert values(answered_scores(spec, ANSWERS), "acc") == [None] * 4


def test_a_scorer_that_asks_past_us_is_refused(own_task):
    spec = own_task(name="stray", process_results="!function utils.asking_elsewhere")
    with pytest.raises(ScoringError, match=r"stray asks a judge at https://judge\.example.*the answers are kept"):
        answered_scores(spec, ANSWERS)


@pytest.mark.slow
def test_a_scorer_that_asks_without_end_is_left(own_task, server, new_judge):
    server.reply = lambda messages: "more"
    scores = answered_scores(own_task(process_results="!function utils.insatiable"), ["a"], judge=new_judge())
    assert values(scores, "acc") == [None]
    assert len(server.requests) <= 12


def test_addresses_of_shipped_scorers_are_the_proxys(answers, new_judge):
    from mmkv_bench.evaluation.documents import task_config
    from mmkv_bench.judging.client import proxy

    for name in METRICS:
        config = task_config(fixture_spec(name))
        scorers = [config["process_results"], *(entry["aggregation"] for entry in config["metric_list"])]
        found = set().union(*(addresses(scorer) for scorer in scorers))
        assert found and all(address.startswith(proxy().root) for address in found)
