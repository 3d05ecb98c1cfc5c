"""What trackers are told of a run: what it is, as flat keys that stay, and at its end what all rows of its folder came to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mmkv_bench.config.schema import as_list
from mmkv_bench.store.tracking import show_summary

if TYPE_CHECKING:
    from mmkv_bench.config.schema import Logger
    from mmkv_bench.plan.cells import Cell
    from mmkv_bench.store.store import Store


def settings(logger: Logger, shard: str) -> dict[str, Any]:
    """What `store.tracking.tracker` takes."""
    if logger.kind == "none":
        return {"name": "none"}
    return {
        "name": logger.kind,
        "mode": logger.mode,
        "project": logger.project,
        "entity": logger.entity,
        "run": logger.name,
        "shard": shard.replace("/", "of"),
    }


def described(resolved: Mapping[str, Any], cells: Sequence[Cell]) -> dict[str, Any]:
    """A resolved configuration for a viewer: flat keys to filter and to draw by, several values joined by commas, and all of it
    under `run`."""
    return {
        "model": str(resolved["model"]["name"]),
        "weights": str(resolved["model"]["weights"]),
        "dtype": cells[0].dtype,
        "attention": str(resolved["model"]["attention"]),
        "dataset": _joined(cell.dataset for cell in cells),
        "method": _joined(cell.method for cell in cells),
        "budget": _joined(cell.budget for cell in cells if cell.budget is not None),
        **{key: _joined(as_list(resolved[key])) for key in ("protocol", "reading", "seed")},
        "limit": resolved["limit"],
        **{key: str(resolved[key]) for key in ("sharing", "decode", "scenario", "shard")},
        "cells": len(cells),
        "run": dict(resolved),
    }


def _joined(values: Iterable[Any]) -> str:
    return ",".join(dict.fromkeys(map(str, values)))


_SUMMARY = ("model", "dtype", "attention", "device", "dataset", "method", "budget", "protocol", "reading", "seed")
"""Keys of a summary's configuration; of its rows and of no run, since several may have made them."""


def summarise(logger: Logger, shard: str, store: Store, worked: bool) -> None:
    """Show what the rows of a run's folder came to, once for all runs, processes and attempts that made them; a run that found
    nothing to do (not `worked`) writes nothing where nothing was shown before."""
    if logger.kind == "none" or not (worked or (store.root / "wandb").is_dir()):
        return
    from mmkv_bench.tables.tracked_rows import tracked_rows

    lines = tracked_rows(store)
    about = {key: _joined(line[key] for line in lines if line[key] is not None) for key in _SUMMARY}
    show_summary(settings(logger, shard), store.root, about, lines, logger.cells)
