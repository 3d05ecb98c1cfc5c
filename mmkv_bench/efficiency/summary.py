"""From raw times to printed numbers: medians with quartiles, ratios to `full` in the same repeat, and hardware limits.

Everything is computed from rows of the table `timings`. The summary has one line per cell, prompt length, batch and way of
building the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mmkv_bench.config.schema import ONE_BY_ONE
from mmkv_bench.forecast.roofline import prefill_operations

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from mmkv_bench.forecast.roofline import Roofline
    from mmkv_bench.plan.cells import Cell

LINE = ["cell", "prompt_tokens", "batch", "batch_prefill"]
WAY = ["cell", "prompt_tokens", "batch_prefill"]
"""Columns that all batch sizes of a cell share."""
COMPRESSION = ["score", "select", "reduce"]
POINTS = ("ttft", "vision", "compression", "second_token", "total")
_QUARTILES = {"low": 0.25, "median": 0.5, "high": 0.75}
LEAST_REPEATS = 3
"""Minimum number of repeats to decide whether a step's time depends on its bytes."""
_LEAST_MORE = 1.05
"""Minimum ratio of a step's bytes at two lengths for their times to show whether the step depends on its bytes."""
_ALIKE = 0.05  # maximum relative difference of medians for two steps to count as equally long


def summary_lines(
    rows: pa.Table, baselines: Mapping[str, str], limits: Roofline | None, memory_limit: int | None = None
) -> pd.DataFrame:
    """Summarise timed passes: return one line per cell, prompt length, batch and kind of prefill, sorted by length, batch and
    cell.

    Args:
        rows: rows of the table `timings`.
        baselines: cell -> the full-cache cell that its ratios divide by.
        limits: roofline of the model on the device. If None (unknown), MBU, MFU, rooflines and `speed_up_allowed` are null.
        memory_limit: passes that counted memory under another limit are left out.

    Returns:
        These columns, null where unknown.
        `<name>_low`, `<name>_median`, `<name>_high` for each of `POINTS`, `score`, `tpot` and `tokens_s`: quartiles over
        repeats (for TPOT over all steps) [s, tokens/s].
        `<name>_ratio_...` for TPOT, second token and total: the cell's value over the value of `full`.
        `status` (the first failure, else ok), `repeats`, peaks and bytes of the pass that counts memory, `load` (median),
        `threads` and `disturbed`.
        `largest_batch` of the cell at this length, null if no failure bounds it, and `largest_ratio`, its ratio to full's.
        `batch_prefill` is null for one sequence.
    """
    table = rows.to_pandas()
    if table.empty:
        return table
    table["batch_prefill"] = table["batch_prefill"].fillna(ONE_BY_ONE)
    limit = table["memory_limit"].isna() if memory_limit is None else table["memory_limit"] == memory_limit
    table = table[table["repeat"].notna() | limit]
    lines = _state(table)
    timed = table[table["repeat"].notna() & (table["status"] == "ok")]
    if not timed.empty:
        wide = timed.pivot(index=[*LINE, "repeat"], columns="phase", values="seconds")
        wide["compression"] = wide[COMPRESSION].sum(axis=1)
        wide["vision"] = wide["vision"] if "vision" in wide else float("nan")
        decode = timed[timed["phase"] == "decode"].set_index([*LINE, "repeat"])
        steps = decode["steps_s"].explode().astype(float)
        batch = wide.index.get_level_values("batch")
        wide["tokens_s"] = batch * decode["steps_s"].map(len).reindex(wide.index) / wide["decode"]
        wide["tpot"] = steps.groupby(level=[*LINE, "repeat"]).median()
        lines = lines.join(_quartiles(wide[[*POINTS, "score", "tokens_s"]])).join(_quartiles(steps.to_frame("tpot")))
        lines = lines.join(_quartiles(_ratios(wide, baselines)))
    lines = lines.join(_memory(table)).reset_index()
    lines = lines.merge(_largest(lines, baselines), how="left", on=WAY)
    lines = lines.sort_values(["prompt_tokens", "batch", "batch_prefill", "cell"], ignore_index=True)
    lines.loc[lines["batch"] == 1, "batch_prefill"] = None
    for name in ("tpot_median", "ttft_median", "vision_median", "compression_median", "bytes_useful_step"):
        lines[name] = lines[name] if name in lines else float("nan")
    return _allowed(_limited(lines, limits), baselines)


def _state(table: pd.DataFrame) -> pd.DataFrame:
    """Return, per line of the summary: status and error (of the first failure), repeats, load, and disturbances."""
    ended = table[table["phase"] == "total"]
    lines = ended.assign(ok=ended["status"] == "ok").sort_values([*LINE, "ok"], kind="stable").groupby(LINE)
    state = lines.nth(0).set_index(LINE)[["status", "error", "new_tokens", "prompts", "visual_tokens"]]
    repeats = ended[ended["repeat"].notna() & (ended["status"] == "ok")].groupby(LINE).size()
    state["repeats"] = repeats.reindex(state.index, fill_value=0)
    state = state.join(ended[[*LINE, "load"]].groupby(LINE).median()).join(
        ended[[*LINE, "threads"]].groupby(LINE).max()
    )
    reasons = ended[[*LINE, "disturbed"]].explode("disturbed").dropna().drop_duplicates().groupby(LINE)["disturbed"]
    state["disturbed"] = reasons.agg("; ".join).reindex(state.index)
    return state


def _ratios(wide: pd.DataFrame, baselines: Mapping[str, str]) -> pd.DataFrame:
    """Return the ratio of each value to that of `full` in the same repeat; null if `full` has no such pass.

    wide: one row per pass, one column per value.
    baselines: cell -> the full-cache cell that its ratios divide by.
    """
    import pandas as pd

    cells = wide.index.get_level_values("cell")
    others = [wide.index.get_level_values(name) for name in (*LINE[1:], "repeat")]
    full = pd.MultiIndex.from_arrays([cells.map(baselines), *others], names=wide.index.names)
    values = wide[["tpot", "second_token", "total"]]
    return (values / values.reindex(full).to_numpy()).add_suffix("_ratio")


def _largest(lines: pd.DataFrame, baselines: Mapping[str, str]) -> pd.DataFrame:
    """Return the largest batch that fits for each `WAY`, and its ratio to full's. Null unless one sequence more ran out of
    memory."""
    import pandas as pd

    alone = lines[lines["batch"] == 1].set_index(["cell", "prompt_tokens"])["status"]
    ways = lines[WAY].drop_duplicates()
    one = alone.reindex(pd.MultiIndex.from_frame(ways[["cell", "prompt_tokens"]])).to_numpy()
    ways = ways.set_index(WAY).assign(fits=pd.Series(one).map({"ok": 1, "oom": 0}).to_numpy(), fails=float("nan"))
    many = lines[lines["batch"] > 1]
    for name, status, most in (("fits", "ok", "max"), ("fails", "oom", "min")):
        sizes = many[many["status"] == status].groupby(WAY)["batch"].agg(most)
        ways[name] = sizes.reindex(ways.index).fillna(ways[name])
    bounded = (ways["fits"] == 0) | (ways["fails"] == ways["fits"] + 1)
    largest = ways["fits"].where(bounded)
    cells = largest.index.get_level_values("cell").map(baselines)
    full = pd.MultiIndex.from_arrays([cells, *(largest.index.get_level_values(name) for name in WAY[1:])])
    ratio = largest.to_numpy() / largest.reindex(full).replace(0, float("nan")).to_numpy()
    return pd.DataFrame({"largest_batch": largest, "largest_ratio": ratio}, index=largest.index).reset_index()


def _quartiles(values: pd.DataFrame) -> pd.DataFrame:
    """Return the quartiles of each column over the repeats of a line: `<column>_low`, `<column>_median`, `<column>_high`."""
    lines = values.groupby(level=LINE)
    quantiles = [lines.quantile(share).add_suffix(f"_{name}") for name, share in _QUARTILES.items()]
    return quantiles[0].join(quantiles[1:])


def _memory(table: pd.DataFrame) -> pd.DataFrame:
    """Return, per line of the summary: memory peaks by phase and bytes of the cache, from the pass that counts memory."""
    counted = table[table["repeat"].isna() & (table["status"] == "ok")]
    peaks = counted.pivot(index=LINE, columns="phase", values="peak_allocated").add_prefix("peak_")
    total, decode = (counted[counted["phase"] == name].set_index(LINE) for name in ("total", "decode"))
    peaks["reserved"], peaks["resident"] = total["peak_reserved"], total["peak_resident"]
    return peaks.join(decode[["bytes_held", "bytes_useful_step", "bytes_read_step"]])


def _limited(lines: pd.DataFrame, limits: Roofline | None) -> pd.DataFrame:
    """Return the lines with columns that compare times with hardware limits: MBU, MFU, and the roofline time of a decode
    step."""
    lines[["roofline_ms", "mbu", "prefill_mfu"]] = float("nan")
    lines["launch_bound"] = lines["launch_unknown"] = False
    if limits is None:
        return lines
    read = limits.weights + lines["bytes_useful_step"]
    lines["roofline_ms"] = list(map(limits.step_ms, lines["bytes_useful_step"], lines["batch"]))
    lines["mbu"] = read / lines["tpot_median"] / limits.bandwidth
    if limits.rate is not None:
        operations = lines["prompt_tokens"].map(lambda tokens: prefill_operations(limits.decoder, tokens))
        text = lines["ttft_median"] - lines["vision_median"].fillna(0) - lines["compression_median"]
        lines["prefill_mfu"] = operations * lines["batch"] / text / limits.rate
    return _between_lengths(lines, read)


def _allowed(lines: pd.DataFrame, baselines: Mapping[str, str]) -> pd.DataFrame:
    """Return the lines with the column `speed_up_allowed`: full's roofline time over the line's. Null for `full`.

    Both times are at the same length and batch.
    """
    import pandas as pd

    places, base = lines[LINE].fillna({"batch_prefill": ONE_BY_ONE}), lines["cell"].map(baselines)
    rooflines = lines["roofline_ms"].set_axis(pd.MultiIndex.from_frame(places))
    full = rooflines.reindex(pd.MultiIndex.from_frame(places.assign(cell=base))).to_numpy()
    lines["speed_up_allowed"] = (full / lines["roofline_ms"]).where(lines["cell"] != base)
    return lines


def _between_lengths(lines: pd.DataFrame, read: pd.Series) -> pd.DataFrame:
    """Find out whether the decode steps of a cell are bound by kernel launches. Return lines with `launch_bound` and
    `launch_unknown`.

    The steps of the shortest and the longest prompt at one batch are compared. If the quartiles of the step times overlap and
    the medians differ by at most `_ALIKE`, a step's time does not depend on its bytes: it is bound by launches. If the
    quartiles overlap but the medians differ more, this is unknown. It is also unknown with few repeats, because their steps
    were measured close in time.

    read: bytes that a step of each line reads.
    """
    for _, group in lines.assign(read=read).groupby(["cell", "batch", "batch_prefill"], dropna=False):
        group = group.dropna(subset=["tpot_median", "read"]).sort_values("prompt_tokens")
        if len(group) < 2 or group["read"].iloc[-1] < _LEAST_MORE * group["read"].iloc[0]:
            continue
        first, last = group.iloc[0], group.iloc[-1]
        if min(first["repeats"], last["repeats"]) < LEAST_REPEATS:
            lines.loc[group.index, "launch_unknown"] = True
            continue
        moves = last["tpot_low"] > first["tpot_high"]
        alike = last["tpot_median"] <= (1 + _ALIKE) * first["tpot_median"]
        lines.loc[group.index, "launch_bound"] = not moves and alike
        lines.loc[group.index, "launch_unknown"] = not moves and not alike
    return lines


def document(lines: pd.DataFrame, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return the lines of a summary as plain values for JSON, each with the method and the budget of its cell. Unknown values
    are null."""
    named = {cell.cell: {"method": cell.method, "budget": str(cell.budget or "")} for cell in cells}
    return [
        named[line["cell"]] | {name: None if value is None or value != value else value for name, value in line.items()}
        for line in lines.astype(object).to_dict("records")
    ]
