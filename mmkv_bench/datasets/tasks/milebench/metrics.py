"""Scores of MileBench answers, by the rules of its evaluate.py (github.com/MileBench/MileBench).

These odd rules are kept, because published numbers were made with them:
- Punctuation next to a space is deleted, other punctuation becomes a space. If a number has a comma (1,000), all
  punctuation is deleted. The first 32 periods are deleted, unless a digit follows.
- An option counts as chosen if its text occurs anywhere in the answer, even inside a word. The leftmost match wins, and
  of matches at the same position the option listed first: among "Image 1" to "Image 12", the answer "Image 12" chooses
  "Image 1". `exact_match` has no such trap.
- An option's text with one of . ^ $ * | is recognised only after the option's letter: the benchmark compares the match
  with the option escaped for a regular expression. So "$5" alone is no answer, "B. $5" is.
- An answer without an option's text is read as the letters among its characters that name options: "option c" is C.

One rule is changed: the benchmark reads an empty answer as choice C. Here an empty answer, or an answer that names no
option or several options, has no choice: it scores 0 and counts in `parse_failed`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mmkv_bench.datasets.rouge import rouge_l
from mmkv_bench.datasets.tasks.milebench.prompt import letter

MARKS = (";", "/", "[", "]", '"', "{", "}", "(", ")", "=", "+", "\\", "_", "-", ">", "<", "@", "`", ",", "?", "!")
NUMBER_WITH_COMMA = re.compile(r"\d,\d")
PERIOD = re.compile(r"\.(?!\d)")
UNRECOGNISED = (".", "^", "$", "*", "|")
PERIODS = 32  # periods deleted: the benchmark passes the flag re.UNICODE as the parameter `count`


def normalised(text: str) -> str:
    """Return the text in lower case, without most punctuation."""
    text = text.replace("\n", " ").replace("\t", " ").strip()
    bare, number = text, NUMBER_WITH_COMMA.search(text) is not None
    for mark in MARKS:
        deleted = number or f"{mark} " in text or f" {mark}" in text
        bare = bare.replace(mark, "" if deleted else " ")
    bare = PERIOD.sub("", bare, count=PERIODS)
    return bare.strip("'").strip('"').strip().lower()


def chosen(answer: str, choices: Sequence[str]) -> int | None:
    """Return the position of the option that an answer names, None if it names no option or several."""
    answer, options = normalised(answer), [normalised(choice) for choice in choices]
    if not answer:
        return None
    letters = [letter(i) for i in range(len(options))]
    found = _leftmost(answer, [normalised(f"{name} {option}") for name, option in zip(letters, options, strict=True)])
    if found is not None:
        return found
    texts = [normalised(option).replace(" ", "") for option in options]
    found = _leftmost(answer.replace(" ", ""), texts)
    if found is not None and not any(sign in texts[found] for sign in UNRECOGNISED):
        return texts.index(texts[found])
    if answer.upper() in letters:
        return letters.index(answer.upper())
    named = "".join(character.upper() for character in answer if character.upper() in letters)
    return letters.index(named) if named in letters else None


def _leftmost(text: str, options: Sequence[str]) -> int | None:
    places = [(text.find(option), i) for i, option in enumerate(options) if option in text]
    return min(places)[1] if places else None


def choice_scores(answer: str, choices: Sequence[str], reference: str) -> dict[str, float]:
    """Score an answer to a question with choices; the reference is one of the choices."""
    options = [normalised(choice) for choice in choices]
    right = options.index(normalised(reference))
    found = chosen(answer, choices)
    accepted = (options[right], letter(right).lower(), normalised(f"{letter(right)} {options[right]}"))
    return {
        "accuracy": float(found == right),
        "exact_match": float(normalised(answer) in accepted),
        "parse_failed": float(found is None),
    }


def needle_scores(answer: str, reference: str) -> dict[str, float]:
    """Score 1 if the reference is one of the answer's words."""
    given, wanted = normalised(answer), normalised(reference)
    return {"accuracy": float(wanted in given.split()), "exact_match": float(given == wanted)}


def contains_scores(answer: str, reference: str) -> dict[str, float]:
    """Score 1 if the reference occurs anywhere in the answer, even inside a word."""
    given, wanted = normalised(answer), normalised(reference)
    return {"accuracy": float(wanted in given), "exact_match": float(given == wanted)}


def rouge_scores(answer: str, reference: str) -> dict[str, float]:
    """Return the ROUGE-L F of the normalised texts; 0 for an empty answer."""
    return {"rouge_l": rouge_l(normalised(answer), normalised(reference))}


def scores(scorer: str, answer: str, doc: Mapping[str, object]) -> dict[str, float]:
    """Score an answer with a sub-task's scorer (see `subtasks.SubTask`)."""
    reference = str(doc["response"])
    if scorer == "choice":
        return choice_scores(answer, list(doc["choices"]), reference)
    return {"needle": needle_scores, "contains": contains_scores, "rouge": rouge_scores}[scorer](answer, reference)
