"""From raw times to what is printed: medians with quartiles, ratios to `full` of the same repeat, and the limit beside each.

A pure function of rows of the table `timings`. One line per cell, prompt length, batch and way in which that was built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mmkv_bench.config.schema import ONE_BY_ONE
from mmkv_bench.efficiency.plan import TEXT
from mmkv_bench.forecast.roofline import mbu, mfu, prefill_operations

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from mmkv_bench.forecast.roofline import Roofline
    from mmkv_bench.plan.cells import Cell

LINE = ["cell", "prompt_tokens", "batch", "batch_prefill"]
WAY = ["cell", "prompt_tokens", "batch_prefill"]
"""A cell's batches of all sizes."""
COMPRESSION = ["score", "select", "reduce"]
POINTS = ("ttft", "vision", "compression", "second_token", "total")
_QUARTILES = {"low": 0.25, "median": 0.5, "high": 0.75}
LEAST_REPEATS = 3
"""Fewer are too few to tell whether a step moves with its bytes."""
_LEAST_MORE = 1.05
_ALIKE = 0.05  # by which the medians of two steps may differ that are said to take the same time
"""Bytes of a step must differ by so much between two lengths for their times to say whether it moves with them."""


def summary_lines(
    rows: pa.Table, baselines: Mapping[str, str], limits: Roofline | None, memory_limit: int | None = None
) -> pd.DataFrame:
    """The lines, sorted by length, batch and cell; columns that nothing is known for are null.

    Args:
        rows: of the table `timings`; baselines: cell -> the cell of `full` that its ratios are to.
        limits: of model and device, None where they are not known: MBU, MFU, rooflines and `speed_up_allowed` are then null.
        memory_limit: passes that counted memory under another one are left out.

    Returns:
        For each of `POINTS`, `score`, `tpot` and `tokens_s`: `<name>_low`, `<name>_median`, `<name>_high`, quartiles over repeats
        (of TPOT over all steps) [s, tokens/s]; `<name>_ratio_...` of TPOT, second token, total: the cell's over `full`'s;
        `status` (the first failure, else ok), `repeats`, peaks and bytes of the pass that counts memory, `load` (median),
        `threads` and `disturbed`;
        `largest_batch` of the cell at this length, null where no failure bounds it, and `largest_ratio`: that over full's;
        `batch_prefill` is null where there is one sequence.
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
    """How each line ended: the first failure's status and error where there is one; its repeats, and what disturbed them."""
    ended = table[table["phase"] == "total"]
    lines = ended.assign(ok=ended["status"] == "ok").sort_values([*LINE, "ok"], kind="stable").groupby(LINE)
    state = lines.nth(0).set_index(LINE)[["status", "error", "new_tokens", "prompts", "visual_tokens"]]
    state["prompts"] = state["prompts"].fillna(TEXT)  # of rows older than the column
    repeats = ended[ended["repeat"].notna() & (ended["status"] == "ok")].groupby(LINE).size()
    state["repeats"] = repeats.reindex(state.index, fill_value=0)
    state = state.join(ended[[*LINE, "load"]].groupby(LINE).median()).join(
        ended[[*LINE, "threads"]].groupby(LINE).max()
    )
    reasons = ended[[*LINE, "disturbed"]].explode("disturbed").dropna().drop_duplicates().groupby(LINE)["disturbed"]
    state["disturbed"] = reasons.agg("; ".join).reindex(state.index)
    return state


def _ratios(wide: pd.DataFrame, baselines: Mapping[str, str]) -> pd.DataFrame:
    """The cell's over `full`'s of the same length, batch and repeat; null where that pass is not there."""
    import pandas as pd

    cells = wide.index.get_level_values("cell")
    others = [wide.index.get_level_values(name) for name in (*LINE[1:], "repeat")]
    full = pd.MultiIndex.from_arrays([cells.map(baselines), *others], names=wide.index.names)
    names = ["tpot", "second_token", "total"]
    ratios = wide[names] / wide[names].reindex(full).to_numpy()
    return ratios.add_suffix("_ratio")


def _largest(lines: pd.DataFrame, baselines: Mapping[str, str]) -> pd.DataFrame:
    """Of each cell, length and way: the most sequences that fit, where one more was tried and ran out of memory."""
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
    """`<column>_low`, `_median`, `_high` of each line."""
    lines = values.groupby(level=LINE)
    quantiles = [lines.quantile(share).add_suffix(f"_{name}") for name, share in _QUARTILES.items()]
    return quantiles[0].join(quantiles[1:])


def _memory(table: pd.DataFrame) -> pd.DataFrame:
    """Peaks by phase, and bytes of the cache, of the pass that counts memory."""
    counted = table[table["repeat"].isna() & (table["status"] == "ok")]
    peaks = counted.pivot(index=LINE, columns="phase", values="peak_allocated").add_prefix("peak_")
    total, decode = (counted[counted["phase"] == name].set_index(LINE) for name in ("total", "decode"))
    peaks["reserved"], peaks["resident"] = total["peak_reserved"], total["peak_resident"]
    return peaks.join(decode[["bytes_held", "bytes_useful_step", "bytes_read_step"]])


def _limited(lines: pd.DataFrame, limits: Roofline | None) -> pd.DataFrame:
    """Set limits next to the numbers: MBU, MFU, and the roofline time of a step.

    `kv_bandwidth` is the rate at which the extra bytes of a longer prompt lengthen a step.
    """
    import pandas as pd

    nothing = pd.Series(float("nan"), lines.index)
    for name in ("roofline_ms", "mbu", "prefill_mfu", "kv_bandwidth"):
        lines[name] = nothing
    lines["launch_bound"] = lines["launch_unknown"] = False
    if limits is None:
        return lines
    pairs = [*zip(lines["bytes_useful_step"], lines["batch"], strict=True)]
    read = [limits.step_bytes(*pair) for pair in pairs]
    lines["roofline_ms"] = [limits.step_ms(*pair) for pair in pairs]
    lines["mbu"] = [
        mbu(nbytes, seconds, limits.bandwidth) for nbytes, seconds in zip(read, lines["tpot_median"], strict=True)
    ]
    if limits.rate is not None:
        operations = (
            lines["prompt_tokens"].map(lambda tokens: prefill_operations(limits.decoder, tokens)) * lines["batch"]
        )
        text = lines["ttft_median"] - lines["vision_median"].fillna(0) - lines["compression_median"]
        lines["prefill_mfu"] = mfu(operations, text, limits.rate)
    return _between_lengths(lines, pd.Series(read, lines.index))


def _allowed(lines: pd.DataFrame, baselines: Mapping[str, str]) -> pd.DataFrame:
    """`speed_up_allowed`: full's roofline of the same length and batch over the line's; null for `full` itself."""
    import pandas as pd

    places, base = lines[LINE].fillna({"batch_prefill": ONE_BY_ONE}), lines["cell"].map(baselines)
    rooflines = lines["roofline_ms"].set_axis(pd.MultiIndex.from_frame(places))
    full = rooflines.reindex(pd.MultiIndex.from_frame(places.assign(cell=base))).to_numpy()
    lines["speed_up_allowed"] = (full / lines["roofline_ms"]).where(lines["cell"] != base)
    return lines


def _between_lengths(lines: pd.DataFrame, read: pd.Series) -> pd.DataFrame:
    """From the shortest to the longest prompt of a cell at one batch: the bandwidth at which the further bytes are read. Where
    the steps' quartiles overlap although there are more bytes, and the medians differ by `_ALIKE` at most, the step does not move
    with them: it is bound by launches. Where they overlap because the times scatter, and of few repeats, whose steps have their
    time of day in common, nothing is told."""
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
        if moves:
            bandwidth = (last["read"] - first["read"]) / (last["tpot_median"] - first["tpot_median"])
            lines.loc[group.index, "kv_bandwidth"] = bandwidth
    return lines


def document(lines: pd.DataFrame, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The lines as plain values, each with the method and the budget of its cell; null for what is not known."""
    named = {cell.cell: {"method": cell.method, "budget": str(cell.budget or "")} for cell in cells}
    return [
        named[line["cell"]] | {name: None if value is None or value != value else value for name, value in line.items()}
        for line in lines.astype(object).to_dict("records")
    ]
