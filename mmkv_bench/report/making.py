"""Rows -> the folder of a report: each store is read once, one after the other; pages are written last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmkv_bench.report.command import Commands
from mmkv_bench.report.folder import PAGES, Folder, check
from mmkv_bench.report.overview import COSTS, Views
from mmkv_bench.report.store import StoreShown

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
    folder, views, commands = Folder(out), Views(), Commands()
    stores, left_out = list[dict[str, Any]](), list[str]()
    for number, root in enumerate(roots):
        stores.append(_add(number, root, folder, views, commands, samples, left_out))
    return _finish(folder, views, stores, left_out)


def _add(
    number: int, root: Path, folder: Folder, views: Views, commands: Commands, samples: int, left_out: list[str]
) -> dict[str, Any]:
    """One store into the report; returns what the pages say of it."""
    from mmkv_bench.tables.build import build
    from mmkv_bench.tables.costs import known_tables
    from mmkv_bench.tables.rows import load

    rows = load(root)
    tables = build(rows)
    if not number:
        folder.begin()  # not before some rows were read: a mistake leaves an earlier report as it was
    shown = StoreShown(number, root, rows, tables)
    views.add(number, tables, known_tables(root, COSTS), shown.name)
    answers = len(rows.responses)
    left_out += shown.write(folder, commands, samples)
    return {"rows": str(root), "cells": len(rows.cells), "answers": answers}


def _finish(folder: Folder, views: Views, stores: Sequence[Mapping[str, Any]], left_out: Sequence[str]) -> Made:
    """The libraries, the data of the overview, and the pages."""
    from jinja2 import Environment, FileSystemLoader

    from mmkv_bench import __version__

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
        "left_out": list(left_out),
        "stores": list(stores),
        "views": views.tables,
        "entries": views.entries.plain(),
    }
    folder.script("report", content)
    parts = ", ".join(f"{name} {size / 1e6:.1f}" for name, size in folder.bytes.items() if size)
    size = f"{folder.size / 1e6:.1f} MB in {folder.files + 1:,} files ({parts})"
    folder.script("size", size)
    return Made(folder.root / "index.html", about, size, tuple(left_out))
