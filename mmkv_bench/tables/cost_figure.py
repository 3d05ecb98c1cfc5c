"""A cost against the length of the prompt: one panel per model, kind of prompt and batch, one line per method and budget."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import ConfigError
from mmkv_bench.tables.captions import context_words, line_label
from mmkv_bench.tables.cost_names import Cost
from mmkv_bench.tables.costs import CostEntry, CostTable
from mmkv_bench.tables.figure import looks
from mmkv_bench.tables.line import Line
from mmkv_bench.tables.number_text import unit_of
from mmkv_bench.tables.rows import BASELINE
from mmkv_bench.tables.step_limits import TIMED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STROKES = ("-", "--", "-.", ":")
_COLUMNS = 3
_LETTERS = 13  # of the small print, in an inch
_BANDS = 4
"""Of so many lines in a panel intervals are bands; of more they are bars, each line's a little beside the others'."""
_BESIDE = 0.02  # between the bars of two lines, in doublings of the length


def length_figure(tables: Sequence[CostTable], cost: Cost) -> Figure:
    """The picture, of ms/token with the rooflines of the tables' limits.

    Raises:
        ConfigError: nothing was measured at any length.
    """
    from matplotlib.figure import Figure

    panels: dict[tuple[str, ...], list[CostTable]] = {}
    for table in tables:
        if table.per_pass and any(cost.key in own for own in table.entries.values()):
            key = (*table.context.values(), str(table.shape["dataset"]), str(table.shape["batch"]), table.axis)
            panels.setdefault(key, []).append(table)
    if not panels:
        raise ConfigError(
            f"These rows have no {cost.name} against a length: run scenario=efficiency with lengths=[2048,8192,...] first"
        )
    every = [table for own in panels.values() for table in own]
    styles = looks(method for table in every for method in table.methods)
    values = [own[cost.key].value for table in every for own in table.entries.values() if cost.key in own]
    scale = unit_of(cost.unit, [value for value in values if value is not None])
    across = min(len(panels), _COLUMNS)
    down = -(-len(panels) // across)
    figure = Figure(figsize=(max(5.2 * across, 7.6), 4.3 * down + 0.8), dpi=150, layout="constrained")
    grid = figure.subplots(down, across, squeeze=False).ravel()
    for axes, own in zip(grid, panels.values(), strict=False):
        _draw(axes, own, cost, scale, styles)
        axes.set_title(_title(own[0], every), fontsize=11)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    _legend(figure, grid[: len(panels)])
    words = context_words(every[0].context, every[0].readings, [table.context for table in every])
    words += [f"device={name}" for name in dict.fromkeys(table.context["device"] for table in every)]
    said = [*words[1:], "medians with their intervals", *_failures(every, cost), *_disturbed(every)]
    width = int(_LETTERS * figure.get_figwidth())
    figure.suptitle(textwrap.fill("; ".join(said), width), fontsize=9, color="#555555")
    return figure


def _draw(
    axes: Axes,
    tables: Sequence[CostTable],
    cost: Cost,
    scale: tuple[float, str],
    styles: dict[str, tuple[str, str]],
) -> None:
    size, unit = scale
    lines: dict[tuple[str, str], Line] = {}
    for table in tables:
        lines |= {(method.label, budget): method for method, budget in table.lines()}
    budgets = sorted({budget for _, budget in lines if budget}, key=float)
    for number, (key, method) in enumerate(lines.items()):
        colour, shape = styles[method.label]
        stroke = "-" if not key[1] else _STROKES[budgets.index(key[1]) % len(_STROKES)]
        points = [
            (int(table.shape["prompt_tokens"]), entry, table)
            for table in tables
            if (entry := table.entries.get(key, {}).get(cost.key)) is not None and entry.value is not None
        ]
        if not points:
            continue
        x = [tokens for tokens, _, _ in points]
        y = [_number(entry) / size for _, entry, _ in points]
        name = line_label(method) + (f", {key[1]}" if key[1] else "")
        axes.plot(x, y, color=colour, marker=shape, linestyle=stroke, markersize=7, linewidth=1.8, label=name)
        ends = [
            (tokens, entry.low / size, entry.high / size) for tokens, entry, _ in points if entry.low and entry.high
        ]
        if ends and len(lines) <= _BANDS:
            axes.fill_between(*zip(*ends, strict=True), color=colour, alpha=0.15, linewidth=0)
        elif ends:
            at, low, high = zip(*ends, strict=True)
            beside = 2 ** (_BESIDE * (number - (len(lines) - 1) / 2))
            axes.vlines([tokens * beside for tokens in at], low, high, color=colour, alpha=0.55, linewidth=1.3)
        if cost.key == TIMED:
            _roofline(axes, points, key, colour, size)
    ticks = sorted({int(table.shape["prompt_tokens"]) for table in tables})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [_length(tokens) for tokens in ticks])
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("prompt tokens", fontsize=10.5)
    per = "ms/token" if cost.key == TIMED and unit == "ms" else f"{cost.name} [{unit}]" if unit else cost.name
    axes.set_ylabel(per, fontsize=10.5)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def _roofline(
    axes: Axes,
    points: Sequence[tuple[int, CostEntry, CostTable]],
    key: tuple[str, str],
    colour: str,
    size: float,
) -> None:
    found = [
        (tokens, table.limits.least[key] / size)
        for tokens, _, table in points
        if table.limits is not None and key in table.limits.least
    ]
    if found:
        label = "roofline, in the line's colour" if key[0] == BASELINE else "_"
        axes.plot(*zip(*found, strict=True), color=colour, linestyle=(0, (1, 1.5)), linewidth=1.2, label=label)


def _number(entry: CostEntry) -> float:
    assert entry.value is not None, "points have values"
    return entry.value


def _length(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def _title(table: CostTable, every: Sequence[CostTable]) -> str:
    several = len({other.shape["dataset"] for other in every}) > 1
    kind = f", {table.shape['dataset']}" if several else ""
    return f"{table.context['model']}{kind}, batch {table.shape['batch']}"


def _legend(figure: Figure, panels: Sequence[Axes]) -> None:
    handles: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=min(len(handles), 4), frameon=False, fontsize=9.5
    )


def _disturbed(tables: Sequence[CostTable]) -> list[str]:
    """What disturbed the passes, as the table of the shortest prompt says it."""
    said = next((table.disturbed for table in tables if table.disturbed), ())
    return [f"disturbed: {', '.join(said)}"] if said else []


def _failures(tables: Sequence[CostTable], cost: Cost) -> list[str]:
    """What has no point: which line failed, at which length and batch."""
    found = [
        f"{line_label(method)} {budget} at {table.shape['prompt_tokens']} x {table.shape['batch']}: {entry.failed}"
        for table in tables
        for method, budget in table.lines()
        if (entry := table.entries[method.label, budget].get(cost.key)) is not None and entry.failed
    ]
    return ["no point: " + ", ".join(found)] if found else []
