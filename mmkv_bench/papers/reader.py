"""Reader: finds the number that rows hold for an address.

Tables of the stores behind a body of evidence, each read once and only for the cells that some address needs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from mmkv_bench.config.files import content
from mmkv_bench.config.unavailable import UNAVAILABLE
from mmkv_bench.papers import margins
from mmkv_bench.papers.address import STAND_IN, SYNTHETIC, Address, MethodSettings, file_of, samples_of
from mmkv_bench.papers.diagnostic_curves import DiagnosticEvidence
from mmkv_bench.papers.evidence import AMBIGUOUS, FOUND, Evidence, Match, Shared
from mmkv_bench.papers.measurement import (
    CANNOT_RUN,
    COMPUTED,
    FAILED,
    MEASURED,
    NOT_RUN,
    PART,
    PLANNED,
    UNCLEAR,
    WAITING,
    Measurement,
    Questions,
    average,
    differing,
    joined,
    subtract,
)
from mmkv_bench.papers.non_score_metrics import DIAGNOSTICS, PASSES, REDUCTIONS, cache_size, missing_input, planned_peak
from mmkv_bench.statistics.shared_draws import intervals
from mmkv_bench.tables.agreement import agreeing
from mmkv_bench.tables.cost_rows import ALONE, passes
from mmkv_bench.tables.metrics import aggregator_of, headlines
from mmkv_bench.tables.rows import SAMPLE_COLUMNS, frame
from mmkv_bench.tables.scores import Sheet

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from mmkv_bench.store.store import Store


class EvidenceReader:
    """Numbers of addresses in a body of evidence."""

    def __init__(self, evidence: Evidence, addresses: Sequence[Address]) -> None:
        self.evidence = evidence
        self._tables = StoreTables(evidence, {one for address in addresses for one in (address, *_operands(address))})
        self._measurements: dict[tuple[Address, Shared | None], Measurement] = {}

    def measured(
        self, address: Address, parts: Sequence[Address] = (), like: Sequence[Shared | None] = ()
    ) -> Measurement:
        """Find the number at an address.

        Args:
            parts: addresses that it is the mean of.
            like: facts that the rows must share, of each part; None: of any rows, the first that count.
        """
        if parts:
            return average([self._one(*one) for one in zip(parts, like or [None] * len(parts), strict=True)])
        return self._one(address, *like)

    def _one(self, address: Address, like: Shared | None = None) -> Measurement:
        if (address, like) not in self._measurements:
            one = _without_rows(address, self._number(address, like))
            if address.minus is not None:
                one = self._difference(address, one)
            if one.rows and not self.evidence.stand_in:
                commits = self.evidence.cells.iloc[list(one.rows)]["git_commit"].unique()
                late = (margins.unjudged(None if commit != commit else commit) for commit in commits)
                one = replace(one, mismatches=joined(one.mismatches, tuple(filter(None, late))))
            self._measurements[address, like] = one
        return self._measurements[address, like]

    def _number(self, address: Address, like: Shared | None = None) -> Measurement:
        if address.model in UNAVAILABLE:
            why = UNAVAILABLE[address.model].why.partition(" (")[0].partition(", and ")[0]
            return Measurement(CANNOT_RUN, f"{UNAVAILABLE[address.model].title} {why}")
        if address.metric in DIAGNOSTICS:
            return self._diagnostic(address)
        match = self.evidence.match(address, like)
        if match.state != FOUND:
            ambiguous = match.state == AMBIGUOUS
            return Measurement(UNCLEAR if ambiguous else NOT_RUN, match.why, rows=match.rows if ambiguous else ())
        timed = address.dataset in SYNTHETIC
        read = self._passes if timed else self._reduction if address.metric in REDUCTIONS else self._score
        one = replace(read(address, match), rows=match.rows)
        if one.value is None:
            return one
        excess, remarks = ((), ()) if timed or self.evidence.stand_in else self._kept(match)
        return replace(
            one,
            mismatches=joined(match.mismatches, one.mismatches, excess),
            unstated=joined(match.unstated, remarks),
            passed=match.passed,
            shared=(match.shared,),
            questions=(Questions() if timed else self._questions(address, match),),
        )

    def _kept(self, match: Match) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return what the answers say of entries kept: (mismatches, remarks).

        More entries than asked are a mismatch, unless a paper's own formula or code keeps them.
        """
        counts: Counter[str] = Counter()
        for row in match.rows:
            counts.update(self._tables.counts(row))
        first = self.evidence.cells.iloc[match.rows[0]]
        allowed = first["reading"] == "released" or json.loads(first["parameters"] or "{}").get("over_budget")
        answers, over = counts.pop(ANSWERS, 0), counts.pop(OVER, 0)
        excess = (f"{over:,} of {answers:,} answers kept {OVER}",) if over else ()
        remarks = tuple(f"{what} in {n:,} of {answers:,} answers" for what, n in sorted(counts.items()))
        return ((), excess + remarks) if allowed else (excess, remarks)

    def _questions(self, address: Address, match: Match) -> Questions:
        prompts = [self._tables.prompts(row) for row in match.rows]
        digests = tuple(sorted({int(each.sum()) for each in prompts}))
        return Questions(self._tables.scorer(match.rows[0], address.metric), len(prompts[0]), digests)

    def _score(self, address: Address, match: Match) -> Measurement:
        held = self._tables.sheet(match.rows, address.metric)
        if held is None:
            return Measurement(UNCLEAR, "two stores hold the same cell with other scores")
        sheet, places = held
        scores = sheet.scores(places, address.metric)
        answers = [len(self._tables.prompts(row)) for row in match.rows]
        of = _whole_size(address)
        sized = Measurement(WAITING, n=scores.n or min(answers), of=of)
        if not scores.n:
            if not any(answers):
                return Measurement(NOT_RUN)
            judged = content("dataset", file_of(address.dataset))["about"].get("judge") == "needed"
            return replace(sized, why="for a judge" if judged else "for its scores: run with stage=score")
        if scores.n < max(answers):  # a metric of one kind of question has fewer samples, and yet all are scored
            unscored = max(n - self._tables.scored(row) for n, row in zip(answers, match.rows, strict=True))
            if unscored > 0:
                why = f"for the scores of {unscored} of {max(answers)} answers"
                return replace(sized, why=why, n=min(answers))
        if scores.unjudged:
            return replace(sized, why=f"for a judge: {scores.unjudged} of {scores.n} answers")
        if scores.n_ok < scores.n:
            return replace(sized, state=FAILED, why=f"{scores.n - scores.n_ok} of {scores.n} samples")
        scale = margins.margin(address.dataset, address.metric).scale
        by_seed = [sheet.scores([place], address.metric) for place in places] if len(places) > 1 else []
        headline, *seeds = headlines([scores, *by_seed], address.dataset, address.metric)
        value, low, high = (
            None if headline[key] is None else scale * headline[key] for key in ("value", "low", "high")
        )
        values = tuple(scale * one["value"] for one in seeds if one["value"] is not None)
        many = (f"{max(answers):,} answers, the data set has {of:,}",) if of and max(answers) > of else ()
        state, why = _completeness(min(answers), of, match)
        return Measurement(state, why, value, low, high, scores.n, of, many, seeds=values, scores=scores)

    def _reduction(self, address: Address, match: Match) -> Measurement:
        reduction = REDUCTIONS[address.metric]
        tables = [self._tables.responses(row) for row in match.rows]
        n, of = min(map(len, tables)), _whole_size(address)
        failed = sum(int((table["status"] != "ok").sum()) for table in tables)
        if failed:
            return Measurement(FAILED, f"{failed} samples", n=n, of=of)
        if reduction.column == "tpot_s" and any((table["measured"] != "own").any() for table in tables):
            return Measurement(
                CANNOT_RUN, "runs that share prefills have no times by method; use sharing=off", n=n, of=of
            )
        state, why = _completeness(n, of, match)
        if not reduction.layers:
            values = np.mean([table[reduction.column].to_numpy(np.float64) for table in tables], axis=0) / reduction.per
            (interval,) = intervals(
                [(values, tables[0]["cluster"].astype(str).to_numpy())], address.dataset, share=False
            )
            return Measurement(state, why, float(values.mean()), interval.low, interval.high, n, of)
        # spread over samples of the ratios that layers keep, averaged over layers; `mad`: distance from the profile's
        ratios = _ratios(tables[0])
        if reduction.layers == "std":
            return Measurement(state, why, float(ratios.std(axis=0).mean()), n=len(ratios), of=of)
        (profile,) = _operands(address)
        other = self.evidence.match(profile, match.shared)
        if other.state != FOUND:
            return Measurement(NOT_RUN, f"it needs {profile.method} too")
        fixed = _ratios(self._tables.responses(other.rows[0])).mean(axis=0)
        return Measurement(state, why, float(np.abs(ratios - fixed).mean()), n=len(ratios), of=of)

    def _diagnostic(self, address: Address) -> Measurement:
        """Read a diagnostic: its curves by layer, and the mean over layers."""
        match = self._diagnostics.match(address)
        if match.state != FOUND:
            return Measurement(UNCLEAR if match.state == AMBIGUOUS else NOT_RUN, match.why)
        of, first = address.samples or _whole_size(address), match.curves[0]
        state, why = (PART, f"{match.n:,} of {of:,}") if of and match.n < of else (MEASURED, "")
        shown = Measurement(state, why, first.value, first.low, first.high, match.n, of, match.mismatches)
        return replace(shown, curves=match.curves, made=match.made, source=match.source, drawn=match.rows)

    def _passes(self, address: Address, match: Match) -> Measurement:
        reduction, table = PASSES[address.metric], self._tables.timings(match.rows[0])
        wanted = {"prompt_tokens": address.length, "new_tokens": address.new_tokens, "batch": address.batch or 1}
        for column, value in {**wanted, "batch_prefill": ALONE}.items():
            table = table[table[column] == value] if len(table) else table
        if not len(table):
            return Measurement(NOT_RUN)
        failed = table["status"][table["status"] != "ok"]
        if len(failed):
            return Measurement(FAILED, str(failed.iloc[0]))
        values = table[reduction.column].dropna().to_numpy(np.float64) / reduction.per
        if not len(values):
            return Measurement(NOT_RUN, f"no pass holds {reduction.column}")
        disturbed = sorted({str(what) for one in table["disturbed"].dropna() for what in one})
        mismatches = (f"disturbed by {', '.join(disturbed)}",) if disturbed else ()
        return Measurement(MEASURED, "", float(np.median(values)), n=len(values), mismatches=mismatches)

    def _difference(self, address: Address, minuend: Measurement) -> Measurement:
        """Subtract the number of another method under the same facts."""
        (base,) = _operands(address)
        other = self._number(base, *minuend.shared)
        if minuend.value is not None and other.state == NOT_RUN:
            names = differing(minuend, self._number(base).shared)
            why = f"{address.minus} was run with other {names}" if names else ""
            return replace(other, why=why, rows=minuend.rows)
        return subtract(address, minuend, other)

    @cached_property
    def _diagnostics(self) -> DiagnosticEvidence:
        return DiagnosticEvidence.of(self.evidence)


def _without_rows(address: Address, one: Measurement) -> Measurement:
    """Compute a number that needs no rows; else say what it needs."""
    if one.state != NOT_RUN or one.why:
        return one
    for state, number in ((COMPUTED, cache_size(address)), (PLANNED, planned_peak(address))):
        if number is not None:
            return replace(one, state=state, value=number[0], why=number[1])
    return replace(one, why=missing_input(address))


def _whole_size(address: Address) -> int:
    """Return how many samples a complete number has; 0: unknown. A stand-in shows as many as there are."""
    return 0 if address.model == STAND_IN else samples_of(address.dataset)


def _operands(address: Address) -> tuple[Address, ...]:
    """Return the addresses that a number needs besides: the subtracted one, or the profile that it is a distance from."""
    if address.metric in REDUCTIONS and REDUCTIONS[address.metric].layers == "mad":
        return (replace(address, method=MethodSettings.of(address.method.name)),)
    return () if address.minus is None else (replace(address, method=address.minus, minus=None),)


def _completeness(answers: int, of: int, match: Match) -> tuple[str, str]:
    if match.missing:
        return PART, f"seeds {', '.join(map(str, match.missing))} missing"
    return (PART, f"{answers:,} of {of:,}") if of and answers < of else (MEASURED, "")


def _ratios(answers: pd.DataFrame) -> np.ndarray:
    """Return kept entries of each layer over the prompt's, float64 [n, layers]; heads are averaged."""
    kept = [[float(np.mean(layer)) for layer in one] for one in answers["kept"]]
    return np.array(kept) / answers["context_tokens"].to_numpy(np.float64)[:, None]


T = TypeVar("T")
ANSWERS, OVER = "answers", "more entries than asked"
_ANSWER = ["cell", "sample_id", "metric"]
_TEXTS = dict.fromkeys(("cell", "sample_id", "cluster", "metric", "status"), "object")
_SCORER = ("judge", "judge_prompts", "judge_temperature", "scorer_digest")


class StoreTables:
    """Tables by store; a row is a place in the evidence's cells."""

    def __init__(self, evidence: Evidence, addresses: set[Address]) -> None:
        self.evidence = evidence
        self._addresses = addresses

    def responses(self, row: int) -> pd.DataFrame:
        """Return the answers of a cell, columns that metrics reduce."""
        return self._of_cell(self._responses, row)

    def timings(self, row: int) -> pd.DataFrame:
        """Return the timed passes of a cell."""
        return self._of_cell(self._timings, row)

    def counts(self, row: int) -> Mapping[str, int]:
        """Return the number of a cell's answers, and of those that kept more than asked, fell back or saw text before a cut."""
        store, cell = self.evidence.cell(row)
        return self._counts[store].get(cell, {})

    def scorer(self, row: int, metric: str) -> tuple[str, ...]:
        """Return who gave a cell's scores of a metric."""
        return self._scorers.get((*self.evidence.cell(row), metric), ())

    def prompts(self, row: int) -> np.ndarray:
        """Return digests of a cell's samples with their prompts, one an answer, from all its copies."""
        none = np.array([], dtype=np.uint64)
        places = [self.evidence.cell(place) for place in (row, *self.evidence.copies(row))]
        return np.unique(np.concatenate([self._prompts[store].get(cell, none) for store, cell in places]))

    def scored(self, row: int) -> int:
        """Return the number of a cell's samples with a score of any metric, in all its copies."""
        tables = [self._of_cell(self._samples, place) for place in (row, *self.evidence.copies(row))]
        return len({one for table in tables for one in table["sample_id"].astype(str)})

    def sheet(self, rows: Sequence[int], metric: str) -> tuple[Sheet, list[int]] | None:
        """Return the scores of cells, one a seed, and their places in the sheet; None if two stores contradict each other."""
        names = [self.evidence.cell(row)[1] for row in rows]
        places = {place for row in rows for place in (row, *self.evidence.copies(row))}
        stores = sorted({self.evidence.cell(place)[0] for place in places})
        if len(stores) == 1:
            sheet = self._sheets[stores[0]]
            return sheet, [sheet.cells.index(name) for name in names]
        import pandas as pd

        tables = [self._samples[store] for store in stores]
        tables = [table[table["cell"].isin(names) & (table["metric"] == metric)].astype(_TEXTS) for table in tables]
        scores = pd.concat(tables, ignore_index=True)  # seeds in several stores, or parts of a cell
        if len(scores[[*_ANSWER, "value", "status"]].drop_duplicates()) > len(scores[_ANSWER].drop_duplicates()):
            return None
        return Sheet.of(scores.drop_duplicates(_ANSWER), names), [*range(len(names))]

    def _of_cell(self, tables: Mapping[int, pd.DataFrame], row: int) -> pd.DataFrame:
        store, cell = self.evidence.cell(row)
        table = tables[store]
        return table[table["cell"] == cell] if len(table) else table

    def _read(self, read: Callable[[Store, list[str]], T]) -> dict[int, T]:
        """Read from every store the cells that some address needs."""
        from mmkv_bench.store.store import Store

        return {number: read(Store(self.evidence.roots[number]), cells) for number, cells in self._cells.items()}

    @cached_property
    def _cells(self) -> dict[int, list[str]]:
        cells: dict[int, list[str]] = {}
        for row in sorted({row for one in self._addresses for row in self.evidence.candidates(one).tolist()}):
            store, cell = self.evidence.cell(row)
            cells.setdefault(store, []).append(cell)
        return cells

    @cached_property
    def _samples(self) -> Mapping[int, pd.DataFrame]:
        """Scores of complete cells; a StoreError where scores, metrics and answers contradict each other."""
        return self._read(
            lambda store, cells: frame(
                agreeing(store, store.samples(cells, SAMPLE_COLUMNS, coded=True), store.metrics(cells))
            )
        )

    @cached_property
    def _sheets(self) -> Mapping[int, Sheet]:
        return {number: Sheet.of(self._samples[number], cells) for number, cells in self._cells.items()}

    @cached_property
    def _prompts(self) -> Mapping[int, Mapping[str, np.ndarray]]:
        columns = ["cell", "sample_id", "prompt_hash"]
        return self._read(lambda store, cells: _digests(frame(store.responses(cells, columns, coded=True))))

    @cached_property
    def _scorers(self) -> Mapping[tuple[int, str, str], tuple[str, ...]]:
        tables = self._read(lambda store, cells: store.metrics(cells, ["cell", "metric", *_SCORER]).to_pylist())
        return {
            (store, line["cell"], line["metric"]): tuple(str(line[name]) for name in _SCORER)
            for store, table in tables.items()
            for line in table
        }

    @cached_property
    def _responses(self) -> Mapping[int, pd.DataFrame]:
        columns = ["cell", "sample_id", "cluster", "status", "measured", "context_tokens"]
        columns += dict.fromkeys(one.column for one in REDUCTIONS.values())
        return self._read(lambda store, cells: store.responses(cells, columns).to_pandas())

    @cached_property
    def _timings(self) -> Mapping[int, pd.DataFrame]:
        return self._read(lambda store, cells: passes(store.timings(cells)))

    @cached_property
    def _counts(self) -> Mapping[int, Mapping[str, Mapping[str, int]]]:
        columns = ("cell", "fallback", "entries_asked", "entries_resident", "question_text_before_cut")
        return self._read(lambda store, cells: _counts(store.responses(cells, columns)))


def _counts(answers: pa.Table) -> dict[str, Counter[str]]:
    """Return cell -> `StoreTables.counts`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    cells, reasons = answers["cell"], answers["fallback"].combine_chunks()
    over = pc.fill_null(pc.greater(answers["entries_resident"], answers["entries_asked"]), False)
    cut = pc.fill_null(pc.greater(answers["question_text_before_cut"], 0), False)
    counts: dict[str, Counter[str]] = {}
    for what, named in (
        (ANSWERS, cells),
        (OVER, cells.filter(over)),
        ("question text before a cut", cells.filter(cut)),
    ):
        for one in named.value_counts().to_pylist():
            counts.setdefault(one["values"], Counter())[what] = one["counts"]
    of_reason = cells.combine_chunks().take(pc.list_parent_indices(reasons))
    fallbacks = pa.table({"cell": of_reason, "reason": reasons.flatten()}).group_by(["cell", "reason"])
    for one in fallbacks.aggregate([([], "count_all")]).to_pylist():
        counts[one["cell"]][f"fallback {one['reason']}"] = one["count_all"]
    return counts


def _digests(answers: pd.DataFrame) -> dict[str, np.ndarray]:
    """Return cell -> a digest of each sample with its prompt, uint64 [n]."""
    from pandas.util import hash_pandas_object

    digests = hash_pandas_object(answers[["sample_id", "prompt_hash"]], index=False).to_numpy()
    return {str(cell): digests[places] for cell, places in answers.groupby("cell", observed=True).indices.items()}
