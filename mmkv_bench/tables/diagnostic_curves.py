"""Diagnostics that are curves in every layer: Lorenz curves, histograms, head patterns, spectra."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mmkv_bench.tables.figure import COLOURS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from mmkv_bench.tables.diagnostic_rows import Panel

_MAP = "viridis"
_LABELS = {
    "cumulative_attention": ("share of the prompt's keys, largest first", "share of the text's attention"),
    "focus": ("share of the prompt's tokens, most focused first", "share of the answer's focuses"),
}


def lorenz(axes: Sequence[Axes], panel: Panel) -> None:
    """Shares of attention that the lowest shares of tokens gather, and the range of the Gini coefficients."""
    (each,), rows = axes, panel.rows
    curves = _grid(rows[rows["quantity"] == "lorenz"], ["layer"])
    for layer, curve in curves.iterrows():
        each.plot([0, *curve.index], [0, *curve], color=_colour(panel, layer), linewidth=1.4)
    each.plot([0, 1], [0, 1], color="grey", linestyle="--", linewidth=1)
    gini = rows[rows["quantity"] == "gini"].groupby("layer")["value"].mean()
    low, high = gini.idxmin(), gini.idxmax()
    told = f"Gini {gini[low]:.2f} (layer {low:.0f})\nto {gini[high]:.2f} (layer {high:.0f})"
    each.text(0.04, 0.96, told, transform=each.transAxes, va="top", fontsize=9)
    each.set_xlabel("share of the tokens, least attended first")
    each.set_ylabel("share of the attention")
    _bar(each, panel)


def histogram(axes: Sequence[Axes], panel: Panel) -> None:
    """Four layers from the first to the last, prompt beside answer."""
    rows = panel.rows[panel.rows["quantity"] == "density"]
    chosen = np.unique(np.linspace(0, len(panel.layers) - 1, len(axes)).round().astype(int))
    for each, place in zip(axes, chosen, strict=False):
        layer = panel.layers[place]
        for number, part in enumerate(("prompt", "answer")):
            own = rows[(rows["layer"] == layer) & (rows["part"] == part)].groupby("x")["value"].mean()
            own = own[own > 0]
            each.plot(own.index, own, color=COLOURS[number], linewidth=1.5, label=part)
        each.set_yscale("log")
        each.set_xlabel(f"layer {layer}: input of the query projection")
    ends = [end for each in axes[: len(chosen)] for end in each.get_xlim()]
    reach = max(map(abs, ends))
    heights = [end for each in axes[: len(chosen)] for end in each.get_ylim()]
    for each in axes[: len(chosen)]:
        each.set_xlim(-reach, reach)
        each.set_ylim(min(heights), max(heights))
    for each in axes[len(chosen) :]:
        each.set_visible(False)
    axes[0].set_ylabel("density")
    axes[0].legend(frameon=False, fontsize=8.5)


def of_heads(axes: Sequence[Axes], panel: Panel) -> None:
    """A curve per KV head; those that hold least and most at small shares stand out."""
    (each,), rows = axes, panel.rows
    curves = _grid(rows, ["layer", "head"])
    for (layer, _), curve in curves.iterrows():
        each.plot(curve.index, curve, color=_colour(panel, layer), linewidth=0.8, alpha=0.55)
    area = curves.mean(axis=1)
    for key, colour in ((area.idxmin(), COLOURS[1]), (area.idxmax(), "black")):
        layer, head = key
        label = f"layer {layer:.0f}, head {head:.0f}"
        each.plot(curves.columns, curves.loc[key], color=colour, linewidth=2.2, label=label)
    across, up = _LABELS[panel.name]
    each.set_xlabel(across)
    each.set_ylabel(up)
    each.set_ylim(0, 1.02)
    each.legend(frameon=False, fontsize=8.5, loc="lower right")
    _bar(each, panel)


def spectrum(axes: Sequence[Axes], panel: Panel) -> None:
    """Energy over frequency of keys and values: all layers together, then layer by layer."""
    rows = panel.rows
    for number, part in enumerate(("keys", "values")):
        own = rows[rows["part"] == part].groupby("x")["value"].mean()
        axes[0].plot(own.index, own, color=COLOURS[number], linewidth=1.5, label=part)
    axes[0].set_yscale("log")
    axes[0].set_xlabel("frequency along the prompt, 1 the highest")
    axes[0].set_ylabel("share of the energy")
    axes[0].legend(frameon=False, fontsize=8.5)
    grids = [_grid(rows[rows["part"] == part], ["layer"]) for part in ("keys", "values")]
    shares = np.concatenate([grid.to_numpy() for grid in grids])
    low, high = shares[shares > 0].min(), shares.max()
    for each, grid, part in zip(axes[1:], grids, ("keys", "values"), strict=True):
        _heat(each, grid, (low, high))
        each.set_title(part, fontsize=9.5)
        each.set_xlabel("frequency")
        each.set_ylabel("layer")


def _heat(axes: Axes, grid: pd.DataFrame, ends: tuple[float, float]) -> None:
    from matplotlib.colors import LogNorm

    layers = [int(layer) for layer in grid.index]
    edges = (0, 1, layers[-1] + 0.5, layers[0] - 0.5)
    drawn = axes.imshow(grid, aspect="auto", extent=edges, cmap=_MAP, norm=LogNorm(*ends), interpolation="nearest")
    axes.set_yticks(layers if len(layers) <= 12 else layers[:: -(-len(layers) // 10)])
    axes.figure.colorbar(drawn, ax=axes, label="share of the energy")


def _grid(rows: pd.DataFrame, lines: list[str]) -> pd.DataFrame:
    """Means over samples: one row per line of the picture, one column per place on the curve."""
    return rows.groupby([*lines, "x"], observed=True)["value"].mean().unstack("x")


def _colour(panel: Panel, layer: Any) -> Any:
    from matplotlib import colormaps

    layers = panel.layers
    return colormaps[_MAP](layers.index(int(layer)) / max(len(layers) - 1, 1) * 0.92)


def _bar(axes: Axes, panel: Panel) -> None:
    """Which colour is which layer."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    layers = panel.layers
    colours = ListedColormap([_colour(panel, layer) for layer in layers])
    norm = BoundaryNorm(np.arange(len(layers) + 1) - 0.5, len(layers))
    shown = range(len(layers)) if len(layers) <= 12 else range(0, len(layers), -(-len(layers) // 8))
    bar = axes.figure.colorbar(ScalarMappable(norm, colours), ax=axes, ticks=list(shown))
    bar.ax.set_yticklabels([str(layers[place]) for place in shown])
    bar.set_label("layer")
