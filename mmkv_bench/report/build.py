"""Rows -> the folder of a report: each store is read once, one after the other; pages are written last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import ConfigError
from mmkv_bench.report.command import Commands
from mmkv_bench.report.folder import PAGES, Folder, check
from mmkv_bench.report.scores import COSTS, Views
from mmkv_bench.report.store_pages import StoreShown

if TYPE_CHECKING:
    from mmkv_bench.tables.costs import CostTable

COPIED = (".css", ".js")


@dataclass(frozen=True)
class Made:
    """A report that was written. index: the page to open; left_out: sentences on what it does not show."""

    index: Path
    about: str
    size: str
    left_out: tuple[str, ...]


def make(roots: Sequence[Path], out: Path, samples: int) -> Made:
    """Write the report of these stores.

    Args:
        samples: of each dataset, how many are shown.

    Raises:
        ConfigError: a folder without rows, or `out` holds something that is no report. StoreError: rows that are damaged or of
            another version, a disk that refuses.
    """
    check(out)
    report = _Report(Folder(out), Views(), Commands(), [], [], [])
    for number, root in enumerate(roots):
        _add(report, number, root, samples)
    report.left_out += report.views.join_passes(report.costs)
    return _finish(report)


@dataclass
class _Report:
    """A report that is being made. stores: what the pages say of each; costs: tables of all of them."""

    folder: Folder
    views: Views
    commands: Commands
    stores: list[dict[str, Any]]
    costs: list[CostTable]
    left_out: list[str]


def _add(report: _Report, number: int, root: Path, samples: int) -> None:
    """One store into the report."""
    from mmkv_bench.tables.build import build
    from mmkv_bench.tables.costs import known_tables
    from mmkv_bench.tables.rows import load

    costs = known_tables(root, COSTS)
    report.costs += costs
    try:
        rows = load(root, fidelity=())  # of which no table of scores shows any
    except ConfigError:
        if not any(table.per_pass for table in costs):
            raise
        rows = None
    if not number:
        report.folder.begin()  # not before some rows were read: a mistake leaves an earlier report as it was
    if rows is None:
        report.left_out.append(
            f"{root} holds timed passes alone; `mmkv-bench tables {root} --metric tpot_s,ttft_s,peak` prints all they tell."
        )
        report.stores.append({"rows": str(root), "cells": 0, "answers": 0})
        return
    tables = build(rows)
    shown = StoreShown(number, root, rows, tables)
    report.views.add(number, tables, costs, shown.name)
    report.stores.append({"rows": str(root), "cells": len(rows.cells), "answers": len(rows.responses)})
    del rows, tables  # answers are read next, with their texts: not beside what tables are made of
    report.left_out += shown.write(report.folder, report.commands, samples)


def _finish(report: _Report) -> Made:
    """The libraries, the data of the overview, and the pages."""
    from jinja2 import Environment, FileSystemLoader

    from mmkv_bench import __version__

    folder, views, stores = report.folder, report.views, report.stores
    versions = folder.libraries()
    pages = Environment(loader=FileSystemLoader(PAGES), autoescape=True)
    for path in sorted(PAGES.iterdir()):
        if path.suffix in COPIED:
            folder.write("pages", path.name, path.read_bytes())
        elif path.name != "base.html":
            folder.write("pages", path.name, pages.get_template(path.name).render(page=path.name).encode())
    cells, answers = (sum(store[key] for store in stores) for key in ("cells", "answers"))
    names = ", ".join(store["rows"] for store in stores)
    about = f"{cells:,} cells, {answers:,} answers, {len(views.tables)} tables, of {names}."
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    content = {
        "version": __version__,
        "about": about,
        "libraries": f"Charts and tables by {said}; licences in lib/.",
        "left_out": report.left_out,
        "stores": stores,
        "views": views.tables,
        "families": views.families,
        "entries": views.entries.plain(),
    }
    folder.script("report", content)
    parts = ", ".join(f"{name} {size / 1e6:.1f}" for name, size in folder.bytes.items() if size)
    size = f"{folder.size / 1e6:.1f} MB in {folder.files + 1:,} files ({parts})"
    folder.script("size", size)
    folder.finish()
    return Made(folder.root / "index.html", about, size, tuple(report.left_out))
