"""Summary of the table `timings`: medians with quartiles, ratios to the full cache in the same repeat, and hardware
limits.

It has one line per cell, prompt length, batch size and kind of prefill (together or one by one).
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

LINE_COLUMNS = ["cell", "prompt_tokens", "batch", "batch_prefill"]
WAY_COLUMNS = ["cell", "prompt_tokens", "batch_prefill"]
"""Columns that all batch sizes of a cell share."""
COMPRESSION = ["score", "select", "reduce"]
POINTS = ("ttft", "vision", "compression", "second_token", "total")
_QUARTILES = {"low": 0.25, "median": 0.5, "high": 0.75}
LEAST_REPEATS = 3
"""Minimum number of repeats to decide whether a step's time depends on its bytes."""
_LEAST_MORE = 1.05
"""Minimum ratio of a step's bytes at two lengths to decide whether a step's time depends on its bytes."""
_SAME_TIME_TOLERANCE = 0.05  # maximum relative difference of medians for two steps to count as equally long


def summary_lines(
    rows: pa.Table, baselines: Mapping[str, str], limits: Roofline | None, memory_limit: int | None = None
) -> pd.DataFrame:
    """Return one line per cell, prompt length, batch size and kind of prefill, sorted by length, batch and cell.

    Args:
        rows: rows of the table `timings`.
        baselines: cell -> the full-cache cell that its ratios divide by.
        limits: roofline of the model on the device. If None (unknown), MBU, MFU, rooflines and `speed_up_allowed` are
            null.
        memory_limit: passes that counted memory under another limit are left out.

    Returns:
        These columns, null where unknown.
        `<name>_low`, `<name>_median`, `<name>_high` for each of `POINTS`, `score`, `tpot` and `tokens_s`: quartiles
            over repeats (for TPOT over all steps) [s, tokens/s].
        `<name>_ratio_...` for TPOT, second token and total: the cell's value over the value of `full`.
        `status` (the first failure, else ok), `repeats`, peaks and bytes of the pass that counts memory, `load`
            (median), `threads` and `disturbed`.
        `largest_batch` of the cell at this length, null if no failure bounds it, and `largest_ratio`, its ratio to
            full's.
        `batch_prefill` is null for one sequence.
    """
    table = rows.to_pandas()
    if table.empty:
        return table
    table["batch_prefill"] = table["batch_prefill"].fillna(ONE_BY_ONE)
    has_memory_limit = table["memory_limit"].isna() if memory_limit is None else table["memory_limit"] == memory_limit
    table = table[table["repeat"].notna() | has_memory_limit]
    lines = _status_columns(table)
    timed_rows = table[table["repeat"].notna() & (table["status"] == "ok")]
    if not timed_rows.empty:
        seconds_by_phase = timed_rows.pivot(index=[*LINE_COLUMNS, "repeat"], columns="phase", values="seconds")
        seconds_by_phase["compression"] = seconds_by_phase[COMPRESSION].sum(axis=1)
        seconds_by_phase["vision"] = seconds_by_phase["vision"] if "vision" in seconds_by_phase else float("nan")
        decode_rows = timed_rows[timed_rows["phase"] == "decode"].set_index([*LINE_COLUMNS, "repeat"])
        step_seconds = decode_rows["steps_s"].explode().astype(float)
        batch = seconds_by_phase.index.get_level_values("batch")
        seconds_by_phase["tokens_s"] = (
            batch * decode_rows["steps_s"].map(len).reindex(seconds_by_phase.index) / seconds_by_phase["decode"]
        )
        seconds_by_phase["tpot"] = step_seconds.groupby(level=[*LINE_COLUMNS, "repeat"]).median()
        lines = lines.join(_quartiles(seconds_by_phase[[*POINTS, "score", "tokens_s"]])).join(
            _quartiles(step_seconds.to_frame("tpot"))
        )
        lines = lines.join(_quartiles(_ratios(seconds_by_phase, baselines)))
    lines = lines.join(_memory(table)).reset_index()
    lines = lines.merge(_largest_batches(lines, baselines), how="left", on=WAY_COLUMNS)
    lines = lines.sort_values(["prompt_tokens", "batch", "batch_prefill", "cell"], ignore_index=True)
    lines.loc[lines["batch"] == 1, "batch_prefill"] = None
    for name in ("tpot_median", "ttft_median", "vision_median", "compression_median", "bytes_useful_step"):
        lines[name] = lines[name] if name in lines else float("nan")
    return _add_allowed_speed_up(_add_limits(lines, limits), baselines)


def _status_columns(table: pd.DataFrame) -> pd.DataFrame:
    """Return, per line of the summary: status and error (of the first failure), repeats, load, and disturbances."""
    total_rows = table[table["phase"] == "total"]
    lines = (
        total_rows.assign(ok=total_rows["status"] == "ok")
        .sort_values([*LINE_COLUMNS, "ok"], kind="stable")
        .groupby(LINE_COLUMNS)
    )
    state = lines.nth(0).set_index(LINE_COLUMNS)[["status", "error", "new_tokens", "prompts", "visual_tokens"]]
    repeats = total_rows[total_rows["repeat"].notna() & (total_rows["status"] == "ok")].groupby(LINE_COLUMNS).size()
    state["repeats"] = repeats.reindex(state.index, fill_value=0)
    state = state.join(total_rows[[*LINE_COLUMNS, "load"]].groupby(LINE_COLUMNS).median()).join(
        total_rows[[*LINE_COLUMNS, "threads"]].groupby(LINE_COLUMNS).max()
    )
    disturbance_groups = (
        total_rows[[*LINE_COLUMNS, "disturbed"]]
        .explode("disturbed")
        .dropna()
        .drop_duplicates()
        .groupby(LINE_COLUMNS)["disturbed"]
    )
    state["disturbed"] = disturbance_groups.agg("; ".join).reindex(state.index)
    return state


def _ratios(wide: pd.DataFrame, baselines: Mapping[str, str]) -> pd.DataFrame:
    """Return the ratio of each value to that of `full` in the same repeat; null if `full` has no such pass.

    wide: one row per pass, one column per value.
    """
    import pandas as pd

    cells = wide.index.get_level_values("cell")
    index_levels = [wide.index.get_level_values(name) for name in (*LINE_COLUMNS[1:], "repeat")]
    index_of_full = pd.MultiIndex.from_arrays([cells.map(baselines), *index_levels], names=wide.index.names)
    values = wide[["tpot", "second_token", "total"]]
    return (values / values.reindex(index_of_full).to_numpy()).add_suffix("_ratio")


def _largest_batches(lines: pd.DataFrame, baselines: Mapping[str, str]) -> pd.DataFrame:
    """Return, per cell, length and kind of prefill, the largest batch that fits and its ratio to the full cache's.

    Both are null unless a batch with one sequence more ran out of memory. The largest batch is 0 if not even one fits.
    """
    import pandas as pd

    status_of_one_sequence = lines[lines["batch"] == 1].set_index(["cell", "prompt_tokens"])["status"]
    fit_by_way = lines[WAY_COLUMNS].drop_duplicates()
    status_by_way = status_of_one_sequence.reindex(
        pd.MultiIndex.from_frame(fit_by_way[["cell", "prompt_tokens"]])
    ).to_numpy()
    fit_by_way = fit_by_way.set_index(WAY_COLUMNS).assign(
        fits=pd.Series(status_by_way).map({"ok": 1, "oom": 0}).to_numpy(), fails=float("nan")
    )
    lines_of_batches = lines[lines["batch"] > 1]
    for name, status, most in (("fits", "ok", "max"), ("fails", "oom", "min")):
        batch_by_way = lines_of_batches[lines_of_batches["status"] == status].groupby(WAY_COLUMNS)["batch"].agg(most)
        fit_by_way[name] = batch_by_way.reindex(fit_by_way.index).fillna(fit_by_way[name])
    is_bounded = (fit_by_way["fits"] == 0) | (fit_by_way["fails"] == fit_by_way["fits"] + 1)
    largest = fit_by_way["fits"].where(is_bounded)
    cells = largest.index.get_level_values("cell").map(baselines)
    index_of_full = pd.MultiIndex.from_arrays(
        [cells, *(largest.index.get_level_values(name) for name in WAY_COLUMNS[1:])]
    )
    ratio_to_full = largest.to_numpy() / largest.reindex(index_of_full).replace(0, float("nan")).to_numpy()
    return pd.DataFrame({"largest_batch": largest, "largest_ratio": ratio_to_full}, index=largest.index).reset_index()


def _quartiles(values: pd.DataFrame) -> pd.DataFrame:
    """Return the quartiles of each column over the rows of a line: `<column>_low`, `<column>_median`, `<column>_high`."""
    lines = values.groupby(level=LINE_COLUMNS)
    quantiles = [lines.quantile(share).add_suffix(f"_{name}") for name, share in _QUARTILES.items()]
    return quantiles[0].join(quantiles[1:])


def _memory(table: pd.DataFrame) -> pd.DataFrame:
    memory_rows = table[table["repeat"].isna() & (table["status"] == "ok")]
    peaks = memory_rows.pivot(index=LINE_COLUMNS, columns="phase", values="peak_allocated").add_prefix("peak_")
    total_rows, decode_rows = (
        memory_rows[memory_rows["phase"] == name].set_index(LINE_COLUMNS) for name in ("total", "decode")
    )
    peaks["reserved"], peaks["resident"] = total_rows["peak_reserved"], total_rows["peak_resident"]
    return peaks.join(decode_rows[["bytes_held", "bytes_useful_step", "bytes_read_step"]])


def _add_limits(lines: pd.DataFrame, limits: Roofline | None) -> pd.DataFrame:
    """Add columns that compare times with hardware limits: MBU, MFU, and the roofline time of a decode step."""
    lines[["roofline_ms", "mbu", "prefill_mfu"]] = float("nan")
    lines["launch_bound"] = lines["launch_unknown"] = False
    if limits is None:
        return lines
    bytes_read = limits.weights + lines["bytes_useful_step"]
    lines["roofline_ms"] = list(map(limits.step_ms, lines["bytes_useful_step"], lines["batch"]))
    lines["mbu"] = bytes_read / lines["tpot_median"] / limits.bandwidth
    if limits.rate is not None:
        operations = lines["prompt_tokens"].map(lambda tokens: prefill_operations(limits.decoder, tokens))
        text_prefill_seconds = lines["ttft_median"] - lines["vision_median"].fillna(0) - lines["compression_median"]
        lines["prefill_mfu"] = operations * lines["batch"] / text_prefill_seconds / limits.rate
    return _mark_launch_bound(lines, bytes_read)


def _add_allowed_speed_up(lines: pd.DataFrame, baselines: Mapping[str, str]) -> pd.DataFrame:
    """Add `speed_up_allowed`: full's roofline time over the line's, at the same length and batch. Null for `full`."""
    import pandas as pd

    line_keys, full_cells = lines[LINE_COLUMNS].fillna({"batch_prefill": ONE_BY_ONE}), lines["cell"].map(baselines)
    rooflines = lines["roofline_ms"].set_axis(pd.MultiIndex.from_frame(line_keys))
    full_rooflines = rooflines.reindex(pd.MultiIndex.from_frame(line_keys.assign(cell=full_cells))).to_numpy()
    lines["speed_up_allowed"] = (full_rooflines / lines["roofline_ms"]).where(lines["cell"] != full_cells)
    return lines


def _mark_launch_bound(lines: pd.DataFrame, read: pd.Series) -> pd.DataFrame:
    """Set `launch_bound` and `launch_unknown`: whether kernel launches bound the decode steps of a cell.

    The steps of the shortest and the longest prompt at one batch are compared. If the quartiles of the step times
    overlap and the medians differ by at most `_SAME_TIME_TOLERANCE`, launches bound the step, because its time does not
    depend on its bytes. If the quartiles overlap but the medians differ more, this is unknown. With fewer than
    `LEAST_REPEATS` repeats it is unknown too.

    read: bytes that a step of each line reads.
    """
    for _, group in lines.assign(read=read).groupby(["cell", "batch", "batch_prefill"], dropna=False):
        group = group.dropna(subset=["tpot_median", "read"]).sort_values("prompt_tokens")
        if len(group) < 2 or group["read"].iloc[-1] < _LEAST_MORE * group["read"].iloc[0]:
            continue
        shortest_prompt, longest_prompt = group.iloc[0], group.iloc[-1]
        if min(shortest_prompt["repeats"], longest_prompt["repeats"]) < LEAST_REPEATS:
            lines.loc[group.index, "launch_unknown"] = True
            continue
        is_slower = longest_prompt["tpot_low"] > shortest_prompt["tpot_high"]
        has_same_median = longest_prompt["tpot_median"] <= (1 + _SAME_TIME_TOLERANCE) * shortest_prompt["tpot_median"]
        lines.loc[group.index, "launch_bound"] = not is_slower and has_same_median
        lines.loc[group.index, "launch_unknown"] = not is_slower and not has_same_median
    return lines


def document(lines: pd.DataFrame, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return the lines of a summary for JSON, each with method and budget of its cell. Unknown values are None."""
    cell_names = {cell.cell: {"method": cell.method, "budget": str(cell.budget or "")} for cell in cells}
    return [
        cell_names[line["cell"]]
        | {name: None if value is None or value != value else value for name, value in line.items()}
        for line in lines.astype(object).to_dict("records")
    ]
