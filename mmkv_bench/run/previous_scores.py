"""A judge's earlier scores outlive a pass in which the judge is not there: what it gave is never replaced by nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mmkv_bench.judging.judge_config import NOT_JUDGED
from mmkv_bench.tables.metrics import JUDGE

if TYPE_CHECKING:
    from mmkv_bench.evaluation.contract import CellScores

Row = dict[str, Any]


@dataclass
class Kept:
    """The `samples` rows of a cell with the stored scores in place, and by metric what its `metrics` row says then: the
    judge's columns, lmms-eval's aggregate (None where it is not of these samples), and why there is none."""

    samples: list[Row]
    judges: dict[str, Row] = field(default_factory=dict)
    lmms_eval: dict[str, float | None] = field(default_factory=dict)
    reasons: dict[str, str | None] = field(default_factory=dict)


def keep_judged(
    fresh: Sequence[Row], stored: Sequence[Row], metrics: Sequence[Mapping[str, Any]], scores: CellScores
) -> Kept:
    """What a cell's rows hold after a pass: its own scores, but for judged metrics that would lose some.

    Such a metric keeps every stored score whose sample this pass left without one (a stored `ok` answer never changes).
    Where this pass had another judge than the stored one, it keeps all its stored scores, and samples without one are not
    judged: two judges' scores are never averaged. The new judge's answers are in its cache, so asking it again for the
    rest is all that is left to do.

    fresh: `samples` rows of this pass; stored, metrics: the cell's rows of those tables; scores: what the pass gave.
    """
    rows = {(row["sample_id"], row["metric"]): row for row in fresh}
    kept = Kept([])
    for known in metrics if scores.not_judged else ():
        name = known["metric"]
        old = {row["sample_id"]: row for row in stored if row["metric"] == name}
        judged = {sample: row for sample, row in old.items() if row["status"] == "ok" and row["value"] is not None}
        lost = [sample for sample in judged if not _has_value(rows.get((sample, name)))]
        if known["judge"] is None or not lost:
            continue
        by = scores.judged.get(name)
        other = by is not None and tuple(by) != tuple(known[column] for column in JUDGE)
        for sample in judged if other else lost:
            rows[sample, name] = judged[sample]
        new = {sample: row for (sample, metric), row in rows.items() if metric == name}
        if other:
            new |= {sample: row | {"value": None} for sample, row in new.items() if sample not in judged}
            rows |= {(sample, name): row for sample, row in new.items()}
        kept.judges[name] = {column: known[column] for column in JUDGE}
        answered = [row for row in new.values() if row["status"] == "ok"]
        waiting = sum(row["value"] is None for row in answered)
        same = new.keys() == old.keys() and not waiting
        kept.lmms_eval[name] = known["lmms_eval"] if same else None
        if waiting:
            why = scores.not_judged.get(name, "").split(": ", 2)[-1] or "this judge did not answer for all"
            kept.reasons[name] = f"{NOT_JUDGED}: {waiting} of {len(answered)} samples: {why}"
        else:
            together = f"{NOT_JUDGED} in one pass, which lmms-eval's aggregate needs"
            kept.reasons[name] = known["lmms_eval_reason"] if same else scores.reason or together
    kept.samples = list(rows.values())
    return kept


def _has_value(row: Mapping[str, Any] | None) -> bool:
    return row is not None and row["value"] is not None
