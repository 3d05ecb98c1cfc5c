r"""Tables as LaTeX for `\usepackage{booktabs}`; UTF-8 marks become commands, so any engine sets them."""

from __future__ import annotations

from collections.abc import Sequence

from mmkv_bench.tables.compare import separated_pairs
from mmkv_bench.tables.notes import (
    BEFORE_CUT,
    OVER,
    PACKED,
    PREFILL,
    PRESET,
    RETRIEVED,
    caption,
    line_label,
    notes,
    title,
)
from mmkv_bench.tables.render import (
    PAIRS,
    RANKS,
    entry_text,
    p_value,
    rank_grid,
    score,
    signed,
    span,
    towards_better,
)
from mmkv_bench.tables.score_table import ScoreTable
from mmkv_bench.tables.sections import Text

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "_": r"\_",
    "%": r"\%",
    "&": r"\&",
    "#": r"\#",
    "$": r"\$",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    OVER: r"\dag{}",
    PREFILL: r"\S{}",
    BEFORE_CUT: r"\P{}",
    PACKED: r"\ddag{}",
    RETRIEVED: r"\ensuremath{\diamond}",
    PRESET: r"\ensuremath{\parallel}",
}
_FLOATS = 10


def escape(text: str) -> str:
    """Plain text as LaTeX text."""
    return "".join(_SPECIAL.get(character, character) for character in text)


def stacked(tables: Sequence[str]) -> str:
    """Tables behind each other; LaTeX gives up where 18 floats wait for a page, as they do without text between them."""
    ends = {*range(_FLOATS, len(tables), _FLOATS)}
    return "\n".join(table + ("\\clearpage\n" if number in ends else "") for number, table in enumerate(tables, 1))


def latex(tables: Sequence[ScoreTable], *, intervals: bool = True, pairs: bool = False) -> str:
    """All tables, each a `table` environment with caption, label and notes; with `pairs`, a second one after each."""
    blocks = []
    for table in tables:
        blocks.append(_scores(table, tables, intervals))
        if pairs:
            blocks.append(_pairs(table))
    return stacked(blocks)


def _scores(table: ScoreTable, tables: Sequence[ScoreTable], intervals: bool) -> str:
    columns = table.budgets or ("",)
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escape(f'{title(table)}. {caption(table, tables, intervals)}')}}}",
    ]
    lines += [rf"\label{{tab:{_label(table, tables)}}}", rf"\begin{{tabular}}{{l{'c' * len(columns)}}}", r"\toprule"]
    lines += [" & ".join(["method", *(escape(budget) or "all" for budget in columns)]) + r" \\", r"\midrule"]
    for method in table.methods:
        if not method.budgeted:
            cell = _cell(entry_text(table, method, "", intervals))
            cells = [rf"\multicolumn{{{len(columns)}}}{{c}}{{{cell}}}"]
        else:
            cells = [_cell(entry_text(table, method, budget, intervals)) for budget in columns]
        lines.append(" & ".join([escape(line_label(method)), *cells]) + r" \\")
    if not table.comparable and len(table.common_ids):
        heading = f"the same over the {len(table.common_ids)} samples ok in every cell"
        lines += [r"\midrule", rf"\multicolumn{{{len(columns) + 1}}}{{l}}{{{heading}}} \\"]
        for method in table.methods:
            entries = [table.entry(method.label, budget) for budget in columns]
            cells = [score(entry.common) if entry else "" for entry in entries]
            lines.append(" & ".join([escape(line_label(method)), *cells]) + r" \\")
    lines += _ranks(table, columns) if intervals else []
    lines += [r"\bottomrule", r"\end{tabular}"]
    remarks = notes(table)
    if remarks:
        lines.append(r"\par\smallskip\footnotesize\raggedright " + r" \\ ".join(map(escape, remarks)))
    return "\n".join([*lines, r"\end{table}", ""])


def _ranks(table: ScoreTable, columns: Sequence[str]) -> list[str]:
    grid = rank_grid(table)
    if not grid:
        return []
    ranked = [bool(table.ranked(budget)) for budget in columns]
    lines = [r"\midrule", rf"\multicolumn{{{len(columns) + 1}}}{{l}}{{{escape(RANKS)}}} \\"]
    for label, *ranks in grid:
        shown = iter(ranks)
        lines.append(" & ".join([escape(label), *(next(shown) if known else "" for known in ranked)]) + r" \\")
    return lines


def _cell(text: Text) -> str:
    number = rf"\textbf{{{escape(text.number)}}}" if text.bold else escape(text.number)
    if text.range:
        number += rf" {{\scriptsize {text.range}}}"
    return number + (rf"\textsuperscript{{{escape(''.join(text.marks))}}}" if text.marks else "")


def _pairs(table: ScoreTable) -> str:
    lines = [r"\begin{table}", r"\centering"]
    about = f"{title(table)}. {PAIRS}."
    lines += [rf"\caption{{{escape(about)}}}", r"\begin{tabular}{lllccc}", r"\toprule"]
    lines += [r"budget & better & worse & difference & $p$ (Holm) & $n$ \\", r"\midrule"]
    for pair in separated_pairs(table):
        value, low, high = towards_better(pair)
        difference = rf"{signed(value)} {{\scriptsize {span(low, high)}}}"
        names = [escape(name) for name in (pair.budget or "all", *pair.order)]
        lines.append(" & ".join([*names, difference, escape(p_value(pair.holm)), str(pair.n)]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def _label(table: ScoreTable, tables: Sequence[ScoreTable]) -> str:
    parts = (table.dataset, table.metric, table.context["protocol"], "-".join(table.readings), table.axis)
    text = "-".join(part for part in parts if part)
    alike = [
        t
        for t in tables
        if (t.dataset, t.metric, t.context["protocol"], t.readings, t.axis)
        == (table.dataset, table.metric, table.context["protocol"], table.readings, table.axis)
    ]
    number = next(i for i, other in enumerate(alike) if other is table)
    text = f"{text}-{number + 1}" if len(alike) > 1 else text
    return "".join(character if character.isalnum() or character == "-" else "-" for character in text)
