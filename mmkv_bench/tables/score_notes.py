"""Marks (such as †) and notes of tables of scores."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from math import exp, inf

from mmkv_bench.protocols import protocol
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
from mmkv_bench.statistics.paired_tests import LARGEST_SHARE, Column
from mmkv_bench.store.schema import RESAMPLING
from mmkv_bench.tables.score_table import CONTROLS, Entry, Line, ScoreTable
from mmkv_bench.tables.stored_rows import BASELINE, FIXTURE
from mmkv_bench.tables.table import Note, Rank
from mmkv_bench.tables.text import cell_words

OVER, PREFILL, BEFORE_CUT, PACKED, RETRIEVED, PRESET = "†", "§", "¶", "‡", "◊", "∥"
FIXTURE_DATA = Note(
    "Fixture data, made to exercise the task: the scores say nothing about model or methods.", Rank.WARNING
)
NOTHING_RIGHT = "The full cache scores 0: this model cannot do this task, so its methods cannot be judged by it."
RANKS = "Ranks run from 1 + the number of methods proven better to m - the number proven worse"
_MOST_LISTED = 6  # cells that a note lists by name
_ROUNDING = 1e-5  # lmms-eval rounds MMMU's aggregate to five digits


def marks(table: ScoreTable, method: Line, entry: Entry, budget: str) -> list[str]:
    """Return the marks behind the number of a table cell, such as † for over the budget, in a fixed order."""
    audit = entry.audit
    flags = {
        OVER: audit.over > 0,
        PRESET: method.label in table.above_bold(budget),
        PREFILL: _mostly_prefill(method, entry),
        BEFORE_CUT: audit.text_before_cut > 0,
        PACKED: audit.packed > 0,
        RETRIEVED: audit.retrievable > 0,
    }
    letters = _letters(table)
    return [mark for mark, true in flags.items() if true] + [letters[reason] for reason in audit.fallbacks]


def _letters(table: ScoreTable) -> dict[str, str]:
    return {reason: chr(ord("a") + i) for i, reason in enumerate(table.fallbacks)}


def _mostly_prefill(method: Line, entry: Entry) -> bool:
    """Return True if compression could not change most answers, because their tokens come from the full prefill."""
    return method.base != BASELINE and 2 * entry.audit.from_prefill > entry.audit.n


def gate_note(verdict: str) -> Note:
    """Return a sentence of `comparable_cells.verdict` as a note: a warning if the full cache missed its expected score."""
    return Note(verdict, Rank.WARNING if " failed:" in verdict else Rank.READING)


def score_notes(table: ScoreTable) -> list[Note]:
    note_functions = (_data_notes, _failure_notes, _bold_notes, _mark_notes, _free_notes, _state_notes, _line_notes)
    return [note for part in (*note_functions, _version_notes, _origin_notes) for note in part(table)]


def _cells(table: ScoreTable) -> list[tuple[str, Line, Entry]]:
    """Return (name such as `snapkv at 64`, method, entry) of every table cell, line by line."""
    return [(cell_words(method.label, budget), method, entry) for method, budget, entry in table.cells]


def _data_notes(table: ScoreTable) -> Iterator[Note]:
    falls, entries = lower_is_better(table.metric), table.entries.values()
    if falls:
        yield Note("Smaller values are better.", Rank.MARK)
    if table.dataset.endswith(FIXTURE):
        yield FIXTURE_DATA
    if table.gate:
        yield gate_note(table.gate)
    full = table.entries.get((BASELINE, ""))
    full_scores_zero = full is not None and full.value == 0 and full.scores.n_ok > 0
    if full_scores_zero and table.compressed and table.metric not in FIDELITY and not falls:
        yield Note(NOTHING_RIGHT, Rank.WARNING)
    judges = sorted({judge for entry in entries for judge in entry.judges})
    if len(judges) == 1:
        yield Note(f"Judged by {judges[0]}.")
    elif judges:
        yield Note(f"Several judges, whose scores cannot be compared: {'; '.join(judges)}.", Rank.WARNING)
    unjudged, answers = sum(entry.scores.unjudged for entry in entries), sum(entry.scores.n for entry in entries)
    if unjudged and table.metric in MEASURES:
        text = f"Not measured: {unjudged} of {answers} answers. Run again with out=<another folder> to measure them."
        yield Note(text, Rank.WARNING)
    elif unjudged:
        text = "Not judged: answers without a judge's score, of all answers. stage=score with a judge adds the scores."
        yield Note(text, Rank.WARNING)


def _failure_notes(table: ScoreTable) -> Iterator[Note]:
    cells, largest_size = _cells(table), table.sizes[-1] if table.sizes else 0
    if any(not entry.scores.complete and not entry.scores.unjudged for entry in table.entries.values()):
        text = (
            "Cells with failures show samples ok / samples, the score with failures as 0 / the score over the "
            f"{len(table.common_ids)} samples ok in every cell."
        )
        yield Note(text, Rank.WARNING)
    smaller_cells = [f"{words} (n={e.scores.n})" for words, _, e in cells if e.scores.n < largest_size]
    if smaller_cells:
        yield Note(
            f"Fewer samples than the {largest_size} of the largest cell: {', '.join(smaller_cells)}.", Rank.WARNING
        )
    cells_of_chosen = [(words, e.audit.chosen, e.audit.n) for words, _, e in cells if e.audit.chosen]
    if cells_of_chosen:
        text = (
            "Samples chosen by id (samples=[...]) do not represent the dataset, so these cells are not compared: "
            f"{_counts_text(cells_of_chosen)}. out=<another folder> keeps such answers apart."
        )
        yield Note(text, Rank.WARNING)
    unranked = table.unranked()
    if unranked:
        budgets_text = "" if len(unranked) == len(table.columns) else f" at {', '.join(unranked)}"
        yield Note(f"No bold{budgets_text}: the cells that are compared are not ok on the same samples.", Rank.MARK)
    if table.waiting:
        unscored_texts = ", ".join(f"{cell_words(*key)} ({count})" for key, count in table.waiting.items())
        yield Note(f"Answers without scores yet (stage=score adds them): {unscored_texts}.", Rank.WARNING)


def _bold_notes(table: ScoreTable) -> Iterator[Note]:
    columns = {budget: column for budget, column in table.columns.items() if len(column.names) > 1}
    ranked_columns = {budget: column for budget in table.budgets if columns and (column := table.ranked(budget))}
    if ranked_columns:
        method_counts = sorted({len(column.names) for column in ranked_columns.values()})
        text = (
            f"Bold: not significantly worse than any other method (alpha {ALPHA:g}, corrected for m = "
            f"{' to '.join(map(str, dict.fromkeys([method_counts[0], method_counts[-1]])))}). The best method is among them with "
            f"{LEVEL:.0%} confidence."
        )
        yield Note(text, Rank.MARK)
        text = (
            f"{RANKS}, with m methods compared. A method is proven worse by a paired test at p <= {ALPHA:g} / (m - 1), or "
            "in a pair separated by Holm. Not bold is no proof of being worse."
        )
        yield Note(text, Rank.DETAIL)
    undecidable_budgets = [budget for budget, column in columns.items() if not column.decidable.any()]
    undecided = [
        budget for budget, column in columns.items() if not column.beats.any() and budget not in undecidable_budgets
    ]
    if undecided:
        yield Note(f"No bold{_at(undecided)}: no method is proven better than another.", Rank.MARK)
    if undecidable_budgets:
        text = (
            f"Not decidable{_at(undecidable_budgets)}: one document, image or video holds more than "
            f"{LARGEST_SHARE:.0%} of the samples. A test needs {round(1 / LARGEST_SHARE)} of them or more; "
            "a larger limit gives more."
        )
        yield Note(text, Rank.MARK)
    yield from _resolution(table, columns)
    yield from _study_notes(table)
    if ranked_columns:
        yield from _rival_notes(table, list(ranked_columns))


def _at(budgets: Sequence[str]) -> str:
    return f" at {', '.join(budgets)}" if any(budgets) else ""


def _resolution(table: ScoreTable, columns: Mapping[str, Column]) -> Iterator[Note]:
    """Yield a note on the smallest differences that the paired tests could detect, unless no budget can be tested."""
    aggregator = aggregate_of(table.metric)
    ratio = aggregator is not None and aggregator.ratio
    gap_texts = [
        f"{'none' if gap == inf else f'a ratio of {exp(gap):.3g}' if ratio else f'{gap:.2g}'}{budget and f' at {budget}'}"
        for budget, column in columns.items()
        if (gap := column.resolution) is not None
    ]
    if gap_texts:
        yield Note(f"Smallest difference that could be detected: {', '.join(gap_texts)}.")


def _study_notes(table: ScoreTable) -> Iterator[Note]:
    primary = table.primary
    if primary is None:
        return
    endpoint_columns = (table.dataset, table.metric, table.context["protocol"])
    if endpoint_columns == (primary.dataset, primary.metric, primary.protocol) and primary.budget in table.budgets:
        late_text = " (named after its answers were made)" * primary.late
        text = f"Primary endpoint of this study{late_text}: column {primary.budget}. All else is exploratory."
        yield Note(text, Rank.MARK)
    else:
        yield Note(f"Exploratory: the primary endpoint of this study is {primary}.")


def _rival_notes(table: ScoreTable, budgets: Sequence[str]) -> Iterator[Note]:
    """Yield notes on lines that are printed but do not compete (controls, presets, marked cells)."""
    families = [table.family(budget) for budget in budgets]
    presets = {label: of for family in families for label, of in family.presets.items()}
    controls = [method.label for method in table.methods if method.base in CONTROLS and method.base != BASELINE]
    control_texts = [f"{', '.join(controls)} (control{'s' * (len(controls) > 1)})"] if controls else []
    control_texts += [f"presets of {', '.join(dict.fromkeys(presets.values()))}"] if presets else []
    audits = [entry.audit for method, _, entry in table.cells if method.base != BASELINE]
    flag_of_mark = {OVER: "over", PACKED: "packed", RETRIEVED: "retrievable"}
    apart_marks = [mark for mark, name in flag_of_mark.items() if any(getattr(audit, name) for audit in audits)]
    control_texts += [f"cells marked {' '.join(apart_marks)}"] if apart_marks else []
    if control_texts:
        yield Note(f"Shown but not compared: {'; '.join(control_texts)}.")
    if presets:
        preset_texts = "; ".join(f"{label} (of {of})" for label, of in presets.items())
        yield Note(f"Presets, not compared beside their method: {preset_texts}.", Rank.DETAIL)
    for method in dict.fromkeys(family.method for family in families if family.method):
        yield Note(f"All lines are compared, because nearly all are presets of {method}.")


def _mark_notes(table: ScoreTable) -> Iterator[Note]:
    cells = _cells(table)
    marked: list[tuple[str, str, str]] = []  # sign, meaning, cells
    cells_over_budget = [(words, method, e.audit) for words, method, e in cells if e.audit.over]
    if cells_over_budget:
        is_pixels_only = all(method.base == "pixels" for _, method, _ in cells_over_budget)
        reason_text = ", even with the smallest pictures or the fewest frames" * is_pixels_only
        excess_texts = "; ".join(
            f"{words} by {a.excess_mean:.1%}, at most {a.excess_worst:.1%} ({a.over} of {a.n})"
            for words, _, a in cells_over_budget
        )
        marked.append((OVER, f"more entries than the budget{reason_text}", excess_texts))
    defects = [words for words, method, _ in cells_over_budget if not method.may_exceed and not method.resamples]
    if defects:
        text = f"Defect: {', '.join(defects)} over the budget, which reading=released or a paper's own formula alone may be."
        yield Note(text, Rank.WARNING)
    labels_above_bold = {label: None for budget in table.budgets or ("",) for label in sorted(table.above_bold(budget))}
    if labels_above_bold:
        meaning = "better than a bold cell, but a preset is not compared beside its method"
        marked.append((PRESET, meaning, ", ".join(labels_above_bold)))
    cells_mostly_prefill = [
        (words, e.audit.from_prefill, e.audit.n) for words, method, e in cells if _mostly_prefill(method, e)
    ]
    if cells_mostly_prefill:
        meaning = f"most answers have no token from the compressed cache (protocol={table.context['protocol']})"
        marked.append((PREFILL, meaning, _counts_text(cells_mostly_prefill)))
    cells_text_before_cut = [
        (words, e.audit.text_before_cut, e.audit.n) for words, _, e in cells if e.audit.text_before_cut
    ]
    if cells_text_before_cut:
        marked.append((BEFORE_CUT, "the compressed context held question text", _counts_text(cells_text_before_cut)))
    cells_packed = [f"{words} ({_bytes(e)})" for words, _, e in cells if e.audit.packed]
    if cells_packed:
        marked.append((PACKED, "entries in fewer bits, not comparable by entries", _first_cells(cells_packed)))
    cells_retrievable = [
        f"{words} (reaches {e.audit.reach:.1f} times as many; {_bytes(e)})"
        for words, _, e in cells
        if e.audit.retrievable
    ]
    if cells_retrievable:
        meaning = "the budget bounds the entries that a step reads, evicted ones stay within reach"
        marked.append((RETRIEVED, meaning, _first_cells(cells_retrievable)))
    for reason, letter in _letters(table).items():
        counts = [(words, e.audit.fallbacks[reason], e.audit.n) for words, _, e in cells if reason in e.audit.fallbacks]
        if counts:
            marked.append((letter, f"fallback {reason}", f"fallback {reason}: {_counts_text(counts)}"))
    if marked:
        yield Note(f"Marks: {'; '.join(f'{sign} = {meaning}' for sign, meaning, _ in marked)}.", Rank.MARK)
    for sign, _, excess_texts in marked:
        yield Note(f"{sign} {excess_texts}.", Rank.DETAIL)


def _counts_text(cells: Sequence[tuple[str, int, int]]) -> str:
    """Return cells with counts as `snapkv at 64 (3 of 500)`; many cells only as a range of counts.

    cells: (name of the table cell, number of affected answers, number of answers).
    """
    if len(cells) > _MOST_LISTED:
        counts = sorted(count for _, count, _ in cells)
        return f"{len(cells)} cells, {counts[0]} to {counts[-1]} answers each of {max(n for *_, n in cells)}"
    return "; ".join(f"{words} ({count} of {n})" for words, count, n in cells)


def _bytes(entry: Entry) -> str:
    """Return a text on the bytes held, as a share of the full cache's bytes. For rows without that number (older rows) the text
    is on bytes of entries and metadata."""
    audit = entry.audit
    host = f"{audit.host:.0%} on the host" if audit.host else ""
    if audit.held is not None:
        return f"holds {audit.held:.0%} of full's bytes{host and f', {host}'}"
    return f"{audit.device:.0%} of full's bytes on the device{host and f' and {host}'}"


def _first_cells(cells: Sequence[str]) -> str:
    more_text = f"; and {len(cells) - _MOST_LISTED} more cells" if len(cells) > _MOST_LISTED else ""
    return "; ".join(cells[:_MOST_LISTED]) + more_text


def _free_notes(table: ScoreTable) -> Iterator[Note]:
    """Yield the protocol's caveat, or the share of answer tokens that no method can affect, unless `full` is the only method."""
    name = table.context["protocol"]
    caveat = protocol(name).caveat
    if table.compressed and caveat is not None:
        yield Note(f"protocol={name}: {caveat}")
    elif table.compressed and table.free is not None:
        text = (
            f"Under protocol={name} the first token comes from the full cache: {table.free:.0%} of the answer tokens cannot be "
            "affected by any method."
        )
        yield Note(f"Answers are mostly free. {text}", Rank.WARNING) if table.mostly_free else Note(text)


def _state_notes(table: ScoreTable) -> Iterator[Note]:
    """Yield a note on the share of the model's state that each budget leaves, if only some layers are compressed."""
    shares: dict[str, list[float]] = {}
    for _, budget, entry in table.cells:
        if budget and entry.audit.of_all:
            shares.setdefault(budget, []).append(entry.audit.of_all)
    share_texts = [f"{sum(values) / len(values):.0%} stays at {budget}" for budget, values in shares.items()]
    if share_texts:
        yield Note(
            f"Budgets are of compressed layers. With windows and recurrent states of the others, {', '.join(share_texts)}."
        )


def _line_notes(table: ScoreTable) -> Iterator[Note]:
    for method in table.methods:
        entries = [e for (label, _), e in table.entries.items() if label == method.label]
        seeds = sorted({seed for entry in entries for seed in entry.seeds})
        if len(seeds) > 1:
            has_uneven_seeds = any(entry.uneven_seeds for entry in entries)
            text = f"{method.label}: mean over seeds {', '.join(map(str, seeds))} within each sample"
            text += f"{'; not every sample has every seed' * has_uneven_seeds}."
            yield Note(text, Rank.READING if has_uneven_seeds else Rank.DETAIL)
        if method.is_alias:
            text = f"{method.label}: the method {method.base} with its default parameters, under another name."
            yield Note(text, Rank.DETAIL)
        if method.resamples:
            control_text = f"a control that evicts nothing and {RESAMPLING.get(method.base)}"
            yield Note(f"{method.label}: {control_text}. Its entries are the most that do not exceed the budget.")
        if method.cheats:
            yield Note(f"{method.label} (ceiling): knows the full cache's own answer, so it is not compared.")
        if method.tuned:
            values = ", ".join(f"{key}={value}" for key, value in sorted(json.loads(method.parameters).items()))
            yield Note(f"{method.label} (tuned): {values}.", Rank.DETAIL)


def _version_notes(table: ScoreTable) -> Iterator[Note]:
    """Yield notes on methods whose code has several versions: which are left out, and whether the shown ones differ by budget."""
    for label, budgets in table.versions.items():
        older_versions = [
            f"{budget or 'all budgets'} (version {', '.join(map(str, versions[1:]))}, shown: {versions[0]})"
            for budget, versions in budgets.items()
            if len(versions) > 1
        ]
        if older_versions:
            yield Note(
                f"{label}: older versions of its numbers are left out at {', '.join(older_versions)}.", Rank.MARK
            )
        labels_by_version: dict[int, list[str]] = {}
        for budget, versions in budgets.items():
            labels_by_version.setdefault(versions[0], []).append(budget or "all budgets")
        if len(labels_by_version) > 1:
            version_texts = " and ".join(
                f"{version} at {', '.join(of)}" for version, of in sorted(labels_by_version.items())
            )
            yield Note(f"{label}: the budgets show different versions of its numbers: {version_texts}.", Rank.WARNING)


def _origin_notes(table: ScoreTable) -> Iterator[Note]:
    kinds = sorted(table.cpus.items(), key=lambda kind: (-kind[1], kind[0]))
    if len(kinds) > 1:
        yield Note(f"Cells were made on several kinds of CPU: {', '.join(f'{kind} ({n})' for kind, n in kinds)}.")
    if table.weights_files:
        files = "; ".join(table.weights_files)
        yield Note(f"Weights: {files}, dequantised. These are not the weights that the model's publisher trained.")
    labels_by_artefacts: dict[tuple[str, ...], list[str]] = {}
    for label, artefacts in table.calibrations.items():
        labels_by_artefacts.setdefault(artefacts, []).append(label)
    for artefacts, labels in labels_by_artefacts.items():
        reader_text = f"{', '.join(labels)} by {' and '.join(artefacts)}"
        yield Note(f"Calibrated: {reader_text}. Other methods have not seen these data.")
    unread_cells = [(words, e.unread, e.audit.n or e.scores.n) for words, _, e in _cells(table) if e.unread]
    if unread_cells and table.metric not in (PARSE_FAILED, *FIDELITY):
        text = (
            f"Answers in which no choice can be read count as 0: {_counts_text(unread_cells)}. lmms-eval does the same, unless "
            "its scorer draws a choice at random."
        )
        yield Note(text, Rank.WARNING)
    yield from _lmms_eval_notes(table)


def _lmms_eval_notes(table: ScoreTable) -> Iterator[Note]:
    gaps = [
        (abs(e.value - e.lmms_eval_ours), cell_name, e)
        for cell_name, _, e in _cells(table)
        if e.value is not None and e.lmms_eval_ours is not None
    ]
    if not gaps:
        return
    largest_gap, cell_name, entry = max(gaps, key=lambda one: one[0])
    scale = upstream(table.metric)
    aggregate = "lmms-eval's own aggregate" + ("" if scale is SAME else f" ({scale.unit}, rescaled here)")
    if largest_gap <= _ROUNDING:
        yield Note(f"{aggregate} is the same in all {len(gaps)} cells that have one.", Rank.DETAIL)
    else:
        numbers = f"{entry.lmms_eval_ours:.4f} against {entry.value:.4f}"
        yield Note(f"{aggregate} differs, most for {cell_name}: {numbers} here.", Rank.WARNING)
