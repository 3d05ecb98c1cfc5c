"""The score of one sample, out of what lmms-eval's scorers return for it: a number, or a dict of one shape or another."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Mapping
from typing import Any

Aggregation = Callable[..., Any] | None  # none of what lmms-eval does not list as a metric
Extractor = Callable[[Any, Aggregation], float | None]

EXTRACTORS: dict[str, Extractor] = {}

# Scores of subsets that lmms-eval's scorer returns, but no list of metrics names.
BESIDE = {"vstar_direct_attributes_acc", "vstar_relative_position_acc"}


def extractor(*metrics: str) -> Callable[[Extractor], Extractor]:
    """Register a function for metrics whose per-sample values need one; it gets the value and the aggregation."""

    def register(function: Extractor) -> Extractor:
        EXTRACTORS.update(dict.fromkeys(metrics, function))
        return function

    return register


def sample_value(metric: str, value: Any, aggregation: Aggregation) -> float | None:
    """The sample's score, or None for a metric that exists only over many samples (captions, submissions).

    A registered extractor goes first; then a number is the score, and a dict's `score` is.
    """
    return EXTRACTORS[metric](value, aggregation) if metric in EXTRACTORS else plain_value(value)


def plain_value(value: Any) -> float | None:
    """A number, or the number that a dict holds as `score`."""
    if isinstance(value, Mapping):
        value = value.get("score")
    if isinstance(value, numbers.Real):
        return float(value)
    item = getattr(value, "item", None)  # a one-element array or tensor
    return float(item()) if item is not None and getattr(value, "size", 1) == 1 else None


@extractor("single", "cross", "average")
def hrbench(value: Any, aggregation: Aggregation) -> float | None:
    """HR-Bench: 1 for the right letter. Its aggregate is the mean over cyclic orders of the choices of their means."""
    return float(value["gpt_score"])


@extractor("WUPS")
def wups(value: Any, aggregation: Aggregation) -> float | None:
    """NExT-QA, open-ended: WUPS at threshold 0, the one that is aggregated."""
    return float(value["0"])


@extractor("mmmu_acc", "muirbench_score_overall", "mirb_score", "lvb_acc")
def aggregate_of_one(value: Any, aggregation: Aggregation) -> float | None:
    """Prediction and answer side by side; the metric is a mean of matches, so over one sample it is that match."""
    assert aggregation is not None, "these metrics are in lmms-eval's lists"
    options = {"args": None} if "args" in inspect.signature(aggregation).parameters else {}
    score = aggregation([value], **options)
    return float(score) if isinstance(score, numbers.Real) else None


@extractor("gpt_eval")
def worldqa(value: Any, aggregation: Aggregation) -> float | None:
    """WorldQA: the judge's words, or an answer that its aggregation reads or asks the judge about. Others: a number."""
    of_worldqa = isinstance(value, Mapping) and "question_idx" in value
    return aggregate_of_one(value, aggregation) if of_worldqa else plain_value(value)


@extractor("seed_all", "seed_image", "seed_video")
def prediction_is_answer(value: Any, aggregation: Aggregation) -> float | None:
    """Letters, compared as SEED-Bench's aggregation does (which also writes a file, so it is not called here)."""
    return float(value["pred"].strip().lower() == value["answer"].strip().lower())
