"""Measurements: the number of an address in result rows, with its interval, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mmkv_bench.papers.address import Address
from mmkv_bench.papers.margins import margin
from mmkv_bench.tables.compare import against
from mmkv_bench.tables.dataset_groups import Mean, mean
from mmkv_bench.tables.scores import Scores

if TYPE_CHECKING:
    import pandas as pd


class State(StrEnum):
    """Whether there is a number of an address, or why there is none."""

    MEASURED = "measured"
    COMPUTED = "computed"
    PLANNED = "planned"
    PART = "part"
    WAITING = "waiting"
    FAILED = "failed"
    NOT_RUN = "not run"
    CANNOT_RUN = "cannot run"
    AMBIGUOUS = "ambiguous"


Shared = tuple[tuple[str, str], ...]
"""Facts (name, value) that two compared numbers must share."""
OF_MODEL = ("path", "fingerprint", "dtype", "attention", "numerics", "max_pixels", "min_pixels")
"""Facts that all parts of a mean must share, whatever their data."""
WHOLE = (State.MEASURED, State.COMPUTED)
"""States of a complete number. `planned` is not complete: a dry run forecasts the number, which is shown and not judged."""


class Questions(NamedTuple):
    """Questions behind a number: judge and scorer, number of questions, digests of the prompts (several if seeds differ)."""

    scorer: tuple[str, ...] = ()
    n: int = 0
    prompts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Curve:
    """One line of a figure: its label, the mean over layers with its interval over samples, and the number of each layer."""

    label: str
    value: float
    low: float | None
    high: float | None
    layers: tuple[float, ...]


@dataclass(frozen=True)
class Measurement:
    """Our number for one table cell (`Address`), in the unit of the printed number, or the reason why there is none.

    Attributes:
        why: reason of a state other than measured.
        value, low, high: number and 95 % interval, or None.
        n, of: samples with an answer, and samples of the data set (0: unknown).
        mismatches: facts of the rows that contradict the address.
        unstated: facts that neither the paper nor a file of `conf` states.
        rows: positions of the number's rows in the cells of `Evidence`.
        seeds: value per seed, if there are several seeds.
        shared: for each part of a mean, the facts that a number must share to be compared with this one.
        questions: for each part of a mean, what was asked and who scored it.
        passed: how the used run differs from further runs of the same number, which are not used.
        curves: lines of a diagnostic; `value` is the first line's. made: versions of libraries that made them.
        source: rows folder and id of a diagnostic. drawn: rows from which the diagnostic is drawn.
        scores: scores for paired comparisons; None for means and reductions.
    """

    state: State
    why: str = ""
    value: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    of: int = 0
    mismatches: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    seeds: tuple[float, ...] = ()
    unstated: tuple[str, ...] = ()
    shared: tuple[Shared, ...] = ()
    questions: tuple[Questions, ...] = ()
    passed: str = ""
    curves: tuple[Curve, ...] = ()
    made: str = ""
    source: str = ""
    drawn: pd.DataFrame | None = field(default=None, compare=False, repr=False)
    scores: Scores | None = field(default=None, compare=False, repr=False)

    @property
    def number(self) -> float:
        """The value of a measurement that has one."""
        assert self.value is not None
        return self.value


def average(parts: Sequence[Measurement]) -> Measurement:
    """Return the mean of several measurements. It has a number only if all of them are measured."""
    states = {part.state for part in parts}
    rows = tuple(row for part in parts for row in part.rows)
    joint_measurement = Measurement(
        State.MEASURED, mismatches=joined(*(part.mismatches for part in parts), _mixed(parts)), rows=rows
    )
    if states != {State.MEASURED}:
        states_worst_first = (
            State.CANNOT_RUN,
            State.AMBIGUOUS,
            State.FAILED,
            State.WAITING,
            State.NOT_RUN,
            State.PART,
            State.MEASURED,
        )
        state = next(state for state in states_worst_first if state in states)
        complete_parts = sum(part.state == State.MEASURED for part in parts)
        if complete_parts and state == State.NOT_RUN:
            return replace(joint_measurement, state=State.PART, why=f"{complete_parts} of {len(parts)} parts")
        return replace(joint_measurement, state=state, why=next(part.why for part in parts if part.state == state))
    mean_interval = _wider(mean([Mean(part.number, part.low, part.high) for part in parts]), parts)
    n = sum(part.n for part in parts)
    return replace(
        joint_measurement,
        **{name: getattr(mean_interval, name) for name in ("value", "low", "high")},
        n=n,
        of=n,
        seeds=_by_seed(parts, lambda values: sum(values) / len(values)),
        unstated=joined(*(part.unstated for part in parts)),
        shared=tuple(one for part in parts for one in part.shared),
        questions=tuple(one for part in parts for one in part.questions),
        passed="; ".join(joined(*((part.passed,) for part in parts if part.passed))),
    )


def subtract(at: Address, a: Measurement, b: Measurement) -> Measurement:
    """Return measurement a minus measurement b, paired by sample. at: address of the difference."""
    for one in (a, b):
        if one.scores is None or one.value is None:
            state = one.state if one.value is None else State.CANNOT_RUN
            return replace(
                one, state=state, value=None, low=None, high=None, why=one.why or "it has no scores by sample"
            )
    gap, mismatch_text = paired_difference(at, a, b), incomparable(a, b)
    state, why = next(((one.state, one.why) for one in (a, b) if one.state != State.MEASURED), (State.MEASURED, ""))
    return replace(
        a,
        state=state,
        why=why,
        value=a.number - b.number,
        low=gap.low if gap else None,
        high=gap.high if gap else None,
        n=min(a.n, b.n),
        mismatches=joined(a.mismatches, b.mismatches, (mismatch_text,) if mismatch_text else ()),
        unstated=joined(a.unstated, b.unstated),
        passed="; ".join(joined(*((one.passed,) for one in (a, b) if one.passed))),
        rows=(*a.rows, *b.rows),
        seeds=_by_seed((a, b), lambda pair: pair[0] - pair[1]),
    )


def paired_difference(at: Address, a: Measurement, b: Measurement) -> Mean | None:
    """Return the difference a - b of two scores, paired by sample, with its interval; None without common samples.

    at: address of the difference, whose metric gives the printed unit.
    """
    assert a.scores is not None
    assert b.scores is not None
    (difference,) = against([a.scores], b.scores, at.metric)
    if difference.value is None:
        return None
    scale = margin(at.dataset, at.metric).scale
    low, high = (None if end is None else scale * end for end in (difference.low, difference.high))
    return Mean(scale * difference.value, low, high)


def incomparable(a: Measurement, b: Measurement) -> str:
    """Return the reason why the difference of two measurements has no meaning; "" if it has one."""
    mismatch_names = [name for name in (differing(a, b.shared),) if name]
    for one, two in zip(a.questions, b.questions, strict=False):
        mismatch_names += ["scorer"] if one.scorer != two.scorer else []
        mismatch_names += ["prompts"] if one.n == two.n and one.prompts != two.prompts else []
    return f"other {', '.join(dict.fromkeys(mismatch_names))} than what it is compared with" if mismatch_names else ""


def differing(a: Measurement, shared: Sequence[Shared]) -> str:
    """Return the names of the run's facts in which `a` differs from `shared`, joined by commas; "" if in none.

    shared: facts of the other number, one item per part of a mean.
    """
    pairs = zip(a.shared, shared, strict=False)
    return ", ".join(dict.fromkeys(name for one, two in pairs for name, _ in sorted({*one} ^ {*two})))


def joined(*words: Sequence[str]) -> tuple[str, ...]:
    """Return all words of several sequences in order, each once."""
    return tuple(dict.fromkeys(word for part in words for word in part))


def _mixed(parts: Sequence[Measurement]) -> tuple[str, ...]:
    """Return one sentence, in a tuple, on the facts of the model in which the measurements differ; () if in none."""
    values: dict[str, set[str]] = {}
    for name, value in (fact for part in parts for shared in part.shared for fact in shared if fact[0] in OF_MODEL):
        values.setdefault(name, set()).add(value)
    mixed_fields = sorted(name for name, each in values.items() if len(each) > 1)
    return (f"its parts have several {', '.join(mixed_fields)}",) if mixed_fields else ()


def _by_seed(parts: Sequence[Measurement], combine: Callable[[Sequence[float]], float]) -> tuple[float, ...]:
    """Return combine(numbers of all measurements under one seed), for each seed.

    A measurement without seeds (a method that draws nothing) is used for every seed.
    """
    count = min((len(part.seeds) for part in parts if part.seeds), default=0)
    return tuple(combine([part.seeds[n] if part.seeds else part.number for part in parts]) for n in range(count))


def _wider(whole: Mean, parts: Sequence[Measurement]) -> Mean:
    """Return a mean with a wider interval if its parts share clusters.

    Data sets share clusters if they ask about the same photographs. The distances to the ends are combined with the
    correlation of the parts' cluster sums (Zou and Donner, Statistics in Medicine 27, 2008). Parts of different sheets, and
    pooled metrics, are taken as independent.
    """
    if whole.low is None or whole.high is None:
        return whole
    distances_below = np.array([part.number - part.low for part in parts if part.low is not None])
    distances_above = np.array([part.high - part.number for part in parts if part.high is not None])
    covariance_terms = np.zeros(2)
    for i, j in combinations(range(len(parts)), 2):
        shared = _correlation(parts[i].scores, parts[j].scores)
        covariance_terms += (
            2 * shared * np.array([distances_below[i] * distances_below[j], distances_above[i] * distances_above[j]])
        )
    if not covariance_terms.any():
        return whole
    interval_distances = np.array([whole.value - whole.low, whole.high - whole.value])
    low, high = np.sqrt(np.maximum(interval_distances**2 + covariance_terms / len(parts) ** 2, 0.0))
    return Mean(whole.value, whole.value - float(low), whole.value + float(high))


def _correlation(a: Scores | None, b: Scores | None) -> float:
    """Return the correlation of two data sets' means over the clusters that both have."""
    import pandas as pd

    if a is None or b is None or a.ids is not b.ids:
        return 0.0
    cluster_sums_a, cluster_sums_b = (
        pd.Series(each.values - each.values.mean()).groupby(each.clusters).sum() for each in (a, b)
    )
    norm_product = float(np.sqrt((cluster_sums_a**2).sum() * (cluster_sums_b**2).sum()))
    return float((cluster_sums_a * cluster_sums_b).sum()) / norm_product if norm_product else 0.0
