"""Receipts of `verify`: which stored answers were made again, which columns were compared, and the outcomes. Bundles: published
stores with a receipt, their tables, and the versions, devices and code of their rows.

A receipt is a JSON file. It identifies cells by their hashes, and the answers and scores of a cell by their digests, so a
receipt is valid for these rows only.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from mmkv_bench import __version__
from mmkv_bench.diagnostics.remade_answers import COMPARED, DIFFERENT, EQUAL, INTERRUPTED, SCORES, StoredAnswer
from mmkv_bench.diagnostics.replanned_cells import VERSIONS
from mmkv_bench.errors import ConfigError
from mmkv_bench.store.provenance import collect, source_files, source_version
from mmkv_bench.store.publish import ENVIRONMENT, RECEIPT, TABLES
from mmkv_bench.store.store import Store
from mmkv_bench.store.tally import tally

FORMAT = 2
NAMES = {"kept": "entries kept per head", "kept_digest": "digest of the kept positions"}
"""Descriptions of columns whose names do not describe them."""


def lines(drawn: Sequence[StoredAnswer]) -> Iterator[str]:
    """Yield report lines on drawn answers after `make_again`.

    There is one line per store, per answer that differs, and per reason why answers were not made again; then the number of
    equal answers, and the numbers of answers per compared column.
    """
    for root in dict.fromkeys(one.root for one in drawn):
        outcome_counts = Counter(one.outcome.partition(" (")[0].partition(":")[0] for one in drawn if one.root == root)
        count_texts = ", ".join(f"{count} {kind}" for kind, count in sorted(outcome_counts.items()))
        yield f"{root}: {sum(outcome_counts.values())} drawn, {count_texts}"
    for one in drawn:
        if one.outcome == DIFFERENT:
            cpu_here, cpu_of_cell = collect()["cpu"], one.cell["cpu"]
            cpu_text = "" if cpu_of_cell in (None, cpu_here) else f" (made on {cpu_of_cell}, here {cpu_here})"
            yield f"different: {one.label}: {', '.join(one.differing)}{cpu_text}"
    for reason, count in Counter(one.outcome for one in drawn if one.outcome not in (EQUAL, DIFFERENT)).items():
        example = next(one for one in drawn if one.outcome == reason)
        yield f"not made again: {count} because of {reason}; first {example.label}"
    yield f"equal: {sum(one.same for one in drawn)} of {len(drawn)} drawn"
    answers_remade = [one for one in drawn if one.compared]
    if answers_remade:
        counts = _counts(answers_remade)
        yield f"compared in {len(answers_remade)} answers: " + ", ".join(
            NAMES.get(name, name) + ("" if count == len(answers_remade) else f" (in {count})")
            for name, count in counts.items()
            if count
        )
        if fields_absent := [NAMES.get(name, name) for name, count in counts.items() if not count]:
            yield f"not compared, because the rows do not have it: {', '.join(fields_absent)}"


def receipt(drawn: Sequence[StoredAnswer], seed: int | None, words: Sequence[str] = ()) -> dict[str, Any]:
    """Return the receipt of answers that were made again: JSON data with the outcomes of each store and cell (one method,
    budget and dataset).

    Args:
        drawn: the answers with their outcomes.
        seed: seed of the draw; None if all answers of the cells were made again.
        words: command-line words that selected the cells.
    """
    environment_here = collect()
    stores = []
    for root in dict.fromkeys(one.root for one in drawn):
        answers = [one for one in drawn if one.root == root]
        cells: dict[str, list[StoredAnswer]] = {}
        for one in answers:
            cells.setdefault(one.row["cell"], []).append(one)
        digests, score_digest_of = tally(Store(root)).digests, score_digests(Store(root), cells)
        entries = [_cell(cell, group, *digests[cell], score_digest_of[cell]) for cell, group in sorted(cells.items())]
        stores.append({"rows": root.name, "cells": entries})
    return {
        "receipt": FORMAT,
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "verdict": verdict(drawn),
        "seed": seed,
        "words": list(words),
        "versions": {"mmkv_bench": __version__, **{name: version(name) for name in VERSIONS}},
        "commit": environment_here["git_commit"],
        "uncommitted_changes": environment_here["git_dirty"],
        "processor": environment_here["cpu"] or environment_here["device"],
        "stores": stores,
    }


def score_digests(store: Store, cells: Collection[str]) -> dict[str, str]:
    """Return hash of a cell (one method, budget and dataset) -> digest of its samples' scores, 16 hex digits of a sha256.

    A cell without scores has the digest of an empty list.
    """
    columns = ("cell", "sample_id", "metric", "value")
    rows = (
        store.samples(cells, columns).select(columns).sort_by([(name, "ascending") for name in columns[:3]]).to_pandas()
    )
    texts = {
        cell: part[[*columns[1:]]].to_json(orient="values", double_precision=15) for cell, part in rows.groupby("cell")
    }
    return {cell: hashlib.sha256(texts.get(cell, "[]").encode()).hexdigest()[:16] for cell in cells}


def _scores(answers: Sequence[StoredAnswer]) -> dict[str, dict[str, float]]:
    """Return metric -> `stored` and `made_again` (mean scores) and `answers` (number), over the answers scored again."""
    means = {}
    for metric in sorted({name for one in answers for name in one.scores_again}):
        scored = [one for one in answers if metric in one.scores_again]
        stored, score_again = (
            fmean(one.scores[metric] for one in scored),
            fmean(one.scores_again[metric] for one in scored),
        )
        means[metric] = {"stored": stored, "made_again": score_again, "answers": len(scored)}
    return means


def _cell(cell: str, answers: Sequence[StoredAnswer], stored: int, digest: str, scores: str) -> dict[str, Any]:
    """Return a receipt's entry for one cell (one method, budget and dataset).

    answers: the cell's drawn answers. stored: number of all its stored answers. digest, scores: digests of the stored answers
        and of their scores.
    """
    row = answers[0].cell
    return {
        "cell": cell,
        "label": answers[0].cell_label,
        "dataset": row["dataset"],
        "answers_stored": stored,
        "answers_digest": digest,
        "scores_digest": scores,
        "scores": _scores(answers),
        "made_again": sum(bool(one.compared) for one in answers),
        "equal": sum(one.same for one in answers),
        "different": {one.row["sample_id"]: one.differing for one in answers if one.differing},
        "not_made_again": dict(Counter(one.outcome for one in answers if not one.compared)),
        "compared": _counts(answers),
    }


def verdict(drawn: Sequence[StoredAnswer]) -> str:
    """Return the result for all answers: `equal`, `different`, `interrupted`, or `nothing made again`."""
    outcomes = {one.outcome for one in drawn}
    if DIFFERENT in outcomes:
        return DIFFERENT
    if INTERRUPTED in outcomes:
        return INTERRUPTED
    return EQUAL if EQUAL in outcomes else "nothing made again"


EXIT_CODES = {EQUAL: 0, DIFFERENT: 1, "nothing made again": 2, INTERRUPTED: 130}


def receipts_of(paths: Sequence[Path], roots: Sequence[Path]) -> dict[Path, dict[str, Mapping[str, Any]]]:
    """Return store -> hash of a cell (one method, budget and dataset) -> the cell's entry in a receipt, with the receipt's
    date, `file` and `path`.

    paths: receipt files. roots: folders of the stores.

    Raises:
        ConfigError: a file is not a receipt, or is a receipt of other rows.
    """
    receipts: dict[Path, dict[str, Mapping[str, Any]]] = {root: {} for root in roots}
    stores = {root: Store(root) for root in (roots if paths else ())}
    digests = {root: tally(store).digests for root, store in stores.items()}
    for number, path in enumerate(paths):
        made_at, cell_entries = _read(path)
        cells_about = {root: [cell for cell in cell_entries if cell in digests[root]] for root in stores}
        if not any(cells_about.values()):
            raise ConfigError(
                f"{path} has no cell of {', '.join(map(str, roots))}; give the receipt of these rows, or leave it out"
            )
        for root, cells in cells_about.items():
            score_digest_of = score_digests(stores[root], cells) if cells else {}
            for cell in cells:
                entry = cell_entries[cell]
                same_answers = digests[root][cell][1] == entry["answers_digest"]
                if not same_answers or score_digest_of[cell] != entry["scores_digest"]:
                    raise ConfigError(
                        f"{path} is about other {'scores' if same_answers else 'answers'} of cell {cell[:8]} ({entry['label']}) "
                        f"than {root} has; verify these rows again"
                    )
                receipts[root][cell] = entry | {"made_at": made_at, "file": f"{number}-{path.name}", "path": path}
    return receipts


def _read(path: Path) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return (date, entries by hash of the cell) of a receipt file.

    Raises:
        ConfigError: the file is not a receipt.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["receipt"] != FORMAT:
            raise ValueError(f"format {data['receipt']}, but this version reads format {FORMAT}: verify again")
        entries = {entry["cell"]: dict(entry) for part in data["stores"] for entry in part["cells"]}
        for entry, (name, kind) in product(entries.values(), _ENTRY_TYPES.items()):
            if not isinstance(entry[name], kind):
                raise TypeError(f"{name}={entry[name]!r}")
        return str(data["made_at"]), entries
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is not a receipt ({type(error).__name__}: {error}); give a file that `mmkv-bench verify --receipt` wrote"
        ) from None


_ENTRY_TYPES = {
    **dict.fromkeys(("cell", "label", "answers_digest", "scores_digest"), str),
    "scores": dict,
    **dict.fromkeys(("answers_stored", "made_again", "equal"), int),
}


def _counts(answers: Sequence[StoredAnswer]) -> dict[str, int]:
    return {name: sum(name in one.compared for one in answers) for name in (*COMPARED, SCORES)}


# ---------------------------------------------------------------------- a bundle: published rows with a receipt
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
    rows = store.cells(columns=MADE_WITH).to_pylist()
    distinct_rows = {json.dumps(row, sort_keys=True): row | {"versions": json.loads(row["versions"])} for row in rows}
    file_contents = {
        "made_with": list(distinct_rows.values()),
        "package": source_version(),
        "source": dict(source_files()),
    }
    return {
        RECEIPT: receipt.read_bytes(),
        TABLES: tables_text(store.root).encode(),
        ENVIRONMENT: json.dumps(file_contents, indent=1).encode() + b"\n",
    }


def tables_text(root: Path) -> str:
    """Return the tables of all scores of a store as markdown, with the pairs of methods that are proven different.

    For random weights the text is only a sentence.

    Raises:
        ConfigError: there are no scores. StoreError: rows contradict each other.
    """
    from mmkv_bench.tables.build import RANDOM, build
    from mmkv_bench.tables.formats import markdown
    from mmkv_bench.tables.score_text import fidelity_metrics, names, tables_of_scores
    from mmkv_bench.tables.stored_rows import load

    rows = load(root, fidelity=fidelity_metrics([]))
    try:
        built_tables = build(rows, metrics=names(None, rows))
    except ConfigError as error:
        if str(error) != RANDOM:
            raise
        return f"{RANDOM}\n"
    return markdown(tables_of_scores(built_tables, pairs=True))
