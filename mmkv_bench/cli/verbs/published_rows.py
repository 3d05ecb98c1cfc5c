"""`mmkv-bench pack` rewrites rows as few files, `fetch` downloads published rows, `verify` makes answers again, and
`accept` checks a bundle.

A bundle is an experiment's published rows with tables, a receipt of answers made again, and the environment.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mmkv_bench.cli.grammar import overrides_of, rows_folder
from mmkv_bench.errors import ConfigError

RESULTS = Path("results/tiny")


def pack(given: argparse.Namespace) -> int:
    """Rewrite each folder of rows as few files, and print the sizes before and after. Return 0."""
    from mmkv_bench.diagnostics.receipt import files_beside
    from mmkv_bench.store.compact import pack
    from mmkv_bench.store.publish import check_empty, publish
    from mmkv_bench.store.store import Store

    if given.publish is not None:
        if len(given.rows) != 1:
            raise ConfigError(
                f"--publish takes one folder of rows but got {len(given.rows)}; publish each folder by itself"
            )
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
        old_mib = _mib(folder)
        dropped_cells = pack(Store(folder), given.slim)
        note = f"; dropped {dropped_cells} cells that newer numbers of their methods supersede" if dropped_cells else ""
        print(f"{folder}: {old_mib:.1f} -> {_mib(folder):.1f} MiB{note}")
        if given.publish is not None:
            files_to_add = {} if given.receipt is None else files_beside(Store(folder), given.receipt)
            digest = publish(Store(folder), given.publish, files_to_add)
            print(f"{given.publish}: ready to be uploaded; its manifest's sha256 is {digest}")
    return 0


def _mib(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20


def fetch(given: argparse.Namespace) -> int:
    """Fetch and check published rows, or a model's weights, and print what was fetched. Return 0."""
    if given.model is not None:
        return _fetch_model(given)
    if given.accept_terms:
        raise ConfigError("--accept-terms is only for a model's weights; write `mmkv-bench fetch model <name>` with it")
    if given.out is None:
        raise ConfigError(f"fetching the rows of {given.source} needs a folder; write --out runs/published")
    from mmkv_bench.store.publish import fetch, place
    from mmkv_bench.store.store import Store

    fetched, present = fetch(place(given.source), given.out, given.sha256, lambda line: print(line, file=sys.stderr))
    cells = Store(given.out).cells().num_rows
    print(f"{given.out}: {cells} cells in {fetched + present} files, {fetched} fetched, {present} there already")
    print(f"mmkv-bench tables {given.out} prints their tables")
    return 0


def _fetch_model(given: argparse.Namespace) -> int:
    from mmkv_bench.models.fetch import fetch_model

    if given.source != "model" or given.out is not None or given.sha256 is not None:
        raise ConfigError(
            "fetching weights takes only a model's name, without --out and --sha256; write "
            f"`mmkv-bench fetch model {given.model}`"
        )
    print(f"{fetch_model(given.model, given.accept_terms)}: the weights of model={given.model}")
    return 0


def verify(given: argparse.Namespace) -> int:
    """Generate stored answers again and compare.

    Return 0 if all are equal, 1 if an answer differs, 2 if none could be generated again, 130 if interrupted.
    """
    from mmkv_bench.diagnostics.receipt import EXIT_CODES, lines, receipt, verdict
    from mmkv_bench.diagnostics.remade_answers import draw, make_again

    is_folder = [Path(word).is_dir() for word in given.what]
    roots = [rows_folder(word) for word in given.what[: is_folder.index(False) if False in is_folder else None]]
    choosing_words = given.what[len(roots) :]
    cells, sample = _requested_cells(roots, choosing_words)
    roots = roots or stores_with_answers(RESULTS)
    sample_count, seed = (None, None) if given.all else (given.samples, given.seed)
    drawn_answers = draw(roots, sample_count, seed or 0, cells, sample)
    print(
        f"making {len(drawn_answers)} answers of {len({one.row['cell'] for one in drawn_answers})} cells again",
        file=sys.stderr,
    )
    make_again(drawn_answers, given.other_versions, run_code=given.run_code)
    print("\n".join(lines(drawn_answers)))
    if given.receipt is not None:
        receipt_json = json.dumps(receipt(drawn_answers, seed, choosing_words), indent=1)
        given.receipt.write_text(receipt_json + "\n", encoding="utf-8")
        link_hint = f"mmkv-bench report <rows> --receipt {given.receipt} links it from the cells' pages"
        print(f"receipt: {given.receipt}; {link_hint}")
    return EXIT_CODES[verdict(drawn_answers)]


def _requested_cells(roots: Sequence[Path], words: Sequence[str]) -> tuple[list[str] | None, str | None]:
    """Return the cells (hashes) and the sample that words of the command line choose. None means all.

    Raises ConfigError: words without exactly one folder of rows before them, or words that match no cell and no sample.
    """
    from mmkv_bench.report.show import StoreCells
    from mmkv_bench.store.store import Store

    if not words:
        return None, None
    if len(roots) != 1:
        folders_clause = "no folder" if not roots else f"{len(roots)} folders"
        raise ConfigError(
            f"{words[0]!r} is not a folder of result rows. Words that choose cells follow one folder, but got "
            f"{folders_clause}. Write mmkv-bench verify <rows> {' '.join(words)}"
        )
    chosen_cells = StoreCells(Store(roots[0])).choose(words)
    return chosen_cells.cells, chosen_cells.sample


def stores_with_answers(folder: Path) -> list[Path]:
    """Return the stores directly below a folder that have answers, sorted."""
    return sorted(file.parent for file in folder.glob("*/store.json") if any(file.parent.glob("responses/*.parquet")))


# ---------------------------------------------------------------------- accept
FIRST_REAL = ("experiment=first_real", "model=smolvlm_256m,qwen2_5_vl_3b")
"""Settings of the bundles that `make first-real` makes."""


def accept(given: argparse.Namespace) -> int:
    """Check an experiment's bundle and print a line per check. Return 0 if nothing is refused, else 1."""
    from mmkv_bench.diagnostics.acceptance import NOT_CHECKED, REFUSED, findings
    from mmkv_bench.plan.validate import compose_checked_jobs
    from mmkv_bench.store.publish import place

    bundle, settings = place(given.bundle), given.overrides or list(FIRST_REAL)
    given.overrides, as_json, given.json = settings, given.json, False
    configs = [config for _, config in compose_checked_jobs(overrides_of(given))]
    seed = secrets.randbelow(1 << 32) if given.seed is None else given.seed
    findings_so_far = []
    if not as_json:
        print(f"{bundle.shown} as a bundle of {' '.join(settings)}")
    with tempfile.TemporaryDirectory() as folder:
        for finding in findings(bundle, configs, Path(folder) / "rows", given.samples, seed):
            findings_so_far.append(finding)
            if not as_json:
                print(finding, flush=True)
    accepted = all(finding.outcome != REFUSED for finding in findings_so_far)
    if as_json:
        checks = [asdict(finding) for finding in findings_so_far]
        print(json.dumps({"accepted": accepted, "settings": settings, "seed": seed, "checks": checks}))
    elif accepted:
        unchecked_names = ", ".join(finding.check for finding in findings_so_far if finding.outcome == NOT_CHECKED)
        print("accepted: nothing is refused" + f"; not checked: {unchecked_names}" * bool(unchecked_names))
    else:
        print(f"refused: {', '.join(finding.check for finding in findings_so_far if finding.outcome == REFUSED)}")
    return int(not accepted)
