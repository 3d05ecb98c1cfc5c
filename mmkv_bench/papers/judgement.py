"""Filled tables of the papers: measured beside printed numbers, with verdicts on scores, drops from full to method, and leads.

If the paper prints the full cache's number, in the same table or else in another table, the verdict on a method depends on the
verdict on the full cache (`_apply_gate`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

from mmkv_bench.papers import margins
from mmkv_bench.papers.address import SYNTHETIC, Address
from mmkv_bench.papers.evidence import Evidence
from mmkv_bench.papers.evidence_reader import EvidenceReader
from mmkv_bench.papers.layout import TableCell, TableLayout, load, table_ids
from mmkv_bench.papers.margins import Tolerance, Verdict
from mmkv_bench.papers.measurement import (
    WHOLE,
    Measurement,
    State,
    differing_facts,
    incomparable,
    paired_difference,
    unique_words,
)
from mmkv_bench.papers.non_score_metrics import has_numbers
from mmkv_bench.papers.printed import COMPARABLE, OPEN, RATIOS, Printed, of_table
from mmkv_bench.statistics.metric_kinds import lower_is_better
from mmkv_bench.tables.dataset_groups import Mean, mean

FULL = "full"
DROPS = (COMPARABLE, OPEN, "prompt differs", "weights not released", "prompt cutting differs")
"""Statuses under which differences to `full` are judged, because method and full deviate from the paper in the same way."""
_NOT_RUN = "full not run"
_Key = tuple[object, ...]


@dataclass(frozen=True)
class FilledCell:
    """A table cell with printed and measured numbers.

    Attributes:
        printed: the printed value; None if the paper has none.
        measured: our number, under the table's own reading of the method.
        readings: name of a further reading -> our number. words: name of a further reading -> verdict on our number.
        tolerance: tolerance of the printed number; None if nothing can be judged.
        verdict: verdict on `measured`, or None.
        drop: verdict on the difference to `full`, or None. counted: True if `drop` counts, because `full` agrees with the paper.
        ratio: (our ratio, printed ratio) of the method to `full`, for times and peaks; else None.
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
    def number_pair(self) -> tuple[float, float] | None:
        """(measured, printed) if both are numbers, else None."""
        if self.printed is None or self.printed.number is None or self.measured.value is None:
            return None
        return self.measured.value, self.printed.number

    @property
    def printed_value(self) -> Printed:
        """`printed` of a cell that has it."""
        assert self.printed is not None
        return self.printed

    @property
    def printed_number(self) -> float:
        """Printed number of a cell that has one."""
        return self.printed_value.readable_number


class PrintedFull(NamedTuple):
    """A printed number of the full cache, with its table and cell."""

    layout: TableLayout
    cell: TableCell
    printed: Printed


@dataclass(frozen=True)
class _PairedFull:
    """The full cache beside a method. why: reason why the two cannot be compared, or "". gate: verdict on the full cache."""

    full: FilledCell
    why: str = ""
    gate: Verdict | None = None


def is_full(cell: TableCell) -> bool:
    return cell.address.method.base == FULL


def column_of(address: Address) -> _Key:
    """Return the fields that a method's number shares with the full cache's number in the same column."""
    return address.model, address.dataset, address.metric, address.length, address.new_tokens, address.batch


def printed_fulls(layout: TableLayout, printed: Mapping[tuple[str, ...], Printed]) -> dict[_Key, PrintedFull]:
    """Return key (`_place`) -> number of the full cache, for all such numbers that a table prints.

    printed: `Address.printed` -> printed value.
    """
    full_cells: dict[_Key, PrintedFull] = {}
    for cell in layout.cells:
        printed_value = printed.get(cell.address.printed)
        if (
            printed_value is not None
            and printed_value.number is not None
            and is_full(cell)
            and has_numbers(cell.address.metric)
        ):
            full_cells.setdefault(_place(cell), PrintedFull(layout, cell, printed_value))
    return full_cells


def _place(cell: TableCell) -> _Key:
    """Return the key of a number that a method and the full cache beside it share."""
    cell_address = cell.address
    parts_of_mean = tuple((part.dataset, part.metric) for part in cell.parts)
    is_timed = cell_address.dataset in SYNTHETIC  # made-up prompts have no such conditions
    conditions = () if is_timed else (cell_address.max_new_tokens, cell_address.cut_prompt, cell_address.frames)
    return (*column_of(cell_address), *conditions, cell_address.protocol, parts_of_mean)


@cache
def _fulls_of_paper(paper: str) -> Mapping[_Key, PrintedFull]:
    """Return key (`_place`) -> number of the full cache in all tables of a paper.

    If several tables print a number, the first number that is comparable with ours is taken.
    """
    layouts = [layout for layout in map(load, table_ids()) if layout.paper == paper]
    full_cells = [one for layout in layouts for one in printed_fulls(layout, of_table(layout.id)).values()]
    full_cells.sort(key=lambda one: one.printed.status not in (COMPARABLE, OPEN, RATIOS))
    return {_place(one.cell): one for one in reversed(full_cells)}


def _fill_cell(cell: TableCell, printed: Printed | None, layout: TableLayout, reader: EvidenceReader) -> FilledCell:
    readings = {name: reader.measure(at, parts) for name, (at, parts) in cell.readings.items()}
    is_judged = printed is not None and printed.number is not None and has_numbers(cell.address.metric)
    tolerance = margins.tolerance(layout, cell, printed) if printed is not None and is_judged else None
    return FilledCell(cell, printed, reader.measure(cell.address, cell.parts), readings, tolerance=tolerance)


def _judge_cell(one: FilledCell, full: PrintedFull | None, reader: EvidenceReader) -> FilledCell:
    """Add the verdicts to a filled cell. full: the full cache's printed number beside the cell, or None."""
    if one.printed is None:
        return one
    if not has_numbers(one.cell.address.metric):
        has_value = one.measured.value is not None
        return replace(one, verdict=Verdict(margins.NOT_COMPARABLE, why=one.printed.status) if has_value else None)
    numbers = {"": one.measured, **one.readings}
    verdict_words = {name: verdict for name, number in numbers.items() if (verdict := _level(one, number)) is not None}
    if full is None:
        return replace(one, verdict=verdict_words.pop("", None), words=verdict_words)
    pairs = {name: _paired_full(number, full, reader) for name, number in numbers.items()}
    verdict_words = {name: _apply_gate(verdict, pairs[name]) for name, verdict in verdict_words.items()}
    one, pair = replace(one, verdict=verdict_words.pop("", None), words=verdict_words), pairs[""]
    if one.measured.state == State.PLANNED:
        return one
    if one.printed_value.status == RATIOS:
        return _ratio(one, pair)
    is_absolute = one.cell.address.minus is None and not pair.why
    full_agrees = pair.gate is not None and pair.gate.word == margins.AGREES
    return replace(one, drop=_drop(one, pair) if is_absolute else None, counted=full_agrees)


def _paired_full(number: Measurement, full: PrintedFull, reader: EvidenceReader) -> _PairedFull:
    """Return the full cache, measured under the conditions of `number`, with its verdict. full: the printed number."""
    full_address, parts = full.cell.address, full.cell.parts
    full_measurement, why = reader.measure(full_address, parts, number.shared), ""
    if number.shared and full_measurement.value is None:
        others = reader.measure(full_address, parts).shared
        why = f"full was run with other {differing_facts(number, others)}" if others else _NOT_RUN
    elif number.shared and full_measurement.shared:
        mismatch_text = incomparable(number, full_measurement)
        why = f"full has {mismatch_text}" if mismatch_text else ""
    filled_full = FilledCell(
        full.cell, full.printed, full_measurement, tolerance=margins.tolerance(full.layout, full.cell, full.printed)
    )
    return _PairedFull(filled_full, why, _level(filled_full, full_measurement))


def _apply_gate(verdict: Verdict, pair: _PairedFull) -> Verdict:
    """Return the verdict on a method after the check of the full cache.

    The verdict becomes `not comparable` if our full cache differs from the paper's, is not comparable with it, or was not
    run under the same conditions, and `undecided` if the verdict on the full cache is `undecided`.
    """
    gate = pair.gate
    full_passes = gate is not None and gate.word in (margins.AGREES, margins.UNINFORMATIVE) and not pair.why
    if full_passes or verdict.word in (margins.NOT_COMPARABLE, margins.UNINFORMATIVE):
        return verdict
    if pair.why or gate is None:
        return Verdict(margins.NOT_COMPARABLE, why=pair.why or _NOT_RUN)
    if gate.word == margins.DIFFERS:
        return Verdict(margins.NOT_COMPARABLE, why="full differs from what is printed for it")
    return Verdict(gate.word, why=f"so is full{f', {gate.why}' if gate.why else ''}")


def _level(one: FilledCell, measured: Measurement) -> Verdict | None:
    """Return the verdict on a measured beside the printed number, without check of the full cache; None if nothing is judged."""
    if one.printed is None or measured.value is None or measured.state not in (*WHOLE, State.PART):
        return None
    if one.printed.number is None or one.printed.status not in (COMPARABLE, OPEN) or one.tolerance is None:
        return Verdict(margins.NOT_COMPARABLE, why=one.printed.status)
    if measured.mismatches:
        return Verdict(margins.NOT_COMPARABLE, why="; ".join(measured.mismatches))
    if measured.state == State.PART:
        return Verdict(margins.UNDECIDED)
    seeds = margins.seed_half_width(measured.seeds, one.tolerance.relative)
    return margins.level(measured.value, one.printed.number, one.tolerance, seeds)


def _drop(one: FilledCell, pair: _PairedFull) -> Verdict | None:
    """Return the verdict on a method's difference to the full cache; None if the difference cannot be judged."""
    full, numbers = pair.full, (one.measured, pair.full.measured)
    states_of_both = {each.state for each in numbers}
    if one.number_pair is None or full.number_pair is None or one.tolerance is None or full.tolerance is None:
        return None
    if {one.printed_value.status, full.printed_value.status} - {*DROPS} or states_of_both - {
        State.MEASURED,
        State.PART,
    }:
        return None
    if any(each.mismatches for each in numbers):
        return None
    if State.PART in states_of_both:
        return Verdict(margins.UNDECIDED)
    joint_tolerance = replace(one.tolerance, half=one.tolerance.half + full.tolerance.half)
    ours, printed = zip(one.number_pair, full.number_pair, strict=True)
    return margins.drop(
        ours, printed, joint_tolerance, margins.seed_half_width(one.measured.seeds, joint_tolerance.relative)
    )


def _ratio(one: FilledCell, pair: _PairedFull) -> FilledCell:
    """Add the ratio to the full cache and its verdict to a cell with a time or peak of another device."""
    method, full = one.number_pair, pair.full.number_pair
    if one.measured.value is not None and (pair.why or full is None):
        return replace(one, verdict=Verdict(margins.NOT_COMPARABLE, why=pair.why or _NOT_RUN))
    if method is None or full is None or not all((*method, *full)) or pair.full.measured.state == State.PLANNED:
        return one
    ratio_limit = margins.ratio_tolerance(one.cell, one.printed_value, pair.full.printed_value)
    ratio = method[0] / full[0], method[1] / full[1]
    mismatches = unique_words(one.measured.mismatches, pair.full.measured.mismatches)
    verdict = (
        Verdict(margins.NOT_COMPARABLE, why="; ".join(mismatches)) if mismatches else margins.level(*ratio, ratio_limit)
    )
    return replace(one, tolerance=ratio_limit, ratio=ratio, verdict=verdict)


COSTS = ("ttft_s", "total_s", "tpot_ms", "peak_gb", "selection_ms")


@dataclass(frozen=True)
class FilledTable:
    """A paper's table filled with measured numbers and verdicts.

    leads: verdicts on the printed leads of the paper's method over its strongest baseline.
    versions: column of versions, such as `torch` -> distinct values in the rows behind the numbers.
    refused: number of stored settings that are no evidence, because weights or data are not real.
    sources: position in `Evidence.cells` -> rows folder and hash.
    """

    layout: TableLayout
    cells: tuple[FilledCell, ...]
    leads: tuple[Verdict, ...]
    versions: Mapping[str, tuple[str, ...]]
    refused: int
    sources: Mapping[int, str] = field(default_factory=dict)

    @property
    def states(self) -> Counter[str]:
        return Counter(one.measured.state for one in self.cells)

    def verdicts(self, proposed: bool) -> Counter[str]:
        """Count the verdicts on numbers by word. Computed numbers are left out.

        proposed: True for the paper's own method, False for all others.
        """
        cells = [one for one in self.cells if self.layout.proposes(one.cell) == proposed and one.verdict]
        return Counter(one.verdict.word for one in cells if one.verdict and one.measured.state != State.COMPUTED)


def fill(layout: TableLayout, evidence: Evidence) -> FilledTable:
    """Return a table with measured and printed numbers and verdicts. A stand-in has no printed numbers."""
    printed = {} if layout.stands_for else of_table(layout.id)
    fulls = {**(_fulls_of_paper(layout.paper) if layout.paper else {}), **printed_fulls(layout, printed)}
    full_of_cell = [
        None if is_full(cell) or cell.address.printed not in printed else fulls.get(_place(cell))
        for cell in layout.cells
    ]
    addresses_of_fulls = [at for full in full_of_cell if full is not None for at in full.cell.needed_addresses]
    reader = EvidenceReader(evidence, [*layout.needed_addresses, *addresses_of_fulls])
    cells = [_fill_cell(cell, printed.get(cell.address.printed), layout, reader) for cell in layout.cells]
    cells = [_judge_cell(one, full, reader) for one, full in zip(cells, full_of_cell, strict=True)]
    leads = tuple(_leads(layout, cells, reader))
    rows = sorted({row for one in cells for row in one.measured.rows})
    sources = {row: evidence.source(row) for row in rows}
    return FilledTable(layout, tuple(cells), leads, evidence.versions(rows), evidence.refused, sources)


def _leads(layout: TableLayout, cells: Sequence[FilledCell], reader: EvidenceReader) -> Iterator[Verdict]:
    """Yield the verdict on each printed lead of the paper's method over the strongest baseline of a column and budget."""
    for group in _columns(cells):
        proposed = [one for one in group if layout.proposes(one.cell)]
        baselines = [one for one in group if not layout.proposes(one.cell)]
        if len(proposed) != 1 or not baselines:
            continue
        sign = -1 if lower_is_better(group[0].cell.address.metric) else 1
        best_baseline = max(baselines, key=lambda one: sign * one.printed_number)
        if sign * (proposed[0].printed_number - best_baseline.printed_number) > 0:
            paired_lead = _paired_lead(reader, proposed[0], best_baseline, sign)
            yield (
                Verdict(margins.UNDECIDED, "one of the two was not run")
                if paired_lead is None
                else margins.lead(paired_lead.low, paired_lead.high)
            )


def _columns(cells: Sequence[FilledCell]) -> Iterator[list[FilledCell]]:
    """Yield the cells with printed scores of at least two methods in one column at one budget.

    The full cache, differences and costs are left out.
    """
    groups: dict[tuple[object, ...], list[FilledCell]] = {}
    for one in cells:
        cell_address = one.cell.address
        if one.printed is None or one.printed.number is None or is_full(one.cell) or cell_address.minus is not None:
            continue
        if cell_address.metric not in COSTS and has_numbers(cell_address.metric):
            groups.setdefault((*column_of(cell_address), cell_address.budget_kind, cell_address.budget), []).append(one)
    yield from (group for group in groups.values() if len(group) > 1)


def _paired_lead(reader: EvidenceReader, a: FilledCell, b: FilledCell, sign: int) -> Mean | None:
    """Return our lead of a over b, paired by sample; None if the two are not comparable.

    For means, the result is the mean of the parts' leads. sign: -1 if smaller values are better, else 1.
    """
    differences = []
    for left, right in zip(a.cell.needed_addresses, b.cell.needed_addresses, strict=True):
        left_measurement, right_measurement = reader.measure(left), reader.measure(right)
        if (
            left_measurement.scores is None
            or right_measurement.scores is None
            or left_measurement.mismatches
            or right_measurement.mismatches
            or incomparable(left_measurement, right_measurement)
        ):
            return None
        difference = paired_difference(left, left_measurement, right_measurement)
        if difference is None:
            return None
        if sign < 0:
            low, high = (None if end is None else -end for end in (difference.high, difference.low))
            difference = Mean(-difference.value, low, high)
        differences.append(difference)
    return mean(differences) if differences else None
