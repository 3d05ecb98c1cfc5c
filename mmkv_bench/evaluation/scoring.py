"""Scoring: stored answers go through lmms-eval's own filters, metrics and aggregation, with no model loaded."""

from __future__ import annotations

import numbers
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import DataError
from mmkv_bench.evaluation.captions import Captioned, caption_scores, holds_caption, kind_of
from mmkv_bench.evaluation.contract import Answer, CellScores, SampleRef, SampleScore, TaskSpec
from mmkv_bench.evaluation.documents import Documents, documents, task_config
from mmkv_bench.evaluation.environment import harness, task_environment
from mmkv_bench.evaluation.extract import BESIDE, sample_value
from mmkv_bench.evaluation.generating import expected_prompts
from mmkv_bench.evaluation.judges import require_judge
from mmkv_bench.evaluation.parsing import PARSE_FAILED, guessed, reads_choices, seed, state, state_kept, unread
from mmkv_bench.evaluation.task_errors import scoring_errors, task_errors

if TYPE_CHECKING:
    from lmms_eval.api.instance import Instance


def score(spec: TaskSpec, answers: Mapping[str, Answer], limit: int | None = None) -> CellScores:
    """Scores of one cell on one dataset, from its stored answers.

    answers: sample id -> answer. limit: how many samples the cell is to have, None = as far as the answers reach.

    An answer belongs to one task, document and prompt: an `ok` answer to another prompt than the sample's is refused.
    Only `ok` answers reach the scorer. Unless every sample has one, lmms-eval's aggregate is None and the reason says
    how many have not; failed samples have rows with value None, samples without any answer have no rows. Python's and
    numpy's random generators are seeded by task and document before each sample and restored afterwards. Where a scorer
    cannot read a choice out of an answer, `parse_failed` is 1; if it draws one then, the sample's scores are 0 here, and
    lmms-eval's aggregate holds what it drew (see parsing.py). Caption metrics are scored per sample (see captions.py).

    Raises ScoringError when the scorer fails or needs a judge that is not configured, DataError for foreign answers.
    """
    reach = max((answer.doc_id + 1 for answer in answers.values()), default=1)
    docs = documents(spec, reach if limit is None else limit)
    texts = {
        ref.doc_id: answers[ref.sample_id].text
        for ref in docs.refs
        if ref.sample_id in answers and answers[ref.sample_id].status == "ok"
    }
    _check_prompts(spec, docs, answers, texts)
    reason = _why_incomplete(docs, answers)
    replay = _Replay(spec, docs, texts)
    aggregate = replay.run(with_aggregates=reason is None) if texts else {}
    return CellScores(
        samples=_rows(spec, docs, answers, replay.values, replay.parts),
        aggregate=None if reason else aggregate,
        reason=reason or replay.unaggregated,
        unscored=tuple(replay.unscored),
    )


class _Replay:
    """One pass of lmms-eval's loop over the answered documents, around a fresh task.

    values: doc_id -> metric -> score; parts: doc_id -> metric -> what corpus scores are made of; unscored: metrics
    without per-sample scores (dict as an ordered set); unaggregated: why lmms-eval's aggregation of some metrics failed.
    With several filters, metrics are named "metric,filter".
    """

    def __init__(self, spec: TaskSpec, docs: Documents, texts: Mapping[int, str]) -> None:
        self.spec, self.docs, self.texts = spec, docs, texts
        self.values: dict[int, dict[str, float]] = {}
        self.parts: dict[int, dict[str, tuple[float, ...]]] = {}
        self.unscored: dict[str, None] = {}
        self.unaggregated: str | None = None
        self.captions: dict[str, dict[int, Captioned]] = {}  # metric -> doc_id -> caption
        self.position: SampleRef | None = None
        self.passes: dict[int, int] = {}  # doc_id -> how many filters' outputs were scored

    def run(self, with_aggregates: bool) -> dict[str, float]:
        """Returns lmms-eval's aggregates by metric."""
        module, name = harness(self.spec.offline), self.spec.name
        config = task_config(self.spec)
        with module.quiet(), task_environment(self.spec.media_root), state_kept(), _scratch_folder():
            with task_errors(name):
                self.task = module.ScoringTask(
                    config, self.docs.bare, set(self.texts), with_aggregates, self._before, self._after
                )
            require_judge(name, self.task)
            with scoring_errors(name, self._where):
                results = module.run_loop(self.task, module.Respondent(self._respond), limit=len(self.docs.refs))
                self._score_captions()
        self._count_parsed()
        return self._aggregates(results)

    def _respond(self, instance: Instance) -> str:
        return self.texts[instance.doc_id]

    def _before(self, doc_id: int) -> None:
        self.position = self.docs.refs[doc_id]
        seed(self._identity(doc_id))
        self.state = state()

    def _identity(self, doc_id: int) -> str:
        return f"{self.spec.name}/{doc_id}"

    def _after(self, doc_id: int, metrics: Mapping[str, Any], results: list) -> None:
        number = self.passes[doc_id] = self.passes.get(doc_id, -1) + 1
        functions = self.task.metric_functions
        guess = state() != self.state and guessed(
            self._identity(doc_id), metrics, lambda: self.task.scored(doc_id, results)
        )
        found = self.values.setdefault(doc_id, {})
        for metric, raw in metrics.items():
            if metric not in functions and metric not in BESIDE:
                continue
            name = self._name(metric, number)
            if kind_of(metric) and holds_caption(raw):
                self.captions.setdefault(name, {})[doc_id] = Captioned(raw["pred"], tuple(raw["answer"]))
                continue
            value = sample_value(metric, raw, functions.get(metric))
            if value is None:
                self.unscored[name] = None
            else:
                found[name] = 0.0 if guess and self._rising(metric) else value
        if guess or reads_choices(metrics, self.task.config.process_results):
            found[self._name(PARSE_FAILED, number)] = float(guess or unread(metrics))

    def _name(self, metric: str, number: int) -> str:
        filters = self.task.filter_names
        return metric if len(filters) == 1 else f"{metric},{filters[number]}"

    def _rising(self, metric: str) -> bool:
        """Whether more is better; a guess on a metric where less is better keeps what was drawn."""
        return metric in BESIDE or self.task.higher_is_better().get(metric) is not False

    def _count_parsed(self) -> None:
        """One guess makes the task one whose answers can be unreadable: then every sample tells whether its was."""
        for name in {name for found in self.values.values() for name in found if name.startswith(PARSE_FAILED)}:
            for found in self.values.values():
                found.setdefault(name, 0.0)

    def _score_captions(self) -> None:
        """Scores of the collected captions: of each filter's own, over the references of all documents."""
        for own in {name.partition(",")[2] for name in self.captions}:
            names = {name: kind_of(name.partition(",")[0]) for name in self.captions if name.partition(",")[2] == own}
            given = self.captions[next(iter(names))]
            every = {ref.doc_id: given.get(ref.doc_id) or self._without_caption(ref.doc_id) for ref in self.docs.refs}
            scored = caption_scores(names.values(), every)
            for name, kind in names.items():
                for doc_id, (value, parts) in scored[kind].items():
                    if value is not None:
                        self.values.setdefault(doc_id, {})[name] = value
                    if parts is not None:
                        self.parts.setdefault(doc_id, {})[name] = parts

    def _without_caption(self, doc_id: int) -> Captioned:
        """The references of a document without an answer, as the scorer hands them out for an empty one."""
        for metric, raw in self.task.scored(doc_id, [""]).items():
            if kind_of(metric) and holds_caption(raw):
                return Captioned(None, tuple(raw["answer"]))
        raise DataError(f"sample {self.docs.refs[doc_id].sample_id} of task {self.spec.name} has no reference captions")

    def _where(self) -> str:
        return f"sample {self.position.sample_id}" if self.position else "its start"

    def _aggregates(self, results: Mapping[str, Any]) -> dict[str, float]:
        found = {}
        for key, value in results.items():  # "metric,filter" -> number, and more that is none
            metric, comma, _ = key.partition(",")
            if comma and metric in self.task.metric_functions and isinstance(value, numbers.Real):
                found[metric if len(self.task.filter_names) == 1 else key] = float(value)
        if self.task.aggregation_errors:
            metric, error = next(iter(self.task.aggregation_errors.items()))
            self.unaggregated = f"lmms-eval's aggregation of {metric} failed: {error!r}"
        return found


def _check_prompts(spec: TaskSpec, docs: Documents, answers: Mapping[str, Answer], texts: Mapping[int, str]) -> None:
    expected = expected_prompts(spec, docs, set(texts))
    for doc_id, text in texts.items():
        sample_id = docs.refs[doc_id].sample_id
        given = answers[sample_id]
        if not isinstance(text, str):
            raise DataError(
                f"the stored answer to sample {sample_id} of task {spec.name} is ok but has no text; its row is broken"
            )
        if (given.doc_id, given.prompt_hash) != (doc_id, expected[doc_id]):
            raise DataError(
                f"the stored answer to sample {sample_id} of task {spec.name} belongs to document {given.doc_id} and prompt "
                f"{given.prompt_hash[:12]}, the data have document {doc_id} and prompt {expected[doc_id][:12]}: the "
                "dataset or the task's prompt changed; generate the answers again"
            )


def _why_incomplete(docs: Documents, answers: Mapping[str, Answer]) -> str | None:
    counts: dict[str, int] = {}
    for ref in docs.refs:
        status = answers[ref.sample_id].status if ref.sample_id in answers else "missing"
        if status != "ok":
            counts[status] = counts.get(status, 0) + 1
    if not counts:
        return None
    named = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    return f"{sum(counts.values())} of {len(docs.refs)} samples have no answer: {named}"


def _rows(
    spec: TaskSpec,
    docs: Documents,
    answers: Mapping[str, Answer],
    values: Mapping[int, Mapping[str, float]],
    parts: Mapping[int, Mapping[str, tuple[float, ...]]],
) -> list[SampleScore]:
    rows = []
    headline = _headline(spec, values)
    for ref in docs.refs:
        answer = answers.get(ref.sample_id)
        if answer is None:
            continue
        if answer.status == "ok":
            scores = values.get(ref.doc_id, {})
        else:
            scores = dict.fromkeys([*headline, *(f"{metric}_{ref.kind}" for metric in headline if spec.is_mix)])
        own = parts.get(ref.doc_id, {})
        rows += [SampleScore(*ref[1:3], metric, scores[metric], answer.status, own.get(metric)) for metric in scores]
    return rows


def _headline(spec: TaskSpec, values: Mapping[int, Mapping[str, float]]) -> list[str]:
    """The metrics a failed sample counts in: those of the config, else those seen, else those of the task's YAML."""
    if spec.metrics:
        return list(spec.metrics)
    seen = list(dict.fromkeys(metric for scores in values.values() for metric in scores))
    return seen or [str(entry["metric"]) for entry in task_config(spec).get("metric_list") or []]


@contextmanager
def _scratch_folder() -> Iterator[None]:
    """Some tasks drop files into the working directory when they aggregate; nobody reads them."""
    with tempfile.TemporaryDirectory(prefix="mmkv_bench_") as folder, chdir(folder):
        yield
