"""How much of the needle an answer has, 0 to 1."""

from __future__ import annotations

import re
from collections import Counter


def recall(answer: str, expected: str) -> float:
    """The fraction of the expected answer's different words that the answer has: what PyramidKV's script plots and averages
    (scripts_needle/visualize.py). Words are what white space separates, without case."""
    wanted = set(expected.lower().split())
    return len(wanted & set(answer.lower().split())) / len(wanted)


def rouge1(answer: str, needle: str) -> float:
    """F of single words as multisets, stemmed, against the whole needle: the package rouge_score's `rouge1`, which the
    script writes to its files (times 10)."""
    given, wanted = _stems(answer), _stems(needle)
    common = (Counter(given) & Counter(wanted)).total()
    if not common:
        return 0.0
    precision, full = common / len(given), common / len(wanted)
    return 2 * precision * full / (precision + full)


def first_line(answer: str) -> str:
    """What the script's decoding ends at: it takes a line break for the end of an answer."""
    return answer.strip().split("\n")[0]


def _stems(text: str) -> list[str]:
    from nltk.stem.porter import PorterStemmer

    stemmer = PorterStemmer()
    words = re.sub(r"[^a-z0-9]+", " ", text.lower()).split()
    return [stemmer.stem(word) if len(word) > 3 else word for word in words]
