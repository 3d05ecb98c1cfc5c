"""Scores of many cells of a dataset. The scorer is asked once about each answer, even if many cells gave it.

A score depends on a document and an answer's text. It is computed by a new task with random generators seeded by task and
document alone (`replay.py`). So equal answers get equal scores, unless the scorer remembers other answers of a cell. This is
tested: the first and the last cell are also scored alone, in lmms-eval's whole loop around a separate task. If one number
differs, all cells are scored alone. So are tasks that ask a judge or score captions and pairs, whose scores combine several
samples.

lmms-eval's aggregates are computed for each cell by its own function, from the values that its scorer returned for the cell's
answers. A running score, for display only, is the score of a single answer while others are still to come.
"""

from __future__ import annotations

import copy
import numbers
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import eq
from typing import Any

from mmkv_bench.datasets.specs import TaskSpec
from mmkv_bench.errors import ScoringError
from mmkv_bench.evaluation.documents import Documents, documents, task_config
from mmkv_bench.evaluation.environment import scoring_errors
from mmkv_bench.evaluation.replay import Replay, count_parsed, scorer_surroundings
from mmkv_bench.evaluation.samples import Answer, CellScores, SampleScore
from mmkv_bench.evaluation.scoring import (
    checked_texts,
    metrics_due,
    parts_of_nothing,
    rows_of,
    score,
    why_incomplete,
)
from mmkv_bench.evaluation.task_scorer import seed
from mmkv_bench.judging.answers import JudgeAnswers
from mmkv_bench.judging.client import ScoringPass, asking
from mmkv_bench.judging.questions import JUDGED

LEAST = 4  # with fewer cells nothing is saved, because two cells are scored twice
AT_ONCE = 1 << 16  # answers per pass, whose requests are in memory
READ = 1 << 16  # answers of the cells whose rows are made together, or the answers of one cell
HELD = 1 << 16  # with more outcomes in memory, those of answers that the next cells do not give are dropped

Answers = Callable[[str], Mapping[str, Answer]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The scorer's result for one answer.

    values: metric -> score. parts: metric -> numbers from which a corpus score is computed.
    returned: what the scorer returned, for each of lmms-eval's filters.
    """

    values: Mapping[str, float]
    parts: Mapping[str, tuple[float, ...]]
    returned: Sequence[Mapping[str, Any]]


class Grader:
    """Scores a dataset's cells, several at a time, with the same results as `score` for each cell alone.

    reach: cell -> number of documents that it was asked about, for all cells that will be scored.
    answers: function that returns a cell's answers (sample id -> answer). It is called twice, before the scorer runs and when
    the cell is scored, so that only few cells' answers are in memory.
    failed: documents whose answer failed in some cell, if known.
    """

    def __init__(
        self,
        spec: TaskSpec,
        reach: Mapping[str, int],
        answers: Answers,
        judge: JudgeAnswers | None = None,
        failed: Collection[int] = (),
    ) -> None:
        self.spec, self.reach, self.answers, self.judge, self.failed = spec, reach, answers, judge, failed
        self._batches: dict[int, BatchGrader | None] = {}

    def scores(self, cells: Sequence[str]) -> Iterator[tuple[str, CellScores]]:
        """Yield (cell, scores) for these cells in order. Their distinct answers are in memory together.

        Raises:
            ScoringError, DataError: as `score` does.
        """
        for limit, group in groupby(cells, self.reach.__getitem__):
            names, batch = list(group), self._batch(limit)
            if batch is None or not _ask_about(batch, map(self.answers, names)):
                for cell in names:
                    yield cell, score(self.spec, self.answers(cell), limit, self.judge)
                continue
            groups_at_once = max(READ // limit, 1)
            for some in (names[start : start + groups_at_once] for start in range(0, len(names), groups_at_once)):
                yield from zip(some, batch.scores([self.answers(cell) for cell in some]), strict=True)

    def _batch(self, limit: int) -> BatchGrader | None:
        """Return the batch grader for cells that were asked about `limit` documents; None if the cells must be scored
        one by one.

        That is so if there are few cells, a judge scores them, or the batch grader failed its test.
        """
        if limit not in self._batches:
            cells = [cell for cell, reach in self.reach.items() if reach == limit]
            is_single = len(cells) < LEAST or self.spec.name in JUDGED
            self._batches[limit] = None if is_single else self._batch_if_exact(limit, cells[0], cells[-1])
        return self._batches[limit]

    def _batch_if_exact(self, limit: int, *cells: str) -> BatchGrader | None:
        """Return a batch grader if its scores of the given cells equal those of `score`, otherwise None."""
        docs = documents(self.spec, limit)
        batch = BatchGrader(self.spec, docs, [doc_id for doc_id in self.failed if doc_id < limit])
        answers = [self.answers(cell) for cell in cells]
        if not _ask_about(batch, answers):
            return None
        is_equal = all(map(eq, (score(self.spec, each, limit) for each in answers), batch.scores(answers)))
        return batch if is_equal else None


def _ask_about(batch: BatchGrader, cells: Iterable[Mapping[str, Answer]]) -> bool:
    """Score the distinct answers of the cells. Return False if the cells must be scored one by one instead.

    That is so if `BatchGrader.ask` refuses, or if the scorer failed (scoring one by one then shows in which cell).
    """
    texts: dict[int, dict[str | None, None]] = {}
    for answers in cells:
        for answer in answers.values():
            if answer.status == "ok":
                texts.setdefault(answer.doc_id, {})[answer.text] = None
    try:
        return batch.ask(texts)
    except ScoringError:
        return False


class SharedReplay(Replay):
    """A pass of the scorer over several answers per document, without aggregation.

    Scores have keys (doc_id, number of the answer).
    """

    def __init__(self, spec: TaskSpec, docs: Documents) -> None:
        super().__init__(spec, docs, {}, ScoringPass(JudgeAnswers(), ()))
        self.returned: dict[tuple[int, int], list[dict[str, Any]]] = {}
        self.opened = False

    def outcomes(self, answers: Sequence[tuple[int, str]]) -> list[Outcome] | None:
        """Return the scorer's result for each answer (doc_id, text); None if a score depends on several samples or on a
        judge.

        Raises:
            ScoringError: the scorer failed.
        """
        config = None if self.opened else task_config(self.spec)
        with scorer_surroundings(self.spec), asking(self.scoring_pass), scoring_errors(self.spec.name, self._where):
            if config is not None:
                self.open(config, False)
                self.opened = True
            self.task.score_answers(answers)
        keys = [(doc_id, number) for number, (doc_id, _) in enumerate(answers)]
        outcomes = [
            Outcome(self.values[key], self.parts.get(key, {}), self.returned[key])
            for key in keys
            if key in self.returned
        ]
        for results in (self.values, self.parts, self.passes, self.returned):
            results.clear()
        is_independent = not (self.captions or self.halves or self.scoring_pass.asked or self.scoring_pass.unanswered)
        return outcomes if is_independent else None

    def _doc(self, key: tuple[int, int]) -> int:
        return key[0]

    def _after(self, key: tuple[int, int], metrics: Mapping[str, Any], results: list) -> None:
        super()._after(key, metrics, results)
        self.returned.setdefault(key, []).append(dict(metrics))


class BatchGrader:
    """Scorer of many cells of one dataset, which scores each distinct answer once.

    failed: documents whose answer failed in some cell, if known.
    """

    def __init__(self, spec: TaskSpec, docs: Documents, failed: Collection[int] = ()) -> None:
        self.spec, self.docs, self.failed = spec, docs, failed
        self.outcomes: dict[int, dict[str, Outcome]] = {ref.doc_id: {} for ref in docs.refs}  # by answer text
        self.due: dict[int, list[str]] = {}
        self.nothing = parts_of_nothing(spec)
        self.aggregating = Replay(spec, docs, {}, ScoringPass(JudgeAnswers(), ()))
        self.opened = False

    def ask(self, texts: Mapping[int, Collection[str | None]]) -> bool:
        """Score the answers of `texts` (doc_id -> texts) that have no score yet. Return True if they were scored.

        Return False if a score depends on several samples or a judge, or an answer is malformed or belongs to no
        document.
        """
        answers = {doc_id: [text for text in each if isinstance(text, str)] for doc_id, each in texts.items()}
        if any(doc_id not in self.outcomes or len(answers[doc_id]) < len(each) for doc_id, each in texts.items()):
            return False  # foreign or broken answers, which `score` refuses with a reason
        known_outcomes = self.outcomes
        texts_left = [
            (doc_id, text) for doc_id, each in answers.items() for text in each if text not in known_outcomes[doc_id]
        ]
        if sum(map(len, known_outcomes.values())) > HELD:
            self.outcomes = {
                doc_id: {text: outcomes[text] for text in answers.get(doc_id, ()) if text in outcomes}
                for doc_id, outcomes in known_outcomes.items()
            }
        for start in range(0, len(texts_left), AT_ONCE):
            texts_at_once, replay = texts_left[start : start + AT_ONCE], SharedReplay(self.spec, self.docs)
            outcomes = replay.outcomes(texts_at_once)
            replay.close()
            if outcomes is None:
                return False
            for (doc_id, text), outcome in zip(texts_at_once, outcomes, strict=True):
                self.outcomes[doc_id][text] = outcome
        if not self.opened:
            config = task_config(self.spec)
            with scorer_surroundings(self.spec):
                self.aggregating.open(config, True)
            self.opened = True
        return True

    def scores(self, cells: Sequence[Mapping[str, Answer]]) -> list[CellScores]:
        """Return the scores of each cell, equal to those of `score`. cells: answers of each cell, by sample id."""
        texts = [checked_texts(self.spec, self.docs, answers) for answers in cells]
        outcomes = [{doc_id: self.outcomes[doc_id][text] for doc_id, text in each.items()} for each in texts]
        reasons = [why_incomplete(self.docs, answers) for answers in cells]
        with scorer_surroundings(self.spec):
            aggregates: list[tuple[dict[str, float] | None, dict[str, str]]] = [
                (None, {}) if reason else self._aggregates(each) for each, reason in zip(outcomes, reasons, strict=True)
            ]
        return [
            CellScores(self._rows(answers, each), aggregate, reason, unaggregated)
            for answers, each, reason, (aggregate, unaggregated) in zip(
                cells, outcomes, reasons, aggregates, strict=True
            )
        ]

    def _rows(self, answers: Mapping[str, Answer], outcomes: Mapping[int, Outcome]) -> list[SampleScore]:
        """Return the scores of one cell's samples, failed samples included."""
        refs = self.docs.refs
        due = self._due([ref.doc_id for ref in refs if ref.sample_id in answers and ref.doc_id not in outcomes])
        values = {doc_id: dict(outcome.values) for doc_id, outcome in outcomes.items()}
        count_parsed(values)
        parts_of_doc = {doc_id: outcome.parts for doc_id, outcome in outcomes.items()}
        return rows_of(self.spec, self.docs, answers, values, parts_of_doc, {}, due, self.nothing)

    def _due(self, failed: Sequence[int]) -> Mapping[int, list[str]]:
        """Return document with a failed answer -> the metrics that a good answer would have had.

        `metrics_due` reads the whole split, so the documents that failed in any cell are looked up together.
        """
        if new_docs := [doc_id for doc_id in failed if doc_id not in self.due]:
            self.due |= metrics_due(self.spec, self.docs, sorted({*new_docs, *self.failed} - self.due.keys()), ())
        if all(self.due[doc_id] for doc_id in failed):
            return self.due
        # After a failure the scorer returned no metrics for later documents.
        return metrics_due(self.spec, self.docs, failed, ())

    def _aggregates(self, outcomes: Mapping[int, Outcome]) -> tuple[dict[str, float], dict[str, str]]:
        """Return (metric -> lmms-eval's aggregate, metric without an aggregate -> reason) of one cell."""
        replay = self.aggregating
        returned: dict[tuple[str, str], list] = {}
        for number, name in enumerate(replay.task.filter_names):
            for doc_id in sorted(outcomes):
                for metric, value in outcomes[doc_id].returned[number].items():
                    is_number = type(value) in (float, int, bool) or isinstance(value, numbers.Number)
                    returned.setdefault((metric, name), []).append(value if is_number else copy.deepcopy(value))
        replay.unaggregated, replay.task.aggregation_errors = {}, {}
        seed(replay.identity(max(outcomes)))
        aggregates = replay.aggregates(replay.task.aggregated(returned))
        return aggregates, replay.unaggregated


class RunningScores:
    """Scores of single answers of one dataset, equal to the scores that the score stage will give.

    Scores that combine several samples (captions, pairs, corpus metrics) or come from a judge are left out.

    Raises:
        MMKVError: the task cannot be loaded, or its scorer asks a judge at another address.
    """

    def __init__(self, spec: TaskSpec, limit: int | None) -> None:
        self._spec, self._replay = spec, SharedReplay(spec, documents(spec, limit))

    def of(self, answers: Sequence[tuple[int, str]]) -> list[dict[str, float]] | None:
        """Return metric -> score of each answer (doc_id, text); None if a score depends on several samples or on a judge.

        Only metrics that are means over samples are scored; if the dataset's configuration names metrics, only these.

        Raises:
            ScoringError: the scorer failed.
        """
        outcomes = None if self._spec.name in JUDGED else self._replay.outcomes(answers)
        if outcomes is None:
            return None
        wanted_metrics = self._spec.metrics
        return [
            {
                name: value
                for name, value in outcome.values.items()
                if name not in outcome.parts and (not wanted_metrics or name in wanted_metrics)
            }
            for outcome in outcomes
        ]
