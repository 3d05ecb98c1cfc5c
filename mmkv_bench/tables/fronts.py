"""Scores against costs, one point a cell: joined from one store or two, with what could not be joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from mmkv_bench.errors import ConfigError
from mmkv_bench.statistics.metric_kinds import lower_is_better
from mmkv_bench.tables.captions import line_label
from mmkv_bench.tables.cost_names import Cost
from mmkv_bench.tables.costs import CostEntry, CostTable, known_tables
from mmkv_bench.tables.line import Line
from mmkv_bench.tables.score_table import ScoreTable

Key: TypeAlias = tuple[str, str, str, str, str, str]


@dataclass(frozen=True)
class Point:
    """One cell. x: the cost with its interval; y: the score with its own; best: no cell costs less and scores as well, nor
    scores more and costs as little."""

    method: Line
    budget: str
    x: float
    x_low: float | None
    x_high: float | None
    y: float
    y_low: float | None
    y_high: float | None
    best: bool = False


@dataclass(frozen=True)
class Front:
    """Points of one table against one cost. source: what the costs are of; alone: cells of the table without that cost."""

    table: ScoreTable
    cost: Cost
    source: str
    points: tuple[Point, ...]
    alone: tuple[str, ...]


def fronts(
    tables: Sequence[ScoreTable],
    costs: Sequence[Cost],
    roots: Sequence[Path],
    tokens: int | None = None,
    batch: int | None = None,
    prompts: str | None = None,
) -> list[Front]:
    """Each table against each cost. A cost is looked for in the answers of the table's own dataset, then in passes of
    `scenario=efficiency`, in all `roots`; cells are the same where model, method, reading, parameters, protocol and budget are.

    Args:
        tokens, batch, prompts: of the passes; needed where they have several.

    Raises:
        ConfigError: a cost that is known of no cell of a table, or passes of several shapes.
    """
    known = [table for root in roots for table in known_tables(root, costs)]
    answers = [table for table in known if not table.per_pass]
    wanted = {
        ("--prompts", "dataset"): None if prompts is None else f"made_up_{prompts}",
        ("--tokens", "prompt_tokens"): tokens,
        ("--batch", "batch"): batch,
    }
    passes = _of_shape([table for table in known if table.per_pass], wanted)
    return [_front(table, cost, answers, passes) for table in tables for cost in costs]


def _of_shape(tables: Sequence[CostTable], asked: Mapping[tuple[str, str], int | str | None]) -> list[CostTable]:
    """The passes of one shape. asked: (flag, name of a shape's part) -> its value, None where nothing was said."""
    found = list(tables)
    for (flag, name), wanted in asked.items():
        held = sorted({table.shape[name] for table in found}, key=lambda value: (str(type(value)), value))
        words = [str(value).removeprefix("made_up_") for value in held]
        if wanted is None and len(held) > 1:
            raise ConfigError(f"The passes have {name} {', '.join(words)}; choose one with {flag} {words[-1]}")
        if wanted is not None and found and wanted not in held:
            said = str(wanted).removeprefix("made_up_")
            raise ConfigError(f"{flag} {said}: the passes have {name} {', '.join(words)}; choose one of them")
        found = [table for table in found if wanted is None or table.shape[name] == wanted]
    return found


def _front(table: ScoreTable, cost: Cost, answers: Sequence[CostTable], passes: Sequence[CostTable]) -> Front:
    own = [other for other in answers if other.context["dataset"] == table.dataset]
    for source, among in (("these answers", own), ("passes", passes)):
        entries = {
            _key(other.context, method, other.axis, budget): entry
            for other in among
            for method, budget in other.lines()
            if (entry := other.entries[method.label, budget].get(cost.key)) is not None and entry.value is not None
        }
        front = _joined(table, cost, entries, source if among is own else _shape_words(passes))
        if front.points:
            return front
    raise ConfigError(
        f"{cost.name} is known of no cell of {table.dataset}: answers of runs that share prefills have no times of their own; "
        "run scenario=efficiency with the same model, methods and budgets and name its rows with --costs"
    )


def _shape_words(passes: Sequence[CostTable]) -> str:
    shapes = {f"{table.shape['prompt_tokens']} prompt tokens, batch {table.shape['batch']}" for table in passes}
    return f"passes of {'; '.join(sorted(shapes))}"


def _key(context: dict[str, str], method: Line, axis: str, budget: str) -> Key:
    kind = axis if budget else "none"
    return (
        context["model"],
        context["protocol"],
        method.base,
        method.reading or "",
        method.parameters,
        f"{kind} {budget}",
    )


def _joined(table: ScoreTable, cost: Cost, entries: dict[Key, CostEntry], source: str) -> Front:
    points, alone = [], []
    for method in table.methods:
        for budget in ("", *table.budgets):
            score = table.entries.get((method.label, budget))
            if score is None or score.value is None:
                continue
            took = entries.get(_key(table.context, method, table.axis, budget))
            if took is None or took.value is None:
                alone.append(line_label(method) + (f" at {budget}" if budget else ""))
                continue
            points.append(Point(method, budget, took.value, took.low, took.high, score.value, score.low, score.high))
    return Front(table, cost, source, _marked(points, lower_is_better(table.metric), cost), tuple(alone))


def _marked(points: Sequence[Point], falling: bool, cost: Cost) -> tuple[Point, ...]:
    """The points with `best`, from the cheapest on; of two that are the same both are."""
    from dataclasses import replace

    rate = -1.0 if cost.unit == "tokens/s" else 1.0  # more of it is better
    sign = -1.0 if falling else 1.0
    ordered = sorted(points, key=lambda point: (rate * point.x, -sign * point.y))
    made: list[Point] = []
    highest, at = float("-inf"), float("nan")
    for point in ordered:
        score = sign * point.y
        best = score > highest or (score == highest and point.x == at)
        if score > highest:
            highest, at = score, point.x
        made.append(replace(point, best=best))
    return tuple(made)
