"""The number that rows hold for an address, with its interval, or why there is none."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mmkv_bench.config.files import content
from mmkv_bench.config.unavailable import UNAVAILABLE
from mmkv_bench.papers import fixed
from mmkv_bench.papers.address import STAND_IN, SYNTHETIC, Address, MethodSettings, file_of, samples_of
from mmkv_bench.papers.computed import cache_size, lacking, planned_peak
from mmkv_bench.papers.diagnostic_curves import Curve, DiagnosticEvidence
from mmkv_bench.papers.evidence import AMBIGUOUS, FOUND, Evidence, Match, Shared
from mmkv_bench.papers.identity import OF_MODEL
from mmkv_bench.papers.metrics import DIAGNOSTICS, PASSES, REDUCTIONS, Reduction, margin
from mmkv_bench.statistics.shared_draws import intervals
from mmkv_bench.tables.agreement import agreeing
from mmkv_bench.tables.cost_rows import ALONE, passes
from mmkv_bench.tables.dataset_groups import Mean, mean
from mmkv_bench.tables.metrics import aggregator_of, headlines
from mmkv_bench.tables.rows import SAMPLE_COLUMNS, frame
from mmkv_bench.tables.scores import Scores, Sheet

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from mmkv_bench.store.store import Store

STATES = ("measured", "computed", "planned", "part", "waiting", "failed", "not run", "cannot run", "ambiguous")
MEASURED, COMPUTED, PLANNED, PART, WAITING, FAILED, NOT_RUN, CANNOT_RUN, UNCLEAR = STATES
WHOLE = (MEASURED, COMPUTED)
"""States of a number that nothing is missing from. `planned` is none: a dry run foresees it, and it is shown and not judged."""
_ANSWERS, _OVER = "answers", "more entries than asked"
_ANSWER = ["cell", "sample_id", "metric"]
_TEXTS = dict.fromkeys(("cell", "sample_id", "cluster", "metric", "status"), "object")
_SCORER = ("judge", "judge_prompts", "judge_temperature", "scorer_digest")


class Questions(NamedTuple):
    """Who scored a number, how many samples it has and a digest of their prompts, of several if its seeds had several."""

    scorer: tuple[str, ...] = ()
    n: int = 0
    prompts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Measurement:
    """What stands at an address. Numbers are in the unit of the printed one.

    Attributes:
        state: one of STATES; why: what a state other than measured means here.
        value, low, high: with a 95 % interval where there is one; None where no number is shown.
        n, of: samples with an answer, and how many the data set has (0: unknown).
        other: what is other about its rows than the address says; unstated: what they were made with and nothing states;
            shared: what a number that is compared with it must share, of each part of a mean, and asked: what its samples
            were asked; passed: what runs of the address that were passed over differ in; rows: places in the evidence; seeds:
            the value under each seed, where there are several.
        curves: of a diagnostic, each line of the figure with its layers; `value` is that of the first; made: with what;
            source: rows folder and measurement; drawn: the rows of its picture.
        scores: what a paired comparison needs; None of means and reductions.
    """

    state: str
    why: str = ""
    value: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    of: int = 0
    other: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    seeds: tuple[float, ...] = ()
    unstated: tuple[str, ...] = ()
    shared: tuple[Shared, ...] = ()
    asked: tuple[Questions, ...] = ()
    passed: str = ""
    curves: tuple[Curve, ...] = ()
    made: str = ""
    source: str = ""
    drawn: pd.DataFrame | None = field(default=None, compare=False, repr=False)
    scores: Scores | None = field(default=None, compare=False, repr=False)

    @property
    def number(self) -> float:
        """The value of one that has a number."""
        assert self.value is not None
        return self.value


class EvidenceReader:
    """Numbers of addresses out of a body of evidence; every store is read once, and of it only what is asked for."""

    def __init__(self, evidence: Evidence, wanted: Sequence[Address]) -> None:
        self.evidence = evidence
        self._wanted = {one for address in wanted for one in (address, *_behind(address))}
        self._known: dict[tuple[Address, Shared | None], Measurement] = {}

    def measured(
        self, address: Address, parts: Sequence[Address] = (), like: Sequence[Shared | None] = ()
    ) -> Measurement:
        """What there is at an address.

        Args:
            parts: those that it is the mean of.
            like: what its rows must share, of each part; of what is None, whichever rows count first.
        """
        if parts:
            each = like or [None] * len(parts)
            return self._mean(address, [self._one(*one) for one in zip(parts, each, strict=True)], parts)
        return self._one(address, *like)

    def _one(self, address: Address, like: Shared | None = None) -> Measurement:
        if (address, like) not in self._known:
            found = _without_rows(address, self._number(address, like))
            if address.minus is not None:
                found = self._minus(address, found)
            self._known[address, like] = self._fixed(found)
        return self._known[address, like]

    def _fixed(self, found: Measurement) -> Measurement:
        """With what is to be said of rows that were made before the margins were fixed, or nobody knows when."""
        if self.evidence.stand_in or not found.rows:
            return found
        commits = self.evidence.cells.iloc[list(found.rows)]["git_commit"]
        told = (fixed.unjudged(None if commit != commit else commit) for commit in commits.unique())
        return replace(found, other=_joined(found.other, tuple(filter(None, told))))

    def _number(self, address: Address, like: Shared | None = None) -> Measurement:
        if address.model in UNAVAILABLE:
            return Measurement(
                CANNOT_RUN, f"{UNAVAILABLE[address.model].title} {_clause(UNAVAILABLE[address.model].why)}"
            )
        if address.metric in DIAGNOSTICS:
            return self._diagnosed(address)
        match = self.evidence.match(address, like)
        if match.state == AMBIGUOUS:
            return Measurement(UNCLEAR, match.why, rows=match.rows)
        if match.state != FOUND:
            return Measurement(NOT_RUN, match.why)
        if address.dataset in SYNTHETIC:
            read = self._passes
        else:
            read = self._reduced if address.metric in REDUCTIONS else self._score
        found = read(address, match)
        if found.value is None:
            return replace(found, rows=match.rows)
        unkept = address.dataset in SYNTHETIC or self.evidence.stand_in
        over, told = ((), ()) if unkept else self._kept_of(match)
        return replace(
            found,
            other=_joined(match.other, found.other, over),
            rows=match.rows,
            unstated=_joined(match.unstated, told),
            passed=match.passed,
            shared=(match.shared,),
            asked=(self._asked_of(address, match),),
        )

    def _kept_of(self, match: Match) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What the answers say of what was kept: (why they are not judged, what is told beside the number). More entries than
        asked are told where a paper's own formula or code keeps them, and else no evidence."""
        counts: Counter[str] = Counter()
        for row in match.rows:
            counts.update(self._kept[self._store(row)].get(self._cell(row), {}))
        first = self.evidence.cells.iloc[match.rows[0]]
        allowed = first["reading"] == "released" or json.loads(first["parameters"] or "{}").get("over_budget")
        answers, over = counts.pop(_ANSWERS, 0), counts.pop(_OVER, 0)
        excess = (f"{over:,} of {answers:,} answers kept more entries than asked",) if over else ()
        told = tuple(f"{what} in {n:,} of {answers:,} answers" for what, n in sorted(counts.items()))
        return ((), excess + told) if allowed else (excess, told)

    def _asked_of(self, address: Address, match: Match) -> Questions:
        if address.dataset in SYNTHETIC:
            return Questions()
        row, each = match.rows[0], [self._answered(row) for row in match.rows]
        digests = tuple(sorted({int(prompts.sum()) for prompts in each}))
        scorer = self._scorers.get((self._store(row), self._cell(row), address.metric), ())
        return Questions(scorer, len(each[0]), digests)

    def _score(self, address: Address, match: Match) -> Measurement:
        held = self._sheet(match, address.metric)
        if held is None:
            return Measurement(UNCLEAR, "two stores hold the same cell with other scores", rows=match.rows)
        sheet, places = held
        found = sheet.scores(places, address.metric)
        each = [len(self._answered(row)) for row in match.rows]
        answers = min(each)
        of = _of(address)
        if not found.n:
            if not any(each):
                return Measurement(NOT_RUN)
            judged = content("dataset", file_of(address.dataset))["about"].get("judge") == "needed"
            return Measurement(
                WAITING, "for a judge" if judged else "for its scores: run with stage=score", n=answers, of=of
            )
        unscored = (
            0 if found.n >= max(each) else max(n - self._scored(row) for n, row in zip(each, match.rows, strict=True))
        )
        if unscored > 0:  # a metric of one kind of question has fewer samples, and yet all are scored
            return Measurement(WAITING, f"for the scores of {unscored} of {max(each)} answers", n=answers, of=of)
        if found.unjudged:
            return Measurement(WAITING, f"for a judge: {found.unjudged} of {found.n} answers", n=found.n, of=of)
        if found.n_ok < found.n:
            return Measurement(FAILED, f"{found.n - found.n_ok} of {found.n} samples", n=found.n, of=of)
        scale = margin(address.dataset, address.metric).scale
        seeds = [sheet.scores([place], address.metric) for place in places] if len(places) > 1 else []
        told, *each_seed = headlines([found, *seeds], address.dataset, aggregator_of(address.metric), address.metric)
        value, low, high = (None if told[key] is None else scale * told[key] for key in ("value", "low", "high"))
        state, why = _whole(answers, of, match)
        values = tuple(scale * one["value"] for one in each_seed if one["value"] is not None)
        many = (f"{max(each):,} answers, the data set has {of:,}",) if of and max(each) > of else ()
        return Measurement(state, why, value, low, high, found.n, of, many, seeds=values, scores=found)

    def _reduced(self, address: Address, match: Match) -> Measurement:
        reduction = REDUCTIONS[address.metric]
        tables = [self._responses[self._store(row)] for row in match.rows]
        own = [table[(table["cell"] == self._cell(row))] for table, row in zip(tables, match.rows, strict=True)]
        answers = min(len(table) for table in own)
        of = _of(address)
        failed = sum(int((table["status"] != "ok").sum()) for table in own)
        if failed:
            return Measurement(FAILED, f"{failed} samples", n=answers, of=of)
        if reduction.layers:
            return self._layers(address, reduction, own[0], match, of)
        if reduction.column == "tpot_s" and any((table["measured"] != "own").any() for table in own):
            return Measurement(
                CANNOT_RUN, "times of a shared run are no method's own; run with sharing=off", n=answers, of=of
            )
        values = np.mean([table[reduction.column].to_numpy(np.float64) for table in own], axis=0) / reduction.per
        (found,) = intervals([(values, own[0]["cluster"].astype(str).to_numpy())], address.dataset, share=False)
        state, why = _whole(answers, of, match)
        return Measurement(state, why, float(values.mean()), found.low, found.high, answers, of)

    def _layers(self, address: Address, reduction: Reduction, own: pd.DataFrame, match: Match, of: int) -> Measurement:
        """Spread over samples of the ratios that layers keep, averaged over layers; `mad`: distance from the profile's."""
        ratios = _ratios(own)
        if reduction.layers == "std":
            value = float(ratios.std(axis=0).mean())
        else:
            (profile,) = _behind(address)
            other = self.evidence.match(profile, match.shared)
            if other.state != FOUND:
                return Measurement(NOT_RUN, f"it needs {profile.method} too")
            table = self._responses[self._store(other.rows[0])]
            fixed = _ratios(table[table["cell"] == self._cell(other.rows[0])])
            value = float(np.abs(ratios - fixed.mean(axis=0)).mean())
        state, why = _whole(len(own), of, match)
        return Measurement(state, why, value, n=len(own), of=of)

    def _diagnosed(self, address: Address) -> Measurement:
        """A diagnostic: what its rows say by layer, and the mean over layers."""
        found = self._curves.read(address)
        if found.state == AMBIGUOUS:
            return Measurement(UNCLEAR, found.why)
        if found.state != FOUND:
            return Measurement(NOT_RUN)
        of = address.samples or _of(address)
        state, why = (PART, f"{found.n:,} of {of:,}") if of and found.n < of else (MEASURED, "")
        first = found.curves[0]
        shown = Measurement(state, why, first.value, first.low, first.high, found.n, of, found.other)
        return replace(shown, curves=found.curves, made=found.made, source=found.source, drawn=found.rows)

    def _passes(self, address: Address, match: Match) -> Measurement:
        reduction = PASSES[address.metric]
        row = match.rows[0]
        table = self._timings[self._store(row)]
        own = table[table["cell"] == self._cell(row)] if len(table) else table
        for column, asked in (("prompt_tokens", address.length), ("new_tokens", address.new_tokens)):
            own = own[own[column] == asked] if len(own) else own
        own = own[(own["batch"] == (address.batch or 1)) & (own["batch_prefill"] == ALONE)] if len(own) else own
        if not len(own):
            return Measurement(NOT_RUN)
        if (own["status"] != "ok").any():
            return Measurement(FAILED, str(own["status"][own["status"] != "ok"].iloc[0]))
        values = own[reduction.column].dropna().to_numpy(np.float64) / reduction.per
        if not len(values):
            return Measurement(NOT_RUN, f"no pass holds {reduction.column}")
        disturbed = sorted({str(what) for one in own["disturbed"].dropna() for what in one})
        other = (f"disturbed by {', '.join(disturbed)}",) if disturbed else ()
        return Measurement(MEASURED, "", float(np.median(values)), n=len(values), other=other)

    def _minus(self, address: Address, own: Measurement) -> Measurement:
        """The difference to another method, paired by sample."""
        from mmkv_bench.tables.compare import against

        assert address.minus is not None
        base = replace(address, method=address.minus, minus=None)
        other = self._number(base, *own.shared)
        if own.value is not None and other.state == NOT_RUN:
            names = differing(own, self._number(base).shared)
            return replace(other, why=f"{address.minus} was run with other {names}" if names else "", rows=own.rows)
        for one in (own, other):
            if one.scores is None or one.value is None:
                state = one.state if one.value is None else CANNOT_RUN
                return replace(one, state=state, value=None, low=None, high=None, why=one.why or "no score of a sample")
        assert own.scores is not None
        assert other.scores is not None
        scale = margin(address.dataset, address.metric).scale
        (found,) = against(
            [own.scores], aligned(other.scores, own.scores), address.metric, aggregator_of(address.metric)
        )
        low, high = (None if end is None else scale * end for end in (found.low, found.high))
        apart = incomparable(own, other)
        state, why = next(((one.state, one.why) for one in (own, other) if one.state != MEASURED), (MEASURED, ""))
        return replace(
            own,
            state=state,
            why=why,
            value=own.number - other.number,
            low=low,
            high=high,
            n=min(own.n, other.n),
            other=_joined(own.other, other.other, (apart,) if apart else ()),
            unstated=_joined(own.unstated, other.unstated),
            passed="; ".join(_joined(*((one.passed,) for one in (own, other) if one.passed))),
            rows=(*own.rows, *other.rows),
            seeds=_of_each_seed((own, other), lambda pair: pair[0] - pair[1]),
        )

    def _mean(self, address: Address, parts: Sequence[Measurement], of: Sequence[Address]) -> Measurement:
        """A mean over several: only where all of them are whole."""
        told = {part.state for part in parts}
        rows = tuple(row for part in parts for row in part.rows)
        other = _joined(*(part.other for part in parts), _mixed(parts))
        if told != {MEASURED}:
            state = next(
                state for state in (CANNOT_RUN, UNCLEAR, FAILED, WAITING, NOT_RUN, PART, MEASURED) if state in told
            )
            done = sum(part.state == MEASURED for part in parts)
            if done and state == NOT_RUN:
                return Measurement(PART, f"{done} of {len(parts)} parts", rows=rows, other=other)
            lacking = next(part for part in parts if part.state == state)
            return Measurement(state, lacking.why, rows=rows, other=other)
        found = _wider(mean([Mean(part.number, part.low, part.high) for part in parts]), parts)
        n = sum(part.n for part in parts)
        whole = Measurement(MEASURED, "", found.value, found.low, found.high, n, n, other, rows)
        return replace(
            whole,
            seeds=_of_each_seed(parts, lambda values: sum(values) / len(values)),
            unstated=_joined(*(part.unstated for part in parts)),
            shared=tuple(one for part in parts for one in part.shared),
            asked=tuple(one for part in parts for one in part.asked),
            passed="; ".join(_joined(*((part.passed,) for part in parts if part.passed))),
        )

    def _sheet(self, match: Match, metric: str) -> tuple[Sheet, list[int]] | None:
        """The scores of a match and where its cells, one a seed, stand; None where two stores hold other scores of one answer."""
        names = [self._cell(row) for row in match.rows]
        places = {place for row in match.rows for place in (row, *self.evidence.copies(row))}
        stores = sorted({self._store(place) for place in places})
        if len(stores) == 1:
            sheet = self._sheets[stores[0]]
            return sheet, [sheet.cells.index(name) for name in names]
        import pandas as pd

        held = [self._samples[store] for store in stores]
        held = [rows[rows["cell"].isin(names) & (rows["metric"] == metric)].astype(_TEXTS) for rows in held]
        rows = pd.concat(held, ignore_index=True)  # seeds in several stores, or parts of a cell
        if len(rows[[*_ANSWER, "value", "status"]].drop_duplicates()) > len(rows[_ANSWER].drop_duplicates()):
            return None
        return Sheet.of(rows.drop_duplicates(_ANSWER), names), [*range(len(names))]

    def _answered(self, row: int) -> np.ndarray:
        """Digests of a cell's samples and prompts, one an answer, wherever they lie."""
        none = np.array([], dtype=np.uint64)
        places = (row, *self.evidence.copies(row))
        held = [self._prompts[self._store(place)].get(self._cell(row), none) for place in places]
        return np.unique(np.concatenate(held))

    def _scored(self, row: int) -> int:
        """How many of a cell's samples have a score of any metric, wherever they lie."""
        tables = [self._samples[self._store(place)] for place in (row, *self.evidence.copies(row))]
        ids = [table["sample_id"][table["cell"] == self._cell(row)].astype(str) for table in tables]
        return len({*(one for own in ids for one in own)})

    def _store(self, row: int) -> int:
        return int(self.evidence.cells["store"].iloc[row])

    def _cell(self, row: int) -> str:
        return str(self.evidence.cells["cell"].iloc[row])

    @cached_property
    def _needed(self) -> dict[int, list[str]]:
        """Store -> its cells that some address has."""
        rows = sorted({row for one in self._wanted for row in self.evidence.candidates(one).tolist()})
        found: dict[int, list[str]] = {}
        for row in rows:
            found.setdefault(self._store(row), []).append(self._cell(row))
        return found

    @cached_property
    def _curves(self) -> DiagnosticEvidence:
        return DiagnosticEvidence.of(self.evidence)

    @cached_property
    def _samples(self) -> Mapping[int, pd.DataFrame]:
        return self._read(_scores)

    @cached_property
    def _sheets(self) -> Mapping[int, Sheet]:
        return {number: Sheet.of(self._samples[number], cells) for number, cells in self._needed.items()}

    @cached_property
    def _prompts(self) -> Mapping[int, Mapping[str, np.ndarray]]:
        """Store -> cell -> digests of its samples with their prompts."""
        columns = ["cell", "sample_id", "prompt_hash"]
        return self._read(lambda store, cells: _digests(frame(store.responses(cells, columns, coded=True))))

    @cached_property
    def _scorers(self) -> Mapping[tuple[int, str, str], tuple[str, ...]]:
        """(store, cell, metric) -> who gave its scores."""
        tables = self._read(lambda store, cells: store.metrics(cells, ["cell", "metric", *_SCORER]).to_pylist())
        return {
            (store, line["cell"], line["metric"]): tuple(str(line[name]) for name in _SCORER)
            for store, table in tables.items()
            for line in table
        }

    @cached_property
    def _responses(self) -> Mapping[int, pd.DataFrame]:
        columns = ["cell", "sample_id", "cluster", "status", "measured", "context_tokens"]
        columns += [one.column for one in REDUCTIONS.values()]
        return self._read(lambda store, cells: store.responses(cells, list(dict.fromkeys(columns))).to_pandas())

    @cached_property
    def _kept(self) -> Mapping[int, Mapping[str, Mapping[str, int]]]:
        """Store -> cell -> how many answers there are, kept more than asked, fell back (by reason) or saw text before a cut."""
        columns = ("cell", "fallback", "entries_asked", "entries_resident", "question_text_before_cut")
        return self._read(lambda store, cells: _kept(store.responses(cells, columns)))

    @cached_property
    def _timings(self) -> Mapping[int, pd.DataFrame]:
        return self._read(lambda store, cells: passes(store.timings(cells)))

    def _read(self, read: Any) -> dict[int, Any]:
        from mmkv_bench.store.store import Store

        return {number: read(Store(self.evidence.roots[number]), cells) for number, cells in self._needed.items()}


def _scores(store: Store, cells: Sequence[str]) -> pd.DataFrame:
    """The scores of cells, of those alone that were scored as they are: all answers, none made again since.

    Raises StoreError where scores, metrics and answers contradict each other.
    """
    scores = agreeing(store, store.samples(cells, SAMPLE_COLUMNS, coded=True), store.metrics(cells))
    return frame(scores)


def _kept(answers: pa.Table) -> dict[str, Counter[str]]:
    """Cell -> counts of its answers, see `EvidenceReader._kept`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    reasons = answers["fallback"].combine_chunks()
    of = answers["cell"].combine_chunks().take(pc.list_parent_indices(reasons))
    fell_back = pa.table({"cell": of, "what": pc.binary_join_element_wise("fallback", reasons.flatten(), " ")})
    over = pc.greater(answers["entries_resident"], answers["entries_asked"])
    parts = [
        fell_back,
        *(
            pa.table({"cell": kept, "what": pa.repeat(what, len(kept))})
            for what, kept in (
                (_ANSWERS, answers["cell"]),
                (_OVER, answers["cell"].filter(pc.fill_null(over, False))),
                (
                    "question text before a cut",
                    answers["cell"].filter(pc.greater(answers["question_text_before_cut"], 0)),
                ),
            )
        ),
    ]
    counts = pa.concat_tables(parts).group_by(["cell", "what"]).aggregate([([], "count_all")])
    found: dict[str, Counter[str]] = {}
    for cell, what, n in zip(*(counts[name].to_pylist() for name in ("cell", "what", "count_all")), strict=True):
        found.setdefault(cell, Counter())[what] = n
    return found


def _digests(answers: pd.DataFrame) -> dict[str, np.ndarray]:
    """Cell -> a digest of each sample with its prompt, uint64 [n]."""
    from pandas.util import hash_pandas_object

    digests = hash_pandas_object(answers[["sample_id", "prompt_hash"]], index=False).to_numpy()
    return {str(cell): digests[places] for cell, places in answers.groupby("cell", observed=True).indices.items()}


def _without_rows(address: Address, found: Measurement) -> Measurement:
    """A number that no rows hold, where it needs none; else with what it needs."""
    if found.state != NOT_RUN or found.why:
        return found
    size = cache_size(address)
    if size is not None:
        return replace(found, state=COMPUTED, value=size[0], why=size[1])
    peak = planned_peak(address)
    if peak is not None:
        return replace(found, state=PLANNED, value=peak[0], why=peak[1])
    return replace(found, why=lacking(address))


def _of(address: Address) -> int:
    """How many samples belong to a whole number; 0: unknown. A stand-in shows as many as there are."""
    return 0 if address.model == STAND_IN else samples_of(address.dataset)


def aligned(other: Scores, own: Scores) -> Scores:
    """Scores of another sheet with the samples and clusters of this one's: matched by their names."""
    if other.ids is own.ids:
        return other
    place = {name: number for number, name in enumerate(own.ids)}
    keep = np.array([name in place for name in other.sample_ids], dtype=bool)
    samples = np.array([place[name] for name in other.sample_ids[keep]], dtype=own.samples.dtype)
    order = np.argsort(samples, kind="stable")
    cluster = dict(zip(own.samples.tolist(), own.clusters.tolist(), strict=True))
    clusters = np.array([cluster.get(int(one), -1) for one in samples[order]], dtype=own.clusters.dtype)
    parts = None if other.parts is None else other.parts[keep][order]
    return Scores(samples[order], clusters, other.values[keep][order], parts, other.unjudged, own.ids)


def incomparable(a: Measurement, b: Measurement) -> str:
    """Why two numbers say nothing of what they differ by; empty where they do."""
    names = [name for name in (differing(a, b.shared),) if name]
    for one, two in zip(a.asked, b.asked, strict=False):
        names += ["scorer"] if one.scorer != two.scorer else []
        names += ["prompts"] if one.n == two.n and one.prompts != two.prompts else []
    return f"other {', '.join(dict.fromkeys(names))} than what it is compared with" if names else ""


def differing(a: Measurement, shared: Sequence[Shared]) -> str:
    """Names of what a number does not share with one that was made with this."""
    pairs = zip(a.shared, shared, strict=False)
    return ", ".join(dict.fromkeys(name for one, two in pairs for name, _ in sorted({*one} ^ {*two})))


def _mixed(parts: Sequence[Measurement]) -> tuple[str, ...]:
    """What parts of a mean were not all made with: it is of one model, in one precision."""
    values: dict[str, set[str]] = {}
    for name, value in (fact for part in parts for shared in part.shared for fact in shared if fact[0] in OF_MODEL):
        values.setdefault(name, set()).add(value)
    mixed = sorted(name for name, own in values.items() if len(own) > 1)
    return (f"its parts have several {', '.join(mixed)}",) if mixed else ()


def _joined(*words: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word for part in words for word in part))


def _wider(found: Mean, parts: Sequence[Measurement]) -> Mean:
    """A mean's interval where its parts share clusters: data sets may ask about the same photographs, and then what one of
    them was lucky in the other was too. Distances to the ends are joined with the correlation of the parts' cluster sums
    (Zou and Donner, Statistics in Medicine 27, 2008); parts of other sheets, and aggregates that are no means, share none."""
    if found.low is None or found.high is None:
        return found
    below = [part.number - part.low for part in parts if part.low is not None]
    above = [part.high - part.number for part in parts if part.high is not None]
    extra_below = extra_above = 0.0
    for i, j in combinations(range(len(parts)), 2):
        shared = _correlation(parts[i].scores, parts[j].scores)
        extra_below += 2 * shared * below[i] * below[j]
        extra_above += 2 * shared * above[i] * above[j]
    if not extra_below and not extra_above:
        return found
    k2 = len(parts) ** 2
    low = found.value - float(np.sqrt(max((found.value - found.low) ** 2 + extra_below / k2, 0.0)))
    return Mean(
        found.value, low, found.value + float(np.sqrt(max((found.high - found.value) ** 2 + extra_above / k2, 0.0)))
    )


def _correlation(a: Scores | None, b: Scores | None) -> float:
    """Of two data sets' means, over the clusters that both have."""
    if a is None or b is None or a.ids is not b.ids:
        return 0.0
    shared = np.intersect1d(a.clusters, b.clusters)
    if not len(shared):
        return 0.0
    sums = []
    for one in (a, b):
        index = np.unique(one.clusters, return_inverse=True)
        sums.append(dict(zip(index[0].tolist(), np.bincount(index[1], one.values - one.values.mean()), strict=True)))
    product = sum(sums[0][cluster] * sums[1][cluster] for cluster in shared.tolist())
    size = np.sqrt(sum(value**2 for value in sums[0].values()) * sum(value**2 for value in sums[1].values()))
    return float(product / size) if size else 0.0


def _behind(address: Address) -> tuple[Address, ...]:
    """The addresses that a number needs besides: what is subtracted, or the profile that it is a distance from."""
    if address.metric in REDUCTIONS and REDUCTIONS[address.metric].layers == "mad":
        return (replace(address, method=MethodSettings.of(address.method.name)),)
    return () if address.minus is None else (replace(address, method=address.minus, minus=None),)


def _of_each_seed(parts: Sequence[Measurement], combine: Callable[[Sequence[float]], float]) -> tuple[float, ...]:
    """What parts come to under each seed; one without seeds is the same under every one."""
    count = min((len(part.seeds) for part in parts if part.seeds), default=0)
    return tuple(combine([part.seeds[n] if part.seeds else part.number for part in parts]) for n in range(count))


def _whole(answers: int, of: int, match: Match) -> tuple[str, str]:
    if match.missing:
        return PART, f"seeds {', '.join(map(str, match.missing))} missing"
    return (PART, f"{answers:,} of {of:,}") if of and answers < of else (MEASURED, "")


def _ratios(answers: pd.DataFrame) -> np.ndarray:
    """Kept entries of each layer over the prompt's, float64 [n, layers]; heads are averaged."""
    kept = [[float(np.mean(layer)) for layer in one] for one in answers["kept"]]
    return np.array(kept) / answers["context_tokens"].to_numpy(np.float64)[:, None]


def _clause(text: str) -> str:
    return text.partition(" (")[0].partition(", and ")[0]
