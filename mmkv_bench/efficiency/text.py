"""Summary as text: one table per prompt length and batch size, with hardware limits next to the numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmkv_bench.efficiency.plan import TEXT, EfficiencyPlan
from mmkv_bench.efficiency.summary import LEAST_REPEATS
from mmkv_bench.families.facts import share_of_all_state
from mmkv_bench.forecast.roofline import MS, Roofline
from mmkv_bench.store.measurements import load_warning
from mmkv_bench.text_columns import align_columns

if TYPE_CHECKING:
    import pandas as pd


_MIB, _NAN = 1 / 2**20, float("nan")
_EXCESS_TOLERANCE = 1.005
"""Values above this are reported as more than 1."""
_TPOT_HEADING = "TPOT ms [quartiles]"
COLUMNS: tuple[tuple[str, str, float], ...] = (
    ("TTFT ms", "ttft_median", MS),
    ("vision ms", "vision_median", MS),
    ("MFU", "prefill_mfu", 1),
    ("compress ms", "compression_median", MS),
    ("2nd token ms", "second_token_median", MS),
    ("total ms", "total_median", MS),
    (_TPOT_HEADING, "tpot_median", MS),
    ("roofline ms", "roofline_ms", 1),
    ("speed-up allowed", "speed_up_allowed", 1),
    ("MBU", "mbu", 1),
    ("tokens/s", "tokens_s_median", 1),
    ("of full: TPOT", "tpot_ratio_median", 1),
    ("2nd token", "second_token_ratio_median", 1),
    ("total", "total_ratio_median", 1),
    ("peak MiB", "peak_total", _MIB),
    ("KV held", "bytes_held", _MIB),
    ("useful/step", "bytes_useful_step", _MIB),
    ("read/step MiB", "bytes_read_step", _MIB),
)
"""Heading, column of the summary, and factor to the heading's unit."""
PEAKS: tuple[tuple[str, str, float], ...] = (
    *((name, f"peak_{name}", _MIB) for name in ("vision", "prefill", "score", "reduce", "join")),
    *(("first token", "peak_first_token", _MIB), ("decode", "peak_decode", _MIB)),
    *(("largest", "peak_total", _MIB), ("resident set", "resident", _MIB)),
)
"""Heading, column and factor for the peak bytes of each phase. The resident set is counted only on the CPU."""


def text(plan: EfficiencyPlan, lines: pd.DataFrame, limits: Roofline | None) -> str:
    """Return the summary as text: tables and notes. lines: from `summary_lines`."""
    place_and_label = {cell.cell: (place, cell.label) for place, cell in enumerate(plan.cells)}
    texts = []
    if len(lines):
        lines = lines[lines["batch_prefill"].isna() | (lines["batch_prefill"] == plan.pass_config.batch_prefill)]
        lines = lines.sort_values(
            "cell", key=lambda cells: cells.map(lambda cell: place_and_label[cell][0]), kind="stable"
        )
        lines = lines.assign(label=[place_and_label[cell][1] for cell in lines["cell"]])
    for (tokens, kind, batch), group in lines.groupby(["prompt_tokens", "prompts", "batch"]) if len(lines) else ():
        if batch in plan.batches:
            title = f"{_prompts(tokens, kind, group)}, batch {batch}{_of_all_state(plan, int(tokens))}"
            texts += ["", title, *_table(group.to_dict("records"))]
    if plan.searches and len(lines):
        texts += _largest_batch_lines(plan, lines)
    return "\n".join([*texts, "", *_notes(lines, limits)])


def _prompts(tokens: int, kind: str, group: pd.DataFrame) -> str:
    visual = "" if kind == TEXT else f" ({kind}: {group['visual_tokens'].iloc[0]} visual)"
    return f"{tokens} prompt tokens{visual}"


def _of_all_state(plan: EfficiencyPlan, tokens: int) -> str:
    """Return a clause on the share of windows and recurrent states in all state, and the share that each budget leaves.

    The clause is "" for a model without windows and recurrent states.
    """
    family, dtype = plan.family, plan.cells[0].dtype
    if not family.states.layers:
        return ""
    share_by_kind = {"windows and recurrent states": share_of_all_state(family, tokens, 0, dtype)}
    for budget in dict.fromkeys(cell.budget for cell in plan.cells if cell.budget is not None):
        kept_per_head = min(tokens, budget.entries_for(tokens))
        share_by_kind[f"with {budget} of {tokens} entries per KV head"] = share_of_all_state(
            family, tokens, kept_per_head, dtype
        )
    return "; of all state: " + ", ".join(f"{name} {share:.1%}" for name, share in share_by_kind.items())


def _table(lines: list[dict[str, Any]]) -> list[str]:
    """Return the text of one length and batch: a table of times, one line per failed cell, and a table of memory peaks."""
    finished_lines = [line for line in lines if line["status"] == "ok"]
    failed_lines = [f"  {line['label']}: {line['status']}: {line['error']}" for line in lines if line["status"] != "ok"]
    if not finished_lines:
        return failed_lines
    rows = [
        [line["label"] + " *" * line["launch_bound"], *(_cell(line, *column) for column in COLUMNS)]
        for line in finished_lines
    ]
    shown_columns = [column for column in PEAKS if any(_number(line, *column[1:]) != "-" for line in finished_lines)]
    peak_rows = [[line["label"], *(_number(line, *column[1:]) for column in shown_columns)] for line in finished_lines]
    return [
        *align_columns(["method", *(head for head, _, _ in COLUMNS)], rows, words=1),
        *failed_lines,
        "",
        "  peak MiB by phase, weights included",
        *align_columns(["method", *(head for head, _, _ in shown_columns)], peak_rows, words=1),
    ]


def _cell(line: dict[str, Any], head: str, column: str, factor: float) -> str:
    cell_text = _number(line, column, factor, 1 if column == "tokens_s_median" else 2)
    if head == _TPOT_HEADING:
        cell_text += f" [{_number(line, 'tpot_low', factor)}, {_number(line, 'tpot_high', factor)}]"
    return cell_text


def _number(line: dict[str, Any], column: str, factor: float = 1, digits: int = 2) -> str:
    value = line.get(column)
    return "-" if value is None or value != value else f"{value * factor:.{digits}f}"


def _largest_batch_lines(plan: EfficiencyPlan, lines: pd.DataFrame) -> list[str]:
    """Return one line of text per cell and length: the largest batch that fits, its times, and those of `full`."""
    texts = []
    for (tokens, kind), group in lines.groupby(["prompt_tokens", "prompts"]):
        texts += ["", f"{_prompts(tokens, kind, group)}, largest batch"]
        largest_line_by_cell = {
            cell: _line_of_largest(sizes.to_dict("records")) for cell, sizes in group.groupby("cell", sort=False)
        }
        for cell, line in largest_line_by_cell.items():
            texts.append(
                f"{line['label']}: largest batch: {_batch(line, largest_line_by_cell.get(plan.baselines[cell], {}))}"
            )
    return texts


def _line_of_largest(sizes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the summary line of a cell's largest batch; without one, a line with the reason. sizes: the cell's lines."""
    largest_batch = next((line["largest_batch"] for line in reversed(sizes) if line["largest_batch"] >= 0), None)
    line_of_largest = next((line for line in sizes if line["batch"] == largest_batch), None)
    failed_line = next((line for line in sizes if line["status"] not in ("ok", "oom")), sizes[0] | {"status": "ok"})
    return line_of_largest or failed_line | {"largest_batch": largest_batch}


def _batch(line: dict[str, Any], full: dict[str, Any]) -> str:
    if line["largest_batch"] is None:
        return "not found" + (f": {line['status']}: {line['error']}" if line["status"] != "ok" else "")
    if line["largest_batch"] == 0:
        return "0 (one sequence does not fit)"
    ratio = {"rate": line.get("tokens_s_median", _NAN) / full.get("tokens_s_median", _NAN)}
    return (
        f"{int(line['largest_batch'])} ({_number(line, 'largest_ratio')} x full's); "
        f"{_number(line, 'tokens_s_median', digits=1)} tokens/s ({_number(ratio, 'rate')} x full's at its largest), "
        f"TPOT {_number(line, 'tpot_median', MS)} ms, TTFT {_number(line, 'ttft_median', MS)} ms, "
        f"peak {_number(line, 'peak_total', _MIB)} MiB, KV held {_number(line, 'bytes_held', _MIB)} MiB"
    )


def _notes(lines: pd.DataFrame, limits: Roofline | None) -> list[str]:
    notes = [
        "Medians over repeats; TPOT over all steps. of full: the method's time over the full cache's of the same repeat. "
        "Compare by 2nd token and total: a method may show its first token before it compresses. tokens/s counts only decoding, "
        "from the first token on; total includes the prefills.",
    ]
    if limits is None:
        notes.append(
            "Times have no limits beside them: nothing was timed, the model's shape is unknown, or the rows' device was not "
            "measured (mmkv-bench plan --measure)."
        )
    else:
        rate_clause = "" if limits.rate is None else f", {limits.rate / 1e12:.2f} TFLOP/s"
        notes.append(
            f"Limits of {limits.device}: {limits.bandwidth / 1e9:.1f} GB/s read-only{rate_clause}. MBU: weights "
            "and useful keys and "
            "values of a step, over its time and that bandwidth; roofline: the least time of a step; speed-up allowed: full's "
            "roofline over the line's; MFU: the text model's operations over the prompt, over its time and that rate."
        )
        notes += _exceeded_limits(lines, limits)
    if not len(lines):
        return notes
    if lines["launch_bound"].any():
        notes.append("* launch_bound: the step takes no longer with the longest prompt than with the shortest.")
    if lines["launch_unknown"].any():
        notes.append(
            f"Whether a step is launch_bound is unknown with fewer than {LEAST_REPEATS} repeats, or if its times scatter "
            "more than they differ: give more repeats."
        )
    load_note = load_warning(lines["load"], lines["threads"])
    disturbances = sorted(set(lines["disturbed"].dropna())) + ([load_note] if load_note else [])
    return [*notes, f"Disturbed: {'; '.join(disturbances)}."] if disturbances else notes


def _exceeded_limits(lines: pd.DataFrame, limits: Roofline) -> list[str]:
    """Return one sentence if some time is shorter than the hardware limit allows, else an empty list."""
    highest_by_name = {"MFU": lines["prefill_mfu"].max(), "MBU": lines["mbu"].max()} if len(lines) else {}
    exceeding_values = [f"{name} {value:.2f}" for name, value in highest_by_name.items() if value > _EXCESS_TOLERANCE]
    if not exceeding_values:
        return []
    load_text = "an unknown load" if limits.load is None else f"a load of {limits.load:.1f}"
    return [
        f"Limits are exceeded ({', '.join(exceeding_values)}; at most 1 is possible): what {limits.device} "
        "reaches was measured too low, "
        f"under {load_text}; measure it on an idle machine (mmkv-bench plan --measure auto) and run the same command again."
    ]
