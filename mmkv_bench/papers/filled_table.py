"""A table of a paper, filled: beside each printed number the measured one and what is said of the two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from mmkv_bench.errors import ConfigError
from mmkv_bench.papers.address import STAND_IN, Address
from mmkv_bench.papers.evidence import Evidence
from mmkv_bench.papers.fulls import PrintedFull, beside, full_of, is_full, own_fulls
from mmkv_bench.papers.layout import TableCell, TableLayout
from mmkv_bench.papers.margins import limits, of_ratio
from mmkv_bench.papers.metrics import has_numbers, margin
from mmkv_bench.papers.printed import COMPARABLE, OPEN, RATIOS, Printed, of_table
from mmkv_bench.papers.reader import (
    COMPUTED,
    MEASURED,
    PART,
    PLANNED,
    WHOLE,
    EvidenceReader,
    Measurement,
    aligned,
    differing,
    incomparable,
)
from mmkv_bench.papers.verdict import (
    AGREES,
    DIFFERS,
    NOT_COMPARABLE,
    UNDECIDED,
    UNINFORMATIVE,
    Tolerance,
    Verdict,
    drop,
    lead,
    level,
    of_seeds,
)
from mmkv_bench.statistics.metric_kinds import lower_is_better
from mmkv_bench.tables.compare import against
from mmkv_bench.tables.dataset_groups import Mean, mean
from mmkv_bench.tables.metrics import aggregator_of

DROPS = (COMPARABLE, OPEN, "prompt differs", "weights not released", "prompt cutting differs")
"""Statuses under which a difference to `full` still says something: what differs is the same for both."""
COSTS = ("ttft_s", "total_s", "tpot_ms", "peak_gb", "selection_ms")


@dataclass(frozen=True)
class FilledCell:
    """One cell, filled. `printed` is None where the paper has no number for it; `verdict` where nothing is to be said of the
    number as the table reads it; `counted`: whether the verdict on its drop counts, because `full` agrees; `ratio`: ours and
    the printed one to `full`, where these were compared; `limits`: what it was judged by; `readings`: name -> what there is
    under each further reading, `words` what is said of that."""

    cell: TableCell
    printed: Printed | None
    measured: Measurement
    readings: Mapping[str, Measurement] = field(default_factory=dict)
    words: Mapping[str, Verdict] = field(default_factory=dict)
    limits: Tolerance | None = None
    verdict: Verdict | None = None
    drop: Verdict | None = None
    counted: bool = False
    ratio: tuple[float, float] | None = None

    @property
    def shown(self) -> tuple[float, float] | None:
        """(measured, printed) where both are numbers."""
        if self.printed is None or self.printed.number is None or self.measured.value is None:
            return None
        return self.measured.value, self.printed.number


@dataclass(frozen=True)
class Lead:
    """A lead of the paper's method over its strongest baseline that the paper prints: who, by how much, and ours."""

    own: TableCell
    over: TableCell
    printed: float
    verdict: Verdict
    ours: Mean | None = None


@dataclass(frozen=True)
class FilledTable:
    """A table, filled. `pairs`: of all other pairs that our intervals tell apart, how many have the printed sign, and how
    many the other one; `versions`: column -> values behind its numbers; `refused`: cells of rows that stand in for something;
    `sources`: place of a cell in the evidence -> its rows folder and hash.
    """

    spec: TableLayout
    cells: tuple[FilledCell, ...]
    leads: tuple[Lead, ...]
    pairs: tuple[int, int]
    versions: Mapping[str, tuple[str, ...]]
    refused: int
    sources: Mapping[int, str] = field(default_factory=dict)

    @property
    def states(self) -> Counter[str]:
        """How many cells are in each state."""
        return Counter(one.measured.state for one in self.cells)

    def verdicts(self, own: bool) -> Counter[str]:
        """Words on levels as the table reads them, of the paper's own method or of all others. What is computed counts as
        neither: it follows from the same lengths and shapes as the printed number."""
        found = [one for one in self.cells if self.spec.own(one.cell) == own and one.measured.state != COMPUTED]
        return Counter(one.verdict.word for one in found if one.verdict)


def needed(spec: TableLayout) -> list[Address]:
    """Every address that a table's numbers are made of, its further readings included."""
    found = [one for cell in spec.cells for one in cell.needed]
    return found + [one for cell in spec.cells for own, parts in cell.readings.values() for one in parts or (own,)]


def fill(
    spec: TableLayout, evidence: Evidence, printed: Mapping[tuple[str, ...], Printed] | None = None
) -> FilledTable:
    """A table with what there is for it.

    Args:
        printed: the printed values by address; those of the reference numbers unless given.

    Raises:
        ConfigError: a printed number is asked for beside what stands in for something.
    """
    if printed is None:
        printed = {} if spec.stands_for else of_table(spec.id)
    if printed and any(cell.address.model == STAND_IN for cell in spec.cells):
        raise ConfigError(f"{spec.id}: no printed number stands beside the embedded model, which stands in for others")
    fulls = own_fulls(spec, printed)
    beside = [full_of(cell, fulls, spec.paper) if cell.address.printed in printed else None for cell in spec.cells]
    reader = EvidenceReader(evidence, needed(spec) + [part for full in beside if full for part in full.cell.needed])
    cells = [_filled(spec, cell, printed.get(cell.address.printed), reader) for cell in spec.cells]
    judged = [_judged(one, full, reader) for one, full in zip(cells, beside, strict=True)]
    leads, pairs = _order(spec, judged, reader)
    rows = sorted({row for one in judged for row in one.measured.rows})
    sources = {row: evidence.source(row) for row in rows}
    return FilledTable(spec, tuple(judged), tuple(leads), pairs, evidence.told(rows), evidence.refused, sources)


def _filled(spec: TableLayout, cell: TableCell, printed: Printed | None, reader: EvidenceReader) -> FilledCell:
    readings = {name: reader.measured(own, parts) for name, (own, parts) in cell.readings.items()}
    numbers = printed is not None and printed.number is not None and has_numbers(cell.address.metric)
    held = limits(spec, cell, printed) if numbers and printed is not None else None
    return FilledCell(cell, printed, reader.measured(cell.address, cell.parts), readings, limits=held)


def _judged(one: FilledCell, full: PrintedFull | None, reader: EvidenceReader) -> FilledCell:
    """The cell with its verdicts."""
    if one.printed is None:
        return one
    if not has_numbers(one.cell.address.metric):
        told = Verdict(NOT_COMPARABLE, why=one.printed.status) if one.measured.value is not None else None
        return replace(one, verdict=told)
    every = {name: (own, _level(one, own)) for name, own in {"": one.measured, **one.readings}.items()}
    if full is None:
        said = {name: verdict for name, (_, verdict) in every.items() if verdict is not None}
        return replace(one, verdict=said.pop("", None), words=said)
    fulls = {name: _like(own, full, reader) for name, (own, verdict) in every.items()}
    said = {name: _gated(verdict, fulls[name]) for name, (_, verdict) in every.items() if verdict is not None}
    one = replace(one, verdict=said.pop("", None), words=said)
    if one.measured.state == PLANNED:
        return one
    beside = fulls[""]
    assert one.printed is not None
    if one.printed.status == RATIOS:
        return _ratio(one, beside)
    found = _drop(one, beside) if one.cell.address.minus is None and not beside.why else None
    return replace(one, drop=found, counted=beside.gate is not None and beside.gate.word == AGREES)


@dataclass(frozen=True)
class _Beside:
    """The full cache as the rows have it that share what a number was made with; why: what keeps the two apart; gate: what is
    said of the full cache itself."""

    full: FilledCell
    why: str = ""
    gate: Verdict | None = None


def _like(own: Measurement, full: PrintedFull, reader: EvidenceReader) -> _Beside:
    at, parts = full.cell.address, full.cell.parts
    measured, why = reader.measured(at, parts, own.shared), ""
    if own.shared and measured.value is None:
        others = reader.measured(at, parts).shared
        why = f"full was run with other {differing(own, others)}" if others else "full not run"
    elif own.shared and measured.shared:
        apart = incomparable(own, measured)
        why = f"full has {apart}" if apart else ""
    beside = FilledCell(full.cell, full.printed, measured, limits=limits(full.spec, full.cell, full.printed))
    return _Beside(beside, why, _level(beside, measured))


def _gated(verdict: Verdict, beside: _Beside) -> Verdict:
    """Nothing is said of a method where its full cache is not the paper's."""
    gate = beside.gate
    if verdict.word in (NOT_COMPARABLE, UNINFORMATIVE) or (
        gate is not None and gate.word in (AGREES, UNINFORMATIVE) and not beside.why
    ):
        return verdict
    if beside.why or gate is None:
        return Verdict(NOT_COMPARABLE, why=beside.why or "full not run")
    if gate.word == DIFFERS:
        return Verdict(NOT_COMPARABLE, why="full differs from what is printed for it")
    return Verdict(gate.word, why=f"so is full{f', {gate.why}' if gate.why else ''}")


def _level(one: FilledCell, measured: Measurement) -> Verdict | None:
    """What is said of a number under one reading; None while it has none."""
    if one.printed is None or measured.value is None or measured.state not in (*WHOLE, PART):
        return None
    if one.printed.number is None or one.printed.status not in (COMPARABLE, OPEN) or one.limits is None:
        return Verdict(NOT_COMPARABLE, why=one.printed.status)
    if measured.other:
        return Verdict(NOT_COMPARABLE, why="; ".join(measured.other))
    if measured.state == PART:
        return Verdict(UNDECIDED)
    return level(measured.value, one.printed.number, one.limits, of_seeds(measured.seeds, one.limits.relative))


def _drop(one: FilledCell, beside: _Beside) -> Verdict | None:
    """What is said of the difference to `full`."""
    full = beside.full
    own, theirs, states = one.shown, full.shown, {one.measured.state, full.measured.state}
    if own is None or theirs is None or one.limits is None or full.limits is None:
        return None
    assert one.printed is not None
    assert full.printed is not None
    if one.printed.status not in DROPS or full.printed.status not in DROPS:
        return None
    if one.measured.other or full.measured.other or states - {MEASURED, PART}:
        return None
    if PART in states:
        return Verdict(UNDECIDED)
    held = replace(one.limits, half=one.limits.half + full.limits.half)
    return drop((own[0], theirs[0]), (own[1], theirs[1]), held, of_seeds(one.measured.seeds, held.relative))


def _ratio(one: FilledCell, beside: _Beside) -> FilledCell:
    """The cell with what is said of its ratio to `full`: of times and peaks of another device."""
    own, theirs = one.shown, beside.full.shown
    if one.measured.value is not None and (beside.why or theirs is None):
        return replace(one, verdict=Verdict(NOT_COMPARABLE, why=beside.why or "full not run"))
    if own is None or theirs is None or not all((*own, *theirs)) or beside.full.measured.state == PLANNED:
        return one
    assert one.printed is not None
    held = of_ratio(one.cell, (one.printed, beside.full.printed or one.printed))
    one = replace(one, limits=held, ratio=(own[0] / theirs[0], own[1] / theirs[1]))
    other = tuple(dict.fromkeys((*one.measured.other, *beside.full.measured.other)))
    if other:
        return replace(one, verdict=Verdict(NOT_COMPARABLE, why="; ".join(other)))
    return replace(one, verdict=level(own[0] / theirs[0], own[1] / theirs[1], held))


def _order(
    spec: TableLayout, cells: Sequence[FilledCell], reader: EvidenceReader
) -> tuple[list[Lead], tuple[int, int]]:
    """The leads that a paper prints for its own method over its strongest baseline, and all other pairs."""
    leads, same, other = [], 0, 0
    for group in _groups(cells):
        own = [one for one in group if spec.own(one.cell)]
        rest = [one for one in group if not spec.own(one.cell)]
        sign = -1 if lower_is_better(group[0].cell.address.metric) else 1
        claimed = None
        if len(own) == 1 and rest:
            best = max(rest, key=lambda one: sign * _printed(one))
            if sign * (_printed(own[0]) - _printed(best)) > 0:
                claimed = (own[0], best)
                ours = _paired(reader, own[0], best, sign)
                verdict = lead(*((None, None) if ours is None else (ours.low, ours.high)))
                leads.append(Lead(own[0].cell, best.cell, sign * (_printed(own[0]) - _printed(best)), verdict, ours))
        for a, b in combinations(group, 2):
            if claimed is not None and {id(a), id(b)} == {id(one) for one in claimed}:
                continue
            ours, gap = _paired(reader, a, b, sign), sign * (_printed(a) - _printed(b))
            if ours is None or ours.low is None or ours.high is None or ours.low <= 0 <= ours.high or not gap:
                continue
            same, other = (same + 1, other) if (ours.value > 0) == (gap > 0) else (same, other + 1)
    return leads, (same, other)


def _groups(cells: Sequence[FilledCell]) -> Iterator[list[FilledCell]]:
    """Methods of one column and budget that have a printed number of the same kind."""
    found: dict[tuple[object, ...], list[FilledCell]] = {}
    for one in cells:
        if one.printed is None or one.printed.number is None or is_full(one.cell) or one.cell.address.minus is not None:
            continue
        if one.cell.address.metric in COSTS or not has_numbers(one.cell.address.metric):
            continue
        key = (*beside(one.cell.address), one.cell.address.budget_kind, one.cell.address.budget)
        found.setdefault(key, []).append(one)
    yield from (group for group in found.values() if len(group) > 1)


def _printed(one: FilledCell) -> float:
    assert one.printed is not None
    assert one.printed.number is not None
    return one.printed.number


def _paired(reader: EvidenceReader, a: FilledCell, b: FilledCell, sign: int) -> Mean | None:
    """Our difference a - b, better above 0, paired by sample; of means the mean of their parts'."""
    found = []
    for left, right in zip(a.cell.needed, b.cell.needed, strict=True):
        one, two = reader.measured(left), reader.measured(right)
        if one.scores is None or two.scores is None or one.other or two.other or incomparable(one, two):
            return None
        (difference,) = against([one.scores], aligned(two.scores, one.scores), left.metric, aggregator_of(left.metric))
        if difference.value is None:
            return None
        scale = sign * margin(left.dataset, left.metric).scale
        ends = [None if end is None else scale * end for end in (difference.low, difference.high)]
        low, high = ends if sign > 0 else ends[::-1]
        found.append(Mean(scale * difference.value, low, high))
    return mean(found) if found else None
