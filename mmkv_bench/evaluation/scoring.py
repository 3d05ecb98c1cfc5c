"""Scoring: stored answers go through lmms-eval's own filters, metrics and aggregation, with no model loaded.

What a scorer's last pass is worth is told here, too: which scores stand, which were made from fillers, and who judged.
Scorers score a sample under its category as well (`favor_acc_AS`, `relaxed_human_split`, `autodq_f1_stock`). A sample that
failed, or that no judge judged, has to be missing there, too, or such a metric would pass for one over all its samples:
`metrics_due`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from mmkv_bench.datasets.specs import TaskSpec
from mmkv_bench.errors import DataError, ScoringError
from mmkv_bench.evaluation.documents import Documents, documents, task_config
from mmkv_bench.evaluation.generating import prompt_hashes
from mmkv_bench.evaluation.replay import Replay
from mmkv_bench.evaluation.samples import Answer, CellScores, JudgedBy, SampleScore
from mmkv_bench.evaluation.task_scorer import PARSE_FAILED, base_metric
from mmkv_bench.judging.answers import JudgeAnswers
from mmkv_bench.judging.client import Probe, ScoringPass, asking, in_rounds
from mmkv_bench.judging.judge_config import NOT_JUDGED
from mmkv_bench.judging.questions import JudgedMetric, prompts_digest


def metrics_due(
    spec: TaskSpec, docs: Documents, doc_ids: Iterable[int], judged: tuple[JudgedMetric, ...]
) -> dict[int, list[str]]:
    """doc_id -> names of the metrics that the scorer returns for an empty answer, of those it can tell them for.

    A pass of its own around a fresh task, whose scores are thrown away; no judge is asked. A scorer that cannot do with an
    empty answer, or not without a judge, tells none for that sample.
    """
    empty = dict.fromkeys(doc_ids, "")
    if not empty:
        return {}
    probe = Probe(judged)
    replay = Replay(spec, docs, empty, probe)
    with asking(probe), suppress(ScoringError):
        replay.run(with_aggregates=False, over_samples=False)
    return {doc_id: replay.names_of(doc_id) for doc_id in empty}


Lost = dict[int, dict[str, str]]
"""doc_id -> metric -> why it is not judged."""


def take_back(
    scoring_pass: ScoringPass,
    values: dict[int, dict[str, float]],
    metrics: Callable[[int], Sequence[str]],
    kept: str = "",
) -> Lost:
    """Remove scores of fillers from `values`, and return what is missing.

    values: doc_id -> metric -> score. metrics: gives the metrics that a sample, by doc_id, is to have. kept: a metric that no
    judge decides.
    """
    lost: Lost = {}
    for owner in unheard(scoring_pass):
        wanted = metrics(owner)
        scores, gone = values.setdefault(owner, {}), lost.setdefault(owner, {})
        for metric, why in scoring_pass.unanswered.get(owner, {}).items():
            names = [name for name in scores if metric in (None, base_metric(name)) and base_metric(name) != kept]
            for name in names or ([metric] if metric else [name for name in wanted if name not in gone]):
                gone[name] = why
                scores.pop(name, None)
        if owner in scoring_pass.refused:
            gone |= {name: scoring_pass.refused[owner] for name in wanted if name not in scores and name not in gone}
    return lost


def unheard(scoring_pass: ScoringPass) -> list[int]:
    """The doc_ids of samples of which a question had no answer."""
    return sorted(owner for owner in {*scoring_pass.unanswered, *scoring_pass.refused} if owner is not None)


def reasons(scoring_pass: ScoringPass, lost: Lost, samples: int, aggregated: Iterable[str]) -> dict[str, str]:
    """Metric -> `not judged: ...`, for each metric that misses an answer in a sample or in lmms-eval's aggregation."""
    lines: dict[str, str] = {}
    for name in dict.fromkeys(name for gone in lost.values() for name in gone):
        whys = [gone[name] for gone in lost.values() if name in gone]
        lines[name] = f"{NOT_JUDGED}: {len(whys)} of {samples} samples: {whys[0]}"
    for metric, why in scoring_pass.unanswered.get(None, {}).items():
        for name in aggregated:
            if metric in (None, base_metric(name)):
                lines.setdefault(name, f"{NOT_JUDGED}: lmms-eval's aggregation: {why}")
    return lines


def judged_by(
    scoring_pass: ScoringPass, names: Iterable[str], prompts: Mapping[str | None, str]
) -> dict[str, JudgedBy]:
    """Metric -> who judged it, for each metric of `names` with an answer of the judge."""
    judges = {}
    for name in names:
        answered = [each for each in scoring_pass.asked if each.answered and each.metric in (None, base_metric(name))]
        if not answered:
            continue
        temperatures = {each.question.temperature for each in answered}
        judges[name] = JudgedBy(
            model=str(scoring_pass.answers.model),
            prompts=prompts.get(base_metric(name)) or prompts.get(None),
            temperature=temperatures.pop() if len(temperatures) == 1 else None,
        )
    return judges


def score(
    spec: TaskSpec, answers: Mapping[str, Answer], limit: int | None = None, judge: JudgeAnswers | None = None
) -> CellScores:
    """Scores of one cell on one dataset, from its stored answers.

    answers: sample id -> answer. limit: how many samples the cell is to have, None = as far as the answers reach.
    judge: where scorers' questions go; None: there is no judge.

    An answer belongs to one task, document and prompt: an `ok` answer to another prompt than the sample's is refused.
    Only `ok` answers reach the scorer. Unless every sample has one, lmms-eval's aggregate is None and the reason says
    how many have not; failed samples have rows with value None, of the config's metrics and of those that the scorer
    returns for an empty answer to them (see `metrics_due`); samples without any answer have no rows. Python's and
    numpy's random generators are seeded by task and document before each sample and restored afterwards. Where a scorer
    cannot read a choice out of an answer, `parse_failed` is 1; if it draws one then, the sample's scores are 0 here, and
    lmms-eval's aggregate holds what it drew (see task_scorer.py). Caption metrics are scored per sample (see captions.py).

    What a scorer made of a question without an answer is no score: the sample's value is None, `not_judged` says why, and
    lmms-eval's aggregate of that metric is left out.

    Raises ScoringError when the scorer fails or asks a judge past ours, DataError for foreign answers.
    """
    reach = max((answer.doc_id + 1 for answer in answers.values()), default=1)
    docs = documents(spec, reach if limit is None else limit)
    texts = checked_texts(spec, docs, answers)
    reason = why_incomplete(docs, answers)
    (replay, aggregate), scoring_pass = in_rounds(
        spec.name,
        judge or JudgeAnswers(),
        lambda scoring_pass: _pass(spec, docs, texts, scoring_pass, with_aggregates=reason is None),
    )
    failed = [ref.doc_id for ref in docs.refs if ref.sample_id in answers and ref.doc_id not in texts]
    due = metrics_due(spec, docs, [*failed, *unheard(scoring_pass)], scoring_pass.judged)
    listed = list(spec.metrics) or _listed(spec) or _scored(replay.values)
    lost = take_back(
        scoring_pass, replay.values, lambda doc_id: list(dict.fromkeys([*listed, *due[doc_id]])), kept=PARSE_FAILED
    )
    not_judged = reasons(scoring_pass, lost, len(texts), aggregate)
    named = dict.fromkeys([*aggregate, *_scored(replay.values)])
    return CellScores(
        samples=rows_of(spec, docs, answers, replay.values, replay.parts, lost, due, parts_of_nothing(spec)),
        aggregate=None if reason else {name: value for name, value in aggregate.items() if name not in not_judged},
        reason=reason,
        unaggregated=replay.unaggregated,
        unscored=tuple(replay.unscored),
        judged=judged_by(
            scoring_pass,
            [name for name in named if base_metric(name) != PARSE_FAILED],
            _prompts(spec, docs, scoring_pass),
        ),
        not_judged=not_judged,
    )


def _pass(
    spec: TaskSpec, docs: Documents, texts: Mapping[int, str], scoring_pass: ScoringPass, with_aggregates: bool
) -> tuple[Replay, dict[str, float]]:
    replay = Replay(spec, docs, texts, scoring_pass)
    return replay, replay.run(with_aggregates) if texts else {}


UNDER_TEST = "‹…›"
_PROMPTS: dict[tuple[str, int], dict[str | None, str]] = {}


def _prompts(spec: TaskSpec, docs: Documents, scoring_pass: ScoringPass) -> dict[str | None, str]:
    """Digests of the judge's prompts by metric: of the questions about the dataset's first two documents with one text
    in the place of the answers, so that they tell prompts and not answers apart. Empty where nobody was asked."""
    if not any(asked.answered for asked in scoring_pass.asked):
        return {}
    first = {ref.doc_id: UNDER_TEST for ref in docs.refs[:2]}
    key = spec.key(), len(first)
    if key not in _PROMPTS:
        probe = Probe(scoring_pass.judged)
        with asking(probe), suppress(ScoringError):
            Replay(spec, docs, first, probe).run(with_aggregates=True)
        _PROMPTS[key] = {
            metric: prompts_digest([each.question for each in probe.asked if each.metric == metric])
            for metric in {each.metric for each in probe.asked}
        }
    return _PROMPTS[key]


def checked_texts(spec: TaskSpec, docs: Documents, answers: Mapping[str, Answer]) -> dict[int, str]:
    """doc_id -> text, of the answers that are ok. Raises DataError for one without text, or of another document or prompt."""
    every = {ref.doc_id: answers[ref.sample_id] for ref in docs.refs if ref.sample_id in answers}
    ok = {doc_id: answer for doc_id, answer in every.items() if answer.status == "ok"}
    expected, texts = prompt_hashes(spec, set(ok), len(docs.refs)), {}
    for doc_id, answer in ok.items():
        sample_id = docs.refs[doc_id].sample_id
        if not isinstance(answer.text, str):
            raise DataError(
                f"the stored answer to sample {sample_id} of task {spec.name} is ok but has no text; its row is broken"
            )
        if (answer.doc_id, answer.prompt_hash) != (doc_id, expected[doc_id]):
            raise DataError(
                f"the stored answer to sample {sample_id} of task {spec.name} belongs to document {answer.doc_id} and prompt "
                f"{answer.prompt_hash[:12]}, the data have document {doc_id} and prompt {expected[doc_id][:12]}: the "
                "dataset or the task's prompt changed; retry=[changed] answers such samples again"
            )
        texts[doc_id] = answer.text
    return texts


def why_incomplete(docs: Documents, answers: Mapping[str, Answer]) -> str | None:
    """Count the samples without an answer, by how they ended; None where all have one."""
    ended = (answers[ref.sample_id].status if ref.sample_id in answers else "missing" for ref in docs.refs)
    counts = Counter(status for status in ended if status != "ok")
    if not counts:
        return None
    named = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    return f"{sum(counts.values())} of {len(docs.refs)} samples have no answer: {named}"


def rows_of(
    spec: TaskSpec,
    docs: Documents,
    answers: Mapping[str, Answer],
    values: Mapping[int, Mapping[str, float]],
    parts: Mapping[int, Mapping[str, tuple[float, ...]]],
    lost: Lost,
    due: Mapping[int, list[str]],
    nothing: Mapping[str, tuple[float, ...]],
) -> list[SampleScore]:
    """The scores of all samples with an answer, failed ones among them.

    values, parts: those of a pass; lost: doc_id -> metrics whose judge did not answer; due: see `metrics_due`; nothing:
    `parts_of_nothing`, of metrics that are not in `parts`.
    """
    rows: list[SampleScore] = []
    headline = list(spec.metrics) or _scored(values) or _listed(spec)  # a failed sample counts in these
    for ref in docs.refs:
        answer = answers.get(ref.sample_id)
        if answer is None:
            continue
        if answer.status == "ok":
            scores: dict[str, float | None] = {**values.get(ref.doc_id, {}), **dict.fromkeys(lost.get(ref.doc_id, ()))}
        else:
            of_kind = [f"{metric}_{ref.kind}" for metric in headline if spec.is_mix]
            scores = dict.fromkeys([*headline, *of_kind, *due[ref.doc_id]])
        sample_parts = parts.get(ref.doc_id, {})
        rows += [
            SampleScore(
                *ref[1:3], metric, value, answer.status, sample_parts.get(metric, nothing.get(base_metric(metric)))
            )
            for metric, value in scores.items()
        ]
    return rows


def parts_of_nothing(spec: TaskSpec) -> dict[str, tuple[float, ...]]:
    """Metric -> parts of a sample without a score, of a task whose YAML gives them as `metadata.parts_of_nothing`."""
    metadata = {} if spec.is_pages else task_config(spec).get("metadata")
    parts_of = metadata.get("parts_of_nothing") if isinstance(metadata, Mapping) else None
    return {metric: tuple(map(float, parts)) for metric, parts in (parts_of or {}).items()}


def _listed(spec: TaskSpec) -> list[str]:
    """The metrics of the task's YAML."""
    return [str(entry["metric"]) for entry in task_config(spec).get("metric_list") or []]


def _scored(values: Mapping[int, Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(metric for scores in values.values() for metric in scores))
