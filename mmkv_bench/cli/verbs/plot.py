"""`mmkv-bench plot`: pictures of rows."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmkv_bench.cli.grammar import Parser, count, rows_folder
from mmkv_bench.cli.verbs.measure import ANALYSES
from mmkv_bench.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mmkv_bench.tables.cost_rows import Cost
    from mmkv_bench.tables.score_table import ScoreTable

AXES = ("entries", "fraction")
_OF_SCORES = ("budget", "front", "removal")


def plot_options(parser: Parser) -> None:
    """Add the kind of picture, rows, filters and the file."""
    parser.add_argument(
        "kind",
        choices=(*_OF_SCORES[:1], "length", *_OF_SCORES[1:], *ANALYSES),
        help="budget: scores against the budget; length: a cost against the length of the prompt, with the roofline where the "
        "device was measured; front: scores against costs, one point a cell, the Pareto front drawn; removal: scores against "
        "the share of entries that FlashCache removed; others: the diagnostic of that name, as its paper's figure has it",
    )
    parser.add_argument(
        "rows",
        type=Path,
        help="rows folder that a run printed; of scores, for `length` of efficiency, of diagnostics",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="PATH", help="without suffix; makes PATH.png and PATH.svg"
    )
    parser.add_argument("--metric", metavar="NAME", help="the score; needed where the rows hold several")
    parser.lists(
        {
            "dataset": "only these datasets, one panel each",
            "protocol": "only these protocols; default: paper",
            "reading": "only these readings",
            "methods": "(budget, front, removal) only these lines",
            "budgets": "only budgets of a kind, entries or fraction; or (budget, front, removal) only these, as 64,128",
            "cost": "what costs are drawn, as for `tables --metric`; default: tpot_s (length), bytes,tpot_s (front)",
        }
    )
    parser.add_argument(
        "--costs",
        type=Path,
        metavar="ROWS",
        help="(front) rows of scenario=efficiency, where they are in another folder",
    )
    parser.add_argument("--tokens", type=count, metavar="N", help="(front) passes of this prompt length")
    parser.add_argument("--batch", type=count, metavar="N", help="(front) passes of this batch")
    parser.add_argument("--prompts", choices=("text", "image", "video"), help="(front) passes of this kind of prompts")
    parser.examples(
        "mmkv-bench plot budget results/tiny/large --out large",
        "mmkv-bench plot budget results/tiny/large --methods snapkv,mmshift --budgets 64,128,256 --out two",
        "mmkv-bench plot length runs/speed --out latency",
        "mmkv-bench plot front runs/demo --costs runs/speed --tokens 512 --out front",
        "mmkv-bench plot lorenz runs/figures --out lorenz",
    )


def plot(given: argparse.Namespace) -> int:
    """Draw the picture, print the files' names and what is left out of it."""
    from mmkv_bench.tables.figure import save

    if given.kind not in _OF_SCORES:
        for flag, names in (("methods", given.methods), ("budgets", _numbers(given))):
            if names:
                raise ConfigError(
                    f"--{flag} {','.join(names)} chooses among scores, and plot {given.kind} draws none; leave it out"
                )
    drawers = {"budget": _budget, "length": _length, "front": _front, "removal": _removal}
    figure, left_out = drawers.get(given.kind, _diagnostic)(given)
    for line in [*save(figure, given.out), *left_out]:
        print(line)
    return 0


def _budget(given: argparse.Namespace) -> tuple[Figure, list[str]]:
    from mmkv_bench.tables.figure import accuracy_figure

    return accuracy_figure(_score_tables(given)), []


def _removal(given: argparse.Namespace) -> tuple[Figure, list[str]]:
    from mmkv_bench.tables.figure import removal_figure

    given.budgets = [*(given.budgets or []), *_axes(given, "fraction")]
    return removal_figure(_score_tables(given)), []


def _diagnostic(given: argparse.Namespace) -> tuple[Figure, list[str]]:
    from mmkv_bench.tables.diagnostic_figure import diagnostic_figure, panels

    return diagnostic_figure(panels(rows_folder(given.rows), given.kind, given.dataset)), []


def _length(given: argparse.Namespace) -> tuple[Figure, list[str]]:
    from mmkv_bench.forecast.roofline import roofline_by_context
    from mmkv_bench.store.store import Store
    from mmkv_bench.tables.cost_figures import length_figure
    from mmkv_bench.tables.costs import cost_tables, needed, set_limits

    costs = _costs(given, ["tpot_s"])
    if len(costs) > 1:
        names = ", ".join(cost.name for cost in costs)
        raise ConfigError(f"plot length draws one cost, got {names}; name one with --cost")
    rows = rows_folder(given.rows)
    tables = [
        table
        for table in cost_tables(rows, (), beside=[*costs, *needed(costs)])
        if (given.protocol or ["paper"])[0] == table.context["protocol"]
        and table.axis in _axes(given, table.axis)
        and (given.dataset is None or table.context["dataset"] in given.dataset)
    ]
    return length_figure(set_limits(tables, costs, roofline_by_context(Store(rows))), costs[0]), []


def _front(given: argparse.Namespace) -> tuple[Figure, list[str]]:
    from mmkv_bench.tables.cost_figures import front_figure, fronts

    roots = [rows_folder(root) for root in dict.fromkeys([given.rows, given.costs or given.rows])]
    costs = _costs(given, ["bytes", "tpot_s"])
    drawn = fronts(_score_tables(given), costs, roots, given.tokens, given.batch, given.prompts)
    left_out = [
        f"not drawn against {front.cost.name}, which is not known of them ({front.table.dataset}): {', '.join(front.alone)}"
        for front in drawn
        if front.alone
    ]
    return front_figure(drawn), left_out


def _costs(given: argparse.Namespace, usual: Sequence[str]) -> list[Cost]:
    from mmkv_bench.tables.cost_rows import divided, refuse_unknown

    names, costs = divided(given.cost or usual)
    refuse_unknown(names, ())
    return costs


def _axes(given: argparse.Namespace, default: str) -> list[str]:
    """The kinds of budgets that are asked for, or this one."""
    return [name for name in given.budgets or () if name in AXES] or [default]


def _numbers(given: argparse.Namespace) -> list[str]:
    """The single budgets that are asked for."""
    return [name for name in given.budgets or () if name not in AXES]


def _score_tables(given: argparse.Namespace) -> list[ScoreTable]:
    """The tables of scores: one of each dataset.

    Raises:
        ConfigError: a dataset with several, or none at all.
    """
    from mmkv_bench.tables.build import build
    from mmkv_bench.tables.compare import narrowed
    from mmkv_bench.tables.rows import load

    tables = build(
        load(given.rows),
        datasets=given.dataset,
        protocols=given.protocol or ["paper"],
        readings=given.reading,
        metrics=[given.metric] if given.metric else None,
    )
    tables = [table for table in tables if table.budgets and table.axis in _axes(given, table.axis)]
    if given.methods or _numbers(given):
        tables = [table for table in narrowed(tables, given.methods, _numbers(given) or None) if table.budgets]
    for dataset in dict.fromkeys(table.dataset for table in tables):
        several = [table for table in tables if table.dataset == dataset]
        if len(several) > 1:
            kinds = "; ".join(
                f"{t.metric}, {t.axis}, reading={' and '.join(t.readings)}, model={t.context['model']}" for t in several
            )
            raise ConfigError(
                f"The rows hold {len(several)} tables of {dataset} ({kinds}), and one is drawn: name --metric, --protocol, "
                "--reading or --budgets"
            )
    if not tables:
        raise ConfigError("The rows hold no table of scores with a budget of that kind, so there is nothing to draw")
    return sorted(tables, key=lambda table: (given.dataset or [table.dataset]).index(table.dataset))
