"""What stands around a table: its caption, the marks on its cells, and the notes that explain them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from mmkv_bench.statistics.intervals import LEVEL
from mmkv_bench.statistics.metric_kinds import CAPS, FIDELITY, MEASURES, PARSE_FAILED, SAME, lower_is_better, upstream
from mmkv_bench.tables.best import best_notes
from mmkv_bench.tables.line import Line
from mmkv_bench.tables.protocol_notes import mostly_free, tested
from mmkv_bench.tables.rows import BASELINE
from mmkv_bench.tables.score_table import AXES, Entry, ScoreTable
from mmkv_bench.tables.versions import version_notes

OVER, PREFILL, BEFORE_CUT, PACKED, RETRIEVED, PRESET = "†", "§", "¶", "‡", "◊", "∥"
FIXTURE = "_fixture"  # how labels of datasets of our own making end
_MANY = 6  # cells that a note lists by name
_ROUNDING = 1e-5  # MMMU's aggregate comes with five digits
# Context that a caption names only where it tells two tables apart, and what must be equal for it to do so.
_WITHIN = {"model_fingerprint": "model", "dataset_fingerprint": "dataset"}
_QUIET = (*_WITHIN, "dtype", "attention", "generation", "numerics_version", "torch", "transformers")
_QUIET += ("device", "processor", "lmms_eval")


def title(table: ScoreTable) -> str:
    """What the table shows, in one phrase."""
    return f"{table.dataset}, {table.metric}"


def caption(table: ScoreTable, tables: Sequence[ScoreTable], intervals: bool = True) -> str:
    """Axis, model, protocol, reading, sample count and interval kind, and what tells this table from the others."""
    contexts = [each.context for each in tables]
    parts = [axis_words(table.axis), *context_words(table.context, table.readings, contexts)]
    if mostly_free(table):
        parts.append("answers mostly free")
    parts.append(size_text(table))
    if table.metric in CAPS:
        parts.append(f"a sample counts for {CAPS[table.metric]:g} nats at most")
    kinds = sorted({entry.interval for entry in table.entries.values()} - {"none"})
    if intervals and kinds:
        parts.append(f"{LEVEL:.0%} intervals ({', '.join(kinds)})")
    return "; ".join(parts)


def axis_words(axis: str) -> str:
    """What a table's budgets count."""
    return AXES[axis] if axis == "none" else f"budget: {AXES[axis]}"


def context_words(
    context: Mapping[str, str], readings: Sequence[str], contexts: Sequence[Mapping[str, str]]
) -> list[str]:
    """Model, protocol, reading, and what tells this context from the others that are shown with it."""
    parts = [f"model={context['model']}", f"protocol={context['protocol']}"]
    if readings:
        parts.append(f"reading={' and '.join(readings)}")
    if context["limits"]:
        parts.append(context["limits"])
    for column in _QUIET:
        within = _WITHIN.get(column)
        others = [other for other in contexts if within is None or other[within] == context[within]]
        if len({other[column] for other in others}) > 1:
            value = context[column]
            parts.append(f"{column}={value[:12] if within else value}")
    return parts


def size_text(table: ScoreTable) -> str:
    """`n=500`, or `n=300 to 500` where the cells hold different numbers of samples."""
    low, high = table.sizes[0], table.sizes[-1]
    return f"n={low}" if low == high else f"n={low} to {high}"


def line_label(method: Line) -> str:
    """The method's name in the table, with `ceiling` where it cheats, `calibrated` where it was measured on data before,
    and `tuned` where its parameters are not the defaults."""
    said = {"ceiling": method.cheats, "calibrated": method.calibrated, "tuned": method.tuned}
    words = ", ".join(word for word, true in said.items() if true)
    if not words:
        return method.label
    return f"{method.label[:-1]}, {words})" if method.label.endswith(")") else f"{method.label} ({words})"


def fallback_letters(table: ScoreTable) -> dict[str, str]:
    """A letter for each fallback reason that occurs in the table."""
    return {reason: chr(ord("a") + i) for i, reason in enumerate(table.fallbacks)}


def marks(table: ScoreTable, method: Line, entry: Entry, budget: str) -> list[str]:
    """The marks behind a cell's number, in a fixed order."""
    found = [OVER] if entry.audit.over else []
    if method.label in table.above_bold(budget):
        found.append(PRESET)
    if _untested(method, entry):
        found.append(PREFILL)
    if entry.audit.text_before_cut:
        found.append(BEFORE_CUT)
    if entry.audit.packed:
        found.append(PACKED)
    if entry.audit.retrievable:
        found.append(RETRIEVED)
    letters = fallback_letters(table)
    return found + [letters[reason] for reason in entry.audit.fallbacks]


def notes(table: ScoreTable) -> list[str]:
    """One line for everything that a reader of the numbers must know, in a fixed order; empty when there is nothing."""
    return [
        *_source_notes(table),
        *_judge_notes(table),
        *_failure_notes(table),
        *best_notes(table, _apart(table)),
        *_mark_notes(table),
        *_method_notes(table),
        *version_notes(table.versions),
        *_machine_notes(table),
        *tested(table),
        *_calibration_notes(table),
        *_unread_notes(table),
        *_lmms_eval_notes(table),
    ]


def where(key: tuple[str, str]) -> str:
    """A cell in words: `snapkv at 64`."""
    label, budget = key
    return f"{label} at {budget}" if budget else label


def _named(table: ScoreTable) -> list[tuple[str, Line, Entry]]:
    """Every cell of the table once, as (words, method, entry), line by line."""
    places = [(method, (method.label, budget)) for method in table.methods for budget in ("", *table.budgets)]
    return [(where(key), method, table.entries[key]) for method, key in places if key in table.entries]


def _untested(method: Line, entry: Entry) -> bool:
    """Whether most answers could not be changed by compression, so that the cell cannot tell methods apart."""
    return method.base != BASELINE and 2 * entry.audit.from_prefill > entry.audit.n


def _source_notes(table: ScoreTable) -> list[str]:
    """What the numbers stand on: made-up data, and the full-cache gate; and which way is better, where it is down."""
    made = "fixture data, made to exercise the task: the scores say nothing about the model or the methods."
    falling = ["the smaller value is the better one."] * lower_is_better(table.metric)
    return falling + [made] * table.dataset.endswith(FIXTURE) + ([table.gate] if table.gate else [])


def _judge_notes(table: ScoreTable) -> list[str]:
    """Who judged, whether that was one judge with the same prompts, and what no judge has answered; of a measure, what was
    not measured while answering."""
    judges = sorted({judge for entry in table.entries.values() for judge in entry.judges})
    lines = [f"judged by {judges[0]}."] if len(judges) == 1 else []
    if len(judges) > 1:
        lines.append(f"judged by several judges, whose scores do not compare: {'; '.join(judges)}.")
    unvalued = sum(entry.scores.unjudged for entry in table.entries.values())
    if unvalued and table.metric in MEASURES:
        answers = sum(entry.scores.n for entry in table.entries.values())
        lines.append(f"not measured: {unvalued} of {answers} answers; out=<another folder> measures them.")
    elif unvalued:
        lines.append(
            "not judged: answers for which no judge gave a score, of all answers; stage=score with a judge asks it."
        )
    return lines


def _failure_notes(table: ScoreTable) -> list[str]:
    lines = []
    if any(not entry.scores.complete and not entry.scores.unjudged for entry in table.entries.values()):
        lines.append(
            "not every sample is ok: such cells show samples ok / samples, the score with failures as 0 / the score "
            f"over the {len(table.common_ids)} samples ok in every cell."
        )
    short = [f"{words} (n={e.scores.n})" for words, _, e in _named(table) if e.scores.n < table.sizes[-1]]
    if short:
        lines.append(f"fewer samples than the {table.sizes[-1]} of the largest cell: {', '.join(short)}.")
    picked = [(words, e.audit.chosen, e.audit.n) for words, _, e in _named(table) if e.audit.chosen]
    if picked:
        lines.append(
            "samples that were asked for by their ids (samples=[...]) say nothing of the dataset, and cells with such, which "
            f"count in their scores until out=<another folder> keeps them apart, are not compared: {_listed(picked)}."
        )
    unranked = table.unranked()
    if unranked:
        at = "" if len(unranked) == len(table.columns) else f" at {', '.join(unranked)}"
        lines.append(f"nothing is marked best{at}, because the cells that compete are not ok on the same samples.")
    waiting = [f"{where(key)} ({count})" for key, count in table.waiting.items()]
    if waiting:
        lines.append(f"answers not scored yet (stage=score): {', '.join(waiting)}.")
    return lines


def _apart(table: ScoreTable) -> list[str]:
    """The marks, of those that occur, whose cells do not compete."""
    audits = [entry.audit for _, method, entry in _named(table) if method.base != BASELINE]
    kinds = {
        OVER: any(audit.over for audit in audits),
        PACKED: any(audit.packed for audit in audits),
        RETRIEVED: any(audit.retrievable for audit in audits),
    }
    return [mark for mark, found in kinds.items() if found]


def _mark_notes(table: ScoreTable) -> list[str]:
    cells = _named(table)
    lines = []
    exceeding = [
        (method, (f"{words} by {e.audit.excess_mean:.1%}, at most {e.audit.excess_worst:.1%}", e.audit.over, e.audit.n))
        for words, method, e in cells
        if e.audit.over
    ]
    if pictures := [told for method, told in exceeding if method.resamples]:
        lines.append(
            f"{OVER} the smallest pictures, or the fewest frames, have more entries than the budget: "
            f"{_listed(pictures, shorten=False)}."
        )
    defect = any(not method.may_exceed and not method.resamples for method, _ in exceeding)
    if over := [told for method, told in exceeding if not method.resamples]:
        blame = ", which only reading=released may do, or a paper's own formula: take it for a defect" if defect else ""
        lines.append(f"{OVER} more entries resident than the budget{blame}: {_listed(over, shorten=False)}.")
    above = {label: None for budget in table.budgets or ("",) for label in sorted(table.above_bold(budget))}
    if above:
        lines.append(
            f"{PRESET} scores better than a bold cell of its column and is not bold, because a preset does not compete beside "
            f"its method: {', '.join(above)}."
        )
    untested = [(words, e.audit.from_prefill, e.audit.n) for words, method, e in cells if _untested(method, e)]
    if untested:
        lines.append(
            f"{PREFILL} answers with no token (but the end token) decoded from the compressed cache, which cannot tell "
            f"methods apart (protocol={table.context['protocol']}): {_listed(untested)}."
        )
    cut = [(words, e.audit.text_before_cut, e.audit.n) for words, _, e in cells if e.audit.text_before_cut]
    if cut:
        lines.append(f"{BEFORE_CUT} answers whose compressed context held question text: {_listed(cut)}.")
    packed = [f"{words} ({_bytes(e)})" for words, _, e in cells if e.audit.packed]
    if packed:
        lines.append(f"{PACKED} entries in fewer bits, not to be compared by entries: {_some(packed)}.")
    retrieved = [
        f"{words} (reaches {e.audit.reach:.1f} times as many; {_bytes(e)})"
        for words, _, e in cells
        if e.audit.retrievable
    ]
    if retrieved:
        lines.append(
            f"{RETRIEVED} the budget bounds the entries read per step; evicted ones stay within reach: {_some(retrieved)}."
        )
    if any(e.audit.held is None for _, _, e in cells if not e.audit.entries_only):
        lines.append(
            "bytes of rows older than the column bytes_held are bytes_device and bytes_metadata: slots reserved for tokens to "
            "come and buffers of decode policies are not among them."
        )
    for reason, letter in fallback_letters(table).items():
        found = [(words, e.audit.fallbacks.get(reason, 0), e.audit.n) for words, _, e in cells]
        lines.append(f"{letter} fallback {reason}: {_listed([cell for cell in found if cell[1]])}.")
    return lines


def _listed(cells: Sequence[tuple[str, int, int]], shorten: bool = True) -> str:
    """(words, count, of how many answers) of each cell; only the range where there are many cells."""
    if shorten and len(cells) > _MANY:
        counts = sorted(count for _, count, _ in cells)
        return f"{len(cells)} cells, {counts[0]} to {counts[-1]} answers each of {max(n for *_, n in cells)}"
    return "; ".join(f"{words} ({count} of {n})" for words, count, n in cells)


def _bytes(entry: Entry) -> str:
    """Bytes against the full cache's: all that are held, or, of older rows, those of entries and metadata."""
    if entry.audit.held is not None:
        host = f", {entry.audit.host:.0%} on the host" if entry.audit.host else ""
        return f"holds {entry.audit.held:.0%} of full's bytes{host}"
    host = f" and {entry.audit.host:.0%} on the host" if entry.audit.host else ""
    return f"{entry.audit.device:.0%} of full's bytes on the device{host}"


def _some(cells: Sequence[str]) -> str:
    return (
        "; ".join(cells) if len(cells) <= _MANY else f"{'; '.join(cells[:_MANY])}; and {len(cells) - _MANY} more cells"
    )


def _method_notes(table: ScoreTable) -> list[str]:
    lines = []
    for method in table.methods:
        entries = [e for (label, _), e in table.entries.items() if label == method.label]
        seeds = sorted({seed for entry in entries for seed in entry.seeds})
        if len(seeds) > 1:
            uneven = " (not every sample has every seed)" if any(entry.uneven_seeds for entry in entries) else ""
            lines.append(
                f"{method.label}: averaged within each sample over seeds {', '.join(map(str, seeds))}{uneven}."
            )
        if method.renamed:
            lines.append(f"{method.label}: the method {method.base} with its default parameters, under another name.")
        if method.resamples:
            lines.append(
                f"{method.label}: a control that evicts nothing, the whole cache of smaller pictures or fewer frames; its "
                "entries are the most that do not exceed the budget."
            )
        if method.cheats:
            lines.append(
                f"{method.label} (ceiling): cheats, it knows the full cache's own answer; not marked best, and no rival of "
                "the others."
            )
        if method.tuned:
            values = json.loads(method.parameters)
            lines.append(f"{method.label} (tuned): {', '.join(f'{k}={v}' for k, v in sorted(values.items()))}.")
    return lines


def _machine_notes(table: ScoreTable) -> list[str]:
    if len(table.cpus) < 2:
        return []
    kinds = ", ".join(
        f"{kind} ({count})" for kind, count in sorted(table.cpus.items(), key=lambda found: (-found[1], found[0]))
    )
    return [f"cells were made beside several kinds of CPU: {kinds}."]


def _calibration_notes(table: ScoreTable) -> list[str]:
    """Which lines knew data before their first prompt, a note for all that read the same artefacts."""
    readers: dict[tuple[str, ...], list[str]] = {}
    for label, artefacts in table.calibrations.items():
        readers.setdefault(artefacts, []).append(label)
    return [
        f"calibrated: {', '.join(labels)} by {' and '.join(artefacts)}, which methods without the mark have not seen."
        for artefacts, labels in readers.items()
    ]


def _unread_notes(table: ScoreTable) -> list[str]:
    cells = [(words, e.unread, e.audit.n or e.scores.n) for words, _, e in _named(table) if e.unread]
    if not cells or table.metric in (PARSE_FAILED, *FIDELITY):
        return []
    return [
        "answers in which no choice can be read count 0 (in lmms-eval's own aggregate as well, unless its scorer draws a "
        f"choice at random): {_listed(cells)}."
    ]


def _lmms_eval_notes(table: ScoreTable) -> list[str]:
    gaps = [
        (abs(e.value - e.lmms_eval_ours), words, e)
        for words, _, e in _named(table)
        if e.value is not None and e.lmms_eval_ours is not None
    ]
    if not gaps:
        return []
    gap, words, entry = max(gaps, key=lambda found: found[0])
    scale = upstream(table.metric)
    printed = "" if scale is SAME else f", which it prints as {scale.unit} and is rescaled here,"
    if gap <= _ROUNDING:
        return [f"lmms-eval's own aggregate{printed} is the same in all {len(gaps)} cells that have one."]
    return [
        f"lmms-eval's own aggregate{printed} differs, most for {words}: {entry.lmms_eval_ours:.4f} against "
        f"{entry.value:.4f} here."
    ]
