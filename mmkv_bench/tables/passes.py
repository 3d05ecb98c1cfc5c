"""Rows of `timings` with one line per pass: what each phase took, and what was held."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

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
