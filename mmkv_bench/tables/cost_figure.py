"""A cost against the length of the prompt: one panel per model, kind of prompt and batch, one line per method and budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mmkv_bench.errors import ConfigError
from mmkv_bench.tables.captions import context_words, line_label
from mmkv_bench.tables.cost_names import Cost
from mmkv_bench.tables.costs import TIMED, CostEntry, CostTable
from mmkv_bench.tables.figure import canvas, legend_below, log2_axis, looks, small_print
from mmkv_bench.tables.line import Line
from mmkv_bench.tables.number_text import unit_of
from mmkv_bench.tables.rows import BASELINE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STROKES = ("-", "--", "-.", ":")
_COLUMNS = 3
_LETTERS = 13  # of the small print, in an inch
_BANDS = 4
"""Most lines in a panel whose intervals are bands; with more they are bars beside each other."""
_BESIDE = 0.02  # between the bars of two lines, in doublings of the length


def length_figure(tables: Sequence[CostTable], cost: Cost) -> Figure:
    """The picture, of ms/token with the rooflines of the tables' limits.

    Raises:
        ConfigError: nothing was measured at any length.
    """
    panels: dict[tuple[str, ...], list[CostTable]] = {}
    for table in tables:
        if table.per_pass and any(cost.key in row for row in table.entries.values()):
            key = (*table.context.values(), str(table.shape["dataset"]), str(table.shape["batch"]), table.axis)
            panels.setdefault(key, []).append(table)
    if not panels:
        raise ConfigError(
            f"These rows have no {cost.name} against a length: run scenario=efficiency with lengths=[2048,8192,...] first"
        )
    every = [table for group in panels.values() for table in group]
    styles = looks(method for table in every for method in table.methods)
    values = [row[cost.key].value for table in every for row in table.entries.values() if cost.key in row]
    scale = unit_of(cost.unit, [value for value in values if value is not None])
    across = min(len(panels), _COLUMNS)
    down = -(-len(panels) // across)
    figure, grid = canvas(down, across, (max(5.2 * across, 7.6), 4.3 * down + 0.8), len(panels))
    for axes, group in zip(grid, panels.values(), strict=False):
        _draw(axes, group, cost, scale, styles)
        axes.set_title(_title(group[0], every), fontsize=11)
    legend_below(figure, grid[: len(panels)])
    words = context_words(every[0].context, every[0].readings, [table.context for table in every])[1:]
    words += [f"device={name}" for name in dict.fromkeys(table.context["device"] for table in every)]
    words += ["medians with their intervals", *_failures(every, cost)]
    disturbed = next((table.disturbed for table in every if table.disturbed), ())
    words += [f"disturbed: {', '.join(disturbed)}"] if disturbed else []
    small_print(figure, words, int(_LETTERS * figure.get_figwidth()))
    return figure


def _draw(
    axes: Axes,
    tables: Sequence[CostTable],
    cost: Cost,
    scale: tuple[float, str],
    styles: Mapping[str, tuple[str, str]],
) -> None:
    size, unit = scale
    lines: dict[tuple[str, str], Line] = {}
    for table in tables:
        lines |= {(method.label, budget): method for method, budget in table.lines()}
    budgets = sorted({budget for _, budget in lines if budget}, key=float)
    for number, (key, method) in enumerate(lines.items()):
        colour, shape = styles[method.label]
        entries = [(int(t.shape["prompt_tokens"]), t.entries.get(key, {}).get(cost.key), t) for t in tables]
        points = [(tokens, e, t) for tokens, e, t in entries if e is not None and e.value is not None]
        if not points:
            continue
        stroke = "-" if not key[1] else _STROKES[budgets.index(key[1]) % len(_STROKES)]
        y = [e.value / size for _, e, _ in points if e.value is not None]
        style = {"color": colour, "marker": shape, "linestyle": stroke}
        name = line_label(method) + (f", {key[1]}" if key[1] else "")
        axes.plot([tokens for tokens, _, _ in points], y, markersize=7, linewidth=1.8, label=name, **style)
        _intervals(axes, points, size, colour, number, len(lines))
        if cost.key == TIMED:
            _roofline(axes, [(tokens, t) for tokens, _, t in points], key, colour, size)
    ticks = sorted({int(table.shape["prompt_tokens"]) for table in tables})
    log2_axis(axes, ticks, [_length(tokens) for tokens in ticks], "prompt tokens")
    axes.set_ylim(bottom=0)
    per = "ms/token" if cost.key == TIMED and unit == "ms" else f"{cost.name} [{unit}]" if unit else cost.name
    axes.set_ylabel(per, fontsize=10.5)


def _intervals(
    axes: Axes, points: Sequence[tuple[int, CostEntry, CostTable]], size: float, colour: str, number: int, lines: int
) -> None:
    """The intervals of the line with this number, of so many lines."""
    ends = [(tokens, e.low / size, e.high / size) for tokens, e, _ in points if e.low and e.high]
    if ends and lines <= _BANDS:
        axes.fill_between(*zip(*ends, strict=True), color=colour, alpha=0.15, linewidth=0)
    elif ends:
        at, low, high = zip(*ends, strict=True)
        beside = 2 ** (_BESIDE * (number - (lines - 1) / 2))
        axes.vlines([tokens * beside for tokens in at], low, high, color=colour, alpha=0.55, linewidth=1.3)


def _roofline(
    axes: Axes, points: Sequence[tuple[int, CostTable]], key: tuple[str, str], colour: str, size: float
) -> None:
    known = [
        (tokens, table.limits.least[key] / size)
        for tokens, table in points
        if table.limits and key in table.limits.least
    ]
    if known:
        label = "roofline, in the line's colour" if key[0] == BASELINE else "_"
        axes.plot(*zip(*known, strict=True), color=colour, linestyle=(0, (1, 1.5)), linewidth=1.2, label=label)


def _length(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def _title(table: CostTable, every: Sequence[CostTable]) -> str:
    several = len({other.shape["dataset"] for other in every}) > 1
    kind = f", {table.shape['dataset']}" if several else ""
    return f"{table.context['model']}{kind}, batch {table.shape['batch']}"


def _failures(tables: Sequence[CostTable], cost: Cost) -> list[str]:
    """The points that are missing, with the line, the length and the batch of each."""
    failed = [
        f"{line_label(method)} {budget} at {table.shape['prompt_tokens']} x {table.shape['batch']}: {entry.failed}"
        for table in tables
        for method, budget in table.lines()
        if (entry := table.entries[method.label, budget].get(cost.key)) is not None and entry.failed
    ]
    return ["no point: " + ", ".join(failed)] if failed else []
