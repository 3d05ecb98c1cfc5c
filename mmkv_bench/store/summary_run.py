"""The one wandb run that shows what all rows of a folder came to, and on request one per cell; see `tracking.py`."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmkv_bench.store.files import lock_held
from mmkv_bench.store.tracking import WandbTracker, tracker
from mmkv_bench.store.wandb_process import begin_anew

log = logging.getLogger(__name__)

MEASURED = (
    "score",
    "low",
    "high",
    "difference",
    "answers",
    "failures",
    "ttft_s",
    "tpot_s",
    "peak_bytes",
    "group_prefill_s",
    "group_decode_s",
    "group_peak_bytes",
)
"""Keys of a cell's row that are numbers it came to; all others say what it is."""


def show_summary(
    config: Mapping[str, Any],
    root: Path | str,
    about: Mapping[str, Any],
    cells: Sequence[Mapping[str, Any]],
    each: bool = False,
) -> bool:
    """One run that shows what all rows of a folder came to. It is written once: where the same was shown before nothing is done,
    and other numbers take its place under the same id.

    Args:
        config: as for `tracker`; root: the folder; about: the run's configuration; cells: a row per cell and metric, keys that
            are the same in each; each: one more run for each of these, whose configuration is what it is and whose summary
            is what it came to.

    Returns:
        Whether it was written now.

    Raises:
        ConfigError: as `tracker`.
    """
    shown = tracker(config, root)
    if not isinstance(shown, WandbTracker) or not cells:
        return False
    try:
        return _show(shown, about, cells, each)
    except OSError as problem:
        log.warning("wandb's summary cannot be written (%s); the results are all in the store", problem)
        return False


def _show(shown: WandbTracker, about: Mapping[str, Any], cells: Sequence[Mapping[str, Any]], each: bool) -> bool:
    """What `show_summary` does."""
    digest = hashlib.sha256(json.dumps([about, cells, each], sort_keys=True, default=str).encode()).hexdigest()[:16]
    marks = shown.folder / ".attempts"
    marks.mkdir(parents=True, exist_ok=True)
    mark, lock = marks / f"{shown.group}-summary", marks / "lock"
    lock.touch()
    with lock_held(lock):
        if mark.exists() and mark.read_text() == digest:
            return False
        mark.unlink(missing_ok=True)
        shown.patience_s += len(cells) if each else 0
        begin_anew(shown.folder, name := f"{shown.group}-summary")
        shown.open(name, "summary", about)
        shown.describe({"cells": len({row["cell"] for row in cells})}, cells)
        for row in cells if each else ():
            shown.close()
            begin_anew(shown.folder, name := f"{shown.group}-{_of_row(row)}")
            shown.open(name, "cell", {key: row[key] for key in row if key not in MEASURED}, _label(row))
            shown.describe({key: row[key] for key in MEASURED if row[key] is not None})
        written = shown.ended()
        if written:  # else the next run tries again
            mark.write_text(digest)
    return written


def _of_row(row: Mapping[str, Any]) -> str:
    """What tells a cell's run from others: the cell, its metric and the shape of its prompts."""
    return "-".join(str(row[key]) for key in ("cell", "metric", "prompt_tokens", "batch") if row[key] is not None)


def _label(row: Mapping[str, Any]) -> str:
    return " ".join(str(row[key]) for key in ("method", "budget", "dataset", "metric") if row[key] is not None)
