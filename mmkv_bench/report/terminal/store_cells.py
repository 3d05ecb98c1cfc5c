"""Cells of a store: their names in a terminal, and the ones that a user's words name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.store.rows import refuse_malformed
from mmkv_bench.store.tally import remembered
from mmkv_bench.tables.rows import BASELINE, config_of
from mmkv_bench.tables.status import label

if TYPE_CHECKING:
    from mmkv_bench.store.store import Store

_COLUMNS = (
    *("cell", "model", "dataset", "method", "base", "reading", "protocol", "budget_entries", "budget_fraction", "seed"),
    "config",
)
_SHORT = 8  # letters of a hash, or as many more as tell all cells apart
_LEAST = 4  # of them by which a cell is found
_COMPARED = 20_000  # ids of samples that are looked through for one that a word may mean


@dataclass(frozen=True)
class NamedCells:
    """Cells and the sample that words name. sample: an id, or None; one: it is a single cell, and the words chose it."""

    cells: list[str]
    sample: str | None
    one: bool


class StoreCells:
    """The cells of a store, `full` first, then by method and budget.

    Raises:
        ConfigError: there are none.
    """

    def __init__(self, store: Store) -> None:
        table = remembered(store, "cells", _COLUMNS)
        refuse_malformed(table, store.root)
        rows = table.to_pylist()
        if not rows:
            raise ConfigError(f"{store.root} holds no cells; give a folder of rows, as runs print them")
        self.store = store
        self.rows: dict[str, Mapping[str, Any]] = {row["cell"]: row for row in sorted(rows, key=_order)}

    @cached_property
    def digits(self) -> int:
        """Letters of a hash that tell all cells apart, 8 at least."""
        names = sorted(self.rows)
        shared = [_shared(a, b) for a, b in pairwise(names)]
        return max([_SHORT, *(length + 1 for length in shared)])

    def short(self, cell: str) -> str:
        """A hash, cut."""
        return cell[: self.digits]

    def label(self, cell: str) -> str:
        """`snapkv@64 strict seed=1`."""
        return label(self.rows[cell])

    def title(self, cell: str) -> str:
        """`snapkv@64 (37f7b1d0)`."""
        return f"{self.label(cell)} ({self.short(cell)})"

    def metrics(self, cell: str) -> list[str]:
        """The metrics that the cell's dataset is judged by, where its configuration names them."""
        row = self.rows[cell]
        node = (config_of(row["config"]).get("datasets") or {}).get(row["dataset"]) or {}
        return list(node.get("metrics") or [])

    def named(self, words: Sequence[str]) -> NamedCells:
        """Find what words name: a sample where one of them is its id, and the cells that the others choose. Of several words of
        one kind (methods, datasets, ...) a cell has to fit one.

        Raises:
            ConfigError: a word that fits nothing, or words that no cell fits together.
        """
        chosen: dict[str, set[str]] = {}
        sample = None
        for word in words:
            kind, fitting = self._fitting(word)
            if fitting:
                chosen.setdefault(kind, set()).update(fitting)
            elif sample is None and word in self.samples:
                sample = word
            else:
                raise ConfigError(f"{word!r} is neither a cell nor a sample of {self.store.root}; {self._near(word)}")
        cells = [cell for cell in self.rows if all(cell in fitting for fitting in chosen.values())]
        if not cells:
            raise ConfigError(
                f"no cell of {self.store.root} is {' and '.join(map(repr, words))} at once; leave a word out"
            )
        return NamedCells(cells, sample, len(cells) == 1 and bool(chosen))

    def _fitting(self, word: str) -> tuple[str, set[str]]:
        """(the kind of a word, the cells that it fits)."""
        for kind in self._names:
            fitting = {cell for cell, names in self._names[kind].items() if word in names}
            if fitting:
                return kind, fitting
        if len(word) < _LEAST:
            return "method", set()
        return "method", {cell for cell in self.rows if cell.startswith(word)}

    @cached_property
    def _names(self) -> Mapping[str, Mapping[str, set[str]]]:
        """Kind -> cell -> the words by which it is found, besides its hash."""
        names_of: dict[str, dict[str, set[str]]] = {}
        for cell, row in self.rows.items():
            methods, budgets = {row["method"], row["base"]}, _budgets(row)
            names_of.setdefault("method", {})[cell] = methods | {
                f"{name}@{budget}" for name in methods for budget in budgets
            }
            names_of.setdefault("budget", {})[cell] = budgets
            for kind in ("dataset", "model", "protocol", "reading"):
                names_of.setdefault(kind, {})[cell] = {row[kind]} - {None}
            names_of.setdefault("seed", {})[cell] = {f"seed={row['seed']}"} if row["seed"] is not None else set()
        return names_of

    @cached_property
    def samples(self) -> set[str]:
        """Ids of all samples that some cell has a row for."""
        return set(self.store.responses(None, ("sample_id",), coded=True)["sample_id"].unique().to_pylist())

    def _near(self, word: str) -> str:
        names = {name for of_cell in self._names.values() for own in of_cell.values() for name in own}
        close = get_close_matches(word, self.samples, n=3, cutoff=0.8) if len(self.samples) <= _COMPARED else []
        if close:
            return f"did you mean {' or '.join(map(repr, close))}?"
        return f"{nearest(word, names)}; samples are called as {min(self.samples, default='no one')!r}"


def _budgets(row: Mapping[str, Any]) -> set[str]:
    """A cell's budget as it may be written."""
    if row["budget_fraction"] is not None:
        fraction = Decimal(row["budget_fraction"])
        return {row["budget_fraction"], f"{fraction.normalize():f}", f"{(fraction * 100).normalize():f}%"}
    return {str(row["budget_entries"])} if row["budget_entries"] is not None else set()


def _order(row: Mapping[str, Any]) -> tuple[Any, ...]:
    budget = row["budget_entries"] if row["budget_entries"] is not None else row["budget_fraction"]
    place = (row["dataset"], row["model"], row["protocol"], row["base"] != BASELINE, row["method"])
    return *place, row["budget_fraction"] is not None, float(budget or 0), row["seed"] or 0, row["reading"] or ""


def _shared(a: str, b: str) -> int:
    """Letters with which both begin."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
