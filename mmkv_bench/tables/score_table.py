"""Tables of scores: methods by budgets for one model, dataset, protocol and metric. `tables/build.py` makes them from rows.

A table cell is a method at a budget, averaged over seeds within each sample. A score is printed only if every sample is ok.
Budgets in entries and budgets in fractions make separate tables and are never converted into each other.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmkv_bench.config.files import conf_dir
from mmkv_bench.statistics.metric_kinds import lower_is_better
from mmkv_bench.statistics.paired_tests import Column
from mmkv_bench.store.schema import RESAMPLING
from mmkv_bench.store.store_notes import PrimaryEndpoint
from mmkv_bench.tables.audit import MOSTLY, Audit
from mmkv_bench.tables.sample_scores import Scores, common_samples
from mmkv_bench.tables.stored_rows import BASELINE, config_of


@dataclass(frozen=True)
class Line:
    """A method as one line of a table. `budgeted` is False for `full` and other methods without a budget."""

    label: str
    name: str
    base: str
    tuned: bool
    reading: str | None
    parameters: str
    budgeted: bool

    @property
    def cheats(self) -> bool:
        """True if the method reads the full cache's answer. Such an upper bound does not compete with other methods."""
        return bool(self._values.get("reads_answer"))

    @cached_property
    def calibrated(self) -> bool:
        """True if the method uses numbers that were measured on data before the first prompt."""
        return bool(calibrations(self.parameters))

    @property
    def may_exceed(self) -> bool:
        """True if exceeding the budget is no defect, because the paper's formula or the authors' code does so."""
        return self.reading == "released" or bool(self._values.get("over_budget"))

    @property
    def is_alias(self) -> bool:
        """True for a variant that changes only the name of a method."""
        return self.name != self.base and not self.tuned and self.base not in ("custom", "kvpress")

    @property
    def resamples(self) -> bool:
        """True for controls that shorten the prompt and evict nothing."""
        return self.base in RESAMPLING

    @cached_property
    def _values(self) -> dict[str, Any]:
        return json.loads(self.parameters)

    @property
    def variant(self) -> tuple[str, str, str | None, str]:
        """(name, base method, reading, parameters as JSON): the line's identity, which does not depend on the other lines."""
        return self.name, self.base, self.reading, self.parameters


CONTROLS = ("full", "oracle", "blind")
"""Base methods that do not compete: the full cache, a choice of entries by the answer's attention, a prompt without images."""

PRESETS = {"adakv_official": "adakv", "mmshift_llava": "mmshift", "snapkv_kvpress": "snapkv"}
"""Method of conf/method -> the method that it is a setting of, with other constants."""

_ABLATION_SHARE = 0.8  # share of a column's lines
_NAMING_PARAMETERS = {"kvpress": ("press",), "custom": ("path", "name")}
"""Base method that stands for many -> parameters that tell which."""


class ComparisonFamily(NamedTuple):
    """The lines of one budget that are compared with each other; their p-values are corrected together.

    competitors: the lines that compete.
    presets: label of a line that does not compete -> label of the line that competes for the same method.
    method: the method of which nearly all lines are presets (an ablation); "" without one.
    """

    competitors: tuple[Line, ...]
    presets: dict[str, str]
    method: str = ""


def family(methods: Sequence[Line]) -> ComparisonFamily:
    """Choose which of the lines of one budget compete. The choice never depends on a score.

    `CONTROLS` and methods that read the full cache's answer never compete. For each method the line with default parameters
    competes, in the reading `paper` if both readings are present; without such a line, all presets of the method compete. If
    nearly all lines that may compete are presets of one method (an ablation), all of these lines compete.
    """
    competitors_and_presets = [method for method in methods if method.base not in CONTROLS and not method.cheats]
    groups: dict[tuple[Hashable, ...], list[Line]] = {}
    for line in competitors_and_presets:
        groups.setdefault(_method(line), []).append(line)
    presets: dict[str, str] = {}
    for name, group in groups.items():
        if len(group) > 1 and len(group) >= _ABLATION_SHARE * len(competitors_and_presets):
            return ComparisonFamily(tuple(competitors_and_presets), {}, str(name[0]))
        untuned_lines = [
            line for line in group if not line.tuned and line.name == line.base and line.base not in PRESETS
        ]
        default_lines = [line for line in untuned_lines if line.reading == "paper"] or untuned_lines
        if default_lines:
            presets |= {line.label: default_lines[0].label for line in group if line not in default_lines}
    return ComparisonFamily(tuple(line for line in competitors_and_presets if line.label not in presets), presets)


@cache
def _method(line: Line) -> tuple[Hashable, ...]:
    """Return the identity of a line's method, equal for all presets of the method."""
    keys = _NAMING_PARAMETERS.get(line.base, ())
    parameters = json.loads(line.parameters) if keys else {}
    return PRESETS.get(line.base, line.base), *(json.dumps(parameters.get(key)) for key in keys)


def calibrations(parameters: str) -> dict[str, str]:
    """Return name -> checksum of the calibration files that a method read.

    parameters: the method's parameters (JSON). A `calibration` that is a string (`auto`, a path) or null was not read.
    """
    calibration_node = json.loads(parameters).get("calibration")
    return dict(calibration_node) if isinstance(calibration_node, Mapping) else {}


def calibration_words(configs: Iterable[str], checksums: Mapping[str, str]) -> tuple[str, ...]:
    """Return one phrase per calibration file: name, checksum and the samples that the file was measured on.

    Old configurations do not state the samples; then the file in `conf/calibration` with the same checksum does.

    Args:
        configs: configurations (JSON) of the runs that read the files.
        checksums: file's name -> checksum.
    """
    samples: dict[str, Any] = {}
    for config in configs:
        samples |= config_of(config).get("calibrations") or {}
    committed = {} if set(checksums.values()) <= set(samples) else _committed(conf_dir())
    artefact_texts = []
    for name, checksum in sorted(checksums.items()):
        data = samples.get(checksum) or committed.get(checksum)
        count = f"{data['samples']} samples: " if data and data["samples"] else ""
        artefact_texts.append(f"{name} {checksum} ({count + data['dataset'] if data else 'unknown samples'})")
    return tuple(artefact_texts)


@cache
def _committed(folder: Path) -> dict[str, dict[str, Any]]:
    """Return first 16 digits of the checksum -> dataset and number of samples, for every calibration file below `folder`."""
    artefacts = [json.loads(path.read_text()) for path in sorted(folder.glob("calibration/*/*.json"))]
    return {
        artefact["checksum"][:16]: {"samples": len(artefact["samples"]), "dataset": artefact["dataset"]}
        for artefact in artefacts
    }


AXES = {
    "entries": "entries kept per KV head",
    "fraction": "fraction of the prompt's entries kept",
    "none": "no budget",
}


@dataclass(frozen=True)
class Entry:
    """A method at a budget in a table of scores.

    value, low, high: printed score and ends of its interval; None unless every sample is ok. interval: kind of the interval.
    zero: score with failed samples counted as 0; None in the cases listed in `metric_rows.headlines`.
    common: score over the samples that are ok in every cell of the table; None without such samples.
    uneven_seeds: True if some sample lacks the score of a seed.
    lmms_eval: lmms-eval's aggregate, averaged over seeds; None unless every seed has one. lmms_eval_ours: the same on the
        scale of `value`.
    unread: number of answers from which no choice could be parsed.
    judges: texts that name judges, prompts and temperatures.
    cells: hashes of the stored settings, one per seed.
    """

    scores: Scores
    value: float | None
    low: float | None
    high: float | None
    interval: str
    zero: float | None
    common: float | None
    seeds: tuple[int, ...]
    uneven_seeds: bool
    audit: Audit
    lmms_eval: float | None
    lmms_eval_ours: float | None = None
    unread: int = 0
    judges: tuple[str, ...] = ()
    cells: tuple[str, ...] = ()

    @property
    def headline(self) -> float:
        """`value` of a table cell whose samples are all ok."""
        assert self.value is not None, "only a complete cell has a headline"
        return self.value


@dataclass
class ScoreTable:
    """Table of scores of one context and metric: methods by budgets.

    axis: unit of the budgets, a key of `AXES`. budgets: exact decimal strings, ascending.
    entries: (line's label, budget) -> table cell. The budget is "" for a line without a budget.
    waiting: (label, budget) -> number of answers without a score yet.
    columns: budget -> paired tests between the competing methods (`compare.columns`).
    gate: sentence on whether `full` reaches the score that a paper prints; None if no configuration states such scores.
    free: share of an answer's tokens that no method can change (`audit.free_share`).
    calibrations: label of a calibrated line -> phrases on the calibration files that the method read.
    versions: label -> budget -> versions of the method's code, for lines with several versions.
    primary: the primary endpoint declared for the rows. cpus: kind of CPU -> number of stored settings run on it.
    weights_files: GGUF files of the weights.
    letters: names of the fallbacks in all tables that are printed as one with this table.
    """

    context: dict[str, str]
    metric: str
    axis: str
    budgets: tuple[str, ...]
    methods: tuple[Line, ...]
    entries: dict[tuple[str, str], Entry]
    waiting: dict[tuple[str, str], int] = field(default_factory=dict)
    columns: dict[str, Column] = field(default_factory=dict)
    gate: str | None = None
    free: float | None = None
    calibrations: dict[str, tuple[str, ...]] = field(default_factory=dict)
    versions: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    primary: PrimaryEndpoint | None = None
    cpus: dict[str, int] = field(default_factory=dict)
    weights_files: tuple[str, ...] = ()
    letters: tuple[str, ...] = ()
    _comparable_at: dict[str, bool] = field(default_factory=dict, repr=False)
    _above_at: dict[str, frozenset[str]] = field(default_factory=dict, repr=False)

    @property
    def dataset(self) -> str:
        return self.context["dataset"]

    @property
    def compressed(self) -> bool:
        """True if the table has a method other than `full`."""
        return any(method.base != BASELINE for method in self.methods)

    @property
    def mostly_free(self) -> bool:
        """True if the full prefill gives, on average, at least half of an answer's tokens, which no method can change."""
        return self.free is not None and self.free >= MOSTLY and self.compressed

    def entry(self, label: str, budget: str) -> Entry | None:
        """Return the table cell of a line at a budget. A line without a budget has the same cell at every budget."""
        return self.entries.get((label, budget)) or self.entries.get((label, ""))

    @property
    def cells(self) -> list[tuple[Line, str, Entry]]:
        """(line, budget, table cell) of every table cell, line by line."""
        methods_and_budgets = [(method, budget) for method in self.methods for budget in ("", *self.budgets)]
        return [
            (line, at, self.entries[line.label, at])
            for line, at in methods_and_budgets
            if (line.label, at) in self.entries
        ]

    @property
    def readings(self) -> tuple[str, ...]:
        """Readings of the methods: `paper` (as the paper's text says), `released` (as the authors' code does) or both."""
        return tuple(sorted({method.reading for method in self.methods if method.reading}))

    @cached_property
    def common_ids(self) -> np.ndarray:
        """Ids of the samples that are ok in every table cell, ascending, object [m]."""
        all_scores = [entry.scores for entry in self.entries.values()]
        return all_scores[0].ids[common_samples(all_scores)] if all_scores else np.array([], dtype=object)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Distinct numbers of samples of the table cells, ascending."""
        return tuple(sorted({entry.scores.n for entry in self.entries.values()}))

    @cached_property
    def fallbacks(self) -> tuple[str, ...]:
        """Names of the fallbacks that methods reported (they did less than requested), sorted; `letters` if these are given."""
        occurring = sorted({reason for entry in self.entries.values() for reason in entry.audit.fallbacks})
        return self.letters or tuple(occurring)

    @cached_property
    def comparable(self) -> bool:
        """True if all table cells have the same samples, all ok."""
        return _comparable(list(self.entries.values()))

    def ranked(self, budget: str) -> Column | None:
        """Return the paired tests of the competing methods at a budget.

        None if the methods are not all ok on the same samples, or if no method is proven better than another.
        """
        column = self.columns.get(budget)
        return column if column is not None and column.beats.any() and self._same_samples(budget) else None

    def unranked(self) -> list[str]:
        """Return the budgets at which several methods compete, but are not all ok on the same samples."""
        return [b for b, column in self.columns.items() if len(column.names) > 1 and not self._same_samples(b)]

    def _same_samples(self, budget: str) -> bool:
        if budget not in self._comparable_at:
            names = self.columns[budget].names
            self._comparable_at[budget] = _comparable([self.entries[name, budget] for name in names])
        return self._comparable_at[budget]

    def family(self, budget: str) -> ComparisonFamily:
        """Return which lines at this budget compete. Unlike `columns`, lines that `Audit.comparable` excludes are included."""
        return family([method for method in self.methods if (method.label, budget) in self.entries])

    def best(self, budget: str) -> tuple[str, ...]:
        """Return the labels of the competing methods to which no other is proven superior; empty if `ranked` is None.

        With 95 % confidence the best method is among them.
        """
        column = self.ranked(budget)
        return column.winners if column else ()

    def above_bold(self, budget: str) -> frozenset[str]:
        """Return the labels of the presets at this budget that score better than a bold method.

        Presets are further settings of a method that competes. Presets do not compete, so they are never bold.
        """
        if budget not in self._above_at:
            sign = -1 if lower_is_better(self.metric) else 1
            entries_at_budget = {label: entry for (label, at), entry in self.entries.items() if at == budget}
            bold_headlines = [
                sign * entries_at_budget[name].headline for name in self.best(budget) if name in entries_at_budget
            ]
            presets = [
                (label, entries_at_budget[label]) for label in (self.family(budget).presets if bold_headlines else ())
            ]
            self._above_at[budget] = frozenset(
                label
                for label, entry in presets
                if entry.audit.comparable and entry.value is not None and sign * entry.value > min(bold_headlines)
            )
        return self._above_at[budget]

    def rank(self, label: str, budget: str) -> tuple[int, int] | None:
        """Return (best, worst) rank of a method at 95 % confidence, 1 = best; None if the method has no rank."""
        column = self.ranked(budget)
        if column is None or label not in column.names:
            return None
        low, high = column.ranks[column.names.index(label)]
        return int(low), int(high)


def _comparable(entries: list[Entry]) -> bool:
    same_samples = all(np.array_equal(entry.scores.samples, entries[0].scores.samples) for entry in entries)
    return same_samples and all(entry.scores.complete for entry in entries)
