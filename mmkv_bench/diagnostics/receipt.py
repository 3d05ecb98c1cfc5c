"""Receipts of `verify`: which stored answers were made again, what of each was compared, and how it came out.

A receipt is a JSON file. It names cells by their hash and each cell's answers by their digest, so that it fits no other rows.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mmkv_bench import __version__
from mmkv_bench.diagnostics.replanned_cells import VERSIONS
from mmkv_bench.diagnostics.verify import COMPARED, DIFFERENT, EQUAL, INTERRUPTED, SCORES, StoredAnswer
from mmkv_bench.errors import ConfigError
from mmkv_bench.store.store import Store
from mmkv_bench.store.tally import tally

FORMAT = 1
NAMES = {"kept": "entries kept per head", "kept_digest": "digest of the kept positions"}
"""What a column says, where its name does not."""


def lines(drawn: Sequence[StoredAnswer]) -> Iterator[str]:
    """Report a line per store, each difference, each reason, and what was compared in how many answers."""
    for root in dict.fromkeys(one.root for one in drawn):
        of = Counter(_kind(one) for one in drawn if one.root == root)
        yield f"{root}: {sum(of.values())} drawn, {', '.join(f'{count} {kind}' for kind, count in sorted(of.items()))}"
    for one in drawn:
        if one.outcome == DIFFERENT:
            yield f"different: {one.label}: {', '.join(one.differing)}{_other_cpu(one)}"
    for reason, count in Counter(one.outcome for one in drawn if one.outcome not in (EQUAL, DIFFERENT)).items():
        example = next(one for one in drawn if one.outcome == reason)
        yield f"not made again: {count} because of {reason}; first {example.label}"
    yield f"equal: {sum(one.same for one in drawn)} of {len(drawn)} drawn"
    remade = [one for one in drawn if one.compared]
    if remade:
        counts = _counts(remade)
        yield f"compared in {len(remade)} answers: " + ", ".join(
            NAMES.get(name, name) + ("" if count == len(remade) else f" (in {count})")
            for name, count in counts.items()
            if count
        )
        if absent := [NAMES.get(name, name) for name, count in counts.items() if not count]:
            yield f"not compared, because the rows do not have it: {', '.join(absent)}"


def receipt(drawn: Sequence[StoredAnswer], seed: int | None, words: Sequence[str] = ()) -> dict[str, Any]:
    """Return the receipt of answers that were made again, as JSON data.

    Args:
        seed: of the draw; None where all answers of the cells were made again. words: that chose the cells.
    """
    from mmkv_bench.store.provenance import collect

    here = collect()
    stores = []
    for root in dict.fromkeys(one.root for one in drawn):
        answers = [one for one in drawn if one.root == root]
        digests = tally(Store(root)).digests
        cells = {
            cell: [one for one in answers if one.row["cell"] == cell]
            for cell in {one.row["cell"]: None for one in answers}
        }
        stores.append(
            {"rows": root.name, "cells": [_cell(cell, group, *digests[cell]) for cell, group in sorted(cells.items())]}
        )
    return {
        "receipt": FORMAT,
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "verdict": verdict(drawn),
        "seed": seed,
        "words": list(words),
        "versions": {"mmkv_bench": __version__, **{name: version(name) for name in VERSIONS}},
        "commit": here["git_commit"],
        "uncommitted_changes": here["git_dirty"],
        "processor": here["cpu"] or here["device"],
        "stores": stores,
    }


def _cell(cell: str, answers: Sequence[StoredAnswer], stored: int, digest: str) -> dict[str, Any]:
    """Return what was compared in the answers of one cell.

    Args:
        stored: answers that the store has of the cell; digest: their digest.
    """
    row = answers[0].cell
    return {
        "cell": cell,
        "label": answers[0].cell_label,
        "dataset": row["dataset"],
        "answers_stored": stored,
        "answers_digest": digest,
        "made_again": sum(bool(one.compared) for one in answers),
        "equal": sum(one.same for one in answers),
        "different": {one.row["sample_id"]: one.differing for one in answers if one.differing},
        "not_made_again": dict(Counter(one.outcome for one in answers if not one.compared)),
        "compared": _counts(answers),
    }


def verdict(drawn: Sequence[StoredAnswer]) -> str:
    """Return `equal`, `different`, `interrupted`, or `nothing made again`."""
    outcomes = {one.outcome for one in drawn}
    if DIFFERENT in outcomes:
        return DIFFERENT
    if INTERRUPTED in outcomes:
        return INTERRUPTED
    return EQUAL if EQUAL in outcomes else "nothing made again"


EXIT_CODES = {EQUAL: 0, DIFFERENT: 1, "nothing made again": 2, INTERRUPTED: 130}


def receipts_of(paths: Sequence[Path], roots: Sequence[Path]) -> dict[Path, dict[str, Mapping[str, Any]]]:
    """Return, by store and hash of a cell, the entry that a receipt has of it, with the receipt's date, `file` and `path`.

    Raises:
        ConfigError: a file that is no receipt, or one of other rows.
    """
    receipts: dict[Path, dict[str, Mapping[str, Any]]] = {root: {} for root in roots}
    digests = {root: tally(Store(root)).digests for root in (roots if paths else ())}
    for number, path in enumerate(paths):
        made_at, entries = _read(path)
        about = [(root, cell) for root in digests for cell in entries if cell in digests[root]]
        if not about:
            raise ConfigError(
                f"{path} is about no cell of {', '.join(map(str, roots))}; give the receipt of these rows, or leave it out"
            )
        for root, cell in about:
            entry = entries[cell]
            if digests[root][cell][1] != entry["answers_digest"]:
                raise ConfigError(
                    f"{path} is about other answers of cell {cell[:8]} ({entry['label']}) than {root} holds; "
                    "verify these rows anew"
                )
            receipts[root][cell] = entry | {"made_at": made_at, "file": f"{number}-{path.name}", "path": path}
    return receipts


def _read(path: Path) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return the date of a receipt, and its entries by cell."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["receipt"] != FORMAT:
            raise ValueError(f"format {data['receipt']}")
        return str(data["made_at"]), {
            entry["cell"]: _checked(entry) for part in data["stores"] for entry in part["cells"]
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no receipt ({type(error).__name__}: {error}); give a file that `mmkv-bench verify --receipt` wrote"
        ) from None


def _checked(entry: Any) -> dict[str, Any]:
    """Return an entry whose numbers are numbers and whose texts are texts. Raises TypeError or KeyError."""
    for name, kind in _KINDS.items():
        if not isinstance(entry[name], kind):
            raise TypeError(f"{name}={entry[name]!r}")
    return dict(entry)


_KINDS = {
    **dict.fromkeys(("cell", "label", "answers_digest"), str),
    **dict.fromkeys(("answers_stored", "made_again", "equal"), int),
}


def _counts(answers: Sequence[StoredAnswer]) -> dict[str, int]:
    return {name: sum(name in one.compared for one in answers) for name in (*COMPARED, SCORES)}


def _kind(one: StoredAnswer) -> str:
    return one.outcome.partition(" (")[0].partition(":")[0]


def _other_cpu(one: StoredAnswer) -> str:
    from mmkv_bench.store.provenance import collect

    here, there = collect()["cpu"], one.cell["cpu"]
    return "" if here == there or there is None else f" (made on {there}, here {here})"
