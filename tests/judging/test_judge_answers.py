"""Questions to a judge over real HTTP: answered once and kept, tried again when that helps, and never made up."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import signal
import threading
import time

import pytest

from mmkv_bench.config.schema import Judge
from mmkv_bench.errors import StoreError
from mmkv_bench.judging import client
from mmkv_bench.judging.answers import Endpoint, JudgeAnswers, address_of
from mmkv_bench.judging.client import ScoringPass, ask, ask_all
from mmkv_bench.judging.questions import (
    JudgeError,
    Question,
    criterion_score,
    mark_of_one,
    one_letter_among_words,
    option_letter,
    points,
)
from tests.each import each
from tests.judging import judge_server as judge

KEY = "sk-test-0123456789abcdef"


@pytest.fixture
def server():
    with judge.serving() as running:
        yield running


@pytest.fixture
def settings(server, tmp_path):
    return Judge("local", "judge-7b", server.url, timeout_s=5.0, backoff_s=0.001, cache=str(tmp_path / "judge"))


def outcome(settings: Judge, question: Question | str = "how good?", answers: JudgeAnswers | None = None) -> str:
    """The answer that two passes get, or why there is none."""
    answers = answers or JudgeAnswers(settings)
    question = question if isinstance(question, Question) else Question.of(question)
    for _ in range(2):
        try:
            return answers.look_up(answers.as_asked(question))
        except JudgeError as error:
            reason = str(error)
            answers.fetch()
    return f"not judged: {reason}"


def test_a_question_is_sent_once_as_asked_and_its_answer_kept_for_every_later_run(server, settings, tmp_path):
    question = Question.of("how good?", 0.25, 77)
    assert outcome(settings, question) == "0.5"
    assert server.requests == [
        {
            "model": "judge-7b",
            "messages": [{"role": "user", "content": "how good?"}],
            "temperature": 0.25,
            "max_tokens": 77,
        }
    ]
    assert server.paths == ["/v1/chat/completions"]
    (file,) = (tmp_path / "judge").rglob("*.json")
    assert file.stem == question.digest("judge-7b", server.url + "/chat/completions")
    assert json.loads(file.read_text())["served_model"] == "served-model"
    server.behaviours = [judge.hangs_up]
    later = dataclasses.replace(settings, url=f"{server.url}/chat/completions/", retries=0)
    answers = JudgeAnswers(later)
    assert outcome(later, question, answers) == "0.5"
    assert (answers.counts["cached"], len(server.requests)) == (1, 1)


def test_two_endpoints_of_one_model_id_share_no_answers(server, settings):
    settings = dataclasses.replace(settings, model="default")
    assert outcome(settings) == "0.5"
    with judge.serving(lambda messages: "0.9") as other:
        elsewhere = dataclasses.replace(settings, url=other.url)
        assert outcome(elsewhere) == "0.9" and outcome(settings) == "0.5"
        assert outcome(elsewhere) == "0.9"
        assert (len(server.requests), len(other.requests)) == (1, 1)


def test_an_address_holds_no_credentials():
    urls = ("http://me:secret@[::1]:8000/v1?api-key=secret", "http://[::1]:8000/v1/", "http://[::1]:8000/v1")
    assert {address_of(url) for url in urls} == {"http://[::1]:8000/v1/chat/completions"}


def test_the_digest_is_of_model_address_messages_temperature_and_length_alone():
    question = Question.of("how good?", 0.0, 64)
    same = Question.of([{"content": "how good?", "role": "user"}], 0, 64, readable=str.isdigit)
    assert question.digest("m", "u") == same.digest("m", "u")
    others = [Question.of("how bad?", 0.0, 64), Question.of("how good?", 0.5, 64), Question.of("how good?", 0.0, 65)]
    digests = {other.digest("m", "u") for other in [question, *others]}
    assert len(digests | {question.digest("n", "u"), question.digest("m", "v")}) == 6


def test_a_full_url_is_taken_as_the_base_url_it_holds(server, settings):
    assert outcome(dataclasses.replace(settings, url=server.url + "/chat/completions")) == "0.5"
    assert server.paths == ["/v1/chat/completions"]


@pytest.mark.parametrize(
    "trouble",
    [
        judge.fails(500),
        judge.fails(503, "<html>busy</html>"),
        judge.fails(429, Retry_After="0"),
        judge.nonsense,
        judge.other_json,
        judge.says(None),
        judge.says("  "),
        judge.truncated,
        judge.hangs_up,
        judge.endless,
        lambda handler, body: handler.send(200, "[" * 100_000),
    ],
    ids=["500", "503", "429", "html", "json", "null", "blank", "truncated", "hang-up", "endless", "deep"],
)
def test_what_may_pass_is_asked_again(server, settings, trouble):
    server.behaviours = [trouble, trouble]
    assert outcome(settings) == "0.5"
    assert len(server.requests) == 3


def test_a_silent_judge_is_asked_again_after_the_time_limit(server, settings):
    server.behaviours = [judge.silent(0.6)]
    started = time.perf_counter()
    assert outcome(dataclasses.replace(settings, timeout_s=0.2)) == "0.5"
    assert time.perf_counter() - started >= 0.2


@pytest.mark.parametrize("slow", [judge.drips, judge.drips_headers])
def test_a_judge_that_answers_too_slowly_is_left_in_time(server, settings, slow):
    server.behaviours = [slow]
    started = time.perf_counter()
    assert outcome(dataclasses.replace(settings, timeout_s=0.3)) == "0.5"
    assert time.perf_counter() - started < 30
    assert len(server.requests) == 2


def test_a_placeholder_for_a_key_changes_no_answer(server, settings, monkeypatch):
    monkeypatch.setenv("MY_JUDGE_KEY", "5")
    assert outcome(dataclasses.replace(settings, key_env="MY_JUDGE_KEY")) == "0.5"
    assert server.keys == ["Bearer 5"]


def test_retry_after_is_waited_for_as_seconds_and_as_a_date(server, settings):
    from datetime import UTC, datetime, timedelta
    from email.utils import format_datetime

    server.behaviours = [judge.fails(429, Retry_After="0.3")]
    started = time.perf_counter()
    assert outcome(settings) == "0.5"
    assert time.perf_counter() - started >= 0.3
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
    server.behaviours = [judge.fails(503, Retry_After=soon)]
    started = time.perf_counter()
    assert outcome(settings, "another") == "0.5"
    assert time.perf_counter() - started >= 0.5


def test_a_judge_that_asks_for_an_hour_is_not_waited_for(server, settings):
    server.behaviours = [judge.fails(429, Retry_After="3600")]
    assert outcome(settings).startswith("not judged: ")
    assert len(server.requests) == 1


def test_attempts_are_bounded_and_waits_grow(server, settings):
    server.behaviours = [judge.fails(500)] * 20
    waits = []
    endpoint = Endpoint(dataclasses.replace(settings, retries=3, backoff_s=1.0))

    async def wait(seconds: float) -> None:
        waits.append(seconds)

    endpoint._sleep = wait
    (failure,) = endpoint.ask_all({"q": Question.of("?")}, lambda *kept: None).values()
    assert "answers 500" in failure.reason
    assert len(server.requests) == 4
    assert all(0.5 * 2**i <= wait <= 2**i for i, wait in enumerate(waits)) and len(waits) == 3


def test_a_wrong_key_is_one_sentence_and_no_second_attempt(server, settings, monkeypatch):
    server.wanted_key = "right"
    monkeypatch.setenv("MY_JUDGE_KEY", KEY)
    answers = JudgeAnswers(dataclasses.replace(settings, key_env="MY_JUDGE_KEY"))
    for name in "abc":
        reason = outcome(settings, name, answers)
        assert reason == f"not judged: {server.url}/chat/completions refuses the key in MY_JUDGE_KEY (401)"
    assert len(server.requests) == 1
    assert answers.gone is not None


def test_the_key_is_sent_and_stands_nowhere_else(server, settings, monkeypatch, tmp_path):
    monkeypatch.setenv("MY_JUDGE_KEY", KEY)
    settings = dataclasses.replace(settings, key_env="MY_JUDGE_KEY", retries=0)
    server.behaviours = [judge.fails(400, f"bad request of {KEY}"), judge.says(f"0.5 says {KEY}")]
    reason = outcome(settings, "refused")
    assert KEY not in reason and "<redacted>" in reason
    assert outcome(settings, "echoed") == "0.5 says <redacted>"
    assert server.keys == [f"Bearer {KEY}"] * 2
    for number, before in enumerate(("", "k", "Bearer ")):  # base64 of one key is written in three ways
        echo = base64.b64encode(f"{before}{KEY}".encode()).decode()
        server.behaviours = [judge.says(f"0.5 says {echo}, {KEY.encode().hex()}")]
        said = outcome(settings, f"encoded {number}")
        assert said.count("<redacted>") == 2 and echo[4:-6] not in said
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and KEY in file.read_text()]
    assert KEY not in repr(settings)


def test_openais_key_goes_to_nobody_who_is_not_named_for_it(server, settings, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert outcome(settings) == "0.5"
    assert server.keys == [None]


def test_a_missing_key_asks_nobody(server, settings, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    settings = dataclasses.replace(settings, key_env="OPENAI_API_KEY")
    assert outcome(settings) == "not judged: OPENAI_API_KEY is not set; set it to the judge's key"
    monkeypatch.setenv("OPENAI_API_KEY", "sk-with\nnewline")
    assert "is not a key" in outcome(settings)
    assert server.requests == []


def test_a_redirect_takes_the_key_nowhere(server, settings, monkeypatch):
    monkeypatch.setenv("MY_JUDGE_KEY", KEY)
    with judge.serving() as elsewhere:
        server.behaviours = [judge.fails(307, Location=elsewhere.url + "/chat/completions")]
        reason = outcome(dataclasses.replace(settings, key_env="MY_JUDGE_KEY"))
        assert "answers 307" in reason
        assert elsewhere.requests == []


def test_a_dead_judge_costs_one_questions_attempts_and_names_itself(settings):
    address = judge.dead_address()
    answers = JudgeAnswers(dataclasses.replace(settings, url=address, retries=1))
    questions = [Question.of(f"question {i}") for i in range(50)]
    for question in questions:
        with pytest.raises(JudgeError, match="not asked yet"):
            answers.look_up(question)
    assert answers.fetch() == 50 and not answers.counts["asked"]
    assert f"{address}/chat/completions cannot be reached" in answers.gone
    for question in questions:
        with pytest.raises(JudgeError, match="cannot be reached"):
            answers.look_up(question)
    assert answers.counts["failed"] == 50


def test_a_judge_that_dies_on_the_way_keeps_what_it_answered(server, settings):
    settings = dataclasses.replace(settings, concurrency=1, retries=0)
    server.behaviours = [judge.answer] * 3 + [judge.hangs_up] * 100
    answers = JudgeAnswers(settings)
    for i in range(30):
        with pytest.raises(JudgeError):
            answers.look_up(Question.of(f"question {i}"))
    assert answers.fetch()
    assert (answers.counts["asked"], answers.counts["failed"]) == (3, 27)
    assert len(server.requests) == 6  # three in a row without an answer are enough


def test_a_question_that_is_refused_does_not_end_the_others(server, settings):
    server.behaviours = [judge.fails(400, "too long")]
    answers = JudgeAnswers(settings)
    for name in ("long", "short", "brief"):
        with pytest.raises(JudgeError):
            answers.look_up(Question.of(name))
    answers.fetch()
    with pytest.raises(JudgeError, match="answers 400.*too long"):
        answers.look_up(Question.of("long"))
    assert [answers.look_up(Question.of(name)) for name in ("short", "brief")] == ["0.5", "0.5"]
    assert len(server.requests) == 3


def test_unreadable_answers_are_asked_again_then_given_up_and_kept_nowhere(server, settings, tmp_path):
    question = Question.of("how good?", readable=mark_of_one)
    server.reply = lambda messages: "quite good"
    settings = dataclasses.replace(settings, retries=2, backoff_s=60.0)  # no wait: the judge is well
    assert "not of the form that the scorer reads: 'quite good'" in outcome(settings, question)
    assert len(server.requests) == 3
    assert not list(tmp_path.rglob("*.json"))
    server.behaviours = [judge.says("good"), judge.says("0.9")]
    assert outcome(settings, question) == "0.9"


def test_a_kept_answer_that_is_broken_or_unreadable_is_asked_for_again(server, settings, tmp_path):
    question = Question.of("how good?")
    outcome(settings, question)
    (file,) = (tmp_path / "judge").rglob("*.json")
    for damage in ("", "{", "[1]", '{"answer": 3}', '{"answer": " "}'):
        file.write_text(damage)
        assert outcome(settings, question) == "0.5"
        assert json.loads(file.read_text())["answer"] == "0.5"
    assert len(server.requests) == 6
    server.reply = lambda messages: "7"
    strict = Question.of("how good?", readable=str.isdigit)
    assert outcome(settings, strict) == "7"


def test_a_cache_that_cannot_be_written_stops_the_run_with_a_sentence(server, settings, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"judge\.cache=<folder>"):
        outcome(dataclasses.replace(settings, cache=str(tmp_path / "file" / "judge")))


def test_an_interrupt_and_a_full_disk_leave_the_questions_that_are_under_way(server, settings, request):
    """Neither waits for answers that would take 30 s."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    questions = {str(i): Question.of(f"question {i}") for i in range(8)}
    server.behaviours = [judge.answer, judge.answer] + [judge.silent(30)] * 8
    asked = []

    def keep(question, reply):
        asked.append(question)
        if len(asked) == 2:
            raise StoreError("the disk is full")

    started = time.perf_counter()
    with pytest.raises(StoreError, match="the disk is full"):
        Endpoint(settings).ask_all(questions, keep)
    # more than are asked, for a question of before may still be under way and take one
    server.behaviours = [judge.answer] + [judge.silent(30)] * 16
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        Endpoint(dataclasses.replace(settings, timeout_s=60)).ask_all(questions, lambda *_: None)
    assert time.perf_counter() - started < 15


def test_no_more_questions_are_under_way_than_allowed_and_more_than_one_is(server, settings):
    server.pause_s = 0.05
    answers = JudgeAnswers(dataclasses.replace(settings, concurrency=4))
    for i in range(17):
        with pytest.raises(JudgeError):
            answers.look_up(Question.of(f"question {i}"))
    assert answers.fetch()
    assert answers.counts["asked"] == 17
    assert 2 <= server.most <= 4


def test_the_configured_temperature_wins_and_is_part_of_the_answers_identity(server, settings):
    warm = dataclasses.replace(settings, temperature=0.7)
    outcome(settings, Question.of("how good?", 0.2))
    outcome(warm, Question.of("how good?", 0.2))
    assert [request["temperature"] for request in server.requests] == [0.2, 0.7]


def test_without_a_judge_nothing_is_asked():
    assert outcome(None) == "not judged: no judge was asked (judge=none)"


# ---------------------------------------------------------------- the client of our own tasks
def test_ask_collects_then_answers_and_asks_side_by_side(server, settings):
    answers = JudgeAnswers(settings)
    server.reply = lambda messages: messages[0]["content"].upper()
    for passes in range(2):
        scoring_pass = ScoringPass(answers, ())
        with client.asking(scoring_pass), scoring_pass.of([3]):
            if passes:
                assert ask_all(["one", "two"]) == ["ONE", "TWO"]
                assert ask("one") == "ONE"
                assert scoring_pass.refused == {}
            else:
                with pytest.raises(JudgeError, match="not asked yet"):
                    ask_all(["one", "two"])
                assert scoring_pass.refused == {3: "not asked yet"}
        assert answers.fetch() == (0 if passes else 2)
    assert sorted(request["messages"][0]["content"] for request in server.requests) == ["one", "two"]


def test_ask_outside_of_scoring_is_refused():
    with pytest.raises(JudgeError, match="score stage"):
        ask("anyone there?")


def test_many_threads_may_ask_one_ledger(server, settings):
    answers, scoring_pass = JudgeAnswers(settings), None
    scoring_pass = ScoringPass(answers, ())
    with client.asking(scoring_pass):
        threads = [threading.Thread(target=lambda i=i: scoring_pass.fill(Question.of(f"q{i % 10}"))) for i in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers.fetch()
    assert len(server.requests) == answers.counts["asked"] == 10


# ---------------------------------------------------------------- which answers scorers can read
@each(
    ("readable", "good", "bad"),
    [
        (mark_of_one, ["0", "1.0", "0.3 because", "1"], ["1.1", "-0.1", "nan", "inf", "good", "", "\n0.5x", "5"]),
        (
            criterion_score,
            ["{'score': 4}", '{"score": 0}', "{'score': 4.8}", "{'score': '5'}"],
            ["4", "{'score': 6}", "{'score': '4.8'}", "```{'score': 4}```", "{'points': 4}", "{'score': None}", ""],
        ),
        (points, ["Point:\n0.3", "1", "Rationale:\nfine\nPoint:\n0.5 "], ["Point: 1", "Point:\n2", "0.5\nfine", ""]),
        (option_letter, ["A", " e\n"], ["A.", "F", "AB", ""]),
        (one_letter_among_words, ["A", "B.", "The answer is C", "Z"], ["A or B", "none", "", "Y"]),
    ],
)
def test_answers_are_readable_exactly_when_the_scorer_reads_them(readable, good, bad):
    assert [text for text in good if not readable(text)] == []
    assert [text for text in bad if readable(text)] == []
