"""Margins: how far a measured number may differ from a printed one, and the verdicts.

`results/reference/margins.yaml` has a margin per metric. A cell's margin is at most half of the printed gap to a rival, so that
two numbers that both agree cannot change places. The rival of the paper's method is the strongest baseline of the column and
budget, and the rival of a baseline is the paper's method. The rival of a difference or a ratio to the full cache is "no effect".
The full cache has no rival. Rivals come from all tables of a paper.

Rows are judged only if their commit contains the same margins, which were then fixed before the rows were made.

For a printed number P, a measured number M and a margin d, the 95 % interval of M - P decides: `agrees` if it is wholly inside
+-d, `differs` if it is wholly outside, else `undecided`. The interval contains

- half a unit of P's last printed digit, on both sides;
- the spread over seeds, for a method that draws at random: Student's t, with M and P each a mean over as many seeds;
- no sampling error, because greedy decoding answers the same questions the same way. If only a part of the paper's questions was
  asked, the verdict is `undecided`.

The margin allows for differences between kernels and libraries. If it is less than half a digit plus one answer, a single answer
would change the verdict, which then is `uninformative`. Perplexity, times and bytes are judged on the log scale.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import log, log1p, sqrt
from statistics import stdev
from typing import Any

from mmkv_bench.config.files import content, reference_dir
from mmkv_bench.declared import read_yaml
from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.papers.address import MEAN, SYNTHETIC, Address, is_group, samples_of
from mmkv_bench.papers.layout import TableCell, TableLayout, load, table_ids
from mmkv_bench.papers.non_score_metrics import has_numbers
from mmkv_bench.papers.printed import Printed, of_table
from mmkv_bench.statistics.metric_kinds import lower_is_better
from mmkv_bench.store.provenance import file_in_commit

FILE = "results/reference/margins.yaml"
NO_EFFECT = "no effect"
_Methods = Mapping[tuple[str, ...], Mapping[str, float]]


@dataclass(frozen=True)
class Margin:
    """Allowed difference between measured and printed values of a metric, in the printed unit; on the log scale if `relative`.

    scale: printed value / our value. margin: allowed difference. step: change of the value when a run is repeated.
    gate: tolerance of the full-cache gates in conf/model; None: `margin`.
    """

    scale: float
    margin: float
    relative: bool = False
    step: float = 0.0
    gate: float | None = None


@dataclass(frozen=True)
class MarginsVersion:
    """A version of the margins. fixed: day on which it was fixed. measured: number of cells with real weights at that time."""

    version: int
    fixed: str
    measured: int
    change: str


@cache
def margin(dataset: str, metric: str) -> Margin:
    """Return the margin of a metric. For `mean`, the file has a margin for groups of datasets, and margins by `dataset`.

    Raises:
        ConfigError: margins.yaml has no such margin.
    """
    name = metric if metric != MEAN else "group" if is_group(dataset) else dataset
    margins = _margins_file()["metrics"]
    if name not in margins:
        raise ConfigError(f"margins.yaml has no margin for {name!r}; {nearest(name, margins)}")
    return Margin(**margins[name])


@cache
def versions() -> tuple[MarginsVersion, ...]:
    """Return all versions of the margins, oldest first. Verdicts use the newest."""
    return tuple(MarginsVersion(**{**one, "fixed": str(one["fixed"])}) for one in _margins_file()["versions"])


@cache
def why_unjudged(commit: str | None) -> str:
    """Return the reason why rows of a commit are not judged, such as an unknown commit; "" if they are judged."""
    margins_here, latest_version = _margins_file(), versions()[-1]
    text = file_in_commit(FILE, commit) if commit else None
    if text is None:
        return f"it is unknown which margins its commit ({(commit or 'none')[:12]}) had"
    committed_margins: Mapping[str, Any] = read_yaml(text) or {}
    if committed_margins.get("version", 1) != margins_here["version"]:
        version_text = f"version {latest_version.version} of the margins ({latest_version.fixed})"
        return f"its commit {str(commit)[:12]} is older than {version_text}"
    same_margins = committed_margins.get("metrics") == margins_here["metrics"]
    return (
        "" if same_margins else f"its commit {str(commit)[:12]} has other margins of version {latest_version.version}"
    )


def tolerance(layout: TableLayout, cell: TableCell, printed: Printed) -> Tolerance:
    """Return the tolerance of a cell's printed number. printed: a readable value."""
    cell_address, number = cell.address, printed.readable_number
    fixed_margin = margin(cell_address.dataset, cell_address.metric)
    half_digit_width = log1p(printed.half / number) if fixed_margin.relative else printed.half
    step = fixed_margin.step if fixed_margin.relative else _one_answer(cell)
    full_tolerance = Tolerance(half_digit_width, fixed_margin.margin, fixed_margin.relative, step)
    limited_tolerance = _within_gap(full_tolerance, *_rival(layout, cell, number, fixed_margin.relative))
    printed_full = (
        None
        if cell_address.method.base == "full" or cell_address.minus
        else _columns(layout.paper)[2].get(_column(cell_address, False))
    )
    return (
        limited_tolerance
        if printed_full is None
        else replace(
            limited_tolerance, full=abs(_gap(printed_full, number, fixed_margin.relative)) <= limited_tolerance.margin
        )
    )


def ratio_tolerance(cell: TableCell, method: Printed, full: Printed) -> Tolerance:
    """Return the tolerance of the ratio method / full of two printed times or peaks of memory, whose rival is the ratio 1."""
    half_digit_width = sum(log1p(one.half / one.readable_number) for one in (method, full))
    fixed_margin = margin(cell.address.dataset, cell.address.metric)
    return _within_gap(
        Tolerance(half_digit_width, fixed_margin.margin, True, fixed_margin.step),
        NO_EFFECT,
        abs(log(method.readable_number / full.readable_number)),
    )


def _within_gap(most: Tolerance, rival: str, gap: float | None) -> Tolerance:
    return most if gap is None or gap / 2 >= most.margin else replace(most, margin=gap / 2, rival=rival)


def _one_answer(cell: TableCell) -> float:
    """Return the change of a cell's number by a single answer [printed unit]; 0 if the number of questions is unknown."""
    question_counts = [
        (one, _questions(one.dataset, one.metric)) for one in cell.needed_addresses if one.dataset not in SYNTHETIC
    ]
    score_of_one_answer = [margin(one.dataset, one.metric).scale / n for one, n in question_counts if n]
    return max(score_of_one_answer, default=0.0) / len(cell.needed_addresses)


@cache
def _questions(dataset: str, metric: str) -> int:
    """Return the number of questions that a data set's file states, for a metric such as `favor_acc_NSM` those after `NSM`."""
    stated_samples = str((content("dataset", dataset).get("about") or {}).get("samples"))
    subset_size = re.search(rf"\b{metric.rpartition('_')[2]} (\d[\d,]*)", stated_samples)
    return int(subset_size[1].replace(",", "")) if subset_size else samples_of(dataset)


def _rival(layout: TableLayout, cell: TableCell, number: float, relative: bool) -> tuple[str, float | None]:
    """Return (name, printed gap) of a cell's rival; ("", None) without one.

    number: printed number of the cell. relative: True for gaps on the log scale.
    """
    cell_address = cell.address
    if cell_address.minus is not None:
        return NO_EFFECT, abs(number)
    if cell_address.method.base == "full":
        return "", None
    proposed, baselines = (methods.get(_column(cell_address), {}) for methods in _columns(layout.paper)[:2])
    methods_without_variant = {name: value for name, value in proposed.items() if "(" not in name}
    # ablations of the paper's method are rivals only if the method itself is not printed
    rivals = baselines if layout.proposes(cell) else methods_without_variant or proposed
    if not rivals:
        return "", None
    if layout.proposes(cell):
        name = (min if lower_is_better(cell_address.metric) else max)(rivals, key=rivals.__getitem__)
    else:
        name = min(rivals, key=lambda one: abs(rivals[one] - number))
    return name, abs(_gap(number, rivals[name], relative))


def _gap(one: float, other: float, relative: bool) -> float:
    return log(one / other) if relative else one - other


def _column(at: Address, budget: bool = True) -> tuple[str, ...]:
    """Return `Address.printed` without method and subtracted method, and without the budget if `budget` is False."""
    model, dataset, metric, _, _, *rest = at.printed
    return (model, dataset, metric, *(rest if budget else rest[2:]))


@cache
def _columns(paper: str) -> tuple[_Methods, _Methods, Mapping[tuple[str, ...], float]]:
    """Return the printed numbers of a paper's tables: (of the paper's methods, of baselines, of the full cache).

    The first two are column and budget -> method -> number, the third is column -> number, with keys of `_column`. If two
    tables print a number, the first counts.
    """
    proposed: dict[tuple[str, ...], dict[str, float]] = {}
    baselines: dict[tuple[str, ...], dict[str, float]] = {}
    full_scores: dict[tuple[str, ...], float] = {}
    for layout in map(load, table_ids()):
        values = of_table(layout.id) if layout.paper == paper else {}
        for cell in layout.cells if values else ():
            cell_address, printed = cell.address, values.get(cell.address.printed)
            if (
                printed is None
                or printed.number is None
                or cell_address.minus is not None
                or not has_numbers(cell_address.metric)
            ):
                continue
            if cell_address.method.base == "full":
                full_scores.setdefault(_column(cell_address, False), printed.number)
            else:
                methods = proposed if layout.proposes(cell) else baselines
                methods.setdefault(_column(cell_address), {}).setdefault(str(cell_address.method), printed.number)
    return proposed, baselines, full_scores


@cache
def _margins_file() -> Mapping[str, Any]:
    return read_yaml((reference_dir() / "margins.yaml").read_bytes())


AGREES, DIFFERS, UNDECIDED, UNINFORMATIVE = WORDS = "agrees", "differs", "undecided", "uninformative"
CONFIRMED, CONTRADICTED = "confirmed", "contradicted"
NOT_COMPARABLE = "not comparable"
ROUNDING = 1e-9
"""Allowance for rounding errors of our arithmetic."""


@dataclass(frozen=True)
class Verdict:
    """Verdict on a number, as one word. why: reason, or ""."""

    word: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.word}: {self.why}" if self.why else self.word


@dataclass(frozen=True)
class Tolerance:
    """Allowed difference between a measured and a printed number, in the printed unit; on the log scale if `relative`.

    half: half a unit of the last printed digit. margin: allowed difference.
    step: change of the number by one answer, or when a run is repeated.
    rival: rival whose printed number reduced the margin, or "".
    full: True if the full cache's printed number is within the margin, so that a method that drops nothing would agree.
    """

    half: float
    margin: float
    relative: bool = False
    step: float = 0.0
    rival: str = ""
    full: bool = False

    @property
    def informative(self) -> bool:
        """True if the margin is at least as large as half a printed digit and one answer together."""
        return self.half + self.step <= self.margin + ROUNDING


def level(measured: float, printed: float, tolerance: Tolerance, seeds: float = 0.0) -> Verdict:
    """Return the verdict on a measured number of all questions.

    Args:
        measured, printed: numbers in the printed unit; both above 0 if the tolerance is `relative`.
        tolerance: tolerance of the printed number.
        seeds: result of `seed_half_width`.
    """
    return _of_gap(_gap(measured, printed, tolerance.relative), tolerance, seeds)


def drop(
    measured: tuple[float, float], printed: tuple[float, float], tolerance: Tolerance, seeds: float = 0.0
) -> Verdict:
    """Return the verdict on a method's difference to the full cache.

    Args:
        measured, printed: (the method's number, the full cache's number).
        tolerance: tolerance whose `half` includes the rounding of both printed numbers.
        seeds: result of `seed_half_width`.
    """
    return _of_gap(_gap(*measured, tolerance.relative) - _gap(*printed, tolerance.relative), tolerance, seeds)


def seed_half_width(values: Sequence[float], relative: bool = False) -> float:
    """Return half of the 95 % interval, due to seeds alone, of the difference between a measured and a printed mean.

    Both are taken as means over len(values) seeds. The result is 0 for fewer than two values.

    values: our number under each seed. relative: True for the log scale.
    """
    if len(values) < 2:
        return 0.0
    from scipy.special import stdtrit

    values_on_scale, n = [log(value) for value in values] if relative else values, len(values)
    return float(stdtrit(n - 1, 0.975)) * sqrt(2 / n) * stdev(values_on_scale)


def lead(low: float | None, high: float | None) -> Verdict:
    """Return the verdict (confirmed, contradicted, undecided) on a lead that a paper prints.

    low, high: ends of the interval of our lead, or None.
    """
    if low is not None and low > 0:
        return Verdict(CONFIRMED)
    return Verdict(CONTRADICTED if high is not None and high < 0 else UNDECIDED)


def _of_gap(gap: float, tolerance: Tolerance, seeds: float) -> Verdict:
    if not tolerance.informative:
        return Verdict(UNINFORMATIVE)
    low, high = gap - tolerance.half - seeds, gap + tolerance.half + seeds
    if low >= -tolerance.margin - ROUNDING and high <= tolerance.margin + ROUNDING:
        return Verdict(AGREES)
    is_outside = low > tolerance.margin + ROUNDING or high < -tolerance.margin - ROUNDING
    return Verdict(DIFFERS if is_outside else UNDECIDED)
