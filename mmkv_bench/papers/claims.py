"""Claims: sentences of the papers that state a number. Each holds, fails, is undecided or was not tested.

Only judged cells test a claim: their status allows a comparison (times and sizes in ratios alone), their conditions are the
table's, and the full cache beside them is the paper's. A number that is stated as about so large may be off by the margin of its
cell, or for a ratio or percentage by SHARE, but never by more than half of the stated effect: without an effect no claim holds.
The spread over seeds counts as in a cell's verdict. A claim that leaves its cells open is ambiguous and never tested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Any

from mmkv_bench.config.schema import reference_dir
from mmkv_bench.errors import ConfigError
from mmkv_bench.papers import printed
from mmkv_bench.papers.filled_table import FilledTable
from mmkv_bench.papers.judgement import FilledCell
from mmkv_bench.papers.margins import margin
from mmkv_bench.papers.measurement import MEASURED, PART, WHOLE, incomparable
from mmkv_bench.papers.printed import COMPARABLE, OPEN, RATIOS
from mmkv_bench.papers.verdict import NOT_COMPARABLE, ROUNDING, of_seeds

HOLDS, FAILS, UNDECIDED, NOT_TESTED, AMBIGUOUS = "holds", "fails", "undecided", "not tested", "ambiguous sentence"
SHARE = 0.05
"""Tolerance of a ratio or percentage that is stated as about so large, beside its rounding."""
_NO_EFFECT = {"ratio": 1.0, "difference": 0.0, "reduction": 0.0, "gain": 0.0}
_OF_TWO = ("ratio", "reduction", "gain")
"""Operations that times and sizes of another device allow."""
_OPERATIONS: Mapping[str, Callable[[float, float], float]] = {
    "level": lambda a, b: a,
    "difference": lambda a, b: a - b,
    "ratio": lambda a, b: a / b,
    "reduction": lambda a, b: 100 * (1 - a / b),
    "gain": lambda a, b: 100 * (a / b - 1),
}


@dataclass(frozen=True)
class Claim:
    """One sentence: number and half are the stated number and half of its last digit; by: one of `_OPERATIONS`; how: about, at
    least, at most or ambiguous; of: labels of its cells; why: for an ambiguous one, what it leaves open."""

    paper: str
    quote: str
    number: float
    half: float
    table: str
    by: str
    how: str
    of: tuple[Mapping[str, str], ...]
    why: str = ""


@dataclass(frozen=True)
class ClaimResult:
    """A claim with its word and our number, None where there is none."""

    claim: Claim
    word: str
    ours: float | None = None


@cache
def claims() -> tuple[Claim, ...]:
    """Read all claims of `claims.yaml`, with the numbers that their sentences state.

    Raises:
        ConfigError: a quote that no row of the printed numbers has, or several.
    """
    import yaml

    return tuple(map(_claim, yaml.safe_load((reference_dir() / "claims.yaml").read_text(encoding="utf-8"))["claims"]))


def _claim(entry: Mapping[str, Any]) -> Claim:
    rows = printed.load()
    rows = rows[(rows["status"] == printed.CLAIM) & (rows["paper"] == entry["paper"])]
    rows = rows[rows["note"].str.contains(entry["quote"], regex=False)]
    for key in {"metric", "subset"} & {*entry}:
        rows = rows[rows[key] == entry[key]]
    if rows["number"].nunique() != 1:
        raise ConfigError(
            f"claims.yaml: {len(rows)} numbers of {entry['paper']} quote {entry['quote']!r}; a claim quotes one"
        )
    number = float(rows["number"].iloc[0])
    half = printed.half_digit(str(rows["value"].iloc[0]), number)
    cells = tuple({key: str(value) for key, value in entry[side].items()} for side in ("a", "b") if side in entry)
    sentence = (entry["paper"], entry["quote"], number, half)
    return Claim(*sentence, entry["table"], entry.get("by", ""), entry["is"], cells, entry.get("why", ""))


def find(table: FilledTable, where: Mapping[str, str]) -> FilledCell:
    """Find the cell of a table with these labels.

    Raises:
        ConfigError: none, or several.
    """
    cells = [one for one in table.cells if where.items() <= table.layout.labels(one.cell).items()]
    if len(cells) != 1:
        raise ConfigError(f"claims.yaml: {table.layout.id} has {len(cells)} cells {dict(where)}; a claim names one")
    return cells[0]


def tested(tables: Sequence[FilledTable]) -> list[ClaimResult]:
    """Test every claim."""
    by_name = {table.layout.id: table for table in tables}
    return [_tested(claim, [find(by_name[claim.table], where) for where in claim.of]) for claim in claims()]


def _tested(claim: Claim, cells: Sequence[FilledCell]) -> ClaimResult:
    if claim.how == "ambiguous":
        return ClaimResult(claim, AMBIGUOUS)
    states = {one.measured.state for one in cells}
    if states - {*WHOLE, PART} or not states & {MEASURED, PART} or not all(_judged(one, claim.by) for one in cells):
        return ClaimResult(claim, NOT_TESTED)
    if len({id(one) for one in cells}) > 1 and incomparable(cells[0].measured, cells[-1].measured):
        return ClaimResult(claim, NOT_TESTED)
    spreads = [(one.measured.number, of_seeds(one.measured.seeds)) for one in cells]
    ends = [(number - spread, number + spread) for number, spread in spreads]
    ours = _OPERATIONS[claim.by](*(one.measured.number for one in (*cells, *cells)[:2]))
    every = [_OPERATIONS[claim.by](a, b) for a in ends[0] for b in ends[-1]]
    low, high = _allowed(claim, cells)
    if PART in states or min(every) < low - ROUNDING <= max(every) or min(every) <= high + ROUNDING < max(every):
        return ClaimResult(claim, UNDECIDED, ours)
    return ClaimResult(claim, HOLDS if low - ROUNDING <= ours <= high + ROUNDING else FAILS, ours)


def _judged(one: FilledCell, by: str) -> bool:
    """Tell whether a cell's number may speak for or against the paper."""
    if one.measured.value is None or one.measured.mismatches:
        return False
    if one.printed is None or one.printed.status == RATIOS:
        return by in _OF_TWO
    judged = one.printed.status in (COMPARABLE, OPEN)
    return judged and (one.verdict is None or one.verdict.word != NOT_COMPARABLE)


def _allowed(claim: Claim, cells: Sequence[FilledCell]) -> tuple[float, float]:
    """Return the ends of the range that our number may lie in."""
    if claim.how != "about":
        low = claim.number - claim.half if claim.how == "at least" else -inf
        return low, claim.number + claim.half if claim.how == "at most" else inf
    if claim.by in _OF_TWO:
        room, effect = SHARE * abs(claim.number), abs(claim.number - _NO_EFFECT[claim.by])
    else:
        at, number = cells[0].cell.address, cells[0].printed_number
        fixed = margin(at.dataset, at.metric)
        room = fixed.margin * (number if fixed.relative else 1.0)
        effect = abs(claim.number) if claim.by == "difference" else inf
        if claim.by == "level" and len(cells) > 1:
            effect = abs(number - cells[1].printed_number)
    room = claim.half + min(room, effect / 2)
    return claim.number - room, claim.number + room
