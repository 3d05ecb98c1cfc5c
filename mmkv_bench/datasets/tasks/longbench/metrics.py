"""The metrics of LongBench (metrics.py and eval.py of github.com/THUDM/LongBench), 0 to 1; papers print them times 100.

A sample's score is the best over its reference answers. What is done otherwise than there:
- Edit similarity of code is 2 x (longest common subsequence of characters) / (sum of lengths), rounded to a percent. The
  package that LongBench calls (fuzzywuzzy) gives that where python-Levenshtein is installed beside it, and an approximation
  by matching blocks where it is not.
- Classes that are part of the right class's name are not counted as named, all of them. LongBench takes them out of a list
  while it goes through it, which misses the one after each.
- LongBench means to look for the most similar class when none is named, but tests a list against 0, so it never does;
  an answer without a class scores 0 there and here.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mmkv_bench.datasets.rouge import rouge_l

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
COMMENT_SIGNS = ("`", "#", "//")


def score(scorer: str, answer: str, doc: Mapping[str, Any], first_line: bool = False) -> float:
    """The best score of an answer over the document's `answers`; `all_classes` are the classes of classification."""
    if first_line:
        answer = answer.lstrip("\n").split("\n")[0]
    measure = SCORERS[scorer]
    classes = doc["all_classes"] or ()
    return max((measure(answer, reference, classes) for reference in doc["answers"]), default=0.0)


def qa_f1(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F1 of words as multisets, without case, punctuation and articles."""
    given, wanted = _words(answer), _words(reference)
    common = (Counter(given) & Counter(wanted)).total()
    if not common:
        return 0.0
    precision, recall = common / len(given), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def rouge(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """ROUGE-L F of the package `rouge`."""
    return rouge_l(answer, reference)


def classification(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """1 / (number of classes named) if the right one is among them."""
    named = [name for name in classes if name in answer and (name == reference or name not in reference)]
    return 1 / len(named) if reference in named else 0.0


def retrieval(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """The fraction of the answer's numbers that are the number of the right paragraph."""
    wanted = re.search(r"Paragraph (\d+)", reference)
    return count(answer, wanted[1]) if wanted else 0.0


def count(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """The fraction of the answer's numbers that are the right one."""
    numbers = re.findall(r"\d+", answer)
    return numbers.count(str(reference)) / len(numbers) if numbers else 0.0


def code_sim(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Edit similarity of the answer's first line that is neither a comment nor a code fence."""
    lines = answer.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(sign in line for sign in COMMENT_SIGNS)), "")
    total = len(line) + len(reference)
    return round(100 * 2 * _common(line, reference) / total) / 100 if total else 0.0


SCORERS: dict[str, Callable[..., float]] = {
    "qa_f1": qa_f1,
    "rouge": rouge,
    "classification": classification,
    "retrieval": retrieval,
    "count": count,
    "code_sim": code_sim,
}


def _words(text: str) -> list[str]:
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def _common(a: str, b: str) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for letter in a:
        diagonal = 0
        for j, other in enumerate(b, start=1):
            diagonal, row[j] = row[j], diagonal + 1 if letter == other else max(row[j], row[j - 1])
    return row[-1]
