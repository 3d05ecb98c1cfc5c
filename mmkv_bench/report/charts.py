"""Charts of the report as plotly figures. The style sheet of the pages colours text and lines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mmkv_bench.report.formatting import budget_words, byte_words, number
from mmkv_bench.report.scores import FamilyRanks, ScoreLine, ScoreView, cost_value
from mmkv_bench.tables.costs import CostEntry, CostTable
from mmkv_bench.tables.figure import COLOURS, GREY, MARKERS, Look, looks
from mmkv_bench.tables.questions import LOOKS, MODES, PLACE, x_shift
from mmkv_bench.tables.table import Table
from mmkv_bench.tables.text import axis_words, ranks_text

if TYPE_CHECKING:
    import pandas as pd

DASHES = ("solid", "dash", "dot", "dashdot")
AXIS = {"automargin": True}
MANY_NUMBERS = 400
"""Largest heat map, in fields, whose fields show their numbers."""


Figure = dict[str, Any]
"""Data and layout for plotly's script."""


def _figure(traces: Sequence[Mapping[str, Any]], **layout: Any) -> Figure:
    transparent_background = dict.fromkeys(("paper_bgcolor", "plot_bgcolor"), "rgba(0,0,0,0)")
    margin = {"l": 60, "r": 20, "t": 20, "b": 50}
    return {
        "data": traces,
        "layout": transparent_background | {"margin": margin, "hoverlabel": {"align": "left"}} | layout,
    }


def _method_traces(
    view: ScoreView, lines: Iterable[ScoreLine], places: Iterable[float], styles: Mapping[str, Look]
) -> list[dict[str, Any]]:
    """Return one plotly trace per method. places: the x value of each of `lines`."""
    points: dict[str, list[tuple[float, ScoreLine]]] = {}
    for line, x in zip(lines, places, strict=True):
        points.setdefault(line["label"], []).append((x, line))
    traces = []
    for method in sorted(points):
        line_points = sorted(points[method], key=lambda point: point[0])
        scores = [(line["value"] or 0.0, line["low"], line["high"]) for _, line in line_points]
        hover_texts = {"text": [view.hint(line) for _, line in line_points], "hoverinfo": "text"}
        traces.append(_trace(method, [number(x) for x, _ in line_points], scores, styles[method]) | hover_texts)
    return traces


Numbers = Sequence[tuple[float, float | None, float | None]]
"""Value, low and high of each point."""


def _trace(name: str, x: Sequence[Any], points: Numbers, look: Look, scale: float = 1.0, **line: Any) -> dict[str, Any]:
    colour = look.colour.replace("black", GREY)  # black is invisible on a dark page
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": x,
        "y": [number(value / scale) for value, _, _ in points],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [0 if high is None else number((high - value) / scale) for value, _, high in points],
            "arrayminus": [0 if low is None else number((value - low) / scale) for value, low, _ in points],
            "thickness": 1,
            "width": 3,
        },
        "line": {"color": colour, **line, "width": 2},
        "marker": {"symbol": MARKERS.get(look.marker, look.marker), "size": 8, "color": colour},
    }


def against_budget(view: ScoreView, styles: Mapping[str, Look]) -> Figure:
    """Return a chart of scores against the budget, on a logarithmic axis. A method without a budget is a horizontal
    line."""
    scored_lines = [line for line in view.lines if line["value"] is not None]
    budgets = [float(budget) for budget in view.budgets]
    level_traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": line["label"],
            "x": [budgets[0], budgets[-1]] if budgets else [0, 1],
            "y": [number(line["value"])] * 2,
            "line": {"color": GREY, "dash": "dash", "width": 2},
            "text": view.hint(line),
            "hoverinfo": "text",
        }
        for line in scored_lines
        if not line["budget"]
    ]
    budgeted_lines = [line for line in scored_lines if line["budget"]]
    traces = _method_traces(view, budgeted_lines, (float(line["budget"]) for line in budgeted_lines), styles)
    budget_labels = [view.budget_words(budget).removesuffix(" entries") for budget in view.budgets]
    axis = AXIS | {
        "type": "log",
        "title": {"text": axis_words(view.axis)},
        "tickvals": budgets,
        "ticktext": budget_labels,
    }
    return _figure([*level_traces, *traces], height=520, xaxis=axis, yaxis=AXIS | {"title": {"text": view.metric}})


def against_cost(view: ScoreView, cost: str, styles: Mapping[str, Look]) -> Figure:
    """Return a chart of scores against a cost: `bytes` or `token` (seconds per token)."""
    lines = [line for line in view.lines if line["value"] is not None and cost_value(line, cost) is not None]
    values = [line[cost].value for line in lines]
    traces = _method_traces(view, lines, values, styles)
    cost_label = "bytes held" if cost == "bytes" else "seconds per token"
    axis: dict[str, Any] = AXIS | {"type": "log", "title": {"text": cost_label}}
    if cost == "bytes":
        ticks = _powers_of_two(values)
        axis |= {"tickvals": ticks, "ticktext": [byte_words(tick) for tick in ticks]}
    return _figure(traces, height=480, xaxis=axis, yaxis=AXIS | {"title": {"text": view.metric}})


def against_length(tables: Sequence[CostTable], cost: str) -> Figure | None:
    """Return a chart of a cost of timed passes against prompt length, one line per method, budget and batch.

    None if no pass has the cost.
    """
    points: dict[tuple[str, str, str], list[tuple[int, CostEntry]]] = {}
    for table in tables:
        for method, budget in table.lines():
            entry = table.entries[method.label, budget].get(cost)
            if entry is not None and entry.value is not None:
                key = method.label, budget_words(table.axis, budget) if budget else "", str(table.shape["batch"])
                points.setdefault(key, []).append((int(table.shape["prompt_tokens"]), entry))
    styles, traces = looks(label for label, _, _ in points), []
    unit_size, unit = (2**30, "GiB") if cost == "peak_total" else (1e-3, "ms")
    for (label, budget, batch), entries in points.items():
        entries.sort(key=lambda point: point[0])
        numbers = [(entry.value or 0.0, entry.low, entry.high) for _, entry in entries]
        budgets = sorted({other for name, other, _ in points if name == label})
        name = ", ".join(filter(None, (label, budget, f"batch {batch}")))
        dash = DASHES[budgets.index(budget) % len(DASHES)]
        traces.append(_trace(name, [tokens for tokens, _ in entries], numbers, styles[label], unit_size, dash=dash))
    if not traces:
        return None
    lengths = sorted({tokens for entries in points.values() for tokens, _ in entries})
    ticks = {"tickvals": lengths, "ticktext": [f"{tokens:,}" for tokens in lengths]}
    axis = AXIS | {"type": "log", "title": {"text": "prompt tokens"}} | ticks
    return _figure(traces, height=480, xaxis=axis, yaxis=AXIS | {"title": {"text": unit}, "rangemode": "tozero"})


def against_place(line: pd.DataFrame, full: pd.DataFrame) -> Figure:
    """Return a chart of the score against a question's position among its document's questions, one line per mode.

    The mode says what the cache was compressed for, see `tables.questions.MODES`. The full cache is dashed.

    line, full: rows of `tables.questions.by_place` of one method and budget, and of the full cache.
    """
    modes = [mode for mode in MODES if (line["mode"] == mode).any()]
    traces = []
    rows = full[full["mode"] == "each"]
    if len(rows):
        values = [(value, None, None) for value in rows["value"]]
        level_trace = _trace("full", [*map(int, rows["place"])], values, Look(GREY, "x"), dash="dash")
        traces.append(level_trace | {"mode": "lines"})
    for mode in modes:
        rows = line[line["mode"] == mode]
        interval_bounds = rows[["low", "high"]].astype(object).where(rows[["low", "high"]].notna(), None)
        points = list(zip(rows["value"], interval_bounds["low"], interval_bounds["high"], strict=True))
        trace = _trace(mode, [number(place + x_shift(mode, modes)) for place in rows["place"]], points, LOOKS[mode])
        points_of_mode = zip(rows["place"], rows["value"], strict=True)
        hover_texts = [f"{mode}, question {place}: {value:.2f}" for place, value in points_of_mode]
        traces.append(trace | {"text": hover_texts, "hoverinfo": "text"})
    axis_range = {"range": [-0.03, 1.05]} if line["value"].between(0, 1).all() else {}
    axis = AXIS | {"title": {"text": PLACE}, "tickvals": sorted({*map(int, line["place"])})}
    metric = str(line["metric"].iloc[0])
    return _figure(traces, height=420, xaxis=axis, yaxis=AXIS | {"title": {"text": metric}} | axis_range)


def table_texts(table: Table) -> dict[str, Any]:
    """Return a table as texts for a page, with intervals, marks and all notes."""
    grids = []
    for grid in table.grids:
        rows = [[" ".join(filter(None, (cell.text, cell.interval, *cell.marks))) for cell in row] for row in grid.cells]
        grids.append({"heading": grid.heading, "header": grid.header, "rows": rows})
    return {"title": table.title, "caption": table.caption, "grids": grids, "notes": table.split_notes("all")[0]}


def _powers_of_two(values: Sequence[float]) -> list[float]:
    lowest_power, highest_power = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    return [
        2.0**power
        for power in range(lowest_power, highest_power + 1, math.ceil((highest_power - lowest_power + 1) / 10))
    ]


def rank_intervals(ranks: FamilyRanks) -> Figure:
    """Return a chart of ranks: a thin interval per task, a thick one for the mean; the method with the best mean on
    top."""
    count, tasks = len(ranks.methods), ranks.tasks
    task_intervals: dict[str, list[Any]] = {"x": [], "y": []}
    points: dict[str, list[Any]] = {"x": [], "y": [], "text": []}
    for row, ends in enumerate(ranks.ends):
        for k, (low, high) in enumerate(ends):
            y_position = count - 1 - row + (0.6 * (k / (len(tasks) - 1) - 0.5) if len(tasks) > 1 else 0.25)
            task_intervals["x"] += [low - 0.12, high + 0.12, None]
            task_intervals["y"] += [y_position, y_position, None]
            points["x"].append((low + high) / 2)
            points["y"].append(y_position)
            points["text"].append(f"{tasks[k]}: rank {ranks_text((low, high))}")
    middles, halves = ([(high + sign * low) / 2 for low, high in ranks.means] for sign in (1, -1))
    task_count_text = f"{len(tasks)} task{'s' * (len(tasks) > 1)}"
    shared_trace = {"type": "scatter", "showlegend": False}
    traces = [
        shared_trace | task_intervals | {"mode": "lines", "line": {"color": GREY, "width": 2}, "hoverinfo": "skip"},
        shared_trace | points | {"mode": "markers", "marker": {"color": GREY, "size": 5}, "hoverinfo": "text"},
        shared_trace
        | {
            "mode": "markers",
            "x": middles,
            "y": [*range(count - 1, -1, -1)],
            "error_x": {"type": "data", "array": halves, "thickness": 5, "width": 0, "color": COLOURS["blue"]},
            "marker": {"color": COLOURS["blue"], "size": 9},
            "hoverinfo": "text",
            "text": [
                f"{method}: mean {ranks_text(mean, '.1f')} over {task_count_text}"
                for method, mean in zip(ranks.methods, ranks.means, strict=True)
            ],
        },
    ]
    tick_step = 5 if count > 20 else 1
    return _figure(
        traces,
        height=90 + 34 * count,
        xaxis=AXIS | {"title": {"text": "rank, 1 = best"}, "range": [0.5, count + 0.5], "dtick": tick_step},
        yaxis=AXIS | {"tickvals": [*range(count - 1, -1, -1)], "ticktext": list(ranks.methods), "zeroline": False},
    )


def by_head(layers: int, heads: int, words: str, kinds: Sequence[str] = ("",), digits: int = 0) -> Figure:
    """Return an empty heat map by layer and KV head. Thousands of cells share a map, so pages supply the numbers.

    Args:
        words: name of what the numbers count.
        kinds: labels of buttons, each of which shows other numbers.
        digits: decimals of the numbers in the fields.
    """
    trace = {
        "type": "heatmap",
        "coloraxis": "coloraxis",
        "xgap": 1,
        "ygap": 1,
        "hovertemplate": f"layer %{{y}}, KV head %{{x}}: %{{z}} {words}<extra></extra>",
        "texttemplate": f"%{{z:.{digits}f}}" if layers * heads <= MANY_NUMBERS else None,
    }
    buttons = [
        {"label": kind, "method": "restyle", "args": [{"visible": [kind == other for other in kinds]}]}
        for kind in kinds
    ]
    button_menu = {"type": "buttons", "direction": "right", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"}
    return _figure(
        [trace | {"visible": kind == kinds[0]} for kind in kinds],
        height=min(900, 120 + 26 * layers),
        coloraxis={"colorscale": "Cividis", "colorbar": {"title": {"text": words}}},
        updatemenus=[button_menu | {"buttons": buttons}] if len(kinds) > 1 else [],
        margin={"l": 60, "r": 20, "t": 50 if len(kinds) > 1 else 20, "b": 50},
        xaxis=AXIS | {"title": {"text": "KV head"}, "dtick": 4 if heads > 20 else 1, "showgrid": False},
        yaxis=AXIS
        | {"title": {"text": "layer"}, "autorange": "reversed", "dtick": 4 if layers > 40 else 1, "showgrid": False},
    )


def over_image(image: str, edges: tuple[Sequence[float], Sequence[float]]) -> Figure:
    """Return an empty heat map that covers an image; the page supplies its values.

    Args:
        image: address of the image relative to the page.
        edges: edges of the map's columns and of its rows, as fractions of the image's sides.
    """
    hidden_axis = {"visible": False, "fixedrange": True}
    x_edges, y_edges = edges
    trace = {"type": "heatmap", "x": x_edges, "y": y_edges, "z": [[None]], "zmin": 0, "colorscale": "Cividis"}
    trace |= {"opacity": 0.62, "showscale": False}
    trace |= {"hovertemplate": "kept by %{z:.0%} of layers and heads<extra></extra>"}
    source = {"source": image, "xref": "paper", "yref": "paper", "x": 0, "y": 1, "sizex": 1, "sizey": 1}
    return _figure(
        [trace],
        margin=dict.fromkeys("lrtb", 0),
        xaxis=hidden_axis | {"range": [0, 1]},
        yaxis=hidden_axis | {"range": [1, 0]},
        images=[source | {"sizing": "stretch", "layer": "below"}],
    )
