"""What a scorer's last pass is worth: which scores stand, which were made from fillers, and who judged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from mmkv_bench.evaluation.contract import JudgedBy
from mmkv_bench.judging.client import Asked, ScoringPass
from mmkv_bench.judging.question import prompts_digest

NOT_JUDGED = "not judged"
"""Begins the reason of every metric that lacks a judge's answer."""

Lost = dict[int, dict[str, str]]
"""doc_id -> metric -> why it is not judged."""


def take_back(
    scoring_pass: ScoringPass,
    values: dict[int, dict[str, float]],
    metrics: Callable[[int], Sequence[str]],
    kept: str = "",
) -> Lost:
    """Remove from `values` what scorers made of fillers, and tell what is missing.

    values: doc_id -> metric -> score. metrics: tells those that a sample, by doc_id, is to have. kept: a metric that no judge
    decides.
    """
    lost: Lost = {}
    for owner in unheard(scoring_pass):
        wanted = metrics(owner)
        found, gone = values.setdefault(owner, {}), lost.setdefault(owner, {})
        for metric, why in scoring_pass.unanswered.get(owner, {}).items():
            names = [name for name in found if metric in (None, base(name)) and base(name) != kept]
            for name in names or ([metric] if metric else [name for name in wanted if name not in gone]):
                gone[name] = why
                found.pop(name, None)
        if owner in scoring_pass.refused:
            gone |= {name: scoring_pass.refused[owner] for name in wanted if name not in found and name not in gone}
    return lost


def unheard(scoring_pass: ScoringPass) -> list[int]:
    """The doc_ids of samples of which a question had no answer."""
    return sorted(owner for owner in {*scoring_pass.unanswered, *scoring_pass.refused} if owner is not None)


def reasons(scoring_pass: ScoringPass, lost: Lost, samples: int, aggregated: Iterable[str]) -> dict[str, str]:
    """Metric -> `not judged: ...`, for each metric that misses an answer in a sample or in lmms-eval's aggregation."""
    found: dict[str, str] = {}
    for name in dict.fromkeys(name for gone in lost.values() for name in gone):
        whys = [gone[name] for gone in lost.values() if name in gone]
        found[name] = f"{NOT_JUDGED}: {len(whys)} of {samples} samples: {whys[0]}"
    for metric, why in scoring_pass.unanswered.get(None, {}).items():
        for name in aggregated:
            if metric in (None, base(name)):
                found.setdefault(name, f"{NOT_JUDGED}: lmms-eval's aggregation: {why}")
    return found


def judged_by(
    scoring_pass: ScoringPass, names: Iterable[str], prompts: Mapping[str | None, str]
) -> dict[str, JudgedBy]:
    """Metric -> who judged it, for each metric of `names` with an answer of the judge."""
    found = {}
    for name in names:
        answered = [asked for asked in scoring_pass.asked if asked.answered and asked.metric in (None, base(name))]
        if not answered:
            continue
        temperatures = {asked.question.temperature for asked in answered}
        found[name] = JudgedBy(
            model=str(scoring_pass.ledger.model),
            prompts=prompts.get(base(name)) or prompts.get(None),
            temperature=temperatures.pop() if len(temperatures) == 1 else None,
        )
    return found


def prompts_of(asked: Sequence[Asked]) -> dict[str | None, str]:
    """Metric (None: unknown) -> digest of its questions, in their order."""
    return {
        metric: prompts_digest([one.question for one in asked if one.metric == metric])
        for metric in {one.metric for one in asked}
    }


def base(name: str) -> str:
    """A metric's name without the filter's: `gpt_eval,flexible` is of `gpt_eval`."""
    return name.partition(",")[0]
