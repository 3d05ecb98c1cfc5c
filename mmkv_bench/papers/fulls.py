"""The full cache that a number stands beside: in its own table, wherever methods stand there, else in another of its paper."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from mmkv_bench.papers.address import SYNTHETIC, Address
from mmkv_bench.papers.layout import TableCell, TableLayout, load, table_ids
from mmkv_bench.papers.metrics import has_numbers
from mmkv_bench.papers.printed import COMPARABLE, OPEN, RATIOS, Printed, of_table

FULL = "full"
Place = tuple[object, ...]


class PrintedFull(NamedTuple):
    """A printed number of the full cache: the table, its cell there, and what is printed."""

    spec: TableLayout
    cell: TableCell
    printed: Printed


def is_full(cell: TableCell) -> bool:
    """Whether a cell is of the full cache."""
    return cell.address.method.base == FULL


def beside(address: Address) -> Place:
    """All of an address that a method shares with the full cache of its column."""
    return address.model, address.dataset, address.metric, address.length, address.new_tokens, address.batch


def own_fulls(spec: TableLayout, printed: Mapping[tuple[str, ...], Printed]) -> dict[Place, PrintedFull]:
    """The full caches of a table by what a method beside them shares, its conditions and the parts of its mean included."""
    found: dict[Place, PrintedFull] = {}
    for cell in spec.cells:
        one = printed.get(cell.address.printed)
        if one is not None and one.number is not None and is_full(cell) and has_numbers(cell.address.metric):
            found.setdefault(_place(cell), PrintedFull(spec, cell, one))
    return found


def full_of(cell: TableCell, own: Mapping[Place, PrintedFull], paper: str) -> PrintedFull | None:
    """The full cache beside a cell; None of full itself, and where the paper prints none.

    own: `own_fulls` of its table; paper: empty where no other table counts.
    """
    if is_full(cell):
        return None
    return own.get(_place(cell)) or (_of_paper(paper).get(_place(cell)) if paper else None)


def _place(cell: TableCell) -> Place:
    at = cell.address
    parts = tuple((part.dataset, part.metric) for part in cell.parts)
    asked = (
        () if at.dataset in SYNTHETIC else (at.max_new_tokens, at.cut_prompt, at.frames)
    )  # made-up prompts have their own
    return (*beside(at), *asked, at.protocol, parts)


@cache
def _of_paper(paper: str) -> Mapping[Place, PrintedFull]:
    """Of all tables of a paper; where several print one, the first whose number is held against ours."""
    every = [one for spec in map(load, table_ids()) if spec.paper == paper for one in _listed(spec)]
    held = sorted(every, key=lambda one: one.printed.status not in (COMPARABLE, OPEN, RATIOS))
    return {_place(one.cell): one for one in reversed(held)}


def _listed(spec: TableLayout) -> list[PrintedFull]:
    return list(own_fulls(spec, of_table(spec.id)).values())
