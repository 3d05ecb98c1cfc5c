"""Scoring: stored answers go through lmms-eval's own filters, metrics and aggregation, without loading a model.

This file also decides which scores of a pass are valid, which were made from fillers, and who judged. Scorers also score a
sample under its category (`favor_acc_AS`, `relaxed_human_split`, `autodq_f1_stock`). A failed or unjudged sample must be
missing under its category too, or that metric would seem to cover all its samples: see `metrics_due`.
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
from mmkv_bench.judging.answers import NOT_JUDGED, JudgeAnswers
from mmkv_bench.judging.client import Probe, ScoringPass, asking, in_rounds
from mmkv_bench.judging.questions import JudgedMetric, prompts_digest


def metrics_due(
    spec: TaskSpec, docs: Documents, doc_ids: Iterable[int], judged: tuple[JudgedMetric, ...]
) -> dict[int, list[str]]:
    """Return document -> names of the metrics that the scorer gives for an answer.

    The names are those that the scorer returns for an empty answer, without a judge. The list is empty if the scorer
    needs a judge or an answer with text.
    """
    empty_answers = dict.fromkeys(doc_ids, "")
    if not empty_answers:
        return {}
    probe = Probe(judged)
    replay = Replay(spec, docs, empty_answers, probe)
    with asking(probe), suppress(ScoringError):
        replay.run(with_aggregates=False, over_samples=False)
    return {doc_id: replay.names_of(doc_id) for doc_id in empty_answers}


Lost = dict[int, dict[str, str]]
"""For each document and metric that is not judged: the reason ({doc_id: {metric: reason}})."""


def remove_unjudged_scores(
    scoring_pass: ScoringPass,
    values: dict[int, dict[str, float]],
    metrics: Callable[[int], Sequence[str]],
    kept: str = "",
) -> Lost:
    """Remove scores that a scorer made from fillers instead of a judge's answers.

    Return doc_id -> metric -> reason, for the removed or missing scores.

    values: doc_id -> metric -> score; changed in place.
    metrics: function from a doc_id to the metrics that the sample should have.
    kept: a metric whose scores stay, because no judge decides them.
    """
    reasons_by_owner: Lost = {}
    for owner in unjudged_samples(scoring_pass):
        wanted_metrics = metrics(owner)
        scores, reasons_of_owner = values.setdefault(owner, {}), reasons_by_owner.setdefault(owner, {})
        for metric, why in scoring_pass.unanswered.get(owner, {}).items():
            names = [name for name in scores if metric in (None, base_metric(name)) and base_metric(name) != kept]
            for name in names or (
                [metric] if metric else [name for name in wanted_metrics if name not in reasons_of_owner]
            ):
                reasons_of_owner[name] = why
                scores.pop(name, None)
        if owner in scoring_pass.refused:
            reasons_of_owner |= {
                name: scoring_pass.refused[owner]
                for name in wanted_metrics
                if name not in scores and name not in reasons_of_owner
            }
    return reasons_by_owner


def unjudged_samples(scoring_pass: ScoringPass) -> list[int]:
    """Return the doc_ids of samples with a question that the judge did not answer."""
    return sorted(owner for owner in {*scoring_pass.unanswered, *scoring_pass.refused} if owner is not None)


def reasons(scoring_pass: ScoringPass, lost: Lost, samples: int, aggregated: Iterable[str]) -> dict[str, str]:
    """Return metric -> `not judged: ...`, for each metric that lacks a judge's answer in a sample or in an aggregation.

    lost: doc_id -> metric -> reason. samples: number of all samples. aggregated: names of the aggregated metrics.
    """
    reason_by_name: dict[str, str] = {}
    for name in dict.fromkeys(name for gone in lost.values() for name in gone):
        reasons_of_name = [gone[name] for gone in lost.values() if name in gone]
        reason_by_name[name] = f"{NOT_JUDGED}: {len(reasons_of_name)} of {samples} samples: {reasons_of_name[0]}"
    for metric, why in scoring_pass.unanswered.get(None, {}).items():
        for name in aggregated:
            if metric in (None, base_metric(name)):
                reason_by_name.setdefault(name, f"{NOT_JUDGED}: lmms-eval's aggregation: {why}")
    return reason_by_name


def judged_by(
    scoring_pass: ScoringPass, names: Iterable[str], prompts: Mapping[str | None, str]
) -> dict[str, JudgedBy]:
    """Return metric -> the judge that scored it, for metrics with an answered question.

    names: the metrics. prompts: metric (None: all metrics) -> digest of the judge's prompts.
    """
    judges = {}
    for name in names:
        answered_questions = [
            each for each in scoring_pass.asked if each.answered and each.metric in (None, base_metric(name))
        ]
        if not answered_questions:
            continue
        temperatures = {each.question.temperature for each in answered_questions}
        judges[name] = JudgedBy(
            model=str(scoring_pass.answers.model),
            prompts=prompts.get(base_metric(name)) or prompts.get(None),
            temperature=temperatures.pop() if len(temperatures) == 1 else None,
        )
    return judges


def score(
    spec: TaskSpec, answers: Mapping[str, Answer], limit: int | None = None, judge: JudgeAnswers | None = None
) -> CellScores:
    """Score the stored answers of one cell (a method and budget) on one dataset.

    Args:
        spec: the dataset's task.
        answers: sample id -> answer.
        limit: number of samples of the cell; None takes all documents up to the last answer.
        judge: answers to the scorers' questions; None: no judge.

    Only `ok` answers reach the scorer. An `ok` answer to another prompt than the sample's is refused. Unless every sample has
    an `ok` answer, lmms-eval's aggregate is None, and the reason counts the others. Failed samples have rows with value None,
    for the configured metrics and for those that the scorer returns for an empty answer (`metrics_due`). Samples without any
    answer have no rows.

    Python's and numpy's random generators are seeded by task and document before each sample and restored afterwards. If a
    scorer cannot read a choice from an answer, `parse_failed` is 1. If it then draws a choice, the sample's scores are 0, but
    lmms-eval's aggregate keeps the drawn scores (see task_scorer.py). Caption metrics are scored per sample (see captions.py).

    A value that a scorer made from an unanswered question is no score: the sample's value is None, `not_judged` gives the
    reason, and lmms-eval's aggregate of that metric is left out.

    Raises:
        ScoringError: the scorer fails, or asks a judge past this package's proxy.
        DataError: an answer belongs to another task, document or prompt.
    """
    document_count = max((answer.doc_id + 1 for answer in answers.values()), default=1)
    docs = documents(spec, document_count if limit is None else limit)
    texts = checked_texts(spec, docs, answers)
    incomplete_reason = why_incomplete(docs, answers)
    (replay, aggregate), scoring_pass = in_rounds(
        spec.name,
        judge or JudgeAnswers(),
        lambda scoring_pass: _pass(spec, docs, texts, scoring_pass, with_aggregates=incomplete_reason is None),
    )
    failed_docs = [ref.doc_id for ref in docs.refs if ref.sample_id in answers and ref.doc_id not in texts]
    metrics_of_failed = metrics_due(spec, docs, [*failed_docs, *unjudged_samples(scoring_pass)], scoring_pass.judged)
    listed_metrics = list(spec.metrics) or _yaml_metrics(spec) or _metric_names(replay.values)
    taken_back = remove_unjudged_scores(
        scoring_pass,
        replay.values,
        lambda doc_id: list(dict.fromkeys([*listed_metrics, *metrics_of_failed[doc_id]])),
        kept=PARSE_FAILED,
    )
    not_judged = reasons(scoring_pass, taken_back, len(texts), aggregate)
    metric_names = dict.fromkeys([*aggregate, *_metric_names(replay.values)])
    return CellScores(
        samples=rows_of(
            spec, docs, answers, replay.values, replay.parts, taken_back, metrics_of_failed, parts_of_nothing(spec)
        ),
        aggregate=None
        if incomplete_reason
        else {name: value for name, value in aggregate.items() if name not in not_judged},
        reason=incomplete_reason,
        unaggregated=replay.unaggregated,
        judged=judged_by(
            scoring_pass,
            [name for name in metric_names if base_metric(name) != PARSE_FAILED],
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
    """Return metric (None: all metrics) -> digest of the judge's prompts; empty if no judge was asked.

    The digests cover the questions about the dataset's first two documents, with a fixed text in place of the answers.
    """
    if not any(asked.answered for asked in scoring_pass.asked):
        return {}
    texts_under_test = {ref.doc_id: UNDER_TEST for ref in docs.refs[:2]}
    key = spec.key(), len(texts_under_test)
    if key not in _PROMPTS:
        probe = Probe(scoring_pass.judged)
        with asking(probe), suppress(ScoringError):
            Replay(spec, docs, texts_under_test, probe).run(with_aggregates=True)
        _PROMPTS[key] = {
            metric: prompts_digest([each.question for each in probe.asked if each.metric == metric])
            for metric in {each.metric for each in probe.asked}
        }
    return _PROMPTS[key]


def checked_texts(spec: TaskSpec, docs: Documents, answers: Mapping[str, Answer]) -> dict[int, str]:
    """Return document -> text of its `ok` answer.

    Raises:
        DataError: an answer has no text, or belongs to another document or prompt.
    """
    answer_of_doc = {ref.doc_id: answers[ref.sample_id] for ref in docs.refs if ref.sample_id in answers}
    ok_answers = {doc_id: answer for doc_id, answer in answer_of_doc.items() if answer.status == "ok"}
    expected_hashes, texts = prompt_hashes(spec, set(ok_answers), len(docs.refs)), {}
    for doc_id, answer in ok_answers.items():
        sample_id = docs.refs[doc_id].sample_id
        if not isinstance(answer.text, str):
            raise DataError(
                f"the stored answer to sample {sample_id} of task {spec.name} is ok but has no text, so its row "
                "is broken; restore the row from a copy"
            )
        if (answer.doc_id, answer.prompt_hash) != (doc_id, expected_hashes[doc_id]):
            raise DataError(
                f"the stored answer to sample {sample_id} of task {spec.name} belongs to document {answer.doc_id} "
                f"and prompt {answer.prompt_hash[:12]}, but the data have document {doc_id} and prompt "
                f"{expected_hashes[doc_id][:12]}: the dataset or the task's prompt changed; retry=[changed] answers such "
                "samples again"
            )
        texts[doc_id] = answer.text
    return texts


def why_incomplete(docs: Documents, answers: Mapping[str, Answer]) -> str | None:
    """Return a text that counts the samples without an `ok` answer by status; None if every sample has one."""
    statuses = (answers[ref.sample_id].status if ref.sample_id in answers else "missing" for ref in docs.refs)
    counts = Counter(status for status in statuses if status != "ok")
    if not counts:
        return None
    status_counts = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    return f"{sum(counts.values())} of {len(docs.refs)} samples have no answer: {status_counts}"


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
    """Return the scores of all samples with an answer, failed samples included.

    values, parts: doc_id -> metric -> score, and the numbers from which a corpus score is computed; from a `Replay`.
    lost: doc_id -> metrics whose judge did not answer.
    due: doc_id of a failed sample -> the metrics that it should have (`metrics_due`).
    nothing: metric -> parts of a sample without a score, used if `parts` has none for the sample.
    """
    rows: list[SampleScore] = []
    # A failed sample gets rows of these metrics.
    headline_metrics = list(spec.metrics) or _metric_names(values) or _yaml_metrics(spec)
    for ref in docs.refs:
        answer = answers.get(ref.sample_id)
        if answer is None:
            continue
        if answer.status == "ok":
            scores: dict[str, float | None] = {**values.get(ref.doc_id, {}), **dict.fromkeys(lost.get(ref.doc_id, ()))}
        else:
            metrics_of_kind = [f"{metric}_{ref.kind}" for metric in headline_metrics if spec.is_mix]
            scores = dict.fromkeys([*headline_metrics, *metrics_of_kind, *due[ref.doc_id]])
        sample_parts = parts.get(ref.doc_id, {})
        rows += [
            SampleScore(
                *ref[1:3], metric, value, answer.status, sample_parts.get(metric, nothing.get(base_metric(metric)))
            )
            for metric, value in scores.items()
        ]
    return rows


def parts_of_nothing(spec: TaskSpec) -> dict[str, tuple[float, ...]]:
    """Return metric -> `parts` of a sample without a score (`metadata.parts_of_nothing` of the task's YAML)."""
    metadata = {} if spec.is_pages else task_config(spec).get("metadata")
    parts_by_metric = metadata.get("parts_of_nothing") if isinstance(metadata, Mapping) else None
    return {metric: tuple(map(float, parts)) for metric, parts in (parts_by_metric or {}).items()}


def _yaml_metrics(spec: TaskSpec) -> list[str]:
    return [str(entry["metric"]) for entry in task_config(spec).get("metric_list") or []]


def _metric_names(values: Mapping[int, Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(metric for scores in values.values() for metric in scores))
