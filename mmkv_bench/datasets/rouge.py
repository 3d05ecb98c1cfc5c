"""ROUGE-L as the PyPI package `rouge` 1.0.1 computes it. MileBench, Elastic-Cache and PrefixKV score with this package.

The package differs from the ROUGE-L of Lin (2004) on token sequences, and this file keeps every difference:
- A text is cut into sentences at every period. Words are separated by white space and compared unchanged. White space
  between two periods is a sentence of one empty word.
- Words count once: lengths are numbers of different words, and an LCS counts its different words.
- Several sentences: each reference sentence has an LCS with each answer sentence; the union of these as sets of words counts.
- Several longest common subsequences: one is chosen by going backwards; if the word of either text may be left out, the
  answer's word is. This choice decides which words count when a word occurs twice.

tests/datasets/test_rouge.py compares this file with numbers of the package and with a slower reference.
"""

from __future__ import annotations

from collections.abc import Sequence

EPSILON = 1e-8  # the package adds it to precision + recall


def rouge_l(answer: str, reference: str) -> float:
    """Return the ROUGE-L F-measure of an answer against a reference, 0 to 1. Equal texts give 1 - 5e-9.

    A text that is empty or has only periods gives 0; the package `rouge` refuses such a text.
    """
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
    """Return the different words of the longest common subsequence of a reference and an answer, both lists of words."""
    lengths = [[0] * (len(answer) + 1)]  # lengths[i][j]: LCS of the first i words and the first j words
    for word in reference:
        previous_row, row = lengths[-1], [0]
        for j, other in enumerate(answer):
            row.append(previous_row[j] + 1 if word == other else max(previous_row[j + 1], row[j]))
        lengths.append(row)
    common_words: set[str] = set()
    i, j = len(reference), len(answer)
    while i and j:
        if reference[i - 1] == answer[j - 1]:
            common_words.add(reference[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return common_words
