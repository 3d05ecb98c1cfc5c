"""`mmkv-bench show`: a store, one of its cells or one sample, in the terminal."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmkv_bench.cli.grammar import Parser, rows_folder
from mmkv_bench.consent import RUN_CODE
from mmkv_bench.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from mmkv_bench.diagnostics.verify import RemadeAnswer
    from mmkv_bench.report.terminal.store_cells import StoreCells

SUMMARY = "show rows in the terminal: all cells, one cell, or one sample with every method's answer"


def options(parser: Parser) -> None:
    """Declare the rows and the words that choose among them."""
    parser.add_argument("rows", type=Path, help="a rows folder that a run printed")
    parser.add_argument(
        "what",
        nargs="*",
        help="the beginning of a cell's hash, or words that choose cells (method, method@budget, dataset, protocol, "
        "reading, seed=0); the id of a sample; nothing: all cells",
    )
    parser.add_argument(
        "--prompt", action="store_true", help="with a sample: its whole prompt, as the chat template made it"
    )
    parser.add_argument(
        "--remake",
        action="store_true",
        help="with a sample: load the model, answer it again, show which visual tokens each method kept",
    )
    parser.add_argument(
        "--other-versions",
        action="store_true",
        help="remake also under another torch or transformers than made the rows",
    )
    parser.add_argument(
        RUN_CODE,
        action="store_true",
        help="remake also with the method files that the rows name, if they are the rows'",
    )
    parser.examples(
        "mmkv-bench show results/tiny/large",
        "mmkv-bench show results/tiny/large mmshift@128 pages_walk_large",
        "mmkv-bench show results/tiny/large walk3-large-test-000000",
        "mmkv-bench show runs/default lookup-small-test-000000 --prompt",
        "mmkv-bench show results/tiny/large walk3-large-test-000000 mmshift@128 --remake",
    )


def answer(given: argparse.Namespace) -> int:
    """0; with --remake 1 where an answer that was made again differs from the stored one, 2 where none could be."""
    from mmkv_bench.report.terminal.sample import show_sample
    from mmkv_bench.report.terminal.store_cells import StoreCells
    from mmkv_bench.report.terminal.store_view import show_cell, show_store
    from mmkv_bench.report.terminal.text import console
    from mmkv_bench.store.store import Store

    out, cells = console(), StoreCells(Store(rows_folder(given.rows)))
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
    """Print what was kept, by cell."""
    from mmkv_bench.diagnostics.verify import remake
    from mmkv_bench.report.terminal.kept_map import KeptMap, shares, show

    remade: dict[str, RemadeAnswer] = {}
    for own in shown.values():
        again = remake(cells.store.root, own, name, other_versions, run_code)
        remade |= {cell: again[cell] for cell in own if cell in again}
    maps = []
    for one in remade.values():
        if one.kept is not None and one.prompt is not None:
            proof = "digest the same" if one.proven else "answer and counts the same" if one.same else "NOT the same"
            share = shares(one.kept, one.prompt.tokens)
            maps.append(KeptMap(cells.title(one.cell), [proof], share, one.prompt.visual, one.prompt.places))
    out.print("\nMade again", style="bold")
    show(out, maps)
    for one in remade.values():
        if not one.same:
            what = f"differs in {', '.join(one.differing)}" if one.differing else f"not made again: {one.outcome}"
            out.print(f"{cells.title(one.cell)} {what}")
    if any(one.differing for one in remade.values()):
        return 1
    return 0 if any(one.same for one in remade.values()) else 2
