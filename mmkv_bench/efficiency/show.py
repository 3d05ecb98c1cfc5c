"""The summary for people: one table per prompt length, each number beside its limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmkv_bench.efficiency.kinds import TEXT
from mmkv_bench.efficiency.summary import LEAST_REPEATS
from mmkv_bench.forecast.roofline import MS
from mmkv_bench.store.measurements import load_warning

if TYPE_CHECKING:
    import pandas as pd

    from mmkv_bench.efficiency.planned import Planned
    from mmkv_bench.forecast.roofline import Roofline

_MIB, _NAN = 2**20, float("nan")
_ABOVE = 1.005
"""What is printed as more than 1."""
PEAKS = {
    "vision": "vision",
    "prefill": "prefill",
    "score": "score",
    "reduce": "reduce",
    "join": "join",
    "first_token": "first token",
    "decode": "decode",
    "total": "largest",
    "resident": "resident set",
}
"""Peaks that are shown beside each other: column of the summary (without `peak_`) -> its head."""
COLUMNS = (
    *(
        "method",
        "TTFT ms",
        "vision ms",
        "MFU",
        "compress ms",
        "2nd token ms",
        "total ms",
        "TPOT ms [quartiles]",
        "roofline ms",
        "speed-up allowed",
        "MBU",
        "tokens/s",
    ),
    *("of full: TPOT", "2nd token", "total", "peak MiB", "KV held", "useful/step", "read/step MiB"),
)


def shown(plan: Planned, lines: pd.DataFrame, limits: Roofline | None) -> str:
    """The tables, and what their words mean. lines: of `summarised`."""
    labels = {cell.cell: (place, cell.label) for place, cell in enumerate(plan.cells)}
    texts = []
    if len(lines):
        lines = lines[lines["batch_prefill"].isna() | (lines["batch_prefill"] == plan.config.batch_prefill)]
        lines = lines.sort_values("cell", key=lambda cells: cells.map(lambda cell: labels[cell][0]), kind="stable")
    for (tokens, kind, batch), group in lines.groupby(["prompt_tokens", "prompts", "batch"]) if len(lines) else ():
        if batch in plan.batches:
            records = [(labels[line["cell"]][1], line) for line in group.to_dict("records")]
            rows = [_row(*record) for record in records]
            texts += ["", f"{_shape(tokens, kind, group)}, batch {batch}", *_aligned([COLUMNS, *rows])]
            texts += ["", "  peak MiB by phase, weights included", *_peaks(records)]
    if plan.searches and len(lines):
        texts += _largest(plan, lines, labels)
    if len(lines) and limits is not None:
        texts += _read_at(lines, labels, limits)
    return "\n".join([*texts, "", *_notes(lines, limits)])


def _shape(tokens: int, kind: str, group: pd.DataFrame) -> str:
    visual = "" if kind == TEXT else f" ({kind}: {group['visual_tokens'].iloc[0]} visual)"
    return f"{tokens} prompt tokens{visual}"


def _largest(plan: Planned, lines: pd.DataFrame, labels: dict[str, tuple[int, str]]) -> list[str]:
    """One line per cell and length: the most sequences that fit, and what they do, beside what full's do."""
    texts = []
    for (tokens, kind), group in lines.groupby(["prompt_tokens", "prompts"]):
        texts += ["", f"{_shape(tokens, kind, group)}, largest batch"]
        found = {cell: _at_largest(sizes.to_dict("records")) for cell, sizes in group.groupby("cell", sort=False)}
        for cell, line in found.items():
            texts.append(f"{labels[cell][1]}: {_said(line, found.get(plan.baselines[cell], {}))}")
    return texts


def _read_at(lines: pd.DataFrame, labels: dict[str, tuple[int, str]], limits: Roofline) -> list[str]:
    """At what rate further keys and values are read, of cells that were measured at several lengths."""
    texts = []
    for (kind, batch), group in lines.dropna(subset=["kv_bandwidth"]).groupby(["prompts", "batch"]):
        ends = f"{group['prompt_tokens'].min()} to {group['prompt_tokens'].max()}"
        shown = group.drop_duplicates("cell").to_dict("records")
        rates = ", ".join(
            f"{labels[line['cell']][1]} {line['kv_bandwidth'] / 1e9:.1f} GB/s ({line['kv_bandwidth'] / limits.bandwidth:.2f})"
            for line in shown
        )
        texts.append(f"From {ends} prompt tokens ({kind}, batch {batch}) a step reads what it has more of at: {rates}")
    return ["", *texts, "  (in brackets the share of the read-only bandwidth)"] if texts else []


def _at_largest(sizes: list[dict[str, Any]]) -> dict[str, Any]:
    """The line of a cell's largest batch; one that says why there is none, where there is none."""
    largest = next((line["largest_batch"] for line in reversed(sizes) if line["largest_batch"] >= 0), None)
    at = next((line for line in sizes if line["batch"] == largest), None)
    failed = next((line for line in sizes if line["status"] not in ("ok", "oom")), {"status": "ok", "error": ""})
    return at or {"largest_batch": largest, "status": failed["status"], "error": failed["error"]}


def _said(line: dict[str, Any], full: dict[str, Any]) -> str:
    if line["largest_batch"] is None:
        return "largest batch: not found" + (f": {line['status']}: {line['error']}" if line["status"] != "ok" else "")
    if line["largest_batch"] == 0:
        return "largest batch: 0 (one sequence does not fit)"
    ratio = {"rate": line.get("tokens_s_median", _NAN) / full.get("tokens_s_median", _NAN)}
    rate = f" ({_number(ratio, 'rate', 2)} x full's at its largest)"
    return (
        f"largest batch: {int(line['largest_batch'])} ({_number(line, 'largest_ratio', 2)} x full's); "
        f"{_number(line, 'tokens_s_median', 1)} tokens/s{rate}, TPOT {_ms(line, 'tpot_median')} ms, "
        f"TTFT {_ms(line, 'ttft_median')} ms, peak {_number(line, 'peak_total', 2, _MIB)} MiB, "
        f"KV held {_number(line, 'bytes_held', 2, _MIB)} MiB"
    )


def _row(label: str, line: dict[str, Any]) -> tuple[str, ...]:
    if line["status"] != "ok":
        return (label, f"{line['status']}: {line['error']}")
    quartiles = f"{_ms(line, 'tpot_median')} [{_ms(line, 'tpot_low')}, {_ms(line, 'tpot_high')}]"
    return (
        label + (" *" if line["launch_bound"] else ""),
        _ms(line, "ttft_median"),
        _ms(line, "vision_median"),
        _number(line, "prefill_mfu", 2),
        *(_ms(line, f"{name}_median") for name in ("compression", "second_token", "total")),
        quartiles,
        _number(line, "roofline_ms", 2),
        _number(line, "speed_up_allowed", 2),
        _number(line, "mbu", 2),
        _number(line, "tokens_s_median", 1),
        *(_number(line, f"{name}_ratio_median", 2) for name in ("tpot", "second_token", "total")),
        *(
            _number(line, name, 2, _MIB)
            for name in ("peak_total", "bytes_held", "bytes_useful_step", "bytes_read_step")
        ),
    )


def _peaks(records: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """The most that was held in each phase; the resident set beside, which a device's counters have no use for."""
    ended = [(label, line) for label, line in records if line["status"] == "ok"]
    names = {name: f"peak_{name}" if name != "resident" else name for name in PEAKS}
    shown = [name for name in PEAKS if any(_number(line, names[name], 2) != "-" for _, line in ended)]
    rows = [(label, *(_number(line, names[name], 2, _MIB) for name in shown)) for label, line in ended]
    return [f"  {row}" for row in _aligned([("method", *(PEAKS[name] for name in shown)), *rows])]


def _number(line: dict[str, Any], name: str, digits: int, unit: float = 1.0) -> str:
    value = line.get(name)
    return "-" if value is None or value != value else f"{value / unit:.{digits}f}"


def _ms(line: dict[str, Any], name: str) -> str:
    return _number(line, name, 2, 1 / MS)


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    columns = len(rows[0])
    whole = [row for row in rows if len(row) == columns]
    widths = [max(len(row[place]) for row in whole) for place in range(columns)]
    widths[0] = max(widths[0], *(len(row[0]) for row in rows))
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=False))]
        )
        if len(row) == columns
        else "  ".join([row[0].ljust(widths[0]), row[1]])
        for row in rows
    ]


def _notes(lines: pd.DataFrame, limits: Roofline | None) -> list[str]:
    said = [
        "Medians over repeats; TPOT over all steps. of full: the method's time over the full cache's of the same repeat. "
        "Compare by 2nd token and total: a method may show its first token before it compresses. tokens/s counts decoding alone, "
        "from the first token on; the prefills are in total.",
    ]
    if limits is None:
        said.append(
            "No limit is beside the times: nothing was timed, the model's shape is not known here, or the rows' device was not "
            "measured here (mmkv-bench plan --measure)."
        )
    else:
        rate = "" if limits.rate is None else f", {limits.rate / 1e12:.2f} TFLOP/s"
        said.append(
            f"Limits of {limits.device}: {limits.bandwidth / 1e9:.1f} GB/s read-only{rate}. MBU: weights and useful keys and "
            "values of a step, over its time and that bandwidth; roofline: the least time of a step; speed-up allowed: full's "
            "roofline over the line's; MFU: the text model's operations over the prompt, over its time and that rate."
        )
        said += _exceeded(lines, limits)
    if len(lines) and lines["launch_bound"].any():
        said.append("* launch_bound: the step takes no longer with the longest prompt than with the shortest.")
    if len(lines) and lines["launch_unknown"].any():
        said.append(
            f"Whether a step is launch_bound cannot be told of fewer than {LEAST_REPEATS} repeats, or where its times scatter "
            "more than they differ: give more repeats."
        )
    disturbed = sorted(set(lines["disturbed"].dropna())) if len(lines) else []
    if len(lines) and (other := load_warning(lines["load"], lines["threads"])):
        disturbed.append(other)
    if disturbed:
        said.append(f"Disturbed: {'; '.join(disturbed)}.")
    return said


def _exceeded(lines: pd.DataFrame, limits: Roofline) -> list[str]:
    """One sentence where a time is better than its limit, none else."""
    if not len(lines):
        return []
    highest = {"MFU": lines["prefill_mfu"].max(), "MBU": lines["mbu"].max()}
    above = [f"{name} {value:.2f}" for name, value in highest.items() if value > _ABOVE]
    if not above:
        return []
    load = "an unknown load" if limits.load is None else f"a load of {limits.load:.1f}"
    return [
        f"Limits are exceeded ({', '.join(above)}; at most 1 is possible): what {limits.device} reaches was measured too low, "
        f"under {load}; measure it on an idle machine (mmkv-bench plan --measure auto) and run the same command again."
    ]
