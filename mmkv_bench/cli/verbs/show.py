"""`mmkv-bench show`: a store, one of its cells or one sample, in the terminal."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmkv_bench.cli.grammar import Parser, rows_folder
from mmkv_bench.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from mmkv_bench.diagnostics.remake import Remade
    from mmkv_bench.report.terminal.known import Cells

SUMMARY = "show rows in the terminal: all cells, one cell, or one sample with every method's answer"


def options(parser: Parser) -> None:
    """Which rows, what of them."""
    parser.add_argument("rows", type=Path, help="a rows folder that a run printed")
    parser.add_argument(
        "what",
        nargs="*",
        help="the beginning of a cell's hash, or words that choose cells (method, method@budget, dataset, protocol, "
        "reading, seed=0); the id of a sample; nothing: all cells",
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
    parser.examples(
        "mmkv-bench show results/tiny/large",
        "mmkv-bench show results/tiny/large mmshift@128 pages_walk_large",
        "mmkv-bench show results/tiny/large walk3-large-test-000000",
        "mmkv-bench show results/tiny/large walk3-large-test-000000 mmshift@128 --remake",
    )


def answer(given: argparse.Namespace) -> int:
    """0; with --remake 1 where an answer that was made again differs from the stored one, 2 where none could be."""
    from mmkv_bench.report.terminal import cell, overview, sample
    from mmkv_bench.report.terminal.known import Cells
    from mmkv_bench.report.terminal.text import console
    from mmkv_bench.store.store import Store

    out, cells = console(), Cells(Store(rows_folder(given.rows)))
    meant = cells.meant(given.what)
    if meant.sample is not None:
        shown = sample.show(out, cells, meant.sample, meant.cells)
        return _remake(out, cells, meant.sample, shown, given.other_versions) if given.remake else 0
    if given.remake:
        raise ConfigError("--remake needs a sample: name one, as in mmkv-bench show <rows> <sample id> --remake")
    if meant.one:
        cell.show(out, cells, meant.cells[0])
    else:
        overview.show(out, cells, meant.cells)
    return 0


def _remake(out: Console, cells: Cells, name: str, shown: Mapping[str, Sequence[str]], other_versions: bool) -> int:
    """Print what was kept, by cell."""
    from mmkv_bench.diagnostics.remake import remake
    from mmkv_bench.report.terminal.kept_map import legend, shades_of, side_by_side

    found: dict[str, Remade] = {}
    for own in shown.values():
        again = remake(cells.store.root, own, name, other_versions)
        found |= {cell: again[cell] for cell in own if cell in again}
    shades = shades_of(out)
    out.print("\nMade again", style="bold")
    blocks = []
    for one in found.values():
        head = [f"{cells.label(one.cell)} ({cells.short(one.cell)})", *_words(one)]
        if one.kept is None or one.seen is None:
            continue
        maps = _maps(one, shades, out.width)
        if len(maps) > 1:  # images of one prompt stand beside each other
            maps = [side_by_side(maps, out.width)]
        blocks.append([*head, *(line for block in maps for line in block)])
    for line in side_by_side(blocks, out.width):
        out.print(line, overflow="ignore", no_wrap=True, crop=False)
    out.print(f"\n{legend(shades)}")
    for one in found.values():
        if not one.same:
            what = f"differs in {', '.join(one.differing)}" if one.differing else f"not made again: {one.outcome}"
            out.print(f"{cells.label(one.cell)} ({cells.short(one.cell)}) {what}")
    if any(one.differing for one in found.values()):
        return 1
    return 0 if any(one.same for one in found.values()) else 2


def _words(one: Remade) -> list[str]:
    """How much was kept, and whether it is what the row's digest is of."""
    if one.kept is None or one.seen is None:
        return []
    from mmkv_bench.report.terminal.kept_map import shares

    share = shares(one.kept, one.seen.tokens)
    visual, text = share[one.seen.visual].sum(), share.sum() - share[one.seen.visual].sum()
    told = f"visual {visual:.0f} of {len(one.seen.visual)}, text {text:.0f} of {one.seen.tokens - len(one.seen.visual)}"
    proof = "digest the same" if one.proven else "answer and counts the same" if one.same else "NOT the same"
    return [told, proof] + ([one.seen.why] if one.seen.why else [])


def _maps(one: Remade, shades: str, width: int) -> list[list[str]]:
    """A block of lines per image."""
    from mmkv_bench.report.terminal.kept_map import ACROSS, drawn, raster, shares

    if one.kept is None or one.seen is None or one.seen.boxes is None:
        return []
    share = shares(one.kept, one.seen.tokens)[one.seen.visual]
    if share.min() == 1:
        return [["all of them"]]
    return [
        drawn(raster(one.seen.boxes, share, image, width // ACROSS), shades) for image in range(len(one.seen.sizes))
    ]
