"""The papers' sentences that state a number: each holds, fails, is undecided or was not tested, by cells of the tables.

A sentence is tested only by cells that are judged: of a status that compares (times and sizes in ratios alone), under the
table's conditions, beside a full cache that is the paper's. What is about so large may be off by the margin of its cell, or of a
ratio or percentage by SHARE, and never by more than half of the effect that it states: without an effect none of them holds.
Seeds are in it as in a cell's verdict. A sentence that leaves open which cells it means is ambiguous and never tested.
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
from mmkv_bench.papers.filled_table import FilledCell, FilledTable
from mmkv_bench.papers.metrics import margin
from mmkv_bench.papers.printed import COMPARABLE, OPEN, RATIOS
from mmkv_bench.papers.reader import MEASURED, PART, WHOLE, incomparable
from mmkv_bench.papers.verdict import NOT_COMPARABLE, ROUNDING, of_seeds

HOLDS, FAILS, UNDECIDED, NOT_TESTED, AMBIGUOUS = "holds", "fails", "undecided", "not tested", "ambiguous sentence"
SHARE = 0.05
"""Of a stated ratio or percentage: how far one that is only about so large may be off, beside its rounding."""
_NO_EFFECT = {"ratio": 1.0, "difference": 0.0, "reduction": 0.0, "gain": 0.0}
_OF_TWO = ("ratio", "reduction", "gain")
"""What times and sizes of another device may be compared by."""

_OPERATIONS: Mapping[str, Callable[[float, float], float]] = {
    "level": lambda a, b: a,
    "difference": lambda a, b: a - b,
    "ratio": lambda a, b: a / b,
    "reduction": lambda a, b: 100 * (1 - a / b),
    "gain": lambda a, b: 100 * (a / b - 1),
}


@dataclass(frozen=True)
class Claim:
    """One sentence. `number`, `half`: what it states and how it is rounded; `of`: where cells stand by their labels, of a level
    that was raised also from what; `why`: of an ambiguous one, what it leaves open."""

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
    """All of `claims.yaml`, with the numbers that their sentences state.

    Raises:
        ConfigError: a quote that no row of the text numbers has, or that several have.
    """
    import yaml

    told = yaml.safe_load((reference_dir() / "claims.yaml").read_text(encoding="utf-8"))["claims"]
    return tuple(_claim(one) for one in told)


def _claim(told: Mapping[str, Any]) -> Claim:
    rows = printed.load()
    own = rows[(rows["status"] == printed.CLAIM) & (rows["paper"] == told["paper"])]
    own = own[own["note"].str.contains(told["quote"], regex=False)]
    for key in ("metric", "subset"):
        own = own[own[key] == told[key]] if key in told else own
    if own["number"].nunique() != 1:
        raise ConfigError(
            f"claims.yaml: {len(own)} numbers of {told['paper']} quote {told['quote']!r}; a claim is one of them"
        )
    row = own.iloc[0]
    half = printed.half_digit(str(row["value"]), float(row["number"]))
    cells = tuple({key: str(value) for key, value in told[side].items()} for side in ("a", "b") if side in told)
    sentence = (told["paper"], told["quote"], float(row["number"]), half)
    return Claim(*sentence, told["table"], told.get("by", ""), told["is"], cells, told.get("why", ""))


def find(page: FilledTable, where: Mapping[str, str]) -> FilledCell:
    """The cell of a table that labels name.

    Raises:
        ConfigError: none, or several.
    """
    spec = page.spec
    found = []
    for one in page.cells:
        cell = one.cell
        labels = {
            "block": spec.blocks[cell.block].label,
            "row": spec.rows[cell.row].label,
            "column": spec.columns[cell.column].label,
            "across": "" if cell.across is None else spec.across[cell.across].label,
        }
        if all(labels[key] == value for key, value in where.items()):
            found.append(one)
    if len(found) != 1:
        raise ConfigError(f"claims.yaml: {spec.id} has {len(found)} cells {dict(where)}; a claim names one")
    return found[0]


def tested(pages: Sequence[FilledTable]) -> list[ClaimResult]:
    """Every claim with its word."""
    by_name = {page.spec.id: page for page in pages}
    return [_tested(claim, [find(by_name[claim.table], where) for where in claim.of]) for claim in claims()]


def _tested(claim: Claim, cells: Sequence[FilledCell]) -> ClaimResult:
    if claim.how == "ambiguous":
        return ClaimResult(claim, AMBIGUOUS)
    states = {one.measured.state for one in cells}
    if states - {*WHOLE, PART} or not states & {MEASURED, PART} or not all(_judged(one, claim.by) for one in cells):
        return ClaimResult(claim, NOT_TESTED)
    if len({id(one) for one in cells}) > 1 and incomparable(cells[0].measured, cells[-1].measured):
        return ClaimResult(claim, NOT_TESTED)
    ends = [_ends(one) for one in cells]
    ours = _OPERATIONS[claim.by](*(one.measured.number for one in (*cells, *cells)[:2]))
    every = [_OPERATIONS[claim.by](a, b) for a in ends[0] for b in ends[-1]]
    low, high = _room(claim, cells)
    if PART in states or min(every) < low - ROUNDING <= max(every) or min(every) <= high + ROUNDING < max(every):
        return ClaimResult(claim, UNDECIDED, ours)
    return ClaimResult(claim, HOLDS if low - ROUNDING <= ours <= high + ROUNDING else FAILS, ours)


def _judged(one: FilledCell, by: str) -> bool:
    """Whether a cell's number may speak for or against the paper."""
    if one.measured.value is None or one.measured.other:
        return False
    if one.printed is None or one.printed.status == RATIOS:
        return by in _OF_TWO
    judged = one.printed.status in (COMPARABLE, OPEN)
    return judged and (one.verdict is None or one.verdict.word != NOT_COMPARABLE)


def _ends(one: FilledCell) -> tuple[float, float]:
    away = of_seeds(one.measured.seeds)
    return one.measured.number - away, one.measured.number + away


def _room(claim: Claim, cells: Sequence[FilledCell]) -> tuple[float, float]:
    """From where to where our number may lie."""
    if claim.how != "about":
        low = claim.number - claim.half if claim.how == "at least" else -inf
        return low, claim.number + claim.half if claim.how == "at most" else inf
    if claim.by in _OF_TWO:
        room, effect = SHARE * abs(claim.number), abs(claim.number - _NO_EFFECT[claim.by])
    else:
        at, number = cells[0].cell.address, _printed(cells[0])
        fixed = margin(at.dataset, at.metric)
        room = fixed.margin * (number if fixed.relative else 1.0)
        effect = abs(claim.number) if claim.by == "difference" else inf
        if claim.by == "level" and len(cells) > 1:
            effect = abs(number - _printed(cells[1]))
    room = claim.half + min(room, effect / 2)
    return claim.number - room, claim.number + room


def _printed(one: FilledCell) -> float:
    assert one.printed is not None
    assert one.printed.number is not None
    return one.printed.number
