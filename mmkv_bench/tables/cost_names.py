"""Names of costs: every column of numbers of `responses`, and every phase and number of `timings`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.store.packing import OF_GROUPS
from mmkv_bench.store.schema import COLUMNS, FLOAT, INT, PHASES

_NO_NUMBERS = {"schema_version", "doc_id", "repeat", "place", "order_seed"}
_OTHER_NAMES = {"peak": "peak_total", "bytes": "bytes_held", "tokens": "n_tokens", "compression_s": "compress_s"}
"""Short names, and what they stand for."""
_OF_RESPONSES = {"peak_total": ("peak_device_bytes", "peak_resident_bytes")}
"""Names that responses have under another one; the first column that is not null."""
_DERIVED = {"tpot_s": "seconds", "compress_s": "seconds", "tokens_s": "tokens/s"}
"""Costs that are computed from the rows of `timings` -> unit."""


@dataclass(frozen=True)
class Cost:
    """One thing that a table of costs shows.

    Attributes:
        name: as it was asked for; key: as `costs_seen` names it; unit: as the schema does.
        columns: of `responses`, the first that is not null counts; none where only `timings` has it.
        shared: in rows of shared runs it is the group's.
    """

    name: str
    key: str
    unit: str
    columns: tuple[str, ...]

    @property
    def shared(self) -> bool:
        return bool({*self.columns} & {*OF_GROUPS})


def _known() -> dict[str, Cost]:
    units = dict(_DERIVED)
    units |= {f"{phase}_s": "seconds" for phase in PHASES} | {f"peak_{phase}": "bytes" for phase in PHASES}
    held: dict[str, tuple[str, ...]] = dict(_OF_RESPONSES)
    for table in ("timings", "responses"):
        for column in COLUMNS[table]:
            if column.type in (INT, FLOAT) and column.name not in _NO_NUMBERS | {"seconds", "peak_allocated"}:
                units[column.name] = column.unit
                if table == "responses":
                    held[column.name] = (column.name,)
    return {key: Cost(key, key, unit, held.get(key, ())) for key, unit in units.items()}


KNOWN = _known()
"""All of them by their own names."""


def is_cost(name: str) -> bool:
    """True for the full or the short name of a cost."""
    return _key(name) in KNOWN


def _key(name: str) -> str:
    """`prefill` is prefill_s; `peak` and the other short names are what they stand for."""
    name = _OTHER_NAMES.get(name, name)
    return f"{name}_s" if name in PHASES else name


def divided(metrics: Sequence[str]) -> tuple[list[str], list[Cost]]:
    """(the other names, costs) among what was asked for, in its order."""
    names = dict.fromkeys(metrics)
    found = {name: KNOWN[_key(name)] for name in names if is_cost(name)}
    costs = [Cost(name, known.key, known.unit, known.columns) for name, known in found.items()]
    return [name for name in names if name not in found], costs


def refuse_unknown(names: Iterable[str], scored: Iterable[str]) -> None:
    """Raises ConfigError for the first name that is no score of the rows, and no cost either."""
    usual = [*scored, *_OTHER_NAMES]
    for name in names:
        if name not in usual:
            allowed = [*usual, *KNOWN] if get_close_matches(name, [*usual, *KNOWN], cutoff=0.5) else usual
            raise ConfigError(
                f"The rows hold no metric '{name}': {nearest(name, allowed)}; also any column of responses and phase of timings "
                "(docs/rows.md)"
            )
