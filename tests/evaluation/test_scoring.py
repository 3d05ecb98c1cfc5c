"""Stored answers through lmms-eval's own metric code: right scores, nothing scored that is no answer, nothing lost."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from mmkv_bench.datasets.drawn_page_tasks import PAGE_TASKS
from mmkv_bench.errors import DataError, ScoringError
from mmkv_bench.evaluation.scoring import score
from mmkv_bench.tiny.pages import make_sample
from tests import cover
from tests.evaluation.conftest import ANSWERS, answered, answered_scores, ask_all, pages, values


def right_answers(requests) -> list[str]:
    return [
        make_sample(request.kind, "small", "test", int(request.sample_id.rsplit("-", 1)[1])).answer
        for request in requests
    ]


@pytest.mark.slow
@cover.few("task", PAGE_TASKS, keep=2)
def test_our_mean_and_lmms_evals_aggregate_agree_on_every_pages_task(task):
    requests = ask_all(pages(task), 20)
    right = right_answers(requests)
    texts = [text if i % 3 else text + "x" for i, text in enumerate(right)]
    scores = score(pages(task), answered(requests, texts))
    assert values(scores, "exact_match") == [float(i % 3 != 0) for i in range(20)]
    assert scores.reason is None
    for metric, aggregate in scores.aggregate.items():
        assert aggregate == pytest.approx(np.mean(values(scores, metric)), abs=1e-12)
    kinds = PAGE_TASKS[task]
    by_kind = {f"exact_match_{kind}" for kind in kinds} if len(kinds) > 1 else set()
    assert set(scores.aggregate) == {"exact_match"} | by_kind
    assert [row.sample_id for row in scores.samples if row.metric == "exact_match"] == [r.sample_id for r in requests]


@pytest.mark.slow
def test_kinds_of_a_mix_are_scored_apart():
    requests = ask_all(pages("pages_multi_image"), 6)
    right = right_answers(requests)
    texts = [text if request.kind == "mi_lookup" else "" for request, text in zip(requests, right, strict=True)]
    aggregate = score(pages("pages_multi_image"), answered(requests, texts)).aggregate
    assert aggregate == {"exact_match": 0.5, "exact_match_mi_lookup": 1.0, "exact_match_mi_walk3": 0.0}


def test_white_space_around_an_answer_does_not_count_and_its_absence_inside_does():
    requests = ask_all(pages(), 3)
    right = right_answers(requests)
    scores = score(pages(), answered(requests, [f" {right[0]}\n", right[1][:2] + " " + right[1][2:], right[2].upper()]))
    assert values(scores, "exact_match") == [1.0, 0.0, 0.0]


def test_scoring_decodes_no_image(monkeypatch):
    import datasets

    requests = ask_all(pages(), 5)
    monkeypatch.setattr(datasets.Image, "decode_example", lambda *a, **k: pytest.fail("an image was decoded"))
    assert score(pages(), answered(requests, right_answers(requests))).aggregate == {"exact_match": 1.0}


def test_a_failed_sample_never_reaches_the_scorer_and_empties_the_aggregate(own_task):
    spec = own_task()
    requests = ask_all(spec)
    answers = answered(requests, ["a", None, "c", "x"])
    answers[requests[1].sample_id] = answers[requests[1].sample_id]._replace(text="b")  # a row gone wrong
    scores = score(spec, answers)
    assert values(scores, "acc") == [1.0, None, 1.0, 0.0]
    assert [row.status for row in scores.samples] == ["ok", "oom", "ok", "ok"]
    assert scores.aggregate is None
    assert scores.reason == "1 of 4 samples have no answer: 1 oom"


def test_an_incomplete_cell_is_not_aggregated_at_all(own_task):
    spec = own_task(aggregation="!function utils.complete")
    assert values(answered_scores(spec, ["a", None, "c", "x"]), "acc") == [1.0, None, 1.0, 0.0]
    assert answered_scores(spec, ANSWERS).aggregate == {"acc": 1.0}


@pytest.mark.full
def test_failed_samples_of_a_mix_count_under_their_kind():
    requests = ask_all(pages("pages_redundant"), 4)
    right = right_answers(requests)
    scores = score(pages("pages_redundant"), answered(requests, [right[0], None, right[2], right[3]]))
    assert values(scores, "exact_match") == [1.0, None, 1.0, 1.0]
    assert values(scores, "exact_match_redundant_walk3") == [None, 1.0]
    assert values(scores, "exact_match_redundant_lookup") == [1.0, 1.0]


@pytest.mark.full
def test_when_every_sample_failed_they_still_have_rows(own_task):
    scores = answered_scores(own_task(), [None, None])
    assert values(scores, "acc") == [None, None]
    assert (scores.aggregate, scores.reason) == (None, "2 of 2 samples have no answer: 2 oom")


def test_a_missing_sample_empties_the_aggregate_and_has_no_row(own_task):
    spec = own_task()
    requests = ask_all(spec)
    answers = answered(requests, ANSWERS)
    del answers[requests[0].sample_id]
    scores = score(spec, answers)
    assert (values(scores, "acc"), scores.aggregate) == ([1.0, 1.0, 1.0], None)
    assert "1 missing" in scores.reason
    assert score(spec, answered(requests[:2], "ab"), limit=4).reason == "2 of 4 samples have no answer: 2 missing"
    assert score(spec, answered(requests[:2], "ab")).aggregate == {"acc": 1.0}
    assert score(spec, answered(requests, ["a", "b", "x", "x"]), limit=2).aggregate == {"acc": 1.0}


def test_filters_see_each_answer_beside_its_own_document(own_task):
    filters = "[{name: only, filter: [{function: !function utils.FirstIsFor}]}]"
    scores = answered_scores(own_task(filter_list=filters), ["a", None, "c", "d"])
    assert values(scores, "acc") == [1.0, None, 1.0, 1.0]


def test_several_filters_have_names_of_their_own(own_task):
    take = "{function: take_first}"
    filters = (
        f"[{{name: plain, filter: [{take}]}}, {{name: loud, filter: [{{function: !function utils.Shout}}, {take}]}}]"
    )
    scores = answered_scores(own_task(filter_list=filters), ANSWERS)
    assert (values(scores, "acc,plain"), values(scores, "acc,loud")) == ([1.0] * 4, [0.0] * 4)
    assert scores.aggregate == {"acc,plain": 1.0, "acc,loud": 0.0}


def test_an_answer_to_another_prompt_is_refused(own_task):
    spec = own_task()
    requests = ask_all(spec)
    for change in ({"prompt_hash": "0" * 64}, {"doc_id": 2}):
        answers = answered(requests, ANSWERS)
        answers[requests[1].sample_id] = answers[requests[1].sample_id]._replace(**change)
        with pytest.raises(DataError, match=f"{requests[1].sample_id}.*retry=.changed. answers such samples again"):
            score(spec, answers)


def test_prompts_are_checked_in_a_process_that_made_none(own_task, monkeypatch):
    from mmkv_bench.evaluation import documents, fingerprints

    spec = own_task()
    requests = ask_all(spec)
    monkeypatch.setattr(documents, "_LOADED", {})
    monkeypatch.setattr(fingerprints, "_MEMORIES", {})
    assert score(spec, answered(requests, ANSWERS)).aggregate == {"acc": 1.0}
    monkeypatch.setattr(fingerprints, "_MEMORIES", {})
    foreign = answered(requests, ANSWERS)
    foreign[requests[3].sample_id] = foreign[requests[3].sample_id]._replace(prompt_hash="1" * 64)
    with pytest.raises(DataError, match="prompt"):
        score(spec, foreign)


DRAWN = {
    "process_results": "!function utils.drawn",
    "metric_list": "[{metric: acc, aggregation: mean, higher_is_better: false}]",
}


def test_draws_depend_on_the_document_alone_and_leave_the_generators_alone(own_task):
    spec = own_task(**DRAWN)  # where less is better, 0 would be no honest score: draws stay
    random.seed(1)
    all_four = values(answered_scores(spec, ANSWERS), "acc")
    random.seed(2)
    np.random.seed(2)
    state, numpy_state = random.getstate(), np.random.get_state()[1].tolist()
    without_first = values(answered_scores(spec, [None, "b", "c", "d"]), "acc")
    assert random.getstate() == state
    assert np.random.get_state()[1].tolist() == numpy_state
    assert without_first[1:] == all_four[1:]
    assert len(set(all_four)) == 4


def test_a_drawn_score_is_a_failed_parse_and_0_here_and_lmms_evals_aggregate_keeps_the_draw(own_task):
    spec = own_task(process_results="!function utils.drawn")
    scores = answered_scores(spec, ANSWERS)
    assert values(scores, "acc") == [0.0] * 4
    assert values(scores, "parse_failed") == [1.0] * 4
    assert scores.aggregate["acc"] == pytest.approx(np.mean(values(answered_scores(own_task(**DRAWN), ANSWERS), "acc")))


def test_a_scorer_that_draws_now_and_then_is_held_to_it_for_every_sample(own_task):
    spec = own_task(process_results="!function utils.guessing")
    scores = answered_scores(spec, ["a", "the answer is b", "?", None])
    assert values(scores, "acc") == [1.0, 1.0, 0.0, None]
    assert values(scores, "parse_failed") == [0.0, 0.0, 1.0, None]
    assert values(answered_scores(spec, ["a", "b", "x c", "d"]), "parse_failed") == [0.0] * 4


def test_random_numbers_that_decide_nothing_are_no_guess(own_task):
    scores = answered_scores(own_task(process_results="!function utils.shuffling"), ["a", "b", "x", "d"])
    assert values(scores, "acc") == [1.0, 1.0, 0.0, 1.0]
    assert values(scores, "parse_failed") == [0.0] * 4  # it could have drawn


def test_a_task_that_neither_draws_nor_tells_what_it_read_has_no_count_of_failed_parses(own_task):
    assert {row.metric for row in answered_scores(own_task(), ANSWERS).samples} == {"acc"}


def test_a_failed_aggregation_is_told_and_the_samples_keep_their_scores(own_task):
    spec = own_task(aggregation="!function utils.complete")
    assert answered_scores(spec, ANSWERS).unaggregated == {}
    scores = answered_scores(spec, ANSWERS[:3])
    assert values(scores, "acc") == [1.0] * 3
    assert scores.aggregate == {}
    assert scores.reason is None
    assert "without all samples" in scores.unaggregated["acc"]


def test_a_scorer_that_raises_is_named_with_its_task_and_sample_at_once(own_task, monkeypatch):
    import time

    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waited to try again"))
    spec = own_task(name="fragile", process_results="!function utils.raising")
    with pytest.raises(ScoringError, match="fragile.*fragile-000001.*cannot score b.*stage=score"):
        answered_scores(spec, ANSWERS)
    assert values(answered_scores(spec, ["a"]), "acc") == [1.0]


def test_a_scorer_that_lacks_what_its_task_could_not_import_says_so(own_task):
    spec = own_task(name="poor", process_results="!function utils.lacking")
    with pytest.raises(ScoringError, match="poor.*'lemmas' is not defined.*probably missing.*stage=score"):
        answered_scores(spec, ANSWERS)


def test_a_scorer_that_exits_the_process_is_an_error_that_names_it(own_task):
    with pytest.raises(ScoringError, match="leaver.*no API key"):
        answered_scores(own_task(name="leaver", process_results="!function utils.exiting"), ANSWERS)


@pytest.mark.slow
def test_a_scorer_that_asks_a_judge_is_not_judged_without_one_even_where_a_key_is_set(own_task, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-somebody")  # only judge=openai sends it anywhere
    scores = answered_scores(own_task(name="judged", process_results="!function utils.judged"), ANSWERS)
    assert values(scores, "acc") == [None] * 4
    assert scores.not_judged == {"acc": "not judged: 4 of 4 samples: no judge was asked (judge=none)"}
    assert scores.aggregate == {}


def test_scores_in_dicts_are_extracted(own_task):
    spec = own_task(process_results="!function utils.with_score", aggregation="!function utils.corpus")
    scores = answered_scores(spec, ["a", "x", "c", "x"])
    assert values(scores, "acc") == [1.0, 0.0, 1.0, 0.0]
    assert scores.aggregate == {"acc": 4.0}  # the task's own, whatever it is


def test_a_pair_of_prediction_and_answer_is_extracted_by_its_aggregation(own_task):
    names = {"metric": "mmmu_acc", "aggregation": "!function utils.matches"}
    scores = answered_scores(own_task(process_results="!function utils.with_pair", **names), ["a", "x", "c", "d"])
    assert values(scores, "mmmu_acc") == [1.0, 0.0, 1.0, 1.0]
    assert scores.aggregate == {"mmmu_acc": 0.75}


@pytest.mark.slow
def test_caption_metrics_beside_the_headline_are_not_aggregated_by_lmms_eval_and_say_so(own_task):
    entries = [f"{{metric: {name}, aggregation: mean, higher_is_better: true}}" for name in ("acc", "own_CIDEr")]
    spec = own_task(process_results="!function utils.two_metrics", metric_list=f"[{', '.join(entries)}]")
    everything = answered_scores(spec, ANSWERS)
    assert (everything.aggregate, everything.unaggregated) == ({"acc": 1.0, "own_CIDEr": 2.0}, {})
    headline = answered_scores(dataclasses.replace(spec, metrics=("acc",)), ANSWERS)
    assert headline.aggregate == {"acc": 1.0}
    assert set(headline.unaggregated) == {"own_CIDEr"}
    assert values(headline, "own_CIDEr") == [2.0] * 4


def test_a_metric_of_the_whole_corpus_has_an_aggregate_and_no_samples(own_task):
    names = {"metric": "cider", "aggregation": "!function utils.corpus"}
    scores = answered_scores(own_task(process_results="!function utils.caption", **names), ANSWERS)
    assert (scores.samples, scores.aggregate) == ([], {"cider": 4.0})


def test_every_scoring_has_a_fresh_task_and_leaves_no_file(own_task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = own_task(aggregation="!function utils.remembering")
    assert [answered_scores(spec, ANSWERS).aggregate for _ in range(2)] == [{"acc": 4.0}] * 2
    assert not list(tmp_path.glob("**/submission.json"))
