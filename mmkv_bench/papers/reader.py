"""Reader: finds the number that rows hold for an address."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from mmkv_bench.config.files import content
from mmkv_bench.config.unavailable import UNAVAILABLE
from mmkv_bench.papers import margins
from mmkv_bench.papers.address import STAND_IN, SYNTHETIC, Address, MethodSettings, file_of, samples_of
from mmkv_bench.papers.computed import cache_size, missing_input, planned_peak
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
from mmkv_bench.papers.metrics import DIAGNOSTICS, PASSES, REDUCTIONS
from mmkv_bench.papers.store_tables import ANSWERS, OVER, StoreTables
from mmkv_bench.statistics.intervals import intervals
from mmkv_bench.tables.cost_rows import ALONE
from mmkv_bench.tables.metrics import headlines

if TYPE_CHECKING:
    import pandas as pd


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
