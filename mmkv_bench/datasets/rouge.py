"""ROUGE-L as the PyPI package `rouge` 1.0.1 computes it, which MileBench, Elastic-Cache and PrefixKV score with.

It is not the ROUGE-L of Lin (2004) on token sequences. What it does instead, all of it kept here:
- A text is cut into sentences at every period; words are what white space separates, compared as they are. White space
  between two periods is a sentence of one empty word.
- Words count once: lengths are numbers of different words, and an LCS counts its different words.
- Several sentences: the LCS of each pair of a reference sentence and an answer's sentence are united as sets of words.
- Of several longest common subsequences, the one is taken that is found going backwards and leaving out a word of the
  answer where either text's word may be left out; it decides which words are counted where a word stands twice.

tests/datasets/test_rouge.py holds it to numbers of the package and to a slower reference.
"""

from __future__ import annotations

from collections.abc import Sequence

EPSILON = 1e-8  # the package adds it to precision + recall


def rouge_l(answer: str, reference: str) -> float:
    """F-measure, 0 to 1 (an exact copy gives 1 - 5e-9). 0 for nothing and for periods alone, which the package refuses."""
    answers, references = _sentences(answer), _sentences(reference)
    answer_words = {word for sentence in answers for word in sentence}
    reference_words = {word for sentence in references for word in sentence}
    if not answer_words or not reference_words:
        return 0.0
    common: set[str] = set()
    for reference_sentence in references:
        for answer_sentence in answers:
            common |= _common_words(reference_sentence, answer_sentence)
    precision, recall = len(common) / len(answer_words), len(common) / len(reference_words)
    return 2.0 * precision * recall / (precision + recall + EPSILON)


def _sentences(text: str) -> list[list[str]]:
    return [sentence.split() or [""] for sentence in text.split(".") if sentence]


def _common_words(reference: Sequence[str], answer: Sequence[str]) -> set[str]:
    """The different words of the longest common subsequence."""
    lengths = [[0] * (len(answer) + 1)]  # lengths[i][j]: LCS of the first i words and the first j words
    for word in reference:
        above, row = lengths[-1], [0]
        for j, other in enumerate(answer):
            row.append(above[j] + 1 if word == other else max(above[j + 1], row[j]))
        lengths.append(row)
    words: set[str] = set()
    i, j = len(reference), len(answer)
    while i and j:
        if reference[i - 1] == answer[j - 1]:
            words.add(reference[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return words
