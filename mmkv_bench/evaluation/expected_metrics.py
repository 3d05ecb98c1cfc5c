"""Which metrics a sample without a score would have: those that the task's scorer returns for an empty answer to it.

Scorers score a sample under its category too (`favor_acc_AS`, `relaxed_human_split`, `autodq_f1_stock`). A sample that
failed, or that no judge judged, has to be missed there as well, or such a metric would pass for one over all its samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from mmkv_bench.datasets.task_spec import TaskSpec
from mmkv_bench.errors import ScoringError
from mmkv_bench.evaluation.documents import Documents
from mmkv_bench.evaluation.replay import Replay
from mmkv_bench.judging.client import Probe, asking
from mmkv_bench.judging.known_judges import JudgedMetric


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
        replay.name_metrics()
    return {doc_id: replay.names_of(doc_id) for doc_id in empty}
