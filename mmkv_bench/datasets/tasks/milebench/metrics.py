"""Scores of MileBench answers, by the rules of its evaluate.py (github.com/MileBench/MileBench).

Kept although they are odd, because published numbers are made by them:
- Punctuation next to a space is deleted and other punctuation becomes a space; where a number has a comma (1,000), all
  of it is deleted. Periods go unless a digit follows, the first 32 of them.
- An option counts as chosen where its text stands anywhere in the answer, inside of words too, and the leftmost match
  wins, at one place the option listed first: among "Image 1" to "Image 12", the answer "Image 12" is the choice
  "Image 1". `exact_match` has no such trap.
- A text with one of . ^ $ * | is not recognised by itself, only after its letter: the benchmark compares what it found
  with the option escaped for a regular expression. So "$5" alone is no answer, "B. $5" is.
- An answer without an option's text is read as the letters among its characters that name options: "option c" is C.

Changed: an empty answer is read as choice C there; here it has no choice, so it scores 0 and counts in `parse_failed`.
So does any answer that names no option or several.
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
PERIODS = 32  # that are deleted: the benchmark hands the flag re.UNICODE to the parameter `count`


def normalised(text: str) -> str:
    """Lower case, without most punctuation."""
    text = text.replace("\n", " ").replace("\t", " ").strip()
    bare, number = text, NUMBER_WITH_COMMA.search(text) is not None
    for mark in MARKS:
        deleted = number or f"{mark} " in text or f" {mark}" in text
        bare = bare.replace(mark, "" if deleted else " ")
    bare = PERIOD.sub("", bare, count=PERIODS)
    return bare.strip("'").strip('"').strip().lower()


def chosen(answer: str, choices: Sequence[str]) -> int | None:
    """Position of the option that an answer names, None where it names none or several."""
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
    """Scores of an answer to a question with choices, one of which is the reference."""
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
    """The reference is to be one of the answer's words."""
    given, wanted = normalised(answer), normalised(reference)
    return {"accuracy": float(wanted in given.split()), "exact_match": float(given == wanted)}


def contains_scores(answer: str, reference: str) -> dict[str, float]:
    """The reference is to stand anywhere in the answer, inside of words too."""
    given, wanted = normalised(answer), normalised(reference)
    return {"accuracy": float(wanted in given), "exact_match": float(given == wanted)}


def rouge_scores(answer: str, reference: str) -> dict[str, float]:
    """ROUGE-L F of the normalised texts; 0 for an empty answer."""
    return {"rouge_l": rouge_l(normalised(answer), normalised(reference))}


def scores(scorer: str, answer: str, doc: Mapping[str, object]) -> dict[str, float]:
    """Scores of an answer by a sub-task's scorer (see `subtasks.SubTask`)."""
    reference = str(doc["response"])
    if scorer == "choice":
        return choice_scores(answer, list(doc["choices"]), reference)
    return {"needle": needle_scores, "contains": contains_scores, "rouge": rouge_scores}[scorer](answer, reference)
