"""The papers' sentences that state a number: each holds, fails, is undecided or was not tested, by cells of the tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from mmkv_bench.config.schema import reference_dir
from mmkv_bench.errors import ConfigError
from mmkv_bench.papers import printed
from mmkv_bench.papers.fill import Filled, Page
from mmkv_bench.papers.measured import MEASURED, PART

HOLDS, FAILS, UNDECIDED, NOT_TESTED = "holds", "fails", "undecided", "not tested"
SHARE = 0.05
"""Of the stated number: how far one that is only about so large may be off, beside its rounding."""

_OPERATIONS: Mapping[str, Callable[[float, float], float]] = {
    "level": lambda a, b: a,
    "difference": lambda a, b: a - b,
    "ratio": lambda a, b: a / b,
    "reduction": lambda a, b: 100 * (1 - a / b),
    "gain": lambda a, b: 100 * (a / b - 1),
}


@dataclass(frozen=True)
class Claim:
    """One sentence. `number`, `half`: what it states and how it is rounded; `of`: where cells stand by their labels."""

    paper: str
    quote: str
    number: float
    half: float
    table: str
    by: str
    how: str
    of: tuple[Mapping[str, str], ...]


@dataclass(frozen=True)
class Tested:
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
    return Claim(told["paper"], told["quote"], float(row["number"]), half, told["table"], told["by"], told["is"], cells)


def find(page: Page, where: Mapping[str, str]) -> Filled:
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


def tested(pages: Sequence[Page]) -> list[Tested]:
    """Every claim with its word."""
    by_name = {page.spec.id: page for page in pages}
    return [_tested(claim, [find(by_name[claim.table], where) for where in claim.of]) for claim in claims()]


def _tested(claim: Claim, cells: Sequence[Filled]) -> Tested:
    values = [one.measured.value for one in cells]
    states = {one.measured.state for one in cells}
    if any(value is None for value in values) or any(one.measured.other for one in cells) or states - {MEASURED, PART}:
        return Tested(claim, NOT_TESTED)
    first, second = (float(value) for value in (*values, *values)[:2] if value is not None)
    ours = _OPERATIONS[claim.by](first, second)
    if PART in states:
        return Tested(claim, UNDECIDED, ours)
    return Tested(claim, HOLDS if _holds(claim, ours) else FAILS, ours)


def _holds(claim: Claim, ours: float) -> bool:
    if claim.how == "at least":
        return ours >= claim.number - claim.half
    if claim.how == "at most":
        return ours <= claim.number + claim.half
    return abs(ours - claim.number) <= claim.half + SHARE * abs(claim.number)
