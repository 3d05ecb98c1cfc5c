"""Scores against costs as a picture: a row of panels per table, a column per cost, one point a cell, the Pareto front drawn."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import ConfigError
from mmkv_bench.tables.captions import caption, line_label
from mmkv_bench.tables.figure import looks
from mmkv_bench.tables.fronts import Front, Point
from mmkv_bench.tables.number_text import number, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FRONT = "#999999"
_NAMED = 12  # points of a panel that all have their budget beside them; of more only those on the front
_NAMES = {"tpot_s": "time per token", "ttft_s": "time to first token", "bytes_held": "bytes that the cache holds"}


def front_figure(fronts: Sequence[Front]) -> Figure:
    """The picture. Raises ConfigError where there is nothing to draw."""
    from matplotlib.figure import Figure

    if not fronts:
        raise ConfigError("There is no table of scores to draw: name rows that are scored.")
    tables = list({id(front.table): front.table for front in fronts}.values())
    costs = list(dict.fromkeys(front.cost.key for front in fronts))
    styles = looks(point.method for front in fronts for point in front.points)
    size = (max(5.0 * len(costs), 7.6), 4.1 * len(tables) + 0.9)
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    grid = figure.subplots(len(tables), len(costs), squeeze=False, sharey="row")
    handles: dict[str, Any] = {}
    for front in fronts:
        axes = grid[[table is front.table for table in tables].index(True)][costs.index(front.cost.key)]
        _draw(axes, front, styles)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    for row, table in zip(grid, tables, strict=True):
        row[0].set_ylabel(f"{table.dataset}\n{table.metric.replace('_', ' ')}", fontsize=10.5)
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=min(len(handles), 4), frameon=False, fontsize=9.5
    )
    words = caption(tables[0], tables).split("; ")
    sources = dict.fromkeys(f"{front.cost.name}: {front.source}" for front in fronts)
    figure.suptitle(textwrap.fill("; ".join([*words, *sources]), 125), fontsize=9, color="#555555")
    return figure


def _draw(axes: Axes, front: Front, styles: dict[str, tuple[str, str]]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    size, unit = unit_of(front.cost.unit, [point.x for point in front.points])
    best = [point for point in front.points if point.best]
    x, y = [point.x / size for point in best], [point.y for point in best]
    rate = front.cost.unit == "tokens/s"
    axes.step(x, y, where="post", color=_FRONT, linewidth=1.4, zorder=1, label="Pareto front")
    for label in dict.fromkeys(point.method.label for point in front.points):
        own = [point for point in front.points if point.method.label == label]
        colour, shape = styles[label]
        for point in own:
            _bars(axes, point, size, colour)
        axes.plot(
            [point.x / size for point in own],
            [point.y for point in own],
            linestyle="none",
            color=colour,
            marker=shape,
            markersize=11 if shape == "*" else 8,
            markeredgecolor=colour if shape == "x" else "white",
            markeredgewidth=1.6 if shape == "x" else 0.8,
            label=line_label(own[0].method),
            zorder=3,
        )
    for point in best if len(front.points) > _NAMED else front.points:
        axes.annotate(
            point.budget or "",
            (point.x / size, point.y),
            textcoords="offset points",
            xytext=(6, -10),
            fontsize=8,
            color="#444444",
        )
    most, least = max(point.x for point in front.points), min(point.x for point in front.points)
    if least > 0 and most / least > 8:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(float(f"{value:.3g}"))))
        axes.xaxis.set_minor_formatter(NullFormatter())
    name = _NAMES.get(front.cost.key, front.cost.name)
    axes.set_xlabel(f"{name} [{unit}]" if unit else name, fontsize=10.5)
    if rate:
        axes.invert_xaxis()  # cheaper is to the left, as elsewhere
    axes.grid(color="#E3E3E3", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def _bars(axes: Axes, point: Point, size: float, colour: str) -> None:
    if point.y_low is not None and point.y_high is not None:
        axes.plot([point.x / size] * 2, [point.y_low, point.y_high], color=colour, linewidth=1.2, alpha=0.6, zorder=2)
    if point.x_low is not None and point.x_high is not None:
        axes.plot(
            [point.x_low / size, point.x_high / size], [point.y] * 2, color=colour, linewidth=1.2, alpha=0.6, zorder=2
        )
