"""Scores of single answers while others are still to come, for who watches a run: those that the score stage will give them.

A score is made of a document and a text, from random generators that are set by the document alone (`replay.py`). What is
made of several samples (captions, pairs, corpus metrics), or by a judge, has no running score.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmkv_bench.datasets.task_spec import TaskSpec
from mmkv_bench.evaluation.documents import documents, task_config
from mmkv_bench.evaluation.environment import harness, task_environment
from mmkv_bench.evaluation.grader import SharedReplay
from mmkv_bench.evaluation.replay import scratch_folder
from mmkv_bench.evaluation.sample_values import state_kept
from mmkv_bench.evaluation.scorer_code import refuse_other_judges
from mmkv_bench.evaluation.task_errors import scoring_errors
from mmkv_bench.judging.client import asking
from mmkv_bench.judging.known_judges import JUDGED
from mmkv_bench.judging.proxy import proxy


class RunningScores:
    """Of one dataset.

    Raises:
        MMKVError: a task that cannot be loaded, or whose scorer asks a judge elsewhere.
    """

    def __init__(self, spec: TaskSpec, limit: int | None) -> None:
        self._spec, self._module = spec, harness(spec.offline)
        self._replay = SharedReplay(spec, documents(spec, limit), {})
        self._opened = False

    def of(self, answers: Sequence[tuple[int, str]]) -> list[dict[str, float]] | None:
        """The metrics of each (doc_id, text); None where a score is not of one sample alone, or a judge's.

        Raises:
            ScoringError: the scorer failed.
        """
        replay = self._replay
        if self._spec.name in JUDGED:
            return None
        with (
            self._module.quiet(),
            task_environment(self._spec.media_root),
            state_kept(),
            scratch_folder(),
            asking(replay.scoring_pass),
            scoring_errors(self._spec.name, lambda: "a running score"),
        ):
            if not self._opened:
                self._open()
            replay.task.score_answers(list(enumerate(answers)))
        found = [self._means((doc_id, number)) for number, (doc_id, _) in enumerate(answers)]
        for kept in (replay.values, replay.parts, replay.passes, replay.returned):
            kept.clear()
        return found if replay.alone else None

    def _open(self) -> None:
        self._replay.open(self._module, task_config(self._spec), False)
        if not self._spec.is_pages:
            proxy().listen()
            refuse_other_judges(self._spec.name, self._replay.task, proxy().root)
        self._opened = True

    def _means(self, key: tuple[int, int]) -> dict[str, float]:
        """The metrics of one answer whose headline is a mean over samples: the configuration's, else all."""
        parts, wanted = self._replay.parts.get(key, {}), self._spec.metrics
        return {
            name: value
            for name, value in self._replay.values.get(key, {}).items()
            if name not in parts and (not wanted or name in wanted)
        }
