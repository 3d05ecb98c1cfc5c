"""Costs: times, bytes and counts, read from the rows of a store.

A cost is a numeric column of `responses` (one row per answer), or a time, peak or number of `timings` (rows of timed passes).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.store.packing import OF_GROUPS
from mmkv_bench.store.schema import COLUMNS, FLOAT, INT, PHASES, STATUSES
from mmkv_bench.store.store import Store
from mmkv_bench.tables.sample_scores import encode, is_text, lists_of, numbers, positions_in
from mmkv_bench.tables.stored_rows import frame

if TYPE_CHECKING:
    import pandas as pd


_COLUMNS_WITHOUT_COST = {"schema_version", "doc_id", "repeat", "place", "order_seed"}
_OTHER_NAMES = {"peak": "peak_total", "bytes": "bytes_held", "tokens": "n_tokens", "compression_s": "compress_s"}
"""Short name -> full name."""
_OF_RESPONSES = {"peak_total": ("peak_device_bytes", "peak_resident_bytes")}
"""Cost -> columns of `responses`; the first column that is not null has the value."""
_DERIVED = {"tpot_s": "seconds", "compress_s": "seconds", "tokens_s": "tokens/s"}
"""Cost that is computed from `timings` -> unit."""


@dataclass(frozen=True)
class Cost:
    """One column of a table of costs.

    Attributes:
        name: name that the user gave.
        key: full name, a key of `KNOWN`.
        columns: columns of `responses`; the first that is not null in a row gives the cost. Empty for costs of `timings` only.
        shared: True if the value belongs to all methods together in a run whose methods share a prefill.
    """

    name: str
    key: str
    unit: str
    columns: tuple[str, ...]

    @property
    def shared(self) -> bool:
        return bool({*self.columns} & {*OF_GROUPS})


def _all_costs() -> dict[str, Cost]:
    units = dict(_DERIVED)
    units |= {f"{phase}_s": "seconds" for phase in PHASES} | {f"peak_{phase}": "bytes" for phase in PHASES}
    columns_of: dict[str, tuple[str, ...]] = dict(_OF_RESPONSES)
    for table in ("timings", "responses"):
        for column in COLUMNS[table]:
            if column.type in (INT, FLOAT) and column.name not in _COLUMNS_WITHOUT_COST | {"seconds", "peak_allocated"}:
                units[column.name] = column.unit
                if table == "responses":
                    columns_of[column.name] = (column.name,)
    return {key: Cost(key, key, unit, columns_of.get(key, ())) for key, unit in units.items()}


KNOWN = _all_costs()
"""Full name -> cost."""


def _full_name(name: str) -> str:
    """Return the full name for a short one, such as `prefill_s` for `prefill`; other names are returned unchanged."""
    name = _OTHER_NAMES.get(name, name)
    return f"{name}_s" if name in PHASES else name


def split_costs(metrics: Sequence[str]) -> tuple[list[str], list[Cost]]:
    """Split names into (names that are no costs, costs), without duplicates and in the given order."""
    names = dict.fromkeys(metrics)
    costs = [replace(KNOWN[_full_name(name)], name=name) for name in names if _full_name(name) in KNOWN]
    return [name for name in names if _full_name(name) not in KNOWN], costs


def refuse_unknown(names: Iterable[str], scored: Iterable[str]) -> None:
    """Raise ConfigError for the first name that is neither in `scored` (metrics with scores) nor in `_OTHER_NAMES`."""
    usual_names = [*scored, *_OTHER_NAMES]
    for name in names:
        if name not in usual_names:
            suggested_names = (
                [*usual_names, *KNOWN] if get_close_matches(name, [*usual_names, *KNOWN], cutoff=0.5) else usual_names
            )
            raise ConfigError(
                f"The rows have no metric '{name}': {nearest(name, suggested_names)}; any column of responses and "
                "phase of timings works too (docs/rows.md)"
            )


SHAPE = ("dataset", "prompt_tokens", "visual_tokens", "batch", "batch_prefill", "new_tokens")
ALONE = "one_by_one"
MEMORY = -1
"""Number of the repeat that counts memory and is not timed."""
_PASS = ["cell", *SHAPE, "repeat"]
_COMPRESSION = ["score_s", "select_s", "reduce_s"]
_ANSWERS = ("cell", "sample_id", "cluster", "status", "measured", "fallback")
_MACHINE = ["disturbed", "load", "threads"]


@dataclass(frozen=True)
class CostRows:
    """Costs of the answers, or of the timed passes, of some cells (stored settings).

    Attributes:
        frame: one row per answer or pass, with one column per cost (NaN: unknown) and these columns:
            place: position of the cell in the list of cells.
            unit: number of the sample or repeat. Values of two methods are paired by unit.
            cluster: number of the cluster. Values of one cluster are not independent.
            shape: position in `shapes`. status: position in `STATUSES`; 0 is ok.
            group: True if methods shared the prefill, so that times and peaks do not belong to one method.
            disturbed, load, threads (passes only): causes that disturbed the pass; load and threads of the machine.
        shapes: prompt shapes (`SHAPE`); one empty shape for answers.
        fallbacks: frame with place, shape and reason of each fallback that a method reported.
        per_pass: True for passes. A pass may lack a cost, because one pass counts memory and others measure time.
    """

    frame: pd.DataFrame
    shapes: tuple[Mapping[str, int | str], ...]
    fallbacks: pd.DataFrame
    per_pass: bool


def answer_costs(store: Store, cells: Sequence[str], costs: Sequence[Cost]) -> CostRows:
    """Return the costs of a store's answers, sorted by position in `cells` (hashes)."""
    columns = [name for cost in costs for name in cost.columns]
    table = frame(store.responses(None, dict.fromkeys([*_ANSWERS, *columns]), coded=True))
    unit, cluster = encode(table["sample_id"])[1], encode(table["cluster"])[1]
    identity_columns = {"unit": unit, "cluster": np.where(cluster < 0, cluster.max(initial=0) + 1 + unit, cluster)}
    identity_columns |= {"group": is_text(table["measured"], "group"), "shape": np.zeros(len(table), dtype=np.int64)}
    for cost in costs:
        values = np.full(len(table), np.nan)
        for name in cost.columns:
            values = np.where(np.isnan(values), numbers(table[name]), values)
        identity_columns[cost.key] = values
    return _rows(table, cells, costs, identity_columns, ({},))


def pass_costs(store: Store, cells: Sequence[str], costs: Sequence[Cost]) -> CostRows:
    """Return the costs of a store's passes (`scenario=efficiency`), sorted by position in `cells` (hashes)."""
    table = passes(store.timings())
    shapes = table[list(SHAPE)].drop_duplicates().sort_values(list(SHAPE)).to_dict("records")
    unit = (table["repeat"] - MEMORY).to_numpy()
    identity_columns = {"unit": unit, "cluster": unit, "group": np.zeros(len(table), dtype=bool)}
    identity_columns |= {"shape": table.groupby(list(SHAPE)).ngroup().to_numpy(np.int64)}
    identity_columns |= {cost.key: numbers(table[cost.key]) if cost.key in table else np.nan for cost in costs}
    identity_columns |= {
        "disturbed": table["disturbed"],
        "load": numbers(table["load"]),
        "threads": numbers(table["threads"]),
    }
    return _rows(table, cells, costs, identity_columns, tuple(shapes), per_pass=True)


def _rows(
    table: pd.DataFrame,
    cells: Sequence[str],
    costs: Sequence[Cost],
    further_columns: Mapping[str, np.ndarray | pd.Series | float],
    shapes: tuple[Mapping[str, int | str], ...],
    per_pass: bool = False,
) -> CostRows:
    import pandas as pd

    cell_numbers, status_codes = positions_in(table["cell"], cells), positions_in(table["status"], STATUSES)
    columns = {"place": cell_numbers, "status": status_codes, **further_columns}
    for cost in costs:
        columns[cost.key] = np.where(status_codes > 0, np.nan, columns[cost.key])
    order = np.argsort(cell_numbers, kind="stable")
    order = order[cell_numbers[order] >= 0]
    rows = pd.DataFrame(columns, index=table.index).iloc[order].reset_index(drop=True)
    reasons = lists_of(table["fallback"], pa.string(), order)
    fallbacks = rows[["place", "shape"]].iloc[pc.list_parent_indices(reasons).to_numpy(zero_copy_only=False)]
    fallbacks = fallbacks.assign(reason=reasons.flatten().dictionary_encode().to_pandas().to_numpy())
    return CostRows(rows, shapes, fallbacks, per_pass)


def passes(rows: pa.Table) -> pd.DataFrame:
    """Join the rows of `timings` (one per phase of a pass) into one row per pass, failed passes included.

    Passes that only searched for the largest batch are left out. The columns are:
    - columns of `timings` that describe a whole pass;
    - `<phase>_s` [s] and `peak_<phase>` [bytes] of each phase;
    - `compress_s` [s], `tpot_s` [s] (median over decode steps) and `tokens_s` (tokens per second of the whole batch).
    """
    import pandas as pd

    table = rows.to_pandas()
    table["batch_prefill"] = table["batch_prefill"].fillna(ALONE)
    table["repeat"] = table["repeat"].fillna(MEMORY).astype("int64")
    shape = pd.MultiIndex.from_frame(table[["cell", *SHAPE]])
    table = table[~table["searched"].eq(True) | shape.isin(shape[table["repeat"] != MEMORY])]
    total_rows = table[table["phase"] == "total"].set_index(_PASS)
    decode_rows = table[table["phase"] == "decode"].set_index(_PASS)
    pass_table = total_rows[["status", "fallback", "peak_reserved", "peak_resident", *_MACHINE]]
    pass_table = pass_table.join(decode_rows[["bytes_held", "bytes_useful_step", "bytes_read_step"]])
    for column, name in (("seconds", "{}_s"), ("peak_allocated", "peak_{}")):
        by_phase = table[table[column].notna()].pivot(index=_PASS, columns="phase", values=column)
        pass_table = pass_table.join(by_phase.rename(columns=name.format))
    pass_table["compress_s"] = pass_table.reindex(columns=_COMPRESSION).sum(axis=1, min_count=1)
    steps = pd.to_numeric(decode_rows["steps_s"].dropna().explode()).groupby(level=_PASS)
    pass_table["tpot_s"] = steps.median().reindex(pass_table.index)
    tokens = steps.size().reindex(pass_table.index) * pass_table.index.get_level_values("batch")
    pass_table["tokens_s"] = tokens / pass_table["decode_s"] if "decode_s" in pass_table else float("nan")
    return pass_table.reset_index()
