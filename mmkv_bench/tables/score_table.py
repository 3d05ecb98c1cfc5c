"""Tables of scores: methods by budgets of one model, dataset, protocol and metric, with its failure rules.

A table cell is a method at a budget; its seeds are averaged within each sample. It has a headline only if every sample
is ok. Budgets in entries and in fractions make tables of their own; neither is ever turned into the other.
`tables/build.py` makes tables from rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from mmkv_bench.statistics.column import Column
from mmkv_bench.statistics.metric_kinds import lower_is_better
from mmkv_bench.store.study import PrimaryEndpoint
from mmkv_bench.tables.audit import MOSTLY, Audit
from mmkv_bench.tables.line import ComparisonFamily, Line, family
from mmkv_bench.tables.rows import BASELINE
from mmkv_bench.tables.scores import Scores, common_samples

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
    `free` is the share of the answers that no method can change (see `free.share`), `calibrations` says of each calibrated
    line what its artefacts were made of, `primary` is the study's primary endpoint, `versions` the versions by budget of lines
    that have several (see `versions`), `cpus` how many cells were made beside which kind of CPU.
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
        """Names of the fallbacks that occur in the table, in order."""
        return tuple(sorted({reason for entry in self.entries.values() for reason in entry.audit.fallbacks}))

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
        """Methods at this budget of which no rival is proven better: with 95 % confidence the truly best one is among them.

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
