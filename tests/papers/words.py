"""Words of a cell as tables show them, with the reasons that its letters stand for."""

from __future__ import annotations

from mmkv_bench.papers.judgement import FilledCell, FilledTable
from mmkv_bench.papers.layout import load
from mmkv_bench.papers.table import Reasons, cells_of, paper_table
from mmkv_bench.tables.table import GridCell


def text(one: FilledCell) -> str:
    """Write a cell: number, interval, verdict: reasons, marks."""
    reasons = Reasons()
    filled = FilledTable(load("mmshift_table01"), (one,), (), {}, 0, dict.fromkeys(one.measured.rows, "rows cell"))
    return "; ".join(_words(cell, reasons) for cell in cells_of(filled, one, reasons))


def _words(cell: GridCell, reasons: Reasons) -> str:
    letters = {letter: reason for reason, letter in reasons.items()}
    why = ", ".join(letters[mark] for mark in cell.marks if mark in letters)
    signs = "".join(mark for mark in cell.marks if mark not in letters)
    verdict = f"{cell.verdict}: {why}" if why else cell.verdict
    return " ".join(filter(None, (cell.text, cell.interval, verdict, signs)))


def notes(filled: FilledTable) -> list[str]:
    """List all notes below a table."""
    return [note.text for note in paper_table(filled).notes]
