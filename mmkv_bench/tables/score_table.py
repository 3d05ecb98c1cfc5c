"""Tables of scores: methods by budgets of one model, dataset, protocol and metric, with its failure rules.

A table cell is a method at a budget; its seeds are averaged within each sample. It has a headline only if every sample
is ok. Budgets in entries and in fractions make tables of their own; neither is ever turned into the other.
`tables/build.py` makes tables from rows.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mmkv_bench.config.files import conf_dir
from mmkv_bench.statistics.column import Column
from mmkv_bench.statistics.metric_kinds import lower_is_better
from mmkv_bench.store.schema import RESAMPLING
from mmkv_bench.store.study import PrimaryEndpoint
from mmkv_bench.tables.audit import MOSTLY, Audit
from mmkv_bench.tables.rows import BASELINE, config_of
from mmkv_bench.tables.scores import Scores, common_samples


@dataclass(frozen=True)
class Line:
    """One line of a table. `budgeted` is False for `full` and whatever else takes no budget."""

    label: str
    name: str
    base: str
    tuned: bool
    reading: str | None
    parameters: str
    budgeted: bool

    @property
    def cheats(self) -> bool:
        """True for a ceiling: it was given the full cache's own answer, is not marked best and does not compete."""
        return bool(self._values.get("reads_answer"))

    @cached_property
    def calibrated(self) -> bool:
        """True if built with a calibration: numbers measured on data before the first prompt."""
        return bool(calibrations(self.parameters))

    @property
    def may_exceed(self) -> bool:
        """True if more entries than the budget are no defect: a released code's, or the paper's own formula."""
        return self.reading == "released" or bool(self._values.get("over_budget"))

    @property
    def renamed(self) -> bool:
        """True for a variant that changes nothing but the name."""
        return self.name != self.base and not self.tuned and self.base not in ("custom", "kvpress")

    @property
    def resamples(self) -> bool:
        """True for the controls that evict nothing and give a smaller prompt."""
        return self.base in RESAMPLING

    @cached_property
    def _values(self) -> dict[str, Any]:
        return json.loads(self.parameters)

    @property
    def variant(self) -> tuple[str, str, str | None, str]:
        """Identity of the line, whatever its label says."""
        return self.name, self.base, self.reading, self.parameters


CONTROLS = ("full", "oracle", "blind")
"""Families (`base`) that are no methods: what the uncompressed cache, the answer's own attention and no image give."""

PRESETS = {"adakv_official": "adakv", "mmshift_llava": "mmshift", "snapkv_kvpress": "snapkv"}
"""Methods of conf/method that are another's parts with other constants -> that other one, which is predeclared."""

_NEARLY_ALL = 0.8  # of a column's lines
_LOADED = {"kvpress": ("press",), "custom": ("path", "name")}
"""Families whose method is what these parameters name."""


@dataclass(frozen=True)
class ComparisonFamily:
    """competitors: the lines that compete; presets: line -> the predeclared line of its method, beside which it does not compete;
    method: of which nearly all lines are presets, so that all of them compete ("" where there is none)."""

    competitors: tuple[Line, ...]
    presets: dict[str, str]
    method: str = ""


def family(methods: Sequence[Line]) -> ComparisonFamily:
    """The family of the lines of one column. It looks at what was asked for alone, never at a score.

    Predeclared is the line that has its method's name and default parameters, in the reading `paper` where both are
    there. Without such a line all presets of the method compete. Where nearly all lines are presets of one method
    (ablations of it), they are what the reader compares, and all lines compete.
    """
    lines = [method for method in methods if method.base not in CONTROLS and not method.cheats]
    groups: dict[tuple[Hashable, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault(_method(line), []).append(line)
    presets: dict[str, str] = {}
    for name, group in groups.items():
        if len(group) > 1 and len(group) >= _NEARLY_ALL * len(lines):
            return ComparisonFamily(tuple(lines), {}, str(name[0]))
        plain = [line for line in group if not line.tuned and line.name == line.base and line.base not in PRESETS]
        declared = [line for line in plain if line.reading == "paper"] or plain
        if declared:
            presets |= {line.label: declared[0].label for line in group if line not in declared}
    return ComparisonFamily(tuple(line for line in lines if line.label not in presets), presets)


@cache
def _method(line: Line) -> tuple[Hashable, ...]:
    """The method that a line is a preset of."""
    keys = _LOADED.get(line.base, ())
    parameters = json.loads(line.parameters) if keys else {}
    return PRESETS.get(line.base, line.base), *(json.dumps(parameters.get(key)) for key in keys)


def calibrations(parameters: str) -> dict[str, str]:
    """Method -> checksum of the calibrations that a line's parameters (JSON) name; empty for a method that read none.

    A word instead (`auto`, a path) or null was never looked up: that variant works without one.
    """
    named = json.loads(parameters).get("calibration")
    return dict(named) if isinstance(named, Mapping) else {}


def calibration_words(configs: Iterable[str], checksums: Mapping[str, str]) -> tuple[str, ...]:
    """Name, checksum and samples of each of `calibrations`, as a phrase.

    Rows have the samples in their configuration (`calibrations`: checksum -> dataset in words, number of samples). For
    older rows the checksum, which covers the samples too, finds the artefact in `conf/calibration`.

    Args:
        configs: of the cells that read them (JSON).
    """
    samples: dict[str, Any] = {}
    for config in configs:
        samples |= config_of(config).get("calibrations") or {}
    committed = {} if set(checksums.values()) <= set(samples) else _committed(conf_dir())
    phrases = []
    for name, checksum in sorted(checksums.items()):
        data = samples.get(checksum) or committed.get(checksum)
        count = f"{data['samples']} samples: " if data and data["samples"] else ""
        phrases.append(f"{name} {checksum} ({count + data['dataset'] if data else 'unknown samples'})")
    return tuple(phrases)


@cache
def _committed(folder: Path) -> dict[str, dict[str, Any]]:
    """First 16 digits of the checksum -> samples and dataset of every artefact below the configuration folder."""
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
    """One table cell. `value`, `low`, `high` are None unless every sample is ok; `common` is the score over the samples
    ok in every cell of the table, `zero` the score with failures counted as 0 (None where less is better), `lmms_eval`
    lmms-eval's own aggregate (its mean over seeds), `lmms_eval_ours` the same on the scale of `value`,
    `unread` the answers in which no choice could be read, `judges` who judged, with prompts and temperature, `cells` the hashes
    of the cells behind it, one a seed."""

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
        """`value` of a cell of which every sample is ok."""
        assert self.value is not None, "only a complete cell has a headline"
        return self.value


@dataclass
class ScoreTable:
    """Entries by (label, budget); `budgets` are exact decimal strings in ascending order, "" stands for no budget.

    `waiting` counts the answers, by (label, budget), that have no score yet; `columns` holds, by budget, the methods that
    compete there (`compare.columns`); `gate` says whether `full` scores what
    is printed for it (None: nobody expects it to);
    `free` is the share of the answers that no method can change (`audit.free_share`), `calibrations` says of each calibrated
    line what its artefacts were made of, `primary` is the study's primary endpoint, `versions` the versions by budget of lines
    that have several (see `versions`), `cpus` how many cells were made beside which kind of CPU,
    `weights_files` the GGUF files of the weights,
    `letters` the fallbacks of all tables that it stands beside in one.
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
        """True if any of its methods is not `full`."""
        return any(method.base != BASELINE for method in self.methods)

    @property
    def mostly_free(self) -> bool:
        """True if the full prefill gives at least half of what the answers say, whatever a method keeps."""
        return self.free is not None and self.free >= MOSTLY and self.compressed

    def entry(self, label: str, budget: str) -> Entry | None:
        """The cell in that column; what takes no budget stands in every column."""
        return self.entries.get((label, budget)) or self.entries.get((label, ""))

    @property
    def cells(self) -> list[tuple[Line, str, Entry]]:
        """Every cell once, line by line: method, budget, entry."""
        places = [(method, budget) for method in self.methods for budget in ("", *self.budgets)]
        return [(line, at, self.entries[line.label, at]) for line, at in places if (line.label, at) in self.entries]

    @property
    def readings(self) -> tuple[str, ...]:
        """The readings of its methods, `paper` first; empty for `full` alone."""
        return tuple(sorted({method.reading for method in self.methods if method.reading}))

    @cached_property
    def common_ids(self) -> np.ndarray:
        """Ids of the samples that are ok in every cell of the table, ascending, object [m]."""
        every = [entry.scores for entry in self.entries.values()]
        return every[0].ids[common_samples(every)] if every else np.array([], dtype=object)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The distinct numbers of samples of the table's cells."""
        return tuple(sorted({entry.scores.n for entry in self.entries.values()}))

    @cached_property
    def fallbacks(self) -> tuple[str, ...]:
        """Names of the fallbacks that occur in the table, in order, or those that `letters` stand for."""
        occurring = sorted({reason for entry in self.entries.values() for reason in entry.audit.fallbacks})
        return self.letters or tuple(occurring)

    @cached_property
    def comparable(self) -> bool:
        """True if all cells are ok on all of the same samples."""
        return _comparable(list(self.entries.values()))

    def ranked(self, budget: str) -> Column | None:
        """The column of those that compete at a budget, where anything may be said of who is best there: all of them are
        ok on all of the same samples, and one is better than another."""
        column = self.columns.get(budget)
        return column if column is not None and column.beats.any() and self._same_samples(budget) else None

    def unranked(self) -> list[str]:
        """Budgets at which nothing is said of who is best, because those that compete are not ok on the same samples."""
        return [b for b, column in self.columns.items() if len(column.names) > 1 and not self._same_samples(b)]

    def _same_samples(self, budget: str) -> bool:
        if budget not in self._comparable_at:
            names = self.columns[budget].names
            self._comparable_at[budget] = _comparable([self.entries[name, budget] for name in names])
        return self._comparable_at[budget]

    def lines(self, budget: str) -> tuple[Line, ...]:
        """The methods with a cell of that very budget."""
        return tuple(method for method in self.methods if (method.label, budget) in self.entries)

    def family(self, budget: str) -> ComparisonFamily:
        """The lines of this budget that compete, unless they are over it or stored otherwise (see `columns`)."""
        return family(self.lines(budget))

    def best(self, budget: str) -> tuple[str, ...]:
        """Methods at this budget of which no other is proven better: with 95 % confidence the truly best one is among them.

        Empty where no method is proven better than another, and where samples failed or differ between cells.
        """
        column = self.ranked(budget)
        return column.winners if column else ()

    def above_bold(self, budget: str) -> frozenset[str]:
        """Presets at this budget with a better score than a bold one has, which do not compete and so cannot be bold."""
        if budget not in self._above_at:
            sign = -1 if lower_is_better(self.metric) else 1
            shown = {label: entry for (label, at), entry in self.entries.items() if at == budget}
            bold = [sign * shown[name].headline for name in self.best(budget) if name in shown]
            presets = [
                label for label in (self.family(budget).presets if bold else ()) if shown[label].audit.comparable
            ]
            scores = {label: value for label in presets if (value := shown[label].value) is not None}
            self._above_at[budget] = frozenset(label for label, value in scores.items() if sign * value > min(bold))
        return self._above_at[budget]

    def rank(self, label: str, budget: str) -> tuple[int, int] | None:
        """From and to of a method's rank among those that compete, 1 = best, at 95 %; None where it has none."""
        column = self.ranked(budget)
        if column is None or label not in column.names:
            return None
        low, high = column.ranks[column.names.index(label)]
        return int(low), int(high)


def _comparable(entries: list[Entry]) -> bool:
    same = all(np.array_equal(entry.scores.samples, entries[0].scores.samples) for entry in entries)
    return same and all(entry.scores.complete for entry in entries)
