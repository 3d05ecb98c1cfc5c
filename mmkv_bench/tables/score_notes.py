"""Notes of a table of scores, each with its rank."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import exp, inf

from mmkv_bench.protocols import protocol
from mmkv_bench.statistics.column import LARGEST_SHARE, Column
from mmkv_bench.statistics.intervals import ALPHA, LEVEL
from mmkv_bench.statistics.metric_kinds import (
    FIDELITY,
    MEASURES,
    PARSE_FAILED,
    SAME,
    aggregate_of,
    lower_is_better,
    upstream,
)
from mmkv_bench.store.schema import RESAMPLING
from mmkv_bench.tables.notes import (
    BEFORE_CUT,
    FIXTURE_DATA,
    OVER,
    PACKED,
    PREFILL,
    PRESET,
    RANKS,
    RETRIEVED,
    fallback_letters,
    gate_rank,
    mostly_prefill,
    notes_that_hold,
)
from mmkv_bench.tables.rows import BASELINE, FIXTURE
from mmkv_bench.tables.score_table import CONTROLS, Entry, Line, ScoreTable
from mmkv_bench.tables.table import Note, Rank
from mmkv_bench.tables.text import cell_words

NOTHING_RIGHT = "The full cache scores 0: this model cannot do this task, so its methods cannot be judged by it."
_MANY = 6  # cells that a note lists by name
_ROUNDING = 1e-5  # MMMU's aggregate comes with five digits


def score_notes(table: ScoreTable) -> list[Note]:
    """Return the notes of a table of scores."""
    return [
        *_data_notes(table),
        *_failure_notes(table),
        *_bold_notes(table),
        *_mark_notes(table),
        *_free_notes(table),
        *_state_notes(table),
        *_line_notes(table),
        *_version_notes(table),
        *_origin_notes(table),
    ]


def _cells(table: ScoreTable) -> list[tuple[str, Line, Entry]]:
    """Return every cell of the table once, line by line: (name such as `snapkv at 64`, method, entry)."""
    return [(cell_words(method.label, budget), method, entry) for method, budget, entry in table.cells]


def _data_notes(table: ScoreTable) -> list[Note]:
    """Return notes on the metric's direction, the data, the full-cache check, and judges."""
    entries = table.entries.values()
    judges = sorted({judge for entry in entries for judge in entry.judges})
    n_unjudged, n_answers = sum(entry.scores.unjudged for entry in entries), sum(entry.scores.n for entry in entries)
    missing = "Not judged: answers without a judge's score, of all answers. stage=score with a judge adds the scores."
    if table.metric in MEASURES:
        missing = (
            f"Not measured: {n_unjudged} of {n_answers} answers. Run again with out=<another folder> to measure them."
        )
    return notes_that_hold(
        (lower_is_better(table.metric), Rank.MARK, "Smaller values are better."),
        (table.dataset.endswith(FIXTURE), Rank.WARNING, FIXTURE_DATA),
        (table.gate, gate_rank(table.gate or ""), table.gate or ""),
        (_nothing_right(table), Rank.WARNING, NOTHING_RIGHT),
        (len(judges) == 1, Rank.READING, f"Judged by {''.join(judges)}."),
        (len(judges) > 1, Rank.WARNING, f"Several judges, whose scores cannot be compared: {'; '.join(judges)}."),
        (n_unjudged, Rank.WARNING, missing),
    )


def _nothing_right(table: ScoreTable) -> bool:
    """Tell whether the full cache scores 0 and a larger value would be better."""
    full = table.entries.get((BASELINE, ""))
    worst = full is not None and full.value == 0 and full.scores.n_ok > 0
    return worst and table.compressed and table.metric not in FIDELITY and not lower_is_better(table.metric)


def _failure_notes(table: ScoreTable) -> list[Note]:
    cells, most = _cells(table), table.sizes[-1] if table.sizes else 0
    failed = any(not entry.scores.complete and not entry.scores.unjudged for entry in table.entries.values())
    short = [f"{words} (n={e.scores.n})" for words, _, e in cells if e.scores.n < most]
    chosen = [(words, e.audit.chosen, e.audit.n) for words, _, e in cells if e.audit.chosen]
    unranked = table.unranked()
    at = "" if len(unranked) == len(table.columns) else f" at {', '.join(unranked)}"
    waiting_text = ", ".join(f"{cell_words(*key)} ({count})" for key, count in table.waiting.items())
    common = len(table.common_ids) if failed else 0
    return notes_that_hold(
        (
            failed,
            Rank.WARNING,
            "Cells with failures show samples ok / samples, the score with failures as 0 / the score over the "
            f"{common} samples ok in every cell.",
        ),
        (short, Rank.WARNING, f"Fewer samples than the {most} of the largest cell: {', '.join(short)}."),
        (
            chosen,
            Rank.WARNING,
            "Samples chosen by id (samples=[...]) do not represent the dataset, so these cells are not compared: "
            f"{_listed(chosen)}. out=<another folder> keeps such answers apart.",
        ),
        (unranked, Rank.MARK, f"No bold{at}: the cells that are compared are not ok on the same samples."),
        (waiting_text, Rank.WARNING, f"Answers without scores yet (stage=score adds them): {waiting_text}."),
    )


def _bold_notes(table: ScoreTable) -> list[Note]:
    """Return notes on the meaning of bold, budgets without bold, and lines that are not compared."""
    columns = {budget: column for budget, column in table.columns.items() if len(column.names) > 1}
    if not columns:
        return _study_notes(table)
    ranked = {budget: column for budget in table.budgets if (column := table.ranked(budget))}
    sizes = sorted({len(column.names) for column in ranked.values()})
    m = " to ".join(map(str, dict.fromkeys([*sizes[:1], *sizes[-1:]])))
    blind = [budget for budget, column in columns.items() if not column.decidable.any()]
    undecided = [budget for budget, column in columns.items() if not column.beats.any() and budget not in blind]
    notes = notes_that_hold(
        (
            ranked,
            Rank.MARK,
            f"Bold: not significantly worse than any other method (alpha {ALPHA:g}, corrected for m = {m}). The best method "
            f"is among them with {LEVEL:.0%} confidence.",
        ),
        (
            ranked,
            Rank.DETAIL,
            f"{RANKS}, with m methods compared. A method is proven worse by a paired test at p <= {ALPHA:g} / (m - 1), or "
            "in a pair separated by Holm. "
            "Not bold is no proof of being worse.",
        ),
        (undecided, Rank.MARK, f"No bold{_at(undecided)}: no method is proven better than another."),
        (
            blind,
            Rank.MARK,
            f"Not decidable{_at(blind)}: one document, image or video holds more than {LARGEST_SHARE:.0%} of the samples. "
            f"A test needs {round(1 / LARGEST_SHARE)} of them or more; a larger limit gives more.",
        ),
    )
    notes += _resolution(table, columns) + _study_notes(table)
    return notes + (_rival_notes(table, list(ranked)) if ranked else [])


def _at(budgets: Sequence[str]) -> str:
    return f" at {', '.join(budgets)}" if any(budgets) else ""


def _resolution(table: ScoreTable, columns: Mapping[str, Column]) -> list[Note]:
    """Return a note on the smallest difference that each column could have separated; nothing if no column is decidable."""
    gaps = {budget: gap for budget, column in columns.items() if (gap := column.resolution) is not None}
    if not gaps:
        return []
    aggregator = aggregate_of(table.metric)
    ratio = aggregator is not None and aggregator.ratio
    words = [
        f"{'none' if gap == inf else f'a ratio of {exp(gap):.3g}' if ratio else f'{gap:.2g}'}{budget and f' at {budget}'}"
        for budget, gap in gaps.items()
    ]
    return [Note(f"Smallest difference that could be detected: {', '.join(words)}.")]


def _study_notes(table: ScoreTable) -> list[Note]:
    primary = table.primary
    if primary is None:
        return []
    here = (table.dataset, table.metric, table.context["protocol"])
    if here == (primary.dataset, primary.metric, primary.protocol) and primary.budget in table.budgets:
        late = " (named after its answers were made)" * primary.late
        return [
            Note(f"Primary endpoint of this study{late}: column {primary.budget}. All else is exploratory.", Rank.MARK)
        ]
    return [Note(f"Exploratory: the primary endpoint of this study is {primary}.")]


def _rival_notes(table: ScoreTable, budgets: Sequence[str]) -> list[Note]:
    """Return notes on the lines that are shown but not compared."""
    families = [table.family(budget) for budget in budgets]
    presets = {label: of for family in families for label, of in family.presets.items()}
    controls = [method.label for method in table.methods if method.base in CONTROLS and method.base != BASELINE]
    words = [f"{', '.join(controls)} (control{'s' * (len(controls) > 1)})"] if controls else []
    words += [f"presets of {', '.join(dict.fromkeys(presets.values()))}"] if presets else []
    audits = [entry.audit for _, method, entry in _cells(table) if method.base != BASELINE]
    apart = {OVER: "over", PACKED: "packed", RETRIEVED: "retrievable"}
    apart_marks = [mark for mark, name in apart.items() if any(getattr(audit, name) for audit in audits)]
    words += [f"cells marked {' '.join(apart_marks)}"] if apart_marks else []
    notes = [Note(f"Shown but not compared: {'; '.join(words)}.")] if words else []
    if presets:
        named = "; ".join(f"{label} (of {of})" for label, of in presets.items())
        notes.append(Note(f"Presets, not compared beside their method: {named}.", Rank.DETAIL))
    ablated = dict.fromkeys(family.method for family in families if family.method)
    return notes + [Note(f"All lines are compared, because nearly all are presets of {method}.") for method in ablated]


def _mark_notes(table: ScoreTable) -> list[Note]:
    """Return one note that explains all marks of the table, and for each mark a note that lists its cells."""
    cells = _cells(table)
    meanings: dict[str, str] = {}
    details = []

    def mark(sign: str, meaning: str, where: str) -> None:
        meanings[sign] = meaning
        details.append(Note(f"{sign} {where}.", Rank.DETAIL))

    over = [(method, e, words) for words, method, e in cells if e.audit.over]
    excess = [
        (f"{words} by {e.audit.excess_mean:.1%}, at most {e.audit.excess_worst:.1%}", e.audit.over, e.audit.n)
        for _, e, words in over
    ]
    defects = [words for method, _, words in over if not method.may_exceed and not method.resamples]
    if over:
        pictures = all(method.base == "pixels" for method, _, _ in over)
        why = ", even with the smallest pictures or the fewest frames" * pictures
        mark(OVER, f"more entries than the budget{why}", _listed(excess, shorten=False))
    above = {label: None for budget in table.budgets or ("",) for label in sorted(table.above_bold(budget))}
    if above:
        mark(PRESET, "better than a bold cell, but a preset is not compared beside its method", ", ".join(above))
    prefill = [(words, e.audit.from_prefill, e.audit.n) for words, method, e in cells if mostly_prefill(method, e)]
    if prefill:
        name = table.context["protocol"]
        mark(PREFILL, f"most answers have no token from the compressed cache (protocol={name})", _listed(prefill))
    cut = [(words, e.audit.text_before_cut, e.audit.n) for words, _, e in cells if e.audit.text_before_cut]
    if cut:
        mark(BEFORE_CUT, "the compressed context held question text", _listed(cut))
    packed = [f"{words} ({_bytes(e)})" for words, _, e in cells if e.audit.packed]
    if packed:
        mark(PACKED, "entries in fewer bits, not comparable by entries", _some(packed))
    retrieved = [
        f"{words} (reaches {e.audit.reach:.1f} times as many; {_bytes(e)})"
        for words, _, e in cells
        if e.audit.retrievable
    ]
    if retrieved:
        meaning = "the budget bounds the entries that a step reads, evicted ones stay within reach"
        mark(RETRIEVED, meaning, _some(retrieved))
    for reason, letter in fallback_letters(table).items():
        counts = [(words, e.audit.fallbacks[reason], e.audit.n) for words, _, e in cells if reason in e.audit.fallbacks]
        if counts:
            mark(letter, f"fallback {reason}", f"fallback {reason}: {_listed(counts)}")
    legend = "; ".join(f"{sign} = {meaning}" for sign, meaning in meanings.items())
    defect = (
        f"Defect: {', '.join(defects)} over the budget, which reading=released or a paper's own formula alone may be."
    )
    return [*notes_that_hold((defects, Rank.WARNING, defect), (legend, Rank.MARK, f"Marks: {legend}.")), *details]


def _listed(cells: Sequence[tuple[str, int, int]], shorten: bool = True) -> str:
    """List the affected answers of each cell: `snapkv at 64 (3 of 500)`. For many cells give only the range of counts.

    cells: (name of the cell, affected answers, all answers)."""
    if shorten and len(cells) > _MANY:
        counts = sorted(count for _, count, _ in cells)
        return f"{len(cells)} cells, {counts[0]} to {counts[-1]} answers each of {max(n for *_, n in cells)}"
    return "; ".join(f"{words} ({count} of {n})" for words, count, n in cells)


def _bytes(entry: Entry) -> str:
    """Describe a cell's bytes as shares of the full cache's bytes: all bytes that the cache holds, or for older rows, which lack
    that number, the bytes of entries and metadata on the device and on the host."""
    if entry.audit.held is not None:
        host = f", {entry.audit.host:.0%} on the host" if entry.audit.host else ""
        return f"holds {entry.audit.held:.0%} of full's bytes{host}"
    host = f" and {entry.audit.host:.0%} on the host" if entry.audit.host else ""
    return f"{entry.audit.device:.0%} of full's bytes on the device{host}"


def _some(cells: Sequence[str]) -> str:
    more = f"; and {len(cells) - _MANY} more cells" if len(cells) > _MANY else ""
    return "; ".join(cells[:_MANY]) + more


def _free_notes(table: ScoreTable) -> list[Note]:
    """Return the protocol's caveat, or the share of answer tokens that no method can affect; nothing for `full` alone."""
    if not table.compressed:
        return []
    name = table.context["protocol"]
    caveat = protocol(name).caveat
    if caveat is not None:
        return [Note(f"protocol={name}: {caveat}")]
    if table.free is None:
        return []
    text = (
        f"Under protocol={name} the first token comes from the full cache: {table.free:.0%} of the answer tokens cannot be "
        "affected by any method."
    )
    if table.mostly_free:
        return [Note(f"Answers are mostly free. {text}", Rank.WARNING)]
    return [Note(text)]


def _state_notes(table: ScoreTable) -> list[Note]:
    """If only some layers of the model are compressed, return a note on the share of the whole state that each budget leaves."""
    shares: dict[str, list[float]] = {}
    for _, budget, entry in table.cells:
        if budget and entry.audit.of_all:
            shares.setdefault(budget, []).append(entry.audit.of_all)
    words = [f"{sum(values) / len(values):.0%} stays at {budget}" for budget, values in shares.items()]
    text = f"Budgets are of compressed layers. With windows and recurrent states of the others, {', '.join(words)}."
    return [Note(text, Rank.READING)] if words else []


def _line_notes(table: ScoreTable) -> list[Note]:
    notes: list[Note] = []
    for method in table.methods:
        entries = [e for (label, _), e in table.entries.items() if label == method.label]
        seeds = sorted({seed for entry in entries for seed in entry.seeds})
        uneven = any(entry.uneven_seeds for entry in entries)
        mean = f"mean over seeds {', '.join(map(str, seeds))} within each sample"
        values = ", ".join(f"{key}={value}" for key, value in sorted(json.loads(method.parameters).items()))
        notes += notes_that_hold(
            (
                len(seeds) > 1,
                Rank.READING if uneven else Rank.DETAIL,
                f"{method.label}: {mean}{'; not every sample has every seed' * uneven}.",
            ),
            (
                method.renamed,
                Rank.DETAIL,
                f"{method.label}: the method {method.base} with its default parameters, under another name.",
            ),
            (
                method.resamples,
                Rank.READING,
                f"{method.label}: a control that evicts nothing and {RESAMPLING.get(method.base)}. Its entries are the most that "
                "do not exceed the budget.",
            ),
            (
                method.cheats,
                Rank.READING,
                f"{method.label} (ceiling): knows the full cache's own answer, so it is not compared.",
            ),
            (method.tuned, Rank.DETAIL, f"{method.label} (tuned): {values}."),
        )
    return notes


def _version_notes(table: ScoreTable) -> list[Note]:
    """Return notes on numbers of older versions of a method, which are left out, and on lines that show different versions of
    their method at different budgets."""
    notes = []
    for label, budgets in table.versions.items():
        older = [
            f"{budget or 'all budgets'} (version {', '.join(map(str, found[1:]))}, shown: {found[0]})"
            for budget, found in budgets.items()
            if len(found) > 1
        ]
        if older:
            notes.append(Note(f"{label}: older versions of its numbers are left out at {', '.join(older)}.", Rank.MARK))
        shown: dict[int, list[str]] = {}
        for budget, found in budgets.items():
            shown.setdefault(found[0], []).append(budget or "all budgets")
        if len(shown) > 1:
            words = " and ".join(f"{version} at {', '.join(of)}" for version, of in sorted(shown.items()))
            text = f"{label}: the budgets show different versions of its numbers: {words}."
            notes.append(Note(text, Rank.WARNING))
    return notes


def _origin_notes(table: ScoreTable) -> list[Note]:
    """Return notes on kinds of CPU, quantised weights, calibrations, unreadable answers, and lmms-eval's aggregates."""
    kinds = sorted(table.cpus.items(), key=lambda kind: (-kind[1], kind[0]))
    readers: dict[tuple[str, ...], list[str]] = {}
    for label, artefacts in table.calibrations.items():
        readers.setdefault(artefacts, []).append(label)
    unread = [(words, e.unread, e.audit.n or e.scores.n) for words, _, e in _cells(table) if e.unread]
    cpus = f"Cells were made on several kinds of CPU: {', '.join(f'{kind} ({n})' for kind, n in kinds)}."
    choices = (
        f"Answers in which no choice can be read count as 0: {_listed(unread)}. lmms-eval does the same, unless its scorer draws "
        "a choice at random."
    )
    files = "; ".join(table.weights_files)
    quantised = f"Weights: {files}, dequantised. These are not the weights that the model's publisher trained."
    return [
        *notes_that_hold((len(kinds) > 1, Rank.READING, cpus), (table.weights_files, Rank.READING, quantised)),
        *(
            Note(
                f"Calibrated: {', '.join(labels)} by {' and '.join(artefacts)}. Other methods have not seen these data."
            )
            for artefacts, labels in readers.items()
        ),
        *notes_that_hold((unread and table.metric not in (PARSE_FAILED, *FIDELITY), Rank.WARNING, choices)),
        *_lmms_eval_notes(table),
    ]


def _lmms_eval_notes(table: ScoreTable) -> list[Note]:
    gaps = [
        (abs(e.value - e.lmms_eval_ours), words, e)
        for words, _, e in _cells(table)
        if e.value is not None and e.lmms_eval_ours is not None
    ]
    if not gaps:
        return []
    gap, words, entry = max(gaps, key=lambda found: found[0])
    scale = upstream(table.metric)
    aggregate = "lmms-eval's own aggregate" + ("" if scale is SAME else f" ({scale.unit}, rescaled here)")
    if gap <= _ROUNDING:
        return [Note(f"{aggregate} is the same in all {len(gaps)} cells that have one.", Rank.DETAIL)]
    numbers = f"{entry.lmms_eval_ours:.4f} against {entry.value:.4f}"
    return [Note(f"{aggregate} differs, most for {words}: {numbers} here.", Rank.WARNING)]
