"""Marks on cells, and the notes of tables of costs, fidelity, groups and ranks. `score_notes` has the notes of scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmkv_bench.protocols import protocol
from mmkv_bench.statistics.intervals import ALPHA, LEVEL
from mmkv_bench.statistics.metric_kinds import KL_TO
from mmkv_bench.tables.costs import LIMIT, TIMED, CostTable
from mmkv_bench.tables.rows import BASELINE
from mmkv_bench.tables.score_table import Entry, Line, ScoreTable
from mmkv_bench.tables.table import Note, Rank
from mmkv_bench.tables.text import cell_words

OVER, PREFILL, BEFORE_CUT, PACKED, RETRIEVED, PRESET = "†", "§", "¶", "‡", "◊", "∥"
FIXTURE_DATA = "Fixture data, made to exercise the task: the scores say nothing about model or methods."
RANKS = "Ranks run from 1 + the number of methods proven better to m - the number proven worse"
OVER_FULL = "/ full"
_EMBEDDED = "tiny"


def fallback_letters(table: ScoreTable) -> dict[str, str]:
    """Map each fallback reason to its letter in the table."""
    return {reason: chr(ord("a") + i) for i, reason in enumerate(table.fallbacks)}


def marks(table: ScoreTable, method: Line, entry: Entry, budget: str) -> list[str]:
    """Return the marks behind a cell's number, in a fixed order."""
    audit = entry.audit
    flags = {
        OVER: audit.over > 0,
        PRESET: method.label in table.above_bold(budget),
        PREFILL: mostly_prefill(method, entry),
        BEFORE_CUT: audit.text_before_cut > 0,
        PACKED: audit.packed > 0,
        RETRIEVED: audit.retrievable > 0,
    }
    letters = fallback_letters(table)
    return [mark for mark, true in flags.items() if true] + [letters[reason] for reason in audit.fallbacks]


def notes_that_hold(*candidates: tuple[object, Rank, str]) -> list[Note]:
    """Return the notes whose condition is true. candidates: (condition, rank, text) of each note."""
    return [Note(text, rank) for true, rank, text in candidates if true]


def mostly_prefill(method: Line, entry: Entry) -> bool:
    """Tell whether most answers come from the full prefill, so that the cell cannot tell methods apart."""
    return method.base != BASELINE and 2 * entry.audit.from_prefill > entry.audit.n


def gate_rank(verdict: str) -> Rank:
    """Return the rank of a sentence of `sweep.verdict`: a warning if the check failed."""
    return Rank.WARNING if " failed:" in verdict else Rank.READING


def cost_notes(table: CostTable) -> list[Note]:
    """Return the notes of a table of costs."""
    of = "repeat" if table.per_pass else "sample"
    entries = [entry for costs in table.entries.values() for entry in costs.values()]
    levels = {entry.level for entry in entries if entry.level is not None}
    few = "; with fewer than six values, the least and the largest" if levels and min(levels) < LEVEL else ""
    shown = {cost.key for cost in table.costs}
    steps = table.per_pass and TIMED in shown
    limit = (
        "No roofline beside tpot_s: the model's shape is unknown or this device was not measured (mmkv-bench plan --measure)."
        if table.limits is None
        else f"{LIMIT}: the roofline of a step, the longer of reading weights and kept entries at "
        f"{table.limits.bandwidth / 1e9:.1f} GB/s (read-only, {table.limits.device}) and computing with them, where the device's "
        "rate is known."
    )
    peak = (
        "peak: largest sum of live storages, weights included, counted in a pass that is not timed."
        if table.per_pass
        else "peak: device memory of the run by CUDA's allocator, or on a CPU the largest resident set of the process."
    )
    ratio = f"{OVER_FULL}: median over {of}s of the method's value divided by full's of the same {of}."
    random = "Random weights: times and bytes are those of the true shape, answers mean nothing."
    notes = notes_that_hold(
        (table.random_weights, Rank.WARNING, random),
        (
            table.weights_files,
            Rank.READING,
            f"Weights: {'; '.join(table.weights_files)}; bytes and times are of the dequantised ones.",
        ),
        (table.disturbed, Rank.WARNING, f"Disturbed: {'; '.join(table.disturbed)}."),
        (any(entry.ratio is not None for entry in entries), Rank.MARK, ratio),
        (levels, Rank.READING, f"Intervals of medians are order statistics{few}."),
        (steps, Rank.READING, "tpot_s: the median over the steps of each repeat."),
        (steps, Rank.MARK, limit),
        ("peak_total" in shown, Rank.READING, peak),
    )
    for reason, cells in table.fallbacks.items():
        words = "; ".join(f"{cell_words(label, budget)} ({count})" for label, budget, count in cells)
        notes.append(Note(f"Fallback {reason}: {words}.", Rank.WARNING))
    return notes


def fidelity_notes(table: ScoreTable, metrics: Sequence[str]) -> list[Note]:
    """Return the notes of a table of fidelity. table: one of its metrics. metrics: all its metrics."""
    first = "without token 1, which the full prefill gives to all methods"
    if not protocol(table.context["protocol"]).from_prefill:
        first = "token 1 included"
    continued = KL_TO[0] in metrics
    fed = "the dataset's continuation" if continued else "full's own answer"
    kl = (
        f"KL(full || method) and top-1 agreement per token of {fed}, teacher-forced, mean over samples "
        f"({first}). A sample counts for 5 nats at most."
    )
    full = any(method.base == BASELINE for method in table.methods)
    floor = "full: measured again through the path of compressed caches, as the noise floor of the others."
    common = "Tokens in common: length of the method's own answer until it differs from full's."
    shown = ", ".join(f"--metric {metric}" for metric in metrics if "_to_" not in metric)
    return notes_that_hold(
        (True, Rank.MARK, kl),
        (not continued, Rank.MARK, common),
        (continued, Rank.MARK, "to N: the stretch of the continuation that ends at token N, from the one before on."),
        (full, Rank.READING, floor),
        (True, Rank.DETAIL, f"For intervals and pairs: {shown}."),
    )


def group_notes(
    fixture: bool, absent: Mapping[str, tuple[int, int]], calibrated: Sequence[str], gates: Sequence[str]
) -> list[Note]:
    """Return the notes of a table of means over datasets.

    Args:
        fixture: the data are fixtures.
        absent: group -> (datasets with a table, all datasets).
        calibrated: labels of calibrated lines.
        gates: sentences on whether `full` reaches the printed means.
    """
    groups = ", ".join(f"{name} ({here} of {size} datasets)" for name, (here, size) in absent.items())
    labels = ", ".join(calibrated)
    calibration = f"Calibrated on data that the other methods have not seen (see each dataset's table): {labels}."
    return notes_that_hold(
        (fixture, Rank.WARNING, FIXTURE_DATA),
        (absent, Rank.WARNING, f"Not complete: {groups}."),
        (calibrated, Rank.READING, calibration),
        *((True, gate_rank(sentence), sentence) for sentence in gates),
    )


def task_rank_notes(methods: int, tasks: int, model: str, some: Sequence[str]) -> list[Note]:
    """Return the notes of ranks over tasks. some: methods that are compared only on some of the tasks."""
    text = (
        f"{RANKS}, of m = {methods} compared on all {tasks} tasks, each task at p <= "
        f"{ALPHA:g} / {tasks}: with {LEVEL:.0%} confidence all true ranks, and all means over these tasks, are within."
    )
    notes = [Note(text, Rank.MARK), *(Note(sentence, Rank.WARNING) for sentence in predicts_nothing(model))]
    return notes + ([Note(f"On some of the tasks only: {', '.join(some)}.")] if some else [])


def predicts_nothing(model: str) -> list[str]:
    """Return the sentence that stands beside every ranking of the embedded model; nothing for other models."""
    text = (
        "Rankings of the embedded model predict no paper's: mean Kendall's tau -.15 to the orders that papers print (87 "
        "settings, at 10 %)."
    )
    return [text] if model == _EMBEDDED else []
