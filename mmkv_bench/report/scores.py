"""Score tables for the report: lines with bytes and times, and families of tasks with ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from markupsafe import Markup

from mmkv_bench.report.formatting import Field, budget_words, byte_words, datatable, interval, score, text_field
from mmkv_bench.statistics.metric_kinds import lower_is_better
from mmkv_bench.tables.audit import Audit
from mmkv_bench.tables.cost_rows import KNOWN
from mmkv_bench.tables.costs import CostEntry, CostTable, cell_key
from mmkv_bench.tables.dataset_groups import TaskRanks, families, headlines, ranking_warning, ranks_over
from mmkv_bench.tables.figure import Look, looks
from mmkv_bench.tables.score_notes import score_notes
from mmkv_bench.tables.score_table import Entry, Line, ScoreTable
from mmkv_bench.tables.score_text import SHORT, record
from mmkv_bench.tables.stored_rows import CONTEXT
from mmkv_bench.tables.text import caption, context_words, line_label, ranks_text

COSTS = (KNOWN["bytes_held"], KNOWN["bytes_device"], KNOWN["tpot_s"])
FILTERED = ("model", "dataset", "protocol", "reading", "method", "budget", "metric", "rows")
"""Columns, in the table of all lines, with a list of values to choose from."""


ScoreLine = dict[str, Any]
"""Scores of a method at a budget, all seeds together: a csv record (`record`) with more keys for the report.

    label: the method's label; pages: names of its cells' pages; store: number of its store; axis: kind of budget.
    rank: lowest and highest; audit, fallbacks: texts; bytes, token: costs; setting: key that a timed pass must share.
"""


def cost_value(line: ScoreLine, name: str) -> float | None:
    """Return the median cost of a line; None if rows lack it. name: `bytes` (held) or `token` (seconds per token)."""
    return None if line[name] is None else line[name].value


@dataclass
class ScoreView:
    """A score table as the report shows it. number: position among the report's tables. axis: kind of budget."""

    number: int
    dataset: str
    metric: str
    axis: str
    budgets: tuple[str, ...]
    caption: str
    notes: list[str]
    lines: list[ScoreLine]

    def budget_words(self, budget: str) -> str:
        return budget_words(self.axis, budget) or "no budget"

    def has(self, cost: str) -> bool:
        """Return True if some line has a score and this cost (`bytes` or `token`)."""
        return any(line["value"] is not None and cost_value(line, cost) is not None for line in self.lines)

    def hint(self, line: ScoreLine) -> str:
        """Return the text that a chart shows when the mouse is over the point of a line."""
        hint_lines = [f"{line['label']}, {self.budget_words(line['budget'])}", f"{_score_words(line)}, n = {line['n']}"]
        return "<br>".join([*hint_lines, *filter(None, [line["fallbacks"]])])

    def leaders(self, budget: str) -> Markup | str:
        """Return HTML with the best methods at a budget and their best score.

        The best are the methods to which no other is proven superior. The result is `-` if no method is proven better
        than another, and "" if no line has the budget.
        """
        lines = [line for line in self.lines if line["budget"] == budget]
        best_lines = [line for line in lines if line["best"] and line["value"] is not None]
        if not best_lines:
            return "-" if lines else ""
        leader_text = ", ".join(line["label"] for line in best_lines)
        leader_text = f"{len(best_lines)} not told apart" if len(best_lines) > 3 else leader_text
        best_score = (min if lower_is_better(self.metric) else max)(line["value"] for line in best_lines)
        all_leaders = "\n".join(f"{line['label']} {_score_words(line)}" for line in best_lines)
        return Markup('<span title="{}">{} <span class="quiet">{}</span></span>').format(
            all_leaders, leader_text, score(best_score)
        )

    def curve_numbers(self) -> tuple[list[str], list[list[str]]]:
        """Return (header, rows) of a table of scores by method and budget."""
        scores: dict[str, dict[str, str]] = {}
        for line in self.lines:
            scores.setdefault(line["label"], {})[line["budget"]] = _score_words(line)
        budgets = ("", *self.budgets)
        rows = [[method, *(words.get(budget, "") for budget in budgets)] for method, words in scores.items()]
        return ["method", *map(self.budget_words, budgets)], rows

    def cost_numbers(self, cost: str) -> tuple[list[str], list[list[Any]]]:
        """Return (header, rows) of a table with one cost (`bytes` or `token`) and the score by method and budget."""
        header = "bytes held" if cost == "bytes" else "time per token"
        rows = []
        for line in self.lines:
            if (value := cost_value(line, cost)) is not None:
                cost_text = byte_words(value) if cost == "bytes" else f"{1000 * value:.3g} ms"
                budget, ratio = self.budget_words(line["budget"]), score(line[cost].ratio)
                rows.append([line["label"], budget, cost_text, ratio, score(line["value"])])
        return ["method", "budget", header, "ratio to full", self.metric], rows


def _score_words(line: ScoreLine) -> str:
    return f"{score(line['value'])} {interval(line['low'], line['high'])}"


@dataclass(frozen=True)
class FamilyRanks:
    """Ranks of methods over tasks at a budget, the best mean first.

    ends: per method, lowest and highest rank on each task. means: per method, lowest and highest mean rank.
    """

    tasks: list[str]
    methods: list[str]
    ends: list[list[list[int]]]
    means: list[list[float]]
    note: str

    def numbers(self) -> tuple[list[str], list[list[str]]]:
        """Return (header, rows) of a table of ranks by method and task."""
        rows = [
            [method, ranks_text(mean, ".1f"), *map(ranks_text, ends)]
            for method, mean, ends in zip(self.methods, self.means, self.ends, strict=True)
        ]
        return ["method", "mean", *self.tasks], rows


@dataclass
class Family:
    """Tables that share an overview page: they differ only in the dataset (task). ranks: by budget."""

    words: str
    store: int
    views: list[ScoreView]
    ranks: dict[str, FamilyRanks]

    @property
    def budgets(self) -> list[str]:
        """Budgets of the tables of this family, ascending."""
        return sorted({budget for view in self.views for budget in view.budgets}, key=float)


class ScoreViews:
    """Score tables of all stores, and their families."""

    def __init__(self) -> None:
        self.views: list[ScoreView] = []
        self.families: list[Family] = []

    def add(
        self, store: int, tables: Sequence[ScoreTable], costs: Sequence[CostTable], name: Callable[[str], str]
    ) -> None:
        """Add the tables of one store.

        store: number of the store. name: function from the hash of a cell to the name of its page.
        """
        cost_entries, views = _costs(costs), {}
        for table in tables:
            notes = [note.text for note in sorted(score_notes(table), key=lambda note: note.rank)]
            lines = [
                _line(table, *cell, cost_entries) | {"store": store, "pages": list(map(name, cell[-1].cells))}
                for cell in table.cells
            ]
            view_head = len(self.views), table.dataset, table.metric, table.axis, tuple(table.budgets)
            views[id(table)] = ScoreView(*view_head, caption(table, tables), notes, lines)
            self.views.append(views[id(table)])
        self.families += _families(store, tables, views)

    @property
    def lines(self) -> list[ScoreLine]:
        """Lines of all tables: one per method and budget of each table."""
        return [line for view in self.views for line in view.lines]

    def styles(self) -> dict[str, Look]:
        """Return label of a line -> colour and marker, the same in every chart."""
        return looks(line["label"] for line in self.lines)

    def join_passes(self, tables: Sequence[CostTable]) -> list[str]:
        """Fill in missing times per token from timed passes (`scenario=efficiency`) of any store.

        A line takes the time of a pass with equal model, method, reading, parameters, protocol and budget. Of all
        passes, only those with the smallest batch and then the longest prompt are used. Return a sentence on the number
        of filled lines; [] without passes. tables: cost tables of all stores.
        """
        passes = [table for table in tables if table.per_pass]
        if not passes:
            return []
        shape = max((table.shape for table in passes), key=lambda one: (-int(one["batch"]), int(one["prompt_tokens"])))
        time_entries = {}
        for table in [table for table in passes if table.shape == shape]:
            for method, budget in table.lines():
                entry = table.entries[method.label, budget].get("tpot_s")
                time_entries[cell_key(table.context, method, table.axis, budget)] = entry
        joined_lines = 0
        for line in self.lines:
            entry = time_entries.get(line["setting"])
            if cost_value(line, "token") is None and entry is not None and entry.value is not None:
                line["token"] = entry
                joined_lines += 1
        shape_text = f"passes of {shape['prompt_tokens']} prompt tokens, batch {shape['batch']}"
        return [f"Times per token of {joined_lines} of {len(self.lines)} lines come from {shape_text}."]

    def table(self, stores: Sequence[str]) -> tuple[str, Markup]:
        """Return (sentence, HTML) of one sortable table of all lines. stores: folders of the stores.

        The sentence names columns with a single value, which the table leaves out.
        """
        columns = {header: list(map(field_of, self.lines)) for header, field_of in _COLUMNS.items()}
        columns["rows"] = [text_field(stores[line["store"]]) for line in self.lines]
        constant_columns = [
            name for name in FILTERED if len({text for text, _ in columns[name]}) == 1 and name != "method"
        ]
        constant_text = ", ".join(f"{name} {columns[name][0][0]}" for name in constant_columns if columns[name][0][0])
        varying_columns = {name: fields for name, fields in columns.items() if name not in constant_columns}
        return f"All lines: {constant_text}." if constant_text else "", datatable("cells", varying_columns, FILTERED)


def _cell_links(line: ScoreLine) -> Field:
    link = Markup('<a href="cells/{}.html">{}</a>')
    links = Markup(" ").join(link.format(name, name.partition("-")[2][:SHORT]) for name in line["pages"])
    return text_field("".join(line["pages"][:1]), links)


def _token_ms(line: ScoreLine) -> Field:
    seconds = cost_value(line, "token")
    return "-" if seconds is None else f"{1000 * seconds:#.3g}".removesuffix("."), seconds


def _text(key: str) -> Callable[[ScoreLine], Field]:
    return lambda line: text_field(line[key] or "-")


_COLUMNS: dict[str, Callable[[ScoreLine], Field]] = {
    "cell": _cell_links,
    "method": _text("label"),
    "budget": lambda line: (
        budget_words(line["axis"], line["budget"]) or "no budget",
        (line["axis"], float(line["budget"] or "inf")),
    ),
    "score": lambda line: (score(line["value"]), line["value"]),
    "95 % interval": lambda line: (interval(line["low"], line["high"]), line["low"]),
    "n": lambda line: (f"{line['n_ok']}/" * (line["n_ok"] != line["n"]) + str(line["n"]), (line["n"], line["n_ok"])),
    "rank": lambda line: (ranks_text(line["rank"]) if line["rank"] else "", line["rank"]),
    **{name: _text(name) for name in ("dataset", "metric", "protocol", "reading", "model")},
    "bytes, of full": lambda line: (score(ratio := line["bytes"] and line["bytes"].ratio), ratio),
    "ms/token": _token_ms,
    "remarks": lambda line: text_field(
        "; ".join(filter(None, (line["over_budget"] and "over budget", line["fallbacks"])))
    ),
    "audit": _text("audit"),
}
"""Header -> function that returns the field of a line, for the table of all lines."""


def _line(
    table: ScoreTable,
    method: Line,
    budget: str,
    entry: Entry,
    costs: Mapping[tuple[Any, ...], Mapping[str, CostEntry]],
) -> ScoreLine:
    """Return a line of the report. costs: key of `_key` -> costs by name."""
    entries = costs.get(_key(table, method, budget), {})
    bytes_held, bytes_device, token_time = (entries.get(cost.key) for cost in COSTS)
    return {
        **record(table, method, budget, entry),
        "label": line_label(method),
        "axis": table.axis,
        "rank": table.rank(method.label, budget),
        "audit": audit_words(entry.audit),
        "fallbacks": "; ".join(f"{reason}: {n} of {entry.audit.n}" for reason, n in entry.audit.fallbacks.items()),
        "bytes": bytes_held
        if bytes_held is not None and bytes_held.value is not None
        else bytes_device,  # some rows are older than bytes_held
        "token": token_time,
        "setting": cell_key(table.context, method, table.axis, budget),
    }


def _families(store: int, tables: Sequence[ScoreTable], views: Mapping[int, ScoreView]) -> Iterable[Family]:
    """Yield families of tables with equal context: one of each task's first metric, then one per metric.

    Equal families are yielded once. store: number of the store. views: id of a table -> its view.
    """
    contexts = [table.context for table in tables]
    for family in families(tables):
        metrics = dict.fromkeys(table.metric for table in family)
        table_choices = [headlines(family), *([t for t in family if t.metric == metric] for metric in metrics)]
        for members in {tuple(map(id, choice)): choice for choice in table_choices}.values():
            first_table = members[0]
            same_metric = all(a.metric == b.metric for a, b in pairwise(members))
            family_words = [first_table.metric if same_metric else "each task's first metric", first_table.axis]
            family_words += context_words(first_table.context, first_table.readings, contexts)
            family_words.append(f"{len(members)} task{'s' * (len(members) > 1)}")
            ranks = {ranked.budget: _ranks(ranked) for ranked in ranks_over(members)}
            yield Family(" · ".join(family_words), store, [views[id(table)] for table in members], ranks)


def _ranks(ranked: TaskRanks) -> FamilyRanks:
    names = {line.label: line_label(line) for table in ranked.tables for line in table.methods}
    methods, means, rank_ends = [names[label] for label in ranked.methods], ranked.means.tolist(), ranked.ranks.tolist()
    order_by_mean = sorted(
        range(len(methods)), key=lambda at: (sum(means[at]), means[at][1], text_field(methods[at])[1])
    )
    note = [words[:1].upper() + words[1:] for words in ranking_warning(ranked.tables[0].context["model"])]
    if ranked.apart:
        note.append(f"On some of the tasks only: {', '.join(names[label] for label in ranked.apart)}.")
    return FamilyRanks(
        [table.dataset for table in ranked.tables],
        [methods[at] for at in order_by_mean],
        [[task[at] for task in rank_ends] for at in order_by_mean],
        [means[at] for at in order_by_mean],
        " ".join(note),
    )


def audit_words(audit: Audit) -> str:
    """Return a text on the kept entries of a cell's answers, such as the number of answers over the budget."""
    if not audit.n:
        return "no counted answers"
    over_text = f"{audit.over} of {audit.n} answers over the budget, by {audit.excess_mean:.1%} on average and "
    is_said = {
        f"all {audit.n} answers within the budget": not audit.over,
        f"{over_text}{audit.excess_worst:.1%} at most": audit.over,
        f"{audit.from_prefill} answers wholly from the full prefill": audit.from_prefill,
        f"{audit.text_before_cut} with question text before the cut": audit.text_before_cut,
        f"packed entries: {audit.device:.2f} of full's bytes on the device": audit.packed,
        f"entries come back from the host: {audit.host:.2f} of full's bytes there": audit.retrievable,
    }
    return "; ".join(words for words, true in is_said.items() if true)


def _key(table: ScoreTable | CostTable, method: Line, budget: str) -> tuple[Any, ...]:
    """Return the key that matches score and cost tables of one store: context, method, kind of budget, budget."""
    return *map(table.context.get, CONTEXT), method.name, *cell_key(table.context, method, table.axis, budget)


def _costs(tables: Sequence[CostTable]) -> dict[tuple[Any, ...], Mapping[str, CostEntry]]:
    costs: dict[tuple[Any, ...], Mapping[str, CostEntry]] = {}
    for table in tables:
        for method, budget in () if table.per_pass else table.lines():
            costs.setdefault(_key(table, method, budget), table.entries[method.label, budget])
    return costs
