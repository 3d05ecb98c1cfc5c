"""Rows -> tables of costs: per method and budget the median of times, bytes and tokens, and the ratio to `full` of the same run.

Answers are what a sample took (`responses`); passes of `scenario=efficiency` are repeats at one shape of the prompt (`timings`),
with a table for each shape. A ratio is a cell's value over that of `full` for the same sample or in the same repeat, and its
median is over these ratios. Seeds are averaged within each sample or repeat first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mmkv_bench.errors import ConfigError
from mmkv_bench.statistics.medians import Medians, medians
from mmkv_bench.store.cell_rows import processor
from mmkv_bench.store.measurements import load_warning
from mmkv_bench.store.schema import STATUSES
from mmkv_bench.tables.cost_names import KNOWN, Cost
from mmkv_bench.tables.cost_rows import Seen, answers_seen, passes_seen
from mmkv_bench.tables.line import Line
from mmkv_bench.tables.rows import BASELINE, CONTEXT, cells_of, choose, latest, missing, with_limits
from mmkv_bench.tables.sweep import Sweep

if TYPE_CHECKING:
    import pandas as pd


WITHIN = CONTEXT
"""What must agree for two costs to be compared: as of scores, the device among it."""
SHARED_RUN = (
    "{names} of these rows {is_are} of runs that share prefills: the times and peaks of a group of cells that were decoded "
    "together, of no method by itself; run with sharing=off or scenario=efficiency for a method's own, or leave {it} out"
)


@dataclass(frozen=True)
class CostEntry:
    """What one line of a table took.

    Attributes:
        value: median over samples or repeats, None unless all of them are known; low, high: its interval, of this level.
        ratio: median of the paired ratios to `full`, with its interval; None without any.
        n: samples or repeats that should have a value; known: that have one.
        failed: status of the first failure by name, None where there is none.
    """

    value: float | None
    low: float | None
    high: float | None
    level: float | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    n: int
    known: int
    paired: int
    failed: str | None


@dataclass
class CostTable:
    """Entries by (label, budget) and cost's key; budgets are texts, "" for none; shape: of the prompt, empty for answers.

    fallbacks: reason -> [(label, budget, how many answers or passes)]; disturbed: what disturbed the passes; limits: of decode
    steps, which `set_limits` sets.
    """

    context: dict[str, str]
    shape: Mapping[str, int | str]
    axis: str
    costs: tuple[Cost, ...]
    methods: tuple[Line, ...]
    entries: dict[tuple[str, str], dict[str, CostEntry]]
    per_pass: bool
    fallbacks: dict[str, list[tuple[str, str, int]]] = field(default_factory=dict)
    disturbed: tuple[str, ...] = ()
    random_weights: bool = False
    limits: StepLimits | None = None

    @property
    def readings(self) -> tuple[str, ...]:
        """The readings of its methods, `paper` first."""
        return tuple(sorted({method.reading for method in self.methods if method.reading}))

    def lines(self) -> list[tuple[Line, str]]:
        """The table's lines in order, each method at its budgets."""
        budgets: dict[str, list[str]] = {}
        for label, budget in sorted(self.entries, key=lambda key: Decimal(key[1] or 0)):
            budgets.setdefault(label, []).append(budget)
        return [(method, budget) for method in self.methods for budget in budgets.get(method.label, ())]


def cost_tables(
    root: Path | str,
    costs: Sequence[Cost],
    *,
    beside: Sequence[Cost] = (),
    datasets: Sequence[str] | None = None,
    protocols: Sequence[str] | None = None,
    readings: Sequence[str] | None = None,
) -> list[CostTable]:
    """The tables of a store, those of answers first; the filters name what to keep. beside: costs that need not be known.

    Raises:
        ConfigError: no store, a filter that names what the rows do not hold, a cost that they do not know, and times that only
            groups of cells have.
    """
    every = [*costs, *beside]
    seen, chosen = _read(root, every, datasets, protocols, readings)
    wanted = [_own(part, list(chosen["place"]), every) for part in seen]
    _refuse_unknown(seen, wanted, list(chosen["place"]), costs)
    return _every_table(chosen, seen, wanted)


def known_tables(root: Path | str, costs: Sequence[Cost]) -> list[CostTable]:
    """The tables of a store with those of the costs that it knows, none where it knows none; errors of rows that are not there as
    of `cost_tables`."""
    seen, chosen = _read(root, costs)
    return _every_table(chosen, seen, [_own(part, list(chosen["place"]), costs) for part in seen])


def set_limits(tables: Sequence[CostTable], costs: Sequence[Cost], known: Known) -> list[CostTable]:
    """Sets the `limits` of tables of these costs and what is `needed` beside them, which is shown no more; returns those that
    know one of the costs."""
    for table in tables:
        if table.per_pass and any(cost.key == TIMED for cost in table.costs):
            table.limits = _limits(table, known(table.context))
        table.costs = tuple(cost for cost in table.costs if cost in costs)
        shown = {cost.key for cost in table.costs}
        table.entries = {
            line: {key: entry for key, entry in own.items() if key in shown} for line, own in table.entries.items()
        }
    return [table for table in tables if table.costs]


def _limits(table: CostTable, limit: Limit | None) -> StepLimits | None:
    if limit is None:
        return None
    batch = int(table.shape["batch"])
    useful = {key: own[USEFUL].value for key, own in table.entries.items() if USEFUL in own}
    least = {key: limit.step_s(value, batch) for key, value in useful.items() if value is not None}
    return StepLimits(least, limit.bandwidth, limit.device)


def _read(
    root: Path | str,
    costs: Sequence[Cost],
    datasets: Sequence[str] | None = None,
    protocols: Sequence[str] | None = None,
    readings: Sequence[str] | None = None,
) -> tuple[list[Seen], pd.DataFrame]:
    """What answers and passes say, and the cells that the filters choose, with `place`."""
    from mmkv_bench.store.store import Store

    root = Path(root)
    if not root.is_dir():
        raise ConfigError(f"There is no rows folder at '{root}': give the folder that a run printed as its rows.")
    store = Store(root)
    cells = cells_of(store)
    if cells.empty:
        raise ConfigError(f"'{root}' holds no result rows: give the folder that a run printed as its rows.")
    cells = with_limits(cells)
    keep = choose(cells["dataset"], datasets, "dataset") & choose(cells["protocol"], protocols, "protocol")
    keep &= choose(cells["reading"], readings, "reading") | cells["reading"].isna()
    cells = cells.assign(place=np.arange(len(cells)), latest=latest(cells))
    names = list(cells["cell"])
    return [answers_seen(store, names, costs), passes_seen(store, names, costs)], cells[keep]


def _every_table(chosen: pd.DataFrame, seen: Sequence[Seen], wanted: Sequence[tuple[Cost, ...]]) -> list[CostTable]:
    return [table for part, shown in zip(seen, wanted, strict=True) if shown for table in _tables(chosen, part, shown)]


def _own(seen: Seen, places: Sequence[int], costs: Sequence[Cost]) -> tuple[Cost, ...]:
    """The costs of which some line of these cells has a value of its own."""
    at = seen.lines(places)
    known = {key: ~np.isnan(values[at]) for key, values in seen.values.items()}
    own = ~seen.group[at]
    return tuple(cost for cost in costs if bool((known[cost.key] & (own | (not cost.shared))).any()))


def _refuse_unknown(
    seen: Sequence[Seen], wanted: Sequence[tuple[Cost, ...]], places: Sequence[int], costs: Sequence[Cost]
) -> None:
    lacking = [cost for cost in costs if not any(cost in shown for shown in wanted)]
    if not lacking:
        return
    groups = any(bool(part.group[part.lines(places)].any()) for part in seen)
    shared = [cost.name for cost in lacking if cost.shared and groups]
    if shared:
        one = len(shared) == 1
        raise ConfigError(
            SHARED_RUN.format(names=" and ".join(shared), is_are="is" if one else "are", it="it" if one else "them")
        )
    first = lacking[0]
    name = first.name if first.name == first.key else f"{first.name} ({first.key})"
    raise ConfigError(
        f"These rows know no {name}: it is null in all of them, or is measured by scenario=efficiency alone; leave it out"
    )


def _tables(cells: pd.DataFrame, seen: Seen, costs: tuple[Cost, ...]) -> list[CostTable]:
    made = []
    if seen.per_pass and "cpu" in cells:  # times of two kinds of CPU do not compare in any precision
        kinds = zip(cells["device"], cells["cpu"], cells["dtype"], strict=True)
        cells = cells.assign(
            processor=[processor(device, None if missing(cpu) else cpu, dtype, True) for device, cpu, dtype in kinds]
        )
    for _, group in cells.groupby(list(WITHIN), dropna=False, sort=True):
        for axis in [kind for kind in ("entries", "fraction") if (group["budget_kind"] == kind).any()] or ["none"]:
            own = group[group["budget_kind"].isin([axis, "none"])]
            found = _of_sweep(Sweep.of(own, axis), seen, costs)
            for table in found:
                table.random_weights = "weights" in group and bool((group["weights"] == "random").any())
            made += found
    return made


def _of_sweep(sweep: Sweep, seen: Seen, costs: tuple[Cost, ...]) -> list[CostTable]:
    """The tables of one context and kind of budget: one of answers, or one per shape of the prompt."""
    keys = list(sweep.groups)
    for own in sweep.groups.values():
        own.refuse_twins()
    at = seen.lines(sweep.places)
    if not len(at):
        return []
    sizes = [[int(seen.starts[place + 1] - seen.starts[place]) for place in sweep.groups[key].places] for key in keys]
    line = np.repeat(np.arange(len(keys)), [sum(each) for each in sizes])
    line = seen.shape[at] * len(keys) + line  # numbered through all shapes
    count = len(keys) * len(seen.shapes)
    full = next((number for number, (label, budget) in enumerate(keys) if label == BASELINE and not budget), None)
    found = {cost.key: _entries(seen, at, line, cost, count, len(keys), full) for cost in costs}
    present = np.bincount(line, minlength=count) > 0
    tables = []
    for number, shape in enumerate(seen.shapes):
        places = [n for n in range(len(keys)) if present[number * len(keys) + n]]
        if not places:
            continue
        entries = {keys[n]: {key: each[number * len(keys) + n] for key, each in found.items()} for n in places}
        labels = {label for label, _ in entries}
        methods = tuple(method for method in sweep.methods if method.label in labels)
        table = CostTable(sweep.context, shape, sweep.axis, costs, methods, entries, seen.per_pass)
        table.fallbacks = _fallbacks(seen, sweep, number)
        table.disturbed = _disturbed(seen, at[seen.shape[at] == number])
        tables.append(table)
    return tables


def _entries(
    seen: Seen, at: np.ndarray, line: np.ndarray, cost: Cost, count: int, width: int, full: int | None
) -> list[CostEntry]:
    """The entries of one cost by number of line. width: lines of a shape; full: which of them is `full`."""
    values, unit, status = seen.values[cost.key][at], seen.unit[at], seen.status[at]
    if cost.shared:
        values = np.where(seen.group[at], np.nan, values)
    expected = ~np.isnan(values) | (status > 0) if seen.per_pass else np.ones(len(at), dtype=bool)
    line, values, unit, status = (each[expected] for each in (line, values, unit, status))
    clusters = seen.cluster[at][expected]
    failed = np.full(count, len(STATUSES))
    np.minimum.at(failed, line[status > 0], status[status > 0])
    line, unit, values, clusters = _over_seeds(line, unit, values, clusters)
    own = medians(values, line, clusters, count)
    n = np.bincount(line, minlength=count)
    ratios = np.full(len(values), np.nan)
    if full is not None:
        base = _paired(line, unit, values, width, full)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.where(base != 0, values / base, np.nan)
    paired = medians(ratios, line, clusters, count)
    return [_entry(own, paired, number, int(n[number]), int(failed[number])) for number in range(count)]


def _over_seeds(
    line: np.ndarray, unit: np.ndarray, values: np.ndarray, clusters: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The mean of each line and unit; NaN where one of its seeds has no value."""
    width = int(unit.max(initial=0)) + 1
    distinct, first, place, size = np.unique(
        line * width + unit, return_index=True, return_inverse=True, return_counts=True
    )
    if len(distinct) == len(line):
        return line, unit, values, clusters
    mean = np.bincount(place.reshape(-1), weights=values, minlength=len(distinct)) / size
    return distinct // width, distinct % width, mean, clusters[first]


def _paired(line: np.ndarray, unit: np.ndarray, values: np.ndarray, width: int, full: int) -> np.ndarray:
    """The value of `full` at the same shape and unit, NaN where there is none."""
    units = int(unit.max(initial=0)) + 1
    base = np.full((int(line.max(initial=0)) // width + 1) * units, np.nan)
    place = line // width * units + unit
    baseline = line % width == full
    base[place[baseline]] = values[baseline]
    return base[place]


def _entry(own: Medians, paired: Medians, number: int, n: int, failed: int) -> CostEntry:
    known = int(own.n[number])
    whole = n > 0 and known == n
    found: dict[str, Any] = dict.fromkeys(("value", "low", "high", "level", "ratio", "ratio_low", "ratio_high"))
    if whole:
        every = (own.median, own.low, own.high, own.level, paired.median, paired.low, paired.high)
        found = {name: _plain(each[number]) for name, each in zip(found, every, strict=True)}
    status = STATUSES[failed] if failed < len(STATUSES) else None
    return CostEntry(**found, n=n, known=known, paired=int(paired.n[number]), failed=status)


def _plain(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _fallbacks(seen: Seen, sweep: Sweep, shape: int) -> dict[str, list[tuple[str, str, int]]]:
    """Reason -> (label, budget, how many answers or passes) of the lines in which it occurs."""
    found: dict[str, list[tuple[str, str, int]]] = {}
    if not len(seen.reason):
        return found
    for (label, budget), own in sweep.groups.items():
        counts = np.zeros(len(seen.reasons), dtype=np.int64)
        for place in own.places:
            low, high = np.searchsorted(seen.reason_line, seen.starts[place : place + 2])
            here = seen.shape[seen.reason_line[low:high]] == shape
            counts += np.bincount(seen.reason[low:high][here], minlength=len(counts))
        for number in np.flatnonzero(counts):
            found.setdefault(seen.reasons[number], []).append((label, budget, int(counts[number])))
    return dict(sorted(found.items()))


def _disturbed(seen: Seen, at: np.ndarray) -> tuple[str, ...]:
    if not seen.per_pass:
        return ()
    said = {
        word for words in seen.disturbed[at] if words is not None and not isinstance(words, float) for word in words
    }
    other = load_warning(seen.load[at], seen.threads[at])
    return (*sorted(said), *([other] if other else []))


TIMED = "tpot_s"
LIMIT = "limit"
"""Header of the column of limits."""
USEFUL = "bytes_useful_step"
"""What a step reads of keys and values, from which its limit is computed."""


class Limit(Protocol):
    """Of a model on a device: bandwidth of a read-only pass [bytes/s], the device's name, and the least seconds of a step whose
    sequences, `batch` of them, read `useful` bytes of keys and values together."""

    @property
    def bandwidth(self) -> float: ...

    @property
    def device(self) -> str: ...

    def step_s(self, useful: float, batch: int) -> float: ...


Known = Callable[[Mapping[str, str]], "Limit | None"]
"""Of a table's context; None where the device was not measured, or the model's shape is not known."""


@dataclass(frozen=True)
class StepLimits:
    """Of the lines of a table: (label, budget) -> the least seconds of a step; and at what bandwidth, of which device."""

    least: Mapping[tuple[str, str], float]
    bandwidth: float
    device: str


def needed(costs: Sequence[Cost]) -> list[Cost]:
    """What limits are computed from and is not among the costs, where a step's time is."""
    keys = {cost.key for cost in costs}
    return [KNOWN[USEFUL]] if TIMED in keys and USEFUL not in keys else []
