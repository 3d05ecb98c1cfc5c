"""Tables as markdown, aligned so that it reads well in a terminal too; and the texts that LaTeX shares with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmkv_bench.statistics.intervals import ALPHA
from mmkv_bench.statistics.metric_kinds import MEASURES, lower_is_better
from mmkv_bench.tables.asked import better, comparisons
from mmkv_bench.tables.best import pair_summary
from mmkv_bench.tables.compare import Pair, separated_pairs
from mmkv_bench.tables.line import Line
from mmkv_bench.tables.notes import caption, line_label, marks, notes, title
from mmkv_bench.tables.table import Entry, Table


@dataclass(frozen=True)
class Text:
    """One printed table cell, not yet in any format: `range` is the interval or "", `marks` what follows the number."""

    number: str
    range: str = ""
    marks: tuple[str, ...] = ()
    bold: bool = False


EMPTY = Text("")
RANKS = "Ranks among those that compete (95%):"
PAIRS = "Paired differences whose interval, Holm-corrected within the budget, excludes 0"


def score(value: float | None) -> str:
    """Two decimals, without a minus on zero; "-" for nothing."""
    if value is None:
        return "-"
    text = f"{value:.2f}"
    return text.removeprefix("-") if float(text) == 0 else text


def signed(value: float) -> str:
    """Two decimals with a sign, but for zero."""
    return score(value) if float(f"{value:.2f}") <= 0 else f"+{score(value)}"


def span(low: float | None, high: float | None) -> str:
    """`[0.71, 0.80]`, or "" without an interval."""
    return "" if low is None or high is None else f"[{score(low)}, {score(high)}]"


def p_value(p: float) -> str:
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def entry_text(table: Table, method: Line, budget: str, intervals: bool) -> Text:
    """What is printed for a method at a budget ("" = no budget)."""
    entry = table.entry(method.label, budget)
    if entry is None:
        return EMPTY
    found = tuple(marks(table, method, entry))
    if entry.scores.unjudged:
        word = "not measured" if table.metric in MEASURES else "not judged"
        return Text(f"{word}: {entry.scores.n - entry.scores.n_ok}/{entry.scores.n}", "", found)
    if entry.value is None:
        return Text(f"{entry.scores.n_ok}/{entry.scores.n} ok: {score(entry.zero)} / {score(entry.common)}", "", found)
    bold = method.label in table.best(budget) and (method.label, budget) in table.entries
    return Text(score(entry.value), span(entry.low, entry.high) if intervals else "", found, bold)


LONG = 10
"""So many tables have their contents before them."""


def markdown(
    tables: Sequence[Table],
    *,
    intervals: bool = True,
    pairs: bool = False,
    compare: bool = False,
    against: str | None = None,
) -> str:
    """All tables, each with caption and notes, and their contents before them where they are many.

    pairs: the separated pairs after each table. compare: every comparison of the lines that are shown (see `asked`), or with
    `against` those with that line, beside the whole table's verdict.
    """
    texts = [_contents(tables)] if len(tables) >= LONG else []
    for table in tables:
        texts.append(_markdown_table(table, tables, intervals, pairs))
        if compare:
            texts.append("\n\n".join(_compared(table, against)) + "\n")
    return "\n".join(texts)


def _contents(tables: Sequence[Table]) -> str:
    lines = [f"{number}. {title(table)}: {caption(table, tables, False)}" for number, table in enumerate(tables, 1)]
    return "\n".join([f"{len(tables)} tables:", "", *lines]) + "\n"


def _compared(table: Table, against: str | None) -> list[str]:
    """The comparisons that were asked for, with how many they are and how many the whole table makes."""
    found = comparisons(table, against)
    if not found:
        return ["No two lines were to be compared."]
    most = {budget: len(column.p) for budget, column in table.columns.items()}
    header = ["budget", "a", "b", "a - b", "p", "Holm, asked", "Holm, whole", "proven better, whole"]
    grid = [
        [
            one.pair.budget or "all",
            one.pair.a,
            one.pair.b,
            signed(one.pair.difference),
            p_value(one.pair.p),
            p_value(one.asked),
            "-" if one.whole is None else p_value(one.whole),
            better(one, one.whole, lower_is_better(table.metric)),
        ]
        for one in found
    ]
    falls = [one for one in found if one.whole is not None and one.asked <= ALPHA < one.whole]
    budgets = dict.fromkeys(one.pair.budget for one in found)
    counts = ", ".join(f"{most[budget]} at {budget or 'all'}" for budget in budgets if budget in most)
    said = [
        f"{len(found)} comparisons were asked for; among those that compete, the whole table makes {counts or 'none'}. Each p "
        "is corrected over those asked for at its budget (asked), and over all that the whole table makes there (whole): who "
        "asks for two has seen them all, so the latter counts. Bold and ranks are the whole table's, too.",
    ]
    if falls:
        pairs = ", ".join(f"{one.pair.a} and {one.pair.b} at {one.pair.budget or 'all'}" for one in falls)
        said.append(f"only among what was asked for, and not in the whole table, differ: {pairs}.")
    return ["Comparisons asked for:", aligned(header, grid), "\n".join(f"- {line}" for line in said)]


def _markdown_table(table: Table, tables: Sequence[Table], intervals: bool, pairs: bool) -> str:
    columns = table.budgets or ("",)
    header = ["method", *(budget or "all" for budget in columns)]
    grid = [
        [line_label(method), *(_cell(entry_text(table, method, budget, intervals)) for budget in columns)]
        for method in table.methods
    ]
    blocks = [f"**{title(table)}**: {caption(table, tables, intervals)}", aligned(header, grid)]
    if not table.comparable and len(table.common_ids):
        common = [[line_label(m), *(_common(table.entry(m.label, b)) for b in columns)] for m in table.methods]
        blocks += [f"The same over the {len(table.common_ids)} samples ok in every cell:", aligned(header, common)]
    ranks = rank_grid(table)
    if ranks and intervals:
        blocks += [RANKS, aligned(["method", *(budget for budget in columns if table.ranked(budget))], ranks)]
    remarks = notes(table)
    if remarks:
        blocks.append("\n".join(f"- {note}" for note in remarks))
    if pairs:
        blocks += _markdown_pairs(table)
    return "\n\n".join(blocks) + "\n"


def _cell(text: Text) -> str:
    number = f"**{text.number}**" if text.bold else text.number
    return " ".join(part for part in (number, text.range, "".join(text.marks)) if part)


def _common(entry: Entry | None) -> str:
    return score(entry.common) if entry else ""


def rank_grid(table: Table) -> list[list[str]]:
    """Name and ranks, as `2-5`, of every line that has one; a column for each budget at which there are ranks."""
    budgets = [budget for budget in table.budgets if table.ranked(budget)]
    grid = []
    for method in table.methods:
        ranks = [table.rank(method.label, budget) for budget in budgets]
        if any(ranks):
            grid.append([line_label(method), *(_rank(rank) for rank in ranks)])
    return grid


def _rank(rank: tuple[int, int] | None) -> str:
    return "" if rank is None else "-".join(map(str, dict.fromkeys(rank)))


def _markdown_pairs(table: Table) -> list[str]:
    header = ["budget", "better", "worse", "difference", "Holm interval", "Holm p", "n"]
    grid = [
        [
            pair.budget or "all",
            *pair.order,
            signed(towards_better(pair)[0]),
            span(*towards_better(pair)[1:]),
            p_value(pair.holm),
            str(pair.n),
        ]
        for pair in separated_pairs(table)
    ]
    summary = "\n".join(f"- {line}" for line in pair_summary(table))
    heading = f"{PAIRS}:"
    return [heading, aligned(header, grid), summary] if grid else [heading + " none.", summary]


def towards_better(pair: Pair) -> tuple[float, float | None, float | None]:
    """The better one's score minus the worse one's, with the ends of its interval."""
    if pair.better == pair.a:
        return pair.difference, pair.low, pair.high
    low, high = (None if end is None else -end for end in (pair.high, pair.low))
    return -pair.difference, low, high


def aligned(header: Sequence[str], grid: Sequence[Sequence[str]]) -> str:
    """A markdown table whose columns line up in a fixed-width font."""
    lines = [list(header), *map(list, grid)]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(header))]
    rows = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    return "\n".join([rows[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *rows[1:]])
