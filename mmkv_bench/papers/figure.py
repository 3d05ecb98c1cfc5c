"""The pictures of filled tables: curves over budgets or lengths, the radar of percents of full, analyses as `plot` draws them.

What a stand-in draws says so in every panel, so that no copy of the picture loses it.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from mmkv_bench.errors import ConfigError
from mmkv_bench.papers.address import FRACTION, NONE
from mmkv_bench.papers.filled_table import FilledCell, FilledTable
from mmkv_bench.papers.metrics import DIAGNOSTICS
from mmkv_bench.papers.reader import PLANNED
from mmkv_bench.tables.figure import looks_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.projections.polar import PolarAxes

_PERCENT = 100.0
_SMALL, _LETTERS = 9, 15  # points of a title's letters, and how many an inch surely holds
_BAR = "<colorbar>"  # as matplotlib calls the axes of one


def drawable(page: FilledTable) -> bool:
    """Whether a page is a figure that has a number to draw."""
    return bool(page.spec.figure) and any(map(_drawn, page.cells))


def pictures(page: FilledTable) -> dict[str, Figure]:
    """The pictures of a figure's page (`TableLayout.figure`), by what their files' names have behind its id: one, or one of each
    analysis. Points without a number are left out.

    Raises:
        ConfigError: it is no figure that is drawn from its cells, or none of its cells holds a number.
    """
    if page.spec.figure not in PICTURES:
        raise ConfigError(f"{page.spec.id} is no figure that is drawn from its cells")
    if not any(map(_drawn, page.cells)):
        raise ConfigError(f"no cell of {page.spec.id} holds a number, so there is nothing to draw; {page.spec.title}")
    found = PICTURES[page.spec.figure](page)
    for figure in found.values():
        for axes in figure.axes:
            if page.spec.stands_for and axes.get_visible() and axes.get_label() != _BAR:
                _mark(axes)
        title = f"{page.spec.title} ({page.spec.id}): {page.spec.caption}"
        figure.suptitle(textwrap.fill(title, int(_LETTERS * figure.get_figwidth())), fontsize=_SMALL, color="#555555")
    return found


def _drawn(one: FilledCell) -> bool:
    """Whether it is a point: what a dry run foresees is none beside what was measured."""
    return one.measured.value is not None and one.measured.state != PLANNED


def _analyses(page: FilledTable) -> dict[str, Figure]:
    """Each analysis as `mmkv-bench plot` draws it, from the rows of these cells alone."""
    import pandas as pd

    from mmkv_bench.tables.diagnostic_figure import BESIDE, diagnostic_figure, panels_of

    own = {one.measured.source: one for one in page.cells if one.measured.drawn is not None}
    rows = pd.concat([one.measured.drawn for one in own.values()], ignore_index=True)
    names = dict.fromkeys(DIAGNOSTICS[one.cell.address.metric].name for one in own.values())
    alone = [name for name in names if not any(BESIDE.get(other) == name for other in names)]
    return {f".{name}": diagnostic_figure(panels_of(rows, name)) for name in alone}


def _with_legend(figure: Figure) -> dict[str, Figure]:
    """The one picture of its page, its lines' names below."""
    handles = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=min(len(handles), 4), frameon=False, fontsize=10.5
    )
    return {"": figure}


def _curves(page: FilledTable) -> dict[str, Figure]:
    """A panel for each block and column, over what columns are split by; over the columns where nothing splits them."""
    spec = page.spec
    split = len(spec.across) > 1
    panels: dict[tuple[int, int], list[FilledCell]] = {}
    for one in page.cells:
        panels.setdefault((one.cell.block, one.cell.column if split else 0), []).append(one)
    figure = _empty(len(panels))
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    styles = _styles(page)
    for axes, ((block, column), cells) in zip(grid, panels.items(), strict=True):
        for row in dict.fromkeys(one.cell.row for one in cells):
            own = [one for one in cells if one.cell.row == row and _drawn(one)]
            _line(axes, own, spec.rows[row].label, styles)
        axes.set_xscale("log", base=2)
        places = {_place(one): _told(one) for one in cells if _place(one) is not None}
        axes.set_xticks([*places], [*places.values()])
        axes.set_xticks([], minor=True)
        axes.set_xlabel(_axis(cells), fontsize=10.5)
        words = (spec.blocks[block].label, spec.columns[column].label if split else cells[0].cell.address.metric)
        axes.set_title(" ".join(filter(None, words)), fontsize=12)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    return _with_legend(figure)


def _line(axes: Axes, cells: Sequence[FilledCell], label: str, styles: Mapping[str, tuple[str, str]]) -> None:
    """One row: a line with its band of intervals, or a level where one cell stands for all."""
    colour, shape = styles[label]
    if len(cells) == 1 and _place(cells[0]) is None:
        own = cells[0].measured
        axes.axhline(own.number, color=colour, linestyle="--", linewidth=1.4, label=label)
        return
    points = sorted((place, one.measured) for one in cells if (place := _place(one)) is not None)
    axes.plot(
        [x for x, _ in points], [y.number for _, y in points], color=colour, marker=shape, linewidth=1.8, label=label
    )
    known = [(x, y.low, y.high) for x, y in points if y.low is not None and y.high is not None]
    if known:
        at, low, high = zip(*known, strict=True)
        axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)


def _radar(page: FilledTable) -> dict[str, Figure]:
    """Percent of `full`, an axis for each column."""
    spec = page.spec
    full = {one.cell.column: one.measured.value for one in page.cells if one.cell.address.method.base == "full"}
    columns = [column for column, value in full.items() if value]
    if not columns:
        raise ConfigError(f"{spec.id}: full has no number, so there is nothing to be a percent of")
    angles = [2 * math.pi * place / len(columns) for place in range(len(columns))]
    figure = _empty(1)
    axes: PolarAxes = figure.add_subplot(projection="polar")
    for row in range(len(spec.rows)):
        own = {one.cell.column: one.measured.value for one in page.cells if one.cell.row == row}
        shares = [(own[column], full[column]) for column in columns]
        if any(value is None for value, _ in shares):
            continue
        values = [_PERCENT * value / whole for value, whole in shares if value is not None and whole]
        colour, shape = _styles(page)[spec.rows[row].label]
        axes.plot(
            [*angles, angles[0]], [*values, values[0]], color=colour, marker=shape, markersize=5,
            label=spec.rows[row].label,
        )  # fmt: skip
    axes.set_xticks(angles, [spec.columns[column].label for column in columns], fontsize=9)
    axes.tick_params(axis="x", pad=22)
    axes.set_ylim(0, None)
    return _with_legend(figure)


PICTURES: Mapping[str, Callable[[FilledTable], dict[str, Figure]]] = {
    "curves": _curves,
    "radar": _radar,
    "analysis": _analyses,
}
"""What `figure` of a table's file may say -> how its cells are drawn."""


def _empty(panels: int) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(max(5.2 * panels, 7.6), 5.0), dpi=110, layout="constrained")


def _mark(axes: Axes) -> None:
    axes.text(
        0.5, 0.5, "STAND-IN", transform=axes.transAxes, rotation=30, fontsize=34, color="#B00020", alpha=0.22,
        ha="center", va="center", weight="bold",
    )  # fmt: skip


def _styles(page: FilledTable) -> dict[str, tuple[str, str]]:
    """Colour and marker of every row's label."""
    return looks_of({page.spec.rows[one.cell.row].label: one.cell.address.method.base for one in page.cells})


def _place(one: FilledCell) -> float | None:
    """Where a cell stands on the axis; None for one that stands at every budget."""
    at = one.cell.address
    if at.length is not None:
        return float(at.length)
    return None if at.budget_kind == NONE else float(at.budget)


def _told(one: FilledCell) -> str:
    at = one.cell.address
    return f"{at.length:,}" if at.length is not None else at.budget


def _axis(cells: Sequence[FilledCell]) -> str:
    if any(one.cell.address.length is not None for one in cells):
        return "prompt tokens"
    fraction = any(one.cell.address.budget_kind == FRACTION for one in cells)
    return "fraction of the prompt's entries kept" if fraction else "entries kept per KV head"
