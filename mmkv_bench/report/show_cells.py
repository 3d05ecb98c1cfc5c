"""Cells of a store in a terminal, and the ones that a user's words name; of one cell its configuration, scores and audit, and
the command that makes it again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from functools import cached_property
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.report.answers import COLUMNS, AnswerTable, audit_sentences, counted, endings, parsed
from mmkv_bench.report.command import Commands
from mmkv_bench.report.fields import number_words
from mmkv_bench.report.terminal import pairs, plain, table
from mmkv_bench.statistics.metric_kinds import MEASURES
from mmkv_bench.store.rows import refuse_malformed
from mmkv_bench.store.tally import remembered, tally
from mmkv_bench.tables.rows import BASELINE, config_of
from mmkv_bench.tables.status import label
from mmkv_bench.tables.text import interval_text, score, signed

if TYPE_CHECKING:
    from rich.console import Console

    from mmkv_bench.store.store import Store

_COLUMNS = (
    *("cell", "model", "dataset", "method", "base", "reading", "protocol", "budget_entries", "budget_fraction", "seed"),
    "config",
)
_SHORT = 8  # letters of a hash, or as many more as tell all cells apart
_LEAST = 4  # of them by which a cell is found
_COMPARED = 20_000  # ids of samples that are looked through for one that a word may mean


@dataclass(frozen=True)
class NamedCells:
    """Cells and the sample that words name. sample: an id, or None; one: it is a single cell, and the words chose it."""

    cells: list[str]
    sample: str | None
    one: bool


class StoreCells:
    """The cells of a store, `full` first, then by method and budget.

    Raises:
        ConfigError: there are none.
    """

    def __init__(self, store: Store) -> None:
        table = remembered(store, "cells", _COLUMNS)
        refuse_malformed(table, store.root)
        rows = table.to_pylist()
        if not rows:
            raise ConfigError(f"{store.root} holds no cells; give a folder of rows, as runs print them")
        self.store = store
        self.rows: dict[str, Mapping[str, Any]] = {row["cell"]: row for row in sorted(rows, key=_order)}

    @cached_property
    def digits(self) -> int:
        """Letters of a hash that tell all cells apart, 8 at least."""
        names = sorted(self.rows)
        shared = [_shared(a, b) for a, b in pairwise(names)]
        return max([_SHORT, *(length + 1 for length in shared)])

    def short(self, cell: str) -> str:
        """A hash, cut."""
        return cell[: self.digits]

    def label(self, cell: str) -> str:
        """`snapkv@64 strict seed=1`."""
        return label(self.rows[cell])

    def title(self, cell: str) -> str:
        """`snapkv@64 (37f7b1d0)`."""
        return f"{self.label(cell)} ({self.short(cell)})"

    def metrics(self, cell: str) -> list[str]:
        """The metrics that the cell's dataset is judged by, where its configuration names them."""
        row = self.rows[cell]
        node = (config_of(row["config"]).get("datasets") or {}).get(row["dataset"]) or {}
        return list(node.get("metrics") or [])

    def named(self, words: Sequence[str]) -> NamedCells:
        """Find what words name: a sample where one of them is its id, and the cells that the others choose. Of several words of
        one kind (methods, datasets, ...) a cell has to fit one.

        Raises:
            ConfigError: a word that fits nothing, or words that no cell fits together.
        """
        chosen: dict[str, set[str]] = {}
        sample = None
        for word in words:
            kind, fitting = self._fitting(word)
            if fitting:
                chosen.setdefault(kind, set()).update(fitting)
            elif sample is None and word in self.samples:
                sample = word
            else:
                raise ConfigError(f"{word!r} is neither a cell nor a sample of {self.store.root}; {self._near(word)}")
        cells = [cell for cell in self.rows if all(cell in fitting for fitting in chosen.values())]
        if not cells:
            raise ConfigError(
                f"no cell of {self.store.root} is {' and '.join(map(repr, words))} at once; leave a word out"
            )
        return NamedCells(cells, sample, len(cells) == 1 and bool(chosen))

    def _fitting(self, word: str) -> tuple[str, set[str]]:
        """(the kind of a word, the cells that it fits)."""
        for kind in self._names:
            fitting = {cell for cell, names in self._names[kind].items() if word in names}
            if fitting:
                return kind, fitting
        if len(word) < _LEAST:
            return "method", set()
        return "method", {cell for cell in self.rows if cell.startswith(word)}

    @cached_property
    def _names(self) -> Mapping[str, Mapping[str, set[str]]]:
        """Kind -> cell -> the words by which it is found, besides its hash."""
        names_of: dict[str, dict[str, set[str]]] = {}
        for cell, row in self.rows.items():
            methods, budgets = {row["method"], row["base"]}, _budgets(row)
            names_of.setdefault("method", {})[cell] = methods | {
                f"{name}@{budget}" for name in methods for budget in budgets
            }
            names_of.setdefault("budget", {})[cell] = budgets
            for kind in ("dataset", "model", "protocol", "reading"):
                names_of.setdefault(kind, {})[cell] = {row[kind]} - {None}
            names_of.setdefault("seed", {})[cell] = {f"seed={row['seed']}"} if row["seed"] is not None else set()
        return names_of

    @cached_property
    def samples(self) -> set[str]:
        """Ids of all samples that some cell has a row for."""
        return set(self.store.responses(None, ("sample_id",), coded=True)["sample_id"].unique().to_pylist())

    def _near(self, word: str) -> str:
        names = {name for of_cell in self._names.values() for own in of_cell.values() for name in own}
        close = get_close_matches(word, self.samples, n=3, cutoff=0.8) if len(self.samples) <= _COMPARED else []
        if close:
            return f"did you mean {' or '.join(map(repr, close))}?"
        return f"{nearest(word, names)}; samples are called as {min(self.samples, default='no one')!r}"


def _budgets(row: Mapping[str, Any]) -> set[str]:
    """A cell's budget as it may be written."""
    if row["budget_fraction"] is not None:
        fraction = Decimal(row["budget_fraction"])
        return {row["budget_fraction"], f"{fraction.normalize():f}", f"{(fraction * 100).normalize():f}%"}
    return {str(row["budget_entries"])} if row["budget_entries"] is not None else set()


def _order(row: Mapping[str, Any]) -> tuple[Any, ...]:
    budget = row["budget_entries"] if row["budget_entries"] is not None else row["budget_fraction"]
    place = (row["dataset"], row["model"], row["protocol"], row["base"] != BASELINE, row["method"])
    return *place, row["budget_fraction"] is not None, float(budget or 0), row["seed"] or 0, row["reading"] or ""


def _shared(a: str, b: str) -> int:
    """Letters with which both begin."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


MOST = 200
"""Cells that are listed; words choose among more."""
_METRIC = ("cell", "metric", "n", "n_ok", "value", "value_failures_zero", "low", "high")

_CONFIGURATION = (
    *("model", "model_fingerprint", "weights", "model_revision", "dataset", "dataset_fingerprint", "method", "base"),
    *("reading", "protocol", "seed", "parameters", "allocation_scope", "dtype", "attention", "generation"),
    *("numerics_version", "method_version"),
)
_PROVENANCE = ("created_at", "git_commit", "git_dirty", "torch", "transformers", "device", "driver", "cpu", "versions")

Metrics = dict[str, dict[str, Mapping[str, Any]]]


def show_store(console: Console, cells: StoreCells, chosen: Sequence[str]) -> None:
    """Print the cells of a store: score, interval, how the answers ended."""
    ended, scores = _ended(cells), _metrics(cells)
    rows = sum(sum(one.values()) for one in ended.values())
    console.print(f"{cells.store.root}: {len(cells.rows):,} cells, {rows:,} answers")
    for (dataset, model, protocol), group in groupby(chosen[:MOST], lambda cell: _place(cells.rows[cell])):
        members = list(group)
        metric = _headline(cells, members, scores)
        console.print(f"\n{dataset}, {model}, protocol={protocol}", style="bold")
        header = ["cell", "method", "n", metric or "score", "95% interval", "answers"]
        lines = [_line(cells, cell, scores.get(cell, {}).get(metric), ended.get(cell, {})) for cell in members]
        table(console, header, lines, right=("n", metric or "score"))
    if len(chosen) > MOST:
        console.print(f"\n{len(chosen) - MOST:,} more cells: choose by words, as method@budget or several of these")
        for what in ("dataset", "model", "protocol", "reading", "method"):
            names = dict.fromkeys(cells.rows[cell][what] for cell in chosen)
            console.print(plain(f"{what}: {' '.join(sorted(filter(None, names)))}"))


def _metrics(cells: StoreCells) -> Metrics:
    """Cell -> metric -> its row of `metrics`."""
    metrics: Metrics = {}
    for row in remembered(cells.store, "metrics", _METRIC).to_pylist():
        metrics.setdefault(row["cell"], {})[row["metric"]] = row
    return metrics


def _headline(cells: StoreCells, own: Sequence[str], scores: Metrics) -> str:
    """The metric that cells of one dataset are shown by: the configuration's first, else the first that is the task's own."""
    scored = {name for cell in own for name in scores.get(cell, {})}
    configured = [name for name in cells.metrics(own[0]) if name in scored]
    return next(iter(configured or sorted(scored - MEASURES) or sorted(scored)), "")


def _line(cells: StoreCells, cell: str, metric: Mapping[str, Any] | None, ended: Mapping[str, int]) -> list[str]:
    protocol = cells.rows[cell]["protocol"]
    label = " ".join(word for word in cells.label(cell).split(" ") if word != protocol)
    fields = (
        ["", "-", ""]
        if metric is None
        else [str(metric["n"]), _value(metric), interval_text(metric["low"], metric["high"])]
    )
    return [cells.short(cell), label, *fields, endings(ended)]


def _value(metric: Mapping[str, Any]) -> str:
    """A headline; where answers failed, in brackets what it is with failures as zero."""
    if metric["value"] is None and metric["value_failures_zero"] is not None:
        return f"({score(metric['value_failures_zero'])})"
    return score(metric["value"])


def _ended(cells: StoreCells) -> dict[str, dict[str, int]]:
    """Cell -> status -> answers that ended so."""
    counts = tally(cells.store).counts
    counts_of: dict[str, dict[str, int]] = {}
    for cell, status, n in zip(*(counts[name].to_pylist() for name in ("cell", "status", "n")), strict=True):
        statuses = counts_of.setdefault(cell, {})
        statuses[status] = statuses.get(status, 0) + n
    return counts_of


def _place(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["dataset"], row["model"], row["protocol"]


def show_cell(console: Console, cells: StoreCells, cell: str) -> None:
    """Print a cell."""
    (row,) = cells.store.cells([cell]).to_pylist()
    console.print(f"{cells.label(cell)} on {row['dataset']}", style="bold")
    console.print(f"cell {cell}")
    _section(console, "Configuration")
    pairs(console, [(name, _value_words(row[name])) for name in _CONFIGURATION if row[name] is not None])
    _section(console, "Where it comes from")
    pairs(console, [(name, _value_words(row[name])) for name in _PROVENANCE if row[name] is not None])
    _scores(console, cells, cell)
    _audit(console, cells, cell)
    _section(console, "Again")
    command = Commands().of({key: value for key, value in row.items() if value is not None}, 0, parsed(row["config"]))
    if command["line"]:
        console.print(command["line"], soft_wrap=True)
    console.print(command["note"])


def _section(console: Console, title: str) -> None:
    console.print(f"\n{title}", style="bold")


def _value_words(value: Any) -> str:
    """A value of a row; JSON as `key=value`."""
    text = value.isoformat(timespec="seconds") if hasattr(value, "isoformat") else str(value)
    if text[:1] == "{":
        held = json.loads(text)
        text = ", ".join(f"{key}={json.dumps(one)}" for key, one in held.items())
    return plain(text)


def _scores(console: Console, cells: StoreCells, cell: str) -> None:
    rows = cells.store.metrics([cell]).to_pylist()
    _section(console, "Scores")
    if not rows:
        console.print("none: its answers are not scored; mmkv-bench score makes up for that")
        return
    first = cells.metrics(cell)
    rows.sort(key=lambda row: (first.index(row["metric"]) if row["metric"] in first else len(first), row["metric"]))
    lines = []
    for row in rows:
        less = "" if row["difference"] is None else signed(row["difference"])
        gap = interval_text(row["difference_low"], row["difference_high"])
        fields = [
            row["metric"],
            f"{row['n_ok']} of {row['n']}",
            score(row["value"]),
            interval_text(row["low"], row["high"]),
        ]
        lines.append([*fields, " ".join(filter(None, (less, gap)))])
    table(console, ["metric", "ok", "value", "95% interval", "minus full"], lines, right=("ok", "value"))


def _audit(console: Console, cells: StoreCells, cell: str) -> None:
    """Print how the answers ended and what they kept, all of them, and by layer and KV head."""
    answers = AnswerTable(cells.store.responses([cell], COLUMNS, coded=True))
    _section(console, "Answers")
    for sentence in audit_sentences(counted(answers.rows(cell))):
        console.print(sentence)
    if (kept := answers.kept(cell)) is not None:
        _heads(console, kept)


def _heads(console: Console, kept: Sequence[Sequence[Sequence[float]]]) -> None:
    """Entries by layer and KV head; heads that do not fit into the width are told by their least and most."""
    mean, least, most = kept
    heads = len(mean[0])
    console.print("\nentries kept by layer and KV head, mean over answers (least to most where they differ):")
    if heads * 8 + 8 > console.width:
        lines = [
            [
                str(layer),
                number_words(sum(row) / heads),
                number_words(min(least[layer])),
                number_words(max(most[layer])),
            ]
            for layer, row in enumerate(mean)
        ]
        header = ["layer", f"mean of {heads} heads", "least", "most"]
    else:
        header = ["layer", *(f"head {head}" for head in range(heads))]
        lines = [
            [str(layer), *(_spread(row[head], least[layer][head], most[layer][head]) for head in range(heads))]
            for layer, row in enumerate(mean)
        ]
    table(console, header, lines, right=header)


def _spread(mean: float, least: float, most: float) -> str:
    return number_words(mean) if least == most else f"{number_words(mean)} ({number_words(least)}-{number_words(most)})"
