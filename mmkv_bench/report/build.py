"""Writing of a report. Stores are read one after the other; the pages of tables, which join all stores, are written
last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import ConfigError, StoreError
from mmkv_bench.report.cells import Commands
from mmkv_bench.report.charts import (
    against_budget,
    against_cost,
    against_length,
    against_place,
    rank_intervals,
    table_texts,
)
from mmkv_bench.report.folder import Folder, check
from mmkv_bench.report.scores import COSTS, Family, ScoreViews
from mmkv_bench.report.store_pages import StorePages
from mmkv_bench.tables.build import build
from mmkv_bench.tables.cost_rows import KNOWN
from mmkv_bench.tables.costs import CostTable, cost_tables
from mmkv_bench.tables.stored_rows import Rows
from mmkv_bench.tables.table import Table

if TYPE_CHECKING:
    import pandas as pd

Receipts = Mapping[Path, Mapping[str, Mapping[str, Any]]]
"""Store -> hash of a cell -> its entry in a receipt of `verify`, with `made_at`, `file` and `path`."""


@dataclass(frozen=True)
class Report:
    """A written report. index: first page. about, size: sentences. left_out: sentences on missing parts, and on
    passes whose times were used."""

    index: Path
    about: str
    size: str
    left_out: tuple[str, ...]


def build_report(roots: Sequence[Path], out: Path, samples: int, receipts: Receipts | None = None) -> Report:
    """Write the report of several stores into the folder `out`.

    Args:
        roots: folders of the stores.
        samples: largest number of samples that are shown per dataset.
        receipts: entries of receipts, to which the pages of cells link.

    Raises:
        ConfigError: a folder has no rows, or `out` contains something other than a report.
        StoreError: rows are damaged or of another version, or the disk refuses to write.
    """
    from mmkv_bench.tables.deployment import deployment_tables

    check(out)
    pass_tables = [table for root in roots for table in deployment_tables(root)]
    question_points, left_out = _question_scores(roots)
    further_pages = [("passes.html", "Timed passes")] * bool(pass_tables) + [("questions.html", "Questions")] * bool(
        question_points
    )
    folder, views, commands = Folder(out, further_pages), ScoreViews(), Commands()
    costs: list[CostTable] = []
    cells = answers = 0
    for number, root in enumerate(roots):
        store_costs = cost_tables(root, (), beside=[*COSTS, KNOWN["ttft_s"], KNOWN["peak_total"]])
        costs += store_costs
        rows = _score_rows(root, any(table.per_pass for table in store_costs))
        if not number:
            folder.begin()  # only after some rows were read, so that a mistake leaves an earlier report unchanged
        if rows is None:
            continue
        tables = build(rows)
        pages = StorePages(number, root, rows, tables)
        views.add(number, tables, store_costs, pages.name)
        cells, answers = cells + len(rows.cells), answers + len(rows.responses)
        del rows, tables  # frees memory: the answers with their texts are read next
        left_out += pages.write(folder, commands, samples, (receipts or {}).get(root, {}))
    left_out += views.join_passes(costs)
    store_names = list(map(str, roots))
    about_text = f"{cells:,} cells, {answers:,} answers, {len(views.views)} tables, of {', '.join(store_names)}."
    _write_tables(folder, views, store_names, about_text, left_out)
    if pass_tables:
        _write_passes(folder, pass_tables, [table for table in costs if table.per_pass])
    if question_points:
        _write_questions(folder, question_points)
    size_parts = ", ".join(
        f"{name} {size_text / 1e6:.1f}" for name, size_text in sorted(folder.bytes.items()) if size_text
    )
    size_text = f"{sum(folder.bytes.values()) / 1e6:.1f} MB in {folder.files:,} files ({size_parts})"
    folder.finish()
    return Report(folder.root / "index.html", about_text, size_text, tuple(left_out))


def _score_rows(root: Path, timed: bool) -> Rows | None:
    """Return the rows of a store with scores; None if it has only timed passes (`timed`: it has some)."""
    from mmkv_bench.tables.stored_rows import load

    try:
        return load(root, fidelity=())  # no table of scores in the report shows fidelity
    except ConfigError:
        if timed:
            return None
        raise


def _write_tables(
    folder: Folder, views: ScoreViews, stores: Sequence[str], about: str, left_out: Sequence[str]
) -> None:
    folder.libraries()
    styles = views.styles()
    for view in views.views:
        folder.figure(f"{view.number}-budget", against_budget(view, styles), *view.curve_numbers())
        for cost in filter(view.has, ("bytes", "token")):
            folder.figure(f"{view.number}-{cost}", against_cost(view, cost, styles), *view.cost_numbers(cost))
    shared_columns, table = views.table(stores)
    folder.page("table", "table.html", title="Every cell", about=about, shared=shared_columns, table=table)
    family_titles = [
        f"{family.words} · {stores[family.store]}" if stores[1:] else family.words for family in views.families
    ]
    files = ["index.html", *(f"scores-{number}.html" for number in range(1, len(family_titles)))]
    page_values = {"title": "Which method leads where", "about": about, "left_out": left_out}
    if not views.families:
        folder.page("index", "scores.html", **page_values, family=None)
    for number, family in enumerate(views.families):
        _family_page(folder, number, family, page_values | {"families": list(zip(files, family_titles, strict=True))})


def _write_passes(folder: Folder, measured: Sequence[Table], costs: Sequence[CostTable]) -> None:
    figures = []
    for key, words in (("tpot_s", "Time per token"), ("ttft_s", "Time to first token"), ("peak_total", "Peak memory")):
        figure = against_length(costs, key)
        if figure is not None:
            folder.figure(f"passes-{key}", figure)
            figures.append((f"passes-{key}", words))
    folder.page("passes", "passes.html", title="Timed passes", figures=figures, tables=list(map(table_texts, measured)))


def _question_scores(roots: Sequence[Path]) -> tuple[list[tuple[Table, pd.DataFrame]], list[str]]:
    """Return (table, its scores by position of the question) of data with several questions per document, and sentences
    on unreadable stores."""
    from mmkv_bench.tables.questions import NoQuestionsError, by_place, tables_with_scores

    points_by_store, left_out = [], []
    for root in roots:
        try:
            points_by_store += [(table, by_place(scores)) for table, scores in tables_with_scores(root)]
        except NoQuestionsError:
            continue
        except StoreError as problem:
            left_out.append(f"No page of questions: {problem}.")
    return points_by_store, left_out


def _write_questions(folder: Folder, asked: Sequence[tuple[Table, pd.DataFrame]]) -> None:
    line_numbers: dict[str, int] = {}
    store_parts, names = [], []
    for number, (table, points) in enumerate(asked):
        full_points = points[points["method"] == "full"]
        charts = []
        for (label, budget), line in points[points["method"] != "full"].groupby(["label", "budget"], sort=False):
            line_label = f"{label}, {budget}" if budget else label
            name = f"places-{number}-{line_numbers.setdefault(line_label, len(line_numbers))}"
            chart_values = line[["mode", "place", "value", "low", "high"]].to_numpy(dtype=object)
            folder.figure(
                name, against_place(line, full_points), ("mode", "question", "score", "low", "high"), chart_values
            )
            charts.append((line_numbers[line_label], line_label, name))
        store_parts.append({"words": table.title.partition(":")[0], "table": table_texts(table), "charts": charts})
        names.append((number, f"{store_parts[-1]['words']}, {table.caption}"))
    line_choices = [(place, line_label) for line_label, place in line_numbers.items()]
    title = "Many questions per cache"
    folder.page("questions", "questions.html", title=title, asked=names, lines=line_choices, parts=store_parts)


def _family_page(folder: Folder, number: int, family: Family, shared: dict[str, object]) -> None:
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
