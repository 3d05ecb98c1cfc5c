"""Tables of costs: medians of times, bytes and tokens per method and budget, and medians of their ratios to the full cache.

Costs come from `responses`, one per sample, or from `timings` (`scenario=efficiency`), one per repeat of a pass. Every prompt
shape of the passes gets a table. Seeds are averaged within a sample or repeat; a ratio divides by the value of `full` for the
same sample or repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mmkv_bench.errors import ConfigError
from mmkv_bench.statistics.intervals import Medians, medians
from mmkv_bench.store.measurements import load_warning
from mmkv_bench.store.rows import processor
from mmkv_bench.store.schema import STATUSES
from mmkv_bench.tables.comparable_cells import Sweep, sweeps
from mmkv_bench.tables.cost_rows import KNOWN, Cost, CostRows, answer_costs, pass_costs
from mmkv_bench.tables.score_table import Line
from mmkv_bench.tables.stored_rows import (
    BASELINE,
    NO_ROWS,
    cells_of,
    choose_cells,
    latest,
    missing,
    open_store,
    with_limits,
)

if TYPE_CHECKING:
    import pandas as pd


TIMED = "tpot_s"
LIMIT = "limit"
"""Header of the column of rooflines."""
USEFUL = "bytes_useful_step"
"""Cost from which a step's roofline is computed: bytes of keys and values that a decode step reads."""


class Limit(Protocol):
    """Roofline of a model on a device: lower bound on the time of a decode step.

    bandwidth: measured read bandwidth of the device [bytes/s]. device: name.
    step_s: return the fewest seconds of a step in which `batch` sequences together read `useful` bytes of keys and values.
    """

    @property
    def bandwidth(self) -> float: ...

    @property
    def device(self) -> str: ...

    def step_s(self, useful: float, batch: int) -> float: ...


RooflineOf = Callable[[Mapping[str, str]], "Limit | None"]
"""Function from a table's context to its roofline; None if the device was not measured or the model's shape is unknown."""


@dataclass(frozen=True)
class CostEntry:
    """A cost of a method at a budget. All floats are None unless every sample or repeat has a value.

    Attributes:
        value: median over samples or repeats. low, high: ends of its interval at the confidence `level`.
        ratio: median of the ratios to `full`; None without any ratio. ratio_low, ratio_high: ends of its interval.
        n: number of samples or repeats. known: number of those with a value. paired: number of ratios.
        failed: status of a failed sample or repeat; None without a failure.
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
    """Costs of one model, protocol, and dataset or prompt shape.

    shape: prompt shape of the passes (`SHAPE`); empty for costs of answers.
    entries: (line's label, budget) -> key of the cost -> entry. Budgets are texts, "" for none.
    per_pass: True for timed passes, False for answers.
    fallbacks: reason -> [(label, budget, number of answers or passes)].
    disturbed: causes that disturbed the passes, such as a busy machine.
    roofline, least: roofline, and (label, budget) -> fewest seconds of a decode step by it; `set_limits` sets both.
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
    weights_files: tuple[str, ...] = ()
    roofline: Limit | None = None
    least: Mapping[tuple[str, str], float] = field(default_factory=dict)

    @property
    def readings(self) -> tuple[str, ...]:
        return tuple(sorted({method.reading for method in self.methods if method.reading}))

    def lines(self) -> list[tuple[Line, str]]:
        """Return (method, budget) for every row of the table, in order."""
        budgets: dict[str, list[str]] = {}
        for label, budget in sorted(self.entries, key=lambda key: Decimal(key[1] or 0)):
            budgets.setdefault(label, []).append(budget)
        return [(method, budget) for method in self.methods for budget in budgets.get(method.label, ())]


Key = tuple[str, str, str, str, str, str]
"""Model, protocol, base method, reading, parameters and budget."""


def cell_key(context: Mapping[str, str], method: Line, axis: str, budget: str) -> Key:
    """Return the key by which scores and costs of a method at a budget are joined. It is the same for all datasets and stores.

    context: the columns of `CONTEXT`. axis: entries, fraction or none. budget: text, "" for none.
    """
    kind = axis if budget else "none"
    names = context["model"], context["protocol"], method.base, method.reading or "", method.parameters
    return *names, f"{kind} {budget}"


def cost_tables(
    root: Path | str,
    costs: Sequence[Cost],
    *,
    beside: Sequence[Cost] = (),
    datasets: Sequence[str] | None = None,
    protocols: Sequence[str] | None = None,
    readings: Sequence[str] | None = None,
) -> list[CostTable]:
    """Return the tables of costs of a store: first for answers, then for timed passes.

    Args:
        costs: costs that the rows must have.
        beside: further costs, which the rows may lack.
        datasets, protocols, readings: values to keep; None: all.

    Raises:
        ConfigError: there is no store, or the rows lack a value of a filter or one of `costs`. Rows of methods that share a
            prefill have no times and peaks of one method.
    """
    store = open_store(root)
    cells = cells_of(store)
    if cells.empty:
        raise ConfigError(NO_ROWS.format(root))
    cells = with_limits(cells)
    is_kept = choose_cells(cells, datasets, protocols, readings)
    names = list(cells["cell"])
    # rows of costs refer to the position of a cell among all cells of the store
    cells = cells.assign(place=np.arange(len(cells)), latest=latest(cells))[is_kept]
    cost_parts: list[_Part] = []
    for part in (read(store, names, [*costs, *beside]) for read in (answer_costs, pass_costs)):
        rows = part.frame[np.isin(part.frame["place"], cells["place"])]
        shown_costs = [c for c in (*costs, *beside) if (rows[c.key].notna() & ~(rows["group"] & c.shared)).any()]
        cost_parts.append((part, rows, tuple(shown_costs)))
    _refuse_unknown(cost_parts, costs)
    return [table for part, rows, known in cost_parts if known for table in _tables(cells, part, rows, known)]


def roofline_inputs(costs: Sequence[Cost]) -> list[Cost]:
    """Return the costs to read besides `costs` for rooflines: bytes read per step, if the time per token is in `costs`."""
    keys = {cost.key for cost in costs}
    return [KNOWN[USEFUL]] if TIMED in keys and USEFUL not in keys else []


def set_limits(tables: Sequence[CostTable], costs: Sequence[Cost], roofline_of: RooflineOf) -> list[CostTable]:
    """Set the rooflines of tables with times per token of passes. Return the tables that have any of `costs`, without others."""
    for table in tables:
        if table.per_pass and any(cost.key == TIMED for cost in table.costs):
            table.roofline, batch = roofline_of(table.context), int(table.shape["batch"])
            useful_bytes = {line: row[USEFUL].value for line, row in table.entries.items() if USEFUL in row}
            if table.roofline is not None:
                step_s = table.roofline.step_s
                table.least = {line: step_s(value, batch) for line, value in useful_bytes.items() if value is not None}
        table.costs = tuple(cost for cost in table.costs if cost in costs)
        for row in table.entries.values():
            for key in row.keys() - {cost.key for cost in table.costs}:
                del row[key]
    return [table for table in tables if table.costs]


_Part = tuple[CostRows, "pd.DataFrame", tuple[Cost, ...]]
"""All answers or passes, the rows of those that a table shows, and the costs that these rows have."""


def _refuse_unknown(parts: Sequence[_Part], costs: Sequence[Cost]) -> None:
    absent_costs = [cost for cost in costs if not any(cost in known for _, _, known in parts)]
    if not absent_costs:
        return
    has_groups = any(rows["group"].any() for _, rows, _ in parts)
    shared_names = [cost.name for cost in absent_costs if cost.shared and has_groups]
    if shared_names:
        is_single = len(shared_names) == 1
        raise ConfigError(
            f"{' and '.join(shared_names)} of these rows {'comes' if is_single else 'come'} from runs that share prefills, "
            "whose times and peaks belong to a group of methods; "
            "run with sharing=off or scenario=efficiency for one method's times, "
            f"or leave {'it' if is_single else 'them'} out"
        )
    first = absent_costs[0]
    name = first.name if first.name == first.key else f"{first.name} ({first.key})"
    raise ConfigError(
        f"These rows have no {name}: it is null in all of them, or only scenario=efficiency measures it; leave it out"
    )


def _tables(cells: pd.DataFrame, part: CostRows, rows: pd.DataFrame, costs: tuple[Cost, ...]) -> list[CostTable]:
    if part.per_pass and "cpu" in cells:  # times on two kinds of CPU do not compare in any precision
        kinds = zip(cells["device"], cells["cpu"], cells["dtype"], strict=True)
        cells = cells.assign(
            processor=[processor(device, None if missing(cpu) else cpu, dtype, True) for device, cpu, dtype in kinds]
        )
    return [
        table
        for sweep in sweeps(cells)
        for table in _of_sweep(sweep, part, rows[np.isin(rows["place"], sweep.places)], costs)
    ]


def _of_sweep(sweep: Sweep, part: CostRows, rows: pd.DataFrame, costs: tuple[Cost, ...]) -> list[CostTable]:
    """Return the tables of one sweep: one table for answers, or one per prompt shape for timed passes.

    part: costs of the whole store. rows: costs of this sweep.
    """
    for group in sweep.groups.values():
        group.refuse_equal_seeds()
    if rows.empty:
        return []
    line_keys = list(sweep.groups)
    line_number_of = {place: number for number, key in enumerate(line_keys) for place in sweep.groups[key].places}
    full = next((n for n, (label, budget) in enumerate(line_keys) if label == BASELINE and not budget), None)
    rows = rows.assign(line=rows["place"].map(line_number_of))
    fallbacks = part.fallbacks[np.isin(part.fallbacks["place"], sweep.places)]
    fallbacks = fallbacks.assign(line=fallbacks["place"].map(line_number_of))
    tables = []
    for shape, of_shape in rows.groupby("shape"):
        by_cost = {cost.key: _entries(of_shape, cost, len(line_keys), full, part.per_pass) for cost in costs}
        lines = sorted(of_shape["line"].unique().tolist())
        entries = {line_keys[n]: {key: each[n] for key, each in by_cost.items()} for n in lines}
        labels = {label for label, _ in entries}
        methods = tuple(method for method in sweep.methods if method.label in labels)
        counts = fallbacks[fallbacks["shape"] == shape].groupby(["reason", "line"]).size()
        reasons: dict[str, list[tuple[str, str, int]]] = {}
        for (reason, n), answers in counts.items():
            reasons.setdefault(reason, []).append((*line_keys[n], int(answers)))
        table = CostTable(sweep.context, part.shapes[shape], sweep.axis, costs, methods, entries, part.per_pass)
        table.fallbacks, table.disturbed = reasons, _disturbed(of_shape) if part.per_pass else ()
        table.random_weights, table.weights_files = sweep.random_weights, sweep.weights_files
        tables.append(table)
    return tables


def _entries(rows: pd.DataFrame, cost: Cost, count: int, full: int | None, per_pass: bool) -> list[CostEntry]:
    """Return the `CostEntry` of one cost for each of `count` table lines.

    rows: costs at one prompt shape; the column `line` has the number of the line. full: line number of `full`, or None.
    """
    values = rows[cost.key].where(~rows["group"]) if cost.shared else rows[cost.key]
    if per_pass:
        has_row = values.notna() | (rows["status"] > 0)
        rows, values = rows[has_row], values[has_row]
    line_numbers, unit_numbers, status, clusters = (
        rows[name].to_numpy() for name in ("line", "unit", "status", "cluster")
    )
    worst_status = np.full(count, len(STATUSES))
    np.minimum.at(worst_status, line_numbers[status > 0], status[status > 0])
    line_numbers, unit_numbers, values, clusters = _over_seeds(line_numbers, unit_numbers, values.to_numpy(), clusters)
    full_values = np.full(int(unit_numbers.max(initial=0)) + 1, np.nan)  # of `full`, by sample or repeat
    full_values[unit_numbers[line_numbers == full]] = values[line_numbers == full]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(full_values[unit_numbers] != 0, values / full_values[unit_numbers], np.nan)
    cost_medians, ratio_medians = (medians(each, line_numbers, clusters, count) for each in (values, ratios))
    n = np.bincount(line_numbers, minlength=count)
    return [
        _entry(cost_medians, ratio_medians, number, int(n[number]), int(worst_status[number]))
        for number in range(count)
    ]


def _over_seeds(
    line: np.ndarray, unit: np.ndarray, values: np.ndarray, clusters: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Average values over seeds, for each table line and unit (sample or repeat); NaN if a seed has no value.

    Return arrays (line, unit, mean, cluster), one item per line and unit.
    """
    unit_count = int(unit.max(initial=0)) + 1
    distinct, first, pair_numbers, seeds_per_pair = np.unique(
        line * unit_count + unit, return_index=True, return_inverse=True, return_counts=True
    )
    if len(distinct) == len(line):
        return line, unit, values, clusters
    mean = np.bincount(pair_numbers.reshape(-1), weights=values, minlength=len(distinct)) / seeds_per_pair
    return distinct // unit_count, distinct % unit_count, mean, clusters[first]


def _entry(own: Medians, paired: Medians, number: int, n: int, failed: int) -> CostEntry:
    value_count = int(own.n[number])
    arrays = (own.median, own.low, own.high, own.level, paired.median, paired.low, paired.high)
    values = (float(array[number]) if n == value_count > 0 else np.nan for array in arrays)
    value, low, high, level, ratio, below, above = (None if np.isnan(end) else end for end in values)
    status = STATUSES[failed] if failed < len(STATUSES) else None
    return CostEntry(value, low, high, level, ratio, below, above, n, value_count, int(paired.n[number]), status)


def _disturbed(rows: pd.DataFrame) -> tuple[str, ...]:
    disturbances = {word for found in rows["disturbed"] if isinstance(found, list | np.ndarray) for word in found}
    load_text = load_warning(rows["load"].to_numpy(), rows["threads"].to_numpy())
    return (*sorted(disturbances), *([load_text] if load_text else []))
