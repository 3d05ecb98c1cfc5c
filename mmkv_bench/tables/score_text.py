"""Tables of scores as `Table`: a row per method and a column per budget, then common samples, ranks and pairs.

A table of fidelity (distance from the full cache's token distributions and answers) has a column per metric.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import ConfigError
from mmkv_bench.protocols import protocol
from mmkv_bench.statistics.intervals import ALPHA
from mmkv_bench.statistics.metric_kinds import FIDELITY, KL_TO, MEASURES, POSITIONS, TOP1_TO, lower_is_better
from mmkv_bench.tables.build import build
from mmkv_bench.tables.compare import Pair, better, comparisons, every_pair, requested_pairs, separated_pairs
from mmkv_bench.tables.dataset_groups import families
from mmkv_bench.tables.score_notes import marks, score_notes
from mmkv_bench.tables.score_table import Entry, Line, ScoreTable
from mmkv_bench.tables.stored_rows import BASELINE, Rows
from mmkv_bench.tables.table import Grid, GridCell, Note, Rank, Table
from mmkv_bench.tables.text import caption, interval_text, line_label, p_value, ranks_text, score, signed_score

if TYPE_CHECKING:
    import pandas as pd


SHORT = 12
"""Tables print this many digits of a hash; commands accept as many."""
RANKS = "Ranks among the compared methods (95%)"
PAIRS = "Paired differences whose interval, Holm-corrected within the budget, excludes 0"
_PAIR_HEADER = ("budget", "better", "worse", "difference", "Holm interval", "Holm p", "n")
_COMPARED_HEADER = (
    *("budget", "first", "second", "first - second", "p", "Holm, asked", "Holm, whole", "proven better, whole"),
)


def tables_of_scores(
    tables: Sequence[ScoreTable],
    *,
    intervals: bool = True,
    pairs: bool = False,
    compare: bool = False,
    against: str | None = None,
) -> list[Table]:
    """Return one `Table` per table of scores.

    Args:
        intervals: print intervals and ranks.
        pairs: add a list of the pairs that are proven different; the csv records are then all pairs.
        compare: add a list of all comparisons of lines in the table (`compare.comparisons`).
        against: name or label of a line; list only pairs and comparisons with this line.
    """
    return [
        _table(table, tables, intervals, pairs, comparisons(table, against) if compare else None, against)
        for table in tables
    ]


def frame(tables: Sequence[ScoreTable]) -> pd.DataFrame:
    """Return a frame with the csv record of every table cell."""
    import pandas as pd

    return pd.DataFrame([record for table in tables for record in _records(table)])


def _table(
    table: ScoreTable,
    tables: Sequence[ScoreTable],
    intervals: bool,
    pairs: bool,
    compared: Sequence[Pair] | None,
    against: str | None,
) -> Table:
    columns = table.budgets or ("",)
    header = ["method", *(budget or "all" for budget in columns)]
    grids = [Grid(header, [row(table, method, columns, intervals) for method in table.methods])]
    if not table.comparable and len(table.common_ids):
        entries_by_line = [(line_label(m), [table.entry(m.label, b) for b in columns]) for m in table.methods]
        common_rows = [
            [label, *(score(entry.common) if entry else "" for entry in entries)] for label, entries in entries_by_line
        ]
        grids.append(Grid(header, common_rows, f"The same over the {len(table.common_ids)} samples ok in every cell"))
    ranks = _ranks(table)
    if ranks and intervals:
        grids.append(Grid(["method", *(budget for budget in columns if table.ranked(budget))], ranks, RANKS))
    notes = score_notes(table)
    if pairs:
        grids += [Grid(_PAIR_HEADER, pairs_table, PAIRS, labels=3)] if (pairs_table := _pairs(table, against)) else []
        counts = [
            f"{int((column.separated & requested).sum())} of {int(requested.sum())}{budget and f' at {budget}'}"
            for budget, column in table.columns.items()
            for requested in [requested_pairs(table, column, against)]
        ]
        text = f"Separated pairs of the compared methods: {', '.join(counts) or 'none'}."
        notes.insert(0, Note(text, Rank.WARNING))
    if compared is not None:
        grids += (
            [Grid(_COMPARED_HEADER, _comparison_rows(table, compared), "Comparisons", labels=3)] if compared else []
        )
        notes = [*_comparison_notes(table, compared), *notes]
    return Table(
        f"{table.dataset}, {table.metric}",
        caption(table, tables, intervals),
        grids,
        notes,
        short=caption(table, tables, False),
        name=_name(table, tables),
        records=partial(_pair_records if pairs else _records, table),
    )


def row(table: ScoreTable, method: Line, columns: Sequence[str], intervals: bool) -> list[GridCell | str]:
    """Return a row of the table: the method's label, then a cell for each budget of `columns`."""
    if method.budgeted:
        return [line_label(method), *(_cell(table, method, budget, intervals) for budget in columns)]
    single_cell = _cell(table, method, "", intervals, span=len(columns))
    return [line_label(method), *(single_cell for _ in columns)]


def _cell(table: ScoreTable, method: Line, budget: str, intervals: bool, span: int = 0) -> GridCell:
    entry = table.entry(method.label, budget)
    if entry is None:
        return GridCell("")
    text, value, interval, bold = score(entry.value), entry.value, "", False
    if entry.scores.unjudged:
        word = "not measured" if table.metric in MEASURES else "not judged"
        text, value = f"{word}: {entry.scores.n - entry.scores.n_ok}/{entry.scores.n}", None
    elif value is None:
        text = f"{entry.scores.n_ok}/{entry.scores.n} ok: {score(entry.zero)} / {score(entry.common)}"
    else:
        interval = interval_text(entry.low, entry.high) if intervals else ""
        bold = method.label in table.best(budget) and (method.label, budget) in table.entries
    signs, hashes = tuple(marks(table, method, entry, budget)), tuple(cell[:SHORT] for cell in entry.cells)
    return GridCell(text, value, interval, signs, bold, hashes=hashes, span=span)


def _ranks(table: ScoreTable) -> list[list[str]]:
    budgets = [budget for budget in table.budgets if table.ranked(budget)]
    rows = []
    for method in table.methods:
        ranks = [table.rank(method.label, budget) for budget in budgets]
        if any(ranks):
            rows.append([line_label(method), *(ranks_text(rank or ()) for rank in ranks)])
    return rows


def _pairs(table: ScoreTable, against: str | None) -> list[list[str]]:
    rows = []
    for pair in separated_pairs(table, against):
        better_pair = pair if pair.better == pair.a else pair.swapped
        numbers = (
            signed_score(better_pair.difference),
            interval_text(better_pair.low, better_pair.high),
            p_value(pair.adjusted or 0.0),
        )
        rows.append([pair.budget or "all", better_pair.a, better_pair.b, *numbers, str(pair.n)])
    return rows


def _comparison_rows(table: ScoreTable, compared: Sequence[Pair]) -> list[list[str]]:
    return [
        [
            one.budget or "all",
            one.a,
            one.b,
            signed_score(one.difference),
            p_value(one.p),
            p_value(one.p_requested or 0.0),
            "-" if one.adjusted is None else p_value(one.adjusted),
            better(one, one.adjusted, lower_is_better(table.metric)),
        ]
        for one in compared
    ]


def _comparison_notes(table: ScoreTable, compared: Sequence[Pair]) -> list[Note]:
    if not compared:
        return [Note("No comparisons: fewer than two of these lines have scores.", Rank.WARNING)]
    pairs_per_budget = {budget: len(column.p) for budget, column in table.columns.items()}
    budgets = dict.fromkeys(one.budget for one in compared)
    counts_text = ", ".join(
        f"{pairs_per_budget[budget]} at {budget or 'all'}" for budget in budgets if budget in pairs_per_budget
    )
    text = (
        f"{len(compared)} comparisons here; the whole table has {counts_text or 'none'}. `Holm, asked` corrects for those here, "
        "`Holm, whole` for all of the whole table: only the latter counts, because whoever picked these has seen them all. Bold "
        "and ranks are the whole table's."
    )
    notes = [Note(text, Rank.WARNING)]
    lost_by_whole_correction = [
        one for one in compared if one.adjusted is not None and (one.p_requested or 0.0) <= ALPHA < one.adjusted
    ]
    if lost_by_whole_correction:
        pairs = ", ".join(f"{one.a} and {one.b} at {one.budget or 'all'}" for one in lost_by_whole_correction)
        notes.append(Note(f"Different only among the comparisons here, not in the whole table: {pairs}.", Rank.WARNING))
    return notes


def _name(table: ScoreTable, tables: Sequence[ScoreTable]) -> str:
    """Return a name for links: dataset, metric, protocol, readings and kind of budget, numbered if several have the name."""
    names = ["-".join(filter(None, (t.dataset, t.metric, t.context["protocol"], *t.readings, t.axis))) for t in tables]
    table_number = next(i for i, other in enumerate(tables) if other is table)
    return names[table_number] + (
        f"-{names[: table_number + 1].count(names[table_number])}" if names.count(names[table_number]) > 1 else ""
    )


def _records(table: ScoreTable) -> list[dict[str, Any]]:
    return [record(table, *cell) for cell in table.cells]


def record(table: ScoreTable, method: Line, budget: str, entry: Entry) -> dict[str, Any]:
    audit = entry.audit
    rank = table.rank(method.label, budget) or (None, None)
    return {
        **table.context,
        "reading": method.reading,
        "metric": table.metric,
        "method": method.label,
        **{name: getattr(method, name) for name in ("base", "tuned", "parameters")},
        "budget_kind": table.axis if budget else "none",
        "budget": budget,
        "seeds": " ".join(map(str, entry.seeds)),
        "n": entry.scores.n,
        "n_ok": entry.scores.n_ok,
        **{name: getattr(entry, name) for name in ("value", "low", "high", "interval")},
        "value_failures_zero": entry.zero,
        "value_common": entry.common,
        "n_common": len(table.common_ids),
        "best": budget != "" and method.label in table.best(budget),
        "competes": budget in table.columns and method.label in table.columns[budget].names,
        "rank_low": rank[0],
        "rank_high": rank[1],
        "lmms_eval": entry.lmms_eval,
        "lmms_eval_ours": entry.lmms_eval_ours,
        "answers": audit.n,
        "over_budget": audit.over,
        **{name: getattr(audit, name) for name in ("excess_mean", "excess_worst", "from_prefill", "text_before_cut")},
        "fallbacks": " ".join(f"{reason}={n}" for reason, n in audit.fallbacks.items()),
        "cells": " ".join(cell[:SHORT] for cell in entry.cells),
    }


_PAIR_FIELDS = ("a", "b", "n", "difference", "low", "high", "p", "test", "compete")


def _pair_records(table: ScoreTable) -> list[dict[str, Any]]:
    """Return one csv record per pair of lines at a budget.

    If both lines compete, `low` and `high` are at Holm's level. Otherwise they are at 95 %, and `holm_level` and all later keys
    are None.
    """
    return [
        {
            **table.context,
            "readings": " ".join(table.readings),
            "metric": table.metric,
            "budget_kind": table.axis,
            "budget": pair.budget,
            **{name: getattr(pair, name) for name in _PAIR_FIELDS},
            "holm_level": pair.level,
            "p_holm": pair.adjusted,
            "separated": pair.better is not None if pair.compete else None,
            "better": pair.better,
        }
        for pair in every_pair(table)
    ]


GROUP = "fidelity"
"""Name that stands for all metrics of fidelity on a command line."""

COLUMNS = {
    "fidelity_kl": "KL [nats, <= 5]",
    "fidelity_kl_first": "KL token 1 [<= 5]",
    "fidelity_top1": "top-1",
    "divergence": "tokens in common",
    "same_answer": "same answer",
    **{
        name: f"{word} to {end}"
        for word, names in (("KL", KL_TO), ("top-1", TOP1_TO))
        for name, end in zip(names, POSITIONS, strict=True)
    },
}


def fidelity_metrics(metrics: Sequence[str]) -> set[str]:
    """Return the fidelity metrics in `metrics`; the name `fidelity` stands for all of them."""
    return set(FIDELITY) if GROUP in metrics else set(FIDELITY).intersection(metrics)


def names(metrics: Sequence[str] | None, rows: Rows) -> list[str] | None:
    """Return `metrics` with the name `fidelity` replaced by all fidelity metrics of the rows, if any; None stays None."""
    if metrics is None:
        return None
    names_present = [name for name in FIDELITY if name in rows.names] or [GROUP]
    return [name for metric in metrics for name in (names_present if metric == GROUP else [metric])]


def fidelity_tables(
    rows: Rows,
    datasets: Sequence[str] | None = None,
    protocols: Sequence[str] | None = None,
    readings: Sequence[str] | None = None,
) -> list[Table]:
    """Return one table of fidelity per context (model, dataset, protocol) and kind of budget. A row is a method at a budget.

    Args:
        datasets, protocols, readings: names to keep; None: all. Readings: `paper` or `released` rules of a method.

    Raises:
        ConfigError: the rows have no fidelity metric.
    """
    metrics = [name for name in COLUMNS if name in rows.names]
    if not metrics:
        raise ConfigError(
            "These rows have no fidelity: they were made with fidelity=off, with sharing=off, without `full`, or before it "
            "was measured; run them again in another folder (out=<folder>)."
        )
    tables = build(rows, datasets=datasets, protocols=protocols, readings=readings, metrics=metrics)
    groups: dict[tuple[str, ...], dict[str, ScoreTable]] = {}
    for table in tables:
        groups.setdefault((*table.context.values(), table.axis), {})[table.metric] = table
    return [_fidelity_table(group, tables) for group in groups.values()]


def _fidelity_table(group: Mapping[str, ScoreTable], tables: Sequence[ScoreTable]) -> Table:
    shown_metrics = [metric for metric in COLUMNS if metric in group]
    first_table = group[shown_metrics[0]]
    lines = {
        (method.label, budget): method for t in group.values() for method in t.methods for budget in ("", *t.budgets)
    }
    rows = [
        [
            line_label(method),
            budget or "all",
            *(_fidelity_cell(group[metric], label, budget) for metric in shown_metrics),
        ]
        for (label, budget), method in lines.items()
        if any((label, budget) in table.entries for table in group.values())
    ]
    grid = Grid(["method", "budget", *(COLUMNS[metric] for metric in shown_metrics)], rows, labels=2)
    caption_text = caption(first_table, tables, intervals=False)
    return Table(f"{first_table.dataset}, {GROUP}", caption_text, [grid], [*_fidelity_notes(first_table, [*group])])


def _fidelity_notes(table: ScoreTable, metrics: Sequence[str]) -> Iterator[Note]:
    """Yield the notes of a table of fidelity. table: table of scores of one metric. metrics: all metrics of the table."""
    included_text = "without token 1, which the full prefill gives to all methods"
    if not protocol(table.context["protocol"]).from_prefill:
        included_text = "token 1 included"
    has_continuation = KL_TO[0] in metrics
    fed_text = "the dataset's continuation" if has_continuation else "full's own answer"
    text = (
        f"KL(full || method) and top-1 agreement per token of {fed_text}, teacher-forced, mean over samples "
        f"({included_text}). A sample counts for 5 nats at most."
    )
    yield Note(text, Rank.MARK)
    if has_continuation:
        text = "to N: the stretch of the continuation that ends at token N, from the one before on."
    else:
        text = "Tokens in common: length of the method's own answer until it differs from full's."
    yield Note(text, Rank.MARK)
    if any(method.base == BASELINE for method in table.methods):
        yield Note("full: measured again through the path of compressed caches, as the noise floor of the others.")
    metric_options = ", ".join(f"--metric {metric}" for metric in metrics if "_to_" not in metric)
    yield Note(f"For intervals and pairs: {metric_options}.", Rank.DETAIL)


def _fidelity_cell(table: ScoreTable, label: str, budget: str) -> str:
    entry = table.entries.get((label, budget))
    if entry is None:
        return ""
    if entry.value is None:
        return f"{entry.scores.n_ok}/{entry.scores.n} measured"
    if table.metric.startswith("fidelity_kl"):
        return f"{entry.value:.2g}" if entry.value else "0"
    return f"{entry.value:.1f}" if table.metric == "divergence" else f"{entry.value:.3f}"


def joined_tables(tables: Sequence[ScoreTable], *, intervals: bool = True) -> list[Table]:
    """Join tables that differ only in dataset and metric. A note that holds for some of them begins with their names."""
    return [_joined_table(family, tables, intervals, number) for number, family in enumerate(families(tables), 1)]


def _joined_table(family: Sequence[ScoreTable], tables: Sequence[ScoreTable], intervals: bool, number: int) -> Table:
    letters = tuple(sorted({reason for table in family for reason in table.fallbacks}))
    family = [replace(table, letters=letters) for table in family]  # so a letter means the same fallback in all columns
    metrics = list(dict.fromkeys(table.metric for table in family))
    names = [table.dataset if len(metrics) == 1 else f"{table.dataset}, {table.metric}" for table in family]
    columns = [table.budgets or ("",) for table in family]
    lines_of = [{line_label(line): line for line in table.methods} for table in family]
    rows = []
    for label in dict.fromkeys(label for lines in lines_of for label in lines):
        cells: list[GridCell | str] = [label]
        for table, lines, budgets in zip(family, lines_of, columns, strict=True):
            cells += row(table, lines[label], budgets, intervals)[1:] if label in lines else [""] * len(budgets)
        rows.append(cells)
    groups = [name for name, budgets in zip(names, columns, strict=True) for _ in budgets]
    header = ["method", *(budget or "all" for budgets in columns for budget in budgets)]
    caption_parts = [caption(table, tables, intervals).split("; ") for table in family]
    shared_parts = [word for word in caption_parts[0] if all(word in other for other in caption_parts)]
    notes: dict[Note, list[str]] = {}
    for name, table, each in zip(names, family, caption_parts, strict=True):
        own_text = "; ".join(word for word in each if word not in shared_parts)
        for note in dict.fromkeys([*([Note(f"{own_text}.")] if own_text else []), *score_notes(table)]):
            notes.setdefault(note, []).append(name)
    shared_notes = {note for note, of in notes.items() if len(of) == len(family)}
    merged_notes = [
        n if n in shared_notes else replace(n, text=f"{', '.join(of)}: {n.text}") for n, of in notes.items()
    ]
    title = ", ".join([*dict.fromkeys(table.dataset for table in family), *metrics])
    return Table(
        title, "; ".join(shared_parts), [Grid(header, rows, groups=groups)], merged_notes, name=f"joined-{number}"
    )
