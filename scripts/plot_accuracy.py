"""Draws accuracy against budget, one panel per dataset, from a rows folder: <out>.png and <out>.svg.

python scripts/plot_accuracy.py results/tiny/large --dataset pages_walk_large pages_lookup_large --out docs/images/accuracy
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mmkv_bench.errors import ConfigError, MMKVError
from mmkv_bench.tables.build import build
from mmkv_bench.tables.figure import accuracy_figure, save
from mmkv_bench.tables.rows import load
from mmkv_bench.tables.table import Table


def chosen(tables: Sequence[Table], datasets: Sequence[str]) -> list[Table]:
    """The one table of each dataset, in the order named; ConfigError when the rows hold several or none."""
    found = []
    for dataset in datasets:
        own = [table for table in tables if table.dataset == dataset]
        if len(own) != 1:
            kinds = "; ".join(
                f"{t.metric}, {t.axis}, reading={' and '.join(t.readings)}, model={t.context['model']}" for t in own
            )
            raise ConfigError(
                f"The rows hold {len(own)} tables of {dataset} ({kinds}), one is needed: name --metric, --protocol, "
                "--reading or --budgets."
            )
        found += own
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or an error's own."""
    command = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    command.add_argument("rows", type=Path, help="rows folder of a run")
    command.add_argument("--dataset", nargs="+", default=["pages_walk", "pages_lookup"], help="one panel each")
    command.add_argument("--protocol", default="paper")
    command.add_argument("--reading", nargs="+", default=["paper"], help="default: paper")
    command.add_argument("--metric", help="needed when the rows hold several")
    command.add_argument("--budgets", choices=("entries", "fraction"), default="entries")
    command.add_argument("--out", type=Path, required=True, help="path without suffix")
    arguments = command.parse_args(argv)
    try:
        tables = build(
            load(arguments.rows),
            datasets=arguments.dataset,
            protocols=[arguments.protocol],
            readings=arguments.reading,
            metrics=[arguments.metric] if arguments.metric else None,
        )
        tables = [table for table in tables if table.axis == arguments.budgets]
        for path in save(accuracy_figure(chosen(tables, arguments.dataset)), arguments.out):
            print(path)
    except MMKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
