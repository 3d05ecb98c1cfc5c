"""`mmkv-bench show`, `plot` and `report`: a store, its cells and samples, in the terminal, as pictures and as pages."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from mmkv_bench.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from mmkv_bench.report.show import StoreCells


def show(given: argparse.Namespace) -> int:
    """Print a store's rows. Return 0; with --remake, 1 if a remade answer differs, and 2 if none could be remade."""
    from mmkv_bench.report.show import StoreCells, show_cell, show_sample, show_store
    from mmkv_bench.report.terminal import console
    from mmkv_bench.store.store import Store

    out, cells = console(), StoreCells(Store(given.rows))
    chosen_cells = cells.choose(given.what)
    if chosen_cells.sample is not None:
        answering_cells = show_sample(out, cells, chosen_cells.sample, chosen_cells.cells, given.remake, given.prompt)
        remake_options = (given.other_versions, given.run_code)
        return _remake(out, cells, chosen_cells.sample, answering_cells, *remake_options) if given.remake else 0
    if given.remake or given.prompt:
        flag = "--remake" if given.remake else "--prompt"
        raise ConfigError(f"{flag} needs a sample; write for example mmkv-bench show <rows> <sample id> {flag}")
    if chosen_cells.one:
        show_cell(out, cells, chosen_cells.cells[0])
    else:
        show_store(out, cells, chosen_cells.cells)
    return 0


def _remake(
    out: Console,
    cells: StoreCells,
    name: str,
    shown: Mapping[str, Sequence[str]],
    other_versions: bool,
    run_code: bool,
) -> int:
    """Generate the stored answers to one sample again.

    Print which visual tokens each cell (method at a budget) kept, and which answers differ. Return the exit code of
    `show`.

    name: id of the sample. shown: dataset -> hashes of the cells that answered the sample.
    """
    from mmkv_bench.diagnostics.remade_answers import remake
    from mmkv_bench.report.terminal import KeptMap, shares, show

    remade_answers = []
    for group in shown.values():
        remade_by_cell = remake(cells.store.root, group, name, other_versions, run_code)
        remade_answers += [remade_by_cell[cell] for cell in group if cell in remade_by_cell]
    kept_maps = []
    for one in remade_answers:
        if one.kept is not None and one.prompt is not None:
            same_text = "answer and counts the same" if one.same else "NOT the same"
            comparison = "digest the same" if one.proven else same_text
            kept_shares = shares(one.kept, one.prompt.tokens)
            kept_maps.append(
                KeptMap(cells.title(one.row["cell"]), [comparison], kept_shares, one.prompt.visual, one.prompt.places)
            )
    out.print("\nMade again", style="bold")
    show(out, kept_maps)
    for one in remade_answers:
        if not one.same:
            difference = f"differs in {', '.join(one.differing)}" if one.differing else f"not made again: {one.outcome}"
            out.print(f"{cells.title(one.row['cell'])} {difference}")
    if any(one.differing for one in remade_answers):
        return 1
    return 0 if any(one.same for one in remade_answers) else 2


def report(given: argparse.Namespace) -> int:
    """Write the report's pages. Print its first page, its size and what it leaves out. Return 0."""
    from mmkv_bench.diagnostics.receipt import receipts_of
    from mmkv_bench.report.build import build_report

    roots = list(dict.fromkeys(given.rows))
    report_result = build_report(
        roots, given.out, given.samples, receipts_of(given.receipt, roots) if given.receipt else None
    )
    print("\n".join([f"{report_result.index}: {report_result.about}", report_result.size, *report_result.left_out]))
    return 0


def plot(given: argparse.Namespace) -> int:
    """Draw a figure of rows. Print the files' names and what the figure leaves out. Return 0."""
    from mmkv_bench.api.pictures import PlotRequest, draw
    from mmkv_bench.tables.figure import save

    options = {field.name: getattr(given, field.name) for field in fields(PlotRequest)}
    file_stem = _stem(given.out)
    figure, left_out = draw(PlotRequest(**options))
    for line in [*save(figure, file_stem), *left_out]:
        print(line)
    return 0


def _stem(path: Path) -> Path:
    """Return a figure's path without `.png` or `.svg`. Other picture formats are refused."""
    if path.suffix.lower() in (".pdf", ".jpg", ".jpeg", ".eps"):
        raise ConfigError(
            f"--out {path}: pictures are made as PNG and SVG only; write --out {path.with_suffix('')}, which makes both"
        )
    return path.with_suffix("") if path.suffix.lower() in (".png", ".svg") else path
