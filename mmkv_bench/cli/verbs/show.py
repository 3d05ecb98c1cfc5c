"""`mmkv-bench show`, `plot` and `report`: a store, its cells and samples, in the terminal, as pictures and as pages."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from mmkv_bench.cli.grammar import Parser, count, rows_folder
from mmkv_bench.cli.verbs.measure import ANALYSES
from mmkv_bench.consent import RUN_CODE
from mmkv_bench.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from mmkv_bench.report.show_cells import StoreCells


def show_options(parser: Parser) -> None:
    """Rows and the words that choose among them."""
    parser.add_argument("rows", type=rows_folder, help="a rows folder that a run printed")
    parser.add_argument(
        "what",
        nargs="*",
        help="the beginning of a cell's hash, or words that choose cells (method, method@budget, dataset, protocol, "
        "reading, seed=0); the id of a sample; nothing: all cells",
    )
    for flag, text in {
        "--prompt": "with a sample: its whole prompt, as the chat template made it",
        "--remake": "with a sample: load the model, answer it again, show which visual tokens each method kept",
        "--other-versions": "remake also under another torch or transformers than made the rows",
        RUN_CODE: "remake also with the method files that the rows name, if they are the rows'",
    }.items():
        parser.add_argument(flag, action="store_true", help=text)
    parser.examples(
        "mmkv-bench show results/tiny/large",
        "mmkv-bench show results/tiny/large mmshift@128 pages_walk_large",
        "mmkv-bench show results/tiny/large walk3-large-test-000000",
        "mmkv-bench show runs/default lookup-small-test-000000 --prompt",
        "mmkv-bench show results/tiny/large walk3-large-test-000000 mmshift@128 --remake",
    )


def show(given: argparse.Namespace) -> int:
    """Show rows; with --remake 1 where an answer that was made again differs from the stored one, 2 where none could be."""
    from mmkv_bench.report.show_cells import StoreCells, show_cell, show_store
    from mmkv_bench.report.show_sample import show_sample
    from mmkv_bench.report.terminal import console
    from mmkv_bench.store.store import Store

    out, cells = console(), StoreCells(Store(given.rows))
    named = cells.named(given.what)
    if named.sample is not None:
        shown = show_sample(out, cells, named.sample, named.cells, given.remake, given.prompt)
        again = (given.other_versions, given.run_code)
        return _remake(out, cells, named.sample, shown, *again) if given.remake else 0
    if given.remake or given.prompt:
        flag = "--remake" if given.remake else "--prompt"
        raise ConfigError(f"{flag} needs a sample: name one, as in mmkv-bench show <rows> <sample id> {flag}")
    if named.one:
        show_cell(out, cells, named.cells[0])
    else:
        show_store(out, cells, named.cells)
    return 0


def _remake(
    out: Console,
    cells: StoreCells,
    name: str,
    shown: Mapping[str, Sequence[str]],
    other_versions: bool,
    run_code: bool,
) -> int:
    """Print the visual tokens that each cell kept."""
    from mmkv_bench.diagnostics.verify import remake
    from mmkv_bench.report.terminal import KeptMap, shares, show

    remade = []
    for group in shown.values():
        again = remake(cells.store.root, group, name, other_versions, run_code)
        remade += [again[cell] for cell in group if cell in again]
    maps = []
    for one in remade:
        if one.kept is not None and one.prompt is not None:
            proof = "digest the same" if one.proven else "answer and counts the same" if one.same else "NOT the same"
            share = shares(one.kept, one.prompt.tokens)
            maps.append(KeptMap(cells.title(one.row["cell"]), [proof], share, one.prompt.visual, one.prompt.places))
    out.print("\nMade again", style="bold")
    show(out, maps)
    for one in remade:
        if not one.same:
            what = f"differs in {', '.join(one.differing)}" if one.differing else f"not made again: {one.outcome}"
            out.print(f"{cells.title(one.row['cell'])} {what}")
    if any(one.differing for one in remade):
        return 1
    return 0 if any(one.same for one in remade) else 2


def report_options(parser: Parser) -> None:
    """Rows, folder and number of samples."""
    parser.add_argument("rows", type=rows_folder, nargs="+", help="rows folders that runs printed")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="a new folder, or that of an earlier report, which is replaced",
    )
    parser.add_argument(
        "--samples",
        type=count,
        default=50,
        metavar="N",
        help="of each dataset, the first ones, with answers and images (default: 50)",
    )
    parser.add_argument(
        "--receipt",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a receipt of `mmkv-bench verify`, linked from the pages of its cells; may be given several times",
    )
    parser.examples(
        "mmkv-bench report results/tiny/large --out report",
        "mmkv-bench report results/tiny/large results/tiny/methods --out report --samples 20",
    )


def report(given: argparse.Namespace) -> int:
    """Make the report; print its page, its size and what it leaves out."""
    from mmkv_bench.diagnostics.receipt import receipts_of
    from mmkv_bench.report.build import build_report

    roots = list(dict.fromkeys(given.rows))
    built = build_report(roots, given.out, given.samples, receipts_of(given.receipt, roots) if given.receipt else None)
    print("\n".join([f"{built.index}: {built.about}", built.size, *built.left_out]))
    return 0


def plot_options(parser: Parser) -> None:
    """Add the kind of picture, rows, filters and the file."""
    parser.add_argument(
        "kind",
        choices=("budget", "length", "front", "removal", "position", *ANALYSES),
        help="budget: scores against the budget; length: a cost against the length of the prompt, with the roofline where the "
        "device was measured; front: scores against costs, one point a cell, the Pareto front drawn; removal: scores against "
        "the share of entries that FlashCache removed; position: fidelity against the token of a continuation; others: the "
        "diagnostic of that name, as its paper's figure has it",
    )
    parser.add_argument(
        "rows",
        type=rows_folder,
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
            "methods": "(budget, front, removal, position) only these lines",
            "budgets": "only budgets of a kind, entries or fraction; or (budget, front, removal, position) only these, as 64,128",
            "cost": "what costs are drawn, as for `tables --metric`; default: tpot_s (length), bytes,tpot_s (front)",
        }
    )
    parser.add_argument(
        "--costs",
        type=rows_folder,
        metavar="ROWS",
        help="(front) rows of scenario=efficiency, where they are in another folder",
    )
    parser.add_argument("--tokens", type=count, metavar="N", help="(front) passes of this prompt length")
    parser.add_argument("--batch", type=count, metavar="N", help="(front) passes of this batch")
    parser.add_argument("--prompts", choices=("text", "image", "video"), help="(front) passes of this kind of prompts")
    parser.add_argument(
        "--name", action="append", metavar="LINE=NAME", help="print another name for a line: --name mine=Ours"
    )
    parser.examples(
        "mmkv-bench plot budget results/tiny/large --out large",
        "mmkv-bench plot budget results/tiny/large --methods snapkv,mmshift --budgets 64,128,256 --out two",
        "mmkv-bench plot length runs/speed --out latency",
        "mmkv-bench plot front runs/demo --costs runs/speed --tokens 512 --out front",
        "mmkv-bench plot lorenz runs/figures --out lorenz",
    )


def plot(given: argparse.Namespace) -> int:
    """Draw the picture, print the files' names and what is left out of it."""
    from mmkv_bench.api.pictures import PlotRequest, draw
    from mmkv_bench.tables.figure import save

    options = {field.name: getattr(given, field.name) for field in fields(PlotRequest)}
    stem = _stem(given.out)
    figure, left_out = draw(PlotRequest(**options))
    for line in [*save(figure, stem), *left_out]:
        print(line)
    return 0


def _stem(path: Path) -> Path:
    """The path without `.png` or `.svg`, of which both are made; other kinds of picture are refused."""
    if path.suffix.lower() in (".pdf", ".jpg", ".jpeg", ".eps"):
        raise ConfigError(
            f"--out {path}: pictures are PNG and SVG; write --out {path.with_suffix('')}, which makes both"
        )
    return path.with_suffix("") if path.suffix.lower() in (".png", ".svg") else path
