"""Words of the field for what this package calls otherwise, from `field_words.yaml`, which says what each table of it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mmkv_bench.declared import declared


def _synonyms(entries: Mapping[str, str]) -> dict[str, str]:
    """Word -> what it is here, from the words of each."""
    return {word: name for name, words in entries.items() for word in words.split()}


def _answers(entries: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Word -> answer."""
    return {word: entry["answer"] for entry in entries for word in entry["words"].split()}


_WORDS = declared(__file__)
KEYS = _synonyms(_WORDS["keys"])
"""Word -> the key that it is."""
VALUES = {key: _synonyms(entries) for key, entries in _WORDS["values"].items()}
"""Key -> value -> what it is there."""
NAMES = {group: _synonyms(entries) for group, entries in _WORDS["names"].items()}
"""Group -> folded name -> the name that it is."""
NAME_ANSWERS = {group: _answers(entries) for group, entries in _WORDS["name_answers"].items()}
"""Group -> name -> answer."""
ANSWERS = _answers(_WORDS["answers"])
"""Key -> answer."""
VERBS = _answers(_WORDS["verbs"])
"""First word, or a flag without its dashes -> answer."""
FLAGS = _answers(_WORDS["flags"])
"""Flag of verbs that read rows, without its dashes -> answer."""
