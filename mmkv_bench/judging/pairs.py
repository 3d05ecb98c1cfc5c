"""Metrics of two samples together: Video-ChatGPT's consistency judges the answers to two forms of one question."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

PAIRED = {"gpt_eval_score_consistency": "video_name"}
"""Metric -> the field in which both samples of a pair agree."""


def pairs(fields: Sequence[Any]) -> list[tuple[int, int]]:
    """The documents that lmms-eval puts together: each with the next one of its video that is in no pair yet.

    fields: of each document in order. One without a partner is in no pair.
    """
    waiting: dict[Any, int] = {}
    found = []
    for doc_id, video in enumerate(fields):
        if video in waiting:
            found.append((waiting.pop(video), doc_id))
        else:
            waiting[video] = doc_id
    return found


def pair_score(first: Mapping[str, Any], second: Mapping[str, Any], aggregation: Callable[..., Any]) -> float:
    """The score of one pair: the task's own aggregation over it alone. It writes files into the working folder."""
    values = [copy.deepcopy(dict(first)), copy.deepcopy(dict(second))]  # it changes what it gets
    return float(aggregation(values, args=argparse.Namespace(output_path=".")))
