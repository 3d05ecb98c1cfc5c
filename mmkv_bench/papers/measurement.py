"""Measurements: our number for an address of a paper's table, or the reason why there is none."""

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
from mmkv_bench.tables.sample_scores import Scores

if TYPE_CHECKING:
    import pandas as pd


class State(StrEnum):
    """Kind of our number, or why there is none."""

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
"""Facts (name, value) of a run that two compared numbers must share."""
OF_MODEL = ("path", "fingerprint", "dtype", "attention", "numerics", "max_pixels", "min_pixels")
"""Facts that all parts of a mean must share."""
WHOLE = (State.MEASURED, State.COMPUTED)
"""States of complete numbers. A `planned` number, which a dry run forecasts, is shown and not judged."""


class Questions(NamedTuple):
    """Questions behind a number. n: how many. prompts: digests of all prompts, one unless seeds differ."""

    scorer: tuple[str, ...] = ()
    n: int = 0
    prompts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Curve:
    """A line of a figure. value, low, high: mean over layers, with its interval over samples. layers: number of each layer."""

    label: str
    value: float
    low: float | None
    high: float | None
    layers: tuple[float, ...]


@dataclass(frozen=True)
class Measurement:
    """Our number for an address, in the printed unit, or the reason why there is none.

    Attributes:
        why: reason of the state, or how the number was computed; "" if nothing is to say.
        value, low, high: number and ends of its 95 % interval, or None.
        n, of: number of samples with an answer, and number of samples of the data set (0: unknown).
        mismatches: texts on facts of the rows that contradict the address.
        unstated: texts on facts that neither the paper nor a file of `conf` states, and on fallbacks in the answers.
        rows: positions of the number's rows in `Evidence.cells`.
        seeds: number under each seed, if there are several seeds.
        shared, questions: one item per part of a mean; one item for other numbers.
        passed: text on how the used run differs from other runs of the same number, which are not used.
        curves: lines of a diagnostic, of which the first has `value`. made: versions of libraries that made the diagnostic.
        source: rows folder and id of a diagnostic. drawn: rows of the diagnostic.
        scores: scores by sample for paired comparisons; None for numbers that are no scores, and for means.
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
        """`value` of a measurement that has one."""
        assert self.value is not None
        return self.value


def average(parts: Sequence[Measurement]) -> Measurement:
    """Return the mean of several measurements. The mean has a value only if all measurements have the state `measured`."""
    states = {part.state for part in parts}
    rows = tuple(row for part in parts for row in part.rows)
    joint_measurement = Measurement(
        State.MEASURED, mismatches=unique_words(*(part.mismatches for part in parts), _mixed(parts)), rows=rows
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
    mean_interval = _correct_interval(mean([Mean(part.number, part.low, part.high) for part in parts]), parts)
    n = sum(part.n for part in parts)
    return replace(
        joint_measurement,
        **{name: getattr(mean_interval, name) for name in ("value", "low", "high")},
        n=n,
        of=n,
        seeds=_by_seed(parts, lambda values: sum(values) / len(values)),
        unstated=unique_words(*(part.unstated for part in parts)),
        shared=tuple(one for part in parts for one in part.shared),
        questions=tuple(one for part in parts for one in part.questions),
        passed="; ".join(unique_words(*((part.passed,) for part in parts if part.passed))),
    )


def subtract(at: Address, a: Measurement, b: Measurement) -> Measurement:
    """Return a - b, with an interval paired by sample. at: address of the difference."""
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
        mismatches=unique_words(a.mismatches, b.mismatches, (mismatch_text,) if mismatch_text else ()),
        unstated=unique_words(a.unstated, b.unstated),
        passed="; ".join(unique_words(*((one.passed,) for one in (a, b) if one.passed))),
        rows=(*a.rows, *b.rows),
        seeds=_by_seed((a, b), lambda pair: pair[0] - pair[1]),
    )


def paired_difference(at: Address, a: Measurement, b: Measurement) -> Mean | None:
    """Return a - b in the printed unit, paired by sample, with its interval; None without common samples.

    at: address of the difference. a, b: measurements with scores.
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
    """Return the reason why two measurements cannot be compared; "" if they can."""
    mismatch_names = [name for name in (differing_facts(a, b.shared),) if name]
    for one, two in zip(a.questions, b.questions, strict=False):
        mismatch_names += ["scorer"] if one.scorer != two.scorer else []
        mismatch_names += ["prompts"] if one.n == two.n and one.prompts != two.prompts else []
    return f"other {', '.join(dict.fromkeys(mismatch_names))} than what it is compared with" if mismatch_names else ""


def differing_facts(a: Measurement, shared: Sequence[Shared]) -> str:
    """Return the names of the facts in which `a` differs from another number, joined by commas; "" if in none.

    shared: `Measurement.shared` of the other number.
    """
    pairs = zip(a.shared, shared, strict=False)
    return ", ".join(dict.fromkeys(name for one, two in pairs for name, _ in sorted({*one} ^ {*two})))


def unique_words(*words: Sequence[str]) -> tuple[str, ...]:
    """Concatenate sequences without duplicates."""
    return tuple(dict.fromkeys(word for part in words for word in part))


def _mixed(parts: Sequence[Measurement]) -> tuple[str, ...]:
    """Return one text on the facts of the model (`OF_MODEL`) in which the measurements differ; () if in none."""
    values: dict[str, set[str]] = {}
    for name, value in (fact for part in parts for shared in part.shared for fact in shared if fact[0] in OF_MODEL):
        values.setdefault(name, set()).add(value)
    mixed_fields = sorted(name for name, each in values.items() if len(each) > 1)
    return (f"its parts have several {', '.join(mixed_fields)}",) if mixed_fields else ()


def _by_seed(parts: Sequence[Measurement], combine: Callable[[Sequence[float]], float]) -> tuple[float, ...]:
    """Return combine(numbers of all measurements) for each seed. A measurement without seeds has one number for all seeds."""
    count = min((len(part.seeds) for part in parts if part.seeds), default=0)
    return tuple(combine([part.seeds[n] if part.seeds else part.number for part in parts]) for n in range(count))


def _correct_interval(whole: Mean, parts: Sequence[Measurement]) -> Mean:
    """Correct the interval of a mean for correlated parts: data sets that share clusters, such as the same photographs.

    The distances to the ends are combined with the correlation of the parts' cluster sums (Zou and Donner, Statistics in Medicine
    27, 2008). Parts whose scores are not in one sheet are taken as independent.
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
    """Return the correlation of two means that is due to common clusters; 0 for scores of different sheets."""
    import pandas as pd

    if a is None or b is None or a.ids is not b.ids:
        return 0.0
    cluster_sums_a, cluster_sums_b = (
        pd.Series(each.values - each.values.mean()).groupby(each.clusters).sum() for each in (a, b)
    )
    norm_product = float(np.sqrt((cluster_sums_a**2).sum() * (cluster_sums_b**2).sum()))
    return float((cluster_sums_a * cluster_sums_b).sum()) / norm_product if norm_product else 0.0
