"""`mmkv-bench pack` rewrites rows as few files, `fetch` gets published rows, `verify` makes answers again."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmkv_bench.cli.grammar import rows_folder
from mmkv_bench.errors import ConfigError

if TYPE_CHECKING:
    from mmkv_bench.store.store import Store

RESULTS = Path("results/tiny")


def pack(given: argparse.Namespace) -> int:
    """Pack each folder and print its sizes before and after."""
    from mmkv_bench.store.compact import pack
    from mmkv_bench.store.publish import check_empty, publish
    from mmkv_bench.store.store import Store

    if given.publish is not None and len(given.rows) != 1:
        raise ConfigError(
            f"--publish takes one folder of rows but got {len(given.rows)}; publish each folder by itself"
        )
    if given.publish is not None:
        check_empty(given.publish)
    elif given.receipt is not None:
        raise ConfigError(
            "--receipt needs --publish, because it goes into the published folder; add --publish "
            "<folder>, or leave it out"
        )
    if given.receipt is not None:
        from mmkv_bench.diagnostics.receipt import receipts_of

        receipts_of([given.receipt], given.rows)  # before packing, which cannot be undone
    for folder in given.rows:
        before = _mib(folder)
        dropped = pack(Store(folder), given.slim)
        note = f"; dropped {dropped} cells that newer numbers of their methods supersede" if dropped else ""
        print(f"{folder}: {before:.1f} -> {_mib(folder):.1f} MiB{note}")
        if given.publish is not None:
            digest = publish(Store(folder), given.publish, _beside(Store(folder), given.receipt))
            print(f"{given.publish}: ready to be uploaded; its manifest's sha256 is {digest}")
    return 0


def _beside(store: Store, receipt: Path | None) -> dict[str, bytes]:
    if receipt is None:
        return {}
    from mmkv_bench.diagnostics.bundle import files_beside

    return files_beside(store, receipt)


def _mib(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20


def fetch(given: argparse.Namespace) -> int:
    """Fetch, check and open published rows, and print their size; or fetch a model's weights."""
    if given.model is not None:
        return _fetch_model(given)
    if given.accept_terms:
        raise ConfigError("--accept-terms is only for a model's weights; write `mmkv-bench fetch model <name>` with it")
    if given.out is None:
        raise ConfigError(f"fetching the rows of {given.source} needs a folder; write --out runs/published")
    from mmkv_bench.store.publish import fetch, place
    from mmkv_bench.store.store import Store

    fetched, there = fetch(place(given.source), given.out, given.sha256, lambda line: print(line, file=sys.stderr))
    cells = Store(given.out).cells().num_rows
    print(f"{given.out}: {cells} cells in {fetched + there} files, {fetched} fetched, {there} there already")
    print(f"mmkv-bench tables {given.out} prints their tables")
    return 0


def _fetch_model(given: argparse.Namespace) -> int:
    from mmkv_bench.models.fetch import fetch_model

    if given.source != "model" or given.out is not None or given.sha256 is not None:
        raise ConfigError(
            f"wrong words for a model's weights; write `mmkv-bench fetch model {given.model}` "
            "without --out and --sha256"
        )
    print(f"{fetch_model(given.model, given.accept_terms)}: the weights of model={given.model}")
    return 0


def verify(given: argparse.Namespace) -> int:
    """Make answers again. Return 0 if all are equal, 1 if an answer differs, 2 if none could be made again, 130 if
    interrupted."""
    from mmkv_bench.diagnostics.receipt import EXIT_CODES, lines, receipt, verdict
    from mmkv_bench.diagnostics.reproduction import draw, make_again

    is_folder = [Path(word).is_dir() for word in given.what]
    roots = [rows_folder(word) for word in given.what[: is_folder.index(False) if False in is_folder else None]]
    words = given.what[len(roots) :]
    cells, sample = _named(roots, words)
    roots = roots or stores_with_answers(RESULTS)
    count, seed = (None, None) if given.all else (given.samples, given.seed)
    drawn = draw(roots, count, seed or 0, cells, sample)
    print(f"making {len(drawn)} answers of {len({one.row['cell'] for one in drawn})} cells again", file=sys.stderr)
    make_again(drawn, given.other_versions, run_code=given.run_code)
    print("\n".join(lines(drawn)))
    if given.receipt is not None:
        given.receipt.write_text(json.dumps(receipt(drawn, seed, words), indent=1) + "\n", encoding="utf-8")
        print(
            f"receipt: {given.receipt}; mmkv-bench report <rows> --receipt {given.receipt} links it from the cells' pages"
        )
    return EXIT_CODES[verdict(drawn)]


def _named(roots: Sequence[Path], words: Sequence[str]) -> tuple[list[str] | None, str | None]:
    """Return the cells and the sample that the words choose; None for all.

    Raises:
        ConfigError: words without exactly one folder before them, or that match no cell and no sample.
    """
    from mmkv_bench.report.show import StoreCells
    from mmkv_bench.store.store import Store

    if not words:
        return None, None
    if len(roots) != 1:
        before = "no folder" if not roots else f"{len(roots)} folders"
        raise ConfigError(
            f"{words[0]!r} is not a folder of result rows, and words that choose cells need one folder before "
            f"them, but got {before}. Write mmkv-bench verify <rows> {' '.join(words)}"
        )
    named = StoreCells(Store(roots[0])).named(words)
    return named.cells, named.sample


def stores_with_answers(folder: Path) -> list[Path]:
    """Return the stores below a folder that have answers. Passes and diagnostics are never made again."""
    return sorted(file.parent for file in folder.glob("*/store.json") if any(file.parent.glob("responses/*.parquet")))
