"""What rows say of costs, as arrays: of `responses` a line per answer, of `timings` one per pass; sorted by cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mmkv_bench.store.schema import STATUSES
from mmkv_bench.tables.cost_names import Cost
from mmkv_bench.tables.rows import frame
from mmkv_bench.tables.scores import coded, is_text, numbers, placed

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from mmkv_bench.store.store import Store


_ANSWERS = ("cell", "sample_id", "cluster", "status", "measured", "fallback")


@dataclass(frozen=True)
class Seen:
    """Lines in the order of the cells; the i-th cell has those from starts[i] to starts[i + 1].

    Attributes:
        unit: what a value is paired by: the sample, or the repeat; cluster: what is not independent; shape: number of the
            prompt's shape in `shapes`; all int [lines].
        status: number of the status in `STATUSES`, int [lines]; 0 is ok.
        group: the line is of a shared run, whose times are the group's, bool [lines].
        values: key of a cost -> float64 [lines], NaN where it is not known; of shared runs their groups' times too.
        reasons: names of fallbacks; reason, reason_line: int [found], which of them and where, in the order of lines.
        disturbed: what disturbed passes, object [lines]; load, threads: of the machine and of the pass, float64 [lines]; all
            empty for answers.
        per_pass: lines are passes: a cost may be known of some alone.
    """

    starts: np.ndarray
    unit: np.ndarray
    cluster: np.ndarray
    shape: np.ndarray
    shapes: tuple[Mapping[str, int | str], ...]
    status: np.ndarray
    group: np.ndarray
    values: Mapping[str, np.ndarray]
    reasons: tuple[str, ...]
    reason: np.ndarray
    reason_line: np.ndarray
    disturbed: np.ndarray
    load: np.ndarray
    threads: np.ndarray
    per_pass: bool

    def lines(self, cells: Sequence[int]) -> np.ndarray:
        """All lines of these cells, int [n]."""
        parts = [np.arange(self.starts[cell], self.starts[cell + 1]) for cell in cells]
        return np.concatenate(parts) if parts else np.array([], dtype=np.int64)


def answers_seen(store: Store, cells: Sequence[str], costs: Sequence[Cost]) -> Seen:
    """Of the table `responses`; cells: their names, which are the places."""
    columns = [name for cost in costs for name in cost.columns]
    table = frame(store.responses(None, dict.fromkeys([*_ANSWERS, *columns]), coded=True))
    table = table.drop(columns="sample_id").assign(unit=coded(table["sample_id"])[1])
    values = {}
    for cost in costs:
        known = [numbers(table[name]) for name in cost.columns]
        found = np.full(len(table), np.nan)
        for each in known:
            found = np.where(np.isnan(found), each, found)
        values[cost.key] = found
    cluster = coded(table["cluster"])[1]
    cluster = np.where(cluster < 0, cluster.max(initial=0) + 1 + table["unit"].to_numpy(), cluster)
    group = is_text(table["measured"], "group")
    return _seen(table, cells, values, cluster, group, per_pass=False)


def passes_seen(store: Store, cells: Sequence[str], costs: Sequence[Cost]) -> Seen:
    """Of the table `timings`, as `answers_seen`."""
    table = passes(store.timings())
    table["unit"] = table["repeat"] - MEMORY
    nothing = np.full(len(table), np.nan)
    values = {cost.key: numbers(table[cost.key]) if cost.key in table else nothing for cost in costs}
    return _seen(table, cells, values, table["unit"].to_numpy(), np.zeros(len(table), dtype=bool), per_pass=True)


def _seen(
    table: pd.DataFrame,
    cells: Sequence[str],
    values: Mapping[str, np.ndarray],
    cluster: np.ndarray,
    group: np.ndarray,
    per_pass: bool,
) -> Seen:
    of_line = placed(table["cell"], cells)
    order = np.argsort(of_line, kind="stable")
    order = order[of_line[order] >= 0]
    status = placed(table["status"], STATUSES)[order]
    shapes, shape = _shapes(table) if per_pass else (({},), np.zeros(len(table), dtype=np.int64))
    reasons, reason, reason_line = _reasons(table, order)
    return Seen(
        starts=np.searchsorted(of_line[order], np.arange(len(cells) + 1)),
        unit=table["unit"].to_numpy()[order],
        cluster=cluster[order],
        shape=shape[order],
        shapes=shapes,
        status=status,
        group=group[order],
        values={key: np.where(status > 0, np.nan, each[order]) for key, each in values.items()},
        reasons=reasons,
        reason=reason,
        reason_line=reason_line,
        disturbed=table["disturbed"].to_numpy()[order] if per_pass else np.array([], dtype=object),
        load=numbers(table["load"])[order] if per_pass else np.array([]),
        threads=numbers(table["threads"])[order] if per_pass else np.array([]),
        per_pass=per_pass,
    )


def _shapes(table: pd.DataFrame) -> tuple[tuple[Mapping[str, int | str], ...], np.ndarray]:
    """(shapes of prompts in ascending order, number of each line's)."""
    distinct = table[list(SHAPE)].drop_duplicates().sort_values(list(SHAPE)).to_dict("records")
    return tuple(distinct), table.groupby(list(SHAPE)).ngroup().to_numpy(np.int64)


def _reasons(table: pd.DataFrame, order: np.ndarray) -> tuple[tuple[str, ...], np.ndarray, np.ndarray]:
    """(names of the fallbacks, which of them, in which line) of the lines in that order."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lists = pa.array(table["fallback"], type=pa.list_(pa.string()), from_pandas=True)
    lists = (lists.combine_chunks() if isinstance(lists, pa.ChunkedArray) else lists).take(pa.array(order))
    found = lists.flatten().dictionary_encode()
    line = pc.list_parent_indices(lists).to_numpy(zero_copy_only=False)
    return tuple(found.dictionary.to_pylist()), found.indices.to_numpy(zero_copy_only=False), line


SHAPE = ("dataset", "prompt_tokens", "visual_tokens", "batch", "batch_prefill", "new_tokens")
ALONE = "one_by_one"
_PASS = ["cell", *SHAPE, "repeat"]
MEMORY = -1
"""In place of a repeat: the pass that counts memory."""
_COMPRESSION = ["score_s", "select_s", "reduce_s"]


def passes(rows: pa.Table) -> pd.DataFrame:
    """One line per pass, failed ones included, but not sizes that a search for the largest batch has only tried.

    Columns are those of `timings` that say something of the whole pass, and

    `<phase>_s` [s], `peak_<phase>` [bytes], compress_s [s], tpot_s (median of its steps) [s], tokens_s (of all sequences).
    """
    import pandas as pd

    table = rows.to_pandas()
    table["batch_prefill"] = table["batch_prefill"].fillna(ALONE)
    table["repeat"] = table["repeat"].fillna(MEMORY).astype("int64")
    shape = pd.MultiIndex.from_frame(table[["cell", *SHAPE]])
    table = table[~table["searched"].eq(True) | shape.isin(shape[table["repeat"] != MEMORY])]
    total = table[table["phase"] == "total"].set_index(_PASS)
    decode = table[table["phase"] == "decode"].set_index(_PASS)
    wide = total[["status", "fallback", "disturbed", "peak_reserved", "peak_resident", "load", "threads"]]
    wide = wide.join(decode[["bytes_held", "bytes_useful_step", "bytes_read_step"]])
    for column, name in (("seconds", "{}_s"), ("peak_allocated", "peak_{}")):
        known = table[table[column].notna()]
        made = known.pivot(index=_PASS, columns="phase", values=column)
        wide = wide.join(made.rename(columns=name.format))
    wide["compress_s"] = wide.reindex(columns=_COMPRESSION).sum(axis=1, min_count=1)
    steps = decode["steps_s"].dropna()
    each = pd.to_numeric(steps.explode())
    wide["tpot_s"] = each.groupby(level=_PASS).median().reindex(wide.index)
    made_tokens = each.groupby(level=_PASS).size().reindex(wide.index) * wide.index.get_level_values("batch")
    wide["tokens_s"] = made_tokens / wide["decode_s"] if "decode_s" in wide else float("nan")
    return wide.reset_index()
