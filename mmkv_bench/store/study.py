"""Notes of a study beside its rows: its primary endpoint, and the cells that submitted jobs will answer.

The primary endpoint is named before it is looked at; it stands in `store.json` beside the version. A cell's row is written
by the process that answers it first, which alone knows its device; until then `status` counts the cell from `planned.json`.
Rows decide what is done: a note of a cell that has a row counts for nothing, and the file may be removed at any time. Its
first line is the checksum of the rest, so that damage is said and counts nothing.
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
    """One column of one table: all comparisons of methods there are confirmatory, those of other columns exploratory.

    late: it was named when the store held answers already.
    """

    dataset: str
    metric: str
    budget: str
    protocol: str = "paper"
    late: bool = field(default=False, compare=False)

    @classmethod
    def parse(cls, words: str) -> PrimaryEndpoint:
        """From `<dataset> <metric> <budget> [<protocol>]`.

        Raises ConfigError for fewer or more words.
        """
        parts = str(words).split()
        if len(parts) not in (3, 4):
            raise ConfigError(
                f"primary={words!r} has {len(parts)} words; allowed: <dataset> <metric> <budget> and perhaps <protocol>; write "
                "for example primary='pages_lookup_large exact_match 64'"
            )
        dataset, metric, budget, protocol = (*parts, "paper")[:4]
        return cls(dataset, metric, _as_in_tables(budget), protocol)

    def __str__(self) -> str:
        return f"{self.metric} of {self.dataset} at {self.budget} (protocol={self.protocol})"


def _as_in_tables(budget: str) -> str:
    """`0.20` and `20%` as `0.2`; what is not a number stays, for a run to refuse."""
    try:
        number = Decimal(budget.removesuffix("%"))
    except InvalidOperation:
        return budget
    return f"{(number / 100 if budget.endswith('%') else number).normalize():f}"


def primary_of(root: Path) -> PrimaryEndpoint | None:
    """The primary endpoint of the store in a folder, if its study names one."""
    try:
        mark = json.loads((root / MARK).read_bytes())
        words = mark.get(_KEY)
    except (OSError, ValueError, AttributeError):
        return None  # no store, which whoever reads its rows says
    return None if words is None else replace(PrimaryEndpoint.parse(words), late=bool(mark.get(_LATE)))


def name_primary(root: Path, words: str) -> None:
    """Write the primary endpoint of a store that was prepared.

    Raises StoreError where it names another one already (an endpoint that is chosen again is none), or the disk refuses.
    """
    endpoint = PrimaryEndpoint.parse(words)
    with disk_errors("naming the primary endpoint", root), lock_held(root / MARK):
        stored = primary_of(root)
        if stored == endpoint:
            return
        if stored is not None:
            raise StoreError(
                f"{root} was begun with the primary endpoint {stored}, and primary={words!r} is another; leave it out, or use "
                "another folder (out=<folder>)"
            )
        mark = json.loads((root / MARK).read_bytes()) | {_KEY: words}
        if any(next((root / folder).glob("*"), None) for folder in ("responses", "journal")):
            mark[_LATE] = True
        write_bytes(root / MARK, json.dumps(mark).encode() + b"\n")


_PLANNED = "planned.json"
log = logging.getLogger(__name__)


def note_planned(store: StoreFolder, cells: Mapping[str, tuple[str, int]]) -> None:
    """Note cells, hash -> (dataset, samples). Raises StoreError where the folder cannot be written."""
    store.prepare()
    with store.locked():
        _write_planned(store.root, {**planned_cells(store.root), **cells})


def forget_planned(store: StoreFolder, cells: Collection[str]) -> None:
    """Remove notes of cells. Raises StoreError where the folder cannot be written."""
    if (store.root / _PLANNED).exists():
        with store.locked():
            _write_planned(
                store.root, {name: plan for name, plan in planned_cells(store.root).items() if name not in cells}
            )


def planned_cells(root: Path) -> dict[str, tuple[str, int]]:
    """Cell -> (dataset, samples); none where there is no file, or a damaged one, which is logged."""
    file = root / _PLANNED
    try:
        raw = file.read_bytes()
        first, _, rest = raw.partition(b"\n")
        if raw[:1] != b"{":  # older files have no checksum
            if first != checksum(rest).encode():
                raise ValueError(first)
            raw = rest
        return {str(name): (str(dataset), int(samples)) for name, (dataset, samples) in json.loads(raw).items()}
    except OSError:
        return {}
    except (ValueError, TypeError, AttributeError):
        log.warning("%s is damaged and counts nothing; the next sweep writes it again, or remove it", file)
        return {}


def _write_planned(root: Path, cells: Mapping[str, tuple[str, int]]) -> None:
    with disk_errors("noting what is planned", root):
        if cells:
            text = json.dumps(cells).encode()
            write_bytes(root / _PLANNED, checksum(text).encode() + b"\n" + text)
        else:
            (root / _PLANNED).unlink(missing_ok=True)
