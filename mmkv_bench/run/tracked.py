"""What trackers are told of a run: what it is, as flat keys that stay, and at its end what all rows of its folder came to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mmkv_bench.store.tracking import show_summary

if TYPE_CHECKING:
    from mmkv_bench.config.schema import RunConfig
    from mmkv_bench.plan.cells import Cell
    from mmkv_bench.store.store import Store


def settings(config: RunConfig) -> dict[str, Any]:
    """What `store.tracking.tracker` takes."""
    if config.logger.kind == "none":
        return {"name": "none"}
    return {
        "name": config.logger.kind,
        "mode": config.logger.mode,
        "project": config.logger.project,
        "entity": config.logger.entity,
        "run": config.logger.name,
        "shard": str(config.shard).replace("/", "of"),
    }


def described(config: RunConfig, cells: Sequence[Cell]) -> dict[str, Any]:
    """A run's configuration for a viewer: flat keys to filter and to draw by, several values joined by commas, and all of it
    under `run`."""
    return {
        "model": str(config.model.name),
        "weights": str(config.model.weights),
        "dtype": cells[0].dtype,
        "attention": str(config.model.attention),
        "dataset": _joined(cell.dataset for cell in cells),
        "method": _joined(cell.method for cell in cells),
        "budget": _joined(cell.budget for cell in cells if cell.budget is not None),
        "protocol": _joined(config.protocol),
        "reading": _joined(config.reading),
        "seed": _joined(config.seed),
        "limit": config.limit,
        "sharing": str(config.sharing),
        "decode": str(config.decode),
        "scenario": str(config.scenario),
        "shard": str(config.shard),
        "cells": len(cells),
        "run": dict(config.resolved),
    }


def _joined(values: Iterable[Any]) -> str:
    return ",".join(dict.fromkeys(map(str, values)))


_SUMMARY = ("model", "dtype", "attention", "device", "dataset", "method", "budget", "protocol", "reading", "seed")
"""Keys of a summary's configuration; of its rows and of no run, since several may have made them."""


def summarise(config: RunConfig, store: Store, worked: bool) -> None:
    """Show what the rows of a run's folder came to, once for all runs, processes and attempts that made them; a run that found
    nothing to do (not `worked`) writes nothing where nothing was shown before."""
    if config.logger.kind == "none" or not (worked or (store.root / "wandb").is_dir()):
        return
    from mmkv_bench.tables.tracked_rows import tracked_rows

    lines = tracked_rows(store)
    about = {key: _joined(line[key] for line in lines if line[key] is not None) for key in _SUMMARY}
    show_summary(settings(config), store.root, about, lines, bool(config.logger.cells))
