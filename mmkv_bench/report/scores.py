"""Tables of scores as the report shows them: lines with bytes and times of their cells, and families of tasks with ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from markupsafe import Markup

from mmkv_bench.report.fields import Field, budget_words, byte_words, datatable, interval, rank_words, score, text_field
from mmkv_bench.statistics.metric_kinds import lower_is_better
from mmkv_bench.tables.audit import Audit
from mmkv_bench.tables.cost_rows import KNOWN
from mmkv_bench.tables.costs import CostEntry, CostTable
from mmkv_bench.tables.dataset_groups import TaskRanks, families, headlines, ranks_over
from mmkv_bench.tables.notes import predicts_nothing, score_notes
from mmkv_bench.tables.rows import CONTEXT
from mmkv_bench.tables.score_table import Line, ScoreTable
from mmkv_bench.tables.score_text import SHORT
from mmkv_bench.tables.text import axis_words, caption, context_words, line_label

COSTS = (KNOWN["bytes_held"], KNOWN["bytes_device"], KNOWN["tpot_s"])
FILTERED = ("model", "dataset", "protocol", "reading", "method", "budget", "metric", "rows")
"""Columns of the table of all lines that have a list of values to choose from."""


@dataclass
class ScoreLine:
    """A method at a budget in a table of scores, its seeds together.

    Attributes:
        cells: names of their pages; rank: from and to, None without one; best: none is proven better.
        audit, fallbacks: in words; over: answers over the budget; held, token: bytes and seconds per token.
        setting: what a timed pass of another store must share with it.
    """

    method: str
    reading: str | None
    budget: str
    cells: list[str]
    value: float | None
    low: float | None
    high: float | None
    n: int
    n_ok: int
    rank: tuple[int, int] | None
    best: bool
    audit: str
    fallbacks: str
    over: int
    held: CostEntry | None
    token: CostEntry | None
    setting: tuple[str, ...]

    def cost(self, name: str) -> float | None:
        """The median of `held` or `token`, None where rows do not tell it."""
        entry = self.held if name == "held" else self.token
        return None if entry is None else entry.value


@dataclass
class ScoreView:
    """A table of scores. store: the number of its store; number: its own."""

    number: int
    store: int
    model: str
    dataset: str
    protocol: str
    metric: str
    axis: str
    budgets: tuple[str, ...]
    caption: str
    notes: list[str]
    lines: list[ScoreLine] = field(default_factory=list)

    @property
    def axis_words(self) -> str:
        """The unit of its budgets, in words."""
        return axis_words(self.axis)

    def budget_words(self, budget: str) -> str:
        """A budget as pages show it."""
        return budget_words(self.axis, budget) or "no budget"

    def has(self, cost: str) -> bool:
        """Some line has a score and this cost."""
        return any(line.value is not None and line.cost(cost) is not None for line in self.lines)

    def hint(self, line: ScoreLine) -> str:
        """Words that a point of a chart shows on hover."""
        value = f"{score(line.value)} {interval(line.low, line.high)}, n = {line.n}"
        return "<br>".join(filter(None, (f"{line.method}, {self.budget_words(line.budget)}", value, line.fallbacks)))

    def leaders(self, budget: str) -> Markup | str:
        """The methods of which none is proven better, with their best score; `-` for none, "" where nobody has this budget."""
        best = [line for line in self.lines if line.budget == budget and line.best and line.value is not None]
        if not best:
            return "-" if any(line.budget == budget for line in self.lines) else ""
        words = f"{len(best)} not told apart" if len(best) > 3 else ", ".join(line.method for line in best)
        top = (min if lower_is_better(self.metric) else max)(line.value or 0.0 for line in best)
        all_of_them = "\n".join(f"{line.method} {score(line.value)} {interval(line.low, line.high)}" for line in best)
        return Markup('<span title="{}">{} <span class="quiet">{}</span></span>').format(all_of_them, words, score(top))

    def curve_numbers(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows of the scores by method and budget."""
        held = {(line.method, line.budget): line for line in self.lines}
        budgets = ("", *self.budgets)
        rows = []
        for method in dict.fromkeys(line.method for line in self.lines):
            lines = [held.get((method, budget)) for budget in budgets]
            rows.append(
                [method, *("" if one is None else f"{score(one.value)} {interval(one.low, one.high)}" for one in lines)]
            )
        return ["method", *map(self.budget_words, budgets)], rows

    def cost_numbers(self, cost: str) -> tuple[list[str], list[list[Any]]]:
        """Header and rows of one cost by method and budget."""
        rows = []
        for line in self.lines:
            entry = line.held if cost == "held" else line.token
            if entry is not None and entry.value is not None:
                words = byte_words(entry.value) if cost == "held" else f"{1000 * entry.value:.3g} ms"
                rows.append([line.method, self.budget_words(line.budget), words, score(entry.ratio), score(line.value)])
        return [
            "method",
            "budget",
            "bytes held" if cost == "held" else "time per token",
            "ratio to full",
            self.metric,
        ], rows


@dataclass(frozen=True)
class FamilyRanks:
    """Ranks of methods over tasks at a budget, the best mean first. ends: of each method, from and to on each task."""

    tasks: list[str]
    methods: list[str]
    ends: list[list[list[int]]]
    means: list[list[float]]
    note: str

    def numbers(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows of the ranks by method and task."""
        rows = [
            [method, rank_words(mean, ".1f"), *(rank_words(task) for task in ends)]
            for method, mean, ends in zip(self.methods, self.means, self.ends, strict=True)
        ]
        return ["method", "mean", *self.tasks], rows


@dataclass
class Family:
    """Tables that the overview shows together: of tasks that differ in nothing but the dataset. ranks: by budget."""

    words: str
    store: int
    views: list[ScoreView]
    ranks: dict[str, FamilyRanks]

    @property
    def budgets(self) -> list[str]:
        """Budgets of its tables, ascending."""
        return sorted({budget for view in self.views for budget in view.budgets}, key=float)


class ScoreViews:
    """The tables of scores of all stores, and families of them."""

    def __init__(self) -> None:
        self.views: list[ScoreView] = []
        self.families: list[Family] = []

    def add(
        self, store: int, tables: Sequence[ScoreTable], costs: Sequence[CostTable], name: Callable[[str], str]
    ) -> None:
        """The tables of one store. costs: of the same store; name: cell hash -> the name of its page."""
        known, views = _costs(costs), {}
        for table in tables:
            view = ScoreView(
                number=len(self.views),
                store=store,
                model=table.context["model"],
                dataset=table.dataset,
                protocol=table.context["protocol"],
                metric=table.metric,
                axis=table.axis,
                budgets=tuple(table.budgets),
                caption=caption(table, tables),
                notes=[note.text for note in sorted(score_notes(table), key=lambda note: note.rank)],
            )
            self.views.append(view)
            views[id(table)] = view
            for method in table.methods:
                for budget in ("", *table.budgets):
                    key = (_where(table.context), method.variant, table.axis if budget else "none", budget)
                    view.lines += _lines(table, method, budget, known.get(key, {}), name)
        self.families += _families(store, tables, views)

    def styles(self) -> dict[str, int]:
        """Method -> the number of its colour, shape and dash: the same in every chart."""
        methods = {line.method for view in self.views for line in view.lines}
        return {method: place for place, method in enumerate(sorted(methods, key=lambda name: text_field(name)[1]))}

    def join_passes(self, tables: Sequence[CostTable]) -> list[str]:
        """Times of passes (`scenario=efficiency`), of any store, to lines without a time of their own; model, method, reading,
        parameters, protocol and budget must agree. Returns a sentence on it where there are passes.

        tables: of costs, of all stores; of passes those of the smallest batch and its longest prompt count.
        """
        passes = [table for table in tables if table.per_pass]
        if not passes:
            return []
        shape = max((table.shape for table in passes), key=lambda one: (-int(one["batch"]), int(one["prompt_tokens"])))
        times = {
            _setting(table.context, method, table.axis, budget): table.entries[method.label, budget].get(COSTS[-1].key)
            for table in passes
            if table.shape == shape
            for method, budget in table.lines()
        }
        lines, joined = [line for view in self.views for line in view.lines], 0
        for line in lines:
            took = times.get(line.setting)
            if line.cost("token") is None and took is not None and took.value is not None:
                line.token = took
                joined += 1
        words = f"passes of {shape['prompt_tokens']} prompt tokens, batch {shape['batch']}"
        return [f"Times per token of {joined} of {len(lines)} lines are those of {words}."]

    def table(self, stores: Sequence[str]) -> tuple[str, Markup]:
        """(what all lines share, in words; the table of all of them). stores: their folders."""
        lines = [(view, line) for view in self.views for line in view.lines]
        columns = {header: [value(view, line) for view, line in lines] for header, value in _COLUMNS.items()}
        columns["rows"] = [text_field(stores[view.store]) for view, _ in lines]
        alike = [name for name in FILTERED if len({text for text, _ in columns[name]}) == 1 and name != "method"]
        words = ", ".join(f"{name} {columns[name][0][0]}" for name in alike if columns[name][0][0])
        shown = {name: fields for name, fields in columns.items() if name not in alike}
        return f"All lines: {words}." if words else "", datatable("cells", shown, FILTERED)


def _number(value: float | None, words: str | None = None) -> Field:
    return score(value) if words is None else words, value


def _cell_links(line: ScoreLine) -> Field:
    link = Markup('<a href="cells/{}.html">{}</a>')
    links = Markup(" ").join(link.format(name, name.partition("-")[2][:SHORT]) for name in line.cells)
    return text_field("".join(line.cells[:1]), links)


def _token_ms(line: ScoreLine) -> Field:
    took = line.cost("token")
    return _number(took, "-" if took is None else f"{1000 * took:#.3g}".removesuffix("."))


_COLUMNS: dict[str, Callable[[ScoreView, ScoreLine], Field]] = {
    "cell": lambda view, line: _cell_links(line),
    "method": lambda view, line: text_field(line.method),
    "budget": lambda view, line: (view.budget_words(line.budget), (view.axis, float(line.budget or "inf"))),
    "score": lambda view, line: _number(line.value),
    "95 % interval": lambda view, line: _number(line.low, interval(line.low, line.high)),
    "n": lambda view, line: (str(line.n) if line.n_ok == line.n else f"{line.n_ok}/{line.n}", (line.n, line.n_ok)),
    "rank": lambda view, line: (rank_words(line.rank) if line.rank else "", line.rank),
    "dataset": lambda view, line: text_field(view.dataset),
    "metric": lambda view, line: text_field(view.metric),
    "protocol": lambda view, line: text_field(view.protocol),
    "reading": lambda view, line: text_field(line.reading or "-"),
    "model": lambda view, line: text_field(view.model),
    "bytes, of full": lambda view, line: _number(None if line.held is None else line.held.ratio),
    "ms/token": lambda view, line: _token_ms(line),
    "remarks": lambda view, line: text_field(
        "; ".join(filter(None, ("over budget" * bool(line.over), line.fallbacks)))
    ),
    "audit": lambda view, line: text_field(line.audit),
}
"""Header -> the field of a line in the table of all lines."""


def _lines(
    table: ScoreTable, method: Line, budget: str, costs: Mapping[str, CostEntry], name: Callable[[str], str]
) -> Iterable[ScoreLine]:
    """The line of a method at a budget, where the table has it."""
    entry = table.entries.get((method.label, budget))
    if entry is None:
        return
    held, device, token = (costs.get(cost.key) for cost in COSTS)
    yield ScoreLine(
        method=line_label(method),
        reading=method.reading,
        budget=budget,
        cells=[name(cell) for cell in entry.cells],
        value=entry.value,
        low=entry.low,
        high=entry.high,
        n=entry.scores.n,
        n_ok=entry.scores.n_ok,
        rank=table.rank(method.label, budget),
        best=budget != "" and method.label in table.best(budget),
        audit=audit_words(entry.audit),
        fallbacks="; ".join(f"{reason}: {n} of {entry.audit.n}" for reason, n in entry.audit.fallbacks.items()),
        over=entry.audit.over,
        held=held if held is not None and held.value is not None else device,  # rows that are older than bytes_held
        token=token,
        setting=_setting(table.context, method, table.axis, budget),
    )


def _families(store: int, tables: Sequence[ScoreTable], views: Mapping[int, ScoreView]) -> Iterable[Family]:
    """A family for the first metrics of tasks that belong together, and one for each metric of some of them."""
    contexts = [table.context for table in tables]
    for family in families(tables):
        metrics = dict.fromkeys(table.metric for table in family)
        choices = [headlines(family), *([t for t in family if t.metric == metric] for metric in metrics)]
        for members in {tuple(map(id, choice)): choice for choice in choices}.values():
            first = members[0]
            same = all(a.metric == b.metric for a, b in pairwise(members))
            words = [first.metric if same else "each task's first metric", first.axis]
            words += context_words(first.context, first.readings, contexts)
            words.append(f"{len(members)} task{'s' * (len(members) > 1)}")
            ranks = {ranked.budget: _ranks(ranked) for ranked in ranks_over(members)}
            yield Family(" · ".join(words), store, [views[id(table)] for table in members], ranks)


def _ranks(ranked: TaskRanks) -> FamilyRanks:
    """Ranks in the form of charts, with what is to be said beside them."""
    names = {line.label: line_label(line) for table in ranked.tables for line in table.methods}
    methods, means, ends = [names[label] for label in ranked.methods], ranked.means.tolist(), ranked.ranks.tolist()
    order = sorted(range(len(methods)), key=lambda at: (sum(means[at]), means[at][1], text_field(methods[at])[1]))
    note = [words[:1].upper() + words[1:] for words in predicts_nothing(ranked.tables[0].context["model"])]
    if ranked.apart:
        note.append(f"On some of the tasks only: {', '.join(names[label] for label in ranked.apart)}.")
    return FamilyRanks(
        [table.dataset for table in ranked.tables],
        [methods[at] for at in order],
        [[task[at] for task in ends] for at in order],
        [means[at] for at in order],
        " ".join(note),
    )


def audit_words(audit: Audit) -> str:
    """Summary of the counted entries of a cell's answers."""
    if not audit.n:
        return "no counted answers"
    words = [f"all {audit.n} answers within the budget"]
    if audit.over:
        mean, worst = audit.excess_mean, audit.excess_worst
        words = [f"{audit.over} of {audit.n} answers over the budget, by {mean:.1%} on average and {worst:.1%} at most"]
    if audit.from_prefill:
        words.append(f"{audit.from_prefill} answers wholly from the full prefill")
    if audit.text_before_cut:
        words.append(f"{audit.text_before_cut} with question text before the cut")
    if audit.packed:
        words.append(f"packed entries: {audit.device:.2f} of full's bytes on the device")
    if audit.retrievable:
        words.append(f"entries come back from the host: {audit.host:.2f} of full's bytes there")
    return "; ".join(words)


def _setting(context: Mapping[str, str], method: Line, axis: str, budget: str) -> tuple[str, ...]:
    kind = axis if budget else "none"
    return context["model"], context["protocol"], method.base, method.reading or "", method.parameters, kind, budget


def _where(context: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(context[name] for name in CONTEXT)


def _costs(tables: Sequence[CostTable]) -> dict[tuple[Any, ...], Mapping[str, CostEntry]]:
    """(context, variant, kind of budget, budget) -> costs of a cell's own answers, of the first device that has them."""
    costs: dict[tuple[Any, ...], Mapping[str, CostEntry]] = {}
    for table in tables:
        if table.per_pass:
            continue
        for method, budget in table.lines():
            key = (_where(table.context), method.variant, table.axis if budget else "none", budget)
            costs.setdefault(key, table.entries[method.label, budget])
    return costs
