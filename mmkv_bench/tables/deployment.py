"""Tables for choosing the budget of a service: speed, memory, largest batch and lost score per method, budget and batch.

Passes of `scenario=efficiency` measure speed and memory; a plan counts memory in a dry run, or forecasts bounds of both. The lost
score is the full cache's score minus the method's over the same samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mmkv_bench.statistics.metric_kinds import lower_is_better
from mmkv_bench.tables.compare import Difference, against
from mmkv_bench.tables.cost_rows import KNOWN
from mmkv_bench.tables.costs import CostEntry, CostTable, Key, cell_key, cost_tables
from mmkv_bench.tables.score_notes import OVER
from mmkv_bench.tables.score_table import Line, ScoreTable
from mmkv_bench.tables.stored_rows import BASELINE
from mmkv_bench.tables.table import Grid, GridCell, Note, Rank, Table
from mmkv_bench.tables.text import interval_text, line_label, number, number_span, score, unit_of

GIB = 2**30
MEASURED, COUNTED, LEAST, MOST = "measured", "dry run", "forecast, at least", "forecast, at most"
SIGNS = {MEASURED: "", COUNTED: "~", LEAST: "≥ ", MOST: "≤ "}
"""Source of an estimate -> sign before the number."""
FORECAST = "≥ and ≤: forecast, bounds by arithmetic that a real device does not reach"
_SOURCES = {
    MEASURED: "no sign: measured, median with its interval",
    COUNTED: "~: counted in a dry run of the same code",
    LEAST: FORECAST,
    MOST: FORECAST,
}
_COSTS = ("tpot_s", "tokens_s", "peak_total")


@dataclass(frozen=True)
class Estimate:
    """A number. source: a key of `SIGNS`. low, high: ends of the interval of a measured number, or None."""

    value: float
    source: str = MEASURED
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Option:
    """A method at one budget, batch and prompt length. Estimates are None if unknown.

    Attributes:
        key: key by which scores are joined (`cell_key`).
        method, budget: as printed.
        batch: sequences decoded together.
        step_s: seconds of a decode step, in which each sequence gets a token.
        tokens_s: tokens per second of all sequences.
        speed_up: full's time of a decode step over the method's, at the same batch.
        nbytes: peak device memory [bytes].
        largest: largest batch that fits.
    """

    key: Key
    method: str
    budget: str
    batch: int
    step_s: Estimate | None = None
    tokens_s: Estimate | None = None
    speed_up: Estimate | None = None
    nbytes: Estimate | None = None
    largest: Estimate | None = None

    @property
    def known(self) -> dict[str, Estimate]:
        """The estimates that are not None, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Estimate)}

    def over(self, other: Option | None) -> Option:
        """Return a copy whose unknown estimates are those of `other`."""
        estimates: dict[str, Any] = {} if other is None else other.known | self.known
        return replace(self, **estimates)


@dataclass(frozen=True)
class Setting:
    """Common properties of the options of a table.

    prompts: kind of prompts, `made_up_image` or a dataset. tokens: prompt length. way: how a batch is prefilled.
    """

    model: str
    device: str
    prompts: str
    tokens: int
    way: str


class Measured(NamedTuple):
    """Measured options, by ascending batch. notes: on repeats and disturbances."""

    options: Sequence[Option]
    notes: Sequence[Note]


@dataclass(frozen=True)
class ScoreLoss:
    """Scores that methods lose on one dataset.

    full: score of the full cache; None if one of its samples failed.
    tokens: median prompt length; None if the rows do not state it.
    lost: key of a method and budget (`cell_key`) -> lost score, positive if the full cache is better.
    over: keys of methods with answers that exceed the budget.
    """

    dataset: str
    metric: str
    full: float | None
    tokens: int | None
    lost: Mapping[Key, Difference]
    over: frozenset[Key]

    @property
    def title(self) -> str:
        return f"{self.dataset} {self.metric.replace('_', ' ')}"


# ---------------------------------------------------------------------- measured
def measured_options(root: Path | str) -> dict[Setting, Measured]:
    """Return setting -> measured options, from the passes (`scenario=efficiency`) in a rows folder; {} without passes."""
    tables_of: dict[Setting, list[CostTable]] = {}
    for table in cost_tables(root, (), beside=[KNOWN[key] for key in _COSTS]):
        if table.per_pass:
            shape, context = table.shape, table.context
            prompts = str(shape["dataset"]), int(shape["prompt_tokens"]), str(shape["batch_prefill"])
            tables_of.setdefault(Setting(context["model"], context["device"], *prompts), []).append(table)
    options_of_setting = {}
    for setting, tables in tables_of.items():
        options: dict[tuple[Key, int], Option] = {}
        repeats = []
        for one, (method, budget) in [(each, line) for each in tables for line in each.lines()]:
            option = _option(one, method, budget)
            options.setdefault((option.key, option.batch), option)
            time_entry = one.entries[method.label, budget].get("tpot_s")
            repeats += [] if time_entry is None else [time_entry.n]
        repeats_range = " to ".join(map(str, sorted({min(repeats, default=0), max(repeats, default=0)})))
        notes = [Note(f"Times are medians of {repeats_range} repeats.")] if any(repeats) else []
        disturbed = dict.fromkeys(word for table in tables for word in table.disturbed)
        notes += [Note(f"Disturbed: {'; '.join(disturbed)}.", Rank.WARNING)] if disturbed else []
        options_of_setting[setting] = Measured(sorted(options.values(), key=lambda option: option.batch), notes)
    return options_of_setting


def _option(table: CostTable, method: Line, budget: str) -> Option:
    entries = {key: entry for key, entry in table.entries[method.label, budget].items() if entry.value is not None}
    step, rate, peak = (_estimate(entries.get(key)) for key in _COSTS)
    ratio = entries["tpot_s"].ratio if "tpot_s" in entries else None
    key, batch = cell_key(table.context, method, table.axis, budget), int(table.shape["batch"])
    speed_up = Estimate(1 / ratio) if ratio else None
    return Option(key, line_label(method), budget or "all", batch, step, rate, speed_up, peak)


def _estimate(entry: CostEntry | None) -> Estimate | None:
    return None if entry is None or entry.value is None else Estimate(entry.value, MEASURED, entry.low, entry.high)


# ---------------------------------------------------------------------- scores
def score_losses(tables: Sequence[ScoreTable], root: Path | str) -> list[ScoreLoss]:
    """Return the lost scores per dataset and model, from tables with `full`. The first metric of a dataset counts.

    root: folder of the rows from which `tables` were made.
    """
    prompt_tokens_of = {
        table.context["dataset"]: entry.value
        for table in cost_tables(root, (), beside=[KNOWN["prompt_tokens"]])
        if not table.per_pass and (entry := table.entries.get((BASELINE, ""), {}).get("prompt_tokens")) is not None
    }
    losses: dict[tuple[str, str], ScoreLoss] = {}
    metrics: dict[str, str] = {}
    for table in tables:
        full = table.entries.get((BASELINE, ""))
        if full is None or metrics.setdefault(table.dataset, table.metric) != table.metric:
            continue
        cells = [(cell_key(table.context, line, table.axis, budget), entry) for line, budget, entry in table.cells]
        differences = against([entry.scores for _, entry in cells], full.scores, table.metric)
        losses_by_cell = differences if lower_is_better(table.metric) else map(_negate, differences)
        loss_of = {key: loss for (key, _), loss in zip(cells, losses_by_cell, strict=True)}
        lines_over_budget = frozenset(key for key, entry in cells if entry.audit.over)
        tokens = prompt_tokens_of.get(table.dataset)
        loss = ScoreLoss(
            table.dataset, table.metric, full.value, None if tokens is None else int(tokens), loss_of, lines_over_budget
        )
        key = table.dataset, table.context["model"]
        if (other := losses.get(key)) is not None:  # budgets in entries and in fractions are two tables
            loss = replace(loss, lost={**other.lost, **loss_of}, over=other.over | lines_over_budget)
        losses[key] = loss
    return list(losses.values())


def _negate(one: Difference) -> Difference:
    value, low, high = (None if number is None else -number for number in (one.value, one.high, one.low))
    return Difference(one.n, value, low, high)


# ---------------------------------------------------------------------- the table
def deployment_table(
    setting: Setting,
    options: Sequence[Option],
    losses: Sequence[ScoreLoss] = (),
    memory: float | None = None,
    notes: Sequence[Note] = (),
) -> Table:
    """Return the table of one setting: one line per budget, batch and methods with equal numbers.

    Args:
        options: the methods with their numbers, in the order of the lines.
        losses: lost scores, one column per dataset.
        memory: device memory [bytes] for which the largest batches are given.
        notes: further notes below the table.
    """
    losses = [loss for loss in losses if any(option.key in loss.lost for option in options)]
    memory_text = "" if memory is None else f" on {memory / GIB:,.4g} GiB"
    size, unit = unit_of("bytes", [option.nbytes.value for option in options if option.nbytes is not None])
    columns: dict[str, list[GridCell]] = {
        "ms/token": [_number(option.step_s, 1e-3) for option in options],
        "tokens/s": [_number(option.tokens_s) for option in options],
        "speed-up": [_number(option.speed_up) for option in options],
        f"peak {unit}": [_number(option.nbytes, size) for option in options],
        f"largest batch{memory_text}": [_number(option.largest) for option in options],
    }
    columns |= {f"{loss.title} lost": [_loss_cell(option, loss) for option in options] for loss in losses}
    columns = {head: cells for head, cells in columns.items() if any(cell.value is not None for cell in cells)}
    methods_by_cells: dict[tuple[str | GridCell, ...], list[str]] = {}
    for option, *cells in zip(options, *columns.values(), strict=True):
        methods_by_cells.setdefault((option.budget, str(option.batch), *cells), []).append(option.method)
    rows = [[_names(methods), *cells] for cells, methods in methods_by_cells.items()]
    prefill_text = f"prefilled {setting.way}" if any(option.batch > 1 for option in options) else ""
    facts = [f"model={setting.model}", setting.device and f"device={setting.device}", prefill_text]
    return Table(
        f"{setting.prompts.removeprefix('made_up_')} prompts of {setting.tokens:,} tokens",
        "; ".join(filter(None, facts)),
        [Grid(["method", "budget", "batch", *columns], rows, labels=3)],
        [*notes, *_notes(setting, options, losses)],
        records=partial(_records, setting, tuple(options)),
    )


def deployment_tables(root: Path | str, losses: Sequence[ScoreLoss] = ()) -> list[Table]:
    """Return one deployment table per setting of the passes in a rows folder."""
    return [
        deployment_table(setting, measured.options, losses, notes=measured.notes)
        for setting, measured in measured_options(root).items()
    ]


def _number(estimate: Estimate | None, size: float = 1.0) -> GridCell:
    if estimate is None:
        return GridCell("-")
    value = estimate.value / size
    interval = number_span(estimate.low, estimate.high, size)
    return GridCell(f"{SIGNS[estimate.source]}{number(value)}", value, interval)


def _loss_cell(option: Option, loss: ScoreLoss) -> GridCell:
    difference = loss.lost.get(option.key)
    if difference is None or difference.value is None:
        return GridCell("-")
    if option.key[2] == BASELINE:
        return GridCell(f"of {score(loss.full)}", loss.full)
    return GridCell(
        score(difference.value),
        difference.value,
        interval_text(difference.low, difference.high),
        (OVER,) * (option.key in loss.over),
    )


def _names(methods: Sequence[str]) -> str:
    return ", ".join(methods[:3]) + (f" and {len(methods) - 3} more" if len(methods) > 3 else "")


def _notes(setting: Setting, options: Sequence[Option], losses: Sequence[ScoreLoss]) -> list[Note]:
    sources = {estimate.source for option in options for estimate in option.known.values()}
    sign_texts = [*dict.fromkeys(words for source, words in _SOURCES.items() if source in sources)]
    notes = [Note("; ".join(sign_texts) + ".", Rank.MARK)] if sign_texts else []
    if any(option.step_s or option.speed_up for option in options):
        notes.append(
            Note("ms/token, tokens/s and speed-up are of decoding: every method prefills the whole prompt before.")
        )
    texts_by_loss: dict[str, list[str]] = {}
    for loss in losses:
        has_entry_budgets = any(option.key in loss.lost and option.key[-1].startswith("entries") for option in options)
        prompt_length_text = "" if loss.tokens is None else f", whose prompts have {loss.tokens:,} tokens (median)"
        budget_text = (
            f"; a budget in entries is another share of them than of {setting.tokens:,}"
            if prompt_length_text and has_entry_budgets
            else ""
        )
        samples = max(one.n for one in loss.lost.values())
        texts_by_loss.setdefault(
            f"over the same {samples} samples [95 % interval]{prompt_length_text}{budget_text}", []
        ).append(loss.title)
    for words, titles in texts_by_loss.items():
        notes.append(Note(f"lost: full's score minus the method's, {' and '.join(titles)} {words}.", Rank.MARK))
    if any(option.key in loss.over for option in options for loss in losses):
        notes.append(Note(f"{OVER} the rows hold more entries than the budget.", Rank.MARK))
    return notes


def _records(setting: Setting, options: Sequence[Option]) -> list[dict[str, Any]]:
    return [
        {
            **vars(setting),
            **{name: getattr(option, name) for name in ("method", "budget", "batch")},
            "name": number,
            **{name: getattr(estimate, name) for name in ("value", "low", "high", "source")},
        }
        for option in options
        for number, estimate in option.known.items()
    ]
