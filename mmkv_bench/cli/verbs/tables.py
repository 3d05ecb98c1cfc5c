"""`mmkv-bench tables` prints the tables of rows; `mmkv-bench papers` fills the tables of papers from rows."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.cli.grammar import rows_folder
from mmkv_bench.errors import ConfigError

if TYPE_CHECKING:
    from mmkv_bench.papers.judgement import FilledTable
    from mmkv_bench.papers.layout import TableLayout
    from mmkv_bench.tables.cost_rows import Cost
    from mmkv_bench.tables.table import Table

_OF_SCORES = ("groups", "pairs", "ranks", "join", "methods", "budgets", "against")
_NOT_CSV = ("groups", "ranks", "join", "against", "caption")
_ONE_THING = ("groups", "ranks", "join", "questions")
_NOT_QUESTIONS = (*_OF_SCORES, "no_interval", "name", "caption", "protocol", "reading")
STAND_INS = "standins"


def tables(given: argparse.Namespace) -> int:
    """Carry out `mmkv-bench tables`: print tables of scores, then tables of costs. Return 0."""
    from mmkv_bench.tables.cost_rows import split_costs
    from mmkv_bench.tables.formats import write
    from mmkv_bench.tables.table import rename_lines, replace_caption

    score_metrics, costs = split_costs(given.metric or ())
    _refuse_conflicts(given, score_metrics, costs)
    if given.questions:
        from mmkv_bench.tables.questions import tables_with_scores

        question_tables = tables_with_scores(rows_folder(given.rows), given.dataset, given.metric)
        tables_to_print = [table for table, _ in question_tables]
        sys.stdout.write(write(tables_to_print, given.format, notes=given.notes))
        return 0
    filters = {"datasets": given.dataset, "protocols": given.protocol, "readings": given.reading}
    tables_to_print = _score_tables(given, score_metrics, filters) if score_metrics or not costs else []
    tables_to_print += _cost_tables(given, costs, filters) if costs else []
    if given.format != "csv":
        tables_to_print = replace_caption(rename_lines(tables_to_print, given.name or ()), given.caption)
    sys.stdout.write(write(tables_to_print, given.format, title=f"Tables of {given.rows}", notes=given.notes))
    return 0


def _refuse_conflicts(given: argparse.Namespace, names: Sequence[str], costs: Sequence[Cost]) -> None:
    """Raise ConfigError for options without effect on the output, and for combinations that no format supports.

    names: the requested metrics.
    """
    from mmkv_bench.tables.score_text import GROUP, fidelity_metrics

    score_options = [name for name in _OF_SCORES if getattr(given, name)]
    if costs and score_options:
        raise ConfigError(f"--{score_options[0]} does not work with costs; leave out --metric {costs[0].name}")
    if names and costs and given.format == "csv":
        raise ConfigError(
            f"scores ({', '.join(names)}) and costs ({', '.join(cost.name for cost in costs)}) have different "
            "columns in csv; ask for them in two commands"
        )
    for name in _NOT_CSV if given.format == "csv" else ():
        if getattr(given, name):
            raise ConfigError(f"--{name} does not work with csv; leave out --format csv")
    exclusive_options = [name for name in _ONE_THING if getattr(given, name)]
    if len(exclusive_options) > 1:
        raise ConfigError(
            f"--{exclusive_options[0]} and --{exclusive_options[1]} print different tables; ask for them in two commands"
        )
    unused_options = [name for name in _NOT_QUESTIONS if getattr(given, name)]
    if given.questions and unused_options:
        raise ConfigError(
            f"--questions does not work with --{unused_options[0].replace('_', '-')}; allowed: --dataset, --metric, "
            "--format, --notes; leave it out"
        )
    if given.join and (given.pairs or given.against):
        raise ConfigError("--join prints only scores; leave out --pairs and --against, or --join")
    if _fidelity_alone(given, names) and score_options:
        fidelity_metric_names = ", ".join(sorted(fidelity_metrics([GROUP])))
        raise ConfigError(
            f"--{score_options[0]} does not work with --metric fidelity (one table of all metrics of "
            f"fidelity); name the metrics: --metric with one or more of {fidelity_metric_names}"
        )


def _fidelity_alone(given: argparse.Namespace, names: Sequence[str]) -> bool:
    """Tell whether the output is just the table with all metrics of fidelity. names: the requested metrics."""
    return list(names) == ["fidelity"] and given.format != "csv"


def _score_tables(given: argparse.Namespace, metrics: Sequence[str], filters: dict[str, Any]) -> list[Table]:
    from mmkv_bench.tables import score_text
    from mmkv_bench.tables.build import build
    from mmkv_bench.tables.compare import select_lines
    from mmkv_bench.tables.cost_rows import refuse_unknown
    from mmkv_bench.tables.dataset_groups import group_tables, tables_of_groups, tables_of_ranks
    from mmkv_bench.tables.score_text import joined_tables, tables_of_scores
    from mmkv_bench.tables.stored_rows import load

    rows = load(given.rows, fidelity=score_text.fidelity_metrics(metrics))
    if _fidelity_alone(given, metrics):
        return score_text.fidelity_tables(rows, **filters)
    metric_names = score_text.names(metrics or None, rows)
    refuse_unknown(metric_names or (), rows.names)
    score_tables = build(rows, **filters, metrics=metric_names)
    if given.methods or given.against or given.budgets:
        score_tables = select_lines(score_tables, given.methods, given.budgets, given.against)
    intervals = not given.no_interval
    if given.ranks:
        return tables_of_ranks(score_tables)
    if given.groups:
        return tables_of_groups(group_tables(score_tables, rows), intervals=intervals)
    if given.join:
        return joined_tables(score_tables, intervals=intervals)
    compares_methods = bool(given.methods or given.against)
    return tables_of_scores(
        score_tables, intervals=intervals, pairs=given.pairs, compare=compares_methods, against=given.against
    )


def _cost_tables(given: argparse.Namespace, costs: Sequence[Cost], filters: dict[str, Any]) -> list[Table]:
    from mmkv_bench.forecast.roofline import roofline_by_context
    from mmkv_bench.store.store import Store
    from mmkv_bench.tables.cost_text import tables_of_costs
    from mmkv_bench.tables.costs import cost_tables, roofline_inputs, set_limits

    cost_tables_of_rows = cost_tables(given.rows, costs, beside=roofline_inputs(costs), **filters)
    cost_tables_of_rows = set_limits(cost_tables_of_rows, costs, roofline_by_context(Store(given.rows)))
    return tables_of_costs(cost_tables_of_rows, intervals=not given.no_interval)


# ---------------------------------------------------------------------- papers
def papers(given: argparse.Namespace) -> int:
    """Print the papers' tables filled from rows, or write them and print the files' names. Return 0."""
    from mmkv_bench.papers.layout import load, stand_in_ids, table_ids
    from mmkv_bench.papers.table import SUFFIXES, render

    if given.list:
        output = "".join(f"{name:<24}{load(name).caption}\n" for name in (*table_ids(), *stand_in_ids()))
    elif given.out is None:
        output = render(_fill_tables(given), given.format, notes=given.notes)
    else:
        from mmkv_bench.papers.figure import save_pictures

        output = ""
        given.out.mkdir(parents=True, exist_ok=True)
        for table in _fill_tables(given):
            table_file = given.out / f"{table.layout.id}.{SUFFIXES[given.format]}"
            table_file.write_text(render([table], given.format, notes=given.notes), encoding="utf-8")
            output += "".join(f"{path}\n" for path in (table_file, *save_pictures(table, given.out)))
    sys.stdout.write(output)
    return 0


def _layouts(given: argparse.Namespace) -> list[TableLayout]:
    from mmkv_bench.config.names import tables as meant
    from mmkv_bench.papers.layout import load, stand_in_ids, table_ids

    if not given.tables:
        raise ConfigError("papers needs a table; give its id, all, or standins; --list prints the ids")
    ids_by_group = {"all": table_ids(), STAND_INS: stand_in_ids()}
    meant_ids = meant(" ".join(given.tables))  # MM-ShiftKV table 1
    layout_ids = meant_ids or [one for name in given.tables for one in ids_by_group.get(name) or meant(name) or [name]]
    return [load(name) for name in dict.fromkeys(layout_ids)]


def _fill_tables(given: argparse.Namespace) -> list[FilledTable]:
    """Return the papers' tables that the command line names, filled from rows.

    Without --rows, tables of the embedded model (stand-ins) use rows below `results/tiny`.
    """
    from mmkv_bench.config.files import conf_dir
    from mmkv_bench.papers.evidence import Evidence
    from mmkv_bench.papers.judgement import fill

    results = conf_dir().parent / "results"
    paper_rows = [results / "papers"] if (results / "papers").is_dir() else []
    evidence_by_roots: dict[tuple[bool, tuple[Path, ...]], Evidence] = {}
    filled_tables = []
    for layout in _layouts(given):
        roots = [Path(root) for root in given.rows or ()] or [results / "tiny" / store for store in layout.stores]
        key = (bool(layout.stands_for), tuple(roots or paper_rows))
        if key not in evidence_by_roots:
            evidence_by_roots[key] = Evidence.of(key[1], stand_in=key[0])
        filled_tables.append(fill(layout, evidence_by_roots[key]))
    return filled_tables
