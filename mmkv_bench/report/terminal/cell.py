"""One cell in a terminal: what it is, where it comes from, its scores, what it kept, the command that makes it again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mmkv_bench.report.answers import COLUMNS, AnswerTable
from mmkv_bench.report.cells import parsed
from mmkv_bench.report.command import Commands
from mmkv_bench.report.terminal.known import Cells
from mmkv_bench.report.terminal.overview import endings
from mmkv_bench.report.terminal.text import pairs, plain, table
from mmkv_bench.tables.number_text import score, signed, span

if TYPE_CHECKING:
    from rich.console import Console

_ASKED = (
    *("model", "model_fingerprint", "weights", "model_revision", "dataset", "dataset_fingerprint", "method", "base"),
    *("reading", "protocol", "seed", "parameters", "allocation_scope", "dtype", "attention", "generation"),
    *("numerics_version", "method_version"),
)
_CAME = ("created_at", "git_commit", "git_dirty", "torch", "transformers", "device", "driver", "cpu", "versions")


def show(console: Console, cells: Cells, cell: str) -> None:
    """Print it."""
    (row,) = cells.store.cells([cell]).to_pylist()
    console.print(f"{cells.label(cell)} on {row['dataset']}", style="bold")
    console.print(f"cell {cell}")
    _section(console, "Configuration")
    pairs(console, [(name, _said(row[name])) for name in _ASKED if row[name] is not None])
    _section(console, "Where it comes from")
    pairs(console, [(name, _said(row[name])) for name in _CAME if row[name] is not None])
    _scores(console, cells, cell)
    _audit(console, cells, cell)
    _section(console, "Again")
    command = Commands().of({key: value for key, value in row.items() if value is not None}, 0, parsed(row["config"]))
    if command["line"]:
        console.print(command["line"], soft_wrap=True)
    console.print(command["note"])


def _section(console: Console, title: str) -> None:
    console.print(f"\n{title}", style="bold")


def _said(value: Any) -> str:
    """A value of a row; JSON as `key=value`."""
    text = value.isoformat(timespec="seconds") if hasattr(value, "isoformat") else str(value)
    if text[:1] == "{":
        held = json.loads(text)
        text = ", ".join(f"{key}={json.dumps(one)}" for key, one in held.items())
    return plain(text)


def _scores(console: Console, cells: Cells, cell: str) -> None:
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
        gap = span(row["difference_low"], row["difference_high"])
        found = [row["metric"], f"{row['n_ok']} of {row['n']}", score(row["value"]), span(row["low"], row["high"])]
        lines.append([*found, " ".join(filter(None, (less, gap)))])
    table(console, ["metric", "ok", "value", "95% interval", "minus full"], lines, right=("ok", "value"))


def _audit(console: Console, cells: Cells, cell: str) -> None:
    """How the answers ended, and what they kept: all of them, and by layer and KV head."""
    answers = AnswerTable.of(cells.store.responses([cell], COLUMNS, coded=True))
    told = answers.account(cell)
    _section(console, "Answers")
    counted = told["counted"]
    if counted is None:
        console.print("none")
        return
    console.print(f"{counted['answers']} answers: {endings(counted['ended'])}")
    asked, resident = counted["entries_asked"], counted["entries_resident"]
    if resident:
        budget = "no budget" if asked is None else f"{_range(asked)} asked"
        console.print(f"entries over all layers and KV heads: {_range(resident)} kept, {budget}")
        console.print(
            f"{counted['over']} answers keep more than was asked" if counted["over"] else "none over the budget"
        )
    if counted["tokens_from_compressed"]:
        console.print(f"tokens of an answer: {_range(counted['n_tokens'])}")
        console.print(f"of these from the compressed cache: {_range(counted['tokens_from_compressed'])}")
    if told["kept"]:
        _heads(console, told["kept"])


def _heads(console: Console, kept: Sequence[Sequence[Sequence[float]]]) -> None:
    """Entries by layer and KV head; heads that do not fit into the width are told by their least and most."""
    mean, least, most = kept
    heads = len(mean[0])
    console.print("\nentries kept by layer and KV head, mean over answers (least to most where they differ):")
    if heads * 8 + 8 > console.width:
        lines = [
            [str(layer), _number(sum(row) / heads), _number(min(least[layer])), _number(max(most[layer]))]
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
    return _number(mean) if least == most else f"{_number(mean)} ({_number(least)}-{_number(most)})"


def _range(ends: Sequence[float]) -> str:
    """least, mean, most -> `512`, or `496 to 512, 508 on average`."""
    least, mean, most = ends
    return _number(mean) if least == most else f"{_number(least)} to {_number(most)}, {_number(mean)} on average"


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"
