"""Figure of many questions per cache: the score against a question's position among its document's questions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.tables.figure import COLOURS, GREY, Look, canvas, legend_below, plain, point_style, small_print
from mmkv_bench.tables.question_losses import MODES

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLACE = "question, in the order asked"
LOOKS = {
    "each": Look("black", "h"),
    "joint": Look(COLOURS["green"], "s"),
    "first": Look(COLOURS["vermilion"], "D"),
    "paraphrase": Look(COLOURS["pink"], "P"),
    "generic": Look(COLOURS["gold"], "^"),
    "agnostic": Look(COLOURS["blue"], "o"),
    "turns": Look(COLOURS["violet"], "X"),
}
"""Mode -> colour and marker, in figures and in the report."""
_WIDTH = 4
_ASIDE = 0.07
"""Horizontal distance between the points of different modes, many of which are equal."""


def aside(mode: str, modes: Sequence[str]) -> float:
    """Return the horizontal shift of the points of `mode`, one of the drawn `modes`, so that equal points stay visible."""
    return _ASIDE * (modes.index(mode) - (len(modes) - 1) / 2)


def question_figure(
    points: pd.DataFrame, methods: Sequence[str] | None = None, budgets: Sequence[str] | None = None
) -> Figure:
    """Draw scores against the position of a question among its document's questions.

    There is one panel per method and budget, and in it one line with intervals per mode (what the cache was compressed for).
    The full cache is the dashed line.

    Args:
        points: result of `tables.question_losses.by_place` for one table.
        methods, budgets: methods, in this order, and budgets to draw; None: all.

    Raises:
        ConfigError: no row has one of the methods or budgets.
    """
    panels = _panels(points, methods, budgets)
    modes = [mode for mode in MODES if (points["mode"] == mode).any()]
    across = min(_WIDTH, len(panels))
    down = -(-len(panels) // across)
    figure, axes = canvas(down, across, (3.0 * max(across, 2), 2.6 * down + 0.8), len(panels), sharey=True)
    full = points[(points["method"] == "full") & (points["mode"] == "each")]
    for place, (one, line) in enumerate(zip(axes, panels, strict=False)):
        _draw(one, line, full, modes)
        name, budget = line[["label", "budget"]].iloc[0]
        one.set_title(f"{name}, {budget}" if budget else name, fontsize=10.5)
        if place % across == 0:
            one.set_ylabel(str(points["metric"].iloc[0]).replace("_", " "), fontsize=10)
        if place >= len(panels) - across:
            one.set_xlabel(PLACE, fontsize=10)
    legend_below(figure, axes)
    words = [*points[["dataset", "model"]].iloc[0], f"{points['documents'].max()} documents"]
    small_print(figure, [*words, "bars: 95 % intervals over documents"], 110)
    return figure


def _panels(points: pd.DataFrame, methods: Sequence[str] | None, budgets: Sequence[str] | None) -> list[pd.DataFrame]:
    """Return the points of each panel: one method at one budget."""
    lines = points[points["method"] != "full"]
    if budgets:
        _check("budgets", budgets, lines["budget"])
        lines = lines[lines["budget"].isin(budgets)]
    if methods is None:
        parts = [lines]
    else:
        _check("methods", methods, [*lines["label"], *lines["method"]])
        parts = [lines[(lines["label"] == name) | (lines["method"] == name)] for name in methods]
    panels = [line for part in parts for _, line in part.groupby(["label", "budget"], sort=False)]
    if not panels:
        raise ConfigError("only full has rows with several questions per document; run other methods too")
    return panels


def _check(flag: str, names: Sequence[str], held: Iterable[str]) -> None:
    for name in names:
        if name not in (allowed := sorted({*held})):
            raise ConfigError(
                f"--{flag} {name}: no such rows with several questions per document; {nearest(name, allowed)}"
            )


def _draw(axes: Axes, line: pd.DataFrame, full: pd.DataFrame, modes: Sequence[str]) -> None:
    """Draw one method at one budget."""
    if len(full):
        axes.plot(full["place"], full["value"], color=GREY, linestyle="--", linewidth=1.4, label="full")
    for mode in modes:
        rows = line[line["mode"] == mode]
        if rows.empty:
            continue
        below, above = (rows["value"] - rows["low"]).fillna(0), (rows["high"] - rows["value"]).fillna(0)
        style = point_style(*LOOKS[mode]) | {"markersize": 6, "linewidth": 1.3, "elinewidth": 0.9, "label": mode}
        axes.errorbar(rows["place"] + aside(mode, modes), rows["value"], [below.clip(0), above.clip(0)], **style)
    axes.set_xticks(sorted(line["place"].unique()))
    if line["value"].between(0, 1).all():
        axes.set_ylim(-0.03, 1.05)
    plain(axes)
