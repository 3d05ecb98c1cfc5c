"""Accuracy against budget: one panel per dataset, a line with its interval band per method, `full` as a dashed line."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import ConfigError
from mmkv_bench.tables.captions import caption, line_label, size_text
from mmkv_bench.tables.line import Line
from mmkv_bench.tables.notes import OVER
from mmkv_bench.tables.rows import BASELINE
from mmkv_bench.tables.score_table import Entry, ScoreTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart with every common colour vision; shapes repeat the distinction without colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D1F", "#5B3A8E")
SHAPES = "osD^vP*X"
_FIXED = {BASELINE: ("black", "*"), "random": ("#7F7F7F", "x")}
_DIFFERS_BY_PANEL = ("n=", "dataset_fingerprint=")


def accuracy_figure(tables: Sequence[ScoreTable]) -> Figure:
    """One panel per table, side by side with a common score axis and one legend.

    All tables must have budgets of the same kind; a method keeps colour and shape in all panels.
    Raises ConfigError when a table has no budgets, when kinds differ, or when a cell has no headline.
    """
    from matplotlib.figure import Figure

    _check(tables)
    styles = _styles(tables)
    figure = Figure(figsize=(5.2 * max(len(tables), 2) - 0.4, 4.6), dpi=150, layout="constrained")
    axes = figure.subplots(1, len(tables), sharey=True, squeeze=False)[0]
    for panel, table in zip(axes, tables, strict=True):
        _draw(panel, table, tables, styles)
    axes[0].set_ylabel(tables[0].metric.replace("_", " "))
    handles: dict[str, Any] = {}
    for panel in axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=min(len(handles), 4), frameon=False, fontsize=10.5
    )
    figure.suptitle(_caption(tables), fontsize=9, color="#555555")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
    return figure


def save(figure: Figure, stem: Path, *, plain: bool = False) -> list[Path]:
    """Writes `<stem>.png` and `<stem>.svg`; the same figure always gives the same SVG. Returns the paths.

    plain: the SVG alone, its words as text: small, and whoever searches it finds them.
    """
    from matplotlib import rc_context
    from matplotlib.text import Text

    for text in figure.findobj(Text):  # names are no formulas; those of log axes' ticks are
        if "$" in text.get_text() and "mathdefault" not in text.get_text():
            text.set_parse_math(False)
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in (("svg",) if plain else ("png", "svg"))]
    with rc_context({"svg.hashsalt": "mmkv_bench", "svg.fonttype": "none" if plain else "path"}):
        for path in paths:
            gone = ("Software",) if path.suffix == ".png" else ("Date", "Creator")
            figure.savefig(path, metadata=dict.fromkeys(gone))
    return paths


def _check(tables: Sequence[ScoreTable]) -> None:
    for table in tables:
        if not table.budgets:
            raise ConfigError(f"{table.dataset} holds no cell with a budget, so there is nothing to draw against one.")
        for (label, _), entry in table.entries.items():
            if entry.value is None:
                raise ConfigError(
                    f"{table.dataset}: {label} is ok on {entry.scores.n_ok} of {entry.scores.n} samples, so it has no "
                    "score to draw: run again with retry=oom,timeout,nan,error, or read the table instead."
                )
    if len({table.axis for table in tables}) > 1:
        raise ConfigError("Budgets in entries and in fractions cannot share a figure: name tables of one kind.")


def _styles(tables: Sequence[ScoreTable]) -> dict[str, tuple[str, str]]:
    """Colour and marker per method label, the same in all panels and independent of the order of tables."""
    return looks([method for table in tables for method in table.methods if method.budgeted])


def looks(methods: Iterable[Line]) -> dict[str, tuple[str, str]]:
    """Label -> colour and marker of lines."""
    return looks_of({method.label: method.base for method in methods})


def looks_of(kinds: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Label -> colour and marker: black for `full`, grey for `random`, the others by name, 64 of them apart.

    kinds: label -> family.
    """
    others = [label for label, base in sorted(kinds.items()) if base not in _FIXED]
    found = {label: _FIXED[base] for label, base in kinds.items() if base in _FIXED}
    for place, label in enumerate(others):
        turn, step = divmod(place, len(COLOURS))
        found[label] = COLOURS[step], SHAPES[(step + turn) % len(SHAPES)]
    return found


def _legend(method: Line, tables: Sequence[ScoreTable]) -> str:
    """The method's label, with a dagger when any of its cells in the figure is over its budget."""
    entries = [entry for table in tables for (label, _), entry in table.entries.items() if label == method.label]
    return line_label(method) + (f" {OVER}" if any(entry.audit.over for entry in entries) else "")


def _draw(axes: Axes, table: ScoreTable, tables: Sequence[ScoreTable], styles: dict[str, tuple[str, str]]) -> None:
    for method in table.methods:
        if not method.budgeted:
            _draw_level(axes, method, table.entries[method.label, ""])
            continue
        colour, shape = styles[method.label]
        points = [(b, table.entries[method.label, b]) for b in table.budgets if (method.label, b) in table.entries]
        x = [float(budget) for budget, _ in points]
        axes.plot(
            x,
            [entry.value for _, entry in points],
            color=colour,
            marker=shape,
            markersize=7,
            markeredgecolor="white" if shape != "x" else colour,
            markeredgewidth=0.8 if shape != "x" else 1.6,
            linewidth=1.8,
            label=_legend(method, tables),
        )
        _band(axes, x, [entry for _, entry in points], colour)
    axes.set_xscale("log", base=2)
    ticks = [float(budget) for budget in table.budgets]
    axes.set_xticks(ticks, table.budgets)
    axes.set_xticks([], minor=True)
    names = {"entries": "entries kept per KV head", "fraction": "fraction of the prompt's entries kept"}
    axes.set_xlabel(names[table.axis], fontsize=10.5)
    axes.set_title(table.dataset, fontsize=12)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    values = [entry.headline for entry in table.entries.values()]
    if min(values) >= 0 and max(values) <= 1:
        axes.set_ylim(-0.03, 1.03)


def _band(axes: Axes, x: Sequence[float], entries: Sequence[Entry], colour: str) -> None:
    drawn = [(at, entry.low, entry.high) for at, entry in zip(x, entries, strict=True) if entry.low is not None]
    if drawn:
        at, low, high = zip(*drawn, strict=True)
        axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)


def _draw_level(axes: Axes, method: Line, entry: Entry) -> None:
    colour = "black" if method.base == BASELINE else "#999999"
    axes.axhline(entry.value, color=colour, linestyle="--", linewidth=1.4, label=f"{line_label(method)} (no budget)")
    if entry.low is not None:
        axes.axhspan(entry.low, entry.high, color=colour, alpha=0.08, linewidth=0)


def _caption(tables: Sequence[ScoreTable]) -> str:
    parts = caption(tables[0], tables).split("; ")[1:]
    shared = [part for part in parts if not part.startswith(_DIFFERS_BY_PANEL)]
    sizes = ", ".join(f"{table.dataset} {size_text(table)}" for table in tables)
    if any(entry.audit.over for table in tables for entry in table.entries.values()):
        shared.append(f"{OVER} more entries resident than the budget")
    return textwrap.fill("; ".join([sizes, *shared]), 140)
