"""Notes in a store besides rows: the primary endpoint of the study, and the cells (method at a budget) that submitted
jobs will answer.

`store.json` has the primary endpoint beside the version. A cell's row is written by the process that first answers it.
Until then, `status` counts the cell from `planned.json`. The first line of this file is the checksum of the rest; a
damaged file is reported and ignored, and the file may be removed at any time.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING

from mmkv_bench.errors import ConfigError, StoreError
from mmkv_bench.store.files import MARK, checksum, disk_errors, lock_held, write_bytes

if TYPE_CHECKING:
    from mmkv_bench.store.folder import StoreFolder


_KEY, _LATE = "primary", "primary_named_after_answers"


@dataclass(frozen=True)
class PrimaryEndpoint:
    """A study's primary endpoint: the one score for which comparisons of methods are confirmatory, not exploratory.

    late: whether the store already had answers when the endpoint was named.
    """

    dataset: str
    metric: str
    budget: str
    protocol: str = "paper"
    late: bool = field(default=False, compare=False)

    @classmethod
    def parse(cls, words: str) -> PrimaryEndpoint:
        """Parse `<dataset> <metric> <budget> [<protocol>]`. Raises ConfigError for fewer or more words."""
        words_of_endpoint = str(words).split()
        if len(words_of_endpoint) not in (3, 4):
            raise ConfigError(
                f"primary={words!r} has {len(words_of_endpoint)} words; allowed: <dataset> <metric> <budget>, optionally "
                "followed by <protocol>; write for example primary='pages_lookup_large exact_match 64'"
            )
        dataset, metric, budget, protocol = (*words_of_endpoint, "paper")[:4]
        return cls(dataset, metric, _as_in_tables(budget), protocol)

    def __str__(self) -> str:
        return f"{self.metric} of {self.dataset} at {self.budget} (protocol={self.protocol})"


def _as_in_tables(budget: str) -> str:
    """Return a budget as tables spell it: `0.2` for `0.20` and `20%`. Text that is no number is returned unchanged."""
    try:
        budget_number = Decimal(budget.removesuffix("%"))
    except InvalidOperation:
        return budget
    return f"{(budget_number / 100 if budget.endswith('%') else budget_number).normalize():f}"


def primary_of(root: Path) -> PrimaryEndpoint | None:
    """Return the primary endpoint named in the store at `root`, or None."""
    try:
        stored_mark = json.loads((root / MARK).read_bytes())
        endpoint_text = stored_mark.get(_KEY)
    except (OSError, ValueError, AttributeError):
        return None  # no store, which is reported when its rows are read
    return (
        None
        if endpoint_text is None
        else replace(PrimaryEndpoint.parse(endpoint_text), late=bool(stored_mark.get(_LATE)))
    )


def name_primary(root: Path, words: str) -> None:
    """Write the primary endpoint (see `PrimaryEndpoint.parse`) into `store.json` of a prepared store.

    Raises StoreError: the store names another endpoint, or the disk refuses. ConfigError: as `PrimaryEndpoint.parse`.
    """
    endpoint = PrimaryEndpoint.parse(words)
    with disk_errors("naming the primary endpoint", root), lock_held(root / MARK):
        stored_endpoint = primary_of(root)
        if stored_endpoint == endpoint:
            return
        if stored_endpoint is not None:
            raise StoreError(
                f"{root} was begun with the primary endpoint {stored_endpoint}, but primary={words!r} differs; leave "
                "primary= out, or use another folder (out=<folder>)"
            )
        stored_mark = json.loads((root / MARK).read_bytes()) | {_KEY: words}
        if any(next((root / folder).glob("*"), None) for folder in ("responses", "journal")):
            stored_mark[_LATE] = True
        write_bytes(root / MARK, json.dumps(stored_mark).encode() + b"\n")


_PLANNED = "planned.json"
log = logging.getLogger(__name__)


def note_planned(store: StoreFolder, cells: Mapping[str, tuple[str, int]]) -> None:
    """Add cells to the list of planned cells. cells: hash -> (dataset, number of samples).

    Raises StoreError if the list cannot be written.
    """
    store.prepare()
    with store.locked():
        _write_planned(store.root, {**planned_cells(store.root), **cells})


def forget_planned(store: StoreFolder, cells: Collection[str]) -> None:
    """Remove these cells from the list of planned cells. Raises StoreError if the folder cannot be written."""
    if (store.root / _PLANNED).exists():
        with store.locked():
            planned = planned_cells(store.root).items()
            _write_planned(store.root, {name: plan for name, plan in planned if name not in cells})


def planned_cells(root: Path) -> dict[str, tuple[str, int]]:
    """Return the planned cells, which submitted jobs will answer: hash -> (dataset, number of samples).

    Empty if the list is missing or damaged; damage is logged.
    """
    planned_file = root / _PLANNED
    try:
        checksum_line, _, content = planned_file.read_bytes().partition(b"\n")
        if checksum_line != checksum(content).encode():
            raise ValueError(checksum_line)
        return {str(name): (str(dataset), int(samples)) for name, (dataset, samples) in json.loads(content).items()}
    except OSError:
        return {}
    except (ValueError, TypeError, AttributeError):
        log.warning("%s is damaged and was ignored; the next sweep writes it again, or remove it", planned_file)
        return {}


def _write_planned(root: Path, cells: Mapping[str, tuple[str, int]]) -> None:
    with disk_errors("noting what is planned", root):
        if cells:
            cells_json = json.dumps(cells).encode()
            write_bytes(root / _PLANNED, checksum(cells_json).encode() + b"\n" + cells_json)
        else:
            (root / _PLANNED).unlink(missing_ok=True)
