"""What stands in the cells of a filled table and at their edges, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import floor, log10

from mmkv_bench.papers.diagnostic_curves import Curve
from mmkv_bench.papers.filled_table import FilledCell, FilledTable
from mmkv_bench.papers.printed import Printed
from mmkv_bench.papers.reader import MEASURED, UNCLEAR, Measurement

_EQUAL = 1e-9  # ends of an interval that are no further apart say nothing of digits


def text(one: FilledCell) -> str:
    """A cell: measured [interval] / printed, difference, verdict; or its state beside what is printed. Behind it the number and
    the verdict of each further reading."""
    printed = "" if one.printed is None else f" / {number(one.printed)}"
    own = one.measured
    if own.value is None:
        why = f" ({own.why})" if own.why and own.state != UNCLEAR else ""
        return "; ".join([f"{own.state}{why}{printed}", *readings(one)])
    places = _places(one.printed, own)
    lines = [_with_interval(curve, _places(one.printed, curve), curve.label) for curve in own.curves]
    told = ("; ".join(lines) or _with_interval(own, places)) + printed
    if own.state != MEASURED:
        told = f"{own.state} ({own.why}): {told}"
    if one.ratio:
        told += " ratio {:.3g} / {:.3g}".format(*one.ratio)
    elif one.shown:
        told += f" {one.shown[0] - one.shown[1]:+.{places}f}"
    if one.verdict is not None:
        told += f" {one.verdict}"
    return "; ".join([told + mark(own), *readings(one)])


def mark(own: Measurement) -> str:
    """Behind a number: `*` where it is not judged for what it was made with, `†` where nothing states all of that."""
    return " *" if own.other else " †" if own.unstated else ""


def readings(one: FilledCell) -> list[str]:
    """The number and the verdict of each further reading that has a number."""
    shown = [(name, made) for name, made in one.readings.items() if made.value is not None]
    return [
        " ".join(
            [f"{name} {made.value:.{_places(one.printed, made)}f}", *filter(None, [str(one.words.get(name) or "")])]
        )
        + " *" * bool(made.other)
        for name, made in shown
    ]


def _with_interval(own: Measurement | Curve, places: int, label: str = "") -> str:
    """A number behind its label, with its interval where it has one."""
    words = [*([label] if label else []), f"{own.value:.{places}f}"]
    if own.low is not None and own.high is not None:
        words.append(f"[{own.low:.{places}f}, {own.high:.{places}f}]")
    return " ".join(words)


def number(printed: Printed) -> str:
    """A printed value as it is shown: the literal, or the number where a scan has lost its point."""
    if not printed.value:
        return "unreadable"
    if printed.number is None or "." in printed.value:
        return printed.value
    return f"{printed.number:.{_digits(printed.half)}f}"


def edges(page: FilledTable, one: FilledCell) -> tuple[str, ...]:
    """What stands at a cell's edges."""
    spec, cell = page.spec, one.cell
    across = "" if cell.across is None else spec.across[cell.across].label
    return spec.blocks[cell.block].label, spec.rows[cell.row].label, spec.columns[cell.column].label, across


def grid(page: FilledTable) -> Iterator[tuple[str, list[str], list[tuple[str, list[list[FilledCell]]]]]]:
    """(block's label, header, rows) of each block; a row is its label and the cells of each place: none, one, or those that
    stand together."""
    spec = page.spec
    spans = len(spec.across) > 1
    for b, block in enumerate(spec.blocks):
        own = {(one.cell.row, one.cell.column, one.cell.across): one for one in page.cells if one.cell.block == b}
        if not own:
            continue
        rows = [r for r in range(len(spec.rows)) if any(key[0] == r for key in own)]
        columns, across = range(len(spec.columns)), range(len(spec.across))
        if spec.together:
            sides = [[(c, a) for c in columns] for a in across]
            header = [" ; ".join(column.label for column in spec.columns), *(item.label for item in spec.across)]
        else:
            alone = {c for c in columns if {key[2] for key in own if key[1] == c} == {None}}
            every = [(c, a) for c in columns for a in across if c not in alone or not a]
            sides = [[(c, a)] for c, a in every if any(_at(own, r, c, a) for r in rows)]
            labels = [[spec.columns[c].label, spec.across[a].label if c not in alone else ""] for ((c, a),) in sides]
            header = ["", *(" ".join(filter(None, both)) if spans else both[0] for both in labels)]
        found = [
            (spec.rows[r].label, [[one for at in side for one in _at(own, r, *at)] for side in sides]) for r in rows
        ]
        yield block.label, header, found


def words(cells: Sequence[FilledCell]) -> str:
    """What stands in a place of the table; never nothing."""
    return " ; ".join(map(text, cells)) or "no such cell"


def _at(own: Mapping[tuple[int, int, int | None], FilledCell], row: int, column: int, across: int) -> list[FilledCell]:
    one = own.get((row, column, across)) or own.get((row, column, None))
    return [] if one is None else [one]


def caption(page: FilledTable) -> str:
    said = "measured [95%]" if page.spec.stands_for else "measured [95%] / printed, difference, verdict"
    return f"{page.spec.title} ({page.spec.id}): {page.spec.caption}; {said}"


def _digits(half: float) -> int:
    return max(0, -floor(log10(2 * half) + 1e-9)) if half else 0


def _places(printed: Printed | None, own: Measurement | Curve) -> int:
    """Decimals: the printed number's, else two digits of the interval's width, else four digits of the value."""
    if printed is not None and printed.number is not None:
        return _digits(printed.half)
    if own.low is not None and own.high is not None and own.high - own.low > _EQUAL:
        return max(0, 1 - floor(log10(own.high - own.low)))
    return max(0, 3 - floor(log10(abs(own.value)))) if own.value else 3
