"""Tables of scores: methods by budgets for one model, dataset, protocol and metric, with the rules for failures.

A table cell is a method at a budget; its seeds are averaged within each sample. It has a headline only if every sample
is ok. Budgets in entries and budgets in fractions make separate tables; they are never converted into each other.
`tables/build.py` makes tables from rows.
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
from mmkv_bench.tables.scores import Scores, common_samples
from mmkv_bench.tables.stored_rows import BASELINE, config_of


@dataclass(frozen=True)
class Line:
    """One line of a table. `budgeted` is False for `full` and other methods without a budget."""

    label: str
    name: str
    base: str
    tuned: bool
    reading: str | None
    parameters: str
    budgeted: bool

    @property
    def cheats(self) -> bool:
        """True if the method reads the full cache's answer. It then is an upper bound, does not compete and is never marked
        best."""
        return bool(self._values.get("reads_answer"))

    @cached_property
    def calibrated(self) -> bool:
        """True if the method uses a calibration: numbers measured on data before the first prompt."""
        return bool(calibrations(self.parameters))

    @property
    def may_exceed(self) -> bool:
        """True if exceeding the budget is no defect, because the paper's formula or the authors' code does so."""
        return self.reading == "released" or bool(self._values.get("over_budget"))

    @property
    def renamed(self) -> bool:
        """True for a variant of a method that changes only the name."""
        return self.name != self.base and not self.tuned and self.base not in ("custom", "kvpress")

    @property
    def resamples(self) -> bool:
        """True for the controls that evict nothing but shorten the prompt."""
        return self.base in RESAMPLING

    @cached_property
    def _values(self) -> dict[str, Any]:
        return json.loads(self.parameters)

    @property
    def variant(self) -> tuple[str, str, str | None, str]:
        """(name, base method, reading, parameters as JSON) of a table line: its identity, independent of its label."""
        return self.name, self.base, self.reading, self.parameters


CONTROLS = ("full", "oracle", "blind")
"""Families (`base`) that are not methods: the uncompressed cache, the answer's own attention, and no image."""

PRESETS = {"adakv_official": "adakv", "mmshift_llava": "mmshift", "snapkv_kvpress": "snapkv"}
"""Methods of conf/method with another method's parts and other constants -> that other method, which is predeclared."""

_ABLATION_SHARE = 0.8  # share of a column's lines
_NAMING_PARAMETERS = {"kvpress": ("press",), "custom": ("path", "name")}
"""Families whose method is named by these parameters."""


class ComparisonFamily(NamedTuple):
    """The lines of a column that are compared with each other and corrected together.

    competitors: these lines.
    presets: label of a line that does not compete -> label of the predeclared line that competes for the same method.
    method: if the column is an ablation (nearly all lines are presets of one method), this method; otherwise ""."""

    competitors: tuple[Line, ...]
    presets: dict[str, str]
    method: str = ""


def family(methods: Sequence[Line]) -> ComparisonFamily:
    """Choose which lines of one budget are compared with each other. The choice never depends on a score.

    One line per method competes: the line with the method's name and default parameters, in the reading `paper` if both
    readings are present. If a method has no such line, all its presets compete. If nearly all lines are presets of one method
    (an ablation), all lines compete.
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
    """Return the identity of the method of which a line is a preset."""
    keys = _NAMING_PARAMETERS.get(line.base, ())
    parameters = json.loads(line.parameters) if keys else {}
    return PRESETS.get(line.base, line.base), *(json.dumps(parameters.get(key)) for key in keys)


def calibrations(parameters: str) -> dict[str, str]:
    """Return name -> checksum of the calibration files that a method read; empty if it read none.

    parameters: the method's parameters (JSON). A `calibration` that is a string (`auto`, a path) or null was not read,
    because that variant of the method works without.
    """
    calibration_node = json.loads(parameters).get("calibration")
    return dict(calibration_node) if isinstance(calibration_node, Mapping) else {}


def calibration_words(configs: Iterable[str], checksums: Mapping[str, str]) -> tuple[str, ...]:
    """Return one phrase per calibration file: its name, checksum and the samples that it was measured on.

    New rows contain the samples in their configuration (`calibrations`). For older rows the file in `conf/calibration` with
    the same checksum is read.

    Args:
        configs: configurations (JSON) of the cells that read the files.
        checksums: name of the file -> its checksum.
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
    """Read every calibration file below `folder`. Return first 16 digits of the checksum -> its dataset and number of samples."""
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
    """One table cell.

    value, low, high: the printed score and its interval; None unless every sample is ok. interval: kind of the interval.
    zero: score with failures counted as 0 (None if smaller values are better).
    common: score over the samples that are ok in every cell of the table.
    lmms_eval: lmms-eval's aggregate, averaged over seeds. lmms_eval_ours: the same aggregate on the scale of `value`.
    unread: number of answers from which no choice could be parsed.
    judges: judges with their prompts and temperature. cells: hashes of the store's cells, one per seed."""

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
        """Printed score (`value`) of a table cell whose samples are all ok."""
        assert self.value is not None, "only a complete cell has a headline"
        return self.value


@dataclass
class ScoreTable:
    """Table of scores of one context and metric: methods by budgets.

    entries: (line's label, budget) -> table cell. A budget is an exact decimal string, "" for none; `budgets` ascend.
    waiting: (label, budget) -> number of answers without a score yet.
    columns: budget -> the methods that compete there (`compare.columns`).
    gate: sentence on whether `full` reaches the score that a paper prints; None if no score is expected.
    free: share of the answers' tokens that no method can change (`audit.free_share`).
    calibrations: label of a calibrated line -> phrases on the artefacts that it read.
    versions: label -> budget -> versions of the method, for lines with several versions.
    primary: the study's primary endpoint. cpus: kind of CPU -> number of cells.
    weights_files: the GGUF files of the weights.
    letters: names of the fallbacks of all tables that are joined with this one.
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
        """True if the full prefill gives at least half of the answers' tokens, so that methods cannot change them."""
        return self.free is not None and self.free >= MOSTLY and self.compressed

    def entry(self, label: str, budget: str) -> Entry | None:
        """Return the table cell of a line (its label) at a budget. A line without a budget is in every column."""
        return self.entries.get((label, budget)) or self.entries.get((label, ""))

    @property
    def cells(self) -> list[tuple[Line, str, Entry]]:
        """Every table cell once, line by line: (method, budget, entry)."""
        methods_and_budgets = [(method, budget) for method in self.methods for budget in ("", *self.budgets)]
        return [
            (line, at, self.entries[line.label, at])
            for line, at in methods_and_budgets
            if (line.label, at) in self.entries
        ]

    @property
    def readings(self) -> tuple[str, ...]:
        """Readings of the table's methods, `paper` (as the paper's text says) before `released` (as its code does).

        Empty for `full` alone.
        """
        return tuple(sorted({method.reading for method in self.methods if method.reading}))

    @cached_property
    def common_ids(self) -> np.ndarray:
        """Ids of the samples that are ok in every cell, ascending, object [m]."""
        all_scores = [entry.scores for entry in self.entries.values()]
        return all_scores[0].ids[common_samples(all_scores)] if all_scores else np.array([], dtype=object)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Distinct numbers of samples of the table's cells, ascending."""
        return tuple(sorted({entry.scores.n for entry in self.entries.values()}))

    @cached_property
    def fallbacks(self) -> tuple[str, ...]:
        """Names of the fallbacks (replacements that methods reported) in the table, sorted; `letters` if these are given."""
        occurring = sorted({reason for entry in self.entries.values() for reason in entry.audit.fallbacks})
        return self.letters or tuple(occurring)

    @cached_property
    def comparable(self) -> bool:
        """True if all cells have the same samples and all of these are ok."""
        return _comparable(list(self.entries.values()))

    def ranked(self, budget: str) -> Column | None:
        """Return the tested column of the competing methods at a budget; None if the methods cannot be ranked.

        They cannot if they are not ok on the same samples, or if none is proven better than another.
        """
        column = self.columns.get(budget)
        return column if column is not None and column.beats.any() and self._same_samples(budget) else None

    def unranked(self) -> list[str]:
        """Return the budgets at which the competing methods are not ok on the same samples, so that they are not ranked."""
        return [b for b, column in self.columns.items() if len(column.names) > 1 and not self._same_samples(b)]

    def _same_samples(self, budget: str) -> bool:
        if budget not in self._comparable_at:
            names = self.columns[budget].names
            self._comparable_at[budget] = _comparable([self.entries[name, budget] for name in names])
        return self._comparable_at[budget]

    def family(self, budget: str) -> ComparisonFamily:
        """Return which lines of this budget compete, chosen among all its lines.

        Unlike `columns`, this includes cells over the budget and cells with quantised or offloaded entries.
        """
        return family([method for method in self.methods if (method.label, budget) in self.entries])

    def best(self, budget: str) -> tuple[str, ...]:
        """Return the methods at this budget to which no other method is proven superior.

        With 95 % confidence the best method is among them. The result is empty if no method is proven better than another, or
        if samples failed or differ between cells.
        """
        column = self.ranked(budget)
        return column.winners if column else ()

    def above_bold(self, budget: str) -> frozenset[str]:
        """Return the presets at this budget that score better than a bold method.

        Presets (further settings of a method in the table) do not compete, so they are never bold.
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
        """Return (lowest, highest) possible rank of a competing method at 95 % confidence, 1 = best; None if it has no rank."""
        column = self.ranked(budget)
        if column is None or label not in column.names:
            return None
        low, high = column.ranks[column.names.index(label)]
        return int(low), int(high)


def _comparable(entries: list[Entry]) -> bool:
    same_samples = all(np.array_equal(entry.scores.samples, entries[0].scores.samples) for entry in entries)
    return same_samples and all(entry.scores.complete for entry in entries)
