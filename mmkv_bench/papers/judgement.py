"""Judgement of one cell: its number beside the printed one, and beside the full cache that the paper prints for it.

The full cache stands in the cell's own table, wherever methods stand there, else in another table of its paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

from mmkv_bench.papers.address import SYNTHETIC, Address
from mmkv_bench.papers.layout import TableCell, TableLayout, load, table_ids
from mmkv_bench.papers.margins import ratio_tolerance, tolerance
from mmkv_bench.papers.measurement import MEASURED, PART, PLANNED, WHOLE, Measurement, differing, incomparable, joined
from mmkv_bench.papers.metrics import has_numbers
from mmkv_bench.papers.printed import COMPARABLE, OPEN, RATIOS, Printed, of_table
from mmkv_bench.papers.reader import EvidenceReader
from mmkv_bench.papers.verdict import (
    AGREES,
    DIFFERS,
    NOT_COMPARABLE,
    UNDECIDED,
    UNINFORMATIVE,
    Tolerance,
    Verdict,
    drop,
    level,
    of_seeds,
)

FULL = "full"
DROPS = (COMPARABLE, OPEN, "prompt differs", "weights not released", "prompt cutting differs")
"""Statuses under which a difference to `full` still has a meaning: the deviation is the same for both."""
_NOT_RUN = "full not run"
PublishLocation = tuple[object, ...]


@dataclass(frozen=True)
class FilledCell:
    """One cell with its numbers.

    Attributes:
        printed: None where the paper has no number; measured: ours; readings: name -> ours under each further reading.
        tolerance: None where there is nothing to judge by.
        verdict: on the number as the table reads it; None where there is none; words: name -> verdict on a further reading.
        drop: verdict on the difference to `full`; counted: True where `full` agrees, so that the drop counts.
        ratio: ours and the printed one to `full`, where these were compared.
    """

    cell: TableCell
    printed: Printed | None
    measured: Measurement
    readings: Mapping[str, Measurement] = field(default_factory=dict)
    words: Mapping[str, Verdict] = field(default_factory=dict)
    tolerance: Tolerance | None = None
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

    @property
    def known(self) -> Printed:
        """Its printed value, where the paper has one."""
        assert self.printed is not None
        return self.printed

    @property
    def printed_number(self) -> float:
        """Its printed number, where there is one."""
        return self.known.known


class PrintedFull(NamedTuple):
    """A printed number of the full cache: its table, its cell there, and the value."""

    layout: TableLayout
    cell: TableCell
    printed: Printed


@dataclass(frozen=True)
class _BesideFull:
    """The measured full cache beside a number; why: reason why the two cannot be compared; gate: verdict on full itself."""

    full: FilledCell
    why: str = ""
    gate: Verdict | None = None


def is_full(cell: TableCell) -> bool:
    """Tell whether a cell holds the full cache."""
    return cell.address.method.base == FULL


def column_of(address: Address) -> PublishLocation:
    """Return the part of an address that a method shares with the full cache of its column."""
    return address.model, address.dataset, address.metric, address.length, address.new_tokens, address.batch


def fulls_of(layout: TableLayout, printed: Mapping[tuple[str, ...], Printed]) -> dict[PublishLocation, PrintedFull]:
    """Return the full caches of a table by all that a method beside them shares, conditions and parts of means included."""
    fulls: dict[PublishLocation, PrintedFull] = {}
    for cell in layout.cells:
        one = printed.get(cell.address.printed)
        if one is not None and one.number is not None and is_full(cell) and has_numbers(cell.address.metric):
            fulls.setdefault(_place(cell), PrintedFull(layout, cell, one))
    return fulls


def full_of(cell: TableCell, own: Mapping[PublishLocation, PrintedFull], paper: str) -> PrintedFull | None:
    """Return the full cache beside a cell; None for full itself, and where the paper prints none.

    own: `fulls_of` its table; paper: empty where no other table counts.
    """
    if is_full(cell):
        return None
    return own.get(_place(cell)) or (_fulls_of_paper(paper).get(_place(cell)) if paper else None)


def _place(cell: TableCell) -> PublishLocation:
    at = cell.address
    parts = tuple((part.dataset, part.metric) for part in cell.parts)
    timed = at.dataset in SYNTHETIC  # made-up prompts have no such conditions
    conditions = () if timed else (at.max_new_tokens, at.cut_prompt, at.frames)
    return (*column_of(at), *conditions, at.protocol, parts)


@cache
def _fulls_of_paper(paper: str) -> Mapping[PublishLocation, PrintedFull]:
    """Return those of all tables of a paper; where several print one, the first whose number is compared with ours."""
    layouts = [layout for layout in map(load, table_ids()) if layout.paper == paper]
    fulls = [one for layout in layouts for one in fulls_of(layout, of_table(layout.id)).values()]
    fulls.sort(key=lambda one: one.printed.status not in (COMPARABLE, OPEN, RATIOS))
    return {_place(one.cell): one for one in reversed(fulls)}


def filled(layout: TableLayout, cell: TableCell, printed: Printed | None, reader: EvidenceReader) -> FilledCell:
    """Fill a cell with its numbers, without verdicts."""
    readings = {name: reader.measured(at, parts) for name, (at, parts) in cell.readings.items()}
    one = FilledCell(cell, printed, reader.measured(cell.address, cell.parts), readings)
    if printed is None or printed.number is None or not has_numbers(cell.address.metric):
        return one
    return replace(one, tolerance=tolerance(layout, cell, printed))


def judged(one: FilledCell, full: PrintedFull | None, reader: EvidenceReader) -> FilledCell:
    """Add the verdicts of a cell."""
    if one.printed is None:
        return one
    if not has_numbers(one.cell.address.metric):
        shown = one.measured.value is not None
        return replace(one, verdict=Verdict(NOT_COMPARABLE, why=one.printed.status) if shown else None)
    verdicts = {name: (own, _level(one, own)) for name, own in {"": one.measured, **one.readings}.items()}
    beside = {} if full is None else {name: _beside(own, full, reader) for name, (own, _) in verdicts.items()}
    words = {
        name: _gated(verdict, beside[name]) if full is not None else verdict
        for name, (_, verdict) in verdicts.items()
        if verdict is not None
    }
    one = replace(one, verdict=words.pop("", None), words=words)
    if full is None or one.measured.state == PLANNED:
        return one
    if one.known.status == RATIOS:
        return _ratio(one, beside[""])
    gate = beside[""].gate
    absolute = one.cell.address.minus is None and not beside[""].why
    agrees = gate is not None and gate.word == AGREES
    return replace(one, drop=_drop(one, beside[""]) if absolute else None, counted=agrees)


def _beside(own: Measurement, full: PrintedFull, reader: EvidenceReader) -> _BesideFull:
    """Find the full cache in rows that share the facts of a number."""
    at, parts = full.cell.address, full.cell.parts
    measured, why = reader.measured(at, parts, own.shared), ""
    if own.shared and measured.value is None:
        others = reader.measured(at, parts).shared
        why = f"full was run with other {differing(own, others)}" if others else _NOT_RUN
    elif own.shared and measured.shared:
        apart = incomparable(own, measured)
        why = f"full has {apart}" if apart else ""
    one = FilledCell(full.cell, full.printed, measured, tolerance=tolerance(full.layout, full.cell, full.printed))
    return _BesideFull(one, why, _level(one, measured))


def _gated(verdict: Verdict, beside: _BesideFull) -> Verdict:
    """Withdraw the verdict on a method whose full cache is not the paper's."""
    gate = beside.gate
    passed = gate is not None and gate.word in (AGREES, UNINFORMATIVE) and not beside.why
    if passed or verdict.word in (NOT_COMPARABLE, UNINFORMATIVE):
        return verdict
    if beside.why or gate is None:
        return Verdict(NOT_COMPARABLE, why=beside.why or _NOT_RUN)
    if gate.word == DIFFERS:
        return Verdict(NOT_COMPARABLE, why="full differs from what is printed for it")
    return Verdict(gate.word, why=f"so is full{f', {gate.why}' if gate.why else ''}")


def _level(one: FilledCell, measured: Measurement) -> Verdict | None:
    """Judge a number under one reading; None while it has none."""
    if one.printed is None or measured.value is None or measured.state not in (*WHOLE, PART):
        return None
    if one.printed.number is None or one.printed.status not in (COMPARABLE, OPEN) or one.tolerance is None:
        return Verdict(NOT_COMPARABLE, why=one.printed.status)
    if measured.mismatches:
        return Verdict(NOT_COMPARABLE, why="; ".join(measured.mismatches))
    if measured.state == PART:
        return Verdict(UNDECIDED)
    seeds = of_seeds(measured.seeds, one.tolerance.relative)
    return level(measured.value, one.printed.number, one.tolerance, seeds)


def _drop(one: FilledCell, beside: _BesideFull) -> Verdict | None:
    """Judge the difference to `full`."""
    full, pair = beside.full, (one.measured, beside.full.measured)
    states = {each.state for each in pair}
    if one.shown is None or full.shown is None or one.tolerance is None or full.tolerance is None:
        return None
    if {one.known.status, full.known.status} - {*DROPS} or states - {MEASURED, PART}:
        return None
    if any(each.mismatches for each in pair):
        return None
    if PART in states:
        return Verdict(UNDECIDED)
    both = replace(one.tolerance, half=one.tolerance.half + full.tolerance.half)
    ours, printed = zip(one.shown, full.shown, strict=True)
    return drop(ours, printed, both, of_seeds(one.measured.seeds, both.relative))


def _ratio(one: FilledCell, beside: _BesideFull) -> FilledCell:
    """Judge the ratio to `full` of times and peaks of another device."""
    own, full = one.shown, beside.full.shown
    if one.measured.value is not None and (beside.why or full is None):
        return replace(one, verdict=Verdict(NOT_COMPARABLE, why=beside.why or _NOT_RUN))
    if own is None or full is None or not all((*own, *full)) or beside.full.measured.state == PLANNED:
        return one
    held = ratio_tolerance(one.cell, one.known, beside.full.known)
    ratio = own[0] / full[0], own[1] / full[1]
    mismatches = joined(one.measured.mismatches, beside.full.measured.mismatches)
    verdict = Verdict(NOT_COMPARABLE, why="; ".join(mismatches)) if mismatches else level(*ratio, held)
    return replace(one, tolerance=held, ratio=ratio, verdict=verdict)
