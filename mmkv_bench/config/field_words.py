"""Words of other tools for keys, values and names of this package (`torch_dtype` for `model.dtype`), read from
`field_words.yaml`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mmkv_bench.declared import declared


def _synonyms(entries: Mapping[str, str]) -> dict[str, str]:
    """Invert a mapping from names to their synonyms: synonym to name."""
    return {word: name for name, words in entries.items() for word in words.split()}


def _answers(entries: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Map each word to its answer: text for an error message that says what to type instead."""
    return {word: entry["answer"] for entry in entries for word in entry["words"].split()}


_WORDS = declared(__file__)
KEYS = _synonyms(_WORDS["keys"])
"""Synonym to the key of this package."""
VALUES = {key: _synonyms(entries) for key, entries in _WORDS["values"].items()}
"""Per key: synonym of a value to the value of this package."""
NAMES = {group: _synonyms(entries) for group, entries in _WORDS["names"].items()}
"""Per group: folded synonym to the name in this package."""
NAME_ANSWERS = {group: _answers(entries) for group, entries in _WORDS["name_answers"].items()}
"""Per group: name to answer."""
ANSWERS = _answers(_WORDS["answers"])
"""Key to answer."""
VERBS = _answers(_WORDS["verbs"])
"""First word, or a flag without its dashes, to answer."""
FLAGS = _answers(_WORDS["flags"])
"""Flag of verbs that read rows, without its dashes, to answer."""
