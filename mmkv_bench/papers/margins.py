"""How far a measured number may lie from a printed one, for each address: by its metric (`margins.yaml`), by what the paper
prints beside it, and by how many questions its number is a mean of.

The margin is at most half of the printed gap to the number that it must not be taken for: the strongest baseline of that
column and budget for the paper's own method, the paper's method for a baseline, no effect for a difference and for a ratio to
full. Two numbers that both agree can then not change places. Baselines are looked for in all tables of the paper, so that an
address has one margin wherever it stands. The full cache has the metric's: it is the gate of the others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from math import log, log1p

from mmkv_bench.config.files import content
from mmkv_bench.papers.address import SYNTHETIC, Address, samples_of
from mmkv_bench.papers.layout import TableCell, TableLayout, load, table_ids
from mmkv_bench.papers.metrics import has_numbers, margin
from mmkv_bench.papers.printed import Printed, of_table
from mmkv_bench.papers.verdict import Tolerance
from mmkv_bench.statistics.metric_kinds import lower_is_better

NO_EFFECT = "no effect"
_Methods = Mapping[tuple[str, ...], Mapping[str, float]]


def limits(spec: TableLayout, cell: TableCell, printed: Printed) -> Tolerance:
    """Of a cell whose printed value is a number."""
    at, number = cell.address, _number(printed)
    fixed = margin(at.dataset, at.metric)
    half = log1p(printed.half / number) if fixed.relative else printed.half
    rival, gap = _rival(spec, cell, number, fixed.relative)
    step = fixed.step if fixed.relative else _answer(cell)
    held = _held(Tolerance(half, fixed.margin, fixed.relative, step), rival, gap)
    full = None if at.method.base == "full" or at.minus is not None else _columns(spec.paper)[2].get(_column(at, False))
    return held if full is None else replace(held, full=abs(_gap(full, number, fixed.relative)) <= held.margin)


def of_ratio(cell: TableCell, printed: tuple[Printed, Printed]) -> Tolerance:
    """Of a method's time or peak over full's, as (method, full) print them: both are rounded, and no effect is a ratio of 1."""
    own, full = map(_number, printed)
    half = sum(log1p(one.half / _number(one)) for one in printed)
    fixed = margin(cell.address.dataset, cell.address.metric)
    return _held(Tolerance(half, fixed.margin, True, fixed.step), NO_EFFECT, abs(log(own / full)))


def _held(found: Tolerance, rival: str, gap: float | None) -> Tolerance:
    if gap is None or gap / 2 >= found.margin:
        return found
    return replace(found, margin=gap / 2, rival=rival)


def _answer(cell: TableCell) -> float:
    """What one answer is worth in a cell's number [printed unit]; 0 where nobody knows how many there are."""
    asked = [(one, _questions(one.dataset, one.metric)) for one in cell.needed if one.dataset not in SYNTHETIC]
    worth = [margin(one.dataset, one.metric).scale / n for one, n in asked if n]
    return max(worth, default=0.0) / len(cell.needed)


@cache
def _questions(dataset: str, metric: str) -> int:
    """How many a number is a mean of: `favor_acc_NSM` of those that its data set's file calls `NSM 64`, else of all."""
    told = str((content("dataset", dataset).get("about") or {}).get("samples"))
    own = re.search(rf"\b{metric.rpartition('_')[2]} (\d[\d,]*)", told)
    return int(own[1].replace(",", "")) if own else samples_of(dataset)


def _rival(spec: TableLayout, cell: TableCell, number: float, relative: bool) -> tuple[str, float | None]:
    """(who, gap) of the number that a cell's must not be taken for; ("", None) where there is none."""
    at = cell.address
    if at.minus is not None:
        return NO_EFFECT, abs(number)
    if at.method.base == "full":
        return "", None
    own, others = (methods.get(_column(at), {}) for methods in _columns(spec.paper)[:2])
    whole = {name: value for name, value in own.items() if "(" not in name}
    rivals = others if spec.own(cell) else whole or own  # ablations only where the method itself is not printed
    if not rivals:
        return "", None
    if spec.own(cell):
        name = (min if lower_is_better(at.metric) else max)(rivals, key=rivals.__getitem__)
    else:
        name = min(rivals, key=lambda one: abs(rivals[one] - number))
    return name, abs(_gap(number, rivals[name], relative))


def _gap(one: float, other: float, relative: bool) -> float:
    return log(one / other) if relative else one - other


def _column(at: Address, budget: bool = True) -> tuple[str, ...]:
    """All of an address that a paper prints but the method, and without `budget` but that."""
    model, dataset, metric, _, _, *rest = at.printed
    return (model, dataset, metric, *(rest if budget else rest[2:]))


@cache
def _columns(paper: str) -> tuple[_Methods, _Methods, Mapping[tuple[str, ...], float]]:
    """Printed numbers of the paper's own methods, of its baselines (column and budget -> method -> number) and of the full cache
    (column -> number); of a number that two tables print the first."""
    own: dict[tuple[str, ...], dict[str, float]] = {}
    others: dict[tuple[str, ...], dict[str, float]] = {}
    full: dict[tuple[str, ...], float] = {}
    for spec in map(load, table_ids()):
        values = of_table(spec.id) if spec.paper == paper else {}
        for cell in spec.cells if values else ():
            at, printed = cell.address, values.get(cell.address.printed)
            if printed is None or printed.number is None or at.minus is not None or not has_numbers(at.metric):
                continue
            if at.method.base == "full":
                full.setdefault(_column(at, False), printed.number)
            else:
                methods = own if spec.own(cell) else others
                methods.setdefault(_column(at), {}).setdefault(str(at.method), printed.number)
    return own, others, full


def _number(printed: Printed) -> float:
    assert printed.number is not None
    return printed.number
