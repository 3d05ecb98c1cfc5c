"""Figures of filled tables: measured against printed numbers, and the papers' figures (curves, radar charts, analyses)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import ConfigError
from mmkv_bench.papers.address import FRACTION, NONE, Address
from mmkv_bench.papers.judgement import FilledCell, FilledTable
from mmkv_bench.papers.margins import NOT_COMPARABLE, WORDS
from mmkv_bench.papers.measurement import State
from mmkv_bench.papers.non_score_metrics import DIAGNOSTICS
from mmkv_bench.tables.figure import Look, band, canvas, legend_below, log2_axis, looks, save, small_print
from mmkv_bench.tables.table import COLOURS, VERDICTS, verdict_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CAPTION_LETTERS_PER_INCH = 15  # letters of a caption per inch
_COLOUR_BAR_LABEL = "<colorbar>"  # matplotlib's label of a colour bar's axes
_NO_VERDICT = "no verdict"
_MARKERS = dict(zip((*WORDS, NOT_COMPARABLE, _NO_VERDICT), "oXDsv.", strict=True))
_DRAWING_ORDER = ("differs", *(word for word in _MARKERS if word != "differs"))
_PANELS_ACROSS = 4  # panels side by side


def save_pictures(table: FilledTable, folder: Path) -> list[Path]:
    """Save the pictures of a table and return the paths; [] if the table has no number to draw."""
    drawn_figures = pictures(table) if table.layout.figure and any(map(_is_point, table.cells)) else {}
    drawn_figures |= (
        {".printed": against_printed(table)} if any(one.number_pair and _is_point(one) for one in table.cells) else {}
    )
    stem, is_stand_in = folder / table.layout.id, bool(table.layout.stands_for)
    return [
        file
        for name, figure in drawn_figures.items()
        for file in save(figure, Path(f"{stem}{name}"), plain=is_stand_in)
    ]


def pictures(table: FilledTable) -> dict[str, Figure]:
    """Draw a paper's figure in the form `TableLayout.figure`, and return suffix of the file name -> figure.

    Cells without a number are left out. Every panel of a stand-in is marked as such.

    Raises:
        ConfigError: the table is no figure, or no cell has a number.
    """
    layout = table.layout
    if layout.figure not in PICTURES:
        raise ConfigError(f"{layout.id} is not a figure, so it has no picture; give the id of a figure")
    if not any(map(_is_point, table.cells)):
        raise ConfigError(
            f"no cell of {layout.id} ({layout.title}) has a number, so there is nothing to draw; run its cells first"
        )
    figures = PICTURES[layout.figure](table)
    for figure in figures.values():
        for axes in figure.axes:
            if layout.stands_for and axes.get_visible() and axes.get_label() != _COLOUR_BAR_LABEL:
                axes.text(
                    0.5, 0.5, "STAND-IN", transform=axes.transAxes, rotation=30, fontsize=34, color="#B00020",
                    alpha=0.22, ha="center", va="center", weight="bold",
                )  # fmt: skip
        _caption(table, figure)
    return figures


def against_printed(table: FilledTable) -> Figure:
    """Plot measured against printed numbers, one panel per metric. Colour and marker show the verdict."""
    panels: dict[str, list[FilledCell]] = {}
    for one in table.cells:
        if one.number_pair and _is_point(one):
            unit = f" [{one.printed_value.unit}]" if one.printed_value.unit else ""
            panels.setdefault(f"{one.cell.address.metric}{unit}", []).append(one)
    figure, grid = _panels(len(panels))
    for axes, (name, cells) in zip(grid, panels.items(), strict=True):
        for word in sorted({_word(one) for one in cells}, key=_DRAWING_ORDER.index, reverse=True):
            group = [one for one in cells if _word(one) == word]
            numbers = [(one.measured.number, one.measured.low, one.measured.high) for one in group]
            distances_below = [0.0 if low is None else max(value - low, 0.0) for value, low, _ in numbers]
            distances_above = [0.0 if high is None else max(high - value, 0.0) for value, _, high in numbers]
            look = VERDICTS.get(word)
            axes.errorbar(
                [one.printed_number for one in group], [value for value, _, _ in numbers], (distances_below, distances_above),
                fmt=_MARKERS[word], color=f"#{COLOURS[look.colour if look else 'quiet']}", label=verdict_text(word),
                markersize=6, elinewidth=0.9, alpha=0.85,
            )  # fmt: skip
        axis_limits = [*axes.get_xlim(), *axes.get_ylim()]
        diagonal = [min(axis_limits), max(axis_limits)]
        axes.plot(diagonal, diagonal, color="#999999", linestyle="--", zorder=0, label="measured = printed")
        axes.set_xlabel("printed", fontsize=10.5)
        axes.set_ylabel("measured, 95% interval", fontsize=10.5)
        axes.set_title(name, fontsize=12)
        axes.spines[["top", "right"]].set_visible(False)
    legend_below(figure, figure.axes, 10.5)
    _caption(table, figure)
    return figure


def _is_point(one: FilledCell) -> bool:
    """Return True if a cell has a number other than a dry run's forecast."""
    return one.measured.value is not None and one.measured.state != State.PLANNED


def _word(one: FilledCell) -> str:
    return one.verdict.word if one.verdict else _NO_VERDICT


def _analyses(table: FilledTable) -> dict[str, Figure]:
    """Return `.<analysis>` -> figure as `mmkv-bench plot` draws it, from only the rows of the table's cells."""
    import pandas as pd

    from mmkv_bench.tables.diagnostic_figure import BESIDE, diagnostic_figure, panels_of

    cells = {one.measured.source: one for one in table.cells if one.measured.drawn is not None}.values()
    rows = pd.concat([one.measured.drawn for one in cells], ignore_index=True)
    names = dict.fromkeys(DIAGNOSTICS[one.cell.address.metric].name for one in cells)
    names_drawn_alone = [name for name in names if not any(BESIDE.get(other) == name for other in names)]
    return {f".{name}": diagnostic_figure(panels_of(rows, name)) for name in names_drawn_alone}


def _curves(table: FilledTable) -> dict[str, Figure]:
    """Draw one curve per table row, and return {"": figure}.

    The x axis has budgets or prompt lengths (`_place`). There is a panel per block and column, or only per block if the layout
    has no `across`.
    """
    layout = table.layout
    has_columns_across = len(layout.across) > 1
    panels: dict[tuple[int, int], list[FilledCell]] = {}
    for one in table.cells:
        panels.setdefault((one.cell.block, one.cell.column if has_columns_across else 0), []).append(one)
    figure, grid = _panels(len(panels), len(panels))
    styles = _styles(table)
    for axes, ((block, column), cells) in zip(grid, panels.items(), strict=True):
        for row in dict.fromkeys(one.cell.row for one in cells):
            points = [one for one in cells if one.cell.row == row and _is_point(one)]
            _line(axes, points, layout.rows[row].label, styles)
        tick_labels = {
            place: x_label for place, x_label in (_place(one.cell.address) for one in cells) if place is not None
        }
        addresses = [one.cell.address for one in cells]
        fraction_label = (
            "fraction of the prompt's entries kept" if any(at.budget_kind == FRACTION for at in addresses) else ""
        )
        x_label = (
            "prompt tokens"
            if any(at.length is not None for at in addresses)
            else fraction_label or "entries kept per KV head"
        )
        log2_axis(axes, [*tick_labels], [*tick_labels.values()], x_label)
        panel_title = (
            layout.blocks[block].label,
            layout.columns[column].label if has_columns_across else cells[0].cell.address.metric,
        )
        axes.set_title(" ".join(filter(None, panel_title)), fontsize=12)
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    legend_below(figure, figure.axes, 10.5)
    return {"": figure}


def _line(axes: Axes, cells: Sequence[FilledCell], label: str, styles: Mapping[str, Look]) -> None:
    """Draw a table row as a curve with intervals. A single number that holds at every budget becomes a horizontal line."""
    colour, shape = styles[label]
    points = [(_place(one.cell.address)[0], one.measured) for one in cells]
    if len(points) == 1 and points[0][0] is None:
        axes.axhline(points[0][1].number, color=colour, linestyle="--", linewidth=1.4, label=label)
        return
    sorted_points = sorted((x, y.number, y.low, y.high) for x, y in points if x is not None)
    axes.plot(
        [x for x, *_ in sorted_points], [y for _, y, *_ in sorted_points], color=colour, marker=shape, linewidth=1.8, label=label
    )  # fmt: skip
    band(axes, [(x, low, high) for x, _, low, high in sorted_points], colour)


def _radar(table: FilledTable) -> dict[str, Figure]:
    """Draw a radar chart of numbers in percent of the full cache's, one axis per column, and return {"": figure}."""
    layout = table.layout
    full = {one.cell.column: one.measured.value for one in table.cells if one.cell.address.method.base == "full"}
    columns = [column for column, value in full.items() if value]
    if not columns:
        raise ConfigError(f"{layout.id}: full has no number, so percents of full are undefined; run full first")
    angles = [2 * math.pi * place / len(columns) for place in range(len(columns))]
    figure, (axes,) = _panels(1, subplot_kw={"projection": "polar"})
    styles = _styles(table)
    for row, item in enumerate(layout.rows):
        numbers = {one.cell.column: one.measured.value for one in table.cells if one.cell.row == row}
        shares = [(numbers[column], full[column]) for column in columns]
        values = [100 * value / reference for value, reference in shares if value is not None and reference]
        if len(values) == len(columns):
            colour, shape = styles[item.label]
            closed_outline = [*angles, angles[0]], [*values, values[0]]
            axes.plot(*closed_outline, color=colour, marker=shape, markersize=5, label=item.label)
    axes.set_xticks(angles, [layout.columns[column].label for column in columns], fontsize=9)
    for text, angle in zip(axes.get_xticklabels(), angles, strict=True):
        horizontal_direction = math.cos(angle)
        text.set_horizontalalignment(
            "center" if abs(horizontal_direction) < 0.2 else "left" if horizontal_direction > 0 else "right"
        )
    axes.set_ylim(0, None)
    legend_below(figure, figure.axes, 10.5)
    return {"": figure}


PICTURES: Mapping[str, Callable[[FilledTable], dict[str, Figure]]] = {
    "curves": _curves,
    "radar": _radar,
    "analysis": _analyses,
}
"""`TableLayout.figure` -> function that draws the figure."""


def _panels(count: int, most: int = _PANELS_ACROSS, **axes: Any) -> tuple[Figure, list[Axes]]:
    columns = min(count, most)
    rows_of_panels = math.ceil(count / columns)
    figure, grid = canvas(rows_of_panels, columns, (max(5.2 * columns, 7.6), 5.0 * rows_of_panels), count, **axes)
    return figure, grid[:count]


def _caption(table: FilledTable, figure: Figure) -> None:
    text = f"{table.layout.title} ({table.layout.id}): {table.layout.caption}"
    small_print(figure, [text], int(_CAPTION_LETTERS_PER_INCH * figure.get_figwidth()))


def _styles(table: FilledTable) -> dict[str, Look]:
    names = {table.layout.rows[one.cell.row].label: one.cell.address.method.name for one in table.cells}
    styles_by_method = looks(names.values())
    return {label: styles_by_method[name] for label, name in names.items()}


def _place(at: Address) -> tuple[float | None, str]:
    """Return (position on the x axis, tick label) of a number. The position is None if the number holds at every budget."""
    if at.length is not None:
        return float(at.length), f"{at.length:,}"
    return None if at.budget_kind == NONE else float(at.budget), at.budget
