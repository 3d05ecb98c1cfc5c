"""FlashCache's Figure 2: what is left of the score when a share of the entries is removed, by which of them go first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mmkv_bench.errors import ConfigError
from mmkv_bench.tables.captions import line_label
from mmkv_bench.tables.figure import looks
from mmkv_bench.tables.rows import BASELINE
from mmkv_bench.tables.score_table import ScoreTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FAMILY = "flashcache"


def removal_figure(tables: Sequence[ScoreTable]) -> Figure:
    """One panel per table, a line per variant of FlashCache, the full cache where nothing is removed.

    Raises:
        ConfigError: no table has one at a budget that is a fraction.
    """
    from matplotlib.figure import Figure

    drawn = [table for table in tables if table.axis == "fraction" and any(m.base == FAMILY for m in table.methods)]
    if not drawn:
        raise ConfigError(
            f"The rows hold no {FAMILY} at budgets that are fractions; run variants of it with removal=largest, random and "
            "smallest (methods.flashcache.dba=false) at budget=[0.8,0.6,0.4,0.2]"
        )
    styles = looks(method for table in drawn for method in table.methods if method.base == FAMILY)
    figure = Figure(figsize=(max(5.0 * len(drawn), 6.4), 4.3), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(drawn), sharey=True, squeeze=False)[0]
    for axes, table in zip(panels, drawn, strict=True):
        _draw(axes, table, styles)
    panels[0].set_ylabel(drawn[0].metric.replace("_", " "))
    panels[0].legend(frameon=False, fontsize=9)
    return figure


def _draw(axes: Axes, table: ScoreTable, styles: dict[str, tuple[str, str]]) -> None:
    full = next((table.entries[m.label, ""].value for m in table.methods if m.base == BASELINE), None)
    for method in table.methods:
        if method.base != FAMILY:
            continue
        entries = [(1 - float(budget), table.entry(method.label, budget)) for budget in table.budgets]
        points = [(removed, entry) for removed, entry in entries if entry is not None and entry.value is not None]
        start = [] if full is None else [(0.0, full)]
        line = sorted(
            [*start, *((removed, float(entry.value)) for removed, entry in points if entry.value is not None)]
        )
        colour, shape = styles[method.label]
        axes.plot(*zip(*line, strict=True), color=colour, marker=shape, linewidth=1.8, label=line_label(method))
        known = sorted((at, e.low, e.high) for at, e in points if e.low is not None and e.high is not None)
        if known:
            axes.fill_between(*zip(*known, strict=True), color=colour, alpha=0.15, linewidth=0)
    axes.set_xlim(-0.02, 1.0)
    axes.set_xlabel("share of the entries removed")
    axes.set_title(table.dataset, fontsize=12)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
