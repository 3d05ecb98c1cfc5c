"""Pictures of diagnostics as the papers' figures have them: by layer here, curves in `diagnostic_curves.py`."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmkv_bench.tables.diagnostic_curves import histogram, lorenz, of_heads, spectrum
from mmkv_bench.tables.diagnostic_rows import Panel
from mmkv_bench.tables.figure import COLOURS, SHAPES

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 3
_INSIDE = 4  # lines whose names find room in a panel
_BAND = "bands: middle half of the samples"
_BUDGETS = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True)
class Drawing:
    """How an analysis is drawn: axes beside each other for one panel, and what is said below."""

    draw: Callable[[Sequence[Axes], Panel], None]
    said: str
    axes: int = 1


def diagnostic_figure(panels: Sequence[Panel]) -> Figure:
    """The picture of the panels of one analysis."""
    from matplotlib.figure import Figure

    drawing = DRAWINGS[panels[0].name]
    across = drawing.axes if drawing.axes > 1 else min(len(panels), _COLUMNS)
    down = len(panels) if drawing.axes > 1 else -(-len(panels) // across)
    size = (max(4.6 * across, 6.4), 3.9 * down + 0.7)
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    grid = figure.subplots(down, across, squeeze=False)
    places = list(grid) if drawing.axes > 1 else [[axes] for axes in grid.ravel()]
    for axes, panel in zip(places, panels, strict=False):
        drawing.draw(axes, panel)
        axes[0].set_title(textwrap.fill(panel.title, 60 if drawing.axes > 1 else 52), fontsize=9.5, loc="left")
        for each in axes:
            each.spines[["top", "right"]].set_visible(False)
    for axes in places[len(panels) :]:
        axes[0].set_visible(False)
    figure.supxlabel(drawing.said, fontsize=9, color="#555555")
    return figure


def by_layer(axes: Axes, panel: Panel, rows: pd.DataFrame, what: str) -> None:
    """Numbers against layers: one line per group of the column `what`, heads averaged, the middle half of samples around it."""
    for place, (label, own) in enumerate(rows.groupby(what, observed=True, sort=True)):
        each = own.groupby(["layer", "sample_id"], observed=True)["value"].mean().groupby(level="layer")
        look = {"color": COLOURS[place % len(COLOURS)], "marker": SHAPES[place % len(SHAPES)]}
        middle, low, high = each.mean(), each.quantile(0.25), each.quantile(0.75)
        axes.plot(middle.index, middle, markersize=5, linewidth=1.6, label=str(label) or None, **look)
        axes.fill_between(middle.index, low, high, color=look["color"], alpha=0.15, linewidth=0)
    _layers(axes, panel)


def _hidden_states(axes: Sequence[Axes], panel: Panel) -> None:
    """Means as lines, one standard deviation to either side as bands; of text and visual tokens apart beside it."""
    grid = panel.rows.groupby(["part", "quantity", "layer"], observed=True)["value"].mean().unstack("layer")
    for each, parts in zip(axes, (("prompt", "answer"), ("text", "visual")), strict=True):
        for place, part in enumerate(part for part in parts if part in grid.index.get_level_values("part")):
            mean, spread = grid.loc[part, "mean"], grid.loc[part, "std"]
            each.plot(mean.index, mean, color=COLOURS[place], marker=SHAPES[place], markersize=5, label=part)
            each.fill_between(mean.index, mean - spread, mean + spread, color=COLOURS[place], alpha=0.1, linewidth=0)
            for end in (mean - spread, mean + spread):
                each.plot(mean.index, end, color=COLOURS[place], linewidth=1, linestyle="--")
        _layers(each, panel)
    ends = [end for each in axes for end in each.get_ylim()]
    for each in axes:
        each.set_ylim(min(ends), max(ends) + 0.15 * (max(ends) - min(ends)))
        if each.lines:  # a prompt of text alone has no parts
            each.legend(frameon=False, fontsize=8.5, loc="upper center", ncols=2)
    axes[0].set_ylabel("input of the query projection")


def _coverage(axes: Sequence[Axes], panel: Panel) -> None:
    """Against the budget, all layers together."""
    (each,), rows = axes, panel.rows
    found = rows.groupby(["part", "budget", "sample_id"], dropna=False, observed=True)["value"].mean().reset_index()
    full = found[found["budget"].isna()]
    if len(full):
        each.axhline(full["value"].mean(), color="black", linestyle="--", linewidth=1.4, label="full")
    own = found[found["budget"].notna()]
    own = own.assign(method=own["part"].astype(str).str.replace(r"@[^ ]*", "", regex=True))
    for place, (method, line) in enumerate(own.groupby("method", sort=True)):
        by = line.groupby("budget")["value"]
        look = {"color": COLOURS[place % len(COLOURS)], "marker": SHAPES[place % len(SHAPES)]}
        each.plot(by.mean().index, by.mean(), markersize=6, linewidth=1.6, label=method, **look)
        each.fill_between(by.mean().index, by.quantile(0.25), by.quantile(0.75), color=look["color"], alpha=0.15)
    budgets = sorted(own["budget"].unique())
    each.set_xscale("log", base=2)
    each.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
    each.set_xticks([], minor=True)
    fractions = (rows["budget_kind"] == "fraction").any()
    each.set_xlabel("fraction of the prompt's entries kept" if fractions else "entries kept per KV head")
    each.set_ylabel("answer's attention on kept entries")
    each.set_ylim(0, 1.02)
    _legend(each)


def _feature_error(axes: Sequence[Axes], panel: Panel) -> None:
    by_layer(axes[0], panel, panel.rows, "part")
    axes[0].set_ylabel("mean absolute error of layer outputs")
    axes[0].set_ylim(bottom=0)


def _entropy(axes: Sequence[Axes], panel: Panel) -> None:
    by_layer(axes[0], panel, panel.rows, "part")
    axes[0].set_ylabel("cross-modal attention entropy [nats]")


def _outliers(axes: Sequence[Axes], panel: Panel) -> None:
    rows = panel.rows.assign(gamma=panel.rows["x"].map("gamma {:g}".format))
    by_layer(axes[0], panel, rows, "gamma")
    axes[0].set_ylabel("outlier channels that proxies reach")
    axes[0].set_ylim(-0.02, 1.02)


def _prefix(axes: Sequence[Axes], panel: Panel) -> None:
    """Kept ratios of every layer, one line a budget, and the Gini coefficients of the attention where they were measured."""
    rows = panel.rows[(panel.rows["quantity"] == "kept_ratio")]
    rows = rows[rows["x"].round(6).isin(_BUDGETS)]
    by_layer(axes[0], panel, rows.assign(budget=rows["x"].map("{:.0%} in all".format)), "budget")
    gini = panel.rows[panel.rows["quantity"] == "gini"].groupby("layer")["value"].mean()
    if len(gini):
        axes[0].plot(gini.index, gini, color="black", linestyle="--", linewidth=1.4, label="Gini of attention")
        _legend(axes[0])
    axes[0].set_ylabel("share of the layer's entries kept")
    axes[0].set_ylim(-0.02, 1.02)


def _layers(axes: Axes, panel: Panel) -> None:
    layers = panel.layers
    axes.set_xticks(layers if len(layers) <= 12 else layers[:: -(-len(layers) // 10)])
    axes.set_xlabel("layer")
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    _legend(axes)


def _legend(axes: Axes) -> None:
    lines = len(axes.get_legend_handles_labels()[1])
    if lines > _INSIDE:
        axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1, 0.5))
    elif lines:
        axes.legend(frameon=False, fontsize=8.5)


DRAWINGS = {
    "hidden_states": Drawing(_hidden_states, "lines: means; dashed: one standard deviation to either side", 2),
    "coverage": Drawing(_coverage, _BAND),
    "histogram": Drawing(histogram, "density of the values, all samples together", 4),
    "outlier_hits": Drawing(_outliers, _BAND),
    "lorenz": Drawing(lorenz, "one line a layer; dashed: all tokens alike"),
    "prefix_search": Drawing(_prefix, _BAND),
    "feature_error": Drawing(_feature_error, _BAND),
    "entropy": Drawing(_entropy, _BAND),
    "cumulative_attention": Drawing(
        of_heads, "one line a KV head, its colour the layer; bold: the flattest and the steepest"
    ),
    "focus": Drawing(of_heads, "one line a KV head, its colour the layer; bold: the most dynamic and the most static"),
    "power_spectrum": Drawing(spectrum, "shares of the energy in 128 bands; left: all layers, then by layer", 3),
}
"""Analysis -> how it is drawn."""
