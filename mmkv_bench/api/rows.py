"""`evaluate`, `load_rows`, `make_table` and `paper_tables`: rows as pandas frames and as tables.

A cell is one setting: model, dataset, method, budget, protocol, reading and seed. Its hash is its id.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.config.shorthand import words
from mmkv_bench.errors import ConfigError
from mmkv_bench.store.store import Store
from mmkv_bench.tables.build import build
from mmkv_bench.tables.formats import markdown
from mmkv_bench.tables.latex import latex
from mmkv_bench.tables.score_table import ScoreTable
from mmkv_bench.tables.score_text import frame, names, tables_of_scores
from mmkv_bench.tables.stored_rows import choose, load

if TYPE_CHECKING:
    import pandas as pd

    from mmkv_bench.papers.judgement import FilledTable

Names = str | Sequence[str] | None
"""One name, several names, or None for all."""


class StoredRows:
    """Rows of some cells of a store as pandas frames (docs/rows.md), each read at its first use.

    Attributes:
        folder: the store's folder.
        cells: one row per cell; empty if the store has only diagnostics.
    """

    def __init__(self, folder: Path, cells: pd.DataFrame):
        self.folder, self.cells, self._store = folder, cells, Store(folder)

    @cached_property
    def responses(self) -> pd.DataFrame:
        """One row per cell and sample: the answer, its status, and counts of the prompt and of kept entries."""
        return self._store.responses(self.names).to_pandas()

    @cached_property
    def samples(self) -> pd.DataFrame:
        """One row per cell, sample and metric; empty before scoring."""
        return self._store.samples(self.names).to_pandas()

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """One row per cell and metric: score, interval, difference to `full`."""
        return self._store.metrics(self.names).to_pandas()

    @cached_property
    def timings(self) -> pd.DataFrame:
        """One row per phase and timed pass of `scenario=efficiency`, not aggregated; empty for other runs."""
        return self._store.timings(self.names).to_pandas()

    @cached_property
    def diagnostics(self) -> pd.DataFrame:
        """Rows of `mmkv-bench diagnose`. Filters do not apply, because these rows belong to no cell."""
        return self._store.diagnostics().to_pandas()

    @property
    def names(self) -> list[str]:
        """Hashes of the selected cells."""
        return list(self.cells["cell"])

    def __repr__(self) -> str:
        methods = ", ".join(dict.fromkeys(self.cells["method"]))
        return f"StoredRows({str(self.folder)!r}: {len(self.cells)} cells of {methods})"


def load_rows(
    folder: Path | str,
    *,
    dataset: Names = None,
    method: Names = None,
    budget: Any = None,
    protocol: Names = None,
    reading: Names = None,
) -> StoredRows:
    """Load the rows of a store, or of some of its cells.

    Args:
        folder: the folder that a run printed as its rows (`out`), packed or not.
        dataset, method, protocol, reading: load only cells with this name or one of these names.
        budget: load only cells with this budget (64, 0.2, "20%") or one of a list. Cells without a budget or reading,
            such as `full`'s, pass both filters, because every comparison needs them.

    Returns:
        Six pandas frames, `cells`, `responses`, `samples`, `metrics`, `timings` and `diagnostics`.

    Raises:
        ConfigError: the folder does not exist, has no rows, or no rows with a name of a filter.
        StoreError: the rows are damaged or of another version.

    Example:
        >>> rows = load_rows("results/tiny/large", method="snapkv", budget=64)  # doctest: +SKIP
        >>> rows.responses[["sample_id", "answer", "entries_resident"]]  # doctest: +SKIP
    """
    root = Path(folder).expanduser()
    cells = _cells(root)
    selected = cells["cell"].notna()
    for column, wanted in (("dataset", dataset), ("method", method), ("protocol", protocol)):
        selected &= choose(cells[column], _as_list(wanted), column)
    selected &= choose(cells["reading"], _as_list(reading), "reading") | cells["reading"].isna()
    if budget is not None:
        selected &= _has_budget(cells, budget if isinstance(budget, list | tuple) else [budget])
    return StoredRows(root, cells[selected].reset_index(drop=True))


def evaluate(
    *,
    model: str | None = None,
    method: str | list[str] | None = None,
    budget: Any = None,
    dataset: str | list[str] | None = None,
    verbose: bool = False,
    **overrides: Any,
) -> StoredRows:
    """Run `mmkv-bench run` with these settings, and return the rows.

    Only answers missing in `out` are generated; a finished run just returns its rows.

    Args:
        model, method, budget, dataset: as on the command line, one value or a list (`method=["snapkv", "mine.py"]`); None:
            the configuration's default (the embedded model, mmshift, 64 entries, pages).
        verbose: print the command's output.
        overrides: any key of the configuration: `limit=20`, `out="runs/mine"`, `protocol=["paper", "strict"]`; write keys
            with dots as mappings: `methods={"snapkv": {"window": 16}}`.

    Returns:
        The rows of this run's cells, including `full`: see `load_rows`.

    Raises:
        MMKVError: an error that would stop the command, with the same message. A failed answer does not stop the run: its
            row has a status, and a warning counts failed answers.

    Example:
        >>> rows = evaluate(method=["snapkv", "mmshift"], budget=[16, 64], limit=20)  # doctest: +SKIP
        >>> print(make_table(rows))  # doctest: +SKIP
    """
    from mmkv_bench.plan.planner import make_plan
    from mmkv_bench.plan.validate import compose_checked
    from mmkv_bench.run.run import carry_out

    named = {"model": model, "method": method, "budget": budget, "dataset": dataset}
    config = compose_checked(words({key: value for key, value in named.items() if value is not None} | overrides))
    plan = make_plan(config)
    with contextlib.nullcontext() if verbose else contextlib.redirect_stdout(io.StringIO()):
        code = carry_out(plan)
    cells = _cells(plan.out)
    rows = StoredRows(plan.out, cells[cells["cell"].isin(plan.names)].reset_index(drop=True))
    if code:
        failed = int((rows.responses["status"] != "ok").sum())
        warnings.warn(
            f"{failed} of {len(rows.responses)} answers failed or a dataset was stopped; see status and error in "
            "rows.responses",
            stacklevel=2,
        )
    return rows


class _Printed:
    """Base class whose objects Python and notebooks display as `print` does."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_markdown_(self) -> str:
        return str(self)


class Tables(_Printed, list[ScoreTable]):
    """A list of tables that prints like `mmkv-bench tables`."""

    def __str__(self) -> str:
        return markdown(tables_of_scores(self), notes="all")

    def latex(self) -> str:
        return latex(tables_of_scores(self), notes="all")

    def frame(self) -> pd.DataFrame:
        """Return unrounded numbers, one row per table, method and budget: context, method, budget, score, interval,
        rank, audit."""
        return frame(self)


def make_table(
    rows: StoredRows | Path | str,
    *,
    dataset: Names = None,
    metric: Names = None,
    protocol: Names = None,
    reading: Names = None,
) -> Tables:
    """Make the tables of rows, one per model, dataset, protocol, metric and kind of budget.

    Args:
        rows: the result of `load_rows` or `evaluate`, or a store's folder.
        dataset, metric, protocol, reading: make only tables with this name or one of these names.

    Returns:
        A list of tables: `print` it, show it in a notebook, or take its `frame()`.

    Raises:
        ConfigError: the rows have no scores, or lack a name of a filter.
        StoreError: the rows are damaged.

    Example:
        >>> print(make_table("results/tiny/large", dataset="pages_walk_large"))  # doctest: +SKIP
    """
    if isinstance(rows, StoredRows):
        stored = load(rows.folder, rows.names)
    else:
        stored = load(Path(rows).expanduser())
    return Tables(
        build(
            stored,
            datasets=_as_list(dataset),
            protocols=_as_list(protocol),
            readings=_as_list(reading),
            metrics=names(_as_list(metric), stored),
        )
    )


class PaperTables(_Printed, list["FilledTable"]):
    """A list of tables that prints like `mmkv-bench papers`."""

    def __str__(self) -> str:
        from mmkv_bench.papers.table import render

        return render(self, "md")

    def latex(self) -> str:
        from mmkv_bench.papers.table import render

        return render(self, "latex")

    def frame(self) -> pd.DataFrame:
        """Return one row per table field, as in `--format csv`: address, state, number, interval, printed value and
        verdict."""
        from mmkv_bench.papers.table import frame

        return frame(self)


def paper_tables(*names: str, rows: Sequence[Path | str] | Path | str = ()) -> PaperTables:
    """Make tables and figures of the papers, with measured beside printed numbers.

    Args:
        names: ids of the tables, as listed by `mmkv-bench papers --list`; none: all tables.
        rows: folders of rows, or folders that contain such; none: only printed numbers, and the commands that measure
            them.

    Returns:
        A list of tables: `print` it, show it in a notebook, or take its `frame()`.

    Raises:
        ConfigError: a name is unknown, or a folder has no rows.
        StoreError: the rows are damaged or of another version.

    Example:
        >>> print(paper_tables("mmshift_table01", rows="runs/papers"))  # doctest: +SKIP
    """
    from mmkv_bench.papers.evidence import Evidence
    from mmkv_bench.papers.judgement import fill
    from mmkv_bench.papers.layout import load, table_ids

    specs = [load(name) for name in names or table_ids()]
    folders = [rows] if isinstance(rows, str | Path) else rows
    evidence = Evidence.of([Path(folder).expanduser() for folder in folders])
    return PaperTables(fill(spec, evidence) for spec in specs)


def _cells(root: Path) -> pd.DataFrame:
    if not root.is_dir():
        raise ConfigError(f"There is no rows folder at '{root}': give the folder that a run printed as its rows.")
    store = Store(root)
    cells = store.cells().to_pandas()
    if cells.empty and not store.files("diagnostics"):
        raise ConfigError(f"'{root}' has no result rows: give the folder that a run printed as its rows.")
    return cells


def _has_budget(cells: pd.DataFrame, budgets: Sequence[Any]) -> pd.Series:
    from mmkv_bench.compression.budget import Budget

    selected = cells["budget_kind"] == "none"
    for budget in map(Budget.parse, budgets):
        is_entries = budget.kind == "entries"
        column, value = ("budget_entries", budget.entries) if is_entries else ("budget_fraction", budget.fraction_text)
        at_budget = (cells["budget_kind"] == budget.kind) & (cells[column] == value)
        if not at_budget.any():
            raise ConfigError(f"The rows have no budget {budget}: give a budget that was run, or leave the filter out.")
        selected |= at_budget
    return selected


def _as_list(wanted: Names) -> list[str] | None:
    return [wanted] if isinstance(wanted, str) else None if wanted is None else list(wanted)
