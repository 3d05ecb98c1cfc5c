"""Figures of rows: scores against budgets and costs, costs against the length of prompts, diagnostics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import ConfigError, nearest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mmkv_bench.api.rows import StoredRows
    from mmkv_bench.tables.cost_rows import Cost
    from mmkv_bench.tables.score_table import ScoreTable

AXES = ("entries", "fraction")
OF_SCORES = ("budget", "front", "position", "questions")


@dataclass(frozen=True)
class PlotRequest:
    """Kind and filters of a figure: the flags of `mmkv-bench plot`. None: no filter, or the flag's default.

    rows: folder of rows. costs: folder of efficiency rows, for `front`.
    """

    kind: str
    rows: Path
    metric: str | None = None
    dataset: Sequence[str] | None = None
    protocol: Sequence[str] | None = None
    reading: Sequence[str] | None = None
    methods: Sequence[str] | None = None
    budgets: Sequence[str] | None = None
    cost: Sequence[str] | None = None
    costs: Path | None = None
    tokens: int | None = None
    batch: int | None = None
    prompts: str | None = None
    name: Sequence[str] | None = None


def plot(rows: str | Path | StoredRows, kind: str = "budget", **options: Any) -> Figure:
    """Draw the figure of `mmkv-bench plot <kind> <rows>`.

    Args:
        rows: a folder of rows, or the result of `load_rows` or `evaluate` (all rows of its folder are drawn).
        kind: `budget`, `length`, `front`, `position`, `questions`, or the name of a diagnostic.
        options: flags of the command: metric, dataset, protocol, reading, methods, budgets, cost, costs, tokens, batch,
            prompts, name. Names and budgets are one value or a list: `methods=["snapkv", "mmshift"]`, `budgets=[64,
            128]`, `name="mmshift=Ours"`.

    Raises:
        ConfigError: an option is unknown, or the rows have nothing to draw.
    """
    allowed = [field.name for field in fields(PlotRequest)][2:]
    for name in options:
        if name not in allowed:
            raise ConfigError(f"plot has no option {name}; {nearest(name, allowed)}")
    flags = {name: _option_value(name, value) for name, value in options.items()}
    folder = Path(getattr(rows, "folder", rows))  # type: ignore[arg-type]
    return draw(PlotRequest(kind, folder, **flags))[0]


def _option_value(name: str, value: Any) -> Any:
    """Return an option in the command's form: lists of strings, and a folder as a path."""
    if name == "costs" and value is not None:
        return Path(getattr(value, "folder", value))
    if name in ("dataset", "protocol", "reading", "methods", "budgets", "cost", "name") and value is not None:
        return [str(one) for one in (value if isinstance(value, list | tuple) else [value])]
    return value


def draw(request: PlotRequest) -> tuple[Figure, list[str]]:
    """Return the requested figure, and sentences about lines that the figure leaves out.

    Raises ConfigError: filters of scores for a figure without scores, or rows with nothing to draw.
    """
    if request.kind not in OF_SCORES:
        for flag, names in (("methods", request.methods), ("budgets", _numbers(request))):
            if names:
                raise ConfigError(
                    f"--{flag} {','.join(names)} selects scores, but plot {request.kind} draws no scores; leave it out"
                )
    figure, left_out = _front(request) if request.kind == "front" else (_figure(request), [])
    if request.name:
        _rename(figure, request.name)
    return figure, left_out


def _figure(request: PlotRequest) -> Figure:
    """Return the figure of any kind but `front`. Kinds without a function of their own are diagnostics."""
    from mmkv_bench.tables.diagnostic_figure import diagnostic_figure, panels
    from mmkv_bench.tables.figure import accuracy_figure

    draw_functions = {"length": _length, "position": _position, "questions": _questions}
    if request.kind in draw_functions:
        return draw_functions[request.kind](request)
    if request.kind == "budget":
        return accuracy_figure(_score_tables(request))
    return diagnostic_figure(panels(request.rows, request.kind, request.dataset))


def _rename(figure: Figure, names: Sequence[str]) -> None:
    """Give lines of a figure other names (`line=name`), in place. Text in parentheses after a name stays."""
    from matplotlib.text import Text

    texts = figure.findobj(Text)
    lines = {text.get_text().partition(" (")[0]: text.get_text() for text in texts if text.get_text()}
    for words in names:
        line, equals, name = words.partition("=")
        if line not in lines or not equals or not name:
            advice = "write --name <line>=<name>" if line in lines else nearest(line, lines)
            raise ConfigError(f"--name {words}: {'a name is missing' if line in lines else 'no such line'}; {advice}")
        for text in texts:
            if text.get_text().partition(" (")[0] == line:
                text.set_text(name + text.get_text()[len(line) :])


def _position(request: PlotRequest) -> Figure:
    from mmkv_bench.statistics.metric_kinds import KL_TO, TOP1_TO
    from mmkv_bench.tables.figure import position_figure

    metric = request.metric or "fidelity_kl"
    names = [name for name in (*KL_TO, *TOP1_TO) if name.startswith(f"{metric}_to_")]
    if not names:
        raise ConfigError(
            f"plot position draws fidelity_kl or fidelity_top1, got --metric {metric}; give one of the two"
        )
    tables = [table for name in names for table in _score_tables(replace(request, metric=name))]
    return position_figure(tables, metric)


def _questions(request: PlotRequest) -> Figure:
    from mmkv_bench.tables.questions import by_place, question_figure, tables_with_scores

    scored_tables = tables_with_scores(request.rows, request.dataset, [request.metric] if request.metric else None)
    if len(scored_tables) > 1:
        names = "; ".join(table.title.partition(":")[0] for table, _ in scored_tables)
        raise ConfigError(
            f"plot questions draws one table, but the rows have several ({names}); give --dataset or --metric"
        )
    return question_figure(by_place(scored_tables[0][1]), request.methods, _numbers(request))


def _length(request: PlotRequest) -> Figure:
    from mmkv_bench.forecast.roofline import roofline_by_context
    from mmkv_bench.store.store import Store
    from mmkv_bench.tables.cost_figures import length_figure
    from mmkv_bench.tables.costs import cost_tables, roofline_inputs, set_limits

    costs = _costs(request, ["tpot_s"])
    if len(costs) > 1:
        names = ", ".join(cost.name for cost in costs)
        raise ConfigError(f"plot length draws one cost, got {names}; name one with --cost")
    rows = request.rows
    tables = [
        table
        for table in cost_tables(rows, (), beside=[*costs, *roofline_inputs(costs)])
        if (request.protocol or ["paper"])[0] == table.context["protocol"]
        and table.axis in _axes(request, table.axis)
        and (request.dataset is None or table.context["dataset"] in request.dataset)
    ]
    return length_figure(set_limits(tables, costs, roofline_by_context(Store(rows))), costs[0])


def _front(request: PlotRequest) -> tuple[Figure, list[str]]:
    from mmkv_bench.tables.cost_figures import front_figure, fronts

    roots = list(dict.fromkeys([request.rows, request.costs or request.rows]))
    costs = _costs(request, ["bytes", "tpot_s"])
    drawn = fronts(_score_tables(request), costs, roots, request.tokens, request.batch, request.prompts)
    left_out = [
        f"not drawn, because {front.cost.name} is unknown ({front.table.dataset}): {', '.join(front.alone)}"
        for front in drawn
        if front.alone
    ]
    return front_figure(drawn), left_out


def _costs(request: PlotRequest, usual: Sequence[str]) -> list[Cost]:
    from mmkv_bench.tables.cost_rows import refuse_unknown, split_costs

    names, costs = split_costs(request.cost or usual)
    refuse_unknown(names, ())
    return costs


def _axes(request: PlotRequest, default: str) -> list[str]:
    """Return the kinds of the requested budgets (`entries`, `fraction`); [default] if no kind is requested."""
    return [name for name in request.budgets or () if name in AXES] or [default]


def _numbers(request: PlotRequest) -> list[str]:
    return [name for name in request.budgets or () if name not in AXES]


def _score_tables(request: PlotRequest) -> list[ScoreTable]:
    """Return the selected score tables, one per dataset. Raises ConfigError: several tables of a dataset, or none."""
    from mmkv_bench.tables.build import build
    from mmkv_bench.tables.compare import select_lines
    from mmkv_bench.tables.stored_rows import load

    tables = build(
        load(request.rows),
        datasets=request.dataset,
        protocols=request.protocol or ["paper"],
        readings=request.reading,
        metrics=[request.metric] if request.metric else None,
    )
    tables = [table for table in tables if table.budgets and table.axis in _axes(request, table.axis)]
    if request.methods or _numbers(request):
        tables = [table for table in select_lines(tables, request.methods, _numbers(request) or None) if table.budgets]
    for dataset in dict.fromkeys(table.dataset for table in tables):
        alternatives = [table for table in tables if table.dataset == dataset]
        if len(alternatives) > 1:
            kinds = "; ".join(
                f"{t.metric}, {t.axis}, reading={' and '.join(t.readings)}, model={t.context['model']}"
                for t in alternatives
            )
            raise ConfigError(
                f"The rows have {len(alternatives)} tables of {dataset} ({kinds}), but one can be drawn; give --metric, "
                "--protocol, --reading or --budgets"
            )
    if not tables:
        raise ConfigError("The rows have no table of scores with a budget of that kind; give other rows or --budgets")
    return sorted(tables, key=lambda table: (request.dataset or [table.dataset]).index(table.dataset))
