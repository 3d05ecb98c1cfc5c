"""Tables of several tasks as one: a row per method, and for each task a group of columns, one per budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mmkv_bench.tables.dataset_groups import families
from mmkv_bench.tables.score_notes import score_notes
from mmkv_bench.tables.score_table import ScoreTable
from mmkv_bench.tables.score_text import row
from mmkv_bench.tables.table import Grid, GridCell, Note, Table
from mmkv_bench.tables.text import caption, line_label


def joined_tables(tables: Sequence[ScoreTable], *, intervals: bool = True) -> list[Table]:
    """One table for all that differ in dataset and metric alone. What holds for some tasks only is a note with their names."""
    return [_joined(family, tables, intervals, number) for number, family in enumerate(families(tables), 1)]


def _joined(family: Sequence[ScoreTable], tables: Sequence[ScoreTable], intervals: bool, number: int) -> Table:
    letters = tuple(sorted({reason for table in family for reason in table.fallbacks}))
    family = [replace(table, letters=letters) for table in family]  # one letter means one fallback in all columns
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
    words = [caption(table, tables, intervals).split("; ") for table in family]
    shared = [word for word in words[0] if all(word in other for other in words)]
    notes: dict[Note, list[str]] = {}
    for name, table, each in zip(names, family, words, strict=True):
        own = "; ".join(word for word in each if word not in shared)
        for note in dict.fromkeys([*([Note(f"{own}.")] if own else []), *score_notes(table)]):
            notes.setdefault(note, []).append(name)
    everywhere = {note for note, of in notes.items() if len(of) == len(family)}
    told = [n if n in everywhere else replace(n, text=f"{', '.join(of)}: {n.text}") for n, of in notes.items()]
    title = ", ".join([*dict.fromkeys(table.dataset for table in family), *metrics])
    return Table(title, "; ".join(shared), [Grid(header, rows, groups=groups)], told, name=f"joined-{number}")
