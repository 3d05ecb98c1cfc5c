"""Figures of costs against prompt length, and of scores against costs with the Pareto front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mmkv_bench.errors import ConfigError
from mmkv_bench.statistics.metric_kinds import lower_is_better
from mmkv_bench.tables.cost_rows import Cost
from mmkv_bench.tables.costs import TIMED, CostEntry, CostTable, Key, cell_key, cost_tables
from mmkv_bench.tables.figure import (
    MARKERS,
    Look,
    band,
    canvas,
    legend_below,
    log2_axis,
    looks,
    point_style,
    small_print,
)
from mmkv_bench.tables.score_table import Entry, Line, ScoreTable
from mmkv_bench.tables.stored_rows import BASELINE
from mmkv_bench.tables.text import caption, cell_words, context_words, line_label, number, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_STROKES = ("-", "--", "-.", ":")
_AXES = {"entries": "entries", "fraction": "shares of the prompt", "none": "nothing"}
_PANELS_ACROSS = 3
_CAPTION_LETTERS_PER_INCH = 13  # letters per inch of the small print
_MOST_BANDS = 4
"""Up to this number of lines in a panel, intervals are drawn as bands; with more lines, as bars side by side."""
_BAR_SHIFT = 0.02  # distance between the bars of two lines, in doublings of the length


def length_figure(tables: Sequence[CostTable], cost: Cost) -> Figure:
    """Draw a cost against the prompt length. A figure of the time per token has the rooflines too.

    Raises:
        ConfigError: the cost was not measured at any length.
    """
    panels: dict[tuple[str, ...], list[CostTable]] = {}
    for table in tables:
        if table.per_pass and any(cost.key in row for row in table.entries.values()):
            key = (*table.context.values(), str(table.shape["dataset"]), str(table.shape["batch"]), table.axis)
            panels.setdefault(key, []).append(table)
    if not panels:
        raise ConfigError(
            f"These rows have no {cost.name} by prompt length; run scenario=efficiency with lengths=[2048,8192,...] first"
        )
    all_tables = [table for group in panels.values() for table in group]
    line_styles = _line_styles(all_tables)
    axes_of = {key[:-1]: {other[-1] for other in panels if other[:-1] == key[:-1]} for key in panels}
    values = [row[cost.key].value for table in all_tables for row in table.entries.values() if cost.key in row]
    unit_scale = unit_of(cost.unit, [value for value in values if value is not None])
    n_columns = min(len(panels), _PANELS_ACROSS)
    n_rows = -(-len(panels) // n_columns)
    figure, grid = canvas(n_rows, n_columns, (max(5.2 * n_columns, 7.6), 4.3 * n_rows + 0.8), len(panels))
    for axes, (key, group) in zip(grid, panels.items(), strict=False):
        _draw_lengths(axes, group, cost, unit_scale, line_styles)
        kind = f", {group[0].shape['dataset']}" * (len({table.shape["dataset"] for table in all_tables}) > 1)
        title = f"{group[0].context['model']}{kind}, batch {group[0].shape['batch']}"
        title += f", budgets in {_AXES[group[0].axis]}" if len(axes_of[key[:-1]]) > 1 else ""
        axes.set_title(title, fontsize=11)
    legend_below(figure, grid[: len(panels)])
    context_texts = context_words(
        all_tables[0].context, all_tables[0].readings, [table.context for table in all_tables]
    )[1:]
    context_texts += [f"device={name}" for name in dict.fromkeys(table.context["device"] for table in all_tables)]
    context_texts += ["medians with their intervals", *_failures(all_tables, cost)]
    disturbed = next((table.disturbed for table in all_tables if table.disturbed), ())
    context_texts += [f"disturbed: {', '.join(disturbed)}"] if disturbed else []
    small_print(figure, context_texts, int(_CAPTION_LETTERS_PER_INCH * figure.get_figwidth()))
    return figure


def _line_styles(tables: Sequence[CostTable]) -> dict[tuple[str, str], dict[str, str]]:
    """Return (label, budget) -> plot style. The method sets colour and marker; the budget shifts the marker and sets dashes."""
    methods = looks(method.label for table in tables for method in table.methods)
    lines = {(table.axis, method.label, budget): None for table in tables for method, budget in table.lines()}
    budgets = sorted({(axis, float(budget), budget) for axis, _, budget in lines if budget})
    marker_shift_of = {budget: marker_shift for marker_shift, (_, _, budget) in enumerate(budgets)}
    styles, markers = {}, [*MARKERS]
    for _, label, budget in lines:
        colour, shape = methods[label]
        marker_shift = marker_shift_of.get(budget, 0)
        marker = markers[(markers.index(shape) + marker_shift) % len(markers)] if shape in markers else shape
        styles[label, budget] = {"color": colour, "marker": marker, "linestyle": _STROKES[marker_shift % len(_STROKES)]}
    return styles


def _draw_lengths(
    axes: Axes,
    tables: Sequence[CostTable],
    cost: Cost,
    scale: tuple[float, str],
    styles: Mapping[tuple[str, str], Mapping[str, str]],
) -> None:
    size, unit = scale
    lines: dict[tuple[str, str], Line] = {}
    for table in tables:
        lines |= {(method.label, budget): method for method, budget in table.lines()}
    for place, (key, method) in enumerate(lines.items()):
        colour = styles[key]["color"]
        entries = [(int(t.shape["prompt_tokens"]), t.entries.get(key, {}).get(cost.key), t) for t in tables]
        points = [(tokens, e, t) for tokens, e, t in entries if e is not None and e.value is not None]
        if not points:
            continue
        y = [e.value / size for _, e, _ in points if e.value is not None]
        name = line_label(method) + (f", {key[1]}" if key[1] else "")
        axes.plot([tokens for tokens, _, _ in points], y, markersize=7, linewidth=1.8, label=name, **styles[key])
        _intervals(axes, points, size, colour, place, len(lines))
        roofline_points = [(tokens, t.least[key] / size) for tokens, _, t in points if key in t.least]
        if cost.key == TIMED and roofline_points:
            label = "roofline, in the line's colour" if key[0] == BASELINE else "_"
            axes.plot(
                *zip(*roofline_points, strict=True), color=colour, linestyle=(0, (1, 1.5)), linewidth=1.2, label=label
            )
    ticks = sorted({int(table.shape["prompt_tokens"]) for table in tables})
    tick_labels = [f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens) for tokens in ticks]
    log2_axis(axes, ticks, tick_labels, "prompt tokens")
    axes.set_ylim(bottom=0)
    y_label = "ms/token" if cost.key == TIMED and unit == "ms" else f"{cost.name} [{unit}]" if unit else cost.name
    axes.set_ylabel(y_label, fontsize=10.5)


def _intervals(
    axes: Axes, points: Sequence[tuple[int, CostEntry, CostTable]], size: float, colour: str, number: int, lines: int
) -> None:
    """Draw the intervals of one line as a band, or as shifted bars if the panel has many lines.

    points: (prompt length, cost, table) of each point. size: unit of the axis. number, lines: position of the line in the
        panel, and number of lines.
    """
    interval_ends = [
        (tokens, e.low / size, e.high / size) for tokens, e, _ in points if e.low is not None and e.high is not None
    ]
    if interval_ends and lines <= _MOST_BANDS:
        band(axes, interval_ends, colour)
    elif interval_ends:
        prompt_lengths, low, high = zip(*interval_ends, strict=True)
        shift_factor = 2 ** (_BAR_SHIFT * (number - (lines - 1) / 2))
        axes.vlines(
            [tokens * shift_factor for tokens in prompt_lengths], low, high, color=colour, alpha=0.55, linewidth=1.3
        )


def _failures(tables: Sequence[CostTable], cost: Cost) -> list[str]:
    """Return one text that names all failures with line, prompt length, batch and status; [] without failures."""
    failure_texts = [
        f"{line_label(method)} {budget} at {table.shape['prompt_tokens']} x {table.shape['batch']}: {entry.failed}"
        for table in tables
        for method, budget in table.lines()
        if (entry := table.entries[method.label, budget].get(cost.key)) is not None and entry.failed
    ]
    return ["no point: " + ", ".join(failure_texts)] if failure_texts else []


_FRONT_COLOUR = "#999999"
_MOST_NAMED_POINTS = 12  # with more points, only those on the front are labelled with their budgets
_COST_LABELS = {"tpot_s": "time per token", "ttft_s": "time to first token", "bytes_held": "bytes that the cache holds"}


@dataclass(frozen=True)
class Point:
    """A method at a budget in the figure of scores against costs.

    best: True on the Pareto front: every other point with a better score has a worse cost, and vice versa.
    """

    method: Line
    budget: str
    cost: CostEntry
    score: Entry
    best: bool = False

    @property
    def x(self) -> float:
        assert self.cost.value is not None, "a cell without a cost is no point"
        return self.cost.value

    @property
    def y(self) -> float:
        return self.score.headline


@dataclass(frozen=True)
class Front:
    """One panel: the scores of a table against one cost.

    source: text on the rows from which the costs come. alone: methods and budgets with a score but no cost.
    disturbed: causes that disturbed the timed passes, such as a busy machine.
    """

    table: ScoreTable
    cost: Cost
    source: str
    points: tuple[Point, ...]
    alone: tuple[str, ...]
    disturbed: tuple[str, ...] = ()


def fronts(
    tables: Sequence[ScoreTable],
    costs: Sequence[Cost],
    roots: Sequence[Path],
    tokens: int | None = None,
    batch: int | None = None,
    prompts: str | None = None,
) -> list[Front]:
    """Join the scores of each table with each cost (`cell_key`), and return one `Front` per table and cost.

    Costs come from the answers to the table's dataset, or else from timed passes (`scenario=efficiency`).

    Args:
        roots: folders of rows with costs.
        tokens, batch, prompts: prompt length, batch and kind of prompt of the passes; required if passes differ in them.

    Raises:
        ConfigError: no method of a table has score and cost, no pass has the given shape, or a required argument is missing.
    """
    known_tables = [table for root in roots for table in cost_tables(root, (), beside=costs)]
    answers = [table for table in known_tables if not table.per_pass]
    wanted_shape = {
        ("--prompts", "dataset"): None if prompts is None else f"made_up_{prompts}",
        ("--tokens", "prompt_tokens"): tokens,
        ("--batch", "batch"): batch,
    }
    passes = _of_shape([table for table in known_tables if table.per_pass], wanted_shape)
    return [_front(table, cost, answers, passes) for table in tables for cost in costs]


def _of_shape(tables: Sequence[CostTable], wanted: Mapping[tuple[str, str], int | str | None]) -> list[CostTable]:
    """Return the tables of passes with the wanted prompt shape.

    wanted: (command-line flag, key of `CostTable.shape`) -> value; None if the user gave none.

    Raises:
        ConfigError: no pass has the value, or the passes have several values and the user gave none.
    """
    passes = list(tables)
    for (flag, name), value in wanted.items():
        present = sorted({table.shape[name] for table in passes}, key=lambda value: (str(type(value)), value))
        shape_names = [str(value).removeprefix("made_up_") for value in present]
        if value is None and len(present) > 1:
            raise ConfigError(
                f"The passes differ in {name} ({', '.join(shape_names)}); choose one with {flag} {shape_names[-1]}"
            )
        if value is not None and passes and value not in present:
            asked_value = str(value).removeprefix("made_up_")
            raise ConfigError(
                f"{flag} {asked_value}: the passes have {name} {', '.join(shape_names)}; choose one of these"
            )
        passes = [table for table in passes if value is None or table.shape[name] == value]
    return passes


def _front(table: ScoreTable, cost: Cost, answers: Sequence[CostTable], passes: Sequence[CostTable]) -> Front:
    shape_texts = {f"{each.shape['prompt_tokens']} prompt tokens, batch {each.shape['batch']}" for each in passes}
    same_data = [other for other in answers if other.context["dataset"] == table.dataset]
    for source, tables in (("these answers", same_data), (f"passes of {'; '.join(sorted(shape_texts))}", passes)):
        entries = {
            cell_key(other.context, method, other.axis, budget): entry
            for other in tables
            for method, budget in other.lines()
            if (entry := other.entries[method.label, budget].get(cost.key)) is not None and entry.value is not None
        }
        joined_front = _join_scores(table, cost, entries, source)
        if joined_front.points and tables is passes and cost.unit in ("seconds", "tokens/s"):
            disturbed = dict.fromkeys(word for other in tables for word in other.disturbed)
            repeat_counts = sorted({entry.n for entry in entries.values()})
            repeats = " to ".join(map(str, dict.fromkeys((repeat_counts[0], repeat_counts[-1]))))
            source_text = f"{source}, medians of {repeats} repeat{'s' * (repeat_counts[-1] > 1)}"
            source_text += (
                "" if any(point.cost.low is not None for point in joined_front.points) else ", too few for an interval"
            )
            return replace(joined_front, source=source_text, disturbed=tuple(disturbed))
        if joined_front.points:
            return joined_front
    raise ConfigError(
        f"No cell of {table.dataset} has {cost.name}: answers of runs that share prefills have no times per method; run "
        "scenario=efficiency with the same model, methods and budgets, and give its rows with --costs"
    )


def _join_scores(table: ScoreTable, cost: Cost, entries: Mapping[Key, CostEntry], source: str) -> Front:
    points, unmatched = [], []
    for method, budget, score in table.cells:
        if score.value is None:
            continue
        cost_entry = entries.get(cell_key(table.context, method, table.axis, budget))
        if cost_entry is None or cost_entry.value is None:
            unmatched.append(cell_words(line_label(method), budget))
            continue
        points.append(Point(method, budget, cost_entry, score))
    return Front(table, cost, source, _mark_front(points, lower_is_better(table.metric), cost), tuple(unmatched))


def _mark_front(points: Sequence[Point], falling: bool, cost: Cost) -> tuple[Point, ...]:
    """Return the points, cheapest first, with `best` set on the Pareto front."""
    rate = -1.0 if cost.unit == "tokens/s" else 1.0  # for a rate, more is better
    sign = -1.0 if falling else 1.0
    marked_points: list[Point] = []
    best_score, best_cost = float("-inf"), float("nan")
    for point in sorted(points, key=lambda point: (rate * point.x, -sign * point.y)):
        if sign * point.y > best_score:
            best_score, best_cost = sign * point.y, point.x
        marked_points.append(replace(point, best=(sign * point.y, point.x) == (best_score, best_cost)))
    return tuple(marked_points)


def front_figure(fronts: Sequence[Front]) -> Figure:
    """Draw the fronts: one row of panels per table, one column per cost, one point per method and budget.

    Raises:
        ConfigError: `fronts` is empty.
    """
    if not fronts:
        raise ConfigError("There is no table of scores to draw; give rows that are scored.")
    tables = list({id(front.table): front.table for front in fronts}.values())
    costs = list(dict.fromkeys(front.cost.key for front in fronts))
    styles = looks(point.method.label for front in fronts for point in front.points)
    size = (max(5.0 * len(costs), 7.6), 4.1 * len(tables) + 0.9)
    figure, panels = canvas(len(tables), len(costs), size, sharey="row")
    for front in fronts:
        row = [table is front.table for table in tables].index(True)
        _draw_front(panels[row * len(costs) + costs.index(front.cost.key)], front, styles)
    for panel, table in zip(panels[:: len(costs)], tables, strict=True):
        panel.set_ylabel(f"{table.dataset}\n{table.metric.replace('_', ' ')}", fontsize=10.5)
    legend_below(figure, panels)
    sources = dict.fromkeys(f"{front.cost.name}: {front.source}" for front in fronts)
    disturbed = dict.fromkeys(word for front in fronts for word in front.disturbed)
    disturbance_texts = [f"disturbed: {', '.join(disturbed)}"] if disturbed else []
    small_print(figure, [caption(tables[0], tables), *sources, *disturbance_texts], 125)
    return figure


def _draw_front(axes: Axes, front: Front, styles: Mapping[str, Look]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    size, unit = unit_of(front.cost.unit, [point.x for point in front.points])
    front_points = [point for point in front.points if point.best]
    x, y = [point.x / size for point in front_points], [point.y for point in front_points]
    axes.step(x, y, where="post", color=_FRONT_COLOUR, linewidth=1.4, zorder=1, label="Pareto front")
    for label in dict.fromkeys(point.method.label for point in front.points):
        points = [point for point in front.points if point.method.label == label]
        colour, shape = styles[label]
        style = {"color": colour, "linewidth": 1.2, "alpha": 0.6, "zorder": 2}
        for point in points:
            if point.score.low is not None:
                axes.vlines(point.x / size, point.score.low, point.score.high, **style)
            if point.cost.low is not None and point.cost.high is not None:
                axes.hlines(point.y, point.cost.low / size, point.cost.high / size, **style)
        marker = {"markersize": 11 if shape == "*" else 8, "label": line_label(points[0].method), "zorder": 3}
        x, y = [point.x / size for point in points], [point.y for point in points]
        axes.plot(x, y, linestyle="none", **point_style(colour, shape), **marker)
    for point in front_points if len(front.points) > _MOST_NAMED_POINTS else front.points:
        position, offset = (point.x / size, point.y), {"textcoords": "offset points", "xytext": (6, -10)}
        axes.annotate(point.budget, position, fontsize=8, color="#444444", **offset)
    largest_cost, smallest_cost = max(point.x for point in front.points), min(point.x for point in front.points)
    if smallest_cost > 0 and largest_cost / smallest_cost > 8:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(float(f"{value:.3g}"))))
        axes.xaxis.set_minor_formatter(NullFormatter())
    name = _COST_LABELS.get(front.cost.key, front.cost.name)
    axes.set_xlabel(f"{name} [{unit}]" if unit else name, fontsize=10.5)
    if front.cost.unit == "tokens/s":
        axes.invert_xaxis()  # the cheaper side is on the left in every panel
    axes.grid(color="#E3E3E3", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
