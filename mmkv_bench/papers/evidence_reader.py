"""Computation of the numbers of the papers' tables (`Address`) from stored rows.

A "cell" is a stored setting: one model, dataset, method, budget, protocol and seed, named by a hash.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mmkv_bench.config.files import content
from mmkv_bench.config.names import UNAVAILABLE
from mmkv_bench.papers import margins
from mmkv_bench.papers.address import STAND_IN, SYNTHETIC, Address, MethodSettings, file_of, samples_of
from mmkv_bench.papers.diagnostic_curves import DiagnosticEvidence
from mmkv_bench.papers.evidence import Evidence
from mmkv_bench.papers.measurement import (
    Measurement,
    Questions,
    Shared,
    State,
    average,
    differing_facts,
    subtract,
    unique_words,
)
from mmkv_bench.papers.non_score_metrics import DIAGNOSTICS, PASSES, REDUCTIONS, cache_size, missing_input, planned_peak
from mmkv_bench.statistics.intervals import intervals
from mmkv_bench.tables.cost_rows import ALONE, passes
from mmkv_bench.tables.metric_rows import headlines
from mmkv_bench.tables.sample_scores import Sheet
from mmkv_bench.tables.score_consistency import drop_stale_scores
from mmkv_bench.tables.stored_rows import SAMPLE_COLUMNS, frame

if TYPE_CHECKING:
    import pandas as pd

    from mmkv_bench.store.store import Store


class EvidenceReader:
    """Reader of numbers from the evidence. addresses: all addresses that will be measured."""

    def __init__(self, evidence: Evidence, addresses: Sequence[Address]) -> None:
        self.evidence = evidence
        self._tables = StoreTables(evidence, {one for address in addresses for one in (address, *_operands(address))})
        self._measurements: dict[tuple[Address, Shared | None], Measurement] = {}

    def measure(
        self, address: Address, parts: Sequence[Address] = (), like: Sequence[Shared | None] = ()
    ) -> Measurement:
        """Return our number at `address`, or the reason why there is none.

        Args:
            address: address of the number.
            parts: for a mean, addresses of the averaged numbers.
            like: `Measurement.shared` that the rows must have, one item per part, or one item without parts; (): any rows.
        """
        if parts:
            return average([self._one(*one) for one in zip(parts, like or [None] * len(parts), strict=True)])
        return self._one(address, *like)

    def _one(self, address: Address, like: Shared | None = None) -> Measurement:
        if (address, like) not in self._measurements:
            measurement = _fill_without_run(address, self._number(address, like))
            if address.minus is not None:
                measurement = self._difference(address, measurement)
            if measurement.rows and not self.evidence.stand_in:
                commits = self.evidence.cells.iloc[list(measurement.rows)]["git_commit"].unique()
                margin_doubts = (margins.why_unjudged(None if commit != commit else commit) for commit in commits)
                measurement = replace(
                    measurement, mismatches=unique_words(measurement.mismatches, tuple(filter(None, margin_doubts)))
                )
            self._measurements[address, like] = measurement
        return self._measurements[address, like]

    def _number(self, address: Address, like: Shared | None = None) -> Measurement:
        if address.model in UNAVAILABLE:
            missing_reason = UNAVAILABLE[address.model].why.partition(" (")[0].partition(", and ")[0]
            return Measurement(State.CANNOT_RUN, f"{UNAVAILABLE[address.model].title} {missing_reason}")
        if address.metric in DIAGNOSTICS:
            return self._diagnostics.measure(address, _whole_size(address))
        match = self.evidence.match(address, like)
        if match.state not in (State.MEASURED, State.PART):
            return match
        is_timed = address.dataset in SYNTHETIC
        read_number = self._passes if is_timed else self._reduction if address.metric in REDUCTIONS else self._score
        measurement = replace(read_number(address, match, self._hashes(match)), rows=match.rows)
        if measurement.value is None:
            return measurement
        excess, remarks = ((), ()) if is_timed or self.evidence.stand_in else self._excess_and_remarks(match)
        return replace(
            measurement,
            mismatches=unique_words(match.mismatches, measurement.mismatches, excess),
            unstated=unique_words(match.unstated, remarks),
            passed=match.passed,
            shared=match.shared,
            questions=(Questions() if is_timed else self._questions(address, match),),
        )

    def _hashes(self, match: Measurement) -> list[str]:
        return [self.evidence.cell(row)[1] for row in match.rows]

    def _excess_and_remarks(self, match: Measurement) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return (mismatches, remarks) on answers over the budget, with fallbacks, or with question text before a cut.

        Answers over the budget are a mismatch, unless the paper's formula or code keeps more entries.
        """
        counts: Counter[str] = Counter()
        for cell in self._hashes(match):
            counts.update(self._tables.counts.get(cell, {}))
        first_cell = self.evidence.cells.iloc[match.rows[0]]
        may_exceed = first_cell["reading"] == "released" or json.loads(first_cell["parameters"] or "{}").get(
            "over_budget"
        )
        answers, answers_over_budget = counts.pop(ANSWERS, 0), counts.pop(OVER, 0)
        excess = (f"{answers_over_budget:,} of {answers:,} answers kept {OVER}",) if answers_over_budget else ()
        remarks = tuple(f"{what} in {n:,} of {answers:,} answers" for what, n in sorted(counts.items()))
        return ((), excess + remarks) if may_exceed else (excess, remarks)

    def _questions(self, address: Address, match: Measurement) -> Questions:
        cells = self._hashes(match)
        prompts = [self._tables.prompts[cell] for cell in cells]
        prompt_digests = tuple(sorted({int(each.sum()) for each in prompts}))
        return Questions(self._tables.scorers.get((cells[0], address.metric), ()), len(prompts[0]), prompt_digests)

    def _score(self, address: Address, match: Measurement, cells: Sequence[str]) -> Measurement:
        sheet_and_cells = self._tables.sheet(cells, address.metric)
        if sheet_and_cells is None:
            return Measurement(State.AMBIGUOUS, "two stores hold the same cell with other scores")
        sheet, cell_numbers = sheet_and_cells
        scores = sheet.scores(cell_numbers, address.metric)
        answers = [len(self._tables.prompts[cell]) for cell in cells]
        intended_samples = _whole_size(address)
        waiting_measurement = Measurement(State.WAITING, n=scores.n or min(answers), of=intended_samples)
        if not scores.n:
            if not any(answers):
                return Measurement(State.NOT_RUN)
            needs_judge = content("dataset", file_of(address.dataset))["about"].get("judge") == "needed"
            return replace(
                waiting_measurement, why="for a judge" if needs_judge else "for its scores: run with stage=score"
            )
        if scores.n < max(answers):  # fewer scores than answers: unscored answers, or a metric of one kind of question
            unscored = max(n - self._tables.scored.get(cell, 0) for n, cell in zip(answers, cells, strict=True))
            if unscored > 0:
                waiting_reason = f"for the scores of {unscored} of {max(answers)} answers"
                return replace(waiting_measurement, why=waiting_reason, n=min(answers))
        if scores.unjudged:
            return replace(waiting_measurement, why=f"for a judge: {scores.unjudged} of {scores.n} answers")
        if scores.n_ok < scores.n:
            return replace(
                waiting_measurement, state=State.FAILED, why=f"{scores.n - scores.n_ok} of {scores.n} samples"
            )
        scale = margins.margin(address.dataset, address.metric).scale
        by_seed = [sheet.scores([place], address.metric) for place in cell_numbers] if len(cell_numbers) > 1 else []
        headline, *seeds = headlines([scores, *by_seed], address.dataset, address.metric)
        value, low, high = (
            None if headline[key] is None else scale * headline[key] for key in ("value", "low", "high")
        )
        values = tuple(scale * one["value"] for one in seeds if one["value"] is not None)
        surplus_answers = (
            (f"{max(answers):,} answers, the data set has {intended_samples:,}",)
            if intended_samples and max(answers) > intended_samples
            else ()
        )
        state, waiting_reason = _completeness(min(answers), intended_samples, match)
        return Measurement(
            state,
            waiting_reason,
            value,
            low,
            high,
            scores.n,
            intended_samples,
            surplus_answers,
            seeds=values,
            scores=scores,
        )

    def _reduction(self, address: Address, match: Measurement, cells: Sequence[str]) -> Measurement:
        reduction = REDUCTIONS[address.metric]
        if not {*cells} <= {*self._tables.responses}:
            return Measurement(State.NOT_RUN)
        tables = [self._tables.responses[cell] for cell in cells]
        n, intended_samples = min(map(len, tables)), _whole_size(address)
        failed = sum(int((table["status"] != "ok").sum()) for table in tables)
        if failed:
            return Measurement(State.FAILED, f"{failed} samples", n=n, of=intended_samples)
        if reduction.column == "tpot_s" and any((table["measured"] != "own").any() for table in tables):
            return Measurement(
                State.CANNOT_RUN,
                "runs that share prefills have no times by method; use sharing=off",
                n=n,
                of=intended_samples,
            )
        state, why = _completeness(n, intended_samples, match)
        if not reduction.layers:
            values = np.mean([table[reduction.column].to_numpy(np.float64) for table in tables], axis=0) / reduction.per
            (interval,) = intervals(
                [(values, tables[0]["cluster"].astype(str).to_numpy())], address.dataset, share=False
            )
            return Measurement(state, why, float(values.mean()), interval.low, interval.high, n, intended_samples)
        ratios = _ratios(tables[0])
        if reduction.layers == "std":
            return Measurement(state, why, float(ratios.std(axis=0).mean()), n=len(ratios), of=intended_samples)
        (profile,) = _operands(address)
        profile_match = self.evidence.match(profile, *match.shared)
        if profile_match.state not in (State.MEASURED, State.PART):
            return Measurement(State.NOT_RUN, f"it needs {profile.method} too")
        profile_ratios = _ratios(self._tables.responses[self._hashes(profile_match)[0]]).mean(axis=0)
        return Measurement(
            state, why, float(np.abs(ratios - profile_ratios).mean()), n=len(ratios), of=intended_samples
        )

    def _passes(self, address: Address, match: Measurement, cells: Sequence[str]) -> Measurement:
        reduction, table = PASSES[address.metric], self._tables.timings.get(cells[0])
        if table is None:
            return Measurement(State.NOT_RUN)
        shape_columns = {"prompt_tokens": address.length, "new_tokens": address.new_tokens, "batch": address.batch or 1}
        for column, value in {**shape_columns, "batch_prefill": ALONE}.items():
            table = table[table[column] == value]
        if not len(table):
            return Measurement(State.NOT_RUN)
        failed = table["status"][table["status"] != "ok"]
        if len(failed):
            return Measurement(State.FAILED, str(failed.iloc[0]))
        values = table[reduction.column].dropna().to_numpy(np.float64) / reduction.per
        if not len(values):
            return Measurement(State.NOT_RUN, f"no pass holds {reduction.column}")
        disturbances = sorted({str(what) for one in table["disturbed"].dropna() for what in one})
        mismatches = (f"disturbed by {', '.join(disturbances)}",) if disturbances else ()
        return Measurement(State.MEASURED, "", float(np.median(values)), n=len(values), mismatches=mismatches)

    def _difference(self, address: Address, minuend: Measurement) -> Measurement:
        (base,) = _operands(address)
        subtrahend_number = self._number(base, *minuend.shared)
        if minuend.value is not None and subtrahend_number.state == State.NOT_RUN:
            names = differing_facts(minuend, self._number(base).shared)
            mismatch_text = f"{address.minus} was run with other {names}" if names else ""
            return replace(subtrahend_number, why=mismatch_text, rows=minuend.rows)
        return subtract(address, minuend, subtrahend_number)

    @cached_property
    def _diagnostics(self) -> DiagnosticEvidence:
        return DiagnosticEvidence.of(self.evidence)


def _fill_without_run(address: Address, one: Measurement) -> Measurement:
    """Give a measurement with the state `not run` and no reason a computed or planned number, or else a reason.

    Other measurements are returned unchanged.
    """
    if one.state != State.NOT_RUN or one.why:
        return one
    for state, number in ((State.COMPUTED, cache_size(address)), (State.PLANNED, planned_peak(address))):
        if number is not None:
            return replace(one, state=state, value=number[0], why=number[1])
    return replace(one, why=missing_input(address))


def _whole_size(address: Address) -> int:
    """Return the number of samples of a complete measurement; 0 if unknown, and for the embedded model."""
    return 0 if address.model == STAND_IN else samples_of(address.dataset)


def _operands(address: Address) -> tuple[Address, ...]:
    """Return the address of the number to subtract, or of the layer profile for a distance (`mad`); () for other numbers."""
    if address.metric in REDUCTIONS and REDUCTIONS[address.metric].layers == "mad":
        return (replace(address, method=MethodSettings.of(address.method.name)),)
    return () if address.minus is None else (replace(address, method=address.minus, minus=None),)


def _completeness(answers: int, of: int, match: Measurement) -> tuple[State, str]:
    if match.state == State.PART:
        return State.PART, match.why
    return (State.PART, f"{answers:,} of {of:,}") if of and answers < of else (State.MEASURED, "")


def _ratios(answers: pd.DataFrame) -> np.ndarray:
    """Return the share of the context's entries that each layer keeps, averaged over heads, float64 [answers, layers]."""
    kept_ratios = [[float(np.mean(layer)) for layer in one] for one in answers["kept"]]
    return np.array(kept_ratios) / answers["context_tokens"].to_numpy(np.float64)[:, None]


T = TypeVar("T")
ANSWERS, OVER = "answers", "more entries than asked"
_ANSWER = ["cell", "sample_id", "metric"]
_SCORER = ("judge", "judge_prompts", "judge_temperature", "scorer_digest")


class StoreTables:
    """Tables of all stores, each read once and only for the cells behind some address.

    Scores and prompts of a cell are joined over all stores with the cell; other values come from the first of these stores.
    """

    def __init__(self, evidence: Evidence, addresses: set[Address]) -> None:
        rows = sorted({row for one in addresses for row in evidence.candidates(one).tolist()})
        self._cells: dict[Path, list[str]] = {}
        for row in rows:
            store, cell = evidence.cell(row)
            self._cells.setdefault(evidence.roots[store], []).append(cell)

    def sheet(self, cells: Sequence[str], metric: str) -> tuple[Sheet, list[int]] | None:
        """Return (sheet of all scores, positions of `cells` in the sheet); None if stores contradict each other on a score."""
        if any((cell, metric) in self._contradictions for cell in cells):
            return None
        return self._sheet, [self._sheet.cells.index(cell) for cell in cells]

    def _read(self, read: Callable[[Store, list[str]], T]) -> Iterator[T]:
        """Yield read(store, hashes of the needed cells) for each store."""
        from mmkv_bench.store.store import Store

        yield from (read(Store(root), cells) for root, cells in self._cells.items())

    def _first(self, read: Callable[[Store, list[str]], Mapping[Any, T]]) -> dict[Any, T]:
        return {cell: value for table in reversed([*self._read(read)]) for cell, value in table.items()}

    @cached_property
    def _samples(self) -> pd.DataFrame:
        """Scores of the needed cells without those of stale cells, and without exact copies.

        Raises:
            StoreError: scores, metrics and answers contradict each other.
        """
        import pandas as pd

        def read(store: Store, cells: list[str]) -> pd.DataFrame:
            return frame(
                drop_stale_scores(store, store.samples(cells, SAMPLE_COLUMNS, coded=True), store.metrics(cells))
            )

        tables = [*self._read(read)]
        for name in tables[0].select_dtypes("category") if len(tables) > 1 else ():
            names = pd.Index(pd.unique(np.concatenate([table[name].cat.categories for table in tables])))
            tables = [table.assign(**{name: table[name].cat.set_categories(names)}) for table in tables]
        return pd.concat(tables, ignore_index=True).drop_duplicates([*_ANSWER, "value", "status"])

    @cached_property
    def _contradictions(self) -> set[tuple[str, str]]:
        duplicates = self._samples[self._samples.duplicated(_ANSWER)]
        return set(zip(duplicates["cell"], duplicates["metric"], strict=True))

    @cached_property
    def _sheet(self) -> Sheet:
        cells = dict.fromkeys(cell for each in self._cells.values() for cell in each)
        return Sheet.of(self._samples.drop_duplicates(_ANSWER), list(cells))

    @cached_property
    def scored(self) -> Mapping[str, int]:
        """Hash -> number of samples with a score of any metric."""
        return self._samples.groupby("cell", observed=True)["sample_id"].nunique().to_dict()

    @cached_property
    def prompts(self) -> Mapping[str, np.ndarray]:
        """Hash -> sorted digests of (sample id, prompt hash) of the answers. Equal digests mean equal questions."""
        from pandas.util import hash_pandas_object

        columns = ["cell", "sample_id", "prompt_hash"]
        prompts: dict[str, np.ndarray] = defaultdict(lambda: np.array([], dtype=np.uint64))
        for answers in self._read(lambda store, cells: frame(store.responses(cells, columns, coded=True))):
            digests = hash_pandas_object(answers[columns[1:]], index=False).to_numpy()
            for cell, places in answers.groupby("cell", observed=True).indices.items():
                prompts[str(cell)] = np.union1d(prompts[str(cell)], digests[places])
        return prompts

    @cached_property
    def scorers(self) -> Mapping[tuple[str, str], tuple[str, ...]]:
        """(hash, metric) -> judge and scorer, as texts (`_SCORER`)."""
        columns = ["cell", "metric", *_SCORER]
        return self._first(
            lambda store, cells: {
                (line["cell"], line["metric"]): tuple(str(line[name]) for name in _SCORER)
                for line in store.metrics(cells, columns).to_pylist()
            }
        )

    @cached_property
    def responses(self) -> Mapping[str, pd.DataFrame]:
        """Hash -> answers, with the columns of `REDUCTIONS`."""
        columns = ["cell", "sample_id", "cluster", "status", "measured", "context_tokens"]
        columns += dict.fromkeys(one.column for one in REDUCTIONS.values())
        return self._first(lambda store, cells: _by_cell(store.responses(cells, columns).to_pandas()))

    @cached_property
    def timings(self) -> Mapping[str, pd.DataFrame]:
        """Hash -> timed passes, as `cost_rows.passes` returns them."""
        return self._first(lambda store, cells: _by_cell(passes(store.timings(cells))))

    @cached_property
    def counts(self) -> Mapping[str, Mapping[str, int]]:
        """Hash -> reason -> number of answers.

        The reasons are `ANSWERS` (all), `OVER` (kept more than the budget), fallbacks, and question text before a cut.
        """
        columns = ("cell", "fallback", "entries_asked", "entries_resident", "question_text_before_cut")
        answers = self._first(lambda store, cells: _by_cell(store.responses(cells, columns).to_pandas()))
        return {cell: _counts(of_cell) for cell, of_cell in answers.items()}


def _by_cell(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    return dict(iter(table.groupby("cell", sort=False))) if len(table) else {}


def _counts(answers: pd.DataFrame) -> Counter[str]:
    counts = Counter(f"fallback {reason}" for reasons in answers["fallback"].dropna() for reason in reasons)
    counts[ANSWERS] = len(answers)
    counts[OVER] = int((answers["entries_resident"] > answers["entries_asked"]).sum())
    counts["question text before a cut"] = int((answers["question_text_before_cut"] > 0).sum())
    return +counts  # without zeros
