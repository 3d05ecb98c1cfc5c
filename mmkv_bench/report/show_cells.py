"""Cells of a store in a terminal, chosen by a user's words. For one cell also its configuration, scores and audit, and the
command that makes it again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from functools import cached_property
from itertools import groupby, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.report.answers import COLUMNS, AnswerTable, audit_sentences, counted, endings, left_at, parsed
from mmkv_bench.report.command import Commands
from mmkv_bench.report.fields import number_words
from mmkv_bench.report.terminal import pairs, plain, table
from mmkv_bench.statistics.metric_kinds import MEASURES
from mmkv_bench.store.rows import refuse_malformed
from mmkv_bench.store.tally import remembered, tally
from mmkv_bench.tables.rows import BASELINE, config_of
from mmkv_bench.tables.status import asked_at, label
from mmkv_bench.tables.text import interval_text, score, signed

if TYPE_CHECKING:
    from rich.console import Console

    from mmkv_bench.store.store import Store

_COLUMNS = (
    *("cell", "model", "dataset", "method", "base", "reading", "protocol", "budget_entries", "budget_fraction", "seed"),
    *("generation", "config"),
)
_SHORT = 8  # letters of a hash, or more if cells share these
_LEAST = 4  # fewest letters of a hash that choose a cell
_COMPARED = 20_000  # largest number of sample ids that are searched for similar ones


@dataclass(frozen=True)
class NamedCells:
    """What the arguments of `mmkv-bench show` choose: cells (hashes), and a sample's id or None.

    one: the arguments chose exactly one cell, and not merely because the store has only one."""

    cells: list[str]
    sample: str | None
    one: bool


class StoreCells:
    """The cells of a store, `full` first, then by method and budget.

    Raises:
        ConfigError: the store has no cells.
    """

    def __init__(self, store: Store) -> None:
        table = remembered(store, "cells", _COLUMNS)
        refuse_malformed(table, store.root)
        rows = table.to_pylist()
        if not rows:
            raise ConfigError(f"{store.root} has no cells; give the folder that a run printed as its rows")
        self.store = store
        self.rows: dict[str, Mapping[str, Any]] = {row["cell"]: row for row in sorted(rows, key=_order)}

    @cached_property
    def digits(self) -> int:
        """Number of leading letters of the hashes that are enough to distinguish all cells, at least 8."""
        return max([_SHORT, *((left_at(a, b) or 0) + 1 for a, b in pairwise(sorted(self.rows)))])

    def short(self, cell: str) -> str:
        """Shorten a hash."""
        return cell[: self.digits]

    def label(self, cell: str) -> str:
        """Return a cell's label: `snapkv@64 strict seed=1`."""
        return label(self.rows[cell])

    def title(self, cell: str) -> str:
        """Return a cell's title: `snapkv@64 (37f7b1d0)`."""
        return f"{self.label(cell)} ({self.short(cell)})"

    def brief_label(self, cell: str) -> str:
        """Return a cell's label without the protocol."""
        return " ".join(word for word in self.label(cell).split(" ") if word != self.rows[cell]["protocol"])

    def metrics(self, cell: str) -> list[str]:
        """Return the metrics in the configuration of the cell's dataset."""
        row = self.rows[cell]
        node = (config_of(row["config"]).get("datasets") or {}).get(row["dataset"]) or {}
        return list(node.get("metrics") or [])

    def named(self, words: Sequence[str]) -> NamedCells:
        """Find the cells, and the sample, that the arguments of `mmkv-bench show` choose.

        Each word is a method, dataset, budget, other column value, beginning of a hash, or (one word) a sample's id. A cell must
        match every kind of word that is given, and at least one word of each kind.

        Raises:
            ConfigError: a word matches nothing, or no cell matches all words.
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
                f"no cell of {self.store.root} matches {' and '.join(map(repr, words))} together; leave a word out"
            )
        return NamedCells(cells, sample, len(cells) == 1 and bool(chosen))

    def _fitting(self, word: str) -> tuple[str, set[str]]:
        """Return what a word is, such as `method` or `dataset`, and the cells that it matches. A word of no other kind may be the
        beginning of a hash; the kind is then `method`, and the set is empty if no hash begins so."""
        for kind, words_of in _WORDS.items():
            fitting = {cell for cell, row in self.rows.items() if word in words_of(row)}
            if fitting:
                return kind, fitting
        return "method", {cell for cell in self.rows if len(word) >= _LEAST and cell.startswith(word)}

    @cached_property
    def samples(self) -> set[str]:
        """Return the ids of all samples that have a row in some cell."""
        return set(self.store.responses(None, ("sample_id",), coded=True)["sample_id"].unique().to_pylist())

    def _near(self, word: str) -> str:
        names = {name for words_of in _WORDS.values() for row in self.rows.values() for name in words_of(row)}
        close = get_close_matches(word, self.samples, n=3, cutoff=0.8) if len(self.samples) <= _COMPARED else []
        if close:
            return f"did you mean {' or '.join(map(repr, close))}?"
        return f"{nearest(word, names)}; ids of samples look like {min(self.samples, default='no one')!r}"


def _budgets(row: Mapping[str, Any]) -> set[str]:
    """Return the spellings by which a user may name a cell's budget: `64`, or both `0.2` and `20%`."""
    if row["budget_fraction"] is not None:
        fraction = Decimal(row["budget_fraction"])
        return {row["budget_fraction"], f"{fraction.normalize():f}", f"{(fraction * 100).normalize():f}%"}
    return {str(row["budget_entries"])} if row["budget_entries"] is not None else set()


def _column_word(name: str) -> Callable[[Mapping[str, Any]], set[str]]:
    return lambda row: {row[name]} - {None}


_WORDS: dict[str, Callable[[Mapping[str, Any]], set[str]]] = {
    "method": lambda row: {
        name + end for name in (row["method"], row["base"]) for end in ("", *(f"@{one}" for one in _budgets(row)))
    },
    "budget": _budgets,
    **{name: _column_word(name) for name in ("dataset", "model", "protocol", "reading")},
    "seed": lambda row: set() if row["seed"] is None else {f"seed={row['seed']}"},
    "place": lambda row: set(asked_at(row)),
}
"""Kind -> words that choose a cell, besides its hash."""


def _order(row: Mapping[str, Any]) -> tuple[Any, ...]:
    budget = row["budget_entries"] if row["budget_entries"] is not None else row["budget_fraction"]
    place: tuple[Any, ...] = (row["dataset"], row["model"], row["protocol"], row["base"] != BASELINE, row["method"])
    place += (row["budget_fraction"] is not None, float(budget or 0), row["seed"] or 0, row["reading"] or "")
    return *place, asked_at(row)


MOST = 200
"""Largest number of cells in a list; words choose among more."""
_METRIC = ("cell", "metric", "n", "n_ok", "value", "value_failures_zero", "low", "high")

_CONFIGURATION = (
    *("model", "model_fingerprint", "weights", "model_revision", "dataset", "dataset_fingerprint", "method", "base"),
    *("reading", "protocol", "seed", "parameters", "allocation_scope", "dtype", "attention", "generation"),
    *("numerics_version", "method_version"),
)
_PROVENANCE = ("created_at", "git_commit", "git_dirty", "torch", "transformers", "device", "driver", "cpu", "versions")


def show_store(console: Console, cells: StoreCells, chosen: Sequence[str]) -> None:
    """Print the cells of a store: score, interval, statuses of the answers."""
    counts = tally(cells.store).counts.select(["cell", "status", "n"]).to_pandas()
    ended = counts.groupby(["cell", "status"], observed=True)["n"].sum().to_dict()
    endings_of: dict[str, dict[str, int]] = {}
    for (cell, status), n in ended.items():
        endings_of.setdefault(cell, {})[status] = n
    metrics: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in remembered(cells.store, "metrics", _METRIC).to_pylist():
        metrics.setdefault(row["cell"], {})[row["metric"]] = row
    console.print(f"{cells.store.root}: {len(cells.rows):,} cells, {sum(ended.values()):,} answers")
    place = itemgetter("dataset", "model", "protocol")
    for (dataset, model, protocol), group in groupby(chosen[:MOST], lambda cell: place(cells.rows[cell])):
        members = list(group)
        scored = {name for cell in members for name in metrics.get(cell, {})}
        configured = [name for name in cells.metrics(members[0]) if name in scored]
        metric = next(iter(configured or sorted(scored - MEASURES) or sorted(scored)), "")
        console.print(f"\n{dataset}, {model}, protocol={protocol}", style="bold")
        header = ["cell", "method", "n", metric or "score", "95% interval", "answers"]
        lines = []
        for cell in members:
            scores = _score_fields(metrics.get(cell, {}).get(metric))
            lines.append([cells.short(cell), cells.brief_label(cell), *scores, endings(endings_of.get(cell, {}))])
        table(console, header, lines, right=("n", metric or "score"))
    if len(chosen) > MOST:
        console.print(
            f"\n{len(chosen) - MOST:,} more cells: choose with words, such as method@budget, or with several words"
        )
        for what in ("dataset", "model", "protocol", "reading", "method"):
            names = dict.fromkeys(cells.rows[cell][what] for cell in chosen)
            console.print(plain(f"{what}: {' '.join(sorted(filter(None, names)))}"))


def _score_fields(metric: Mapping[str, Any] | None) -> list[str]:
    """Format samples, score and interval. If answers failed, the score with failures as zero is in brackets."""
    if metric is None:
        return ["", "-", ""]
    zero, value = metric["value_failures_zero"], score(metric["value"])
    words = f"({score(zero)})" if metric["value"] is None and zero is not None else value
    return [str(metric["n"]), words, interval_text(metric["low"], metric["high"])]


def show_cell(console: Console, cells: StoreCells, cell: str) -> None:
    """Print a cell: configuration, provenance, scores, answers and command."""
    (row,) = cells.store.cells([cell]).to_pylist()
    console.print(f"{cells.label(cell)} on {row['dataset']}", style="bold")
    console.print(f"cell {cell}")
    for title, names in {"Configuration": _CONFIGURATION, "Where it comes from": _PROVENANCE}.items():
        _section(console, title)
        pairs(console, [(name, _value_words(row[name])) for name in names if row[name] is not None])
    _scores(console, cells, cell)
    answers = AnswerTable(cells.store.responses([cell], COLUMNS, coded=True))
    _section(console, "Answers")
    for sentence in audit_sentences(counted(answers.rows(cell))):
        console.print(sentence)
    if (kept := answers.kept(cell)) is not None:
        _heads(console, kept)
    _section(console, "Again")
    command = Commands().of({key: value for key, value in row.items() if value is not None}, 0, parsed(row["config"]))
    if command["line"]:
        console.print(command["line"], soft_wrap=True)
    console.print(command["note"])


def _section(console: Console, title: str) -> None:
    console.print(f"\n{title}", style="bold")


def _value_words(value: Any) -> str:
    """Format a value of a row; JSON as `key=value`."""
    text = value.isoformat(timespec="seconds") if hasattr(value, "isoformat") else str(value)
    if text[:1] == "{":
        text = ", ".join(f"{key}={json.dumps(part)}" for key, part in json.loads(text).items())
    return plain(text)


def _scores(console: Console, cells: StoreCells, cell: str) -> None:
    rows = cells.store.metrics([cell]).to_pylist()
    _section(console, "Scores")
    if not rows:
        console.print("none: the answers are not scored; run mmkv-bench score")
        return
    first = cells.metrics(cell)
    rows.sort(key=lambda row: (first.index(row["metric"]) if row["metric"] in first else len(first), row["metric"]))
    lines = []
    for row in rows:
        difference_text = "" if row["difference"] is None else signed(row["difference"])
        gap = " ".join(filter(None, (difference_text, interval_text(row["difference_low"], row["difference_high"]))))
        ends = interval_text(row["low"], row["high"])
        lines.append([row["metric"], f"{row['n_ok']} of {row['n']}", score(row["value"]), ends, gap])
    table(console, ["metric", "ok", "value", "95% interval", "minus full"], lines, right=("ok", "value"))


def _heads(console: Console, kept: Sequence[Sequence[Sequence[float]]]) -> None:
    """Print entries by layer and KV head; if the heads do not fit into the width, print mean, least and most over heads."""
    mean, least, most = kept
    heads = len(mean[0])
    console.print("\nentries kept by layer and KV head, mean over answers (least to most where they differ):")
    if heads * 8 + 8 > console.width:
        header = ["layer", f"mean of {heads} heads", "least", "most"]
        values = [(sum(row) / heads, min(low), max(high)) for row, low, high in zip(mean, least, most, strict=True)]
        fields = [list(map(number_words, layer)) for layer in values]
    else:
        header = ["layer", *(f"head {head}" for head in range(heads))]
        fields = [list(map(_spread, *layer)) for layer in zip(mean, least, most, strict=True)]
    table(console, header, [[str(layer), *words] for layer, words in enumerate(fields)], right=header)


def _spread(mean: float, least: float, most: float) -> str:
    return number_words(mean) if least == most else f"{number_words(mean)} ({number_words(least)}-{number_words(most)})"
