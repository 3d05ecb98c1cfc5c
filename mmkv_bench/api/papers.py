"""`paper_tables`: the papers' tables and figures with what rows hold for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmkv_bench.papers.evidence import Evidence
from mmkv_bench.papers.filled_table import FilledTable, fill
from mmkv_bench.papers.formats import frame, render
from mmkv_bench.papers.layout import load, table_ids

if TYPE_CHECKING:
    import pandas as pd


class PaperTables(list[FilledTable]):
    """Tables that print as `mmkv-bench papers` prints them."""

    def __str__(self) -> str:
        return render(self, "md")

    def _repr_markdown_(self) -> str:
        return str(self)

    def latex(self) -> str:
        """The tables in LaTeX."""
        return render(self, "latex")

    def frame(self) -> pd.DataFrame:
        """One row per cell, the columns of `--format csv`: its address, state, number, interval, printed value and verdict."""
        return frame(self)


def paper_tables(*names: str, rows: Sequence[Path | str] | Path | str = ()) -> PaperTables:
    """Tables and figures of the papers, measured beside printed.

    Args:
        names: their ids, as `mmkv-bench papers --list` has them; none: all of them.
        rows: folders that runs printed, or that hold such; none: nothing was measured, and the cells say what runs them.

    Returns:
        A list of tables: `print` it, show it in a notebook, or take its `frame()`.

    Raises:
        ConfigError: a name that no table has, or a folder without rows. StoreError: rows that are damaged or of another
            version.

    Example:
        >>> print(paper_tables("mmshift_table01", rows="runs/papers"))  # doctest: +SKIP
    """
    specs = [load(name) for name in names or table_ids()]
    folders = [rows] if isinstance(rows, str | Path) else rows
    evidence = Evidence.of([Path(folder).expanduser() for folder in folders])
    return PaperTables(fill(spec, evidence) for spec in specs)
