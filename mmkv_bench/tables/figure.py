"""Figures of scores against the budget or the position in a continuation, and the style that all figures share.

A method has the same colour and marker everywhere. Methods of one family share a hue and differ by their markers. Hues are Okabe
and Ito's, which colour-blind readers can tell apart; two are darkened and two added, so that each has a contrast of 3:1 on white
and on a dark page.
"""

from __future__ import annotations

import io
import textwrap
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mmkv_bench.errors import ConfigError
from mmkv_bench.tables.score_notes import OVER
from mmkv_bench.tables.score_table import AXES, Entry, Line, ScoreTable
from mmkv_bench.tables.stored_rows import BASELINE
from mmkv_bench.tables.text import caption, line_label, size_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


COLOURS = {
    "blue": "#0072b2",
    "vermilion": "#d55e00",
    "green": "#009e73",
    "pink": "#c7689c",
    "gold": "#a87b00",
    "sky": "#3b8fc2",
    "violet": "#8a63c9",
    "brown": "#9c5a3c",
}
GREY = "#7f7f7f"
_SYMBOLS = "circle square diamond triangle-up triangle-down cross star x pentagon hexagon triangle-left triangle-right"
MARKERS = dict(zip("osD^vP*Xph<>", _SYMBOLS.split(), strict=True))
"""Marker in matplotlib -> symbol in plotly."""


class Look(NamedTuple):
    """Colour (RGB in hex) and matplotlib marker of a line."""

    colour: str
    marker: str


_FAMILIES = {
    "vermilion": ("mmshift", "mmshift_adakv", "mmshift_pyramidkv", "mmshift_sparsemm", "mmshift_llava"),
    "blue": ("snapkv", "pyramidkv", "adakv", "sparsemm", "last_query", "snapkv_kvpress", "adakv_official"),
    "green": ("keydiff", "kvpress", "custom"),
    "gold": ("look_m", "meda", "elastic_cache", "madakv"),
    "violet": ("flashcache", "expected_attention", "hybridkv", "infinipot_v", "generic_query", "kvzip"),
    "pink": ("h2o", "h2o_decode"),
    "brown": ("streamingllm", "local"),
    "sky": ("prefixkv", "prefixkv_uniform", "prefixkv_pyramid", "kivi_prefixkv", "kivi"),
}
_MARKERS = "".join(MARKERS)
_LOOKS_OF_SHIPPED = {
    name: Look(COLOURS[hue], _MARKERS[(place + shift) % len(_MARKERS)])
    for shift, (hue, names) in enumerate(_FAMILIES.items())
    for place, name in enumerate(names)
} | {
    "full": Look("black", "*"),
    "random": Look(GREY, "x"),
    "reservoir": Look(GREY, "D"),
    "even_frames": Look(GREY, "h"),
    "pixels": Look(GREY, "P"),
    "cut_prompt": Look(GREY, "X"),
    "blind": Look(GREY, "v"),
    "oracle": Look(GREY, "^"),
}


_HUES_OF_OTHERS = ("brown", "pink", "gold", "sky")  # hues for methods that are not shipped


def looks(labels: Iterable[str]) -> dict[str, Look]:
    """Return label -> colour and marker, different for all labels as long as a hue has markers left.

    A shipped method has a fixed look. Another label gets the hue of the shipped method whose name it begins with, or else a hue
    computed from the label, and a free marker.
    """
    labels = set(labels)
    look_of = {label: _LOOKS_OF_SHIPPED[label] for label in sorted(labels) if label in _LOOKS_OF_SHIPPED}
    for label in sorted(labels - set(look_of)):
        label_hash = zlib.crc32(label.encode())
        listed_prefix = max((name for name in _LOOKS_OF_SHIPPED if label.startswith(name)), key=len, default="")
        hue = (
            _LOOKS_OF_SHIPPED[listed_prefix].colour
            if listed_prefix
            else COLOURS[_HUES_OF_OTHERS[label_hash % len(_HUES_OF_OTHERS)]]
        )
        markers = [_MARKERS[(label_hash // 8 + step) % len(_MARKERS)] for step in range(len(_MARKERS))]
        used_looks = {*_LOOKS_OF_SHIPPED.values(), *look_of.values()}
        look_of[label] = next(
            (look for marker in markers if (look := Look(hue, marker)) not in used_looks), Look(hue, markers[0])
        )
    return look_of


_DIFFERS_BY_PANEL = ("n=", "dataset_fingerprint=")


@cache
def _picture() -> type[Figure]:
    """Return a subclass of `Figure` that notebooks show even if pyplot was never imported."""
    from matplotlib.figure import Figure

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            content = io.BytesIO()
            self.savefig(content, format="png", dpi=100)
            return content.getvalue()

    return Picture


def canvas(
    down: int, across: int, size: tuple[float, float], used: int | None = None, **axes: Any
) -> tuple[Figure, list[Axes]]:
    """Return (figure, panels) with `down` rows and `across` columns of panels, listed row by row.

    size: inches. used: number of visible panels; None: all. axes: options of `Figure.subplots`.
    """
    figure = _picture()(figsize=size, dpi=150, layout="constrained")
    panels = list(figure.subplots(down, across, squeeze=False, **axes).ravel())
    for panel in panels[used if used is not None else len(panels) :]:
        panel.set_visible(False)
    return figure, panels


def legend_below(figure: Figure, panels: Iterable[Axes], size: float = 9.5) -> None:
    """Draw one legend below all panels, with each label once."""
    handles: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    columns = min(len(handles), 4)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=size)


def small_print(figure: Figure, words: Sequence[str], width: int) -> None:
    """Write `words` above the panels, joined by semicolons, in lines of `width` letters."""
    figure.suptitle(textwrap.fill("; ".join(words), width), fontsize=9, color="#555555")


def log2_axis(axes: Axes, ticks: Sequence[float], labels: Sequence[str], name: str) -> None:
    """Give a panel a logarithmic x axis (base 2) with only these ticks, and call `plain`."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, labels)
    axes.set_xticks([], minor=True)
    axes.set_xlabel(name, fontsize=10.5)
    plain(axes)


def plain(axes: Axes) -> None:
    """Draw horizontal grid lines, and no frame above and to the right."""
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def point_style(colour: str, shape: str) -> dict[str, Any]:
    """Return matplotlib's options for points: colour, marker, and a white edge unless the marker is an x."""
    stroke = shape == "x"
    edge = {"markeredgecolor": colour if stroke else "white", "markeredgewidth": 1.6 if stroke else 0.8}
    return {"color": colour, "marker": shape, **edge}


def band(axes: Axes, points: Sequence[tuple[float, float | None, float | None]], colour: str) -> None:
    """Draw the intervals of a line as a band. points: (x, low, high); points without an interval are left out."""
    points_with_interval = [point for point in points if point[1] is not None and point[2] is not None]
    if points_with_interval:
        axes.fill_between(*zip(*points_with_interval, strict=True), color=colour, alpha=0.15, linewidth=0)


def save(figure: Figure, stem: Path, *, plain: bool = False) -> list[Path]:
    """Write `<stem>.png` and `<stem>.svg`, and return their paths. The same figure always gives the same SVG bytes.

    plain: write only the SVG, with text as text, so that the file is small and searchable.
    """
    from matplotlib import rc_context
    from matplotlib.text import Text

    for text in figure.findobj(Text):  # names are not formulas, but the ticks of log axes are
        if "$" in text.get_text() and "mathdefault" not in text.get_text():
            text.set_parse_math(False)
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in (("svg",) if plain else ("png", "svg"))]
    with rc_context({"svg.hashsalt": "mmkv_bench", "svg.fonttype": "none" if plain else "path"}):
        for path in paths:
            dated_keys = ("Software",) if path.suffix == ".png" else ("Date", "Creator")
            figure.savefig(path, metadata=dict.fromkeys(dated_keys))
    return paths


def accuracy_figure(tables: Sequence[ScoreTable]) -> Figure:
    """Draw scores against the budget: one panel per table, with a common score axis and one legend.

    Raises:
        ConfigError: a table has no budgets, kinds of budgets differ between tables, or a method has failed samples.
    """
    _check(tables)
    styles = looks(method.label for table in tables for method in table.methods if method.budgeted)
    figure, panels = canvas(1, len(tables), (5.2 * max(len(tables), 2) - 0.4, 4.6), sharey=True)
    for panel, table in zip(panels, tables, strict=True):
        _draw_scores(panel, table, tables, styles)
    panels[0].set_ylabel(tables[0].metric.replace("_", " "))
    legend_below(figure, panels, 10.5)
    small_print(figure, _caption(tables), 140)
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
    return figure


def _check(tables: Sequence[ScoreTable]) -> None:
    for table in tables:
        if not table.budgets:
            raise ConfigError(
                f"{table.dataset} has no cell with a budget, so there is no figure; give rows of methods with a budget."
            )
        for (label, _), entry in table.entries.items():
            if entry.value is None:
                raise ConfigError(
                    f"{table.dataset}: {label} is ok on {entry.scores.n_ok} of {entry.scores.n} samples, so it has no "
                    "score to draw; run again with retry=oom,timeout,nan,error, or read the table instead."
                )
    if len({table.axis for table in tables}) > 1:
        raise ConfigError("Budgets in entries and in fractions cannot share a figure; choose tables of one kind.")


def _draw_scores(axes: Axes, table: ScoreTable, tables: Sequence[ScoreTable], styles: Mapping[str, Look]) -> None:
    for method in table.methods:
        if not method.budgeted:
            _draw_level(axes, method, table.entries[method.label, ""])
            continue
        entries = [(float(b), table.entries.get((method.label, b))) for b in table.budgets]
        points = [(x, entry) for x, entry in entries if entry is not None]
        is_over_budget = any(
            e.audit.over for t in tables for (label, _), e in t.entries.items() if label == method.label
        )
        style = point_style(*styles[method.label]) | {"label": line_label(method) + f" {OVER}" * is_over_budget}
        axes.plot([x for x, _ in points], [e.value for _, e in points], markersize=7, linewidth=1.8, **style)
        band(axes, [(x, entry.low, entry.high) for x, entry in points], styles[method.label].colour)
    log2_axis(axes, [float(budget) for budget in table.budgets], table.budgets, AXES[table.axis])
    axes.set_title(table.dataset, fontsize=12)
    values = [entry.headline for entry in table.entries.values()]
    if min(values) >= 0 and max(values) <= 1:
        axes.set_ylim(-0.03, 1.03)


def _draw_level(axes: Axes, method: Line, entry: Entry) -> None:
    colour = "black" if method.base == BASELINE else "#999999"
    axes.axhline(entry.value, color=colour, linestyle="--", linewidth=1.4, label=f"{line_label(method)} (no budget)")
    if entry.low is not None:
        axes.axhspan(entry.low, entry.high, color=colour, alpha=0.08, linewidth=0)


def _caption(tables: Sequence[ScoreTable]) -> list[str]:
    caption_parts = caption(tables[0], tables).split("; ")[1:]
    shared_parts = [part for part in caption_parts if not part.startswith(_DIFFERS_BY_PANEL)]
    if any(entry.audit.over for table in tables for entry in table.entries.values()):
        shared_parts.append(f"{OVER} more entries resident than the budget")
    return [", ".join(f"{table.dataset} {size_text(table)}" for table in tables), *shared_parts]


def position_figure(tables: Sequence[ScoreTable], metric: str) -> Figure:
    """Draw KL divergence from the full cache, or agreement with it, against the position in a continuation.

    There is one panel per budget.

    Args:
        tables: one per stretch of the continuation, of one dataset and kind of budget, each for a point at the stretch's end.
        metric: name of the y axis.
    """
    last_tokens = [int(table.metric.rpartition("_")[2]) for table in tables]
    methods = [method for method in tables[0].methods if method.budgeted]
    budgets, styles = tables[0].budgets, looks(method.label for method in methods)
    figure, panels = canvas(1, len(budgets), (5.2 * max(len(budgets), 2) - 0.4, 4.8), sharey=True)
    for panel, budget in zip(panels, budgets, strict=True):
        for method in methods:
            entries = [(end, table.entry(method.label, budget)) for end, table in zip(last_tokens, tables, strict=True)]
            points = [(end, entry.value) for end, entry in entries if entry is not None and entry.value is not None]
            if points:
                style = point_style(*styles[method.label])
                panel.plot(*zip(*points, strict=True), **style, markersize=7, linewidth=1.6, label=line_label(method))
        log2_axis(
            panel, last_tokens, [str(end) for end in last_tokens], "last token of the stretch of the continuation"
        )
        panel.set_title(f"{AXES[tables[0].axis]}: {budget}", fontsize=11)
    panels[0].set_ylabel(metric.replace("_", " "))
    legend_below(figure, panels)
    small_print(figure, [tables[0].dataset, *_caption(tables[:1])[1:]], 140)
    return figure
