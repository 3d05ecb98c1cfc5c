"""The primary endpoint that a study names before it is looked at; it stands in `store.json` beside the version."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path

from mmkv_bench.errors import ConfigError, StoreError
from mmkv_bench.store.files import MARK, disk_errors, lock_held, write_whole

_KEY, _LATE = "primary", "primary_named_after_answers"


@dataclass(frozen=True)
class Endpoint:
    """One column of one table: all comparisons of methods there are confirmatory, those of other columns exploratory.

    late: it was named when the store held answers already.
    """

    dataset: str
    metric: str
    budget: str
    protocol: str = "paper"
    late: bool = field(default=False, compare=False)

    @classmethod
    def parse(cls, words: str) -> Endpoint:
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
    """`0.20` and `20%` as `0.2`; what is no number stays, for a run to refuse."""
    try:
        number = Decimal(budget.removesuffix("%"))
    except InvalidOperation:
        return budget
    return f"{(number / 100 if budget.endswith('%') else number).normalize():f}"


def primary_of(root: Path) -> Endpoint | None:
    """The primary endpoint of the store in a folder, if its study names one."""
    try:
        mark = json.loads((root / MARK).read_bytes())
        words = mark.get(_KEY)
    except (OSError, ValueError, AttributeError):
        return None  # no store, which whoever reads its rows says
    return None if words is None else replace(Endpoint.parse(words), late=bool(mark.get(_LATE)))


def name_primary(root: Path, words: str) -> None:
    """Write the primary endpoint of a store that was prepared.

    Raises StoreError where it names another one already (an endpoint that is chosen again is none), or the disk refuses.
    """
    endpoint = Endpoint.parse(words)
    with disk_errors("naming the primary endpoint", root), lock_held(root / MARK):
        known = primary_of(root)
        if known == endpoint:
            return
        if known is not None:
            raise StoreError(
                f"{root} was begun with the primary endpoint {known}, and primary={words!r} is another; leave it out, or use "
                "another folder (out=<folder>)"
            )
        mark = json.loads((root / MARK).read_bytes()) | {_KEY: words}
        if any(next((root / folder).glob("*"), None) for folder in ("responses", "journal")):
            mark[_LATE] = True
        write_whole(root / MARK, lambda stream: stream.write(json.dumps(mark).encode() + b"\n"))
