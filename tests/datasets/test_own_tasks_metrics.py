"""Metrics of our own tasks against values worked out by hand and against slower references."""

from __future__ import annotations

import difflib
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv_bench.datasets.tasks.dream1k import autodq
from mmkv_bench.datasets.tasks.favor_bench.choice import chosen, released
from mmkv_bench.datasets.tasks.longbench import metrics as longbench
from mmkv_bench.datasets.tasks.needle import metrics as needle
from tests.each import each

WORDS = st.lists(st.sampled_from(["red", "a", "the", "Boat", "boat,", "lamp.", "is"]), max_size=8).map(" ".join)
LETTERS = st.text("abc ", max_size=7)


# LongBench


@each(
    ("answer", "reference", "value"),
    [
        ("The Eiffel Tower!", "eiffel tower", 1.0),
        ("eiffel", "Eiffel Tower", 2 / 3),  # precision 1, recall 1/2
        ("eiffel eiffel", "Eiffel Tower", 0.5),  # words count as often as they stand: 1 of 2 and 1 of 2
        ("a an the", "the", 0.0),  # nothing but articles
        ("", "tower", 0.0),
        ("anthem", "them", 0.0),  # an article inside a word stays
        ("U.S.A", "usa", 1.0),
    ],
)
def test_qa_f1_by_hand(answer, reference, value):
    assert longbench.qa_f1(answer, reference) == pytest.approx(value)


@given(WORDS, WORDS)
def test_qa_f1_against_matching_words_one_by_one(answer, reference):
    def plain(text):
        letters = "".join(c for c in text.lower() if c not in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
        return [word for word in letters.split() if word not in ("a", "an", "the")]

    given_words, left = plain(answer), plain(reference)
    wanted, same = len(left), 0
    for word in given_words:
        if word in left:
            left.remove(word)
            same += 1
    value = 2 * same / (len(given_words) + wanted) if same else 0.0  # F1 is the Dice coefficient
    assert longbench.qa_f1(answer, reference) == pytest.approx(value)


@each(
    ("answer", "value"),
    [
        ("Other location", 1.0),
        ("I say Other location or City", 0.5),
        ("location", 0.0),  # part of the right class's name is not counted against it, nor for it
        ("location of Other location", 1.0),
        ("Other location, Date, City, Manner", 1 / 3),
        ("nothing", 0.0),
    ],
)
def test_classification_by_hand(answer, value):
    classes = ["City", "Other location", "location", "Date"]
    assert longbench.classification(answer, "Other location", classes) == pytest.approx(value)


def test_count_and_retrieval_by_hand():
    assert longbench.count("There are 12 or 13, so 12", "12") == pytest.approx(2 / 3)
    assert longbench.count("none", "12") == 0.0
    assert longbench.count("112", "12") == 0.0
    assert longbench.retrieval("Paragraph 7", "Paragraph 7") == 1.0
    assert longbench.retrieval("7 of 30", "Paragraph 7") == 0.5
    assert longbench.retrieval("Paragraph seven", "Paragraph 7") == 0.0


@each(
    ("answer", "reference", "value"),
    [
        ("    return x", "    return x", 1.0),
        ("\n\n# comment\n// other\n```\n    return x\nmore", "    return x", 1.0),
        ("return x", "    return x", 0.8),  # common 8 of 8 and 12: 16 / 20; indentation counts
        ("abc", "xyz", 0.0),
        ("import os", "import sys", 0.84),  # common "import s": 16 / 19 = 0.8421, to a percent
        ("# only a comment", "x = 1", 0.0),
        ("", "", 0.0),
    ],
)
def test_code_similarity_by_hand(answer, reference, value):
    assert longbench.code_sim(answer, reference) == pytest.approx(value)


@settings(deadline=None)
@given(LETTERS, LETTERS)
def test_code_similarity_against_all_subsequences(answer, reference):
    common = max(
        len(kept)
        for count in range(len(answer) + 1)
        for kept in itertools.combinations(answer, count)
        if _is_subsequence(kept, reference)
    )
    total = len(answer) + len(reference)
    expected = round(200 * common / total) / 100 if total else 0.0
    assert longbench.code_sim(answer, reference) == pytest.approx(expected)
    matcher = difflib.SequenceMatcher(None, answer, reference)  # what fuzzywuzzy takes without python-Levenshtein
    assert expected >= round(100 * matcher.ratio()) / 100 or not total


def _is_subsequence(kept, text):
    letters = iter(text)
    return all(letter in letters for letter in kept)


def test_longbench_takes_the_best_reference_and_the_first_line():
    doc = {"answers": ["red boat", "the lamp"], "all_classes": []}
    assert longbench.score("qa_f1", "lamp", doc) == 1.0
    assert longbench.score("qa_f1", "lamp\nred boat and much more", doc, first_line=True) == 1.0
    assert longbench.score("qa_f1", "\n\nlamp\nmore", doc, first_line=True) == 1.0
    assert longbench.score("qa_f1", "lamp and more of that", doc) == pytest.approx(2 / 6)
    assert longbench.score("rouge", "", doc) == 0.0


# Needle


def test_needle_recall_by_hand():
    expected = "eat a sandwich and sit in Dolores Park on a sunny day."
    assert needle.recall("Eat a sandwich and sit in Dolores Park on a sunny day.", expected) == 1.0
    assert needle.recall("eat a sandwich and sit in dolores park on a sunny day", expected) == pytest.approx(10 / 11)
    assert needle.recall("a a a", expected) == pytest.approx(1 / 11)  # 11 different words: `a` stands twice
    assert needle.recall("", expected) == 0.0


@pytest.mark.slow
def test_needle_rouge1_by_hand():
    assert needle.rouge1("sitting parks", "sit park") == 1.0  # stems
    assert needle.rouge1("Dolores-Park", "dolores park day") == pytest.approx(2 * 2 / (2 + 3))
    assert needle.rouge1("a a", "a b") == pytest.approx(0.5)
    assert needle.rouge1("", "a") == 0.0
    assert needle.first_line("  under the stone\nand more") == "under the stone"


# FAVOR-Bench

OPTIONS = ["He jumps", "He jumps and runs", "He runs.", "Cat", "They sit"]


@each(
    ("answer", "option"),
    [
        ("He jumps", "He jumps"),
        ("The answer: he  JUMPS and\nruns", "He jumps and runs"),
        ("He runs", "He runs."),
        ("He jumps and runs, that is, he jumps", None),  # the short one stands alone, too
        ("He jumps or they sit", None),
        ("The cats play", None),  # not a word of its own
        ("A cat.", "Cat"),
        ("", None),
        ("(B)", None),
    ],
)
def test_the_option_that_an_answer_names(answer, option):
    assert chosen(answer, OPTIONS) == option


def test_the_released_rule():
    assert released("he jumps", OPTIONS, "He jumps")
    assert not released("He jumps and runs", OPTIONS, "He jumps")  # an option that has the right one in it
    assert released("He jumps and runs", OPTIONS, "He jumps and runs")
    assert released("They sit. Cat. He jumps and runs.", OPTIONS, "They sit")  # all options: still right
    assert not released("He runs", OPTIONS, "He runs.")  # the full stop counts


# DREAM-1K


def test_events_are_read_from_what_judges_write():
    events = ["A man runs.", "A dog barks."]
    for reply in (
        json.dumps(events),
        f"```json\n{json.dumps(events)}\n```",
        f"Here they are: {json.dumps(events)} Done.",
    ):
        assert autodq.read_events(reply) == events
    assert autodq.read_events("[]") == []
    assert autodq.read_events('["A man runs.", "A man runs."]') == ["A man runs."]
    for reply in ("", "none", '{"events": 3}', "[1, 2]", '["a", ""]', '["a"', "[" * 5):
        assert autodq.read_events(reply) is None
    assert autodq.read_events(autodq.EVENTS_EXAMPLE)


def test_relations_have_to_match_the_events():
    assert autodq.read_relations('["entailed", "Neither "]', 2) == ["entailed", "neither"]
    for reply in ('["entailed"]', '["entailed", "true"]', '["entailed", 1]', "yes", "[]"):
        assert autodq.read_relations(reply, 2) is None


def test_autodq_arithmetic():
    assert autodq.entailed(["entailed", "neither", "contradicted", "entailed"]) == 0.5
    assert autodq.entailed([]) == 0.0
    assert autodq.f1(0.5, 1.0) == pytest.approx(2 / 3)
    assert autodq.f1(0.0, 0.0) == 0.0
    # means 0.75 and 0.25: not the mean of the samples' own F1, (2/3 + 0) / 2
    assert autodq.f1_of_means([(0.5, 0.5), (1.0, 0.0)]) == pytest.approx(2 * 0.75 * 0.25)


def test_questions_hold_the_texts_whatever_braces_they_have():
    text = 'He writes {x} and "[y]".'
    assert text in autodq.extract_question(text)
    question = autodq.relate_question(text, ["A {b}.", "C."])
    assert text in question and "1. A {b}.\n2. C." in question and "here are 2 events" in question
