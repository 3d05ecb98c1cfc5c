"""What a table is: methods by budgets of one model, dataset, protocol and metric, with its failure rules.

A table cell is a method at a budget; its seeds are averaged within each sample. It has a headline only if every sample
is ok. Budgets in entries and in fractions make tables of their own; neither is ever turned into the other.
`tables/build.py` makes tables from rows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from mmkv_bench.tables.audit import Audit
from mmkv_bench.tables.calibrated import artefacts
from mmkv_bench.tables.compare import Pair
from mmkv_bench.tables.rows import BASELINE
from mmkv_bench.tables.scores import Scores, common_samples
from mmkv_bench.tables.versions import Versions

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
    `unread` the answers in which no choice could be read, `judges` who judged, with prompts and temperature."""

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


@dataclass(frozen=True)
class Method:
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
        """It was given the full cache's own answer: a ceiling, which neither is marked best nor competes."""
        return bool(json.loads(self.parameters).get("reads_answer"))

    @property
    def calibrated(self) -> bool:
        """It was built with a calibration: numbers measured on data before the first prompt."""
        return bool(artefacts(self.parameters))

    @property
    def may_exceed(self) -> bool:
        """More entries than the budget are no defect: a released code's, or the paper's own formula."""
        return self.reading == "released" or bool(json.loads(self.parameters).get("over_budget"))

    @property
    def variant(self) -> tuple[str, str, str | None, str]:
        """What tells it from every other line, whatever its label says."""
        return self.name, self.base, self.reading, self.parameters


@dataclass
class Table:
    """Entries by (label, budget); `budgets` are exact decimal strings in ascending order, "" stands for no budget.

    `waiting` counts the answers, by (label, budget), that have no score yet; `pairs` holds every two methods at every
    budget, Holm-corrected together; `gate` says whether `full` scores what is printed for it (None: nobody expects it to);
    `free` is the share of the answers that no method can change (see `free.share`), `calibrations` says of each calibrated
    line what its artefacts were made of, `versions` the versions by budget of lines that have several (see `versions`).
    """

    context: dict[str, str]
    metric: str
    axis: str
    budgets: tuple[str, ...]
    methods: tuple[Method, ...]
    entries: dict[tuple[str, str], Entry]
    waiting: dict[tuple[str, str], int] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)
    gate: str | None = None
    free: float | None = None
    calibrations: dict[str, tuple[str, ...]] = field(default_factory=dict)
    versions: dict[str, Versions] = field(default_factory=dict)

    @property
    def dataset(self) -> str:
        return self.context["dataset"]

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
        """Whether all cells are ok on all of the same samples; otherwise nothing may be marked best."""
        entries = list(self.entries.values())
        same = all(np.array_equal(entry.scores.samples, entries[0].scores.samples) for entry in entries)
        return same and all(entry.scores.complete for entry in entries)

    def best(self, budget: str) -> tuple[str, ...]:
        """Methods at this budget that no other one is better than by a Holm-corrected paired interval.

        Empty when samples failed or differ between cells, and when no method of the column is worse than another.
        `full`, ceilings that know its answer, cells over their budget, and those whose entries are packed or can be
        retrieved, which are another axis, neither are marked nor compete.
        """
        rivals = {
            method.label
            for method in self.methods
            if (entry := self.entries.get((method.label, budget)))
            and method.base != BASELINE
            and not method.cheats
            and not entry.audit.over
            and entry.audit.entries_only
        }
        beaten = {
            pair.worse for pair in self.pairs if pair.budget == budget and pair.separated and {pair.a, pair.b} <= rivals
        }
        if not self.comparable or not beaten:
            return ()
        return tuple(method.label for method in self.methods if method.label in rivals - beaten)
