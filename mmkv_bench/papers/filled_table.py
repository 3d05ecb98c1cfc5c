"""A paper's table, filled: measured numbers beside printed ones, with verdicts on levels, drops to full, and leads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from mmkv_bench.errors import ConfigError
from mmkv_bench.papers.address import STAND_IN
from mmkv_bench.papers.evidence import Evidence
from mmkv_bench.papers.judgement import FilledCell, column_of, filled, full_of, fulls_of, is_full, judged
from mmkv_bench.papers.layout import TableCell, TableLayout
from mmkv_bench.papers.measurement import COMPUTED, incomparable, paired_difference
from mmkv_bench.papers.metrics import has_numbers
from mmkv_bench.papers.printed import Printed, of_table
from mmkv_bench.papers.reader import EvidenceReader
from mmkv_bench.papers.verdict import Verdict, lead
from mmkv_bench.statistics.metric_kinds import lower_is_better
from mmkv_bench.tables.dataset_groups import Mean, mean

COSTS = ("ttft_s", "total_s", "tpot_ms", "peak_gb", "selection_ms")


@dataclass(frozen=True)
class Lead:
    """A printed lead of the paper's method over its strongest baseline, with our difference and the verdict."""

    own: TableCell
    over: TableCell
    printed: float
    verdict: Verdict
    ours: Mean | None = None


@dataclass(frozen=True)
class FilledTable:
    """A filled table.

    pairs: of all other pairs that our intervals separate, the number with the printed sign and with the other one; versions:
    column -> values behind its numbers; refused: number of cells that are no evidence; sources: place in the evidence -> rows
    folder and hash.
    """

    layout: TableLayout
    cells: tuple[FilledCell, ...]
    leads: tuple[Lead, ...]
    pairs: tuple[int, int]
    versions: Mapping[str, tuple[str, ...]]
    refused: int
    sources: Mapping[int, str] = field(default_factory=dict)

    @property
    def states(self) -> Counter[str]:
        """Number of cells in each state."""
        return Counter(one.measured.state for one in self.cells)

    def verdicts(self, own: bool) -> Counter[str]:
        """Count verdicts on levels, of the paper's own method or of all others.

        Computed numbers count as neither: they follow from the same lengths and shapes as the printed ones.
        """
        cells = [one for one in self.cells if self.layout.own(one.cell) == own and one.measured.state != COMPUTED]
        return Counter(one.verdict.word for one in cells if one.verdict)


def fill(
    layout: TableLayout, evidence: Evidence, printed: Mapping[tuple[str, ...], Printed] | None = None
) -> FilledTable:
    """Fill a table from evidence.

    Args:
        printed: printed values by address; default: those of results/reference.

    Raises:
        ConfigError: printed numbers for a stand-in.
    """
    if printed is None:
        printed = {} if layout.stands_for else of_table(layout.id)
    if printed and any(cell.address.model == STAND_IN for cell in layout.cells):
        raise ConfigError(f"{layout.id} is filled by the embedded model: no printed number stands beside it")
    own = fulls_of(layout, printed)
    fulls = [full_of(cell, own, layout.paper) if cell.address.printed in printed else None for cell in layout.cells]
    needed = [at for full in fulls if full is not None for at in full.cell.needed]
    reader = EvidenceReader(evidence, [*layout.needed, *needed])
    cells = [filled(layout, cell, printed.get(cell.address.printed), reader) for cell in layout.cells]
    cells = [judged(one, full, reader) for one, full in zip(cells, fulls, strict=True)]
    leads, pairs = _order(layout, cells, reader)
    rows = sorted({row for one in cells for row in one.measured.rows})
    sources = {row: evidence.source(row) for row in rows}
    return FilledTable(layout, tuple(cells), tuple(leads), pairs, evidence.versions(rows), evidence.refused, sources)


def _order(
    layout: TableLayout, cells: Sequence[FilledCell], reader: EvidenceReader
) -> tuple[list[Lead], tuple[int, int]]:
    """Judge the printed leads over the strongest baseline, and count the signs of all other pairs."""
    leads, same, other = [], 0, 0
    for group in _columns(cells):
        own = [one for one in group if layout.own(one.cell)]
        rest = [one for one in group if not layout.own(one.cell)]
        sign = -1 if lower_is_better(group[0].cell.address.metric) else 1
        claimed: list[FilledCell] = []
        if len(own) == 1 and rest:
            best = max(rest, key=lambda one: sign * one.printed_number)
            printed = sign * (own[0].printed_number - best.printed_number)
            if printed > 0:
                claimed, ours = [own[0], best], _paired(reader, own[0], best, sign)
                verdict = lead(*((None, None) if ours is None else (ours.low, ours.high)))
                leads.append(Lead(own[0].cell, best.cell, printed, verdict, ours))
        for a, b in combinations(group, 2):
            if claimed and {id(a), id(b)} == {*map(id, claimed)}:
                continue
            ours, gap = _paired(reader, a, b, sign), sign * (a.printed_number - b.printed_number)
            if ours is None or ours.low is None or ours.high is None or ours.low <= 0 <= ours.high or not gap:
                continue
            same, other = (same + 1, other) if (ours.value > 0) == (gap > 0) else (same, other + 1)
    return leads, (same, other)


def _columns(cells: Sequence[FilledCell]) -> Iterator[list[FilledCell]]:
    """Group methods of one column and budget that have a printed number of the same kind."""
    groups: dict[tuple[object, ...], list[FilledCell]] = {}
    for one in cells:
        at = one.cell.address
        if one.printed is None or one.printed.number is None or is_full(one.cell) or at.minus is not None:
            continue
        if at.metric not in COSTS and has_numbers(at.metric):
            groups.setdefault((*column_of(at), at.budget_kind, at.budget), []).append(one)
    yield from (group for group in groups.values() if len(group) > 1)


def _paired(reader: EvidenceReader, a: FilledCell, b: FilledCell, sign: int) -> Mean | None:
    """Return our difference a - b, better above 0, paired by sample; of means, the mean of their parts'."""
    differences = []
    for left, right in zip(a.cell.needed, b.cell.needed, strict=True):
        one, two = reader.measured(left), reader.measured(right)
        if one.scores is None or two.scores is None or one.mismatches or two.mismatches or incomparable(one, two):
            return None
        difference = paired_difference(left, one, two)
        if difference is None:
            return None
        if sign < 0:
            low, high = (None if end is None else -end for end in (difference.high, difference.low))
            difference = Mean(-difference.value, low, high)
        differences.append(difference)
    return mean(differences) if differences else None
