"""ROUGE-L of the package `rouge`: numbers that rouge 1.0.1 gave, and a slower way to the same number."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv_bench.datasets.rouge import rouge_l
from tests import cover
from tests.each import each

# rouge 1.0.1, Rouge().get_scores(answer, reference)[0]["rouge-l"]["f"]
OF_THE_PACKAGE = [
    ("the cat sat on the mat", "the cat lay on the mat", 0.7999999950000002),
    ("a b c a", "a c b a", 0.6666666616666668),
    ("police kill the gunman. he fell", "police killed the gunman he fell", 0.8333333283333335),
    ("the red car is gone", "the red car is gone", 0.999999995),
    ("no match here", "other words", 0.0),
    ("a b a b", "b a b a", 0.999999995),
    ("x y z. w v", "w v x. y z q", 0.9090909041322315),
    ("a b .", "b. . e . d d b. e x.5 x.5 a.", 0.4444444409876544),
    ("x.5 b e . e b . a. .", ". e x.5 b", 0.7999999952000001),
]


@each(("answer", "reference", "expected"), OF_THE_PACKAGE)
def test_numbers_of_the_package(answer, reference, expected):
    assert rouge_l(answer, reference) == pytest.approx(expected, abs=1e-12)


def test_by_hand():
    # different words: 3 of 3 and 3 of 6
    assert rouge_l("the disc moved", "the disc moved to the left side") == pytest.approx(2 * 0.5 / 1.5)


@each("text", ["", ".", "...."])
def test_a_text_without_a_word_scores_zero(text):
    assert rouge_l(text, "a b") == 0.0
    assert rouge_l("a b", text) == 0.0


def slow(answer: list[str], reference: list[str]) -> float:
    """One sentence each: the LCS by recursion over prefixes, an answer's word left out where either may be."""

    @cache
    def longest(i: int, j: int) -> tuple[str, ...]:
        if i == 0 or j == 0:
            return ()
        if reference[i - 1] == answer[j - 1]:
            return (*longest(i - 1, j - 1), answer[j - 1])
        shorter_reference, shorter_answer = longest(i - 1, j), longest(i, j - 1)
        return shorter_reference if len(shorter_reference) > len(shorter_answer) else shorter_answer

    common = len(set(longest(len(reference), len(answer))))
    precision, recall = common / len(set(answer)), common / len(set(reference))
    return 2 * precision * recall / (precision + recall) if common else 0.0


words = st.lists(st.sampled_from("abcde"), min_size=1, max_size=12)


@settings(max_examples=cover.examples(300), deadline=None)
@given(words, words)
def test_it_is_the_slow_way_s_number_for_single_sentences(answer, reference):
    assert rouge_l(" ".join(answer), " ".join(reference)) == pytest.approx(slow(answer, reference), abs=1e-7)


@settings(max_examples=cover.examples(100), deadline=None)
@given(words, words)
def test_more_sentences_share_no_fewer_words(answer, reference):
    """Cutting the answer can only add words to the union, never lose those of its parts' common subsequences."""
    cut = len(answer) // 2
    parts = [part for part in (answer[:cut], answer[cut:]) if part]
    joined = rouge_l(". ".join(" ".join(part) for part in parts), " ".join(reference))
    best = max(slow(part, reference) * (len(set(part)) + len(set(reference))) / 2 for part in parts)
    assert joined * (len(set(answer)) + len(set(reference))) / 2 >= best - 1e-6
