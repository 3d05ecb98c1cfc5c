"""Figures of diagnostics (such as attention entropy), as papers print them: one panel per model, dataset and setting."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmkv_bench.errors import ConfigError
from mmkv_bench.store.store import Store
from mmkv_bench.tables.figure import COLOURS as HUES
from mmkv_bench.tables.figure import MARKERS, canvas, log2_axis, looks, plain
from mmkv_bench.tables.score_table import AXES
from mmkv_bench.tables.stored_rows import choose

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = tuple(HUES.values())

BESIDE = {"prefix_search": "lorenz"}
"""Analysis -> another analysis whose rows are drawn into the same panel."""
_PANEL = ("model", "model_fingerprint", "dtype", "dataset", "dataset_fingerprint", "versions", "setting")
_PANELS_ACROSS = 3
_MOST_LINES_INSIDE = 4  # largest number of lines whose legend fits into a panel
_MOST_TICKS = 12  # largest number of layers that all have a tick
_LEGEND_OF_BAND = "bands: middle half of the samples"
_BUDGETS = (0.1, 0.3, 0.5, 0.7, 0.9)
_COLOUR_MAP = "viridis"
_HEAD_LABELS = {
    "cumulative_attention": ("share of the prompt's keys, largest first", "share of the text's attention"),
    "focus": ("share of the prompt's tokens, most focused first", "share of the answer's focuses"),
}


@dataclass(frozen=True)
class Panel:
    """Data of one panel: an analysis of one model, dataset and setting.

    rows: rows of `diagnostics`, also of the analysis `BESIDE` this one, with columns `budget` and `budget_kind` of the method
        (null without a method).
    """

    name: str
    title: str
    rows: pd.DataFrame

    @property
    def layers(self) -> list[int]:
        """Layers that have values, ascending."""
        return sorted(int(layer) for layer in self.rows["layer"].dropna().unique())


@dataclass(frozen=True)
class Drawing:
    """Style of an analysis. draw: draws a panel. legend: text below the figure. axes: number of axes of a panel."""

    draw: Callable[[Sequence[Axes], Panel], None]
    legend: str
    axes: int = 1


def panels(root: Path, name: str, datasets: Sequence[str] | None = None) -> list[Panel]:
    """Return the panels of the analysis `name` in a store, one per model, dataset and setting.

    datasets: datasets to draw; None: all.

    Raises:
        ConfigError: the store has no rows of the analysis or of one of `datasets`.
    """
    all_rows = Store(root).diagnostics(coded=True).to_pandas()
    if not (all_rows["name"] == name).any():
        names_present = ", ".join(sorted(map(str, all_rows["name"].unique()))) or "none"
        raise ConfigError(
            f"'{root}' has no rows of {name} (it has: {names_present}); run `mmkv-bench diagnose {name}` to make some"
        )
    return panels_of(all_rows[choose(all_rows["dataset"], datasets, "dataset")], name)


def panels_of(every: pd.DataFrame, name: str) -> list[Panel]:
    """Return the panels of the analysis `name`. every: rows of the table `diagnostics`."""
    rows = every[every["name"].isin([name, BESIDE.get(name, name)])]
    settings = {text: json.loads(text) for text in rows["settings"].unique()}
    methods = {text: values.pop("method", {}) for text, values in settings.items()}
    texts = rows["settings"].astype(str)
    rows = rows.assign(
        setting=texts.map({text: json.dumps(values, sort_keys=True) for text, values in settings.items()}),
        budget=texts.map({text: float(method["budget"]) if method else None for text, method in methods.items()}),
        budget_kind=texts.map({text: method.get("budget_kind") for text, method in methods.items()}),
    )
    panel_groups = [(key, own) for key, own in rows.groupby(list(_PANEL), observed=True) if (own["name"] == name).any()]
    return [Panel(name, _title(own, key, [other for other, _ in panel_groups]), own) for key, own in panel_groups]


def _title(rows: pd.DataFrame, key: Sequence[str], every: Sequence[Sequence[str]]) -> str:
    samples = int(rows["sample_id"].nunique())
    title_lines = [f"{key[0]}, {key[3]}, {samples} {'sample' if samples == 1 else 'samples'}"]
    title_lines += ["random weights"] * (json.loads(str(key[-1])).get("weights") == "random")
    same_model_panels = [other for other in every if (other[0], other[3]) == (key[0], key[3])]
    title_lines += [
        f"{name} {key[at]}" for at, name in enumerate(_PANEL) if len({other[at] for other in same_model_panels}) > 1
    ]
    return "; ".join(title_lines)


def diagnostic_figure(panels: Sequence[Panel]) -> Figure:
    """Draw all panels of one analysis as one figure."""
    drawing = DRAWINGS[panels[0].name]
    axes_in_row = drawing.axes > 1
    n_columns = drawing.axes if axes_in_row else min(len(panels), _PANELS_ACROSS)
    n_rows = len(panels) if axes_in_row else -(-len(panels) // n_columns)
    figure, axes = canvas(
        n_rows, n_columns, (max(4.6 * n_columns, 6.4), 3.9 * n_rows + 0.7), len(panels) * drawing.axes
    )
    for number, panel in enumerate(panels):
        group = axes[number * drawing.axes : (number + 1) * drawing.axes]
        drawing.draw(group, panel)
        group[0].set_title(textwrap.fill(panel.title, 60 if axes_in_row else 52), fontsize=9.5, loc="left")
        for each in group:
            each.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(drawing.legend, fontsize=9, color="#555555")
    return figure


def _look(place: int) -> dict[str, Any]:
    return {"color": COLOURS[place % len(COLOURS)], "marker": tuple(MARKERS)[place % len(MARKERS)]}


def _some(layers: Sequence[int]) -> list[int]:
    return list(layers if len(layers) <= _MOST_TICKS else layers[:: -(-len(layers) // 10)])


def _layer_axis(axes: Axes, panel: Panel) -> None:
    axes.set_xticks(_some(panel.layers))
    axes.set_xlabel("layer")
    plain(axes)
    _legend(axes)


def _legend(axes: Axes) -> None:
    lines = len(axes.get_legend_handles_labels()[1])
    outside_placement = {"loc": "center left", "bbox_to_anchor": (1, 0.5)} if lines > _MOST_LINES_INSIDE else {}
    if lines:
        axes.legend(frameon=False, fontsize=8.5, **outside_placement)


def _by_layer(axes: Axes, panel: Panel, rows: pd.DataFrame, column: str, label: str) -> None:
    """Draw a line of means over samples against the layer for each value of `column`, with a band of the middle half."""
    for place, (name, group) in enumerate(rows.groupby(column, observed=True, sort=True)):
        samples = group.groupby(["layer", "sample_id"], observed=True)["value"].mean().groupby(level="layer")
        middle, low, high = samples.mean(), samples.quantile(0.25), samples.quantile(0.75)
        axes.plot(middle.index, middle, markersize=5, linewidth=1.6, label=str(name) or None, **_look(place))
        axes.fill_between(middle.index, low, high, color=_look(place)["color"], alpha=0.15, linewidth=0)
    _layer_axis(axes, panel)
    axes.set_ylabel(label)


def _hidden_states(axes: Sequence[Axes], panel: Panel) -> None:
    """Draw means and standard deviations by layer: of prompt and answer, and beside them of text and visual tokens."""
    grid = panel.rows.groupby(["part", "quantity", "layer"], observed=True)["value"].mean().unstack("layer")
    for each, parts in zip(axes, (("prompt", "answer"), ("text", "visual")), strict=True):
        for place, part in enumerate(part for part in parts if part in grid.index.get_level_values("part")):
            mean, spread = grid.loc[part, "mean"], grid.loc[part, "std"]
            each.plot(mean.index, mean, markersize=5, label=part, **_look(place))
            each.fill_between(mean.index, mean - spread, mean + spread, color=COLOURS[place], alpha=0.1, linewidth=0)
            for end in (mean - spread, mean + spread):
                each.plot(mean.index, end, color=COLOURS[place], linewidth=1, linestyle="--")
        _layer_axis(each, panel)
    axis_limits = [end for each in axes for end in each.get_ylim()]
    for each in axes:
        each.set_ylim(min(axis_limits), max(axis_limits) + 0.15 * (max(axis_limits) - min(axis_limits)))
        if each.lines:  # a prompt of text alone has no parts
            each.legend(frameon=False, fontsize=8.5, loc="upper center", ncols=2)
    axes[0].set_ylabel("input of the query projection")


def _coverage(axes: Sequence[Axes], panel: Panel) -> None:
    (each,), rows = axes, panel.rows
    means = rows.groupby(["part", "budget", "sample_id"], dropna=False, observed=True)["value"].mean().reset_index()
    full, methods = means[means["budget"].isna()], means[means["budget"].notna()]
    if len(full):
        each.axhline(full["value"].mean(), color="black", linestyle="--", linewidth=1.4, label="full")
    names = methods["part"].astype(str).str.replace(r"@[^ ]*", "", regex=True)
    styles = looks(map(str, names.unique()))
    for method, line in methods.groupby(names, sort=True):
        values_by_budget, look = line.groupby("budget")["value"], styles[str(method)]
        style = {"color": look.colour, "marker": look.marker}
        each.plot(
            values_by_budget.mean().index, values_by_budget.mean(), markersize=6, linewidth=1.6, label=method, **style
        )
        low, high = values_by_budget.quantile(0.25), values_by_budget.quantile(0.75)
        each.fill_between(low.index, low, high, color=look.colour, alpha=0.15)
    budgets = sorted(methods["budget"].unique())
    budget_kind = "fraction" if (rows["budget_kind"] == "fraction").any() else "entries"
    log2_axis(each, budgets, [f"{budget:g}" for budget in budgets], AXES[budget_kind])
    each.set(ylabel="answer's attention on kept entries", ylim=(0, 1.02))
    _legend(each)


def _parts(axes: Sequence[Axes], panel: Panel, label: str, bottom: float | None = None) -> None:
    _by_layer(axes[0], panel, panel.rows, "part", label)
    axes[0].set_ylim(bottom=bottom)


def _outliers(axes: Sequence[Axes], panel: Panel) -> None:
    rows = panel.rows.assign(gamma=panel.rows["x"].map("gamma {:g}".format))
    _by_layer(axes[0], panel, rows, "gamma", "outlier channels that proxies reach")
    axes[0].set_ylim(-0.02, 1.02)


def _prefix(axes: Sequence[Axes], panel: Panel) -> None:
    rows = panel.rows[panel.rows["quantity"] == "kept_ratio"]
    rows = rows[rows["x"].round(6).isin(_BUDGETS)]
    rows = rows.assign(budget=rows["x"].map("{:.0%} in all".format))
    _by_layer(axes[0], panel, rows, "budget", "share of the layer's entries kept")
    gini = panel.rows[panel.rows["quantity"] == "gini"].groupby("layer")["value"].mean()
    if len(gini):
        axes[0].plot(gini.index, gini, color="black", linestyle="--", linewidth=1.4, label="Gini of attention")
        _legend(axes[0])
    axes[0].set_ylim(-0.02, 1.02)


def _lorenz(axes: Sequence[Axes], panel: Panel) -> None:
    (each,), rows = axes, panel.rows
    curves = _grid(rows[rows["quantity"] == "lorenz"], ["layer"])
    for layer, curve in curves.iterrows():
        each.plot([0, *curve.index], [0, *curve], color=_colour(panel, layer), linewidth=1.4)
    each.plot([0, 1], [0, 1], color="grey", linestyle="--", linewidth=1)
    gini = rows[rows["quantity"] == "gini"].groupby("layer")["value"].mean()
    low, high = gini.idxmin(), gini.idxmax()
    text = f"Gini {gini[low]:.2f} (layer {low:.0f})\nto {gini[high]:.2f} (layer {high:.0f})"
    each.text(0.04, 0.96, text, transform=each.transAxes, va="top", fontsize=9)
    each.set(xlabel="share of the tokens, least attended first", ylabel="share of the attention")
    _layer_bar(each, panel)


def _histogram(axes: Sequence[Axes], panel: Panel) -> None:
    """Draw the densities of hidden-state values of prompt and answer, in layers from the first to the last, one per axes."""
    rows = panel.rows[panel.rows["quantity"] == "density"]
    layer_places = np.unique(np.linspace(0, len(panel.layers) - 1, len(axes)).round().astype(int))
    used_axes = axes[: len(layer_places)]
    for each, place in zip(used_axes, layer_places, strict=True):
        layer = panel.layers[place]
        for number, part in enumerate(("prompt", "answer")):
            density = rows[(rows["layer"] == layer) & (rows["part"] == part)].groupby("x")["value"].mean()
            density = density[density > 0]
            each.plot(density.index, density, color=COLOURS[number], linewidth=1.5, label=part)
        each.set(yscale="log", xlabel=f"layer {layer}: input of the query projection")
    widest_x = max(abs(end) for each in used_axes for end in each.get_xlim())
    heights = [end for each in used_axes for end in each.get_ylim()]
    for each in used_axes:
        each.set(xlim=(-widest_x, widest_x), ylim=(min(heights), max(heights)))
    for each in axes[len(layer_places) :]:
        each.set_visible(False)
    axes[0].set_ylabel("density")
    axes[0].legend(frameon=False, fontsize=8.5)


def _heads(axes: Sequence[Axes], panel: Panel) -> None:
    """Draw one curve per KV head. The curves with the smallest and the largest mean are bold."""
    (each,), rows = axes, panel.rows
    curves = _grid(rows, ["layer", "head"])
    for (layer, _), curve in curves.iterrows():
        each.plot(curve.index, curve, color=_colour(panel, layer), linewidth=0.8, alpha=0.55)
    area = curves.mean(axis=1)
    for key, colour in ((area.idxmin(), COLOURS[1]), (area.idxmax(), "black")):
        layer, head = key
        label = f"layer {layer:.0f}, head {head:.0f}"
        each.plot(curves.columns, curves.loc[key], color=colour, linewidth=2.2, label=label)
    x_label, y_label = _HEAD_LABELS[panel.name]
    each.set(xlabel=x_label, ylabel=y_label, ylim=(0, 1.02))
    each.legend(frameon=False, fontsize=8.5, loc="lower right")
    _layer_bar(each, panel)


def _sinks(axes: Sequence[Axes], panel: Panel) -> None:
    rows = panel.rows
    mass = rows[rows["quantity"] == "first_token_mass"].groupby(["layer", "head"])["value"].mean().unstack("head")
    layers = [int(layer) for layer in mass.index]
    share = rows[rows["quantity"] == "sink_heads"]["value"].mean()
    title_text = f"attention on the first token\n{share:.0%} of the heads above .3"
    limits = {"vmin": 0, "vmax": max(0.3, float(mass.max().max()))}
    _heat(axes[0], mass, layers, (-0.5, mass.shape[1] - 0.5), title_text, **limits)
    axes[0].set_xticks(_some(range(mass.shape[1])))
    axes[0].set_xlabel("query head")
    ratio = rows[rows["quantity"] == "activation_ratio"].groupby("layer")["value"].mean()
    axes[1].plot(ratio.index, ratio, markersize=5, linewidth=1.6, **_look(0))
    axes[1].set_yscale("log")
    _layer_axis(axes[1], panel)
    axes[1].set_ylabel("largest activation over the median")


def _heat(
    axes: Axes, grid: pd.DataFrame, layers: Sequence[int], ends: tuple[float, float], label: str, **colours: Any
) -> None:
    """Draw a heat map with a row per layer. ends: first and last value of the x axis. label: text at the colour bar."""
    edges = (*ends, layers[-1] + 0.5, layers[0] - 0.5)
    heat = axes.imshow(grid, aspect="auto", extent=edges, cmap=_COLOUR_MAP, interpolation="nearest", **colours)
    axes.set_yticks(_some(layers))
    axes.figure.colorbar(heat, ax=axes, label=label)
    axes.set_ylabel("layer")


def _spectrum(axes: Sequence[Axes], panel: Panel) -> None:
    from matplotlib.colors import LogNorm

    rows, keys_and_values = panel.rows, ("keys", "values")
    grids = [_grid(rows[rows["part"] == part], ["layer"]) for part in keys_and_values]
    all_shares = np.concatenate([grid.to_numpy() for grid in grids])
    norm = LogNorm(all_shares[all_shares > 0].min(), all_shares.max())
    for number, (part, grid, each) in enumerate(zip(keys_and_values, grids, axes[1:], strict=True)):
        mean = rows[rows["part"] == part].groupby("x")["value"].mean()
        axes[0].plot(mean.index, mean, color=COLOURS[number], linewidth=1.5, label=part)
        _heat(each, grid, [int(layer) for layer in grid.index], (0, 1), "share of the energy", norm=norm)
        each.set_title(part, fontsize=9.5)
        each.set_xlabel("frequency")
    axes[0].set(yscale="log", xlabel="frequency along the prompt, 1 the highest", ylabel="share of the energy")
    axes[0].legend(frameon=False, fontsize=8.5)


def _grid(rows: pd.DataFrame, lines: list[str]) -> pd.DataFrame:
    return rows.groupby([*lines, "x"], observed=True)["value"].mean().unstack("x")


def _colour(panel: Panel, layer: Any) -> Any:
    from matplotlib import colormaps

    layers = panel.layers
    return colormaps[_COLOUR_MAP](layers.index(int(layer)) / max(len(layers) - 1, 1) * 0.92)


def _layer_bar(axes: Axes, panel: Panel) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    layers = panel.layers
    colours = ListedColormap([_colour(panel, layer) for layer in layers])
    norm = BoundaryNorm(np.arange(len(layers) + 1) - 0.5, len(layers))
    tick_places = _some(range(len(layers)))
    bar = axes.figure.colorbar(ScalarMappable(norm, colours), ax=axes, ticks=tick_places)
    bar.ax.set_yticklabels([str(layers[place]) for place in tick_places])
    bar.set_label("layer")


_LEGEND_OF_HEADS = "one line a KV head, its colour the layer; bold: "
DRAWINGS = {
    "hidden_states": Drawing(_hidden_states, "lines: means; dashed: one standard deviation to either side", 2),
    "coverage": Drawing(_coverage, _LEGEND_OF_BAND),
    "histogram": Drawing(_histogram, "density of the values, all samples together", 4),
    "outlier_hits": Drawing(_outliers, _LEGEND_OF_BAND),
    "lorenz": Drawing(_lorenz, "one line a layer; dashed: all tokens alike"),
    "prefix_search": Drawing(_prefix, _LEGEND_OF_BAND),
    "feature_error": Drawing(partial(_parts, label="mean absolute error of layer outputs", bottom=0), _LEGEND_OF_BAND),
    "entropy": Drawing(partial(_parts, label="cross-modal attention entropy [nats]"), _LEGEND_OF_BAND),
    "cumulative_attention": Drawing(_heads, f"{_LEGEND_OF_HEADS}the flattest and the steepest"),
    "focus": Drawing(_heads, f"{_LEGEND_OF_HEADS}the most dynamic and the most static"),
    "sinks": Drawing(_sinks, "means over the samples; queries of the prompt's later half", 2),
    "vision": Drawing(partial(_parts, label="share, or cosine above that of all pairs"), _LEGEND_OF_BAND),
    "power_spectrum": Drawing(_spectrum, "shares of the energy in 128 bands; left: all layers, then by layer", 3),
}
"""Analysis -> its drawing."""
