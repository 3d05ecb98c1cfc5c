"""Other words for keys, values and names: those of other tools (`field_words.yaml`), and other spellings of names (`SnapKV`,
`Qwen2.5-VL-7B-Instruct`, `docvqa_val`, `MM-ShiftKV Table 1`).

A spelling stands for a name of `conf/` if both have the same letters and digits, and if this holds for one name only. Case,
separators and a `v` before a version are ignored. The name in `conf/` enters the configuration, so no hash depends on a
spelling.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mmkv_bench.config.files import DATASET, MODEL, TABLES, TITLES, benchmark_members, content, options
from mmkv_bench.declared import read_declared
from mmkv_bench.errors import folded


def _synonyms(entries: Mapping[str, str]) -> dict[str, str]:
    """Map each synonym to its name."""
    return {word: name for name, words in entries.items() for word in words.split()}


def _answers(entries: Iterable[Mapping[str, str]]) -> dict[str, str]:
    return {word: entry["answer"] for entry in entries for word in entry["words"].split()}


_FIELD_WORDS = read_declared(__file__, "field_words.yaml")
KEYS = _synonyms(_FIELD_WORDS["keys"])
"""Synonym to the key of this package (`torch_dtype` to `model.dtype`)."""
VALUES = {key: _synonyms(entries) for key, entries in _FIELD_WORDS["values"].items()}
"""Per key: synonym of a value to the value of this package."""
NAMES = {group: _synonyms(entries) for group, entries in _FIELD_WORDS["names"].items()}
"""Per group: folded synonym to the name in this package."""
NAME_ANSWERS = {group: _answers(entries) for group, entries in _FIELD_WORDS["name_answers"].items()}
"""Per group: name to answer."""
KEY_ANSWERS = _answers(_FIELD_WORDS["answers"])
VERB_ANSWERS = _answers(_FIELD_WORDS["verbs"])
"""First word, or a flag without its dashes, to answer."""
FLAG_ANSWERS = _answers(_FIELD_WORDS["flags"])
"""Flag of verbs that read rows, without its dashes, to answer."""


def alike(name: str, allowed: Iterable[str]) -> str:
    """Return the allowed name that a spelling stands for; the spelling itself if there is no such name or more than one.

    A name has the same letters and digits as its spellings (`SnapKV` stands for `snapkv`).
    """
    allowed = list(allowed)
    same_spelling = [one for one in allowed if folded(one) == folded(name)]
    return same_spelling[0] if name not in allowed and len(same_spelling) == 1 else name


def canonical(group: str, name: str, extra: tuple[str, ...] = ()) -> str:
    """Return the name in a config group that a spelling stands for (`SnapKV`: `snapkv`), or the spelling itself.

    A model may also be given by the end of its hub id, a dataset by its lmms-eval task. extra: further config folders.
    """
    names, name = options(group, extra), name.removesuffix(".yaml")
    if name in names or not folded(name):
        return name
    if (synonym_or_name := NAMES.get(group, {}).get(folded(name), alike(name, names))) in names:
        return synonym_or_name
    if group == MODEL:
        path_by_name = {
            synonym_or_name: str(content(group, synonym_or_name, extra).get("path")).rpartition("/")[2]
            for synonym_or_name in names
        }
        same_path = [synonym_or_name for synonym_or_name, path in path_by_name.items() if folded(path) == folded(name)]
        return same_path[0] if len(same_path) == 1 else name
    without_suffix = alike(name.rpartition("_")[0], names)
    return (
        without_suffix
        if group == DATASET and without_suffix in names and content(group, without_suffix, extra).get("task") == name
        else name
    )


def chosen(group: str, name: str, extra: tuple[str, ...] = ()) -> list[str]:
    """Return the names of `conf/` that `<group>=<name>` chooses: all datasets of a benchmark such as `milebench`,
    else one name."""
    if group == DATASET and name not in options(group, extra):
        benchmarks = benchmark_members()
        if members := benchmarks.get(alike(name, benchmarks)):
            return list(members)
    return [canonical(group, name, extra)]


_TABLE = re.compile(
    r"(?P<paper>.*?)[\W_]*(?:(?P<table>tab(?:le)?s?)|fig(?:ure)?s?)[\W_]*(?P<number>\d+)", re.IGNORECASE
)


def tables(words: str) -> list[str]:
    """Return the ids of the papers' tables and figures that a text names: `mmshift_table01` for `MM-ShiftKV Table 1`.

    A paper alone names all its tables and figures. A number alone names that table of every paper.
    Empty if the text names none.
    """
    table_match = _TABLE.fullmatch(words)
    paper_by_folded_name = {folded(one): key for key, title in TITLES.items() for one in (key, title)}
    paper = paper_by_folded_name.get(folded(table_match["paper"] if table_match else words), "")
    if not paper and folded(table_match["paper"] if table_match else words):
        return []
    table_suffix = f"{'table' if table_match['table'] else 'fig'}{int(table_match['number']):02}" if table_match else ""
    return (
        [name for name in options(TABLES) if name.startswith(paper) and name.endswith(table_suffix)]
        if table_match or paper
        else []
    )


# ---------------------------------------------------------------------- models that cannot be run
@dataclass(frozen=True)
class Unavailable:
    """A model of the papers that cannot be run, and why. `unavailable.yaml` explains the fields."""

    title: str
    repository: str
    papers: str
    why: str
    needed: str
    instead: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    def sentence(self, name: str) -> str:
        """Return the error message for `model=<name>`, which explains why the model cannot be run."""
        text = f"model={name} cannot be run: {self.title} ({self.repository}) {self.why}; it would need {self.needed}"
        return f"{text}; the nearest that runs is model={' or model='.join(self.instead)}" if self.instead else text


UNAVAILABLE = {
    name: Unavailable(**fields | {key: tuple(fields.get(key, ())) for key in ("instead", "aliases")})
    for name, fields in read_declared(__file__, "unavailable.yaml").items()
}


def unavailable(name: str) -> Unavailable | None:
    """Return the entry of `unavailable.yaml` for a model name in any spelling; None without one."""
    folded_name = folded(name)
    return next((one for key, one in UNAVAILABLE.items() if folded_name in map(folded, (key, *one.aliases))), None)
