"""Bundles: a published store with its tables, a receipt of verified answers, and the versions, devices and code of its rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmkv_bench.diagnostics.receipt import receipts_of
from mmkv_bench.errors import ConfigError
from mmkv_bench.store.provenance import source_files, source_version
from mmkv_bench.store.publish import ENVIRONMENT, RECEIPT, TABLES
from mmkv_bench.store.store import Store

MADE_WITH = ("model", "device", "driver", "cpu", "git_commit", "git_dirty", "versions")
"""Columns of `cells` that a bundle repeats in a readable file."""


def files_beside(store: Store, receipt: Path) -> dict[str, bytes]:
    """Return the files that turn a published store into a bundle: name -> content.

    Args:
        receipt: file of `mmkv-bench verify --receipt` about this store.

    Raises:
        ConfigError: the file is not a receipt of these rows, or the rows have no scores. StoreError: rows contradict each other.
    """
    receipts_of([receipt], [store.root])
    return {
        RECEIPT: receipt.read_bytes(),
        TABLES: tables_text(store.root).encode(),
        ENVIRONMENT: json.dumps(_environment(store), indent=1).encode() + b"\n",
    }


def tables_text(root: Path) -> str:
    """Return the tables of all scores with their separated pairs as markdown; for random weights only a sentence.

    Raises:
        ConfigError: there are no scores. StoreError: rows contradict each other.
    """
    from mmkv_bench.tables.build import RANDOM, build
    from mmkv_bench.tables.formats import markdown
    from mmkv_bench.tables.rows import load
    from mmkv_bench.tables.score_text import among, names, tables_of_scores

    rows = load(root, fidelity=among([]))
    try:
        built = build(rows, metrics=names(None, rows))
    except ConfigError as error:
        if str(error) != RANDOM:
            raise
        return f"{RANDOM}\n"
    return markdown(tables_of_scores(built, pairs=True))


def _environment(store: Store) -> dict[str, Any]:
    """Return what made the rows and the bundle: the distinct versions and devices of the cells, and this package's version and
    checksums of its source files."""
    rows = store.cells(columns=MADE_WITH).to_pylist()
    distinct = {json.dumps(row, sort_keys=True): row | {"versions": json.loads(row["versions"])} for row in rows}
    return {"made_with": list(distinct.values()), "package": source_version(), "source": dict(source_files())}
