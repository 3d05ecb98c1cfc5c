"""Margins: how far a measured number may differ from a printed one (`results/reference/margins.yaml`), for each address.

A margin depends on the metric, on the rival's printed number, and on the number of questions. It is at most half of the
printed gap to the rival. The rival of the paper's method is the strongest baseline of that column and budget; a baseline's rival
is the paper's method; for a difference or a ratio to full it is "no effect". So two numbers that both agree cannot change
places. All tables of a paper are searched for rivals, so an address has the same margin in every table. The full cache has the
metric's margin: it is the gate of the others.

A row is judged only if its commit contains these margins, that is, if they were fixed before the row was made. Without a commit
(an installed wheel), or with a commit that this checkout lacks, this is unknown: the row is shown and not judged.

The verdicts on a measured number beside a printed one are pure functions of numbers and return one word.

P is printed, M measured. The 95 % interval of M - P is compared with a margin d that was fixed beforehand: `agrees` if it is
wholly inside +-d, `differs` if it is wholly outside, else `undecided`. The interval contains

- half of P's last printed digit, on both sides: a bound, added as it is;
- the spread over seeds, for a method that draws at random: Student's t of M's seeds, with M and P each a mean over as many seeds;
- no sampling error if all of the paper's items were asked: greedy decoding answers the same questions the same way.
  A part of the items is always `undecided`: a run takes the first items, so no interval can be given. Items that are
  not the paper's are not comparable and are never judged.

Differences between kernels and libraries are not in the interval; the margin allows for them. If the margin is less than half a
digit plus one answer, the verdict is `uninformative`: a single answer would change it. Perplexity, times and bytes are judged
on the log scale.
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
    """How far measured and printed values of one metric may differ, in the printed unit; if `relative`, as shares of the value.

    scale: printed value / our value. margin: allowed difference. step: how much a repeated run changes the value.
    gate: allowed difference for the full cache; None: `margin`.
    """

    scale: float
    margin: float
    relative: bool = False
    step: float = 0.0
    gate: float | None = None


@dataclass(frozen=True)
class MarginsVersion:
    """A version of the margins. fixed: the day. measured: number of cells with real weights at that time."""

    version: int
    fixed: str
    measured: int
    change: str


@cache
def margin(dataset: str, metric: str) -> Margin:
    """Return the margin (allowed difference to a printed number) of a metric; for a mean, that of the averaged metric.

    Raises:
        ConfigError: margins.yaml has no margin for it.
    """
    name = metric if metric != MEAN else "group" if is_group(dataset) else dataset
    margins = _here()["metrics"]
    if name not in margins:
        raise ConfigError(f"margins.yaml has no margin for {name!r}; {nearest(name, margins)}")
    return Margin(**margins[name])


@cache
def versions() -> tuple[MarginsVersion, ...]:
    """Return all versions of the margins, oldest first. Verdicts use the last."""
    return tuple(MarginsVersion(**{**one, "fixed": str(one["fixed"])}) for one in _here()["versions"])


@cache
def unjudged(commit: str | None) -> str:
    """Return the reason why rows of a commit are not judged; "" if they are judged."""
    margins_here, latest_version = _here(), versions()[-1]
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
    """Return how far our number may differ from the printed one in a table cell.

    printed: a value that is a number.
    """
    cell_address, number = cell.address, printed.known
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
    """Return the tolerance of the ratio of a method's time or memory peak to that of the full cache.

    It includes the rounding of both printed numbers, `method` and `full`, and keeps the ratio distinguishable from 1.
    """
    half_digit_width = sum(log1p(one.half / one.known) for one in (method, full))
    fixed_margin = margin(cell.address.dataset, cell.address.metric)
    return _within_gap(
        Tolerance(half_digit_width, fixed_margin.margin, True, fixed_margin.step),
        NO_EFFECT,
        abs(log(method.known / full.known)),
    )


def _within_gap(most: Tolerance, rival: str, gap: float | None) -> Tolerance:
    return most if gap is None or gap / 2 >= most.margin else replace(most, margin=gap / 2, rival=rival)


def _one_answer(cell: TableCell) -> float:
    """Return how much a single answer changes a cell's number [printed unit]; 0 if the number of questions is unknown."""
    question_counts = [
        (one, _questions(one.dataset, one.metric)) for one in cell.needed if one.dataset not in SYNTHETIC
    ]
    score_of_one_answer = [margin(one.dataset, one.metric).scale / n for one, n in question_counts if n]
    return max(score_of_one_answer, default=0.0) / len(cell.needed)


@cache
def _questions(dataset: str, metric: str) -> int:
    """Return the number of questions behind a number, from the data set's file.

    For the metric `favor_acc_NSM` this is the number after `NSM` in the file.
    """
    stated_samples = str((content("dataset", dataset).get("about") or {}).get("samples"))
    subset_size = re.search(rf"\b{metric.rpartition('_')[2]} (\d[\d,]*)", stated_samples)
    return int(subset_size[1].replace(",", "")) if subset_size else samples_of(dataset)


def _rival(layout: TableLayout, cell: TableCell, number: float, relative: bool) -> tuple[str, float | None]:
    """Return (name, gap) of the number from which a cell's number must stay distinguishable; ("", None) without one.

    For the paper's method this is the strongest baseline, for a baseline the paper's method, for a difference 0.

    number: the cell's printed number. relative: gaps are on the log scale.
    """
    cell_address = cell.address
    if cell_address.minus is not None:
        return NO_EFFECT, abs(number)
    if cell_address.method.base == "full":
        return "", None
    proposed, baselines = (methods.get(_column(cell_address), {}) for methods in _columns(layout.paper)[:2])
    methods_without_variant = {name: value for name, value in proposed.items() if "(" not in name}
    # ablations are rivals only if the method itself is not printed
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
    """Return the key of a table column: `Address.printed` without the method, and without the budget if `budget` is False."""
    model, dataset, metric, _, _, *rest = at.printed
    return (model, dataset, metric, *(rest if budget else rest[2:]))


@cache
def _columns(paper: str) -> tuple[_Methods, _Methods, Mapping[tuple[str, ...], float]]:
    """Return the printed numbers of a paper's tables: (of its own methods, of baselines, of the full cache).

    The first two map (column and budget) -> method -> number, the third column -> number. If two tables print a number, the
    first counts.
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
def _here() -> Mapping[str, Any]:
    return read_yaml((reference_dir() / "margins.yaml").read_bytes())


AGREES, DIFFERS, UNDECIDED, UNINFORMATIVE = WORDS = "agrees", "differs", "undecided", "uninformative"
CONFIRMED, CONTRADICTED = "confirmed", "contradicted"
NOT_COMPARABLE = "not comparable"
ROUNDING = 1e-9
"""Rounding error of our arithmetic."""


@dataclass(frozen=True)
class Verdict:
    """Verdict on a number, as one word. why: reason, for `not comparable` and for `undecided` without an interval; else ""."""

    word: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.word}: {self.why}" if self.why else self.word


@dataclass(frozen=True)
class Tolerance:
    """How far a measured number may differ from a printed one, in the printed unit; if `relative`, on the log scale.

    half: half of the printed number's last digit. margin: allowed difference beyond rounding.
    step: how much one answer more or less changes the number.
    rival: the method whose printed number lies so near that it reduced the margin, or "".
    full: the full cache's printed number is within the margin, so a method that drops nothing would agree too.
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
    """Return the verdict on a measured number for which all items were asked.

    Args:
        measured, printed: numbers in the printed unit; both above 0 if the tolerance is `relative`.
        tolerance: tolerance of the printed number.
        seeds: half of the 95 % interval over seeds (`of_seeds`).
    """
    return _of_gap(_gap(measured, printed, tolerance.relative), tolerance, seeds)


def drop(
    measured: tuple[float, float], printed: tuple[float, float], tolerance: Tolerance, seeds: float = 0.0
) -> Verdict:
    """Return the verdict on a method's difference to the full cache.

    Args:
        measured, printed: (the method's number, the full cache's number).
        tolerance: its `half` includes the rounding of both printed numbers.
        seeds: half of the 95 % interval over seeds (`of_seeds`).
    """
    return _of_gap(_gap(*measured, tolerance.relative) - _gap(*printed, tolerance.relative), tolerance, seeds)


def of_seeds(values: Sequence[float], relative: bool = False) -> float:
    """Return half of the 95 % interval of the difference between a measured and a printed mean that is due to seeds alone.

    Both are taken as means over len(values) seeds. values: our number under each seed; with fewer than two the result is 0.
    relative: on the log scale.
    """
    if len(values) < 2:
        return 0.0
    from scipy.special import stdtrit

    values_on_scale, n = [log(value) for value in values] if relative else values, len(values)
    return float(stdtrit(n - 1, 0.975)) * sqrt(2 / n) * stdev(values_on_scale)


def lead(low: float | None, high: float | None) -> Verdict:
    """Return the verdict (confirmed, contradicted, undecided) on a lead over baselines that a paper claims.

    low, high: interval of our paired difference; above 0 is better.
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
