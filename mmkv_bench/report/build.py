"""Rows -> the folder of a report: each store is read once, one after the other; the pages of tables are written last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mmkv_bench.errors import ConfigError
from mmkv_bench.report.charts import against_budget, against_cost, rank_intervals
from mmkv_bench.report.command import Commands
from mmkv_bench.report.folder import Folder, check
from mmkv_bench.report.scores import COSTS, Family, ScoreViews
from mmkv_bench.report.store_pages import StorePages

if TYPE_CHECKING:
    from mmkv_bench.tables.costs import CostTable


@dataclass(frozen=True)
class Report:
    """A report that was written. index: the page to open; left_out: sentences on what it does not show."""

    index: Path
    about: str
    size: str
    left_out: tuple[str, ...]


@dataclass
class _Draft:
    """A report that is being made. stores: their folders; costs: tables of all of them."""

    folder: Folder
    views: ScoreViews = field(default_factory=ScoreViews)
    commands: Commands = field(default_factory=Commands)
    stores: list[str] = field(default_factory=list)
    costs: list[CostTable] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    cells: int = 0
    answers: int = 0


def build_report(roots: Sequence[Path], out: Path, samples: int) -> Report:
    """Write the report of these stores.

    Args:
        samples: of each dataset, how many are shown.

    Raises:
        ConfigError: a folder without rows, or `out` holds something that is no report. StoreError: rows that are damaged or of
            another version, a disk that refuses.
    """
    check(out)
    draft = _Draft(Folder(out))
    for number, root in enumerate(roots):
        _add_store(draft, number, root, samples)
    draft.left_out += draft.views.join_passes(draft.costs)
    return _finish(draft)


def _add_store(draft: _Draft, number: int, root: Path, samples: int) -> None:
    """One store into the report."""
    from mmkv_bench.tables.build import build
    from mmkv_bench.tables.costs import cost_tables
    from mmkv_bench.tables.rows import load

    costs = cost_tables(root, (), beside=COSTS)
    draft.costs += costs
    draft.stores.append(str(root))
    try:
        rows = load(root, fidelity=())  # of which no table of scores shows any
    except ConfigError:
        if not any(table.per_pass for table in costs):
            raise
        rows = None
    if not number:
        draft.folder.begin()  # not before some rows were read: a mistake leaves an earlier report as it was
    if rows is None:
        draft.left_out.append(
            f"{root} holds timed passes alone; `mmkv-bench tables {root} --metric tpot_s,ttft_s,peak` prints all they tell."
        )
        return
    tables = build(rows)
    pages = StorePages(number, root, rows, tables)
    draft.views.add(number, tables, costs, pages.name)
    draft.cells += len(rows.cells)
    draft.answers += len(rows.responses)
    del rows, tables  # answers are read next, with their texts: not beside what tables are made of
    draft.left_out += pages.write(draft.folder, draft.commands, samples)


def _finish(draft: _Draft) -> Report:
    """The libraries, the charts, and the pages of tables."""
    folder, views = draft.folder, draft.views
    folder.libraries()
    styles = views.styles()
    for view in views.views:
        folder.figure(f"{view.number}-budget", against_budget(view, styles), *view.curve_numbers())
        for cost in filter(view.has, ("bytes", "token")):
            folder.figure(f"{view.number}-{cost}", against_cost(view, cost, styles), *view.cost_numbers(cost))
    about = (
        f"{draft.cells:,} cells, {draft.answers:,} answers, {len(views.views)} tables, of {', '.join(draft.stores)}."
    )
    alike, table = views.table(draft.stores)
    folder.page("table", "table.html", title="Every cell", about=about, shared=alike, table=table)
    files = ["index.html", *(f"scores-{number}.html" for number in range(1, len(views.families)))]
    several = len(draft.stores) > 1
    words = [family.words + (f" · {draft.stores[family.store]}" if several else "") for family in views.families]
    shared = {"title": "Which method leads where", "about": about, "left_out": draft.left_out}
    if not views.families:
        folder.page("index", "scores.html", **shared, family=None)
    for number, family in enumerate(views.families):
        _family_page(folder, number, family, shared | {"families": list(zip(files, words, strict=True))})
    parts = ", ".join(f"{name} {size / 1e6:.1f}" for name, size in sorted(folder.bytes.items()) if size)
    size = f"{folder.size / 1e6:.1f} MB in {folder.files:,} files ({parts})"
    folder.finish()
    return Report(folder.root / "index.html", about, size, tuple(draft.left_out))


def _family_page(folder: Folder, number: int, family: Family, shared: dict[str, object]) -> None:
    """The overview of tables that belong together, and the charts of their ranks."""
    ranks = {}
    for place, budget in enumerate(family.budgets):
        if budget in family.ranks:
            name = f"ranks-{number}-{place}"
            folder.figure(name, rank_intervals(family.ranks[budget]), *family.ranks[budget].numbers())
            ranks[place] = {"figure": name, "note": family.ranks[budget].note}
    folder.page(
        "index" if not number else f"scores-{number}",
        "scores.html",
        **shared,
        family=family,
        datasets=[(view.number, view.dataset) for view in family.views],
        budgets=[(place, family.views[0].budget_words(budget)) for place, budget in enumerate(family.budgets)],
        ranks={place: ranks.get(place) for place in range(len(family.budgets))},
        leaders=[[view.dataset, *map(view.leaders, family.budgets)] for view in family.views],
    )
