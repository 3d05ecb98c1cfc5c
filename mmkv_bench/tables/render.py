"""Tables as sections, which are written as markdown or as a page, and the texts that LaTeX shares with them."""

from __future__ import annotations

from collections.abc import Sequence

from mmkv_bench.statistics.intervals import ALPHA
from mmkv_bench.statistics.metric_kinds import MEASURES, lower_is_better
from mmkv_bench.tables.best import pair_summary
from mmkv_bench.tables.compare import Pair, separated_pairs
from mmkv_bench.tables.line import Line
from mmkv_bench.tables.notes import caption, line_label, marks, notes, title
from mmkv_bench.tables.raw import SHORT
from mmkv_bench.tables.requested import better, comparisons
from mmkv_bench.tables.score_table import Entry, ScoreTable
from mmkv_bench.tables.sections import Block, Grid, Notes, Section, Text, as_markdown

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


def entry_text(table: ScoreTable, method: Line, budget: str, intervals: bool) -> Text:
    """What is printed for a method at a budget ("" = no budget)."""
    entry = table.entry(method.label, budget)
    if entry is None:
        return EMPTY
    found = tuple(marks(table, method, entry, budget))
    cells = tuple(cell[:SHORT] for cell in entry.cells)
    if entry.scores.unjudged:
        word = "not measured" if table.metric in MEASURES else "not judged"
        return Text(f"{word}: {entry.scores.n - entry.scores.n_ok}/{entry.scores.n}", "", found, cells=cells)
    if entry.value is None:
        told = f"{entry.scores.n_ok}/{entry.scores.n} ok: {score(entry.zero)} / {score(entry.common)}"
        return Text(told, "", found, cells=cells)
    bold = method.label in table.best(budget) and (method.label, budget) in table.entries
    return Text(score(entry.value), span(entry.low, entry.high) if intervals else "", found, bold, cells)


def markdown(tables: Sequence[ScoreTable], *, intervals: bool = True, pairs: bool = False) -> str:
    """All tables as markdown; see `sections`."""
    return as_markdown(sections(tables, intervals=intervals, pairs=pairs))


def sections(
    tables: Sequence[ScoreTable],
    *,
    intervals: bool = True,
    pairs: bool = False,
    compare: bool = False,
    against: str | None = None,
) -> list[Section]:
    """Every table with caption and notes.

    pairs: the separated pairs after each table. compare: every comparison of the lines that are shown (see `asked`), or with
    `against` those with that line, beside the whole table's verdict.
    """
    return [
        Section(
            title(table),
            caption(table, tables, intervals),
            (*_body(table, intervals, pairs), *(_compared(table, against) if compare else ())),
            short=caption(table, tables, False),
        )
        for table in tables
    ]


def _compared(table: ScoreTable, against: str | None) -> list[Block]:
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
    return ["Comparisons asked for:", Grid(header, grid), Notes(said)]


def _body(table: ScoreTable, intervals: bool, pairs: bool) -> list[Block]:
    columns = table.budgets or ("",)
    header = ["method", *(budget or "all" for budget in columns)]
    grid: list[list[Text | str]] = [
        [line_label(method), *(entry_text(table, method, budget, intervals) for budget in columns)]
        for method in table.methods
    ]
    blocks: list[Block] = [Grid(header, grid)]
    if not table.comparable and len(table.common_ids):
        common = [[line_label(m), *(_common(table.entry(m.label, b)) for b in columns)] for m in table.methods]
        blocks += [f"The same over the {len(table.common_ids)} samples ok in every cell:", Grid(header, common)]
    ranks = rank_grid(table)
    if ranks and intervals:
        blocks += [RANKS, Grid(["method", *(budget for budget in columns if table.ranked(budget))], ranks)]
    remarks = notes(table)
    if remarks:
        blocks.append(Notes(remarks))
    return blocks + (_pairs(table) if pairs else [])


def _common(entry: Entry | None) -> str:
    return score(entry.common) if entry else ""


def rank_grid(table: ScoreTable) -> list[list[str]]:
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


def _pairs(table: ScoreTable) -> list[Block]:
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
    summary = Notes(pair_summary(table))
    return [f"{PAIRS}:", Grid(header, grid), summary] if grid else [f"{PAIRS}: none.", summary]


def towards_better(pair: Pair) -> tuple[float, float | None, float | None]:
    """The better one's score minus the worse one's, with the ends of its interval."""
    if pair.better == pair.a:
        return pair.difference, pair.low, pair.high
    low, high = (None if end is None else -end for end in (pair.high, pair.low))
    return -pair.difference, low, high
