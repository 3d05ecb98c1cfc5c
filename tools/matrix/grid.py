"""The grid of the matrix: its cells, where they are kept, and how they are shown."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

OK = "ok"
ALL = "all methods"
UNRUN = "no run of it is recorded yet; make matrix makes it"
HEAD = """\
# Model family x dataset x method

Made by `make matrix` (`python -m tools.matrix --write results/matrix`) for data sets with a fixture and the embedded
model's pages; models that were not run have no column. Each cell was run with random weights of two layers at true
width, the family's own processor, one sample of data of our own making in the upstream schema, budget 20%, protocols
paper and strict, on CPU. A number is the methods whose rows are all ok; a letter stands for a reason below.
[grid.csv](grid.csv) has one line per cell, with the commit of the code that ran it and its dtype (empty: refused before
any row, or run in bfloat16 before either was kept here). kvpress is optional: the cells of that method are ok where it
was installed.
"""


@dataclass(frozen=True)
class Line:
    """One cell of the grid. `reason` is empty for `ok`; `fallbacks`, `git_commit` and `dtype` are those of its rows."""

    model: str
    dataset: str
    method: str
    result: str
    reason: str = ""
    fallbacks: str = ""
    git_commit: str = ""
    dtype: str = ""


COLUMNS = [field.name for field in fields(Line)]


def write(file: Path, lines: Sequence[Line]) -> None:
    """Keep one model's lines, in the place of those that it had of the same datasets."""
    run = {line.dataset for line in lines}
    kept = [line for line in _kept(file) if line.dataset not in run]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps([asdict(line) for line in [*kept, *lines]]))


def read(out: Path, models: Sequence[str], names: Sequence[str]) -> list[Line]:
    """The lines that runs left below `out`, and one for every dataset that a model was not run on."""
    lines = []
    for model in models:
        found = _by_dataset(_kept(out / f"{model}.json"))
        for name in names:
            lines += found.get((model, name)) or [Line(model, name, ALL, "not run", UNRUN)]
    return lines


def merged(lines: Sequence[Line], file: Path, models: Sequence[str], names: Sequence[str]) -> list[Line]:
    """The grid in `file` (as `as_csv` has it) of these models and datasets, with `lines` in the place of its own, but
    for those that were not run."""
    before = _by_dataset(_from_csv(file) if file.is_file() else [])
    now = {key: found for key, found in _by_dataset(lines).items() if found[0].reason != UNRUN}
    grid = []
    for model in models:
        for name in names:
            key = (model, name)
            grid += now.get(key) or before.get(key) or [Line(model, name, ALL, "not run", UNRUN)]
    return grid


def _by_dataset(lines: Sequence[Line]) -> dict[tuple[str, str], list[Line]]:
    found: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        found.setdefault((line.model, line.dataset), []).append(line)
    return found


def _kept(file: Path) -> list[Line]:
    return [Line(**line) for line in json.loads(file.read_text())] if file.is_file() else []


def _from_csv(file: Path) -> list[Line]:
    with file.open(newline="") as stream:
        return [Line(**row) for row in csv.DictReader(stream)]


def as_csv(lines: Sequence[Line]) -> str:
    """One line per cell of the grid."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([[getattr(line, name) for name in COLUMNS] for line in lines])
    return stream.getvalue()


def render(lines: Sequence[Line]) -> str:
    """The grid as markdown: a table of datasets by models, each cell telling how many methods are ok, and the letters of
    the reasons of the others; then the reasons, with methods."""
    models = list(dict.fromkeys(line.model for line in lines))
    letters = _letters(lines)
    held: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        held.setdefault((line.dataset, line.model), []).append(line)
    text = [HEAD, "| dataset | " + " | ".join(models) + " |", "|---" * (len(models) + 1) + "|"]
    for name in sorted({line.dataset for line in lines}):
        row = [_cell(held.get((name, model), []), letters) for model in models]
        text.append(f"| {name} | " + " | ".join(row) + " |")
    text += ["", "## Reasons", ""]
    text += [f"- **{letter}** {_reason(reason, lines)}" for reason, letter in letters.items()]
    return "\n".join(text) + "\n"


def _letters(lines: Sequence[Line]) -> dict[tuple[str, str], str]:
    """(result, reason) -> a, b, ..., z, aa, ab, ... in order of appearance."""
    reasons = dict.fromkeys((line.result, line.reason) for line in lines if line.result != OK)
    return {reason: _letter(number) for number, reason in enumerate(reasons)}


def _letter(number: int) -> str:
    return (_letter(number // 26 - 1) if number > 25 else "") + chr(ord("a") + number % 26)


def _cell(lines: Sequence[Line], letters: Mapping[tuple[str, str], str]) -> str:
    good = sum(line.result == OK for line in lines)
    reasons = dict.fromkeys(letters[line.result, line.reason] for line in lines if line.result != OK)
    return " ".join([f"{good} ok"] * bool(good) + list(reasons))


def _reason(key: tuple[str, str], lines: Sequence[Line]) -> str:
    mine = [line for line in lines if (line.result, line.reason) == key]
    what = f"{key[0]}: {key[1]}" if key[1] else f"{key[0]}, **without a reason**"
    return f"{what} ({_some('method', [line.method for line in mine])})"


def _some(what: str, names: Sequence[Any]) -> str:
    names = list(dict.fromkeys(names))
    return ", ".join(names) if len(names) <= 6 else f"{len(names)} {what}s"
